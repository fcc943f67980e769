"""``ringsim.compute``: work that is nothing but time, the same on real ranks and on a virtual clock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from ringsim.errors import ArgumentError
from ringsim.state import get_state
from ringsim.traces.recorder import span

__all__ = ["COMPUTE", "Clock", "compute", "read_label", "stretch", "stretched"]

COMPUTE: Final = "compute "  # what the name of its span begins with; the seconds asked for follow


# How long the calling rank has slept in `compute`, in seconds: that has been stretched already.
_slept: Final[ContextVar[float]] = ContextVar("ringsim_slept", default=0.0)


class Clock(Protocol):
    """The clock of a rank that is simulated; real ranks have none, theirs is the machine's."""

    def now_s(self) -> float:
        """Returns the time, in seconds from the start of the run."""

    def advance(self, seconds: float) -> None:
        """Lets ``seconds`` pass on the calling rank; others may run meanwhile."""

    def work(self, seconds: float) -> None:
        """The same, for what needs a core: it waits for one where the ranks share them."""


def compute(seconds: float) -> None:
    """Takes time, as computing would: a real rank sleeps, a simulated one lets its clock go on.

    Ranks that sleep do not compete for cores, so that a few cores can stand for many ranks. ``Slow`` and ``Jitter`` in ``inject`` make it
    longer or shorter. The trace shows a span "compute 0.005 s", named after the seconds that were asked for.

    Args:
        seconds: how long, 0 or more. A real sleep lasts a little longer: ``ringsim.calibrate`` finds how much.

    Raises:
        ArgumentError: ``seconds`` is no number from 0.

    Example:
        >>> compute(0.001)
    """
    if not _is_duration(seconds):
        raise ArgumentError(f"seconds must be a number from 0, got {seconds!r}. Give seconds, not milliseconds: compute(0.005).")
    state = get_state()
    with span(f"{COMPUTE}{float(seconds)!r} s"):
        if state.clock is not None:
            state.clock.advance(stretch(seconds) + state.sleep_s)
            if state.around_s:
                state.clock.work(state.around_s)
        else:
            begin_s = time.perf_counter()
            time.sleep(stretch(seconds))
            _slept.set(_slept.get() + time.perf_counter() - begin_s)


@contextmanager
def stretched() -> Iterator[None]:
    """Makes what a real rank computes within last as long as what is injected there asks: it sleeps at the end.

    A simulated rank is charged for what it computes instead, see ``ringsim.charging``. Nothing sleeps where nothing is injected.

    Example:
        >>> with stretched():
        ...     result = 6 * 7
    """
    state = get_state()
    if state.clock is not None or (state.slowdown == 1.0 and state.jitter is None):
        yield
        return
    begin_s, slept_s = time.perf_counter(), _slept.get()
    yield
    took_s = time.perf_counter() - begin_s - (_slept.get() - slept_s)
    time.sleep(max(0.0, stretch(took_s) - took_s))


def stretch(seconds: float) -> float:
    """Returns how long a computation takes on the calling rank with what is injected there; draws where something jitters.

    Args:
        seconds: how long it would take.

    Example:
        >>> stretch(2.0)
        2.0
    """
    state = get_state()
    return seconds * state.slowdown * (1.0 if state.jitter is None else state.jitter())


def read_label(label: str) -> float | None:
    """Returns the seconds that a span named ``label`` asked for, None where it is no span of ``compute``.

    Example:
        >>> read_label("compute 0.005 s"), read_label("compute"), read_label("forward")
        (0.005, None, None)
    """
    if not (label.startswith(COMPUTE) and label.endswith(" s")):
        return None
    try:
        seconds = float(label[len(COMPUTE) : -2])
    except ValueError:  # a user's own span
        return None
    return seconds if 0 <= seconds < math.inf else None


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
