"""The table of all collectives.

The table lists each collective's names and traffic, and the messages that can implement it. The
recorder, the trace analysis, the simulator and the readers of other formats use the table to
distinguish collectives. The backends add torch's arguments to it (``ringsim.comm.calls``).

The speed of a collective is measured by two bandwidths. The algorithm bandwidth, S / t, is the
speed at which the program's own buffer moved. The bus bandwidth is the algorithm bandwidth times
the share of S that has to cross the slowest link. On given hardware, the bus bandwidth is the same
for every operation and every number of ranks::

    family                      S (bytes)        bus factor     made of
    send, recv                  the message      1              itself
    broadcast, reduce           the buffer       1              a binomial tree
    all_reduce                  the buffer       2 (n - 1) / n  a ring, twice around
    all_gather, reduce_scatter  n shards         (n - 1) / n    a ring
    all_to_all                  the send buffer  (n - 1) / n    pairs, one partner after another
    gather, scatter             n shards         (n - 1) / n    the root with each rank in turn
    barrier                     0                none           dissemination

n is the number of ranks in the *group*. A trace stores S as ``size_bytes``. Messages are sent in
rounds: each rank waits for its sends and receives in one round before it begins the next.

Source:
    nccl-tests, ``doc/PERFORMANCE.md``: the factors and their derivation. R. Thakur, R.
    Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
    19 (2005): the algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ringsim.errors import TraceFileError

Transfer = tuple[int, int, int]  # source and destination as indices in the group, and bytes


class Collective(NamedTuple):
    """A torch.distributed collective.

    Attributes:
        name: the simplest torch name.
        family: its family, as in the table above.
        shares: the bus factor as a multiple of (n - 1) / n, 0 for a factor of 1, or None if there
            is no factor.
        others: its other names in torch and DeepSpeed. Ranks may use different names for the same
            collective.
        root: "src" or "dst" if the operation has a root, or "" if not.
        reduces: whether the operation combines the ranks' values.
        uneven: whether the ranks' sizes may differ.
    """

    name: str
    family: str
    shares: int | None
    others: tuple[str, ...] = ()
    root: str = ""
    reduces: bool = False
    uneven: bool = False


_ROWS = (
    Collective("broadcast", "broadcast", 0, ("broadcast_object_list",), root="src"),
    Collective("reduce", "reduce", 0, root="dst", reduces=True),
    Collective("all_reduce", "all_reduce", 2, ("inference_all_reduce",), reduces=True),
    Collective("all_reduce_coalesced", "all_reduce", 2, reduces=True),
    Collective(
        "all_gather",
        "all_gather",
        1,
        ("all_gather_into_tensor", "all_gather_single", "all_gather_object", "allgather_fn"),
    ),
    Collective("all_gather_coalesced", "all_gather", 1),
    Collective(
        "reduce_scatter",
        "reduce_scatter",
        1,
        ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_fn"),
        reduces=True,
    ),
    Collective("all_to_all", "all_to_all", 1, ("all_to_all_single",), uneven=True),
    Collective(
        "gather", "gather", 1, ("gather_into_tensor", "gather_single", "gather_object"), root="dst"
    ),
    Collective("scatter", "scatter", 1, ("scatter_object_list",), root="src"),
    Collective("barrier", "barrier", None),
    Collective("monitored_barrier", "barrier", None),
)
# keyed by each of their names
COLLECTIVES = {name: row for row in _ROWS for name in (row.name, *row.others)}
MESSAGES = frozenset(
    (
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend",
        "batch_irecv",
        "batch_isend_irecv",
        "send_object_list",
        "recv_object_list",
    )
)


def same_collective(one: str, other: str) -> bool:
    """Returns whether calls to two operations, given by name, can belong to the same collective.

    Example:
        >>> (
        ...     same_collective("all_gather", "all_gather_into_tensor"),
        ...     same_collective("barrier", "all_reduce"),
        ... )
        (True, False)
    """
    return one == other or (one in COLLECTIVES and COLLECTIVES[one] is COLLECTIVES.get(other))


def make_rounds(op: str, size: int, root: int, size_bytes: int) -> Iterator[list[Transfer]]:
    """Yields the rounds of a collective.

    Args:
        op: the operation, as torch spells it.
        size: the number of ranks in the group.
        root: the root's index in the group; ignored if the operation has no root.
        size_bytes: S, as defined in the table above.

    Yields:
        The messages of one round, each as source and destination (indices in the group) and bytes.

    Raises:
        TraceFileError: no collective has this name.

    Example:
        >>> list(make_rounds("broadcast", 4, 1, 100))
        [[(1, 2, 100)], [(1, 3, 100), (2, 0, 100)]]
        >>> sum(len(messages) for messages in make_rounds("all_reduce", 4, -1, 100))
        24
    """
    family, ranks = _family_of(op), range(size)
    # an empty message counts as one byte
    share, whole = max(-(-size_bytes // size), 1), max(size_bytes, 1)
    count = _number_of_rounds(family, size)
    for step in range(count):
        other = step if step < root else step + 1
        match family:
            case "all_reduce" | "all_gather" | "reduce_scatter":
                yield [(rank, (rank + 1) % size, share) for rank in ranks]
            case "all_to_all":
                yield [(rank, (rank + step + 1) % size, share) for rank in ranks]
            case "broadcast":
                yield _spread(size, root, 1 << step, whole)
            case "reduce":
                yield [
                    (to, source, amount)
                    for source, to, amount in _spread(size, root, 1 << (count - 1 - step), whole)
                ]
            case "gather":
                yield [(other, root, share)]
            case "scatter":
                yield [(root, other, share)]
            case _:
                yield [(rank, (rank + (1 << step)) % size, 1) for rank in ranks]


def count_rounds(op: str, size: int, size_bytes: int) -> tuple[int, int]:
    """Returns a collective's number of rounds and the bytes per message.

    Example:
        >>> count_rounds("all_reduce", 4, 100), count_rounds("barrier", 5, 0)
        ((6, 25), (3, 1))
    """
    if size == 1:
        return 0, 0
    return _number_of_rounds(_family_of(op), size), next(make_rounds(op, size, 0, size_bytes))[0][2]


def _family_of(op: str) -> str:
    if op not in COLLECTIVES:
        raise TraceFileError(
            f"ringsim does not know which messages the collective {op!r} sends. "
            "Leave this operation out of the trace."
        )
    return COLLECTIVES[op].family


def _number_of_rounds(family: str, size: int) -> int:
    if family in ("broadcast", "reduce", "barrier"):
        return (size - 1).bit_length()
    return 2 * (size - 1) if family == "all_reduce" else size - 1


def _spread(size: int, root: int, have: int, amount: int) -> list[Transfer]:
    """Returns the messages in one round of a broadcast.

    Each of the ``have`` ranks that hold the data sends it to one more rank.
    """
    return [
        ((root + place) % size, (root + place + have) % size, amount)
        for place in range(min(have, size - have))
    ]


def bus_factor(op: str, group_size: int) -> float:
    """Returns the ratio of an operation's bus bandwidth to its algorithm bandwidth.

    Args:
        op: the operation, as torch spells it.
        group_size: the number of ranks in the operation's group, at least 1.

    Returns:
        The factor, or NaN if there is none: a barrier carries no data, and for other operations
        the factor may be unknown.

    Example:
        >>> (
        ...     bus_factor("all_reduce", 4),
        ...     bus_factor("all_gather", 4),
        ...     bus_factor("isend", 4),
        ...     bus_factor("barrier", 4),
        ... )
        (1.5, 0.75, 1.0, nan)

    Source:
        nccl-tests, ``doc/PERFORMANCE.md``.
    """
    if op in MESSAGES:
        return 1.0
    shares = COLLECTIVES[op].shares if op in COLLECTIVES else None
    if shares is None:
        return math.nan
    return shares * (group_size - 1) / group_size if shares else 1.0


def algbw_gb_per_s(size_bytes: int, duration_us: float) -> float:
    """Returns the algorithm bandwidth, S / t, in GB/s; 1 GB is 10**9 bytes.

    Args:
        size_bytes: S, as defined in the module docstring.
        duration_us: t, in microseconds.

    Returns:
        The bandwidth, or NaN if the operation carried no data or its time is unknown.

    Example:
        >>> algbw_gb_per_s(1_000_000, 500.0)
        2.0
    """
    return size_bytes / duration_us * 1e-3 if size_bytes > 0 and duration_us > 0 else math.nan


def busbw_gb_per_s(op: str, size_bytes: int, duration_us: float, group_size: int) -> float:
    """Returns the bus bandwidth in GB/s; 1 GB is 10**9 bytes.

    Args:
        op: the operation, as torch spells it.
        size_bytes: S, as defined in the module docstring.
        duration_us: the duration in microseconds.
        group_size: the number of ranks in the operation's group, at least 1.

    Returns:
        The bandwidth, or NaN if the operation carried no data, its time is unknown, or it has no
        factor.

    Example:
        >>> busbw_gb_per_s("all_reduce", 1_000_000, 500.0, group_size=4)
        3.0
    """
    return algbw_gb_per_s(size_bytes, duration_us) * bus_factor(op, group_size)
