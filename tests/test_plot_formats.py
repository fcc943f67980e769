"""Tests that the words of every picture have room, in a page, a column and a slide."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import matplotlib as mpl
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.text import Text
from pictures import overlap
from synthetic import Story, known, pipeline, trace_of

import ringsim
from ringsim import Link, Trace, compare, plot_schedules, simulate_schedule
from ringsim import comm as dist
from ringsim.cli.traces import PURPOSES
from ringsim.errors import Deadlock
from ringsim.pipeline import Costs, make_schedule, plot_schedule

LONG = "WWWW_a_name_that_somebody_generated_from_a_path/" * 4
LINK = Link(1e-6, 1e-9)


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


def seen_words(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Returns the texts that matplotlib really draws, which leaves out ticks beyond the axes."""
    found: list[Text] = []
    draw = Text.draw

    def note(self: Text, renderer: Any, *args: Any) -> Any:
        if self.get_visible() and self.get_text().strip():
            found.append(self)
        return draw(self, renderer, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", note)
        patched.setattr(mpl.text.Annotation, "draw", _note_annotation(found))
        axes.figure.canvas.draw()
    return list(dict.fromkeys(found))


def _note_annotation(found: list[Text]) -> Any:
    draw = mpl.text.Annotation.draw

    def note(self: Any, renderer: Any) -> Any:
        if self.get_visible() and self.get_text().strip():
            found.append(self)
        return draw(self, renderer)

    return note


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("name", PICTURES)
def test_no_word_lies_on_another_or_beyond_the_edge(
    name: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ax = PICTURES[name](**PURPOSES[purpose][1])
    figure: Any = ax.figure
    boxes = {text: Text.get_window_extent(text) for text in seen_words(ax, monkeypatch)}
    pixel = figure.dpi / 72
    for text, box in boxes.items():
        assert figure.bbox.x0 - pixel <= box.x0 <= box.x1 <= figure.bbox.x1 + pixel, text
        assert figure.bbox.y0 - pixel <= box.y0 <= box.y1 <= figure.bbox.y1 + pixel, text
    for one, other in combinations(boxes, 2):
        assert overlap(boxes[one], boxes[other]) < pixel, (one, other)
