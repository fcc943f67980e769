"""What stages that differ cost, as formulas: with one stage a rank, and times given by stage.

The slowest stage sets the pace, and all microbatches queue before it; the others are passed once each way. GPipe, with a second stage that
takes twice as long::

    rank 0   F0 F1 F2                   B0    B1    B2
    rank 1      F0--- F1--- F2--- B0--- B1--- B2---
"""

from __future__ import annotations

from collections.abc import Sequence

from ringsim.errors import ArgumentError
from ringsim.pipeline.programs import Time
from ringsim.pipeline.schedules.arguments import check_counts

__all__ = ["gpipe_makespan", "one_f_one_b_bound"]


def gpipe_makespan(num_microbatches: int, forward: Sequence[Time], backward: Sequence[Time], latency: Time = 0) -> Time:
    """Returns how long GPipe takes with stages that differ: the slowest stage sets the pace, the others are passed once.

    Args:
        num_microbatches: how many microbatches.
        forward: the time of each stage's forward.
        backward: the time of each stage's backward.
        latency: how long a message takes; it travels as soon as it is sent.

    Returns:
        The time from the start of the first action to the end of the last.

    Raises:
        ArgumentError: there is no stage, or a stage has one time only, or there is no microbatch.

    Example:
        >>> gpipe_makespan(3, forward=[1, 2, 1], backward=[2, 4, 2])
        24

    Source:
        GPipe is a row of machines that each microbatch passes in the same order; checked against the evaluator.
    """
    _check(num_microbatches, forward, backward)
    pace = max(forward) + max(backward)
    return sum(forward) + sum(backward) + (num_microbatches - 1) * pace + 2 * (len(forward) - 1) * latency


def one_f_one_b_bound(num_microbatches: int, forward: Sequence[Time], backward: Sequence[Time]) -> Time:
    """Returns what 1F1B takes at least with stages that differ; there is no simple formula for what it takes.

    Args:
        num_microbatches: how many microbatches.
        forward: the time of each stage's forward.
        backward: the time of each stage's backward.

    Returns:
        For the worst stage: its whole work, and one microbatch's way from the start to it and back.

    Raises:
        ArgumentError: there is no stage, or a stage has one time only, or there is no microbatch.

    Example:
        >>> one_f_one_b_bound(3, forward=[1, 2, 1], backward=[2, 4, 2])
        21

    Source:
        No stage can begin before the first microbatch reaches it, nor end later than the last one's gradient leaves it.
    """
    _check(num_microbatches, forward, backward)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return max(sum(both[:stage]) + num_microbatches * time for stage, time in enumerate(both))


def _check(num_microbatches: int, forward: Sequence[Time], backward: Sequence[Time]) -> None:
    check_counts(len(forward), num_microbatches)
    if len(forward) != len(backward):
        raise ArgumentError(
            f"forward and backward must have one time a stage each, got {len(forward)} and {len(backward)}. Add the missing."
        )
