"""A thread's name look-ups are answered at once, whatever the network's name server does."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from contextlib import suppress

import pytest

from ringsim import resolver
from ringsim.comm.rendezvous import BackgroundCall
from ringsim.resolver import without_name_server

pytestmark = pytest.mark.skipif(sys.platform != "linux" or resolver._state_of_thread() is None, reason="glibc only")
NAMELESS = "192.0.2.7"  # for documentation: no hosts file has it


def look_up_s() -> float:
    """Asks for the name of an address; returns how long the answer took."""
    begin = time.monotonic()
    with suppress(socket.gaierror):  # what a silent name server comes to in the end
        assert socket.getnameinfo((NAMELESS, 0), socket.NI_NUMERICSERV)[0] == NAMELESS
    return time.monotonic() - begin


def beside_a_silent_name_server(shielded: bool) -> float:
    """Makes a silent socket this thread's name server, and asks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        state = resolver._state_of_thread()
        assert state is not None
        state.retrans, state.retry, state.nscount, state.family = 1, 1, 1, socket.AF_INET
        state.port[:] = silent.getsockname()[1].to_bytes(2, "big")
        state.address[:] = socket.inet_aton("127.0.0.1")
        if not shielded:
            return look_up_s()
        with without_name_server():
            return look_up_s()


def test_a_silent_name_server_is_not_waited_for() -> None:
    waited_s = BackgroundCall(lambda: beside_a_silent_name_server(shielded=False)).result(30)
    assert waited_s > 0.9, "the silent server was not asked: this test shows nothing"
    assert BackgroundCall(lambda: beside_a_silent_name_server(shielded=True)).result(30) < waited_s / 2


def test_the_threads_own_name_servers_come_back() -> None:
    def servers() -> list[list[object]]:
        state = resolver._state_of_thread()
        assert state is not None

        def look() -> list[object]:
            return [state.retrans, state.retry, state.options, state.nscount, state.family, bytes(state.port), bytes(state.address)]

        before = look()
        with without_name_server():
            within = look()
        return [before, within, look()]

    before, within, after = BackgroundCall(servers).result(30)
    assert before == after != within


def test_other_threads_are_not_concerned() -> None:
    here = resolver._state_of_thread()
    assert here is not None
    before = bytes(here)

    def elsewhere() -> bytes:
        with without_name_server():
            return bytes(here)

    assert BackgroundCall(elsewhere).result(30) == before


def test_nothing_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have left must not go away in between
    before = descriptors()
    for _ in range(20):
        with without_name_server():
            look_up_s()
    assert descriptors() == before


def test_elsewhere_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver.ctypes, "CDLL", lambda _: object())
    with without_name_server():
        pass
