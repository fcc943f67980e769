"""Asking a check for its verdict, on simulated ranks or real ones, and what holds for every verdict."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ringsim
from ringsim import comm
from ringsim.check import CheckResult, examination
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
ENOUGH_S = 15.0  # what a check promises


@pytest.fixture
def on_the_clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Answers run on simulated ranks: what a check judges, the trace, is the same. Their module calls ``torch.distributed`` ``dist``."""

    def run(job: Any, kind: Any, options: Any) -> Trace:
        function, args, kwargs = pickle.loads(job.call)
        return simulate(function, world_size=kind.world_size, args=args, kwargs=kwargs, link=LINK)

    monkeypatch.setattr(examination, "run", run)
    if hasattr(request.module, "dist"):
        monkeypatch.setattr(request.module, "dist", comm)


def verdict(examine: Callable[..., CheckResult], answer: Any, seed: int | None = 1) -> CheckResult:
    start = time.monotonic()
    result = examine(answer, seed=seed)
    assert time.monotonic() - start < ENOUGH_S
    assert bool(result) is result.passed
    assert result.reason.endswith(".")
    assert "\n" not in result.reason
    assert bool(result.hint) is not result.passed
    assert json.loads(json.dumps(result.as_dict()))["passed"] is result.passed
    assert result.reason in repr(result)
    assert str(result.seed) in repr(result)
    return result


def never_ends(*_: Any) -> None:
    while True:
        time.sleep(0.1)


def each_wrong(table: dict[Callable[..., Any], list[tuple[Any, ...]]]) -> Iterator[tuple[Any, ...]]:
    """Yields a check, an answer to it, words of the reason and words of the hint."""
    for examine, rows in table.items():
        for answer, words, *hint in rows:
            yield examine, answer, words, *(hint or [""])
