"""Collectives issued by C++: their ends, and the program's waits for them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
        # the outcome of its first waits, with limits, and whether another wait followed
        self.tries: list[Callable[[], None]] = []
        self.tried = threading.Event()

    def wait(self, limit: timedelta | None = None) -> None:
        if self.tries:
            self.tries.pop(0)()
            limit = timedelta(0)
        else:
            self.tried.set()
        if not self.done.wait(None if limit is None else limit.total_seconds()) or self.fails:
            raise RuntimeError("not done")


def ends(recorder: Recorder, which: list[int]) -> list[int]:
    """Returns the status of all records, once some are final."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        status = recorder.read().status.tolist()
        if all(status[place] != IN_FLIGHT for place in which):
            return status
        time.sleep(0.001)
    raise TimeoutError(f"in flight: {status}")


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
    assert ends(recorder, [2, 3]) == [IN_FLIGHT, IN_FLIGHT, OK, ERROR]
    with late.wait_for_tensor(made[1]):
        pass  # the program has waited for the second one
    before = recorder.read()
    assert before.status.tolist() == [IN_FLIGHT, OK, OK, ERROR]
    with late.wait_for_tensor(made[2]):
        pass  # and for the third, which was already done
    works[0].done.set()
    assert ends(recorder, [0]) == [OK, OK, OK, ERROR]
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
        tells: whether the thread enters a block after it returns.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tells = True
        self.looking, self.look = looking, look = threading.Semaphore(0), threading.Semaphore(0)

        class Watched(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if timeout is None:
                    return super().get()
                looking.release()
                assert look.acquire(timeout=30)
                return super().get(block=False)

        monkeypatch.setattr(
            dispatcher, "queue", SimpleNamespace(SimpleQueue=Watched, Empty=queue.Empty)
        )
        self.recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=lambda: 0)
        self.pending: dict[Any, int] = {}
        self.late = LateWaits(self.recorder, lambda work, *limit: work.wait(*limit), self.pending)
        self._post = self.recorder.make_post(OP_CODES["all_reduce"])
        self._orders: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        order = "call"
        while order == "call":
            self._in_cpp(sys._getframe())
            if self.tells:
                self.late.enter_block()
            self._orders.task_done()  # it has returned
            order = self._orders.get()
            self._orders.task_done()

    def _in_cpp(self, frame: FrameType) -> None:
        while (order := self._orders.get()) != "return":
            work, group, made, nested = order
            place = sys._getframe() if nested else frame
            self.late.add(work, self._post(0, NONE, NONE, 0) or 0, group, made, place)
            self._orders.task_done()

    def issue(
        self,
        work: Handle,
        group: int = 0,
        made: Sequence[torch.Tensor] = (),
        nested: bool = False,
    ) -> None:
        self._orders.put((work, group, made, nested))
        self._orders.join()

    def issue_in_another_thread(self, work: Handle) -> None:
        self.late.add(work, self._post(0, NONE, NONE, 0) or 0, 0)  # type: ignore[arg-type]

    def come_back(self) -> None:
        self._orders.put("return")
        self._orders.join()

    def call_again(self) -> None:
        self._orders.put("call")

    def look_again(self) -> None:
        """Lets the current check end, and the next one begin."""
        self.look.release()
        assert self.looking.acquire(timeout=30)

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
    assert program.looking.acquire(timeout=30)
    program.look_again()  # it has not returned
    program.issue(second, 1)
    assert program.looking.acquire(timeout=30)
    program.come_back()
    events = program.end()
    assert events.wait_ns[0] == NONE
    assert events.post_ns[1] <= events.wait_ns[1] <= events.done_ns[1]
    assert program.pending == {}


def test_a_call_is_back_also_if_no_block_tells(program: Program) -> None:
    program.tells = False
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.come_back()
    assert program.end().wait_ns[0] != NONE


def test_a_function_in_python_that_cpp_calls_may_issue_the_next(program: Program) -> None:
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.issue(done(), nested=True)
    program.look.release()
    come_true(lambda: program.recorder.read().status[1] == OK)
    program.come_back()
    assert program.end().wait_ns[0] == NONE


def test_another_thread_on_the_same_group_does_not_hide_what_a_call_waited_for(
    program: Program,
) -> None:
    """In 0.2.0 the first collective did not count as waited for."""
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.issue_in_another_thread(done())
    program.look.release()
    come_true(lambda: program.recorder.read().status[1] == OK)
    program.come_back()
    assert [wait != NONE for wait in program.end().wait_ns] == [True, False]


def test_a_call_that_comes_again_from_the_same_place_is_another(program: Program) -> None:
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.come_back()
    second = Handle()
    program.call_again()
    program.issue(second, 1)
    program.look.release()
    come_true(lambda: program.recorder.read().wait_ns[0] != NONE)
    second.done.set()
    assert program.looking.acquire(timeout=30)
    program.come_back()
    assert (program.end().wait_ns != NONE).all()


def test_a_long_wait_is_noted_while_it_lasts(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "NOTICED_S", 0.01)
    work = Handle()
    work.fails = True
    program.issue(work)
    come_true(lambda: program.recorder.read().wait_ns[0] != NONE)
    noted = program.recorder.read()
    assert noted.status.tolist() == [IN_FLIGHT]
    work.done.set()
    come_true(lambda: program.recorder.read().status[0] == ERROR)
    program.come_back()
    assert program.end().wait_ns.tolist() == noted.wait_ns.tolist()


@pytest.mark.parametrize("back_when", ["it is done", "it is not done"])
def test_who_is_back_at_the_second_look_has_waited_for_what_is_done(
    back_when: str, program: Program
) -> None:
    work = Handle()

    def second() -> None:
        program.come_back()
        if back_when == "it is done":
            work.done.set()

    issued = threading.Event()
    work.tries = [lambda: issued.wait(30) and None, second]
    program.issue(work)
    issued.set()
    if back_when == "it is done":
        assert program.looking.acquire(timeout=30)
    else:
        assert work.tried.wait(30)
        work.done.set()
    come_true(lambda: program.recorder.read().status[0] == OK)
    assert (program.end().wait_ns[0] == NONE) == (back_when == "it is not done")


def come_true(check: Callable[[], Any]) -> None:
    """Waits until a condition is true."""
    end_s = time.monotonic() + 30
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_the_place_of_a_tensor_is_that_of_the_latest_collective_on_it(program: Program) -> None:
    made, first, second = torch.ones(3), Handle(), Handle()
    program.issue(first, 0, [made])
    program.issue(second, 1, [made])
    program.come_back()
    first.done.set()
    come_true(lambda: program.recorder.read().status[0] == OK)
    with program.late.wait_for_tensor(made):
        pass
    assert program.recorder.read().status.tolist() == [OK, OK]
    second.done.set()
    program.end()


def test_a_wait_that_begins_while_the_end_comes_is_not_after_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, wait = Handle(), program.recorder.wait
    program.issue(work)
    program.come_back()

    def wait_too_late(slot: int) -> None:
        work.done.set()
        come_true(lambda: program.recorder.read().status[0] == OK)
        wait(slot)

    monkeypatch.setattr(program.recorder, "wait", wait_too_late)
    with program.late.wait_for((0,)):
        pass
    first = program.recorder.read()
    assert first.wait_ns[0] <= first.done_ns[0]
    with program.late.wait_for((0,)):
        pass  # finished collectives are not waited for again
    assert program.end().wait_ns.tolist() == first.wait_ns.tolist()


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

    def leave(thread: threading.Thread, limit_s: float) -> None:
        thread.join(limit_s)
        left.append(thread.is_alive())

    monkeypatch.setattr(dispatcher, "leave_thread", leave)
    assert program.end().status.tolist() == [OK, IN_FLIGHT, IN_FLIGHT]
    assert (len(limits), left) == (3, [False, True, True])
    assert limits[1] + limits[2] < 1.5 * dispatcher.JOIN_S
    for work in works:
        work.done.set()
