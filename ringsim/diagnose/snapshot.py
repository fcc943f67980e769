"""The open operations of every rank at one moment, and their possible matches.

A snapshot is made from events: the whole trace of a finished or simulated run, or the events that a
builder keeps from a live run. The builder reads batches as the ranks' parts grow. It drops pairs
that are done on both sides and only counts them, so the cost of a poll depends on the number of
open operations, not on the length of the run::

    channel 0 -> 1      [done][done][done][open]  [open]            sends
                        [done][done][done][open]                    recvs
                         dropped, counted  kept: the k-th matches the k-th, whatever was dropped
                                           from both sides

A recv from any source and a recv from a particular rank may get the same message if both are open
under the same tag. The record shows which recv got the message only after the recv from any source
is done. Until then, either may still get the message, unless the snapshot is *settled*: then no
message is in flight, so a rank that still waits did not get it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    DESTROYED,
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    OP_KINDS,
    RECORD,
    RECV,
    SEND,
    WORLD_LABELS,
    Events,
    Group,
    Ints,
    Payload,
    Tables,
    make_events,
    number_places,
)
from ringsim.traces.findings import EXIT_CODE, IN_VAIN, LEFT_BLOCK, LOST, End, Operation
from ringsim.traces.items import as_operation, event_at
from ringsim.traces.matching import (
    CollectiveCalls,
    count_alike,
    number_channels,
    number_rows,
    refused,
)

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

STATES = ("running", "blocked", "exited", "failed", "killed", "stopped", "unknown")
GONE = frozenset({"exited", "failed", "killed"})  # will post no more operations
# operations that a rank does not wait for: enough to find near matches
MOST_POSTED = 1000
MOST_REFUSED = 100  # refused operations of a rank
# messages that block their thread until they are done
BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")
_NO_GROUP = Group("", ())
_UNKNOWN = End("unknown")
_MARK = OP_CODES["mark"]
# words in files of version 0.2.0, which had no field for this
_OLD_WORDS = {
    "left with exit code": EXIT_CODE,
    "has left the recorded block": LEFT_BLOCK,
    "is lost: ": LOST,
    "and waited in vain on its way out": IN_VAIN,
}
ABLE = ("unknown", "running")  # states in a finished trace that the events refine


@dataclass(frozen=True)
class OpenOperation:
    """An operation that a rank has posted but not completed.

    Attributes:
        operation: the operation.
        group: the operation's group, with its members, because two groups may have the same name.
        awaited: whether the rank is blocked waiting for it; true for all operations of an awaited
            batch.
        index: its place, from 0, among its rank's sends (or recvs) on its channel (group, source,
            destination, tag), or among its rank's collectives on the group. 0 for a recv from any
            source.
        counterparts: the number of operations on the other side that may match this one or those
            before it on its channel. A send may also match its peer's open recvs from any source. A
            recv from any source may match each send that no recv has got for certain, less one for
            each such recv before it. Unused for collectives.
        contested: the number of ``counterparts`` that other recvs may have received instead,
            because it is unknown which message a recv from any source received.
        taken: whether other recvs received so many counterparts that none is left for this
            operation; set only if no message is in flight.
        thread: the number of the thread that posted it; a waiting thread does not block others.
        entered: for a collective, the operations that members posted as their ``index``-th
            collective on the group; missing members have posted no such operation. Members that
            share one tuple are examined together.
    """

    operation: Operation
    group: Group
    awaited: bool
    index: int = 0
    counterparts: int = 0
    entered: tuple[Operation, ...] = ()
    contested: int = 0
    taken: bool = False
    thread: int = 0

    @property
    def matched(self) -> bool:
        """Whether the message's other side is also known to be posted."""
        return self.counterparts > self.index and not self.taken

    @property
    def doubtful(self) -> bool:
        """Whether the operation is matched only if other recvs leave a message for it."""
        return self.matched and self.counterparts - self.contested <= self.index


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank at one moment.

    Attributes:
        state: one of ``STATES``. "blocked": all its threads wait, in its ``awaited`` operations or
            for each other. "exited": its worker has returned, or its process exited with code 0.
            "failed": it raised. "killed": its process died. In all other states, it can continue.
        posted: the operations that are posted but not done.
        end: further facts about the rank's end, or about its activity.
        refused: its latest messages that raised an error instead of being posted, each with the
            ``index`` that it would have had.
        last: the last operation that the rank posted, if it is gone.
    """

    state: str
    posted: tuple[OpenOperation, ...] = ()
    end: End = _UNKNOWN
    refused: tuple[OpenOperation, ...] = ()
    last: Operation | None = None

    @property
    def awaited(self) -> tuple[OpenOperation, ...]:
        """The operations in which the rank is blocked; empty if it is not blocked."""
        return tuple(one for one in self.posted if one.awaited) if self.state == "blocked" else ()

    @property
    def is_out(self) -> bool:
        """Whether the rank will post no more operations, whatever other ranks do.

        The rank is gone, or its threads wait for each other.
        """
        return self.state in GONE or (self.state == "blocked" and not self.awaited)

    @property
    def left_early(self) -> bool:
        """Whether the rank is known to have exited with code 0 before its worker returned."""
        left = self.end.how == EXIT_CODE or self.end.error == "SystemExit"
        return self.state == "exited" and left


@dataclass(frozen=True)
class Snapshot:
    """The state of all ranks at one moment."""

    ranks: tuple[RankSnapshot, ...]

    def settle(self) -> Snapshot:
        """Returns the snapshot under the assumption that no message is in flight.

        An operation that is awaited and ``doubtful`` is then ``taken``. If a rank awaits several
        operations together, as in a batch, any of the others may be the missing one, so they stay
        as they are.

        Example:
            >>> from ringsim.diagnose.waitfor import analyse
            >>> operation = Operation(rank=0, op="recv", peer=1, tag=0, group="world")
            >>> mine = OpenOperation(
            ...     operation, Group("world", (0, 1)), awaited=True, counterparts=1, contested=1
            ... )
            >>> snapshot = Snapshot((RankSnapshot("blocked", (mine,)), RankSnapshot("exited")))
            >>> analyse(snapshot) is None, analyse(snapshot.settle()).ranks
            (True, (0,))
        """
        ranks = []
        for rank in self.ranks:
            missing = [
                one for one in rank.posted if one.awaited and (one.doubtful or not one.matched)
            ]
            if len(missing) == 1 and missing[0].doubtful:
                rank = replace(
                    rank,
                    posted=tuple(
                        replace(one, taken=True) if one is missing[0] else one
                        for one in rank.posted
                    ),
                )
            ranks.append(rank)
        return Snapshot(tuple(ranks))


class Head(NamedTuple):
    """A rank's progress, and the slots of the operations that block it.

    If the heads of two polls are equal, nothing happened in between.
    """

    written: int
    open: int
    awaited: tuple[int, ...]


class RankRecords:
    """One rank's kept records.

    Args:
        last_kind: records of later kinds, such as MARK, are not kept.
    """

    def __init__(self, last_kind: int = COLLECTIVE) -> None:
        self._last_kind = last_kind
        self.slots: Ints = np.zeros(0, dtype=np.int64)
        self.records: Ints = np.zeros(0, dtype=RECORD)
        self.latest = self.records  # the last operation, even if it is no longer kept
        self.written = 0
        self._last: dict[int, int] = {}  # by thread, the slot of its latest record
        # as of the previous batch: earlier slots have been read since
        self._followed: dict[int, int] = {}

    def add(self, slots: Ints, records: Ints) -> None:
        """Adds new records, and replaces changed records."""
        self._followed = dict(self._last)
        place = np.searchsorted(self.slots, slots)
        known = place < len(self.slots)
        known[known] = self.slots[place[known]] == slots[known]
        self.records[place[known]] = records[known]
        slots, records = slots[~known], records[~known]
        self.written += len(slots)
        self._last |= dict(zip(records["thread"].tolist(), slots.tolist(), strict=True))
        operation = OP_KINDS[records["op"]] <= self._last_kind
        if operation.any():
            self.latest = records[operation][-1:].copy()
            self.slots = np.concatenate([self.slots, slots[operation]])
            self.records = np.concatenate([self.records, records[operation]])
            self.keep(np.argsort(self.slots))  # another thread may have filled a gap

    def keep(self, which: Ints) -> None:
        """Keeps only the given records."""
        self.slots, self.records = self.slots[which], self.records[which]

    @property
    def awaited(self) -> Ints:
        """Marks the operations in which the rank is blocked."""
        records = self.records
        mask: Ints = (records["status"] == IN_FLIGHT) & (records["done_ns"] == NONE)
        mask &= records["wait_ns"] != NONE
        return mask

    @property
    def settled(self) -> Ints:
        """Marks the operations that can no longer be refused.

        These operations are awaited, done, or followed by another operation of their thread.
        """
        records = self.records
        mask: Ints = (records["wait_ns"] != NONE) | (records["status"] != IN_FLIGHT)
        for thread, slot in self._followed.items():
            mask |= (records["thread"] == thread) & (self.slots < slot)
        return mask


class SnapshotBuilder:
    """Collects the operations of a live run, and takes snapshots of it.

    Args:
        world_size: the number of ranks.

    Attributes:
        used_before: the numbers of the groups with unrecorded operations.
        from_any: (group, rank) for each rank that has received from any source.
        elsewhere: the ranks on other machines, whose operations are unknown.
    """

    def __init__(self, world_size: int) -> None:
        self.used_before: set[int] = set()
        self.from_any: set[tuple[int, int]] = set()
        self.elsewhere: set[int] = set()
        self._ranks = [RankRecords() for _ in range(world_size)]
        self._numbers: dict[str, dict[Any, int]] = {"group": {}, "payload": {}, "file": {}}
        # pairs dropped by (group, source, destination, tag), calls by (group,)
        self._dropped = Counter[tuple[int, ...]]()

    def add(
        self,
        rank: int,
        slots: Ints,
        records: Ints,
        names: Mapping[str, Mapping[int, Any]],
        fresh: Collection[int],
    ) -> None:
        """Adds the records that a rank has written or changed since the last call.

        Args:
            rank: the rank that wrote them.
            slots: the slot of each record, ascending (int64).
            records: the records, an array of ``RECORD``.
            names: the groups, payloads and files of the records, by table and number.
            fresh: the numbers of the rank's groups on which every operation is recorded.
        """
        records = records.copy()
        for table, merged in self._numbers.items():
            records[table] = _renumber(records[table], names[table], merged)
        for number, group in names["group"].items():
            if number not in fresh:
                self.used_before.add(self.number_group(group))
        from_any = (records["peer"] == ANY_SOURCE) & (OP_KINDS[records["op"]] == RECV)
        self.from_any |= {(group, rank) for group in records["group"][from_any].tolist()}
        self._ranks[rank].add(slots, records)

    def number_group(self, group: Group) -> int:
        """Returns a group's number in the events."""
        return self._numbers["group"].setdefault(group, len(self._numbers["group"]))

    def head(self, rank: int) -> Head:
        """Returns a rank's progress."""
        its = self._ranks[rank]
        return Head(
            its.written,
            int((its.records["status"] == IN_FLIGHT).sum()),
            tuple(its.slots[its.awaited].tolist()),
        )

    def awaiting_threads(self, rank: int) -> set[int]:
        """Returns the ``threading.get_ident()`` of each thread blocked in an operation."""
        its = self._ranks[rank]
        return set(its.records["thread"][its.awaited].tolist())

    @property
    def open_bytes(self) -> int:
        """The number of bytes in flight, as far as known."""
        events = self.events()
        return int(np.maximum(events.size_bytes[events.status == IN_FLIGHT], 0).sum())

    def events(self) -> Events:
        """Returns the kept operations of all ranks."""
        return self._as_events(
            [its.records for its in self._ranks],
            seq=np.concatenate([its.slots for its in self._ranks]),
        )

    def _as_events(self, by_rank: list[Ints], **more: Ints) -> Events:
        records = np.concatenate(by_rank)
        columns: dict[str, Any] = {name: records[name] for name in RECORD.names or ()} | more
        columns["rank"] = np.repeat(np.arange(len(by_rank)), [len(its) for its in by_rank])
        columns |= {"thread": number_rows(records["thread"]), "label": NONE}
        groups: dict[Group, int] = self._numbers["group"]
        payloads: dict[Payload, int] = self._numbers["payload"]
        return make_events(
            columns, Tables(tuple(groups), tuple(payloads), (), tuple(self._numbers["file"]))
        )

    def settled(self, ended: Collection[int] = ()) -> Ints:
        """Marks the events that can no longer be refused, such as those of ``ended`` ranks."""
        return np.concatenate(
            [its.settled | (rank in ended) for rank, its in enumerate(self._ranks)]
        )

    def build(self, states: Sequence[str], at_ns: int) -> Snapshot:
        """Returns a snapshot of the open operations, with their possible matches.

        Args:
            states: the state of each rank; "running" becomes "blocked" if the rank waits.
            at_ns: the time of the snapshot, on CLOCK_MONOTONIC.
        """
        events, awaited = self.events(), [its.awaited for its in self._ranks]
        ends = {
            rank: End("blocked" if state == "running" and its.any() else state)
            for rank, (state, its) in enumerate(zip(states, awaited, strict=True))
        }
        return _make_snapshot(
            events,
            ends,
            events.status == IN_FLIGHT,
            np.concatenate(awaited),
            at_ns,
            self._dropped,
            latest=self._as_events([its.latest for its in self._ranks]),
        )

    def count_dropped(self, events: Events, event: int) -> int:
        """Returns the number of dropped operations on the channel or group of an event.

        The dropped operations precede all kept operations.
        """
        return self._dropped[_channel_key(events, event)]

    def drop(self, events: Events, calls: CollectiveCalls, done: Ints) -> None:
        """Drops operations that are no longer needed, and counts them.

        Args:
            events: the result of ``events``, with nothing added since.
            calls: the collectives among the events.
            done: a mask of the operations to drop. They must be pairs of a send and its recv, or
                calls with all members, and the earliest on their channel or group.
        """
        # one for each pair or call
        leaving = np.concatenate(
            [np.flatnonzero(done & (events.kind == SEND)), calls.last[done[calls.last]]]
        )
        channel = number_channels(events, leaving)
        for first, number in count_alike(events.kind[leaving], channel):
            self._dropped[_channel_key(events, leaving[first])] += number
        turned_down = refused(events)
        many = _count_later(events.rank, turned_down) >= MOST_REFUSED
        kept = ~(done | (turned_down & many))
        ends = np.cumsum([len(its.slots) for its in self._ranks])
        for its, mine in zip(self._ranks, np.split(kept, ends[:-1]), strict=True):
            its.keep(mine)


def snapshot_of_events(
    events: Events,
    world_size: int,
    ends: Mapping[int, tuple[str, str] | End] | None = None,
    *,
    end_ns: int | None = None,
) -> Snapshot:
    """Returns a snapshot of the end of a finished, failed or loaded trace.

    If the last operation of a thread ended with an error while the rank waited for it, the
    operation still counts as awaited, because the wait would not have ended by itself.

    Args:
        events: the recorded events.
        world_size: the number of ranks, including ranks without an event.
        ends: the known ends by rank, as returned by ``read_ends``; for other ranks, and for ranks
            that were "running", the events show whether they are blocked.
        end_ns: the end of the waiting; by default, the last recorded time.

    Example:
        >>> from ringsim.diagnose.waitfor import analyse
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["recv"]] * 2,
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "wait_ns": [5, 5],
        ...         "post_ns": [5, 5],
        ...         "status": [IN_FLIGHT] * 2,
        ...     }
        ... )
        >>> analyse(snapshot_of_events(events, 2)).cycle
        (0, 1)
    """
    known = dict.fromkeys(range(world_size), _UNKNOWN) | {
        rank: End(*end) for rank, end in (ends or {}).items()
    }
    known |= _without_groups(events, known)
    speaks = events.communicates
    thread = number_rows(events.rank, events.thread)
    open_ops = speaks & ((events.status == IN_FLIGHT) | _broken_waits(events, speaks, thread))
    awaited = open_ops & (events.wait_ns != NONE)
    # one of its communicating threads does not wait
    awake = events.rank[speaks & ~np.isin(thread, thread[awaited])]
    for rank in np.setdiff1d(events.rank[awaited], awake).tolist():
        if known[rank].state in ABLE:
            known[rank] = End("blocked")
    return _make_snapshot(
        events,
        known,
        open_ops,
        awaited,
        max(int(events.last_ns.max(initial=0)), end_ns or 0),
        Counter(),
        latest=events,
    )


def _make_snapshot(
    events: Events,
    ends: Mapping[int, End],
    open_ops: Ints,
    awaited: Ints,
    last_ns: int,
    dropped: Counter[tuple[int, ...]],
    latest: Events,
) -> Snapshot:
    """Returns a snapshot of events, given masks of the open and the awaited events.

    ``dropped`` counts the operations that are missing from the events, and ``latest`` contains each
    rank's last operation.
    """
    index, counterparts, contested = _count_channels(events)
    kept = open_ops & (awaited | (counterparts <= index))
    calls = CollectiveCalls.of(events)
    index[calls.event] = calls.place
    posted: list[list[OpenOperation]] = [[] for _ in ends]
    idle = [0 for _ in ends]

    @cache  # one tuple for all ranks that wait in a call
    def enter(call: int) -> tuple[Operation, ...]:
        return tuple(operation_of(events, one) for one in calls.events_of(call))

    for event in np.flatnonzero(kept).tolist():
        rank = int(events.rank[event])
        idle[rank] += not awaited[event]
        if not awaited[event] and idle[rank] > MOST_POSTED:
            continue
        call = calls.call_of(event)
        before = dropped[_channel_key(events, event)]
        posted[rank].append(
            OpenOperation(
                operation_of(events, event, last_ns),
                _group(events, event),
                awaited=bool(awaited[event]),
                index=int(index[event]) + before,
                counterparts=int(counterparts[event]) + (before if call == NONE else 0),
                contested=int(contested[event]),
                entered=enter(call) if call != NONE else (),
                thread=int(events.thread[event]),
            )
        )
    raised = np.flatnonzero(refused(events) & (events.kind <= RECV))
    spoken = np.flatnonzero(latest.communicates)
    last = dict(zip(latest.rank[spoken].tolist(), spoken.tolist(), strict=True))
    ranks = []
    for rank, end in ends.items():
        turned_down = tuple(
            OpenOperation(
                operation_of(events, one),
                _group(events, one),
                awaited=False,
                index=int(index[one]) + dropped[_channel_key(events, one)],
            )
            for one in raised[events.rank[raised] == rank][-MOST_REFUSED:].tolist()
        )
        gone = end.state in GONE and rank in last
        said = operation_of(latest, last[rank]) if gone else None
        ranks.append(RankSnapshot(end.state, tuple(posted[rank]), end, turned_down, said))
    return Snapshot(tuple(ranks))


def operation_of(events: Events, event: int, last_ns: int | None = None) -> Operation:
    """Returns an event as an operation.

    With ``last_ns``, the end of the trace, unfinished operations get their waiting time.
    """
    one, waited_s = event_at(events, event), 0.0
    ended_ns = one.done_ns if one.done_ns is not None else last_ns
    if one.wait_ns is not None and ended_ns is not None:
        waited_s = max(ended_ns - one.wait_ns, 0) * 1e-9
    return as_operation(one, peer=int(events.peer[event]), waited_s=waited_s)


def read_ends(metadata: Mapping[str, Any], world_size: int) -> dict[int, End]:
    """Reads how the ranks ended from a trace's metadata.

    The metadata may come from an untrusted file, so invalid entries are ignored.
    ``metadata["ends"]`` is a list of ``{"rank": 2, "state": "failed", "about": "raised ValueError:
    ...", "error": "ValueError", "at_ns": 70_000}``, some with "how". A rank that was ended from
    outside is "running" or "stopped", and ``about`` describes its activity. A rank has no entry if
    its error only follows from another rank's error.

    Example:
        >>> read_ends(
        ...     {
        ...         "ends": [
        ...             {"rank": 1, "state": "failed", "at_ns": 70},
        ...             {"rank": 9, "state": "exited"},
        ...         ]
        ...     },
        ...     2,
        ... )
        {1: End(state='failed', about='', at_ns=70, error='', how='')}
    """
    said = metadata.get("ends")
    ends = {}
    for entry in said if isinstance(said, list) else ():
        if not isinstance(entry, dict):
            continue
        rank, at_ns = entry.get("rank"), entry.get("at_ns")
        state, about, error = (entry.get(key, "") for key in ("state", "about", "error"))
        if (
            type(rank) is int
            and 0 <= rank < world_size
            and state in STATES
            and isinstance(about, str)
        ):
            old = (how for words, how in _OLD_WORDS.items() if words in about)
            how = str(entry["how"]) if "how" in entry else next(old, "")
            ends[rank] = End(state, about, at_ns if type(at_ns) is int else None, str(error), how)
    return ends


def read_end_ns(metadata: Mapping[str, Any]) -> int | None:
    """Returns the time when all waiting ended, in ns from the start of the run.

    This is the time of the decision to end the ranks, or the end of the run.

    Example:
        >>> (
        ...     read_end_ns({"given_up_ns": 7, "end_ns": 9}),
        ...     read_end_ns({"end_ns": 9}),
        ...     read_end_ns({"end_ns": "soon"}),
        ... )
        (7, 9, None)
    """
    said = metadata.get("given_up_ns", metadata.get("end_ns"))
    return said if type(said) is int and 0 <= said < 2**63 else None


def until(events: Events, moment_ns: int) -> Events:
    """Returns the events in the state that they had at a given time.

    Later posts are left out, and operations that ended later are still in flight. After a rank is
    woken from an endless wait, it may catch the error, return, or try again, but that does not
    explain the wait.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0],
        ...         "op": [OP_CODES["recv"]] * 2,
        ...         "post_ns": [1, 9],
        ...         "wait_ns": [2, 9],
        ...         "done_ns": [8, 9],
        ...         "status": [ERROR, OK],
        ...     }
        ... )
        >>> before = until(events, 7)
        >>> before.wait_ns.tolist(), before.done_ns.tolist(), before.status.tolist() == [IN_FLIGHT]
        ([2], [-1], True)
    """
    found = events.select(events.post_ns <= moment_ns)
    found = replace(found, wait_ns=np.where(found.wait_ns > moment_ns, NONE, found.wait_ns))
    return _open_again(found, found.done_ns > moment_ns)


def _open_again(events: Events, some: Ints) -> Events:
    """Returns the events, of which those marked are still in flight."""
    return replace(
        events,
        done_ns=np.where(some, NONE, events.done_ns),
        status=np.where(some, IN_FLIGHT, events.status),
    )


def is_on_nccl(trace: Trace) -> bool:
    """Returns whether a run used NCCL, whose operations wait on GPUs instead of in the program."""
    return trace.metadata.get("backend") == "nccl"


def leave_out_queued(events: Events) -> Events:
    """Returns the events of an NCCL run without operations that have not begun on their GPU.

    ``wait()`` has returned, so the order on the GPU is taken from the record. The first operation
    of a rank that has not ended, with its batch (the same ``wait_ns``), is what the rank's GPU
    waits for. Open operations posted later count as not posted, in either direction: NCCL would
    have completed a message that both sides had begun. Tags are removed, because NCCL ignores them.

    Example:
        >>> recv, send = OP_CODES["irecv"], OP_CODES["isend"]
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0, 0, 1],
        ...         "op": [recv, send, send, recv],
        ...         "peer": [1, 1, 1, 0],
        ...         "post_ns": [1, 2, 6, 7],
        ...         "wait_ns": [5, 5, 7, 8],
        ...         "status": [IN_FLIGHT] * 4,
        ...     }
        ... )
        >>> leave_out_queued(events).post_ns.tolist()
        [1, 2, 7]
    """
    left = events.communicates & (events.status == IN_FLIGHT)
    waits = left & (events.wait_ns != NONE)
    for column, differs in ((events.post_ns, np.greater), (events.wait_ns, np.not_equal)):
        first = np.full(int(events.rank.max(initial=0)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, events.rank[waits], column[waits])
        left &= differs(column, first[events.rank])
    found = events.select(~left)
    return replace(found, tag=np.full_like(found.tag, NONE))


def reopen(events: Events, metadata: Mapping[str, Any]) -> Events:
    """Returns the events, in which operations that were ended by a verdict are still in flight.

    ringsim ends stuck operations with an error after it has decided that they can never finish.
    Pictures show them as stuck, because they did not fail themselves.
    """
    if type(given_up_ns := metadata.get("given_up_ns")) is not int:
        return events
    ended = (events.status == ERROR) & events.communicates & (events.done_ns > given_up_ns)
    ended &= (events.wait_ns != NONE) & (events.wait_ns <= given_up_ns)
    return _open_again(events, ended)


def _without_groups(events: Events, ends: Mapping[int, End]) -> dict[int, End]:
    """Returns the ends of the ranks that have destroyed their process groups for good."""
    labels = [number for number, name in enumerate(events.tables.labels) if name in WORLD_LABELS]
    marks = np.flatnonzero((events.op == _MARK) & np.isin(events.label, labels))
    last = dict(zip(events.rank[marks].tolist(), marks.tolist(), strict=True))
    found = {}
    for rank, event in last.items():
        one = event_at(events, event)
        if one.label == DESTROYED and ends[rank].state in ABLE:
            place = as_operation(one).place
            about = f"has destroyed its process groups{f' at {place}' if place else ''}"
            found[rank] = End("exited", about)
    return found


def _broken_waits(events: Events, speaks: Ints, thread: Ints) -> Ints:
    """Marks operations whose wait raised an error, if their thread then stayed silent."""
    latest = np.full(len(events), NONE, dtype=np.int64)
    np.maximum.at(latest, thread[speaks], np.maximum(events.post_ns, events.wait_ns)[speaks])
    mask: Ints = speaks & (events.status == ERROR) & (events.wait_ns != NONE)
    mask &= events.wait_ns >= latest[thread]
    return mask


def _count_channels(events: Events) -> tuple[Ints, Ints, Ints]:
    """Numbers the sends and recvs of each channel, in columns with one row per event.

    Further columns count the operations on the other side, and the contested operations.
    """
    kind = events.kind
    index, counterparts, contested = np.zeros((3, len(events)), dtype=np.int64)
    sent = ~refused(events)
    some = np.flatnonzero((kind <= RECV) & (events.peer >= 0))
    side = number_rows(kind[some], number_channels(events, some))
    # backwards, later means earlier
    index[some] = _count_later(side[::-1], sent[some][::-1])[::-1]
    sends = np.flatnonzero((kind == SEND) & (events.peer >= 0) & sent)
    recvs = np.flatnonzero((kind == RECV) & (events.peer >= 0) & sent)
    from_any = np.flatnonzero(
        (kind == RECV) & (events.peer == ANY_SOURCE) & sent & (events.status == IN_FLIGHT)
    )
    channel = number_channels(events, np.concatenate([sends, recvs]))
    count = int(channel.max(initial=-1)) + 1
    of_send, of_recv = channel[: len(sends)], channel[len(sends) :]
    counterparts[sends] = np.bincount(of_recv, minlength=count)[of_send]
    counterparts[recvs] = np.bincount(of_send, minlength=count)[of_recv]
    # A later recv that is done was from any source, or no thread has waited for the earlier one.
    done = events.status[recvs] == OK
    contested[recvs] = np.minimum(_count_later(of_recv, done), counterparts[recvs])
    # A recv from any source may take any remaining send, or one that an open recv from one rank
    # leaves. Which one is unknown until it is done. Each needs its own.
    spare = np.bincount(of_recv[events.status[recvs] == IN_FLIGHT], minlength=count)
    # if this is not positive, none of the recvs from this rank can match it
    over = counterparts[sends] - index[sends]
    left, over = sends[over <= spare[of_send]], over[over <= spare[of_send]]
    target = np.where(kind == SEND, events.peer, events.rank)
    inbox = number_rows(events.group, target, events.tag)
    earlier = number_places(inbox[from_any])
    for event, before in zip(from_any.tolist(), earlier.tolist(), strict=True):
        fitting = inbox[left] == inbox[event]
        fits = left[fitting]
        counterparts[event] = max(len(fits) - before, 0)
        contested[event] = counterparts[event] - max(int((over[fitting] <= 0).sum()) - before, 0)
        contested[fits] += np.maximum(index[fits] + 1 - counterparts[fits], 0)
        counterparts[fits] = np.maximum(counterparts[fits], index[fits] + 1)
        beside = recvs[inbox[recvs] == inbox[event]]
        contested[beside] = np.minimum(contested[beside] + 1, counterparts[beside])
    return index, counterparts, contested


def _count_later(channel: Ints, marked: Ints) -> Ints:
    """Counts, for each event, the marked events that come later on its channel."""
    order = np.argsort(channel, kind="stable")
    up_to = np.cumsum(np.bincount(channel, marked))  # the marked events up to each channel
    later = np.zeros(len(channel), dtype=np.int64)
    later[order] = up_to[channel[order]] - np.cumsum(marked[order])
    return later


def _group(events: Events, event: int) -> Group:
    group = int(events.group[event])
    return events.tables.groups[group] if group != NONE else _NO_GROUP


def _channel_key(events: Events, event: int) -> tuple[int, ...]:
    """Returns a key for the channel of a message, or for the group of a collective."""
    columns: tuple[Ints, ...] = (events.group, events.rank, events.peer, events.tag)
    if events.kind[event] == RECV:
        columns = (events.group, events.peer, events.rank, events.tag)
    if events.kind[event] == COLLECTIVE:
        columns = columns[:1]
    return tuple(int(column[event]) for column in columns)


def _renumber(numbers: Ints, names: Mapping[int, Any], merged: dict[Any, int]) -> Ints:
    """Translates a rank's numbers into a merged table's, or into -1 if they have no name."""
    known, places = np.unique(numbers, return_inverse=True)
    found = [
        merged.setdefault(names[one], len(merged)) if one in names else NONE
        for one in known.tolist()
    ]
    return np.array(found, dtype=np.int32)[places]
