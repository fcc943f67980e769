"""When a message leaves, and when a send is done: three ways, by name.

| name | like | a send |
|---|---|---|
| ``rendezvous`` | Gloo | waits for its recv, at every size |
| ``buffered(65536)``, ``buffered`` | MPI | up to so many bytes, or at any size, leaves and is done at once; a larger one waits |
| ``grouped`` | NCCL | waits for its recv, and for all that its rank has posted on the group before; a batch counts as one |

A group of simulated ranks: one object that all its members hold.

How the bytes of a message, or of a collective, get from one simulated rank's tensor into another's.

Both lie in one process. As on real ranks, nothing of it is part of anybody's history: neither the modes of the rank that happens to do the
copying nor gradients count.

The handle of a simulated message: when it is done, and the wait for that.

Brings the sends and the recvs of simulated ranks together.

The k-th send of a channel (group, source, destination, tag) belongs to the k-th recv. Which of the two is posted first does not matter::

    rendezvous                    send --------- waits --------> recv           as Gloo does it, at every size
                                                                  |==== link ====> both are done

    buffered, up to a limit       send, done                     recv           as MPI does it with small messages
                                   |==== link ====> arrived       |-> done

Brings sends and recvs together where the operations of a rank on a group are carried out one after the other, as NCCL does it.

What a rank posts on a group stands in a queue. A batch is one entry: its messages begin together, and are done together::

    rank 0   [send to 1] [recv from 1]       each rank's send waits for the other's recv, which stands behind its own send:
    rank 1   [send to 0] [recv from 0]       a deadlock

    rank 0   [send to 1, recv from 1]        posted with batch_isend_irecv: both go
    rank 1   [send to 0, recv from 0]
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ringsim.comm.follower import disagreement
from ringsim.comm.mpi_transfers import to_index
from ringsim.errors import ArgumentError, MessageMismatch, RunTimeout, say
from ringsim.link import Link
from ringsim.simulator.clock import Clock
from ringsim.simulator.links import Carrier, Line, PrivateLinks

if TYPE_CHECKING:
    from ringsim.simulator.rank import RankCore
from ringsim.simulator.recording import Kind
from ringsim.traces.events import ANY_SOURCE, NONE, Payload

if TYPE_CHECKING:
    from ringsim.simulator.rank import RankCore

__all__ = [
    "NEVER",
    "Channel",
    "Message",
    "Operation",
    "OrderedOffice",
    "PostOffice",
    "Recv",
    "Semantics",
    "Send",
    "SimulatedGroup",
    "check_storage",
    "check_tensor",
    "check_tensors",
    "move",
    "read_semantics",
    "shorten",
]

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
    """Returns what a name says.

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
        raise ArgumentError(f"semantics must be {known}, got {say(name)}. Take one of these.")
    return Semantics(-1, in_order=name == "grouped")


class SimulatedGroup:
    """Ranks that talk with each other; answers what a ``ProcessGroup`` is asked, and is passed as ``group=``.

    Args:
        clock: knows which rank asks.
        name: the same on all members: "world", "ring:2>3", ...
        ranks: the members, global ranks, in the group's order.
        number: its number in the trace.
        desc: what the user called it.

    Attributes:
        places: the place of each member, by its global rank.
        calls: how many collectives each member has called, by place; empty before the first.
        free_s: when the bytes of its last collective have left, where its links are its own.
        links: the different links from each member to the next one, once somebody has asked.
        meetings: the collectives that not all members have come to, by their number.
    """

    __slots__ = ("calls", "clock", "desc", "free_s", "group_name", "links", "meetings", "number", "places", "ranks")

    def __init__(self, clock: Clock, name: str, ranks: tuple[int, ...], number: int, desc: str = "undefined") -> None:
        self.clock = clock
        self.group_name = name
        self.ranks = ranks
        self.number = number
        self.desc = desc
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.calls: list[int] = []
        self.free_s = 0.0
        self.links: tuple[Link, ...] = ()
        self.meetings: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Says what to do instead to torch's own functions, which look for the methods of ``ProcessGroup``."""
        raise AttributeError(
            f'the group of a call of torch.distributed must be one of torch\'s own, got group "{self.group_name}" of the simulator, which '
            f"has no {name}. Use the functions of ringsim.comm: from ringsim import comm as dist."
        )

    def __repr__(self) -> str:
        return f'SimulatedGroup("{self.group_name}", {shorten(self.ranks)})'

    @property
    def group_desc(self) -> str:
        """What the user called the group."""
        return self.desc

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns the calling rank's place in the group, -1 outside."""
        rank = self.clock.current.number
        return self.places.get(rank, -1)

    def place_of(self, what: str, global_rank: Any, group_rank: Any) -> int:
        """Returns the group rank that is meant by one of the two.

        Args:
            what: "dst" or "src", for the error.
            global_rank: a global rank, or None.
            group_rank: a place in the group, or None.

        Raises:
            ArgumentError: both or none are given, or the group has no such rank.
        """
        if (global_rank is None) == (group_rank is None):
            given = "none" if global_rank is None else f"{global_rank} and {group_rank}"
            raise ArgumentError(f"one of {what} and group_{what} must be given, got {given} ({self._here()}). Leave one of them out.")
        if global_rank is None:
            place = to_index(f"group_{what}", group_rank)
            if not 0 <= place < len(self.ranks):
                raise ArgumentError(
                    f"group_{what} must be a rank of the group, from 0 to {len(self.ranks) - 1}, got {place} ({self._here()}). "
                    f"Its global ranks are {shorten(self.ranks)}."
                )
            return place
        rank = to_index(what, global_rank)
        if rank not in self.places:
            raise ArgumentError(
                f"{what} must be a global rank of the group, one of {shorten(self.ranks)}, got {rank} ({self._here()}). "
                f"To count within the group, use group_{what}."
            )
        return self.places[rank]

    def _here(self) -> str:
        return f'rank {self.rank()} of {len(self.ranks)} of group "{self.group_name}"'


def shorten(ranks: Sequence[int]) -> str:
    """Returns ranks in words: all of them, or of many the first.

    Example:
        >>> shorten([0, 2]), shorten(range(100))
        ('[0, 2]', '[0, 1, 2, 3, 4, 5, 6, 7] and 92 more')
    """
    return f"{list(ranks[:8])} and {len(ranks) - 8} more" if len(ranks) > 16 else str(list(ranks))


def move(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another one of as many elements; of tensors without data nothing.

    Args:
        source: what is sent.
        target: where it goes.

    Raises:
        ArgumentError: one of them has data and the other has none, or the memory of one has become smaller than itself.
    """
    if source.is_meta or target.is_meta:
        if source.is_meta and target.is_meta:
            return
        raise ArgumentError(
            f"both sides of a message must have data, or none, got {source.device} at the sender and {target.device} at the receiver. "
            "Make both tensors on one device."
        )
    check_storage("source", source)
    check_storage("target", target)
    if source.requires_grad:
        source = source.detach()
    if target.requires_grad:
        target = target.detach()
    if source.shape != target.shape:
        source = source.reshape(target.shape)
    if target.is_inference():  # may be written to nowhere else
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def check_storage(what: str, tensor: torch.Tensor) -> None:
    """Checks that the memory of a tensor still holds all of it: torch would read and write beyond its end.

    Args:
        what: what the tensor is, for the error.
        tensor: with data.

    Raises:
        ArgumentError: the storage was resized since the tensor was made.
    """
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # a subclass without memory of its own, which says itself how it is copied
        return
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last) * tensor.itemsize
    if needed > there and tensor.numel():
        raise ArgumentError(
            f"the {what} tensor of a message must keep its memory until the message is done, got a storage of {there:,} bytes for "
            f"{needed:,}. Resize it after wait()."
        )


def check_tensor(what: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor that the simulator can carry, cut off from its history.

    Args:
        what: what the tensor is called, for the error.
        tensor: the argument.

    Raises:
        ArgumentError: it is no tensor, or not a dense one on the CPU or the meta device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
    if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (" (quantized)" if tensor.is_quantized else "")
        raise ArgumentError(
            f"{what} must be a dense tensor on the CPU or the meta device in a simulation, got {kind}. Convert it: tensor.cpu().to_dense()."
        )
    return tensor.detach()


def check_tensors(what: str, tensors: Any) -> list[torch.Tensor]:
    """Returns a list of tensors that the simulator can carry; see ``check_tensor``."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{what} must be a list of tensors, got {type(tensors).__name__}. Put them into a list.")
    return [check_tensor(f"{what}[{place}]", tensor) for place, tensor in enumerate(tensors)]


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
