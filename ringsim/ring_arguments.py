"""What ``initialize_distributed`` is told: completed by what the launcher says, and checked before any socket is opened."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ringsim.environment import discover
from ringsim.errors import ArgumentError

__all__ = ["RingArguments", "check_ring_arguments", "complete_ring_arguments"]

_LONGEST_TIMEOUT_S = 1e6  # eleven days: in milliseconds it fits into the 32 bits that poll(2) takes


@dataclass(frozen=True)
class RingArguments:
    """The arguments of ``initialize_distributed`` after ``check_ring_arguments``; the ring keeps them under the same names.

    Attributes:
        head_ip: where rank 0 is.
        port: where rank 0 listens.
        world_size: how many ranks there are in all rings together.
        rank: this global rank.
        local_rank: this rank's number on its machine.
        comm_device: "cpu" or "gpu".
        timeout_s: limit of one operation, in seconds.
        ranks: the global ranks of this rank's ring, in order.
    """

    head_ip: str
    port: int
    world_size: int
    rank: int
    local_rank: int
    comm_device: str
    timeout_s: float
    ranks: tuple[int, ...]


def check_ring_arguments(
    head_ip: Any, port: Any, world_size: Any, rank: Any, local_rank: Any, comm_device: Any, timeout_s: Any, ring_ranks: Sequence[Any] | None
) -> RingArguments:
    """Checks every argument of ``initialize_distributed`` that can be checked alone.

    Args:
        head_ip: a numeric address or a name, as text.
        port: a whole number, 1 to 65535.
        world_size: a whole number, 1 or more.
        rank: a whole number, 0 to ``world_size`` - 1.
        local_rank: a whole number, 0 or more.
        comm_device: "cpu" or "gpu".
        timeout_s: a number of seconds above 0.
        ring_ranks: the global ranks of this rank's ring in order; None for all ranks.

    Returns:
        The same values, whole numbers as ``int``.

    Raises:
        ArgumentError: a value breaks its rule; the message names the argument, the rule and the value.

    Example:
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 2, 2, "cpu", 30, None).ranks
        (0, 1, 2, 3)
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 4, 0, "cpu", 30, None)
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: rank must be a whole number from 0 to 3, got 4 (world_size 4). Give each process its own.
    """
    world_size = _whole("world_size", world_size, 1, None, "", "Pass the number of processes.")
    rank = _whole("rank", rank, 0, world_size - 1, f" (world_size {world_size})", "Give each process its own.")
    where = f" (rank {rank} of {world_size})"
    port = _whole("port", port, 1, 65535, where, "Pass a free port of rank 0's machine, the same on every rank.")
    local_rank = _whole("local_rank", local_rank, 0, None, where, "Pass this process's number on its machine, counted from 0.")
    if not isinstance(head_ip, str) or not head_ip.strip():
        raise ArgumentError(
            f"head_ip must be an address or a name as text, got {head_ip!r}{where}. Pass rank 0's address, such as '127.0.0.1'."
        )
    if comm_device not in ("cpu", "gpu"):
        raise ArgumentError(f"comm_device must be 'cpu' or 'gpu', got {comm_device!r}{where}. Pass 'cpu' for Gloo, 'gpu' for NCCL.")
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not isfinite(timeout_s) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ArgumentError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}{where}. Pass for example 30.")
    return RingArguments(head_ip, port, world_size, rank, local_rank, comm_device, float(timeout_s), _ring(ring_ranks, rank, world_size))


def complete_ring_arguments(
    known: Mapping[str, Any], head_ip: Any, port: Any, world_size: Any, rank: Any, local_rank: Any, comm_device: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Fills in the arguments of ``initialize_distributed`` that are None.

    Args:
        known: what the ring or the default process group that exists says, by the names of the arguments; it comes before the launcher.
        head_ip: as in ``check_ring_arguments``, and so for the others; None to find it.
        port: likewise.
        world_size: likewise.
        rank: likewise.
        local_rank: likewise.
        comm_device: likewise; "cpu" where nothing is known.

    Returns:
        The six values in this order, none of them None. They are checked where they are used.

    Raises:
        ArgumentError: a value does not go with what the launcher says.
        RingError: a value is nowhere to be found.

    Example:
        >>> complete_ring_arguments({}, "10.0.0.1", 29500, 4, 2, 0, None)
        ('10.0.0.1', 29500, 4, 2, 0, 'cpu')
    """
    given = {"head_ip": head_ip, "port": port, "world_size": world_size, "rank": rank, "local_rank": local_rank}
    values: dict[str, Any] = {name: known.get(name) if value is None else value for name, value in given.items()}
    if None in values.values():
        values = vars(discover(**values))
    device = known.get("comm_device", "cpu") if comm_device is None else comm_device
    return values["head_ip"], values["port"], values["world_size"], values["rank"], values["local_rank"], device


def _whole(name: str, value: Any, low: int, high: int | None, where: str, advice: str) -> int:
    """Returns a whole number as ``int``, also numpy's; text and True are none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        span = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise ArgumentError(f"{name} must be a whole number {span}, got {value!r}{where}. {advice}")
    return number


def _ring(ring_ranks: Any, rank: int, world_size: int) -> tuple[int, ...]:
    """Returns the ring's ranks; they are different, exist, and include this one."""
    if ring_ranks is None:
        return tuple(range(world_size))
    where = f"(rank {rank} of {world_size})"
    advice = "Pass the global ranks of the ring that this rank is in, in order; [rank] where it is in none."
    if isinstance(ring_ranks, (str, bytes)) or not hasattr(ring_ranks, "__iter__"):
        raise ArgumentError(f"ring_ranks must be a sequence of ranks, got {ring_ranks!r} {where}. {advice}")
    ranks = tuple(_whole("each of ring_ranks", each, 0, world_size - 1, f" {where}", advice) for each in ring_ranks)
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(f"ring_ranks must not name a rank twice, got {list(ranks)} {where}. {advice}")
    if rank not in ranks:
        raise ArgumentError(f"ring_ranks must include the rank that passes it, got {list(ranks)} {where}. {advice}")
    return ranks
