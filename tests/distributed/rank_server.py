"""Real ranks for tests, cheaply: a server that has imported torch and never computed forks one process for each rank.

Used as ``with RankServer() as server: server.run("module", "function", arguments)``. Run as a script, this file is the server.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        how: "returned", "raised" or "killed" (at the time limit, or by a signal).
        value: what it returned, or the error's message.
        error: the name of the error's class, "" where none was raised.
        took_s: how long it ran.
    """

    how: str
    value: Any
    error: str = ""
    took_s: float = 0.0


class RankServer:
    """A process that forks ranks on request."""

    def __enter__(self) -> RankServer:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the server ends when nobody can ask any more
        self._process.stdout.close()
        self._process.wait(10)

    def run(
        self, function: Any, arguments: list[tuple[Any, ...]], *, limit_s: float = 30, environment: dict[str, str] | None = None
    ) -> list[Ended]:
        """Runs ``function(*arguments[i])`` in process i, all at once, and returns how each ended; kills what runs at the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _write(self._process.stdin, (sys.path, function.__module__, function.__name__, arguments, limit_s, environment or {}))
        ended: list[Ended] = _read(self._process.stdout)
        return ended


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that is free now."""
    from ringsim.comm.bootstrap import listen

    with listen(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def results(ended: list[Ended]) -> list[Any]:
    """Returns what the ranks returned; fails where one did not."""
    assert [(each.how, each.value) for each in ended if each.how != "returned"] == []
    return [each.value for each in ended]


def _write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(pipe.read(struct.unpack("<Q", header)[0]))


def _serve() -> None:
    import ringsim.ring  # torch is imported here, once

    del ringsim
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print is not an answer
    while True:
        try:
            sys.path[:], module, name, arguments, limit_s, environment = _read(requests)
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        os.environ.update(environment)
        _write(answers, _run(function, arguments, limit_s))
        for variable in environment:
            del os.environ[variable]


def _run(function: Any, arguments: list[tuple[Any, ...]], limit_s: float) -> list[Ended]:
    children = [_fork(function, each) for each in arguments]
    deadline = time.monotonic() + limit_s
    texts = {pipe: b"" for _, pipe in children}
    open_pipes = set(texts)
    while open_pipes and (remaining := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(open_pipes), [], [], remaining)[0]:
            data = os.read(pipe, 65536)
            texts[pipe] += data
            if not data:
                open_pipes.discard(pipe)
    ended = []
    for pid, pipe in children:
        if pipe in open_pipes:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        ended.append(pickle.loads(texts[pipe]) if texts[pipe] else Ended("killed", f"wait status {status}"))
    return ended


def _fork(function: Any, arguments: tuple[Any, ...]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    begin = time.monotonic()
    try:
        ended = Ended("returned", function(*arguments), "", time.monotonic() - begin)
    except BaseException as error:
        if os.environ.get("RANK_SERVER_SHOWS"):
            traceback.print_exc()
        ended = Ended("raised", str(error), type(error).__name__, time.monotonic() - begin)
    os.write(writer, pickle.dumps(ended))
    os._exit(0)


if __name__ == "__main__":
    sys.modules["rank_server"] = sys.modules["__main__"]  # so that what is pickled here is found there
    Ended.__module__ = "rank_server"
    _serve()
