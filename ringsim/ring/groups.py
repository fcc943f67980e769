"""How the pair groups of a ring are built.

The arguments, the groups of two ranks, and the two ways to get all of them. This is the one module
that builds groups by torch's private API. The public ``new_group`` must be called by every rank for
every group, also by ranks outside it: a ring of N pairs costs each rank N calls. A pair needs only
its two members. So each member builds the group by itself, under a name that both know, over the
store that all ranks share. (Torch's own way for that, ``use_local_synchronization``, puts the
number of groups that the process has made into the name: both members must then have made equally
many, which no order achieves in a ring of odd length.)

Gloo writes its own address into a store and waits for the other's. Over the shared store that takes
ten questions for two groups, and ranks that build their groups in an unlucky order wait for each
other in a circle. So both groups are built at once, each over a store inside this process, and only
the addresses go through the shared store, in three questions::

    group to pred --- my address --->  |            |  --- both of mine --->  shared store
    (a thread)    <-- its address ---  |  exchange  |
    group to succ --- my address --->  |            |  <-- one of pred's,
    (a thread)    <-- its address ---  |            |      one of succ's ---  shared store

Every rank writes before it waits, so no order of ranks can stop them.

On NCCL, two ranks connect at their first message, and whoever comes first waits in the call for the
other, even of ``irecv``. A ring in which each rank posted its receive first would stand still. So
the pairs connect here, one edge at a time in an order that all share: the edges with even numbers,
which have no rank in common but for the last of an odd ring, then the others::

    edge 0: ranks 0, 1      edge 2: ranks 2, 3     ...      at once
         edge 1: ranks 1, 2      edge 3: ranks 3, 0         then these

On every other backend all ranks call the public ``new_group`` for every pair of every ring, in one
order. MPI joins its ranks itself; the roll-call then goes over the store of its default group. On
the virtual clock a store is of no use, whose waits are in real time: there the ranks first tell
each other, in one all_gather, which ring each is in::

    rank 2 of 4, ring_ranks=[2, 3]          said by all  made by all, in this order
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

# public, though torch lists it nowhere
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
from ringsim.state import get_state

Pair = tuple[int, int]
PairGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]

# where Gloo keeps addresses in a store is no public promise: other versions take the public way
# until tried
_KNOWN_TORCH = ("2.13.", "2.15.")
_LONGEST_TIMEOUT_S = 1e6  # eleven days: in milliseconds it fits into the 32 bits that poll(2) takes


@dataclass(frozen=True)
class RingArguments:
    """The arguments of ``initialize_distributed`` once they are checked.

    The ring keeps them under the same names. ``ranks`` are the global ranks of this rank's ring, in
    order; with ``by_hosts``, the order is found when the ranks have met.
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
    ring_ranks: Sequence[Any] | None,
    ring_order: Any = "ranks",
) -> RingArguments:
    """Checks every argument of ``initialize_distributed`` that can be checked alone.

    Raises:
        ArgumentError: a value breaks its rule; the message names the argument, the rule and the
            value.

    Example:
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 2, 2, "cpu", 30, None).ranks
        (0, 1, 2, 3)
        >>> check_ring_arguments("127.0.0.1", 29500, 4, 4, 0, "cpu", 30, None)
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: rank must be an integer from 0 to 3, got 4 (world_size 4). Give each process its own.
    """  # noqa: E501
    world_size = read_whole("world_size", world_size, 1, None, "", "Pass the number of processes.")
    rank = read_whole(
        "rank", rank, 0, world_size - 1, f" (world_size {world_size})", "Give each process its own."
    )
    where = f" (rank {rank} of {world_size})"
    port = read_whole(
        "port",
        port,
        1,
        65535,
        where,
        "Pass a free port of rank 0's machine, the same on every rank.",
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
            f"head_ip must be an address or a name as text, got {head_ip!r}{where}. Pass rank "
            "0's address, such as '127.0.0.1'."
        )
    if comm_device not in ("cpu", "gpu"):
        raise ArgumentError(
            f"comm_device must be 'cpu' or 'gpu', got {comm_device!r}{where}. Pass 'cpu' for "
            "Gloo, 'gpu' for NCCL."
        )
    if not is_number(timeout_s) or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ArgumentError(
            f"timeout_s must be a number of seconds above 0, got {timeout_s!r}{where}. "
            "Pass for example 30."
        )
    if ring_order not in ("ranks", "hosts"):
        raise ArgumentError(
            f"ring_order must be 'ranks' or 'hosts', got {ring_order!r}{where}. Pass 'hosts' to "
            "keep a host's ranks together."
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
    """Returns the ring's ranks, which must exist, be different and include this one."""
    advice = (
        "Pass the global ranks of the ring that this rank is in, in "
        "order; [rank] where it is in none."
    )
    if isinstance(ring_ranks, (str, bytes)) or not hasattr(ring_ranks, "__iter__"):
        raise ArgumentError(
            f"ring_ranks must be a sequence of ranks, got {ring_ranks!r}{where}. {advice}"
        )
    ranks = tuple(
        read_whole("each of ring_ranks", each, 0, world_size - 1, where, advice)
        for each in ring_ranks
    )
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(
            f"ring_ranks must not name a rank twice, got {list(ranks)}{where}. {advice}"
        )
    if rank not in ranks:
        raise ArgumentError(
            f"ring_ranks must include the rank that passes it, got {list(ranks)}{where}. {advice}"
        )
    return ranks


def pairs_of(rank: int, ranks: Sequence[int]) -> tuple[Pair, Pair] | None:
    """Names the two pairs of a ring that a rank is in; group *i* is over places (i, (i+1) mod N).

    Args:
        rank: a global rank of the ring.
        ranks: the ring's global ranks in order.

    Returns:
        The pair that the rank receives on, in which it is the successor, and the pair that it sends
        on, in which it is the predecessor; each as (predecessor, successor). None for a ring of
        one.

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


def all_pairs(ranks: Sequence[int]) -> list[Pair]:
    """Returns the pairs of a ring in order; none for a ring of one.

    Example:
        >>> all_pairs([2, 3, 5])
        [(2, 3), (3, 5), (5, 2)]
    """
    return list(itertools.pairwise([*ranks, ranks[0]])) if len(ranks) > 1 else []


def pair_name(pair: Pair) -> str:
    """Returns the name of the group over a pair, predecessor first.

    Example:
        >>> pair_name((2, 3)), pair_name((3, 0))
        ('ring:2>3', 'ring:3>0')
    """
    return f"ring:{pair[0]}>{pair[1]}"


def build_pair_groups(
    rank: int,
    ranks: Sequence[int],
    rings: Sequence[Sequence[int]],
    store: Store,
    backend: str,
    timeout: timedelta,
) -> PairGroups:
    """Builds this rank's two pair groups, over the default process group.

    Every rank of the world calls it, each for its own ring. It blocks until the neighbours have got
    there, and on NCCL until the pairs are connected.

    Args:
        rank: this global rank.
        ranks: this ring's global ranks in order.
        rings: all rings of the world, the same list on every rank.
        store: a store that all ranks share, in which this ring's names are unused.
        backend: what carries the groups.
        timeout: limit of each operation on the groups.

    Returns:
        The group that this rank receives on and the group that it sends on; None and None in a ring
        of one.
    """
    if backend != "gloo" or not _builds_privately():
        # The time-out is not inherited from the default group: without it, a deadlock on a pair
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
    """Has each pair of a ring exchange one element each way.

    So the first messages of the program find a connection. Every rank of the ring calls it. It
    blocks until both its pairs are connected.

    Args:
        rank: this global rank.
        ranks: the ring's global ranks in order.
        groups: this rank's groups: the one that it receives on, and the one that it sends on.
        tensor: one element, on the device of the groups.
        comm: has the functions of ``torch.distributed``.
    """
    pairs = pairs_of(rank, ranks)
    if pairs is None:
        return
    edges = all_pairs(ranks)
    for pair, group in sorted(
        zip(pairs, groups, strict=True),
        key=lambda one: (edges.index(one[0]) % 2, edges.index(one[0])),
    ):
        # NCCL has one communicator for single messages, where each direction connects by itself,
        # and one for batches and collectives.
        for source, target in (pair, pair[::-1]):
            if source == rank:
                comm.send(tensor, target, group=group)
            else:
                comm.recv(tensor, source, group=group)
        comm.all_reduce(tensor, group=group)


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroys a group. It does not block.

    Harmless where there is none, or where it was destroyed with the default group.
    """
    if group is not None and dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def _builds_privately() -> bool:
    """Returns whether members can build a group by themselves with this torch.

    A known version that has all private names.
    """
    gloo = getattr(dist, "ProcessGroupGloo", None)
    needed = ((gloo, "_Options"), (gloo, "create_device"), (c10d, "_register_pg_in_world"))
    return torch.__version__.startswith(_KNOWN_TORCH) and all(
        hasattr(owner, name) for owner, name in needed
    )


def _build_by_all(
    rank: int, rings: Iterable[Sequence[int]], new_group: Callable[..., Any]
) -> tuple[Any, Any]:
    """Builds the groups the public way.

    Every rank calls ``new_group`` for every pair of every ring, in one order.
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
    """Returns the device of Gloo's connections, a listening socket and a thread.

    That of the default group where it is on Gloo.
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
    """A group being built.

    Gloo runs in a thread, over a store in this process, until the other member's address is there.
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
        options._threads = 1  # they run collectives, which pair groups do not
        options._timeout = timeout
        options.global_ranks_in_group = self.members
        options.group_name = self.name
        self._backend = BackgroundCall(
            lambda: dist.ProcessGroupGloo(self._store, self.place, len(self.members), options)
        )

    # In its first group over a store, Gloo keeps the address of member i under "0/i".

    def address(self) -> bytes:
        """Waits for the address that Gloo has for the other member, and returns it."""
        self._store.wait([f"0/{self.place}"], self._timeout)
        address: bytes = self._store.get(f"0/{self.place}")
        return address

    def meet(self, address: bytes) -> None:
        """Hands the other member's address to Gloo, which connects."""
        # torch takes bytes as well as text
        self._store.set(f"0/{self.peer_place}", address)  # type: ignore[arg-type]

    def group(self, store: Store) -> dist.ProcessGroup:
        """Waits until the two are connected.

        Returns the group, entered into torch's tables as by ``new_group``.
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
    """Meets the other ranks and builds the groups of torch that a ring needs.

    Every rank of the world calls it. It blocks until all have built theirs. Returns the groups, and
    the ring's ranks in order.

    Args:
        wanted: the ring.
        listen_socket: for rank 0, a socket that listens already; None to open one.
        undo: receives the calls that take down what was built.

    Raises:
        ArgumentError: there is no such GPU, or the existing default group differs.
        RendezvousFailed: the ranks did not find each other.
        RingError: the store of the existing default group is hidden.
    """
    rank, world_size, timeout_s = wanted.rank, wanted.world_size, wanted.timeout_s
    timeout = timedelta(seconds=timeout_s)
    chosen = get_state().backend
    if wanted.comm_device == "gpu" and chosen not in (None, "nccl"):
        raise ArgumentError(
            f"comm_device must be 'cpu' on the backend {chosen!r}, got 'gpu' "
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
    """Builds all pair groups of simulated ranks, which are joined already.

    Every rank of the world calls it. It blocks until all have made all groups. Returns the groups,
    and the ring's ranks in order.

    Args:
        wanted: the ring.
        undo: receives the calls that take down what was built.

    Raises:
        ArgumentError: ``comm_device`` is "gpu", or the world has another rank or number of ranks.
        RendezvousFailed: the ranks do not agree on their rings.
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
    """Compares the arguments with the process group that exists."""
    for name, value in (("world_size", world_size), ("rank", rank)):
        if getattr(wanted, name) != value:
            raise ArgumentError(
                f"{name} must be {value} as in the default process group that exists, got "
                f"{getattr(wanted, name)} "
                f"(rank {rank} of {world_size}). Pass what init_process_group was told."
            )


def _ask_for_rings(wanted: RingArguments) -> list[tuple[int, ...]]:
    """Returns every ring of the world, the same list on every rank.

    A rank's ring is a row of numbers, filled up with -1. Where the ring is to be ordered by hosts,
    a number beyond all ranks stands for the rank's host instead.
    """
    size = wanted.world_size
    mine = [size + zlib.crc32(socket.gethostname().encode())] if wanted.by_hosts else wanted.ranks
    row = torch.full((size,), -1, dtype=torch.int64)
    row[: len(mine)] = torch.tensor(mine)
    rows = [torch.empty_like(row) for _ in range(size)]
    with pause_log():  # the program did not ask for it
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
            f"{fault} (rank {wanted.rank} of {wanted.world_size}). Pass the same ring_ranks on "
            "every rank of a ring."
        )
    return list_rings(cards)


def _store_of_default_group(wanted: RingArguments) -> Store:
    """Returns the store of the default group that the script made, if it fits the arguments."""
    _check_world(wanted, dist.get_rank(), dist.get_world_size())
    store = default_store()
    if store is None:
        raise RingError(
            "initialize_distributed must come before init_process_group with this version of "
            "torch, which hides the store of a group, "
            f"got a group that exists (rank {wanted.rank} of {wanted.world_size}). Leave "
            "init_process_group out."
        )
    return store


def _select_gpu(wanted: RingArguments) -> str:
    """Makes this rank's GPU the current device.

    Returns a text that identifies it among all GPUs. It includes ``NCCL_HOSTID``, if you set one:
    NCCL takes ranks with different ones for ranks of different machines, so they may share a GPU.
    """
    where = f"(rank {wanted.rank} of {wanted.world_size}, local_rank {wanted.local_rank})"
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ArgumentError(
            f"comm_device must be 'cpu' where torch finds no GPU with NCCL, got 'gpu' {where}. "
            "Pass 'cpu', or use a CUDA build of torch."
        )
    count = torch.cuda.device_count()
    if wanted.local_rank >= count:
        raise ArgumentError(
            f"local_rank must be below the number of GPUs of this machine, {count}, got "
            f"{wanted.local_rank} {where}. "
            "Start at most one rank for each GPU, or pass comm_device='cpu'."
        )
    torch.cuda.set_device(wanted.local_rank)
    return (
        f"{torch.cuda.get_device_name(wanted.local_rank)} "
        f"{torch.cuda.get_device_properties(wanted.local_rank).uuid}"
        f"{' as host ' + host if (host := os.environ.get('NCCL_HOSTID', '')) else ''}"
    )
