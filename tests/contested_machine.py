"""A machine on which a recv from any rank and one from a particular rank may both want a message: it goes to either, as it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rendezvous_machine import Instruction, Machine, Op

from ringsim.traces.events import ANY_SOURCE, Group


class ContestedMachine(Machine):
    """Runs programs of messages. Which recv gets a message is settled when the later of the two is posted, and stays so.

    Args:
        programs: see ``Machine``.
        groups: see ``Machine``.
        choose: picks one of several.
    """

    def __init__(self, programs: Sequence[Sequence[Instruction]], groups: Sequence[Group], choose: Callable[[Sequence[Any]], Any]) -> None:
        super().__init__(programs, groups)
        self._choose = choose
        self._partner: dict[int, Op] = {}  # of an operation, by its id

    def step(self, rank: int) -> bool:
        known = len(self.posted[rank])
        moved = super().step(rank)
        for op in self.posted[rank][known:]:
            others = self._wanted(op)
            if others:
                other = self._choose(others)
                self._partner[id(op)], self._partner[id(other)] = other, op
        return moved

    def source(self, recv: Op) -> int | None:
        other = self._partner.get(id(recv))
        return other.rank if other is not None else None

    def _matched(self, op: Op) -> bool:
        return id(op) in self._partner

    def _wanted(self, op: Op) -> list[Op]:
        """Returns what the other side of a new operation may be: of each kind the first that has none."""
        if op.op.endswith("send"):
            open_recvs = [one for one in self.posted[op.peer] if self._is_open(one, "recv", op)]
            first = {one.peer: one for one in reversed(open_recvs)}
            return [first[peer] for peer in (op.rank, ANY_SOURCE) if peer in first]
        senders = range(len(self.programs)) if op.peer == ANY_SOURCE else [op.peer]
        sends = [[one for one in self.posted[sender] if one.peer == op.rank and self._is_open(one, "send", op)] for sender in senders]
        return [some[0] for some in sends if some]

    def _is_open(self, one: Op, kind: str, like: Op) -> bool:
        return one.op.endswith(kind) and (one.tag, one.group) == (like.tag, like.group) and id(one) not in self._partner
