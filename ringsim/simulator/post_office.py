"""Brings the sends and the recvs of simulated ranks together.

The k-th send of a channel (group, source, destination, tag) belongs to the k-th recv. Which of the two is posted first does not matter::

    rendezvous                    send --------- waits --------> recv           as Gloo does it, at every size
                                                                  |==== link ====> both are done

    buffered, up to a limit       send, done                     recv           as MPI does it with small messages
                                   |==== link ====> arrived       |-> done
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch

from ringsim.comm.follower import disagreement
from ringsim.errors import MessageMismatch
from ringsim.simulator.carriers import Carrier, PrivateLinks
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import NEVER, Message, Recv, Send
from ringsim.simulator.hub import Hub
from ringsim.simulator.moving import move_alike
from ringsim.traces.events import ANY_SOURCE, Payload

if TYPE_CHECKING:
    from ringsim.simulator.ranks import RankCore

__all__ = ["PostOffice"]

_Channel = tuple[SimulatedGroup, int, int, int]  # group, source, destination, tag; ranks are global
_RENDEZVOUS: Final = -1


class PostOffice:
    """Holds what waits for its other side.

    Args:
        hub: the clock.
        carrier: says how long a message takes.
        limit_bytes: a message up to this size does not wait for its recv; -1: each does.
    """

    _by_tag = True

    def __init__(self, hub: Hub, carrier: Carrier, limit_bytes: int = _RENDEZVOUS) -> None:
        self._hub = hub
        self._carry = carrier.carry
        self._knows = isinstance(carrier, PrivateLinks)  # at once when a message arrives
        self._limit = limit_bytes
        self._number = itertools.count(1).__next__
        self._sends: dict[_Channel, deque[Send]] = {}
        self._recvs: dict[_Channel, deque[Recv]] = {}
        self._from_any: dict[tuple[SimulatedGroup, int, int], deque[Recv]] = {}  # by group, destination, tag

    def send(self, send: Send) -> None:
        """Takes a send that has just been posted.

        Raises:
            MessageMismatch: its recv expects something else.
        """
        self._hub.polls = 0
        me, group, peer, tag = send.rank.number, send.group, send.peer, send.tag if self._by_tag else 0
        channel = (group, me, peer, tag)
        queue = self._recvs.get(channel)
        recv = queue[0] if queue else None
        if self._from_any:
            others = self._from_any.get((group, peer, tag))
            if others and (recv is None or others[0].number < recv.number):
                queue, recv = others, others[0]
        if recv is not None:
            if send.kind is not recv.kind:
                self._check(send, recv, send)
            queue.popleft()  # type: ignore[union-attr]  # it is where `recv` is from
            self._meet(send, recv)
            return
        if send.kind.size_bytes <= self._limit:
            self._leave(send)
        send.number = self._number()
        waiting = self._sends.get(channel)
        if waiting is None:
            waiting = self._sends[channel] = deque()
        waiting.append(send)

    def recv(self, recv: Recv) -> None:
        """Takes a recv that has just been posted.

        Raises:
            MessageMismatch: its send brings something else.
        """
        self._hub.polls = 0
        me, group, peer, tag = recv.rank.number, recv.group, recv.peer, recv.tag if self._by_tag else 0
        if peer == ANY_SOURCE:
            channel = self._find_first(group, me, tag)
        else:
            channel = (group, peer, me, tag)
        queue = self._sends.get(channel) if channel else None
        if queue:
            send = queue[0]
            if send.kind is not recv.kind:
                self._check(send, recv, recv)
            queue.popleft()
            self._meet(send, recv)
            return
        recv.number = self._number()
        if peer == ANY_SOURCE:
            self._from_any.setdefault((group, me, tag), deque()).append(recv)
            return
        waiting = self._recvs.get(channel)  # type: ignore[arg-type]
        if waiting is None:
            waiting = self._recvs[channel] = deque()  # type: ignore[index]
        waiting.append(recv)

    def batch(self, rank: RankCore, group: SimulatedGroup) -> AbstractContextManager[None]:
        """Returns a block in which a rank posts what it begins together; here that makes no difference."""
        return nullcontext()

    def waiting(self) -> Iterator[Message]:
        """Yields the sends and recvs without their other side."""
        for queues in (self._sends, self._recvs, self._from_any):
            for queue in queues.values():
                yield from queue

    def _meet(self, send: Send, recv: Recv) -> None:
        """Begins to carry a message, or gives one that has left already to its recv."""
        hub = self._hub
        now, kind = hub.now, send.kind
        if recv.peer == ANY_SOURCE:
            recv.peer = send.rank.number
            if recv.slot >= 0:
                recv.rank.tape.set_peer(recv.slot, recv.peer)
        move_alike(send.tensor, recv.tensor, kind)
        if send.left:
            if send.arrives_s == NEVER:
                send.met = recv
            else:
                recv.complete(max(send.arrives_s, now))
            return
        buffered = kind.size_bytes <= self._limit
        if self._knows:
            arrives_s = self._carry(send.rank.number, recv.rank.number, kind.size_bytes, now)
            recv.done_s = arrives_s  # type: ignore[assignment]  # these links know
            if recv.waiting:
                recv.waiting = False
                hub.wake(recv.rank.runner, arrives_s)  # type: ignore[arg-type]
            send.complete(now if buffered else arrives_s)  # type: ignore[arg-type]
            return
        ends = (recv,) if buffered else (recv, send)
        if buffered:
            send.complete(now)

        def arrive(time_s: float) -> None:
            for each in ends:
                each.complete(time_s)

        arrives_s = self._carry(send.rank.number, recv.rank.number, kind.size_bytes, now, arrive)
        if arrives_s is not None:
            arrive(arrives_s)

    def _leave(self, send: Send) -> None:
        """Lets a message leave though nobody has asked for it yet: what was sent is copied, and the send is done."""
        now = self._hub.now
        with torch.inference_mode():
            send.tensor = send.tensor.clone()
        send.left = True
        send.done_s = now

        def arrive(time_s: float) -> None:
            send.arrives_s = time_s
            if send.met is not None:
                send.met.complete(time_s)

        arrives_s = self._carry(send.rank.number, send.peer, send.kind.size_bytes, now, arrive)
        if arrives_s is not None:
            send.arrives_s = arrives_s

    def _find_first(self, group: SimulatedGroup, me: int, tag: int) -> _Channel | None:
        """Returns the channel of the send to ``me`` that was posted first, None where there is none."""
        best: _Channel | None = None
        number = 0
        for source in group.ranks:
            queue = self._sends.get((group, source, me, tag))
            if queue and (best is None or queue[0].number < number):
                best, number = (group, source, me, tag), queue[0].number
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
