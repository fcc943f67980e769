"""Messages and collectives whose sides disagree, in what was recorded: some abort a process, most go unnoticed.

What a run left behind: handles nobody waited for, collectives that not everybody entered, groups made in different order, races.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.diagnose.snapshot import operation_of
from ringsim.diagnose.verdict import name_ranks
from ringsim.traces.collectives import same_collective
from ringsim.traces.events import COLLECTIVE, IN_FLIGHT, NONE, OP_CODES, OP_NAMES, RECV, SEND, Events, Ints, Payload, read_notice
from ringsim.traces.findings import Finding, Operation, payload_text
from ringsim.traces.matching import CollectiveCalls, match, number_rows, refused
from ringsim.traces.value import count

if TYPE_CHECKING:
    from ringsim.diagnose.waitfor import Snapshot
    from ringsim.traces.value import Trace

__all__ = [
    "find_collective_mismatches",
    "find_leaks",
    "find_message_mismatches",
    "find_missing",
    "find_notices",
    "find_order_mismatches",
    "find_races",
]

MOST_FINDINGS: Final = 5
_MOST_CALLS: Final = 4
_UNEVEN: Final = [OP_CODES["all_to_all"], OP_CODES["all_to_all_single"]]  # each rank may bring another size
_SHAPED: Final = [OP_CODES["all_reduce"], OP_CODES["broadcast"], OP_CODES["reduce"], OP_CODES["new_group"]]  # the same shape on all ranks
_FAMILY: Final = np.array([next(code for code, other in enumerate(OP_NAMES) if same_collective(name, other)) for name in OP_NAMES])


def find_message_mismatches(trace: Trace) -> tuple[Finding, ...]:
    """Finds messages whose two sides differ in bytes, dtype or shape.

    Args:
        trace: any trace.

    Returns:
        One finding for each pair of lines and payloads: other sizes first, then other dtypes, then other shapes; at most
        ``MOST_FINDINGS``.

    Example:
        >>> from ringsim.traces.events import Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> names = Tables(payloads=(Payload("float32", (2, 3), 24), Payload("float32", (3, 2), 24)))
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0], "tag": [0, 0],
        ...                       "payload": [0, 1]}, names)
        >>> find_message_mismatches(Trace(events, {"world_size": 2}))[0].message.rpartition(": ")[2]
        'the shape differs.'
    """
    events = trace.events
    reached = np.flatnonzero(~refused(events))
    if len(reached) == len(events):
        send, recv = trace.messages.send, trace.messages.recv
    else:
        messages = match(events.select(reached), by_tag=trace.metadata.get("backend") != "nccl")
        send, recv = reached[messages.send], reached[messages.recv]
    differ = (events.payload[send] != events.payload[recv]) & (events.payload[send] != NONE) & (events.payload[recv] != NONE)
    send, recv = send[differ], recv[differ]
    if len(send) == 0:
        return ()
    columns = [
        column[side] for column in (events.rank, events.payload, events.file, events.line) for side in (send, recv)
    ]  # one finding for each pair of lines
    _, first, times = np.unique(np.stack(columns), axis=1, return_index=True, return_counts=True)
    found = []
    for index, number in zip(first.tolist(), times.tolist(), strict=True):
        mine, theirs = operation_of(events, int(send[index])), operation_of(events, int(recv[index]))
        found.append((_severity(mine, theirs), index, _message_finding(mine, theirs, number)))
    return tuple(finding for _, _, finding in sorted(found, key=lambda one: one[:2])[:MOST_FINDINGS])


def _severity(mine: Operation, theirs: Operation) -> int:
    return 0 if mine.size_bytes != theirs.size_bytes else 1 if mine.dtype != theirs.dtype else 2


def _message_finding(send: Operation, recv: Operation, times: int) -> Finding:
    what = ("size", "dtype", "shape")[_severity(send, recv)]
    message = (
        f"rank {send.rank} sends {payload_text(send)} in {send}, rank {recv.rank} receives {payload_text(recv)} in {recv}: "
        f"the {what} differs" + (f" ({count(times, 'time')})" if times > 1 else "")
    )
    effect = {
        "size": "Gloo aborts the receiver where the buffer is smaller, and fills a part of it where it is larger.",
        "dtype": "The bytes are taken for the other dtype, without a word.",
        "shape": "The values are taken for the other shape, without a word.",
    }[what]
    hint = f"{effect} Let rank {recv.rank} receive into {payload_text(send)}, or send what it expects."
    return Finding("message_mismatch", tuple(sorted((send.rank, recv.rank))), (send, recv), f"{message}.", hint)


def find_collective_mismatches(events: Events) -> tuple[Finding, ...]:
    """Finds calls of a collective in which the ranks differ: in kind, size, dtype, shape, reduction or root.

    Args:
        events: of any trace.

    Returns:
        One finding for each group, of the first call in which they differ; what comes later may merely follow.

    Example:
        >>> from ringsim.traces.events import Group, Tables, make_events
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["barrier"], OP_CODES["all_reduce"]], "group": [0, 0]},
        ...                      Tables(groups=(Group("world", (0, 1)),)))
        >>> print(find_collective_mismatches(events)[0])
        rank 0 calls barrier (world), rank 1 calls all_reduce (world) as collective 1 of group world: the kind differs.
          Hint: Let all ranks of a group call the same collectives, with the same arguments, in one order.
    """
    calls = CollectiveCalls.of(events)
    if len(calls.event) == 0:
        return ()
    first = np.zeros(len(calls.last), dtype=np.int64)
    first[calls.call[::-1]] = calls.event[::-1]
    other, mine = calls.event, first[calls.call]
    op = events.op[mine]
    payload, others = events.payload[mine], events.payload[other]
    carries = (payload != NONE) & (others != NONE)
    even = carries & ~np.isin(op, _UNEVEN)
    amount = _number(events, lambda one: (one.size_bytes, one.dtype))
    reduction = _number(events, lambda one: one.reduction)
    differ = {
        "kind": _FAMILY[op] != _FAMILY[events.op[other]],
        "root": events.peer[mine] != events.peer[other],
        "size or dtype": even & (amount[payload] != amount[others]),
        "reduction": carries & (reduction[payload] != reduction[others]),
        "shape": even & np.isin(op, _SHAPED) & (payload != others),
    }
    wrong = np.flatnonzero(np.any(list(differ.values()), axis=0))
    if len(wrong) == 0:
        return ()
    earliest: dict[int, int] = {}  # group -> place of its first call that is wrong
    for index in wrong.tolist():
        group, place = int(events.group[other[index]]), int(calls.place[index])
        earliest[group] = min(place, earliest.get(group, place))
    findings = []
    for group, place in earliest.items():
        some = [index for index in wrong.tolist() if events.group[other[index]] == group and calls.place[index] == place]
        operations = tuple(operation_of(events, int(event)) for event in (mine[some[0]], *other[some]))
        what = next(name for name, where in differ.items() if where[some].any())
        findings.append(_collective_finding(operations, place, what))
    return tuple(findings)


def _collective_finding(operations: tuple[Operation, ...], place: int, what: str) -> Finding:
    said = ", ".join(f"rank {one.rank} calls {one}{_extra(one, what)}" for one in operations[:_MOST_CALLS])
    more = f" and {len(operations) - _MOST_CALLS} more ranks otherwise still" if len(operations) > _MOST_CALLS else ""
    message = f"{said}{more} as collective {place + 1} of group {operations[0].group}: the {what} differs."
    if operations[0].op == "new_group":
        hint = "Every rank must call new_group for every group, in one order, also for groups that it is not in."
        return Finding("group_order_mismatch", tuple(sorted(one.rank for one in operations)), operations, message, hint)
    hint = "Let all ranks of a group call the same collectives, with the same arguments, in one order."
    return Finding("collective_mismatch", tuple(sorted(one.rank for one in operations)), operations, message, hint)


def _extra(operation: Operation, what: str) -> str:
    return f" with root {operation.peer}" if what == "root" else ""


def _number(events: Events, of: Callable[[Payload], Hashable]) -> Ints:
    """Numbers the payloads so that those alike in what ``of`` returns have one number; the last entry stands for no payload."""
    numbers: dict[Hashable, int] = {}
    return np.array([*(numbers.setdefault(of(one), len(numbers)) for one in events.tables.payloads), NONE], dtype=np.int64)


_MARK: Final = OP_CODES["mark"]


def find_notices(events: Events) -> tuple[Finding, ...]:
    """Returns what was found while the program ran, before it did damage: it stands in the trace as marks.

    Example:
        >>> from ringsim.traces.events import Tables, make_events
        >>> from ringsim.traces.events import word_notice
        >>> names = Tables(labels=(word_notice("buffer_hazard", "two buffers overlap."),))
        >>> find_notices(make_events({"rank": [1], "op": [_MARK], "label": [0]}, names))[0].message
        'rank 1: two buffers overlap.'
    """
    labels = {number: said for number, label in enumerate(events.tables.labels) if (said := read_notice(label)) is not None}
    found: dict[tuple[str, str], Finding] = {}
    finders: dict[tuple[str, str], set[int]] = {}
    for event in np.flatnonzero((events.op == _MARK) & np.isin(events.label, list(labels))).tolist():
        kind, message = labels[int(events.label[event])]
        before = found.get((kind, message))
        refused_op = _refused_before(events, event)
        operations = () if refused_op is None else tuple(operation_of(events, one) for one in (refused_op, *_others_in(events, refused_op)))
        ranks = {int(events.rank[event]), *(one.rank for one in operations)}
        if kind != "buffer_hazard":  # which is about a rank's own memory, whoever it exchanges it with
            ranks |= {one.peer for one in operations if one.peer >= 0 and one.kind != COLLECTIVE}
        if before is not None:
            ranks, operations = ranks | set(before.ranks), (*before.operations, *operations)
        found[kind, message] = Finding(kind, tuple(sorted(ranks)), operations, message)
        finders.setdefault((kind, message), set()).add(int(events.rank[event]))
    # Of a mismatch all sides are named first, of what is one rank's own mistake that rank.
    named = {key: one.ranks if one.kind.endswith("_mismatch") else sorted(finders[key]) for key, one in found.items()}
    return tuple(replace(one, message=f"{name_ranks(named[key])}: {one.message}") for key, one in found.items())


def _refused_before(events: Events, mark: int) -> int | None:
    """Returns the operation that a notice is about: its rank's latest one before the mark, where it was refused on the mark's line."""
    before = np.flatnonzero((events.rank[:mark] == events.rank[mark]) & (events.kind[:mark] <= COLLECTIVE))[-1:]
    about = before[refused(events)[before] & (events.line[before] == events.line[mark])]
    return int(about[0]) if len(about) else None


def _others_in(events: Events, event: int) -> tuple[int, ...]:
    """Returns the other ranks' operations in the call of a collective that was refused, and that would have been its rank's next there."""
    if events.kind[event] != COLLECTIVE:
        return ()
    group = np.flatnonzero((events.kind == COLLECTIVE) & (events.group == events.group[event]))
    counted, rank = ~refused(events)[group], events.rank[group]
    place = np.count_nonzero(counted & (rank == events.rank[event]) & (group < event))
    found = []
    for other in np.unique(rank[rank != events.rank[event]]).tolist():
        its = rank == other
        before = np.cumsum(counted[its]) - counted[its]  # each may have been refused itself: both saw that they differ
        found += group[its][before == place][:1].tolist()
    return tuple(found)


def find_leaks(trace: Trace) -> tuple[Finding, ...]:
    """Finds operations that ranks left open when they returned: nobody waited for them, or a thread that was left behind still did.

    Args:
        trace: of a run that finished.

    Returns:
        One finding for each line, at most ``MOST_FINDINGS``.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events({"rank": [0], "op": [OP_CODES["isend"]], "peer": [1], "tag": [0], "status": [IN_FLIGHT], "line": [7]})
        >>> find_leaks(Trace(events, {"world_size": 2}))[0].message
        'rank 0 never waited for its isend to 1 (tag 0), whose other side never came.'
    """
    events = trace.events
    kind = events.kind
    open_ops = np.flatnonzero((kind <= COLLECTIVE) & (events.status == IN_FLIGHT))
    met = np.zeros(len(events), dtype=bool)
    met[trace.messages.send] = met[trace.messages.recv] = True
    found = []
    if len(open_ops) == 0:
        return ()
    columns = [column[open_ops] for column in (events.rank, events.op, events.file, events.line, met, events.wait_ns != NONE)]
    _, first, times = np.unique(np.stack(columns), axis=1, return_index=True, return_counts=True)
    for index, number in zip(first.tolist(), times.tolist(), strict=True):
        event = int(open_ops[index])
        operation = operation_of(events, event)
        hint = f"Keep what {OP_NAMES[events.op[event]]} returns and call its wait(): until then the tensor may not be used."
        message = f"rank {operation.rank} never waited for its {operation}"
        if events.wait_ns[event] != NONE:
            hint = "Let its thread end, and join it, before the worker returns."
            message = f"rank {operation.rank} returned while a thread of it still waited in {operation}"
        if kind[event] != COLLECTIVE:
            message += ", whose other side was posted" if met[event] else ", whose other side never came"
        if number > 1:
            message += f" ({count(number, 'time')})"
        found.append((bool(met[event]), -number, Finding("leaked_request", (operation.rank,), (operation,), f"{message}.", hint)))
    return tuple(finding for *_, finding in sorted(found, key=lambda one: one[:2])[:MOST_FINDINGS])


def find_missing(events: Events) -> tuple[Finding, ...]:
    """Finds collectives of a finished run that some members of the group never entered, where nobody is blocked in them.

    Example:
        >>> from ringsim.traces.events import Group, Tables, make_events
        >>> events = make_events({"rank": [0], "op": [OP_CODES["barrier"]], "group": [0], "status": [IN_FLIGHT]},
        ...                      Tables(groups=(Group("world", (0, 1)),)))
        >>> find_missing(events)[0].message
        'rank 1 never took part in barrier (world), which rank 0 posted.'
    """
    calls = CollectiveCalls.of(events)
    waits = (events.status[calls.event] == IN_FLIGHT) & (events.wait_ns[calls.event] == NONE)
    findings = []
    for call in np.unique(calls.call[waits & ~calls.complete[calls.call]])[:MOST_FINDINGS].tolist():
        inside = calls.event[calls.call == call]
        first = operation_of(events, int(inside[0]))
        there = sorted(set(events.rank[inside].tolist()))
        missing = [rank for rank in events.tables.groups[events.group[inside[0]]].ranks if rank not in there]
        if not missing:
            continue
        message = f"{name_ranks(missing)} never took part in {first}, which {name_ranks(there)} posted."
        operations = tuple(operation_of(events, event) for event in inside.tolist())
        findings.append(
            Finding(
                "missing_participant", tuple(sorted(missing)), operations, message, f"{first.op} needs every member of group {first.group}."
            )
        )
    return tuple(findings)


def find_order_mismatches(world: Snapshot) -> tuple[Finding, ...]:
    """Finds groups of one name with different members, on which operations wait: the ranks made their groups in different order.

    Args:
        world: the last moment of the run.
    """
    by_name: dict[str, dict[tuple[int, ...], list[Operation]]] = {}
    for view in world.ranks:
        for one in view.posted:
            if one.group.name:
                by_name.setdefault(one.group.name, {}).setdefault(one.group.ranks, []).append(one.operation)
    findings = []
    for name, members in by_name.items():
        if len(members) > 1:
            operations = tuple(some[0] for some in members.values())
            made = ", ".join(f"{list(ranks)} on {name_ranks(sorted({one.rank for one in some}))}" for ranks, some in members.items())
            ranks = tuple(sorted({one.rank for some in members.values() for one in some}))
            hint = "Every rank must call new_group for every group, in one order, also for groups that it is not in."
            findings.append(
                Finding("group_order_mismatch", ranks, operations, f"group {name} has other members on other ranks: {made}.", hint)
            )
    return tuple(findings)


def find_races(events: Events) -> tuple[Finding, ...]:
    """Finds channels that several threads of a rank use: which message comes first there is left to chance.

    A recv from any source is none: the trace keeps where its message came from, not that it might have come from elsewhere.

    Args:
        events: of any trace.

    Returns:
        One finding for each channel, at most ``MOST_FINDINGS``.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> sends = {"rank": [0, 0], "thread": [0, 1], "op": [OP_CODES["send"]] * 2, "peer": [1, 1], "tag": [0, 0]}
        >>> find_races(make_events(sends))[0].kind
        'race'
    """
    kind = events.kind
    some = np.flatnonzero(((kind == SEND) | (kind == RECV)) & (events.peer >= 0))
    if len(some) == 0 or not (events.thread[some] != 0).any():
        return ()
    channel = number_rows(kind[some], events.group[some], events.rank[some], events.peer[some], events.tag[some])
    first = np.full(int(channel.max()) + 1, NONE, dtype=np.int64)
    first[channel[::-1]] = some[::-1]
    differ = np.flatnonzero(events.thread[some] != events.thread[first[channel]])
    findings = []
    for index in differ[np.unique(channel[differ], return_index=True)[1]][:MOST_FINDINGS].tolist():
        event = int(some[index])
        mine, theirs = operation_of(events, int(first[channel[index]])), operation_of(events, event)
        message = (
            f"two threads of rank {mine.rank} use one tag for one peer: {mine} and {theirs}. Which message comes first is left to chance."
        )
        findings.append(Finding("race", (mine.rank,), (mine, theirs), message, "Give each thread a tag, or a group, of its own."))
    return tuple(findings)
