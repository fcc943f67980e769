"""Tests of the bandwidth chart of a table, which shows measured or cited values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text
from pictures import CONTRAST, assert_apart, contrast, distance, legend, title, words

from ringsim.plot.published import FIGURES
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths

META = {
    "source": "measured", "machine": {"cpu": "some CPU", "cores": 2}, "backend": "gloo",
    "date": "2026-11-20",
}  # fmt: skip
SIZES = [2**power for power in range(3, 25)]
USUAL = {"pattern": "pingpong", "src": 0, "dst": 1, "backend": "gloo", "kind": "measured", "n": 30}


def rows(time_s: Callable[[int], float], **series: Any) -> list[dict[str, Any]]:
    """Makes one row per size, with p10 and p90 of 0.9 and 1.2 times the median."""
    found = []
    for size in SIZES:
        us = time_s(size) * 1e6
        times = {"latency_us": us, "p10_latency_us": 0.9 * us, "p90_latency_us": 1.2 * us}
        rates = {"p10_algbw_gb_per_s": size / us / 1.2e3, "p90_algbw_gb_per_s": size / us / 0.9e3}
        found.append(USUAL | {"size_bytes": size} | times | rates | series)
    return found


def line(size: int) -> float:
    return 40e-6 + size / 4e9


def table(*groups: list[dict[str, Any]], **about: Any) -> Bandwidths:
    return make_bandwidths([row for group in groups for row in group], META | about)


def drawn(ax: Axes, prefix: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the points of the lines in one panel whose id has this prefix."""
    return [line.get_data() for line in ax.lines if (line.get_gid() or "").startswith(prefix)]


def test_a_table_is_drawn_in_both_panels_as_it_is() -> None:
    ax = table(rows(line)).plot()
    times_us = np.array([line(size) * 1e6 for size in SIZES])
    rates = np.array(SIZES) / times_us / 1e3
    for panel, medians, low, high in (
        (ax, rates, 1 / 1.2, 1 / 0.9), (ax.child_axes[0], times_us, 0.9, 1.2),
    ):  # fmt: skip
        ((sizes, values),) = drawn(panel, "median gloo pingpong 0>1")
        assert sizes.tolist() == SIZES
        assert values == pytest.approx(medians)
        (band,) = [one for one in panel.collections if one.get_gid() == "band gloo pingpong 0>1"]
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.min() == pytest.approx(low * medians.min())
        assert heights.max() == pytest.approx(high * medians.max())
    ((sizes, fitted),) = drawn(ax, "fit ")
    assert fitted == pytest.approx(sizes / line(sizes) * 1e-9)
    assert drawn(ax, "n half")[0] == (pytest.approx([160_000]), pytest.approx([2.0]))
    fit = r"alpha = 40\.0+ ± 0\.0+ µs, 1/beta = 4\.0+ ± 0\.0+ GB/s, n½ = 156 KiB\."
    assert re.search(f"Gloo pingpong 0 -> 1: {fit}", words(ax))
    assert "measured on some CPU, 2 cores, gloo, 2026-11-20" in words(ax)
    assert "Medians of n = 30 repetitions" in words(ax)
    assert "no cost that grows with size" in words(table(rows(lambda _: 40e-6)).plot())


def test_a_break_is_not_bridged_and_each_side_has_its_fit() -> None:
    ax = table(rows(lambda size: line(size) + 360e-6 * (size >= 2**16))).plot()
    for panel in (ax, *ax.child_axes):
        left, right = drawn(panel, "median gloo")
        assert (left[0].max(), right[0].min(), len(drawn(panel, "fit "))) == (2**15, 2**16, 2)
    assert "up to 32 KiB: alpha = " in words(ax)
    assert "Curves are interrupted at jumps" in words(ax)


def test_each_curve_says_where_it_comes_from_and_no_two_labels_overlap() -> None:
    tcp = rows(lambda size: 6e-6 + size / 4e9, backend="tcp")
    backends = [rows(line, backend=name) for name in ("nccl", "mpi", "mine")]
    simulated = rows(lambda size: 2 * line(size), kind="simulated")
    ax = table(rows(line), simulated, tcp, *backends).plot()
    measured, made = [one for one in ax.lines if str(one.get_gid()).startswith("median gloo")]
    assert (measured.get_linestyle(), made.get_linestyle()) == ("-", "--")
    assert measured.get_color() == made.get_color()
    # a ceiling has no fit
    assert (len(drawn(ax, "ceiling tcp")), len(drawn(ax, "fit "))) == (1, 5)
    labels = {"Gloo pingpong", "Gloo pingpong, simulated", "TCP, no torch", "NCCL", "MPI", "mine"}
    ax.figure.canvas.draw()
    written = [text for text in ax.texts if text.get_text() in labels]
    assert {text.get_text() for text in written} == labels
    assert_apart([Text.get_window_extent(text) for text in written], 3)
    assert min(contrast(text.get_color(), "white") for text in written) > CONTRAST
    dark = table(rows(line), simulated, tcp, *backends).plot(theme="dark")
    coloured = [text.get_color() for text in dark.texts if text.get_text() in labels]
    assert min(contrast(colour, "#15181c") for colour in coloured) > CONTRAST
    curves = [one for one in ax.lines if re.match("median|ceiling", str(one.get_gid()))]
    colours = {one.get_color() for one in curves}
    assert len(colours) == 5
    assert min(distance(one, other) for one, other in combinations(colours, 2)) > 15


def test_published_figures_stand_only_where_no_nccl_was_measured() -> None:
    ax = table(rows(line)).plot()
    times = {(one.size_bytes, one.latency_us) for one in FIGURES if one.latency_us is not None}
    rates = {one.bandwidth_gb_per_s for one in FIGURES} - {None}
    assert {float(values[0]) for _, values in drawn(ax, "published")} == rates
    points = drawn(ax.child_axes[0], "published")
    assert {point for shown in points for point in zip(*shown, strict=True)} == times
    assert any("published elsewhere (not measured here)" in entry for entry in legend(ax))
    assert all(figure.source in words(ax) for figure in FIGURES)
    for ax in (
        table(rows(line), rows(line, backend="nccl")).plot(),
        table(rows(line)).plot(published=False),
        table(rows(line, pattern="all_reduce", src=-1, dst=-1, busbw_gb_per_s=1.0)).plot(),
    ):
        assert drawn(ax, "published") == drawn(ax.child_axes[0], "published") == []
        assert not any("published" in entry for entry in legend(ax))


def test_an_all_reduce_is_drawn_by_its_bus_bandwidth() -> None:
    every = rows(line, pattern="all_reduce", src=-1, dst=-1)
    bus = [
        row | {"busbw_gb_per_s": 1.5e-3 * row["size_bytes"] / row["latency_us"]} for row in every
    ]
    ax = table(bus).plot()
    ((_, gb_per_s),) = drawn(ax, "median gloo")
    assert gb_per_s.tolist() == pytest.approx([1.5 * size / line(size) * 1e-9 for size in SIZES])
    assert ax.get_ylabel() == "bus bandwidth, GB/s"
    assert "all_reduce: alpha" in words(ax)


def test_of_several_edges_the_slowest_is_fitted() -> None:
    edges = [
        rows(lambda size, n=n: (1 + n) * line(size), pattern="shift", src=n, dst=(n + 1) % 4)
        for n in range(4)
    ]
    ax = table(*edges).plot()
    assert len(drawn(ax, "median gloo")) == 4
    assert len(drawn(ax, "fit ")) == len(drawn(ax, "fit Gloo shift 3 -> 0")) == 1
    assert "the slowest of 4 edges" in words(ax)


@pytest.mark.parametrize(
    ("found", "heading", "said"),
    [
        (table(), "No backend was measured", ""),
        (
            table(rows(line)[:1], interface="lo", load=[0.26, 1.5], notes=["Stopped early."]),
            "Gloo: 8 B take 40 µs, 8 B reach 0.0002 GB/s",
            "Sockets over lo; load average 0.3 before and 1.5 after.\nStopped early.\n",
        ),
        (
            table(rows(line, backend="nccl"), paths={"0>1": "p2p", "1>0": "host-staged"}),
            "NCCL: 8 B take 40 µs",
            "Paths between the GPUs: 0>1: p2p, 1>0: host-staged.",
        ),
        (
            table(rows(line, backend="nccl"), paths={"0>1": "sockets, one GPU"}),
            "NCCL over sockets, one GPU: 8 B take 40 µs",  # never interpreted as a link
            "",
        ),
    ],
)
def test_the_title_says_what_messages_take_and_the_text_what_went_on(
    found: Bandwidths, heading: str, said: str
) -> None:
    ax = found.plot()
    assert title(ax).startswith(heading)
    assert said in words(ax)


def test_curves_leave_out_what_a_logarithmic_axis_cannot_show() -> None:
    nothing = rows(line)[0] | {"size_bytes": 0, "latency_us": 40.0}
    unknown = rows(line)[1] | {"latency_us": math.nan}
    ax = table([nothing, unknown], rows(line)[2:]).plot()
    assert [sizes.tolist() for sizes, _ in drawn(ax, "median")] == [SIZES[2:]]
