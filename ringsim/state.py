"""The one state of a rank.

Its ring, its recorder, where its hidden prints go, the backend of groups to come, and its clock.
``RankState`` is a frozen value and is replaced whole. There is one for the process; each simulated
rank has its own, in its context. Nothing else in ringsim is a module global that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

OUR_THREADS: Final = "ringsim-"  # prefix of the names of ringsim's own threads


@dataclass(frozen=True)
class RankState:
    """What a rank knows about itself.

    Fields of type Any hold values of modules above this one, which it does not import.

    Attributes:
        ring: the ``Ring`` that this rank is in, None before ``initialize_distributed`` and after
            ``destroy_distributed``.
        recorder: the ``Recorder`` of this rank's events, None while nothing is recorded.
        hidden_output: takes the text that print suppression hides, None to drop it.
        undo_print: gives ``builtins.print`` back, None while it is not replaced.
        backend: the name of the backend of groups to come, None for whatever torch takes.
        log: the ``LogOptions`` of what ``ringsim.comm`` logs, None for nothing.
        stopped_log: the log while it is stopped, with its settings and records; None before it was
            first configured.
        clock: the rank's virtual ``Clock``, None for the real one.
        slowdown: how many times as long ``ringsim.compute`` takes.
        jitter: draws how many times as long the next computation takes; None for no jitter.
        costs: the ``CostTable`` of what the computations of a stage take on the virtual clock, None
            for no time.
        sleep_s: how much longer than asked ``ringsim.compute`` takes on the virtual clock, as a
            real sleep does.
        around_s: what the program takes around each computation there, for which it needs a core.
    """

    ring: Any = None
    recorder: Any = None
    hidden_output: Callable[[str], None] | None = None
    undo_print: Callable[[], None] | None = None
    backend: str | None = None
    log: Any = None
    stopped_log: Any = None
    clock: Any = None
    slowdown: float = 1.0
    jitter: Callable[[], float] | None = None
    costs: Any = None
    sleep_s: float = 0.0
    around_s: float = 0.0


class _Process:
    """The state of the process, and whether simulated ranks in it have states of their own.

    Attributes:
        unchanged: whether no log stands between a call of ``ringsim.comm`` and torch, on any rank
            of the process.
    """

    def __init__(self) -> None:
        self.change(RankState(), simulates=False)

    def change(self, state: RankState, *, simulates: bool) -> None:
        """Sets all attributes."""
        self.state, self.simulates = state, simulates
        self.unchanged = not simulates and is_plain(state)


def is_plain(state: RankState) -> bool:
    """Returns whether calls of ``ringsim.comm`` go to torch as they are on a rank."""
    return state.log is None


process = _Process()
_simulated: ContextVar[RankState | None] = ContextVar("ringsim_rank_state", default=None)


def get_state() -> RankState:
    """Returns the state of the calling rank."""
    # torch.compile cannot follow a context variable
    return (_simulated.get() if process.simulates else None) or process.state


@contextmanager
def simulated_states() -> Iterator[None]:
    """Lets ranks of this process have states of their own inside the block, see ``enter_rank``."""
    before = process.simulates
    process.change(process.state, simulates=True)
    try:
        yield
    finally:
        process.change(process.state, simulates=before)


def enter_rank(state: RankState) -> None:
    """Gives the calling context, that of a simulated rank, a state of its own."""
    _simulated.set(state)


def change_state(**changes: Any) -> RankState:
    """Replaces the calling rank's state by one with ``changes`` and returns it.

    They are fields of ``RankState``.
    """
    before = get_state()
    state = replace(before, **changes)
    if before is process.state:
        process.change(state, simulates=process.simulates)
    else:
        _simulated.set(state)
    return state
