"""Schedules with one stage a rank, stage s on rank s. F is a forward, B a backward; p is the number of ranks, m the number of microbatches.

GPipe does all forwards, then all backwards (p = 3, m = 4; B drawn as long as F)::

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3        all 4 microbatches live on every rank
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

1F1B starts a microbatch's backward as soon as it can, and from then on does one of each in turn::

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3        never more than 3 microbatches live
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           2
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3              1

Both end at the same time when messages cost nothing: 1F1B saves memory, not time.

Zero bubble schedules split the backward, B = I + W, and fill the gaps with its second half. The previous rank waits for the input's
gradient I. Nobody waits for the weights' gradients W, so a rank that would be idle does one that it has put off (ZB-H1, p = 3, m = 4, all
actions of the same length)::

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 also fills the gap at the start, with more forwards: no rank is ever idle between its first and its last action, for about twice the
memory.
"""

from __future__ import annotations

from ringsim.schedules.schedule import Phase, Schedule, check_counts, phased

__all__ = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2"]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns GPipe, also called AFAB: all forwards, then all backwards.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; may be fewer than ranks.

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
    return phased("gpipe", m, [[(m, "F"), (m, "B")]] * num_ranks, [[rank] for rank in range(num_ranks)])


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: after a warm-up, one forward and one backward in turn.

    Rank s starts with p - 1 - s forwards, its distance to the last rank. When the first gradient comes back, p - s of its microbatches are
    under way; from then on each forward waits until a backward has freed a place.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; may be fewer than ranks.

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
    return phased("1f1b", m, rows, [[rank] for rank in range(p)])


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H1: 1F1B's order with the backward split; a smaller bubble for the memory of 1F1B's first rank on every rank.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; may be fewer than ranks, but then some gaps stay.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_h1(2, 3).actions]
        ['0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2', '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241, section 2.1 and figure 3.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, num_ranks)
    rows = [_row(warm_up=p - 1 - rank, put_off=rank, num_microbatches=played) for rank in range(p)]
    return phased("zb_h1", num_microbatches, rows, [[rank] for rank in range(p)], played)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H2: no gap between a rank's first and last action, for about twice the memory of 1F1B.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; with fewer than 2 ``num_ranks`` - 1 some gaps stay.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_h2(2, 3).actions]
        ['0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2', '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241, section 2.2 and figure 3.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    rows = [_row(warm_up=2 * (p - 1 - rank), put_off=2 * rank, num_microbatches=played) for rank in range(p)]
    return phased("zb_h2", num_microbatches, rows, [[rank] for rank in range(p)], played)


def _row(warm_up: int, put_off: int, num_microbatches: int) -> list[Phase]:
    """Phases of a rank: ``warm_up`` forwards first, and the weights' gradients always ``put_off`` microbatches late."""
    return [
        (warm_up, "F"),
        (put_off, "F I"),
        (num_microbatches - warm_up - put_off, "F I W"),
        (warm_up, "I W"),
        (put_off, "W"),
    ]
