"""Errors of a prediction, compared with typed-out ones and with the evaluator's makespans."""

from __future__ import annotations

import numpy as np
import pytest
from stage_traces import trace_of
from synthetic import Story

from ringsim.errors import ArgumentError
from ringsim.predict.comparison import Errors, compare
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate
from ringsim.traces.value import Trace

SCHEDULE = make_schedule("1f1b", 3, 4)


def step(scale: float = 1.0, latency: float = 0.25, steps: int = 1) -> Trace:
    """A recorded 1F1B, all times multiplied; a unit lasts 2 ms."""
    costs = Costs(forward=scale, backward=2 * scale, latency=latency * scale)
    return trace_of(*[evaluate(SCHEDULE, costs)] * steps)


def test_a_run_beside_itself_is_without_error() -> None:
    comparison = compare(step(steps=2), step(steps=2))
    assert comparison.steps == comparison.operations.__class__(0, 0, 0, 2)
    assert np.array_equal(comparison.lag_s, np.zeros(len(comparison.lag_s)))
    assert comparison.median_error == 0


def test_errors_are_signed_and_relative_to_what_was_measured() -> None:
    comparison = compare(step(), step(scale=0.8))
    assert comparison.steps.bias == pytest.approx(-0.2)
    assert comparison.steps.mean == comparison.steps.worst == pytest.approx(0.2)
    assert comparison.operations.bias < 0  # everything ends too early
    last = comparison.real.events.done_ns[comparison.real_index].argmax()
    assert comparison.lag_s[last] == pytest.approx(-0.2 * comparison.real_steps_s[0])


def test_no_communication_is_the_same_schedule_without_messages() -> None:
    comparison = compare(step(latency=0.25), step(latency=0.25))
    without = evaluate(SCHEDULE, Costs(forward=1, backward=2)).makespan * 2e-3  # 2 ms a unit
    assert comparison.no_communication_s == pytest.approx(float(without))
    assert comparison.baseline("no communication").bias == pytest.approx(float(without) / comparison.real_steps_s[0] - 1)
    assert comparison.nominal_s is None  # nobody asked for seconds
    with pytest.raises(ArgumentError, match=r"name must be one of the baselines \['no communication'\], got 'nominal'"):
        comparison.baseline("nominal")


def test_nominal_is_what_the_program_asked_for() -> None:
    def run(longer_ms: float) -> Trace:
        story = Story(2)
        for rank, begin in ((0, 10.0), (1, 16.0 + longer_ms)):
            end = begin + 5 + longer_ms
            story.span(rank, "step gpipe", begin - 1, end + 1)
            story.span(rank, "forward", begin, end, stage=rank, microbatch=0)
            story.span(rank, "compute 0.005 s", begin, end)
        return story.trace()

    comparison = compare(run(0.5), run(0.25))
    assert comparison.nominal_s == pytest.approx(0.010)
    assert comparison.no_communication_s == pytest.approx(0.0105)  # with the computations of the prediction
    assert comparison.real_steps_s[0] == pytest.approx(0.012)
    assert comparison.virtual_steps_s[0] == pytest.approx(0.0115)
    assert "baseline nominal: 10.000 ms" in repr(comparison)


def test_computations_that_touch_are_told_apart() -> None:
    story = Story(1)
    story.span(0, "step gpipe", 9, 24)
    for microbatch in range(2):  # on a virtual clock nothing lies between them
        begin = 10.0 + 5 * microbatch
        story.span(0, "forward", begin, begin + 5, stage=0, microbatch=microbatch)
        story.span(0, "compute 0.004 s", begin, begin + 5)
    trace = story.trace()
    assert compare(trace, trace).nominal_s == pytest.approx(0.008)


def test_a_run_without_steps_is_one_step() -> None:
    def run(arrives_ms: float) -> Trace:
        story = Story(2)
        story.message(0, 1, (1, 1, arrives_ms), (2, 2, arrives_ms))
        return story.trace()

    comparison = compare(run(5.0), run(6.0))
    assert comparison.real_steps_s.tolist() == pytest.approx([0.004])
    assert comparison.steps.bias == pytest.approx(0.25)
    assert comparison.lag_s.tolist() == pytest.approx([0.001, 0.001])
    assert comparison.nominal_s is comparison.no_communication_s is None


def test_runs_of_other_programs_are_refused() -> None:
    story = Story(3)
    story.message(0, 1, (1, 1, 2), (1, 1, 2))
    other = Story(3)
    other.message(0, 2, (1, 1, 2), (1, 1, 2), group="world")
    with pytest.raises(ArgumentError, match=r"got isend with 1 in one and isend with 2 in the other \(rank 0, operation 0\)"):
        compare(story.trace(), other.trace())
    with pytest.raises(ArgumentError, match="the two runs must have as many ranks, got 3 and 2"):
        compare(story.trace(), Story(2).trace())
    with pytest.raises(ArgumentError, match=r"got the span 'step 1f1b' in one and nothing more in the other \(rank 0"):
        compare(step(steps=2), step(steps=1))
    with pytest.raises(ArgumentError, match="must have something to compare"):
        compare(Story(1).trace(), Story(1).trace())


def test_errors_of_nothing_are_none() -> None:
    assert np.isnan(Errors.of([]).mean)
    assert Errors.of([]).count == 0
