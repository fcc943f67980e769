"""Runs a function in its own process, such as a simulation on the virtual clock.

The process is forked by the same server as the ranks, with torch loaded. Side effects of the
function (threads, patched functions, a crash) end with the process, and the caller can end it at
any time::

    caller                                     process
    ------                                     -------
    function and arguments, pickled -------->  calls the function
    shows its output as it arrives  <--------  prints
    asks the user                   <------->  stops at a breakpoint
    result, unpickled               <--------  returns; waits for the next call, or to be ended
    on Ctrl-C: "interrupt"          -------->  hands over its partial result
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

from ringsim.diagnose.failure import describe_death, indent, interrupted_once
from ringsim.errors import RankFailed, RunTimeout
from ringsim.launch.job import ALONE, INTERRUPT, RankKind, pack_caller, start_environment
from ringsim.launch.ranks import RankSet, get_launcher
from ringsim.launch.results import read_result
from ringsim.launch.run import Run, RunOptions
from ringsim.traces.cells import name_cells

_HAND_OVER_S = 2.0  # for the partial result of an interrupted process


def run_alone(function: str, *args: Any, limit_s: float | None = None) -> Any:
    """Calls a function in its own process.

    Args:
        function: the function as "module:name", so that the caller need not import it; called
            with the ``Process``, ``args``, and the names of notebook cells, by file.
        args: further arguments, which are pickled.
        limit_s: the time limit for the call, in seconds.

    Returns:
        A copy of the result.

    Raises:
        Interrupted: Ctrl-C was pressed; the error's ``trace`` is the partial result.
        RunTimeout: the limit was exceeded; the error's ``trace`` is the partial result.
        RankFailed: the process died.
    """
    process = start_alone()
    with interrupted_once():
        try:
            cells = name_cells(pack_caller().lines)
            return Alone(process, function, (*args, cells), limit_s).finish()
        finally:
            process.close()


def start_alone() -> RankSet:
    """Starts a process that calls functions, one after the other."""
    kind = RankKind(1, ALONE, 1.0, ring=False, environment=start_environment())
    return get_launcher().get(kind)


class Alone(Run):
    """A call, as a run of one rank, whose "trace" is the result."""

    what = "simulation"

    def __init__(self, process: RankSet, function: str, args: Any, limit_s: float | None) -> None:
        job = replace(pack_caller(), call=pickle.dumps((function, args)))
        process.config.file("out").write_text("")  # without the output of the last call
        super().__init__(process, job, RunOptions(limit_s=limit_s, poll_s=None))

    def dismiss(self) -> None:
        """Does nothing, because the process waits for the next call."""

    def _follow(self, now: float) -> bool:
        self.follow_outputs()
        return True

    def _keep_report(self, one: Any, report: Any) -> None:
        one.report = report  # of a death, or an error that the function has raised

    def _find_error(self) -> Any:
        (one,) = self.ranks
        report: Any = one.report
        if report is None and one.result is None:
            late = (
                f"the simulation did not end within limit_s={self.options.limit_s:g} s. Raise "
                "limit_s, or look at error.trace to see where the ranks were."
            )
            return self._explained(RunTimeout(late))
        self.follow_outputs(last=True)
        if report is None or isinstance(report, BaseException):
            return report
        where = f" ({report.where})" if report.where else ""
        lines = f"\n{indent(report.traceback)}" if report.traceback else ""
        text = f"the simulation ended early: {describe_death(report)}{where}{lines}"
        # otherwise, the output is that of another process
        return (report.exit_code is None and self._startup_error()) or RankFailed(text)

    def _explained(self, error: Any) -> Any:
        """Adds the partial result of the process to an error, if it arrives in time."""
        (one,) = self.ranks
        one.tell(INTERRUPT)
        deadline = time.monotonic() + _HAND_OVER_S
        while not one.is_over and (left_s := deadline - time.monotonic()) > 0:
            self._hear(left_s)
        if one.result is not None:
            found = self._make_trace(complete=False)
            error.trace, error.diagnosis = found.trace, found.diagnosis
        self.follow_outputs(last=True)
        return error

    def _make_trace(self, *, complete: bool) -> Any:
        (one,) = self.ranks
        return read_result(self.rank_set.config.file("result"), one.result or [])
