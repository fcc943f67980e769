"""Schedules in which the model goes down the ranks and comes back up, like a V: rank r has stage r and stage 2p - 1 - r.

::

    rank 0    stage 0                 stage 7     the loss is computed on rank 0, where the microbatch came in
    rank 1        stage 1         stage 6
    rank 2            stage 2 stage 5
    rank 3            stage 3 stage 4             both stages of the turn are here: no message between them

Each rank has one stage near the start, whose activations live long, and one near the end, whose activations do not: all ranks need the same
memory. In the phases below, chunk 0 is the one on the way down, chunk 1 the one on the way up.
"""

from __future__ import annotations

from ringsim.schedules.schedule import Schedule, check_counts, phased

__all__ = ["dualpipe_v", "zb_v"]


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-V: no gap between a rank's first and last action where F, I and W take the same time, for the memory of 1F1B.

    Args:
        num_ranks: how many ranks, each with two stages.
        num_microbatches: how many microbatches; with fewer than 2 ``num_ranks`` - 1 some gaps stay.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_v(2, 1).actions]
        ['0F0 3F0 3I0 3W0 0I0 0W0', '1F0 2F0 2I0 2W0 1I0 1W0']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241: ZB-V. The phases are those of torch's
        ScheduleZBVZeroBubble.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    rows = []
    for rank in range(p):
        after = p - 1 - rank  # how many ranks are between this one and the turn
        phases = [
            (2 * after + 1, "F0"),  # until the first microbatch has come back up
            (rank, "F1 F0"),
            (after + 1, "F1 I1 W1"),
            (played - p - after, "F0 I0 W0 F1 I1 W1"),
            (after, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),  # earlier ranks wait for these, so their W come later
            (after + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        rows.append(phases)
    return phased("zb_v", num_microbatches, rows, [(rank, 2 * p - 1 - rank) for rank in range(p)], played)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns DualPipeV: forwards of one chunk beside backwards of the other, made for hardware that can do both at once.

    The pairs ``F0 B1`` and ``F1 B0`` of the middle phases are what the paper computes at the same time, hiding the messages of one behind
    the computing of the other. Here they run one after the other.

    Args:
        num_ranks: how many ranks, each with two stages.
        num_microbatches: how many microbatches; with fewer than 2 ``num_ranks`` most of the overlap is lost.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in dualpipe_v(2, 1).actions]
        ['0F0 3F0 3I0 3W0 0B0', '1F0 2F0 2B0 1B0']

    Source:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, arXiv 2412.19437, section 3.2.1: DualPipe; cut in half to a V in its repository,
        github.com/deepseek-ai/DualPipe. The phases are its steps, as in torch's ScheduleDualPipeV.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, 2 * num_ranks)
    rows = []
    for rank in range(p):
        after = p - 1 - rank
        phases = [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "I1 W F1"),
            (played - p - after, "F0 B1 F1 B0"),
            (after, "B1 F1 B0"),
            # rank + 1 times B1 B0; the second half of these backwards is split, because earlier ranks wait for the gradients
            ((rank + 1) // 2, "B1 B0"),
            ((rank + 1) % 2, "B1 I0"),
            ((rank + 1) // 2, "I1 I0"),
            (after, "W I0"),
            (rank + 1, "W"),
        ]
        rows.append(phases)
    return phased("dualpipe_v", num_microbatches, rows, [(rank, 2 * p - 1 - rank) for rank in range(p)], played)
