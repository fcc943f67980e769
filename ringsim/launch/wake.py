"""What is asked and wanted of a rank while its first thread is at work or blocked: where it is, and that its waits end.

Nothing in torch ends a wait, so the rank's connections to the other ranks are shut.

A blocked ``wait()`` of Gloo lets go of the interpreter, so another thread can do this; the wait then raises. It does not where a message is
half-way through, nor in a recv from any source.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from ringsim.traces.recorder import CallSites

__all__ = ["ANSWER_S", "ASK", "OUR_THREADS", "WAKE", "WAKE_S", "WHERE", "Threads", "find_place", "list_threads", "shut_connections"]

ASK: Final = "threads?"  # what the watcher wants of a rank: its threads
WAKE: Final = "wake"  # and that it shuts its connections
WHERE: Final = "where?"  # what the launcher wants of it before it ends it: at which line of the user's it is

# A thread whose innermost frame is in one of these waits for another thread of its process.
_IDLE_FILES: Final = ("/threading.py", "/queue.py", "/concurrent/futures/thread.py", "/tqdm/_monitor.py")
ANSWER_S: Final = 1.0  # what ranks get to say where they are: a busy machine is slow, and who computes in C++ may keep its interpreter
WAKE_S: Final = 2.0  # what a rank gets, after its connections have been shut, to raise
OUR_THREADS: Final = "ringsim-"  # how the names of our own begin


class Threads(NamedTuple):
    """What a rank says of its own threads, ringsim's apart.

    Attributes:
        busy: those, by ``threading.get_ident()``, that do something or wait in an operation.
        idle: whether there are others, which wait for something in this process.
    """

    busy: frozenset[int]
    idle: bool


def list_threads() -> Threads:
    """Returns what the threads of this process are at, our own apart. It does not block."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)} | {threading.get_ident()}
    busy, idle = [], False
    for ident, frame in sys._current_frames().items():
        if ident in ours:
            continue
        if frame.f_code.co_filename.endswith(_IDLE_FILES):
            idle = True
        else:
            busy.append(ident)
    return Threads(frozenset(busy), idle)


def find_place(library: str) -> tuple[str, int] | None:
    """Returns file and line of the user's program where the first thread of this process is; None where it is in none.

    Args:
        library: directory of torch, whose files are not the user's.
    """
    sites = CallSites(lambda _: 0)
    sites.declare_library(library, speaker="")
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and sites.learn(frame.f_code.co_filename) < 0:
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def shut_connections(keep_port: int) -> int:
    """Shuts the TCP connections of this process to others on this machine, the one to the rendezvous apart (Linux).

    Args:
        keep_port: the rendezvous's.

    Returns:
        How many it shut.
    """
    count = 0
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            mine, other = connection.getsockname(), connection.getpeername()  # a listening socket has no peer: it raises
            if mine[0] == other[0] and keep_port not in (mine[1], other[1]):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Yields a duplicate of every TCP socket of this process, to be closed by whoever takes it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()
