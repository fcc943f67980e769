"""A rank's state: its ring, recorder, output, backend for new groups, and clock.

``RankState`` is a frozen value; a change replaces it as a whole. The process has one state, and
each simulated rank has its own state in its context. ringsim has no other mutable module globals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

OUR_THREADS = "ringsim-"  # prefix of the names of ringsim's own threads


def start_thread(name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts and returns one of ringsim's own threads, which does not keep the process alive."""
    thread = threading.Thread(target=work, args=args, name=OUR_THREADS + name, daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    Fields of type Any have types from higher layers, which this module does not import.

    Attributes:
        ring: the rank's ``Ring``; None before ``initialize_distributed`` and after
            ``destroy_distributed``.
        recorder: the ``Recorder`` of this rank's events; None while nothing is recorded.
        hidden_output: a function that receives the text hidden by print suppression; None to drop
            the text.
        undo_print: a function that restores ``builtins.print``; None while ``print`` is not
            replaced.
        backend: the name of the backend for new groups, or None for torch's default.
        log: the ``LogOptions`` of the ``ringsim.comm`` log, or None for no log.
        stopped_log: the stopped log, with its settings and records; None before a log was
            configured.
        clock: the rank's virtual ``Clock``, or None for the real clock.
        slowdown: the factor for the time of ``ringsim.compute``.
        jitter: a function that draws the factor for the next computation, or None for no jitter.
        costs: the ``CostTable`` for computations of a stage on the virtual clock, or None if
            computations take no time.
        sleep_s: the extra time of ``ringsim.compute`` on the virtual clock, like the extra time of
            a real sleep.
        around_s: the program's core time around each computation on the virtual clock.
        debug: whether an error keeps the variables of the rank.
        ended: the groups of a session that ended with a failed call.
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
    debug: bool = False
    ended: Collection[Any] = ()


class _Process:
    """The state of the process.

    Attributes:
        state: the state of a rank that is not simulated.
        simulates: whether simulated ranks in the process have their own states.
        unchanged: whether no rank of the process logs its calls to ``ringsim.comm``.
    """

    def __init__(self) -> None:
        self.change(RankState(), simulates=False)

    def change(self, state: RankState, *, simulates: bool) -> None:
        """Sets all attributes."""
        self.state, self.simulates = state, simulates
        self.unchanged = not simulates and state.log is None


process = _Process()
_simulated: ContextVar[RankState | None] = ContextVar("ringsim_rank_state", default=None)


def get_state() -> RankState:
    """Returns the state of the calling rank."""
    # torch.compile cannot follow a context variable
    return (_simulated.get() if process.simulates else None) or process.state


@contextmanager
def simulated_states() -> Iterator[None]:
    """Gives each of this process's ranks its own state inside the block; see ``enter_rank``."""
    before = process.simulates
    process.change(process.state, simulates=True)
    try:
        yield
    finally:
        process.change(process.state, simulates=before)


def enter_rank(state: RankState) -> None:
    """Gives the calling context, which belongs to a simulated rank, its own state."""
    _simulated.set(state)


def change_state(**changes: Any) -> RankState:
    """Changes fields of the calling rank's state and returns the new ``RankState``."""
    before = get_state()
    state = replace(before, **changes)
    if before is process.state:
        process.change(state, simulates=process.simulates)
    else:
        _simulated.set(state)
    return state
