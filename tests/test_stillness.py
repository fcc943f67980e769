"""Whether processes are at rest: real ones, that sleep, compute, are stopped, end, or have something to read."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ringsim.launch import stillness
from ringsim.launch.stillness import at_rest

ASLEEP = "import sys; print(flush=True); sys.stdin.read()"
AT_WORK = "print(flush=True)\nwhile True: pass"
WITH_A_BUSY_THREAD = """
import threading
def work():
    while True: pass
threading.Thread(target=work, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
UNREAD = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
sys.stdin.read()
"""
UNSENT = UNREAD.replace(
    "print(", "connection.setblocking(False)\ntry:\n    while True: connection.send(bytes(1 << 16))\nexcept OSError: pass\nprint(", 1
)
WAKES_FOR_NOTHING = """
import select, threading
def loop():
    with select.epoll() as events:
        while True: events.poll(0.001)
for _ in range(3): threading.Thread(target=loop, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
PASSES_A_BYTE_ON = """
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
print(flush=True)
while connection.recv(1):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # nothing tells that the byte is still in here
    end = time.monotonic() + 0.0003
    while time.monotonic() < end: pass
    connection.send(b"1")
"""
PASSES_A_TURN_ON = """
import threading, time
def work(mine, others):
    while mine.acquire():
        end = time.monotonic() + 0.0003
        while time.monotonic() < end: pass
        others.release()
turns = threading.Semaphore(1), threading.Semaphore(0)
for pair in turns, turns[::-1]: threading.Thread(target=work, args=pair, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
Start = Callable[..., subprocess.Popen[bytes]]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that says when it is where it should be, and ends all of them."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(program: str, *arguments: object, keeps: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=keeps)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def ever_at_rest(pids: list[int]) -> bool:
    """Looks until they are at rest, 200 times at most."""
    for _ in range(200):
        if at_rest(pids):
            return True
        time.sleep(0.001)
    return False


def test_processes_that_sleep_are_at_rest(start: Start) -> None:
    assert ever_at_rest([start(ASLEEP).pid, start(ASLEEP).pid])


@pytest.mark.parametrize("program", [AT_WORK, WITH_A_BUSY_THREAD])
def test_one_that_computes_is_not(start: Start, program: str) -> None:
    asleep, busy = start(ASLEEP).pid, start(program).pid
    assert not ever_at_rest([asleep, busy])
    assert ever_at_rest([asleep])


def test_one_that_is_stopped_or_has_ended_is_not(start: Start) -> None:
    process = start(ASLEEP)
    os.kill(process.pid, signal.SIGSTOP)
    assert not ever_at_rest([process.pid])
    os.kill(process.pid, signal.SIGCONT)
    assert ever_at_rest([process.pid])
    process.communicate()
    assert not at_rest([process.pid])


def test_a_byte_that_nobody_has_read_is_on_its_way(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = start(UNREAD, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert ever_at_rest([reader.pid])
            connection.send(b"1")
            assert not ever_at_rest([reader.pid])


def test_so_is_one_that_another_process_has_not_sent_off_yet(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = start(UNREAD, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert ever_at_rest([reader.pid])
            for _ in range(20):
                connection.send(b"1", socket.MSG_MORE)
                assert not at_rest([reader.pid])


def test_so_is_what_the_other_side_has_no_room_for(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = start(UNSENT, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert not ever_at_rest([sender.pid])


def test_so_is_what_came_to_somebody_who_has_not_accepted_it(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = start(ASLEEP, keeps=[server.fileno()]).pid
        port = server.getsockname()[1]
    assert ever_at_rest([pid])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.send(b"1")
        assert not ever_at_rest([pid])


def test_processes_that_wake_every_millisecond_for_nothing_are_at_rest(start: Start) -> None:
    assert ever_at_rest([start(WAKES_FOR_NOTHING).pid for _ in range(8)])


def test_a_byte_that_went_from_one_to_the_other_meanwhile_was_on_its_way(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        pids = [start(PASSES_A_BYTE_ON, side.fileno(), keeps=[side.fileno()]).pid for side in (one, other)]
        one.send(b"1")
    assert not ever_at_rest(pids)


@pytest.mark.parametrize("moves", [False, True])
def test_so_was_one_that_has_been_read_since(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()

    def sleeps(_pid: int) -> bool:
        if moves:
            one.send(b"1")
            other.recv(1)
            other.send(b"1")  # acknowledges
            one.recv(1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return True

    monkeypatch.setattr(stillness, "_sleeps", sleeps)
    with one, other:
        assert at_rest([os.getpid()]) is not moves


def test_threads_that_each_sleep_every_other_moment_are_not_at_rest(start: Start) -> None:
    assert not ever_at_rest([start(PASSES_A_TURN_ON).pid])


def test_nor_is_a_process_in_which_a_thread_began_after_the_first_look(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, looks = stillness._threads, itertools.cycle([1, None])
    monkeypatch.setattr(stillness, "_threads", lambda pid: threads(pid)[: next(looks)])
    assert not ever_at_rest([start(WITH_A_BUSY_THREAD).pid])


def test_the_thread_that_asks_does_not_count() -> None:
    def ask() -> None:
        answers.append(ever_at_rest([os.getpid()]))

    answers: list[bool] = []
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # this thread sleeps meanwhile
    assert answers == [True]
