"""Schedules with one stage a rank: stage s is on rank s. F is a forward, B a backward pass, p the number of ranks, m of microbatches.

GPipe does all forwards, then all backwards (p = 3, m = 4; B drawn as long as F)::

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

1F1B starts a microbatch's backward as soon as it can, and from then on does one of each in turn::

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3        never more than 3 microbatches live
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           2
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3              1

Both end at the same time where messages cost nothing: 1F1B saves memory, not time.
"""

from __future__ import annotations

from ringsim.pipeline.actions import Action
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.schedules.arguments import check_counts

__all__ = ["gpipe", "one_f_one_b"]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns GPipe, also called AFAB: all forwards, then all backwards.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; fewer than ranks is allowed.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in gpipe(2, 3).actions]
        ['0F0 0F1 0F2 0B0 0B1 0B2', '1F0 1F1 1F2 1B0 1B1 1B2']

    Source:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2018, arXiv 1811.06965, figure 2.
        The backwards there run from the last microbatch to the first; here from the first, as in torch: the times are the same.
    """
    check_counts(num_ranks, num_microbatches)
    rows = tuple(
        tuple(Action(stage, kind, microbatch) for kind in ("F", "B") for microbatch in range(num_microbatches))
        for stage in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, tuple(range(num_ranks)), rows)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: after a warm-up, one forward and one backward in turn.

    Rank s starts with p - 1 - s forwards, the distance to the last stage: when the first gradient comes back, p - s of its microbatches
    are under way, and each further forward waits until a backward has freed its place.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; fewer than ranks is allowed.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in one_f_one_b(2, 3).actions]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, arXiv 2104.04473,
        section 2.2.1; first in PipeDream, arXiv 1806.03377.
    """
    check_counts(num_ranks, num_microbatches)
    rows = tuple(tuple(_one_f_one_b_row(stage, num_ranks - 1 - stage, num_microbatches)) for stage in range(num_ranks))
    return Schedule("1f1b", num_microbatches, tuple(range(num_ranks)), rows)


def _one_f_one_b_row(stage: int, warm_up: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(stage, "F", microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(stage, "B", microbatch) for microbatch in range(num_microbatches)]
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):  # the last backwards have no forward to go with
        row += [forward, backward]
    return row + backwards[len(forwards[warm_up:]) :]
