"""The ring: a rank, its two neighbours, and the group that it shares with each of them.

Group *i* connects rank *i* and rank (*i* + 1) mod N. Each rank is in two groups::

    rank 2's predecessor group                      rank 2's successor group
    "ring:1>2": 2 is the successor, receives        "ring:2>3": 2 is the predecessor, sends

         rank 1 ----- ring:1>2 -----> rank 2 ----- ring:2>3 -----> rank 3

Activations travel forward on a group, and their gradients travel back on the same group. A ring of
one rank has no groups; a ring of two ranks has two distinct groups over the same two ranks, one for
each direction.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ringsim.comm.backends import TORCH
from ringsim.environment import HERE, discover
from ringsim.errors import ArgumentError, RingError
from ringsim.ring.groups import (
    RingArguments,
    build_on_clock,
    build_on_torch,
    check_ring_arguments,
)
from ringsim.ring.pairs import Pair, all_pairs, pair_name
from ringsim.ring.printing import restore_output, suppress_output
from ringsim.state import change_state, get_state

_DEFAULT_TIMEOUT_S = 30.0
_NO_PORT = 1  # stored if the world met without a port (over file://, or a store)


@dataclass(frozen=True)
class Ring:
    """A rank's place in its ring.

    Attributes:
        rank: the global rank of this process.
        world_size: the number of ranks in all rings together.
        pred: the global rank that this rank receives from.
        succ: the global rank that this rank sends to.
        pred_group: the group that this rank receives on; None in a ring of one rank.
        succ_group: the group that this rank sends on; None in a ring of one rank.
        comm_device: "cpu" (Gloo, or another backend) or "gpu" (NCCL).
        ranks: the ring's global ranks, in order.
        local_rank: this rank's number on its machine; with "gpu", also the number of its GPU.
        head_ip: the address of rank 0's machine.
        port: the port on which rank 0 listens.
        timeout_s: the time limit for one operation, in seconds.
        backend: the name of the backend chosen with ``set_backend``; "torch" if none was chosen.
        take_down: a function that destroys the groups of this ring, for ``destroy_distributed``.
        in_order: whether the operations that a rank posts on a group run one after the other, as
            with NCCL and ``simulate(..., semantics="grouped")``.

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
        """The device for this rank's tensors: its GPU with "gpu", else the CPU.

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
    def group_pairs(self) -> list[tuple[str, Pair]]:
        """The name and (predecessor, successor) of every group in this ring, in order.

        This rank belongs to only two of these groups.
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
    """Connects this process to the other ranks in a ring.

    This function creates the default process group, the ring, and this rank's two pair groups. Call
    it once in every process, in any order; it blocks until all processes have called it. If the
    ranks cannot connect, every rank raises the same error. Rank 0 listens at ``head_ip`` and
    ``port`` (only on loopback if ``head_ip`` is loopback), and the other ranks connect to it. If
    the script has already called ``init_process_group``, the ring is built on that group, and
    ``head_ip`` and ``port`` are stored but not used. Afterwards, only rank 0's prints are shown;
    see ``suppress_output``. A second call with the same values returns immediately; an omitted
    argument and the default ``timeout_s`` match any value.

    After ``ringsim.comm.set_backend``, the groups use that backend. With "mpi", MPI connects the
    ranks, and ``head_ip`` and ``port`` are stored but not used.

    Omitted arguments are taken from the default process group if it exists, then from the
    launcher's variables (``ringsim.environment``: torchrun, ``srun``, ``mpirun`` and others). In a
    process without a launcher, you must pass these arguments; ``world_size=1`` creates a world of
    one rank.

    Args:
        head_ip: the address or name of rank 0's machine.
        port: a free port on that machine, the same on every rank.
        world_size: the number of processes.
        rank: the rank of this process, counted from 0.
        local_rank: this process's number on its machine, counted from 0; with "gpu", also the
            number of its GPU.
        comm_device: "cpu" for Gloo, which never touches CUDA; "gpu" for NCCL, with
            ``cuda:local_rank`` as the current device. The default is "cpu" even on machines with
            GPUs, so that a script behaves the same everywhere.
        timeout_s: the time limit for the rendezvous and for every operation on the groups, in
            seconds.
        ring_ranks: the global ranks of this rank's ring in order, or None for a ring of all ranks.
            All ranks in a ring must pass the same list. Different lists create several rings in one
            world. A rank outside every ring passes ``[rank]``.
        ring_order: "hosts" to place each host's ranks next to each other in a ring of all ranks, so
            that as few edges as possible connect different hosts. Every rank must pass the same
            value. The default keeps the ranks in order; ``ring_ranks`` always keeps its own order.

    Raises:
        ArgumentError: an argument is invalid, or differs from the existing ring.
        RingError: an omitted argument cannot be found, or variables contradict each other; the
            message lists them.
        RendezvousFailed: the ranks did not find each other; the message lists the present and the
            missing ranks.

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


def initialize(*args: Any, listen_socket: socket.socket | None = None, **named_args: Any) -> Ring:
    """Joins the ring and returns it; takes the arguments of ``check_ring_arguments``.

    ``listen_socket`` is a socket from ``listen``. Rank 0 takes it over, so that a launcher can
    reserve the port before any rank runs.
    """
    wanted = check_ring_arguments(*args, **named_args)
    ring: Ring | None = get_state().ring
    backend = get_state().backend or TORCH
    if ring is not None and not dist.is_initialized():
        destroy_distributed()  # the script destroyed the default group, and so the pair groups
    elif ring is not None:
        _check_same(ring, wanted, backend)
        return ring
    clock = get_state().clock
    with ExitStack() as undo:
        if clock is None:
            groups, ranks = build_on_torch(wanted, listen_socket, undo)
        else:
            groups, ranks = build_on_clock(wanted, undo)
        place = ranks.index(wanted.rank)
        values = vars(wanted) | {"ranks": ranks}
        del values["by_hosts"]
        ring = Ring(
            **values,
            pred=ranks[place - 1],
            succ=ranks[(place + 1) % len(ranks)],
            pred_group=groups[0],
            succ_group=groups[1],
            backend=backend,
            in_order=wanted.comm_device == "gpu" if clock is None else clock.in_order,
            take_down=undo.pop_all().close,
        )
    change_state(ring=ring)
    suppress_output(ring.rank)
    return ring


def current_ring() -> Ring:
    """Returns this rank's ring.

    Any rank may call this function at any time; it does not block.

    Raises:
        RingError: no ring exists, or it has been destroyed.

    Example:
        >>> current_ring()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: this rank is not in a ring. Call initialize_distributed, or use ringsim.trace.
    """  # noqa: E501
    ring: Ring | None = get_state().ring
    if ring is None:
        raise RingError(
            "this rank is not in a ring. Call initialize_distributed, or use ringsim.trace."
        )
    return ring


def get_pipeline_parallel_pred_group() -> dist.ProcessGroup | None:
    """Returns the predecessor group.

    In this group, the rank is the successor and receives. Any rank may call this function at any
    time after ``initialize_distributed``; it does not block.

    Returns:
        The group, or None in a ring of one rank.

    Raises:
        RingError: no ring exists.

    Example:
        The pair (predecessor, successor) on which each of four ranks receives:

        >>> from ringsim.ring.groups import pairs_of
        >>> [pairs_of(rank, range(4))[0] for rank in range(4)]
        [(3, 0), (0, 1), (1, 2), (2, 3)]

    Source:
        FlexLLMGen's ``dist_utils.py``, in which the two names are swapped.
    """
    return current_ring().pred_group


def get_pipeline_parallel_succ_group() -> dist.ProcessGroup | None:
    """Returns the successor group.

    In this group, the rank is the predecessor and sends. Any rank may call this function at any
    time after ``initialize_distributed``; it does not block.

    Returns:
        The group, or None in a ring of one rank.

    Raises:
        RingError: no ring exists.

    Example:
        The pair (predecessor, successor) on which each of four ranks sends:

        >>> from ringsim.ring.groups import pairs_of
        >>> [pairs_of(rank, range(4))[1] for rank in range(4)]
        [(0, 1), (1, 2), (2, 3), (3, 0)]

    Source:
        FlexLLMGen's ``dist_utils.py``, in which the two names are swapped.
    """
    return current_ring().succ_group


def get_comm_device() -> str:
    """Returns "gpu" if the ring uses NCCL, and "cpu" if it uses Gloo or another backend.

    Any rank may call this function at any time after ``initialize_distributed``; it does not block.

    Raises:
        RingError: no ring exists.

    Example:
        >>> get_comm_device()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: this rank is not in a ring. Call initialize_distributed, or use ringsim.trace.
    """  # noqa: E501
    return current_ring().comm_device


def destroy_distributed() -> None:
    """Undoes ``initialize_distributed``; does nothing if no ring exists.

    This function restores printing and destroys the groups that ``initialize_distributed`` created.
    Call it on every rank after the rank's last message. With torch, rank 0 waits a few seconds at
    most for the other ranks to call it, because rank 0 hosts the store that all ranks share. A
    default process group that the script created itself is kept.

    Example:
        >>> destroy_distributed()
        >>> destroy_distributed()
    """
    restore_output()
    ring = get_state().ring
    change_state(ring=None)
    if ring is not None:
        ring.take_down()


def _known() -> dict[str, Any]:
    """Returns the arguments that are known from the existing ring or default process group."""
    ring: Ring | None = get_state().ring
    if not dist.is_initialized():
        return {}
    if ring is not None:
        return vars(ring)
    return {"world_size": dist.get_world_size(), "rank": dist.get_rank()}


def _discover(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns the values, with a discovered value in place of each None.

    In an existing world without a launcher, placeholders are used.
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
    """Raises ArgumentError unless a second call requests the existing ring."""
    if backend != ring.backend:
        raise ArgumentError(
            f"the backend must be {ring.backend!r}, as in the existing ring, got {backend!r} "
            f"(rank {ring.rank} of {ring.world_size}). Call set_backend before "
            "initialize_distributed, or call destroy_distributed on every rank first."
        )
    if wanted.by_hosts and sorted(ring.ranks) == sorted(wanted.ranks):
        wanted = replace(wanted, ranks=ring.ranks)  # in host order, which does not change
    for name, value in vars(wanted).items():
        if name == "by_hosts" or (name == "timeout_s" and value == _DEFAULT_TIMEOUT_S):
            continue
        existing = getattr(ring, name)
        if value != existing:
            argument = "ring_ranks" if name == "ranks" else name
            raise ArgumentError(
                f"{argument} must be {existing!r}, as in the existing ring, got {value!r} "
                f"(rank {ring.rank} of {ring.world_size}). Use the existing ring "
                "(current_ring), or call destroy_distributed on every rank first."
            )
