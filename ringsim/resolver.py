"""Keeps torch's store client from asking a name server who it talks to.

The client looks up the name of the address it connects to, only to write it into its log. For loopback too the question goes out to the
network's name server: many ranks that start at once ask at once, and where such a burst is dropped, each rank waits five seconds for its
second try. Here the thread that connects is given a name server of its own, a socket in this process, which says at once that there is no
such name. Linux with glibc only; elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ringsim.comm.rendezvous import BackgroundCall

__all__ = ["without_name_server"]

_NO_SUCH_NAME = b"\x81\x83"  # the second word of a DNS answer: an answer, recursion available, NXDOMAIN
_LONGEST_QUESTION = 512  # bytes of a DNS question over UDP


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, of which every thread has one."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
        ("family", ctypes.c_ushort),  # the first of three struct sockaddr_in
        ("port", ctypes.c_ubyte * 2),
        ("address", ctypes.c_ubyte * 4),
    )


@contextmanager
def without_name_server() -> Iterator[None]:
    """Answers every name look-up of the calling thread at once with "no such name"; names in the hosts file are still found.

    Any rank calls it, in a thread that is given up afterwards; it does not block. Other threads are not concerned.

    Example:
        >>> with without_name_server():
        ...     socket.getnameinfo(("127.0.0.1", 80), socket.NI_NUMERICSERV)[1]
        '80'
    """
    state = _state_of_thread()
    if state is None:
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        kept = bytes(state)
        state.retry = 1  # a state that differs from the file is not read from the file again
        state.nscount = 1
        state.family = socket.AF_INET
        state.port[:] = server.getsockname()[1].to_bytes(2, "big")
        state.address[:] = socket.inet_aton("127.0.0.1")
        answering = BackgroundCall(lambda: _answer(server))
        try:
            yield
        finally:
            server.sendto(b"", server.getsockname())
            answering.result(limit_s=1.0)
            ctypes.memmove(ctypes.addressof(state), kept, len(kept))


def _answer(server: socket.socket) -> None:
    """Answers questions until an empty one comes."""
    while True:
        question, asker = server.recvfrom(_LONGEST_QUESTION)
        if not question:
            return
        server.sendto(question[:2] + _NO_SUCH_NAME + question[4:], asker)


def _state_of_thread() -> _ResolverState | None:
    """Returns this thread's resolver state, None where the C library is not glibc."""
    library = ctypes.CDLL(None)
    try:
        initialise, find = library.__res_init, library.__res_state
    except AttributeError:
        return None
    find.restype = ctypes.POINTER(_ResolverState)
    if initialise() != 0:
        return None
    state: _ResolverState = find().contents
    return state
