"""``ringsim.compute``.

Work that is nothing but time, the same on real ranks and on a virtual clock. What computing costs
on the virtual clock: a table says how long a piece of work takes, and the clock of the rank goes on
that far.

A real rank takes its time itself. A simulated one takes none, whatever it computes, unless
``ringsim.simulate`` was given a table of costs; tensors without data (``device="meta"``) make
models possible that fit on no machine::

    rank 1  recv | F: 4.0e13 operations, charged | isend  the stages of a pipeline say what they do,
                                                          and are charged for it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from ringsim.errors import ArgumentError, is_number, say
from ringsim.state import get_state
from ringsim.traces.spans import span

__all__ = [
    "COMPUTE",
    "PROCESSOR",
    "Clock",
    "CostTable",
    "FlopCosts",
    "Flops",
    "PostingCosts",
    "Work",
    "charge",
    "check_costs",
    "compute",
    "read_label",
    "stretch",
    "stretched",
]

COMPUTE: Final = "compute "  # what the name of its span begins with; the seconds asked for follow
# what the name of a mark begins with; the seconds follow: of the process, and of its main thread
PROCESSOR: Final = "processor time "


# How long the calling rank has slept in `compute`, in seconds: that has been stretched already.
_slept: Final[ContextVar[float]] = ContextVar("ringsim_slept", default=0.0)


class Clock(Protocol):
    """The clock of a rank that is simulated; real ranks have none, theirs is the machine's."""

    def now_s(self) -> float:
        """Returns the time, in seconds from the start of the run."""

    def advance(self, seconds: float) -> None:
        """Lets ``seconds`` pass on the calling rank; others may run meanwhile."""

    def work(self, seconds: float) -> None:
        """Like ``advance``, but occupies a core, and waits for a free one."""


def compute(seconds: float) -> None:
    """Takes time, as computing would: a real rank sleeps, a simulated one lets its clock go on.

    Ranks that sleep do not compete for cores, so that a few cores can stand for many ranks.
    ``Slow`` and ``Jitter`` in ``inject`` make it longer or shorter. The trace shows a span "compute
    0.005 s", named after the seconds that were asked for.

    Args:
        seconds: how long, 0 or more. A real sleep lasts a little longer: ``ringsim.calibrate``
            finds how much.

    Raises:
        ArgumentError: ``seconds`` is no number from 0.

    Example:
        >>> compute(0.001)
    """
    if not is_number(seconds) or seconds < 0:
        raise ArgumentError(
            f"seconds must be a number from 0, got {seconds!r}. Give seconds, not milliseconds: "
            "compute(0.005)."
        )
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
    """Makes what a real rank computes within last as long as what is injected there asks.

    It sleeps at the end. A simulated rank is charged for what it computes instead, see
    ``ringsim.compute_costs``. Nothing sleeps where nothing is injected.

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
    """Returns the length of a computation on the calling rank with what is injected there.

    It is given in seconds; draws where something jitters.

    Example:
        >>> stretch(2.0)
        2.0
    """
    state = get_state()
    return seconds * state.slowdown * (1.0 if state.jitter is None else state.jitter())


def read_label(label: str) -> float | None:
    """Returns the seconds that a span named ``label`` asked for; None if none of ``compute``.

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


class Flops(NamedTuple):
    """Floating-point operations of some layers, for one microbatch.

    Attributes:
        forward: of the forward pass.
        input_grad: of the half of the backward pass that finds the gradient of the input.
        weight_grad: of the half that finds the gradients of the weights.

    Example:
        >>> Flops(forward=2, input_grad=3, weight_grad=4).of("B")
        7
    """

    forward: int
    input_grad: int
    weight_grad: int

    def of(self, kind: str) -> int:
        """Returns the number of operations of an action.

        "F", "I", "W", or "B" for the last two together.
        """
        return {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "B": self.input_grad + self.weight_grad,
        }[kind]

    def plus(self, other: Flops) -> Flops:
        """Returns the operations of both together."""
        return Flops(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Work:
    """A piece of work of a pipeline stage.

    Attributes:
        kind: "F" (forward; prefill and decode of a generation, too), "B" (backward), or its halves
            "I" (gradient of the input) and "W" (gradients of the weights).
        stage: number of the stage.
        microbatch: number of the microbatch.
        flops: floating-point operations, as `ringsim.pipeline.flops` counts them.
    """

    kind: str
    stage: int
    microbatch: int
    flops: int


class CostTable(Protocol):
    """Knows how long work takes; a class of one's own with this method will do.

    Its ``repr`` goes into the trace.
    """

    def time_s(self, work: Work) -> float:
        """Returns the seconds that a piece of work takes."""
        ...


@runtime_checkable
class PostingCosts(Protocol):
    """A table of costs that also knows what the program around the computations takes, in seconds.

    What ``ringsim.calibrate`` finds.
    """

    @property
    def sleep_s(self) -> float:
        """How much longer ``ringsim.compute`` takes than it is asked to."""
        ...

    @property
    def around_s(self) -> float:
        """What the program takes around it."""
        ...

    def post_s(self, sends: bool, size_bytes: int, *, met: bool = True) -> float:
        """Returns the time that posting a message takes of its rank, in seconds.

        ``met``: whether a send's receive is posted already.
        """
        ...


def check_costs(compute: object) -> None:
    """Raises ArgumentError unless what was passed is a table of costs, or None."""
    if compute is not None and (
        isinstance(compute, type) or not callable(getattr(compute, "time_s", None))
    ):
        raise ArgumentError(
            f"compute must be a table of costs, with a method time_s(work), got {say(compute)}. "
            "Pass ringsim.FlopCosts(flops_per_s=4e14)."
        )


@dataclass(frozen=True)
class FlopCosts:
    """Charges the arithmetic of transformer layers.

    ``operations / flops_per_s`` seconds for each computation of a stage. The two halves of a split
    backward pass cost what each needs. (Ringsim's own second half, on real ranks, walks through the
    layers again, and takes longer.) Norms, softmax, embeddings and the optimizer cost nothing, nor
    does reading memory, which decides how long decoding one token takes: say what your hardware
    reaches on the layers in question, not what is printed on it.

    Args:
        flops_per_s: floating-point operations per second that a rank reaches, above 0.

    Raises:
        ArgumentError: it is no such number.

    Example:
        >>> FlopCosts(flops_per_s=4e14).time_s(Work("F", stage=0, microbatch=0, flops=8 * 10**13))
        0.2
    """

    flops_per_s: float

    def __post_init__(self) -> None:
        value: object = self.flops_per_s
        if not isinstance(value, int | float) or not is_number(value) or not value > 0:
            raise ArgumentError(
                f"flops_per_s must be a number above 0, got {say(value)}. A GPU reaches some 1e14."
            )

    def time_s(self, work: Work) -> float:
        """Returns the seconds that a piece of work takes."""
        return work.flops / self.flops_per_s


def charge(kind: str, stage: int, microbatch: int, count: Callable[[], Flops]) -> None:
    """Charges the calling rank for work that it has just done.

    Nothing on a real rank, or where no table is in force. Who computes a stage calls it; a
    simulated rank goes on when that much time has passed, and others may run meanwhile. ``count``
    counts the operations of the stage, and is called only if a rank is charged.

    Example:
        >>> charge("F", 0, 0, count=lambda: Flops(1, 1, 1))  # a real rank
    """
    state = get_state()
    if state.costs is not None and state.clock is not None:
        work = Work(kind, stage, microbatch, count().of(kind))
        state.clock.advance(stretch(state.costs.time_s(work)))
