"""Who can never go on: the wait-for analysis, a pure function of what the ranks have posted at one moment.

A send of Gloo returns only when its recv was posted, at any size, so a rank that waits for an unmatched operation goes on only if its peer
does something; the peer can do something only if it is not blocked itself. Starting from the ranks that are not blocked, whoever can still
be helped is set free, until nobody is left to be. The rest can never go on, whatever the others do::

    free      ranks that are not blocked
    repeat    a blocked rank is set free when all that it waits for can still happen:
                a matched operation                        will finish, unless the peer was killed
                an unmatched send, or recv from one peer   when that peer is free
                a recv from any source                     when a member of the group is free (OR)
                a collective                               when every member has arrived, or is free (AND)

Source:
    The fixpoint is that of T. Hilbrich et al., "Distributed wait state tracking for runtime MPI deadlock detection", 2013 (AND/OR wait-for
    graphs of MUST); rendezvous makes it exact here, for there is no buffering to guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ringsim.diagnose.finding import Operation
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, NONE, Group

__all__ = [
    "GONE",
    "STATES",
    "Hindrance",
    "Posted",
    "RankView",
    "Stuck",
    "World",
    "analyse",
    "find_cycle",
    "hindering",
    "meets",
    "same_collective",
]

STATES: Final = ("running", "blocked", "exited", "failed", "killed", "stopped", "unknown")
GONE: Final = frozenset({"exited", "failed", "killed"})  # will post nothing more
_DEAD: Final = frozenset({"failed", "killed"})  # nor finish what it has posted

# Collectives that Gloo carries out alike, so that one rank may call the one and another the other.
_FAMILIES: Final = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Posted:
    """An operation that a rank has posted and that is not done.

    Attributes:
        operation: what it is.
        group: on which group, with its members: two groups of one name are two.
        awaited: whether the rank is blocked in waiting for it; of a batch that is true of all its operations.
        index: the how-manieth it is, from 0: of its rank's sends (or recvs) on its channel (group, source, destination, tag); of its
            rank's collectives on the group. 0 for a recv from any source.
        counterparts: how many the other side has posted on that channel so far; for a recv from any source, how many sends there are
            that it could take. Not for collectives.
        entered: for a collective: what other members posted as their ``index``-th collective on the group; who is missing has not.
    """

    operation: Operation
    group: Group
    awaited: bool
    index: int = 0
    counterparts: int = 0
    entered: tuple[Operation, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether the other side of a message has been posted, too."""
        return self.counterparts > self.index


@dataclass(frozen=True)
class RankView:
    """What is known of one rank at one moment.

    Attributes:
        state: one of ``STATES``. "blocked": it waits for its ``awaited`` operations and can do nothing else (all threads that communicate
            do). "exited": its worker has returned, or its process left with code 0. "failed": it raised. "killed": its process died.
            "unknown" and "stopped" (by a signal) count as able to go on.
        posted: its operations that are not done.
        about: what else is known, for the message: "raised ValueError: no such layer", "ended by signal 9 (SIGKILL)".
    """

    state: str
    posted: tuple[Posted, ...] = ()
    about: str = ""

    @property
    def awaited(self) -> tuple[Posted, ...]:
        """What it is blocked in; empty where it is not blocked."""
        return tuple(one for one in self.posted if one.awaited) if self.state == "blocked" else ()


@dataclass(frozen=True)
class World:
    """All ranks at one moment, ``ranks[r]`` being rank r."""

    ranks: tuple[RankView, ...]


@dataclass(frozen=True)
class Hindrance:
    """Why a rank cannot go on: one operation, and the ranks that will not do their part in it.

    Attributes:
        rank: who waits.
        posted: in what.
        peers: for whom, ascending. One of them would do for a recv from any source; a collective needs them all.
    """

    rank: int
    posted: Posted
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Stuck:
    """The ranks that can never go on.

    Attributes:
        ranks: all of them, ascending.
        cycle: a shortest cycle among them, each waiting for the next and the last for the first; empty where there is none.
        hindrances: who waits for whom, ordered by rank.
    """

    ranks: tuple[int, ...]
    cycle: tuple[int, ...]
    hindrances: tuple[Hindrance, ...]


def meets(mine: Operation, theirs: Operation) -> bool:
    """Tells whether two calls of a collective belong together; those that make groups must make the same one."""
    return same_collective(mine.op, theirs.op) and (mine.op != "new_group" or mine.shape == theirs.shape)


def same_collective(one: str, other: str) -> bool:
    """Tells whether two collectives, by their names, can meet.

    Example:
        >>> same_collective("all_gather", "all_gather_into_tensor"), same_collective("barrier", "all_reduce")
        (True, False)
    """
    return _FAMILIES.get(one, one) == _FAMILIES.get(other, other)


def analyse(world: World) -> Stuck | None:
    """Finds the ranks that can never go on.

    Args:
        world: the ranks at one moment, a consistent cut: no operation counts as matched whose other side is not posted.

    Returns:
        Those ranks and why, None where everybody can still go on.

    Example:
        >>> both = (0, 1)
        >>> def receives(rank, peer):
        ...     operation = Operation(rank=rank, op="recv", peer=peer, tag=0, group="world")
        ...     return RankView("blocked", (Posted(operation, Group("world", both), awaited=True),))
        >>> stuck = analyse(World((receives(0, 1), receives(1, 0))))
        >>> stuck.ranks, stuck.cycle
        ((0, 1), (0, 1))
        >>> analyse(World((receives(0, 1), RankView("running")))) is None
        True
    """
    free = {rank for rank, view in enumerate(world.ranks) if view.state not in GONE and not view.awaited}
    waiting: dict[int, list[tuple[int, Posted]]] = {}  # rank -> the blocked ranks that it may help, and in what
    open_needs: dict[int, int] = {}  # blocked rank -> how many of its operations need a rank that is not free yet
    for rank, view in enumerate(world.ranks):
        awaited = view.awaited
        if awaited:
            hindered = [one for one in awaited if hindering(world, free, rank, one)]
            open_needs[rank] = len(hindered)
            for one in hindered:
                for peer in hindering(world, set(), rank, one):
                    waiting.setdefault(peer, []).append((rank, one))
    fresh = deque(rank for rank, needs in open_needs.items() if needs == 0)
    free.update(fresh)
    while fresh:
        for rank, one in waiting.get(fresh.popleft(), ()):
            if rank in free or hindering(world, free, rank, one):
                continue
            if not any(hindering(world, free, rank, other) for other in world.ranks[rank].awaited):
                free.add(rank)
                fresh.append(rank)
    stuck = tuple(rank for rank in open_needs if rank not in free)
    if not stuck:
        return None
    hindrances = tuple(
        Hindrance(rank, one, peers) for rank in stuck for one in world.ranks[rank].awaited if (peers := hindering(world, free, rank, one))
    )
    return Stuck(stuck, find_cycle(hindrances), hindrances)


def hindering(world: World, free: set[int], rank: int, one: Posted) -> tuple[int, ...]:
    """Returns the ranks that keep an operation from finishing while only ``free`` ranks act; none where it will finish.

    Args:
        world: the ranks.
        free: those that can act.
        rank: whose operation it is.
        one: the operation.
    """
    peer = one.operation.peer
    if one.operation.kind == COLLECTIVE:
        entered = {other.rank: other for other in one.entered}
        # Who makes a group waits for its members; the others pass by.
        members = one.operation.shape if one.operation.op == "new_group" else one.group.ranks
        return tuple(
            member
            for member in members
            if member != rank
            and _known(world, member)
            and (
                world.ranks[member].state in _DEAD or not meets(one.operation, entered[member]) if member in entered else member not in free
            )
        )
    if peer == ANY_SOURCE:
        others = tuple(member for member in one.group.ranks if member != rank)
        helped = one.matched or any(member in free or not _known(world, member) for member in others)
        return () if helped else others
    if peer == NONE or not _known(world, peer):
        return ()
    if one.matched:
        return (peer,) if world.ranks[peer].state in _DEAD else ()
    return () if peer in free else (peer,)


def _known(world: World, rank: int) -> bool:
    return 0 <= rank < len(world.ranks)


def find_cycle(hindrances: Iterable[Hindrance]) -> tuple[int, ...]:
    """Returns a shortest cycle of ranks that wait for each other, beginning with its lowest rank; empty where there is none."""
    graph: dict[int, list[int]] = {}
    for hindrance in hindrances:
        graph.setdefault(hindrance.rank, []).extend(hindrance.peers)
    best: tuple[int, ...] = ()
    for start in graph:
        came_from: dict[int, int] = {}
        fresh = deque([start])
        while fresh and start not in came_from:
            rank = fresh.popleft()
            for peer in graph.get(rank, ()):
                if peer not in came_from and (peer == start or peer in graph):
                    came_from[peer] = rank
                    fresh.append(peer)
        if start in came_from:
            path = [start]
            while (rank := came_from[path[-1]]) != start:
                path.append(rank)
            cycle = (start, *reversed(path[1:]))
            if not best or len(cycle) < len(best):
                best = cycle
            if len(best) <= 2:
                break
    if not best:
        return ()
    first = best.index(min(best))
    return best[first:] + best[:first]
