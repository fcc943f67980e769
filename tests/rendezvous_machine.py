"""A small machine that runs programs of sends, recvs and collectives as Gloo does.

It computes independently which ranks can continue. A program is a list of instructions for each
rank. The next instruction of a rank never depends on time, so the set of ranks that finish does not
depend on the order in which the machine runs them. Recvs from any source are the exception: their
message is chosen when the later of the two operations is posted, and does not change afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trace_file import ANY_SOURCE, make_trace

# ("send" | "recv" | "isend" | "irecv", peer, tag, group), ("barrier" | "all_reduce", group), or
# ("wait", handle), or ("wait_all",), which waits for all operations together, like a batch with one
# handle
Instruction = tuple[Any, ...]
BLOCKING = ("send", "recv", "barrier", "all_reduce")


@dataclass(eq=False)
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
    partner: Op | None = None  # the other side of a message

    @property
    def is_collective(self) -> bool:
        return self.op in ("barrier", "all_reduce")


@dataclass
class Machine:
    """A machine that runs ``programs``; ``groups`` are numbered, and have names and members.

    ``choose`` picks one of several operations that may match.
    """

    programs: Sequence[Sequence[Instruction]]
    groups: Sequence[Any]
    choose: Callable[[list[Op]], Op] = lambda others: min(others, key=lambda op: op.post)
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
        return [
            rank
            for rank, program in enumerate(self.programs)
            if self.at[rank] == len(program) and not self.awaited[rank]
        ]

    @property
    def unfinished(self) -> set[int]:
        return set(range(len(self.programs))) - set(self.finished)

    def is_matched(self, op: Op) -> bool:
        if not op.is_collective:
            return op.partner is not None
        index = self._calls(op.rank, op.group).index(op)
        theirs = [
            self._calls(member, op.group)[index : index + 1]
            for member in self.groups[op.group].ranks
        ]
        return all(calls and calls[0].op == op.op for calls in theirs)

    def _calls(self, rank: int, group: int) -> list[Op]:
        return [one for one in self.posted[rank] if one.is_collective and one.group == group]

    def _others(self, op: Op) -> list[Op]:
        """Returns the operations that may match a new one.

        These are, for each rank, its first unmatched operations with this peer and with any source.
        """
        found: dict[tuple[int, int], Op] = {}
        for rank in range(len(self.programs)) if op.peer == ANY_SOURCE else [op.peer]:
            for one in self.posted[rank]:
                same = (one.tag, one.group, one.partner) == (op.tag, op.group, None)
                if (
                    same
                    and one.peer in (op.rank, ANY_SOURCE)
                    and {one.op[-4:], op.op[-4:]} == {"send", "recv"}
                ):
                    found.setdefault((rank, one.peer), one)
        return list(found.values())

    def step(self, rank: int) -> bool:
        """Runs one instruction of a rank; returns False if the rank is blocked."""
        self.clock += 1
        if self.awaited[rank]:
            if not all(map(self.is_matched, self.awaited[rank])):
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
            others = [] if op.is_collective else self._others(op)
            if others:
                op.partner = self.choose(others)
                op.partner.partner = op
            self.posted[rank].append(op)
            self.awaited[rank] = [op] if what in BLOCKING else []
        for op in self.awaited[rank]:
            op.wait = self.clock
        return True

    def run(
        self,
        choose: Callable[[list[int]], int],
        look: Callable[[Machine], None] = lambda _machine: None,
    ) -> None:
        """Runs until every rank is blocked or done.

        ``choose`` picks the next rank, and ``look`` is called after every step.
        """
        ranks = list(range(len(self.programs)))
        idle: set[int] = set()
        while len(idle) < len(ranks):
            rank = choose([one for one in ranks if one not in idle])
            if self.step(rank):
                idle.clear()
            else:
                idle.add(rank)
            look(self)

    def events(self) -> Any:
        """Returns a trace of the operations so far."""
        carried = {"size_bytes": 32, "file": "program.py"}
        rows = [
            {
                "rank": op.rank,
                "op": op.op,
                "tag": op.tag,
                "line": op.line,
                **carried,
                "peer": op.partner.rank if op.partner is not None and op.done >= 0 else op.peer,
                "group": self.groups[op.group].name,
                "times": (op.post, op.wait, op.done),
                "status": "in_flight" if op.done < 0 else "ok",
            }
            for posted in self.posted
            for op in posted
        ]
        return make_trace(rows, groups={one.name: one.ranks for one in self.groups}).events
