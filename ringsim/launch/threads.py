"""Inspects the threads of a rank.

It finds the threads that only wait for another thread, and the user's lines at which they wait. A
rank whose threads all wait for each other, or in operations, does nothing more by itself. For waits
in Python's own modules, the frames show this. For other waits, Linux shows it, because a lock taken
by ``with lock:`` has no frame: the thread sleeps in a system call whose arguments determine what
can end it.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ringsim.state import OUR_THREADS
from ringsim.traces.frames import current_frames
from ringsim.traces.sites import CallSites

Place = tuple[str, int]  # a file and a line in it
Places = dict[int, Place | None]  # by rank or thread; None if there is none

_TQDM = "/tqdm/_monitor.py"  # wakes every 10 s, and never communicates
# A thread with its innermost frame in one of these files waits for another thread of its process.
_IDLE_FILES = ("/threading.py", "/queue.py", "/concurrent/futures/thread.py", _TQDM)
# Names of the threads of Gloo and of torch's stores, which only serve operations.
_LIBRARY_THREADS = ("gloo_", "pt_gloo", "pt_tcpstore")
_FUTEX, _EPOLL, _RECV = range(3)
_CALLS = {  # numbers of Linux's system calls, by machine
    "x86_64": {"202": _FUTEX, "232": _EPOLL, "281": _EPOLL, "45": _RECV},
    "aarch64": {"98": _FUTEX, "22": _EPOLL, "207": _RECV},
}
# FUTEX_PRIVATE_FLAG in Linux's include/uapi/linux/futex.h: no other process can end this wait
_PRIVATE = 0x80


class Threads(NamedTuple):
    """A rank's report on its threads, except for ringsim's own threads."""

    # by ``threading.get_ident()``, the threads that work, or wait for anything outside this process
    busy: Collection[int]
    # the user's line at which each other thread waits; None if there is none
    idle: Places
    # the idle threads that may wake without another Python thread: at a limit, or by a C++ thread
    timed: Collection[int] = ()

    def besides(self, awaiting: Collection[int]) -> Threads:
        """Returns the report without the threads that wait in an operation."""
        idle = {thread: place for thread, place in self.idle.items() if thread not in awaiting}
        return Threads(
            set(self.busy).difference(awaiting), idle, set(self.timed).difference(awaiting)
        )


def list_threads() -> Threads:
    """Returns a report on this process's threads, except for ringsim's own; does not block."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    numbers = {thread.ident: thread.native_id for thread in known.values()}
    # Python still has the thread number from before the fork
    numbers[threading.main_thread().ident] = os.getpid()
    quiet = _is_quiet(numbers.values())
    sites = _make_sites()
    busy: list[int] = []
    idle: Places = {}
    timed: list[int] = []
    for ident, frame in current_frames().items():
        thread = known.get(ident)
        if ident == threading.get_ident() or (
            thread is not None and thread.name.startswith(OUR_THREADS)
        ):
            continue
        file, first = frame.f_code.co_filename, thread is threading.main_thread()
        endless = waits_without_end(numbers.get(ident))
        if first and signal.getitimer(signal.ITIMER_REAL)[0]:
            endless = False  # an alarm will end it
        # A time limit of the main thread belongs to the program, and so does a timer; other threads
        # wake regularly for background work.
        acts = endless is False and (first or isinstance(thread, threading.Timer))
        if (file.endswith(_IDLE_FILES) and not acts) or (endless and quiet):
            user = sites.find(frame)
            idle[ident] = (
                None
                if user is None or user.f_code.co_filename.endswith(_IDLE_FILES)
                else _place(user)
            )
            if not (endless and quiet) and not file.endswith(_TQDM):
                timed.append(ident)
        else:
            busy.append(ident)
    return Threads(busy, idle, timed)


def find_place() -> Place | None:
    """Returns the file and line of the user's program that the main thread is executing."""
    frame = _make_sites().find(current_frames().get(threading.main_thread().ident or 0))
    return None if frame is None else _place(frame)


def _make_sites() -> CallSites:
    sites = CallSites(lambda _: 0)
    if (torch := sys.modules.get("torch")) is not None:
        sites.declare_library(os.path.dirname(str(torch.__file__)), speaker="")
    return sites


def _place(frame: FrameType) -> Place:
    return frame.f_code.co_filename, frame.f_lineno


def _is_quiet(of_python: Collection[int | None]) -> bool:
    """Returns whether all C++ threads wait, apart from threads that only serve operations."""
    try:
        others = [
            (task, (task / "comm").read_text())
            for task in Path("/proc/self/task").iterdir()
            if int(task.name) not in of_python
        ]
    except OSError:  # not Linux, or a thread has just ended
        return False
    return all(
        name.startswith(_LIBRARY_THREADS) or waits_without_end(int(task.name))
        for task, name in others
    )


def waits_without_end(thread: int | None) -> bool | None:
    """Returns whether only a different thread of this process can end a thread's wait.

    This requires a wait without a limit. Returns None if unknown.
    """
    try:
        number, *arguments = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        if (calls := _CALLS.get(os.uname().machine)) is None:
            return None
        call, values = calls.get(number), [int(each, 16) for each in arguments[:4]]
        if call == _FUTEX:
            return bool(values[1] & _PRIVATE) and values[3] == 0
        if call == _EPOLL:
            watched = Path(f"/proc/self/fdinfo/{values[0]}").read_text().splitlines()
            ours = all(
                _is_ours(int(line.split()[1])) for line in watched if line.startswith("tfd:")
            )
            return values[3] & 0xFFFFFFFF == 0xFFFFFFFF and ours  # an int, -1 for no limit
        return call == _RECV and _is_ours(values[0])
    except OSError:
        return None


def _is_ours(descriptor: int) -> bool:
    """Returns whether both ends of a connection are in this process.

    The process created the pair, and has no child that may have inherited an end.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode) or any(
        task.read_text() for task in Path("/proc/self/task").glob("*/children")
    ):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as end:
        maker = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return end.family == socket.AF_UNIX and maker == os.getpid()
