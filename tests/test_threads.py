"""A rank's report on its threads.

It has the threads that only another one can wake, and the user's lines at which they wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from processes import read, until

from ringsim.launch.threads import list_threads

LONG_S = 600  # longer than any test


def held(lock: Any) -> Any:
    """Returns a lock that is never released."""
    lock.acquire()
    return lock


def recv_from(here: socket.socket, _there: socket.socket) -> bytes:
    return here.recv(1)


async def serve() -> None:
    await (await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)).serve_forever()


# whether only another thread of the process can end it
WAITS: dict[str, tuple[bool, Callable[[], object]]] = {
    "a lock": (True, lambda: held(threading.Lock()).acquire()),
    "a lock, for a while": (False, lambda: held(threading.Lock()).acquire(timeout=LONG_S)),
    "a queue": (True, lambda: queue.Queue().get()),
    "another thread, in asyncio": (
        True,
        lambda: asyncio.run(asyncio.to_thread(held(threading.Lock()).acquire)),
    ),
    "time, in asyncio": (False, lambda: asyncio.run(asyncio.sleep(LONG_S))),
    "anybody, in asyncio": (False, lambda: asyncio.run(serve())),
    "a socket of this process": (True, lambda: recv_from(*socket.socketpair())),
    "a socket for anybody": (False, lambda: socket.create_server(("127.0.0.1", 0)).accept()),
    "a pipe": (False, lambda: os.read(os.pipe()[0], 1)),
    "a lock of several processes": (False, lambda: held(get_context("fork").Lock()).acquire()),
    "time": (False, lambda: time.sleep(LONG_S)),
    "an event, for a while": (True, lambda: threading.Event().wait(LONG_S)),
}
TIMED = "an event, for a while"  # like threads for background work


def look_at(thread: threading.Thread) -> tuple[bool, bool, list[int]]:
    """Returns whether a sleeping thread counts as idle, and as timed.

    Also returns the lines of this file at which threads wait.
    """
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    assert until(
        lambda: read(Path(f"/proc/self/task/{number}/stat")).rpartition(")")[2].split()[0] == "S",
        40,
    )
    said = list_threads()
    places = said.idle.values()
    return (
        thread.ident not in said.busy,
        thread.ident in said.timed,
        [place[1] for place in places if place and place[0] == __file__],
    )


def report() -> None:
    """Prints the idle threads, in its own process without other threads and children."""
    said: dict[str, object] = {}
    for name, (expected, wait) in WAITS.items():
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        # called immediately
        until(lambda: look_at(thread)[:2] == (expected, name == TIMED))  # noqa: B023
        said[name] = look_at(thread)
    main = threading.main_thread()
    limits = [("first", None, 0), ("limited", LONG_S, 0), ("alarmed", None, LONG_S)]
    for name, limit_s, alarm_s in limits:
        signal.alarm(alarm_s)
        # it ends first
        asker = threading.Thread(target=lambda: said.update({name: look_at(main)[0]}))  # noqa: B023
        asker.start()
        asker.join(limit_s)
    timer = threading.Timer(LONG_S, print)
    timer.start()
    said["timer"] = look_at(timer)[0]
    print(json.dumps(said), flush=True)


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("wait", WAITS)
def test_a_thread_is_idle_if_only_another_of_its_process_can_wake_it(
    wait: str, said: dict[str, Any]
) -> None:
    expected, begin = WAITS[wait]
    idle, timed, lines = said[wait]
    assert (idle, timed) == (expected, wait == TIMED)
    place = recv_from if "recv_from" in begin.__code__.co_names else begin
    assert (place.__code__.co_firstlineno + (place is recv_from) in lines) is idle


def test_a_limit_of_the_first_thread_an_alarm_and_a_timer_are_the_programs_own(
    said: dict[str, Any],
) -> None:
    found = [said[name] for name in ("first", "limited", "alarmed", "timer")]
    assert found == [True, False, False, False]


if __name__ == "__main__":
    try:
        report()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # no code waits for the threads, and nothing wakes them
    os._exit(0)
