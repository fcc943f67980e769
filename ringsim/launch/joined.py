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

On leaving the block, each rank posts a text to a board, which rank 0 reads: beside the program's
messages, never among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ringsim.comm.torch_private import default_store
from ringsim.diagnose.failure import describe_unfinished, raise_verdict, read_verdict, write_verdict
from ringsim.errors import RingError
from ringsim.launch.threads import Threads, find_place, list_threads
from ringsim.launch.watcher import (
    ANSWER_S,
    ASK,
    SHUT,
    WAKE,
    WAKE_S,
    WHERE,
    LiveRecords,
    Watcher,
    look_at,
    shut_connections,
)
from ringsim.state import OUR_THREADS
from ringsim.traces.recorder import Recorder

# messages posted before the block are not in the parts: give them time to arrive
SETTLE_S: Final = 0.5
TAKE_OVER_S: Final = 1.0  # how often a rank checks that some rank watches
_BYE: Final = "bye"
_LOOK_S: Final = 0.01  # between two looks at a board, once it has taken a while
_MOST_IDLE: Final = 16  # threads of a rank that are told of
_LINE_BYTES: Final = 1 << 12  # up to this length a line is written whole or not at all


class JoinedWatch:
    """This rank's part in the watch, from its creation to ``stop``.

    Every rank of the block creates one; none waits for another.

    Args:
        recorder: of this rank; its directory is the same on all ranks.
        world_size: number of ranks.
        on_deaths: called on the rank that watches, from a thread, with the ranks whose processes
            died without leaving the block.
    """

    def __init__(
        self, recorder: Recorder, world_size: int, on_deaths: Callable[[list[int]], None]
    ) -> None:
        self._recorder, self._directory = recorder, recorder.directory
        self._rank = rank = recorder.rank
        self._world_size = world_size
        self._on_deaths = on_deaths
        self._keep_port = store_port()
        self._raised = threading.Event()
        self._stopped = threading.Event()
        self._ear = _make_pipe(self._path(rank, "ear"))
        self._wait_broke = False
        self._threads = [
            threading.Thread(target=self._listen, name=f"{OUR_THREADS}ear", daemon=True)
        ]
        # the pipe of the answers, on a rank that watches or did
        self._answers, self._unread = -1, b""
        if rank == 0:
            self._begin_to_watch()
        self._threads[0].start()

    def _begin_to_watch(self) -> None:
        if self._answers < 0:
            self._answers = _make_pipe(self._path(self._rank, "answers"))
            os.set_blocking(self._answers, False)
        records = LiveRecords(self._directory, self._world_size, strangers=True)
        self._watcher = Watcher(
            records, self._world_size, ask=lambda rank: self._tell(rank, ASK), settle_s=SETTLE_S
        )
        self._threads[1:] = [
            threading.Thread(target=self._watch, name=f"{OUR_THREADS}watcher", daemon=True)
        ]
        self._threads[1].start()

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

        Where no operation of it has raised it since.
        """
        verdict = None if self._raised.is_set() else read_verdict(self._directory)
        return (
            verdict.error
            if verdict is not None
            and self._rank in verdict.ranks
            and self._rank not in verdict.waiting
            else None
        )

    def ask_others(self) -> list[dict[str, Any]]:
        """Asks the other ranks where they are, after a wait of rank 0 broke without a verdict.

        On rank 0, before ``stop``. It ends the watch, and blocks for ``ANSWER_S`` at most.

        Returns:
            What the ranks still in the block are doing, as ``describe_unfinished`` says it; nothing
            where there is no reason to ask.
        """
        if self._rank or not self._wait_broke or self._raised.is_set():
            return []
        self._stopped.set()
        self._threads[-1].join()
        here = {
            rank: look_at(pid)
            for rank, (pid, ended) in enumerate(self._watcher.processes())
            if rank and pid is not None and not ended
        }
        doing = {
            rank: process.doing
            for rank, process in here.items()
            if process is not None and process.state not in "ZX"
        }
        for rank in doing:
            self._tell(rank, WHERE)
        places: dict[int, tuple[str, int] | None] = {}
        deadline = time.monotonic() + ANSWER_S
        while (
            doing.keys() - places.keys()
            and select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))[0]
        ):
            for rank, what, *more in self._hear():
                if what == WHERE:  # an answer to the watcher's last question may come first
                    places[rank] = more[0] and (more[0][0], more[0][1])
        return [describe_unfinished(rank, word, places.get(rank)) for rank, word in doing.items()]

    def stop(self) -> None:
        """Ends this rank's part; blocks for one look at most."""
        self._stopped.set()
        os.write(self._ear, f"{_BYE}\n".encode())
        for thread in self._threads:
            thread.join()
        for pipe, what in ((self._ear, "ear"), (self._answers, "answers")):
            if pipe >= 0:
                os.close(pipe)
                self._path(self._rank, what).unlink(missing_ok=True)

    def stands(self) -> str | None:
        """Names the state in which all ranks of this host stand still.

        "" where one may go on, None where another rank watches them.
        """
        if len(self._threads) == 1:
            return None
        return (
            self._watcher.stands()
            if self._threads[1].is_alive() and not self._stopped.is_set()
            else ""
        )

    def _listen(self) -> None:
        """Answers the watcher, and becomes the watcher where no other rank is."""
        while True:
            while not select.select([self._ear], [], [], TAKE_OVER_S)[0]:
                if len(self._threads) == 1 or not self._threads[1].is_alive():
                    self._take_over()
            for line in os.read(self._ear, _LINE_BYTES).decode().splitlines():
                word, _, asker = line.partition(" ")
                if word == ASK:
                    threads = list_threads(os.path.dirname(torch.__file__))
                    self._answer(
                        asker,
                        [
                            self._rank,
                            threads.busy,
                            [*threads.idle.items()][:_MOST_IDLE],
                            threads.timed,
                        ],
                    )
                elif word == WHERE:
                    self._answer(
                        asker, [self._rank, WHERE, find_place(os.path.dirname(torch.__file__))]
                    )
                elif word in (WAKE, SHUT):
                    awaited = self._recorder.awaited()
                    shut_connections(self._keep_port)
                    if word == WAKE and not self._leaves(awaited):
                        verdict = read_verdict(self._directory)
                        why = verdict.diagnosis if verdict is not None else ""
                        sys.stderr.write(
                            f"[rank {self._rank}] ended, since nothing else ends its wait. {why}\n"
                        )
                        sys.stderr.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                else:
                    return

    def _leaves(self, awaited: set[int]) -> bool:
        """Returns whether this rank leaves what it waits for within ``WAKE_S``.

        By the verdict's error, or in C++ by torch's own.
        """
        deadline = time.monotonic() + WAKE_S
        while awaited & self._recorder.awaited() and not self._raised.wait(_LOOK_S):
            if time.monotonic() > deadline:
                return False
        return True

    def _watch(self) -> None:
        """Watches all ranks until there is a verdict."""
        watcher = self._watcher
        dead: list[int] = []
        while not self._stopped.wait(watcher.pause_s) and not self._others_watch():
            for rank, busy, idle, timed in self._hear():
                watcher.hear(
                    rank,
                    Threads(
                        busy,
                        {thread: place and (place[0], place[1]) for thread, place in idle},
                        timed,
                    ),
                )
            states = [_state_of(pid, ended) for pid, ended in watcher.processes()]
            known, dead = dead, [rank for rank, state in enumerate(states) if state == "killed"]
            if dead != known:
                self._on_deaths(dead)
            verdict = watcher.look(states)
            if verdict is not None:
                write_verdict(self._directory, verdict)
                for rank in verdict.ranks:
                    self._tell(rank, WAKE if rank in verdict.waiting else SHUT)
                break

    def _hear(self) -> list[Any]:
        """Returns the answers that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._answers, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def _take_over(self) -> None:
        """Becomes the watcher, if no other rank in the block is and there is no verdict yet."""
        if not self._others_watch() and read_verdict(self._directory) is None:
            with contextlib.suppress(OSError):  # no pipe can be made
                self._begin_to_watch()

    def _others_watch(self) -> bool:
        """Tells whether a lower rank is in the block, and so watches."""
        return any(_write(self._path(rank, "ear")) for rank in range(self._rank))

    def _tell(self, rank: int, word: str) -> None:
        _write(self._path(rank, "ear"), f"{word} {self._rank}\n")

    def _answer(self, asker: str, what: list[Any]) -> None:
        _write(self._path(int(asker), "answers"), f"{json.dumps(what)}\n")


def _state_of(pid: int | None, ended: bool) -> str:
    """Returns the state of a rank's process."""
    if pid is None:
        return "running"
    process = look_at(pid)
    if process is not None and process.state not in "ZX":
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
    """Writes a line, if any, to a pipe; tells whether a process of this machine listens on it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(pipe, line.encode())
    os.close(pipe)
    return True


def store_port() -> int:
    """Returns the port of the rendezvous, -1 where it is not over TCP."""
    store: object = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", -1))


class StoreBoard:
    """Where the ranks of one block announce that they have left it; each posts one text.

    It is in the default store of ``torch.distributed``. The n-th block that a rank enters is the
    n-th of every rank.

    Attributes:
        run_id: names the block, on all ranks alike; no other block has it.
        store: of the block, through which parts can be gathered.
    """

    def __init__(self, rank: int) -> None:
        store = default_store()
        if store is None:
            raise RingError(
                "this version of torch must tell its default store, got none. Use a version that "
                "ringsim was tested with."
            )
        entered = store.add(f"ringsim/recording/entered/{rank}", 1)
        # public, though torch lists it nowhere
        self.store = dist.PrefixStore(f"ringsim/recording/{entered}", store)  # type: ignore[attr-defined]
        # The first rank to enter names the block: rank 0 may come late, and nobody waits for it.
        self.run_id = self.store.compare_set("run_id", "", uuid.uuid4().hex[:12]).decode()

    def post(self, rank: int, text: str) -> None:
        """Posts this rank's text."""
        self.store.set(str(rank), text)

    def find(self, rank: int) -> str | None:
        """Returns the text of a rank, None if it has not posted yet.

        It asks first, since torch warns of each time-out of a ``get``.
        """
        said: bytes | None = self.store.get(str(rank)) if self.store.check([str(rank)]) else None
        return None if said is None else said.decode()

    def read(self, rank: int, wait_s: float) -> str | None:
        """Returns the text of a rank, None if it posts none within ``wait_s`` seconds."""
        deadline, pause_s = time.monotonic() + wait_s, 0.0005
        while (text := self.find(rank)) is None and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        return text
