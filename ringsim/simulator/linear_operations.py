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
        """How many levels there are; see `level`."""
        return 2 * (self.num_microbatches + self.num_ranks - 1)

    def warm_up(self, rank: Ints) -> Ints:
        """Returns with how many forwards ranks begin."""
        distance = self.num_ranks - 1 - rank if self.name == "1f1b" else np.full_like(rank, self.num_microbatches)
        warm_up: Ints = np.minimum(distance, self.num_microbatches)
        return warm_up

    def position(self, rank: Ints, is_forward: Ints, microbatch: Ints) -> Ints:
        """Returns where computations stand in the rows of their ranks."""
        m, w = self.num_microbatches, self.warm_up(rank)
        forward = np.where(microbatch < w, microbatch, 2 * microbatch - w)
        backward = np.where(microbatch < m - w, w + 2 * microbatch + 1, m + microbatch)
        position: Ints = np.where(is_forward, forward, backward)
        return position

    def level(self, rank: Ints, is_forward: Ints, microbatch: Ints) -> Ints:
        """Returns the levels of computations: whatever one needs is on a level before its own, and a rank has at most one on each.

        ::

            1f1b    F p + 2m    B 2P - 1 - p + 2m
            gpipe   F p + m     B 2P + M - 2 - p + m
        """
        p, m = self.num_ranks, self.num_microbatches
        first, step = (2 * p - 1, 2) if self.name == "1f1b" else (2 * p + m - 2, 1)
        level: Ints = np.where(is_forward, rank, first - rank) + step * microbatch
        return level

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Returns rank, whether it is a forward, and microbatch of all computations, rank after rank, each in its order."""
        p, m = self.num_ranks, self.num_microbatches
        rank = np.arange(p, dtype=np.int32)[:, None]
        w = self.warm_up(rank)
        position = np.arange(2 * m, dtype=np.int32)[None, :]
        turn = position - w
        is_forward = (turn < 0) | ((turn % 2 == 0) & (position < 2 * m - w))
        forward, backward = np.where(turn < 0, position, w + turn // 2), np.where(position < 2 * m - w, turn // 2, position - m)
        microbatch = np.where(is_forward, forward, backward)
        return np.broadcast_to(rank, microbatch.shape).ravel(), is_forward.ravel(), microbatch.ravel()

    def to_operations(self, ahead: int) -> Operations:
        """Returns the columns with the places of the messages; ``ahead`` as in `lower`."""
        p, m = self.num_ranks, self.num_microbatches
        rank, is_forward, microbatch = self.columns()
        first = np.arange(p + 1, dtype=np.int64) * 2 * m
        source = np.where(is_forward, rank - 1, rank + 1)
        has_message = (source >= 0) & (source < p)
        begin = 2 * m * rank
        sent = np.where(has_message, 2 * m * source + self.position(source, is_forward, microbatch), -1)
        posted = np.arange(len(rank)) - ahead - 1
        posted = np.where(has_message & (posted >= begin), posted, -1)
        queued = np.where(has_message & (microbatch > 0), begin + self.position(rank, is_forward, microbatch - 1), -1)
        kind = np.where(is_forward, 0, 1).astype(np.int8)
        messages = (each.astype(np.int32) for each in (sent, posted, queued))
        return Operations(self.name, m, tuple(range(p)), first, rank.astype(np.int32), kind, microbatch.astype(np.int32), *messages)
