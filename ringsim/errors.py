"""Everything ringsim raises on purpose.

The tree::

    Exception
     +-- RingError                 something about ranks, rings or traces went wrong
     |    +-- RankFailed           a rank raised, or died
     |    +-- Deadlock             nobody can go on (also a RuntimeError, which torch raises there)
     |    +-- MessageMismatch      the two sides of a message disagree (also a RuntimeError)
     |    +-- PeerExited           the other side of a message is gone (also a RuntimeError)
     |    +-- RendezvousFailed     the ranks could not find each other
     |    +-- RunTimeout           a run took longer than its limit
     |    +-- TraceFileError       a trace file cannot be read or written
     |    +-- ScheduleError        a pipeline schedule breaks its rules
     |    +-- ArgumentError        a bad argument (also a ValueError)
     +-- KeyboardInterrupt
          +-- Interrupted          the user stopped a run

Errors that end a run carry ``trace``, what was recorded until then, and ``diagnosis``, why it ended (None where nobody asked).
Every message reads ``<what> must be <rule>, got <value> (<where>). <What to do>.``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

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


class RingError(Exception):
    """Something about ranks, rings or traces went wrong; the parent of ringsim's other errors.

    Args:
        message: what must hold, what was found, where, and what to do.
        trace: what was recorded until then, where a run ended with this error.
        diagnosis: why the run ended, where somebody found out.

    Example:
        >>> from ringsim.errors import RankFailed, RingError
        >>> try:
        ...     raise RankFailed("rank 2 of 4 raised ValueError: no such layer")
        ... except RingError as error:
        ...     print(error, error.trace)
        rank 2 of 4 raised ValueError: no such layer None
    """

    imposed = False  # whether it is raised in a rank only because of what has become of others

    def __init__(self, message: str, *, trace: Trace | None = None, diagnosis: Any = None) -> None:
        super().__init__(message)
        self.trace = trace
        self.diagnosis = diagnosis

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the message alone, for it names the user's own line already."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(RingError):
    """A rank raised an exception, or its process died; ``rank`` says which one failed first."""

    def __init__(self, message: str, *, rank: int = -1, trace: Trace | None = None, diagnosis: Any = None) -> None:
        super().__init__(message, trace=trace, diagnosis=diagnosis)
        self.rank = rank


class Deadlock(RingError, RuntimeError):
    """Nobody can go on: the ranks wait for each other. Also a RuntimeError, as torch would raise there."""


class MessageMismatch(RingError, RuntimeError):
    """The two sides of a message disagree on its size, dtype or shape, or the ranks of a group on what they call together."""


class PeerExited(RingError, RuntimeError):
    """The other side of a message is gone and will never answer."""


class RendezvousFailed(RingError):
    """The ranks could not find each other; the message names those present and those missing."""


class RunTimeout(RingError):
    """A run took longer than the limit that it was given."""


class TraceFileError(RingError):
    """A trace file cannot be read or written: truncated, damaged, foreign, or of a later version."""


class ScheduleError(RingError):
    """A pipeline schedule breaks its rules."""


class ArgumentError(RingError, ValueError):
    """An argument breaks its rule; the message names the argument, the rule and the value."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run (Ctrl-C, or a notebook's Interrupt); ``trace`` holds what was recorded until then."""

    def __init__(self, message: str, *, trace: Trace | None = None, diagnosis: Any = None) -> None:
        super().__init__(message)
        self.trace = trace
        self.diagnosis = diagnosis

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the message alone."""
        return [f"{type(self).__name__}: {self}"]
