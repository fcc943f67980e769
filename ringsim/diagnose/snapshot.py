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

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    OP_NAMES,
    RECORD,
    RECV,
    SEND,
    STATUS_NAMES,
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
from ringsim.traces.matching import CollectiveCalls, number_rows, refused

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
_ABLE = ("unknown", "running")  # states in a finished trace that the events refine


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
        self.groups = 0  # number of its known groups
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
        for thread in np.unique(records["thread"]).tolist():
            self._last[thread] = max(
                self._last.get(thread, NONE), int(slots[records["thread"] == thread].max())
            )
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
        mask: Ints = (
            (records["status"] == IN_FLIGHT)
            & (records["wait_ns"] != NONE)
            & (records["done_ns"] == NONE)
        )
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
        self._dropped: dict[tuple[int, ...], int] = {}

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
        its = self._ranks[rank]
        for number, group in itertools.islice(names["group"].items(), its.groups, None):
            if number not in fresh:
                self.used_before.add(self.number_group(group))
        its.groups = len(names["group"])
        from_any = records["group"][
            (records["peer"] == ANY_SOURCE) & (OP_KINDS[records["op"]] == RECV)
        ]
        self.from_any |= {(group, rank) for group in np.unique(from_any).tolist()}
        its.add(slots, records)

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
        columns = {
            name: records[name] for name in RECORD.names or () if name not in ("thread", "label")
        } | more
        columns["rank"] = np.repeat(np.arange(len(by_rank)), [len(its) for its in by_rank])
        columns["thread"] = number_rows(records["thread"])
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
        last = _last_of_gone(self._as_events([its.latest for its in self._ranks]), ends)
        return _make_snapshot(
            events,
            ends,
            events.status == IN_FLIGHT,
            np.concatenate(awaited),
            at_ns,
            self._dropped,
            last,
        )

    def count_dropped(self, events: Events, event: int) -> int:
        """Returns the number of dropped operations on the channel or group of an event.

        The dropped operations precede all kept operations.
        """
        return self._dropped.get(_channel_key(events, event), 0)

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
        for event, number in zip(*_count_rows(events, leaving), strict=True):
            key = _channel_key(events, event)
            self._dropped[key] = self._dropped.get(key, 0) + number
        start = 0
        for its in self._ranks:
            leaves = done[start : start + len(its.slots)].copy()
            start += len(its.slots)
            turned_down = np.flatnonzero(
                (its.records["status"] == ERROR) & (its.records["wait_ns"] == NONE)
            )
            leaves[turned_down[:-MOST_REFUSED]] = True
            its.keep(~leaves)


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
    recorded_ns = max(
        events.post_ns.max(initial=0), events.wait_ns.max(initial=0), events.done_ns.max(initial=0)
    )
    speaks = events.kind <= COLLECTIVE
    thread = events.rank.astype(np.int64) * (int(events.thread.max(initial=0)) + 1) + events.thread
    open_ops = speaks & ((events.status == IN_FLIGHT) | _broken_waits(events, speaks, thread))
    awaited = open_ops & (events.wait_ns != NONE)
    # one of its communicating threads does not wait
    awake = np.unique(events.rank[speaks & ~np.isin(thread, thread[awaited])])
    for rank in np.setdiff1d(events.rank[awaited], awake).tolist():
        if rank in known and known[rank].state in _ABLE:
            known[rank] = End("blocked")
    return _make_snapshot(
        events,
        known,
        open_ops,
        awaited,
        max(int(recorded_ns), end_ns or 0),
        {},
        _last_of_gone(events, known),
    )


def _last_of_gone(events: Events, ends: Mapping[int, End]) -> dict[int, Operation]:
    """Returns the last operation of each rank that is gone."""
    spoken = np.flatnonzero(events.kind <= COLLECTIVE)
    last = spoken[np.append(np.diff(events.rank[spoken]) != 0, True)[: len(spoken)]].tolist()
    return {
        int(events.rank[event]): operation_of(events, event)
        for event in last
        if ends.get(int(events.rank[event]), _UNKNOWN).state in GONE
    }


def _make_snapshot(
    events: Events,
    ends: Mapping[int, End],
    open_ops: Ints,
    awaited: Ints,
    last_ns: int,
    dropped: Mapping[tuple[int, ...], int],
    last: Mapping[int, Operation],
) -> Snapshot:
    """Returns a snapshot of events, given masks of the open and the awaited events.

    ``dropped`` counts the operations that are missing from the events.
    """
    index, counterparts, contested = _count_channels(events)
    kept = open_ops & (awaited | (counterparts <= index)) & (events.rank < len(ends))
    calls = CollectiveCalls.of(events)
    index[calls.event] = calls.place
    posted: list[list[OpenOperation]] = [[] for _ in ends]
    idle = [0 for _ in ends]
    # by call; one tuple for all ranks that wait in it
    entered: dict[int, tuple[Operation, ...]] = {NONE: ()}
    for event in np.flatnonzero(kept).tolist():
        rank = int(events.rank[event])
        idle[rank] += not awaited[event]
        if not awaited[event] and idle[rank] > MOST_POSTED:
            continue
        call = calls.call_of(event) if events.kind[event] == COLLECTIVE else NONE
        if call not in entered:
            entered[call] = tuple(operation_of(events, one) for one in calls.events_of(call))
        before = dropped.get(_channel_key(events, event), 0)
        posted[rank].append(
            OpenOperation(
                operation_of(events, event, last_ns),
                _group(events, event),
                awaited=bool(awaited[event]),
                index=int(index[event]) + before,
                counterparts=int(counterparts[event]) + (before if call == NONE else 0),
                contested=int(contested[event]),
                entered=entered[call],
                thread=int(events.thread[event]),
            )
        )
    raised = np.flatnonzero(refused(events) & (events.kind <= RECV))
    ranks = []
    for rank, end in ends.items():
        turned_down = []
        for one in raised[events.rank[raised] == rank][-MOST_REFUSED:].tolist():
            place = _place_of_refused(events, one) + dropped.get(_channel_key(events, one), 0)
            turned_down.append(
                OpenOperation(
                    operation_of(events, one), _group(events, one), awaited=False, index=place
                )
            )
        ranks.append(
            RankSnapshot(
                end.state,
                tuple(posted[rank]),
                end,
                tuple(turned_down),
                last.get(rank),
            )
        )
    return Snapshot(tuple(ranks))


def operation_of(events: Events, event: int, last_ns: int | None = None) -> Operation:
    """Returns an event as an operation.

    With ``last_ns``, the end of the trace, unfinished operations get their waiting time.
    """
    tables = events.tables
    payload = tables.payloads[events.payload[event]] if events.payload[event] != NONE else None
    wait_ns, done_ns = int(events.wait_ns[event]), int(events.done_ns[event])
    until = done_ns if done_ns != NONE else last_ns
    return Operation(
        rank=int(events.rank[event]),
        op=OP_NAMES[events.op[event]],
        peer=int(events.peer[event]),
        tag=int(events.tag[event]),
        group=_group(events, event).name,
        size_bytes=payload.size_bytes if payload else NONE,
        dtype=payload.dtype if payload else "",
        shape=payload.shape if payload else (),
        file=tables.files[events.file[event]] if events.file[event] != NONE else "",
        line=int(events.line[event]),
        status=STATUS_NAMES[events.status[event]],
        waited_s=max(until - wait_ns, 0) * 1e-9 if wait_ns != NONE and until is not None else 0.0,
    )


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
    latest_ns = np.maximum(np.maximum(events.post_ns, events.wait_ns), events.done_ns)
    if not (latest_ns > moment_ns).any():
        return events
    found = events.select(events.post_ns <= moment_ns)
    open_still = found.done_ns > moment_ns
    return replace(
        found,
        wait_ns=np.where(found.wait_ns > moment_ns, NONE, found.wait_ns),
        done_ns=np.where(open_still, NONE, found.done_ns),
        status=np.where(open_still, IN_FLIGHT, found.status).astype(found.status.dtype),
    )


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
    left = (events.kind <= COLLECTIVE) & (events.status == IN_FLIGHT)
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
    ended = (events.status == ERROR) & (events.kind <= COLLECTIVE) & (events.done_ns > given_up_ns)
    ended &= (events.wait_ns != NONE) & (events.wait_ns <= given_up_ns)
    if not ended.any():
        return events
    return replace(
        events,
        done_ns=np.where(ended, NONE, events.done_ns),
        status=np.where(ended, IN_FLIGHT, events.status).astype(events.status.dtype),
    )


def _without_groups(events: Events, ends: Mapping[int, End]) -> dict[int, End]:
    """Returns the ends of the ranks that have destroyed their process groups for good."""
    labels = [number for number, name in enumerate(events.tables.labels) if name in WORLD_LABELS]
    marks: list[int] = np.flatnonzero((events.op == _MARK) & np.isin(events.label, labels)).tolist()
    found = {}
    # the last one of each rank
    for rank, event in {int(events.rank[event]): event for event in marks}.items():
        if (
            events.tables.labels[events.label[event]] == DESTROYED
            and ends.get(rank, _UNKNOWN).state in _ABLE
        ):
            place = operation_of(events, event).place
            found[rank] = End(
                "exited", f"has destroyed its process groups{f' at {place}' if place else ''}"
            )
    return found


def _broken_waits(events: Events, speaks: Ints, thread: Ints) -> Ints:
    """Marks operations whose wait raised an error, if their thread then stayed silent."""
    mask: Ints = speaks & (events.status == ERROR) & (events.wait_ns != NONE)
    if mask.any():
        some = np.flatnonzero(speaks)
        _, place = np.unique(thread[some], return_inverse=True)
        latest = np.full(len(some), NONE, dtype=np.int64)
        np.maximum.at(latest, place, np.maximum(events.post_ns[some], events.wait_ns[some]))
        mask[some] &= events.wait_ns[some] >= latest[place]
    return mask


def _count_channels(events: Events) -> tuple[Ints, Ints, Ints]:
    """Numbers the sends and recvs of each channel, in columns with one row per event.

    Further columns count the operations on the other side, and the contested operations.
    """
    kind = events.kind
    index, counterparts, contested = np.zeros((3, len(events)), dtype=np.int64)
    sent = ~refused(events)
    sends = np.flatnonzero((kind == SEND) & (events.peer >= 0) & sent)
    recvs = np.flatnonzero((kind == RECV) & (events.peer >= 0) & sent)
    from_any = np.flatnonzero(
        (kind == RECV) & (events.peer == ANY_SOURCE) & sent & (events.status == IN_FLIGHT)
    )
    both = np.concatenate([sends, recvs])
    source = np.concatenate([events.rank[sends], events.peer[recvs]])
    target = np.concatenate([events.peer[sends], events.rank[recvs]])
    channel = number_rows(events.group[both], source, target, events.tag[both])
    count = int(channel.max(initial=-1)) + 1
    of_send, of_recv = channel[: len(sends)], channel[len(sends) :]
    index[sends], index[recvs] = number_places(of_send), number_places(of_recv)
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
    earlier: dict[tuple[int, int, int], int] = {}
    for event in from_any.tolist():
        rank, group, tag = int(events.rank[event]), int(events.group[event]), int(events.tag[event])
        fitting = (
            (events.peer[left] == rank) & (events.group[left] == group) & (events.tag[left] == tag)
        )
        fits, before = left[fitting], earlier.get((rank, group, tag), 0)
        counterparts[event] = max(len(fits) - before, 0)
        contested[event] = counterparts[event] - max(int((over[fitting] <= 0).sum()) - before, 0)
        contested[fits] += np.maximum(index[fits] + 1 - counterparts[fits], 0)
        counterparts[fits] = np.maximum(counterparts[fits], index[fits] + 1)
        beside = recvs[
            (events.rank[recvs] == rank)
            & (events.group[recvs] == group)
            & (events.tag[recvs] == tag)
        ]
        contested[beside] = np.minimum(contested[beside] + 1, counterparts[beside])
        earlier[rank, group, tag] = before + 1
    return index, counterparts, contested


def _place_of_refused(events: Events, event: int) -> int:
    """Returns the number of earlier operations on the channel of a refused operation."""
    same = [
        column[:event] == column[event]
        for column in (events.rank, events.kind, events.group, events.peer, events.tag)
    ]
    return int((np.logical_and.reduce(same) & ~refused(events)[:event]).sum())


def _count_later(channel: Ints, marked: Ints) -> Ints:
    """Counts, for each event, the marked events that come later on its channel."""
    order = np.argsort(channel, kind="stable")
    until = np.cumsum(marked[order])
    last = np.append(np.diff(channel[order]) != 0, True)[: len(order)]  # of each channel's run
    later = np.zeros(len(channel), dtype=np.int64)
    later[order] = np.repeat(until[last], np.diff(np.flatnonzero(last), prepend=-1)) - until
    return later


def _count_rows(events: Events, some: Ints) -> tuple[list[int], list[int]]:
    """Returns the first event and the number of events for each channel or group."""
    _, first, count = np.unique(
        number_channels(events, some), return_index=True, return_counts=True
    )
    return some[first].tolist(), count.tolist()


def number_channels(events: Events, some: Ints) -> Ints:
    """Numbers the channel of each message, separately for sends and recvs."""
    return number_rows(
        *(
            column[some]
            for column in (events.kind, events.group, events.rank, events.peer, events.tag)
        )
    )


def _group(events: Events, event: int) -> Group:
    group = int(events.group[event])
    return events.tables.groups[group] if group != NONE else _NO_GROUP


def _channel_key(events: Events, event: int) -> tuple[int, ...]:
    """Returns a key for the channel of a message, or for the group of a collective."""
    group, rank, peer = int(events.group[event]), int(events.rank[event]), int(events.peer[event])
    if events.kind[event] == COLLECTIVE:
        return (group,)
    return (
        group,
        *((rank, peer) if events.kind[event] == SEND else (peer, rank)),
        int(events.tag[event]),
    )


def _renumber(numbers: Ints, names: Mapping[int, Any], merged: dict[Any, int]) -> Ints:
    """Translates a rank's numbers into a merged table's, or into -1 if they have no name."""
    known, places = np.unique(numbers, return_inverse=True)
    found = [
        merged.setdefault(names[one], len(merged)) if one in names else NONE
        for one in known.tolist()
    ]
    return np.array(found, dtype=np.int32)[places]
