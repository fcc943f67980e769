"""The published schedules, each defined by the phases of every rank.

Schedules with one stage per rank come first, then schedules that go around the ring several times,
then two schedules that form a V. F is a forward and B a backward; p is the number of ranks and m
the number of microbatches. In the first group, stage s is on rank s.

GPipe does all forwards, then all backwards (p = 3, m = 4; the diagrams draw B as long as F)::

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3        all 4 microbatches live on every rank
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

1F1B starts each microbatch's backward as soon as possible. From then on, forwards and backwards
alternate::

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3        never more than 3 microbatches live
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3           2
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3              1

GPipe and 1F1B end at the same time if messages cost nothing: 1F1B saves memory, not time.

Zero bubble schedules split the backward, B = I + W, and fill the gaps with its second half. The
previous rank waits for the input's gradient, I. No rank waits for the weights' gradients, W, so a
rank that would otherwise be idle does a postponed W (ZB-H1, p = 3, m = 4, all actions of the same
length)::

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 also fills the gap at the start, with more forwards. No rank is ever idle between its first
and its last action, but the memory is about twice as large.

Next are schedules that go around the ring several times. Rank r holds the stages r, p + r, 2p + r
and so on, which are its v chunks.

At the start, a rank waits until the earlier stages have passed on a microbatch. With chunks, stages
are v times smaller, and so is this bubble. The price is about v times as many messages, including
messages over the wrap-around edge.

A rank can process its forwards in two orders (p = 2, v = 2, m = 4; numbers are microbatches)::

                      chunk 0    chunk 1  chunk 0    chunk 1
    interleaved 1F1B  F0 F1      F0 F1    F2 F3      F2 F3    depth first: a round of microbatches
                                                              through all chunks
    looped BFS        F0 F1 F2 F3         F0 F1 F2 F3         breadth first: all microbatches
                                                              through a chunk

Last are schedules in which the model goes down the ranks and comes back up, like a V. Rank r holds
stage r and stage 2p - 1 - r.

::

    rank 0    stage 0                 stage 7     the loss is computed on rank 0, where the
                                                  microbatch came in
    rank 1        stage 1         stage 6
    rank 2            stage 2 stage 5
    rank 3            stage 3 stage 4             both stages of the turn are here: no message
                                                  between them

Each rank holds one stage near the start, whose activations are live for a long time, and one near
the end, whose activations are not. All ranks therefore need the same memory. In the phases below,
chunk 0 is on the way down and chunk 1 on the way up.
"""

from __future__ import annotations

from itertools import pairwise

from ringsim.schedules.schedule import (
    Order,
    PhasedRow,
    PhasedRows,
    Schedule,
    check_counts,
    phased,
)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns GPipe, also called AFAB: all forwards, then all backwards.

    Args:
        num_ranks: the number of ranks, each with one stage.
        num_microbatches: the number of microbatches, which may be less than ``num_ranks``.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in gpipe(2, 3).actions]
        ['0F0 0F1 0F2 0B0 0B1 0B2', '1F0 1F1 1F2 1B0 1B1 1B2']

    Source:
        Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
        2018, arXiv 1811.06965, figure 2. In the paper, the backwards run from the last microbatch
        to the first; here they start with the first, as in torch. The times are the same.
    """
    check_counts(num_ranks, num_microbatches)
    m = num_microbatches
    return phased("gpipe", m, [[(m, "F"), (m, "B")]] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: after a warm-up, forwards and backwards alternate.

    Rank s starts with p - 1 - s forwards, one for each rank after it. When the first gradient comes
    back, p - s microbatches are in progress on the rank. From then on, each forward waits until a
    backward has finished a microbatch.

    Args:
        num_ranks: the number of ranks, each with one stage.
        num_microbatches: the number of microbatches, which may be less than ``num_ranks``.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in one_f_one_b(2, 3).actions]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM, 2021, arXiv 2104.04473, section 2.2.1; first in PipeDream, arXiv 1806.03377.
    """
    check_counts(num_ranks, num_microbatches)
    p, m = num_ranks, num_microbatches
    rows = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        rows.append([(warm_up, "F"), (m - warm_up, "F B"), (warm_up, "B")])
    return phased("1f1b", m, rows)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H1: 1F1B with the backward split in two.

    ZB-H1 has a smaller bubble, but every rank needs as much memory as 1F1B's first rank.

    Args:
        num_ranks: the number of ranks, each with one stage.
        num_microbatches: the number of microbatches; with fewer microbatches than ranks, some gaps
            remain.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_h1(2, 3).actions]
        ['0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2', '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241, section 2.1 and
        figure 3.
    """
    return _zero_bubble("zb_h1", num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-H2, which leaves no gaps between a rank's first and last action.

    ZB-H2 needs about twice as much memory as 1F1B.

    Args:
        num_ranks: the number of ranks, each with one stage.
        num_microbatches: the number of microbatches; if less than 2 ``num_ranks`` - 1, some gaps
            remain.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_h2(2, 3).actions]
        ['0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2', '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241, section 2.2 and
        figure 3.
    """
    return _zero_bubble("zb_h2", num_ranks, num_microbatches, 2)


def _zero_bubble(name: str, num_ranks: int, num_microbatches: int, distance: int) -> Schedule:
    """Returns ZB-H1 or ZB-H2.

    From rank to rank, the warm-up gets shorter by ``distance`` forwards, and the weights' gradients
    are computed ``distance`` microbatches later.
    """
    check_counts(num_ranks, num_microbatches)
    delays = [distance * rank for rank in range(num_ranks)]
    played = max(num_microbatches, delays[-1] + 1)
    rows = []
    for warm_up, put_off in zip(reversed(delays), delays, strict=True):
        phases = [
            (warm_up, "F"),
            (put_off, "F I"),
            (played - delays[-1], "F I W"),
            (warm_up, "I W"),
            (put_off, "W"),
        ]
        rows.append(phases)
    return phased(name, num_microbatches, rows, num_played=played)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns interleaved 1F1B: 1F1B over several chunks per rank, depth first.

    Microbatches run in rounds of ``num_ranks`` microbatches, or slightly more. A round passes
    through a rank's first chunk, then its second, and so on. The round comes back around the ring
    just when the rank has finished the previous chunk.

    Args:
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches.
        num_chunks: the number of stages per rank.

    Returns:
        The schedule. If the rounds cannot be equal, the first round and some others have one extra
        microbatch.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> print(*map(str, interleaved_1f1b(2, 2, num_chunks=2).actions[1]))
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM, 2021, arXiv 2104.04473, section 2.2.2.
    """
    check_counts(num_ranks, num_microbatches, num_chunks)
    p, m, v = num_ranks, num_microbatches, num_chunks
    num_rounds = max(1, m // p)
    # the first microbatch of each round, followed by m
    firsts = [-(-m * index // num_rounds) for index in range(num_rounds + 1)]
    rounds = [range(first, end) for first, end in pairwise(firsts)]
    warm_ups = [min((v - 1) * len(rounds[0]) + 2 * (p - 1 - rank), m * v) for rank in range(p)]
    rows = []
    for rank, warm_up in enumerate(warm_ups):
        order = Order(range(rank, v * p, p), rounds)
        phases = ((warm_up, "F"), (m * v - warm_up, "F B"), (warm_up, "B"))
        rows.append(PhasedRow(phases, (order,), (Order(order.stages[::-1], rounds),), m))
    return Schedule("interleaved_1f1b", m, tuple(range(p)) * v, PhasedRows(rows))


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns looped BFS (breadth first): GPipe over several chunks per rank.

    Args:
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches.
        num_chunks: the number of stages per rank.

    Returns:
        The schedule. Backwards run from the last microbatch to the first, as in torch.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> print(*map(str, looped_bfs(2, 2, num_chunks=2).actions[1]))
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

    Source:
        Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022, arXiv 2211.05953.
    """
    check_counts(num_ranks, num_microbatches, num_chunks)
    p, m, v = num_ranks, num_microbatches, num_chunks
    rows = []
    for rank in range(p):
        stages = range(rank, v * p, p)
        backwards = Order(stages[::-1], (range(m)[::-1],))
        rows.append(
            PhasedRow(((m * v, "F"), (m * v, "B")), (Order(stages, (range(m),)),), (backwards,), m)
        )
    return Schedule("looped_bfs", m, tuple(range(p)) * v, PhasedRows(rows))


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns ZB-V, which leaves no gaps between a rank's first and last action.

    The gaps disappear only if F, I and W take the same time. ZB-V needs as much memory as 1F1B.

    Args:
        num_ranks: the number of ranks, each with two stages.
        num_microbatches: the number of microbatches; if less than 2 ``num_ranks`` - 1, some gaps
            remain.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in zb_v(2, 1).actions]
        ['0F0 3F0 3I0 3W0 0I0 0W0', '1F0 2F0 2I0 2W0 1I0 1W0']

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241: ZB-V. The phases are
        the same as in torch's ScheduleZBVZeroBubble.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    rows = []
    for rank in range(p):
        after = p - 1 - rank  # the number of ranks between this one and the turn
        phases = [
            (2 * after + 1, "F0"),  # until the first microbatch comes back up
            (rank, "F1 F0"),
            (after + 1, "F1 I1 W1"),
            (played - p - after, "F0 I0 W0 F1 I1 W1"),
            (after, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),  # earlier ranks wait for these, so W comes later
            (after + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        rows.append(phases)
    stages = [(rank, 2 * p - 1 - rank) for rank in range(p)]
    return phased("zb_v", num_microbatches, rows, stages, played)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns DualPipeV, which pairs forwards of one chunk with backwards of the other.

    DualPipeV is designed for hardware that can run a forward and a backward at the same time. In
    the middle phases, the forward of one chunk overlaps with the backward of the other.
    ``Costs.overlap`` determines how much time this saves. By default, it saves none, because the
    executor runs the two actions one after the other.

    Args:
        num_ranks: the number of ranks, each with two stages.
        num_microbatches: the number of microbatches; if it is less than 2 ``num_ranks``, most of
            the overlap is lost.

    Returns:
        The schedule.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> [" ".join(map(str, row)) for row in dualpipe_v(2, 1).actions]
        ['0F0 3F0 3I0 3W0 0B0', '1F0 2F0 2B0 1B0']

    Source:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, arXiv 2412.19437, section 3.2.1: DualPipe.
        Its repository, github.com/deepseek-ai/DualPipe, cuts DualPipe in half to form a V. The
        phases here are the steps in the repository, as in torch's ScheduleDualPipeV.
    """
    check_counts(num_ranks, num_microbatches)
    p, played = num_ranks, max(num_microbatches, 2 * num_ranks)
    rows = []
    for rank in range(p):
        after = p - 1 - rank
        first = int(after == 0)  # the last rank's first forward and backward do not overlap
        phases = [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "I1 W F1"),
            (first, "F0 B1 F1+ B0"),
            (played - p - after - first, "F0+ B1 F1+ B0"),
            (after, "B1 F1+ B0"),
            # rank + 1 times B1 B0; the second half of these backwards is split, because earlier
            # ranks wait for the gradients
            ((rank + 1) // 2, "B1 B0"),
            ((rank + 1) % 2, "B1 I0"),
            ((rank + 1) // 2, "I1 I0"),
            (after, "W I0"),
            (rank + 1, "W"),
        ]
        rows.append(phases)
    stages = [(rank, 2 * p - 1 - rank) for rank in range(p)]
    return phased("dualpipe_v", num_microbatches, rows, stages, played)
