"""How a ring's groups come to be: by rendezvous and torch's own groups, or by what another backend calls its world and its groups.

On torch each rank builds the two groups that it is in, over the store where the ranks met (``pair_groups``). The protocol of backends knows
no store, and a ``new_group`` that all ranks call for every group, in one order. So on another backend the ranks first tell each other, in
one all_gather, which ring each is in, and then make all pairs of all rings::

    rank 2 of 4, ring_ranks=[2, 3]          said by all           made by all, in this order
      |-- all_gather(my ring) ------------> [0,1] [0,1]           "ring:0>1" "ring:1>0"
      |                                     [2,3] [2,3]           "ring:2>3" "ring:3>2"   <- these two are rank 2's
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ringsim.comm.backend import Backend
from ringsim.comm.functions import find
from ringsim.comm.log import pause_log
from ringsim.comm.rendezvous import Card, build_default_group, find_fault, leave, meet, meet_over
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.pair_groups import PairGroups, build_pair_groups, default_store, destroy_group, pair_name, pairs_of
from ringsim.ring_arguments import RingArguments

__all__ = ["build_on_backend", "build_on_torch"]


def build_on_torch(wanted: RingArguments, listen_socket: socket.socket | None, undo: ExitStack) -> PairGroups:
    """Meets the other ranks and builds the groups of torch that a ring needs.

    Every rank of the world calls it. It blocks until all have built theirs.

    Args:
        wanted: the ring.
        listen_socket: for rank 0, a socket that listens already; None to open one.
        undo: what takes down again what was built goes here.

    Returns:
        The group that this rank receives on and the group that it sends on; None and None in a ring of one.

    Raises:
        ArgumentError: there is no such GPU, or the default group that exists is another.
        RendezvousFailed: the ranks did not find each other.
        RingError: the default group that exists hides its store.
    """
    rank, world_size, timeout_s = wanted.rank, wanted.world_size, wanted.timeout_s
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if wanted.comm_device == "gpu" else "gloo"
    gpu = _select_gpu(wanted) if wanted.comm_device == "gpu" else ""
    card = Card(world_size, wanted.comm_device, wanted.ranks, gpu)
    builds_default = not dist.is_initialized()
    if builds_default:
        rendezvous = meet(wanted.head_ip, wanted.port, rank, world_size, card, timeout_s, listen_socket)
    else:
        rendezvous = meet_over(_store_of_default_group(wanted), rank, world_size, card, timeout_s)
    undo.callback(leave, rendezvous, timeout_s)
    failure: RuntimeError | None = None
    groups: PairGroups = (None, None)
    try:
        if builds_default:
            undo.callback(build_default_group(rendezvous, rank, world_size, backend, timeout))
            undo.callback(destroy_group, dist.group.WORLD)
        groups = build_pair_groups(rank, wanted.ranks, rendezvous.rings, rendezvous.roll.store, backend, timeout)
        for group in groups:
            undo.callback(destroy_group, group)
    except RuntimeError as error:
        failure = error
    try:
        rendezvous.roll.finish(
            time.monotonic() + timeout_s, None if failure is None else f"rank {rank} must reach its peers, got {_first_line(failure)}"
        )
    except RendezvousFailed as error:
        raise error from failure
    return groups


def build_on_backend(backend: Backend, wanted: RingArguments, undo: ExitStack) -> tuple[Any, Any]:
    """Joins the ranks and builds all pair groups, both as a backend other than torch does it.

    Every rank of the world calls it. It blocks until all have made all groups.

    Args:
        backend: makes the world, unless it is there, and the groups.
        wanted: the ring.
        undo: what takes down again what was built goes here: the world and its groups with it, or the groups of a world that was there.

    Returns:
        The group that this rank receives on and the group that it sends on; None and None in a ring of one.

    Raises:
        ArgumentError: ``comm_device`` is "gpu", or rank and number of ranks are others for the backend.
        RendezvousFailed: the ranks do not agree on their rings.
        RingError: what the backend says where ranks are missing.
    """
    rank, world_size = wanted.rank, wanted.world_size
    if wanted.comm_device != "cpu":
        raise ArgumentError(
            f"comm_device must be 'cpu' on the backend {backend.name!r}, got {wanted.comm_device!r} (rank {rank} of {world_size}). "
            "Pass 'cpu', or call set_backend('torch') for NCCL."
        )
    timeout = timedelta(seconds=wanted.timeout_s)
    exists = backend.is_initialized()
    if exists:
        _check_world(wanted, backend.get_rank(), backend.get_world_size())
    else:
        backend.init_process_group(timeout=timeout, world_size=world_size, rank=rank)
        undo.callback(_destroy, backend, None)
    mine: dict[str, Any] = {}
    for ring in _ask_for_rings(backend, wanted):
        pairs = [both[1] for both in (pairs_of(each, ring) for each in ring) if both is not None]
        for pair in pairs:
            group = backend.new_group(list(pair), timeout=timeout, group_desc=pair_name(pair))
            if rank in pair:
                mine[pair_name(pair)] = group
                if exists:
                    undo.callback(_destroy, backend, group)
    both = pairs_of(rank, wanted.ranks)
    return (None, None) if both is None else (mine[pair_name(both[0])], mine[pair_name(both[1])])


def _check_world(wanted: RingArguments, rank: int, world_size: int) -> None:
    """Compares the arguments with the process group that exists.

    Raises:
        ArgumentError: they differ.
    """
    for name, value in (("world_size", world_size), ("rank", rank)):
        if getattr(wanted, name) != value:
            raise ArgumentError(
                f"{name} must be {value} as in the default process group that exists, got {getattr(wanted, name)} "
                f"(rank {rank} of {world_size}). Pass what init_process_group was told."
            )


def _ask_for_rings(backend: Backend, wanted: RingArguments) -> list[tuple[int, ...]]:
    """Returns every ring of the world, the same list on every rank; a rank's ring is a row of numbers, filled up with -1."""
    row = torch.full((wanted.world_size,), -1, dtype=torch.int64)
    row[: len(wanted.ranks)] = torch.tensor(wanted.ranks)
    rows = [torch.empty_like(row) for _ in range(wanted.world_size)]
    with pause_log():  # it is ours, not the program's
        find(backend, "all_gather")(rows, row)
    cards = [Card(wanted.world_size, wanted.comm_device, tuple(each[each >= 0].tolist())) for each in rows]
    fault = find_fault(cards)
    if fault is not None:
        raise RendezvousFailed(f"{fault} (rank {wanted.rank} of {wanted.world_size}). Pass the same ring_ranks on every rank of a ring.")
    return list(dict.fromkeys(card.ring for card in cards))


def _destroy(backend: Backend, group: Any) -> None:
    """Ends a group of a backend, or with None its world; harmless where the script has done so."""
    if backend.is_initialized():
        with suppress(RingError):
            backend.destroy_process_group(group)


def _store_of_default_group(wanted: RingArguments) -> Store:
    """Returns the store of the group that the script made, if that group is as the arguments say."""
    _check_world(wanted, dist.get_rank(), dist.get_world_size())
    store = default_store()
    if store is None:
        raise RingError(
            "initialize_distributed must come before init_process_group with this version of torch, which hides the store of a group, "
            f"got a group that exists (rank {wanted.rank} of {wanted.world_size}). Leave init_process_group out."
        )
    return store


def _select_gpu(wanted: RingArguments) -> str:
    """Makes this rank's GPU the current device and returns what tells it from every other GPU."""
    where = f"(rank {wanted.rank} of {wanted.world_size}, local_rank {wanted.local_rank})"
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ArgumentError(
            f"comm_device must be 'cpu' where torch finds no GPU with NCCL, got 'gpu' {where}. Pass 'cpu', or use a CUDA build of torch."
        )
    count = torch.cuda.device_count()
    if wanted.local_rank >= count:
        raise ArgumentError(
            f"local_rank must be below the number of GPUs of this machine, {count}, got {wanted.local_rank} {where}. "
            "Start at most one rank for each GPU, or pass comm_device='cpu'."
        )
    torch.cuda.set_device(wanted.local_rank)
    return f"{torch.cuda.get_device_name(wanted.local_rank)} {torch.cuda.get_device_properties(wanted.local_rank).uuid}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
