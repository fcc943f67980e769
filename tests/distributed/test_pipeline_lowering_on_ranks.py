"""Lowered schedules on ranks: they end wherever the sends and receives stand, and do what the evaluator times."""

from __future__ import annotations

import pytest
from pipeline_cases import Case, compare_all, complaints

import ringsim
from ringsim.pipeline.messages import PAYLOAD_TAG
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.engine import evaluate
from ringsim.schedules.lowering import lower, lower_in_step
from ringsim.schedules.schedule import SEND_KINDS, Action


def test_lowered_schedules_run_as_they_are() -> None:
    num_ranks = 3
    schedules = [make_schedule(name, num_ranks, 5) for name in SCHEDULE_NAMES]
    lowered = [each for schedule in schedules for each in (lower(schedule, ahead=0), lower(schedule, ahead=99), lower_in_step(schedule))]
    cases = [Case(num_microbatches=5, same_shapes=alike, options={"schedule": schedule}) for schedule in lowered for alike in (True, False)]
    by_rank = ringsim.trace(compare_all, world_size=num_ranks, args=(cases,)).results
    wrong = [each for index, case in enumerate(cases) for each in complaints(case, [results[index] for results in by_rank], 1e-10)]
    assert wrong == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_do_what_the_evaluator_times(num_ranks: int) -> None:
    """Computations and payloads in the order of the evaluation, rank by rank; headers, greetings and losses have tags of their own."""
    evaluations = [evaluate(make_schedule(name, num_ranks, 4)) for name in SCHEDULE_NAMES]
    cases = [Case(options={"schedule": evaluation.schedule.name}) for evaluation in evaluations]
    events = ringsim.trace(compare_all, world_size=num_ranks, args=(cases,)).to_pandas()
    spans = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
    for rank in range(num_ranks):
        own = events[events["rank"] == rank].sort_values("seq")
        computed = own[(own.kind == "span") & own.label.isin(spans)]
        assert [Action(row.stage, spans[row.label], row.microbatch) for row in computed.itertuples()] == [
            timed.action for evaluation in evaluations for timed in evaluation.get_computations(rank)
        ]
        payloads = own[(own.kind == "send") & (own.tag == PAYLOAD_TAG)]
        assert [(row.peer, row.stage, row.microbatch) for row in payloads.itertuples()] == [
            (evaluation.schedule.stage_ranks[action.other_side.stage], action.stage, action.microbatch)
            for evaluation in evaluations
            for action, _, _ in evaluation.actions[rank]
            if action.kind in SEND_KINDS
        ]
