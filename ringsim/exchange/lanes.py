"""Where slices go so that none cuts another: viewers draw a lane as a stack of boxes, each inside the one below or beside it.

::

    spans        | step 0                    |          lane 0: they nest
                 | forward 0 |  | forward 1  |
    operations   | irecv from 0        |  | send |      lane 0
                    | isend to 1   |                    lane 1, for it overlaps
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

__all__ = ["place_apart", "place_nested", "unfold"]


def place_apart(starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Gives each slice a lane on which none overlaps another; the lowest that is free.

    Args:
        starts: when each begins; shape (n,), ascending.
        ends: when each ends, not before its start; shape (n,).

    Returns:
        The lanes, from 0; shape (n,).

    Example:
        >>> place_apart([0, 1, 3], [3, 5, 4])
        [0, 1, 0]
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def place_nested(starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Gives each slice lane 0 where it nests with those already there, and another where it would cut one.

    Args:
        starts: when each begins; shape (n,), ascending, and where equal the longest first.
        ends: when each ends, not before its start; shape (n,).

    Returns:
        The lanes, from 0; shape (n,).

    Example:
        >>> place_nested([0, 1, 3], [4, 2, 6])  # the third begins within the first and ends after it
        [0, 0, 1]
    """
    stack: list[float] = []
    lanes, cutting = [], []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or end <= stack[-1]:
            stack.append(end)
            lanes.append(0)
        else:
            cutting.append(index)
            lanes.append(1)
    for index, lane in zip(cutting, place_apart([starts[i] for i in cutting], [ends[i] for i in cutting]), strict=True):
        lanes[index] += lane
    return lanes


def unfold(starts: Sequence[float], ends: Sequence[float]) -> Iterator[tuple[int, bool]]:
    """Yields the begins and ends of slices that nest, in the order of time: at one moment an end before the next begin.

    Args:
        starts: when each begins; shape (n,), ascending, and where equal what lies outside first.
        ends: when each ends; shape (n,); infinite for one that does not, and is never closed.

    Yields:
        Which slice, and whether it begins.

    Example:
        >>> ["[]"[not begins] + str(index) for index, begins in unfold([0, 1, 3], [3, 3, math.inf])]
        ['[0', '[1', ']1', ']0', '[2']
    """
    stack: list[int] = []
    for index, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            yield stack.pop(), False
        yield index, True
        stack.append(index)
    yield from ((index, False) for index in reversed(stack) if ends[index] != math.inf)
