"""All pictures have distinct colours, text that is not cut off, and reproducible bytes."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from pictures import CONTRAST, assert_within, contrast, distance, drawn, lab
from synthetic import Story, known, pipeline, trace_of

import ringsim
from ringsim import Link, Trace, compare
from ringsim import comm as dist
from ringsim.cli import main
from ringsim.errors import ArgumentError, Deadlock
from ringsim.pipeline import make_schedule, plot_schedule

LINK = Link(1e-6, 1e-9)


def step() -> Trace:
    return trace_of(known("1f1b", 4, 8))


def run(ranks: int) -> Any:
    return ringsim.simulate_schedule("1f1b", num_ranks=ranks, num_microbatches=4)


def diagnosis() -> Any:
    """Makes two ranks that wait for each other."""
    with pytest.raises(Deadlock) as caught:
        ringsim.simulate(
            lambda: dist.recv(torch.zeros(1), 1 - dist.get_rank()), world_size=2, link=LINK
        )
    return caught.value.diagnosis


VALUES: dict[str, Callable[[], Any]] = {
    "trace": lambda: pipeline(4),
    "many ranks": lambda: pipeline(17),
    "nothing": lambda: Story(2).trace(),
    "step": step,
    "table": lambda: ringsim.bandwidth(edge=(0, 1), link=LINK, sizes=[8, 1024, 2**20]),
    "run": lambda: run(3),
    "map": lambda: run(65),
    "comparison": lambda: compare(step(), step()),
}
DRAWN: dict[str, Callable[..., Axes]] = {
    "ring": lambda **to: pipeline(3).plot_ring(**to),
    "timeline": lambda **to: pipeline(4).plot_timeline(**to),
    "messages": lambda **to: pipeline(4).plot_bandwidth(**to),
    "step": lambda **to: step().plot_timeline(**to),
    "schedule": lambda **to: plot_schedule(make_schedule("zb_v", 2, 4), **to),
    "diagnosis": lambda **to: diagnosis().plot(**to),
    **{
        kind: lambda kind=kind, **to: VALUES[kind]().plot(**to)
        for kind in ("table", "run", "map", "comparison")
    },
}
USERS_STYLE = {"font.size": 23.0, "axes.grid": True, "axes.facecolor": "red"}
every_picture = pytest.mark.parametrize("draw", DRAWN.values(), ids=list(DRAWN))


def fates() -> Axes:
    """Makes a timeline with all looks of operations but one, and with six span names."""
    story = Story(2)
    to_1, from_0 = ({"peer": peer, "group": "ring:0>1", "size_bytes": 8} for peer in (1, 0))
    for number, name in enumerate("abcdef"):
        story.span(0, f"name {name}", number, number + 1)
    story.message(0, 1, (20, 21, 29), (26, 26, 29))
    story.message(0, 1, (13, 14, 17), (10, 11, 17))
    story.op(0, "all_reduce", (30, 31, 34), group="world", size_bytes=64)
    story.op(1, "irecv", (30, 31, 33), **from_0, tag=1, status=3)
    story.op(0, "send", (41, 41, -1), **to_1, tag=2)
    story.op(1, "irecv", (40, -1, -1), **from_0, tag=2)
    story.op(0, "irecv", (35, 36, 39), peer=1, group="world", size_bytes=8, tag=5)
    story.op(1, "mark", (50, -1, -1), label="end", status=2)
    return story.trace().plot_timeline()


@pytest.mark.parametrize(
    ("draw", "looks"), [(fates, 14), (lambda: DRAWN["schedule"](), 4)], ids=["timeline", "schedule"]
)
def test_everybody_can_tell_the_looks_apart(draw: Callable[[], Axes], looks: int) -> None:
    patches = draw().get_legend().get_patches()
    patches = [patch for patch in patches if "paler" not in patch.get_label()]
    assert len(patches) >= looks
    spans = [patch for patch in patches if patch.get_label().startswith("name")]
    others = [patch for patch in patches if patch not in spans]
    for one, other in [*combinations(spans, 2), *combinations(others, 2)]:
        if one.get_hatch() == other.get_hatch():
            colours = one.get_facecolor(), other.get_facecolor()
            assert distance(*colours) > 20, (one.get_label(), other.get_label())
            assert abs(lab(colours[0])[0] - lab(colours[1])[0]) > 15, "too close in grey"
    for patch in patches:
        ink = lab(patch.get_facecolor()) - lab(patch.get_edgecolor())
        assert not patch.get_hatch() or np.linalg.norm(ink) > 12, "the texture is invisible"


def test_neighbours_in_the_ring_differ_also_without_colour() -> None:
    ax = pipeline(5).plot_ring()
    colours = {to_hex(one.get_facecolor()) for one in drawn(ax.patches, "forward-").values()}
    assert len(colours) == 4, "three alternating colours, and one for the edge that closes the ring"
    assert min(distance(one, other) for one, other in combinations(colours, 2)) > 15
    assert len({line.get_linestyle() for line in ax.lines}) >= 2


@every_picture
def test_words_can_be_read_on_white_and_on_dark(draw: Callable[..., Axes]) -> None:
    for theme, ground, least in (("light", "#ffffff", CONTRAST), ("dark", "#15181c", CONTRAST)):
        for text in draw(theme=theme).figure.findobj(mpl.text.Text):
            patch = text.get_bbox_patch()
            own = patch is not None and to_rgba(patch.get_facecolor())[3] > 0
            behind = patch.get_facecolor() if own else ground
            is_shown = text.get_text().strip() and text.get_visible()
            assert not is_shown or contrast(text.get_color(), behind) >= least, (theme, text)


def test_a_trace_without_events_is_text_in_a_notebook() -> None:
    data, _ = VALUES["nothing"]()._repr_mimebundle_()
    assert data.keys() == {"text/plain"}


@pytest.mark.parametrize("kind", sorted(VALUES.keys() - {"nothing"}))
def test_a_notebook_gets_the_whole_picture_in_our_style(kind: str) -> None:
    with mpl.rc_context(USERS_STYLE):
        data, about = VALUES[kind]()._repr_mimebundle_()
        assert mpl.rcParams["font.size"] == 23.0
    assert plt.get_fignums() == [], "the notebook must not show the picture a second time"
    assert about["image/png"]["alt"]
    pixels = plt.imread(io.BytesIO(base64.b64decode(data["image/png"])))[:, :, :3]
    assert 300 <= pixels.shape[0] <= 1200
    for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]):
        assert (edge == 1.0).all(), "no word may be cut off"


@every_picture
def test_a_picture_goes_where_it_is_told(draw: Callable[..., Axes]) -> None:
    figure, (other, own) = plt.subplots(1, 2, figsize=(14, 4))
    assert draw(ax=own) is own
    assert figure.axes == [other, own]
    assert not other.has_data()
    assert plt.get_fignums() == [figure.number]


@every_picture
def test_in_a_column_a_picture_is_whole_with_few_sizes_of_letters(
    draw: Callable[..., Axes],
) -> None:
    ax = draw(figsize=(3.3, None), compact=True)
    assert ax.figure.get_figwidth() == 3.3
    assert_within(ax)
    texts = ax.figure.findobj(lambda it: isinstance(it, mpl.text.Text) and it.get_visible())
    sizes = {round(text.get_fontsize(), 1) for text in texts if text.get_text().strip()}
    assert len(sizes) <= 3
    assert min(sizes) >= 5
    assert ax.get_title(loc="left") == ""


def test_a_picture_has_the_theme_size_and_letters_that_are_asked_for_or_the_users() -> None:
    with plt.style.context("dark_background"):
        looks: tuple[dict[str, Any], ...] = ({"theme": "dark"}, {}, {"theme": "light"})
        grounds = [pipeline(3).plot_ring(**look).figure.get_facecolor() for look in looks]
    assert list(map(to_hex, grounds)) == ["#15181c", "#000000", "#ffffff"]
    ax = pipeline(3).plot_ring(figsize=(8, 5), dpi=70)
    assert (*ax.figure.get_size_inches(), ax.figure.dpi) == (8, 5, 70)
    assert_within(ax)
    with mpl.rc_context({"font.sans-serif": ["DejaVu Serif"], "axes.labelsize": 7.0}):
        label = pipeline(3).plot_timeline().xaxis.label
        assert (label.get_fontsize(), label.get_fontname()) == (7, "DejaVu Serif")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"theme": "blue"}, "theme must be"),
        ({"ax": "any", "figsize": (3, 3)}, "figsize and dpi cannot be combined"),
        ({"ax": "any", "dpi": 70}, "figsize and dpi cannot be combined"),
    ],
)
def test_a_style_that_cannot_be_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        pipeline(3).plot_ring(**bad)


@pytest.mark.parametrize("purpose", ["slide", "web", "paper"])
def test_files_are_the_same_byte_for_byte_and_an_svg_says_what_it_shows(
    purpose: str, tmp_path: Path
) -> None:
    pipeline(3).save(tmp_path / "run.ringtrace")
    for out in ("first", "second"):
        command = ["figures", f"{tmp_path}/run.ringtrace", "--for", purpose, "-o"]
        assert main([*command, f"{tmp_path}/{out}"]) == 0
    files = sorted((tmp_path / "first").iterdir())
    names = {file.name.partition(".")[0] for file in files}
    assert names == {"ring", "timeline", "bandwidth"}
    for file in files:
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
    if purpose == "web":
        svg = (tmp_path / "first" / "ring.svg").read_text()
        assert "dc:date" not in svg
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        for prefix in ("rank-", "group-ring"):
            assert sum(element.get("id", "").startswith(prefix) for element in root.iter()) == 3
