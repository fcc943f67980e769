"""GPipe and 1F1B as columns without a list of actions: a thousand ranks and thousands of microbatches in a few array operations.

Rank p of P in 1F1B over M microbatches, w = min(P - 1 - p, M)::

    position   0 .. w-1      w .. 2M-w-1              2M-w .. 2M-1
               F0 .. F(w-1)  Fw B0 F(w+1) B1 ...      B(M-w) .. B(M-1)

GPipe is the same with w = M on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringsim.simulator.operations import Operations
from ringsim.traces.events import Ints

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear:
    """A schedule with one stage a rank, each doing some forwards, then forwards and backwards in turn, then backwards.

    Attributes:
        name: ``gpipe`` or ``1f1b``.
        num_ranks: how many ranks, P.
        num_microbatches: how many microbatches, M.

    Example:
        >>> operations = Linear("1f1b", 2, 2).to_operations(ahead=1)
        >>> [str(operations.action(number)) for number in range(len(operations))]
        ['0F0', '0F1', '0B0', '0B1', '1F0', '1B0', '1F1', '1B1']
    """

    name: str
    num_ranks: int
    num_microbatches: int

    @property
    def levels(self) -> int:
        """How many levels there are; see `first_levels`."""
        return 2 * (self.num_microbatches + self.num_ranks - 1)

    @property
    def stride(self) -> int:
        """How many levels one microbatch is behind the other."""
        return 2 if self.name == "1f1b" else 1

    def first_levels(self, rank: int) -> tuple[int, int]:
        """Returns the levels of a rank's forward and backward of microbatch 0; each further one is a stride later.

        Whatever a computation needs is on a level before its own, and a rank has at most one on each.
        """
        turn = 2 * self.num_ranks - 1 if self.name == "1f1b" else 2 * self.num_ranks + self.num_microbatches - 2
        return rank, turn - rank

    def positions(self, rank: int) -> tuple[Ints, Ints]:
        """Returns where a rank's forwards and backwards stand in its row, by microbatch."""
        m = self.num_microbatches
        w = min(self.num_ranks - 1 - rank, m) if self.name == "1f1b" else m
        forwards = np.concatenate([np.arange(w), np.arange(w, 2 * m - w, 2)])
        backwards = np.concatenate([np.arange(w + 1, 2 * m - w, 2), np.arange(2 * m - w, 2 * m)])
        return forwards, backwards

    def to_operations(self, ahead: int) -> Operations:
        """Returns the columns with the places of the messages; ``ahead`` as in `lower`."""
        p, m = self.num_ranks, self.num_microbatches
        microbatch, sent, posted, queued = np.full((4, p, 2 * m), -1, dtype=np.int32)
        kind = np.empty((p, 2 * m), dtype=np.int8)
        places = [self.positions(rank) for rank in range(p)]
        for rank, of_rank in enumerate(places):
            row = 2 * m * rank + np.arange(2 * m)
            for direction, source in enumerate((rank - 1, rank + 1)):
                own = of_rank[direction]
                kind[rank, own], microbatch[rank, own] = direction, np.arange(m)
                if 0 <= source < p:
                    sent[rank, own] = 2 * m * source + places[source][direction]
                    posted[rank, own] = np.where(own > ahead, row[own] - ahead - 1, -1)
                    queued[rank, own[1:]] = row[own[:-1]]
        stage = np.repeat(np.arange(p, dtype=np.int32), 2 * m)
        first = np.arange(p + 1, dtype=np.int64) * 2 * m
        columns = (each.ravel() for each in (kind, microbatch, sent, posted, queued))
        return Operations(self.name, m, tuple(range(p)), first, stage, *columns)
