"""``ringsim.compute``, and the cost of computing on a virtual clock.

``compute`` only spends time, and does so in the same way on real ranks and on a virtual clock. All
other computing takes real time on real ranks. On simulated ranks, other computing takes no time
unless you pass a cost table to ``ringsim.simulate``. The table gives the time of each piece of
work, and the rank's clock advances by that time. With tensors that hold no data
(``device="meta"``), you can simulate models that are too large for any machine::

    rank 1  recv | F: 4.0e13 operations, charged | isend  pipeline stages report their work,
                                                          and are charged for it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, Protocol, runtime_checkable

from ringsim.errors import ArgumentError, is_number, say
from ringsim.state import get_state
from ringsim.traces.spans import span

COMPUTE = "compute "  # prefix of the span's name, before the seconds
# prefix of a mark's name, before the seconds of the process and of its main thread
PROCESSOR = "processor time "


# The time that the calling rank has slept in `compute`, in seconds, with all slowdowns included.
_slept: ContextVar[float] = ContextVar("ringsim_slept", default=0.0)


class Clock(Protocol):
    """The clock of a simulated rank; real ranks use the machine's clock."""

    def now_s(self) -> float:
        """Returns the time since the start of the run, in seconds."""

    def advance(self, seconds: float) -> None:
        """Advances the calling rank's time by ``seconds``; other ranks may run in the meantime."""

    def work(self, seconds: float) -> None:
        """Like ``advance``, but first waits for a free core, and then occupies that core."""


def compute(seconds: float) -> None:
    """Spends time as if computing: a real rank sleeps, and a simulated rank advances its clock.

    Sleeping ranks do not compete for cores, so a few cores are enough for many ranks. The injected
    faults ``Slow`` and ``Jitter`` change how long the call takes. The trace shows a span such as
    "compute 0.005 s", named after the seconds that you passed.

    Args:
        seconds: the time in seconds; must be non-negative. A real sleep lasts slightly longer;
            ``ringsim.calibrate`` measures the difference.

    Raises:
        ArgumentError: ``seconds`` is not a non-negative number.

    Example:
        >>> compute(0.001)
    """
    if not is_number(seconds) or seconds < 0:
        raise ArgumentError(
            f"seconds must be a non-negative number, got {seconds!r}. Pass seconds, not "
            "milliseconds: compute(0.005)."
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
    """Stretches a real rank's computations inside the block by the injected slowdown.

    The rank sleeps at the end of the block if a slowdown is injected. A simulated rank is charged
    for its work instead; see ``ringsim.compute_costs``.

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
    """Returns the time a computation takes on the calling rank, with injected slowdown and jitter.

    Example:
        >>> stretch(2.0)
        2.0
    """
    state = get_state()
    return seconds * state.slowdown * (1.0 if state.jitter is None else state.jitter())


def read_label(label: str) -> float | None:
    """Returns the seconds in the name of a ``compute`` span, or None for any other name.

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
    """The number of floating-point operations that some layers perform for one microbatch.

    Attributes:
        forward: the operations in the forward pass.
        input_grad: the operations in the half of the backward pass that computes the input's
            gradient.
        weight_grad: the operations in the half that computes the weights' gradients.

    Example:
        >>> Flops(forward=2, input_grad=3, weight_grad=4).of("B")
        7
    """

    forward: int
    input_grad: int
    weight_grad: int

    def of(self, kind: str) -> int:
        """Returns the number of operations in an action; "B" stands for "I" and "W" together."""
        return {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "B": self.input_grad + self.weight_grad,
        }[kind]

    def plus(self, other: Flops) -> Flops:
        """Returns the sum of the two operands."""
        return Flops(*map(add, self, other))


@dataclass(frozen=True)
class Work:
    """A piece of a pipeline stage's work.

    Attributes:
        kind: "F" (forward, or the prefill or decoding step of a generation), "B" (backward), or its
            halves "I" (gradient of the input) and "W" (gradients of the weights).
        stage: the number of the stage.
        microbatch: the number of the microbatch.
        flops: the number of floating-point operations, as counted by `ringsim.pipeline.flops`.
    """

    kind: str
    stage: int
    microbatch: int
    flops: int


class CostTable(Protocol):
    """A table of how long pieces of work take; any class with a ``time_s`` method is accepted.

    The table's ``repr`` is written to the trace.
    """

    def time_s(self, work: Work) -> float:
        """Returns the time that a piece of work takes, in seconds."""
        ...


@runtime_checkable
class PostingCosts(Protocol):
    """A cost table that includes the time the program spends around computations, in seconds.

    ``ringsim.calibrate`` returns such a table.
    """

    @property
    def sleep_s(self) -> float:
        """The time that ``ringsim.compute`` takes in addition to the requested seconds."""
        ...

    @property
    def around_s(self) -> float:
        """The time that the program spends in its own code before and after each computation."""
        ...

    def post_s(self, sends: bool, size_bytes: int, *, met: bool = True) -> float:
        """Returns the time that a rank needs to post a message, in seconds.

        ``met`` is true if the receive for a send is already posted.
        """
        ...


def check_costs(compute: object) -> None:
    """Raises ArgumentError unless a value is a cost table or None."""
    if compute is not None and (
        isinstance(compute, type) or not callable(getattr(compute, "time_s", None))
    ):
        raise ArgumentError(
            f"compute must be a cost table with a time_s(work) method, got {say(compute)}. "
            "Pass ringsim.FlopCosts(flops_per_s=4e14), for example."
        )


@dataclass(frozen=True)
class FlopCosts:
    """A cost table that charges for the arithmetic of transformer layers.

    Each computation of a stage takes ``operations / flops_per_s`` seconds. Each half of a split
    backward pass is charged for its own operations. (On real ranks, the second half of ringsim's
    backward pass goes through the layers again and therefore takes longer.) Norms, softmax,
    embeddings and the optimizer cost nothing. Memory reads, which dominate the decoding of a token,
    also cost nothing: pass the speed that your hardware reaches on these layers, not its nominal
    speed.

    Args:
        flops_per_s: the number of floating-point operations that a rank performs per second; must
            be positive.

    Raises:
        ArgumentError: ``flops_per_s`` is not a positive number.

    Example:
        >>> FlopCosts(flops_per_s=4e14).time_s(Work("F", stage=0, microbatch=0, flops=8 * 10**13))
        0.2
    """

    flops_per_s: float

    def __post_init__(self) -> None:
        value: object = self.flops_per_s
        if not isinstance(value, int | float) or not is_number(value) or not value > 0:
            raise ArgumentError(
                f"flops_per_s must be a positive number, got {say(value)}. Use about 1e14 for a "
                "GPU."
            )

    def time_s(self, work: Work) -> float:
        """Returns the time that a piece of work takes, in seconds."""
        return work.flops / self.flops_per_s


def charge(kind: str, stage: int, microbatch: int, count: Callable[[], Flops]) -> None:
    """Charges the calling rank for work that the rank has just performed.

    The code that computes a stage calls this function. The clock of a simulated rank advances by
    the time of the work, and other ranks may run meanwhile. On a real rank, or without a cost
    table, nothing happens. ``count`` is a function that returns the stage's number of operations;
    it is called only if the rank is charged.

    Example:
        >>> charge("F", 0, 0, count=lambda: Flops(1, 1, 1))  # a real rank
    """
    state = get_state()
    if state.costs is not None and state.clock is not None:
        work = Work(kind, stage, microbatch, count().of(kind))
        state.clock.advance(stretch(state.costs.time_s(work)))
