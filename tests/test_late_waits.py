"""Collectives issued by C++: their ends, and the program's waits for them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from ringsim.comm import dispatcher
from ringsim.comm.dispatcher import LateWaits
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, OP_CODES, Events
from ringsim.traces.recorder import Recorder


class Handle:
    """A stand-in for a handle, which the test completes."""

    def __init__(self) -> None:
        self.done, self.fails = threading.Event(), False

    def wait(self, limit: timedelta | None = None) -> None:
        if not self.done.wait(None if limit is None else limit.total_seconds()) or self.fails:
            raise RuntimeError("not done")


def come_true(check: Callable[[], Any]) -> None:
    """Waits until a condition is true."""
    end_s = time.monotonic() + 30
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_each_group_is_waited_for_by_itself() -> None:
    recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=lambda: 0)
    post = recorder.make_post(OP_CODES["all_reduce"])
    works, slots = [Handle() for _ in range(4)], [post(0, NONE, NONE, 0) or 0 for _ in range(4)]
    made = [torch.ones(3) for _ in range(4)]
    late = LateWaits(recorder, lambda work, *limit: work.wait(*limit), {})
    for work, slot, group, tensor in zip(works, slots, (0, 0, 1, 1), made, strict=True):
        late.add(work, slot, group, [tensor])  # type: ignore[arg-type]
    works[1].done.set()
    works[2].done.set()
    works[3].fails = True
    works[3].done.set()
    come_true(lambda: recorder.read().status.tolist() == [IN_FLIGHT, IN_FLIGHT, OK, ERROR])
    late.begin_tensor(made[1])()  # the program has waited for the second one
    before = recorder.read()
    assert before.status.tolist() == [IN_FLIGHT, OK, OK, ERROR]
    late.begin_tensor(made[2])()  # and for the third, which was already done
    works[0].done.set()
    come_true(lambda: recorder.read().status.tolist() == [OK, OK, OK, ERROR])
    late.stop()
    after = recorder.read()
    assert after.done_ns[1:3].tolist() == before.done_ns[1:3].tolist()
    assert after.wait_ns[2] == NONE
    assert after.wait_ns[3] != NONE, "it failed later, so it was not refused"


class Program:
    """A thread that calls into C++, which issues collectives, and a LateWaits that watches it.

    Attributes:
        looking: a semaphore released when a check begins that may find that the thread returned.
        look: a semaphore that lets such a check continue.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looking, self.look = looking, look = threading.Semaphore(0), threading.Semaphore(0)

        class Watched(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if timeout is None:
                    return super().get()
                looking.release()
                assert look.acquire(timeout=30)
                return super().get(block=False)

        watched = SimpleNamespace(SimpleQueue=Watched, Empty=queue.Empty)
        monkeypatch.setattr(dispatcher, "queue", watched)
        self.recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=lambda: 0)
        self.pending: dict[Any, int] = {}
        self.late = LateWaits(self.recorder, lambda work, *limit: work.wait(*limit), self.pending)
        self._post = self.recorder.make_post(OP_CODES["all_reduce"])
        self._orders: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._in_cpp(sys._getframe())
        self.late.enter_block()
        self._orders.task_done()  # it has returned
        self._orders.get()

    def _in_cpp(self, frame: FrameType) -> None:
        while (order := self._orders.get()) is not None:
            work, group = order
            self.late.add(work, self._post(0, NONE, NONE, 0) or 0, group, [], frame)
            self._orders.task_done()

    def issue(self, work: Handle, group: int = 0) -> None:
        self._orders.put((work, group))
        self._orders.join()

    def issue_in_another_thread(self, work: Handle) -> None:
        self.late.add(work, self._post(0, NONE, NONE, 0) or 0, 0)  # type: ignore[arg-type]

    def await_look(self) -> None:
        """Waits until the next check begins."""
        assert self.looking.acquire(timeout=30)

    def come_back(self) -> None:
        self._orders.put(None)
        self._orders.join()

    def end(self) -> Events:
        for _ in range(9):
            self.look.release()
        self._orders.put("end")
        self.late.stop()
        return self.recorder.read()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def done() -> Handle:
    work = Handle()
    work.done.set()
    return work


def test_the_last_collective_of_a_call_counts_as_waited_for_when_the_call_is_back(
    program: Program,
) -> None:
    first, second = done(), done()
    program.pending[first] = 0
    program.issue(first)
    program.await_look()
    program.look.release()  # it has not returned
    program.await_look()
    program.issue(second, 1)
    program.await_look()
    program.come_back()
    events = program.end()
    assert events.wait_ns[0] == NONE
    assert events.post_ns[1] <= events.wait_ns[1] <= events.done_ns[1]
    assert program.pending == {}


def test_another_thread_on_the_same_group_does_not_hide_what_a_call_waited_for(
    program: Program,
) -> None:
    """In 0.2.0 the first collective did not count as waited for."""
    program.issue(done())
    program.await_look()
    program.issue_in_another_thread(done())
    program.look.release()
    come_true(lambda: program.recorder.read().status[1] == OK)
    program.come_back()
    assert [wait != NONE for wait in program.end().wait_ns] == [True, False]


def test_what_is_under_way_at_the_end_shares_one_limit(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three groups is done when it is waited for.

    The other groups' threads end later by themselves.
    """
    works, limits, left, join = [Handle() for _ in range(3)], [], [], threading.Thread.join
    for group, work in enumerate(works):
        program.issue(work, group)
    program.come_back()

    def join_last(thread: threading.Thread, timeout: float | None = None) -> None:
        assert timeout is not None
        limits.append(timeout)
        works[0].done.set()
        join(thread, timeout)

    monkeypatch.setattr(dispatcher, "JOIN_S", 0.2)
    monkeypatch.setattr(threading.Thread, "join", join_last)
    monkeypatch.setattr(dispatcher, "leave_thread", lambda thread: left.append(thread.is_alive()))
    assert program.end().status.tolist() == [OK, IN_FLIGHT, IN_FLIGHT]
    assert (len(limits), left) == (3, [False, True, True])
    assert limits[1] + limits[2] < 1.5 * dispatcher.JOIN_S
    for work in works:
        work.done.set()
