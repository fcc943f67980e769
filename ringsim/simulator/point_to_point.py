"""Matches the sends and recvs of simulated ranks, and decides when a message leaves.

The k-th send of a channel (group, source, destination, tag) matches the channel's k-th recv. Either
side may be posted first. The semantics are chosen by name:

| name | as on | a send |
|---|---|---|
| ``rendezvous`` | Gloo | waits for its recv, at every size |
| ``buffered(65536)`` | MPI | up to this size, leaves immediately and is done; otherwise waits |
| ``buffered`` | | leaves immediately and is done, at any size |
| ``grouped`` | NCCL | waits for its recv, and for its rank's earlier messages on the group |
| ``paired`` | NCCL | waits for its recv, and for earlier messages of the two ranks on the group |
| ``grouped(65536)`` | | up to this size, is done when its turn comes; otherwise waits |

With ``grouped`` and ``paired``, a batch counts as one message. With ``paired``, the batches on a
group have an order of their own. torch uses one NCCL communicator per group if you pass
``device_id`` to ``init_process_group`` (``grouped``). Otherwise, batches use the group's
communicator, and other messages use a communicator for their two ranks (``paired``).

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
from functools import partial

import torch

from ringsim.comm.torch_private import outside_modes
from ringsim.diagnose.mismatches import disagreement
from ringsim.errors import ArgumentError, MessageMismatch, say
from ringsim.simulator.clock import Clock, Rank
from ringsim.simulator.links import Arrived, Links, SharedCores, SharedLinks
from ringsim.simulator.work import (
    NEVER,
    PayloadKind,
    SimulatedWork,
    Team,
    check_storage,
    copy_tensor,
    describe_payload,
)
from ringsim.traces.events import ANY_SOURCE, ERROR

SINGLE = 1  # the tag of a channel for messages that are not in a batch, if these do not meet


class SimulatedMessage(SimulatedWork):
    """One side of a message: a send or a recv.

    Attributes:
        number: its index among the messages that had to wait for their other side, or 0 if the
            other side was already posted.
        met: for a send, the matching recv.
        arrives_s: the arrival time, for a send that left before its recv was posted.
        entry: the messages that are carried out together with this one, if a rank's messages run in
            order.
    """

    number = 0
    met: SimulatedMessage | None = None
    arrives_s: float | None = None
    entry: _Entry | None = None

    def __init__(
        self,
        op: int,
        rank: Rank,
        slots: tuple[int, ...],
        channel: Channel,
        kind: PayloadKind,
        tensor: torch.Tensor,
        tag: int,
        sends: bool,
    ) -> None:
        super().__init__(op, rank, slots, channel.group, kind)
        self.channel, self.tensor, self.tag, self.sends = channel, tensor, tag, sends
        self.peer = channel.dst if sends else channel.src

    def arrive(self, time_s: float) -> None:
        """Completes a send and its recv after the message has arrived."""
        self.met.complete(time_s)  # type: ignore[union-attr]  # it has left, so it has its recv
        self.complete(time_s)

    def source_rank(self) -> int:
        """Waits for the message, and returns its source as a rank of the group."""
        self.wait()
        return self.group.places[self.peer]

    _source_rank = source_rank

    def _results(self) -> list[torch.Tensor]:
        return [self.tensor]

    def describe(self) -> str:
        """Returns a description of the operation in words."""
        return f"{'send to' if self.sends else 'recv from'} {self.peer}, tag {self.tag}"


@dataclass
class Connection:
    """The connection between two ranks in a group, which a timeout may close."""

    is_open: bool = True
    # the end of each rank's last post on the connection, if posting takes time
    busy_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Channel:
    """The messages from one rank of a group to another with one tag, in order.

    If the source is ANY_SOURCE, these are the recvs from any rank.
    """

    group: Team
    src: int
    dst: int
    tag: int
    connection: Connection
    # the messages that wait for their other side: all sends, or all recvs
    waiting: deque[SimulatedMessage] = field(default_factory=deque)


# -- matching


class Matcher:
    """The messages that wait for their other side.

    A message moves when both sides are posted. However, a message up to a size limit leaves as soon
    as it is sent: the tensor is copied, and the send is done immediately.
    """

    by_tag = True
    paired = False

    def __init__(self, clock: Clock, links: Links, limit_bytes: float) -> None:
        self._clock, self._links, self._limit = clock, links, limit_bytes
        self._stalls = isinstance(links, SharedCores) and links.gloo is not None
        self._posted = 0  # the number of messages that had to wait for their other side
        self._channels: dict[tuple[Team, int, int, int], Channel] = {}
        self._connections: defaultdict[tuple[Team, int, int], Connection] = defaultdict(Connection)
        self._hears_anybody = False  # whether a recv from any source was ever posted

    def channel_of(self, group: Team, src: int, dst: int, tag: int, is_single: bool) -> Channel:
        """Returns the channel for a group, a source, a destination and a tag.

        The ranks are global. ``is_single`` is false for the messages of a batch.
        """
        key = (group, src, dst, tag if self.by_tag else SINGLE * (self.paired and is_single))
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(
                *key, self._connections[group, min(src, dst), max(src, dst)]
            )
            self._hears_anybody |= src == ANY_SOURCE
        return channel

    def post(self, message: SimulatedMessage) -> None:
        """Handles a message that has just been posted.

        The method raises an error if the message does not match its other side, or if its data
        cannot be moved.
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

    def post_together(self, messages: list[SimulatedMessage]) -> None:
        """Handles a batch of messages, which are independent of each other in these semantics."""
        for message in messages:
            self.post(message)

    def waiting(self) -> Iterator[SimulatedMessage]:
        """Yields the messages whose other side is missing."""
        for channel in self._channels.values():
            yield from channel.waiting

    def _queue(self, channel: Channel, message: SimulatedMessage) -> None:
        """Queues a message until its other side is posted."""
        if message.sends and message.kind.size_bytes <= self._limit:
            try:
                check_storage(message.tensor)
            except ArgumentError:
                message.close_record(ERROR)
                raise
            with torch.inference_mode(), outside_modes():
                message.tensor = message.tensor.clone()
            self._leave(message)
        self._posted += 1
        message.number = self._posted
        channel.waiting.append(message)

    def _find_other_side(self, channel: Channel, sends: bool) -> deque[SimulatedMessage]:
        """Returns the queue whose first message matches the new message.

        Recvs from any source may match several queues. The oldest message is then chosen.
        """
        group, dst = channel.group, channel.dst
        sources = group.ranks if channel.src == ANY_SOURCE else (channel.src, ANY_SOURCE)
        found = [self._channels.get((group, src, dst, channel.tag)) for src in sources]
        queues = [
            each.waiting
            for each in found
            if each is not None and each.waiting and each.waiting[0].sends is not sends
        ]
        return min(queues, key=lambda queue: queue[0].number, default=channel.waiting)

    def _meet(self, send: SimulatedMessage, recv: SimulatedMessage, last: SimulatedMessage) -> None:
        """Moves a message's data and starts to carry the message.

        ``last`` is the side that has just been posted. If the data cannot be moved, the post of
        ``last`` raises an error, and the wait of the other side raises the same error.
        """
        send.met = recv
        if recv.peer == ANY_SOURCE:
            recv.peer = send.rank.number
            for slot in recv.slots[:1]:
                recv.rank.recorder.amend(slot, peer=recv.peer)
        try:
            copy_tensor(send.tensor, recv.tensor)
        except Exception as error:
            first = recv if last is send else send
            last.close_record(ERROR)
            first.error = type(error)(*error.args)
            first.complete(self._clock.now)
            raise
        self._begin(send, recv)

    def _begin(self, send: SimulatedMessage, recv: SimulatedMessage) -> None:
        """Starts to carry a message whose recv is posted, unless it has already left."""
        if send.kind.size_bytes > self._limit:
            self._begin_both(send, recv)
        elif send.arrives_s is None:  # the recv was posted first
            self._leave(send)
        elif send.arrives_s < NEVER:
            self._end(recv, max(send.arrives_s, self._clock.now))

    def _begin_both(self, send: SimulatedMessage, recv: SimulatedMessage) -> None:
        """Starts to carry a message, both of whose sides are done when it arrives."""
        apart_s = NEVER
        if self._stalls:
            busy_s = send.channel.connection.busy_s
            apart_s = self._clock.now - min(
                busy_s.get(message.rank.number, -NEVER) for message in (send, recv)
            )
        self._carry(send, send.arrive, apart_s)

    def _leave(self, send: SimulatedMessage) -> None:
        """Sends a message and completes the send."""
        send.arrives_s = NEVER
        self._end(send, self._clock.now)

        def arrive(time_s: float) -> None:
            send.arrives_s = time_s
            if send.met is not None:
                self._end(send.met, time_s)

        self._carry(send, arrive)

    def _end(self, message: SimulatedMessage, time_s: float) -> None:
        """Sets the time at which one side of a message is done."""
        message.complete(time_s)

    def _carry(self, send: SimulatedMessage, arrived: Arrived, apart_s: float = NEVER) -> None:
        """Carries a message, and calls ``arrived`` with the arrival time once it is known."""
        links, src, size_bytes = self._links, send.rank.number, send.kind.size_bytes
        if isinstance(links, SharedLinks):
            links.carry(src, send.peer, size_bytes, arrived)
        else:
            arrived(links.carry(src, send.peer, size_bytes, self._clock.now, apart_s))


@dataclass
class _Entry:
    """One rank's messages on one communicator that are issued as a batch."""

    messages: list[SimulatedMessage]
    queue: deque[_Entry]
    num_arrived: int = 0
    end_s: float = 0.0  # the latest arrival so far


class InOrder(Matcher):
    """Like `Matcher`, but a rank's messages on a group start in order, whatever their tags.

    If ``paired`` is set, each other rank has an order of its own, and batches have one together.

    Each rank's send waits for the other rank's recv, which is queued behind that rank's own send.
    This is a deadlock::

        rank 0   [send to 1] [recv from 1]
        rank 1   [send to 0] [recv from 0]

    If the ranks post the two messages with ``batch_isend_irecv``, both messages start::

        rank 0   [send to 1, recv from 1]
        rank 1   [send to 0, recv from 0]
    """

    by_tag = False

    def __init__(self, clock: Clock, links: Links, limit_bytes: float, *, paired: bool) -> None:
        super().__init__(clock, links, limit_bytes)
        self.paired = paired
        self._entries: defaultdict[tuple[int, Team, object], deque[_Entry]] = defaultdict(deque)

    def post(self, message: SimulatedMessage) -> None:
        """Handles a message that has just been posted, and starts it when its turn comes."""
        if message.peer == ANY_SOURCE:
            raise ArgumentError(
                'semantics="grouped" and "paired" do not support a recv from any source '
                f"({message.rank.here()}), because NCCL does not. "
                "Pass src."
            )
        self._clock.polls = 0
        self.post_together([message])

    def post_together(self, messages: list[SimulatedMessage]) -> None:
        """Handles a batch of messages, which start together."""
        first = messages[0]
        pair = first.peer if first.channel.tag == SINGLE else None
        queue = self._entries[first.rank.number, first.group, pair]
        entry = _Entry(messages, queue)
        for message in messages:
            message.entry = entry
        queue.append(entry)
        if len(queue) == 1:
            self._post_all(entry)

    def _post_all(self, entry: _Entry) -> None:
        for message in entry.messages:
            super().post(message)

    def _begin_both(self, send: SimulatedMessage, recv: SimulatedMessage) -> None:
        def arrive(time_s: float) -> None:
            self._end(send, time_s)
            self._end(recv, time_s)

        self._carry(send, arrive)

    def _end(self, message: SimulatedMessage, time_s: float) -> None:
        entry = message.entry
        assert entry is not None
        entry.num_arrived += 1
        entry.end_s = max(entry.end_s, time_s)
        if entry.num_arrived == len(entry.messages):
            for each in entry.messages:
                each.complete(entry.end_s)
            self._clock.at(entry.end_s, partial(self._go_on, entry.queue))

    def _go_on(self, queue: deque[_Entry]) -> None:
        """Starts the next entry when an entry is done."""
        queue.popleft()
        if not queue:
            return
        try:
            self._post_all(queue[0])
        except (MessageMismatch, ArgumentError) as error:
            # the call that posted the message has returned, so the wait raises the error
            for message in queue[0].messages:
                message.error = error
                message.complete(self._clock.now)


def make_matcher(semantics: object, clock: Clock, links: Links) -> Matcher:
    """Creates the object that matches messages, for semantics given by name.

    Raises ArgumentError if the name is unknown.
    """
    found = re.fullmatch(
        r"rendezvous|(buffered|grouped|paired)(?:\((\d+)\))?", str(semantics), re.ASCII
    )
    if found is None:
        known = (
            '"rendezvous" (Gloo), "buffered" or "buffered(65536)" (MPI), or "grouped", "paired", '
            '"grouped(65536)" or "paired(65536)" (NCCL)'
        )
        raise ArgumentError(f"semantics must be {known}, got {say(semantics)}.")
    name, limit = found.groups()
    limit_bytes = int(limit) if limit else math.inf if name == "buffered" else -1
    if name in ("grouped", "paired"):
        return InOrder(clock, links, limit_bytes, paired=name == "paired")
    return Matcher(clock, links, limit_bytes)


def _compare(mine: SimulatedMessage, theirs: SimulatedMessage) -> None:
    """Raises MessageMismatch if the two sides of a message disagree.

    ``mine`` was posted last.
    """
    what = disagreement(mine.kind.payload, theirs.kind.payload)
    if not what:
        return
    peer = theirs.rank.number
    message = (
        f"the two sides of a message disagree on its {what}: "
        f"{describe_payload(mine.kind.payload)} here and "
        f"{describe_payload(theirs.kind.payload)} in rank {peer}'s "
        f"{'recv' if mine.sends else 'send'}{theirs.place_of_call()} "
        f"({mine.rank.here()}, {'send to' if mine.sends else 'recv from'} {peer}, tag "
        f"{mine.tag}, group {mine.group.group_name}). "
        "Make both tensors alike, or send in the order in which the other side receives."
    )
    mine.refuse("message_mismatch", message)
    raise MessageMismatch(message)
