"""Faults to inject into a run, with the same effect on real ranks and on a virtual clock.

::

    rank 0  compute | send 0 -> 1 |              Slow(rank=0, factor=2)   compute takes twice as
                                                                          long
    rank 1                 recv   | compute |    Degrade(0, 1, factor=5)  the message takes five
                                                                          times as long
    rank 2                             recv ...  Fail(rank=2, at_op=0)    raises instead of posting
                                                                          its first operation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from ringsim.errors import ArgumentError, RankFailed, is_number, name_integers, say

# for each field that may be a fraction: the least and the greatest value, the rule in words, and
# the remedy
_NUMBERS = {
    "factor": (1, math.inf, "a number of at least 1", "Use 2 to double the time, for example."),
    "fraction": (
        math.ulp(0.0),
        1,
        "positive and at most 1",
        "Use 0.1 to vary times by up to 10 %, for example.",
    ),
}


class _Fault:
    """A fault whose fields follow their rules (by default, an integer from 0)."""

    def __post_init__(self) -> None:
        """Raises ArgumentError unless each field follows its rule."""
        for name, value in vars(self).items():
            if name in _NUMBERS:
                least, most, rule, remedy = _NUMBERS[name]
                right = (
                    isinstance(value, int | float) and is_number(value) and least <= value <= most
                )
            else:
                rule, remedy = name_integers(0), "Count from 0."
                right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not right:
                where = type(self).__name__
                raise ArgumentError(f"{name} must be {rule}, got {say(value)} ({where}). {remedy}")


@dataclass(frozen=True)
class Slow(_Fault):
    """Makes a rank compute more slowly.

    Each ``ringsim.compute`` on the rank, and each computation in a pipeline, takes ``factor`` times
    as long. A real rank sleeps for the extra time; a virtual clock advances by the same amount. If
    a rank has several ``Slow`` faults, their factors multiply.

    Args:
        rank: the rank to slow down.
        factor: the factor by which the rank's computing times are multiplied, at least 1.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     ringsim.compute(0.001)
        >>> trace = ringsim.trace(worker, world_size=2, inject=[ringsim.Slow(rank=1, factor=20)])
        >>> took_ns = trace.events.done_ns - trace.events.post_ns
        >>> bool(took_ns[1] >= 20_000_000)
        True
    """

    rank: int
    factor: float


@dataclass(frozen=True)
class Degrade(_Fault):
    """Makes a link slower: each message from ``src`` to ``dst`` takes ``factor`` times as long.

    On a virtual clock, the latency and the time per byte are multiplied by ``factor``. On real
    ranks, the receiver sleeps at the end of its wait, so that the message takes ``factor`` times as
    long, measured from the moment when both sides have been posted. If a link has several
    ``Degrade`` faults, their factors multiply. The opposite direction, from ``dst`` to ``src``, is
    a separate link. On real ranks, collectives are not affected.

    Args:
        src: the sending rank.
        dst: the receiving rank.
        factor: the factor by which the times of the link's messages are multiplied, at least 1.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> Degrade(0, 1, factor=5)
        Degrade(src=0, dst=1, factor=5)
    """

    src: int
    dst: int
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.src == self.dst:
            raise ArgumentError(
                f"src and dst must be different ranks, got {self!r}. Choose two different "
                "ranks, because a link leads from one rank to another."
            )


@dataclass(frozen=True)
class Fail(_Fault):
    """Makes a rank raise ``RankFailed`` instead of posting its operation number ``at_op``.

    Operations are sends, recvs and collectives, counted from 0 in the order in which the rank's
    trace lists them; the creation of a group does not count. A rank that posts fewer operations
    does not fail. If a rank has several ``Fail`` faults, the one with the lowest ``at_op`` applies.

    Args:
        rank: the rank that fails.
        at_op: the number of operations that the rank posts before it fails.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> Fail(rank=2, at_op=7)
        Fail(rank=2, at_op=7)
    """

    rank: int
    at_op: int


@dataclass(frozen=True)
class Jitter(_Fault):
    """Makes computing times vary randomly.

    Each ``ringsim.compute`` takes ``1 - fraction`` to ``1 + fraction`` times as long. Each rank
    draws its own factors from a uniform distribution, in the order of its computations. The factors
    are the same on both clocks and in every run. If a run has several ``Jitter`` faults, their
    factors multiply.

    Args:
        fraction: the largest relative change, greater than 0 and at most 1.
        seed: the seed for the random numbers.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> Jitter(fraction=0.1, seed=7)
        Jitter(fraction=0.1, seed=7)
    """

    fraction: float
    seed: int = 0


Injection = Slow | Degrade | Fail | Jitter


def check_injections(inject: Iterable[Injection], world_size: int) -> tuple[Injection, ...]:
    """Returns a run's injections as a tuple.

    Raises:
        ArgumentError: a value is not an injection, or names a rank that does not exist in the run.
    """
    try:
        checked = tuple(inject)
    except TypeError:  # a single fault, not in a list
        raise ArgumentError(
            "inject must be a list of Slow, Degrade, Fail and Jitter objects, got "
            f"{say(inject)}. Use inject=[...]."
        ) from None
    for each in checked:
        if not isinstance(each, Injection):
            raise ArgumentError(
                "inject must contain only Slow, Degrade, Fail and Jitter objects, got "
                f"{say(each)}. Use ringsim.Slow(rank=1, factor=2), for example."
            )
        if isinstance(each, Jitter):
            continue
        highest = max(each.src, each.dst) if isinstance(each, Degrade) else each.rank
        if highest >= world_size:
            raise ArgumentError(
                f"every rank in inject must be from 0 to {world_size - 1}, got {each!r}. Choose "
                "a rank of the run."
            )
    return checked


def slowed_by(inject: Iterable[Injection], rank: int) -> float:
    """Returns the factor for a rank's computing times, or 1.0 if nothing slows the rank down."""
    return float(
        math.prod(each.factor for each in inject if isinstance(each, Slow) and each.rank == rank)
    )


def jitter_of(inject: Iterable[Injection], rank: int) -> Callable[[], float] | None:
    """Returns a function that draws the factor for a rank's next computation, or None."""
    streams = [
        (each.fraction, Random(f"{each.seed} {rank}"))
        for each in inject
        if isinstance(each, Jitter)
    ]
    if not streams:
        return None
    return lambda: math.prod(1 + part * stream.uniform(-1, 1) for part, stream in streams)


def degraded_by(inject: Iterable[Injection], src: int, dst: int) -> float:
    """Returns the factor for messages from ``src`` to ``dst``, or 1.0 without degradation."""
    return float(
        math.prod(
            each.factor
            for each in inject
            if isinstance(each, Degrade) and (each.src, each.dst) == (src, dst)
        )
    )


def fails_at(inject: Iterable[Injection], rank: int) -> int | None:
    """Returns the number of the operation at which a rank fails, or None if it does not fail."""
    return min(
        (each.at_op for each in inject if isinstance(each, Fail) and each.rank == rank),
        default=None,
    )


def make_failure(rank: int, at_op: int, world_size: int) -> RankFailed:
    """Returns the error that a rank, on either clock, raises instead of posting an operation."""
    return RankFailed(
        f"rank {rank} of {world_size} was made to fail instead of posting operation {at_op} "
        f"(counted from 0). To let the rank continue, remove Fail(rank={rank}, at_op={at_op}) "
        "from inject.",
        rank=rank,
    )
