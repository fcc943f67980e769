"""The warnings and errors for programs that poll ``is_completed()`` of a Gloo message."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from ringsim.comm import polling
from ringsim.traces.sites import CallSites


class Refused(Exception):
    pass


class Message:
    """A handle like Gloo's.

    The test ends with ``ended`` after a number of calls, so that it cannot run forever.
    """

    asked = 0

    def is_completed(self) -> bool:
        Message.asked += 1
        return Message.asked > 1000


def passes(work: Any) -> None:
    while not work.is_completed():
        pass


def sleeps(work: Any) -> None:
    while not work.is_completed():
        time.sleep(0.0001)


def asks_all(work: Any) -> None:
    works = [work, work]
    while not all(each.is_completed() for each in works):
        pass


def gives_up(work: Any) -> None:
    for _ in range(100):
        if work.is_completed():
            break


def counts(work: Any) -> None:
    tries = 0
    while not work.is_completed():
        tries += 1
        print("not yet", end="")


def does_something_else(work: Any) -> None:
    tries: list[int] = []
    while not work.is_completed():
        tries.append(1)


def asks_once(work: Any) -> None:
    work.is_completed()


@pytest.mark.parametrize(
    ("program", "changed", "told"),
    [
        (passes, {}, "refused"),
        (passes, {"threads": 2}, "warned"),  # another thread may wait for it
        (passes, {"threads": 2, "_THREADS_S": 0.0}, "refused"),  # but has not done so for a while
        (passes, {"alarm": 60.0}, "warned"),
        (sleeps, {}, "refused"),
        (asks_all, {}, "refused"),
        (counts, {}, "refused"),
        (gives_up, {}, "warned"),
        (does_something_else, {}, "warned"),
        (asks_once, {}, ""),
    ],
)
def test_a_loop_that_nothing_else_ends_is_refused_and_others_are_warned(
    program: Callable[[Any], None],
    changed: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(rule: str, todo: str) -> NoReturn:
        raise Refused(f"{rule}. {todo}.")

    work = Message()
    Message.asked = 0
    monkeypatch.setattr(polling, "Work", Message)
    monkeypatch.setattr(polling, "is_message", lambda _: True)
    monkeypatch.setattr(polling, "_WARN_S", 0.0)
    monkeypatch.setattr(polling, "_THREADS_S", changed.get("_THREADS_S", 60.0))
    monkeypatch.setattr(signal, "getitimer", lambda _: (changed.get("alarm", 0.0), 0.0))
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(
        threading, "enumerate", lambda: [threading.main_thread()] * changed.get("threads", 1)
    )
    finished: list[Any] = []
    hook = polling.make_is_completed(CallSites(lambda _: 0), [work], finished.append, refuse)  # type: ignore[list-item]
    monkeypatch.setattr(Message, "is_completed", hook)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        if told == "refused":
            with pytest.raises(Refused, match=r"so this loop never ends. Call wait\(\)"):
                program(work)
            assert Message.asked <= 3
        else:
            program(work)
    assert (work in finished) is (Message.asked > 1000)
    assert len(said) == (told == "warned")  # once per line
    for one in said:
        assert (one.filename, one.lineno) == (
            __file__,
            program.__code__.co_firstlineno + 2 - (program in (passes, sleeps)),
        )
