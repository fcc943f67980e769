"""The process in which ``ringsim.launch.alone`` runs a function."""

from __future__ import annotations

import os
import pickle
import pkgutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ringsim.launch.job import INTERRUPT, Job, RankConfig
from ringsim.launch.results import write_result

_EXPECTED = "ringsim.simulator.simulation:simulate_here"  # most calls are of this function


def preload() -> None:
    """Loads the code of the function that most processes run, before they are forked."""
    pkgutil.resolve_name(_EXPECTED)


def park() -> NoReturn:
    """Blocks the calling thread until the caller ends the process."""
    while True:
        time.sleep(3600)


class Process:
    """The process of a call, as seen by the called function.

    Attributes:
        hand_over: a function that returns the partial result, called if the caller interrupts.
    """

    def __init__(self, channel: Connection, config: RankConfig) -> None:
        self.hand_over: Callable[[], Any] | None = None
        self._channel, self._file = channel, config.file("result")
        self._heard, self._received = Pipe(duplex=False)  # the caller's messages
        self._lock = threading.RLock()
        self._finished = False

    def say(self, what: str, value: Any) -> None:
        """Sends a message to the caller, from any thread."""
        with self._lock:
            self._channel.send((what, value))

    def ask(self, text: str) -> str:
        """Shows a text to the user, and returns the line that the user types."""
        self.say("asks", text)
        return str(self.hear())

    def hear(self) -> Any:
        """Waits for a message of the caller: a line that the user types, or a further call."""
        message = self._heard.recv()
        self._finished = False
        return message

    def finish(self, value: Any, what: str = "result") -> None:
        """Sends the result, from any thread; only the first result of a call counts."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self.say(what, write_result(value, self._file))

    def listen(self) -> None:
        """Answers the caller; ends the process when the caller is gone."""
        try:
            while True:
                message = pickle.loads(self._channel.recv_bytes())
                if message != INTERRUPT:
                    self._received.send(message)
                elif self.hand_over is not None:
                    self.finish(self.hand_over(), "handed over")
        except (EOFError, OSError):
            os._exit(1)


def become(
    channel: Connection, config: RankConfig, enter: Callable[[Job, dict[str, str]], None]
) -> NoReturn:
    """Runs the function of ``run_alone`` in this process; does not return.

    Args:
        channel: the channel to the caller.
        config: the configuration of the process, as rank 0 of 1.
        enter: a function that sets up the process like the caller's, with additional variables.
    """
    process = Process(channel, config)
    try:
        job, function, args = pickle.loads(channel.recv_bytes())
        enter(job, {})
        threading.Thread(target=process.listen, name="ringsim-channel", daemon=True).start()
        process.finish(pkgutil.resolve_name(function)(process, *args))
    except BaseException as error:  # the caller must receive any error
        process.say("failed", error)
    park()
