"""Messages and collectives whose sides disagree, in what was recorded: some abort a process, most go unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.diagnose.waitfor import same_collective
from ringsim.diagnose.world_of_events import operation_of
from ringsim.traces.events import NONE, OP_CODES, OP_NAMES, Events, Ints, Payload
from ringsim.traces.findings import Finding, Operation, payload_text
from ringsim.traces.matching import CollectiveCalls, match, refused
from ringsim.traces.value import count

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["find_collective_mismatches", "find_message_mismatches"]

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
