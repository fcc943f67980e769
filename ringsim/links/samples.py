"""From the times of recorded operations to the time of a message: the arithmetic of each pattern, and when there are enough of them.

A block is measured in steps: one round trip, one burst of a stream, one exchange. A step's time is read from the record, from the moment
at which its first operation was posted to the moment at which its last was done, on one rank, so that no two clocks are compared::

    src, recorded        send.post ... send.done  recv.post ............... recv.done       of a ping-pong, half of this
    dst, not recorded                 recv .................... send

The rank at the other end is not recorded meanwhile: it would record between the message that comes and the one that goes, and each
message would take longer by that (by a tenth at 4 KiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ringsim.links.plan import STREAM, Block

__all__ = ["OPERATIONS", "combine", "is_steady", "parts_of", "step_ns", "timed_ranks"]

Floats = npt.NDArray[Any]

OPERATIONS: Final = {"pingpong": 2, "oneway": STREAM, "exchange": 2, "shift": 2, "all_reduce": 1, "copy": 1}  # of one rank in one step
STEADY: Final = 0.025  # half the width of the median's 95 % interval, relative to the median
STEPS_MIN: Final = 10
STEADY_S: Final = 0.03  # a machine has moods that last for milliseconds: no block is shorter, unless its time is
STEPS_MAX: Final = 5000


def timed_ranks(block: Block, ranks: Sequence[int]) -> list[int]:
    """Returns the ranks whose record tells the time of a block; the first of them leads.

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
    """Returns how long each complete step of a block took on one rank, as that rank's share of the definition says.

    Args:
        block: the block.
        post_ns: when the rank's operations of the block were posted, in order; shape (n,).
        done_ns: when they were done, -1 for not yet; shape (n,).

    Returns:
        ns of each step, float64: half a round trip, the time per message of a stream, otherwise the whole step.

    Example:
        >>> step_ns(Block("gloo", "pingpong", 0, 1, 8), np.array([0, 40, 100, 140]), np.array([30, 80, 130, 180]))
        array([40., 40.])
    """
    each = 1 if block.backend in ("tcp", "memcpy") else OPERATIONS[block.pattern]  # a span around a whole step
    steps = len(post_ns) // each
    post, done = post_ns[: steps * each].reshape(steps, each), done_ns[: steps * each].reshape(steps, each)
    complete = (done >= 0).all(axis=1)
    last = done[:, 0] if block.pattern == "shift" else done.max(axis=1)  # of a shift the recv, posted first, is what arrives
    found: Floats = (last - post.min(axis=1))[complete] / parts_of(block)
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
