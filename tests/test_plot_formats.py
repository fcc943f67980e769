"""Tests that the words of every picture have room, in a page, a column and a slide."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.quiver import Quiver
from matplotlib.text import Text
from pictures import CONTRAST, boxes, contrast, drawn, legend, overlap, title
from synthetic import Story, known, many_events, pipeline, trace_of

import ringsim
from ringsim import Link, Trace, compare, plot_schedules, simulate_schedule
from ringsim import comm as dist
from ringsim.cli.traces import PURPOSES
from ringsim.errors import ArgumentError, Deadlock
from ringsim.pipeline import Costs, make_schedule, plot_schedule
from ringsim.plot.style import caption, save_figure

LONG = "WWWW_a_name_that_somebody_generated_from_a_path/" * 4
LINK = Link(1e-6, 1e-9)
# the most inches of a figure in a column, by picture; others may have 3.5
STRIPS = ("timeline", "timeline of 1", "timeline, long names", "timeline, long times", "nothing")
HIGHEST = dict.fromkeys((*STRIPS, "step", "step of 1", "schedule", "run"), 1.2)


def hostile(ranks: int, seconds: float = 0.001) -> Trace:
    """Makes a trace whose names are long: spans, marks and hosts."""
    story = Story(ranks)
    for rank in range(ranks):
        for number in range(5):
            at = 1e3 * seconds * (rank + 3 * number)
            story.span(rank, f"{LONG}{number}", at, at + 2e3 * seconds, microbatch=10**9 + number)
            story.op(rank, "mark", (at + 1, -1, -1), label=LONG, status=2)
        if ranks > 1:
            story.message(rank, (rank + 1) % ranks, (9, 9, 12), (8, 8, 12))
    about = [{"rank": rank, "host": f"{LONG}{rank // 2}", "pid": 10**6} for rank in range(ranks)]
    return story.trace(ranks=about)


def stuck(ranks: int) -> Any:
    with pytest.raises(Deadlock) as caught:
        ringsim.simulate(
            lambda: dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size()),
            world_size=ranks,
            link=LINK,
        )
    return caught.value.diagnosis


def stuck_of_4() -> Any:
    return stuck(4)


def table(**more: Any) -> Any:
    return ringsim.bandwidth(edge=(0, 1), link=LINK, sizes=[8, 1024, 2**20], **more)


def run(ranks: int, **more: Any) -> Any:
    return simulate_schedule("1f1b", Costs(**more), num_ranks=ranks, num_microbatches=4)


PICTURES: dict[str, Callable[..., Axes]] = {
    "ring": lambda **to: pipeline(4).plot_ring(**to),
    "ring of 1": lambda **to: pipeline(1).plot_ring(**to),
    "ring of 16": lambda **to: pipeline(16).plot_ring(**to),
    "ring, long names": lambda **to: hostile(3).plot_ring(**to),
    "matrix": lambda **to: pipeline(17).plot_ring(**to),
    "timeline": lambda **to: pipeline(4).plot_timeline(**to),
    "timeline of 1": lambda **to: hostile(1).plot_timeline(**to),
    "timeline of 16": lambda **to: pipeline(16).plot_timeline(**to),
    "timeline, long names": lambda **to: hostile(4).plot_timeline(**to),
    "timeline, long times": lambda **to: hostile(4, 1e5).plot_timeline(**to),
    "nothing": lambda **to: Story(2).trace().plot_timeline(**to),
    "step": lambda **to: trace_of(known("1f1b", 4, 8)).plot_timeline(**to),
    "step of 1": lambda **to: trace_of(known("1f1b", 1, 2)).plot_timeline(**to),
    "step of 16": lambda **to: trace_of(known("zb_h1", 16, 20)).plot_timeline(**to),
    "schedule": lambda **to: plot_schedule(make_schedule("zb_v", 2, 4), **to),
    "schedules": lambda **to: plot_schedules(
        "gpipe", "zb_h1", run(3, latency=0.5), num_ranks=4, num_microbatches=8, **to
    ),
    "run": lambda **to: run(3, latency=1).plot(**to),
    "map": lambda **to: run(65).plot(**to),
    "comparison": lambda **to: compare(
        trace_of(known("1f1b", 4, 8)), trace_of(known("gpipe", 4, 8))
    ).plot(**to),
    "messages": lambda **to: pipeline(4).plot_bandwidth(**to),
    "table": lambda **to: table().plot(**to),
    "no message": lambda **to: Story(2).trace().plot_bandwidth(**to),
    "diagnosis": lambda **to: stuck(4).plot(**to),
    "diagnosis of 16": lambda **to: stuck(16).plot(**to),
    "no finding": lambda **to: Story(2).trace().explain().plot(**to),
    "diagnosis, long names": lambda **to: hostile(4).explain().plot(**to),
}

OF_FOUR = ("ring", "timeline", "step", "schedules", "comparison", "messages", "diagnosis")


def seen_words(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Returns the texts that matplotlib really draws, which leaves out ticks beyond the axes."""
    found: dict[Text, None] = {}
    draw = Text.draw

    def note(self: Text, *args: Any, **more: Any) -> Any:
        if self.get_visible() and self.get_text().strip():
            found[self] = None
        return draw(self, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", note)
        axes.figure.canvas.draw()
    return list(found)


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("name", PICTURES)
def test_no_word_lies_on_another_or_beyond_the_edge(
    name: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ax = PICTURES[name](**PURPOSES[purpose][1])
    figure: Any = ax.figure
    # of an annotation, without its arrow
    boxes = {text: Text.get_window_extent(text) for text in seen_words(ax, monkeypatch)}
    point = figure.dpi / 72
    for text, box in boxes.items():
        assert figure.bbox.x0 - point <= box.x0 <= box.x1 <= figure.bbox.x1 + point, text
        assert figure.bbox.y0 - point <= box.y0 <= box.y1 <= figure.bbox.y1 + point, text
    for one, other in combinations(boxes, 2):
        assert overlap(boxes[one], boxes[other]) < point, (one, other)
    if purpose == "paper":
        assert figure.get_figwidth() == 3.3
        assert figure.get_figheight() <= HIGHEST.get(name, 3.5)


def test_a_column_gets_a_strip_and_its_caption_a_file(tmp_path: Path) -> None:
    """Compares a strip with the figures of papers: numbers, phases and one line of legend."""
    ax = plot_schedule(make_schedule("1f1b", 4, 8), **PURPOSES["paper"][1])
    shown = [text.get_text() for text in ax.texts]
    assert sorted(filter(str.isdigit, shown)) == sorted("01234567" * 2 * 4)
    assert {"warm-up", "steady", "cool-down", "units"} <= set(shown)
    assert legend(ax) == ["forward", "backward", "bubble"]
    assert not title(ax)
    save_figure(ax.figure, tmp_path / "step.pdf")
    said = (tmp_path / "step.caption.txt").read_text().splitlines()
    assert said[0] == "1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %."
    assert said[-1].startswith("Simulated: forward 1, backward 2")
    assert any("closed form assumes" in line for line in said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.caption.txt", "step.pdf"]


@pytest.mark.parametrize("name", OF_FOUR)
def test_a_column_has_one_line_of_legend_and_its_caption_has_the_other_entries(name: str) -> None:
    draw = PICTURES[name]
    ax, free = draw(**PURPOSES["paper"][1]), draw(figsize=(33, None), compact=True)
    lines = [text.get_window_extent().y0 for text in ax.get_legend().get_texts()]
    assert max(lines) - min(lines) < 2
    said = [line for line in caption(ax.figure).splitlines() if line.startswith("Not in the leg")]
    left_out = [label for label in legend(free) if label not in legend(ax)]
    assert len(said) == bool(left_out)
    for label in left_out:
        assert label in said[0]
    assert [label for label in legend(free) if label in legend(ax)] == legend(ax)


def test_the_looks_that_fill_most_of_a_column_are_in_its_legend() -> None:
    ax = PICTURES["timeline"](**PURPOSES["paper"][1])
    area: dict[str, float] = {}
    for group in drawn(ax.collections, "").values():
        if isinstance(group, PolyCollection) and not isinstance(group, Quiver):
            for left, right, top, bottom in boxes(ax, group.get_gid()):
                colour = to_hex(group.get_facecolor()[0])
                area[colour] = area.get(colour, 0) + (right - left) * (bottom - top)
    shown = {to_hex(patch.get_facecolor()) for patch in ax.get_legend().get_patches()}
    assert set(sorted(area, key=lambda colour: -area[colour])[:4]) <= shown
    assert "late receiver (orange), " in caption(ax.figure)


def test_schedules_on_one_axis_are_named_and_their_difference_is_marked() -> None:
    """Takes the lengths and the live activations from lesson 06."""
    costs = Costs(latency=0.5)
    ax = plot_schedules("gpipe", "1f1b", costs=costs, num_ranks=4, num_microbatches=8)
    assert title(ax) == "GPipe 36 units, 1F1B 41 units: 5 units (14 %) longer"
    headings = [text.get_text() for text in ax.texts if "live" in text.get_text()]
    assert headings == [
        "GPipe: 36 units, bubble 33 %, at most 8 live activations",
        "1F1B: 41 units, bubble 41 %, at most 4 live activations; 5 units (14 %) longer",
    ]
    ends = drawn(ax.texts, "difference")["difference"]
    assert (ends.xy[0], ends.xyann[0]) == (41, 36)
    lowest = max(box[3] for box in boxes(ax, "actions-F-0"))
    assert lowest > 8, "the second schedule is below the first"
    # ranks with two stages do the same work
    chunks = make_schedule("interleaved_1f1b", 4, 8)
    mixed = plot_schedules("1f1b", chunks, run(4), num_ranks=4, num_microbatches=8)
    assert title(mixed) == "1F1B 33 units, Interleaved 1F1B 28.5 units, 1F1B 21 units"
    seconds = simulate_schedule("1f1b", num_ranks=2, num_microbatches=2, link=LINK)
    with pytest.raises(ArgumentError, match="cannot draw schedules on one axis"):
        plot_schedules(run(2), seconds)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'schedule'"):
        plot_schedules()


@pytest.mark.parametrize(
    "draw", [lambda: pipeline(4), lambda: run(4), stuck_of_4], ids=["trace", "run", "diagnosis"]
)
def test_a_notebook_gets_words_that_can_be_read_in_both_themes(draw: Callable[[], Any]) -> None:
    """Reads the SVG as a browser does: variables, and their values for each colour scheme."""
    html = draw()._repr_mimebundle_()
    html = (html[0] if isinstance(html, tuple) else html)["text/html"]
    svg = base64.b64decode(html.split("data:image/svg+xml;base64,")[1].split('"')[0]).decode()
    assert 'alt="' in html
    assert len(svg) < 500_000
    rules = svg.split("<style>")[1].split("</style>")[0].split("@media(prefers-color-scheme:dark)")
    rest = svg.split("</style>", 1)[1]
    assert not re.findall(r"#[0-9a-f]{6}\b", rest), "every colour must be a variable"
    words = [text for text in ET.fromstring(svg).iter() if text.get("id", "").startswith("text_")]
    assert len(words) > 10
    grounds = []
    for rule in rules:
        colours = dict(re.findall(r"(--c\d+):(#[0-9A-Fa-f]{6})", rule))
        grounds.append(colours[re.findall(r"fill: var\((--c\d+)\)", rest)[0]])
        for text in words:
            fills = [
                re.findall(r"fill: ?var\((--c\d+)\)", part.get("style", ""))
                for part in text.iter()
                if (part.tag.endswith("}path") and part.get("style"))
                or (part.tag.endswith("}g") and part.get("transform"))
            ]
            # the plain background comes before the words
            inks = [colours[fill[0]] if fill else "#000000" for fill in fills]
            behind = (
                inks[0] if len(inks) > 1 and text[0].get("id", "").startswith("patch") else None
            )
            assert contrast(inks[-1], behind or grounds[-1]) >= CONTRAST, (inks, rule[:30])
    assert grounds == ["#ffffff", "#111111"]


def test_a_picture_with_many_bars_stays_a_small_file_in_a_notebook() -> None:
    data, _ = many_events(60_000)._repr_mimebundle_()
    assert set(data) == {"text/plain", "image/png"}
