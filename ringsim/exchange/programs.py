"""What each rank did, as a program without times: work, sends, recvs and collectives, and what each of them needs to be over before it.

A trace has times; a program has reasons. Between two operations a thread worked, except while it was blocked; an operation was posted when
what stood before it was over; and what comes after a wait needs what was waited for::

    thread    work | isend i | work | wait for i | work

    work 0 --> isend i -----.
        '----> work 1 ------+--> work 2

Programs of other tools on the virtual clock.

Every message leaves when its step begins and takes the link of its pair of ranks, one after the other: it is over for the sender when its
bytes are on their way, and for the receiver when it has arrived. So a send never waits for its recv, as in LogGOPSim below its limit for
eager messages. Work of one thread of a rank is done one after the other. A collective begins when all have come to it, and takes as long as
its rounds (``ringsim.traces.collectives``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.exchange.reading import Rows
from ringsim.link import Link, check_link
from ringsim.simulator.links import PrivateLinks
from ringsim.traces.collectives import count_rounds
from ringsim.traces.events import COLLECTIVE, IN_FLIGHT, NONE, OK, OP_NAMES, SPAN, Events, Group, Payload
from ringsim.traces.matching import refused
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["Step", "make_programs", "replay"]

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
        size_bytes: of what moves; of a collective the S of ``ringsim.traces.collectives``.
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


_KINDS: Final = {SEND: "isend", RECV: "irecv"}

Place = tuple[int, int]  # rank, number of the step


def replay(programs: list[list[Step]], link: Link, source: str) -> Trace:
    """Runs programs, and says what happened when.

    Args:
        programs: by rank, the steps.
        link: what a message costs.
        source: the format that they come from, for the metadata.

    Returns:
        A simulated trace. A step that waits for ever is in flight; those behind it are not there.

    Raises:
        ArgumentError: ``link`` is no Link.
        ValueError: a step names a rank or a step that is not there, or steps need each other.

    Example:
        >>> programs = [[Step("work", work_ns=500), Step("send", needs=(0,), peer=1, size_bytes=1000)], [Step("recv", peer=0)]]
        >>> replay(programs, Link(alpha_s=1e-6, beta_s_per_byte=1e-9), "nothing").events.done_ns.tolist()
        [500, 1500, 2500]
    """
    run = _Run(programs, link)
    run.go()
    return run.trace(source)


class _Run:
    def __init__(self, programs: list[list[Step]], link: Link) -> None:
        check_link("link", link)
        _check(programs)
        self._programs, self._link, self._carrier = programs, link, PrivateLinks(link)
        self._world = Group("world", tuple(range(len(programs))))
        self._due: list[tuple[float, int, Place]] = []
        self._count = itertools.count().__next__
        self._missing = [[len(step.needs) + len(step.after) for step in program] for program in programs]
        self._ready = [[0.0] * len(program) for program in programs]
        self._begun: list[list[float]] = [[NONE] * len(program) for program in programs]
        self._done: list[list[float]] = [[NONE] * len(program) for program in programs]
        self._followers = [_followers(program) for program in programs]
        self._free: dict[tuple[int, int], float] = {}  # (rank, thread): when its work is over
        self._arrivals: dict[tuple[int, int, int], deque[float]] = {}
        self._receivers: dict[tuple[int, int, int], deque[Place]] = {}
        self._gathered: dict[Any, list[Place]] = {}
        self._calls: dict[tuple[int, Group], int] = {}

    def go(self) -> None:
        """Runs what can run."""
        for rank, missing in enumerate(self._missing):
            for number, count in enumerate(missing):
                if count == 0:
                    heappush(self._due, (0.0, self._count(), (rank, number)))
        while self._due:
            time, _, place = heappop(self._due)
            self._begin(time, place)

    def _begin(self, time: float, place: Place) -> None:
        rank, number = place
        step = self._programs[rank][number]
        if step.kind == WORK:
            time = max(time, self._free.get((rank, step.thread), 0.0))
            self._free[rank, step.thread] = time + step.work_ns * 1e-9
        self._begun[rank][number] = time
        for follower, needs_end in self._followers[rank][number]:
            if not needs_end:
                self._come(time, (rank, follower))
        if step.kind == WORK:
            self._end(time + step.work_ns * 1e-9, place)
        elif step.kind == SEND:
            arrival = self._carrier.carry(rank, step.peer, step.size_bytes, time)
            self._end(arrival - self._link.alpha_s, place)
            self._meet((rank, step.peer, step.tag), arrival=arrival)
        elif step.kind == RECV:
            self._meet((step.peer, rank, step.tag), receiver=place)
        else:
            self._gather(place, step)

    def _meet(self, key: tuple[int, int, int], *, arrival: float | None = None, receiver: Place | None = None) -> None:
        arrivals, receivers = self._arrivals.setdefault(key, deque()), self._receivers.setdefault(key, deque())
        if arrival is not None:
            arrivals.append(arrival)
        if receiver is not None:
            receivers.append(receiver)
        while arrivals and receivers:
            rank, number = place = receivers.popleft()
            self._end(max(arrivals.popleft(), self._begun[rank][number]), place)

    def _gather(self, place: Place, step: Step) -> None:
        rank, number = place
        group = step.group or self._world
        call = self._calls[rank, group] = self._calls.get((rank, group), 0) + 1
        there = self._gathered.setdefault((group, call), [])
        there.append(place)
        if len(there) == len(group.ranks):
            rounds, size_bytes = count_rounds(step.op, len(group.ranks), step.size_bytes)
            time = self._begun[rank][number] + rounds * self._link.time_s(size_bytes)
            for one in there:
                self._end(time, one)

    def _end(self, time: float, place: Place) -> None:
        rank, number = place
        self._done[rank][number] = time
        for follower, needs_end in self._followers[rank][number]:
            if needs_end:
                self._come(time, (rank, follower))

    def _come(self, time: float, place: Place) -> None:
        """Notes that one of the things that a step waits for is there."""
        rank, number = place
        self._ready[rank][number] = max(self._ready[rank][number], time)
        self._missing[rank][number] -= 1
        if self._missing[rank][number] == 0:
            heappush(self._due, (self._ready[rank][number], self._count(), place))

    def trace(self, source: str) -> Trace:
        """Returns what happened."""
        rows, stuck = Rows(), False
        for rank, program in enumerate(self._programs):
            waits = self._waits(rank)
            for number, step in enumerate(program):
                begun, done = self._begun[rank][number], self._done[rank][number]
                if begun == NONE:
                    stuck = True
                    continue
                times = {"done_ns": NONE if done == NONE else _ns(done), "status": IN_FLIGHT if done == NONE else OK}
                where = {"stage": step.stage, "microbatch": step.microbatch, "thread": step.thread}
                if step.kind == WORK:
                    rows.add(rank, "span", _ns(begun), label=step.label or "work", **times, **where)
                    continue
                more = {"payload": Payload("", (), step.size_bytes), "peer": step.peer, **times, **where}
                if step.kind == TOGETHER:
                    more["group"] = step.group or self._world
                else:
                    more["tag"] = step.tag
                rows.add(
                    rank, step.op or _KINDS[step.kind], _ns(begun), wait_ns=_ns(min(max(waits[number], begun), max(done, begun))), **more
                )
        if stuck and not any(
            begun != NONE and done == NONE for pair in zip(self._begun, self._done, strict=True) for begun, done in zip(*pair, strict=True)
        ):
            raise ValueError("steps of it need each other")
        link = {"alpha_s": self._link.alpha_s, "beta_s_per_byte": self._link.beta_s_per_byte}
        notes = [f"imported from {source} and run on the virtual clock: a message leaves when it is posted"]
        return rows.trace({"world_size": len(self._programs), "source": "simulated", "link": link, "notes": notes})

    def _waits(self, rank: int) -> list[float]:
        """Returns when somebody began to wait for each step: when all else was there that one of its followers needs."""
        waits = [float("inf")] * len(self._programs[rank])
        for step in self._programs[rank]:
            ends = sorted(self._done[rank][need] for need in step.needs)
            for need in step.needs:
                others = ends[-2] if len(ends) > 1 and ends[-1] == self._done[rank][need] else ends[-1] if len(ends) > 1 else 0.0
                waits[need] = min(waits[need], others)
        return waits


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _followers(program: list[Step]) -> list[list[tuple[int, bool]]]:
    """Returns for each step those that wait for it, and whether for its end (or for its beginning)."""
    followers: list[list[tuple[int, bool]]] = [[] for _ in program]
    for number, step in enumerate(program):
        for need in step.needs:
            followers[need].append((number, True))
        for need in step.after:
            followers[need].append((number, False))
    return followers


def _check(programs: list[list[Step]]) -> None:
    for rank, program in enumerate(programs):
        for step in program:
            if not all(0 <= need < len(program) for need in step.needs + step.after):
                raise ValueError(f"a step of rank {rank} needs one that is not there")
            if step.kind in (SEND, RECV) and not (0 <= step.peer < len(programs) and step.peer != rank):
                raise ValueError(f"rank {rank} sends to or receives from rank {step.peer} of {len(programs)}")
            if step.work_ns < 0 or step.size_bytes < 0:
                raise ValueError(f"a step of rank {rank} takes less than no time, or moves less than nothing")
            if step.group is not None and rank not in step.group.ranks:
                raise ValueError(f"rank {rank} calls a collective of a group that it is not in")
