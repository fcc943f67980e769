"""A process that works for a caller: a rank, or one in which ``Alone`` runs functions."""

from __future__ import annotations

import os
import pickle
import pkgutil
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ringsim.launch.job import INTERRUPT, Job, RankConfig
from ringsim.launch.results import write_result
from ringsim.state import start_thread

_EXPECTED = "ringsim.simulator.simulation:simulate_here"  # most calls are of this function
_ASK_S = 0.01


def preload() -> None:
    """Loads the code of the function that most processes run, before they are forked."""
    pkgutil.resolve_name(_EXPECTED)


class Caller:
    """The caller of this process. When it is gone, the process ends.

    Args:
        channel: the channel to the caller.
        config: the configuration of this process.

    Attributes:
        inbox: the caller's messages, unless ``hear`` handles them.
    """

    def __init__(self, channel: Connection, config: RankConfig) -> None:
        self._channel, self._config = channel, config
        self._lock, self._asking = threading.RLock(), threading.Lock()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen(self) -> None:
        """Starts the thread that reads the channel, because the main thread may be blocked."""
        start_thread("channel", self._listen)

    def _listen(self) -> None:
        try:
            while True:
                self.hear(self._channel.recv())
        except (EOFError, OSError):
            if not self._config.keep:
                shutil.rmtree(self._config.directory, ignore_errors=True)
            os._exit(1)

    def hear(self, message: Any) -> None:
        """Handles a message of the caller."""
        self.inbox.put(message)

    def say(self, what: str, value: Any) -> None:
        """Sends a message to the caller, from any thread."""
        with self._lock:
            self._channel.send((what, value))

    def ask(self, text: str) -> str:
        """Shows a text to the user, and returns the line that the user types."""
        with self._asking:
            self.say("asks", text)
            while self.inbox.empty():  # a simulated rank that waited for a lock would seem stuck
                time.sleep(_ASK_S)
            return str(self.inbox.get())


class Process(Caller):
    """The caller of ``Alone``, as seen by the called function.

    Attributes:
        hand_over: a function that returns the partial result, called if the caller interrupts.
        kept: an object that a function keeps for the next call, or None.
    """

    hand_over: Callable[[], Any] | None = None
    kept: Any = None
    _finished = False

    def take(self) -> Job:
        """Waits for a call."""
        job: Job = pickle.loads(self.inbox.get())
        self._finished = False
        return job

    def finish(self, value: Any) -> None:
        """Sends the result, from any thread; only the first result of a call counts."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self.say("result", write_result(value, self._config.file("result")))

    def hear(self, message: Any) -> None:
        """See ``Caller``."""
        if message != INTERRUPT:
            self.inbox.put(message)
        elif self.hand_over is not None:
            self.finish(self.hand_over())


def become(
    channel: Connection, config: RankConfig, enter: Callable[[Job, dict[str, str]], None]
) -> NoReturn:
    """Runs the functions of ``Alone`` in this process, one after the other; does not return.

    Args:
        channel: the channel to the caller.
        config: the configuration of the process, as rank 0 of 1.
        enter: a function that sets up the process like the caller's, with additional variables.
    """
    process = Process(channel, config)
    process.listen()
    has_entered = False
    while True:
        job = process.take()
        try:
            if not has_entered:
                enter(job, {})
                has_entered = True
            process.say("ready", os.getpid())
            process.say("loaded", 1)
            process.inbox.get()  # "go"
            function, args = pickle.loads(job.call or b"")
            process.finish(pkgutil.resolve_name(function)(process, *args))
        except BaseException as error:  # the caller must receive any error
            process.say("failed", error)
