"""What is measured of a generation ring, on traces whose answer is known; and the picture of it."""

from __future__ import annotations

import matplotlib as mpl
import pytest

from ringsim.errors import ArgumentError
from ringsim.plot.charts import MeasuredUse, plot_inner_iterations
from ringsim.schedules.generation import Job, can_finish, idle_of_full_ring, plan_jobs, plan_steps, steady_use, time_generation
from ringsim.traces.events import OP_CODES, Tables, make_events
from ringsim.traces.steps import measure_stage_use
from ringsim.traces.value import Trace

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


@pytest.mark.parametrize(
    ("stages", "turns", "async_comm"),
    [
        (stages, turns, posted)
        for stages in (2, 3, 4)
        for posted in (False, True)
        for turns in range(1, 8)
        if can_finish(stages, turns, posted)
    ],
)
def test_use_of_a_ring_without_delays_is_the_closed_form(stages: int, turns: int, async_comm: bool) -> None:
    use = steady_use(stages, turns, async_comm)
    tokens = 2 + 2 * use.numerator * stages
    for stage in measure_stage_use(played(stages, turns, 1, tokens, async_comm, DECODE, DECODE)):
        assert stage.decode_use == pytest.approx(float(use))
        assert (stage.prefill_s, stage.decode_s) == pytest.approx((0.003, 0.003))


@pytest.mark.parametrize("async_comm", [False, True])
def test_idle_of_a_full_ring_is_the_closed_form(async_comm: bool) -> None:
    for rounds in (1, 3):
        for stage in measure_stage_use(played(4, 4, rounds, 6, async_comm)):
            assert stage.idle_s == pytest.approx(1e-9 * idle_of_full_ring(4, rounds, 6, PREFILL, DECODE))
            assert (stage.prefill_s, stage.decode_s) == pytest.approx((0.007, 0.003))


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
