"""Recovers programs without times from traces, and replays them on the virtual clock.

A trace contains times, whereas a program contains dependencies: work, sends, recvs and collectives,
and the steps that each of them needs. You can therefore change a program, or run it on different
links. The program follows from three rules. Between two operations, a thread worked, except while
it was blocked. An operation was posted when the work before it was done. The steps after a wait
need the operation that was waited for::

    thread    work | isend i | work | wait for i | work

    work 0 --> isend i -----.
        '----> work 1 ------+--> work 2

In a replay, every message leaves when its step begins. The link between two ranks carries one
message after another. For the sender, a message is done when its bytes have left; for the receiver,
when it has arrived. So a send never waits for its recv. Each thread of a rank does its work in
order. A collective begins when all members have reached it, and takes as long as its rounds
(``ringsim.traces.collectives``).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.link import Link
from ringsim.simulator.links import PrivateLinks
from ringsim.traces.collectives import count_rounds
from ringsim.traces.event_rows import EventRows
from ringsim.traces.events import (
    COLLECTIVE,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    OP_NAMES,
    SPAN,
    Events,
    Group,
    Payload,
)
from ringsim.traces.matching import refused

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["ProgramStep", "make_programs", "replay"]

WORK, SEND, RECV, TOGETHER = "work", "send", "recv", "together"
# if there are more needs, an extra step without work joins them, because otherwise each of many
# steps could list each of many others
_MOST_NEEDS: Final = 4
_POST, _JOIN, _OPEN, _CLOSE = range(4)


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step of a program: "work", "send", "recv", or "together" for a collective.

    Attributes:
        needs: the steps of the same rank that must be done before this step. In a program from a
            trace, these are earlier steps.
        peer: the other side of a message, or the root of a collective, or -1 if there is none.
        group: the operation's group, or None for the world.
        size_bytes: the size of the data; for a collective, the size S as defined in
            ``ringsim.traces.collectives``.
        op: torch's name for the operation; empty for work.
        label: for work, the name of the innermost span around the work, which also determines
            ``stage`` and ``microbatch``.
        thread: the thread that performs the step.
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


def make_programs(trace: Trace) -> list[list[ProgramStep]]:
    """Recovers each rank's program from a trace.

    Operations without a partner are left out, because a replay would wait for them forever. These
    are unmatched sends and recvs, and collectives that some members did not call. Marks and the
    creation of groups are also left out.

    Args:
        trace: any trace.

    Returns:
        The steps of each rank, in the order in which they began.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(
        ...     make_events(
        ...         {
        ...             "rank": [0, 1],
        ...             "op": [OP_CODES["isend"], OP_CODES["recv"]],
        ...             "group": [-1, -1],
        ...             "peer": [1, 0],
        ...             "tag": [7, 7],
        ...             "post_ns": [0, 30],
        ...             "wait_ns": [20, 30],
        ...             "done_ns": [60, 70],
        ...         }
        ...     ),
        ...     {"world_size": 2},
        ... )
        >>> for program in make_programs(trace):
        ...     print([(step.kind, step.work_ns, step.needs) for step in program])
        [('send', 0, ()), ('work', 20, ())]
        [('work', 30, ()), ('recv', 0, (0,))]
    """
    events = trace.events
    operations = _messages(trace) | _collectives(events, trace.world_size)
    first = int(events.post_ns.min()) if len(events) else 0
    programs: list[list[ProgramStep]] = [[] for _ in range(trace.world_size)]
    for rank, _, mine in events.by_thread():
        _follow(programs[rank], events, mine.tolist(), operations, first)
    return programs


def _messages(trace: Trace) -> dict[int, ProgramStep]:
    """Returns a step for each matched send and recv. The keys are event indexes."""
    events, found = trace.events, trace.messages
    groups, sizes = (*events.tables.groups, None), events.size_bytes  # the last entry is for NONE
    steps = {}
    for at, (send, recv) in enumerate(zip(found.send.tolist(), found.recv.tolist(), strict=True)):
        for kind, peer, index in ((SEND, found.dst, send), (RECV, found.src, recv)):
            steps[index] = ProgramStep(
                kind,
                peer=int(peer[at]),
                tag=int(found.tag[at]),
                size_bytes=max(int(sizes[send]), 0),
                op=OP_NAMES[events.op[index]],
                group=groups[found.group[at]],
                stage=int(found.stage[at]),
                microbatch=int(found.microbatch[at]),
                thread=int(events.thread[index]),
            )
    return steps


def _collectives(events: Events, world_size: int) -> dict[int, ProgramStep]:
    """Returns a step for each call to a collective that all members of the group called.

    The keys are event indexes.
    """
    calls: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    counts = (events.kind == COLLECTIVE) & (events.group != NONE) & ~refused(events)
    counts &= events.op != OP_CODES["new_group"]
    for index in np.flatnonzero(counts).tolist():
        calls[events.group[index]][events.rank[index]].append(index)
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
                break  # from here on, the members call different operations
            size = max(int(sizes[list(same)].max()), 0)
            for index in same:
                steps[index] = ProgramStep(
                    TOGETHER,
                    peer=int(events.peer[index]),
                    size_bytes=size,
                    op=OP_NAMES[events.op[index]],
                    group=group,
                    thread=int(events.thread[index]),
                )
    return steps


def _follow(
    program: list[ProgramStep],
    events: Events,
    mine: list[int],
    operations: dict[int, ProgramStep],
    first: int,
) -> None:
    labels, clock, ready = (*events.tables.labels, ""), first, list[int]()
    numbers: dict[int, int] = {}  # from event indexes to step indexes
    spans: list[int] = []
    thread = int(events.thread[mine[0]])

    def work(until: int) -> None:
        nonlocal clock, ready
        if until <= clock:
            return
        step = ProgramStep(WORK, tuple(sorted(ready)), until - clock, thread=thread)
        if spans:
            step = replace(
                step,
                label=labels[events.label[spans[-1]]],
                stage=int(events.stage[spans[-1]]),
                microbatch=int(events.microbatch[spans[-1]]),
            )
        program.append(step)
        ready, clock = [len(program) - 1], until

    for time, index, kind in _moments(events, mine, operations):
        if kind == _POST:
            work(time)
            if len(ready) > _MOST_NEEDS:
                program.append(ProgramStep(WORK, needs=tuple(sorted(ready)), thread=thread))
                ready = [len(program) - 1]
            numbers[index] = len(program)
            program.append(replace(operations[index], needs=tuple(sorted(ready))))
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


def _moments(
    events: Events, mine: list[int], operations: dict[int, ProgramStep]
) -> list[tuple[int, int, int]]:
    """Returns a thread's moments in time order.

    Each moment is a tuple (time, event index, kind). The moment of a wait is the wait's end.
    """
    found = []
    times = (column[mine].tolist() for column in (events.post_ns, events.wait_ns, events.done_ns))
    for index, post, wait, done in zip(mine, *times, strict=True):
        if index in operations:
            found.append((post, index, _POST))
            if wait != NONE and done != NONE:
                found.append((max(post, wait, done), index, _JOIN))
        elif events.kind[index] == SPAN and done != NONE:
            found.append((post, index, _OPEN))
            found.append((max(done, post), index, _CLOSE))
    return sorted(found)


_OPS: Final = {WORK: "span", SEND: "isend", RECV: "irecv"}  # for steps without an op

_Channel = tuple[int, int, Group | None, int]  # from, to, group, tag


def replay(programs: list[list[ProgramStep]], link: Link) -> Trace:
    """Runs programs on the virtual clock.

    Args:
        programs: the steps of each rank.
        link: the cost of a message.

    Returns:
        A simulated trace. A step that waits forever is in flight, and the steps after it are
        missing.

    Raises:
        ArgumentError: ``link`` is not a Link.
        ValueError: a time exceeds 292 years.
        TraceFileError: a collective has no known messages.

    Example:
        >>> programs = [
        ...     [
        ...         ProgramStep("work", work_ns=500),
        ...         ProgramStep("send", needs=(0,), peer=1, size_bytes=1000),
        ...     ],
        ...     [ProgramStep("recv", peer=0)],
        ... ]
        >>> replay(programs, Link(alpha_s=1e-6, beta_s_per_byte=1e-9)).events.done_ns.tolist()
        [500, 1500, 2500]
    """
    clock = _Replay(programs, link)
    clock.run()
    return clock.trace()


@dataclass(slots=True, eq=False)
class _Node:
    """The state of a step in a replay.

    The state consists of the missing needs, the earliest possible start, the actual start, and the
    end.
    """

    rank: int
    step: ProgramStep
    missing: int
    ready_s: float = 0.0
    begun_s: float | None = None
    done_s: float | None = None
    needed_by: list[_Node] = field(default_factory=list)


class _Replay:
    def __init__(self, programs: list[list[ProgramStep]], link: Link) -> None:
        self._link, self._carrier = link, PrivateLinks(link)
        self._world = Group("world", tuple(range(len(programs))))
        self._nodes = [
            [_Node(rank, step, len(step.needs)) for step in program]
            for rank, program in enumerate(programs)
        ]
        for nodes in self._nodes:
            for node in nodes:
                for need in node.step.needs:
                    nodes[need].needed_by.append(node)
        self._due: list[tuple[float, int, _Node]] = []
        self._count = itertools.count().__next__
        self._free: dict[tuple[int, int], float] = {}  # when the work of (rank, thread) ends
        self._arrivals: defaultdict[_Channel, deque[float]] = defaultdict(deque)
        self._receivers: defaultdict[_Channel, deque[_Node]] = defaultdict(deque)
        # by group and number of the call
        self._gathered: defaultdict[tuple[Group, int], list[_Node]] = defaultdict(list)
        self._calls: defaultdict[tuple[int, Group], int] = defaultdict(int)

    def run(self) -> None:
        """Runs all steps that can run."""
        for nodes in self._nodes:
            for node in nodes:
                if node.missing == 0:
                    heappush(self._due, (0.0, self._count(), node))
        while self._due:
            time_s, _, node = heappop(self._due)
            self._begin(time_s, node)

    def _begin(self, time_s: float, node: _Node) -> None:
        step, rank = node.step, node.rank
        if step.kind == WORK:
            time_s = max(time_s, self._free.get((rank, step.thread), 0.0))
        node.begun_s = time_s
        if step.kind == WORK:
            end_s = time_s + step.work_ns * 1e-9
            self._free[rank, step.thread] = end_s
            self._end(end_s, node)
        elif step.kind == SEND:
            arrival_s = self._carrier.carry(rank, step.peer, step.size_bytes, time_s)
            self._end(arrival_s - self._link.alpha_s, node)
            channel = (rank, step.peer, step.group, step.tag)
            self._arrivals[channel].append(arrival_s)
            self._meet(channel)
        elif step.kind == RECV:
            channel = (step.peer, rank, step.group, step.tag)
            self._receivers[channel].append(node)
            self._meet(channel)
        else:
            self._gather(time_s, node)

    def _meet(self, channel: _Channel) -> None:
        """Ends the recvs whose messages have been sent."""
        arrivals, receivers = self._arrivals[channel], self._receivers[channel]
        while arrivals and receivers:
            node = receivers.popleft()
            self._end(max(arrivals.popleft(), node.begun_s or 0.0), node)

    def _gather(self, time_s: float, node: _Node) -> None:
        """Ends a collective when its last member has arrived."""
        step, group = node.step, node.step.group or self._world
        self._calls[node.rank, group] += 1
        there = self._gathered[group, self._calls[node.rank, group]]
        there.append(node)
        if len(there) == len(group.ranks):
            rounds, size_bytes = count_rounds(step.op, len(group.ranks), step.size_bytes)
            for one in there:
                self._end(time_s + rounds * self._link.time_s(size_bytes), one)

    def _end(self, time_s: float, node: _Node) -> None:
        node.done_s = time_s
        for waiting in node.needed_by:
            waiting.ready_s = max(waiting.ready_s, time_s)
            waiting.missing -= 1
            if waiting.missing == 0:
                heappush(self._due, (waiting.ready_s, self._count(), waiting))

    def trace(self) -> Trace:
        """Returns the trace of the replay."""
        rows = EventRows()
        for mine in self._nodes:
            waits = _find_waits(mine)
            for node, wait_s in zip(mine, waits, strict=True):
                if node.begun_s is not None:
                    self._add(rows, node, node.begun_s, wait_s)
        link = {"alpha_s": self._link.alpha_s, "beta_s_per_byte": self._link.beta_s_per_byte}
        notes = ["replayed on the virtual clock: a message leaves when it is posted"]
        return rows.trace(
            {"world_size": len(self._nodes), "source": "simulated", "link": link, "notes": notes}
        )

    def _add(self, rows: EventRows, node: _Node, begun_s: float, wait_s: float) -> None:
        step, done_s = node.step, node.done_s
        columns: dict[str, Any] = {
            "stage": step.stage,
            "microbatch": step.microbatch,
            "thread": step.thread,
            "done_ns": NONE if done_s is None else _ns(done_s),
            "status": IN_FLIGHT if done_s is None else OK,
        }
        if step.kind == WORK:
            columns["label"] = step.label or "work"
        else:
            columns["payload"] = Payload("", (), step.size_bytes)
            columns["peer"] = step.peer
            columns["group"] = step.group or self._world
            columns["tag"] = NONE if step.kind == TOGETHER else step.tag
            columns["wait_ns"] = _ns(min(max(wait_s, begun_s), max(done_s or 0.0, begun_s)))
        rows.add(node.rank, step.op or _OPS[step.kind], _ns(begun_s), **columns)


def _find_waits(nodes: list[_Node]) -> list[float]:
    """Returns, for each step of a rank, the time at which the rank began to wait for it.

    The wait begins when everything else that a following step needs is done.
    """
    waits = [math.inf] * len(nodes)
    done_s = [-1.0 if node.done_s is None else node.done_s for node in nodes]
    for node in nodes:
        needs = node.step.needs
        for need in needs:
            others_s = max((done_s[other] for other in needs if other != need), default=0.0)
            waits[need] = min(waits[need], others_s)
    return waits


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
