"""The same reckoning as machine code, made by numba: a part of the time for large steps, after a second of compiling in each process.

The functions below are ordinary Python, and give the same times uncompiled; numba is an extra, so it is asked for only on use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.simulator.columns import Linear, Operations, Prices
from ringsim.traces.events import Ints

__all__ = ["sweep_compiled", "work_through_compiled"]


def sweep_compiled(linear: Linear, prices: Prices, *, rendezvous: bool, ahead: int) -> Ints:
    """Times a step of GPipe or 1F1B, as `wavefront.sweep` does.

    Args:
        linear: the schedule.
        prices: float64, without K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: how many computations before its use a receive is posted.

    Returns:
        When each rank's last computation ends, shape (ranks,).

    Raises:
        ArgumentError: numba is not installed.
    """
    run = _compile(_sweep)
    sizes = linear.num_ranks, linear.num_microbatches, linear.levels, linear.stride, linear.first_levels(0)[1]
    last: Ints = run(*sizes, prices.duration[:2].copy(), prices.occupancy, prices.latency, rendezvous, ahead)
    return last


def work_through_compiled(operations: Operations, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints] | None:
    """Times every computation and message of a schedule, as `worklist.work_through` does.

    Args:
        operations: the schedule.
        prices: float64, without K.
        rendezvous: whether a message starts only when its receive is posted, too.

    Returns:
        When each computation ends, and when its message starts (-inf without one), shapes (n,); None where ranks wait for each other.

    Raises:
        ArgumentError: numba is not installed.
    """
    run = _compile(_work_through)
    columns = operations.first, operations.sent_after, operations.posted_after, operations.queued_after
    places = operations.kind, operations.direction, operations.stage
    ends, starts, done = run(*columns, *places, prices.duration, prices.occupancy, prices.latency, rendezvous)
    return (ends[:-1], starts) if done == len(operations) else None


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        import numba
    except ImportError as error:
        raise ArgumentError(
            "compiled must be left out where numba is not installed, got True. Leave it out, or install it: pip install 'ringsim[fast]'."
        ) from error
    made: Callable[..., Any] = numba.njit(function)
    return made


def _sweep(
    ranks: int, microbatches: int, levels: int, stride: int, turn: int, duration: Any, occupancy: Any, latency: Any, rendezvous: bool,
    ahead: int,
) -> Any:  # fmt: skip
    last, now = np.zeros(ranks), np.zeros(ranks)
    free, posts = np.zeros((2, ranks)), np.zeros((ahead + 1, ranks))
    for level in range(levels):
        # Forwards of microbatch k are on level rank + k * stride, backwards on turn - rank + k * stride.
        for direction in range(2):
            away = level if direction == 0 else level - turn
            low = max(away % stride, away - stride * (microbatches - 1)) if direction == 0 else max(-away, away % stride)
            high = min(ranks - 1, away if direction == 0 else stride * (microbatches - 1) - away)
            step = 1 if direction == 1 else -1
            for rank in range(low, high + 1, stride):
                end, source = last[rank], rank + step
                if 0 <= source < ranks:
                    start = last[source]
                    if rendezvous:
                        start = max(start, posts[ahead - 1, rank] if ahead > 0 else end)
                    start = max(start, free[direction, rank])
                    free[direction, rank] = start + occupancy[direction, rank]
                    end = max(end, free[direction, rank] + latency[direction, rank])
                now[rank] = end + duration[direction, rank]
            if direction == 0:
                kept_low, kept_high = low, high
        for part in range(2):  # both directions read what was before the level
            first, until = (kept_low, kept_high) if part == 0 else (low, high)
            for rank in range(first, until + 1, stride):
                for older in range(ahead - 1, 0, -1):
                    posts[older, rank] = posts[older - 1, rank]
                posts[0, rank] = last[rank]
                last[rank] = now[rank]
    return last


def _work_through(
    first: Any, sent_after: Any, posted_after: Any, queued_after: Any, kind: Any, direction: Any, stage: Any, duration: Any, occupancy: Any,
    latency: Any, rendezvous: bool,
) -> Any:  # fmt: skip
    count, ranks = len(sent_after), len(first) - 1
    ends, starts = np.full(count + 1, -1.0), np.full(count, -np.inf)
    ends[count] = 0.0  # of -1, the start of the step
    places = first[:-1].copy()
    runnable, waiting = np.arange(ranks), ranks
    sleepers = np.full(count, -1)  # who waits for a computation, the first; the next ones follow in `others`
    others = np.full(ranks, -1)
    chain = np.empty(count, dtype=np.int64)
    done = 0
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        place = places[rank]
        clock = ends[place - 1] if place > first[rank] else 0.0
        while place < first[rank + 1]:
            made = sent_after[place]
            if made >= 0:
                if ends[made] < 0:
                    others[rank] = sleepers[made]
                    sleepers[made] = rank
                    break
                chain[0] = place
                length = 1
                behind = queued_after[place]
                while behind >= 0 and starts[behind] < 0:
                    chain[length] = behind
                    length += 1
                    behind = queued_after[behind]
                for link in range(length - 1, -1, -1):
                    message = chain[link]
                    start = ends[sent_after[message]]
                    if rendezvous:
                        start = max(start, ends[posted_after[message]])
                    if behind >= 0:
                        start = max(start, starts[behind] + occupancy[direction[behind], stage[behind]])
                    starts[message] = start
                    behind = message
                way = direction[place], stage[place]
                clock = max(clock, starts[place] + occupancy[way] + latency[way])
            clock = clock + duration[kind[place], stage[place]]
            ends[place] = clock
            done += 1
            woken = sleepers[place]
            while woken >= 0:
                runnable[waiting] = woken
                waiting += 1
                woken = others[woken]
            place += 1
        places[rank] = place
    return ends, starts, done
