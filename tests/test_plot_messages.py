"""Tests of the bandwidth chart of a trace, with a point for each message."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from pictures import legend, title, words
from synthetic import Story

import ringsim
from ringsim import Link, Trace


def one_message(*times_us: float, size: int = 20_000) -> Trace:
    send_post, recv_post, recv_wait, done = (time_us * 1e-3 for time_us in times_us)
    story = Story(2)
    story.message(0, 1, (send_post, send_post, done), (recv_post, recv_wait, done), size)
    return story.trace()


def points(ax: Axes, prefix: str = "messages") -> list[tuple[np.ndarray, np.ndarray]]:
    return [one.get_data() for one in ax.lines if str(one.get_gid()).startswith(prefix)]


@pytest.mark.parametrize(
    ("times_us", "is_bound"),
    [
        ((1, 0, 0, 11), False),  # a late sender, whose time counts from its post
        ((0, 10, 10, 20), False),  # a late receiver
        ((0, 100, 104, 110), True),  # it may have arrived before 104 us
        ((0, 100, 100.4, 110), False),  # looked 4 % late
    ],
)
def test_a_message_counts_from_the_later_post(times_us: tuple[float, ...], is_bound: bool) -> None:
    ax = one_message(*times_us).plot_bandwidth()
    ((sizes, gb_per_s),) = points(ax)
    assert (sizes.tolist(), gb_per_s.tolist()) == ([20_000], [2.0])
    (dot,) = (one for one in ax.lines if str(one.get_gid()).startswith("messages"))
    assert (dot.get_markerfacecolor() == "none") is is_bound, "a lower bound must be an open point"
    assert ("lower bound" in " ".join(legend(ax))) is is_bound
    assert title(ax) == "1 message: at best 2 GB/s, with 19.5 KiB"


@pytest.mark.parametrize(
    ("sizes", "dots", "most_columns"),
    [
        ([20] * 12 + [28] * 13, 12, 1),
        # 40 quarters of a factor of two, and the remaining sizes at the ends
        ((4 * 2 ** np.linspace(8, 18, 900).astype(int)).tolist(), 0, 42),
    ],
)
def test_every_message_is_a_dot_or_one_of_many_of_its_size(
    sizes: list[int], dots: int, most_columns: int
) -> None:
    story = Story(2)
    for at, size in enumerate(sizes):
        times = (2.0 * at, 2.0 * at, 2.0 * at + 1)
        story.message(0, 1, times, times, size, tag=at)
    ax = story.trace().plot_bandwidth()
    quantiles, medians = points(ax, "messages exact p10"), points(ax, "messages exact median")
    alone = [found for found in points(ax) if len(found[0]) != 2 and len(found[0]) == dots]
    assert sum(len(found[0]) for found in alone) == dots
    assert 1 <= len(quantiles) == len(medians) <= most_columns


def test_messages_lie_over_a_measured_curve() -> None:
    curve = ringsim.bandwidth(edge=(0, 1), link=Link(1e-6, 1e-9), sizes=[8, 1024, 2**20])
    trace = one_message(0, 1, 1, 11)
    ax = trace.plot_bandwidth(curve=curve)
    assert [found[0].tolist() for found in points(ax)] == [[20_000]]
    assert len(points(ax, "median ")) == 1
    assert points(ax, "published") == []
    assert "Lines: simulated" in words(ax)


NCCL = one_message(0, 1, 1, 11)
NCCL.metadata["backend"] = "nccl"  # where a wait ends when the work is queued


@pytest.mark.parametrize(
    ("trace", "heading", "said"),
    [
        (one_message(0, 1, 1, 11, size=0), "No message arrived", "1 message of 0 bytes."),
        (one_message(0, 1, 1, -1), "No message arrived", "1 message that never arrived."),
        (Story(2).trace(), "No message arrived", ""),
        (NCCL, "NCCL does not report", "1 message (NCCL reports when a message was queued"),
    ],
    ids=["empty", "in flight", "nothing", "nccl"],
)
def test_what_is_not_drawn_is_said(trace: Trace, heading: str, said: str) -> None:
    ax = trace.plot_bandwidth()
    assert title(ax).startswith(heading)
    assert said in words(ax)
    assert points(ax) == []
