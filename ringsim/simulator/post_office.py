"""Brings the sends and the recvs of simulated ranks together.

The k-th send of a channel (group, source, destination, tag) belongs to the k-th recv. Which of the two is posted first does not matter::

    rendezvous                    send --------- waits --------> recv           as Gloo does it, at every size
                                                                  |==== link ====> both are done

    buffered, up to a limit       send, done                     recv           as MPI does it with small messages
                                   |==== link ====> arrived       |-> done
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from ringsim.comm.follower import disagreement
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.simulator.carriers import Carrier, PrivateLinks
from ringsim.simulator.clock import Clock
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import NEVER, Channel, Message, Recv, Send
from ringsim.simulator.moving import check_storage, move
from ringsim.traces.events import ANY_SOURCE, Payload

if TYPE_CHECKING:
    from ringsim.simulator.ranks import RankCore

__all__ = ["PostOffice"]

_Key = tuple[SimulatedGroup, int, int, int]  # group, source, destination, tag; ranks are global
_RENDEZVOUS: Final = -1


class PostOffice:
    """Holds what waits for its other side.

    Args:
        clock: the clock.
        carrier: says how long a message takes.
        limit_bytes: a message up to this size does not wait for its recv; -1: each does.
    """

    _by_tag = True

    def __init__(self, clock: Clock, carrier: Carrier, limit_bytes: int = _RENDEZVOUS) -> None:
        self._clock = clock
        self._carry = carrier.carry
        self._line_of = carrier.line_of if isinstance(carrier, PrivateLinks) else None  # these know at once when a message arrives
        self._limit = limit_bytes
        self._posted = 0  # how many have had to wait for their other side
        self._channels: dict[_Key, Channel] = {}
        self._from_any: dict[tuple[SimulatedGroup, int, int], deque[Recv]] = {}  # by group, destination, tag

    def channel_of(self, group: SimulatedGroup, src: int, dst: int, tag: int) -> Channel:
        """Returns where the messages of a group, a source, a destination and a tag meet; ranks are global."""
        key = (group, src, dst, tag if self._by_tag else 0)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(*key)
        return channel

    def send(self, send: Send) -> None:
        """Takes a send that has just been posted.

        Raises:
            MessageMismatch: its recv expects something else.
        """
        self._clock.polls = 0
        channel: Any = send.channel
        recv = channel.first
        if type(recv) is not Recv:
            recv = None
        others = self._from_any.get((channel.group, channel.dst, channel.tag)) if self._from_any else None
        if others and (recv is None or others[0].number < recv.number):
            recv = others[0]
            if send.kind is not recv.kind:
                self._check(send, recv, send)
            others.popleft()
            self._meet(send, recv)
        elif recv is not None:
            if send.kind is not recv.kind:
                self._check(send, recv, send)
            channel.first = recv.behind
            self._meet(send, recv)
        else:
            if send.kind.size_bytes <= self._limit:
                self._leave(send)
            self._wait_for(channel, send)

    def recv(self, recv: Recv) -> None:
        """Takes a recv that has just been posted.

        Raises:
            MessageMismatch: its send brings something else.
        """
        self._clock.polls = 0
        channel: Any = recv.channel
        if channel is None:
            tag = recv.tag if self._by_tag else 0
            channel = self._find_first(recv.group, recv.rank.number, tag)
            if channel is None:
                self._posted += 1
                recv.number = self._posted
                self._from_any.setdefault((recv.group, recv.rank.number, tag), deque()).append(recv)
                return
        send = channel.first
        if type(send) is Send:
            if send.kind is not recv.kind:
                self._check(send, recv, recv)
            channel.first = send.behind
            if send.kind.size_bytes <= self._limit:
                self._hand_over(send, recv)
            else:
                self._meet(send, recv)
        else:
            self._wait_for(channel, recv)

    def batch(self, rank: RankCore, group: SimulatedGroup) -> AbstractContextManager[None]:
        """Returns a block in which a rank posts what it begins together; here that makes no difference."""
        return nullcontext()

    def waiting(self) -> Iterator[Message]:
        """Yields the sends and recvs without their other side."""
        for channel in self._channels.values():
            yield from channel.waiting()
        for queue in self._from_any.values():
            yield from queue

    def _wait_for(self, channel: Channel, message: Message) -> None:
        """Lets a message wait for its other side."""
        self._posted += 1
        message.number = self._posted
        channel.append(message)

    def _meet(self, send: Send, recv: Recv) -> None:
        """Begins to carry a message."""
        now, kind = self._clock.now, send.kind
        if recv.peer == ANY_SOURCE:
            self._name_source(recv, send)
        try:
            move(send.tensor, recv.tensor)
        except Exception as error:
            self._fail(send, recv, error)
            raise
        buffered = kind.size_bytes <= self._limit
        if self._line_of is not None:
            channel: Any = send.channel
            line = channel.line
            if line is None:
                line = channel.line = self._line_of(channel.src, channel.dst)
            arrives_s = line.carry(kind.size_bytes, now)
            recv.complete(arrives_s)
            send.complete(now if buffered else arrives_s)
        else:
            self._carry_between(send, recv, buffered)

    def _fail(self, send: Send, recv: Recv, error: Exception) -> None:
        """Ends both sides of a message that cannot be moved: who has just posted its side raises, the other's wait does."""
        mine, theirs = (send, recv) if send.rank is self._clock.current else (recv, send)
        self._record_failure(mine)
        theirs.error = type(error)(*error.args)
        theirs.complete(self._clock.now)

    def _record_failure(self, message: Message) -> None:
        if message.slot >= 0:
            message.rank.tape.times[message.slot + 2] = self._clock.now
            message.rank.tape.failed.add(message.slot)

    def _carry_between(self, send: Send, recv: Recv, buffered: bool) -> None:
        """Begins to carry a message on links that others may share."""
        now = self._clock.now
        ends = (recv,) if buffered else (recv, send)
        if buffered:
            send.complete(now)

        def arrive(time_s: float) -> None:
            for each in ends:
                each.complete(time_s)

        known_s = self._carry(send.rank.number, recv.rank.number, send.kind.size_bytes, now, arrive)
        if known_s is not None:
            arrive(known_s)

    def _hand_over(self, send: Send, recv: Recv) -> None:
        """Gives a message that has left already to its recv."""
        if recv.peer == ANY_SOURCE:
            self._name_source(recv, send)
        move(send.tensor, recv.tensor)
        if send.arrives_s == NEVER:
            send.met = recv
        else:
            recv.complete(max(send.arrives_s, self._clock.now))

    def _name_source(self, recv: Recv, send: Send) -> None:
        """Writes down whom a recv from anybody has got its message from."""
        recv.peer = send.rank.number
        if recv.slot >= 0:
            recv.rank.tape.set_peer(recv.slot, recv.peer)

    def _leave(self, send: Send) -> None:
        """Lets a message leave though nobody has asked for it yet: what was sent is copied, and the send is done."""
        now = self._clock.now
        try:
            check_storage("source", send.tensor)
        except ArgumentError:
            self._record_failure(send)
            raise
        with torch.inference_mode():
            send.tensor = send.tensor.clone()
        send.done_s, send.arrives_s = now, NEVER
        send.met = None

        def arrive(time_s: float) -> None:
            send.arrives_s = time_s
            if send.met is not None:
                send.met.complete(time_s)

        arrives_s = self._carry(send.rank.number, send.peer, send.kind.size_bytes, now, arrive)
        if arrives_s is not None:
            send.arrives_s = arrives_s

    def _find_first(self, group: SimulatedGroup, me: int, tag: int) -> Channel | None:
        """Returns the channel of the send to ``me`` that was posted first, None where there is none."""
        best: Channel | None = None
        number = 0
        for source in group.ranks:
            channel = self._channels.get((group, source, me, tag))
            first = channel.first if channel is not None else None
            if type(first) is Send and (best is None or first.number < number):
                best, number = channel, first.number
        return best

    def _check(self, send: Send, recv: Recv, mine: Message) -> None:
        """Compares the two sides of a message, of which ``mine`` was posted last.

        Raises:
            MessageMismatch: they disagree.
        """
        theirs = recv if mine is send else send
        what = disagreement(mine.kind.payload, theirs.kind.payload)
        if not what:
            return
        rank, peer = mine.rank, theirs.rank.number
        where = f"rank {rank.number} of {rank.everybody.size()}, {'send to' if mine is send else 'recv from'} {peer}, tag {mine.tag}"
        message = (
            f"the two sides of a message must agree on its {what}, got {_describe(mine.kind.payload)} here and "
            f"{_describe(theirs.kind.payload)} in rank {peer}'s {'recv' if mine is send else 'send'}{theirs.rank.place_of(theirs.slot)} "
            f"({where}, group {mine.group.group_name}). Make both tensors alike, or send them in the order in which they are received."
        )
        rank.note("message_mismatch", message, mine)
        raise MessageMismatch(message)


def _describe(payload: Payload) -> str:
    return f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)"
