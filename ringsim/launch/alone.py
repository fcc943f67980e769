"""Runs a function in a process of its own, which ends with it: the virtual clock lives there.

The process comes from the server that ranks come from, with torch loaded. Whatever the function
does to it (threads, patched functions, a crash) is gone with it, and the caller can end it at any
moment::

    caller                                     process
    ------                                     -------
    function and arguments, pickled -------->  calls the function
    shows its output as it comes    <--------  prints
    result, unpickled               <--------  returns; waits to be ended
    on Ctrl-C: "interrupt"          -------->  hands over what there is so far
"""

from __future__ import annotations

import os
import pickle
import pkgutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn

from ringsim.diagnose.failure import interrupted_once, make_error, rename_files, report_death
from ringsim.errors import Interrupted, RingError, RunTimeout
from ringsim.launch.job import ALONE, Job, Kind, RankConfig, pack_caller, start_environment
from ringsim.launch.output import RankOutput
from ringsim.launch.ranks import RankSet, get_launcher
from ringsim.launch.results import read_result, write_result
from ringsim.traces.parts import name_cells

__all__ = ["Process", "become", "run_alone"]

_POLL_S: Final = 0.05
_HAND_OVER_S: Final = 2.0  # for what an interrupted process has to hand over
_INTERRUPT: Final = "interrupt"


def run_alone(
    function: str, *args: Any, limit_s: float | None = None, doing: str = "the run"
) -> Any:
    """Calls a function in a process of its own.

    Args:
        function: "module:name", so that the caller need not import it; it gets the ``Process``
            and ``args``.
        args: pickled.
        limit_s: limit of the call, in seconds.
        doing: the name of the run, for errors.

    Returns:
        The result, a copy.

    Raises:
        Interrupted: Ctrl-C; its ``trace`` is what the process has handed over.
        RunTimeout: the limit has passed; likewise.
        RankFailed: the process has died.
    """
    kind = Kind(1, ALONE, 1.0, ring=False, environment=start_environment())
    ranks = get_launcher().get_fresh(kind)
    with interrupted_once():
        try:
            return _Call(ranks, doing).finish(function, args, limit_s)
        finally:
            ranks.close()


class _Call:
    """The caller's side of one call."""

    def __init__(self, ranks: RankSet, doing: str) -> None:
        self._ranks, self._doing = ranks, doing
        self._channel = ranks.channels[0]
        self._config = ranks.config
        self._output = RankOutput(self._config, show=True, show_hidden=False, tag="")
        self._start_s = time.monotonic()

    def finish(self, function: str, args: tuple[Any, ...], limit_s: float | None) -> Any:
        """Sees the call through; returns its result."""
        job = pack_caller()
        self._channel.send_bytes(pickle.dumps((job, function, args)))
        try:
            value = self._hear(limit_s)
        except KeyboardInterrupt:
            error = Interrupted(f"{self._doing} was interrupted after {self._elapsed_s:.1f} s.")
            raise self._explained(error) from None
        if value is None:
            error = RunTimeout(
                f"{self._doing} did not end within limit_s={limit_s:g} s. Raise limit_s, or look "
                "at error.trace for where the ranks were."
            )
            raise self._explained(error)
        return read_result(self._config.result_file, value)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _hear(self, limit_s: float | None) -> Any:
        """Returns where the result lies, None once the limit has passed; shows output meanwhile."""
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
        """Reads one message; returns where the result lies if it says so.

        Raises:
            BaseException: the function has raised, or the process has died.
        """
        try:
            what, value = self._channel.recv()
        except (EOFError, OSError):
            self._output.follow(last=True)
            raise self._describe_death() from None
        if what == "failed":
            self._output.follow(last=True)
            raise value
        return value if what == "result" else None

    def _describe_death(self) -> RingError:
        code, at_ns = self._ranks.exit_status(0)
        crash = self._config.crash_file
        stack = crash.read_text(errors="replace") if crash.exists() else ""
        report = report_death(0, code, at_ns, self._output.text, stack)
        errors = self._ranks.startup_errors.strip()
        if code is None and errors:
            return RingError(f"the process of {self._doing} did not start:\n{errors}")
        report = rename_files(replace(report, text=f"{self._doing}: {report.text}"), name_cells([]))
        return make_error([report], 1, [])

    def _explained(self, error: Any) -> Any:
        """Gives an error what the process hands over, if it does so in time."""
        self._channel.send_bytes(pickle.dumps(_INTERRUPT))
        deadline = time.monotonic() + _HAND_OVER_S
        while time.monotonic() < deadline:
            if wait([self._channel], timeout=_POLL_S):
                try:
                    what, value = self._channel.recv()
                except (EOFError, OSError):
                    break
                if what in ("handed over", "result"):
                    found = read_result(self._config.result_file, value)
                    error.trace, error.diagnosis = found.trace, found.diagnosis
                    break
        self._output.follow(last=True)
        return error


# -- the process


class Process:
    """The process of a call, as its function sees it.

    Attributes:
        hand_over: returns what there is so far; called if the caller interrupts the run.
    """

    def __init__(self, channel: Connection, config: RankConfig) -> None:
        self.hand_over: Callable[[], Any] | None = None
        self._channel, self._file = channel, config.result_file
        self._lock = threading.Lock()

    def say(self, what: str, value: Any) -> None:
        """Sends a message to the caller, from any thread."""
        with self._lock:
            self._channel.send((what, value))

    def finish(self, value: Any, what: str = "result") -> None:
        """Sends the result, from any thread."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.say(what, write_result(value, self._file))

    def listen(self) -> None:
        """Answers the caller; ends the process when the caller is gone."""
        try:
            while True:
                message = pickle.loads(self._channel.recv_bytes())
                if message == _INTERRUPT and self.hand_over is not None:
                    self.finish(self.hand_over(), "handed over")
        except (EOFError, OSError):
            os._exit(1)


def become(
    channel: Connection, config: RankConfig, enter: Callable[[Job, dict[str, str]], None]
) -> NoReturn:
    """Turns this process into one that runs a function for ``run_alone``; does not return.

    Args:
        channel: to the caller.
        config: of the process, which is rank 0 of one.
        enter: makes the process like the caller's, with some more variables.
    """
    process = Process(channel, config)
    try:
        job, function, args = pickle.loads(channel.recv_bytes())
        enter(job, {})
        threading.Thread(target=process.listen, name="ringsim-channel", daemon=True).start()
        process.finish(pkgutil.resolve_name(function)(process, *args))
    except BaseException as error:  # whatever it is, the caller must hear of it
        process.say("failed", error)
    while True:
        time.sleep(3600)  # the caller ends this process
