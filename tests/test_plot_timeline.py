"""The timeline's picture: rows, bars to scale, arrows, and a level of detail that adds up instead of leaving out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from pictures import assert_within, boxes, drawn, legend, spans, title, words
from synthetic import Story, many_events, pipeline

from ringsim.plot import layout as looks
from ringsim.plot.layout import MOST_ARROWS, OPERATION_LOOKS, choose_messages, make_bars, merge_short, time_range
from ringsim.plot.timeline import plot_timeline
from ringsim.traces.events import MARK, word_notice
from ringsim.traces.value import Trace

FIRST_SPAN = f"boxes-{len(OPERATION_LOOKS)}"
NUM_LOOKS = range(len(OPERATION_LOOKS))


def story_of(world_size: int, *operations: tuple[Any, ...]) -> Trace:
    """A trace of ``(rank, op, times, more)`` in ms; "message" is a send and its recv, "compute" and the like are spans."""
    story = Story(world_size)
    for rank, op, times, more in operations:
        if op == "message":
            story.message(rank, **more)
        elif len(times) == 2:
            story.span(rank, op, *times, **more)
        else:
            story.op(rank, op, times, **more)
    return story.trace()


def bars_of(ax: Axes) -> dict[int, list[tuple[float, float]]]:
    """(from, to) of the bars of operations, by look."""
    return {look: found for look in NUM_LOOKS if (found := spans(ax, f"boxes-{look}"))}


def arrows(ax: Axes) -> list[Any]:
    return list(drawn(ax.collections, "arrows").values())


def test_bars_are_to_scale_and_lie_in_their_lanes() -> None:
    """Rank 1 waits from 1 ms on; the send comes at 4 ms, its own wait at 5 ms; both are done by 7 and 8 ms.

    rank 0   | compute |  ====     span 0-4, send: posted 4, waits 5, done 7
    rank 1    .///////=====        recv: posted 0, waits 1, late sender until 4, transfer until 8
    """
    message = (0, "message", (), {"dst": 1, "send_ms": (4, 5, 7), "recv_ms": (0, 1, 8)})
    ax = plot_timeline(story_of(2, (0, "compute", (0, 4), {"microbatch": 3}), message))
    assert spans(ax, FIRST_SPAN) == [(0, 4)]
    assert bars_of(ax) == {looks.POSTED: [(0, 1), (4, 5)], looks.LATE_SENDER: [(1, 4)], looks.TRANSFER: [(4, 8), (5, 7)]}
    assert ax.get_xlabel() == "time since the start of the run (ms)"
    # 2 ranks x 8 ms; blocked 2 ms on rank 0 and 7 ms on rank 1, of which 3 ms were a late sender's
    assert title(ax) == "2 ranks, 8 ms: 56 % of it blocked in communication"
    assert "transfers 38 %, late senders 19 %; rank 1 waited longest, 3 ms" in words(ax)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels() if label.get_text()] == ["rank 0", "rank 1"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"
    (_, _, span_top, span_bottom) = boxes(ax, FIRST_SPAN)[0]
    send, recv = sorted(boxes(ax, f"boxes-{looks.TRANSFER}"), key=lambda box: box[2])
    assert -0.5 < span_top < span_bottom < send[2] < send[3] < 0.5 < recv[2] < recv[3] < 1.5
    (arrow,) = arrows(ax)  # from where the send was posted to where the recv was done
    assert (arrow.X.item(), arrow.Y.item()) == pytest.approx((4, (send[2] + send[3]) / 2))
    assert (arrow.X.item() + arrow.U.item(), arrow.Y.item() + arrow.V.item()) == pytest.approx((8, (recv[2] + recv[3]) / 2))


@pytest.mark.parametrize(
    ("made", "lanes"),
    [
        ([(0, 10, 0), (1, 4, 0), (4, 9, 0), (5, 6, 0)], [0, 1, 1, 2]),  # nested
        ([(0, 10, 0), (2, 12, 1)], [0, 1]),  # two threads
        ([(5, 5, 0)] * 1000, [0] * 1000),  # on a virtual clock many may share a moment
    ],
    ids=["nested", "threads", "at once"],
)
def test_spans_lie_below_each_other(made: list[tuple[int, int, int]], lanes: list[int]) -> None:
    bars = make_bars(story_of(1, *((0, "span", (start, end), {"thread": thread}) for start, end, thread in made)))
    assert bars.lane.tolist() == lanes
    assert bars.depths == max(lanes) + 1


def test_every_fate_of_an_operation_has_a_look_and_a_word_of_its_own() -> None:
    """What never finished is open-ended and leads the title."""
    to_1, from_0 = ({"peer": peer, "group": "ring:0>1", "size_bytes": 8} for peer in (1, 0))
    ax = plot_timeline(
        story_of(
            2,
            (0, "compute", (0, 1), {}),
            (0, "message", (), {"dst": 1, "send_ms": (20, 21, 29), "recv_ms": (26, 26, 29)}),
            (0, "all_reduce", (10, 11, 14), {"group": "world", "size_bytes": 64}),
            (1, "irecv", (10, 11, 13), {**from_0, "tag": 1, "status": 3}),
            (0, "mark", (12, -1, -1), {"label": "epoch", "status": 2}),
            (0, "send", (31, 31, -1), {**to_1, "tag": 2}),
            (1, "irecv", (30, -1, -1), {**from_0, "tag": 2}),
            (1, "compute", (30, -1), {}),
            (1, "mark", (40, -1, -1), {"label": word_notice("message_mismatch", f"two sides {'differ ' * 30}."), "status": 2}),
        )
    )
    found = bars_of(ax)
    for look, span, word in (
        (looks.LATE_RECEIVER, (21, 26), "blocked: late receiver"),
        (looks.COLLECTIVE_BLOCKED, (11, 14), "collective"),
        (looks.FAILED, (11, 13), "failed"),
        (looks.UNFINISHED, (31, 40), "never finished"),
        (looks.UNWAITED, (30, 40), "never waited for"),
    ):
        assert found[look] == [span]
        assert word in legend(ax)
    assert "blocked: late sender" not in legend(ax)
    assert len(drawn(ax.collections, "open-ends")["open-ends"].get_offsets()) == 3
    assert title(ax) == "Stuck: 1 operation never finished"
    assert "first: rank 0 in send to rank 1" in words(ax)
    assert "1 message never arrived: no arrow." in words(ax)
    assert sum(len(group.X) for group in arrows(ax)) == 1
    assert [segment[0][0] for segment in drawn(ax.collections, "marks")["marks"].get_segments()] == [12, 40]
    assert {"epoch", "message_mismatch"} <= set(words(ax).splitlines()), "a finding by its kind alone"
    assert "mark" in legend(ax)


SECONDS = {"dst": 1, "send_ms": (0, 0, 0), "recv_ms": (0, 0, 0)}


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (story_of(4), "Nothing was recorded on 4 ranks"),
        (pipeline(1), "1 rank, 12.4 ms: 4.8 % of it blocked in communication"),
        (story_of(2, (0, "work", (0, 0), {}), (0, "message", (), SECONDS)), "2 ranks, 1 message, and no time went by"),
        (
            story_of(2, (0, "work", (0, 7 * 24 * 3600 * 1000), {}), (0, "message", (), SECONDS)),
            "2 ranks, 604,800 s: 0 % of it blocked in communication",
        ),
        (story_of(1, (0, "work", (1000, 1010), {})), "1 rank ran for 10 ms without a message"),
        (pipeline(65, 2), None),
    ],
)
def test_every_kind_of_trace_can_be_drawn(trace: Trace, said: str | None) -> None:
    ax = plot_timeline(trace)
    ax.figure.canvas.draw()
    assert said is None or title(ax) == said
    assert "(" in ax.get_xlabel(), "the unit"
    assert "measured on Example CPU, 2 cores" in words(ax)
    if said and "ran for" in said:  # a late start moves the axis and says so
        assert ax.get_xlabel() == "time since the first event (ms), which came 1 s after the start of the run"
        assert spans(ax, FIRST_SPAN) == [(0, 10)]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_few_messages_all_have_an_arrow_and_no_words_are_cut_off(world_size: int) -> None:
    trace = pipeline(world_size)
    ax = plot_timeline(trace)
    assert sum(len(group.X) for group in arrows(ax)) == len(trace.messages)
    assert "Arrows:" not in words(ax)
    assert_within(ax)


def test_many_events_are_merged_and_counted() -> None:
    trace = many_events(60_000)
    bars, ax = make_bars(trace), plot_timeline(trace)
    assert f"merged: {len(bars):,} of {len(bars):,} bars" in words(ax)
    shown = sum(len(group.X) for group in arrows(ax))
    assert 50 < shown <= MOST_ARROWS
    assert f"Arrows: {shown:,} of {len(trace.messages):,} messages" in words(ax)
    assert sum(len(group.get_paths()) for group in drawn(ax.collections, "density-").values()) < len(bars) / 1.2


def test_each_name_of_a_span_has_a_look_and_is_written_where_there_is_room() -> None:
    mark = (0, "mark", (0, -1, -1), {"label": "a mark takes no look", "status": 2})
    ax = plot_timeline(story_of(1, mark, *((0, f"name {number}", (number, number + 1), {}) for number in range(10))))
    assert legend(ax)[:9] == [f"name {number}" for number in range(8)] + ["and 2 more names of spans"]
    assert [spans(ax, f"boxes-{len(OPERATION_LOOKS) + number}")[0][0] for number in range(10)] == list(range(10))
    ends = ((0, 90, {"stage": 2, "microbatch": 3}), (90, 98, {"microbatch": 4}), (98, 100, {"microbatch": 5}))
    ax = plot_timeline(story_of(2, *((0, "compute", (start, end), more) for start, end, more in ends)))
    assert {"compute, stage 2, microbatch 3", "compute 4", "5"} <= set(words(ax).splitlines())


@pytest.mark.parametrize("most", [1, 160])
def test_chosen_arrows_are_spread_over_time_and_pairs(most: int) -> None:
    trace = many_events(6000)
    chosen = choose_messages(trace, most)
    assert 0 < len(np.unique(chosen)) == len(chosen) <= most
    if most == 160:
        times = trace.events.post_ns[trace.messages.send[chosen]]
        assert np.histogram(times, bins=5, range=time_range(trace.events))[0].min() >= 16
        assert len(np.unique(trace.messages.src[chosen])) == len(np.unique(trace.messages.src))


TIMES = st.integers(-1, 1000)
ROWS = st.tuples(st.integers(0, 3), st.sampled_from(["span", "mark", "isend", "irecv", "all_reduce"]), st.integers(0, 500), TIMES, TIMES)


def random_trace(rows: list[tuple[int, str, int, int, int]]) -> Trace:
    """Any events that a recorder could leave: a wait not before the post, an end not before the wait."""
    story = Story(4)
    for rank, op, post, wait, done in rows:
        waits = -1 if wait < 0 or op in ("span", "mark") else post + wait
        ends = -1 if done < 0 or op == "mark" else max(post, waits) + done
        more = {} if op in ("span", "mark") else {"peer": 1 - rank % 2, "group": "world", "tag": 0}
        story.op(rank, op, (post, waits, ends), status=2 if ends >= 0 or op == "mark" else 1, **more)
    return story.trace()


TRACES = st.lists(ROWS, max_size=40).map(random_trace)


@given(TRACES, st.integers(1, 300))
def test_bars_cover_the_time_of_every_event_once_and_merging_keeps_all_of_it(trace: Trace, slot: int) -> None:
    events, bars, slot_ns = trace.events, make_bars(trace), slot * 1_000_000
    assert set(bars.event.tolist()) == set(np.flatnonzero(events.kind != MARK).tolist())
    covered = np.bincount(bars.event, weights=bars.end_ns - bars.start_ns, minlength=len(events))
    end = np.where(events.done_ns < 0, time_range(events)[1], events.done_ns)
    assert (covered == np.where(events.kind == MARK, 0, end - events.post_ns)).all()
    long, density = merge_short(bars, 0, slot_ns)
    lasts = bars.end_ns - bars.start_ns
    assert (long == (lasts >= slot_ns)).all()
    for look in np.unique(bars.look):
        same = ~long & (bars.look == look)
        assert density.count[density.look == look].sum() == same.sum()
        assert density.share[density.look == look].sum() * slot_ns == pytest.approx(lasts[same].sum())
    assert ((density.bottom >= 0) & (density.bottom <= density.top) & (density.top <= 1)).all(), "stacks stay within their lane"
