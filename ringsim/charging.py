"""What computing costs on the virtual clock: a table says how long a piece of work takes, and the clock of the rank goes on that far.

A real rank takes its time itself. A simulated one takes none, whatever it computes, unless ``ringsim.simulate`` was given a table of costs;
tensors without data (``device="meta"``) make models possible that fit on no machine::

    rank 1   recv | F: 4.0e13 operations, charged | isend        the stages of a pipeline say what they do, and are charged for it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ringsim.computing import stretch
from ringsim.errors import ArgumentError, is_number, say
from ringsim.pipeline.flops import Flops
from ringsim.state import get_state

__all__ = ["CostTable", "FlopCosts", "Work", "charge", "check_costs"]


@dataclass(frozen=True)
class Work:
    """A piece of work of a pipeline stage.

    Attributes:
        kind: "F" (forward; prefill and decode of a generation, too), "B" (backward), or its halves "I" (gradient of the input) and "W"
            (gradients of the weights).
        stage: number of the stage.
        microbatch: number of the microbatch.
        flops: floating-point operations, as `ringsim.pipeline.flops` counts them.
    """

    kind: str
    stage: int
    microbatch: int
    flops: int


class CostTable(Protocol):
    """Knows how long work takes; a class of one's own with this method will do. Its ``repr`` goes into the trace."""

    def time_s(self, work: Work) -> float:
        """Returns the seconds that a piece of work takes."""
        ...


def check_costs(compute: object) -> None:
    """Checks that an argument is a table of costs, or None.

    Args:
        compute: what was passed.

    Raises:
        ArgumentError: it is neither.
    """
    if compute is not None and (isinstance(compute, type) or not callable(getattr(compute, "time_s", None))):
        raise ArgumentError(
            f"compute must be a table of costs, with a method time_s(work), got {say(compute)}. Pass ringsim.FlopCosts(flops_per_s=4e14)."
        )


@dataclass(frozen=True)
class FlopCosts:
    """Charges the arithmetic of transformer layers: ``operations / flops_per_s`` seconds for each computation of a stage.

    The two halves of a split backward pass cost what each needs. (Ringsim's own second half, on real ranks, walks through the layers
    again, and takes longer.) Norms, softmax, embeddings and the optimizer cost nothing, nor does reading memory, which decides how long
    decoding one token takes: say what your hardware reaches on the layers in question, not what is printed on it.

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
            raise ArgumentError(f"flops_per_s must be a number above 0, got {say(value)}. A GPU reaches some 1e14.")

    def time_s(self, work: Work) -> float:
        """Returns the seconds that a piece of work takes.

        Args:
            work: what a stage does.
        """
        return work.flops / self.flops_per_s


def charge(kind: str, stage: int, microbatch: int, count: Callable[[], Flops]) -> None:
    """Charges the calling rank for work that it has just done: nothing on a real rank, or where no table is in force.

    Who computes a stage calls it; a simulated rank goes on when that much time has passed, and others may run meanwhile.

    Args:
        kind: as in `Work`, and so are the next two.
        stage: number of the stage.
        microbatch: number of the microbatch.
        count: counts the operations of the stage; called where somebody is charged.

    Example:
        >>> charge("F", 0, 0, count=lambda: Flops(1, 1, 1))  # a real rank
    """
    state = get_state()
    if state.costs is not None and state.clock is not None:
        work = Work(kind, stage, microbatch, count().of(kind))
        state.clock.advance(stretch(state.costs.time_s(work)))
