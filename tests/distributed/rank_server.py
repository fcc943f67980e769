"""Real ranks for tests, cheaply.

A server that has imported torch, but never computed, forks one process per rank. Use it as ``with
RankServer() as server: server.run(function, arguments)``. Run as a script, this file is the server.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Ended:
    """The end of a rank.

    Attributes:
        how: "returned", "raised" or "killed" (at the time limit, or by a signal).
        value: the result, or the error's message.
        error: the name of the error's class, "" if none was raised.
        took_s: the duration of the run.
    """

    how: str
    value: Any
    error: str = ""
    took_s: float = 0.0


class RankServer:
    """A process that forks ranks on request."""

    def __enter__(self) -> RankServer:
        self._channel, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # the server ends when no more requests can come
        self._process.wait(120)  # against hangs, with time for a busy machine

    def run(
        self,
        function: Any,
        arguments: list[tuple[Any, ...]],
        *,
        limit_s: float = 120,
        environment: dict[str, str] | None = None,
    ) -> list[Ended]:
        """Runs ``function(*arguments[i])`` in process i, all together, and returns their ends.

        Processes that still run at the limit are killed.
        """
        called = function.__module__, function.__name__, arguments
        self._channel.send((sys.path, *called, limit_s, environment or {}))
        ended: list[Ended] = self._channel.recv()
        return ended


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return port


def results(ended: list[Ended]) -> list[Any]:
    """Returns the results of the ranks; fails if a rank has none."""
    assert [(each.how, each.value) for each in ended if each.how != "returned"] == []
    return [each.value for each in ended]


def _serve(channel: Connection[Any, Any]) -> None:
    from ringsim import comm  # torch is imported here, once

    del comm
    while True:
        try:
            sys.path[:], module, name, arguments, limit_s, environment = channel.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        os.environ.update(environment)
        channel.send(list(_run(function, arguments, limit_s)))
        for variable in environment:
            del os.environ[variable]


def _run(function: Any, arguments: list[tuple[Any, ...]], limit_s: float) -> Iterator[Ended]:
    ranks = [_fork(function, each) for each in arguments]
    deadline = time.monotonic() + limit_s
    answers: dict[Any, Ended | None] = {}
    while len(answers) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
        for reader in wait([reader for _, reader in ranks if reader not in answers], remaining):
            try:
                # wait() returns the objects that it was given
                answers[reader] = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[reader] = None
    for pid, reader in ranks:
        if reader not in answers:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        reader.close()
        yield answers.get(reader) or Ended("killed", f"wait status {status}")


def _fork(function: Any, arguments: tuple[Any, ...]) -> tuple[int, Connection[Any, Any]]:
    reader, writer = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        writer.close()
        return pid, reader
    reader.close()
    begin = time.monotonic()
    try:
        ended = Ended("returned", function(*arguments), "", time.monotonic() - begin)
    except BaseException as error:
        if os.environ.get("RANK_SERVER_SHOWS"):
            traceback.print_exc()
        ended = Ended("raised", str(error), type(error).__name__, time.monotonic() - begin)
    writer.send(ended)
    os._exit(0)


if __name__ == "__main__":
    # so that names pickled here are found there
    sys.modules["rank_server"] = sys.modules["__main__"]
    Ended.__module__ = "rank_server"
    _serve(Connection(int(sys.argv[1])))
