"""The ring: a rank, its two neighbours, and the group that it shares with each.

Group *i* joins rank *i* and rank (*i* + 1) mod N. A rank is in two of them::

    rank 2's predecessor group                      rank 2's successor group
    "ring:1>2": 2 is the successor, receives        "ring:2>3": 2 is the predecessor, sends

         rank 1 ----- ring:1>2 -----> rank 2 ----- ring:2>3 -----> rank 3

Activations go forward on a group and their gradients come back on the same one. A ring of one has
no groups; a ring of two has two distinct groups over the same two ranks, one for each direction.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from ringsim.comm.backends import TORCH
from ringsim.environment import HERE, discover
from ringsim.errors import ArgumentError, RingError
from ringsim.ring.groups import (
    RingArguments,
    all_pairs,
    build_on_clock,
    build_on_torch,
    check_ring_arguments,
    pair_name,
)
from ringsim.ring.printing import restore_output, suppress_output
from ringsim.state import change_state, get_state

_DEFAULT_TIMEOUT_S: Final = 30.0
_NO_PORT: Final = 1  # of a world that met without one (file://, a store): the port is only stored


@dataclass(frozen=True)
class Ring:
    """A rank's place in its ring.

    Attributes:
        rank: this global rank.
        world_size: how many ranks there are, in all rings together.
        pred: the global rank that this one receives from.
        succ: the global rank that this one sends to.
        pred_group: the group that this rank receives on, None in a ring of one.
        succ_group: the group that this rank sends on, None in a ring of one.
        comm_device: "cpu" (Gloo, or another backend) or "gpu" (NCCL).
        ranks: the ring's global ranks, in order.
        local_rank: this rank's number on its machine, and its GPU with "gpu".
        head_ip: where rank 0 is.
        port: where rank 0 listens.
        timeout_s: limit of one operation, in seconds.
        backend: the name of what carries the messages, as ``set_backend`` had it; "torch" if it
            had none.
        take_down: destroys what was built for this ring, for ``destroy_distributed``.
        in_order: whether the operations that a rank posts on a group are executed one by one: on
            NCCL, and with ``simulate(..., semantics="grouped")``.

    Example:
        >>> ring = Ring(rank=2, world_size=4, pred=1, succ=3, ranks=(0, 1, 2, 3))
        >>> ring.group_pairs
        [('ring:0>1', (0, 1)), ('ring:1>2', (1, 2)), ('ring:2>3', (2, 3)), ('ring:3>0', (3, 0))]
    """

    rank: int
    world_size: int
    pred: int
    succ: int
    ranks: tuple[int, ...]
    pred_group: dist.ProcessGroup | None = field(default=None, repr=False)
    succ_group: dist.ProcessGroup | None = field(default=None, repr=False)
    comm_device: str = "cpu"
    local_rank: int = 0
    head_ip: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = _DEFAULT_TIMEOUT_S
    backend: str = field(default=TORCH, repr=False, compare=False)
    take_down: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    in_order: bool = field(default=False, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors belong: its GPU with "gpu", else the CPU.

        Example:
            >>> Ring(
            ...     rank=0,
            ...     world_size=1,
            ...     pred=0,
            ...     succ=0,
            ...     ranks=(0,),
            ...     comm_device="gpu",
            ...     local_rank=3,
            ... ).device
            device(type='cuda', index=3)
        """
        return (
            torch.device("cuda", self.local_rank)
            if self.comm_device == "gpu"
            else torch.device("cpu")
        )

    @property
    def group_pairs(self) -> list[tuple[str, tuple[int, int]]]:
        """Name and (predecessor, successor) of every group of this ring, in order.

        This rank has only two of them.
        """
        return [(pair_name(pair), pair) for pair in all_pairs(self.ranks)]


def initialize_distributed(
    head_ip: str | None = None,
    port: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    comm_device: str | None = None,
    *,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    ring_ranks: Sequence[int] | None = None,
    ring_order: str = "ranks",
) -> None:
    """Joins this process to the others.

    Default process group, ring, and the two pair groups of this rank. Every process calls it once,
    in any order, and blocks until all have; a wrong start raises the same error on every rank. Rank
    0 listens at ``head_ip`` and ``port`` (only on loopback if ``head_ip`` is loopback), and the
    others connect to it. If the script has already called ``init_process_group``, the ring is built
    on that group, and ``head_ip`` and ``port`` are only stored. Afterwards only rank 0's prints are
    shown (``suppress_output``). A second call with the values in force returns at once; arguments
    that it leaves out, and the default ``timeout_s``, fit any values.

    After ``ringsim.comm.set_backend``, the groups are on that backend. On "mpi", MPI joins the
    ranks, and ``head_ip`` and ``port`` are only stored.

    Arguments that are left out are found: in the default process group if there is one, then in
    what the launcher says (``ringsim.environment``: torchrun, ``srun``, ``mpirun`` and others). A
    process without a launcher must pass them; ``world_size=1`` is a world of one.

    Args:
        head_ip: address or name of rank 0's machine.
        port: a free port there, the same on every rank.
        world_size: how many processes there are.
        rank: this process's number among them, from 0.
        local_rank: its number on its machine, from 0; with "gpu" the number of its GPU.
        comm_device: "cpu" for Gloo, which never touches CUDA; "gpu" for NCCL, with
            ``cuda:local_rank`` as the current device. If left out, "cpu", even on machines with
            GPUs, so that a script does the same everywhere.
        timeout_s: limit for finding each other, and of every operation on the groups, in seconds.
        ring_ranks: the global ranks of this rank's ring in order, the same on each of them; None
            for all ranks. This is how several rings share one world. A rank that is in no ring
            passes ``[rank]``.
        ring_order: "hosts" puts the ranks of each host next to each other in a ring of all ranks,
            so that it changes hosts as rarely as can be; the same on every rank. The default keeps
            the order of the ranks, and so does ``ring_ranks``.

    Raises:
        ArgumentError: an argument breaks its rule, or differs from the existing ring.
        RingError: an argument that was left out cannot be found, or variables contradict each
            other; the message lists them.
        RendezvousFailed: the ranks did not find each other; the message names those present and
            those missing.

    Example:
        >>> initialize_distributed(world_size=1)
        >>> current_ring().ranks, get_comm_device(), get_pipeline_parallel_succ_group()
        ((0,), 'cpu', None)
        >>> destroy_distributed()
    """
    given = {
        "head_ip": head_ip,
        "port": port,
        "world_size": world_size,
        "rank": rank,
        "local_rank": local_rank,
        "comm_device": comm_device,
    }
    known = _known()
    values: dict[str, Any] = {
        name: known.get(name) if value is None else value for name, value in given.items()
    }
    device = values.pop("comm_device")
    if None in values.values():
        values |= _discover(values, known)
    initialize(
        **values,
        comm_device="cpu" if device is None else device,
        timeout_s=timeout_s,
        ring_ranks=ring_ranks,
        ring_order=ring_order,
    )


def initialize(
    head_ip: str,
    port: int,
    world_size: int,
    rank: int,
    local_rank: int,
    comm_device: str,
    *,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    ring_ranks: Sequence[int] | None = None,
    ring_order: str = "ranks",
    listen_socket: socket.socket | None = None,
) -> Ring:
    """Does what ``initialize_distributed`` does, all arguments given, and returns the ring.

    See there for the rest. ``listen_socket`` is a socket from ``listen`` for rank 0, which takes it
    over: so a launcher reserves the port before any rank runs.
    """
    wanted = check_ring_arguments(
        head_ip, port, world_size, rank, local_rank, comm_device, timeout_s, ring_ranks, ring_order
    )
    ring: Ring | None = get_state().ring
    backend = get_state().backend or TORCH
    if ring is not None and not dist.is_initialized():
        destroy_distributed()  # the script destroyed the default group, and the pair groups with it
    elif ring is not None:
        _check_same(ring, wanted, backend)
        return ring
    with ExitStack() as undo:
        if get_state().clock is None:
            groups, ranks = build_on_torch(wanted, listen_socket, undo)
        else:
            groups, ranks = build_on_clock(wanted, undo)
        place = ranks.index(wanted.rank)
        ring = Ring(
            **{
                name: value
                for name, value in vars(wanted).items()
                if name not in ("ranks", "by_hosts")
            },
            ranks=ranks,
            pred=ranks[place - 1],
            succ=ranks[(place + 1) % len(ranks)],
            pred_group=groups[0],
            succ_group=groups[1],
            backend=backend,
            in_order=comm_device == "gpu" or _is_virtually_in_order(),
            take_down=undo.pop_all().close,
        )
    change_state(ring=ring)
    suppress_output(ring.rank)
    return ring


def current_ring() -> Ring:
    """Returns the ring that this rank is in.

    Any rank calls it at any time; it does not block.

    Raises:
        RingError: there is no ring yet, or no longer.

    Example:
        >>> current_ring()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: the ring must exist before it is used, got none. Call initialize_distributed, or use ringsim.trace.
    """  # noqa: E501
    ring: Ring | None = get_state().ring
    if ring is None:
        raise RingError(
            "the ring must exist before it is used, got none. Call initialize_distributed, or "
            "use ringsim.trace."
        )
    return ring


def get_pipeline_parallel_pred_group() -> dist.ProcessGroup | None:
    """Returns the predecessor group.

    The group in which this rank is the successor, and on which it receives. Any rank calls it at
    any time after ``initialize_distributed``; it does not block.

    Returns:
        The group, None in a ring of one.

    Raises:
        RingError: there is no ring.

    Example:
        The pair (predecessor, successor) that each of four ranks receives on:

        >>> from ringsim.ring.groups import pairs_of
        >>> [pairs_of(rank, range(4))[0] for rank in range(4)]
        [(3, 0), (0, 1), (1, 2), (2, 3)]

    Source:
        FlexLLMGen's ``dist_utils.py``, where the two names are the other way round.
    """
    return current_ring().pred_group


def get_pipeline_parallel_succ_group() -> dist.ProcessGroup | None:
    """Returns the successor group.

    The group in which this rank is the predecessor, and on which it sends. Any rank calls it at any
    time after ``initialize_distributed``; it does not block.

    Returns:
        The group, None in a ring of one.

    Raises:
        RingError: there is no ring.

    Example:
        The pair (predecessor, successor) that each of four ranks sends on:

        >>> from ringsim.ring.groups import pairs_of
        >>> [pairs_of(rank, range(4))[1] for rank in range(4)]
        [(0, 1), (1, 2), (2, 3), (3, 0)]

    Source:
        FlexLLMGen's ``dist_utils.py``, where the two names are the other way round.
    """
    return current_ring().succ_group


def get_comm_device() -> str:
    """Returns "gpu" where the ring's messages go by NCCL, "cpu" where by Gloo or another backend.

    Any rank calls it at any time after ``initialize_distributed``; it does not block.

    Raises:
        RingError: there is no ring.

    Example:
        >>> get_comm_device()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: the ring must exist before it is used, got none. Call initialize_distributed, or use ringsim.trace.
    """  # noqa: E501
    return current_ring().comm_device


def destroy_distributed() -> None:
    """Undoes ``initialize_distributed``.

    Prints are shown again, and the groups that it built are gone. Every rank calls it when its
    messages are done. On torch, rank 0 waits until the others have called it too, for a few seconds
    at most, since it holds the store that they share. A default process group that the script made
    itself stays. Harmless if there is no ring.

    Example:
        >>> destroy_distributed()
        >>> destroy_distributed()
    """
    restore_output()
    ring = get_state().ring
    change_state(ring=None)
    if ring is not None:
        ring.take_down()


def _is_virtually_in_order() -> bool:
    """Returns whether this is a simulated rank whose operations on a group go one by one."""
    clock = get_state().clock
    return clock is not None and clock.in_order


def _known() -> dict[str, Any]:
    """Returns what the existing ring or default process group says about this rank."""
    ring: Ring | None = get_state().ring
    if not dist.is_initialized():
        return {}
    if ring is not None:
        return vars(ring)
    return {"world_size": dist.get_world_size(), "rank": dist.get_rank()}


def _discover(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns the values, those that are None found.

    In a world that is there already, made up where no launcher says them.
    """
    try:
        found = discover(**values, ask_mpi=not known)
    except RingError:
        if not known:
            raise
        made_up = {"head_ip": HERE, "port": _NO_PORT, "local_rank": known["rank"]}
        return {name: made_up[name] for name, value in values.items() if value is None}
    return {name: getattr(found, name) for name in values}


def _check_same(ring: Ring, wanted: RingArguments, backend: str) -> None:
    """Raises unless a second call asks for the existing ring."""
    if backend != ring.backend:
        raise ArgumentError(
            f"the backend must be {ring.backend!r} as in the ring that exists, got "
            f"{backend!r} (rank {ring.rank} of "
            f"{ring.world_size}). Call set_backend before initialize_distributed, or "
            "destroy_distributed on every rank first."
        )
    if wanted.by_hosts and sorted(ring.ranks) == sorted(wanted.ranks):
        wanted = replace(wanted, ranks=ring.ranks)  # in the order of the hosts, which do not change
    for each in fields(RingArguments):
        if each.name == "by_hosts":
            continue
        is_value, wanted_value = getattr(ring, each.name), getattr(wanted, each.name)
        if wanted_value != is_value and not (
            each.name == "timeout_s" and wanted_value == _DEFAULT_TIMEOUT_S
        ):
            name = "ring_ranks" if each.name == "ranks" else each.name
            raise ArgumentError(
                f"{name} must be {is_value!r} as in the ring that exists, got {wanted_value!r} "
                f"(rank {ring.rank} of {ring.world_size}). "
                "Use that ring (current_ring), or call destroy_distributed on every rank first."
            )
