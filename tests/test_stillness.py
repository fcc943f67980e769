"""Whether processes are at rest: real ones, that sleep, compute, are stopped, end, or have something to read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

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
Start = Callable[..., subprocess.Popen[bytes]]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that says when it is where it should be, and ends all of them."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(program: str, *arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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


def test_so_is_what_the_other_side_has_no_room_for(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = start(UNSENT, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert not ever_at_rest([sender.pid])


def test_the_thread_that_asks_does_not_count() -> None:
    def ask() -> None:
        answers.append(ever_at_rest([os.getpid()]))

    answers: list[bool] = []
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # this thread sleeps meanwhile
    assert answers == [True]
