"""Any schedule, computation by computation, in plain Python: quickest for few ranks, and exact with Fractions.

Each rank runs until it needs a message whose sender has not come that far, and is woken when it has. Nothing depends on who runs first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringsim.simulator.columns import Operations, Prices
from ringsim.traces.events import Ints

__all__ = ["work_through"]


def work_through(operations: Operations, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints] | None:
    """Times every computation and message of a schedule.

    Args:
        operations: the schedule.
        prices: without K; Fractions stay exact.
        rendezvous: whether a message starts only when its receive is posted, too.

    Returns:
        When each computation ends, and when its message starts to go over its link (-inf without one), shapes (n,); None where ranks wait
        for each other in a circle.

    Example:
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.schedules import one_f_one_b
        >>> from ringsim.simulator.columns import make_prices
        >>> from ringsim.simulator.columns import read_schedule
        >>> ends, starts = work_through(read_schedule(one_f_one_b(2, 2)), make_prices((0, 1), Costs(), None, 0), rendezvous=True)
        >>> ends.tolist()
        [1.0, 2.0, 6.0, 9.0, 2.0, 4.0, 5.0, 7.0]
    """
    count = len(operations)
    first = operations.first.tolist()
    sent_after, posted_after = operations.sent_after.tolist(), operations.posted_after.tolist()
    queued_after = operations.queued_after.tolist()
    kind, direction, stage = operations.kind, operations.direction, operations.stage
    duration = prices.duration[kind, stage].tolist()
    latency, occupancy = prices.latency[direction, stage].tolist(), prices.occupancy[direction, stage].tolist()
    zero: Any = 0 if prices.is_exact else 0.0
    ends: list[Any] = [None] * count + [zero]  # -1, no computation, is the start of the step
    starts: list[Any] = [None] * count
    sleepers: dict[int, list[int]] = {}
    places = first[:-1]
    runnable = list(range(len(places)))
    while runnable:
        rank = runnable.pop()
        place, end = places[rank], first[rank + 1]
        clock = ends[place - 1] if place > first[rank] else zero
        while place < end:
            made = sent_after[place]
            if made >= 0:
                if ends[made] is None:
                    sleepers.setdefault(made, []).append(rank)
                    break
                chain = [place]  # messages before it that still have to take the link: their receivers may need them later
                while (behind := queued_after[chain[-1]]) >= 0 and starts[behind] is None:
                    chain.append(behind)
                for message in reversed(chain):
                    start = ends[sent_after[message]]
                    if rendezvous:
                        start = max(start, ends[posted_after[message]])
                    if behind >= 0:
                        start = max(start, starts[behind] + occupancy[behind])
                    starts[message] = start
                    behind = message
                clock = max(clock, starts[place] + occupancy[place] + latency[place])
            clock = clock + duration[place]
            ends[place] = clock
            if place in sleepers:
                runnable += sleepers.pop(place)
            place += 1
        places[rank] = place
    if places != first[1:]:
        return None
    dtype = object if prices.is_exact else np.float64
    return np.array(ends[:-1], dtype=dtype), np.array([-np.inf if start is None else start for start in starts], dtype=dtype)
