"""Ranks where there is no fork server (macOS, Windows): each is a fresh interpreter. Slower to start, the same in everything else."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from ringsim.errors import RingError
from ringsim.launch.config import Kind, RankConfig
from ringsim.launch.rank_set import RankSet, start_command

START_S: Final = 120.0  # an interpreter with torch, on a busy machine


class SpawnedRanks(RankSet):
    """Ranks that are fresh interpreters.

    Args:
        kind: what they must be like.
        keep_at: directory for their files, or None for a private one.
    """

    def __init__(self, kind: Kind, keep_at: Path | None = None) -> None:
        super().__init__(kind, keep_at)
        key = secrets.token_bytes(32)  # without it nobody else on this machine can pass for a rank
        self._processes: list[subprocess.Popen[str]] = []
        with Listener(("127.0.0.1", 0), authkey=key) as listener, (self.directory / "start.log").open("w") as log:
            for rank in range(kind.world_size):
                process = subprocess.Popen(
                    start_command("rank"),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
                self._processes.append(process)
                start = {"address": listener.address, "key": key.hex(), "config": self.config.for_rank(rank).to_json()}
                if process.stdin is not None:
                    process.stdin.write(json.dumps(start) + "\n")
                    process.stdin.close()
            self.channels = self._accept(listener)

    def _accept(self, listener: Listener) -> list[Connection]:
        """Waits until every rank has called; ranks call in any order and say who they are."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def accept() -> None:  # in a thread, for accept() itself knows no time limit
            with contextlib.suppress(OSError):
                while True:
                    arrived.put(listener.accept())

        threading.Thread(target=accept, name="ringsim-accept", daemon=True).start()
        by_rank: dict[int, Connection] = {}
        deadline = time.monotonic() + START_S
        while len(by_rank) < self.kind.world_size:
            with contextlib.suppress(queue.Empty):
                channel = arrived.get(timeout=0.1)
                by_rank[channel.recv()] = channel
                continue
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                errors = (self.directory / "start.log").read_text().strip()
                self.close()
                raise RingError(f"ranks must be startable, got: {errors or 'no answer'}.")
        return [by_rank[rank] for rank in range(self.kind.world_size)]

    def kill(self) -> None:
        """See ``RankSet``."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def exit_status(self, rank: int) -> tuple[int | None, int]:
        """See ``RankSet``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[rank].wait(1.0), time.monotonic_ns()
        return None, time.monotonic_ns()

    def close(self) -> None:
        """See ``RankSet``."""
        super().close()
        for process in self._processes:
            process.wait()


def main() -> None:
    """Becomes the rank that the line on standard input describes."""
    start = json.loads(sys.stdin.readline())
    config = RankConfig.from_json(start["config"])
    channel = Client(tuple(start["address"]), authkey=bytes.fromhex(start["key"]))
    channel.send(config.rank)
    from ringsim.launch import rank  # with torch, which the launcher does not load

    try:
        rank.main(channel, config)
    finally:
        os._exit(70)
