"""Ranks from a fork server: the launcher's end of both."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from ringsim.launch.config import Kind, start_environment
from ringsim.launch.forkserver import FDS_PER_MESSAGE
from ringsim.launch.rank_set import EXIT_S, RankSet, start_command


class ForkServer:
    """The launcher's end of a fork server."""

    def __init__(self) -> None:
        self.environment = start_environment()
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="ringsim-")  # noqa: SIM115 - open as long as the server
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                start_command("fork server", theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher
            )
        os.register_at_fork(after_in_child=self._control.close)  # or the server would not see the end of this process

    @property
    def alive(self) -> bool:
        """Whether the server can still fork."""
        return self._process.poll() is None

    @property
    def startup_errors(self) -> str:
        """What the server printed; it prints only when something is wrong."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def send(self, message: dict[str, object], fds: list[int] | None = None) -> None:
        """Sends one message; a server that is gone is not an error here, for its ranks' channels say so."""
        with self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])

    def close(self) -> None:
        """Ends the server, and with it every rank."""
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class ForkedRanks(RankSet):
    """Ranks that a fork server forks.

    Args:
        server: who forks them.
        kind: what they must be like.
        park_s: they are made ahead of a call, and the server ends them if none comes within this time; None for a call that waits.
        keep_at: directory for their files, or None for a private one.
    """

    def __init__(self, server: ForkServer, kind: Kind, *, park_s: float | None = None, keep_at: Path | None = None) -> None:
        super().__init__(kind, keep_at)
        self._server = server
        self._name = uuid.uuid4().hex
        pairs = [socket.socketpair() for _ in range(kind.world_size)]
        self.channels = [Connection(ours.detach()) for ours, _ in pairs]
        for first in range(0, kind.world_size, FDS_PER_MESSAGE):
            theirs = [their for _, their in pairs[first : first + FDS_PER_MESSAGE]]
            message = {"do": "fork", "set": self._name, "first": first, "config": asdict(self.config), "park_s": park_s}
            server.send(message, [their.fileno() for their in theirs])
        for _, their in pairs:
            their.close()

    def take(self) -> bool:
        """Takes parked ranks for a call; False when they have ended meanwhile."""
        self._server.send({"do": "take", "set": self._name})
        return self._server.alive and self.directory.is_dir() and not self.exits

    @property
    def exits(self) -> list[Path]:
        """The files that say how ranks ended."""
        return list(self.directory.glob("rank-*.exit"))

    def kill(self) -> None:
        """See ``RankSet``."""
        self._server.send({"do": "kill", "set": self._name})

    def exit_status(self, rank: int) -> tuple[int | None, int]:
        """See ``RankSet``: the server writes it down before it closes the channel."""
        try:
            code, at_ns = self.config.for_rank(rank).exit_file.read_text().split()
        except (OSError, ValueError):  # the server is gone, or the disk full
            return None, time.monotonic_ns()
        return int(code), int(at_ns)

    @property
    def startup_errors(self) -> str:
        """See ``RankSet``."""
        return self._server.startup_errors
