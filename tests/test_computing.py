"""``ringsim.compute`` on a clock that the test holds, and on the machine's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringsim import compute
from ringsim.compute_costs import read_label, stretched
from ringsim.errors import ArgumentError
from ringsim.state import change_state
from ringsim.traces.recorder import Recorder


class _Clock:
    def __init__(self) -> None:
        self.passed: list[float] = []

    def now_s(self) -> float:
        return sum(self.passed)

    def advance(self, seconds: float) -> None:
        self.passed.append(seconds)

    def work(self, seconds: float) -> None:
        self.passed.append(seconds)


@pytest.fixture
def clock() -> Iterator[_Clock]:
    made = _Clock()
    change_state(clock=made)
    yield made
    change_state(clock=None, slowdown=1.0, sleep_s=0.0, around_s=0.0, jitter=None)


@pytest.mark.parametrize(
    ("state", "seconds", "passed"),
    [
        ({}, [3600, 0.25], [3600, 0.25]),  # nobody sleeps
        ({"slowdown": 2.5}, [2], [5.0]),
        # drawn anew for each
        ({"slowdown": 2, "jitter": iter([0.5, 1.5]).__next__}, [1, 1], [1.0, 3.0]),
        # a real rank oversleeps
        ({"slowdown": 2, "sleep_s": 0.125, "around_s": 0.5}, [1, 0], [2.125, 0.5, 0.125, 0.5]),
    ],
)
def test_virtual_clock_goes_on(
    clock: _Clock, state: dict[str, Any], seconds: list[float], passed: list[float]
) -> None:
    change_state(**state)
    for each in seconds:
        compute(each)
    assert clock.passed == passed


def test_real_rank_sleeps_at_least_that_long() -> None:
    begin_s = time.monotonic()
    compute(0.02)
    assert time.monotonic() - begin_s >= 0.02


@pytest.mark.parametrize("seconds", [0.005, 1e-7, 12, 3.0000000000000004])
def test_label_tells_the_seconds(clock: _Clock, tmp_path: Path, seconds: float) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    change_state(recorder=recorder)
    compute(seconds)
    change_state(recorder=None)
    recorder.close()
    assert read_label(recorder.labels[0]) == seconds


def test_label_of_another_span_tells_nothing() -> None:
    others = [
        "compute",
        "compute s",
        "compute fast s",
        "compute -1 s",
        "compute nan s",
        "compute inf s",
        "forward",
        "",
    ]
    assert [read_label(label) for label in others] == [None] * len(others)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True, None])
def test_seconds_that_are_none(seconds: object) -> None:
    with pytest.raises(ArgumentError, match=r"seconds must be a number from 0, got .*Give seconds"):
        compute(seconds)  # type: ignore[arg-type]


def test_what_a_slow_rank_computes_is_stretched_and_its_sleeps_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], []
    change_state(slowdown=4.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with stretched():
        now[0] += 2.0  # it computes
        compute(1.0)  # which sleeps four times as long by itself
    assert slept == [4.0, 6.0]
    assert now[0] == 4 * (2.0 + 1.0)


def test_what_nothing_slows_is_not_stretched(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody asked for it"))
    for slowdown in (1.0, 3.0):  # a simulated rank is charged instead
        change_state(slowdown=slowdown)
        with stretched():
            pass
    assert clock.passed == []
