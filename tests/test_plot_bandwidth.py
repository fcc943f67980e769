"""The bandwidth chart: what stands in it is what was measured, achieved or cited."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from pictures import legend, title, words
from synthetic import Story, pipeline

from ringsim import Link, Trace
from ringsim.errors import ArgumentError
from ringsim.plot.charts import (
    FIGURES,
    LINE_RATES,
    Achieved,
    achieved,
    link_text,
    make_curves,
    pen,
    plot_bandwidth,
    spread,
)
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths

META = {
    "source": "measured",
    "machine": {"cpu": "some CPU", "cores": 2},
    "backend": "gloo",
    "date": "2026-11-20",
}
SIZES = [2**power for power in range(3, 25)]


def rows(
    time_s: Callable[[int], float], *, factor: float = 1.0, **series: Any
) -> list[dict[str, Any]]:
    """One row a size; p10 and p90 of the time are 0.9 and 1.2 times the median."""
    found = []
    for size in SIZES:
        time_us = time_s(size) * 1e6
        found.append(
            {
                "pattern": "pingpong",
                "src": 0,
                "dst": 1,
                "backend": "gloo",
                "kind": "measured",
                "n": 30,
                "size_bytes": size,
            }
            | {
                "latency_us": time_us,
                "p10_latency_us": 0.9 * time_us,
                "p90_latency_us": 1.2 * time_us,
            }
            | {
                "algbw_gb_per_s": size / time_us / 1e3,
                "busbw_gb_per_s": factor * size / time_us / 1e3,
            }
            | {
                "p10_algbw_gb_per_s": size / time_us / 1.2e3,
                "p90_algbw_gb_per_s": size / time_us / 0.9e3,
            }
            | series
        )
    return found


def line(size: int) -> float:
    return 40e-6 + size / 4e9


def jump(size: int) -> float:
    return 40e-6 + size / 4e9 if size < 2**16 else 400e-6 + size / 4e9


def table(*groups: list[dict[str, Any]]) -> Bandwidths:
    return make_bandwidths([row for group in groups for row in group], dict(META))


def drawn(ax: Axes, prefix: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Points of the lines whose id begins like this, in one panel."""
    return [line.get_data() for line in ax.lines if (line.get_gid() or "").startswith(prefix)]


def gids(ax: Axes, prefix: str) -> int:
    return len(drawn(ax, prefix))


# -- a table


def test_a_table_is_drawn_in_both_panels_as_it_is() -> None:
    ax = plot_bandwidth(table(rows(line)))
    (below,) = ax.child_axes
    rates, times_us = (
        np.array([f(size) for size in SIZES])
        for f in (lambda size: size / line(size) * 1e-9, lambda size: line(size) * 1e6)
    )
    for panel, medians, low, high in ((ax, rates, 1 / 1.2, 1 / 0.9), (below, times_us, 0.9, 1.2)):
        ((sizes, values),) = drawn(panel, "median gloo pingpong 0>1")
        assert sizes.tolist() == SIZES
        assert values == pytest.approx(medians)
        (band,) = [one for one in panel.collections if one.get_gid() == "band gloo pingpong 0>1"]
        heights = band.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == (
            pytest.approx(low * medians.min()),
            pytest.approx(high * medians.max()),
        )
    ((sizes, fitted),) = drawn(ax, "fit ")
    assert fitted == pytest.approx(sizes / (40e-6 + sizes / 4e9) * 1e-9)
    assert drawn(ax, "n half")[0] == (pytest.approx([160_000]), pytest.approx([2.0]))
    assert re.search(
        (
            r"Gloo pingpong 0 -> 1: alpha = 40\.0+ ± 0\.0+ µs, 1/beta = "
            r"4\.0+ ± 0\.0+ GB/s, n½ = 156 KiB\."
        ),
        words(ax),
    )
    assert "measured on some CPU, 2 cores, gloo, 2026-11-20" in words(ax)
    assert "Medians of n = 30 repetitions" in words(ax)
    assert not re.search("Interrupted|oad average", words(ax))


def test_n_half_is_not_marked_where_the_fit_does_not_know_alpha() -> None:
    times = dict(zip(SIZES, np.random.default_rng(1).lognormal(0, 1.5, len(SIZES)), strict=True))
    wild = [
        row | {"p10_latency_us": 1e-3, "p90_latency_us": 1e9}
        for row in rows(lambda size: line(size) * times[size])
    ]
    ax = plot_bandwidth(table(wild))
    assert (len(drawn(ax, "fit ")), drawn(ax, "n half")) == (1, [])


def test_a_break_is_not_bridged_and_each_side_has_its_fit() -> None:
    ax = plot_bandwidth(table(rows(jump)))
    for panel in (ax, *ax.child_axes):
        left, right = drawn(panel, "median gloo")
        assert (left[0].max(), right[0].min(), gids(panel, "fit ")) == (2**15, 2**16, 2)
    assert "up to 32 KiB: alpha = " in words(ax)
    assert "Interrupted where the time jumps" in words(ax)


def test_what_was_not_measured_is_dashed_and_a_ceiling_has_no_fit() -> None:
    tcp = rows(lambda size: 6e-6 + size / 4e9, backend="tcp")
    ax = plot_bandwidth(table(rows(line), rows(lambda size: 2 * line(size), kind="simulated"), tcp))
    measured, simulated = [
        one for one in ax.lines if (one.get_gid() or "").startswith("median gloo")
    ]
    assert (measured.get_linestyle(), simulated.get_linestyle()) == ("-", "--")
    assert measured.get_color() == simulated.get_color() == pen("gloo").colour
    assert pen("mine").name == "mine"
    assert (len(drawn(ax, "ceiling tcp")), len(drawn(ax, "fit "))) == (1, 2)
    assert {"Gloo pingpong", "Gloo pingpong, simulated", "TCP, no torch"} <= set(
        words(ax).splitlines()
    )


def test_published_figures_stand_only_where_no_nccl_was_measured() -> None:
    ax = plot_bandwidth(table(rows(line)))
    levels = sorted({float(values[0]) for _, values in drawn(ax, "published")})
    assert levels == sorted(
        figure.bandwidth_gb_per_s for figure in FIGURES if figure.bandwidth_gb_per_s is not None
    )
    points = {
        (size, time)
        for sizes, times in drawn(ax.child_axes[0], "published")
        for size, time in zip(sizes, times, strict=True)
    }
    assert points == {
        (figure.size_bytes, figure.latency_us)
        for figure in FIGURES
        if figure.latency_us is not None
    }
    assert {
        one.get_linestyle() for one in ax.lines if (one.get_gid() or "").startswith("published")
    } == {"--"}
    assert any("published by others (not measured here)" in entry for entry in legend(ax))
    assert all(figure.source in words(ax) for figure in FIGURES)
    for ax in (
        plot_bandwidth(table(rows(line), rows(line, backend="nccl"))),
        table(rows(line)).plot(published=False),
    ):
        assert gids(ax, "published") == gids(ax.child_axes[0], "published") == 0
        assert not any("published" in entry for entry in legend(ax))


def test_an_all_reduce_is_drawn_by_its_bus_bandwidth() -> None:
    ax = plot_bandwidth(table(rows(line, pattern="all_reduce", factor=1.5, src=-1, dst=-1)))
    ((_, gb_per_s),) = drawn(ax, "median gloo")
    assert gb_per_s.tolist() == pytest.approx([1.5 * size / line(size) * 1e-9 for size in SIZES])
    assert ax.get_ylabel() == "bus bandwidth, GB/s"
    assert "all_reduce: alpha" in words(ax)
    assert gids(ax, "published") == 0


def test_of_several_edges_the_slowest_is_fitted() -> None:
    edges = [
        rows(
            lambda size, edge=edge: (1 + edge) * line(size),
            pattern="shift",
            src=edge,
            dst=(edge + 1) % 4,
        )
        for edge in range(4)
    ]
    ax = plot_bandwidth(table(*edges))
    assert (gids(ax, "median gloo"), gids(ax, "fit Gloo shift 3 -> 0"), gids(ax, "fit ")) == (
        4,
        1,
        1,
    )
    assert "the slowest of 4 edges" in words(ax)


def test_an_empty_table_and_one_of_one_size_can_be_drawn() -> None:
    assert title(plot_bandwidth(table())) == "No backend was measured"
    ax = plot_bandwidth(table(rows(line)[:1]))
    assert title(ax) == "Gloo: 8 B take 40 µs, 8 B go at 0.0002 GB/s"
    assert gids(ax, "fit ") == 0


def test_the_chart_says_what_went_on_meanwhile() -> None:
    value = table(rows(line))
    value.metadata.update(interface="lo", load=[0.26, 1.5], paths={}, notes=["Stopped early."])
    assert "Sockets over lo; load average 0.3 before and 1.5 after.\nStopped early.\n" in words(
        plot_bandwidth(value)
    )
    value.metadata.update(interface=None, load=None, paths={"0>1": "p2p", "1>0": "host-staged"})
    assert "Between the GPUs 0>1: p2p, 1>0: host-staged." in words(plot_bandwidth(value))


def test_ranks_that_share_a_gpu_are_never_taken_for_a_link() -> None:
    shared = table(rows(line, backend="nccl"))
    shared.metadata["paths"] = {"0>1": "sockets, one GPU", "1>0": "sockets, one GPU"}
    assert "NCCL over sockets, one GPU" in title(shared.plot())
    shared.metadata["paths"] = {"0>1": "p2p", "1>0": "p2p"}
    assert "over sockets" not in title(shared.plot())


def test_curves_leave_out_what_a_logarithmic_axis_cannot_show() -> None:
    nothing = rows(line)[0] | {"size_bytes": 0, "latency_us": 40.0}
    unknown = rows(line)[1] | {"latency_us": math.nan}
    (curve,) = make_curves(table([nothing, unknown], rows(line)[2:]))
    assert curve.size_bytes.tolist() == SIZES[2:]
    # the bandwidth of a message needs no second name
    (curve,) = make_curves(table(rows(line, busbw_gb_per_s=math.nan)))
    assert curve.bus_factor == 1
    assert curve.gb_per_s.tolist() == pytest.approx([size / line(size) * 1e-9 for size in SIZES])


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (Link(40e-6, 2.5e-10), "alpha = 40 µs, 1/beta = 4 GB/s, n½ = 156 KiB"),
        (
            Link(40e-6, 2.5e-10, 1.3e-6, 1e-11),
            "alpha = 40 ± 1 µs, 1/beta = 4.0 ± 0.2 GB/s, n½ = 156 KiB",
        ),
        (Link(40e-6, 2.5e-10, math.nan, math.nan), "alpha = 40 µs, 1/beta = 4 GB/s, n½ = 156 KiB"),
        (Link(40e-6, 0.0), "alpha = 40 µs, no cost that grows with the size"),
    ],
)
def test_a_fit_in_words(link: Link, text: str) -> None:
    assert link_text(link) == text


@given(st.lists(st.floats(0, 500), min_size=1, max_size=8))
def test_labels_are_moved_apart_and_keep_their_order(heights: list[float]) -> None:
    places = spread(heights, 10)
    order = np.argsort(heights, kind="stable")
    assert (np.diff(np.array(places)[order]) >= 10 - 1e-6).all()
    assert spread(sorted(set(np.round(heights) * 10)), 10) == pytest.approx(
        sorted(set(np.round(heights) * 10))
    )


# -- a trace


def one_message(*times_ns: int, size: int = 20_000) -> Trace:
    send_post, recv_post, recv_wait, done = (time_ns * 1e-6 for time_ns in times_ns)
    story = Story(2)
    story.message(0, 1, (send_post, send_post, done), (recv_post, recv_wait, done), size)
    return story.trace()


@pytest.mark.parametrize(
    ("times", "gb_per_s", "is_bound"),
    [
        ((1000, 0, 0, 11_000), 2.0, False),  # a late sender: counted from its post
        ((0, 1000, 1000, 11_000), 2.0, False),  # a late receiver
        ((0, 1000, 1400, 11_000), 2.0, False),  # looked 4 % late
        ((0, 1000, 6000, 11_000), 2.0, True),  # it may have arrived before 6 us
    ],
)
def test_a_message_counts_from_the_later_post(
    times: tuple[int, int, int, int], gb_per_s: float, is_bound: bool
) -> None:
    found = achieved(one_message(*times))
    assert found.gb_per_s.tolist() == [gb_per_s]
    assert found.is_bound.tolist() == [is_bound]
    ax = one_message(*times).plot_bandwidth()
    (points,) = [one for one in ax.lines if (one.get_gid() or "").startswith("messages")]
    assert (points.get_markerfacecolor() == "none") is is_bound, "a lower bound is an open point"
    assert ("lower bound" in " ".join(legend(ax))) is is_bound
    assert title(ax) == "1 message: at best 2 GB/s, with 19.5 KiB"


def test_every_message_is_a_dot_or_one_of_many_of_its_size() -> None:
    found = achieved(pipeline(4))
    assert len(found) + found.empty + found.unfinished + found.queued == len(pipeline(4).messages)
    all_sizes = np.concatenate([[5] * 12, [7] * 13, 2 ** np.linspace(10, 20, 900)]).astype(np.int64)
    # 40 quarters of a factor of two, and what is left at the ends
    for sizes, most in ((all_sizes[:25], 1), (all_sizes, 42)):
        every = Achieved(
            sizes, sizes * 1e-3, np.ones(len(sizes)), np.zeros(len(sizes), bool), 0, 0, 0
        )
        few, many = every.split(False)
        assert sorted(np.concatenate([few, *many]).tolist()) == list(range(len(sizes)))
        assert 1 <= len(many) <= most
        assert all(len(rows) > 12 for rows in many)
        assert all(np.ptp(np.log2(sizes[rows])) <= 0.3 for rows in many)


def test_messages_lie_over_a_measured_curve() -> None:
    trace = one_message(0, 1000, 1000, 11_000)
    ax = trace.plot_bandwidth(curve=table(rows(line)))
    assert drawn(ax, "messages exact")[0][0].tolist() == [20_000]
    assert len(drawn(ax, "median gloo")) == 1
    assert drawn(ax, "published") == []
    assert "Lines: measured on some CPU" in words(ax)
    with pytest.raises(ArgumentError, match="curve must be left out for a table of bandwidths"):
        plot_bandwidth(table(rows(line)), curve=table(rows(line)))


def test_what_is_not_drawn_is_said() -> None:
    empty, queued = one_message(0, 1000, 1000, 11_000, size=0), one_message(0, 1000, 1000, 11_000)
    # a wait of NCCL ends when the work is queued: a bandwidth from it would be any number
    queued.metadata["backend"] = "nccl"
    for trace, heading, said in (
        (empty, "No message arrived", "Not drawn: 1 message of 0 bytes."),
        (Story(2).trace(), "No message arrived", ""),
        (
            queued,
            "NCCL's messages have no times of their own",
            "Not drawn: 1 message: on NCCL the record has the end of queueing",
        ),
    ):
        ax = trace.plot_bandwidth()
        assert title(ax) == heading
        assert said in words(ax)
        assert gids(ax, "messages") == 0


# -- what others published


def test_every_figure_has_a_source_and_one_number_below_the_line_rate() -> None:
    rates = {rate.link: rate.one_way_gb_per_s for rate in LINE_RATES}
    assert set(rates) <= {figure.link for figure in FIGURES}
    assert all(rate.both_ways_gb_per_s == 2 * rate.one_way_gb_per_s for rate in LINE_RATES)
    for figure in FIGURES:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure.date)
        owner, number = re.fullmatch(
            r"https://github\.com/[\w-]+/([\w-]+)/issues/(\d+)", figure.url
        ).groups()
        assert figure.source == f"{owner} #{number}"
        assert (figure.latency_us is None) != (figure.bandwidth_gb_per_s is None)
        assert (figure.size_bytes is None) == (figure.latency_us is None)
        assert figure.remark
        assert (figure.bandwidth_gb_per_s or 0) < rates.get(figure.link, math.inf)
