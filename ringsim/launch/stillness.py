"""Whether processes of this machine are at rest: nothing that one of them has told another is still on its way or being dealt with.

Whatever is still waited for, nothing that was posted before will bring it then. That takes no moment at which all of them sleep, which is
hard to find: a thread of Gloo wakes every 10 ms for nothing. Each may sleep at a moment of its own::

    every connection               how many bytes it has ever sent and received
    a process after the other      all its threads sleep, at one moment; then which sockets it has
    every connection               the same numbers, and nothing that is still to send or to read

Why that is enough: between the first numbers and the last no byte moved. So a byte that a process had sent before it slept had arrived
before any of them slept, for otherwise it would have moved since, or would still wait to be sent. It woke its receiver, which slept as a
whole only after that: it had dealt with it by then. And what wakes a process that sleeps as a whole is a byte that arrives, which none did,
or a clock. So none has done anything since it slept, but for a clock's sake: it has sent nothing and opened no connection, and what it has
is what it had then. A connection that came, went or began to close in between is seen, too: the two lists are not the same.

All that holds for processes that talk by TCP, as Gloo's do. One that has been seen asleep could be woken by another that is not there yet
through a pipe, say, or memory that they share.

Source:
    The kernel's sock_diag(7): all connections with what each has still to send and to read, in a fraction of a millisecond, where reading
    /proc/net/tcp takes many; and with it its ``struct tcp_info``, whose counters of bytes are those of RFC 4898.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["at_rest"]

_SOCK_DIAG: Final = 4  # the protocol of netlink that tells of sockets
_BY_FAMILY: Final = 20  # the request
_DONE: Final = 3
_DUMP: Final = 0x301  # a request, for all there are
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBBBI48x")  # family, protocol, what more to tell, padding, states; no address
_ANSWER: Final = struct.Struct("=xBxx48s4xIIII")  # state, ends and cookie, bytes to read, bytes to send, user, inode; attributes follow
_PORTS: Final = struct.Struct(">HH")  # how the ends begin: this side's and the other's
_ATTRIBUTE: Final = struct.Struct("=HH")  # length with this, kind
_INFO: Final = 2  # the attribute that is a tcp_info
_MOVED: Final = struct.Struct("=120xQQ")  # of a tcp_info: bytes that the other side has acknowledged, bytes received
_LISTEN: Final = 10
_STATES: Final = 0xFFF & ~(1 << 6 | 1 << 7)  # all but those that hold no byte any more: TIME_WAIT and CLOSE
_LIMIT_S: Final = 1.0
_ROUNDS: Final = 10  # a thread that woke for nothing sleeps again soon, later where it has to wait for a processor


class _Connection(NamedTuple):
    """What the kernel tells of one side of a TCP connection, or of a socket that listens.

    Attributes:
        port: of this side.
        other: port of the other side; 0 where it listens.
        inode: 0 where no process has it: not accepted yet, or closed before all was sent.
        moved: its state, and what it has ever sent, as far as it has arrived, and received, in bytes.
        empty: whether nothing is still to be read here, or to arrive at the other side.
    """

    port: int
    other: int
    inode: int
    moved: tuple[int, int, int]
    empty: bool


def at_rest(pids: Sequence[int]) -> bool:
    """Tells whether processes were at rest just now.

    It does not block. The calling thread does not count, for it may be one of theirs.

    Args:
        pids: the processes, all of this machine.

    Returns:
        False where one of them runs, is stopped or has ended, where a connection holds bytes or moved some, and where the system does not
        tell (not Linux, or another network namespace). Also where a thread woke for nothing each time it was looked at: so it may miss
        that they are, but it never makes it up.

    Example:
        >>> at_rest([2**22 + 1])  # there is no such process
        False
    """
    try:
        if any(os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net") for pid in pids):
            return False
        before, awake = _connections(), list(pids)
        for _ in range(_ROUNDS):
            awake = [pid for pid in awake if not _sleeps(pid)]
            if not awake:
                break
        else:
            return False
        sockets, after = _sockets(pids), _connections()
        ports = {one.port for one in after.values() if one.inode in sockets}
        return _moved(before, ports) == _moved(after, ports) and all(one.empty for one in after.values() if _touches(one, ports))
    except (OSError, LookupError, struct.error):
        return False


def _sleeps(pid: int) -> bool:
    """Tells whether all threads of a process sleep at one moment, but for the one that asks.

    Each is looked at twice, and which there are in between: those that have not run from one look to the other slept then.
    """
    threads, before = _threads(pid), []
    for thread in threads:
        switches = _switches(thread)
        if not switches:
            return False
        before.append(switches)
    return _threads(pid) == threads and all(_switches(thread) == switches for thread, switches in zip(threads, before, strict=True))


def _threads(pid: int) -> list[str]:
    """Returns where the system tells of each thread of a process, but for the one that asks."""
    mine = str(threading.get_native_id())
    return [f"/proc/{pid}/task/{number}/status" for number in os.listdir(f"/proc/{pid}/task") if number != mine]


def _switches(thread: str) -> bytes:
    """Returns how many times a thread has been taken off its processor, in the system's words; nothing where it does not sleep."""
    with open(thread, "rb", buffering=0) as file:
        said = file.read()
    return said.partition(b"\nvoluntary_ctxt_switches:")[2] if b"\nState:\tS" in said else b""


def _sockets(pids: Sequence[int]) -> set[int]:
    """Returns the inodes of all sockets of some processes."""
    found = set()
    for link in [f"/proc/{pid}/fd/{number}" for pid in pids for number in os.listdir(f"/proc/{pid}/fd")]:
        with contextlib.suppress(FileNotFoundError):  # closed by now: in the process that asks, what lists them
            name = os.readlink(link)
            if name.startswith("socket:["):
                found.add(int(name[len("socket:[") : -1]))
    return found


def _touches(one: _Connection, ports: set[int]) -> bool:
    """Tells whether either side of a connection is at one of some ports: the other side may be nobody's any more, or not yet."""
    return one.port in ports or one.other in ports


def _moved(connections: dict[bytes, _Connection], ports: set[int]) -> dict[bytes, tuple[int, int, int]]:
    return {ends: one.moved for ends, one in connections.items() if _touches(one, ports)}


def _connections() -> dict[bytes, _Connection]:
    """Returns all TCP connections of this network namespace by what tells them apart.

    Raises:
        OSError: the kernel does not tell.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        return {ends: one for family in (socket.AF_INET, socket.AF_INET6) for ends, one in _ask(kernel, family)}


def _ask(kernel: socket.socket, family: int) -> Iterator[tuple[bytes, _Connection]]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _STATES)
    kernel.send(_HEADER.pack(_HEADER.size + _REQUEST.size, _BY_FAMILY, _DUMP, 0, 0) + request)
    while True:
        answer, at = kernel.recv(1 << 16), 0
        while at < len(answer):
            length, kind, *_ = _HEADER.unpack_from(answer, at)
            if kind == _DONE:
                return
            if kind != _BY_FAMILY:
                raise OSError(f"the kernel must tell of its connections, got message {kind} of netlink")
            state, ends, unread, unsent, _, inode = _ANSWER.unpack_from(answer, at + _HEADER.size)
            moved = _MOVED.unpack_from(answer, _find_info(answer, at + _HEADER.size + _ANSWER.size, at + length))
            # Of a socket that listens, the two are how many connections wait to be accepted, and how many may.
            port, other = _PORTS.unpack_from(ends)
            yield ends, _Connection(port, other, inode, (state, *moved), state == _LISTEN or unread == unsent == 0)
            at += _aligned(length)


def _find_info(answer: bytes, at: int, end: int) -> int:
    """Returns where the tcp_info begins among the attributes of a connection."""
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _INFO and length >= _ATTRIBUTE.size + _MOVED.size:
            return at + _ATTRIBUTE.size
        at += _aligned(length)
    raise OSError("the kernel must tell how many bytes have moved, got no tcp_info")


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
