"""Schedules that go round the ring several times: with p ranks, rank r has the stages r, p + r, 2p + r and so on, its v chunks.

At the start a rank waits until the stages before its first one have passed a microbatch on. Stages are v times smaller here, so the bubble
is too. The price is about v times as many messages, including those over the wrap-around edge.

Two orders of a rank's forwards (p = 2, v = 2, m = 4; numbers are microbatches)::

                          chunk 0    chunk 1    chunk 0    chunk 1
    interleaved 1F1B      F0 F1      F0 F1      F2 F3      F2 F3       depth first: a round of microbatches through all chunks
    looped BFS            F0 F1 F2 F3           F0 F1 F2 F3            breadth first: all microbatches through a chunk
"""

from __future__ import annotations

from itertools import pairwise

from ringsim.schedules.schedule import Order, PhasedRow, PhasedRows, Schedule, check_counts

__all__ = ["interleaved_1f1b", "looped_bfs"]


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns interleaved 1F1B: 1F1B over several chunks a rank, depth first.

    Microbatches go in rounds of as many as there are ranks, or a few more. A round passes a rank's first chunk, then its second, and so
    on: it comes round the ring just when the rank is done with the previous chunk.

    Args:
        num_ranks: how many ranks.
        num_microbatches: how many microbatches; any number.
        num_chunks: how many stages each rank has.

    Returns:
        The schedule; if the rounds cannot be equal, the first and some others have one microbatch more.

    Raises:
        ArgumentError: a count is less than 1.

    Example:
        >>> print(*map(str, interleaved_1f1b(2, 2, num_chunks=2).actions[1]))
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, arXiv 2104.04473,
        section 2.2.2.
    """
    check_counts(num_ranks, num_microbatches, num_chunks)
    p, m, v = num_ranks, num_microbatches, num_chunks
    num_rounds = max(1, m // p)
    firsts = [-(-m * index // num_rounds) for index in range(num_rounds + 1)]  # the first microbatch of each round, and m
    rounds = [range(first, end) for first, end in pairwise(firsts)]
    warm_ups = [min((v - 1) * len(rounds[0]) + 2 * (p - 1 - rank), m * v) for rank in range(p)]
    rows = []
    for rank, warm_up in enumerate(warm_ups):
        order = Order(range(rank, v * p, p), rounds)
        phases = ((warm_up, "F"), (m * v - warm_up, "F B"), (warm_up, "B"))
        rows.append(PhasedRow(phases, (order,), (order.reverse_stages(),), m))
    return Schedule("interleaved_1f1b", m, tuple(range(p)) * v, PhasedRows(rows))


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns looped breadth-first: GPipe over several chunks a rank.

    Args:
        num_ranks: how many ranks.
        num_microbatches: how many microbatches; any number.
        num_chunks: how many stages each rank has.

    Returns:
        The schedule. Backwards go from the last microbatch to the first, as in torch.

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
        rows.append(PhasedRow(((m * v, "F"), (m * v, "B")), (Order(stages, (range(m),)),), (backwards,), m))
    return Schedule("looped_bfs", m, tuple(range(p)) * v, PhasedRows(rows))
