"""What functions ask of the numbers that they are given: checked in one place, so that a mistake is told in the same words everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Final

from ringsim.errors import ArgumentError

__all__ = ["LONGEST_S", "check_duration", "check_integer", "is_integer", "is_list", "is_number", "is_one_of", "say"]

LONGEST_S: Final = 9e9  # of any time in a trace, which counts nanoseconds in 64 bits: 285 years of the 292
_MOST_SHOWN: Final = 200  # characters of a value


def is_integer(value: object) -> bool:
    """Tells whether a value is a whole number, of Python or of numpy; True and False are none.

    Example:
        >>> [is_integer(value) for value in (3, True, 3.0, "3")]
        [True, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Tells whether a value is a list, a tuple or the like; a text is none.

    Example:
        >>> [is_list(value) for value in ([3], (), range(2), "ab", {0: 1})]
        [True, True, True, False, False]
    """
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_one_of(value: object, names: Sequence[str]) -> bool:
    """Tells whether a value is one of some names.

    Example:
        >>> [is_one_of(value, ("a", "b")) for value in ("a", "c", ["a"])]
        [True, False, False]
    """
    return isinstance(value, str) and value in names


def is_number(value: object) -> bool:
    """Tells whether a value is a number that a float can hold, not NaN and not infinite; True and False are none.

    Example:
        >>> [is_number(value) for value in (3, 0.5, float("nan"), 10**400, True, "3")]
        [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_integer(name: str, value: object, least: int, hint: str) -> None:
    """Checks that an argument is a whole number.

    Args:
        name: of the argument.
        value: what was passed.
        least: how small it may be.
        hint: what to do.

    Raises:
        ArgumentError: it is none, or smaller.

    Example:
        >>> check_integer("steps", 3, 1, "Say how many.")
    """
    if not is_integer(value):
        raise ArgumentError(f"{name} must be an integer from {least}, got {say(value)}. {hint}")
    if value < least:  # type: ignore[operator]
        raise ArgumentError(f"{name} must be {least} or more, got {say(value)}. {hint}")


def check_duration(name: str, value: object) -> None:
    """Checks that an argument is a time that a trace can hold.

    Args:
        name: of the argument.
        value: what was passed, in seconds.

    Raises:
        ArgumentError: it is no number from 0, or too long.

    Example:
        >>> check_duration("forward", 0.005)
    """
    if not is_number(value) or not 0 <= value <= LONGEST_S:  # type: ignore[operator]
        raise ArgumentError(
            f"{name} must be from 0 to {LONGEST_S:g} s, got {say(value)}. Give seconds: a trace, which counts ns, holds 285 years."
        )


def say(value: object) -> str:
    """Returns a value as an error shows it: in one line, and cut where it is long.

    Example:
        >>> say(1.5), say("x" * 1000)[-5:], say([1,
        ...     2])
        ('1.5', 'xx...', '[1, 2]')
    """
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # an integer of ten thousand digits, or a class of somebody's own
        return f"a {type(value).__name__}"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
