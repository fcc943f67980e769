"""Matches sends with recvs, groups collectives into calls, and splits blocked time by cause.

A message is a matched send and recv. Messages with the same group, source, destination and tag do
not overtake each other, so the k-th send matches the k-th recv::

    rank 0 posts  send#0(tag 7)  send#1(tag 7)  send#2(tag 9)
                       |              |              |
    rank 1 posts  recv#0(tag 7)  recv#1(tag 7)       x          tag 9: never received

Similarly, the k-th collective that each member of a group posts belongs to the same call.

A matched operation is blocked either because its partner is late, or because the bytes are in
flight. The time from wait to done is therefore split into two parts::

    recv   post ...... wait =================== done
    send                       post                     until here, the receiver waited for a late
                                                        sender;
                                |---------------|       the rest is transfer

The time of a send that waits for its recv is split in the same way, into late receiver and
transfer. With NCCL, wait and done are times on the GPU stream, while post is a time in the program.
The transfer then includes the time that the partner's GPU spent on earlier work.

Source:
    F. Wolf et al., "Usage of the SCALASCA toolset for scalable performance analysis of large-scale
    parallel applications", 2008: the wait states "late sender" and "late receiver". ringsim counts
    from the moment the program begins to wait (Scalasca's enter), so that the time during which an
    asynchronous operation overlaps with computation does not count as waiting.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, SupportsIndex

import numpy as np

from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    ERROR,
    NONE,
    RECV,
    SEND,
    Events,
    Ints,
    number_places,
)
from ringsim.traces.items import Message, as_operation, event_at


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of a run, stored as columns.

    The columns are numpy arrays of equal length, ordered by the post time of the send.

    Attributes:
        src: the global rank of the sender (int32).
        dst: the global rank of the receiver (int32).
        tag: the tag of the message, as set by the sender (int32).
        group: the index into ``events.tables.groups`` (int32).
        payload: the index of the sender's payload in ``events.tables.payloads`` (int32).
        stage: the pipeline stage, from the sender if it has one, otherwise from the receiver, or -1
            (int32).
        microbatch: the microbatch, chosen in the same way (int32).
        send: the index of the send among the events (int64).
        recv: the index of the recv among the events (int64).
        unmatched: the indices of the sends and recvs without a partner, in ascending order (int64).
        events: the events that the indices refer to.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> messages = match(
        ...     make_events(
        ...         {
        ...             "rank": [0, 1],
        ...             "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...             "group": [-1, -1],
        ...             "peer": [1, 0],
        ...             "tag": [7, 7],
        ...             "post_ns": [0, 500],
        ...             "done_ns": [2000, 3000],
        ...         }
        ...     )
        ... )
        >>> messages[0]
        rank 0 -> 1: send to 1 (tag 7), posted at 0 ns, received at 3 µs
        >>> [message.recv.post_ns for message in messages]
        [500]
    """

    src: Ints
    dst: Ints
    tag: Ints
    group: Ints
    payload: Ints
    stage: Ints
    microbatch: Ints
    send: Ints
    recv: Ints
    unmatched: Ints
    events: Events = field(init=False, repr=False)

    @property
    def early(self) -> Ints:
        """A mask of the messages that seem to have arrived before they were sent.

        For these messages, the clocks of the two ranks are not accurate enough to compare.
        """
        done_ns = self.events.done_ns[self.recv]
        early: Ints = (done_ns != NONE) & (done_ns < self.events.post_ns[self.send])
        return early

    def __len__(self) -> int:
        """Returns the number of messages."""
        return len(self.src)

    def __getitem__(self, index: SupportsIndex) -> Message:
        """Returns one message; a negative index counts from the end."""
        at = operator.index(index)
        send, recv = event_at(self.events, self.send[at]), event_at(self.events, self.recv[at])
        stage, microbatch = (
            None if value == NONE else int(value) for value in (self.stage[at], self.microbatch[at])
        )
        said = (send.tag, send.group, send.size_bytes, send.dtype, send.shape)
        return Message(int(self.src[at]), int(self.dst[at]), *said, stage, microbatch, send, recv)

    def __iter__(self) -> Iterator[Message]:
        """Yields each message."""
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True, repr=False)
class Unmatched:
    """One operation whose other side is missing; printing the operation shows a sentence.

    Attributes:
        index: the index of the operation among the events.
        rank: the rank that posted the operation.
        op: torch's name for the operation.
        peer: the global rank of the other side, or -2 for "from any source".
        group: the name of the group.
        tag: the tag of the message.
        size_bytes: the size of the message.
        file: the source file, or "" if unknown.
        line: the source line, or -1 if unknown.
        status: "ok", "in_flight" or "error".
    """

    index: int
    rank: int
    op: str
    peer: int
    group: str
    tag: int
    size_bytes: int
    file: str
    line: int
    status: str

    def __repr__(self) -> str:
        """Returns a sentence that describes the operation.

        For example ``rank 2: isend to 3 (ring:2>3, tag 7, 8 bytes) at ring.py:12 has no recv``.
        """
        sends = "send" in self.op
        peer = "any rank" if self.peer == ANY_SOURCE else str(self.peer)
        place = f" at {self.file}:{self.line}" if self.file else ""
        where = f"{self.group}, " if self.group else ""
        what = (
            f"{self.op} {'to' if sends else 'from'} {peer} ({where}tag {self.tag}, "
            f"{self.size_bytes} bytes){place}"
        )
        return f"rank {self.rank}: {what} has no {'recv' if sends else 'send'}"


def match(events: Events, *, by_tag: bool = True, apart: Ints | Sequence[int] = ()) -> Messages:
    """Matches sends with recvs.

    For each (group, source, destination, tag), the k-th send matches the k-th recv, in the order in
    which each rank posted them. A recv from any source stays unmatched until it is done, because
    only then is its source known. A refused operation never reached the wire, so it matches nothing
    and does not count as unmatched.

    Args:
        events: the events, in posting order as ``Events`` guarantees.
        by_tag: whether to compare tags; pass False for a backend that ignores them (NCCL).
        apart: the indices of operations to skip, because their other side was left out of the
            trace.

    Returns:
        The messages, which include the indices of the operations without a partner.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> send, recv = OP_CODES["isend"], OP_CODES["irecv"]
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0, 1],
        ...         "op": [send, send, recv],
        ...         "group": [0, 0, 0],
        ...         "peer": [1, 1, 0],
        ...         "tag": [7, 9, 9],
        ...     }
        ... )
        >>> messages = match(events)
        >>> messages.send.tolist(), messages.recv.tolist(), messages.unmatched.tolist()
        ([1], [2], [0])
    """
    kind = np.where(refused(events), NONE, events.kind)
    kind[np.asarray(apart, dtype=np.int64)] = NONE
    alone = (kind == SEND) | (kind == RECV)
    both = np.flatnonzero((kind == SEND) | (kind == RECV) & (events.peer >= 0))
    sends = kind[both] == SEND
    channel = number_channels(events, both, by_tag=by_tag)
    place = number_places(2 * channel + sends)
    name = channel * (len(both) + 1) + place  # equal for a send and a recv that match
    _, send_at, recv_at = np.intersect1d(
        name[sends], name[~sends], assume_unique=True, return_indices=True
    )
    send, recv = both[sends][send_at], both[~sends][recv_at]
    alone[send] = alone[recv] = False

    by_time = np.lexsort((send, events.post_ns[send]))
    send, recv = send[by_time], recv[by_time]
    stage, microbatch = (
        np.where(column[send] != NONE, column[send], column[recv])
        for column in (events.stage, events.microbatch)
    )
    sent = events.tag[send], events.group[send], events.payload[send]
    messages = Messages(
        events.rank[send],
        events.rank[recv],
        *sent,
        stage,
        microbatch,
        send,
        recv,
        np.flatnonzero(alone),
    )
    object.__setattr__(messages, "events", events)  # the class is frozen
    return messages


def describe_unmatched(events: Events, indices: Ints) -> list[Unmatched]:
    """Describes the operations at these indices, which have no partner, in readable form."""
    found = []
    for index in indices.tolist():
        one = as_operation(event_at(events, index), peer=int(events.peer[index]))
        what = one.rank, one.op, one.peer, one.group, one.tag, one.size_bytes
        found.append(Unmatched(index, *what, one.file, one.line, one.status))
    return found


def number_channels(events: Events, some: Ints, *, by_tag: bool = True) -> Ints:
    """Numbers the channels of messages: their group, source, destination and tag.

    A send and its recv are on the same channel.
    """
    sends, rank, peer = events.kind[some] == SEND, events.rank[some], events.peer[some]
    return number_rows(
        events.group[some],
        np.where(sends, rank, peer),
        np.where(sends, peer, rank),
        events.tag[some] if by_tag else None,
    )


def number_rows(*columns: Ints | None) -> Ints:
    """Numbers the distinct rows of ``columns`` from 0 (int64); skips columns that are None.

    Example:
        >>> import numpy as np
        >>> number_rows(np.array([5, 5, 2]), np.array([1, 1, 1])).tolist()
        [1, 1, 0]
    """
    key = np.zeros(0, dtype=np.int64)
    for column in columns:
        if column is None:
            continue
        codes = _number_values(column)
        if len(key) == 0:
            key = codes
        else:  # the product cannot overflow, because both factors are at most the number of rows
            key = _number_values(key * (codes.max(initial=0) + 1) + codes)
    return key


def _number_values(column: Ints) -> Ints:
    """Numbers the distinct values of a column from 0, in ascending order (int64)."""
    if column.dtype.kind != "U":  # a lookup in a short table is cheaper than sorting
        least, most = int(column.min(initial=0)), int(column.max(initial=0))
        if most - least <= 4 * len(column):
            offset = column.astype(np.int64) - least
            found = np.zeros(most - least + 1, dtype=np.int64)
            found[offset] = 1
            return (np.cumsum(found) - 1)[offset]
    return np.unique(column, return_inverse=True)[1].astype(np.int64)


def count_alike(*columns: Ints) -> Iterator[tuple[int, int]]:
    """Yields the first index and the number of each of the distinct rows.

    Example:
        >>> list(count_alike(np.array([5, 5, 2]), np.array([1, 1, 1])))
        [(2, 1), (0, 2)]
    """
    _, first, times = np.unique(number_rows(*columns), return_index=True, return_counts=True)
    return zip(first.tolist(), times.tolist(), strict=True)


def refused(events: Events) -> Ints:
    """Returns a mask of the operations that raised an error when they were posted.

    These operations never reached the wire, so they match nothing.
    """
    mask: Ints = events.communicates & (events.status == ERROR) & (events.wait_ns == NONE)
    return mask


@dataclass(frozen=True, eq=False)
class Waits:
    """The time that each event was blocked, split by cause.

    Each column is an int64 array in ns with one row per event. For a matched operation that is
    done, ``late_sender_ns + late_receiver_ns + transfer_ns == blocked_ns``. For operations without
    a partner, collectives, spans and marks, the three columns by cause are 0, because matching does
    not show why these events waited.

    Attributes:
        blocked_ns: the time from wait to done, or -1 if the event is not done or the program did
            not wait for it.
        late_sender_ns: for a recv, how long it was blocked before its send was posted.
        late_receiver_ns: for a send, how long it was blocked before its recv was posted.
        transfer_ns: the rest of the blocked time, or 0 if the event is not done.
    """

    blocked_ns: Ints
    late_sender_ns: Ints
    late_receiver_ns: Ints
    transfer_ns: Ints


def split_waits(events: Events, messages: Messages) -> Waits:
    """Splits every event's blocked time by cause.

    Args:
        events: the events.
        messages: the messages, as ``match(events)`` returns them.

    Returns:
        The blocked time of each event and its parts.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.matching import match
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "peer": [1, 0],
        ...         "group": [0, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [500, 100],
        ...         "wait_ns": [500, 100],
        ...         "done_ns": [900, 950],
        ...     }
        ... )
        >>> waits = split_waits(events, match(events))
        >>> (
        ...     waits.late_sender_ns.tolist(),
        ...     waits.transfer_ns.tolist(),
        ... )  # rank 1 waited 400 ns for rank 0 to begin
        ([0, 400], [400, 450])

    Source:
        Scalasca's wait states "late sender" and "late receiver"; see the module docstring.
    """
    waited = events.wait_ns != NONE
    blocked = np.where(
        waited & (events.done_ns != NONE), np.maximum(events.done_ns - events.wait_ns, 0), NONE
    )
    late_sender, late_receiver, transfer = np.zeros((3, len(events)), dtype=np.int64)
    late_sender[messages.recv] = _late(events, messages.recv, messages.send)
    late_receiver[messages.send] = _late(events, messages.send, messages.recv)
    matched = np.concatenate([messages.send, messages.recv])
    transfer[matched] = np.maximum(
        blocked[matched] - late_sender[matched] - late_receiver[matched], 0
    )
    return Waits(blocked, late_sender, late_receiver, transfer)


def _late(events: Events, waiter: Ints, partner: Ints) -> Ints:
    """Returns the ns that each ``waiter`` was blocked before its ``partner`` was posted.

    The waiters need not be done.
    """
    wait, done = events.wait_ns[waiter], events.done_ns[waiter]
    posted = events.post_ns[partner]
    until = np.where(done == NONE, posted, np.minimum(posted, done))
    return np.where(wait == NONE, 0, np.maximum(until - wait, 0))


@dataclass(frozen=True, eq=False)
class CollectiveCalls:
    """The collectives in a run, grouped into calls.

    Attributes:
        event: the index of each collective among the events (int64).
        call: the number of the call that each collective belongs to (int64).
        place: the index of each collective among those that its rank posted on the group (int64).
        last: for each call, the event that was posted last (int64).
        complete: for each call, whether every member of the group takes part (bool).
    """

    event: Ints
    call: Ints
    place: Ints
    last: Ints
    complete: Ints

    @classmethod
    def of(cls, events: Events, apart: Ints | Sequence[int] = ()) -> Self:
        """Groups the collectives in a run into calls.

        ``apart`` holds the indices of operations to skip, because other parts of their calls were
        left out of the trace.

        Example:
            >>> from ringsim.traces.events import OP_CODES, Group, Tables, make_events
            >>> barrier = {
            ...     "rank": [0, 0, 1],
            ...     "op": [OP_CODES["barrier"]] * 3,
            ...     "group": [0] * 3,
            ...     "post_ns": [1, 5, 2],
            ... }
            >>> calls = CollectiveCalls.of(
            ...     make_events(barrier, Tables(groups=(Group("world", (0, 1)),)))
            ... )
            >>> calls.call.tolist(), calls.last.tolist(), calls.complete.tolist()
            ([0, 1, 0], [2, 1], [True, False])
            >>> calls.call_of(2), calls.events_of(0)
            (0, (0, 2))
        """
        takes_part = (events.kind == COLLECTIVE) & (events.group != NONE) & ~refused(events)
        takes_part[np.asarray(apart, dtype=np.int64)] = False
        event = np.flatnonzero(takes_part)
        place = number_places(number_rows(events.group[event], events.rank[event]))
        call = number_rows(events.group[event], place)
        number = int(call.max(initial=-1)) + 1
        last = np.zeros(number, dtype=np.int64)
        order = np.argsort(events.post_ns[event], kind="stable")
        last[call[order]] = event[order]
        sizes = np.array([len(group.ranks) for group in events.tables.groups], dtype=np.int64)
        return cls(
            event,
            call,
            place,
            last,
            np.bincount(call, minlength=number) >= sizes[events.group[last]],
        )

    def call_of(self, event: int) -> int:
        """Returns the number of the call that an event belongs to, or -1 if it belongs to none."""
        at = int(np.searchsorted(self.event, event))
        return int(self.call[at]) if at < len(self.event) and self.event[at] == event else NONE

    def events_of(self, call: int) -> tuple[int, ...]:
        """Returns the indices of the events in a call, in ascending order."""
        order, starts = self._by_call
        return tuple(self.event[order[starts[call] : starts[call + 1]]].tolist())

    @cached_property
    def _by_call(self) -> tuple[Ints, Ints]:
        """Returns the events sorted by call, and the position of each call's first event."""
        order = np.argsort(self.call, kind="stable")
        return order, np.searchsorted(self.call[order], np.arange(len(self.last) + 1))


def wait_for_last(events: Events, apart: Ints | Sequence[int] = ()) -> Ints:
    """Returns the time, in ns, that each collective was blocked before the last rank called it.

    The result is 0 for other events, and for calls that some members of the group never made.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group, Tables, make_events
        >>> barrier = {
        ...     "rank": [0, 1],
        ...     "op": [OP_CODES["barrier"]] * 2,
        ...     "group": [0] * 2,
        ...     "post_ns": [1, 5],
        ...     "wait_ns": [2, 5],
        ...     "done_ns": [9, 9],
        ... }
        >>> wait_for_last(make_events(barrier, Tables(groups=(Group("world", (0, 1)),)))).tolist()
        [3, 0]
    """
    calls = CollectiveCalls.of(events, apart)
    known = calls.complete[calls.call] & (events.done_ns[calls.event] != NONE)
    mine, last = calls.event[known], calls.last[calls.call[known]]
    length = np.zeros(len(events), dtype=np.int64)
    length[mine] = _late(events, mine, last)
    return length
