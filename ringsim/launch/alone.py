"""Runs a function in its own process, such as a simulation on the virtual clock.

The process is forked by the same server as the ranks, with torch loaded. Side effects of the
function (threads, patched functions, a crash) end with the process, and the caller can end it at
any time::

    caller                                     process
    ------                                     -------
    function and arguments, pickled -------->  calls the function
    shows its output as it arrives  <--------  prints
    asks the user                   <------->  stops at a breakpoint
    result, unpickled               <--------  returns; waits to be ended
    on Ctrl-C: "interrupt"          -------->  hands over its partial result
"""

from __future__ import annotations

import contextlib
import pickle
import time
from multiprocessing.connection import wait
from typing import Any

from ringsim.diagnose.failure import describe_death, indent, interrupted_once
from ringsim.errors import Interrupted, RankFailed, RingError, RunTimeout
from ringsim.launch.debugging import answer
from ringsim.launch.job import ALONE, INTERRUPT, RankKind, pack_caller, start_environment
from ringsim.launch.output import RankOutput
from ringsim.launch.ranks import get_launcher
from ringsim.launch.results import read_result

_POLL_S = 0.05
_HAND_OVER_S = 2.0  # for the partial result of an interrupted process


def run_alone(
    function: str, *args: Any, limit_s: float | None = None, doing: str = "the run"
) -> Any:
    """Calls a function in its own process.

    Args:
        function: the function as "module:name", so that the caller need not import it; called
            with the ``Process`` and ``args``.
        args: further arguments, which are pickled.
        limit_s: the time limit for the call, in seconds.
        doing: the name of the run, for errors.

    Returns:
        A copy of the result.

    Raises:
        Interrupted: Ctrl-C was pressed; the error's ``trace`` is the partial result.
        RunTimeout: the limit was exceeded; the error's ``trace`` is the partial result.
        RankFailed: the process died.
    """
    process = Alone(doing)
    with interrupted_once():
        try:
            return process.call((pack_caller(), function, args), limit_s)
        finally:
            process.close()


class Alone:
    """The caller's side of a process, which is used for one call or for those of a session.

    Args:
        doing: the name of a call, for errors.

    Attributes:
        close: ends the process.
    """

    def __init__(self, doing: str) -> None:
        kind = RankKind(1, ALONE, 1.0, ring=False, environment=start_environment())
        self._ranks, self._doing = get_launcher().get(kind), doing
        self._channel, self._config = self._ranks.channels[0], self._ranks.config
        self._output = RankOutput(self._config, show=True, show_hidden=False, tag="")
        self.close = self._ranks.close

    def send(self, message: Any) -> None:
        """Sends a message to the process."""
        with contextlib.suppress(OSError):  # it has died, as reading its channel will show
            self._channel.send_bytes(pickle.dumps(message))

    def call(self, message: Any, limit_s: float | None) -> Any:
        """Sends a call, and returns its result."""
        self._start_s = time.monotonic()
        self.send(message)
        try:
            value = self._hear(limit_s)
        except KeyboardInterrupt:
            interrupted = f"{self._doing} was interrupted after {self._elapsed_s:.1f} s."
            raise self._explained(Interrupted(interrupted)) from None
        if value is None:
            late = (
                f"{self._doing} did not end within limit_s={limit_s:g} s. Raise limit_s, or look "
                "at error.trace to see where the ranks were."
            )
            raise self._explained(RunTimeout(late))
        return read_result(self._config.file("result"), value)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _hear(self, limit_s: float | None) -> Any:
        """Shows output until the result arrives; returns its location, or None after the limit."""
        while limit_s is None or self._elapsed_s < limit_s:
            ready = wait([self._channel], timeout=_POLL_S)
            self._output.follow()
            if ready:
                message = self._read()
                if message is not None:
                    self._output.follow(last=True)
                    return message
        return None

    def _read(self) -> Any:
        """Reads one message; returns the location of the result if the message contains it.

        Raises:
            BaseException: the function raised an error, or the process died.
        """
        try:
            what, value = self._channel.recv()
        except (EOFError, OSError):
            raise self._describe_death() from None
        if what == "asks":
            asked_s = time.monotonic()
            self.send(answer(value))
            self._start_s += time.monotonic() - asked_s  # the limit does not include this time
        if what == "failed":
            self._output.follow(last=True)
            raise value
        return value if what == "result" else None

    def _describe_death(self) -> RingError:
        report = self._ranks.report_death(0, self._output)
        errors = self._ranks.startup_errors.strip()
        if report.exit_code is None and errors:
            return RingError(f"the process for {self._doing} did not start:\n{errors}")
        where = f" ({report.where})" if report.where else ""
        lines = f"\n{indent(report.traceback)}" if report.traceback else ""
        return RankFailed(f"{self._doing} ended early: {describe_death(report)}{where}{lines}")

    def _explained(self, error: Any) -> Any:
        """Adds the partial result of the process to an error, if it arrives in time."""
        self.send(INTERRUPT)
        deadline = time.monotonic() + _HAND_OVER_S
        while time.monotonic() < deadline:
            if wait([self._channel], timeout=_POLL_S):
                try:
                    what, value = self._channel.recv()
                except (EOFError, OSError):
                    break
                if what in ("handed over", "result"):
                    found = read_result(self._config.file("result"), value)
                    error.trace, error.diagnosis = found.trace, found.diagnosis
                    break
        self._output.follow(last=True)
        return error
