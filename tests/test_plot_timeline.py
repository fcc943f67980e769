"""Pictures of time: timelines, and steps of pipelines, recorded, simulated and predicted.

Rows, bars to scale, arrows, bubbles, phases, critical paths; and a level of detail that adds up
instead of leaving out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from pictures import boxes, drawn, legend, spans, title, words
from synthetic import UNIT_MS, Story, add_step, known, many_events, pipeline, trace_of

from ringsim import Link, Trace, compare, simulate_schedule
from ringsim.errors import ArgumentError
from ringsim.pipeline import Costs, evaluate, from_text, plot_schedule
from ringsim.plot import layout as looks
from ringsim.plot import schedule_run as pictures
from ringsim.plot.layout import (
    MOST_ARROWS,
    OPERATION_LOOKS,
    choose_messages,
    make_bars,
    merge_ranks,
    merge_short,
    time_range,
)
from ringsim.plot.schedule_run import BOUNDS, measure_shares, plot_overlay
from ringsim.plot.steps import ACTION_LOOKS, picture_step, shows_step, step_picture
from ringsim.plot.timeline import plot_timeline, timeline_picture
from ringsim.prediction.comparison import Comparison
from ringsim.schedules import make_schedule
from ringsim.simulator.schedules import ScheduleRun
from ringsim.traces.events import MARK, SPAN, word_notice

FIRST_SPAN = f"boxes-{len(OPERATION_LOOKS)}"
NUM_LOOKS = range(len(OPERATION_LOOKS))


def story_of(world_size: int, *operations: tuple[Any, ...]) -> Trace:
    """A trace of ``(rank, op, times, more)`` in ms.

    "message" is a send and its recv, "compute" and the like are spans.
    """
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
    """Rank 1 waits from 1 ms on.

    The send comes at 4 ms, its own wait at 5 ms; both are done by 7 and 8 ms.

    rank 0   | compute |  ====     span 0-4, send: posted 4, waits 5, done 7
    rank 1    .///////=====        recv: posted 0, waits 1, late sender until 4, transfer until 8
    """
    message = (0, "message", (), {"dst": 1, "send_ms": (4, 5, 7), "recv_ms": (0, 1, 8)})
    ax = plot_timeline(story_of(2, (0, "compute", (0, 4), {"microbatch": 3}), message))
    assert spans(ax, FIRST_SPAN) == [(0, 4)]
    assert bars_of(ax) == {
        looks.POSTED: [(0, 1), (4, 5)],
        looks.LATE_SENDER: [(1, 4)],
        looks.TRANSFER: [(4, 8), (5, 7)],
    }
    assert ax.get_xlabel() == "time since the start of the run (ms)"
    # 2 ranks x 8 ms; blocked 2 ms on rank 0 and 7 ms on rank 1, of which 3 ms were a late sender's
    assert title(ax) == "2 ranks, 8 ms: 56 % of it blocked in communication"
    assert "transfers 38 %, late senders 19 %; rank 1 waited longest, 3 ms" in words(ax)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels() if label.get_text()] == [
        "rank 0",
        "rank 1",
    ]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"
    (_, _, span_top, span_bottom) = boxes(ax, FIRST_SPAN)[0]
    send, recv = sorted(boxes(ax, f"boxes-{looks.TRANSFER}"), key=lambda box: box[2])
    assert -0.5 < span_top < span_bottom < send[2] < send[3] < 0.5 < recv[2] < recv[3] < 1.5
    (arrow,) = arrows(ax)  # from where the send was posted to where the recv was done
    assert (arrow.X.item(), arrow.Y.item()) == pytest.approx((4, (send[2] + send[3]) / 2))
    assert (arrow.X.item() + arrow.U.item(), arrow.Y.item() + arrow.V.item()) == pytest.approx(
        (8, (recv[2] + recv[3]) / 2)
    )


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
    bars = make_bars(
        story_of(1, *((0, "span", (start, end), {"thread": thread}) for start, end, thread in made))
    )
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
            (
                1,
                "mark",
                (40, -1, -1),
                {
                    "label": word_notice("message_mismatch", f"two sides {'differ ' * 30}."),
                    "status": 2,
                },
            ),
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
    assert [
        segment[0][0] for segment in drawn(ax.collections, "marks")["marks"].get_segments()
    ] == [12, 40]
    assert {"epoch", "message_mismatch"} <= set(words(ax).splitlines()), (
        "a finding by its kind alone"
    )
    assert "mark" in legend(ax)


SECONDS = {"dst": 1, "send_ms": (0, 0, 0), "recv_ms": (0, 0, 0)}


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (story_of(4), "Nothing was recorded on 4 ranks"),
        (pipeline(1), "1 rank, 12.4 ms: 4.8 % of it blocked in communication"),
        (
            story_of(2, (0, "work", (0, 0), {}), (0, "message", (), SECONDS)),
            "2 ranks, 1 message, and no time went by",
        ),
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
        assert (
            ax.get_xlabel()
            == "time since the first event (ms), which came 1 s after the start of the run"
        )
        assert spans(ax, FIRST_SPAN) == [(0, 10)]


def test_many_events_are_merged_and_counted() -> None:
    trace = many_events(60_000)
    bars, ax = make_bars(trace), plot_timeline(trace)
    assert f"merged: {len(bars):,} of {len(bars):,} bars" in words(ax)
    shown = sum(len(group.X) for group in arrows(ax))
    assert 50 < shown <= MOST_ARROWS
    assert f"Arrows: {shown:,} of {len(trace.messages):,} messages" in words(ax)
    assert (
        sum(len(group.get_paths()) for group in drawn(ax.collections, "density-").values())
        < len(bars) / 1.2
    )


def test_many_ranks_share_rows_and_arrows_come_from_the_whole_time() -> None:
    """A row a rank would be finer than a pixel: stripes, and 10 s of textures for 1,000 ranks."""
    trace = many_events(12_000, world_size=600)
    bars, axis, ax = make_bars(trace), looks.TimeAxis.of(trace.events), plot_timeline(trace)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert (names[0], names[-1]) == ("ranks 0–15", "ranks 576–591"), "every second row has its name"
    assert "A row is 16 ranks: the height is the share of their time." in words(ax)
    assert not [
        group for group in ax.collections if isinstance(group, PolyCollection) and group.get_hatch()
    ]
    times = np.concatenate([group.X for group in arrows(ax)])
    assert np.histogram(times, bins=4, range=(0, axis.at(axis.last_ns).item()))[0].min() >= 20
    assert min(abs(group.V).min() for group in arrows(ax)) > 0.9, "from row to row"
    slot_ns = axis.slot_ns * 4
    density = merge_ranks(bars, axis.first_ns, slot_ns, 16, 600)
    for first, ranks in ((0, 16), (592, 8)):
        lasts = (bars.end_ns - bars.start_ns)[(bars.rank >= first) & (bars.rank < first + ranks)]
        assert density.share[density.rank == first].sum() * ranks * slot_ns == pytest.approx(
            lasts.sum()
        )
    assert ((density.top - density.bottom).max(), density.top.max()) <= (1, 1)


def test_rows_of_a_pixel_are_plain_and_leave_no_gap() -> None:
    """Textures, outlines and gaps would beat with the pixels."""
    ax = plot_schedule(make_schedule("gpipe", 300, 1))
    low = [group for group in ax.collections if isinstance(group, PolyCollection)]
    assert low
    assert not any(group.get_hatch() for group in low)
    assert {(top % 1, bottom % 1) for _, _, top, bottom in boxes(ax, "actions-F-0")} == {(0.5, 0.5)}


def test_each_name_of_a_span_has_a_look_and_is_written_where_there_is_room() -> None:
    mark = (0, "mark", (0, -1, -1), {"label": "a mark takes no look", "status": 2})
    ax = plot_timeline(
        story_of(
            1, mark, *((0, f"name {number}", (number, number + 1), {}) for number in range(10))
        )
    )
    assert legend(ax)[:9] == [f"name {number}" for number in range(8)] + [
        "and 2 more names of spans"
    ]
    assert [
        spans(ax, f"boxes-{len(OPERATION_LOOKS) + number}")[0][0] for number in range(10)
    ] == list(range(10))
    ends = (
        (0, 90, {"stage": 2, "microbatch": 3}),
        (90, 98, {"microbatch": 4}),
        (98, 100, {"microbatch": 5}),
    )
    ax = plot_timeline(
        story_of(2, *((0, "compute", (start, end), more) for start, end, more in ends))
    )
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
ROWS = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["span", "mark", "isend", "irecv", "all_reduce"]),
    st.integers(0, 500),
    TIMES,
    TIMES,
)


def random_trace(rows: list[tuple[int, str, int, int, int]]) -> Trace:
    """Any events that a recorder could leave.

    A wait not before the post, an end not before the wait.
    """
    story = Story(4)
    for rank, op, post, wait, done in rows:
        waits = -1 if wait < 0 or op in ("span", "mark") else post + wait
        ends = -1 if done < 0 or op == "mark" else max(post, waits) + done
        more = {} if op in ("span", "mark") else {"peer": 1 - rank % 2, "group": "world", "tag": 0}
        story.op(
            rank, op, (post, waits, ends), status=2 if ends >= 0 or op == "mark" else 1, **more
        )
    return story.trace()


TRACES = st.lists(ROWS, max_size=40).map(random_trace)


@given(TRACES, st.integers(1, 300))
def test_bars_cover_the_time_of_every_event_once_and_merging_keeps_all_of_it(
    trace: Trace, slot: int
) -> None:
    events, bars, slot_ns = trace.events, make_bars(trace), slot * 1_000_000
    assert set(bars.event.tolist()) == set(np.flatnonzero(events.kind != MARK).tolist())
    covered = np.bincount(bars.event, weights=bars.end_ns - bars.start_ns, minlength=len(events))
    end = np.where(events.done_ns < 0, time_range(events)[1], events.done_ns)
    assert (covered == np.where(events.kind == MARK, 0, end - events.post_ns)).all()
    long, density = merge_short(bars, 0, slot_ns)
    lasts = bars.end_ns - bars.start_ns
    assert (long == (lasts >= slot_ns)).all()
    assert density.share.sum() * slot_ns == pytest.approx(lasts[~long].sum())
    for rank, lane, at, look, share in zip(
        density.rank, density.lane, density.slot * slot_ns, density.look, density.share, strict=True
    ):
        same = ~long & (bars.rank == rank) & (bars.lane == lane) & (bars.look == look)
        inside = np.clip(bars.end_ns[same], at, at + slot_ns) - np.clip(
            bars.start_ns[same], at, at + slot_ns
        )
        assert share * slot_ns == pytest.approx(inside.sum())
    short = zip(
        bars.rank[~long],
        bars.lane[~long],
        bars.start_ns[~long] // slot_ns,
        bars.look[~long],
        strict=True,
    )
    assert set(short) <= set(
        zip(density.rank, density.lane, density.slot, density.look, strict=True)
    ), "those of no length, too"
    assert ((density.bottom >= 0) & (density.bottom <= density.top) & (density.top <= 1)).all(), (
        "stacks stay within their lane"
    )


# -- recorded steps, and schedules


def phases(ax: Axes, name: str) -> list[tuple[float, float]]:
    """(from, to) of the brackets of a name, from the top row to the bottom."""
    segments = [
        line
        for group in ax.collections
        if group.get_gid() == f"phase-{name}"
        for line in group.get_segments()
    ]
    return [(line[0][0], line[1][0]) for line in sorted(segments, key=lambda line: line[0][1])]


def curves(ax: Axes, prefix: str) -> dict[str, list[float]]:
    (under,) = ax.child_axes
    return {
        f"{line.get_gid()} {number}": line.get_ydata()
        for number, line in enumerate(under.lines)
        if line.get_gid().startswith(prefix)
    }


def test_boxes_are_to_scale_and_bubbles_fill_the_rest() -> None:
    """As drawn by hand.

    rank 0   F0 F1 .  .  B0 B0 .  B1 B1
    rank 1   .  F0 B0 B0 F1 B1 B1 .  .
    """
    ax = plot_schedule(make_schedule("1f1b", 2, 2))
    assert [
        spans(ax, gid, rank) for gid in ("actions-F-0", "actions-B-0", "bubbles") for rank in (0, 1)
    ] == [
        *([(0, 1), (1, 2)], [(1, 2), (4, 5)]),
        *([(4, 6), (7, 9)], [(2, 4), (5, 7)]),
        *([(2, 4), (6, 7)], [(0, 1), (7, 9)]),
    ]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_recorded_step_and_its_schedule_look_alike(name: str) -> None:
    evaluation = known(name, 4, 8)
    recorded, made = plot_timeline(trace_of(evaluation)), plot_schedule(evaluation)
    for gid in drawn(made.collections, "actions-"):
        assert np.array(spans(recorded, gid)) == pytest.approx(UNIT_MS * np.array(spans(made, gid)))
    assert title(recorded) == title(made)


@pytest.fixture(scope="module")
def usual() -> Any:
    """1F1B on 4 ranks with 8 microbatches: the evaluation, its trace's picture, its own picture."""
    evaluation = known("1f1b", 4, 8)
    return evaluation, plot_timeline(trace_of(evaluation)), plot_schedule(evaluation)


def test_words_say_measured_and_closed_form(usual: Any) -> None:
    _, ax, made = usual
    assert title(ax) == "1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %"
    said = words(ax).splitlines()
    assert "by span 27 % (closed form 27 %), to the work 38 % (38 %); 66 ms" in said
    assert said.count("idle 27 %") == 4
    assert [name for name in said if name in ("warm-up", "steady", "cool-down")] == [
        "warm-up",
        "cool-down",
        "steady",
    ]
    assert legend(ax) == ["forward", "backward", "number: microbatch", "bubble"]
    assert "measured on Example CPU" in words(ax)
    assert "simulated" in words(made)
    assert "by span 0 % (closed form 0 %), to the work 12 % (12 %); 27 units" in words(
        plot_schedule(make_schedule("zb_h2", 4, 8))
    )
    one = plot_schedule(make_schedule("gpipe", 1, 2))
    assert ("bubble" in legend(one), len(curves(one, "live"))) == (False, 1)


def test_every_box_with_room_has_its_number_and_phases_lie_over_their_boxes(usual: Any) -> None:
    ax = usual[2]
    numbers = [text for text in ax.texts if text.get_text().isdigit()]
    assert sorted(text.get_text() for text in numbers) == sorted(
        str(microbatch) for microbatch in range(8) for _ in range(2 * 4)
    )
    for x, y in (text.get_position() for text in numbers):
        assert any(
            box[0] < x < box[1] and box[2] < y < box[3]
            for kind in "FB"
            for box in boxes(ax, f"actions-{kind}-0")
        )
    assert phases(ax, "steady") == [
        pytest.approx(ends, abs=0.1) for ends in [(10, 22), (8, 23), (6, 24), (4, 25)]
    ]
    assert phases(ax, "warm-up")[0] == pytest.approx((0, 10), abs=0.1)
    assert phases(ax, "cool-down")[3] == pytest.approx((25, 27), abs=0.1)
    many = plot_schedule(make_schedule("1f1b", 64, 16))
    assert len(boxes(many, "actions-F-0")) == 64 * 16
    assert not phases(many, "warm-up"), "no room over such low rows"
    assert not [text for text in words(many).splitlines() if text.isdigit()]
    assert len(curves(many, "live")) == 4, "more could not be told apart"
    assert not phases(plot_schedule(make_schedule("gpipe", 4, 8)), "steady")


def test_the_curve_has_the_peaks_and_the_bounds(usual: Any) -> None:
    ax = usual[1]
    assert ax.child_axes[0].get_xlim() == ax.get_xlim()
    assert [max(heights) for heights in curves(ax, "live-").values()] == [4, 3, 2, 1]
    assert sorted(heights[0] for heights in curves(ax, "bound").values()) == [1, 2, 3, 4]
    assert "rank 0: 4 of 4\nrank 1: 3 of 3\nrank 2: 2 of 2\nrank 3: 1 of 1" in words(ax)
    unknown = plot_schedule(
        from_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0", name="mine")
    )
    assert title(unknown) == "mine, 2 ranks, 2 microbatches: bubble 33 %"
    assert not curves(unknown, "bound"), "without a closed form nothing is claimed"
    assert "rank 0: 2\nrank 1: 2" in words(unknown)


def test_stages_of_one_rank_are_told_apart() -> None:
    ax = plot_schedule(make_schedule("interleaved_1f1b", 2, 4))
    first, second = (
        drawn(ax.collections, f"actions-F-{chunk}")[f"actions-F-{chunk}"] for chunk in (0, 1)
    )
    assert second.get_facecolor().sum() > first.get_facecolor().sum(), "paler"
    assert len(boxes(ax, "actions-F-0")) == len(boxes(ax, "actions-F-1")) == 2 * 4
    assert "paler: later stage of the rank" in legend(ax)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rank 0\nstages 0, 2",
        "rank 1\nstages 1, 3",
    ]


def test_messages_are_thin_bars_under_the_boxes_of_their_own_step() -> None:
    evaluation = evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1))
    ax = plot_schedule(evaluation)
    assert "message on its way" in legend(ax)
    assert spans(ax, "messages-1") == spans(ax, "messages-2"), "sends, and recvs under them"
    assert len(spans(ax, "messages-1")) == 4
    heights = [
        max(boxes(ax, gid, 0), key=lambda box: box[3])[2:]
        for gid in ("actions-F-0", "messages-1", "messages-2")
    ]
    assert all(above[1] < below[0] for above, below in pairwise(heights))
    assert "message on its way" not in legend(plot_schedule(make_schedule("dualpipe_v", 2, 4)))


def test_the_last_step_is_drawn_unless_another_is_asked_for() -> None:
    trace = trace_of(known("gpipe", 2, 2), evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1)))
    for step, name in ((0, "GPipe"), (1, "1F1B"), (None, "1F1B")):
        ax = plot_timeline(trace, step=step)
        assert title(ax).startswith(f"{name}, 2 ranks, 2 microbatches")
        bars = [span for gid in drawn(ax.collections, "boxes-") for span in spans(ax, gid)]
        assert len(bars) == (0 if step == 0 else 2 * 4), "the messages of the step alone"
        assert all(ax.get_xlim()[0] <= start < end <= ax.get_xlim()[1] for start, end in bars)
    assert "transfer" in legend(ax)
    assert "step 1 of 2, 18 ms\n" in words(plot_timeline(trace, step=0))
    with pytest.raises(ArgumentError, match="step must be from 0 to 1"):
        plot_timeline(trace, step=2)


def test_a_step_is_shown_where_there_is_one_and_nothing_is_stuck() -> None:
    assert not shows_step(pipeline())
    assert not plot_timeline(pipeline()).child_axes
    with pytest.raises(ArgumentError, match="trace must have a step of a pipeline"):
        plot_timeline(pipeline(), step=0)
    story = Story(2)
    add_step(story, known("1f1b", 2, 2), 1.0, (0, 1), "1f1b")
    trace = story.trace()
    assert shows_step(trace)
    assert timeline_picture(trace).height == step_picture(picture_step(trace)).height
    assert "pipeline      1 step" in trace._repr_mimebundle_()[0]["text/plain"]
    assert not plot_timeline(trace, ax=plt.figure().add_subplot()).child_axes, (
        "no curve on axes of one's own"
    )
    story.op(0, "recv", (30, 30, -1), peer=1, group="world", tag=0, size_bytes=8)
    assert title(plot_timeline(story.trace())) == "Stuck: 1 operation never finished"


def test_a_picture_says_that_ranks_shared_their_cores() -> None:
    """The example machine has 2 cores."""
    four = trace_of(known("1f1b", 4, 4))
    hosts = [
        {"ranks": [{"rank": rank, "host": f"node{rank % several}"} for rank in range(4)]}
        for several in (1, 2)
    ]
    for about, is_said in (
        ({}, True),
        (hosts[0], True),
        (hosts[1], False),
        ({"comm_device": "gpu"}, False),
    ):
        said = words(plot_timeline(Trace(four.events, four.metadata | about)))
        assert (
            (
                "4 ranks shared 2 cores: what had to wait for a core is drawn as computing, or "
                "makes others wait."
            )
            in said
        ) is is_said
    assert "shared" not in words(plot_timeline(trace_of(known("1f1b", 2, 2))))


def test_hosts_are_named_and_links_between_them_marked() -> None:
    """Two hosts of two ranks.

    The second one's clock is 5 s ahead, and only what the clocks showed says so.
    """
    story = Story(4)
    for src, dst in ((0, 1), (1, 2), (2, 3), (3, 0)):
        story.op(src, "isend", (1, 2, 3), peer=dst, group="world", tag=0, size_bytes=8)
        story.op(dst, "irecv", (1, 2, 3), peer=src, group="world", tag=0, size_bytes=8)
    events = story.trace().events
    hosts = {
        "world_size": 4,
        "ranks": [{"rank": rank, "host": f"node{rank // 2}"} for rank in range(4)],
    }
    clocks = [
        {"ranks": [0, 1], "how": "reference", "samples": [[0, 0, 0]]},
        {"ranks": [2, 3], "how": "store", "samples": [[0, -5 * 10**9, 9]]},
    ]
    trace = Trace(events, hosts | {"clocks": clocks})
    ax = plot_timeline(trace)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "node0  rank 0",
        "rank 1",
        "node1  rank 2",
        "rank 3",
    ]
    arrows = {
        one.get_gid(): len(one.U)
        for one in ax.collections
        if str(one.get_gid()).startswith("arrows")
    }
    assert arrows == {"arrows": 2, "arrows-across": 2}
    assert "from host to host" in legend(ax)
    shown = plot_timeline(trace, align=False)
    assert [one.get_xlim()[1] > 5 for one in (ax, shown)] == [False, True]
    assert "arrows-across" not in [
        one.get_gid() for one in plot_timeline(Trace(events, {"world_size": 4})).collections
    ]


# -- simulated schedules


def simulate(**given: Any) -> ScheduleRun:
    settings = {
        "num_ranks": 3,
        "num_microbatches": 4,
        "link": Link(alpha_s=1e-3, beta_s_per_byte=1e-6),
        "size_bytes": 1000,
        **given,
    }
    return simulate_schedule("gpipe", Costs(1e-3, 0.5e-3, 0.5e-3), **settings)


def test_critical_path_lies_where_its_hops_are() -> None:
    run = simulate(size_bytes=2000, semantics="buffered")  # 30 ms, of which a rank computes for 8
    ax = run.plot()
    assert title(ax) == "GPipe, 3 ranks, 4 microbatches: bubble 73 %, closed form 33 %"
    lines = {
        gid: lines.get_segments()
        for gid, lines in drawn(ax.collections, "critical-path-").items()
        if "halo" not in gid
    }
    found = [
        (x0, round(y0), x1, round(y1), gid[14:])
        for gid, some in lines.items()
        for (x0, y0), (x1, y1) in some
    ]
    expected = []
    for hop, after in zip(run.critical_path.hops, [*run.critical_path.hops[1:], None], strict=True):
        begins = hop.rank if hop.source < 0 else hop.source
        ends = (
            hop.source if hop.source >= 0 and after is not None and after.source >= 0 else hop.rank
        )
        reason = "program-order" if hop.reason == "start" else hop.reason.replace(" ", "-")
        expected.append(
            (pytest.approx(hop.start * 1e3), begins, pytest.approx(hop.end * 1e3), ends, reason)
        )
    assert sorted(found) == sorted(expected, key=lambda one: (one[0].expected, one[1]))
    counts = run.critical_path.by_reason
    assert {
        f"critical path: {reason}, {counts[reason]} times" for reason in ("data", "link busy")
    } <= set(legend(ax))


def test_picture_says_what_was_put_in() -> None:
    put_in = (
        "Simulated with: forward 1 ms; backward 1 ms; messages of 1,000 B: on the link 1 ms, "
        "latency 1 ms."
    )
    assert put_in in words(simulate().plot())
    run = simulate_schedule(
        "zb_h1", Costs([1, 2, 1.5], 0.5, 0.25, latency=0.125), num_ranks=3, num_microbatches=4
    )
    said = (
        "forward 1 to 2; backward: input's gradient 0.5; backward: weights' gradients 0.25; "
        "messages 0.125"
    )
    assert f"Simulated with: {said}." in words(run.plot())
    ax = simulate_schedule("1f1b", num_ranks=3, num_microbatches=4).plot()
    assert "message on its way" not in legend(ax), "messages that take no time have no lane"
    assert (ax.get_xlabel(), ax.child_axes[0].get_xlabel()) == ("", "time (units)")
    no_time = simulate_schedule("1f1b", Costs(0, 0, 0), num_ranks=2, num_microbatches=2).plot()
    assert title(no_time) == "1F1B, 2 ranks, 2 microbatches: bubble 0 %"


def test_map_adds_up() -> None:
    run = simulate_schedule("zb_v", Costs(3, 2, 1), num_ranks=6, num_microbatches=12)
    shares = measure_shares(run, rows=6, columns=37)
    assert 0 <= shares.min() <= shares.sum(axis=-1).max() <= 1 + 1e-9
    assert (shares.sum(axis=-1).mean(axis=1) * run.makespan).tolist() == pytest.approx(
        run.busy.tolist()
    )
    assert np.allclose(measure_shares(run, rows=3, columns=37), (shares[::2] + shares[1::2]) / 2)


def test_large_schedules_are_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BOXES", 20)
    ax = simulate(num_ranks=4, num_microbatches=8, semantics="buffered").plot()
    picture = ax.images[0].get_array()
    assert picture.shape == (4, 960, 3)
    assert tuple(picture[0, 5]) == pytest.approx(to_rgb(ACTION_LOOKS["F"].colour)), (
        "rank 0 goes forward first"
    )
    assert tuple(picture[3, 5]) == pytest.approx((1, 1, 1)), "rank 3 waits"
    assert title(ax) == "GPipe, 4 ranks, 8 microbatches: bubble 53 %"  # 16 of 34 ms
    assert legend(ax)[:3] == ["forward", "backward", "bubble"]


# -- predictions


def recorded(*scales: float) -> Trace:
    """Recorded 1F1B steps, one for each scale of time, their computations alone."""
    trace = trace_of(
        *[
            evaluate(make_schedule("1f1b", 3, 4), Costs(forward=scale, backward=2 * scale))
            for scale in scales
        ]
    )
    return Trace(trace.events.select(trace.events.kind == SPAN), trace.metadata)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    virtual = recorded(1.0, 0.9, 1.0)
    return compare(
        recorded(1.1, 1.0, 0.97), Trace(virtual.events, virtual.metadata | {"source": "simulated"})
    )


def predicted(ax: Axes) -> list[int]:
    """How many boxes there are of each look."""
    return [len(boxes(ax, f"predicted-{number}")) for number in range(len(BOUNDS) + 1)]


def test_colours_say_how_far_off_each_end_is(comparison: Comparison) -> None:
    ends = np.array(
        [
            end
            for rank in range(3)
            for _, _, end in evaluate(make_schedule("1f1b", 3, 4)).get_computations(rank)
        ],
        dtype=float,
    )
    for step, (real, virtual) in enumerate(((1.1, 1.0), (1.0, 0.9), (0.97, 1.0))):
        off = ends * (virtual / real - 1) / ends.max()
        wanted = np.histogram(off, [-np.inf, *BOUNDS, np.inf])[0].tolist()
        assert sum(wanted) == 24
        assert predicted(comparison.plot(step=step)) == wanted


def test_words_say_the_error_of_the_step_and_of_all(comparison: Comparison) -> None:
    ax = plot_overlay(comparison)
    assert title(ax) == "Predicted 32.4 ms, measured 36 ms: 10.0 % too short", "the median is drawn"
    assert (
        "1F1B, 3 ranks; step 2 of 3: all of them off by 7.4 % on average, 10.0 % at most"
        in words(ax)
    )
    assert [float(np.asarray(line.get_xdata())[0]) for line in ax.lines[-2:]] == pytest.approx(
        [36, 32.4]
    )
    alt = comparison._repr_mimebundle_()[1]["image/png"]["alt"]
    assert alt.startswith("A measured run and its prediction; median step: measured ")


def test_a_run_without_steps_is_drawn_by_its_spans_else_by_its_waits(
    comparison: Comparison,
) -> None:
    def run(end_ms: float) -> Trace:
        story = Story(1)
        story.span(0, "work", 0, end_ms)
        return story.trace()

    ax = plot_overlay(compare(run(2.0), run(2.04)))
    assert title(ax) == "Second 2.04 ms, first 2 ms: 2.0 % longer"
    assert predicted(ax) == [0, 0, 0, 1, 0]
    story = Story(2)
    story.message(0, 1, (1, 1, 2), (1, 1, 2))
    assert predicted(plot_overlay(compare(story.trace(), story.trace()))) == [0, 0, 2, 0, 0]
    story = Story(2)
    story.message(0, 1, (1, -1, 2), (1, -1, 2))
    with pytest.raises(ArgumentError, match="must have spans or waits to be drawn"):
        plot_overlay(compare(story.trace(), story.trace()))
    with pytest.raises(ArgumentError, match="step must be from 0 to 2, got 3"):
        plot_overlay(comparison, step=3)
