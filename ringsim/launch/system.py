"""Reads processes and connections from /proc on Linux."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import NamedTuple

_CALLED = {"T": "stopped", "t": "stopped", "S": "asleep"}  # in any other state it computes
_EXITING = 0x4  # PF_EXITING in Linux's include/linux/sched.h


class ProcessState(NamedTuple):
    """A process's state at one moment."""

    # R runs or would like to, S sleeps, D waits for a disk, T and t are stopped, Z has ended, X is
    # about to
    state: str
    ticks: int  # of CPU time that it has used so far

    @property
    def doing(self) -> str:
        """The process's activity: "computing", "asleep" or "stopped"."""
        return _CALLED.get(self.state, "computing")


def look_at(pid: int) -> ProcessState | None:
    """Returns a process's state (on Linux), or None if there is no such process.

    Example:
        >>> look_at(2**22 + 1) is None
        True
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = (
                file.read().rpartition(b")")[2].split()
            )  # the name before it may contain any characters
    except OSError:
        return None
    # A process that exits closes its connections before it becomes a zombie.
    state = "X" if int(words[6]) & _EXITING and words[0] != b"Z" else words[0].decode()
    # Ticks show a rank whose other threads compute while its main thread sleeps.
    return ProcessState(state, int(words[11]) + int(words[12]))


def look_at_living(pid: int) -> ProcessState | None:
    """Returns the state of a process, or None if the process has ended or is ending."""
    process = look_at(pid)
    return None if process is None or process.state in "ZX" else process


def measure_memory(pid: str) -> int | None:
    """Returns the memory of a process in bytes (on Linux), or None if it is unknown.

    Memory that processes share is divided among them.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            text = file.read()
    except OSError:
        return None
    return 1024 * int(text.partition("\nPss:")[2].split()[0])


def name_process(name: str) -> None:
    """Names this process for `ps` and `ringsim doctor`, if the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def has_proc() -> bool:
    """Returns whether this system has /proc."""
    return os.path.exists("/proc/self/stat")


def shut_connections(keep_port: int | None, keep_fd: int = -1) -> None:
    """Shuts down TCP connections to other processes on this machine (on Linux and macOS).

    Connections to the rendezvous port, and the file descriptor, stay open.
    """
    for name in os.listdir("/dev/fd"):
        # closed meanwhile, or a listening socket, which has no peer
        with contextlib.suppress(OSError):
            if int(name) == keep_fd or not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    continue
                mine, other = connection.getsockname(), connection.getpeername()
                if mine[0] == other[0] and keep_port not in (mine[1], other[1]):
                    connection.shutdown(socket.SHUT_RDWR)
