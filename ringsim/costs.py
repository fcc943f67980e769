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
"""

from __future__ import annotations

import math
from typing import Final

from ringsim.errors import ArgumentError

__all__ = ["algbw_gb_per_s", "bus_factor", "busbw_gb_per_s"]

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
