"""Tests of calibration, comparison and scaling.

They recover constants from traces made with them, check errors computed by hand, and scale a few
ranks to many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story, trace_of

import ringsim
from ringsim import Link, Trace, calibrate, compare, predict, scale, simulate, simulate_schedule
from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.pipeline import Costs, evaluate, make_schedule, rehearse, train_step_pipeline
from ringsim.topologies import OneMachine

LINK = Link(alpha_s=40e-6, beta_s_per_byte=0.5e-9)
SENDING = Link(alpha_s=15e-6, beta_s_per_byte=0.1e-9)
RECEIVING_MS, SLEEP_MS, AROUND_MS, ASKED_MS = 0.009, 0.08, 0.012, 5.0


def talk(
    sizes_bytes: tuple[int, ...] = (1024, 262144),
    *,
    link: Link = LINK,
    receiving_ms: float = RECEIVING_MS,
    sleep_ms: float = SLEEP_MS,
    rounds: int = 4,
    disturbed: dict[int, float] | None = None,
) -> Story:
    """Rank 0 computes and sends, rank 1 waits.

    ``disturbed`` makes the sleep of a round longer by some milliseconds.

    ::

        rank 0  compute | around | posting | compute ...                  wait for all at the end
        rank 1  posting | blocked ........ done | around | posting | ...
    """
    story = Story(2)
    about: dict[str, Any] = {"group": "ring:0>1", "tag": 0}
    sends = []
    clock, other = 1.0, 1.0
    for number, size_bytes in enumerate(sizes_bytes * rounds):
        begin, end = clock, clock + ASKED_MS + sleep_ms + (disturbed or {}).get(number, 0.0)
        story.span(0, f"compute {ASKED_MS / 1e3!r} s", begin, end)
        send = end + AROUND_MS
        arrived = max(send, other) + link.time_s(size_bytes) * 1e3
        times = (other, other + receiving_ms, arrived)
        story.op(1, "irecv", times, peer=0, size_bytes=size_bytes, **about)
        sends.append((send, arrived, size_bytes))
        other = arrived + AROUND_MS
        clock = send + SENDING.time_s(size_bytes) * 1e3
    for place, (send, arrived, size_bytes) in enumerate(sends):  # one wait after another
        wait = clock + 0.001 * place
        times = (send, wait, max(wait, arrived))
        story.op(0, "isend", times, peer=1, size_bytes=size_bytes, **about)
    return story


def constants(*links: Link) -> list[float]:
    return [constant for link in links for constant in (link.alpha_s, link.beta_s_per_byte)]


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-3)


@given(
    alpha_us=st.floats(5, 500),
    beta_ns=st.floats(0.05, 5),
    sleep_us=st.floats(1, 900),
    receiving_us=st.floats(1, 50),
)  # rounded to ns in the trace
def test_any_constants_are_found(
    alpha_us: float, beta_ns: float, sleep_us: float, receiving_us: float
) -> None:
    link = Link(alpha_us * 1e-6, beta_ns * 1e-9)
    story = talk(link=link, sleep_ms=sleep_us * 1e-3, receiving_ms=receiving_us * 1e-3)
    found = calibrate(story.trace())
    for size_bytes in (1024, 65536, 1 << 20):
        assert found.link.time_s(size_bytes) == near(link.time_s(size_bytes))
    assert constants(found.sending) == near(constants(SENDING))
    assert found.sleep_s == pytest.approx(sleep_us * 1e-6, abs=2e-9)
    assert found.receiving_s == pytest.approx(receiving_us * 1e-6, abs=2e-9)
    assert found.topology == OneMachine(found.link, cores=2)
    assert (found.num_messages, found.sizes_bytes) == (8, (1024, 262144))


def test_several_traces_count_together_and_one_size_is_all_latency() -> None:
    found = calibrate(talk((1024,)).trace(), talk((262144,)).trace())
    assert found.link.time_s(65536) == near(LINK.time_s(65536))
    found = calibrate(talk((65536,)).trace())
    assert constants(found.link) == [near(LINK.time_s(65536)), 0]


def test_a_busy_machine_is_doubtful_and_a_single_disturbance_does_not_count() -> None:
    assert calibrate(talk(disturbed={3: 40.0}).trace()).sleep_s == near(SLEEP_MS * 1e-3)
    found = calibrate(talk(rounds=8, disturbed=dict.fromkeys(range(0, 16, 3), 4.0)).trace())
    assert (
        "busy with other work: the times at which sleeps ended varied by 4.0 ms" in found.notes[0]
    )
    found = calibrate(talk(receiving_ms=0.8).trace())
    assert "busy with other work: posting a receive took up to 0.8 ms" in found.notes[0]
    story = Story(2)
    for begin in (0.0, 5.0, 10.0, 15.0):  # with at least 4 ms of other work between two messages
        story.message(0, 1, (begin + 0.5, begin + 0.6, begin + 1), (begin, begin + 0.01, begin + 1))
    assert "computed for 4.2 ms at a time outside" in calibrate(story.trace()).notes[1]


def test_times_of_the_stages_are_medians() -> None:
    story = talk()
    for step, time in enumerate((1.0, 1.0, 9.0)):
        for rank in range(2):
            at, about = 300.0 + 100 * step, {"stage": rank, "microbatch": 0}
            story.span(rank, "step 1f1b", at, at + 60)
            story.span(rank, "forward", at + 1, at + 1 + (rank + 1) * time, **about)
            story.span(rank, "backward", at + 20, at + 20 + 3 * time, **about)
    costs = calibrate(story.trace()).costs
    assert costs is not None
    assert costs.forward == pytest.approx((0.001, 0.002))
    assert costs.backward == pytest.approx((0.003, 0.003))


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        ([], "at least one trace"),
        ([talk().trace(source="simulated")], "must be measured, got a simulated one"),
        (
            [talk(rounds=1).trace()],
            "at least 3 messages of the same size .*, got 2 messages of all sizes",
        ),
        ([Story(1).trace()], "3 messages .*, got 0 messages of all sizes"),
        ([talk().trace(machine={})], "does not contain the number of cores"),
    ],
)
def test_what_cannot_be_calibrated_from(traces: list[Trace], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        _ = calibrate(*traces).topology


def test_early_sends_and_late_receives_are_told_apart() -> None:
    early, late = talk(), talk()
    for number in range(9):
        # posted before its receive: cheap at every size
        at = 500.0 + 20 * number
        send, recv = (at, at + 0.030, at + 10), (at + 5, at + 5.009, at + 10)
        early.message(0, 1, send, recv, size_bytes=262144)
        # no rank waited for it: "done" does not show when it arrived
        send, recv = (at, at, at + 5), (at - 1, at + 8, at + 8.001)
        late.message(1, 0, send, recv, size_bytes=1024)
        late.span(0, "work", at + 1, at + 7)
    found = calibrate(early.trace())
    assert found.post_s(True, 262144, met=False) == near(30e-6)
    assert found.sending.alpha_s == near(SENDING.alpha_s)
    found = calibrate(late.trace())
    assert (found.num_messages, found.link.alpha_s) == (8, near(LINK.alpha_s))


# -- a calibration on the virtual clock

CALIBRATION = replace(
    calibrate(talk().trace()),
    link=Link(alpha_s=50e-6, beta_s_per_byte=0.5e-9),
    sending=Link(alpha_s=20e-6, beta_s_per_byte=0.1e-9),
    sending_early_s=15e-6,
    receiving_s=10e-6,
    sleep_s=70e-6,
    around_s=30e-6,
    costs=Costs(forward=(0.001, 0.002), input=0.0, weight=0.0, backward=(0.003, 0.004)),
)


def talk_then_wait() -> None:
    """Rank 0 computes 1 ms and sends; rank 1 has posted its receive long before."""
    message = torch.zeros(1000, dtype=torch.uint8)
    if dist.get_rank() == 0:
        ringsim.compute(0.001)
        work = dist.isend(message, 1)
    else:
        work = dist.irecv(message, 0)
    ringsim.mark("posted")
    assert work is not None
    work.wait()


def test_sleeping_posting_and_travelling_take_what_the_calibration_says() -> None:
    trace = simulate(talk_then_wait, world_size=2, link=CALIBRATION.link, compute=CALIBRATION)
    frame = trace.to_pandas().set_index(["rank", "op"])
    assert frame.loc[(0, "span"), "done_ns"] == 1_100_000  # 70 + 30 us longer than requested
    assert frame.loc[(0, "isend"), "post_ns"] == 1_100_000
    assert frame.loc[(0, "mark"), "post_ns"] == 1_120_100  # 20 us, and 0.1 us for 1000 bytes
    assert frame.loc[(1, "mark"), "post_ns"] == 10_000
    # the message is in flight while it is still posted: 50 us and 0.5 us
    assert frame.loc[(1, "irecv"), "done_ns"] == 1_150_500


def measured(trace: Trace) -> Trace:
    """Returns a simulated trace like that of real ranks with exactly these times."""
    return Trace(trace.events, {**trace.metadata, "source": "measured", "machine": {"cores": 2}})


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    train_step_pipeline(model, [torch.ones(2, 3)] * 2, [torch.tensor([0, 1])] * 2)


def test_stages_take_the_times_that_were_measured_and_others_are_refused() -> None:
    trace = simulate(train, world_size=2, compute=CALIBRATION, link=CALIBRATION.link)
    spans = trace.to_pandas().query("label in ['forward', 'backward']")
    took = (spans.done_ns - spans.post_ns) * 1e-6
    took_ms = took.groupby([spans.label, spans.stage], observed=True).mean()
    assert took_ms.round(9).tolist() == [1, 2, 3, 4]  # forward, then backward
    with pytest.raises(ArgumentError, match="contains no time for stage 2"):
        simulate(train, world_size=4, compute=CALIBRATION, link=CALIBRATION.link)


# from a trace with one size, where everything counts as latency
SLOW_LINK = Link(alpha_s=200e-6, beta_s_per_byte=0.0)
SIZE_BYTES = 4096
DOUBT = "doubtful constants: all messages had the same size"


def recorded(name: str, world_size: int, costs: Costs) -> Trace:
    """Returns a trace of two steps like that of real ranks with exactly these times."""
    args = (make_schedule(name, world_size, 8), costs)
    kwargs = {"size_bytes": SIZE_BYTES, "steps": 2}
    return measured(
        simulate(rehearse, world_size=world_size, args=args, kwargs=kwargs, link=SLOW_LINK)
    )


ONE_TWO = Costs(forward=0.001, backward=0.002)


def test_every_prediction_says_what_makes_its_constants_doubtful() -> None:
    """The repr shows the doubts in full, and the line below plots shows them briefly."""
    real = recorded("1f1b", 2, ONE_TWO)
    virtual = predict(
        rehearse,
        world_size=2,
        from_trace=real,
        args=(make_schedule("1f1b", 2, 8), ONE_TWO),
        kwargs={"size_bytes": SIZE_BYTES, "steps": 2},
    )
    by_name = predict("1f1b", world_size=4, from_trace=real)
    for told in (virtual, by_name, scale(real, world_size=4), compare(real, virtual)):
        assert DOUBT in repr(told)
    for drawn, doubtful in ((by_name.plot(), True), (real.plot_timeline(), False)):
        said = str([text.get_text() for text in (*drawn.texts, *drawn.figure.texts)])
        assert ("from doubtful constants" in said) is doubtful


def test_a_worker_is_predicted_with_all_that_the_trace_tells() -> None:
    """These are its computations, messages, posts, and the cores that its ranks share."""
    real = recorded("1f1b", 2, ONE_TWO)
    found = calibrate(real)

    def worker(rounds: int) -> None:
        for _ in range(rounds):
            talk_then_wait()
            train()

    virtual = predict(worker, world_size=2, from_trace=real, kwargs={"rounds": 2})
    by_hand = simulate(worker, world_size=2, args=(2,), topology=found.topology, compute=found)
    assert virtual.to_pandas().equals(by_hand.to_pandas())
    assert predict(train, world_size=4, from_trace=real).world_size == 4  # unrecorded stages
    on_gpus = Trace(real.events, {**real.metadata, "backend": "nccl"})
    alone = predict(talk_then_wait, world_size=2, from_trace=on_gpus)
    assert alone.metadata["constants"]["semantics"] == "grouped"  # if messages need no core


def test_a_schedule_is_predicted_by_name_or_as_it_is() -> None:
    real, split = recorded("1f1b", 2, ONE_TWO), recorded("zb_h1", 4, Costs(0.003, 0.004, 0.002))
    same: Any = make_schedule("gpipe", 8, 8)

    def makespan(name: Any, world_size: int, trace: Trace = real) -> Any:
        return predict(name, world_size=world_size, from_trace=trace).makespan

    assert makespan("gpipe", 8) == makespan(same, 8)
    assert makespan("1f1b", 16) == scale(real, world_size=16).makespan
    assert makespan("1f1b", 4, split) > makespan("zb_h1", 4, split)
    for asked, more, says in (
        ("zb_h1", {}, "a split backward to predict zb_h1, got .*1f1b"),
        (same, {}, "world_size must be the schedule's number of ranks, 8, got 4"),
        (7, {}, "must be a function, a Schedule or the name of a schedule, got 7"),
        (same, {"args": (1,)}, "args and kwargs must be omitted with a schedule"),
    ):
        with pytest.raises(ArgumentError, match=says):
            predict(asked, world_size=4, from_trace=real, **more)


# found for all ranks: outer stages keep their times, and inner stages take the mean of the inner
# stages, or of both if there are only two
@pytest.mark.parametrize(
    ("name", "forward", "expected"),
    [
        ("1f1b", (0.001, 0.002, 0.004, 0.006), (0.001, *[0.003] * 7, 0.006)),
        ("gpipe", (0.001, 0.003), (0.001, 0.002, 0.002, 0.002, 0.003)),
        ("zb_h1", (0.003,) * 4, (0.003,) * 16),
        ("1f1b", (0.003,) * 4, (0.003,) * 2),
    ],
)
def test_stages_scale_to_other_numbers_of_ranks(
    name: str, forward: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    costs, wanted = (Costs(forward=each, input=0.004, weight=0.002) for each in (forward, expected))
    found = scale(
        recorded(name, len(forward), costs), world_size=len(expected), num_microbatches=32
    )
    by_hand = simulate_schedule(
        name,
        wanted,
        num_ranks=len(expected),
        num_microbatches=32,
        link=SLOW_LINK,
        size_bytes=SIZE_BYTES,
    )
    assert found.makespan == pytest.approx(by_hand.makespan, rel=1e-5)
    assert (found.num_ranks, found.num_microbatches) == (len(expected), 32)


SCHEDULE = make_schedule("1f1b", 3, 4)


def test_what_cannot_be_scaled() -> None:
    trace = recorded("1f1b", 2, ONE_TWO)
    without = Trace(trace.events.select(trace.events.label < 0), trace.metadata)
    mine = replace(make_schedule("gpipe", 2, 2), name="mine")
    odd = simulate(
        rehearse, world_size=2, args=(mine, Costs()), kwargs={"size_bytes": 8}, link=SLOW_LINK
    )
    for given_trace, world_size, says in [
        (trace, 1, "world_size must be an integer of at least 2, got 1"),
        (without, 4, "trace contains no pipeline step"),
        (odd, 4, "must contain a step of a known schedule on at least 2 ranks, got .*mine"),
    ]:
        with pytest.raises(ArgumentError, match=says):
            scale(given_trace, world_size=world_size)


# -- comparing two runs


def step(scale: float = 1.0, latency: float = 0.25, steps: int = 1) -> Trace:
    """Returns a recorded 1F1B step with all times multiplied; a unit lasts 2 ms."""
    costs = Costs(forward=scale, backward=2 * scale, latency=latency * scale)
    return trace_of(*[evaluate(SCHEDULE, costs)] * steps)


def test_errors_are_signed_and_relative_to_what_was_measured() -> None:
    same = compare(step(steps=2), step(steps=2))
    assert (same.steps.mean, same.steps.worst, same.steps.bias, same.steps.count) == (0, 0, 0, 2)
    assert (same.median_error, np.abs(same.lag_s).max()) == (0, 0)
    comparison = compare(step(), step(scale=0.8))
    assert comparison.steps.bias == pytest.approx(-0.2)
    assert comparison.steps.mean == comparison.steps.worst == pytest.approx(0.2)
    assert comparison.operations.bias < 0  # everything ends too early
    last = comparison.real.events.done_ns[comparison.real_index].argmax()
    assert comparison.lag_s[last] == pytest.approx(-0.2 * comparison.real_steps_s[0])


def test_no_communication_is_the_same_schedule_without_messages() -> None:
    comparison = compare(step(latency=0.25), step(latency=0.25))
    without = evaluate(SCHEDULE, Costs(forward=1, backward=2)).makespan * 2e-3  # 2 ms per unit
    assert comparison.no_communication_s == pytest.approx(float(without))
    bias = comparison.baseline("no communication").bias
    assert bias == pytest.approx(float(without) / comparison.real_steps_s[0] - 1)
    assert comparison.nominal_s is None  # no seconds were requested
    with pytest.raises(ArgumentError, match=r"baselines \['no communication'\], got 'nominal'"):
        comparison.baseline("nominal")


def test_nominal_is_what_the_program_asked_for() -> None:
    def run(longer_ms: float, **metadata: Any) -> Trace:
        story = Story(2)
        for rank, begin in ((0, 10.0), (1, 16.0 + longer_ms)):
            end = begin + 5 + longer_ms
            story.span(rank, "step gpipe", begin - 1, end + 1)
            story.span(rank, "forward", begin, end, stage=rank, microbatch=0)
            story.span(rank, "compute 0.005 s", begin, end)
        return story.trace(**metadata)

    comparison = compare(run(0.5), run(0.25, source="simulated"))
    steps_s = (*comparison.real_steps_s, *comparison.virtual_steps_s)
    assert steps_s == pytest.approx((0.012, 0.0115))
    # with the prediction's computations
    assert (comparison.nominal_s, comparison.no_communication_s) == pytest.approx((0.010, 0.0105))
    assert "baseline nominal: 10.000 ms" in repr(comparison)
    story = Story(1)
    story.span(0, "step gpipe", 9, 24)
    # adjacent computations: on a virtual clock, there is no time between them
    for microbatch in range(2):
        begin = 10.0 + 5 * microbatch
        story.span(0, "forward", begin, begin + 5, stage=0, microbatch=microbatch)
        story.span(0, "compute 0.004 s", begin, begin + 5)
    assert compare(story.trace(), story.trace()).nominal_s == pytest.approx(0.008)


def one_message(dst: int, arrives_ms: float, world_size: int = 2, posts_until: float = 1) -> Trace:
    story = Story(world_size)
    send, recv = (1, posts_until, arrives_ms), (2, 2, arrives_ms)
    story.message(0, dst, send, recv, group="world")
    return story.trace()


def test_a_run_without_steps_is_one_step() -> None:
    comparison = compare(one_message(1, 5.0), one_message(1, 6.0))
    assert comparison.real_steps_s.tolist() == pytest.approx([0.004])
    assert comparison.steps.bias == pytest.approx(0.25)
    assert comparison.lag_s.tolist() == pytest.approx([0.001, 0.001])
    assert comparison.nominal_s is comparison.no_communication_s is None
    slow = compare(one_message(1, 5.0), one_message(1, 6.0, posts_until=4)).to_pandas()
    assert slow.set_index(["rank", "operation"]).second_s.to_dict() == pytest.approx(
        {(0, "isend"): 0.002, (0, "(program)"): 0.003, (1, "irecv"): 0.004, (1, "(program)"): 0}
    ), "the time of posting belongs to the program"


def test_runs_with_nothing_in_common_are_refused_and_others_say_what_they_lack() -> None:
    for real, virtual in (
        (one_message(1, 3, 3), one_message(2, 3, 3)),
        (Story(3).trace(), Story(2).trace()),
    ):
        with pytest.raises(ArgumentError, match="no finished operation in common"):
            compare(real, virtual)
    longer = compare(step(steps=2), step(steps=1))
    assert (longer.steps.count, longer.unpaired) == (1, (0, 0))
    wide, narrow = make_schedule("1f1b", 4, 4), make_schedule("gpipe", 2, 4)
    wider = compare(trace_of(evaluate(wide)), trace_of(evaluate(narrow)))
    assert wider.unpaired == (4 * 4, 0), "the computations of the stages that only one run has"


def slowed(schedule: str = "1f1b", *, stage: int = 1, since: int = 3, by_ms: float = 2.0) -> Trace:
    """Six simulated steps; from one step on, one stage's forwards take longer."""

    def work() -> None:
        for number in range(6):
            late = [by_ms / 1e3 * (number >= since and place == stage) for place in range(3)]
            costs = Costs([0.004 + more for more in late], 0.008)
            rehearse(make_schedule(schedule, 3, 4), costs, size_bytes=4096)

    return simulate(work, world_size=3, link=LINK)


@pytest.mark.parametrize(("stage", "since", "by_ms"), [(1, 3, 2.0), (0, 0, 1.0), (2, 5, -3.0)])
def test_a_change_is_found_where_it_was_made(stage: int, since: int, by_ms: float) -> None:
    before, after = slowed(by_ms=0), slowed(stage=stage, since=since, by_ms=by_ms)
    comparison = compare(before, after)
    table = comparison.to_pandas().set_index(["step", "rank", "operation"]).sort_index()
    for number in range(6):
        expected = 4e-3 * by_ms * (number >= since)  # four microbatches
        assert table.loc[(number, stage, "forward")].longer_s.sum() == pytest.approx(expected)
        if by_ms > 0:
            longer = comparison.virtual_steps_s[number] - comparison.real_steps_s[number]
            assert longer == pytest.approx(table.loc[number].later_s.max(), abs=1e-9)
    found = comparison.differences
    row = found.find_beginning()
    assert row is not None
    where = (found.step[row], found.rank[row], found.stage[row], found.operation[row])
    assert where == (since, stage, stage, "forward")
    event = after[int(found.began[row])]
    assert (event.rank, event.stage, event.microbatch) == (stage, stage, 0)
    assert f"step {since}, rank {stage}: forward of stage {stage} took " in repr(comparison)
    other = compare(after, before).to_pandas().set_index(["step", "rank", "operation"]).sort_index()
    assert other.longer_s.tolist() == pytest.approx((-table.longer_s).tolist())


def test_what_became_quicker_does_not_explain_a_longer_run() -> None:
    """A message that both sides had to wait for counts once."""

    def run(works_ms: float, sends_ms: float, ends_ms: float) -> Trace:
        story, sent = Story(2), works_ms + sends_ms
        about = {"group": "world", "tag": 0, "size_bytes": 4}
        story.span(0, "work", 0, works_ms)
        story.op(0, "send", (works_ms, works_ms, sent), peer=1, **about)
        story.span(0, "save", sent, ends_ms)
        story.op(1, "recv", (0, 0, sent), peer=0, **about)
        return story.trace()

    before, after = run(10, 30, 45), run(18, 11, 54)
    assert compare(before, after).where_it_began().startswith("rank 0: save took 20 ms longer.")
    assert compare(after, before).where_it_began().startswith("rank 0: save took 20 ms less.")


scales = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)


@given(scales, scales, st.sampled_from(["1f1b", "gpipe"]))
def test_all_of_a_ranks_time_is_shared_out(
    first: list[float], second: list[float], name: str
) -> None:
    def run(forward: list[float], name: str = "1f1b") -> Trace:
        return trace_of(evaluate(make_schedule(name, 3, 4), Costs(forward, 2.0, latency=0.25)))

    before, after = run(first), run(second, name)
    table = compare(before, after).to_pandas().groupby("rank")[["first_s", "second_s"]].sum()
    for column, trace in (("first_s", before), ("second_s", after)):
        spans = trace.to_pandas()
        steps = spans[spans.label.astype(str).str.startswith("step")]
        took_s = ((steps.done_ns - steps.post_ns) * 1e-9).tolist()
        assert table[column].tolist() == pytest.approx(took_s, abs=1e-8)


def test_two_schedules_and_an_unnamed_change_of_a_run_without_steps() -> None:
    comparison = compare(slowed("gpipe", by_ms=0), slowed("1f1b", by_ms=0))
    assert (comparison.unpaired, comparison.steps.count) == ((0, 0), 6)
    assert comparison.lag_s[comparison.step == 0].any()

    def work(slow_s: float) -> None:
        for number in range(5):
            ringsim.compute(0.001 + slow_s * (number >= 2 and dist.get_rank() == 2))
            dist.all_reduce(torch.ones(1000))

    before, after = (
        simulate(work, world_size=4, link=LINK, args=(slow_s,)) for slow_s in (0.0, 0.001)
    )
    said = repr(compare(before, after))
    assert "rank 2: compute took 3 ms longer." in said
    assert "span 'compute 0.002 s' from 2." in said
    unnamed = compare(*(trace.filter(ops="all_reduce") for trace in (before, after)))
    began = unnamed.where_it_began()
    said = "rank 2: (program) took 3 ms longer. The largest part was before rank 2: all_reduce "
    assert began.startswith(said)
    assert f" at test_predict.py:{work.__code__.co_firstlineno + 3} " in began
    assert repr(unnamed).count("%") == 3, "each percentage is written once"
    table = unnamed.to_pandas().query("operation == 'all_reduce'").set_index("rank")
    assert table.waited_longer_s.to_dict() == pytest.approx({0: 3e-3, 1: 3e-3, 2: 0, 3: 3e-3})
    assert unnamed.plot().get_title(loc="left").startswith("Second ")
