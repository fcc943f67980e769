"""Runs lists of operations in their order, without ranks: who would be where, when, and who would wait for whom for ever.

Any point-to-point program is such lists, one a rank. There are four operations: computing, posting a send, posting a receive, and waiting
for a post. A blocking send is a post and its wait::

    send(1); recv(1)          Send(1) Wait(0) Receive(1) Wait(2)
    isend(1); recv(1); wait   Send(1) Receive(1) Wait(1) Wait(0)

The k-th send from a rank to another under a tag meets the k-th receive there; where there are groups, a pair (group, tag) is the tag. Only
a receive from any rank cannot be written so: whom it meets depends on who comes first.

What happens follows from the lists alone, whatever order the ranks really run in: each rank does its list in order, so a rank that can go
on can go on at any time later too. So it is enough to let each rank run until it waits for something that is not posted yet, and to come
back when it is. When nobody is left who can run, either all have ended or nobody ever will: those that are left each wait for one other,
and following them leads into a circle, or to a rank that has ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, NamedTuple

from ringsim.errors import ArgumentError

__all__ = ["SEMANTICS", "Blocked", "Compute", "Message", "Operation", "Receive", "Run", "Semantics", "Send", "Time", "Wait", "run_programs"]

Time = int | float | Fraction
Semantics = Literal["rendezvous", "buffered"]
SEMANTICS: Final = ("rendezvous", "buffered")


@dataclass(frozen=True, slots=True)
class Compute:
    """Works for a while.

    Attributes:
        duration: how long, in any unit, the same everywhere.
    """

    duration: Time


@dataclass(frozen=True, slots=True)
class Send:
    """Posts a send, and goes on.

    Attributes:
        peer: the rank that receives.
        tag: what the receive must have too.
    """

    peer: int
    tag: Hashable = 0


@dataclass(frozen=True, slots=True)
class Receive:
    """Posts a receive, and goes on.

    Attributes:
        peer: the rank that sends.
        tag: what the send must have too.
    """

    peer: int
    tag: Hashable = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until a post of this rank is done.

    Attributes:
        position: where in this rank's list the post stands.
    """

    position: int


Operation = Compute | Send | Receive | Wait
_Place = tuple[int, int]  # (rank, position in its list)


class Message(NamedTuple):
    """A send and the receive that it met; ranks, and positions in their lists.

    Attributes:
        source: the rank that sent.
        send: position of the send.
        rank: the rank that received.
        receive: position of the receive.
        posted: when the send was posted.
        arrived: when the payload was there.
    """

    source: int
    send: int
    rank: int
    receive: int
    posted: Time
    arrived: Time


class Blocked(NamedTuple):
    """A rank that waits for ever.

    Attributes:
        rank: which rank.
        position: of the wait in its list.
        post: position of the send or receive that it waits for.
        peer: the rank that would have to post the other side.
    """

    rank: int
    position: int
    post: int
    peer: int


@dataclass(frozen=True)
class Run:
    """What became of the programs.

    Attributes:
        times: for each rank, (start, end) of each operation that it came to; a post takes no time, a wait ends when the rank goes on.
        messages: those that arrived, by receiver.
        blocked: the ranks that wait for ever, by rank; empty when all have ended.
    """

    times: tuple[tuple[tuple[Time, Time], ...], ...]
    messages: tuple[Message, ...]
    blocked: tuple[Blocked, ...]

    @property
    def cycle(self) -> tuple[Blocked, ...]:
        """The ranks that wait for each other in a circle, each for the next; empty where all wait, in the end, for one that has ended."""
        waiting = {blocked.rank: blocked for blocked in self.blocked}
        for first in waiting:
            path: list[int] = []
            rank = first
            while rank in waiting and rank not in path:
                path.append(rank)
                rank = waiting[rank].peer
            if rank in path:
                return tuple(waiting[member] for member in path[path.index(rank) :])
        return ()


def run_programs(programs: Sequence[Sequence[Operation]], *, latency: Time = 0, semantics: Semantics = "rendezvous") -> Run:
    """Runs one list of operations a rank, in order, on a clock that starts at 0.

    Args:
        programs: for each rank, its operations.
        latency: how long a message travels, in the unit of the computations' durations.
        semantics: ``rendezvous``: a message starts to travel when both sides are posted, and the send ends with it (Gloo, at every size);
            ``buffered``: it travels as soon as it is sent, and the send is done at once (MPI's small messages).

    Returns:
        The times of everything that happened, and who is left waiting. Exact for ints and Fractions.

    Raises:
        ArgumentError: an unknown semantics, a peer that is no other rank, a wait for something that is no earlier post.

    Example:
        >>> both_send_first = [[Send(1), Wait(0), Receive(1), Wait(2)], [Send(0), Wait(0), Receive(0), Wait(2)]]
        >>> [f"rank {stuck.rank} waits for rank {stuck.peer}" for stuck in run_programs(both_send_first).cycle]
        ['rank 0 waits for rank 1', 'rank 1 waits for rank 0']
        >>> run_programs(both_send_first, semantics="buffered").cycle
        ()
    """
    if semantics not in SEMANTICS:
        raise ArgumentError(f"semantics must be one of {', '.join(SEMANTICS)}, got {semantics!r}. Take one of these.")
    _check(programs)
    runner = _Runner(programs, latency, semantics)
    runner.run()
    return Run(tuple(map(tuple, runner.times)), tuple(runner.list_messages()), tuple(runner.list_blocked()))


class _Runner:
    """The lists, how far each rank has come in its own, and who waits for which place to be reached."""

    def __init__(self, programs: Sequence[Sequence[Operation]], latency: Time, semantics: Semantics) -> None:
        self.programs = programs
        self.latency = latency
        self.semantics = semantics
        self.partners = _match(programs)
        self.times: list[list[tuple[Time, Time]]] = [[] for _ in programs]
        self.sleepers: dict[_Place, int] = {}
        self.runnable = list(range(len(programs)))

    def run(self) -> None:
        """Lets ranks run until none of them can."""
        while self.runnable:
            self._advance(self.runnable.pop())

    def _advance(self, rank: int) -> None:
        """Runs one rank until its end, or until it waits for a place that another rank has not reached."""
        times = self.times[rank]
        clock = times[-1][1] if times else 0
        for position in range(len(times), len(self.programs[rank])):
            operation, start = self.programs[rank][position], clock
            if isinstance(operation, Compute):
                clock = start + operation.duration
            elif isinstance(operation, Wait):
                done = self._done_at((rank, operation.position))
                if done is None:
                    partner = self.partners.get((rank, operation.position))
                    if partner is not None:
                        self.sleepers[partner] = rank
                    return
                clock = max(start, done)
            times.append((start, clock))
            if (rank, position) in self.sleepers:
                self.runnable.append(self.sleepers.pop((rank, position)))

    def _done_at(self, place: _Place) -> Time | None:
        """Says when a post is done; None while that depends on the other side, and it is not posted."""
        posted = self.times[place[0]][place[1]][0]
        if self.semantics == "buffered" and isinstance(self.programs[place[0]][place[1]], Send):
            return posted
        partner = self.partners.get(place)
        if partner is None or partner[1] >= len(self.times[partner[0]]):
            return None
        other = self.times[partner[0]][partner[1]][0]
        return max(posted, other) + self.latency if self.semantics == "rendezvous" else max(posted, other + self.latency)

    def list_messages(self) -> Iterator[Message]:
        """Yields the messages that arrived, by receiver."""
        for rank, times in enumerate(self.times):
            for position in range(len(times)):
                arrived = self._done_at((rank, position)) if isinstance(self.programs[rank][position], Receive) else None
                if arrived is not None:
                    source, send = self.partners[rank, position]
                    yield Message(source, send, rank, position, self.times[source][send][0], arrived)

    def list_blocked(self) -> Iterator[Blocked]:
        """Yields the ranks that did not come to the end: each stands at a wait."""
        for rank, program in enumerate(self.programs):
            position = len(self.times[rank])
            if position < len(program):
                wait = program[position]
                assert isinstance(wait, Wait)  # nothing else stops a rank
                post = program[wait.position]
                assert isinstance(post, Send | Receive)  # _check said so
                yield Blocked(rank, position, wait.position, post.peer)


def _check(programs: Sequence[Sequence[Operation]]) -> None:
    """Refuses programs that speak of ranks or posts that there are not."""
    for rank, program in enumerate(programs):
        for position, operation in enumerate(program):
            where = f"(rank {rank}, position {position})"
            if isinstance(operation, Send | Receive) and (operation.peer == rank or not 0 <= operation.peer < len(programs)):
                raise ArgumentError(f"peer must be another rank below {len(programs)}, got {operation.peer} {where}. Name the other side.")
            if isinstance(operation, Wait) and (
                not 0 <= operation.position < position or not isinstance(program[operation.position], Send | Receive)
            ):
                raise ArgumentError(f"a wait must be for an earlier post, got position {operation.position} {where}. Say where it stands.")


def _match(programs: Sequence[Sequence[Operation]]) -> dict[_Place, _Place]:
    """Finds the other side of each post: the k-th send of a channel meets its k-th receive. What has none is left out."""
    sends: dict[Hashable, list[_Place]] = {}
    receives: dict[Hashable, list[_Place]] = {}
    for rank, program in enumerate(programs):
        for position, operation in enumerate(program):
            if isinstance(operation, Send):
                sends.setdefault((rank, operation.peer, operation.tag), []).append((rank, position))
            elif isinstance(operation, Receive):
                receives.setdefault((operation.peer, rank, operation.tag), []).append((rank, position))
    partners: dict[_Place, _Place] = {}
    for channel, places in sends.items():
        for send, receive in zip(places, receives.get(channel, []), strict=False):  # a longer side has messages that nobody answers
            partners[send], partners[receive] = receive, send
    return partners
