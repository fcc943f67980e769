"""Creates a ring's pair groups.

This module checks the arguments and creates the groups of two ranks in one of two ways. It is the
only module that creates groups through torch's private API. Every rank must call the public
``new_group`` for every group, even for groups that do not include the rank, so a ring of N pairs
costs each rank N calls. A pair needs only its two members. So each member creates the group by
itself, under a name that both members know, over the store that all ranks share. (Torch's own
option for this, ``use_local_synchronization``, puts the number of groups that the process has
created into the name. Both members must then have created the same number of groups, which no order
achieves in a ring of odd length.)

Gloo writes its own address into a store and waits for the other side's address. Over the shared
store, this exchange takes ten requests for two groups, and ranks that create their groups in an
unlucky order wait for each other in a cycle. So both groups are created at the same time, each over
a store inside this process, and only the addresses go through the shared store, in three requests::

    group to pred --- my address --->  |            |  --- both of mine --->  shared store
    (a thread)    <-- its address ---  |  exchange  |
    group to succ --- my address --->  |            |  <-- one of pred's,
    (a thread)    <-- its address ---  |            |      one of succ's ---  shared store

Every rank writes before it waits, so the ranks cannot block each other in any order.

On NCCL, two ranks connect at their first message, and the first of them waits for the other inside
the call, even inside ``irecv``. A ring in which each rank posts its receive first would deadlock.
So the pairs connect here, in an order that all ranks share: first the edges with even numbers,
which have no rank in common except for the last edge of an odd ring, then the others::

    edge 0: ranks 0, 1      edge 2: ranks 2, 3     ...      together
         edge 1: ranks 1, 2      edge 3: ranks 3, 0         then these

On every other backend, all ranks call the public ``new_group`` for every pair of every ring, in the
same order. MPI connects its ranks itself; the roll-call then uses the store of its default group.
On the virtual clock, a store cannot be used, because its waits are in real time. So these ranks
first exchange their rings in one all_gather::

    rank 2 of 4, ring_ranks=[2, 3]          all gather   all create, in this order
      |-- all_gather(my ring) ------------> [0,1] [0,1]  "ring:0>1" "ring:1>0"
      |                                     [2,3] [2,3]  "ring:2>3" "ring:3>2"  <- these two are
                                                                             rank 2's
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# public, although torch does not list it
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from ringsim.comm.bootstrap import (
    BackgroundCall,
    Card,
    build_default_group,
    find_fault,
    finishing,
    leave,
    list_rings,
    meet,
    meet_over,
)
from ringsim.comm.functions import MANAGING
from ringsim.comm.log import pause_log
from ringsim.comm.torch_private import default_store
from ringsim.errors import ArgumentError, RendezvousFailed, RingError, is_number, read_whole
from ringsim.ring.pairs import Pair, all_pairs, pair_name
from ringsim.state import get_state

PairGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]

# the place of Gloo's addresses in a store is not documented, so untested versions of torch use the
# public API
_KNOWN_TORCH = ("2.13.", "2.15.")
_LONGEST_TIMEOUT_S = (
    1e6  # eleven days: in milliseconds, the value fits into the 32 bits that poll(2) accepts
)


@dataclass(frozen=True)
class RingArguments:
    """The checked arguments of ``initialize_distributed``.

    The ring has attributes of the same names. ``ranks`` are the global ranks of this rank's ring,
    in order; with ``by_hosts``, the order is determined after the ranks have met.
    """

    head_ip: str
    port: int
    world_size: int
    rank: int
    local_rank: int
    comm_device: str
    timeout_s: float
    ranks: tuple[int, ...]
    by_hosts: bool = False


def check_ring_arguments(
    head_ip: Any,
    port: Any,
    world_size: Any,
    rank: Any,
    local_rank: Any,
    comm_device: Any,
    timeout_s: Any,
    ring_ranks: Sequence[Any] | None = None,
    ring_order: Any = "ranks",
) -> RingArguments:
    """Checks the ``initialize_distributed`` arguments that a rank can check by itself.

    Raises:
        ArgumentError: a value is invalid; the message names the argument, the rule and the value.

    Example:
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 2, 2, "cpu", 30, None).ranks
        (0, 1, 2, 3)
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 4, 0, "cpu", 30, None)
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: rank must be an integer from 0 to 3, got 4 (world_size 4). Give each process its own rank.
    """  # noqa: E501
    world_size = read_whole("world_size", world_size, 1, None, "", "Pass the number of processes.")
    rank = read_whole(
        "rank",
        rank,
        0,
        world_size - 1,
        f" (world_size {world_size})",
        "Give each process its own rank.",
    )
    where = f" (rank {rank} of {world_size})"
    port = read_whole(
        "port",
        port,
        1,
        65535,
        where,
        "Pass a free port on rank 0's machine, the same on every rank.",
    )
    local_rank = read_whole(
        "local_rank",
        local_rank,
        0,
        None,
        where,
        "Pass this process's number on its machine, counted from 0.",
    )
    if not isinstance(head_ip, str) or not head_ip.strip():
        raise ArgumentError(
            f"head_ip must be an address or a host name, got {head_ip!r}{where}. Pass rank 0's "
            "address, such as '127.0.0.1'."
        )
    if comm_device not in ("cpu", "gpu"):
        raise ArgumentError(
            f"comm_device must be 'cpu' or 'gpu', got {comm_device!r}{where}. Pass 'cpu' for "
            "Gloo, or 'gpu' for NCCL."
        )
    if not is_number(timeout_s) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ArgumentError(
            f"timeout_s must be a positive number of seconds, at most {_LONGEST_TIMEOUT_S:g}, "
            f"got {timeout_s!r}{where}. Pass 30, for example."
        )
    if ring_order not in ("ranks", "hosts"):
        raise ArgumentError(
            f"ring_order must be 'ranks' or 'hosts', got {ring_order!r}{where}. Pass 'hosts' to "
            "keep the ranks of each host together."
        )
    ranks = (
        tuple(range(world_size))
        if ring_ranks is None
        else _check_ring_ranks(ring_ranks, rank, world_size, where)
    )
    by_hosts = ring_order == "hosts" and ring_ranks is None
    return RingArguments(
        head_ip, port, world_size, rank, local_rank, comm_device, float(timeout_s), ranks, by_hosts
    )


def _check_ring_ranks(ring_ranks: Any, rank: int, world_size: int, where: str) -> tuple[int, ...]:
    """Returns the ring's ranks, which must exist, differ from each other and include this rank."""
    advice = (
        "Pass the global ranks of this rank's ring in order, or [rank] if this rank is not in a "
        "ring."
    )
    if isinstance(ring_ranks, (str, bytes)) or not hasattr(ring_ranks, "__iter__"):
        raise ArgumentError(
            f"ring_ranks must be a sequence of ranks, got {ring_ranks!r}{where}. {advice}"
        )
    ranks = tuple(
        read_whole("each entry of ring_ranks", each, 0, world_size - 1, where, advice)
        for each in ring_ranks
    )
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(
            f"ring_ranks must contain each rank only once, got {list(ranks)}{where}. {advice}"
        )
    if rank not in ranks:
        raise ArgumentError(
            f"ring_ranks must include this rank, got {list(ranks)}{where}. {advice}"
        )
    return ranks


def pairs_of(rank: int, ranks: Sequence[int]) -> tuple[Pair, Pair] | None:
    """Returns the two pairs in a ring that contain the given rank.

    Group *i* consists of the ranks at the places i and (i+1) mod N.

    Args:
        rank: a global rank of the ring.
        ranks: the ring's global ranks in order.

    Returns:
        The pair on which the rank receives, as the successor, and the pair on which it sends, as
        the predecessor; each as (predecessor, successor). The result is None for a ring of one
        rank.

    Example:
        >>> [pairs_of(rank, range(3)) for rank in range(3)]
        [((2, 0), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 0))]
        >>> pairs_of(0, range(2)), pairs_of(0, [0])
        (((1, 0), (0, 1)), None)
    """
    if len(ranks) < 2:
        return None
    place = ranks.index(rank)
    return (ranks[place - 1], rank), (rank, ranks[(place + 1) % len(ranks)])


def build_pair_groups(
    rank: int,
    ranks: Sequence[int],
    rings: Sequence[Sequence[int]],
    store: Store,
    backend: str,
    timeout: timedelta,
) -> PairGroups:
    """Creates this rank's two pair groups on top of the default process group.

    Call this function on every rank of the world, with the rank's own ring. It blocks until the
    neighbours have also called it, and on NCCL until the pairs are connected.

    Args:
        rank: the calling global rank.
        ranks: this ring's global ranks in order.
        rings: all rings of the world, the same list on every rank.
        store: a store that all ranks share, in which this ring's names are unused.
        backend: the backend of the groups.
        timeout: the time limit for each operation on the groups.

    Returns:
        The group on which this rank receives and the group on which it sends, or None and None in a
        ring of one rank.
    """
    if backend != "gloo" or not _builds_privately():
        # The timeout is not inherited from the default group: without it, a deadlock on a pair
        # would last half an hour.
        groups: PairGroups = _build_by_all(
            rank, rings, functools.partial(dist.new_group, timeout=timeout, backend=backend)
        )
        if backend == "nccl":
            connect(
                rank,
                ranks,
                groups,
                torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())),
            )
        return groups
    pairs = pairs_of(rank, ranks)
    if pairs is None:
        return None, None
    device = _gloo_device()
    builds = [_GlooBuild(rank, pair, device, timeout) for pair in pairs]
    keys = [f"{build.name}/{build.place}" for build in builds]
    peer_keys = [f"{build.name}/{build.peer_place}" for build in builds]
    store.set_timeout(timeout)
    # not in torch's stubs
    store.multi_set(keys, [build.address() for build in builds])  # type: ignore[attr-defined]
    for build, address in zip(builds, store.multi_get(peer_keys), strict=True):
        build.meet(address)
    pred_group, succ_group = (build.group(store) for build in builds)
    return pred_group, succ_group


def connect(
    rank: int, ranks: Sequence[int], groups: PairGroups, tensor: torch.Tensor, comm: Any = dist
) -> None:
    """Connects a ring's pairs by exchanging one element in each direction on each pair.

    The program's first messages then find a connection. Call this function on every rank of the
    ring. It blocks until both pairs of the rank are connected.

    Args:
        rank: the calling global rank.
        ranks: the ring's global ranks in order.
        groups: the group on which this rank receives, and the group on which it sends.
        tensor: one element, on the device of the groups.
        comm: a module with the functions of ``torch.distributed``.
    """
    pairs = pairs_of(rank, ranks)
    if pairs is None:
        return
    edges = all_pairs(ranks)
    for pair, group in sorted(
        zip(pairs, groups, strict=True),
        key=lambda one: (edges.index(one[0]) % 2, edges.index(one[0])),
    ):
        # NCCL has one communicator for single messages, in which each direction connects
        # separately, and a second communicator for batches and collectives.
        for source, target in (pair, pair[::-1]):
            if source == rank:
                comm.send(tensor, target, group=group)
            else:
                comm.recv(tensor, source, group=group)
        comm.all_reduce(tensor, group=group)


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroys a group if it exists and was not already destroyed with the default group.

    This function does not block.
    """
    if group is not None and dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def _builds_privately() -> bool:
    """Returns whether, in this version of torch, members can create a group by themselves.

    The version must have been tested, and must have all the private names.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)
    needed = ((gloo, "_Options"), (gloo, "create_device"), (c10d, "_register_pg_in_world"))
    return torch.__version__.startswith(_KNOWN_TORCH) and all(
        hasattr(owner, name) for owner, name in needed
    )


def _build_by_all(
    rank: int, rings: Iterable[Sequence[int]], new_group: Callable[..., Any]
) -> tuple[Any, Any]:
    """Creates the groups through the public API.

    Every rank calls ``new_group`` for every pair of every ring, in the same order.
    """
    pred_group = succ_group = None
    for pair in itertools.chain.from_iterable(map(all_pairs, rings)):
        group = new_group(list(pair), group_desc=pair_name(pair))
        if pair[0] == rank:
            succ_group = group
        elif pair[1] == rank:
            pred_group = group
    return pred_group, succ_group


def _gloo_device() -> object:
    """Returns a device for Gloo's connections, with a listening socket and a thread.

    If the default group uses Gloo, its device is reused.
    """
    with suppress(RuntimeError):  # the default group has no CPU backend: NCCL
        default = c10d._get_default_group()._get_backend(torch.device("cpu"))
        if isinstance(default, dist.ProcessGroupGloo):
            # not in torch's stubs
            device: object = default.options._devices[0]  # type: ignore[attr-defined]
            return device
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


class _GlooBuild:
    """A group that is being created.

    Gloo runs in a thread, over a store in this process, until the other member's address arrives.
    """

    def __init__(self, rank: int, pair: Pair, device: object, timeout: timedelta) -> None:
        self.name = GroupName(pair_name(pair))
        self.members = sorted(pair)
        self.place = self.members.index(rank)
        self.peer_place = 1 - self.place
        self._timeout = timeout
        self._store = HashStore()
        # not in torch's stubs
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = 1  # the threads run collectives, which pair groups do not use
        options._timeout = timeout
        options.global_ranks_in_group = self.members
        options.group_name = self.name
        self._backend = BackgroundCall(
            lambda: dist.ProcessGroupGloo(self._store, self.place, len(self.members), options)
        )

    # In its first group over a store, Gloo stores the address of member i under "0/i".

    def address(self) -> bytes:
        """Waits for the address that Gloo offers to the other member, and returns that address."""
        self._store.wait([f"0/{self.place}"], self._timeout)
        address: bytes = self._store.get(f"0/{self.place}")
        return address

    def meet(self, address: bytes) -> None:
        """Passes the other member's address to Gloo, which then connects to that member."""
        # torch accepts bytes as well as text
        self._store.set(f"0/{self.peer_place}", address)  # type: ignore[arg-type]

    def group(self, store: Store) -> dist.ProcessGroup:
        """Waits until both members are connected and returns the group.

        Registers the group in torch's tables, as ``new_group`` does.
        """
        backend = self._backend.result(self._timeout.total_seconds())
        group_store = PrefixStore(f"{self.name}/", store)
        group = dist.ProcessGroup(group_store, self.place, len(self.members))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(self.name)
        group._set_group_desc(self.name)
        c10d._register_pg_in_world(
            group,
            backend_name="gloo",
            store=group_store,
            group_name=self.name,
            backend_config="cpu:gloo",
            rank_mapping={member: index for index, member in enumerate(self.members)},
        )
        return group


def build_on_torch(
    wanted: RingArguments, listen_socket: socket.socket | None, undo: ExitStack
) -> tuple[PairGroups, tuple[int, ...]]:
    """Meets the other ranks and creates torch's groups for a ring.

    Call this function on every rank of the world. It blocks until all ranks have created their
    groups. Returns the groups, and the ring's ranks in order.

    Args:
        wanted: the requested ring.
        listen_socket: for rank 0, a socket that already listens; None to open one.
        undo: a stack that receives the calls to destroy the groups.

    Raises:
        ArgumentError: the GPU does not exist, or the existing default group has a different rank or
            size.
        RendezvousFailed: the ranks did not find each other.
        RingError: torch hides the store of the existing default group.
    """
    rank, world_size, timeout_s = wanted.rank, wanted.world_size, wanted.timeout_s
    timeout = timedelta(seconds=timeout_s)
    chosen = get_state().backend
    if wanted.comm_device == "gpu" and chosen not in (None, "nccl"):
        raise ArgumentError(
            f"comm_device must be 'cpu' with the backend {chosen!r}, got 'gpu' "
            f"(rank {rank} of {world_size}). Pass 'cpu', or call set_backend('torch') for NCCL."
        )
    gpu = _select_gpu(wanted) if wanted.comm_device == "gpu" else ""
    backend = "nccl" if gpu else chosen or "gloo"
    card = Card(
        world_size,
        wanted.comm_device,
        wanted.ranks,
        gpu,
        socket.gethostname() if wanted.by_hosts else "",
    )
    if backend == "mpi" and not dist.is_initialized():
        MANAGING["init_process_group"](backend, None, timeout, world_size, rank)
        undo.callback(destroy_group, dist.group.WORLD)
    builds_default = not dist.is_initialized()
    if builds_default:
        rendezvous = meet(
            wanted.head_ip, wanted.port, rank, world_size, card, timeout_s, listen_socket
        )
    else:
        rendezvous = meet_over(_store_of_default_group(wanted), rank, world_size, card, timeout_s)
    undo.callback(leave, rendezvous, timeout_s)
    ranks = next(ring for ring in rendezvous.rings if rank in ring)
    with finishing(rendezvous, timeout_s):
        if builds_default:
            undo.callback(build_default_group(rendezvous, rank, world_size, backend, timeout))
            undo.callback(destroy_group, dist.group.WORLD)
        groups = build_pair_groups(
            rank, ranks, rendezvous.rings, rendezvous.roll.store, backend, timeout
        )
        for group in groups:
            undo.callback(destroy_group, group)
    return groups, ranks


def build_on_clock(wanted: RingArguments, undo: ExitStack) -> tuple[PairGroups, tuple[int, ...]]:
    """Creates all pair groups of simulated ranks, which are already connected.

    Call this function on every rank of the world. It blocks until all ranks have created all
    groups. Returns the groups, and the ring's ranks in order.

    Args:
        wanted: the requested ring.
        undo: a stack that receives the calls to destroy the groups.

    Raises:
        ArgumentError: ``comm_device`` is "gpu", or the existing world has a different rank or size.
        RendezvousFailed: the ranks disagree about their rings.
    """
    rank, world_size = wanted.rank, wanted.world_size
    if wanted.comm_device != "cpu":
        raise ArgumentError(
            f"comm_device must be 'cpu' on the virtual clock, got {wanted.comm_device!r} "
            f"(rank {rank} of {world_size}). Pass 'cpu'."
        )
    if not dist.is_initialized():
        dist.init_process_group(world_size=world_size, rank=rank)
        undo.callback(destroy_group, dist.group.WORLD)
    _check_world(wanted, dist.get_rank(), dist.get_world_size())
    timeout = timedelta(seconds=wanted.timeout_s)
    rings = _ask_for_rings(wanted)
    groups = _build_by_all(rank, rings, functools.partial(dist.new_group, timeout=timeout))
    for group in groups:
        undo.callback(destroy_group, group)
    return groups, next(ring for ring in rings if rank in ring)


def _check_world(wanted: RingArguments, rank: int, world_size: int) -> None:
    """Compares the arguments with the existing process group."""
    for name, value in (("world_size", world_size), ("rank", rank)):
        if getattr(wanted, name) != value:
            raise ArgumentError(
                f"{name} must be {value}, as in the existing default process group, got "
                f"{getattr(wanted, name)} (rank {rank} of {world_size}). Pass the value that "
                "you passed to init_process_group."
            )


def _ask_for_rings(wanted: RingArguments) -> list[tuple[int, ...]]:
    """Returns all rings in the world; the list is the same on every rank.

    Each rank sends its ring as a row of numbers, padded with -1. If the ring is ordered by hosts,
    the row instead contains one number above all ranks, which identifies the rank's host.
    """
    size = wanted.world_size
    mine = [size + zlib.crc32(socket.gethostname().encode())] if wanted.by_hosts else wanted.ranks
    row = torch.full((size,), -1, dtype=torch.int64)
    row[: len(mine)] = torch.tensor(mine)
    rows = [torch.empty_like(row) for _ in range(size)]
    with pause_log():  # the program did not call this operation
        dist.all_gather(rows, row)
    asked = [tuple(each[each >= 0].tolist()) for each in rows]
    hosts = [str(ring[0]) if ring[0] >= size else "" for ring in asked]
    whole = tuple(range(size))
    cards = [
        Card(size, wanted.comm_device, whole if host else ring, host=host)
        for ring, host in zip(asked, hosts, strict=True)
    ]
    fault = find_fault(cards)
    if fault is not None:
        raise RendezvousFailed(
            f"{fault} (rank {wanted.rank} of {wanted.world_size}). Pass the same ring_order on "
            "every rank, and the same ring_ranks on every rank in a ring."
        )
    return list_rings(cards)


def _store_of_default_group(wanted: RingArguments) -> Store:
    """Returns the store of the script's own default group, if it matches the arguments."""
    _check_world(wanted, dist.get_rank(), dist.get_world_size())
    store = default_store()
    if store is None:
        raise RingError(
            "cannot build a ring on the existing process group, because this version of torch "
            f"hides its store (rank {wanted.rank} of {wanted.world_size}). Remove the call to "
            "init_process_group: initialize_distributed creates the group."
        )
    return store


def _select_gpu(wanted: RingArguments) -> str:
    """Selects this rank's GPU and returns a string that uniquely identifies it.

    The text includes ``NCCL_HOSTID``, if this variable is set: NCCL treats ranks with different
    values as ranks on different machines, so these ranks may share a GPU.
    """
    where = f"(rank {wanted.rank} of {wanted.world_size}, local_rank {wanted.local_rank})"
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ArgumentError(
            f"comm_device is 'gpu', but torch finds no GPU or no NCCL {where}. Pass 'cpu', or "
            "use a CUDA build of torch."
        )
    count = torch.cuda.device_count()
    if wanted.local_rank >= count:
        raise ArgumentError(
            f"local_rank must be less than {count}, the number of GPUs on this machine, got "
            f"{wanted.local_rank} {where}. Start at most one rank per GPU, or pass "
            "comm_device='cpu'."
        )
    torch.cuda.set_device(wanted.local_rank)
    return (
        f"{torch.cuda.get_device_name(wanted.local_rank)} "
        f"{torch.cuda.get_device_properties(wanted.local_rank).uuid}"
        f"{' as host ' + host if (host := os.environ.get('NCCL_HOSTID', '')) else ''}"
    )
