"""The ranks of one run, as the launcher sees them, however they were started."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

from ringsim.launch.config import Kind, RankConfig

EXIT_S: Final = 5.0  # a killed process is gone long before


class RankSet(ABC):
    """The ranks of one run, as the launcher sees them.

    Attributes:
        directory: the run's directory, see ``RankConfig``.
        channels: one for each rank; a closed one says that the rank has ended.
    """

    def __init__(self, kind: Kind, keep_at: Path | None = None) -> None:
        self.kind = kind
        self.keep = keep_at is not None
        if keep_at is None:
            self.directory = Path(tempfile.mkdtemp(prefix="ringsim-"))
        else:
            keep_at.mkdir(parents=True)
            self.directory = keep_at
        self.channels: list[Connection] = []

    @property
    def config(self) -> RankConfig:
        """What rank 0 is told; the others differ in their number."""
        kind = self.kind
        return RankConfig(str(self.directory), 0, kind.world_size, kind.comm_device, kind.timeout_s, kind.ring, self.keep)

    @abstractmethod
    def kill(self) -> None:
        """Ends all ranks that are still there; returns at once."""

    @abstractmethod
    def exit_status(self, rank: int) -> tuple[int | None, int]:
        """Returns (exit code or None, when it was known) of a rank whose channel is closed."""

    @property
    def startup_errors(self) -> str:
        """What was printed by processes that could not even become ranks."""
        return ""

    def wait_for_end(self) -> None:
        """Waits until every rank is gone; kills those that take their time."""
        left = [channel for channel in self.channels if not channel.closed]
        deadline = time.monotonic() + EXIT_S
        while left and time.monotonic() < deadline:
            for channel in wait(left, timeout=0.5) or self._kill_and_return_none():
                if _at_end(channel):  # type: ignore[arg-type]  # wait() gives back what it was given
                    left.remove(channel)  # type: ignore[arg-type]

    def _kill_and_return_none(self) -> list[Connection]:
        self.kill()
        return []

    def close(self) -> None:
        """Ends what is left of the ranks, without waiting for the system to take them down, and removes the directory."""
        self.kill()
        for channel in self.channels:
            channel.close()
        deadline = time.monotonic() + EXIT_S
        while self.directory.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.directory, ignore_errors=True)  # the server may just be writing down how a rank ended: then once more


def _at_end(channel: Connection) -> bool:
    """Reads what a leaving rank may still say; True when its side is closed."""
    try:
        channel.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def start_command(what: str, *arguments: object) -> list[str]:
    """Returns the command that makes a fresh interpreter a "fork server" or a "rank", see ``start``."""
    return [sys.executable, str(Path(__file__).with_name("start.py")), json.dumps([what, sys.path, arguments])]
