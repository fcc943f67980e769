"""The handle of a simulated message: when it is done, and the wait for that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

from ringsim.errors import RunTimeout
from ringsim.simulator.carriers import Line
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.tape import Kind
from ringsim.traces.events import NONE, Payload

if TYPE_CHECKING:
    from ringsim.simulator.ranks import RankCore

__all__ = ["NEVER", "Channel", "Message", "Operation", "Recv", "Send"]

NEVER: Final = math.inf
_NO_KIND: Final = Kind(NONE, Payload("", (), 0))


class Operation:
    """An operation of a rank that is under way; what ``isend`` and its kin return.

    Args:
        op: its code.
        rank: whose it is.
        slot: of its record, -1 where it has none.
        group: where.
        kind: of what it carries.

    Attributes:
        done_s: when it is done, ``NEVER`` while nobody knows.
        waiting: whether the rank waits for it, and is to be woken.
        error: what its wait raises, None for nothing.
    """

    __slots__ = ("__weakref__", "done_s", "error", "group", "kind", "op", "rank", "slot", "waiting")

    def __init__(self, op: int, rank: RankCore, slot: int, group: SimulatedGroup, kind: Kind) -> None:
        self.op = op
        self.rank = rank
        self.slot = slot
        self.group = group
        self.kind = kind
        self.done_s = NEVER
        self.waiting = False
        self.error: Exception | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation is done; the second time it returns at once.

        Args:
            timeout: limit in virtual time, seconds or a ``timedelta``; None for none.

        Returns:
            True.

        Raises:
            RunTimeout: the limit has passed; the operation goes on.
        """
        rank, slot = self.rank, self.slot
        clock, tape = rank.clock, rank.tape
        if clock.measures:
            clock.pay()
        if slot >= 0:
            tape.times[slot + 1] = clock.now
        if self.done_s > clock.now:
            broken: BaseException | None = None
            try:
                if timeout is not None:
                    self._block_until(timeout)
                while self.done_s > clock.now:
                    if self.done_s == NEVER:
                        self.waiting = True
                        clock.pause()
                    else:
                        clock.sleep_until(self.done_s)
            except RunTimeout:
                raise
            except BaseException as error:
                if slot >= 0:
                    tape.times[slot + 2] = clock.now
                    tape.failed.add(slot)
                    self.slot = -1
                broken = error
            if broken is not None:
                raise broken  # here, not there: an error that comes from outside learns so of the exception that the program is handling
        if slot >= 0:
            tape.times[slot + 2] = clock.now
            self.slot = -1
        if self.error is not None:
            if slot >= 0:
                tape.failed.add(slot)
            raise self.error
        return True

    def _block_until(self, timeout: Any) -> None:
        clock = self.rank.clock
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        end_s = clock.now + limit_s
        while self.done_s > clock.now:
            if self.done_s <= end_s:
                clock.sleep_until(self.done_s)
            elif clock.now >= end_s:
                self.waiting = False
                raise RunTimeout(
                    f"the operation must be done within {limit_s:g} s of virtual time, got none by then (rank {self.rank.number}, "
                    f"{self.describe()}). Raise the limit, or look who should answer."
                )
            else:
                self.waiting = True
                clock.at(end_s, self.rank.resume)
                clock.pause()
        self.waiting = False

    def describe(self) -> str:
        """Returns the operation in words."""
        raise NotImplementedError

    def complete(self, time_s: float) -> None:
        """Says when the operation is done, and wakes its rank if it waits for that."""
        self.done_s = time_s
        if self.waiting:
            self.waiting = False
            self.rank.clock.at(time_s, self.rank.resume)

    def is_completed(self) -> bool:
        """Returns whether the operation is done, and then records that; where it is not, the other ranks get on a little."""
        clock = self.rank.clock
        if self.done_s > clock.now:
            clock.poll()
        if self.done_s > clock.now:
            return False
        if self.slot >= 0 and self.error is None:  # an error is for its wait to tell
            tape = self.rank.tape
            tape.times[self.slot + 1] = tape.times[self.slot + 2] = clock.now
            self.slot = -1
        return True


class Message(Operation):
    """A send or a recv; it is there from `begin` on.

    Attributes:
        op: its code.
        rank: whose it is.
        slot: of its record, -1 where it has none.
        group: where.
        kind: of what it carries.
        tensor: what is sent, or where it comes in.
        peer: global rank of the other side; of a recv from anybody, -2 until it is there.
        tag: of the message.
        channel: where it meets its other side, None for a recv from anybody.
        number: says which of two was posted first, of those that had to wait for their other side.
        behind: the message that waits behind this one on their channel.
    """

    __slots__ = ("behind", "channel", "number", "peer", "tag", "tensor")

    sends = False

    def begin(
        self,
        op: int,
        rank: RankCore,
        slot: int,
        group: SimulatedGroup,
        kind: Kind,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        channel: Channel | None,
    ) -> None:
        """Takes what it is; no ``__init__``, because that takes objects for numbers where it is compiled."""
        self.op = op
        self.rank = rank
        self.slot = slot
        self.group = group
        self.kind = kind
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.channel = channel
        self.number = 0
        self.done_s = NEVER
        self.waiting = False
        self.error = None
        self.behind: Message | None = None

    def source_rank(self) -> int:
        """Returns the rank within the group that a message came from; waits for it."""
        self.wait()
        place: int = self.group.places[self.peer]
        return place

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Returns the tensor, once it is there."""
        self.wait()
        return [self.tensor]

    def describe(self) -> str:
        """Returns the operation in words."""
        return f"{'send to' if self.sends else 'recv from'} {self.peer}, tag {self.tag}"


class Send(Message):
    """A send.

    Attributes:
        arrives_s: when its message arrives, ``NEVER`` while nobody knows; of one that left before its recv was posted.
        met: its recv, once that was posted; of the same.
    """

    __slots__ = ("arrives_s", "met")

    arrives_s: float
    met: Recv | None

    sends = True


class Recv(Message):
    """A recv."""

    __slots__ = ()


class Channel:
    """What goes from one rank of a group to another with one tag, in order.

    Those that wait for their other side are all sends, or all recvs.

    Args:
        group: the group.
        src: global rank of the sender.
        dst: global rank of the receiver.
        tag: of the messages, as far as it is looked at.

    Attributes:
        first: the message that has waited longest, None where none waits.
        last: the one that was posted last, of those that wait.
        line: carries the messages, where each pair of ranks has a line of its own, and once there was one.
        kind: of the message that was posted last, which the next one mostly is like.
    """

    __slots__ = ("dst", "first", "group", "kind", "last", "line", "src", "tag")

    def __init__(self, group: SimulatedGroup, src: int, dst: int, tag: int) -> None:
        self.group = group
        self.src = src
        self.dst = dst
        self.tag = tag
        self.first: Message | None = None
        self.last: Message | None = None
        self.line: Line | None = None
        self.kind = _NO_KIND

    def append(self, message: Message) -> None:
        """Puts a message behind those that wait."""
        if self.first is None:
            self.first = message
        else:
            self.last.behind = message  # type: ignore[union-attr]  # there is one where there is a first
        self.last = message

    def waiting(self) -> Iterator[Message]:
        """Yields the messages that wait, in order."""
        message = self.first
        while message is not None:
            yield message
            message = message.behind
