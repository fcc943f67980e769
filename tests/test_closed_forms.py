"""Closed forms against the evaluator, which does the lists: two answers that know nothing of each other."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.closed_forms import (
    Step,
    bubble_of_ideal,
    bubble_of_total,
    gpipe_makespan,
    idle,
    makespan,
    messages,
    one_f_one_b_bound,
    peak_live,
    span_idle,
)
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import Evaluation, evaluate
from ringsim.schedules.lowering import lower

TIMES = st.integers(0, 12) | st.fractions(Fraction(1, 9), 9, max_denominator=9)
ALL = [(name, None) for name in SCHEDULE_NAMES] + [("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]
LEAST = {"zb_h1": lambda p: p, "zb_h2": lambda p: 2 * p - 1, "zb_v": lambda p: 2 * p - 1, "dualpipe_v": lambda p: 2 * p}


def make(step: Step) -> Evaluation:
    """Evaluates a step with the default costs."""
    return evaluate(make_schedule(step.name, step.num_ranks, step.num_microbatches, step.num_chunks))


def test_known_points() -> None:
    """4 ranks, 8 microbatches, F = I = W = 1: typed out, by makespan and by span."""
    known = {"gpipe": (33, 9), "1f1b": (33, 9), "interleaved_1f1b": (57, 9), "looped_bfs": (57, 9), "zb_h1": (27, 3), "zb_h2": (27, 0)}
    for name, points in (known | {"zb_v": (51, 0), "dualpipe_v": (51, 3)}).items():
        step = Step(name, 4, 8)
        assert (makespan(step), span_idle(step)) == (make(step).makespan, max(make(step).span_idle)) == points
    assert makespan(Step("1f1b", 1024, 8192)) == 3 * (1024 + 8192 - 1)  # a large step costs nothing


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_form_is_what_the_evaluator_finds(name: str, num_chunks: int | None) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)):
        step = Step(name, p, m, num_chunks)
        evaluation = make(step)
        counted = [sum(message.source == rank for message in evaluation.messages) for rank in range(p)]
        assert list(messages(step)) == counted, step
        if name not in ("zb_v", "dualpipe_v"):
            assert peak_live(step) == evaluation.peak_live, step
        if m < LEAST.get(name, lambda p: 1)(p):
            with pytest.raises(ScheduleError, match="for its closed form"):
                makespan(step)
            continue
        assert makespan(step) == evaluation.makespan, step
        assert set(evaluation.idle) == {idle(step)}, step
        assert max(evaluation.span_idle) == span_idle(step), step
        assert peak_live(step) == evaluation.peak_live, step


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(0, 6), st.tuples(TIMES, TIMES, TIMES))
def test_any_costs(name: str, p: int, more: int, times: tuple[int | Fraction, ...]) -> None:
    m = LEAST.get(name, lambda p: 1)(p) + more
    costs = Costs(*(times[:1] * 3 if name in ("zb_v", "dualpipe_v") else times))  # equal ones alone have a form there
    evaluation = evaluate(make_schedule(name, p, m), costs)
    assert makespan(Step(name, p, m), costs) == evaluation.makespan
    assert span_idle(Step(name, p, m), costs) == max(evaluation.span_idle)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 16), TIMES, TIMES, st.integers(0, 200))
def test_messages_that_take_time(name: str, p: int, m: int, forward: int | Fraction, backward: int | Fraction, latency: int) -> None:
    costs = Costs(forward=forward, backward=backward, latency=latency)
    schedule = make_schedule(name, p, m)
    assert makespan(Step(name, p, m), costs) == evaluate(schedule, costs, "buffered").makespan
    assert makespan(Step(name, p, m), costs, "rendezvous") == evaluate(lower(schedule, ahead=0), costs, "rendezvous").makespan


@given(st.integers(1, 10), st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6), st.integers(0, 20))
def test_stages_that_differ(m: int, stages: list[tuple[int, int]], latency: int) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    costs = Costs(forward=forward, backward=backward, latency=latency)
    assert gpipe_makespan(m, forward, backward, latency) == evaluate(make_schedule("gpipe", len(stages), m), costs, "buffered").makespan
    bound = one_f_one_b_bound(m, forward, backward)
    found = evaluate(make_schedule("1f1b", len(stages), m), costs, "buffered").makespan
    assert bound <= found
    if len(set(stages)) == 1 and latency == 0:
        assert (
            gpipe_makespan(m, forward, backward) == found == makespan(Step("1f1b", len(stages), m), Costs(forward[0], backward=backward[0]))
        )


def test_both_ways_to_say_a_bubble() -> None:
    step = Step("1f1b", 4, 8)
    assert bubble_of_ideal(step) == Fraction(3, 8)  # (p-1) / m
    assert bubble_of_total(step) == Fraction(3, 11)  # (p-1) / (m+p-1)
    assert bubble_of_ideal(Step("interleaved_1f1b", 4, 8, 3)) == Fraction(3, 24)  # (p-1) / (m v)
    assert bubble_of_total(step, Costs(forward=0.5, backward=1.0)) == pytest.approx(3 / 11)
    assert bubble_of_total(Step("1f1b", 1, 8)) == 0
    assert bubble_of_ideal(step, Costs(0, 0, 0)) == 0


@pytest.mark.parametrize(
    ("step", "costs", "message"),
    [
        (Step("zb_h1", 4, 3), Costs(), "num_microbatches of zb_h1 on 4 ranks must be 4 or more for its closed form, got 3"),
        (Step("zb_v", 4, 8), Costs(forward=2), "f, i, w of zb_v must be equal for its closed form, got 2, 1, 1"),
        (Step("dualpipe_v", 2, 8), Costs(backward=3), r"must be equal for its closed form, got 1, 1, 1 \(and b = 3\)"),
        (Step("1f1b", 2, 8), Costs(forward=[1, 2]), "costs must be the same for all stages"),
        (Step("zb_h2", 2, 8), Costs(latency=1), "latency of zb_h2 must be 0 for its closed form, got 1"),
    ],
)
def test_no_formula(step: Step, costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        makespan(step, costs)


def test_steps_are_checked() -> None:
    with pytest.raises(ScheduleError, match="a schedule must be one of"):
        Step("own", 2, 2)
    with pytest.raises(ScheduleError, match="num_chunks of zb_v must be 2, got 1"):
        Step("zb_v", 2, 2, 1)
    with pytest.raises(ArgumentError, match="num_ranks must be 1 or more, got 0"):
        Step("gpipe", 0, 2)
    with pytest.raises(ArgumentError, match="semantics must be one of rendezvous, buffered, got 'grouped'"):
        makespan(Step("gpipe", 2, 2), semantics="grouped")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one time a stage each, got 2 and 1"):
        gpipe_makespan(2, [1, 2], [1])
    with pytest.raises(ArgumentError, match="must be 1 or more, got 0"):
        one_f_one_b_bound(0, [1], [1])
