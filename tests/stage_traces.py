"""Traces of pipelines made from schedules, for the tests of what is read from them: the evaluator's times, as if ranks had taken them."""

from __future__ import annotations

from collections.abc import Sequence

from synthetic import Story

from ringsim.schedules import make_schedule
from ringsim.schedules.engine import Evaluation, evaluate
from ringsim.traces.steps import KINDS
from ringsim.traces.value import Trace

UNIT_MS = 2.0  # of a trace, for one unit of the evaluation
GAP_MS = 3.0  # between steps
LABELS = {kind: label for label, kind in KINDS.items()}


def trace_of(*evaluations: Evaluation, ranks: Sequence[int] | None = None, name: str | None = None) -> Trace:
    """A trace of steps one after the other; ``ranks`` says which rank of the trace has each place of the schedules.

    Every step span lasts on all ranks as long as the whole step and a little around it, as on real ranks that wait for their messages.
    """
    places = range(evaluations[0].schedule.num_ranks) if ranks is None else ranks
    story = Story(max(places) + 1)
    begin = 1.0
    for evaluation in evaluations:
        add_step(story, evaluation, begin, places, name or evaluation.schedule.name)
        begin += float(evaluation.makespan) * UNIT_MS + GAP_MS
    return story.trace()


def add_step(story: Story, evaluation: Evaluation, begin: float, places: Sequence[int], name: str) -> None:
    """Writes one step into a story, from ``begin`` on."""

    def at(time: float) -> float:
        return begin + float(time) * UNIT_MS

    for place, rank in enumerate(places):
        story.span(rank, f"step {name}", begin - 0.5, at(evaluation.makespan) + 0.5)
        for action, start, end in evaluation.get_computations(place):
            story.span(rank, LABELS[action.kind], at(start), at(end), stage=action.stage, microbatch=action.microbatch)
    for message in evaluation.messages:
        if message.arrived > message.posted:
            times = (at(message.posted), at(message.posted), at(message.arrived))
            story.message(places[message.source], places[message.rank], times, times, group="world", tag=message.send.microbatch)


def known(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Evaluation:
    """A schedule of the papers with the evaluator's times: forward 1, backward 2."""
    return evaluate(make_schedule(name, num_ranks, num_microbatches, num_chunks))
