"""What can be made to go wrong in a run, the same way on real ranks and on a virtual clock.

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
from typing import Final

from ringsim.errors import ArgumentError, RankFailed, is_number, say


@dataclass(frozen=True)
class Slow:
    """Makes a rank compute more slowly.

    Each ``ringsim.compute`` on it, and each computation of a pipeline, takes ``factor`` times as
    long. Real ranks sleep that long, a virtual clock advances that far. Several for one rank
    multiply.

    Args:
        rank: which rank.
        factor: how many times as long, 1 or more.

    Raises:
        ArgumentError: a value breaks its rule.

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

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Degrade:
    """Makes a link slower: each message from ``src`` to ``dst`` travels ``factor`` times as long.

    On a virtual clock, latency and time per byte are multiplied. On real ranks the receiver sleeps
    at the end of its wait, so that the message takes ``factor`` times as long, counted from when
    both sides were posted. Several for one link multiply. The way back from ``dst`` to ``src`` is
    another link; on real ranks collectives are not affected.

    Args:
        src: rank that sends.
        dst: rank that receives.
        factor: how many times as long, 1 or more.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> Degrade(0, 1, factor=5)
        Degrade(src=0, dst=1, factor=5)
    """

    src: int
    dst: int
    factor: float

    def __post_init__(self) -> None:
        _check(self)
        if self.src == self.dst:
            raise ArgumentError(
                f"src and dst must be two ranks, got {self!r}. A link "
                "leads from one rank to another."
            )


@dataclass(frozen=True)
class Fail:
    """Makes a rank raise ``RankFailed`` in place of its operation number ``at_op``.

    That is never posted. Operations are sends, recvs and collectives, counted from 0 as the rank's
    trace shows them; making a group does not count. A rank that posts fewer does not fail. Of
    several for one rank, the earliest counts.

    Args:
        rank: which rank.
        at_op: how many operations it posts before that.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> Fail(rank=2, at_op=7)
        Fail(rank=2, at_op=7)
    """

    rank: int
    at_op: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Jitter:
    """Makes computing times vary.

    Each ``ringsim.compute`` takes from ``1 - fraction`` to ``1 + fraction`` times as long. Each
    rank draws its own numbers, uniformly, in the order of its computations: the same ones on both
    clocks and in every run. Several multiply.

    Args:
        fraction: above 0, at most 1.
        seed: of the numbers.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> Jitter(fraction=0.1, seed=7)
        Jitter(fraction=0.1, seed=7)
    """

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)


Injection = Slow | Degrade | Fail | Jitter


def check_injections(inject: Iterable[Injection], world_size: int) -> tuple[Injection, ...]:
    """Returns what a run is to inject as a tuple.

    Raises:
        ArgumentError: something is not an injection, or names a rank that the run does not have.
    """
    try:
        checked = tuple(inject)
    except TypeError:  # a single one, not in a list
        raise ArgumentError(
            f"inject must be a list of Slow, Degrade, Fail and Jitter, got {say(inject)}. Write "
            "inject=[...]."
        ) from None
    for each in checked:
        if not isinstance(each, Injection):
            raise ArgumentError(
                f"inject must hold Slow, Degrade, Fail and Jitter, got {say(each)}. Write "
                "ringsim.Slow(rank=1, factor=2)."
            )
        if isinstance(each, Jitter):
            continue
        highest = max(each.src, each.dst) if isinstance(each, Degrade) else each.rank
        if highest >= world_size:
            raise ArgumentError(
                f"the ranks of an injection must be from 0 to {world_size - 1}, got {each!r}. "
                "Name a rank of the run."
            )
    return checked


def slowed_by(inject: Iterable[Injection], rank: int) -> float:
    """Returns how many times as long a rank computes, 1.0 if nothing slows it."""
    return float(
        math.prod(each.factor for each in inject if isinstance(each, Slow) and each.rank == rank)
    )


def jitter_of(inject: Iterable[Injection], rank: int) -> Callable[[], float] | None:
    """Returns a function that draws how many times as long a rank's next computation takes.

    None without jitter.
    """
    streams = [
        (each.fraction, Random(f"{each.seed} {rank}"))
        for each in inject
        if isinstance(each, Jitter)
    ]
    if not streams:
        return None
    return lambda: math.prod(1 + part * stream.uniform(-1, 1) for part, stream in streams)


def degraded_by(inject: Iterable[Injection], src: int, dst: int) -> float:
    """Returns how many times as long messages from ``src`` to ``dst`` travel.

    1.0 if nothing degrades the link.
    """
    return float(
        math.prod(
            each.factor
            for each in inject
            if isinstance(each, Degrade) and (each.src, each.dst) == (src, dst)
        )
    )


def fails_at(inject: Iterable[Injection], rank: int) -> int | None:
    """Returns the number of the operation in place of which a rank raises, None if it does not."""
    return min(
        (each.at_op for each in inject if isinstance(each, Fail) and each.rank == rank),
        default=None,
    )


def make_failure(rank: int, at_op: int, world_size: int) -> RankFailed:
    """Makes the error that a rank raises in place of an operation, the same on both clocks."""
    return RankFailed(
        f"rank {rank} of {world_size} was made to fail in place of its operation {at_op}, "
        f"counted from 0. Leave Fail(rank={rank}, at_op={at_op}) out of inject to let it go on.",
        rank=rank,
    )


# of the fields that are numbers: from where to where, the rule in words, and the remedy
_NUMBERS: Final = {
    "factor": (1, math.inf, "a number from 1", "2 makes it take twice as long."),
    "fraction": (
        math.ulp(0.0),
        1,
        "above 0 and at most 1",
        "0.1 is a tenth, up and down.",
    ),
}


def _check(injection: Injection) -> None:
    """Raises ArgumentError unless each field follows its rule; all others count from 0."""
    for name, value in vars(injection).items():
        if name in _NUMBERS:
            least, most, rule, remedy = _NUMBERS[name]
            right = isinstance(value, int | float) and is_number(value) and least <= value <= most
        else:
            rule, remedy = "an integer from 0", "Count from 0."
            right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not right:
            where = type(injection).__name__
            raise ArgumentError(f"{name} must be {rule}, got {say(value)} ({where}). {remedy}")
