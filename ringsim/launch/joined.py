"""Watches the ranks of a ``with ringsim.trace(path)`` block, and records their ends.

The lowest rank in the block watches the directory of the parts from a thread: first rank 0 and,
after rank 0 has left or died, the next rank. Each rank listens on a named pipe there, which costs
almost nothing while no rank writes to it. A pipe without a listener means that its rank is gone::

    rank 0, a thread                                    rank r, a thread
    ----------------                                    ----------------
    looks at the parts
    seems stuck: "threads?"  -----> rank-r.ear ------>  looks at its threads
                             <- rank-0.answers <------  reports what they do
    certain: verdict.json
    "wake"                   -----> rank-r.ear ------>  shuts its connections; if the wait has not
                                                        raised 2 s later, the process is ended

The part of a rank on another machine cannot be read here while it is written, so such a rank counts
as able to continue.

The messages are defined in ``protocol``, one per line.
"""

from __future__ import annotations

import ast
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringsim.diagnose.failure import raise_verdict, read_verdict
from ringsim.errors import RingError
from ringsim.launch.block import store_port
from ringsim.launch.protocol import ASK, SHUT, WAKE, WAKE_S, WHERE, Ends, answer, list_unfinished
from ringsim.launch.system import look_at_living, shut_connections
from ringsim.launch.threads import Places, Threads
from ringsim.launch.watcher import LiveRecords, Watcher
from ringsim.state import start_thread
from ringsim.traces.recorder import Recorder

# messages posted before the block are not in the parts, so they need time to arrive
SETTLE_S = 0.5
TAKE_OVER_S = 1.0  # time between two checks that a rank watches
_BYE = "bye"
_LOOK_S = 0.01
_MOST_IDLE = 16  # threads of a rank that are reported
_LINE_BYTES = 1 << 12  # up to this length, a line is written atomically


class JoinedWatch:
    """This rank's role in the watch, from its creation to ``stop``.

    Every rank of the block creates this object without waiting for other ranks.

    Args:
        recorder: this rank's recorder, whose directory is the same on all ranks.
        on_deaths: a function that the watching rank calls, from a thread, with the ranks whose
            processes died without leaving the block.
    """

    _wait_broke = False
    # of a rank that watches or did; also the pipe of the answers
    _watcher: Watcher | None = None
    _watching: threading.Thread | None = None
    _answers, _unread = -1, b""

    def __init__(self, recorder: Recorder, on_deaths: Callable[[list[int]], None]) -> None:
        self._recorder, self._directory = recorder, recorder.directory
        self._rank, self._on_deaths = recorder.rank, on_deaths
        self._keep_port = store_port()
        self._raised, self._stopped = threading.Event(), threading.Event()
        self._ear = _make_pipe(self._path(self._rank, "ear"))
        if self._rank == 0:
            self._begin_to_watch()
        self._listening = start_thread("ear", self._listen)

    def _begin_to_watch(self) -> None:
        if self._answers < 0:
            self._answers = _make_pipe(self._path(self._rank, "answers"))
            os.set_blocking(self._answers, False)
        world_size = self._recorder.world_size
        records = LiveRecords(self._directory, world_size, strangers=True)
        self._watcher = watcher = Watcher(records, world_size, tell=self._tell, settle_s=SETTLE_S)
        self._watching = start_thread("watcher", self._watch, watcher)

    def _path(self, rank: int, what: str) -> Path:
        return self._directory / f"rank-{rank}.{what}"

    def on_failure(self) -> None:
        """Raises the verdict on this rank, if there is one; set as ``Recorder.on_failure``."""
        self._wait_broke = True
        try:
            raise_verdict(self._directory, self._rank)
        except BaseException:
            self._raised.set()
            raise

    def unheard(self) -> RingError | None:
        """Returns the verdict on this rank's mismatched operations.

        Returns None if one of the rank's operations has raised the error since.
        """
        verdict = None if self._raised.is_set() else read_verdict(self._directory)
        if verdict is None or self._rank in verdict.waiting or self._rank not in verdict.ranks:
            return None
        return verdict.error

    def ask_others(self) -> Ends:
        """Asks the other ranks where they are, after a wait on rank 0 failed without a verdict.

        Rank 0 calls this method before ``stop``; it ends the watch, and blocks for at most
        ``ANSWER_S``.

        Returns:
            The activities of the ranks still in the block, as returned by ``describe_unfinished``;
            empty if there is no reason to ask.
        """
        if self._rank or not self._wait_broke or self._raised.is_set():
            return []
        self._stopped.set()
        if self._watcher is None or self._watching is None:
            return []
        self._watching.join()
        pids = {
            rank: pid
            for rank, (pid, ended) in enumerate(self._watcher.processes())
            if rank and pid is not None and not ended
        }
        return list_unfinished(pids, self._tell, self._hear_places)

    def stop(self) -> None:
        """Ends this rank's role; blocks for at most one poll."""
        self._stopped.set()
        os.write(self._ear, f"{_BYE}\n".encode())
        self._listening.join()  # it may begin to watch before
        if self._watching is not None:
            self._watching.join()
        for pipe, what in ((self._ear, "ear"), (self._answers, "answers")):
            if pipe >= 0:
                os.close(pipe)
                self._path(self._rank, what).unlink(missing_ok=True)

    def stands(self) -> str | None:
        """Returns a text for the state of this host's ranks if all of them are at a standstill.

        Returns "" if a rank may continue, or None if another rank watches them.
        """
        if self._watcher is None:
            return None
        return self._watcher.stands() if self._watches() and not self._stopped.is_set() else ""

    def _watches(self) -> bool:
        return self._watching is not None and self._watching.is_alive()

    def _listen(self) -> None:
        """Answers the watcher, and becomes the watcher if no other rank is watching."""
        while True:
            while not select.select([self._ear], [], [], TAKE_OVER_S)[0]:
                if not self._watches():
                    self._take_over()
            for line in os.read(self._ear, _LINE_BYTES).decode().splitlines():
                word, _, asker = line.partition(" ")
                if word in (ASK, WHERE):
                    self._answer(int(asker), word)
                elif word in (WAKE, SHUT):
                    self._end_wait(word)
                else:
                    return

    def _answer(self, asker: int, question: str) -> None:
        said = answer(question)
        if question == ASK:
            busy, idle, timed = said
            said = busy, dict([*idle.items()][:_MOST_IDLE]), timed
        _write(self._path(asker, "answers"), f"{(self._rank, question, said)!r}\n")

    def _end_wait(self, word: str) -> None:
        """Shuts down the connections, and ends the process if it is still waiting."""
        awaited = self._recorder.awaited()
        shut_connections(self._keep_port)
        if word == WAKE and not self._leaves(awaited):
            verdict = read_verdict(self._directory)
            why = verdict.diagnosis if verdict is not None else ""
            sys.stderr.write(
                f"[rank {self._rank}] ended by ringsim, because its wait could not end otherwise. "
                f"{why}\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def _leaves(self, awaited: set[int]) -> bool:
        """Returns whether the waits of this rank end within ``WAKE_S``.

        The waits end with the verdict's error or, in C++, with torch's own error.
        """
        deadline = time.monotonic() + WAKE_S
        while awaited & self._recorder.awaited() and not self._raised.wait(_LOOK_S):
            if time.monotonic() > deadline:
                return False
        return True

    def _watch(self, watcher: Watcher) -> None:
        """Watches all ranks until there is a verdict."""
        dead: list[int] = []
        while not self._stopped.wait(watcher.pause_s) and not self._others_watch():
            for rank, _, said in self._hear():
                watcher.hear(rank, Threads(*said))
            states = [_state_of(pid, ended) for pid, ended in watcher.processes()]
            known, dead = dead, [rank for rank, state in enumerate(states) if state == "killed"]
            if dead != known:
                self._on_deaths(dead)
            verdict = watcher.look(states)
            if verdict is not None:
                watcher.wake(verdict)
                for rank in {*verdict.ranks} - {*verdict.waiting}:
                    self._tell(rank, SHUT)
                break

    def _hear(self) -> list[tuple[int, str, Any]]:
        """Returns the answers received since the last call, as (rank, question, answer)."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._answers, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        return [ast.literal_eval(line.decode()) for line in lines]

    def _hear_places(self, wait_s: float) -> Places:
        select.select([self._answers], [], [], wait_s)
        # an answer to the watcher's last question may arrive first
        return {rank: place for rank, question, place in self._hear() if question == WHERE}

    def _take_over(self) -> None:
        """Becomes the watcher if no other rank is watching and no verdict exists yet."""
        if not self._others_watch() and read_verdict(self._directory) is None:
            with contextlib.suppress(OSError):  # no pipe can be created
                self._begin_to_watch()

    def _others_watch(self) -> bool:
        """Returns whether a lower rank is in the block, and therefore watches."""
        return any(_write(self._path(rank, "ear")) for rank in range(self._rank))

    def _tell(self, rank: int, word: str) -> None:
        _write(self._path(rank, "ear"), f"{word} {self._rank}\n")


def _state_of(pid: int | None, ended: bool) -> str:
    """Returns the state of a rank's process."""
    if pid is None or look_at_living(pid) is not None:
        return "running"
    return "exited" if ended else "killed"


def _make_pipe(path: Path) -> int:
    """Creates a named pipe, replacing a pipe from an earlier run.

    Returns a descriptor that never reads an end of file.
    """
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)


def _write(path: Path, line: str = "") -> bool:
    """Writes a line, if any, to a pipe; returns whether a process on this machine listens."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(pipe, line.encode())
    os.close(pipe)
    return True
