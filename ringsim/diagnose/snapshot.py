"""The ranks at the last moment of a trace: what each had posted that was not done, and how it ended.

What the records leave open of recvs from any source, settled for the moments at which nothing is on its way.

A recv from any source and one from a particular rank, both open under one tag, may get the same message, and so may a send have either as
its other side. Who it was is not in the records before the one from any source is done, so ``analyse`` lets each of them hope. Where it is
known from elsewhere that nothing is on its way any more, hope is over: an operation that is still awaited has not got it. Of several that
a rank awaits at once, as those of a batch under one handle, any other may be what is missing: then hope stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ringsim.diagnose.waitfor import STATES, Posted, RankSnapshot, Snapshot
from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    DESTROYED,
    ERROR,
    IN_FLIGHT,
    MADE_ANEW,
    NONE,
    OK,
    OP_CODES,
    OP_NAMES,
    RECV,
    SEND,
    STATUS_NAMES,
    Events,
    Group,
    Ints,
)
from ringsim.traces.findings import Operation
from ringsim.traces.matching import CollectiveCalls, number_places, number_rows, refused

__all__ = [
    "MOST_POSTED",
    "MOST_REFUSED",
    "doubt",
    "operation_of",
    "read_end_ns",
    "read_end_times",
    "read_ends",
    "snapshot_of_events",
    "until",
]

MOST_POSTED: Final = 1000  # operations of a rank that nobody waits for which a world holds: enough to find what nearly fits
MOST_REFUSED: Final = 100  # operations of a rank that were refused which a world holds
_NO_GROUP: Final = Group("", ())
_MARK: Final = OP_CODES["mark"]
_UNKNOWN: Final = ("unknown", "")
_ABLE: Final = ("unknown", "running")  # states of which the events tell more


def snapshot_of_events(
    events: Events,
    world_size: int,
    ends: Mapping[int, tuple[str, str]] | None = None,
    *,
    end_ns: int | None = None,
    ended_ns: Mapping[int, int] | None = None,
) -> Snapshot:
    """Makes the world of the last moment of a trace, finished, failed or loaded.

    An operation that ended with an error while its rank waited for it, as the last that its thread did, counts as awaited still: whoever
    ended the wait did so because it would not end by itself.

    Args:
        events: what was recorded.
        world_size: number of ranks, those included that left no event.
        ends: state and words by rank for those of which the end is known, as ``read_ends`` gives them; of the others, and of those
            that were "running", the events tell whether they are blocked.
        end_ns: until when ranks waited; the last moment recorded where it is not given.
        ended_ns: when ranks failed, as ``read_end_times`` gives it.

    Returns:
        The world.

    Example:
        >>> from ringsim.diagnose.waitfor import analyse
        >>> from ringsim.traces.events import make_events
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["recv"]] * 2, "peer": [1, 0], "tag": [0, 0], "wait_ns": [5, 5],
        ...                       "post_ns": [5, 5], "status": [IN_FLIGHT] * 2})
        >>> analyse(snapshot_of_events(events, 2)).cycle
        (0, 1)
    """
    ended_ns = ended_ns or {}
    kind = events.kind
    speaks = (kind == SEND) | (kind == RECV) | (kind == COLLECTIVE)
    ends = {**(ends or {}), **_without_groups(events, ends or {})}
    recorded_ns = max(events.post_ns.max(initial=0), events.wait_ns.max(initial=0), events.done_ns.max(initial=0))
    last_ns = max(int(recorded_ns), end_ns or 0)
    broken = _broken_waits(events, speaks)
    open_ops = speaks & ((events.status == IN_FLIGHT) | broken)
    awaited = open_ops & (events.wait_ns != NONE)
    index, counterparts, contested = _count_channels(events, kind)
    matched = counterparts > index
    kept = open_ops & (awaited | ~matched)
    calls = CollectiveCalls.of(events)
    index[calls.event] = calls.place

    blocked = _blocked_ranks(events, speaks, awaited, world_size)
    posted: list[list[Posted]] = [[] for _ in range(world_size)]
    idle = np.zeros(world_size, dtype=np.int64)
    entered: dict[int, tuple[Operation, ...]] = {}  # by call; one tuple for all who wait in it
    for event in np.flatnonzero(kept).tolist():
        rank = int(events.rank[event])
        if rank >= world_size:
            continue
        if not awaited[event]:
            idle[rank] += 1
            if idle[rank] > MOST_POSTED:
                continue
        call = calls.call_of(event) if kind[event] == COLLECTIVE else NONE
        if call != NONE and call not in entered:
            entered[call] = tuple(operation_of(events, one) for one in calls.events_of(call))
        posted[rank].append(
            Posted(
                operation_of(events, event, last_ns),
                _group(events, event),
                awaited=bool(awaited[event]),
                index=int(index[event]),
                counterparts=int(counterparts[event]),
                contested=int(contested[event]),
                entered=entered.get(call, ()),
            )
        )
    raised = np.flatnonzero(refused(events) & (kind <= RECV))
    turned_down = [raised[events.rank[raised] == rank][-MOST_REFUSED:].tolist() for rank in range(world_size)]
    views = []
    for rank in range(world_size):
        state, about = ends.get(rank, _UNKNOWN)
        if state in _ABLE and blocked[rank]:
            state, about = "blocked", ""
        its = [Posted(operation_of(events, one), _group(events, one), False, _place_of_refused(events, one)) for one in turned_down[rank]]
        views.append(RankSnapshot(state, tuple(posted[rank]), about, ended_ns.get(rank), tuple(its)))
    return Snapshot(tuple(views))


def operation_of(events: Events, event: int, last_ns: int | None = None) -> Operation:
    """Returns an event as an operation; with ``last_ns``, the end of the trace, also for how long it is waited for that is not done."""
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


def read_ends(metadata: Mapping[str, Any], world_size: int) -> dict[int, tuple[str, str]]:
    """Reads how the ranks ended from a trace's metadata, which may come from anywhere: what makes no sense is passed over.

    ``metadata["ends"]`` is a list of ``{"rank": 2, "state": "failed", "about": "raised ValueError: ...", "at_ns": 70_000}``; one that was
    ended from outside is "running" or "stopped", with what it was doing, and one whose error merely echoes that of another has no entry.
    """
    said = metadata.get("ends")
    ends = {}
    for entry in said if isinstance(said, list) else ():
        if not isinstance(entry, dict):
            continue
        rank, state, about = entry.get("rank"), entry.get("state"), entry.get("about", "")
        if type(rank) is int and 0 <= rank < world_size and state in STATES and isinstance(about, str):
            ends[rank] = (state, about)
    return ends


def read_end_times(metadata: Mapping[str, Any], world_size: int) -> dict[int, int]:
    """Reads when ranks failed, in ns from the start of the run, from a trace's metadata; where it makes sense, see ``read_ends``.

    Example:
        >>> read_end_times({"ends": [{"rank": 1, "state": "failed", "at_ns": 70}, {"rank": 0, "state": "exited"}]}, 2)
        {1: 70}
    """
    said = metadata.get("ends")
    times = {}
    for entry in said if isinstance(said, list) else ():
        rank, at_ns = (entry.get("rank"), entry.get("at_ns")) if isinstance(entry, dict) else (None, None)
        if type(rank) is int and 0 <= rank < world_size and type(at_ns) is int:
            times[rank] = at_ns
    return times


def read_end_ns(metadata: Mapping[str, Any]) -> int | None:
    """Reads until when ranks waited, in ns from the start of the run; None where the metadata does not say.

    That is when it was decided to end them, or else the end of the run.

    Example:
        >>> read_end_ns({"given_up_ns": 7, "end_ns": 9}), read_end_ns({"end_ns": 9}), read_end_ns({"end_ns": "soon"})
        (7, 9, None)
    """
    said = metadata.get("given_up_ns", metadata.get("end_ns"))
    return said if type(said) is int and 0 <= said < 2**63 else None


def until(events: Events, moment_ns: int) -> Events:
    """Returns the events as they stood at a moment: what was posted later is not there, and what ended later is still under way.

    Whoever is woken because its wait would never end may catch the error, return, or try again. None of that was so when it was woken.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> events = make_events({"rank": [0, 0], "op": [OP_CODES["recv"]] * 2, "post_ns": [1, 9], "wait_ns": [2, 9], "done_ns": [8, 9],
        ...                       "status": [ERROR, OK]})
        >>> before = until(events, 7)
        >>> before.wait_ns.tolist(), before.done_ns.tolist(), before.status.tolist() == [IN_FLIGHT]
        ([2], [-1], True)
    """
    if not ((events.post_ns > moment_ns) | (events.done_ns > moment_ns)).any():
        return events
    found = events.select(events.post_ns <= moment_ns)
    open_still = found.done_ns > moment_ns
    return replace(
        found,
        wait_ns=np.where(found.wait_ns > moment_ns, NONE, found.wait_ns),
        done_ns=np.where(open_still, NONE, found.done_ns),
        status=np.where(open_still, IN_FLIGHT, found.status).astype(found.status.dtype),
    )


def _without_groups(events: Events, ends: Mapping[int, tuple[str, str]]) -> dict[int, tuple[str, str]]:
    """Returns state and words of the ranks that have destroyed their process groups, and made none since."""
    labels = [number for number, name in enumerate(events.tables.labels) if name in (DESTROYED, MADE_ANEW)]
    marks: list[int] = np.flatnonzero((events.op == _MARK) & np.isin(events.label, labels)).tolist()
    found = {}
    for rank, event in {int(events.rank[event]): event for event in marks}.items():  # the last of each
        if events.tables.labels[events.label[event]] == DESTROYED and ends.get(rank, _UNKNOWN)[0] in _ABLE:
            file, line = int(events.file[event]), int(events.line[event])
            place = f" at {os.path.basename(events.tables.files[file])}:{line}" if file != NONE else ""
            found[rank] = ("exited", f"has destroyed its process groups{place}")
    return found


def _broken_waits(events: Events, speaks: Ints) -> Ints:
    """Marks operations whose wait raised, where their thread communicated no more."""
    mask = np.zeros(len(events), dtype=bool)
    failed = np.flatnonzero(speaks & (events.status == ERROR) & (events.wait_ns != NONE))
    if len(failed) == 0:
        return mask
    some = np.flatnonzero(speaks)
    thread = number_rows(events.rank[some], events.thread[some])
    latest = np.full(int(thread.max(initial=-1)) + 1, NONE, dtype=np.int64)
    np.maximum.at(latest, thread, np.maximum(events.post_ns[some], events.wait_ns[some]))
    of_event = np.zeros(len(events), dtype=np.int64)
    of_event[some] = thread
    mask[failed[events.wait_ns[failed] >= latest[of_event[failed]]]] = True
    return mask


def _blocked_ranks(events: Events, speaks: Ints, awaited: Ints, world_size: int) -> Ints:
    """Marks the ranks of which every thread that ever communicated waits."""
    if not awaited.any():
        return np.zeros(world_size, dtype=bool)
    inside = speaks & (events.rank < world_size)
    threads = np.unique(np.stack([events.rank[inside], events.thread[inside]]), axis=1)
    waiting = np.unique(np.stack([events.rank[awaited & inside], events.thread[awaited & inside]]), axis=1)
    every = np.bincount(threads[0], minlength=world_size)
    mask: Ints = (every > 0) & (np.bincount(waiting[0], minlength=world_size) == every)
    return mask


def _count_channels(events: Events, kind: Ints) -> tuple[Ints, Ints, Ints]:
    """Numbers the sends and recvs of each channel, counts the other side's and how many of those are contested; as long as the events."""
    index, counterparts, contested = np.zeros((3, len(events)), dtype=np.int64)
    sent = ~refused(events)
    sends = np.flatnonzero((kind == SEND) & (events.peer >= 0) & sent)
    recvs = np.flatnonzero((kind == RECV) & (events.peer >= 0) & sent)
    from_any = np.flatnonzero((kind == RECV) & (events.peer == ANY_SOURCE) & sent & (events.status == IN_FLIGHT))
    both = np.concatenate([sends, recvs])
    source = np.concatenate([events.rank[sends], events.peer[recvs]])
    target = np.concatenate([events.peer[sends], events.rank[recvs]])
    channel = number_rows(events.group[both], source, target, events.tag[both])
    count = int(channel.max(initial=-1)) + 1
    of_send, of_recv = channel[: len(sends)], channel[len(sends) :]
    index[sends], index[recvs] = number_places(of_send), number_places(of_recv)
    counterparts[sends] = np.bincount(of_recv, minlength=count)[of_send]
    counterparts[recvs] = np.bincount(of_send, minlength=count)[of_recv]
    # Recvs that are done and were posted later than one that is not: they were from anybody, or nobody has waited for that one.
    done = events.status[recvs] == OK
    contested[recvs] = np.minimum(_count_later(of_recv, done), counterparts[recvs])
    # A recv from anybody may take any send that is left over, or that an open recv from one rank leaves to it; which one is not known
    # before it is done. There must be one for each.
    spare = np.bincount(of_recv[events.status[recvs] == IN_FLIGHT], minlength=count)
    over = counterparts[sends] - index[sends]  # none of the recvs from this rank can be for it where that is not positive
    left, over = sends[over <= spare[of_send]], over[over <= spare[of_send]]
    earlier: dict[tuple[int, int, int], int] = {}
    for event in from_any.tolist():
        rank, group, tag = int(events.rank[event]), int(events.group[event]), int(events.tag[event])
        fitting = (events.peer[left] == rank) & (events.group[left] == group) & (events.tag[left] == tag)
        fits, before = left[fitting], earlier.get((rank, group, tag), 0)
        counterparts[event] = max(len(fits) - before, 0)
        contested[event] = counterparts[event] - max(int((over[fitting] <= 0).sum()) - before, 0)
        contested[fits] += np.maximum(index[fits] + 1 - counterparts[fits], 0)
        counterparts[fits] = np.maximum(counterparts[fits], index[fits] + 1)
        beside = recvs[(events.rank[recvs] == rank) & (events.group[recvs] == group) & (events.tag[recvs] == tag)]
        contested[beside] = np.minimum(contested[beside] + 1, counterparts[beside])
        earlier[rank, group, tag] = before + 1
    return index, counterparts, contested


def _place_of_refused(events: Events, event: int) -> int:
    """Counts what its rank had posted before on the channel of an operation that was refused."""
    same = [column[:event] == column[event] for column in (events.rank, events.kind, events.group, events.peer, events.tag)]
    return int((np.logical_and.reduce(same) & ~refused(events)[:event]).sum())


def _count_later(channel: Ints, marked: Ints) -> Ints:
    """Counts for each of some events those of its channel that come after it and are marked."""
    order = np.argsort(channel, kind="stable")
    until = np.cumsum(marked[order])
    last = np.append(np.diff(channel[order]) != 0, True)[: len(order)]  # of each channel's run
    later = np.zeros(len(channel), dtype=np.int64)
    later[order] = np.repeat(until[last], np.diff(np.flatnonzero(last), prepend=-1)) - until
    return later


def _group(events: Events, event: int) -> Group:
    group = int(events.group[event])
    return events.tables.groups[group] if group != NONE else _NO_GROUP


def doubt(world: Snapshot) -> Snapshot:
    """Returns a world in which whatever others may have got instead is theirs.

    Args:
        world: the ranks at one moment at which nothing was on its way.

    Returns:
        The world, in which an operation that is awaited and ``doubtful`` is ``taken``, where its rank can wait for nothing else.

    Example:
        >>> from ringsim.traces.findings import Operation
        >>> from ringsim.diagnose.waitfor import Posted, RankSnapshot, analyse
        >>> from ringsim.traces.events import Group
        >>> operation = Operation(rank=0, op="recv", peer=1, tag=0, group="world")
        >>> mine = Posted(operation, Group("world", (0, 1)), awaited=True, counterparts=1, contested=1)
        >>> world = Snapshot((RankSnapshot("blocked", (mine,)), RankSnapshot("exited")))
        >>> analyse(world) is None, analyse(doubt(world)).ranks
        (True, (0,))
    """
    views = []
    for view in world.ranks:
        missing = [one for one in view.posted if one.awaited and (one.doubtful or not one.matched)]
        if len(missing) == 1 and missing[0].doubtful:
            view = replace(view, posted=tuple(replace(one, taken=True) if one is missing[0] else one for one in view.posted))
        views.append(view)
    return Snapshot(tuple(views))
