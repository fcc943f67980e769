"""Tests of timelines, and of recorded, simulated and predicted pipeline steps."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from pictures import bars, boxes, drawn, legend, spans, title, words
from synthetic import UNIT_MS, Story, add_step, known, many_events, pipeline, trace_of

import ringsim
from ringsim import Link, Trace, compare, simulate_schedule
from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.pipeline import Costs, evaluate, from_text, make_schedule, plot_schedule


def rows(ax: Axes) -> list[str]:
    ax.figure.canvas.draw()
    return [label.get_text() for label in ax.get_yticklabels() if label.get_text()]


def arrows(ax: Axes) -> list[Any]:
    return list(drawn(ax.collections, "arrows").values())


def one_rank(*made: tuple[str, float, float, dict[str, int]]) -> Trace:
    story = Story(1)
    for name, start, end, more in made:
        story.span(0, name, start, end, **more)
    return story.trace()


def test_bars_are_to_scale_and_lie_in_their_lanes() -> None:
    """Rank 1 waits from 1 ms on; the send comes at 4 ms, and takes 3 ms.

    rank 0   | forward |  ===      span 0-4, send: posted 4, waits 5, done 7
    rank 1    .///////===          recv: posted 0, waits 1, late sender until 4, transfer until 7
    """

    def worker() -> None:
        number = torch.zeros(1024)
        if dist.get_rank() == 0:
            with ringsim.span("forward", microbatch=3):
                ringsim.compute(0.004)
            work = dist.isend(number, 1)
        else:
            work = dist.irecv(number, 0)
        ringsim.compute(0.001)
        work.wait()

    link = Link(alpha_s=0.003, beta_s_per_byte=0.0)
    ax = ringsim.simulate(worker, world_size=2, link=link).plot_timeline()
    found = bars(ax)
    assert found["forward"] == [(0, 4)]
    assert found["posted, not waited for yet"] == [(0, 1), (4, 5)]
    assert found["blocked: late sender"] == [(1, 4)]
    assert found["transfer"] == [(4, 7), (5, 7)]
    assert ax.get_xlabel() == "time since the start of the run (ms)"
    # 2 ranks x 7 ms; blocked 2 ms on rank 0 and 6 ms on rank 1, of which 3 ms were a late sender's
    assert title(ax) == "2 ranks, 7 ms: 57 % of it blocked in communication"
    assert "transfers 36 %, late senders 21 %; rank 1 waited longest, 3 ms" in words(ax)
    assert rows(ax) == ["rank 0", "rank 1"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"
    inner = max(box[2:] for box in boxes(ax) if box[:2] == (0, 4))
    send, recv = sorted(
        (box for box in boxes(ax) if box[0] >= 4 and box[1] == 7), key=lambda box: box[2]
    )
    assert -0.5 < inner[0] < inner[1] < send[2] < send[3] < 0.5 < recv[2] < recv[3] < 1.5
    (arrow,) = arrows(ax)  # from the post of the send to the end of the recv
    begin = arrow.X.item(), arrow.Y.item()
    assert begin == pytest.approx((4, (send[2] + send[3]) / 2))
    assert (begin[0] + arrow.U.item(), begin[1] + arrow.V.item()) == pytest.approx(
        (7, (recv[2] + recv[3]) / 2)
    )


def test_spans_lie_below_each_other() -> None:
    nested = [(0, 10, 0), (1, 4, 0), (4, 9, 0), (5, 6, 0)]
    threads = [(20, 30, 0), (22, 32, 1)]
    spans = [*nested, *threads]
    trace = one_rank(*(("span", *between, {"thread": thread}) for *between, thread in spans))
    found = {box[:2]: box[2] for box in boxes(trace.plot_timeline())}
    tops = [found[float(start), float(end)] for start, end, _ in spans]
    lanes = [sorted(set(tops)).index(top) for top in tops]
    assert (lanes[:4], lanes[5] > lanes[4]) == ([0, 1, 1, 2], True)


def test_every_fate_of_an_operation_has_a_look_and_a_word_of_its_own() -> None:
    story = Story(2)
    to_1, from_0 = ({"peer": peer, "group": "ring:0>1", "size_bytes": 8} for peer in (1, 0))
    story.message(0, 1, (20, 21, 29), (26, 26, 29))
    story.op(0, "all_reduce", (10, 11, 14), group="world", size_bytes=64)
    story.op(1, "irecv", (10, 11, 13), **from_0, tag=1, status=3)
    story.op(0, "send", (31, 31, -1), **to_1, tag=2)
    story.op(1, "irecv", (30, -1, -1), **from_0, tag=2)
    story.span(1, "compute", 30, -1)
    story.op(0, "mark", (12, -1, -1), label="epoch", status=2)
    story.op(1, "mark", (40, -1, -1), label="the end", status=2)
    story.span(0, "work", 0, 1)
    ax = story.trace().plot_timeline()
    for word, span in {
        "blocked: late receiver": (21, 26), "collective": (11, 14), "failed": (11, 13),
        "never finished": (31, 40), "never waited for": (30, 40), "compute": (30, 40),
    }.items():  # fmt: skip
        assert bars(ax)[word] == [span]
    assert "blocked: late sender" not in legend(ax)
    assert len(drawn(ax.collections, "open-ends")["open-ends"].get_offsets()) == 3
    assert title(ax) == "Stuck: 1 operation never finished"
    said = {"first: rank 0 in send to rank 1", "No arrow: 1 message never arrived."}
    assert said | {"epoch", "the end"} <= set(words(ax).splitlines())
    assert sum(len(group.X) for group in arrows(ax)) == 1
    ticks = drawn(ax.collections, "marks")["marks"].get_segments()
    assert [segment[0][0] for segment in ticks] == [12, 40]


def test_a_finding_is_marked_by_its_kind_alone() -> None:
    """A mark shows only the kind of a finding, because the sentence is too long."""

    def worker() -> None:
        number = torch.zeros(2 + dist.get_rank())
        (dist.recv if dist.get_rank() else dist.send)(number, 1 - dist.get_rank())

    with pytest.raises(ringsim.errors.MessageMismatch) as caught:
        ringsim.simulate(worker, world_size=2, link=Link(1e-6, 1e-9))
    assert "message_mismatch" in words(caught.value.trace.plot_timeline()).splitlines()


WEEK_MS = 7 * 24 * 3600 * 1000


def instant(work_ms: float) -> Trace:
    story = Story(2)
    story.span(0, "work", 0, work_ms)
    story.message(0, 1, (0, 0, 0), (0, 0, 0))
    return story.trace()


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (Story(4).trace(), "Nothing was recorded on 4 ranks"),
        (instant(0), "2 ranks, 1 message, and no time passed"),
        (instant(WEEK_MS), "2 ranks, 604,800 s: 0 % of it blocked in communication"),
        (one_rank(("work", 1000, 1010, {})), "1 rank ran for 10 ms without a message"),
    ],
)
def test_every_kind_of_trace_can_be_drawn(trace: Trace, said: str) -> None:
    ax = trace.plot_timeline()
    ax.figure.canvas.draw()
    assert title(ax) == said
    assert "(" in ax.get_xlabel(), "the label must have a unit"
    assert "measured on Example CPU, 2 cores" in words(ax)
    if "ran for" in said:  # a late start moves the axis, and a note reports this
        assert ax.get_xlabel() == "time since the first event (ms)"
        assert "The first event came 1 s after the start of the run." in words(ax)
        assert bars(ax)["work"] == [(0, 10)]


def test_many_events_are_merged_and_counted_and_their_arrows_come_from_all_pairs() -> None:
    ax = many_events(60_000).plot_timeline()
    merged, every = re.findall(r"are merged \(([\d,]+) of ([\d,]+)\)", words(ax))[0]
    assert merged == every, "all bars shorter than a pixel must be merged"
    shown = sum(len(group.get_paths()) for group in drawn(ax.collections, "density-").values())
    assert 60_000 <= int(every.replace(",", "")) > 1.2 * shown
    assert "Arrows show 160 of 20,000 messages" in words(ax)
    begins = np.concatenate([np.stack([group.X, group.Y]) for group in arrows(ax)], axis=1)
    assert begins.shape == (2, 160)
    assert len(np.unique(begins[1])) == 8, "every sender must have an arrow"
    assert np.histogram(begins[0], bins=5)[0].min() >= 16


def test_many_ranks_share_plain_rows_and_arrows_connect_different_rows() -> None:
    """One row per rank would be lower than a pixel, and take 10 s for 1,000 ranks."""
    ax = many_events(12_000, world_size=600).plot_timeline()
    # every second row is named
    assert (rows(ax)[0], rows(ax)[-1]) == ("ranks 0–15", "ranks 576–591")
    assert "Each row combines 16 ranks" in words(ax)
    bars_of_rows = [group for group in ax.collections if isinstance(group, PolyCollection)]
    assert not any(group.get_hatch() for group in bars_of_rows)
    times = np.concatenate([group.X for group in arrows(ax)])
    assert np.histogram(times, bins=4)[0].min() >= 20
    assert min(abs(group.V).min() for group in arrows(ax)) > 0.9


def test_each_name_of_a_span_has_a_look_and_is_written_where_there_is_room() -> None:
    names = [f"name {letter}" for letter in "abcdefghij"]
    ax = one_rank(*((name, at, at + 1, {}) for at, name in enumerate(names))).plot_timeline()
    assert legend(ax) == [*names[:8], "and 2 more span names"]
    ax = one_rank(*((name, at, at + 1, {}) for at, name in enumerate(names[:6]))).plot_timeline()
    assert [bars(ax)[name][0][0] for name in names[:6]] == list(range(6))
    ax = one_rank(
        ("compute", 0, 90, {"stage": 2, "microbatch": 3}), ("compute", 90, 98, {"microbatch": 4}),
        ("compute", 98, 100, {"microbatch": 5}),
    ).plot_timeline()  # fmt: skip
    assert {"compute, stage 2, microbatch 3", "compute 4", "5"} <= set(words(ax).splitlines())


def test_hosts_are_named_and_links_between_them_marked() -> None:
    """The second host's clock is 5 s ahead, which only the unaligned times show."""
    story = Story(4)
    for src, dst in ((0, 1), (1, 2), (2, 3), (3, 0)):
        story.message(src, dst, (1, 2, 3), (1, 2, 3))
    trace = story.trace(
        ranks=[{"rank": rank, "host": f"node{rank // 2}"} for rank in range(4)],
        clocks=[
            {"ranks": [0, 1], "how": "reference", "samples": [[0, 0, 0]]},
            {"ranks": [2, 3], "how": "store", "samples": [[0, -5 * 10**9, 9]]},
        ],
    )
    ax = trace.plot_timeline()
    assert rows(ax) == ["node0  rank 0", "rank 1", "node1  rank 2", "rank 3"]
    counts = {gid: len(one.U) for gid, one in drawn(ax.collections, "arrows").items()}
    assert counts == {"arrows": 2, "arrows-across": 2}
    assert "from host to host" in legend(ax)
    shown = trace.plot_timeline(align=False)
    assert [one.get_xlim()[1] > 5 for one in (ax, shown)] == [False, True]


# -- recorded steps, and schedules


def phases(ax: Axes, name: str) -> list[tuple[float, float]]:
    """Returns (from, to) of the brackets with a name, from the top row to the bottom."""
    groups = [group for group in ax.collections if group.get_gid() == f"phase-{name}"]
    lines = [line for group in groups for line in group.get_segments()]
    return [(line[0][0], line[1][0]) for line in sorted(lines, key=lambda line: line[0][1])]


def curves(ax: Axes, prefix: str) -> list[list[float]]:
    """Returns the heights of the curves below a step."""
    lines = ax.child_axes[0].lines
    return [line.get_ydata() for line in lines if line.get_gid().startswith(prefix)]


def test_boxes_are_to_scale_and_bubbles_fill_the_rest() -> None:
    """Compares a picture with a manual drawing.

    rank 0   F0 F1 .  .  B0 B0 .  B1 B1
    rank 1   .  F0 B0 B0 F1 B1 B1 .  .
    """
    ax = plot_schedule(make_schedule("1f1b", 2, 2))
    for gid, rank_0, rank_1 in (
        ("actions-F-0", [(0, 1), (1, 2)], [(1, 2), (4, 5)]),
        ("actions-B-0", [(4, 6), (7, 9)], [(2, 4), (5, 7)]),
        ("bubbles", [(2, 4), (6, 7)], [(0, 1), (7, 9)]),
    ):
        assert [spans(ax, gid, rank) for rank in (0, 1)] == [rank_0, rank_1]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"


def test_a_recorded_step_and_its_schedule_look_alike() -> None:
    evaluation = known("zb_v", 4, 8)
    recorded, made = trace_of(evaluation).plot_timeline(), plot_schedule(evaluation)
    for gid in drawn(made.collections, "actions-"):
        assert np.array(spans(recorded, gid)) == pytest.approx(UNIT_MS * np.array(spans(made, gid)))
    assert title(recorded) == title(made)


@pytest.fixture(scope="module")
def usual() -> tuple[Axes, Axes]:
    """Draws 1F1B on 4 ranks with 8 microbatches: a recorded step, and the schedule."""
    evaluation = known("1f1b", 4, 8)
    return trace_of(evaluation).plot_timeline(), plot_schedule(evaluation)


def test_words_say_measured_and_closed_form(usual: tuple[Axes, Axes]) -> None:
    ax, made = usual
    assert title(ax) == "1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %"
    said = words(ax).splitlines()
    assert "by span 27 % (closed form 27 %), relative to the work 38 % (38 %); 66 ms" in said
    assert [said.count(each) for each in ("idle 27 %", "warm-up", "cool-down")] == [4, 1, 1]
    assert legend(ax) == ["forward", "backward", "number: microbatch", "bubble"]
    assert "measured on Example CPU" in words(ax)
    assert "simulated" in words(made)
    assert ax.child_axes[0].get_xlim() == ax.get_xlim()
    assert [max(heights) for heights in curves(ax, "live-")] == [4, 3, 2, 1]
    assert sorted(heights[0] for heights in curves(ax, "bound")) == [1, 2, 3, 4]
    assert "rank 0: 4 of 4\nrank 1: 3 of 3\nrank 2: 2 of 2\nrank 3: 1 of 1" in words(ax)
    mine = from_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0", name="mine")
    unknown = plot_schedule(mine)
    assert title(unknown) == "mine, 2 ranks, 2 microbatches: bubble 33 %"
    assert not curves(unknown, "bound"), "there must be no bound without a closed form"
    assert "rank 0: 2\nrank 1: 2" in words(unknown)


def test_every_box_with_room_has_its_number_and_phases_lie_over_their_boxes(
    usual: tuple[Axes, Axes],
) -> None:
    ax = usual[1]
    numbers = [text for text in ax.texts if text.get_text().isdigit()]
    assert sorted(text.get_text() for text in numbers) == sorted("01234567" * 2 * 4)
    inside = [box for kind in "FB" for box in boxes(ax, f"actions-{kind}-0")]
    for x, y in (text.get_position() for text in numbers):
        assert any(box[0] < x < box[1] and box[2] < y < box[3] for box in inside)
    steady = [(10, 22), (8, 23), (6, 24), (4, 25)]
    assert np.array(phases(ax, "steady")) == pytest.approx(np.array(steady), abs=0.1)
    assert phases(ax, "warm-up")[0] == pytest.approx((0, 10), abs=0.1)
    assert phases(ax, "cool-down")[3] == pytest.approx((25, 27), abs=0.1)
    many = plot_schedule(make_schedule("1f1b", 64, 16))
    assert len(boxes(many, "actions-F-0")) == 64 * 16
    assert not phases(many, "warm-up"), "low rows must have no brackets"
    assert not [text for text in words(many).splitlines() if text.isdigit()]
    assert len(curves(many, "live")) == 4, "there must be only four curves"


def test_stages_of_one_rank_are_told_apart() -> None:
    ax = plot_schedule(make_schedule("interleaved_1f1b", 2, 4))
    first, second = (drawn(ax.collections, f"actions-F-{at}")[f"actions-F-{at}"] for at in (0, 1))
    assert second.get_facecolor().sum() > first.get_facecolor().sum(), "the second must be paler"
    assert len(boxes(ax, "actions-F-0")) == len(boxes(ax, "actions-F-1")) == 2 * 4
    assert "paler: later stage of the rank" in legend(ax)
    assert rows(ax) == ["rank 0\nstages 0, 2", "rank 1\nstages 1, 3"]


def test_messages_are_thin_bars_under_the_boxes() -> None:
    ax = plot_schedule(evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1)))
    assert "message in flight" in legend(ax)
    assert spans(ax, "messages-1") == spans(ax, "messages-2"), "sends, and recvs under them"
    assert len(spans(ax, "messages-1")) == 4
    heights = [boxes(ax, gid, 0)[0][2:] for gid in ("actions-F-0", "messages-1", "messages-2")]
    assert all(above[1] < below[0] for above, below in pairwise(heights))
    instant = simulate_schedule("1f1b", Costs(0, 0, 0), num_ranks=2, num_microbatches=2).plot()
    assert "message in flight" not in legend(instant)
    assert title(instant) == "1F1B, 2 ranks, 2 microbatches: bubble 0 %"


def test_the_last_step_is_drawn_unless_another_is_asked_for() -> None:
    trace = trace_of(known("gpipe", 2, 2), evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1)))
    for step, name in ((0, "GPipe"), (1, "1F1B"), (None, "1F1B")):
        ax = trace.plot_timeline(step=step)
        assert title(ax).startswith(f"{name}, 2 ranks, 2 microbatches")
        found = [span for gid in drawn(ax.collections, "boxes-") for span in spans(ax, gid)]
        assert len(found) == (0 if step == 0 else 2 * 4), "only messages of the step must be drawn"
        assert all(ax.get_xlim()[0] <= start < end <= ax.get_xlim()[1] for start, end in found)
    assert "transfer" in legend(ax)
    assert "step 1 of 2, 18 ms\n" in words(trace.plot_timeline(step=0))
    with pytest.raises(ArgumentError, match="step must be from 0 to 1"):
        trace.plot_timeline(step=2)


def test_a_step_is_shown_where_there_is_one_and_nothing_is_stuck() -> None:
    assert not pipeline().plot_timeline().child_axes
    with pytest.raises(ArgumentError, match="the trace contains no pipeline step"):
        pipeline().plot_timeline(step=0)
    story = Story(2)
    add_step(story, known("1f1b", 2, 2), 1.0, (0, 1), "1f1b")
    assert story.trace().plot_timeline().child_axes
    own = plt.figure().add_subplot()
    assert not story.trace().plot_timeline(ax=own).child_axes, "a user's axes must have no curves"
    story.op(0, "recv", (30, 30, -1), peer=1, group="world", tag=0, size_bytes=8)
    assert title(story.trace().plot_timeline()) == "Stuck: 1 operation never finished"


def test_a_picture_says_that_ranks_shared_their_cores() -> None:
    """The example machine has 2 cores."""

    def is_said(size: int, **about: Any) -> bool:
        trace = trace_of(known("1f1b", size, 4))
        ax = Trace(trace.events, trace.metadata | about).plot_timeline()
        return "4 ranks shared 2 cores. Waiting for a core" in words(ax)

    assert is_said(4)
    assert not is_said(2)
    assert not is_said(4, comm_device="gpu")
    for hosts in (1, 2):
        ranks = [{"rank": rank, "host": f"node{rank % hosts}"} for rank in range(4)]
        assert is_said(4, ranks=ranks) is (hosts == 1)


# -- simulated schedules


def simulate(**given: Any) -> Any:
    settings = {
        "num_ranks": 3, "num_microbatches": 4, "link": Link(alpha_s=1e-3, beta_s_per_byte=1e-6),
        "size_bytes": 1000, **given,
    }  # fmt: skip
    return simulate_schedule("gpipe", Costs(1e-3, 0.5e-3, 0.5e-3), **settings)


def test_critical_path_lies_where_its_hops_are() -> None:
    run = simulate(size_bytes=2000, semantics="buffered")  # 30 ms, of which a rank computes for 8
    ax = run.plot()
    assert title(ax) == "GPipe, 3 ranks, 4 microbatches: bubble 73 %, closed form 33 %"
    found = [
        (x0, round(y0), x1, round(y1), gid.removeprefix("critical-path-"))
        for gid, some in drawn(ax.collections, "critical-path-").items()
        for (x0, y0), (x1, y1) in some.get_segments()
        if not gid.endswith("halo")
    ]
    hops = run.critical_path.hops
    expected = []
    for hop, after in zip(hops, [*hops[1:], None], strict=True):
        is_message = hop.source >= 0
        queues = is_message and after is not None and after.source >= 0
        reason = "program-order" if hop.reason == "start" else hop.reason.replace(" ", "-")
        begins, ends = (hop.source if it else hop.rank for it in (is_message, queues))
        expected.append((hop.start * 1e3, begins, hop.end * 1e3, ends, reason))
    for got, wanted in zip(sorted(found), sorted(expected), strict=True):
        assert (got[1], *got[3:]) == (wanted[1], *wanted[3:])
        assert (got[0], got[2]) == pytest.approx((wanted[0], wanted[2]))
    counts = run.critical_path.by_reason
    for reason in ("data", "link busy"):
        assert f"critical path: {reason}, {counts[reason]} times" in legend(ax)


def test_a_picture_says_what_was_simulated() -> None:
    said = "forward 1 ms; backward 1 ms; messages of 1,000 B: on the link 1 ms, latency 1 ms"
    assert f"Simulated with {said}." in words(simulate().plot())
    costs = Costs([1, 2, 1.5], 0.5, 0.25, latency=0.125)
    ax = simulate_schedule("zb_h1", costs, num_ranks=3, num_microbatches=4).plot()
    assert (
        "Simulated with forward 1 to 2; backward: input's gradient 0.5; backward: weights' "
        "gradients 0.25; messages 0.125." in words(ax)
    )
    assert (ax.get_xlabel(), ax.child_axes[0].get_xlabel()) == ("", "time (units)")


def test_large_schedules_are_maps_whose_colours_add_up() -> None:
    """A point has the colour of its computation, mixed with white for idle time."""
    ranks = 600
    run = simulate_schedule("zb_v", Costs(3, 2, 1), num_ranks=ranks, num_microbatches=12)
    ax = run.plot()
    shown = np.asarray(ax.images[0].get_array())
    assert shown.shape == (512, 960, 4)
    image = 1 - shown[..., 3:] * (1 - shown[..., :3])  # on a white ground
    kinds = [patch for patch in ax.get_legend().get_patches() if patch.get_label() != "bubble"]
    colours = np.array([to_rgb(patch.get_facecolor()) for patch in kinds]) - 1
    shares, *_ = np.linalg.lstsq(colours.T, (image - 1).reshape(-1, 3).T, rcond=None)
    assert shares.min() >= -1e-6
    assert shares.sum(axis=0).max() <= 1 + 1e-6
    busy = shares.sum(axis=0).reshape(image.shape[:2]).mean(axis=1) * float(run.makespan)
    row = np.arange(ranks) * len(busy) // ranks
    by_row = np.bincount(row, weights=np.asarray(run.busy)) / np.bincount(row)
    assert busy == pytest.approx(by_row)
    first = shares.reshape(-1, *image.shape[:2])[:, :, 5]
    assert first[:, 0].argmax() == 0, "rank 0 must begin with a forward pass"
    assert first[:, -1] == pytest.approx(0), "the last rank must wait"


# -- predictions


def recorded(*scales: float) -> Trace:
    """Makes recorded 1F1B steps, one per scale of time, with only their computations."""
    costs = [Costs(forward=scale, backward=2 * scale) for scale in scales]
    return trace_of(*(evaluate(make_schedule("1f1b", 3, 4), each) for each in costs))


@pytest.fixture(scope="module")
def comparison() -> Any:
    virtual = recorded(1.0, 0.9, 1.0)
    simulated = Trace(virtual.events, virtual.metadata | {"source": "simulated"})
    return compare(recorded(1.1, 1.0, 0.97), simulated)


def predicted(ax: Axes) -> list[int]:
    """Returns the number of boxes of each look."""
    return [len(boxes(ax, f"predicted-{number}")) for number in range(5)]


def test_colours_say_how_far_off_each_end_is(comparison: Any) -> None:
    timed = evaluate(make_schedule("1f1b", 3, 4))
    ends = np.array([end for rank in range(3) for *_, end in timed.get_computations(rank)], float)
    for step, (real, virtual) in enumerate(((1.1, 1.0), (1.0, 0.9), (0.97, 1.0))):
        off = ends * (virtual / real - 1) / ends.max()
        bounds = [-np.inf, -0.05, -0.01, 0.01, 0.05, np.inf]
        assert predicted(comparison.plot(step=step)) == np.histogram(off, bounds)[0].tolist()


def test_words_say_the_error_of_the_step_and_of_all(comparison: Any) -> None:
    ax = comparison.plot()
    # of the median step
    assert title(ax) == "Predicted 32.4 ms, measured 36 ms: 10.0 % too short"
    off = "step 2 of 3: all steps are off by 7.4 % on average, 10.0 % at most"
    assert f"1F1B, 3 ranks; {off}" in words(ax)
    assert [line.get_xdata()[0] for line in ax.lines[-2:]] == pytest.approx([36, 32.4])
    with pytest.raises(ArgumentError, match="step must be from 0 to 2, got 3"):
        comparison.plot(step=3)


def test_a_run_without_steps_is_drawn_by_its_spans_else_by_its_waits() -> None:
    ax = compare(one_rank(("work", 0, 2, {})), one_rank(("work", 0, 2.04, {}))).plot()
    assert title(ax) == "Second 2.04 ms, first 2 ms: 2.0 % longer"
    assert predicted(ax) == [0, 0, 0, 1, 0]
    for wait_ms in (1, -1):
        story = Story(2)
        story.message(0, 1, (1, wait_ms, 2), (1, wait_ms, 2))
        alike = compare(story.trace(), story.trace())
        if wait_ms > 0:
            assert predicted(alike.plot()) == [0, 0, 2, 0, 0]
        else:
            with pytest.raises(ArgumentError, match="without spans or waits"):
                alike.plot()
