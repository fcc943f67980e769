"""Helpers for tests of checks, on simulated or real ranks, with assertions for every verdict."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import Trace, simulate
from ringsim.check import CheckResult, examination

Answer = Callable[..., Any]
# shared by all simulated ranks, so that numbers can bypass the messages
BOARD: dict[Any, Any] = {}
LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


@pytest.fixture
def on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs answers on simulated ranks, with the same traces for the checks to judge."""

    def run(job: Any, kind: Any, options: Any) -> Trace:
        function, args, kwargs = pickle.loads(job.call)
        return simulate(function, world_size=kind.world_size, args=args, kwargs=kwargs, link=LINK)

    monkeypatch.setattr(examination, "run", run)


def verdict(examine: Callable[..., CheckResult], answer: Any, seed: int | None = 1) -> CheckResult:
    result = examine(answer, seed=seed)
    assert bool(result) is result.passed
    headline, *evidence = result.reason.splitlines()
    assert headline.endswith(".")
    assert all(line.startswith("  ") for line in evidence)
    assert bool(result.hint) is not result.passed
    assert json.loads(json.dumps(result.as_dict()))["passed"] is result.passed
    assert " ".join(result.reason.split()) in " ".join(repr(result).split())
    assert " ".join(result.hints) == result.hint
    assert str(result.seed) in repr(result)
    return result


def send(tensor: torch.Tensor | None, to: str = "succ", on: str = "", waits: bool = True) -> Any:
    """Posts a send to a neighbour, on the group of that edge; returns a function that waits."""
    ring: Any = ringsim.current_ring()
    group = None if on == "world" else getattr(ring, f"{on or to}_group")
    sent = None if tensor is None else dist.isend(tensor, getattr(ring, to), group=group)
    return sent.wait if sent is not None and waits else lambda: None


def receive(like: torch.Tensor, source: str = "pred", on: str = "") -> torch.Tensor:
    """Receives from a neighbour, on the group of that edge."""
    ring: Any = ringsim.current_ring()
    received = torch.empty_like(like)
    group = None if on == "world" else getattr(ring, f"{on or source}_group")
    dist.recv(received, getattr(ring, source), group=group)
    return received


def after(work: Answer, result: Answer) -> Answer:
    """Returns an answer that does the right work, but returns something else."""
    return lambda *args: (work(*args), result(*args))[1]


def never_ends(*_: Any) -> None:
    while True:
        time.sleep(0.1)


def make_tests(
    right: dict[Answer, list[Answer]], wrong: dict[Answer, list[tuple[Any, ...]]]
) -> tuple[Answer, Answer]:
    """Returns a test that each right answer passes, and a test that each wrong answer fails.

    A wrong answer comes with words of its reason and its hint.
    """
    assert min(map(len, wrong.values())) >= 6, "each exercise needs six wrong answers"

    @pytest.mark.parametrize(
        ("examine", "answer"),
        [(examine, answer) for examine, answers in right.items() for answer in answers],
    )
    def passes(examine: Answer, answer: Answer) -> None:
        result = verdict(examine, answer, seed=None)  # a failure prints the seed
        assert result.passed, result

    @pytest.mark.parametrize(
        ("examine", "row"), [(examine, row) for examine, rows in wrong.items() for row in rows]
    )
    def fails(examine: Answer, row: tuple[Any, ...]) -> None:
        answer, words, *hint = row
        result = verdict(examine, answer)
        assert not result.passed
        assert words in result.reason
        assert all(each in result.hint for each in hint)

    return passes, fails
