"""What a communication costs in theory: how much traffic an operation makes, and the bandwidths that follow from its time.

Two bandwidths are usual. The algorithm bandwidth says how fast the program's own buffer moved, S / t. The bus bandwidth multiplies it by
what the operation must move at least over the slowest link, so that the same hardware gives the same number whatever the operation and
however many ranks there are::

    op                          S (bytes)             bus factor
    send, recv                  the message           1
    broadcast, reduce           the buffer            1
    all_reduce                  the buffer            2 (n - 1) / n
    all_gather, reduce_scatter  n shards              (n - 1) / n
    all_to_all                  the send buffer       (n - 1) / n
    gather, scatter             n shards              (n - 1) / n

n is the number of ranks in the *group*. A trace holds S as ``size_bytes``.

Source:
    nccl-tests, ``doc/PERFORMANCE.md``: the factors, and why.

Collectives as rounds of messages, for tools and clocks that know only messages.

The algorithms are the plain ones, and the bytes those of ``ringsim.traces.collectives``: a ring for all_reduce, all_gather and reduce_scatter, pairs in
turn for all_to_all, a binomial tree for broadcast and reduce, the root with each in turn for gather and scatter, dissemination for a
barrier. In a round each rank waits for what it sends and receives before the next begins.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ringsim.errors import ArgumentError, TraceFileError

__all__ = ["algbw_gb_per_s", "bus_factor", "busbw_gb_per_s", "count_rounds", "make_rounds"]

_ONE: Final = (
    *("send", "recv", "isend", "irecv", "batch_isend", "batch_irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"),
    *("broadcast", "broadcast_object_list", "reduce"),
)
_TWO_SHARES: Final = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_ONE_SHARE: Final = (
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_single", "all_gather_object", "allgather_fn"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_fn"),
    *(
        "all_to_all",
        "all_to_all_single",
        "gather",
        "gather_single",
        "gather_into_tensor",
        "gather_object",
        "scatter",
        "scatter_object_list",
    ),
)
# How many times (n - 1) / n an operation counts; 0 stands for a factor of 1, whatever n is.
_SHARES: Final = {**dict.fromkeys(_ONE, 0), **dict.fromkeys(_TWO_SHARES, 2), **dict.fromkeys(_ONE_SHARE, 1)}


def bus_factor(op: str, group_size: int) -> float:
    """Returns what turns the algorithm bandwidth of an operation into its bus bandwidth.

    Args:
        op: the operation, as torch spells it.
        group_size: number of ranks in its group, 1 or more.

    Returns:
        The factor; NaN for an operation without one: a barrier, which carries nothing, or one that nobody has derived a factor for.

    Raises:
        ArgumentError: ``group_size`` is less than 1.

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("isend", 4), bus_factor("barrier", 4)
        (1.5, 0.75, 1.0, nan)

    Source:
        nccl-tests, ``doc/PERFORMANCE.md``.
    """
    if group_size < 1:
        raise ArgumentError(f"group_size must be 1 or more, got {group_size}. Pass the number of ranks in the operation's group.")
    shares = _SHARES.get(op)
    if shares is None:
        return math.nan
    return shares * (group_size - 1) / group_size if shares else 1.0


def algbw_gb_per_s(size_bytes: int, duration_us: float) -> float:
    """Returns the algorithm bandwidth, S / t, in GB/s; 1 GB is 10**9 bytes.

    Args:
        size_bytes: S, as the table of this module says.
        duration_us: t, in microseconds.

    Returns:
        The bandwidth; NaN where nothing was carried or no time is known.

    Example:
        >>> algbw_gb_per_s(1_000_000, 500.0)
        2.0
    """
    return size_bytes / duration_us * 1e-3 if size_bytes > 0 and duration_us > 0 else math.nan


def busbw_gb_per_s(op: str, size_bytes: int, duration_us: float, group_size: int) -> float:
    """Returns the bus bandwidth in GB/s; 1 GB is 10**9 bytes.

    Args:
        op: the operation, as torch spells it.
        size_bytes: S, as the table of this module says.
        duration_us: how long it took, in microseconds.
        group_size: number of ranks in its group, 1 or more.

    Returns:
        The bandwidth; NaN where nothing was carried, no time is known, or the operation has no factor.

    Raises:
        ArgumentError: ``group_size`` is less than 1.

    Example:
        >>> busbw_gb_per_s("all_reduce", 1_000_000, 500.0, group_size=4)
        3.0
    """
    return algbw_gb_per_s(size_bytes, duration_us) * bus_factor(op, group_size)


Message = tuple[int, int, int]  # from, to: places in the group; bytes


def make_rounds(op: str, size: int, root: int, size_bytes: int) -> Iterator[list[Message]]:
    """Yields the rounds of one collective.

    Args:
        op: as torch spells it.
        size: number of ranks in the group.
        root: place of the root in the group; anything where the operation has none.
        size_bytes: S, as ``ringsim.traces.collectives`` counts it.

    Yields:
        The messages of a round: from, to (places in the group), bytes.

    Raises:
        TraceFileError: there is no such operation.

    Example:
        >>> list(make_rounds("broadcast", 4, 1, 100))
        [[(1, 2, 100)], [(1, 3, 100), (2, 0, 100)]]
        >>> sum(len(messages) for messages in make_rounds("all_reduce", 4, -1, 100))
        24
    """
    share, ring = max(-(-size_bytes // size), 1), range(size)
    if size == 1:
        return
    if op.startswith("all_reduce"):
        yield from ([(rank, (rank + 1) % size, share) for rank in ring] for _ in range(2 * (size - 1)))
    elif op.startswith(("all_gather", "reduce_scatter")):
        yield from ([(rank, (rank + 1) % size, share) for rank in ring] for _ in range(size - 1))
    elif op.startswith("all_to_all"):
        yield from ([(rank, (rank + step) % size, share) for rank in ring] for step in range(1, size))
    elif op == "broadcast":
        yield from _tree(size, root, max(size_bytes, 1))
    elif op == "reduce":
        yield from (
            [(to, source, amount) for source, to, amount in messages] for messages in [*_tree(size, root, max(size_bytes, 1))][::-1]
        )
    elif op == "gather":
        yield from ([(rank, root, share)] for rank in ring if rank != root)
    elif op == "scatter":
        yield from ([(root, rank, share)] for rank in ring if rank != root)
    elif op in ("barrier", "monitored_barrier"):
        yield from ([(rank, (rank + 2**step) % size, 1) for rank in ring] for step in range((size - 1).bit_length()))
    else:
        raise TraceFileError(f"A collective must be one that messages are known for, got {op!r}. Leave it out of the trace.")


def count_rounds(op: str, size: int, size_bytes: int) -> tuple[int, int]:
    """Returns how many rounds a collective has, and how many bytes each message of them.

    Example:
        >>> count_rounds("all_reduce", 4, 100), count_rounds("barrier", 5, 0)
        ((6, 25), (3, 1))
    """
    if size == 1:
        return 0, 0
    messages = next(make_rounds(op, size, 0, size_bytes))
    if op.startswith("all_reduce"):
        return 2 * (size - 1), messages[0][2]
    if op in ("broadcast", "reduce", "barrier", "monitored_barrier"):
        return (size - 1).bit_length(), messages[0][2]
    return size - 1, messages[0][2]


def _tree(size: int, root: int, size_bytes: int) -> Iterator[list[Message]]:
    """Yields the rounds in which those that have it send it on, each time to as many others."""
    have = 1
    while have < size:
        yield [((root + place) % size, (root + place + have) % size, size_bytes) for place in range(min(have, size - have))]
        have *= 2
