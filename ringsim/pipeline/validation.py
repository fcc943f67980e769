"""Whether a schedule is a whole training step that every rank can come to the end of."""

from __future__ import annotations

from ringsim.errors import Deadlock, ScheduleError
from ringsim.pipeline.actions import Action
from ringsim.pipeline.evaluator import evaluate
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.well_formed import check_places

__all__ = ["validate"]


def validate(schedule: Schedule) -> None:
    """Refuses a schedule that is not complete, not in order, or cannot finish.

    * Complete: each stage does ``F`` of each microbatch once, and ``B``, or ``I`` and ``W``, once; on its own rank.
    * In order: what an action needs from its own rank comes before it; in a lowered schedule sends and receives meet in order.
    * Free of deadlock where a send ends only when it is received, whatever the actions cost.

    Args:
        schedule: any schedule, lowered or not.

    Raises:
        ScheduleError: with the first action that breaks a rule, its rank and its position in the rank's row, from 0.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> validate(one_f_one_b(num_ranks=2, num_microbatches=4))
        >>> validate(Schedule("mine", 2, (0,), ((Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1)),)))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: stage 0 must do the backward pass of microbatch 1, got none (rank 0). Add 0B1, or 0I1 and 0W1.
    """
    check_places(schedule)
    _check_complete(schedule)
    try:
        evaluate(schedule)
    except Deadlock as stuck:
        rank, action = stuck.diagnosis[0]
        position = schedule.actions[rank].index(action)
        raise ScheduleError(f"{stuck} The first is {action} (rank {rank}, position {position}).", diagnosis=stuck.diagnosis) from stuck


def _check_complete(schedule: Schedule) -> None:
    """Refuses a schedule in which a stage leaves something of a microbatch out."""
    for stage, rank in enumerate(schedule.stage_ranks):
        done = set(schedule.actions[rank])
        for microbatch in range(schedule.num_microbatches):
            forward, backward, gradient, weights = (Action(stage, kind, microbatch) for kind in "FBIW")
            where = f"of microbatch {microbatch}, got none (rank {rank})"
            if forward not in done:
                raise ScheduleError(f"stage {stage} must do the forward pass {where}. Add {forward}.")
            if backward not in done and gradient not in done:
                raise ScheduleError(f"stage {stage} must do the backward pass {where}. Add {backward}, or {gradient} and {weights}.")
            if gradient in done and weights not in done:
                raise ScheduleError(f"stage {stage} must make the weights' gradients {where}. Add {weights} after {gradient}.")
