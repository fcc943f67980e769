"""From the recorded steps to the time of a message: the arithmetic of each pattern, and when there are enough of them.

A block is measured in steps: one round trip, one burst of a stream, one exchange. Each is a span in the record of one rank, from the moment
at which its first operation is called to the moment at which its last is done, so that no two clocks are compared::

    src, a span          |--- send --- recv ...............|       of a ping-pong, half of this
    dst                       recv .......... send ---

The operations themselves are not recorded meanwhile, on any rank: that would lie between the message that comes and the one that goes, and
each message would take longer by it (by a tenth at 4 KiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ringsim.links.plan import STREAM, Block

__all__ = ["combine", "is_steady", "parts_of", "step_ns", "timed_ranks"]

Floats = npt.NDArray[Any]

STEADY: Final = 0.025  # half the width of the median's 95 % interval, relative to the median
STEPS_MIN: Final = 10
STEADY_S: Final = 0.03  # a machine has moods that last for milliseconds: no block is shorter, unless its time is
STEPS_MAX: Final = 5000


def timed_ranks(block: Block, ranks: Sequence[int]) -> list[int]:
    """Returns the ranks that record the steps of a block; the first of them leads.

    Args:
        block: the block.
        ranks: all ranks of the ring, in order.
    """
    if block.pattern == "copy":
        return [ranks[0]]
    if block.src < 0:
        return list(ranks)
    return [block.dst if block.pattern == "oneway" else block.src]


def step_ns(block: Block, post_ns: Floats, done_ns: Floats) -> Floats:
    """Returns the times of a message that the steps of a block gave on one rank.

    Args:
        block: the block.
        post_ns: when each step began; shape (n,).
        done_ns: when it ended, -1 for one that was cut off; shape (n,).

    Returns:
        ns of each complete step, float64, divided by ``parts_of(block)``.

    Example:
        >>> step_ns(Block("gloo", "pingpong", 0, 1, 8), np.array([0, 100, 200]), np.array([80, 180, -1]))
        array([40., 40.])
    """
    complete = done_ns >= 0
    found: Floats = (done_ns[complete] - post_ns[complete]) / parts_of(block)
    return found


def parts_of(block: Block) -> int:
    """Returns what the time of a whole step is divided by: the messages that follow each other in it.

    Example:
        >>> parts_of(Block("gloo", "pingpong", 0, 1, 8)), parts_of(Block("gloo", "exchange", 0, 1, 8))
        (2, 1)
    """
    return {"pingpong": 2, "oneway": STREAM, "copy": block.copies}.get(block.pattern, 1)


def combine(by_rank: list[Floats]) -> Floats:
    """Returns the time of each step: that of the slowest of the ranks that tell it.

    Args:
        by_rank: ``step_ns`` of each rank that is timed; steps that one of them lacks are left out.

    Example:
        >>> combine([np.array([3.0, 5.0, 4.0]), np.array([4.0, 1.0])])
        array([4., 5.])
    """
    shortest = min(map(len, by_rank))
    found: Floats = np.max([one[:shortest] for one in by_rank], axis=0)
    return found


def is_steady(samples: Floats) -> bool:
    """Tells whether more repetitions would hardly change the median: from 10 on, when its 95 % interval is within 2.5 % on either side.

    Args:
        samples: the times until now; shape (n,).

    Example:
        >>> is_steady(np.full(10, 5.0)), is_steady(np.full(9, 5.0)), is_steady(np.arange(1.0, 20.0))
        (True, False, False)

    Source:
        The interval between two order statistics, from the binomial distribution (normal approximation): W. J. Conover, "Practical
        Nonparametric Statistics", chapter 3.
    """
    n = len(samples)
    if n < STEPS_MIN:
        return False
    ordered = np.sort(samples)
    reach = 0.98 * n**0.5
    low, high = ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(np.ceil(n / 2 + reach)))]
    return bool((high - low) / 2 <= STEADY * np.median(ordered))
