"""Provides processes for ranks.

The processes are parked ranks, ranks forked by a server with torch loaded, or new interpreters if
there is no such server or ``mpirun`` starts the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import queue
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import IO, Any

from ringsim.diagnose.failure import Report, report_death
from ringsim.errors import RingError
from ringsim.launch.forkserver import FDS_PER_MESSAGE
from ringsim.launch.job import ALONE, RankConfig, RankKind, start_environment
from ringsim.launch.output import RankOutput
from ringsim.state import start_thread

Exit = tuple[int | None, int]  # the exit code, or None if it is unknown, and the end time
EXIT_S = 5.0  # a killed process is gone much earlier
START_S = 120.0  # to start an interpreter with torch on a busy machine
ANSWER_S = 10.0  # a fork server that does not answer in this time is stuck or stopped
_ANSWER_BYTES = 64
_DYING_S = 1.0  # for the ranks of a killed server
_RECENT = 64  # sets of ranks: the directories of earlier sets are already gone
PARKED_S = 60.0  # parked ranks are ended if no call has taken them after this time
PARKED_RANKS_MAX = 16  # parked ranks cost memory: about 10 MB each
_START = "RINGSIM_START"  # the variable with the address to which new ranks connect
# Settings of MPICH and Open MPI: start all ranks on this machine, as any user, even more ranks than
# cores, over loopback.
ON_THIS_MACHINE = {
    "HYDRA_LAUNCHER": "fork",
    "HYDRA_RMK": "user",
    "HYDRA_IFACE": "lo",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


class RankSet(ABC):
    """The ranks of one run, as the launcher sees them.

    Attributes:
        home: the directory of the ranks.
        directory: the directory of the run, see ``RankConfig``; for a session, in ``home``.
        channels: the channel of each rank; a closed channel means that the rank has ended.
    """

    def __init__(self, kind: RankKind, keep_at: Path | None = None) -> None:
        self.kind = kind
        self.keep = keep_at is not None
        self._mark = f"\x0e{secrets.token_hex(8)}\x0f"
        if keep_at is not None:
            keep_at.mkdir(parents=True)
        # The fork server may have another working directory.
        self.home = self.directory = (
            Path(tempfile.mkdtemp(prefix="ringsim-")) if keep_at is None else keep_at.absolute()
        )
        self.channels: list[Connection] = []

    @property
    def config(self) -> RankConfig:
        """The configuration of rank 0, from which the other ranks differ only in their number."""
        kind = self.kind
        return RankConfig(
            str(self.directory),
            0,
            kind.world_size,
            kind.comm_device,
            kind.timeout_s,
            kind.ring,
            self.keep,
            self._mark,
            kind.backend,
            kind.stays,
        )

    def begin_call(self) -> Path:
        """Makes a directory for a session's next call, and returns it."""
        self.directory = Path(tempfile.mkdtemp(prefix="call-", dir=self.home))
        return self.directory

    def find_dead(self) -> list[int]:
        """Returns the dead ranks of a session, whose channels should be silent between calls."""
        return [
            rank
            for rank, channel in enumerate(self.channels)
            if any(_at_end(channel) for _ in iter(channel.poll, False))
        ]

    @abstractmethod
    def kill(self) -> None:
        """Ends all remaining ranks; returns immediately."""

    @abstractmethod
    def replace(self, rank: int) -> None:
        """Starts a new process for a dead rank of a session.

        Raises:
            RingError: no process can be started.
        """

    @abstractmethod
    def exit_status(self, rank: int) -> Exit:
        """Returns (exit code or None, end time) for a rank with a closed channel."""

    def report_death(self, rank: int, output: RankOutput) -> Report:
        """Describes the death of a rank with a closed channel, from the rank's files."""
        code, at_ns = self.exit_status(rank)
        output.follow(last=True)
        crash = self.config.for_rank(rank).file("crash")
        stack = crash.read_text(errors="replace") if crash.exists() else ""
        return report_death(rank, code, at_ns, output.text, stack)

    @property
    def startup_errors(self) -> str:
        """The output of processes that did not become ranks."""
        return ""

    def wait_for_end(self) -> None:
        """Waits until every rank is gone, and kills ranks that take too long."""
        left: list[Any] = [channel for channel in self.channels if not channel.closed]
        deadline = time.monotonic() + EXIT_S
        while left and time.monotonic() < deadline:
            ready = wait(left, timeout=0.5)
            if not ready:
                self.kill()
            left = [channel for channel in left if channel not in ready or not _at_end(channel)]

    @abstractmethod
    def close(self) -> None:
        """Ends the remaining ranks, and removes the directory."""


def _at_end(channel: Connection) -> bool:
    """Reads a leaving rank's last message; returns True if its side is closed."""
    try:
        channel.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def start_command(what: str, *arguments: object) -> list[str]:
    """Returns the command that starts an interpreter as a "fork server" or as a "rank".

    See ``start``.
    """
    return [
        sys.executable,
        str(Path(__file__).with_name("start.py")),
        json.dumps([what, sys.path, arguments]),
    ]


class ForkServer:
    """The launcher's end of a fork server."""

    _has_answered = _is_stuck = _is_retired = False
    _question = 0  # the number of the last one

    def __init__(self) -> None:
        self.environment = start_environment()
        self._lock = threading.Lock()
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            # a standard stream of the caller is closed: a socket in its place would be lost when
            # the server gets its own streams
            pass
        os.close(number)
        # open as long as the server
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="ringsim-")  # noqa: SIM115
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                start_command("fork server", theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C at the terminal is meant for the launcher
            )
        # otherwise, the server would not see the end of this process
        os.register_at_fork(after_in_child=self._control.close)
        self._start_s = time.monotonic()
        self._sets: set[str] = set()  # ranks in use, by name
        # of ranks: a killed server does not remove them
        self.directories: deque[Path] = deque(maxlen=_RECENT)
        self._put("answer", "")  # answered when it has started

    @property
    def alive(self) -> bool:
        """Whether the server can still fork."""
        return self._process.poll() is None

    @property
    def startup_errors(self) -> str:
        """The server's output, which consists only of errors."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def answers(self) -> bool:
        """Returns whether the server works.

        A server that has answered before must answer within ``ANSWER_S``; a starting server has
        more time.
        """
        with self._lock:
            self._has_answered = self._has_answered or bool(
                select.select([self._control], [], [], 0)[0]
            )
            if self._has_answered:
                self._is_stuck = not self._ask("answer", "")
            else:
                self._is_stuck = time.monotonic() > self._start_s + START_S
        return not self._is_stuck

    def take(self, name: str) -> bool:
        """Takes parked ranks for a call.

        Returns False if the server has ended them, or does not confirm that they are alive.
        """
        with self._lock:
            return self._has_answered and self._ask("take", name)

    def _put(self, question: str, name: str) -> None:
        self._question += 1
        self._control.send(
            json.dumps({"do": question, "set": name, "number": self._question}).encode()
        )

    def _ask(self, question: str, name: str) -> bool:
        """Returns the answer to a question, or False if none arrives in time.

        Answers to earlier questions may still be unread.
        """
        answer = [0, False]
        self._control.settimeout(ANSWER_S)
        try:
            self._put(question, name)
            while answer[0] != self._question:
                answer = json.loads(self._control.recv(_ANSWER_BYTES))
        except (OSError, ValueError):  # too late, or the server is gone
            return False
        finally:
            self._control.settimeout(None)
        return bool(answer[1])

    def use(self, name: str) -> None:
        """Notes that a set of ranks is in use."""
        with self._lock:
            self._sets.add(name)

    def release(self, name: str) -> None:
        """Notes that a set of ranks is no longer in use.

        A retired server ends with its last set.
        """
        with self._lock:
            self._sets.discard(name)
            over = self._is_retired and not self._sets
        if over:
            atexit.unregister(self.close)
            self.close()

    def retire(self) -> None:
        """Ends the server as soon as no thread uses its ranks."""
        self._is_retired = True
        atexit.register(self.close)
        self.release("")

    def send(self, message: dict[str, object], fds: list[int] | None = None) -> None:
        """Sends one message; does nothing if the server is gone.

        In that case, the channels of its ranks are closed.
        """
        with self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])

    def close(self) -> None:
        """Ends the server and all its ranks."""
        if self._is_stuck:
            self._process.kill()
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._remove_directories()

    def _remove_directories(self) -> None:
        """Removes the directories of a killed server.

        Dying ranks may still write once.
        """
        deadline = time.monotonic() + _DYING_S
        left = list(self.directories) if self._process.returncode else []
        while left and time.monotonic() < deadline:
            for directory in left:
                shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.01)
            left = [directory for directory in left if directory.exists()]


class ForkedRanks(RankSet):
    """Ranks forked by a fork server.

    Args:
        server: the fork server.
        kind: the properties of the ranks.
        park_s: the time after which the server ends ranks forked ahead of a call; infinite for
            a call that waits.
        keep_at: the directory for their files, or None for a private one.
    """

    def __init__(
        self,
        server: ForkServer,
        kind: RankKind,
        *,
        park_s: float = math.inf,
        keep_at: Path | None = None,
    ) -> None:
        super().__init__(kind, keep_at)
        self._server = server
        if keep_at is None:
            server.directories.append(self.directory)
        self._name = uuid.uuid4().hex
        server.use(self._name)
        for first in range(0, kind.world_size, FDS_PER_MESSAGE):
            self.channels += self._fork(
                first, min(first + FDS_PER_MESSAGE, kind.world_size), park_s
            )

    def _fork(self, first: int, end: int, park_s: float = math.inf) -> list[Connection]:
        """Forks the ranks ``first`` to ``end - 1``; returns their channels."""
        pairs = [socket.socketpair() for _ in range(first, end)]
        message = {
            "do": "fork",
            "set": self._name,
            "first": first,
            "config": asdict(replace(self.config, directory=str(self.home))),
            "park_s": park_s,
        }
        self._server.send(message, [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return [Connection(ours.detach()) for ours, _ in pairs]

    def replace(self, rank: int) -> None:
        """See ``RankSet``."""
        if not self._server.alive:
            raise RingError(f"cannot start rank {rank} again: the process that forks ranks died.")
        self.channels[rank].close()
        (self.channels[rank],) = self._fork(rank, rank + 1)

    def take(self) -> bool:
        """Takes parked ranks for a call; returns False if they have ended in the meantime."""
        return self.directory.is_dir() and self._server.take(self._name)

    def kill(self) -> None:
        """See ``RankSet``."""
        self._server.send({"do": "kill", "set": self._name})

    def close(self) -> None:
        """See ``RankSet``; the server removes the directory later."""
        self._server.send({"do": "end", "set": self._name, "directory": str(self.home)})
        for channel in self.channels:
            channel.close()
        self._server.release(self._name)
        if not self._server.alive:
            shutil.rmtree(self.home, ignore_errors=True)

    def exit_status(self, rank: int) -> Exit:
        """See ``RankSet``; the server writes the status before it closes the channel."""
        try:
            code, at_ns = (self.home / f"rank-{rank}.exit").read_text().split()
        except (OSError, ValueError):  # the server is gone, or the disk is full
            return None, time.monotonic_ns()
        return int(code), int(at_ns)

    @property
    def startup_errors(self) -> str:
        """See ``RankSet``."""
        return self._server.startup_errors


def _start_process(
    before: list[str], start: dict[str, Any], log: IO[str]
) -> subprocess.Popen[bytes]:
    """Starts an interpreter, or a command that starts interpreters, which become ranks.

    They connect to the address in ``start``, and ``log`` receives their output.
    """
    return subprocess.Popen(
        [*before, *start_command("rank")],
        env={**ON_THIS_MACHINE, **os.environ, _START: json.dumps(start)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class SpawnedRanks(RankSet):
    """Ranks that are new interpreters, for systems without the fork server (macOS, Windows).

    These ranks start more slowly, but are otherwise the same.

    Args:
        kind: the properties of the ranks.
        keep_at: the directory for their files, or None for a private one.
    """

    def __init__(self, kind: RankKind, keep_at: Path | None = None) -> None:
        super().__init__(kind, keep_at)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self.channels = self._spawn(range(kind.world_size))
        except BaseException:  # also after Ctrl-C
            self.close()
            raise

    def _spawn(self, ranks: Sequence[int]) -> list[Connection]:
        """Starts some ranks, and returns their channels."""
        # other processes on this machine do not have the key, so they cannot pass for a rank
        key = secrets.token_bytes(32)
        with (
            Listener(("127.0.0.1", 0), authkey=key) as listener,
            (self.home / "start.log").open("w") as log,
        ):
            self._start(ranks, {"address": listener.address, "key": key.hex()}, log)
            return self._accept(ranks, listener)

    def replace(self, rank: int) -> None:
        """See ``RankSet``."""
        self._processes[rank].kill()
        self._processes[rank].wait()
        self.channels[rank].close()
        (self.channels[rank],) = self._spawn([rank])

    def _start(self, ranks: Sequence[int], meeting: dict[str, Any], log: IO[str]) -> None:
        """Starts the processes, which connect to the given address; logs their output."""
        config = replace(self.config, directory=str(self.home))
        for rank in ranks:
            start = {**meeting, "config": asdict(config.for_rank(rank))}
            self._processes[rank] = _start_process([], start, log)

    def _accept(self, ranks: Sequence[int], listener: Listener) -> list[Connection]:
        """Waits until every rank has connected and sent its number, in any order."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def accept() -> None:  # in a thread, since accept() has no time limit
            with contextlib.suppress(OSError):
                while True:
                    arrived.put(listener.accept())

        start_thread("accept", accept)
        by_rank: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        while len(by_rank) < len(ranks):
            with contextlib.suppress(queue.Empty):
                channel = arrived.get(timeout=0.1)
                by_rank[channel.recv()] = channel
                continue
            if time.monotonic() > deadline or any(
                self._processes[rank].poll() is not None
                for rank in self._processes.keys() & set(ranks)
            ):
                errors = (self.home / "start.log").read_text().strip()
                raise RingError(f"cannot start ranks: {errors or 'no answer'}.")
        return [by_rank[rank] for rank in ranks]

    def kill(self) -> None:
        """See ``RankSet``."""
        for process in self._processes.values():
            process.kill()

    def exit_status(self, rank: int) -> Exit:
        """See ``RankSet``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[rank].wait(1.0), time.monotonic_ns()
        return None, time.monotonic_ns()

    def close(self) -> None:
        """See ``RankSet``."""
        self.kill()
        for process in self._processes.values():
            process.wait()
        for channel in self.channels:
            channel.close()
        shutil.rmtree(self.home, ignore_errors=True)


class MpiRanks(SpawnedRanks):
    """Ranks on this machine, started by ``mpirun`` from this environment or from ``PATH``."""

    def __init__(self, kind: RankKind, keep_at: Path | None = None) -> None:
        places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
        found = {
            "mpirun": shutil.which("mpirun", path=os.pathsep.join(places)),
            "mpi4py": find_spec("mpi4py"),
        }
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise RingError(
                f'cannot find {" and ".join(missing)}, which backend="mpi" requires. Run pip '
                "install 'ringsim[mpi]'."
            )
        self._mpirun = str(found["mpirun"])
        super().__init__(kind, keep_at)

    def _start(self, _ranks: Sequence[int], meeting: dict[str, Any], log: IO[str]) -> None:
        version = subprocess.run([self._mpirun, "--version"], capture_output=True, check=False)
        # MPICH ends all ranks after one dies, which would hide the first one
        options = ["-disable-auto-cleanup"] if b"HYDRA" in version.stdout else []
        count = ["-n", str(self.kind.world_size)]
        start = {**meeting, "config": asdict(self.config)}
        self._processes[0] = _start_process([self._mpirun, *options, *count], start, log)

    def exit_status(self, rank: int) -> Exit:
        """See ``RankSet``; only mpirun knows the exit code."""
        return None, time.monotonic_ns()

    def kill(self) -> None:
        """See ``RankSet``; mpirun removes the MPI files."""
        for process in self._processes.values():
            process.terminate()

    def close(self) -> None:
        """See ``RankSet``."""
        self.kill()
        self.wait_for_end()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)
            process.kill()
        super().close()


def become_rank() -> None:
    """Turns this new interpreter into a rank; does not return.

    A variable describes the rank.
    """
    start = json.loads(os.environ.pop(_START))
    config = RankConfig(**start["config"])
    if config.backend == "mpi":
        from ringsim.comm.mpi import start_mpi  # imports torch, which the launcher does not load

        config = config.for_rank(start_mpi())
    channel = Client(tuple(start["address"]), authkey=bytes.fromhex(start["key"]))
    channel.send(config.rank)
    from ringsim.launch import rank  # imported on use: torch

    try:
        rank.main(channel, config)
    finally:
        os._exit(70)


class Launcher:
    """Provides ranks; a process has one launcher, which several threads can use."""

    _server: ForkServer | None = None
    _parked: ForkedRanks | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        atexit.register(self.close)

    def get(self, kind: RankKind, *, keep_at: Path | None = None) -> RankSet:
        """Returns ranks of the given kind, preferably parked ranks.

        The ranks of a session, and a process that runs a function alone, are always new.

        Raises:
            RingError: the ranks cannot be started.
        """
        try:
            if kind.backend == "mpi":
                return MpiRanks(kind, keep_at)
            if has_fork_server():
                return self._get_forked(kind, keep_at)
            return SpawnedRanks(kind, keep_at)
        except OSError as error:
            raise RingError(
                f"cannot start ranks: {error}. Check the limits (ulimit -a) and the disk space."
            ) from None

    def _get_forked(self, kind: RankKind, keep_at: Path | None) -> ForkedRanks:
        with self._lock:
            parked = None
            if not kind.stays and kind.comm_device != ALONE:  # otherwise, parked ranks stay parked
                parked, self._parked = self._parked, None
            if self._server is not None and self._server.alive and not self._server.answers():
                self._retire_server()
            if parked is not None:
                if (
                    keep_at is None
                    and self._server is not None
                    and parked.kind == kind
                    and parked.take()
                ):
                    return parked
                parked.close()
            return ForkedRanks(self._get_server(kind), kind, keep_at=keep_at)

    def park(self, kind: RankKind) -> None:
        """Forks new ranks of the given kind ahead of the next call; returns immediately."""
        if (
            not has_fork_server()
            or kind.world_size > PARKED_RANKS_MAX
            or kind.comm_device != "cpu"
            or kind.backend is not None
            or not kind.ring
        ):
            return
        with self._lock:
            if self._parked is None:
                self._parked = ForkedRanks(self._get_server(kind), kind, park_s=PARKED_S)

    def close(self) -> None:
        """Ends the server and all parked ranks; the next ``get`` starts a new server."""
        with self._lock:
            parked, self._parked = self._parked, None
            server, self._server = self._server, None
            if server is not None:
                server.close()
            if parked is not None:
                parked.close()  # last: without a server, it removes their directory itself

    def _get_server(self, kind: RankKind) -> ForkServer:
        """Returns a server that was started in the environment of ``kind``."""
        if self._server is not None and (
            not self._server.alive or self._server.environment != kind.environment
        ):
            self._retire_server()
        if self._server is None:
            self._server = ForkServer()
        return self._server

    def _retire_server(self) -> None:
        if self._server is not None:
            self._server.retire()
            self._server = None


def has_fork_server() -> bool:
    """Returns whether this system forks ranks; on other systems, each rank is a new interpreter."""
    return sys.platform == "linux"


@functools.cache
def _launcher_of(_pid: int) -> Launcher:
    return Launcher()


def get_launcher() -> Launcher:
    """Returns this process's launcher; a forked child gets its own launcher."""
    return _launcher_of(os.getpid())
