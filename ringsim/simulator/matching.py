"""Brings the sends and recvs of simulated ranks together.

Groups, handles, and when a message leaves. The k-th send of a channel (group, source, destination,
tag) belongs to the k-th recv, whichever is posted first. Three ways, by name:

| name | like | a send |
|---|---|---|
| ``rendezvous`` | Gloo | waits for its recv, at every size |
| ``buffered(65536)``, ``buffered`` | MPI | leaves at once and is done, up to so many bytes or at
any size; a larger one waits |
| ``grouped`` | NCCL | waits for its recv, and for everything that its rank posted on the group
before; a batch counts as one |

::

    rendezvous                    send --------- waits --------> recv
                                                                  |==== link ====> both are done

    buffered, up to a limit       send, done                     recv
                                   |==== link ====> arrived       |-> done
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import Work

from ringsim.comm.calls import Members, check_dense
from ringsim.comm.torch_private import in_backward, outside_modes, run_after_backward
from ringsim.diagnose.mismatches import disagreement
from ringsim.errors import ArgumentError, MessageMismatch, RunTimeout, name_ranks, say
from ringsim.simulator.clock import Clock, Rank
from ringsim.simulator.links import Arrived, Links, SharedCores
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OK, Payload
from ringsim.traces.recorder import Recorder

__all__ = ["NEVER", "Channel", "Kind", "Message", "Operation", "Rendezvous", "Team", "make_matcher"]

NEVER: Final = math.inf


class Team(Members):
    """The ranks of a process group, one object for all of them; the trace knows it by its number.

    Attributes:
        group_name: as the trace spells it: "world", "ring:2>3", "1".
        limit: of each operation, if the program set one.
        meetings: the state that ``ringsim.simulator.collectives`` keeps for the group.
    """

    ranks: tuple[int, ...]

    def __init__(self, clock: Clock, name: str, ranks: tuple[int, ...], number: int) -> None:
        self.clock = clock
        self.group_name = name
        self.ranks = ranks
        self.number = number
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.limit: timedelta | None = None
        self.meetings: Any = None

    def __repr__(self) -> str:
        return f'Team("{self.group_name}", {name_ranks(self.ranks)})'

    def rank(self) -> int:
        """Returns the calling rank's place in the group, -1 outside."""
        return self.places.get(self.clock.current.number, -1)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that the simulator can carry, detached from its history."""
        return check_dense(what, tensor, "in a simulation", meta=True)


# -- tensors


class Kind(NamedTuple):
    """What operations on tensors of one dtype and shape have in common.

    Attributes:
        number: in the trace.
        payload: what the trace says of them.
        size_bytes: the size of the payload.
    """

    number: int
    payload: Payload
    size_bytes: int


def check_storage(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes, all of which its storage must still hold.

    Torch would read and write beyond its end.
    """
    size_bytes: int = tensor.nbytes
    needed: Any = size_bytes
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        # a subclass without memory of its own, which itself says how it is copied
        return size_bytes
    if not tensor.is_contiguous():
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        needed = (last + 1) * tensor.itemsize
    if offset := tensor.storage_offset():
        needed += offset * tensor.itemsize
    if needed > there and size_bytes:
        raise ArgumentError(
            "a tensor must keep its memory until its operation is done, got a storage of "
            f"{there:,} bytes for {needed:,}. "
            "Resize it after wait()."
        )
    return size_bytes


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one, whatever modes of torch the calling rank is in."""
    with outside_modes():
        _copy_data(source, target)


def _copy_data(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one of as many elements; of tensors without data nothing."""
    if source.is_meta or target.is_meta:
        if source.is_meta and target.is_meta:
            return
        raise ArgumentError(
            f"both sides of a message must have data, or none, got {source.device} at the sender "
            f"and {target.device} at the receiver. "
            "Make both tensors on one device."
        )
    size_bytes, room = check_storage(source), check_storage(target)
    if size_bytes != room:
        raise ArgumentError(
            f"a tensor must keep its size until its operation is done, got {size_bytes:,} bytes "
            f"at the sender, {room:,} at the receiver. "
            "Resize it after wait()."
        )
    if source.requires_grad or target.requires_grad:
        source, target = source.detach(), target.detach()
    try:
        target.copy_(source)
    except RuntimeError:
        # shapes differ, or the target was made in inference mode and may be written to nowhere else
        with torch.inference_mode():
            target.copy_(source.reshape(target.shape))


# -- handles


class Operation(Work):
    """An operation that a rank has posted: the handle that ``isend`` and collectives return.

    Attributes:
        slots: of its record, and of others that its wait completes; empty where it is not recorded,
            or complete.
        done_s: when it is done, as far as that is known, else ``NEVER``.
        waiting: whether its rank is to be woken then.
        awaited: whether its rank has begun to wait, so that the record has that time.
        error: what its wait raises, None for nothing.
        peer: global rank of the other side, or of a root; negative where there is none.
        tag: of a message; -1 where there is none.
    """

    # of the class until they change: most operations never have others
    peer = tag = NONE
    done_s, waiting, awaited = NEVER, False, False
    error: Exception | None = None
    future: Any = None

    def __init__(
        self, op: int, rank: Rank, slots: tuple[int, ...], group: Team, kind: Kind
    ) -> None:
        super().__init__()
        self.op, self.rank, self.slots, self.group, self.kind = op, rank, slots, group, kind

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation is done; returns True.

        For ``timeout`` (seconds, or a ``timedelta``) of virtual time at most.

        Raises:
            RunTimeout: the limit has passed. After that of a message, its two ranks have no
                connection in the group any more, as with Gloo.
        """
        clock = self.rank.clock
        if clock.measures:
            clock.pay()
        if self.done_s <= clock.now and self.error is None:
            self._close_done()
            if self.future is not None:
                self._fulfil()
            return True
        self.awaited = True
        for slot in self.slots:
            self.rank.recorder.wait(slot)
        if self.done_s > clock.now:
            self._block(timeout or self.group.limit)
        self.close_record(OK if self.error is None else ERROR)
        if self.future is not None:
            self._fulfil()
        if self.error is not None:
            raise self.error
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def _block(self, timeout: Any) -> None:
        clock = self.rank.clock
        limit_s = (
            NEVER
            if timeout is None
            else timeout.total_seconds()
            if isinstance(timeout, timedelta)
            else float(timeout)
        )
        end_s = clock.now + limit_s
        try:
            while self.done_s > clock.now:
                if self.done_s <= end_s and self.done_s < NEVER:
                    clock.sleep_until(self.done_s)
                    continue
                if clock.now >= end_s:
                    break
                self.waiting = True
                if end_s < NEVER:
                    clock.at(end_s, self.rank)
                try:
                    clock.pause()
                finally:
                    clock.cancel(end_s, self.rank)
        except BaseException as error:
            self.close_record(ERROR)
            broken = error
        else:
            if self.done_s <= clock.now:
                return
            self.waiting = False
            self.close_record(ERROR)
            self.break_off()
            raise RunTimeout(
                f"the operation must be done within {limit_s:g} s of virtual time, got none by "
                f"then (rank {self.rank.number}, "
                f"{self.describe()}). Raise the limit, or look at whoever should answer."
            )
        # outside of `except`: the context of an error that was thrown in is what the program itself
        # is handling
        raise broken

    def describe(self) -> str:
        """Returns the operation in words."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Does what follows from a limit that has passed.

        Nothing, where the operation is no message.
        """

    def complete(self, time_s: float) -> None:
        """Notes when the operation is done, and wakes its rank if it waits for that."""
        self.done_s = time_s
        if self.future is not None:
            self.rank.clock.at(time_s, self._bring_future)
        if self.waiting:
            self.waiting = False
            self.rank.clock.at(time_s, self.rank)

    def is_completed(self) -> bool:
        """Returns whether the operation is done, and then records that.

        Where it is not, the other ranks get on a little.
        """
        clock = self.rank.clock
        if self.done_s > clock.now:
            clock.poll()
        if self.done_s > clock.now:
            return False
        if self.error is None:  # an error is for its wait to tell
            self._close_done()
        return True

    def is_success(self) -> bool:
        """Returns whether the operation is done, without an error."""
        return self.done_s <= self.rank.clock.now and self.error is None

    def exception(self) -> Exception | None:
        """Returns the error of the operation, None if there is none."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        raise NotImplementedError

    # -- its future

    def get_future(self) -> Any:
        """Returns a future of the result, which the rank's own thread completes.

        C++ waits for the futures of gradients at the end of a backward pass, where no rank can give
        way. So the rank waits a moment earlier, in a callback of its own.
        """
        if self.future is None:
            self.future = torch.futures.Future()
            self.future.operation = self
            if self.done_s <= self.rank.clock.now:
                self._fulfil()
            elif self.done_s < NEVER:
                self.rank.clock.at(self.done_s, self._bring_future)
            if not self.future.done() and in_backward():
                run_after_backward(self._wait_for_future)
        return self.future

    def _wait_for_future(self) -> None:
        """Waits; C++ would wait for ever for a future that an error leaves open."""
        try:
            self.wait()
        except BaseException as error:
            if not self.future.done():
                self.future.set_exception(RuntimeError(str(error)))
            raise

    def _bring_future(self) -> None:
        """Lets the rank's own thread complete the future: callbacks run there."""
        self.rank.errands.append(self._fulfil)
        self.rank.clock.at(self.rank.clock.now, self.rank)

    def _fulfil(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        if self.awaited:
            self.close_record(OK)
        else:
            self._close_done()
        self.future.set_result(self._results())

    def _results(self) -> list[torch.Tensor]:
        return []

    # -- its record

    def _close_done(self) -> None:
        """Records that the operation was done when its rank came to wait for it."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            self.rank.recorder.complete_at_once(slot)

    def close_record(self, status: int) -> None:
        """Records that the operation is done, or has failed; once."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            self.rank.recorder.complete(slot, status)

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Lets the wait for this operation complete another record, too.

        Returns False where it was waited for already.
        """
        if not self.slots or recorder is not self.rank.recorder:
            return False
        self.slots += (slot,)
        return True

    def refuse(self, kind: str, message: str) -> None:
        """Records that the operation is wrong, and was refused."""
        if self.slots:
            self.rank.recorder.complete(self.slots[0], ERROR)
            self.rank.recorder.notice(
                kind, message, self.group.number, self.peer, self.tag, self.kind.number
            )

    def place_of_call(self) -> str:
        """Returns where it was posted, as " at ring.py:7"; "" where that was not recorded."""
        return self.rank.recorder.place_of(self.slots[0]) if self.slots else ""


class Message(Operation):
    """A send or a recv.

    Attributes:
        number: its place among the messages that had to wait for their other side; 0 for one that
            met it at once.
        met: of a send, its recv.
        arrives_s: of a send that has left before its recv was posted: when its message arrives.
        entry: what it is carried out with, where a rank's messages go one after the other.
    """

    number = 0
    met: Message | None = None
    arrives_s: float | None = None
    entry: _Entry | None = None

    def __init__(
        self,
        op: int,
        rank: Rank,
        slots: tuple[int, ...],
        channel: Channel,
        kind: Kind,
        tensor: torch.Tensor,
        tag: int,
        sends: bool,
    ) -> None:
        super().__init__(op, rank, slots, channel.group, kind)
        self.channel, self.tensor, self.tag, self.sends = channel, tensor, tag, sends
        self.peer = channel.dst if sends else channel.src

    def break_off(self) -> None:
        """Closes the connection in the group, as Gloo does."""
        self.channel.connection.is_open = False

    def arrive(self, time_s: float) -> None:
        """Completes a send and its recv: the message has arrived."""
        self.met.complete(time_s)  # type: ignore[union-attr]  # what has begun has met its recv
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

    def _results(self) -> list[torch.Tensor]:
        return [self.tensor]

    def describe(self) -> str:
        """Returns the operation in words."""
        return f"{'send to' if self.sends else 'recv from'} {self.peer}, tag {self.tag}"


@dataclass
class Connection:
    """What two ranks have in a group, until a limit closes it."""

    is_open: bool = True
    # until when each of them was posting on it, where that takes time
    busy_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Channel:
    """What goes from one rank of a group to another with one tag, in order.

    From ANY_SOURCE, the recvs from anybody.
    """

    group: Team
    src: int
    dst: int
    tag: int
    connection: Connection
    # for their other side: all sends, or all recvs
    waiting: deque[Message] = field(default_factory=deque)


# -- matching


class Rendezvous:
    """Holds the messages that wait for their other side.

    A message moves when both sides are there.
    """

    by_tag = True

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock, self._links = clock, links
        self._stalls = isinstance(links, SharedCores) and links.gloo is not None
        self._posted = 0  # how many have had to wait for their other side
        self._channels: dict[tuple[Team, int, int, int], Channel] = {}
        self._connections: defaultdict[tuple[Team, int, int], Connection] = defaultdict(Connection)
        self._hears_anybody = False  # whether a recv from anybody was ever posted

    def channel_of(self, group: Team, src: int, dst: int, tag: int) -> Channel:
        """Returns where the messages of a group, a source, a destination and a tag meet.

        Ranks are global.
        """
        key = (group, src, dst, tag if self.by_tag else 0)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(
                *key, self._connections[group, min(src, dst), max(src, dst)]
            )
            self._hears_anybody |= src == ANY_SOURCE
        return channel

    def post(self, message: Message) -> None:
        """Takes a message that has just been posted.

        Raises where it does not fit its other side, or cannot be moved.
        """
        self._clock.polls = 0
        channel, sends = message.channel, message.sends
        waiting = self._find_other_side(channel, sends) if self._hears_anybody else channel.waiting
        if not waiting or waiting[0].sends is sends:
            self._queue(channel, message)
            return
        other = waiting[0]
        if message.kind is not other.kind:
            _compare(message, other)
        waiting.popleft()
        if sends:
            self._meet(message, other, message)
        else:
            self._meet(other, message, message)

    def post_together(self, messages: list[Message]) -> None:
        """Takes the messages of a batch; here they do not depend on each other."""
        for message in messages:
            self.post(message)

    def waiting(self) -> Iterator[Message]:
        """Yields the messages without their other side."""
        for channel in self._channels.values():
            yield from channel.waiting

    def _queue(self, channel: Channel, message: Message) -> None:
        """Lets a message wait for its other side."""
        self._posted += 1
        message.number = self._posted
        channel.waiting.append(message)

    def _find_other_side(self, channel: Channel, sends: bool) -> deque[Message]:
        """Returns the queue whose first message a new one meets.

        Of those that recvs from anybody make possible, the oldest.
        """
        group, dst = channel.group, channel.dst
        sources = (
            group.ranks
            if channel.src == ANY_SOURCE
            else (channel.src, ANY_SOURCE)
            if sends
            else (channel.src,)
        )
        found = [self._channels.get((group, src, dst, channel.tag)) for src in sources]
        queues = [
            each.waiting
            for each in found
            if each is not None and each.waiting and each.waiting[0].sends is not sends
        ]
        return min(queues, key=lambda queue: queue[0].number, default=channel.waiting)

    def _meet(self, send: Message, recv: Message, last: Message) -> None:
        """Brings the data over, and begins to carry a message.

        Of its sides ``last`` has just been posted. Where the data cannot be brought over, ``last``
        raises as it is posted, and the wait for the other side does.
        """
        send.met = recv
        if recv.peer == ANY_SOURCE:
            recv.peer = send.rank.number
            for slot in recv.slots[:1]:
                recv.rank.recorder.amend(slot, peer=recv.peer)
        try:
            _copy(send.tensor, recv.tensor)
        except Exception as error:
            first = recv if last is send else send
            last.close_record(ERROR)
            first.error = type(error)(*error.args)
            first.complete(self._clock.now)
            raise
        self._begin(send, recv)

    def _begin(self, send: Message, recv: Message) -> None:
        """Begins to carry a message whose recv is posted."""
        apart_s = NEVER
        if self._stalls:
            busy_s = send.channel.connection.busy_s
            apart_s = self._clock.now - min(
                busy_s.get(message.rank.number, -NEVER) for message in (send, recv)
            )
        self._carry(send, send.arrive, apart_s)

    def _carry(self, send: Message, arrived: Arrived, apart_s: float = NEVER) -> None:
        """Carries a message; ``arrived`` is told when it arrives, as soon as that is known."""
        arrives_s = self._links.carry(
            send.rank.number, send.peer, send.kind.size_bytes, self._clock.now, arrived, apart_s
        )
        if arrives_s is not None:
            arrived(arrives_s)


class Buffered(Rendezvous):
    """The same, but a message up to a limit leaves as soon as it is sent.

    What was sent is copied, and the send is done.
    """

    def __init__(self, clock: Clock, links: Links, limit_bytes: float) -> None:
        super().__init__(clock, links)
        self._limit = limit_bytes

    def _queue(self, channel: Channel, message: Message) -> None:
        if message.sends and message.kind.size_bytes <= self._limit:
            try:
                check_storage(message.tensor)
            except ArgumentError:
                message.close_record(ERROR)
                raise
            with torch.inference_mode(), outside_modes():
                message.tensor = message.tensor.clone()
            self._leave(message)
        super()._queue(channel, message)

    def _leave(self, send: Message) -> None:
        """Sends a message on its way; the send is done."""
        send.arrives_s = NEVER
        send.complete(self._clock.now)

        def arrive(time_s: float) -> None:
            send.arrives_s = time_s
            if send.met is not None:
                send.met.complete(time_s)

        self._carry(send, arrive)

    def _begin(self, send: Message, recv: Message) -> None:
        if send.kind.size_bytes > self._limit:
            super()._begin(send, recv)
        elif send.arrives_s is None:  # its recv was there first
            self._leave(send)
        elif send.arrives_s < NEVER:
            recv.complete(max(send.arrives_s, self._clock.now))


@dataclass
class _Entry:
    """Messages of one rank on one group that are carried out together."""

    messages: list[Message]
    num_arrived: int = 0
    end_s: float = 0.0  # when the last one that has arrived did


class InOrder(Rendezvous):
    """The same, but a rank's messages on a group begin one after the other; tags do not count.

    ::

    rank 0  [send to 1] [recv from 1]  each rank's send waits for the other's recv, which stands
                                       behind its own send:
    rank 1  [send to 0] [recv from 0]  a deadlock

    rank 0   [send to 1, recv from 1]        posted with batch_isend_irecv: both begin
    rank 1   [send to 0, recv from 0]
    """

    by_tag = False

    def __init__(self, clock: Clock, links: Links) -> None:
        super().__init__(clock, links)
        self._entries: defaultdict[tuple[int, Team], deque[_Entry]] = defaultdict(deque)

    def post(self, message: Message) -> None:
        """Takes a message that has just been posted; it begins when its turn has come."""
        if message.peer == ANY_SOURCE:
            raise ArgumentError(
                'src must be given with semantics="grouped", got a recv from anybody '
                f"({message.rank.here()}): NCCL has none. "
                "Name the sender."
            )
        self._clock.polls = 0
        self.post_together([message])

    def post_together(self, messages: list[Message]) -> None:
        """Takes the messages of a batch, which begin together."""
        entry = _Entry(messages)
        for message in messages:
            message.entry = entry
        queue = self._entries[messages[0].rank.number, messages[0].group]
        queue.append(entry)
        if len(queue) == 1:
            self._post_all(entry)

    def _post_all(self, entry: _Entry) -> None:
        for message in entry.messages:
            super().post(message)

    def _begin(self, send: Message, recv: Message) -> None:
        def arrive(time_s: float) -> None:
            self._arrive(send, time_s)
            self._arrive(recv, time_s)

        self._carry(send, arrive)

    def _arrive(self, message: Message, time_s: float) -> None:
        entry = message.entry
        assert entry is not None
        entry.num_arrived += 1
        entry.end_s = max(entry.end_s, time_s)
        if entry.num_arrived == len(entry.messages):
            for each in entry.messages:
                each.complete(entry.end_s)
            self._clock.at(
                entry.end_s, partial(self._go_on, self._entries[message.rank.number, message.group])
            )

    def _go_on(self, queue: deque[_Entry]) -> None:
        """Begins what stands behind an entry that is done."""
        queue.popleft()
        if not queue:
            return
        try:
            self._post_all(queue[0])
        except (MessageMismatch, ArgumentError) as error:
            # whoever posted it is gone from there: its wait raises
            for message in queue[0].messages:
                message.error = error
                message.complete(self._clock.now)


def make_matcher(semantics: object, clock: Clock, links: Links) -> Rendezvous:
    """Returns what brings messages together, with the semantics of a name.

    Raises ArgumentError where there is none of that name.
    """
    name = str(semantics)
    if name == "rendezvous":
        return Rendezvous(clock, links)
    if name == "grouped":
        return InOrder(clock, links)
    buffered = re.fullmatch(r"buffered(?:\((\d+)\))?", name)
    if buffered is not None:
        return Buffered(clock, links, int(buffered[1]) if buffered[1] else math.inf)
    known = '"rendezvous" (Gloo), "buffered" or "buffered(65536)" (MPI), or "grouped" (NCCL)'
    raise ArgumentError(f"semantics must be {known}, got {say(semantics)}. Choose one of these.")


def _compare(mine: Message, theirs: Message) -> None:
    """Raises MessageMismatch where the two sides of a message disagree.

    ``mine`` was posted last.
    """
    what = disagreement(mine.kind.payload, theirs.kind.payload)
    if not what:
        return
    peer = theirs.rank.number
    message = (
        f"the two sides of a message must agree on its {what}, got "
        f"{describe_payload(mine.kind.payload)} here and "
        f"{describe_payload(theirs.kind.payload)} in rank {peer}'s "
        f"{'recv' if mine.sends else 'send'}{theirs.place_of_call()} "
        f"({mine.rank.here()}, {'send to' if mine.sends else 'recv from'} {peer}, tag "
        f"{mine.tag}, group {mine.group.group_name}). "
        "Make both tensors alike, or send them in the order in which they are received."
    )
    mine.refuse("message_mismatch", message)
    raise MessageMismatch(message)


def describe_payload(payload: Payload) -> str:
    """Returns what an operation carries, in words."""
    words = (
        f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)"
        if payload.dtype
        else "nothing"
    )
    return f"{words}, {payload.reduction}" if payload.reduction else words
