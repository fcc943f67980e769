"""Everything ringsim raises on purpose.

The tree::

    Exception
     +-- RingError                 something about ranks, rings or traces went wrong
     |    +-- RankFailed           a rank raised, or died (*)
     |    +-- Deadlock             nobody can go on (*)
     |    +-- MessageMismatch      the two sides of a message disagree (*)
     |    +-- PeerExited           the other side of a message is gone (*)
     |    +-- RendezvousFailed     the ranks could not find each other (*)
     |    +-- RunTimeout           a run took longer than its limit
     |    +-- TraceFileError       a trace file cannot be read or written
     |    +-- ScheduleError        a pipeline schedule breaks its rules
     |    +-- ArgumentError        a bad argument (*; also a ValueError)
     |         +-- StartsRanks     not of the argument, but of the program that starts its own ranks
     +-- KeyboardInterrupt
          +-- Interrupted          the user stopped a run

    (*) also a RuntimeError: torch raises one where ranks get these, and programs catch it

Errors that end a run carry ``trace``, what was recorded until then, and ``diagnosis``, why it ended
(None where it is not known). Every message reads ``<what> must be <rule>, got <value> (<where>).
<What to do>.``

Below the errors are the checks of arguments that several functions share, so that a mistake is
reported in the same words everywhere.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypeGuard

__all__ = [
    "ArgumentError",
    "Deadlock",
    "Interrupted",
    "MessageMismatch",
    "PeerExited",
    "RankFailed",
    "RendezvousFailed",
    "RingError",
    "RunTimeout",
    "ScheduleError",
    "TraceFileError",
]


# What commands a terminal, turns the direction of a text, or is half a character of UTF-16, which
# no file, terminal or picture takes.
_UNREADABLE: Final = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def escape(text: str, *, lines: bool = True) -> str:
    r"""Returns a text in which unprintable characters are written out.

    Whoever chose its words may have meant harm.

    Args:
        text: any text.
        lines: whether it may have several lines, and tabs.

    Example:
        >>> escape("red \x1b[31m\n"), escape("red \x1b[31m\n", lines=False)
        ('red \\x1b[31m\n', 'red \\x1b[31m\\n')
    """
    kept = "\t\n" if lines else ""
    return _UNREADABLE.sub(
        lambda found: (
            found[0] if found[0] in kept else found[0].encode("unicode_escape").decode("ascii")
        ),
        text,
    )


class _Explained(BaseException):
    """What the errors that end a run have in common."""

    def __init__(self, message: str, *, trace: Any = None, diagnosis: Any = None) -> None:
        super().__init__(escape(str(message)))
        self.trace = trace
        self.diagnosis = diagnosis

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows.

        Only the message, which names the user's own line already.
        """
        return [f"{type(self).__name__}: {self}"]


class RingError(_Explained, Exception):
    """Something about ranks, rings or traces went wrong; the parent of ringsim's other errors.

    Args:
        message: what must hold, what was found, where, and what to do.
        trace: the ``ringsim.Trace`` of what was recorded until then, if a run ended with this
            error.
        diagnosis: why the run ended (``ringsim.diagnose``), if that is known.

    Example:
        >>> from ringsim.errors import RankFailed, RingError
        >>> try:
        ...     raise RankFailed("rank 2 of 4 raised ValueError: no such layer")
        ... except RingError as error:
        ...     print(error, error.trace)
        rank 2 of 4 raised ValueError: no such layer None
    """

    imposed = False  # whether a rank raises it only because of what happened to other ranks


class RankFailed(RingError, RuntimeError):
    """A rank raised an exception, or its process died; ``rank`` says which one failed first."""

    def __init__(
        self, message: str, *, rank: int = -1, trace: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(message, trace=trace, diagnosis=diagnosis)
        self.rank = rank


class Deadlock(RingError, RuntimeError):
    """Nobody can go on: the ranks wait for each other."""


class MessageMismatch(RingError, RuntimeError):
    """The two sides of a message disagree on its size, dtype or shape.

    Or the ranks of a group on what they call together.
    """


class PeerExited(RingError, RuntimeError):
    """The other side of a message is gone and will never answer."""


class RendezvousFailed(RingError, RuntimeError):
    """The ranks could not find each other; the message names those present and those missing."""


class RunTimeout(RingError, RuntimeError):
    """A run, or on simulated ranks an operation, took longer than the limit that it was given."""


class TraceFileError(RingError):
    """A trace file cannot be read or written.

    Truncated, damaged, foreign, or of a later version.
    """

    def __init__(self, message: str, **of_a_run: Any) -> None:
        super().__init__(escape(str(message), lines=False), **of_a_run)


class ScheduleError(RingError):
    """A pipeline schedule breaks its rules."""


class ArgumentError(RingError, ValueError, RuntimeError):
    """An argument breaks its rule; the message names the argument, the rule and the value."""


class Refused(ArgumentError):
    """An argument of an operation that torch refuses, too.

    Where nobody catches it, the run ends in ``RankFailed``, as there.
    """


class StartsRanks(ArgumentError):
    """A program that ringsim has started ranks for starts its own."""


class Interrupted(_Explained, KeyboardInterrupt):
    """The user stopped a run (Ctrl-C, or a notebook's Interrupt).

    ``trace`` holds what was recorded until then.
    """


LONGEST_S: Final = 9e9  # of any time in a trace, 285 years: it counts nanoseconds in 64 bits
_MOST_SHOWN: Final = 200  # characters of a value in a message


def is_integer(value: object) -> TypeGuard[int]:
    """Tells whether a value is a whole number, of Python or numpy; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Tells whether a value is a list, a tuple or similar; a text is not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_one_of(value: object, names: Sequence[str]) -> bool:
    """Tells whether a value is one of the given names."""
    return isinstance(value, str) and value in names


def is_number(value: object) -> TypeGuard[float]:
    """Tells whether a value is a number that a float can hold, not NaN or infinite.

    True and False are not.

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
    """Checks that an argument is a whole number of at least ``least``.

    The error ends with ``hint``.
    """
    if not is_integer(value) or value < least:
        raise ArgumentError(f"{name} must be an integer from {least}, got {say(value)}. {hint}")


def read_whole(
    name: str, value: Any, least: int, most: int | None = None, where: str = "", hint: str = ""
) -> int:
    """Returns an argument as ``int``, if it is a whole number within a range.

    Of Python, numpy or torch.

    Args:
        name: of the argument.
        value: what was passed; True and False are no numbers.
        least: the smallest allowed value.
        most: the largest allowed value; None for no limit.
        where: which rank this is, as the message says it: " (rank 2 of 4)".
        hint: what to do.

    Example:
        >>> read_whole("port", 29500, 1, 65535)
        29500
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        span = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ArgumentError(
            f"{name} must be a whole number {span}, got {value!r}{where}. {hint}".rstrip()
        )
    return number


def check_duration(name: str, value: object) -> None:
    """Checks that an argument is a time in seconds that a trace can hold."""
    if not is_number(value) or not 0 <= value <= LONGEST_S:
        raise ArgumentError(
            f"{name} must be from 0 to {LONGEST_S:g} s, got {say(value)}. Give seconds: a trace, "
            "which counts ns, holds 285 years."
        )


def check_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a worker, if a sequence and a dict by name (or None, for none)."""
    try:
        values = tuple(args)
    except TypeError:
        raise ArgumentError(
            f"args must be a tuple of the worker's arguments, got {say(args)}. Write args=(value,)."
        ) from None
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ArgumentError(
            f"kwargs must be a dict of the worker's arguments by name, got {say(named)}. Write "
            "kwargs={'name': value}."
        )
    return values, dict(named)


def check_seed(seed: Any, world_size: int) -> int:
    """Returns a seed as ``int``, if ``seed + rank`` is one that torch accepts for every rank."""
    if not is_integer(seed) or not -(2**63) <= int(seed) <= 2**64 - world_size:
        raise ArgumentError(
            f"seed must be an integer from -2**63 to 2**64 - {world_size}, got {say(seed)}. Take "
            "a smaller one."
        )
    return int(seed)


def check_worker(worker: object) -> None:
    """Checks that a worker is an ordinary function."""
    if not callable(worker):
        raise ArgumentError(
            f"worker must be a function, got {worker!r}. "
            "Pass the function itself, trace(worker, ...), not what "
            "it returns, trace(worker(), ...)."
        )
    if (
        inspect.iscoroutinefunction(worker)
        or inspect.isgeneratorfunction(worker)
        or inspect.isasyncgenfunction(worker)
    ):
        raise ArgumentError(
            f"worker must be an ordinary function, got {worker!r}, which is async or a "
            "generator. Call it inside one."
        )


def say(value: object) -> str:
    """Returns a value as errors show it: in one line, and shortened if it is long.

    Example:
        >>> say(1.5), say("x" * 1000)[-5:], say([1, 2])
        ('1.5', 'xx...', '[1, 2]')
    """
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # an integer of ten thousand digits, or a class of somebody's own
        return f"a {type(value).__name__}"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0 and 1", or "ranks 0, 1 and 2"; of many, the first.

    Example:
        >>> name_ranks([2]), name_ranks([0, 1, 5]), name_ranks(range(40))
        ('rank 2', 'ranks 0, 1 and 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 10:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
