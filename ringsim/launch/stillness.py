"""Whether processes of this machine are all at rest: each of their threads sleeps, and none of their connections holds a byte.

What one of them had to tell another has then been heard: whatever is still waited for, nothing that was posted before will bring it. Each
thread is looked at twice, with the connections in between::

    threads  a b c d                       d c b a       d being the one that wakes most often: Gloo's do every 10 ms, for nothing
                      every connection
                      ^ who slept before and after and has not run in between slept here, all at one moment

Source:
    The kernel's sock_diag(7): all connections with what each has still to send and to read, in a fraction of a millisecond, where reading
    /proc/net/tcp takes many.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["at_rest"]

_SOCK_DIAG: Final = 4  # the protocol of netlink that tells of sockets
_BY_FAMILY: Final = 20  # the request
_DONE: Final = 3
_DUMP: Final = 0x301  # a request, for all there are
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBBBI48x")  # family, protocol, what more to tell, padding, states; no address
_QUEUES: Final = struct.Struct("=56xIIII")  # of the answer: bytes to read, bytes to send, user, inode
_CONNECTED: Final = 0xFFF & ~(1 << 6 | 1 << 7 | 1 << 10)  # all states but those that hold none: TIME_WAIT, CLOSE and LISTEN
_LIMIT_S: Final = 1.0
_ASLEEP_NOT: Final = -1


def at_rest(pids: Sequence[int]) -> bool:
    """Tells whether there was a moment just now at which processes were at rest.

    It does not block. The calling thread does not count, for it may be one of theirs.

    Args:
        pids: the processes, all of this machine.

    Returns:
        False where one of them runs, is stopped or has ended, where a connection holds bytes, and where the system does not tell (not
        Linux, or another network namespace). Also where a thread woke for nothing just then: so it may miss a moment, of many processes
        most of the time, but it never makes one up.

    Example:
        >>> at_rest([2**22 + 1])  # there is no such process
        False
    """
    try:
        if any(os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net") for pid in pids):
            return False
        sockets, threads = _sockets(pids), sorted(_threads(pids), key=_switches)
        before = [_switches(thread) for thread in threads]
        if _ASLEEP_NOT in before or _threads(pids) != set(threads) or not _all_empty(sockets):
            return False
        after = [_switches(thread) for thread in reversed(threads)]
        return after[::-1] == before and _sockets(pids) == sockets
    except (OSError, LookupError, struct.error):
        return False


def _threads(pids: Sequence[int]) -> set[str]:
    """Returns where the system tells of each thread of some processes, but for the one that asks."""
    mine = str(threading.get_native_id())
    return {f"/proc/{pid}/task/{number}/status" for pid in pids for number in os.listdir(f"/proc/{pid}/task") if number != mine}


def _switches(thread: str) -> int:
    """Returns how many times a thread has been taken off its processor, ``_ASLEEP_NOT`` where it does not sleep."""
    with open(thread, "rb") as file:
        said = dict(line.split(b":", 1) for line in file)
    if not said[b"State"].lstrip().startswith(b"S"):
        return _ASLEEP_NOT
    return int(said[b"voluntary_ctxt_switches"]) + int(said[b"nonvoluntary_ctxt_switches"])


def _sockets(pids: Sequence[int]) -> set[int]:
    """Returns the inodes of all sockets of some processes."""
    found = set()
    for link in [f"/proc/{pid}/fd/{number}" for pid in pids for number in os.listdir(f"/proc/{pid}/fd")]:
        with contextlib.suppress(FileNotFoundError):  # closed by now: in the process that asks, what lists them
            name = os.readlink(link)
            if name.startswith("socket:["):
                found.add(int(name[len("socket:[") : -1]))
    return found


def _all_empty(sockets: set[int]) -> bool:
    """Tells whether no TCP connection of some sockets holds a byte that is not read here, or has not come to the other side."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        return all(
            (unread, unsent) == (0, 0)
            for family in (socket.AF_INET, socket.AF_INET6)
            for unread, unsent, inode in _queues(kernel, family)
            if inode in sockets
        )


def _queues(kernel: socket.socket, family: int) -> Iterator[tuple[int, int, int]]:
    """Yields of each TCP connection the bytes to read and to send, and its inode.

    Raises:
        OSError: the kernel does not tell.
    """
    kernel.send(
        _HEADER.pack(_HEADER.size + _REQUEST.size, _BY_FAMILY, _DUMP, 0, 0) + _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _CONNECTED)
    )
    while True:
        answer, at = kernel.recv(1 << 16), 0
        while at < len(answer):
            length, kind, *_ = _HEADER.unpack_from(answer, at)
            if kind == _DONE:
                return
            if kind != _BY_FAMILY:
                raise OSError(f"the kernel must tell of its connections, got message {kind} of netlink")
            unread, unsent, _, inode = _QUEUES.unpack_from(answer, at + _HEADER.size)
            yield unread, unsent, inode
            at += -(-length // 4) * 4
