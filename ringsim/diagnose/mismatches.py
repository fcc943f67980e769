"""Finds mistakes that need not block any rank: mismatched or unfinished operations.

Mismatched messages and collectives may abort a process inside Gloo, but mostly go unnoticed. They
are found in the records: by the watcher while the ranks run, at the end of a run, and later in any
trace. The k-th send on a channel is compared with its k-th recv, and the k-th collective of a group
on one rank with the k-th on the others.

While ranks run, an operation is compared only after it is settled: awaited, done, or followed by
another operation of its thread. Until then, the operation may still be refused. A refused operation
does not count, because the program may catch the error and try again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringsim.diagnose.snapshot import (
    BLOCKING,
    Snapshot,
    SnapshotBuilder,
    is_on_nccl,
    operation_of,
)
from ringsim.diagnose.verdict import SAME_GROUPS, acts_text
from ringsim.errors import name_ranks
from ringsim.traces.collectives import COLLECTIVES, same_collective
from ringsim.traces.events import (
    COLLECTIVE,
    IN_FLIGHT,
    NONE,
    OP_CODES,
    OP_NAMES,
    RECV,
    THREAD_FAILED,
    Events,
    Ints,
    Payload,
    number_places,
    read_notice,
)
from ringsim.traces.findings import Finding, Operation, lines_text, payload_text
from ringsim.traces.matching import (
    CollectiveCalls,
    count_alike,
    match,
    number_channels,
    number_rows,
    refused,
)
from ringsim.traces.units import count

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

MOST_FINDINGS = 5
_MARK = OP_CODES["mark"]
_BLOCKING = [OP_CODES[name] for name in BLOCKING]
_NEW_GROUP = OP_CODES["new_group"]
_UNEVEN = [
    code for name, code in OP_CODES.items() if name in COLLECTIVES and COLLECTIVES[name].uneven
]
_SAME_CALLS = (
    "Call the same collectives in the same order, with the same arguments, on all ranks of a group."
)
_OWN_TAGS = (
    "Give each thread its own tag or group. Otherwise, the order of their messages is left to "
    "chance."
)
_OWN_MISTAKES = ("invalid_argument", "buffer_hazard")  # of a single rank
_SEVERITY = ("size", "dtype", "reduction", "shape")
_EFFECTS = {
    "size": (
        " Gloo aborts a receiver whose buffer is smaller, but fills only part of a larger buffer."
    ),
    "dtype": " Otherwise, the bytes are silently interpreted as the other dtype.",
    "shape": " Otherwise, the values silently take on the other shape.",
}


def disagreement(mine: Payload, theirs: Payload) -> str:
    """Returns the property in which the two sides of an operation disagree.

    The property is "size", "dtype", "reduction" or "shape", or empty if the sides agree. A flat
    shape agrees with any other shape, and dimensions of 1 do not count, because both differences
    are common and harmless.

    Example:
        >>> disagreement(Payload("float32", (2, 3), 24), Payload("float32", (3, 2), 24))
        'shape'
        >>> disagreement(Payload("float32", (2, 3), 24), Payload("float32", (6,), 24))
        ''
    """
    if mine.size_bytes != theirs.size_bytes:
        return "size"
    if mine.size_bytes == 0:
        return ""
    if mine.dtype != theirs.dtype:
        return "dtype"
    # the reduction of calls from C++ is unknown
    if mine.reduction != theirs.reduction and mine.reduction and theirs.reduction:
        return "reduction"
    shape, other = (
        tuple(size for size in payload.shape if size != 1) for payload in (mine, theirs)
    )
    return "shape" if shape != other and len(shape) > 1 and len(other) > 1 else ""


def find_new_mismatches(
    builder: SnapshotBuilder, ended: Collection[int] = ()
) -> tuple[Finding, ...]:
    """Finds mismatches among the settled operations of a live run.

    The function then removes the operations that are done from the builder. It skips groups used
    before the recording began, and messages that a recv from any source may get, because their
    pairs are unknown. Operations of ranks that have ``ended`` count as settled.
    """
    events, settled = builder.events(), builder.settled(ended)
    known = ~np.isin(events.group, list(builder.used_before))
    send, recv = _settled_pairs(events, settled)
    sure = known[send]
    if builder.from_any:
        receivers = zip(events.group[recv].tolist(), events.rank[recv].tolist(), strict=True)
        sure &= np.array([one not in builder.from_any for one in receivers], dtype=bool)
    calls = CollectiveCalls.of(events)
    compared = _first_marked(settled[calls.event], _member_of(events, calls)) & known[calls.event]
    findings = _message_findings(events, send[sure], recv[sure]) + _call_findings(
        events, calls, compared, builder.count_dropped
    )
    builder.drop(events, calls, _mark_done(events, send, recv, calls, builder.elsewhere))
    return findings


def _settled_pairs(events: Events, settled: Ints) -> tuple[Ints, Ints]:
    """Returns the pairs of sends and recvs, up to the first unsettled operation of a channel."""
    messages = np.flatnonzero((events.kind <= RECV) & (events.peer >= 0))
    sides = number_rows(events.kind[messages], number_channels(events, messages))
    sure = messages[_first_marked(settled[messages], sides)]
    pairs = match(events.select(sure))
    return sure[pairs.send], sure[pairs.recv]


def _member_of(events: Events, calls: CollectiveCalls) -> Ints:
    return number_rows(events.group[calls.event], events.rank[calls.event])


def _first_marked(marked: Ints, key: Ints) -> Ints:
    """Marks the rows before the first unmarked row with the same key."""
    place = number_places(key)
    first = np.full(int(key.max(initial=-1)) + 1, len(key), dtype=np.int64)
    np.minimum.at(first, key[~marked], place[~marked])
    return place < first[key]


def _mark_done(
    events: Events, send: Ints, recv: Ints, calls: CollectiveCalls, elsewhere: set[int]
) -> Ints:
    """Marks operations done on all sides, up to the first open one of each channel or group."""
    done = events.status != IN_FLIGHT
    mask: Ints = done & np.isin(events.peer, list(elsewhere)) & (events.kind <= RECV)
    order = np.argsort(send, kind="stable")  # in the order of posting, on each channel
    gone = order[
        _first_marked((done[send] & done[recv])[order], number_channels(events, send[order]))
    ]
    mask[send[gone]] = mask[recv[gone]] = True
    here = np.array(
        [len(set(group.ranks) - elsewhere) for group in events.tables.groups], dtype=np.int64
    )
    finished = (np.bincount(calls.call, ~done[calls.event]) == 0) & (
        np.bincount(calls.call) >= here[events.group[calls.last]]
    )
    mask[calls.event] = _first_marked(finished[calls.call], _member_of(events, calls))
    return mask


def find_message_mismatches(trace: Trace) -> tuple[Finding, ...]:
    """Finds messages whose two sides differ.

    Returns at most ``MOST_FINDINGS`` findings, one for each pair of lines and payloads, with
    different sizes first.

    Example:
        >>> from ringsim.traces.events import Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> names = Tables(
        ...     payloads=(Payload("float32", (2, 3), 24), Payload("float32", (3, 2), 24))
        ... )
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "payload": [0, 1],
        ...     },
        ...     names,
        ... )
        >>> print(find_message_mismatches(Trace(events, {"world_size": 2}))[0].message)
        rank 0 sends float32[2,3], but rank 1 receives float32[3,2]: the shape differs.
          rank 0 posted send to 1 (tag 0, float32[2,3], 24 bytes)
          rank 1 posted recv from 0 (tag 0, float32[3,2], 24 bytes)
    """
    events = trace.events
    send, recv = trace.messages.send, trace.messages.recv
    known = is_recorded_whole(trace)[send]
    return _message_findings(events, send[known], recv[known])


def is_recorded_whole(trace: Trace) -> Ints:
    """Marks the events on groups that have been recorded since their first operation.

    Only these events can be compared.
    """
    events, names = trace.events, trace.metadata.get("used_before")
    partly = [
        number
        for number, group in enumerate(events.tables.groups)
        if isinstance(names, list) and group.name in names
    ]
    return ~np.isin(events.group, partly)


def _message_findings(events: Events, send: Ints, recv: Ints) -> tuple[Finding, ...]:
    """Returns a finding for each pair of disagreeing lines and payloads."""
    given, wanted = events.payload[send], events.payload[recv]
    differ = (given != wanted) & (given != NONE) & (wanted != NONE)
    send, recv = send[differ], recv[differ]
    if len(send) == 0:
        return ()
    columns = events.rank, events.payload, events.file, events.line
    found = []
    for index, times in count_alike(*(column[side] for column in columns for side in (send, recv))):
        sides = int(send[index]), int(recv[index])
        what = disagreement(*(events.tables.payloads[events.payload[side]] for side in sides))
        if what:
            mine, theirs = both = tuple(operation_of(events, side) for side in sides)
            message = (
                f"rank {mine.rank} sends {payload_text(mine)}, but rank {theirs.rank} receives "
                f"{payload_text(theirs)}: the {what} differs{_times_text(times)}.{acts_text(both)}"
            )
            hint = (
                f"Receive into {payload_text(mine)} on rank {theirs.rank}, or send "
                f"{payload_text(theirs)}.{_EFFECTS.get(what, '')}"
            )
            ranks = tuple(sorted((mine.rank, theirs.rank)))
            finding = Finding("message_mismatch", ranks, both, message, hint)
            found.append((_SEVERITY.index(what), index, finding))
    return _worst(found)


def _worst(found: Iterable[tuple[Any, Any, Finding]]) -> tuple[Finding, ...]:
    """Returns at most ``MOST_FINDINGS`` findings, sorted by their keys."""
    return tuple(one for _, _, one in sorted(found, key=itemgetter(0, 1))[:MOST_FINDINGS])


def _times_text(times: int) -> str:
    return f" ({count(times, 'time')})" if times > 1 else ""


def find_collective_mismatches(events: Events) -> tuple[Finding, ...]:
    """Finds collectives that ranks call differently.

    The calls may differ in kind, root, size, dtype, reduction, shape or order in memory. Only the
    first such call of each group is reported, because later mismatches may be consequences.

    Example:
        >>> from ringsim.traces.events import Group, Tables, make_events
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["barrier"], OP_CODES["all_reduce"]],
        ...         "group": [0, 0],
        ...     },
        ...     Tables(groups=(Group("world", (0, 1)),)),
        ... )
        >>> print(find_collective_mismatches(events)[0])
        the ranks disagree on collective 1 of group world: the kind differs.
          rank 0 calls barrier (world)
          rank 1 calls all_reduce (world)
          Hint: Call the same collectives in the same order, with the same arguments, on all ranks of a group.
    """  # noqa: E501
    return _call_findings(events, CollectiveCalls.of(events), slice(None))


class _WrongCall(NamedTuple):
    """A collective call on which members disagree, with its position among the group's calls."""

    place: int
    events: list[int]
    differs: str  # a clause
    roots: bool = False  # whether the roots differ


def _call_findings(
    events: Events,
    calls: CollectiveCalls,
    compared: Ints | slice,
    count_before: Callable[[Events, int], int] = lambda _events, _event: 0,
) -> tuple[Finding, ...]:
    """Returns a finding for each group's first call on which members disagree.

    Only the ``compared`` events count. ``count_before`` returns the number of calls on an event's
    group that precede ``events``.
    """
    event, call, place = (column[compared] for column in (calls.event, calls.call, calls.place))
    first = np.zeros(len(calls.last), dtype=np.int64)
    first[call[::-1]] = event[::-1]
    mine = first[call]
    columns = (events.op, events.payload, events.peer)
    sides = np.stack([column[side] for column in columns for side in (mine, event)])
    # Most calls are equal, and few combinations occur among the others.
    unlike = np.flatnonzero((sides[::2] != sides[1::2]).any(axis=0))
    number = number_rows(*sides[:, unlike])
    _, example = np.unique(number, return_index=True)
    said = [_call_difference(events, *column) for column in sides[:, unlike[example]].T.tolist()]
    wrong: dict[int, _WrongCall] = {}  # by call
    for index, kind in zip(unlike.tolist(), number.tolist(), strict=True):
        if what := said[kind]:
            differs = f"the {what} differ{'' if what == 'members' else 's'}"
            known = _WrongCall(int(place[index]), [int(mine[index])], differs, what == "root")
            wrong.setdefault(int(call[index]), known).events.append(int(event[index]))
    for index, both, differs in _find_unfit_splits(events, event, call):
        found = _WrongCall(int(place[index]), event[both].tolist(), differs)
        wrong.setdefault(int(call[index]), found)
    by_group = defaultdict[int, list[_WrongCall]](list)
    for one in wrong.values():
        by_group[events.group[one.events[0]]].append(one)
    earliest = (min(its, key=lambda one: one.place) for its in by_group.values())
    return tuple(
        _call_finding(events, one, one.place + count_before(events, one.events[0]))
        for one in earliest
    )


def _find_unfit_splits(
    events: Events, event: Ints, call: Ints
) -> Iterator[tuple[int, list[int], str]]:
    """Yields each all_to_all in which a rank sends more or fewer bytes than the other rank expects.

    Each entry has the first index, the indices of both ranks, and a description.
    """
    uneven = np.flatnonzero(np.isin(events.op[event], _UNEVEN))
    order = uneven[np.argsort(call[uneven], kind="stable")]
    for its in np.split(order, np.flatnonzero(np.diff(call[order])) + 1) if len(order) else ():
        members = events.tables.groups[events.group[event[its[0]]]].ranks
        known = []
        columns = its, events.payload[event[its]], events.rank[event[its]]
        for index, payload, rank in np.stack(columns, axis=1).tolist():
            splits = events.tables.payloads[payload].splits if payload != NONE else ()
            if rank in members and [len(side) for side in splits] == [len(members)] * 2:
                known.append((index, rank, members.index(rank), *splits))
        for mine, theirs in itertools.permutations(known, 2):
            index, rank, place, gives, _ = mine
            other_index, other, target, _, takes = theirs
            if gives[target] != takes[place]:
                what = (
                    f"rank {rank} sends {count(gives[target], 'byte')} to rank {other}, but rank "
                    f"{other} expects {takes[place]:,}"
                )
                yield int(its[0]), [index, other_index], what
                break


def _call_difference(
    events: Events,
    op: int,
    other_op: int,
    payload: int,
    other_payload: int,
    root: int,
    other_root: int,
) -> str:
    """Returns the property in which two ranks' calls differ, or "" if they agree."""
    if not same_collective(OP_NAMES[op], OP_NAMES[other_op]):
        return "kind"
    if root != other_root:
        return "root"
    if NONE in (payload, other_payload) or payload == other_payload:
        return ""
    mine, theirs = events.tables.payloads[payload], events.tables.payloads[other_payload]
    if op == _NEW_GROUP:
        return "members" if mine.shape != theirs.shape else ""
    if op in _UNEVEN:
        empty = min(mine.size_bytes, theirs.size_bytes) <= 0
        return "" if mine.dtype == theirs.dtype or empty else "dtype"
    what = disagreement(mine, theirs)
    if what == "shape" and op != other_op:  # variants accept the same elements in different shapes
        return ""
    return what or ("order of elements in memory" if mine.strides != theirs.strides else "")


def _call_finding(events: Events, wrong: _WrongCall, place: int) -> Finding:
    """Returns the finding for a call, given its position since the group was created."""
    operations = tuple(operation_of(events, event) for event in wrong.events)
    root = " with root {}" if wrong.roots else ""
    calls = [f"rank {one.rank} calls {one}{root.format(one.peer)}" for one in operations]
    message = (
        f"the ranks disagree on collective {place + 1} of group {operations[0].group}: "
        f"{wrong.differs}.{lines_text(calls)}"
    )
    kind, hint = "collective_mismatch", _SAME_CALLS
    if operations[0].op == "new_group":
        kind, hint = "group_order_mismatch", SAME_GROUPS
    ranks = tuple(sorted(one.rank for one in operations))
    return Finding(kind, ranks, operations, message, hint)


def find_notices(events: Events) -> tuple[Finding, ...]:
    """Finds operations that were refused at run time, as marked in the trace.

    Example:
        >>> from ringsim.traces.events import Tables, make_events
        >>> from ringsim.traces.events import word_notice
        >>> names = Tables(labels=(word_notice("buffer_hazard", "two buffers overlap."),))
        >>> find_notices(make_events({"rank": [1], "op": [_MARK], "label": [0]}, names))[0].message
        'rank 1: two buffers overlap.'
    """
    # the ranks that found the mistake, the ranks involved, the operations
    told: dict[tuple[str, str], tuple[set[int], set[int], list[Operation]]] = {}
    for event, said in _list_notices(events):
        if said[0] == THREAD_FAILED:
            continue
        finders, ranks, operations = told.setdefault(said, (set(), set(), []))
        mine = [operation_of(events, one) for one in _list_concerned(events, event)]
        finders.add(int(events.rank[event]))
        ranks |= {int(events.rank[event]), *(one.rank for one in mine)}
        if said[0] != "buffer_hazard":  # it concerns only the rank's own memory
            ranks |= {one.peer for one in mine if one.peer >= 0 and one.kind != COLLECTIVE}
        operations += mine
    findings = []
    for (kind, message), (finders, ranks, operations) in told.items():
        # a mismatch names all sides, but a rank's own mistake only that rank
        named = sorted(finders if kind in _OWN_MISTAKES else ranks)
        concerned = tuple(dict.fromkeys([*named, *sorted(ranks)]))
        text = f"{name_ranks(named)}: {message}"
        findings.append(Finding(kind, concerned, tuple(operations), text))
    return tuple(findings)


def find_failed_threads(events: Events) -> dict[int, str]:
    """Returns the error of each rank's first failed thread, by rank."""
    return {
        int(events.rank[event]): text
        for event, (kind, text) in reversed([*_list_notices(events)])
        if kind == THREAD_FAILED
    }


def _list_notices(events: Events) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yields the marks that are notices, each with the notice's kind and message."""
    notices = [*map(read_notice, events.tables.labels)]
    for event in np.flatnonzero((events.op == _MARK) & (events.label != NONE)).tolist():
        if (said := notices[events.label[event]]) is not None:
            yield event, said


def _list_concerned(events: Events, mark: int) -> list[int]:
    """Returns the operation that a notice is about, if known, and those that correspond to it.

    This is the rank's latest operation, if it was refused on the mark's line.
    """
    before = np.flatnonzero(
        (events.rank[:mark] == events.rank[mark]) & (events.kind[:mark] <= COLLECTIVE)
    )[-1:]
    about = before[refused(events)[before] & (events.line[before] == events.line[mark])].tolist()
    return [*about, *(other for one in about for other in _others_in(events, one))]


def _others_in(events: Events, event: int) -> list[int]:
    """Returns the calls of other ranks that correspond to a refused collective."""
    if events.kind[event] != COLLECTIVE:
        return []
    group = np.flatnonzero((events.kind == COLLECTIVE) & (events.group == events.group[event]))
    counted, rank = ~refused(events)[group], events.rank[group]
    place = np.count_nonzero(counted & (rank == events.rank[event]) & (group < event))
    found = []
    for other in np.setdiff1d(rank, events.rank[event]):
        its = rank == other
        # each may itself have been refused, if both ranks found the difference
        before = np.cumsum(counted[its]) - counted[its]
        found += group[its][before == place][:1].tolist()
    return found


def find_leaks(trace: Trace) -> tuple[Finding, ...]:
    """Finds operations that were still open when their ranks returned.

    No thread waited for them, or a remaining thread was still waiting. There is one finding for
    each line, at most ``MOST_FINDINGS``.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events(
        ...     {
        ...         "rank": [0],
        ...         "op": [OP_CODES["isend"]],
        ...         "peer": [1],
        ...         "tag": [0],
        ...         "status": [IN_FLIGHT],
        ...         "line": [7],
        ...     }
        ... )
        >>> print(find_leaks(Trace(events, {"world_size": 2}))[0].message)
        rank 0 never waited for its isend.
          rank 0 posted isend to 1 (tag 0)
          the other side of the message was never posted
    """
    events = trace.events
    kind = events.kind
    left = (kind <= COLLECTIVE) & (events.status == IN_FLIGHT)
    if is_on_nccl(trace):  # the GPU, not a thread, waited for the others
        left &= events.wait_ns == NONE
    open_ops = np.flatnonzero(left)
    met = np.zeros(len(events), dtype=bool)
    met[trace.messages.send] = met[trace.messages.recv] = True
    about = (events.rank, events.op, events.file, events.line, met, events.wait_ns != NONE)
    found = []
    for index, number in count_alike(*(column[open_ops] for column in about)):
        event = int(open_ops[index])
        operation = operation_of(events, event)
        hint = (
            f"Keep the handle that {operation.op} returns, and call its wait() before you use the "
            "tensor."
        )
        message = f"rank {operation.rank} never waited for its {operation.op}"
        if events.wait_ns[event] != NONE:
            hint = "End this thread and join it before the worker returns."
            message = (
                f"rank {operation.rank} returned while one of its threads waited in {operation.op}"
            )
        message += f"{_times_text(number)}.{acts_text([operation])}"
        if kind[event] != COLLECTIVE:
            message += (
                f"\n  the other side of the message was {'' if met[event] else 'never '}posted"
            )
        leak = Finding("leaked_request", (operation.rank,), (operation,), message, hint)
        found.append((bool(met[event]), -number, leak))
    return _worst(found)


def find_missing(events: Events) -> tuple[Finding, ...]:
    """Finds collectives in a finished run that some members never entered.

    No rank is blocked in these operations.

    Example:
        >>> from ringsim.traces.events import Group, Tables, make_events
        >>> events = make_events(
        ...     {"rank": [0], "op": [OP_CODES["barrier"]], "group": [0], "status": [IN_FLIGHT]},
        ...     Tables(groups=(Group("world", (0, 1)),)),
        ... )
        >>> print(find_missing(events)[0].message)
        rank 1 never took part in barrier.
          rank 0 posted barrier (world)
    """
    calls = CollectiveCalls.of(events)
    waits = (events.status[calls.event] == IN_FLIGHT) & (events.wait_ns[calls.event] == NONE)
    findings = []
    for call in np.unique(calls.call[waits & ~calls.complete[calls.call]])[:MOST_FINDINGS].tolist():
        operations = tuple(operation_of(events, event) for event in calls.events_of(call))
        first, there = operations[0], [one.rank for one in operations]
        members = events.tables.groups[events.group[calls.last[call]]].ranks
        missing = [rank for rank in members if rank not in there]
        message = f"{name_ranks(missing)} never took part in {first.op}.{acts_text(operations)}"
        hint = f"Call {first.op} on every member of group {first.group}."
        ranks = (*sorted(missing), *there)
        findings.append(Finding("missing_participant", ranks, operations, message, hint))
    return tuple(findings)


def find_order_mismatches(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Finds groups in use that have the same name but different members.

    The ranks created their groups in different orders.
    """
    by_name: dict[tuple[str, int], dict[tuple[int, ...], list[Operation]]]
    by_name = defaultdict(lambda: defaultdict(list))
    for one in itertools.chain(*(view.posted for view in snapshot.ranks)):
        if one.group.name:
            by_name[one.group.name, one.group.world][one.group.ranks].append(one.operation)
    findings = []
    for (name, _), members in by_name.items():
        if len(members) > 1:
            first = tuple(some[0] for some in members.values())
            users = [sorted({one.rank for one in some}) for some in members.values()]
            made = [
                f"{list(ranks)} on {name_ranks(using)}"
                for ranks, using in zip(members, users, strict=True)
            ]
            ranks = tuple(sorted({*itertools.chain(*users)}))
            message = f"group {name} has different members on different ranks.{lines_text(made)}"
            findings.append(Finding("group_order_mismatch", ranks, first, message, SAME_GROUPS))
    return tuple(findings)


def find_races(trace: Trace) -> tuple[Finding, ...]:
    """Finds channels on which a thread posted while another thread of its rank was blocked.

    The order of their messages is left to chance. Threads that take turns are not reported, because
    Python may order them in ways that no trace shows. Recvs from any source do not count, because
    the trace records only the sources of the messages that they received. There are at most
    ``MOST_FINDINGS`` findings.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> sends = {
        ...     "rank": [0, 0],
        ...     "thread": [0, 1],
        ...     "op": [OP_CODES["send"]] * 2,
        ...     "peer": [1, 1],
        ...     "tag": [0, 0],
        ...     "done_ns": [8, 9],
        ... }
        >>> [
        ...     len(
        ...         find_races(
        ...             Trace(make_events({**sends, "post_ns": [5, post]}), {"world_size": 2})
        ...         )
        ...     )
        ...     for post in (7, 8)
        ... ]
        [1, 0]
    """
    events = trace.events
    some = np.flatnonzero((events.kind <= RECV) & (events.peer >= 0) & ~refused(events))
    if not (events.thread[some] != 0).any():
        return ()
    end = np.where(events.status == IN_FLIGHT, np.iinfo(np.int64).max, events.done_ns)
    send, recv = trace.messages.send, trace.messages.recv
    # the other side may then let a thread continue
    end[send] = end[recv] = np.minimum(end[send], end[recv])
    channel = number_rows(events.kind[some], number_channels(events, some))
    order = np.lexsort((events.post_ns[some], channel))
    channel, earlier, later = channel[order], some[order][:-1], some[order][1:]
    met = (channel[1:] == channel[:-1]) & (events.thread[earlier] != events.thread[later])
    met &= np.isin(events.op[earlier], _BLOCKING) & (events.post_ns[later] < end[earlier])
    _, first = np.unique(channel[1:][met], return_index=True)
    findings = []
    for index in np.flatnonzero(met)[first[:MOST_FINDINGS]]:
        both = operation_of(events, earlier[index]), operation_of(events, later[index])
        rank = both[0].rank
        message = (
            f"two threads of rank {rank} use the same tag and peer at the same time."
            f"{acts_text(both)}"
        )
        findings.append(Finding("race", (rank,), both, message, _OWN_TAGS))
    return tuple(findings)
