"""Runs send-and-receive programs on a clock, without ranks.

The results are exact times, and the ranks that would wait for each other forever. A point-to-point
program consists of a list of operations for each rank. There are four operations: computing,
posting a send, posting a receive, and waiting for a post. A blocking send is a post followed by its
wait::

    send(1); recv(1)          Send(1) Wait(0) Receive(1) Wait(2)
    isend(1); recv(1); wait   Send(1) Receive(1) Wait(1) Wait(0)

The k-th send from one rank to another with a tag matches the k-th receive with this tag there. With
several groups, a pair (group, tag) serves as the tag. The only operation that cannot be written
this way is a receive from any rank, because its sender depends on the times.

A post *begins* when its communicator gets to it. With ``rendezvous`` and ``buffered``, a post
begins immediately. With ``grouped`` and ``paired``, each rank has a queue of posts for each
communicator, and a post begins when all earlier posts in its queue are done::

    rank 0   [0SEND_F1] 2RECV_F0     0SEND_F1 has begun, and waits for 1RECV_F1, which is queued
    rank 1   [1SEND_F0] 1RECV_F1     behind 1SEND_F0, which waits for 2RECV_F0: neither can go on

A message travels when both sides have begun, and both are done when it arrives. If sends do not
wait, however, a send is done as soon as it begins.

The result does not depend on the order in which this module runs the ranks: each rank goes through
its list in order, so a rank that can continue now can also continue later, and each queue has the
order of its rank's posts. It is enough to run each rank until it waits for a post that is not done,
and to return to the rank when the post is done. When no rank can run, either all ranks have ended,
or the remaining ranks wait forever. Each of them waits for one other rank, and a chain of these
waits leads to a cycle or to a rank that has ended.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringsim.errors import ArgumentError, say
from ringsim.schedules.costs import Time

Semantics = str
SEMANTICS = ("rendezvous", "buffered", "grouped", "paired")
_FORM = re.compile(r"rendezvous|buffered|(grouped|paired)(?:\((\d+)\))?")


class Rules(NamedTuple):
    """The meaning of some semantics.

    Attributes:
        in_order: ``grouped`` or ``paired`` if the posts of a communicator begin in order, or "".
        limit_bytes: the size up to which a send is done as soon as it begins.
    """

    in_order: str
    limit_bytes: float


def read_semantics(semantics: object) -> Rules:
    """Returns the meaning of semantics given by name.

    Raises ArgumentError if the name is unknown.

    Example:
        >>> read_semantics("grouped(65536)"), read_semantics("buffered")
        (Rules(in_order='grouped', limit_bytes=65536), Rules(in_order='', limit_bytes=inf))
    """
    found = _FORM.fullmatch(semantics) if isinstance(semantics, str) else None
    if found is None:
        raise ArgumentError(
            f"semantics must be one of {', '.join(SEMANTICS)}, got {say(semantics)}. For small "
            "sends that do not wait, write, for example, grouped(65536)."
        )
    limit = math.inf if found[0] == "buffered" else int(found[2] or -1)
    return Rules(found[1] or "", limit)


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes for some time, in any unit that is the same everywhere.

    If ``after`` is set, the rank first waits until the post at this position in its list is done.
    """

    duration: Time
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Posts one side of a message and continues. Both sides must have the same tag.

    If ``joins`` is set, this post and the rank's next one are in one batch.
    """

    peer: int
    tag: Hashable = 0
    joins: bool = False


class Send(Post):
    """Posts a send to a peer."""


class Receive(Post):
    """Posts a receive from a peer."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until the post at a given position in this rank's list is done."""

    after: int


Instruction = Compute | Post | Wait
_Place = tuple[int, int]  # (rank, position in its list)
_Queue = tuple[int, Hashable]  # (rank, communicator)


class Delivery(NamedTuple):
    """A send and its matching receive, given by ranks and positions in their lists.

    Attributes:
        source: the rank that sent.
        send: the position of the send.
        rank: the rank that received.
        receive: the position of the receive.
        posted: the time at which the send was posted.
        arrived: the time at which the payload arrived.
    """

    source: int
    send: int
    rank: int
    receive: int
    posted: Time
    arrived: Time


class Blocked(NamedTuple):
    """A rank that waits forever.

    Attributes:
        rank: the rank.
        position: the position of the wait in the rank's list.
        post: the position of the send or receive that the rank waits for.
        head: the position of the post that ``post`` is queued behind, or ``post`` itself if it has
            begun.
        peer: the rank that would have to begin the other side of ``head``.
    """

    rank: int
    position: int
    post: int
    head: int
    peer: int


@dataclass(frozen=True)
class Run:
    """The outcome of running programs.

    Attributes:
        times: for each rank, the (start, end) of each operation that the rank reached; a post takes
            no time, and a wait ends when the rank continues.
        messages: the messages that arrived, sorted by receiver.
        blocked: the ranks that wait forever, in order; empty if all ranks have ended.
        cycle: a cycle of ranks, each of which waits for the next; empty if all ranks wait, directly
            or indirectly, for a rank that has ended.
    """

    times: tuple[tuple[tuple[Time, Time], ...], ...]
    messages: tuple[Delivery, ...]
    blocked: tuple[Blocked, ...]
    cycle: tuple[Blocked, ...] = ()


def run_programs(
    programs: Sequence[Sequence[Instruction]],
    *,
    latency: Time = 0,
    semantics: Semantics = "rendezvous",
) -> Run:
    """Runs one list of operations per rank, in order, on a clock that starts at 0.

    Args:
        programs: for each rank, its operations.
        latency: a message's travel time, in the unit of the computations.
        semantics: ``rendezvous``: a message starts to travel when both sides are posted, and the
            send ends when the message arrives (Gloo, at every size); ``buffered``: the message
            travels as soon as it is sent, and the send is done immediately (MPI, for small
            messages); ``grouped``: like ``rendezvous``, but a rank's posts begin one after another,
            except that a batch begins as one (NCCL with one communicator for all ranks);
            ``paired``: only posts between the same two ranks begin one after another (NCCL with a
            communicator for each pair). With ``grouped(65536)`` or ``paired(65536)``, a send is
            done when it begins, because the messages have no size.

    Returns:
        The times of all operations, and the ranks that are left waiting. The times are exact if the
        inputs are ints or Fractions.

    Example:
        >>> both_send_first = [
        ...     [Send(1), Wait(0), Receive(1), Wait(2)],
        ...     [Send(0), Wait(0), Receive(0), Wait(2)],
        ... ]
        >>> [
        ...     f"rank {stuck.rank} waits for rank {stuck.peer}"
        ...     for stuck in run_programs(both_send_first).cycle
        ... ]
        ['rank 0 waits for rank 1', 'rank 1 waits for rank 0']
        >>> run_programs(both_send_first, semantics="buffered").cycle
        ()
    """
    runner = _Runner(programs, latency, semantics)
    runner.run()
    return Run(
        tuple(map(tuple, runner.times)),
        tuple(runner.list_messages()),
        tuple(runner.list_blocked()),
        runner.find_cycle(),
    )


class _Runner:
    """The programs, each rank's progress, and the posts that ranks wait for."""

    def __init__(
        self, programs: Sequence[Sequence[Instruction]], latency: Time, semantics: Semantics
    ) -> None:
        self.programs = programs
        self.latency = latency
        self.in_order, limit = read_semantics(semantics)
        self.sends_wait = limit < 0  # messages have no size
        self.partners = _match(programs)
        self.times: list[list[tuple[Time, Time]]] = [[] for _ in programs]
        self.begun: dict[_Place, Time] = {}
        self.done: dict[_Place, Time] = {}
        self.runnable: list[int | _Queue] = [*range(len(programs))]
        # the batches that are not done, with the ends of their posts, and the end of the last batch
        # that is
        self.queues: defaultdict[_Queue, deque[dict[_Place, Any]]] = defaultdict(deque)
        self.free: defaultdict[_Queue, Time] = defaultdict(int)

    def run(self) -> None:
        """Runs ranks, and the batches whose turn has come, until none of them can continue."""
        while self.runnable:
            task = self.runnable.pop()
            if isinstance(task, int):
                self._advance(task)
            else:
                self._begin_first(task)

    def _advance(self, rank: int) -> None:
        """Runs one rank to its end, or until it waits for a post that is not done."""
        times = self.times[rank]
        clock = times[-1][1] if times else 0
        batch: dict[_Place, Any] = {}
        for position in range(len(times), len(self.programs[rank])):
            operation, start = self.programs[rank][position], clock
            if isinstance(operation, Post):
                batch[rank, position] = None
            elif operation.after is not None:
                done = self.done.get((rank, operation.after))
                if done is None:
                    return
                clock = max(start, done)
            if isinstance(operation, Compute):
                start = clock
                clock += operation.duration
            times.append((start, clock))
            if isinstance(operation, Post) and not (operation.joins and self.in_order):
                queue = self._find_queue((rank, position))
                self.queues[queue].append(batch)
                if self.queues[queue][0] is batch:
                    self._begin_first(queue)
                batch = {}

    def _find_queue(self, place: _Place) -> _Queue:
        """Returns the queue of a post, which has one of its own if messages are not in order."""
        rank, position = place
        post: Any = self.programs[rank][position]
        if self.in_order == "grouped":
            return rank, None
        return rank, post.peer if self.in_order else place

    def _begin_first(self, queue: _Queue) -> None:
        """Begins a queue's first batch, and ends the messages whose other side has begun."""
        for place in self.queues[queue][0]:
            rank, position = place
            time = self.begun[place] = max(self.times[rank][position][0], self.free[queue])
            sends = isinstance(self.programs[rank][position], Send)
            if sends and not self.sends_wait:
                self._finish(place, time)
            partner = self.partners.get(place)
            if partner not in self.begun:
                continue
            send, receive = (place, partner) if sends else (partner, place)
            left, posted = self.begun[send], self.begun[receive]
            if self.sends_wait:
                left = max(left, posted)
                self._finish(send, left + self.latency)
            self._finish(receive, max(left + self.latency, posted))

    def _finish(self, place: _Place, time: Time) -> None:
        """Ends a post. If its batch is done, its rank and the next batch can continue."""
        queue = self._find_queue(place)
        batch = self.queues[queue][0]
        batch[place] = time
        if None in batch.values():
            return
        self.free[queue] = max(batch.values())
        self.done |= dict.fromkeys(batch, self.free[queue])
        self.queues[queue].popleft()
        if self.queues[queue]:
            self.runnable.append(queue)
        self.runnable.append(place[0])

    def list_messages(self) -> Iterator[Delivery]:
        """Yields the messages that arrived, by receiver."""
        for (rank, position), arrived in sorted(self.done.items()):
            if isinstance(self.programs[rank][position], Receive):
                source, send = self.partners[rank, position]
                posted = self.times[source][send][0]
                yield Delivery(source, send, rank, position, posted, arrived)

    def list_blocked(self) -> Iterator[Blocked]:
        """Yields the ranks that did not reach their end, each of which is blocked in a wait."""
        for rank, program in enumerate(self.programs):
            position = len(self.times[rank])
            if position < len(program):
                waiting: Any = program[position]
                yield self._explain(rank, position, waiting.after)

    def _explain(self, rank: int, position: int, post: int) -> Blocked:
        """Describes a wait for a post. The post, or the one before it, waits for its other side."""
        batch = self.queues[self._find_queue((rank, post))][0]
        head = next(each for (_, each), end in batch.items() if end is None)
        operation: Any = self.programs[rank][head]
        return Blocked(rank, position, post, head, operation.peer)

    def find_cycle(self) -> tuple[Blocked, ...]:
        """Returns a cycle of waits, or nothing if every wait leads to a rank that has ended."""
        stuck = {each.rank: each for each in self.list_blocked()}
        for first in stuck.values():
            path: list[Blocked] = []
            here: Blocked | None = first
            while here is not None and here not in path:
                path.append(here)
                here = self._follow(here, stuck.get(here.peer))
            if here is not None:
                return tuple(path[path.index(here) :])
        return ()

    def _follow(self, blocked: Blocked, wait: Blocked | None) -> Blocked | None:
        """Returns the wait that holds up the other side, or None if its rank has ended.

        ``wait`` is the wait in which its rank is blocked, if any.
        """
        partner = self.partners.get((blocked.rank, blocked.head))
        if partner is None or partner[1] >= len(self.times[blocked.peer]):
            return wait
        queue = self._find_queue(partner)  # it is posted, but queued
        if wait is not None and self._find_queue((wait.rank, wait.post)) == queue:
            return wait
        return self._explain(*partner, partner[1])


def _match(programs: Sequence[Sequence[Instruction]]) -> dict[_Place, _Place]:
    """Maps each post to its other side: a channel's k-th send matches its k-th receive.

    Posts without a match are left out.
    """
    posts: dict[Hashable, tuple[list[_Place], list[_Place]]] = {}
    for rank, program in enumerate(programs):
        for position, operation in enumerate(program):
            if isinstance(operation, Post):
                is_receive = isinstance(operation, Receive)
                ends = (operation.peer, rank) if is_receive else (rank, operation.peer)
                both = posts.setdefault((*ends, operation.tag), ([], []))
                both[is_receive].append((rank, position))
    partners: dict[_Place, _Place] = {}
    for sends, receives in posts.values():
        # the extra posts of the longer side have no match
        for send, receive in zip(sends, receives, strict=False):
            partners[send], partners[receive] = receive, send
    return partners
