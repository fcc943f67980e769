"""Zero bubble schedules with one stage a rank: the backward is split, and its second half fills the gaps.

B = I + W. The input's gradient I is what the rank before waits for. The weights' gradients W wait for nobody, and nobody waits for them, so
a rank that would be idle does one that it has put off (ZB-H1, p = 3, m = 4, all of the same length)::

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 also fills the gap at the start, with further forwards: no rank is ever idle between its first and its last action, for about twice
the memory.
"""

from __future__ import annotations

from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.schedules.arguments import check_counts
from ringsim.pipeline.schedules.linear import linear
from ringsim.pipeline.schedules.rows import Phase

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H1: 1F1B's order with the backward split; a smaller bubble for the memory of 1F1B's first rank on every rank.

    Args:
        num_ranks: how many ranks, each with one stage.
        num_microbatches: how many microbatches; fewer than ranks is allowed, and then some gaps stay.

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
    return linear("zb_h1", num_microbatches, rows, played)


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
    return linear("zb_h2", num_microbatches, rows, played)


def _row(warm_up: int, put_off: int, num_microbatches: int) -> list[Phase]:
    """Phases of a rank: ``warm_up`` forwards first, and the weights' gradients always ``put_off`` microbatches late."""
    return [
        (warm_up, "F"),
        (put_off, "F I"),
        (num_microbatches - warm_up - put_off, "F I W"),
        (warm_up, "I W"),
        (put_off, "W"),
    ]
