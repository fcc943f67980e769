"""The exceptions that ringsim raises.

The exception tree::

    Exception
     +-- RingError                 something about ranks, rings or traces went wrong
     |    +-- RankFailed           a rank raised an exception or died (*)
     |    +-- Deadlock             the ranks wait for each other forever (*)
     |    +-- MessageMismatch      the two sides of a message disagree (*)
     |    +-- PeerExited           the other side of a message is gone (*)
     |    +-- RendezvousFailed     the ranks could not find each other (*)
     |    +-- RunTimeout           a run took longer than its time limit
     |    +-- TraceFileError       a trace file cannot be read or written
     |    +-- ScheduleError        a pipeline schedule breaks its rules
     |    +-- ArgumentError        an argument is invalid (*; also a ValueError)
     |         +-- StartsRanks     a program that runs on ranks starts its own ranks
     +-- KeyboardInterrupt
          +-- Interrupted          the user stopped a run

    (*) also a RuntimeError, because torch raises RuntimeError for these errors

Errors that end a run have the attributes ``trace`` (the trace up to the error) and ``diagnosis``
(the reason, or None if unknown). If the run was started with ``debug=True``, ``locals(2)`` returns
the variables of rank 2 as text. The message for an invalid value reads ``<name> must be <rule>,
got <value> (<where>). <Remedy>.``

This module also contains the argument checks that several functions share, so that the same mistake
produces the same message everywhere.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

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


# Control characters, marks that change the direction of text, and halves of UTF-16 characters:
# they can mislead a reader, or cannot be written to files, terminals or pictures.
_UNREADABLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def escape(text: str, *, lines: bool = True) -> str:
    r"""Returns a string with unprintable characters escaped.

    The text may come from an untrusted source.

    Args:
        text: any text.
        lines: whether to keep line breaks and tabs.

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


def escape_line(text: str) -> str:
    """Returns a string with unprintable characters, line breaks and tabs escaped."""
    return escape(text, lines=False)


class _Explained(BaseException):
    """The base class of errors that can end a run."""

    variables: Mapping[int, str] = {}  # by rank

    def __init__(self, message: str, *, trace: Any = None, diagnosis: Any = None) -> None:
        super().__init__(escape(str(message)))
        self.trace = trace
        self.diagnosis = diagnosis

    def locals(self, rank: int) -> str:
        """Returns the variables of a rank's frames, if the run was started with ``debug=True``.

        The frames are those in which the rank failed, waited or computed when the run ended. Long
        values are shortened, and tensors are described by their shape and dtype.

        Args:
            rank: the rank.

        Raises:
            ArgumentError: the rank's variables are unknown.
        """
        if rank not in self.variables:
            raise ArgumentError(
                f"the variables of rank {rank} are unknown. Run it with debug=True, as in "
                "ringsim.trace(worker, debug=True). A rank that has returned or died has none."
            )
        return self.variables[rank]

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows: the message, which names the user's line."""
        return [f"{type(self).__name__}: {self}"]


class RingError(_Explained, Exception):
    """Something went wrong with ranks, rings or traces; the base class of ringsim's errors.

    Args:
        message: the error message.
        trace: the ``ringsim.Trace`` up to the error if the error ended a run, or None.
        diagnosis: the reason why the run ended (see ``ringsim.diagnose``), or None if unknown.

    Example:
        >>> from ringsim.errors import RankFailed, RingError
        >>> try:
        ...     raise RankFailed("rank 2 of 4 raised ValueError: no such layer")
        ... except RingError as error:
        ...     print(error, error.trace)
        rank 2 of 4 raised ValueError: no such layer None
    """

    imposed = False  # whether a rank raises this error only because of other ranks


class RankFailed(RingError, RuntimeError):
    """A rank raised an exception, or its process died; ``rank`` is the first rank that failed."""

    def __init__(self, message: str, *, rank: int = -1, **of_a_run: Any) -> None:
        super().__init__(message, **of_a_run)
        self.rank = rank


class Deadlock(RingError, RuntimeError):
    """The ranks wait for each other, and none can continue."""


class MessageMismatch(RingError, RuntimeError):
    """The two sides of a message disagree about its size, dtype or shape.

    This error is also raised if the ranks of a group disagree about a collective.
    """


class PeerExited(RingError, RuntimeError):
    """A rank's peer has exited and will never answer."""


class RendezvousFailed(RingError, RuntimeError):
    """The ranks could not find each other; the message lists the present and the missing ranks."""


class RunTimeout(RingError, RuntimeError):
    """A run took longer than its time limit, or an operation on simulated ranks timed out."""


class TraceFileError(RingError):
    """A trace file cannot be written, is truncated or damaged, or has a foreign or later format."""

    def __init__(self, message: str, **of_a_run: Any) -> None:
        super().__init__(escape_line(str(message)), **of_a_run)


class ScheduleError(RingError):
    """A pipeline schedule breaks the rules for schedules."""


class ArgumentError(RingError, ValueError, RuntimeError):
    """An argument is invalid; the message names the argument, the rule and the value."""


class Refused(ArgumentError):
    """An operation has an invalid argument, and torch would also refuse the operation.

    If the program does not catch this error, the run ends in ``RankFailed``, as in torch.
    """


class StartsRanks(ArgumentError):
    """A program starts its own ranks, although ringsim has already started ranks for it."""


class Interrupted(_Explained, KeyboardInterrupt):
    """The user stopped a run (Ctrl-C or a notebook's Interrupt); ``trace`` is the partial trace."""


LONGEST_S = 9e9  # the longest time in a trace, 285 years: a trace counts ns in 64 bits
_MOST_SHOWN = 200  # the most characters of a value in a message


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value is a Python or numpy integer, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Returns whether a value is a list, a tuple or similar, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_one_of(value: object, names: Sequence[str]) -> bool:
    """Returns whether a value is one of the given names."""
    return isinstance(value, str) and value in names


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a finite number (not a bool) that a float can hold.

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


def name_integers(least: int, most: int | None = None) -> str:
    """Describes the rule for an integer argument in words.

    Example:
        >>> name_integers(1), name_integers(2), name_integers(0, 3)
        ('a positive integer', 'an integer of at least 2', 'an integer from 0 to 3')
    """
    if most is not None:
        return f"an integer from {least} to {most}"
    return {0: "a non-negative integer", 1: "a positive integer"}.get(
        least, f"an integer of at least {least}"
    )


def check_integer(name: str, value: object, least: int, hint: str) -> None:
    """Checks that an argument is an integer of at least ``least``.

    The error message ends with ``hint``.
    """
    if not is_integer(value) or value < least:
        raise ArgumentError(f"{name} must be {name_integers(least)}, got {say(value)}. {hint}")


def read_whole(
    name: str, value: Any, least: int, most: int | None = None, where: str = "", hint: str = ""
) -> int:
    """Returns an argument as ``int`` if it is an integer (Python, numpy or torch) within a range.

    Args:
        name: the name of the argument.
        value: the value that was passed; True and False are not integers.
        least: the smallest allowed value.
        most: the largest allowed value, or None for no limit.
        where: the calling rank, as it appears in the message, such as " (rank 2 of 4)".
        hint: the remedy.

    Example:
        >>> read_whole("port", 29500, 1, 65535)
        29500
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ArgumentError(
            f"{name} must be {name_integers(least, most)}, got {value!r}{where}. {hint}".rstrip()
        )
    return number


def check_duration(name: str, value: object) -> None:
    """Checks that an argument is a duration in seconds that a trace can hold."""
    if not is_number(value) or not 0 <= value <= LONGEST_S:
        raise ArgumentError(
            f"{name} must be from 0 to {LONGEST_S:g} s, got {say(value)}. Pass the time in "
            "seconds. A trace counts nanoseconds and can span at most 285 years."
        )


def check_limit(name: str, seconds: object) -> None:
    """Checks that a time limit is a positive number of seconds."""
    if not is_number(seconds) or seconds <= 0:
        raise ArgumentError(
            f"{name} must be a positive number of seconds, got {say(seconds)}. Use 30, for example."
        )


def check_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a worker's arguments after checking that they are a sequence and a dict (or None)."""
    try:
        values = tuple(args)
    except TypeError:
        raise ArgumentError(
            f"args must be a tuple of the worker's arguments, got {say(args)}. Use args=(value,)."
        ) from None
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ArgumentError(
            f"kwargs must be a dict of the worker's arguments by name, got {say(named)}. Use "
            "kwargs={'name': value}."
        )
    return values, dict(named)


def check_seed(seed: Any, world_size: int) -> int:
    """Returns a seed as ``int``; checks that torch accepts ``seed + rank`` for every rank."""
    if not is_integer(seed) or not -(2**63) <= int(seed) <= 2**64 - world_size:
        raise ArgumentError(
            f"seed must be an integer from -2**63 to 2**64 - {world_size}, got {say(seed)}. Use "
            "a seed such as 0."
        )
    return int(seed)


def check_worker(worker: object) -> None:
    """Checks that a worker is an ordinary function."""
    if not callable(worker):
        raise ArgumentError(
            f"worker must be a function, got {worker!r}. "
            "Pass the function itself, trace(worker, ...), not its result, trace(worker(), ...)."
        )
    if (
        inspect.iscoroutinefunction(worker)
        or inspect.isgeneratorfunction(worker)
        or inspect.isasyncgenfunction(worker)
    ):
        raise ArgumentError(
            "worker must be an ordinary function, neither async nor a generator, got "
            f"{worker!r}. Wrap it in an ordinary function."
        )


def say(value: object) -> str:
    """Formats a value for error messages, on one line and shortened if it is long.

    Example:
        >>> say(1.5), say("x" * 1000)[-5:], say([1, 2])
        ('1.5', 'xx...', '[1, 2]')
    """
    try:
        shown = " ".join(repr(value).split())
    except Exception:  # an integer of ten thousand digits, or a class with a failing __repr__
        return f"a {type(value).__name__}"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks as "rank 2", "ranks 0 and 1" or "ranks 0, 1 and 2"; shortens long lists.

    Example:
        >>> name_ranks([2]), name_ranks([0, 1, 5]), name_ranks(range(40))
        ('rank 2', 'ranks 0, 1 and 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 10:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
