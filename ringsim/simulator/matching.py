"""Brings the sends and recvs of simulated ranks together: groups, handles, and when a message leaves.

The k-th send of a channel (group, source, destination, tag) belongs to the k-th recv, whichever is posted first. Three ways, by name:

| name | like | a send |
|---|---|---|
| ``rendezvous`` | Gloo | waits for its recv, at every size |
| ``buffered(65536)``, ``buffered`` | MPI | leaves at once and is done, up to so many bytes or at any size; a larger one waits |
| ``grouped`` | NCCL | waits for its recv, and for everything that its rank posted on the group before; a batch counts as one |

::

    rendezvous                    send --------- waits --------> recv
                                                                  |==== link ====> both are done

    buffered, up to a limit       send, done                     recv
                                   |==== link ====> arrived       |-> done
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from ringsim.comm.collectives import Members, check_dense, shorten
from ringsim.diagnose.mismatches import disagreement
from ringsim.errors import ArgumentError, MessageMismatch, RunTimeout, say
from ringsim.simulator.clock import Clock
from ringsim.simulator.links import Links
from ringsim.traces.events import ERROR, OK, Payload
from ringsim.traces.recorder import Recorder

__all__ = [
    "NEVER",
    "Channel",
    "Kind",
    "Message",
    "Operation",
    "Rank",
    "Recv",
    "Rendezvous",
    "Semantics",
    "Send",
    "SimulatedGroup",
    "check_storage",
    "check_tensor",
    "make_matcher",
    "read_semantics",
]

NEVER: Final = math.inf
_BUFFERED: Final = re.compile(r"buffered(?:\((\d+)\))?")


class Semantics(NamedTuple):
    """When messages leave.

    Attributes:
        limit_bytes: messages up to this size do not wait for their recv; -1: all do.
        in_order: whether a rank's operations on a group are carried out one after the other.
    """

    limit_bytes: int
    in_order: bool


def read_semantics(name: object) -> Semantics:
    """Returns what the name of a semantics means.

    Args:
        name: "rendezvous", "buffered", "buffered(65536)" or "grouped".

    Raises:
        ArgumentError: it is none of these.

    Example:
        >>> read_semantics("rendezvous"), read_semantics("buffered(4096)").limit_bytes
        (Semantics(limit_bytes=-1, in_order=False), 4096)
    """
    found = _BUFFERED.fullmatch(name) if isinstance(name, str) else None
    if found is not None:
        return Semantics(min(int(found[1] or sys.maxsize), sys.maxsize), in_order=False)  # no message is larger
    if not isinstance(name, str) or name not in ("rendezvous", "grouped"):
        known = '"rendezvous" (Gloo), "buffered" or "buffered(65536)" (MPI), or "grouped" (NCCL)'
        raise ArgumentError(f"semantics must be {known}, got {say(name)}. Choose one of these.")
    return Semantics(-1, in_order=name == "grouped")


class Rank(Protocol):
    """What an operation needs of the rank that posted it."""

    number: int
    clock: Clock
    recorder: Recorder | None
    resume: Callable[[], object]

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        ...


class SimulatedGroup(Members):
    """Ranks that talk with each other. All members share it.

    Args:
        clock: knows which rank asks.
        name: the same on all members: "world", "ring:2>3", ...
        ranks: the members, global ranks, in the group's order.
        number: its number in the trace.
        desc: what the user called it.

    Attributes:
        places: the place of each member, by its global rank.
        meetings: what `ringsim.simulator.collectives` keeps of the group.
    """

    kind = "the simulator"
    ranks: tuple[int, ...]

    def __init__(self, clock: Clock, name: str, ranks: tuple[int, ...], number: int, desc: str = "undefined") -> None:
        self.clock = clock
        self.group_name = name
        self.ranks = ranks
        self.number = number
        self.group_desc = desc
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.meetings: Any = None

    def __repr__(self) -> str:
        return f'SimulatedGroup("{self.group_name}", {shorten(self.ranks)})'

    def rank(self) -> int:
        """Returns the calling rank's place in the group, -1 outside."""
        return self.places.get(self.clock.current.number, -1)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that the simulator can carry."""
        return check_tensor(what, tensor)


# -- tensors


class Kind:
    """What operations on tensors of one dtype and shape have in common.

    Args:
        number: of the payload in the trace.
        payload: what the trace says of it.
        dtype: of the tensor, None where there is not just one.
        shape: likewise.
    """

    __slots__ = ("dtype", "number", "payload", "shape", "size_bytes")

    def __init__(self, number: int, payload: Payload, dtype: torch.dtype | None = None, shape: torch.Size | None = None) -> None:
        self.number, self.payload, self.dtype, self.shape = number, payload, dtype, shape
        self.size_bytes = payload.size_bytes


def check_tensor(what: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor that the simulator can carry, detached from its history; see ``check_dense``."""
    return check_dense(what, tensor, "in a simulation", meta=True)


def check_storage(tensor: torch.Tensor) -> int:
    """Checks that the storage of a tensor still holds all of it: torch would read and write beyond its end.

    Returns:
        The size of the tensor, in bytes.

    Raises:
        ArgumentError: the storage was resized since the tensor was made.
    """
    size_bytes: int = tensor.nbytes
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # a subclass without memory of its own, which itself says how it is copied
        return size_bytes
    offset = tensor.storage_offset()
    needed: Any = size_bytes
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (last + 1) * tensor.itemsize
    if offset:
        needed += offset * tensor.itemsize
    if needed > there and size_bytes:
        raise ArgumentError(
            f"a tensor must keep its memory until its operation is done, got a storage of {there:,} bytes for {needed:,}. "
            "Resize it after wait()."
        )
    return size_bytes


def _move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one of as many elements; of tensors without data nothing.

    Raises:
        ArgumentError: one has data and the other has none, or the sizes differ by now, or one has lost its memory.
    """
    if source.is_meta or target.is_meta:
        if source.is_meta and target.is_meta:
            return
        raise ArgumentError(
            f"both sides of a message must have data, or none, got {source.device} at the sender and {target.device} at the receiver. "
            "Make both tensors on one device."
        )
    size_bytes, room = check_storage(source), check_storage(target)
    if size_bytes != room:
        raise ArgumentError(
            f"a tensor must keep its size until its operation is done, got {size_bytes:,} bytes at the sender, {room:,} at the receiver. "
            "Resize it after wait()."
        )
    if source.requires_grad or target.requires_grad:
        source, target = source.detach(), target.detach()
    try:
        target.copy_(source)
    except RuntimeError:  # shapes differ, or the target was made in inference mode and may be written to nowhere else
        with torch.inference_mode():
            target.copy_(source.reshape(target.shape))


# -- handles


class Operation:
    """An operation of a rank that is under way; what ``isend`` and its kin return.

    Args:
        op: its code.
        rank: the rank that posted it.
        slot: of its record, None where it has none.
        group: where.
        kind: of what it carries.

    Attributes:
        done_s: when it is done, ``NEVER`` while that is not known.
        waiting: whether the rank waits for it, and is to be woken.
        error: what its wait raises, None for nothing.
        followers: slots of spans that the wait for this operation ends.
        peer: global rank of the other side, or of a root; negative where there is none.
        tag: of a message; -1 where there is none.
    """

    done_s: float = NEVER
    waiting: bool = False
    error: Exception | None = None
    followers: tuple[int, ...] = ()
    peer: int = -1
    tag: int = -1

    def __init__(self, op: int, rank: Rank, slot: int | None, group: SimulatedGroup, kind: Kind) -> None:
        self.op, self.rank, self.slot, self.group, self.kind = op, rank, slot, group, kind

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
        clock = rank.clock
        if clock.measures:
            clock.pay()
        if slot is not None:
            recorder: Recorder = rank.recorder  # type: ignore[assignment]  # who has a slot has a recorder
            recorder.wait(slot)
            for follower in self.followers:
                recorder.wait(follower)
        if self.done_s > clock.now:
            self._block(timeout)
        if slot is not None:
            self.close_record(OK if self.error is None else ERROR)
        if self.error is not None:
            raise self.error
        return True

    def _block(self, timeout: Any) -> None:
        broken: BaseException
        try:
            clock = self.rank.clock
            if timeout is not None:
                self._block_until(timeout)
            while self.done_s > clock.now:
                if self.done_s == NEVER:
                    self.waiting = True
                    clock.pause()
                else:
                    clock.sleep_until(self.done_s)
            return
        except RunTimeout:
            raise
        except BaseException as error:
            self.close_record(ERROR)
            broken = error
        raise broken  # outside of `except`: the context of an error that was thrown in is what the program itself is handling

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
                    f"{self.describe()}). Raise the limit, or look at whoever should answer."
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
            rank = self.rank
            rank.clock.at(time_s, rank.resume)

    def is_completed(self) -> bool:
        """Returns whether the operation is done, and then records that; where it is not, the other ranks get on a little."""
        clock = self.rank.clock
        if self.done_s > clock.now:
            clock.poll()
        if self.done_s > clock.now:
            return False
        if self.slot is not None and self.error is None:  # an error is for its wait to tell
            self.rank.recorder.wait(self.slot)  # type: ignore[union-attr]
            self.close_record(OK)
        return True

    # -- its record

    def close_record(self, status: int) -> None:
        """Records that the operation is done, or has failed; once."""
        slot, recorder = self.slot, self.rank.recorder
        if slot is None or recorder is None:
            return
        self.slot = None
        recorder.complete(slot, status)
        for follower in self.followers:
            recorder.complete(follower, status)

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Lets the wait for this operation complete another record, too; returns False where it was waited for already."""
        if self.slot is None or recorder is not self.rank.recorder:
            return False
        self.followers += (slot,)
        return True

    def refuse(self, kind: str, message: str) -> None:
        """Records that the operation is wrong, and was refused."""
        if self.slot is not None and self.rank.recorder is not None:
            self.rank.recorder.complete(self.slot, ERROR)
            self.rank.recorder.notice(kind, message, self.group.number, self.peer, self.tag, self.kind.number)

    def place_of_call(self) -> str:
        """Returns where it was posted, as " at ring.py:7"; "" where that was not recorded."""
        recorder = self.rank.recorder
        return "" if self.slot is None or recorder is None else recorder.place_of(self.slot)


class Message(Operation):
    """A send or a recv.

    Args:
        op: its code.
        rank: the rank that posted it.
        slot: of its record, None where it has none.
        group: where.
        kind: of what it carries.
        tensor: what is sent, or where it comes in.
        peer: global rank of the other side; ANY_SOURCE for a recv from anybody, until its message is there.
        tag: of the message.
        channel: where it meets its other side, None for a recv from anybody.

    Attributes:
        number: its place among the messages that had to wait for their other side; 0 for one that met it at once.
        arrives_s: of a send that left before its recv was posted: when its message arrives, ``NEVER`` while that is not known.
        met: of a send, its recv, once both are there.
    """

    sends = False
    number: int = 0
    arrives_s: float | None = None
    met: Message | None = None

    def __init__(
        self,
        op: int,
        rank: Rank,
        slot: int | None,
        group: SimulatedGroup,
        kind: Kind,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        channel: Channel | None,
    ) -> None:
        self.op, self.rank, self.slot, self.group, self.kind = op, rank, slot, group, kind
        self.tensor, self.peer, self.tag, self.channel = tensor, peer, tag, channel

    def arrive(self, time_s: float) -> None:
        """Completes a send and its recv: the message has arrived."""
        if self.met is not None:
            self.met.complete(time_s)
        self.complete(time_s)

    def source_rank(self) -> int:
        """Returns the rank within the group that a message came from; waits for it."""
        self.wait()
        return self.group.places[self.peer]

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Returns the tensor, once it is there."""
        self.wait()
        return [self.tensor]

    def describe(self) -> str:
        """Returns the operation in words."""
        return f"{'send to' if self.sends else 'recv from'} {self.peer}, tag {self.tag}"


class Send(Message):
    """A send."""

    sends = True


class Recv(Message):
    """A recv."""


class Channel:
    """What goes from one rank of a group to another with one tag, in order.

    Args:
        group: the group.
        src: global rank of the sender.
        dst: global rank of the receiver.
        tag: of the messages, as far as it counts.

    Attributes:
        waiting: the messages that wait for their other side: all sends, or all recvs.
        kind: of the message that was posted last, which the next one usually shares.
    """

    __slots__ = ("dst", "group", "kind", "src", "tag", "waiting")

    def __init__(self, group: SimulatedGroup, src: int, dst: int, tag: int) -> None:
        self.group, self.src, self.dst, self.tag = group, src, dst, tag
        self.waiting: deque[Message] = deque()
        self.kind: Kind | None = None


# -- matching


class Rendezvous:
    """Holds the messages that wait for their other side; a message moves when both sides are there.

    Args:
        clock: the virtual clock.
        links: carry the messages.
    """

    by_tag = True

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._carry = links.carry
        self._posted = 0  # how many have had to wait for their other side
        self._channels: dict[tuple[SimulatedGroup, int, int, int], Channel] = {}
        self._from_any: dict[tuple[SimulatedGroup, int, int], deque[Message]] = {}  # by group, destination, tag

    def channel_of(self, group: SimulatedGroup, src: int, dst: int, tag: int) -> Channel:
        """Returns where the messages of a group, a source, a destination and a tag meet; ranks are global."""
        key = (group, src, dst, tag if self.by_tag else 0)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(*key)
        return channel

    def post(self, message: Message) -> None:
        """Takes a message that has just been posted.

        Raises:
            MessageMismatch: its other side expects something else.
            ArgumentError: its tensor has changed, or lost its memory.
        """
        self._clock.polls = 0
        channel = message.channel
        if channel is None:
            channel = self._find_send(message)
            if channel is None:
                key = (message.group, message.rank.number, message.tag)
                self._posted += 1
                message.number = self._posted
                self._from_any.setdefault(key, deque()).append(message)
                return
        waiting = channel.waiting
        if message.sends and self._from_any:
            others = self._from_any.get((channel.group, channel.dst, channel.tag))
            if others and (not waiting or waiting[0].sends or others[0].number < waiting[0].number):
                waiting = others
        other = waiting[0] if waiting else message
        if other.sends is message.sends:
            self._queue(channel, message)
            return
        if message.kind is not other.kind:
            _compare(message, other)
        waiting.popleft()
        send, recv = (message, other) if message.sends else (other, message)
        if recv.channel is None:
            recv.peer = send.rank.number
            if recv.slot is not None:
                recv.rank.recorder.amend(recv.slot, peer=recv.peer)  # type: ignore[union-attr]
        self._meet(send, recv, message)

    def batch(self, rank: Rank) -> AbstractContextManager[None]:
        """Returns a block in which a rank posts what it begins together; here that makes no difference."""
        return nullcontext()

    def waiting(self) -> Iterator[Message]:
        """Yields the messages without their other side."""
        for queue in (*(channel.waiting for channel in self._channels.values()), *self._from_any.values()):
            yield from queue

    def _queue(self, channel: Channel, message: Message) -> None:
        """Lets a message wait for its other side."""
        self._posted += 1
        message.number = self._posted
        channel.waiting.append(message)

    def _meet(self, send: Message, recv: Message, last: Message) -> None:
        """Begins to carry a message, of whose sides ``last`` has just been posted."""
        try:
            _move(send.tensor, recv.tensor)
        except Exception as error:
            self._fail(recv if last is send else send, last, error)
            raise
        now = self._clock.now
        send.met = recv
        arrives_s = self._carry(send.rank.number, recv.rank.number, send.kind.size_bytes, now, send.arrive)
        if arrives_s is not None:
            send.done_s = recv.done_s = arrives_s
            if recv.waiting:
                recv.complete(arrives_s)
            if send.waiting:
                send.complete(arrives_s)

    def _fail(self, first: Message, last: Message, error: Exception) -> None:
        """Ends a message that cannot be moved: ``last`` raises as it is posted, and the wait for the other side does."""
        last.close_record(ERROR)
        first.error = type(error)(*error.args)
        first.complete(self._clock.now)

    def _find_send(self, recv: Message) -> Channel | None:
        """Returns the channel of the send that was posted first, of those that a recv from anybody may take; None where there is none."""
        best: Channel | None = None
        me, tag = recv.rank.number, recv.tag if self.by_tag else 0
        for source in recv.group.ranks:
            channel = self._channels.get((recv.group, source, me, tag))
            if channel is None or not channel.waiting or not channel.waiting[0].sends:
                continue
            if best is None or channel.waiting[0].number < best.waiting[0].number:
                best = channel
        return best


class Buffered(Rendezvous):
    """The same, but a small message leaves as soon as it is sent: what was sent is copied, and the send is done.

    Args:
        clock: the virtual clock.
        links: carry the messages.
        limit_bytes: a message up to this size does not wait for its recv.
    """

    def __init__(self, clock: Clock, links: Links, limit_bytes: int) -> None:
        super().__init__(clock, links)
        self._limit = limit_bytes

    def _queue(self, channel: Channel, message: Message) -> None:
        if message.sends and message.kind.size_bytes <= self._limit:
            self._leave(message)
        super()._queue(channel, message)

    def _leave(self, send: Message) -> None:
        try:
            check_storage(send.tensor)
        except ArgumentError:
            send.close_record(ERROR)
            raise
        with torch.inference_mode():
            send.tensor = send.tensor.clone()
        now = self._clock.now
        send.done_s, send.arrives_s = now, NEVER

        def arrive(time_s: float) -> None:
            send.arrives_s = time_s
            if send.met is not None:
                send.met.complete(time_s)

        arrives_s = self._carry(send.rank.number, send.peer, send.kind.size_bytes, now, arrive)
        if arrives_s is not None:
            send.arrives_s = arrives_s

    def _meet(self, send: Message, recv: Message, last: Message) -> None:
        if send.kind.size_bytes > self._limit:
            super()._meet(send, recv, last)
            return
        try:
            _move(send.tensor, recv.tensor)
        except Exception as error:
            self._fail(recv if last is send else send, last, error)
            raise
        now = self._clock.now
        if send.arrives_s is None:  # its recv was there first
            send.complete(now)
            arrives_s = self._carry(send.rank.number, recv.rank.number, send.kind.size_bytes, now, recv.complete)
            if arrives_s is not None:
                recv.complete(arrives_s)
        elif send.arrives_s == NEVER:
            send.met = recv
        else:
            recv.complete(max(send.arrives_s, now))


class _Entry:
    """Messages of one rank on one group that are carried out together.

    Attributes:
        messages: the messages.
        left: how many of them have not arrived.
        end_s: when the last one that has arrived did.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left = 0
        self.end_s = 0.0


class InOrder(Rendezvous):
    """The same, but a rank's messages on a group begin one after the other; tags do not count.

    ::

    rank 0   [send to 1] [recv from 1]       each rank's send waits for the other's recv, which stands behind its own send:
    rank 1   [send to 0] [recv from 0]       a deadlock

    rank 0   [send to 1, recv from 1]        posted with batch_isend_irecv: both begin
    rank 1   [send to 0, recv from 0]
    """

    by_tag = False

    def __init__(self, clock: Clock, links: Links) -> None:
        super().__init__(clock, links)
        self._queues: dict[tuple[int, SimulatedGroup], deque[_Entry]] = {}
        self._entry_of: dict[Message, _Entry] = {}
        self._open: dict[int, _Entry] = {}  # the batch that a rank is posting

    @contextlib.contextmanager
    def batch(self, rank: Rank) -> Iterator[None]:
        """Makes what a rank posts in the block one entry."""
        entry = self._open[rank.number] = _Entry()
        try:
            yield
        finally:
            del self._open[rank.number]
            if entry.messages:
                self._add(entry, entry.messages[0])

    def post(self, message: Message) -> None:
        """Takes a message that has just been posted; it begins when its turn has come.

        Raises:
            ArgumentError: it is a recv from anybody.
        """
        if message.channel is None:
            raise ArgumentError(
                f'src must be given with semantics="grouped", got a recv from anybody ({message.rank.here()}): NCCL has none. '
                "Name the sender."
            )
        self._clock.polls = 0
        entry = self._open.get(message.rank.number)
        if entry is not None:
            entry.messages.append(message)
            return
        entry = _Entry()
        entry.messages.append(message)
        self._add(entry, message)

    def _add(self, entry: _Entry, message: Message) -> None:
        entry.left = len(entry.messages)
        self._entry_of.update(dict.fromkeys(entry.messages, entry))
        queue = self._queues.setdefault((message.rank.number, message.group), deque())
        queue.append(entry)
        if len(queue) == 1:
            self._begin(entry)

    def _begin(self, entry: _Entry) -> None:
        for message in entry.messages:
            super().post(message)

    def _meet(self, send: Message, recv: Message, last: Message) -> None:
        try:
            _move(send.tensor, recv.tensor)
        except Exception as error:
            self._fail(recv if last is send else send, last, error)
            raise

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
        self._clock.at(entry.end_s, partial(self._go_on, self._queues[message.rank.number, message.group]))

    def _go_on(self, queue: deque[_Entry]) -> None:
        """Begins what stands behind an entry that is done."""
        queue.popleft()
        if not queue:
            return
        try:
            self._begin(queue[0])
        except (MessageMismatch, ArgumentError) as error:  # whoever posted it is gone from there: its wait raises
            for message in queue[0].messages:
                message.error = error
                message.complete(self._clock.now)


def make_matcher(semantics: Semantics, clock: Clock, links: Links) -> Rendezvous:
    """Returns what brings messages together, with the semantics that was asked for."""
    if semantics.in_order:
        return InOrder(clock, links)
    return Rendezvous(clock, links) if semantics.limit_bytes < 0 else Buffered(clock, links, semantics.limit_bytes)


def _compare(mine: Message, theirs: Message) -> None:
    """Compares the two sides of a message, of which ``mine`` was posted last.

    Raises:
        MessageMismatch: they disagree.
    """
    what = disagreement(mine.kind.payload, theirs.kind.payload)
    if not what:
        return
    peer = theirs.rank.number
    where = f"{mine.rank.here()}, {'send to' if mine.sends else 'recv from'} {peer}, tag {mine.tag}"
    message = (
        f"the two sides of a message must agree on its {what}, got {_describe(mine.kind.payload)} here and "
        f"{_describe(theirs.kind.payload)} in rank {peer}'s {'recv' if mine.sends else 'send'}{theirs.place_of_call()} "
        f"({where}, group {mine.group.group_name}). Make both tensors alike, or send them in the order in which they are received."
    )
    mine.refuse("message_mismatch", message)
    raise MessageMismatch(message)


def _describe(payload: Payload) -> str:
    return f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)"
