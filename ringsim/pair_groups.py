"""Process groups of two ranks: the one module that uses torch's private API.

The public ``new_group`` must be called by every rank for every group, also by those outside it: a ring of N pairs costs each rank N calls.
A pair needs only its two members to meet. So each of them builds the group by itself, under a name that both know, over the store that all
ranks share. Torch's own way to let the members alone build a group (``use_local_synchronization``) names it by how many groups the process
made so far: the members of a pair must then have made equally many, which no order achieves in a ring of odd length.

Gloo, building a group, writes its own address into a store and waits for the other's: ten questions to the shared store for two groups,
and the order in which a rank builds them could close a circle of ranks that wait for each other. So each of a rank's two groups is built
over a store of its own in this process, both at once, and only the addresses go through the shared one, in three questions::

    group to pred --- my address --->  |            |  --- both of mine --->  shared store
    (a thread)    <-- its address ---  |  exchange  |
    group to succ --- my address --->  |            |  <-- one of pred's,
    (a thread)    <-- its address ---  |            |      one of succ's ---  shared store

Every rank writes before it waits, so no order of ranks can stop them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from ringsim.comm.rendezvous import BackgroundCall

__all__ = ["Pair", "PairGroups", "build_pair_groups", "default_store", "destroy_group", "pair_name", "pairs_of"]

Pair = tuple[int, int]
PairGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]

_KNOWN_TORCH = "2.13."  # where Gloo keeps addresses in a store is nobody's promise: another version goes the public way until it is tried


def pairs_of(rank: int, ranks: Sequence[int]) -> tuple[Pair, Pair] | None:
    """Names the two pairs of a ring that a rank is in; group *i* is over places (i, (i+1) mod N).

    Args:
        rank: a global rank of the ring.
        ranks: the ring's global ranks in order.

    Returns:
        The pair that the rank receives on, in which it is the successor, and the pair that it sends on, in which it is the predecessor;
        each as (predecessor, successor). None for a ring of one.

    Example:
        >>> for rank in range(4):
        ...     pred_pair, succ_pair = pairs_of(rank, range(4))
        ...     print(rank, pred_pair, succ_pair)
        0 (3, 0) (0, 1)
        1 (0, 1) (1, 2)
        2 (1, 2) (2, 3)
        3 (2, 3) (3, 0)
        >>> pairs_of(0, range(2)), pairs_of(0, [0])
        (((1, 0), (0, 1)), None)
    """
    if len(ranks) < 2:
        return None
    place = ranks.index(rank)
    return (ranks[place - 1], rank), (rank, ranks[(place + 1) % len(ranks)])


def pair_name(pair: Pair) -> str:
    """Returns the name of the group over a pair, predecessor first.

    Example:
        >>> pair_name((2, 3)), pair_name((3, 0))
        ('ring:2>3', 'ring:3>0')
    """
    return f"ring:{pair[0]}>{pair[1]}"


def build_pair_groups(
    rank: int, ranks: Sequence[int], rings: Sequence[Sequence[int]], store: Store, backend: str, timeout: timedelta
) -> PairGroups:
    """Builds this rank's two pair groups, over the default process group.

    Every rank of the world calls it, each for its own ring. It blocks until its neighbours have come as far; on NCCL they meet at the
    first message.

    Args:
        rank: this global rank.
        ranks: this ring's global ranks in order.
        rings: all rings of the world, the same list on every rank.
        store: a store all ranks share, unused before under this ring's names.
        backend: "gloo" or "nccl".
        timeout: limit of each operation on the groups.

    Returns:
        The group that this rank receives on and the group that it sends on; None and None in a ring of one.
    """
    if backend != "gloo" or not _builds_privately():
        return _build_publicly(rank, rings, backend, timeout)
    pairs = pairs_of(rank, ranks)
    if pairs is None:
        return None, None
    device = _gloo_device()
    builds = [_GlooBuild(rank, pair, device, timeout) for pair in pairs]
    keys = [f"{build.name}/{build.here}" for build in builds]
    peer_keys = [f"{build.name}/{build.there}" for build in builds]
    store.set_timeout(timeout)
    store.multi_set(keys, [build.address() for build in builds])  # type: ignore[attr-defined]  # not in torch's stubs
    for build, address in zip(builds, store.multi_get(peer_keys), strict=True):
        build.meet(address)
    pred_group, succ_group = (build.group(store) for build in builds)
    return pred_group, succ_group


def default_store() -> Store | None:
    """Returns the store of the default process group, None where torch does not show it."""
    return c10d._get_default_store() if hasattr(c10d, "_get_default_store") else None


def destroy_group(group: dist.ProcessGroup | None) -> None:
    """Destroys a group of ours; harmless where there is none, or where it went with the default group. It does not block."""
    if group is not None and dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def _builds_privately() -> bool:
    """Tells whether this torch is known to have everything that building a group by its members takes."""
    gloo = getattr(dist, "ProcessGroupGloo", None)
    needed = ((gloo, "_Options"), (gloo, "create_device"), (c10d, "_register_pg_in_world"))
    return torch.__version__.startswith(_KNOWN_TORCH) and all(hasattr(owner, name) for owner, name in needed)


def _build_publicly(rank: int, rings: Sequence[Sequence[int]], backend: str, timeout: timedelta) -> PairGroups:
    """Builds the groups in the public way: every rank calls for every pair of every ring, in one order."""
    pred_group: dist.ProcessGroup | None = None
    succ_group: dist.ProcessGroup | None = None
    for ring in rings:
        for pred in ring:
            pairs = pairs_of(pred, ring)
            if pairs is None:
                continue
            pair = pairs[1]
            # The time-out is not inherited from the default group: without it a deadlock on a pair would last half an hour.
            group = dist.new_group(list(pair), timeout=timeout, backend=backend, group_desc=pair_name(pair))
            if pair[0] == rank:
                succ_group = group
            elif pair[1] == rank:
                pred_group = group
    return pred_group, succ_group


def _gloo_device() -> object:
    """Returns what Gloo's connections go through, a listening socket and a thread: the default group's, where that is Gloo's."""
    with suppress(RuntimeError):  # the default group knows no CPU: NCCL
        default = c10d._get_default_group()._get_backend(torch.device("cpu"))
        if isinstance(default, dist.ProcessGroupGloo):
            device: object = default.options._devices[0]  # type: ignore[attr-defined]  # not in torch's stubs
            return device
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


class _GlooBuild:
    """One group being built: Gloo runs in a thread, over a store in this process, until the other member's address is there."""

    def __init__(self, rank: int, pair: Pair, device: object, timeout: timedelta) -> None:
        self.name = GroupName(pair_name(pair))
        self.members = sorted(pair)
        self.here = self.members.index(rank)
        self.there = 1 - self.here
        self._timeout = timeout
        self._store = HashStore()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._devices = [device]
        options._threads = 1  # they run collectives; messages between two ranks need none
        options._timeout = timeout
        options.global_ranks_in_group = self.members
        options.group_name = self.name
        self._backend = BackgroundCall(lambda: dist.ProcessGroupGloo(self._store, self.here, len(self.members), options))

    def address(self) -> bytes:
        """Waits for what Gloo tells the other member, and returns it."""
        self._store.wait([_gloo_key(self.here)], self._timeout)
        address: bytes = self._store.get(_gloo_key(self.here))
        return address

    def meet(self, address: bytes) -> None:
        """Hands the other member's address to Gloo, which connects."""
        self._store.set(_gloo_key(self.there), address)  # type: ignore[arg-type]  # torch takes bytes as well as text

    def group(self, store: Store) -> dist.ProcessGroup:
        """Waits until the two are connected; returns the group, entered into torch's tables as ``new_group`` would."""
        backend = self._backend.result(self._timeout.total_seconds())
        group_store = PrefixStore(f"{self.name}/", store)
        group = dist.ProcessGroup(group_store, self.here, len(self.members))
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


def _gloo_key(place: int) -> str:
    """Returns the key under which Gloo, in its first group over a store, keeps a member's address."""
    return f"0/{place}"
