"""Schedules with one stage a rank: stage s is on rank s. F is a forward, B a backward pass, p the number of ranks, m of microbatches.

GPipe does all forwards, then all backwards (p = 3, m = 4; B drawn as long as F)::

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3        all 4 microbatches live on every rank
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

1F1B starts a microbatch's backward as soon as it can, and from then on does one of each in turn::

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3        never more than 3 microbatches live
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           2
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3              1

Both end at the same time where messages cost nothing: 1F1B saves memory, not time.
"""

from __future__ import annotations

from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.schedules.arguments import check_counts
from ringsim.pipeline.schedules.rows import Phase, one_chunk, play

__all__ = ["gpipe", "linear", "one_f_one_b"]


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
    m = num_microbatches
    return linear("gpipe", m, [[(m, "F"), (m, "B")]] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: after a warm-up, one forward and one backward in turn.

    Rank s starts with p - 1 - s forwards, its distance to the last rank. When the first gradient comes back, p - s of its microbatches are
    under way, and each further forward waits until a backward has freed its place.

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
    p, m = num_ranks, num_microbatches
    rows = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        rows.append([(warm_up, "F"), (m - warm_up, "F B"), (warm_up, "B")])
    return linear("1f1b", m, rows)


def linear(name: str, num_microbatches: int, rows: list[list[Phase]], num_played: int | None = None) -> Schedule:
    """Returns the schedule with stage s on rank s whose rows are these phases.

    Args:
        name: what to call it.
        num_microbatches: how many microbatches it is for.
        rows: the phases of each rank.
        num_played: for how many microbatches the phases are, where that is more; those beyond ``num_microbatches`` are cut.
    """
    actions = []
    for stage, phases in enumerate(rows):
        places = {"": one_chunk(stage, num_played or num_microbatches)}
        actions.append(play(phases, places, places, num_microbatches))
    return Schedule(name, num_microbatches, tuple(range(len(rows))), tuple(actions))
