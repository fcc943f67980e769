"""GPipe and 1F1B, level after level over all ranks at once, with numpy: the time of a step with memory for the ranks alone.

1F1B, the level of each computation (P = 3, M = 4); whatever a computation needs stands one or two levels before it::

    level     0  1  2  3  4  5  6  7  8  9 10 11
    rank 0   F0    F1    F2 B0 F3 B1    B2    B3
    rank 1      F0    F1 B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

A level has forwards on every second rank and backwards on the ones between: two slices, a few array operations each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringsim.simulator.linear_operations import Linear
from ringsim.simulator.prices import Prices
from ringsim.traces.events import Ints

__all__ = ["Sweep", "sweep"]


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep found; K is there where the prices have it.

    Attributes:
        last: when each rank's last computation ends, shape (P,) or (P, K).
        ends: when each computation ends, in the order of `Operations`, shape (n,); None where it was not asked for.
        starts: when the message of each starts to go over its link, likewise; -inf without a message.
    """

    last: Ints
    ends: Ints | None = None
    starts: Ints | None = None


def sweep(linear: Linear, prices: Prices, *, rendezvous: bool, ahead: int, keep: bool = False) -> Sweep:
    """Times a step.

    Args:
        linear: GPipe or 1F1B.
        prices: float64, with or without K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: as in `lower`: how many computations before its use a receive is posted.
        keep: whether to return the times of all computations; without K.

    Returns:
        The times.

    Example:
        >>> from ringsim.pipeline.costs import Costs
        >>> from ringsim.simulator.prices import make_prices
        >>> sweep(Linear("1f1b", 3, 4), make_prices((0, 1, 2), Costs(), None, 0), rendezvous=True, ahead=1).last.tolist()
        [18.0, 16.0, 14.0]
    """
    state = _State(linear, prices, rendezvous=rendezvous, ahead=ahead, keep=keep)
    p = linear.num_ranks
    places = _place(linear, np.arange(1, p + 1))
    history, started = np.empty((2, linear.levels if keep else 0, p))
    for level in range(linear.levels):
        state.advance(level)
        if keep:
            history[level], started[level] = state.turns[1 - level % 2][places], state.started[places]
    last = state.turns[linear.levels % 2][places]
    if not keep:
        return Sweep(last)
    ends, starts = np.full((2, p, 2 * linear.num_microbatches), -np.inf)
    for rank in range(p):
        for own, level, source in zip(linear.positions(rank), linear.first_levels(rank), (rank - 1, rank + 1), strict=True):
            levels = slice(level, level + linear.stride * linear.num_microbatches, linear.stride)
            ends[rank, own] = history[levels, rank]
            if 0 <= source < p:
                starts[rank, own] = started[levels, rank]
    return Sweep(last, ends.ravel(), starts.ravel())


def _place(linear: Linear, rank: Any) -> Any:
    """Returns where ranks, counted from 1, stand in the arrays: in 1F1B odd ones behind the even ones, so that slices have no holes."""
    return rank // 2 + rank % 2 * (linear.num_ranks // 2 + 1) if linear.name == "1f1b" else rank


class _State:
    """How far the ranks have come: arrays over the ranks, with one that does nothing at either end."""

    def __init__(self, linear: Linear, prices: Prices, *, rendezvous: bool, ahead: int, keep: bool) -> None:
        self.linear = linear
        self.rendezvous, self.keep, self.has_occupancy = rendezvous, keep, prices.has_occupancy
        p = linear.num_ranks
        places = _place(linear, np.arange(1, p + 1))
        shape = (2 * (p // 2 + 1) + 1, *prices.duration.shape[2:])
        self.duration, self.latency, self.occupancy = np.zeros((2, *shape)), np.full((2, *shape), -np.inf), np.zeros((2, *shape))
        self.duration[:, places], self.latency[:, places] = prices.duration[:2], prices.latency
        self.occupancy[:, places] = prices.occupancy
        self.turns = np.zeros((2, *shape))  # when the last computation of each rank ended: before a level, and after it, in turns
        self.free = np.zeros((2, *shape))
        self.posts = np.zeros((ahead, *shape))  # when the last but one ended, and those before it
        self.started = np.zeros(shape)
        self.room = np.empty(shape)
        self.views: list[Any] = [(None, ()), (None, ())]

    def advance(self, level: int) -> None:
        """Does the computations of a level."""
        turn = level % 2
        blocks = _blocks(self.linear, level)
        if self.views[turn][0] != blocks:
            self.views[turn] = (blocks, [self._view(turn, *block) for block in blocks])
        np.copyto(self.turns[1 - turn], self.turns[turn])
        for own, after, ready, room, latency, duration, occupancy, link, posts, started in self.views[turn][1]:
            start = ready
            if self.rendezvous:
                start = np.maximum(ready, posts[-1], out=room)
            if self.has_occupancy:
                start = np.maximum(start, link, out=room)
            if self.keep:
                np.copyto(started, start)
            if self.has_occupancy:
                start = np.add(start, occupancy, out=link)
            np.add(start, latency, out=room)
            np.maximum(room, own, out=room)
            np.add(room, duration, out=after)
            for older, newer in zip(posts[:0:-1], posts[-2::-1], strict=True):
                np.copyto(older, newer)

    def _view(self, turn: int, direction: int, low: int, high: int) -> tuple[Any, ...]:
        """Returns the parts of the arrays that belong to the ranks of a block, and to their senders."""
        here = slice(_place(self.linear, low), _place(self.linear, high) + 1)
        step = 1 if direction else -1
        there = slice(_place(self.linear, low + step), _place(self.linear, high + step) + 1)
        own = self.turns[turn][here]
        priced = (table[direction][here] for table in (self.latency, self.duration, self.occupancy, self.free))
        posts = [own, *(post[here] for post in self.posts)]
        return (own, self.turns[1 - turn][here], self.turns[turn][there], self.room[here], *priced, posts, self.started[here])


def _blocks(linear: Linear, level: int) -> list[tuple[int, int, int]]:
    """Says what a level holds: forwards (0) or gradients (1), and the first and the last rank, counted from 1; in 1F1B every second."""
    p, m = linear.num_ranks, linear.num_microbatches
    if linear.name == "1f1b":
        forward = (0, max(level % 2, level - 2 * (m - 1)) + 1, min(p - 1 - (p - 1 - level) % 2, level) + 1)
        high = min(p - 1 - (p - level) % 2, 2 * p + 2 * m - 3 - level)
        backward = (1, max((level + 1) % 2, 2 * p - 1 - level) + 1, high + 1)
        return [block for block in (forward, backward) if block[1] <= block[2]]
    if level < p + m - 1:
        return [(0, max(0, level - m + 1) + 1, min(p - 1, level) + 1)]
    back = level - (p + m - 1)
    return [(1, p - min(p - 1, back), p - max(0, back - m + 1))]
