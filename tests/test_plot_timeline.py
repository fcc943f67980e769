"""The timeline's picture: rows, bars to scale, arrows, and a level of detail that adds up instead of leaving out."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from synthetic import Story, many_events, pipeline

from ringsim.plot import layout as kinds
from ringsim.plot.layout import MOST_ARROWS, OPERATION_LOOKS, choose_messages, make_bars, merge_short, time_range
from ringsim.plot.timeline import plot_timeline, trace_png
from ringsim.traces.events import MARK, OP_CODES, make_events, word_notice
from ringsim.traces.value import Trace


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def boxes(ax: Axes, look: int) -> list[tuple[float, float, float, float]]:
    """(left, right, top, bottom) of the bars to scale of one look; y grows downwards."""
    corners = [path.vertices for group in ax.collections if group.get_gid() == f"boxes-{look}" for path in group.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), c[:4, 1].min(), c[:4, 1].max()) for c in corners]


def quivers(ax: Axes) -> list[Any]:
    return [group for group in ax.collections if (group.get_gid() or "").startswith("arrows")]


def words(ax: Axes) -> str:
    return "\n".join(text.get_text() for text in ax.texts)


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def one_message() -> Trace:
    """Rank 1 waits from 1 ms on; the send comes at 4 ms, its own wait at 5 ms; both are done by 7 and 8 ms.

    rank 0   | compute |  ====     span 0-4, send: posted 4, waits 5, done 7
    rank 1    .///////=====        recv: posted 0, waits 1, late sender until 4, transfer until 8
    """
    story = Story(2)
    story.span(0, "compute", 0, 4, microbatch=3)
    story.message(0, 1, (4, 5, 7), (0, 1, 8))
    return story.trace()


def test_bars_are_to_scale_and_waits_are_split() -> None:
    ax = plot_timeline(one_message())
    assert [box[:2] for box in boxes(ax, len(OPERATION_LOOKS))] == [(0, 4)]
    assert sorted(box[:2] for box in boxes(ax, kinds.POSTED)) == [(0, 1), (4, 5)]
    assert [box[:2] for box in boxes(ax, kinds.LATE_SENDER)] == [(1, 4)]
    assert sorted(box[:2] for box in boxes(ax, kinds.TRANSFER)) == [(4, 8), (5, 7)]
    assert not boxes(ax, kinds.LATE_RECEIVER)
    assert ax.get_xlabel() == "time since the start of the run (ms)"


def test_a_late_receiver_is_the_senders_wait() -> None:
    story = Story(2)
    story.message(0, 1, (0, 1, 9), (6, 6, 9))
    ax = plot_timeline(story.trace())
    assert [box[:2] for box in boxes(ax, kinds.LATE_RECEIVER)] == [(1, 6)]
    assert "blocked: late receiver" in legend(ax)
    assert "blocked: late sender" not in legend(ax)


def test_rank_zero_is_on_top_and_lanes_do_not_meet() -> None:
    ax = plot_timeline(one_message())
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels() if label.get_text()] == ["rank 0", "rank 1"]
    (_, _, span_top, span_bottom) = boxes(ax, len(OPERATION_LOOKS))[0]
    by_row = sorted(boxes(ax, kinds.TRANSFER), key=lambda box: box[2])
    assert -0.5 < span_top < span_bottom < by_row[0][2] < by_row[0][3] < 0.5 < by_row[1][2] < by_row[1][3] < 1.5


def test_the_arrow_leads_from_where_the_send_was_posted_to_where_the_recv_was_done() -> None:
    ax = plot_timeline(one_message())
    (arrows,) = quivers(ax)
    send, recv = sorted(boxes(ax, kinds.TRANSFER), key=lambda box: box[2])
    assert (arrows.X.item(), arrows.Y.item()) == pytest.approx((4, (send[2] + send[3]) / 2))
    assert (arrows.X.item() + arrows.U.item(), arrows.Y.item() + arrows.V.item()) == pytest.approx((8, (recv[2] + recv[3]) / 2))


def test_nested_spans_lie_below_each_other() -> None:
    story = Story(1)
    for name, start, end in (("outer", 0, 10), ("first", 1, 4), ("second", 4, 9), ("inner", 5, 6)):
        story.span(0, name, start, end)
    bars = make_bars(story.trace())
    assert bars.depths == 3
    assert bars.lane.tolist() == [0, 1, 1, 2]
    ax = plot_timeline(story.trace())
    tops = [boxes(ax, len(OPERATION_LOOKS) + number)[0][2] for number in range(4)]
    assert tops[0] < tops[1] == tops[2] < tops[3]


def test_spans_of_two_threads_do_not_cover_each_other() -> None:
    story = Story(1)
    story.span(0, "main", 0, 10, thread=0)
    story.span(0, "other", 2, 12, thread=1)
    assert make_bars(story.trace()).lane.tolist() == [0, 1]


def test_a_thousand_spans_at_one_moment_are_not_a_thousand_deep() -> None:
    story = Story(1)
    for _ in range(1000):
        story.span(0, "free", 5, 5)
    assert make_bars(story.trace()).depths == 1


def test_names_are_written_where_there_is_room() -> None:
    story = Story(1)
    story.span(0, "compute", 0, 90, stage=2, microbatch=3)
    story.span(0, "compute", 90, 98, microbatch=4)
    story.span(0, "compute", 98, 100, microbatch=5)
    texts = words(plot_timeline(story.trace())).splitlines()
    assert "compute, stage 2, microbatch 3" in texts
    assert "compute 4" in texts
    assert "5" in texts


def test_what_never_finished_is_open_ended_and_leads_the_title() -> None:
    story = Story(2)
    story.op(0, "send", (1, 1, -1), peer=1, group="ring:0>1", size_bytes=8)
    story.op(1, "irecv", (0, -1, -1), peer=0, group="ring:0>1", size_bytes=8)
    story.span(1, "compute", 0, -1)
    story.op(1, "mark", (10, -1, -1), label="given up", status=2)
    ax = plot_timeline(story.trace())
    assert [box[:2] for box in boxes(ax, kinds.UNFINISHED)] == [(1, 10)]
    assert [box[:2] for box in boxes(ax, kinds.UNWAITED)] == [(0, 10)]
    ends = next(group for group in ax.collections if group.get_gid() == "open-ends")
    assert len(ends.get_offsets()) == 3
    assert ax.get_title(loc="left") == "Stuck: 1 operation never finished"
    assert "first: rank 0 in send to rank 1" in words(ax)
    assert "1 message never arrived: no arrow." in words(ax)
    assert not quivers(ax)


def test_collectives_marks_and_failures_have_a_style_and_a_word_of_their_own() -> None:
    story = Story(2)
    story.op(0, "all_reduce", (0, 1, 4), group="world", size_bytes=64)
    story.op(0, "mark", (2, -1, -1), label="epoch", status=2)
    story.op(1, "irecv", (0, 1, 3), peer=0, group="world", size_bytes=8, status=3)
    ax = plot_timeline(story.trace())
    assert [box[:2] for box in boxes(ax, kinds.COLLECTIVE_BLOCKED)] == [(1, 4)]
    assert [box[:2] for box in boxes(ax, kinds.FAILED)] == [(1, 3)]
    assert "epoch" in words(ax)
    assert {"collective", "failed", "mark"} <= set(legend(ax))
    assert "transfer" not in legend(ax)
    ticks = next(group for group in ax.collections if group.get_gid() == "marks")
    assert [segment[0][0] for segment in ticks.get_segments()] == [2]


def test_what_was_found_wrong_is_drawn_by_its_kind_alone() -> None:
    story = Story(2)
    story.op(0, "mark", (2, -1, -1), label=word_notice("message_mismatch", f"two sides {'differ ' * 30}."), status=2)
    story.span(1, "long", 0, 500)
    assert "message_mismatch" in words(plot_timeline(story.trace()))


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (lambda: Story(4).trace(), "Nothing was recorded on 4 ranks"),
        (lambda: Story(1).trace(), "Nothing was recorded on 1 rank"),
        (lambda: pipeline(1), "1 rank, 12.4 ms: 4.8 % of it blocked in communication"),
        (lambda: nothing_takes_time(), "2 ranks, 3 messages, and no time went by"),
        (lambda: a_week(), "2 ranks, 604,800 s: under 0.1 % of it blocked in communication"),
        (lambda: pipeline(65, 2), None),
    ],
)
def test_every_kind_of_trace_can_be_drawn(make: Any, title: str | None) -> None:
    ax = plot_timeline(make())
    ax.figure.canvas.draw()
    assert title is None or ax.get_title(loc="left") == title
    assert "(" in ax.get_xlabel()  # the unit
    assert any(text.get_text().startswith("measured on Example CPU, 2 cores") for text in ax.texts)


def nothing_takes_time() -> Trace:
    story = Story(2)
    for _ in range(3):
        story.span(0, "free", 0, 0)
        story.message(0, 1, (0, 0, 0), (0, 0, 0))
    return story.trace()


def a_week() -> Trace:
    story = Story(2)
    story.span(0, "long", 0, 7 * 24 * 3600 * 1000)
    story.message(0, 1, (1, 1, 2), (1, 1, 2))
    return story.trace()


def test_a_late_start_moves_the_axis_and_says_so() -> None:
    story = Story(1)
    story.span(0, "compute", 1000, 1010)
    ax = plot_timeline(story.trace())
    assert ax.get_xlabel() == "time since the first event (ms), which came 1 s after the start of the run"
    assert [box[:2] for box in boxes(ax, len(OPERATION_LOOKS))] == [(0, 10)]


def test_a_hundred_thousand_events_are_merged_and_counted() -> None:
    trace = many_events()
    bars = make_bars(trace)
    ax = plot_timeline(trace)
    assert f"merged: {len(bars):,} of {len(bars):,} bars" in words(ax)
    arrows = sum(len(group.X) for group in quivers(ax))
    assert 50 < arrows <= MOST_ARROWS
    assert f"Arrows: {arrows:,} of {len(trace.messages):,} messages" in words(ax)
    merged = [group for group in ax.collections if (group.get_gid() or "").startswith("density-")]
    assert sum(len(group.get_paths()) for group in merged) < len(bars) / 1.5


def test_each_name_of_a_span_has_a_look_and_the_legend_says_which() -> None:
    story = Story(1)
    story.op(0, "mark", (0, -1, -1), label="a mark takes no look", status=2)
    for number in range(10):
        story.span(0, f"name {number}", number, number + 1)
    ax = plot_timeline(story.trace())
    assert legend(ax)[:9] == [f"name {number}" for number in range(8)] + ["and 2 more names of spans"]
    assert [boxes(ax, len(OPERATION_LOOKS) + number)[0][0] for number in range(10)] == list(range(10))


def test_few_enough_arrows_are_all_drawn() -> None:
    trace = pipeline(4)
    ax = plot_timeline(trace)
    assert sum(len(group.X) for group in quivers(ax)) == len(trace.messages)
    assert "Arrows:" not in words(ax)


@pytest.mark.parametrize("most", [1, 10, 160])
def test_chosen_arrows_are_spread_over_time(most: int) -> None:
    trace = many_events(6000)
    first, last = time_range(trace.events)
    chosen = choose_messages(trace, most)
    assert 0 < len(chosen) <= most
    assert len(np.unique(chosen)) == len(chosen)
    if most == 160:
        times = trace.events.post_ns[trace.messages.send[chosen]]
        assert np.histogram(times, bins=5, range=(first, last))[0].min() >= 16


TIMES = st.integers(-1, 1000)
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["span", "mark", "isend", "irecv", "all_reduce"]), st.integers(0, 500), TIMES, TIMES),
    max_size=40,
)


def random_trace(rows: list[tuple[int, str, int, int, int]]) -> Trace:
    """Any events that a recorder could leave: a wait not before the post, an end not before the wait."""
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    waits = [-1 if wait < 0 or op in ("span", "mark") else post + wait for _, op, post, wait, _ in rows]
    dones = [-1 if done < 0 or op == "mark" else max(post, wait) + done for (_, op, post, _, done), wait in zip(rows, waits, strict=True)]
    columns = {
        "rank": [row[0] for row in rows],
        "op": [OP_CODES[row[1]] for row in rows],
        "peer": [1 - row[0] % 2 for row in rows],
        "group": [0] * len(rows),
        "tag": [0] * len(rows),
        "post_ns": [row[2] for row in rows],
        "wait_ns": waits,
        "done_ns": dones,
        "status": [2 if done >= 0 or row[1] == "mark" else 1 for row, done in zip(rows, dones, strict=True)],
    }
    return Trace(make_events(columns), {"world_size": 4})


@given(EVENTS)
def test_every_event_but_a_mark_has_bars_that_cover_its_time_once(rows: list[Any]) -> None:
    trace = random_trace(rows)
    events, bars = trace.events, make_bars(trace)
    assert set(bars.event.tolist()) == set(np.flatnonzero(events.kind != MARK).tolist())
    _, last = time_range(events)
    assert (bars.end_ns >= bars.start_ns).all()
    covered = np.bincount(bars.event, weights=bars.end_ns - bars.start_ns, minlength=len(events))
    end = np.where(events.done_ns < 0, last, events.done_ns)
    expected = np.where(events.kind == MARK, 0, end - events.post_ns)
    assert covered.tolist() == expected.tolist()


@given(EVENTS, st.integers(1, 300))
def test_merging_keeps_every_bar_and_all_of_its_time(rows: list[Any], slot_ns: int) -> None:
    bars = make_bars(random_trace(rows))
    long, density = merge_short(bars, 0, slot_ns)
    short = ~long
    assert (bars.end_ns - bars.start_ns >= slot_ns).tolist() == long.tolist()
    for look in np.unique(bars.look):
        same = short & (bars.look == look)
        assert density.count[density.look == look].sum() == same.sum()
        assert density.share[density.look == look].sum() * slot_ns == pytest.approx((bars.end_ns - bars.start_ns)[same].sum())
    assert ((density.bottom >= 0) & (density.bottom <= density.top) & (density.top <= 1)).all()
    assert (density.top - density.bottom > 0).all()  # whatever is there can be seen


@settings(max_examples=10)
@given(EVENTS)
def test_whatever_was_recorded_can_be_drawn(rows: list[Any]) -> None:
    ax = plot_timeline(random_trace(rows))
    ax.figure.canvas.draw()
    plt.close(ax.figure)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_no_words_are_cut_off(world_size: int) -> None:
    ax = plot_timeline(pipeline(world_size))
    ax.figure.canvas.draw()
    for text in [*ax.texts, *ax.get_legend().get_texts(), ax.title, ax.xaxis.label, *ax.get_yticklabels()]:
        if text.get_text() and text.get_visible():
            box, canvas = text.get_window_extent(), ax.figure.bbox
            assert canvas.x0 <= box.x0, text
            assert box.x1 <= canvas.x1, text
            assert canvas.y0 <= box.y0, text
            assert box.y1 <= canvas.y1, text


def test_it_draws_on_axes_that_it_is_given_and_leaves_the_users_settings_alone() -> None:
    with mpl.rc_context({"font.size": 23.0, "axes.facecolor": "red"}):
        _, ax = plt.subplots()
        assert plot_timeline(pipeline(2), ax=ax) is ax
        assert mpl.rcParams["font.size"] == 23.0
        assert mpl.rcParams["axes.facecolor"] == "red"
    assert len(plt.get_fignums()) == 1


def test_the_shares_in_the_words_are_those_of_the_trace() -> None:
    ax = plot_timeline(one_message())
    # 2 ranks x 8 ms; blocked 2 ms on rank 0 and 7 ms on rank 1, of which 3 ms were a late sender's
    assert ax.get_title(loc="left") == "2 ranks, 8 ms: 56 % of it blocked in communication"
    assert "transfers 38 %, late senders 19 %; rank 1 waited longest, 3 ms" in words(ax)


def test_a_notebook_shows_no_empty_timeline() -> None:
    def width(trace: Trace) -> int:
        return int.from_bytes(trace_png(trace)[16:20], "big")  # of the PNG's header

    nothing = Trace(make_events({"rank": [], "op": []}), {"world_size": 3})
    mark = Trace(make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5], "done_ns": [5]}), {"world_size": 3})
    assert width(nothing) < width(mark) / 1.5
