"""Getting ranks: from a fork server with torch loaded, parked ones first; by starting interpreters where there is no such server."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Final

from ringsim.errors import RingError
from ringsim.launch.config import Kind
from ringsim.launch.forked import ForkedRanks, ForkServer
from ringsim.launch.portable import SpawnedRanks
from ringsim.launch.rank_set import RankSet

PARKED_S: Final = 60.0  # ranks that no call has taken after this long are ended
PARKED_RANKS_MAX: Final = 16  # parked ranks cost memory (about 10 MB each): few


class Launcher:
    """Hands out ranks. One for each process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._parked: ForkedRanks | None = None
        atexit.register(self.close)

    def get(self, kind: Kind, *, keep_at: Path | None = None) -> RankSet:
        """Returns ranks of a kind, parked ones if there are any.

        Raises:
            RingError: they cannot be started.
        """
        try:
            if has_fork_server():
                return self._get_forked(kind, keep_at)
            return SpawnedRanks(kind, keep_at)
        except OSError as error:
            raise RingError(f"ranks must be startable, got {error}. Check the limits (ulimit -a) and the space on disk.") from None

    def _get_forked(self, kind: Kind, keep_at: Path | None) -> ForkedRanks:
        with self._lock:
            parked, self._parked = self._parked, None
            if parked is not None:
                if keep_at is None and parked.kind == kind and parked.take():
                    return parked
                parked.close()
            return ForkedRanks(self._get_server(kind), kind, keep_at=keep_at)

    def park(self, kind: Kind) -> None:
        """Has fresh ranks of a kind made ahead of the next call; returns at once."""
        if not has_fork_server() or kind.world_size > PARKED_RANKS_MAX or kind.comm_device != "cpu" or not kind.ring:
            return
        with self._lock:
            if self._parked is None:
                self._parked = ForkedRanks(self._get_server(kind), kind, park_s=PARKED_S)

    def close(self) -> None:
        """Ends the server and all parked ranks; the next ``get`` starts anew."""
        with self._lock:
            if self._parked is not None:
                self._parked.close()
                self._parked = None
            if self._server is not None:
                self._server.close()
                self._server = None

    def _get_server(self, kind: Kind) -> ForkServer:
        """Returns a server that started under the environment that ``kind`` asks for."""
        if self._server is not None and (not self._server.alive or self._server.environment != kind.environment):
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkServer()
        return self._server


def has_fork_server() -> bool:
    """Whether ranks are forked on this system; elsewhere each is a fresh interpreter."""
    return sys.platform == "linux"


@functools.cache
def _launcher_of(_pid: int) -> Launcher:
    return Launcher()


def get_launcher() -> Launcher:
    """Returns this process's launcher; a forked child gets one of its own."""
    return _launcher_of(os.getpid())
