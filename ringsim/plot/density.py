"""Level of detail: bars too short for a pixel are added up, never left out.

Time is cut into slots one pixel wide. What is shorter than a slot gives each slot that it touches its share of the slot's time; slots are
drawn as little stacked bars, whose height is that share::

    100 % |                        lane
          |     _                  in slot 2, transfers take 60 % of the time and late senders 30 %
          |  _ |/|  _
          |_|=||=|_|=|___
           0 1  2 3 4  5           slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ringsim.plot.bars import Bars
from ringsim.traces.events import Ints

__all__ = ["Density", "merge_short"]

LEAST_HEIGHT: Final = 0.2  # share of a lane that a slot with anything in it takes, so that it can be seen


@dataclass(frozen=True, eq=False)
class Density:
    """What short bars add up to: columns, one row for each (rank, lane, slot, look) that occurs.

    Attributes:
        rank: the row (int64).
        lane: the lane (int64).
        slot: which slot of time (int64).
        look: the look (int64).
        count: bars that begin in the slot (int64).
        share: share of the slot that they take, before anything is fitted to the lane (float64).
        bottom: where the stacked bar begins, as a share of the lane's height (float64).
        top: where it ends (float64).
    """

    rank: Ints
    lane: Ints
    slot: Ints
    look: Ints
    count: Ints
    share: Ints
    bottom: Ints
    top: Ints

    def __len__(self) -> int:
        """Returns the number of little bars."""
        return len(self.rank)


def merge_short(bars: Bars, first_ns: int, slot_ns: float) -> tuple[Ints, Density]:
    """Tells long bars from short ones, and adds up the short ones.

    Args:
        bars: all bars.
        first_ns: where slot 0 begins.
        slot_ns: how long a slot is, in ns.

    Returns:
        A mask of the bars at least a slot long, and what the others add up to: their number is the sum of ``count``, their time that of
        ``share`` times ``slot_ns``.
    """
    long = bars.end_ns - bars.start_ns >= slot_ns
    short = ~long
    start = (bars.start_ns[short] - first_ns) / slot_ns
    end = (bars.end_ns[short] - first_ns) / slot_ns
    slot = np.floor(start).astype(np.int64)
    first_part = np.minimum(end, slot + 1) - start
    rest = end - start - first_part  # reaches into the next slot, never further
    spills = rest > 0
    columns = np.stack([bars.rank[short], bars.lane[short], slot, bars.look[short]]).astype(np.int64)
    spilled = columns[:, spills].copy()
    spilled[2] += 1
    keys, which = _unique_columns(np.concatenate([columns, spilled], axis=1))
    share = np.bincount(which, weights=np.concatenate([first_part, rest[spills]]), minlength=keys.shape[1])
    count = np.bincount(which[: short.sum()], minlength=keys.shape[1])
    rank, lane, slot, look = keys
    bottom, top = _stack(np.stack([rank, lane, slot]), np.maximum(share, LEAST_HEIGHT))
    return long, Density(rank, lane, slot, look, count, share, bottom, top)


def _unique_columns(columns: Ints) -> tuple[Ints, Ints]:
    """The distinct columns in ascending order, and which of them each column is; by sorting one number for each."""
    if columns.shape[1] == 0:
        return columns, np.zeros(0, dtype=np.int64)
    sizes = columns.max(axis=1) + 1
    code = np.ravel_multi_index(tuple(columns), tuple(sizes))
    codes, which = np.unique(code, return_inverse=True)
    return np.stack(np.unravel_index(codes, tuple(sizes))), which


def _stack(place: Ints, height: Ints) -> tuple[Ints, Ints]:
    """Stacks the heights that share a place, and shrinks a stack higher than 1; columns of a place lie side by side."""
    if place.shape[1] == 0:
        return height, height
    begins = np.concatenate([[True], np.any(place[:, 1:] != place[:, :-1], axis=0)])
    stack = np.cumsum(begins) - 1
    total = np.bincount(stack, weights=height)
    height = height / np.maximum(total, 1.0)[stack]
    running = np.cumsum(height)
    before = (running - height)[begins]  # what all earlier stacks add up to
    top = np.clip(running - before[stack], 0, 1)
    return np.clip(top - height, 0, 1), top
