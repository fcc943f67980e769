"""What each rank did, as a program without times: work, sends, recvs and collectives, and what each of them needs to be over before it.

A trace has times; a program has reasons. Between two operations a thread worked, except while it was blocked; an operation was posted when
what stood before it was over; and what comes after a wait needs what was waited for::

    thread    work | isend i | work | wait for i | work

    work 0 --> isend i -----.
        '----> work 1 ------+--> work 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.traces.events import COLLECTIVE, NONE, OP_NAMES, SPAN, Events, Group
from ringsim.traces.matching import refused

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["Step", "make_programs"]

WORK, SEND, RECV, TOGETHER = "work", "send", "recv", "together"
_MOST_NEEDS: Final = 4  # more are gathered in a step of no work, so that not each of many steps names each of many others
_POST, _JOIN, _OPEN, _CLOSE = range(4)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
        kind: "work", "send", "recv", or "together" for a collective.
        needs: which steps of the same rank must be over before it; smaller numbers in what a trace gives.
        work_ns: of work, how long it takes.
        peer: of a message the other side; of a collective the root, -1 for none.
        tag: of a message.
        size_bytes: of what moves; of a collective the S of ``ringsim.costs``.
        op: how torch calls it; empty for work.
        group: of a collective.
        label: of work, the name of the innermost span around it.
        stage: of that span, or of the message.
        microbatch: the same.
        thread: who does it.
        after: which steps must have begun before it.
    """

    kind: str
    needs: tuple[int, ...] = ()
    work_ns: int = 0
    peer: int = NONE
    tag: int = 0
    size_bytes: int = 0
    op: str = ""
    group: Group | None = None
    label: str = ""
    stage: int = NONE
    microbatch: int = NONE
    thread: int = 0
    after: tuple[int, ...] = ()


def make_programs(trace: Trace) -> list[list[Step]]:
    """Finds the program of each rank of a trace.

    Operations that met nobody are left out, for nobody could ever go on from there: sends and recvs without a partner, collectives that
    not all members called. So are the making of groups, and marks.

    Args:
        trace: any trace.

    Returns:
        By rank, its steps in the order in which they began.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [0, 1], "op": [OP_CODES["isend"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
        ...     "tag": [7, 7], "post_ns": [0, 30], "wait_ns": [20, 30], "done_ns": [60, 70]}), {"world_size": 2})
        >>> for program in make_programs(trace):
        ...     print([(step.kind, step.work_ns, step.needs) for step in program])
        [('send', 0, ()), ('work', 20, ())]
        [('work', 30, ()), ('recv', 0, (0,))]
    """
    events = trace.events
    operations = _messages(trace) | _collectives(events, trace.world_size)
    first = int(events.post_ns.min()) if len(events) else 0
    programs: list[list[Step]] = [[] for _ in range(trace.world_size)]
    ranks, starts = np.unique(events.rank, return_index=True)
    for rank, mine in zip(ranks.tolist(), np.split(np.arange(len(events)), starts[1:]), strict=False):
        for thread in np.unique(events.thread[mine]).tolist():
            _follow(programs[rank], events, mine[events.thread[mine] == thread].tolist(), operations, first)
    return programs


def _messages(trace: Trace) -> dict[int, Step]:
    """Returns a step for each send and recv that met, by its place among the events."""
    events, found = trace.events, trace.messages
    sizes = [payload.size_bytes for payload in events.tables.payloads]
    columns = (found.src, found.dst, found.tag, found.group, found.payload, found.stage, found.microbatch, found.send, found.recv)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    # Elsewhere the tag alone tells messages of one pair of ranks apart, here the group does, too. Where one tag is used on two groups the
    # pairs of both are numbered.
    groups = {(src, dst, tag): group for src, dst, tag, group, *_ in rows}
    clash = any(groups[src, dst, tag] != group for src, dst, tag, group, *_ in rows) or any(not 0 <= tag < 2**30 for _, _, tag, *_ in rows)
    numbers = {pair: number for number, pair in enumerate(dict.fromkeys((group, tag) for _, _, tag, group, *_ in rows))}
    steps = {}
    for src, dst, tag, group, payload, stage, microbatch, send, recv in rows:
        more: dict[str, Any] = {"tag": numbers[group, tag] if clash else tag, "stage": stage, "microbatch": microbatch}
        more["size_bytes"] = max(sizes[payload], 0) if payload != NONE else 0
        steps[send] = Step(SEND, peer=dst, op=OP_NAMES[events.op[send]], thread=int(events.thread[send]), **more)
        steps[recv] = Step(RECV, peer=src, op=OP_NAMES[events.op[recv]], thread=int(events.thread[recv]), **more)
    return steps


def _collectives(events: Events, world_size: int) -> dict[int, Step]:
    """Returns a step for each call of a collective that all members of its group made, by its place among the events."""
    calls: dict[int, dict[int, list[int]]] = {}
    counts = (events.kind == COLLECTIVE) & (events.group != NONE) & ~refused(events)
    for index in np.flatnonzero(counts).tolist():
        if OP_NAMES[events.op[index]] != "new_group":
            calls.setdefault(int(events.group[index]), {}).setdefault(int(events.rank[index]), []).append(index)
    sizes = events.size_bytes
    steps = {}
    for number, by_rank in calls.items():
        group = events.tables.groups[number]
        if (
            not group.ranks
            or not all(rank < world_size and rank in by_rank for rank in group.ranks)
            or len(set(group.ranks)) < len(group.ranks)
        ):
            continue
        for same in zip(*(by_rank[rank] for rank in group.ranks), strict=False):
            ops = {OP_NAMES[events.op[index]] for index in same}
            if len(ops) > 1:
                break  # from here on the members do not speak of the same
            size = max(int(sizes[list(same)].max()), 0)
            for index in same:
                root, thread = int(events.peer[index]), int(events.thread[index])
                steps[index] = Step(TOGETHER, peer=root, size_bytes=size, op=next(iter(ops)), group=group, thread=thread)
    return steps


def _follow(program: list[Step], events: Events, mine: list[int], operations: dict[int, Step], first: int) -> None:
    """Adds the steps of one thread to a program."""
    tables, clock, ready = events.tables, first, list[int]()
    numbers: dict[int, int] = {}  # of the events, as steps
    spans: list[int] = []
    thread = int(events.thread[mine[0]])

    def work(until: int) -> None:
        nonlocal clock, ready
        if until > clock:
            around = spans[-1] if spans else NONE
            label = tables.labels[events.label[around]] if around != NONE and events.label[around] != NONE else ""
            stage, microbatch = (int(column[around]) if around != NONE else NONE for column in (events.stage, events.microbatch))
            step = Step(WORK, tuple(sorted(ready)), work_ns=until - clock, label=label, stage=stage, microbatch=microbatch, thread=thread)
            program.append(step)
            ready, clock = [len(program) - 1], until

    for time, _, kind, index in _moments(events, mine, operations):
        if kind == _POST:
            work(time)
            if len(ready) > _MOST_NEEDS:
                program.append(Step(WORK, needs=tuple(sorted(ready)), thread=thread))
                ready = [len(program) - 1]
            step = operations[index]
            numbers[index] = len(program)
            program.append(replace(step, needs=tuple(sorted(ready))))
        elif kind == _JOIN:
            work(int(events.wait_ns[index]))
            clock = max(clock, time)
            ready.append(numbers[index])
        else:
            work(time)
            if kind == _OPEN:
                spans.append(index)
            else:
                spans.remove(index)


def _moments(events: Events, mine: list[int], operations: dict[int, Step]) -> Iterator[tuple[int, int, int, int]]:
    """Returns the moments of a thread, (time, place among the events, kind, event), in the order of time.

    A wait counts when it is over: whatever the thread does while it is blocked it did before.
    """
    found = []
    times = (events.post_ns[mine].tolist(), events.wait_ns[mine].tolist(), events.done_ns[mine].tolist())
    for index, post, wait, done in zip(mine, *times, strict=True):
        if index in operations:
            found.append((post, index, _POST, index))
            if wait != NONE and done != NONE:
                found.append((max(post, wait, done), index, _JOIN, index))
        elif events.kind[index] == SPAN and done != NONE:
            found.append((post, index, _OPEN, index))
            found.append((max(done, post), index, _CLOSE, index))
    return iter(sorted(found))
