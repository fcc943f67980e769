"""A small machine that runs programs of sends, recvs and collectives as Gloo does: an independent answer to who can go on.

A program is a list of instructions for each rank. What a rank may do next never depends on time, so which ranks finish does not depend on
the order in which the machine lets them run. A recv from any rank is the exception: it gets whichever message was sent first. Its tag must
not be that of a recv from one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringsim.traces.events import ANY_SOURCE, IN_FLIGHT, OK, OP_CODES, Events, Group, Payload, Tables, make_events

# ("send" | "recv" | "isend" | "irecv", peer, tag, group), ("barrier" | "all_reduce", group), ("wait", which handle), ("wait_all",), which
# waits for all at once, as for a batch under one handle
Instruction = tuple[Any, ...]
BLOCKING = ("send", "recv", "barrier", "all_reduce")


def wait_for_each(program: Sequence[Instruction]) -> list[Instruction]:
    """Returns the instructions that wait for all handles of a program, one after the other."""
    return [("wait", handle) for handle in range(sum(instruction[0] in ("isend", "irecv") for instruction in program))]


@dataclass
class Op:
    rank: int
    op: str
    peer: int
    tag: int
    group: int
    line: int
    post: int
    wait: int = -1
    done: int = -1

    @property
    def is_collective(self) -> bool:
        return self.op in ("barrier", "all_reduce")


@dataclass
class Machine:
    """Runs ``programs``; ``groups`` are numbered, with their members."""

    programs: Sequence[Sequence[Instruction]]
    groups: Sequence[Group]
    posted: list[list[Op]] = field(default_factory=list)
    awaited: list[list[Op]] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    clock: int = 0

    def __post_init__(self) -> None:
        self.posted = [[] for _ in self.programs]
        self.awaited = [[] for _ in self.programs]
        self.at = [0 for _ in self.programs]

    @property
    def finished(self) -> list[int]:
        return [rank for rank, program in enumerate(self.programs) if self.at[rank] == len(program) and not self.awaited[rank]]

    @property
    def unfinished(self) -> set[int]:
        return set(range(len(self.programs))) - set(self.finished)

    def is_stuck(self, rank: int) -> bool:
        """Tells whether a rank waits for something that has no other side yet."""
        return not all(map(self._matched, self.awaited[rank]))

    def _matched(self, op: Op) -> bool:
        if op.is_collective:
            index = [one for one in self.posted[op.rank] if one.is_collective and one.group == op.group].index(op)
            for member in self.groups[op.group].ranks:
                theirs = [one for one in self.posted[member] if one.is_collective and one.group == op.group]
                if len(theirs) <= index or theirs[index].op != op.op:
                    return False
            return True
        if op.peer == ANY_SOURCE:
            return self.source(op) is not None
        if any(one.peer == ANY_SOURCE for one in self.posted[op.peer] if (one.tag, one.group) == (op.tag, op.group)):
            return any(self._sent_to(recv) is op for recv in self.posted[op.peer] if recv.peer == ANY_SOURCE)
        mine = self._channel(op.rank, op.op.lstrip("i"), op.peer, op.tag, op.group)
        other = "recv" if op.op.lstrip("i") == "send" else "send"
        return len(self._channel(op.peer, other, op.rank, op.tag, op.group)) > mine.index(op)

    def source(self, recv: Op) -> int | None:
        """Returns whose message a recv from any rank gets, None where there is none yet."""
        send = self._sent_to(recv)
        return send.rank if send is not None else None

    def _sent_to(self, recv: Op) -> Op | None:
        index = self._channel(recv.rank, "recv", ANY_SOURCE, recv.tag, recv.group).index(recv)
        sends = [op for rank in range(len(self.programs)) for op in self._channel(rank, "send", recv.rank, recv.tag, recv.group)]
        return sorted(sends, key=lambda op: op.post)[index] if len(sends) > index else None

    def _channel(self, rank: int, kind: str, peer: int, tag: int, group: int) -> list[Op]:
        return [one for one in self.posted[rank] if (one.op.lstrip("i"), one.peer, one.tag, one.group) == (kind, peer, tag, group)]

    def step(self, rank: int) -> bool:
        """Lets a rank do one thing; False where it cannot do any."""
        self.clock += 1
        if self.awaited[rank]:
            if self.is_stuck(rank):
                return False
            for op in self.awaited[rank]:
                op.done = self.clock
            self.awaited[rank] = []
            return True
        if self.at[rank] == len(self.programs[rank]):
            return False
        what, *about = self.programs[rank][self.at[rank]]
        self.at[rank] += 1
        line = self.at[rank]
        if what.startswith("wait"):
            handles = [one for one in self.posted[rank] if one.op not in BLOCKING]
            some = handles if what == "wait_all" else handles[about[0] : about[0] + 1]
            self.awaited[rank] = [one for one in some if one.done < 0]
        else:
            peer, tag, group = (-1, -1, about[0]) if len(about) == 1 else about
            op = Op(rank, what, peer, tag, group, line, self.clock)
            self.posted[rank].append(op)
            self.awaited[rank] = [op] if what in BLOCKING else []
        for op in self.awaited[rank]:
            op.wait = self.clock
        return True

    def run(self, choose: Callable[[list[int]], int], look: Callable[[Machine], None] = lambda _machine: None) -> None:
        """Runs until nobody can do anything; ``choose`` picks who goes next, and ``look`` is called after every step."""
        ranks = list(range(len(self.programs)))
        idle: set[int] = set()
        while len(idle) < len(ranks):
            rank = choose([one for one in ranks if one not in idle])
            if self.step(rank):
                idle.clear()
            else:
                idle.add(rank)
            look(self)

    def events(self) -> Events:
        """Returns what has been recorded so far."""
        rows = [op for posted in self.posted for op in posted]
        tables = Tables(groups=tuple(self.groups), payloads=(Payload("float32", (8,), 32),), files=("program.py",))
        columns = {
            "rank": [op.rank for op in rows],
            "op": [OP_CODES[op.op] for op in rows],
            "group": [op.group for op in rows],
            "peer": [self.source(op) if op.peer == ANY_SOURCE and op.done >= 0 else op.peer for op in rows],
            "tag": [op.tag for op in rows],
            "payload": [0 for _ in rows],
            "file": [0 for _ in rows],
            "line": [op.line for op in rows],
            "post_ns": [op.post for op in rows],
            "wait_ns": [op.wait for op in rows],
            "done_ns": [op.done for op in rows],
            "status": [IN_FLIGHT if op.done < 0 else OK for op in rows],
        }
        return make_events(columns, tables)
