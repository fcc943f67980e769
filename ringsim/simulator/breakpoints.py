"""Breakpoints on the virtual clock: while one rank stops, time stands still for all ranks."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ringsim.comm.checks import Attempt
from ringsim.launch.debugging import RankDebugger
from ringsim.simulator.simulation import Simulation, run_in
from ringsim.traces.standing import say_standing
from ringsim.traces.units import time_text

_ANY = -1  # stop at the next operation of any rank


class _Debugger(RankDebugger):
    """The debugger of a simulated rank, with commands that show and run the other ranks."""

    def __init__(self, simulation: _DebuggedSimulation, rank: int, state: str) -> None:
        super().__init__(simulation.process.ask, simulation.where)
        self._simulation, self._state = simulation, {rank: state}

    def do_look(self, _: str) -> None:
        """List what each rank does, and the operations that are posted and matched."""
        self.message(say_standing(self._simulation.interrupt().trace, self._state))

    def do_op(self, rank: str) -> Any:
        """Continue to the next operation of any rank, or of the rank that follows the command."""
        self._simulation.stops = int(rank) if rank.isdecimal() else _ANY
        return self.do_continue("")


class _DebuggedSimulation(Simulation):
    """A simulation whose ranks can stop.

    Attributes:
        stops: the rank that stops before its next operation, _ANY for any rank, or None.
    """

    stops: int | None = None
    _debug = True

    def _prepare_process(self) -> None:
        super()._prepare_process()
        sys.breakpointhook = self._stop

    def where(self) -> str:
        """Returns the running rank and its time."""
        return f"rank {self._clock.current.number} at {time_text(self._clock.now_ns)}"

    def _stop(self) -> None:
        _Debugger(self, self._clock.current.number, "has stopped").set_trace(sys._getframe(1))

    def _on_operation(self, attempt: Attempt) -> None:
        rank, frame = self._clock.current.number, self._recorder.sites.find(sys._getframe())
        if self.stops in (rank, _ANY) and frame is not None:
            self.stops = None
            state = f"has stopped before {self._describe(attempt)}"
            _Debugger(self, rank, state).stop_at(frame)


debug_here = partial(run_in, _DebuggedSimulation)
