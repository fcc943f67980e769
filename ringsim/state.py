"""The one piece of state of a rank: its ring, its recorder, where its hidden prints go, what carries its messages, and its clock.

``RankState`` is a frozen value and is replaced whole. There is one for the process; a simulated rank has one of its own, in its context.
Nothing else in ringsim is a module global that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringsim.comm.backend import Backend
    from ringsim.comm.log import LogOptions
    from ringsim.compute_costs import Clock, CostTable
    from ringsim.ring import Ring
    from ringsim.traces.recorder import Recorder


@dataclass(frozen=True)
class RankState:
    """What a rank knows about itself.

    Attributes:
        ring: the ring this rank is in, None before ``initialize_distributed`` and after ``destroy_distributed``.
        recorder: who writes this rank's events, None while nothing is recorded.
        hidden_output: takes the text that print suppression hides, None to drop it.
        undo_print: gives ``builtins.print`` back, None while it is not replaced.
        backend: what carries the messages of ``ringsim.comm``, None for torch.
        log: what ``ringsim.comm`` logs, None for nothing.
        stopped_log: the log while it is stopped: its settings and what it has; None before it was first configured.
        clock: the rank's virtual clock, None for the real one.
        slowdown: how many times as long ``ringsim.compute`` takes.
        jitter: draws how many times as long the next computation takes; None: as long as it is.
        costs: how long the computations of a stage take on the virtual clock, None for no time.
        sleep_s: how much longer ``ringsim.compute`` takes on the virtual clock than it is asked to, as a real sleep does.
        around_s: what the program takes around it there, which needs a core.
        short: the backend, where messages need nothing besides: no log, and see ``Backend.direct``; else None.
    """

    ring: Ring | None = None
    recorder: Recorder | None = None
    hidden_output: Callable[[str], None] | None = None
    undo_print: Callable[[], None] | None = None
    backend: Backend | None = None
    log: LogOptions | None = None
    stopped_log: LogOptions | None = None
    clock: Clock | None = None
    slowdown: float = 1.0
    jitter: Callable[[], float] | None = None
    costs: CostTable | None = None
    sleep_s: float = 0.0
    around_s: float = 0.0
    short: Backend | None = field(init=False)

    def __post_init__(self) -> None:
        is_short = self.backend is not None and self.backend.direct and self.log is None
        object.__setattr__(self, "short", self.backend if is_short else None)  # it is frozen


# The only cell that changes: the state of the process, last; first a None while simulated ranks have states of their own.
_process: list[Any] = [RankState()]
_simulated: ContextVar[RankState | None] = ContextVar("ringsim_rank_state", default=None)


def get_state() -> RankState:
    """Returns the state of the calling rank."""
    state: RankState = _simulated.get() or _process[-1]
    return state


get_simulated = _simulated.get  # get_simulated() returns the state of the calling simulated rank, None where there is none


def get_cell() -> list[Any]:
    """Returns ``cell``, for who cannot afford a call: the state is ``cell[0] or get_simulated() or cell[-1]``. To be read only.

    ``torch.compile`` can follow that, as it could not follow a context variable.
    """
    return _process


@contextmanager
def simulated_states() -> Iterator[None]:
    """Lets ranks of this process have states of their own inside the block, see ``enter_rank``."""
    _process.insert(0, None)
    try:
        yield
    finally:
        del _process[0]


def enter_rank(state: RankState) -> None:
    """Gives the calling context, a simulated rank's, a state of its own."""
    _simulated.set(state)


def change_state(**changes: Any) -> RankState:
    """Replaces the calling rank's state by one with ``changes`` (fields of ``RankState``) and returns it."""
    state = replace(get_state(), **changes)
    if _simulated.get() is not None:
        _simulated.set(state)
    else:
        _process[-1] = state
    return state
