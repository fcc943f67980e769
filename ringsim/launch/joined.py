"""What ``with ringsim.trace(path)`` does besides recording.

Watches ranks that something else started, and lets them announce their ends. The lowest rank in the
block watches the directory of the parts from a thread: rank 0, and when that has left or died the
next one. Each rank listens on a named pipe there, which costs almost nothing while nobody writes to
it. A pipe that nobody listens on means that its rank is gone::

    rank 0, a thread                                    rank r, a thread
    ----------------                                    ----------------
    looks at the parts
    seems stuck: "threads?"  -----> rank-r.ear ------>  looks at its threads
                             <- rank-0.answers <------  says what they do
    no doubt: verdict.json
    "wake"                   -----> rank-r.ear ------>  shuts its connections; the wait raises, or
                                                        is still there 2 s later: then the
                                                        process is ended

The part of a rank on another machine cannot be read here while it is written: such a rank may still
do anything.

The words are those of ``protocol``, a line each.
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
from typing import Any, Final

from ringsim.diagnose.failure import raise_verdict, read_verdict
from ringsim.errors import RingError
from ringsim.launch.block import store_port
from ringsim.launch.protocol import ASK, SHUT, WAKE, WAKE_S, WHERE, answer, list_unfinished
from ringsim.launch.system import look_at_living, shut_connections
from ringsim.launch.threads import Place, Threads
from ringsim.launch.watcher import LiveRecords, Watcher
from ringsim.state import OUR_THREADS
from ringsim.traces.recorder import Recorder

# messages posted before the block are not in the parts: give them time to arrive
SETTLE_S: Final = 0.5
TAKE_OVER_S: Final = 1.0  # how often a rank checks that some rank watches
_BYE: Final = "bye"
_LOOK_S: Final = 0.01
_MOST_IDLE: Final = 16  # threads of a rank that are told of
_LINE_BYTES: Final = 1 << 12  # up to this length a line is written whole or not at all


class JoinedWatch:
    """This rank's part in the watch, from its creation to ``stop``.

    Every rank of the block creates one; none waits for another.

    Args:
        recorder: of this rank; its directory is the same on all ranks.
        on_deaths: called on the rank that watches, from a thread, with the ranks whose processes
            died without leaving the block.
    """

    def __init__(self, recorder: Recorder, on_deaths: Callable[[list[int]], None]) -> None:
        self._recorder, self._directory = recorder, recorder.directory
        self._rank, self._on_deaths = recorder.rank, on_deaths
        self._keep_port = store_port()
        self._raised, self._stopped = threading.Event(), threading.Event()
        self._wait_broke = False
        # of a rank that watches or did; the pipe of the answers, too
        self._watcher: Watcher | None = None
        self._watching: threading.Thread | None = None
        self._answers, self._unread = -1, b""
        self._ear = _make_pipe(self._path(self._rank, "ear"))
        if self._rank == 0:
            self._begin_to_watch()
        self._listening = _start_thread("ear", self._listen)

    def _begin_to_watch(self) -> None:
        if self._answers < 0:
            self._answers = _make_pipe(self._path(self._rank, "answers"))
            os.set_blocking(self._answers, False)
        world_size = self._recorder.world_size
        records = LiveRecords(self._directory, world_size, strangers=True)
        self._watcher = watcher = Watcher(records, world_size, tell=self._tell, settle_s=SETTLE_S)
        self._watching = _start_thread("watcher", lambda: self._watch(watcher))

    def _path(self, rank: int, what: str) -> Path:
        return self._directory / f"rank-{rank}.{what}"

    def on_failure(self) -> None:
        """Raises the verdict on this rank, if there is one: for ``Recorder.on_failure``."""
        self._wait_broke = True
        try:
            raise_verdict(self._directory, self._rank)
        except BaseException:
            self._raised.set()
            raise

    def unheard(self) -> RingError | None:
        """Returns the verdict on operations of this rank that disagree with others'.

        None if an operation of it has raised it since.
        """
        verdict = None if self._raised.is_set() else read_verdict(self._directory)
        if verdict is None or self._rank in verdict.waiting or self._rank not in verdict.ranks:
            return None
        return verdict.error

    def ask_others(self) -> list[dict[str, Any]]:
        """Asks the other ranks where they are, after a wait of rank 0 broke without a verdict.

        On rank 0, before ``stop``. It ends the watch, and blocks for ``ANSWER_S`` at most.

        Returns:
            What the ranks still in the block are doing, as ``describe_unfinished`` says it; nothing
            if there is no reason to ask.
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
        """Ends this rank's part; blocks for one look at most."""
        self._stopped.set()
        os.write(self._ear, f"{_BYE}\n".encode())
        self._listening.join()  # it may begin to watch until then
        if self._watching is not None:
            self._watching.join()
        for pipe, what in ((self._ear, "ear"), (self._answers, "answers")):
            if pipe >= 0:
                os.close(pipe)
                self._path(self._rank, what).unlink(missing_ok=True)

    def stands(self) -> str | None:
        """Names the state in which all ranks of this host stand still.

        "" if one may go on, None if another rank watches them.
        """
        if self._watcher is None:
            return None
        return self._watcher.stands() if self._watches() and not self._stopped.is_set() else ""

    def _watches(self) -> bool:
        return self._watching is not None and self._watching.is_alive()

    def _listen(self) -> None:
        """Answers the watcher, and becomes the watcher if no other rank is."""
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
        """Shuts the connections; ends a process that waits nevertheless."""
        awaited = self._recorder.awaited()
        shut_connections(self._keep_port)
        if word == WAKE and not self._leaves(awaited):
            verdict = read_verdict(self._directory)
            why = verdict.diagnosis if verdict is not None else ""
            sys.stderr.write(
                f"[rank {self._rank}] ended, because its wait cannot end otherwise. {why}\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def _leaves(self, awaited: set[int]) -> bool:
        """Returns whether this rank leaves what it waits for within ``WAKE_S``.

        By the verdict's error, or in C++ by torch's own.
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
        """Returns the answers that have come since the last call: rank, question, answer."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._answers, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        return [ast.literal_eval(line.decode()) for line in lines]

    def _hear_places(self, wait_s: float) -> dict[int, Place | None]:
        select.select([self._answers], [], [], wait_s)
        # an answer to the watcher's last question may come first
        return {rank: place for rank, question, place in self._hear() if question == WHERE}

    def _take_over(self) -> None:
        """Becomes the watcher, if no other rank in the block is and there is no verdict yet."""
        if not self._others_watch() and read_verdict(self._directory) is None:
            with contextlib.suppress(OSError):  # no pipe can be made
                self._begin_to_watch()

    def _others_watch(self) -> bool:
        """Returns whether a lower rank is in the block, and so watches."""
        return any(_write(self._path(rank, "ear")) for rank in range(self._rank))

    def _tell(self, rank: int, word: str) -> None:
        _write(self._path(rank, "ear"), f"{word} {self._rank}\n")


def _start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"{OUR_THREADS}{name}", daemon=True)
    thread.start()
    return thread


def _state_of(pid: int | None, ended: bool) -> str:
    """Returns the state of a rank's process."""
    if pid is None or look_at_living(pid) is not None:
        return "running"
    return "exited" if ended else "killed"


def _make_pipe(path: Path) -> int:
    """Makes a named pipe, replacing one that an earlier run may have left.

    Returns a descriptor that never reads an end of file.
    """
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)


def _write(path: Path, line: str = "") -> bool:
    """Writes a line, if any, to a pipe; returns whether a process of this machine listens on it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(pipe, line.encode())
    os.close(pipe)
    return True
