"""The generation ring without ranks: closed forms against the plan, played step by step; what is measured of it in a trace."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.plot.charts import MeasuredUse, plot_inner_iterations
from ringsim.schedules.costs import Time
from ringsim.schedules.engine import Run
from ringsim.schedules.generation import (
    Job,
    can_finish,
    check_can_finish,
    count_messages,
    plan_batches,
    plan_jobs,
    plan_steps,
    steady_use,
    time_generation,
)
from ringsim.traces.events import OP_CODES, Tables, make_events
from ringsim.traces.steps import measure_stage_use
from ringsim.traces.value import Trace

SETTINGS = [(stages, turns, async_comm) for stages, async_comm in product(range(1, 7), (False, True)) for turns in range(1, 2 * stages + 3)]


def makespan(run: Run) -> Time:
    assert run.blocked == ()
    return max(times[-1][1] for times in run.times)


def test_the_deadlock_map_is_what_the_plan_does() -> None:
    for (stages, turns, async_comm), rounds, tokens in product(SETTINGS, (1, 2, 3), (1, 2, 3, 5)):
        run = time_generation(stages, turns, rounds, tokens, prefill=3, decode=2, async_comm=async_comm)
        assert (run.blocked == ()) is (tokens == 1 or can_finish(stages, turns, async_comm)), (stages, turns, async_comm, rounds, tokens)


def test_steady_use_is_the_share_in_which_a_full_ring_works() -> None:
    for stages, turns, async_comm in (each for each in SETTINGS if can_finish(*each)):
        use = steady_use(stages, turns, async_comm)
        # Between two numbers of tokens that are a whole number of repetitions apart, once filling is over.
        period = use.numerator * stages
        first, second = (makespan(time_generation(stages, turns, 1, count * period, 1, 1, async_comm=async_comm)) for count in (2, 4))
        assert Fraction(2 * period * turns, second - first) == use, (stages, turns, async_comm)


def test_steady_use_drawn() -> None:
    drawn = {
        (stages, posted): " ".join(str(steady_use(stages, turns, posted)) for turns in range(1, 9))
        for stages in (2, 4)
        for posted in (0, 1)
    }
    assert drawn == {
        (2, 0): "0 1 0 0 0 0 0 0",
        (2, 1): "1/2 1 1/2 0 0 0 0 0",
        (4, 0): "0 1/3 2/3 1 0 0 0 0",
        (4, 1): "1/4 1/2 3/4 1 3/4 1/2 1/4 0",
    }


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_messages_are_as_many_as_their_form_says(stages: int, rounds: int, tokens: int) -> None:
    run = time_generation(stages, stages, rounds, tokens, 1, 1)
    assert len(run.messages) == count_messages(stages, rounds * stages, tokens)
    sends = [(message.source, message.rank) for message in run.messages]
    closing = sends.count((stages - 1, 0)) if stages > 2 else None
    assert closing is None or closing == rounds * stages * (tokens - 1)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_every_output_is_the_input_of_the_next_stage(stages: int, turns: int, rounds: int, tokens: int) -> None:
    """What a stage sends and what its successor receives are the same jobs in the same order, whatever the setting."""
    jobs = plan_jobs(rounds * turns, turns, tokens)
    assert sorted(jobs) == sorted(product(range(rounds * turns), range(tokens)))
    steps = [list(plan_steps(stage, stages, jobs, tokens)) for stage in range(stages)]
    for stage in range(stages):
        assert [step.compute for step in steps[stage] if step.compute] == jobs
        sent = [step.send for step in steps[stage] if step.send]
        received = [step.receive for step in steps[(stage + 1) % stages] if step.receive]
        if stage < stages - 1:
            assert sent == received
        else:  # the token that closes the ring belongs to the next job of its batch
            assert [(job.batch, job.token + 1) for job in sent] == received
    for before, after in zip(steps[0], steps[0][1:], strict=False):
        assert after.send is None or after.send == before.compute


@pytest.mark.parametrize(
    ("stages", "turns", "async_comm", "words"),
    [
        (4, 5, False, ("must be 2 to 4 with 4 stages and synchronous messages, got 5", "Use 4, or async_comm=True.")),
        (4, 1, False, ("must be 2 to 4 ", "got 1: stage 0 receives before it sends", "Use 2, or async_comm=True.")),
        (2, 1, False, ("must be 2 with 2 stages", "Use 2, or async_comm=True.")),
        (4, 8, False, ("got 8", "Use 4.")),
        (4, 8, True, ("must be 1 to 7 with 4 stages and asynchronous messages, got 8", "Use 7.")),
    ],
)
def test_a_ring_that_never_ends_is_refused_with_the_nearest_that_does(
    stages: int, turns: int, async_comm: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(ScheduleError) as refused:
        check_can_finish(stages, turns, num_tokens=2, async_comm=async_comm)
    assert [word for word in words if word not in str(refused.value)] == []
    check_can_finish(stages, turns, num_tokens=1, async_comm=async_comm)  # a single token never goes round


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "4"])
def test_numbers_must_be_numbers(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"num_inner_iterations must be an integer of 1 or more, got "):
        steady_use(4, wrong)
    with pytest.raises(ArgumentError, match="num_tokens must be"):
        check_can_finish(4, 4, wrong)


@given(st.integers(1, 40), st.integers(1, 6), st.none() | st.integers(1, 8))
def test_batches_hold_every_prompt_in_full_rounds(prompts: int, turns: int, size: int | None) -> None:
    batches = plan_batches(prompts, turns, size)
    assert len(batches) % turns == 0
    assert all(batches)
    assert size is None or max(map(len, batches)) <= size
    own = [number for batch in batches for number in batch]
    assert own[:prompts] == list(range(prompts))
    assert set(own[prompts:]) <= {0}
    if prompts >= len(batches):
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert len(own) == prompts


PREFILL, DECODE = 7_000_000, 3_000_000  # ns; no sum of jobs that one waits for is as long as either


def trace_of(starts: list[list[tuple[Job, int]]], prefill: int = PREFILL, decode: int = DECODE) -> Trace:
    """A trace with a span for each job, from when it started, by stage."""
    rows = [(stage, job, start) for stage, of_stage in enumerate(starts) for job, start in of_stage]
    columns = {
        "rank": [stage for stage, _, _ in rows],
        "op": [OP_CODES["span"]] * len(rows),
        "stage": [stage for stage, _, _ in rows],
        "microbatch": [job.batch for _, job, _ in rows],
        "label": [int(job.token > 0) for _, job, _ in rows],
        "post_ns": [start for _, _, start in rows],
        "done_ns": [start + (decode if job.token else prefill) for _, job, start in rows],
    }
    return Trace(make_events(columns, Tables(labels=("prefill", "decode"))), {"world_size": len(starts)})


def played(stages: int, turns: int, rounds: int, tokens: int, async_comm: bool, prefill: int = PREFILL, decode: int = DECODE) -> Trace:
    """The trace of a ring that was played on a clock."""
    run = time_generation(stages, turns, rounds, tokens, prefill, decode, async_comm=async_comm)
    jobs = plan_jobs(rounds * turns, turns, tokens)
    starts = []
    for stage, times in enumerate(run.times):
        place, found = 0, []
        for step in plan_steps(stage, stages, jobs, tokens):
            place += 2 * ((step.send is not None) + (step.receive is not None))  # a post and a wait each
            if step.compute is not None:
                found.append((step.compute, int(times[place][0])))
                place += 1
        starts.append(found)
    return trace_of(starts, prefill, decode)


def test_use_of_a_ring_without_delays_is_the_closed_form() -> None:
    for stages, turns, async_comm in (each for each in SETTINGS if 2 <= each[0] <= 4 and can_finish(*each)):
        use = steady_use(stages, turns, async_comm)
        for stage in measure_stage_use(played(stages, turns, 1, 2 + 2 * use.numerator * stages, async_comm, DECODE, DECODE)):
            assert (stage.decode_use, stage.prefill_s, stage.decode_s) == pytest.approx((float(use), 0.003, 0.003))


@pytest.mark.parametrize(("rounds", "async_comm"), [(1, False), (3, False), (3, True)])
def test_idle_of_a_full_ring(rounds: int, async_comm: bool) -> None:
    """It is idle while it fills and drains, and in each later round for as long as a prompt takes longer than a token."""
    idle_ns = 3 * (PREFILL + (rounds - 1) * (PREFILL - DECODE))
    for stage in measure_stage_use(played(4, 4, rounds, 6, async_comm)):
        assert (stage.idle_s, stage.prefill_s, stage.decode_s) == pytest.approx((1e-9 * idle_ns, 0.007, 0.003))


def test_use_is_that_of_the_time_between_turns() -> None:
    """Two batches on one stage, drawn: a0 b0 | a1 . b1 . . a2 b2, 10 ns a job."""
    jobs = [Job(0, 0), Job(1, 0), Job(0, 1), Job(1, 1), Job(0, 2), Job(1, 2)]
    trace = trace_of([list(zip(jobs, (0, 10, 20, 40, 70, 80), strict=True))], 10, 10)
    (stage,) = measure_stage_use(trace)
    assert stage.decode_use == pytest.approx(20 / 50)
    assert stage.idle_s == pytest.approx(30e-9)


@pytest.mark.parametrize("jobs", [[], [Job(0, 0)], [Job(0, 0), Job(0, 1)], [Job(0, 0), Job(0, 1), Job(0, 2)] * 2])
def test_other_traces_are_refused(jobs: list[Job]) -> None:
    with pytest.raises(ArgumentError, match=r"trace must be of (a|one) call of generate"):
        measure_stage_use(trace_of([[(job, 10 * place) for place, job in enumerate(jobs)]], 10, 10))


def test_the_picture_shows_the_forms_and_the_points() -> None:
    mpl.use("Agg")
    measured = [MeasuredUse(4, False, 0.9), MeasuredUse(2, True, 0.45)]
    ax = plot_inner_iterations(4, measured)
    lines = {line.get_linestyle(): line.get_ydata() for line in ax.get_lines()}
    for style, async_comm in (("-", False), ("--", True)):
        assert lines[style].tolist() == [float(steady_use(4, turns, async_comm)) for turns in range(1, 9)]
    drawn = [tuple(point) for points in ax.collections for point in points.get_offsets().tolist()]
    stuck = [(turns, 0) for turns in range(1, 9) if not can_finish(4, turns)] + [(8, 0)]
    assert sorted(drawn) == sorted([*stuck, (4, 0.9), (2, 0.45)])
    assert "synchronous from 5, asynchronous from 8 on" in " ".join(text.get_text() for text in ax.texts)
    own = mpl.figure.Figure().add_subplot()
    assert plot_inner_iterations(3, ax=own) is own
