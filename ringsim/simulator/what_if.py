"""One schedule with K sets of costs at once: what if this stage were faster, or that link slower?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ringsim.simulator.compiled import sweep_compiled, work_through_compiled
from ringsim.simulator.level_order import Levels
from ringsim.simulator.linear_operations import Linear
from ringsim.simulator.prices import Prices, stack_prices
from ringsim.simulator.wavefront import sweep
from ringsim.traces.events import Ints

__all__ = ["WhatIfs", "time_variants"]

_MOST_TIMES: Final = 2_000_000  # kept at once, of all variants: more would not stay in a cache


@dataclass(frozen=True, eq=False, repr=False)
class WhatIfs:
    """What a schedule takes with each of K sets of costs.

    Attributes:
        name: what the schedule is called.
        makespan: how long the step takes, float64, shape (K,).
        busy: how long each rank computes, shape (K, ranks).

    Example:
        >>> from ringsim.pipeline.costs import Costs
        >>> from ringsim.simulator.schedule_api import simulate_schedule
        >>> what_ifs = simulate_schedule("1f1b", [Costs(), Costs(forward=2)], num_ranks=4, num_microbatches=8)
        >>> what_ifs.makespan.tolist(), what_ifs.bubble.round(3).tolist()
        ([33.0, 44.0], [0.273, 0.273])
    """

    name: str
    makespan: Ints
    busy: Ints

    def __len__(self) -> int:
        """Returns K."""
        return len(self.makespan)

    @property
    def idle(self) -> Ints:
        """How long each rank does not compute while the step lasts, shape (K, ranks)."""
        idle: Ints = self.makespan[:, None] - self.busy
        return idle

    @property
    def bubble(self) -> Ints:
        """The part of the step in which ranks do not compute, over all of them, shape (K,); 0 for a step that takes no time."""
        whole = self.makespan * self.busy.shape[1]
        share: Ints = np.divide(self.idle.sum(axis=1), whole, out=np.zeros(len(self)), where=whole > 0)
        return share

    def __repr__(self) -> str:
        """Returns how many there are, and between which times."""
        return f"{len(self)} what-ifs of {self.name}: {self.makespan.min():.6g} to {self.makespan.max():.6g}"


def time_variants(source: Linear | Levels, variants: list[Prices], *, rendezvous: bool, ahead: int, compiled: bool) -> Ints:
    """Times a schedule with several prices, many at once.

    Args:
        source: the schedule.
        variants: K prices, none of them with a K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: as in `lower`; only a `Linear` has to be told.
        compiled: whether one after the other by machine code.

    Returns:
        The makespans, float64, shape (K,).
    """
    if compiled:
        return np.array([_last_compiled(source, prices, rendezvous=rendezvous, ahead=ahead).max(initial=0.0) for prices in variants])
    kept = source.num_ranks if isinstance(source, Linear) else len(source.order)
    at_once = max(1, _MOST_TIMES // max(kept, 1))
    makespans = []
    for first in range(0, len(variants), at_once):
        prices = stack_prices(variants[first : first + at_once])
        if isinstance(source, Linear):
            last = sweep(source, prices, rendezvous=rendezvous, ahead=ahead).last
        else:
            last, _ = source.time(prices, rendezvous=rendezvous)
        makespans.append(last.max(axis=0, initial=0.0))
    return np.concatenate(makespans)


def _last_compiled(source: Linear | Levels, prices: Prices, *, rendezvous: bool, ahead: int) -> Ints:
    """Returns when computations end, the last ones at least."""
    if isinstance(source, Linear):
        return sweep_compiled(source, prices, rendezvous=rendezvous, ahead=ahead)
    times = work_through_compiled(source.operations, prices, rendezvous=rendezvous)
    assert times is not None  # it has levels, so it comes to an end
    return times[0]
