"""The wait-for analysis: finds the ranks that can never continue.

The analysis is a pure function of the posted operations at one moment. A Gloo send of any size
returns only after its recv is posted, so a rank that waits for an unmatched operation continues
only if its peer acts, and the peer can act only if it is not itself blocked. Starting from the
ranks that are not blocked, each rank that can still be helped is set free. The remaining ranks can
never continue, whatever the others do::

    free      ranks that are not blocked
    repeat    a blocked rank is set free when all operations that one of its threads waits for
              can still finish:
                a matched operation                        will finish, unless the peer was killed
                an unmatched send, or recv from one peer   when that peer is free
                a recv from any source                     when a member of the group is free (OR)
                a collective                               when every member has arrived, or is free
                                                           (AND)

Source:
    The fixpoint comes from T. Hilbrich et al., "Distributed wait state tracking for runtime MPI
    deadlock detection", 2013 (AND/OR wait-for graphs of MUST). It is exact here, because Gloo's
    messages are not buffered.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringsim.diagnose.snapshot import OpenOperation, Snapshot
from ringsim.traces.collectives import same_collective
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, NONE
from ringsim.traces.findings import Operation

_Waiter = tuple[int, int]  # a rank and the number of a thread
_DEAD = frozenset({"failed", "killed"})  # not even their posted operations will finish


@dataclass(frozen=True)
class Hindrance:
    """An operation that blocks a rank, and the ranks that will not do their part."""

    rank: int
    posted: OpenOperation
    # ascending. A recv from any source needs only one of them, a collective needs all
    peers: tuple[int, ...]

    @property
    def operation(self) -> Operation:
        """The operation that blocks the rank."""
        return self.posted.operation


@dataclass(frozen=True)
class Stuck:
    """The ranks that can never continue."""

    ranks: tuple[int, ...]  # all of them, ascending
    # a shortest cycle among them, each waiting for the next and the last for the first; empty if
    # there is none
    cycle: tuple[int, ...]
    hindrances: tuple[Hindrance, ...]  # their waits, ordered by rank


def meets(mine: Operation, theirs: Operation) -> bool:
    """Returns whether two collective calls belong together.

    Calls of new_group must create the same group.
    """
    return same_collective(mine.op, theirs.op) and (
        mine.op != "new_group" or mine.shape == theirs.shape
    )


def analyse(snapshot: Snapshot) -> Stuck | None:
    """Finds the ranks that can never continue.

    Args:
        snapshot: the ranks at one moment, as a consistent cut: an operation counts as matched only
            if its other side is posted.

    Returns:
        These ranks and their waits, or None if all ranks can still continue.

    Example:
        >>> from ringsim.diagnose.snapshot import RankSnapshot
        >>> from ringsim.traces.events import Group
        >>> both = (0, 1)
        >>> def receives(rank, peer):
        ...     operation = Operation(rank=rank, op="recv", peer=peer, tag=0, group="world")
        ...     return RankSnapshot(
        ...         "blocked", (OpenOperation(operation, Group("world", both), awaited=True),)
        ...     )
        >>> stuck = analyse(Snapshot((receives(0, 1), receives(1, 0))))
        >>> stuck.ranks, stuck.cycle
        ((0, 1), (0, 1))
        >>> analyse(Snapshot((receives(0, 1), RankSnapshot("running")))) is None
        True
    """
    needs: dict[Hashable, _Need] = {}
    concerned = defaultdict[int, list[_Need]](list)  # rank -> the needs that it can help with
    missing = Counter[_Waiter]()  # operations that a thread still waits for
    for rank, view in enumerate(snapshot.ranks):
        for one in view.awaited:
            key = _need_key(one)
            if key not in needs:
                needs[key] = need = _make_need(snapshot, one)
                for member in need.wanted:
                    concerned[member].append(need)
            waiter = rank, one.thread
            needs[key].waiters.append(waiter)
            missing[waiter] += 1
    waiting = {rank for rank, _ in missing}
    free = deque(
        rank for rank, view in enumerate(snapshot.ranks) if not view.is_out and rank not in waiting
    )

    def release(waiters: Iterable[_Waiter]) -> None:
        for waiter in waiters:
            missing[waiter] -= 1
            if missing[waiter] == 0:
                free.append(waiter[0])

    for need in needs.values():
        release(need.met())
    while free:
        rank = free.popleft()
        for need in concerned[rank]:
            need.left.discard(rank)
            release(need.met())
    stuck = tuple(sorted(waiting - {rank for (rank, _), number in missing.items() if number == 0}))
    if not stuck:
        return None
    hindrances = tuple(
        Hindrance(rank, one, peers)
        for rank in stuck
        for one in snapshot.ranks[rank].awaited
        if (peers := needs[_need_key(one)].hindering(rank))
    )
    return Stuck(stuck, find_cycle(hindrances), hindrances)


def hindering(snapshot: Snapshot, one: OpenOperation) -> tuple[int, ...]:
    """Returns the ranks that must act before an operation can finish, in ascending order.

    For a recv from any source, one of these ranks is enough.
    """
    return _make_need(snapshot, one).hindering(one.operation.rank)


class _Need:
    """The ranks that an operation waits for.

    Operations that wait for the same ranks share one instance.

    Attributes:
        never: the ranks that will not do their part, whatever happens.
        wanted: the ranks that must be able to act; may include the waiting rank, which never waits
            for itself.
        any_of: whether one of ``wanted`` is enough.
        left: the ranks in ``wanted`` that cannot act yet.
        waiters: the threads that still wait, once for each operation.
    """

    __slots__ = ("_peers", "any_of", "left", "never", "waiters", "wanted")

    def __init__(
        self, never: tuple[int, ...] = (), wanted: tuple[int, ...] = (), *, any_of: bool = False
    ) -> None:
        self.never, self.wanted, self.any_of = never, wanted, any_of
        self.left = set(wanted)
        self.waiters: list[_Waiter] = []
        self._peers: tuple[int, ...] | None = None

    def met(self) -> list[_Waiter]:
        """Returns the waiting threads that can now finish."""
        most = len(self.wanted) - 1 if self.any_of else 1
        if self.never or len(self.left) > most:
            return []
        # if all are needed, the last one that is left waits only for itself, if at all
        last = set() if self.any_of else self.left
        found = [waiter for waiter in self.waiters if not last or waiter[0] in last]
        self.waiters = [waiter for waiter in self.waiters if last and waiter[0] not in last]
        return found

    def hindering(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that keep a rank's operation from finishing, in ascending order.

        No rank may be set free after the first call.
        """
        if self._peers is None:
            helped = self.any_of and len(self.left) < len(self.wanted)
            self._peers = () if helped else tuple(sorted({*self.never, *self.left}))
        return (
            tuple(peer for peer in self._peers if peer != rank)
            if rank in self.left
            else self._peers
        )


def _need_key(one: OpenOperation) -> Hashable:
    """Returns a key that operations share if they wait for the same ranks."""
    operation = one.operation
    if operation.kind == COLLECTIVE:
        made = operation.shape if operation.op == "new_group" else ()
        return operation.op, made, one.group, one.index, id(one.entered)
    return (
        operation.peer,
        one.matched,
        operation.peer == operation.rank,
        one.group if operation.peer == ANY_SOURCE else None,
    )


def _make_need(snapshot: Snapshot, one: OpenOperation) -> _Need:
    rank, peer = one.operation.rank, one.operation.peer
    if one.operation.kind == COLLECTIVE:
        entered = {other.rank: other for other in one.entered}
        # Only the members of a new group wait for each other.
        members = one.operation.shape if one.operation.op == "new_group" else one.group.ranks
        known = [member for member in members if _known(snapshot, member)]
        differ = {other.rank for other in one.entered if not meets(one.operation, other)}
        never = tuple(
            other
            for other in known
            if other in entered and (other in differ or snapshot.ranks[other].state in _DEAD)
        )
        return _Need(never, tuple(other for other in known if other not in entered))
    if peer == ANY_SOURCE:
        others = [member for member in one.group.ranks if member != rank]
        helped = one.matched or not others or any(not _known(snapshot, member) for member in others)
        return _Need() if helped else _Need(wanted=one.group.ranks, any_of=True)
    if peer == NONE or not _known(snapshot, peer):
        return _Need()
    if one.matched:
        return _Need(never=(peer,)) if snapshot.ranks[peer].state in _DEAD else _Need()
    return _Need(never=(peer,)) if peer == rank else _Need(wanted=(peer,))


def _known(snapshot: Snapshot, rank: int) -> bool:
    return 0 <= rank < len(snapshot.ranks)


def find_cycle(hindrances: Iterable[Hindrance]) -> tuple[int, ...]:
    """Returns a shortest cycle of ranks that wait for each other, starting at its lowest rank.

    The result is empty if there is no cycle.
    """
    links = list(hindrances)
    ranks = {link.rank for link in links}
    alone = [link.rank for link in links if link.rank in link.peers]
    if alone:
        return (min(alone),)
    together = {link.peers for link in links}  # many of them share the same peers
    inside = {peers: tuple(peer for peer in peers if peer in ranks) for peers in together}
    graph: dict[int, list[tuple[int, ...]]] = {}
    for link in links:
        graph.setdefault(link.rank, []).append(inside[link.peers])
    cycles = []
    ways: _Ways | None = None
    for start in list(graph):
        if start not in graph:
            continue
        if cycle := _cycle_through(start, graph):
            cycles.append(cycle)
        if len(cycle) == 2:
            break
        ways = ways or _Ways(graph)
        # no other cycle through it is shorter, and no cycle remains through ranks that wait only
        # for it
        ways.remove(start)
    best = min(cycles, key=len, default=())
    first = best.index(min(best)) if best else 0
    return best[first:] + best[:first]


def _cycle_through(start: int, graph: Mapping[int, Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Returns a shortest cycle that starts at a rank, or an empty tuple if there is none."""
    came_from: dict[int, int] = {}
    fresh = deque([start])
    while fresh and start not in came_from:
        rank = fresh.popleft()
        for peer in itertools.chain.from_iterable(graph[rank]):
            if peer in graph and peer not in came_from:
                came_from[peer] = rank
                fresh.append(peer)
    if start not in came_from:
        return ()
    path = [start]
    while (rank := came_from[path[-1]]) != start:
        path.append(rank)
    return (start, *reversed(path[1:]))


class _Ways:
    """Removes ranks from a graph, then any ranks left without edges."""

    def __init__(self, graph: dict[int, list[tuple[int, ...]]]) -> None:
        self._graph = graph
        self._behind: dict[int, list[int]] = {rank: [] for rank in graph}
        self._ahead: dict[int, int] = {}
        for rank, peers in graph.items():
            inside = set(itertools.chain.from_iterable(peers))
            self._ahead[rank] = len(inside)
            for peer in inside:
                self._behind[peer].append(rank)
        for rank in [rank for rank, ahead in self._ahead.items() if ahead == 0]:
            self.remove(rank)

    def remove(self, rank: int) -> None:
        """Removes a rank, unless it is already removed."""
        leaving = [rank]
        while leaving:
            rank = leaving.pop()
            if self._graph.pop(rank, None) is not None:
                for behind in self._behind[rank]:
                    self._ahead[behind] -= 1
                    if self._ahead[behind] == 0:
                        leaving.append(behind)
