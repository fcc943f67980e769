"""Checks on real ranks, which end a run early for some reasons."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_check_messages as messages
import torch
from verdicts import never_ends, verdict

import ringsim
from ringsim import check
from ringsim import comm as dist
from ringsim.check import examination
from ringsim.errors import Interrupted

Answer = Callable[..., Any]


def loses_keywords(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args) if args else function(kwargs["tensor"])


def looks_until_it_is_done(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    while hasattr(result, "wait") and not result.is_completed():
        time.sleep(0.01)
    return result


def share_after_span(numbers: list[int]) -> int:
    with ringsim.span("share"):
        pass
    ring = ringsim.current_ring()
    return sum(numbers[ring.rank :: ring.world_size])


def sends_doubles(token: torch.Tensor) -> None:
    ring = ringsim.current_ring()
    sent = dist.isend(token.double(), ring.succ, group=ring.succ_group)
    dist.recv(torch.empty_like(token), ring.pred, group=ring.pred_group)
    sent.wait()


NOT_SAME = messages.around(loses_keywords)
OUTSIDE = messages.around(encloses=False)
REAL: list[tuple[Answer, Answer, str]] = [
    (check.timed_op, NOT_SAME, "share_gradients must receive the arguments that the caller passes"),
    (check.timed_op, OUTSIDE, "Rank 0 of 3 called share_gradients outside its span."),
    (check.ring, sends_doubles, "Message mismatch: rank "),
    (check.hello, share_after_span, 'Rank 0 of 3 took no number inside its span named "share"'),
]


@pytest.mark.parametrize(("examine", "answer", "reason"), REAL)
def test_what_only_real_times_and_groups_show(examine: Answer, answer: Answer, reason: str) -> None:
    assert reason in verdict(examine, answer).reason


def test_numbers_that_travel_beside_real_messages(tmp_path: Path) -> None:
    place = str(tmp_path)

    def rounds_of_zeros(token: torch.Tensor) -> float:
        ring, zeros = ringsim.current_ring(), torch.zeros(1)
        Path(place, str(ring.rank)).write_text(str(float(token)))
        for _ in range(ring.world_size - 1):
            sent = dist.isend(zeros, ring.succ, group=ring.succ_group)
            dist.recv(torch.empty(1), ring.pred, group=ring.pred_group)
            sent.wait()
        return sum(float(Path(place, str(rank)).read_text()) for rank in range(ring.world_size))

    reason = verdict(check.ring, rounds_of_zeros).reason
    assert "your answer is the same even if every message contains only zeros" in reason


def test_what_cannot_travel_is_a_reason() -> None:
    lock = threading.Lock()

    def answer(numbers: list[int]) -> int:
        with lock:
            return 0

    result = verdict(check.hello, answer)
    assert "The variable 'lock' cannot be sent to the ranks" in result.reason


def computes_forever(*_: Any) -> None:
    while True:
        pass


WAITING = messages.around(looks_until_it_is_done)
UNENDED: list[tuple[Answer, Answer, str, float, str]] = [
    (check.no_deadlock, computes_forever, "CPU_S", 0.5, " within 0.5 s of CPU time."),
    (check.timed_op, WAITING, "ASLEEP_S", 0.2, ": for 0.2 s"),
    (check.hello, never_ends, "LIMIT_S", 0.5, " in time and got only "),
]


@pytest.mark.parametrize(("examine", "answer", "limit", "most", "reason"), UNENDED)
def test_a_run_that_never_ends_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    examine: Answer,
    answer: Answer,
    limit: str,
    most: float,
    reason: str,
) -> None:
    monkeypatch.setattr(examination, limit, most)
    result = verdict(examine, answer)
    assert result.verdict == ("not yet" if limit == "CPU_S" else "undecided")
    assert f"A run with 3 ranks did not end{reason}" in result.reason


def test_a_receive_that_is_not_waited_for_is_the_reason() -> None:
    def exchange(mine: torch.Tensor) -> torch.Tensor:
        ring, received = ringsim.current_ring(), torch.empty_like(mine)
        sent = dist.isend(mine, ring.succ, group=ring.succ_group)
        dist.irecv(received, ring.pred, group=ring.pred_group)
        sent.wait()
        return received

    result = verdict(check.no_deadlock, exchange)
    assert "Rank 0 never waited for its irecv" in result.reason
    assert "Keep the handle that irecv returns, and call its wait()" in result.hint


def test_what_the_answer_prints_is_kept_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def talks(numbers: list[int]) -> None:
        print("looking", force=True)  # type: ignore[call-overload]

    result = verdict(check.hello, talks)
    assert result.trace is not None
    assert result.trace.output == ["looking\n"] * 3
    assert capsys.readouterr().out == ""


def test_an_interrupt_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise Interrupted("the run was interrupted after 1.0 s.")

    monkeypatch.setattr(examination, "run", interrupted)
    with pytest.raises(Interrupted):
        check.hello(messages.share)


def test_real_messages_are_timed_by_the_record(tmp_path: Path) -> None:
    place = str(tmp_path / "given.json")

    def fit(sizes: Any, times: Any) -> tuple[float, float]:
        Path(place).write_text(json.dumps([sizes.tolist(), times.tolist()]))
        each = np.unique(sizes)
        middle = np.array([np.median(times[sizes == size]) for size in each])
        beta, alpha = np.polyfit(each, middle, 1, w=1 / middle)
        return alpha, beta

    trace = check.alphabeta(fit).trace
    assert trace is not None
    sizes, times_s = json.loads(Path(place).read_text())  # the answer gets real messages last
    table = trace.to_pandas()
    small = table[(table["rank"] == 0) & (table["size_bytes"] == 8)]
    trips = (small["done_ns"].to_numpy()[1::2] - small["post_ns"].to_numpy()[::2]) / 2
    counted = [time_s for size, time_s in zip(sizes, times_s, strict=True) if size == 8]
    assert counted == pytest.approx((trips[1:] * 1e-9).tolist()), (
        "every trip except the first must count"
    )
    assert sizes == sorted(sizes)
    assert set(sizes) == set(table["size_bytes"])
