"""What all pictures have in common.

Colours that everybody can tell apart, words that are not cut off, the same bytes each time.
"""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.markers import MarkerStyle
from pictures import assert_within, words
from synthetic import Story, known, pipeline, trace_of

import ringsim
from ringsim import compare
from ringsim.errors import ArgumentError
from ringsim.pipeline import plot_schedule
from ringsim.plot import charts, style
from ringsim.plot.layout import OPERATION_LOOKS, SPAN_LOOKS
from ringsim.plot.ring import (
    CLOSING_COLOUR,
    CLOSING_TEXTURE,
    PAIR_COLOURS,
    PAIR_TEXTURES,
    plot_ring,
)
from ringsim.plot.steps import ACTION_LOOKS, BUBBLE_LOOK, microbatch_entry
from ringsim.plot.timeline import trace_png
from ringsim.schedules import make_schedule
from ringsim.traces.bandwidths import make_bandwidths
from ringsim.traces.findings import Diagnosis, Finding
from ringsim.traces.units import bytes_text, time_text, time_unit

BACKENDS = ("gloo", "nccl", "mpi", "tcp", "mine")
# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009: severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def xyz(colour: str, vision: str = "normal") -> np.ndarray:
    srgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1)


def lab(colour: str, vision: str = "normal") -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it; distances of 2 can just be seen side by side."""
    share = xyz(colour, vision) / (TO_XYZ @ np.ones(3))
    f = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str) -> float:
    """As who sees the least of it sees it."""
    return min(float(np.linalg.norm(lab(one, vision) - lab(other, vision))) for vision in VISION)


def test_everybody_can_tell_the_colours_apart() -> None:
    for looks in (OPERATION_LOOKS, SPAN_LOOKS, (*ACTION_LOOKS.values(), BUBBLE_LOOK)):
        for one, other in combinations(looks, 2):
            if one.hatch == other.hatch:
                assert distance(one.colour, other.colour) > 20, (one, other)
                assert abs(lab(one.colour)[0] - lab(other.colour)[0]) > 15, "in grey, too"
        for look in looks:
            assert not look.hatch or np.linalg.norm(lab(look.colour) - lab(look.ink)) > 12, (
                "a texture can be seen on its colour"
            )
    textures = [*map(str, PAIR_TEXTURES), str(CLOSING_TEXTURE)]
    assert len(set(textures)) == len(PAIR_COLOURS) + 1
    for colours in (
        [charts.pen(backend).colour for backend in BACKENDS],
        (*PAIR_COLOURS, CLOSING_COLOUR),
    ):
        assert min(distance(one, other) for one, other in combinations(colours, 2)) > 15
    for ink in (style.INK, style.MUTED, *(charts.pen(backend).ink for backend in BACKENDS)):
        assert 1.05 / (xyz(ink)[1] + 0.05) > 4.5, "WCAG AA: words can be read on white"


def test_sizes_have_binary_units() -> None:
    sizes = {
        0: "0 B",
        1023: "1,023 B",
        1024: "1 KiB",
        1536: "1.5 KiB",
        1024**2 - 1: "1 MiB",
        10 * 1024**3: "10 GiB",
        1024**7: "1,024 EiB",
    }
    assert {size: bytes_text(size) for size in sizes} == sizes


@given(st.integers(1, 10**15))
def test_times_are_read_back_to_three_digits(length_ns: int) -> None:
    number, name = time_text(length_ns).split(" ")
    unit = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}[name]
    assert time_unit(length_ns) == (unit, name)
    assert float(number.replace(",", "")) * unit == pytest.approx(length_ns, rel=0.006)


def table() -> Any:
    row = {
        "pattern": "pingpong",
        "src": 0,
        "dst": 1,
        "backend": "gloo",
        "kind": "measured",
        "n": 30,
    }
    return make_bandwidths(
        [row | {"size_bytes": 2**k, "latency_us": 40 + 2**k / 4e3} for k in range(3, 25)],
        {"source": "measured"},
    )


def step(scale: float = 1.0) -> ringsim.Trace:
    trace = trace_of(known("1f1b", 4, 8))
    return ringsim.Trace(trace.events, trace.metadata | {"scale": scale})


def run(ranks: int) -> Any:
    return ringsim.simulate_schedule("1f1b", num_ranks=ranks, num_microbatches=4)


VALUES = {
    "trace": lambda: pipeline(4),
    "many ranks": lambda: pipeline(17),
    "nothing": lambda: Story(2).trace(),
    "step": step,
    "table": table,
    "run": lambda: run(3),
    "map": lambda: run(65),
    "comparison": lambda: compare(step(), step(2.0)),
}
DRAWN = {
    "ring": lambda **to: pipeline(3).plot_ring(**to),
    "timeline": lambda **to: pipeline(4).plot_timeline(**to),
    "messages": lambda **to: pipeline(4).plot_bandwidth(**to),
    "step": lambda **to: step().plot_timeline(**to),
    "schedule": lambda **to: plot_schedule(make_schedule("zb_v", 2, 4), **to),
    "diagnosis": lambda **to: Diagnosis((Finding("deadlock", (0, 1), (), "they wait."),), 2).plot(
        **to
    ),
    "iterations": lambda **to: charts.plot_inner_iterations(4, **to),
    **{
        kind: lambda kind=kind, **to: VALUES[kind]().plot(**to)
        for kind in ("table", "run", "map", "comparison")
    },
}


USERS_STYLE = {"font.size": 23.0, "axes.grid": True, "axes.facecolor": "red"}


def read_png(png: bytes | str) -> np.ndarray:
    return plt.imread(io.BytesIO(png if isinstance(png, bytes) else base64.b64decode(png)))[
        :, :, :3
    ]


@pytest.mark.parametrize("kind", VALUES)
def test_a_notebook_gets_the_whole_picture_in_our_style(kind: str) -> None:
    with mpl.rc_context(USERS_STYLE):
        data, about = VALUES[kind]()._repr_mimebundle_()
        assert mpl.rcParams["font.size"] == 23.0
    assert plt.get_fignums() == [], "nothing for the notebook to show a second time"
    assert about["image/png"]["alt"]
    pixels = read_png(data["image/png"])
    assert 300 <= pixels.shape[0] <= 1200
    assert all(
        (edge == 1.0).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:])
    ), "no word is cut off"


@pytest.mark.parametrize("kind", DRAWN)
def test_a_picture_goes_where_it_is_told_and_in_a_column_it_is_whole_with_few_sizes_of_letters(
    kind: str,
) -> None:
    figure, (other, own) = plt.subplots(1, 2, figsize=(14, 4))
    assert DRAWN[kind](ax=own) is own
    assert figure.axes == [other, own]
    assert not other.has_data()
    assert plt.get_fignums() == [figure.number]
    plt.close(figure)
    ax = DRAWN[kind](figsize=(3.3, None), compact=True)
    assert ax.figure.get_figwidth() == 3.3
    assert_within(ax)
    shown = {
        round(text.get_fontsize(), 1)
        for text in ax.figure.findobj(mpl.text.Text)
        if text.get_text().strip() and text.get_visible()
    }
    assert len(shown) <= 3
    assert min(shown) >= 5
    assert ax.get_title(loc="left") == ""


def test_a_picture_is_as_dark_as_it_is_told_or_as_the_users_others() -> None:
    with plt.style.context("dark_background"):
        grounds = [
            DRAWN["ring"](**look).figure.get_facecolor()
            for look in ({"theme": "dark"}, {}, {"theme": "light"})
        ]
    assert [mpl.colors.to_hex(ground) for ground in grounds] == ["#15181c", "#000000", "#ffffff"]


@pytest.mark.parametrize("kind", DRAWN)
def test_words_and_ground_of_a_dark_picture_differ(kind: str) -> None:
    for text in DRAWN[kind](theme="dark").figure.findobj(mpl.text.Text):
        patch = text.get_bbox_patch()
        behind = (
            patch.get_facecolor()
            if patch is not None and mpl.colors.to_rgba(patch.get_facecolor())[3]
            else "#15181c"
        )
        light, dark = sorted(
            (xyz(mpl.colors.to_hex(colour))[1] + 0.05 for colour in (text.get_color(), behind)),
            reverse=True,
        )
        assert not text.get_text().strip() or not text.get_visible() or light / dark >= 3, text


def test_a_figure_has_the_size_that_is_asked_for_and_the_users_letters() -> None:
    ax = plot_ring(pipeline(3), figsize=(8, 5), dpi=70)
    assert (*ax.figure.get_size_inches(), ax.figure.dpi) == (8, 5, 70)
    assert_within(ax)
    with mpl.rc_context({"font.sans-serif": ["DejaVu Serif"], "axes.labelsize": 7.0}):
        ax = pipeline(3).plot_timeline()
        assert ax.xaxis.label.get_fontsize() == 7
        assert ax.xaxis.label.get_fontname() == "DejaVu Serif"
    for bad in (
        {"figsize": (0, 3)},
        {"figsize": (None, 3)},
        {"theme": "blue"},
        {"size": 3},
        {"ax": ax, "figsize": (3, 3)},
    ):
        with pytest.raises(ArgumentError):
            plot_ring(pipeline(3), **bad)


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_files_are_the_same_byte_for_byte(ending: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}{ending}" for number in range(2)]
    for file in files:
        style.save_figure(pipeline(3).plot_timeline(compact=True, figsize=(3.3, 3)).figure, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ArgumentError, match=r"must end in .png, .svg or .pdf, got .*ring.jpeg"):
        style.save_figure(plot_ring(pipeline(3)).figure, tmp_path / "ring.jpeg")


def test_the_notebooks_picture_is_the_same_each_time_and_says_what_the_trace_is() -> None:
    first = trace_png(pipeline(4))
    with mpl.rc_context(USERS_STYLE):
        assert trace_png(pipeline(4)) == first
    assert pipeline(4).describe().encode() in first
    mark = Story(3)
    mark.op(0, "mark", (1, -1, 1))
    without, with_timeline = (
        read_png(trace_png(trace)).shape[1] for trace in (Story(3).trace(), mark.trace())
    )
    assert without < with_timeline / 1.5, "no empty timeline"


def test_an_svg_says_what_it_shows_and_carries_no_date(tmp_path: Path) -> None:
    style.save_figure(
        plot_ring(pipeline(3)).figure,
        tmp_path / "ring.svg",
        title='<ring> & "co"',
        description=r"a \1 of three",
    )
    root = ET.parse(tmp_path / "ring.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert (root.get("role"), root.find(f"{space}title").text, root.find(f"{space}desc").text) == (
        "img",
        '<ring> & "co"',
        r"a \1 of three",
    )
    assert "dc:date" not in (tmp_path / "ring.svg").read_text()
    for prefix in ("rank-", "group-ring"):
        assert sum(element.get("id", "").startswith(prefix) for element in root.iter()) == 3


def test_the_legend_shows_a_number_where_formulas_are_off() -> None:
    """With mathtext off the marker was the two dollar signs and the digit, one over the other."""
    with style.drawing():
        shown = microbatch_entry()._marker.get_path()  # type: ignore[attr-defined]
    with mpl.rc_context({"text.parse_math": True}):
        zero = MarkerStyle("$0$").get_path()
    np.testing.assert_array_equal(shown.codes, zero.codes)


def test_a_long_title_shrinks_and_a_legend_takes_the_columns_that_fit() -> None:
    _, ax = plt.subplots(figsize=(4, 3))
    handles = [style.swatch(style.Look("a name that takes much room", "#123456")) for _ in range(4)]
    with style.drawing():
        style.dress(ax, "far too long for these axes " * 3, metadata={}, handles=handles)
    assert ax.get_legend()._ncols == 1
    assert ax.get_title(loc="left").startswith("far")
    assert ax._left_title.get_fontsize() < style.SETTINGS["axes.titlesize"]
    assert "origin unknown" in words(ax)
