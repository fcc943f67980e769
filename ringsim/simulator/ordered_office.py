"""Brings sends and recvs together where the operations of a rank on a group are carried out one after the other, as NCCL does it.

What a rank posts on a group stands in a queue. A batch is one entry: its messages begin together, and are done together::

    rank 0   [send to 1] [recv from 1]       each rank's send waits for the other's recv, which stands behind its own send:
    rank 1   [send to 0] [recv from 0]       a deadlock

    rank 0   [send to 1, recv from 1]        posted with batch_isend_irecv: both go
    rank 1   [send to 0, recv from 0]
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.clock import Clock
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Message, Recv, Send
from ringsim.simulator.moving import move
from ringsim.simulator.post_office import PostOffice
from ringsim.simulator.ranks import RankCore
from ringsim.traces.events import ANY_SOURCE

__all__ = ["OrderedOffice"]


class _Entry:
    """What is carried out together.

    Attributes:
        messages: of one rank on one group.
        left: how many of them are under way, or have not begun.
        end_s: when the last one that has arrived did.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left = 0
        self.end_s = 0.0


class OrderedOffice(PostOffice):
    """Holds what waits for its other side, or for its turn. Tags are not looked at: the order decides.

    Args:
        clock: the clock.
        carrier: says how long a message takes.
    """

    _by_tag = False

    def __init__(self, clock: Clock, carrier: Carrier) -> None:
        super().__init__(clock, carrier)
        self._queues: dict[tuple[int, SimulatedGroup], deque[_Entry]] = {}
        self._entry_of: dict[Message, _Entry] = {}
        self._open: dict[int, _Entry] = {}  # the batch that a rank is posting

    @contextlib.contextmanager
    def batch(self, rank: RankCore, group: SimulatedGroup) -> Iterator[None]:
        """Makes what a rank posts in the block one entry."""
        entry = self._open[rank.number] = _Entry()
        try:
            yield
        finally:
            del self._open[rank.number]
            self._add(entry, rank.number, group)

    def send(self, send: Send) -> None:
        """Takes a send that has just been posted; it begins when its turn has come."""
        self._take(send)

    def recv(self, recv: Recv) -> None:
        """Takes a recv that has just been posted; it begins when its turn has come.

        Raises:
            ArgumentError: it is from anybody.
        """
        if recv.peer == ANY_SOURCE:
            raise ArgumentError(
                f'src must be given with semantics="grouped", got a recv from anybody ({recv.rank.here()}): NCCL has none. Name the sender.'
            )
        self._take(recv)

    def _take(self, message: Message) -> None:
        self._clock.polls = 0
        number = message.rank.number
        entry = self._open.get(number)
        if entry is not None:
            entry.messages.append(message)
            return
        entry = _Entry()
        entry.messages.append(message)
        self._add(entry, number, message.group)

    def _add(self, entry: _Entry, rank: int, group: SimulatedGroup) -> None:
        if not entry.messages:
            return
        entry.left = len(entry.messages)
        for message in entry.messages:
            self._entry_of[message] = entry
        queue = self._queues.setdefault((rank, group), deque())
        queue.append(entry)
        if len(queue) == 1:
            self._begin(entry)

    def _begin(self, entry: _Entry) -> None:
        for message in entry.messages:
            if isinstance(message, Send):
                super().send(message)
            elif isinstance(message, Recv):
                super().recv(message)

    def _meet(self, send: Send, recv: Recv) -> None:
        move(send.tensor, recv.tensor)

        def arrive(time_s: float) -> None:
            self._arrive(send, time_s)
            self._arrive(recv, time_s)

        arrives_s = self._carry(send.rank.number, recv.rank.number, send.kind.size_bytes, self._clock.now, arrive)
        if arrives_s is not None:
            arrive(arrives_s)

    def _arrive(self, message: Message, time_s: float) -> None:
        entry = self._entry_of.pop(message)
        entry.left -= 1
        entry.end_s = max(entry.end_s, time_s)
        if entry.left:
            return
        for each in entry.messages:
            each.complete(entry.end_s)
        queue = self._queues[message.rank.number, message.group]

        def go_on() -> None:
            queue.popleft()
            if not queue:
                return
            try:
                self._begin(queue[0])
            except MessageMismatch as error:  # nobody who posts is there to hear of it
                for message in queue[0].messages:
                    message.error = error
                    message.complete(self._clock.now)

        self._clock.at(entry.end_s, go_on)
