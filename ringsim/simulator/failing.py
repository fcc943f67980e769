"""A simulated rank that is made to fail."""

from __future__ import annotations

from typing import Any

from ringsim.injections import make_failure
from ringsim.simulator.backend import SimulatedRank
from ringsim.simulator.handles import Part, Recv, Send
from ringsim.simulator.ranks import World

__all__ = ["FailingRank"]


class FailingRank(SimulatedRank):
    """Raises in place of one operation, and of those after it; they are not posted.

    Args:
        world: what it shares with the others.
        number: its rank.
        seed: of its random numbers.
        at_op: how many sends, recvs and collectives it posts before.
    """

    def __init__(self, world: World, number: int, seed: int, at_op: int) -> None:
        super().__init__(world, number, seed)
        self._at_op = at_op
        self._posted = 0

    def isend(self, *args: Any, **named: Any) -> Send | None:
        """Sends, or fails."""
        self._count()
        return super().isend(*args, **named)

    def irecv(self, *args: Any, **named: Any) -> Recv | None:
        """Receives, or fails."""
        self._count()
        return super().irecv(*args, **named)

    def _collect(self, *args: Any, **named: Any) -> Part | None:
        self._count()
        return super()._collect(*args, **named)

    def _count(self) -> None:
        """Counts an operation that is about to be posted.

        Raises:
            RankFailed: it is the one in whose place the rank fails, or a later one.
        """
        if self._posted >= self._at_op:
            raise make_failure(self.number, self._at_op, self.everybody.size())
        self._posted += 1
