"""The check of the ring: numbers that go round, and the many ways in which they do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import IPython.display
import pytest
import torch
import torch.distributed as dist
from verdicts import verdict

import ringsim
from ringsim import check

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]


def pass_round(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    total = token.clone()
    for _ in range(ring.world_size - 1):
        sent = dist.isend(token, ring.succ, group=ring.succ_group)
        received = torch.empty_like(token)
        dist.recv(received, ring.pred, group=ring.pred_group)
        sent.wait()
        token = received
        total += token
    return total


def pass_round_by_turns(token: torch.Tensor) -> float:
    """No isend: even ranks send first, odd ones receive first."""
    ring = ringsim.current_ring()
    tokens = [token]
    for step in range(ring.world_size - 1):
        received = torch.empty(1)
        if ring.rank % 2 == 0:
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        dist.recv(received, ring.pred, group=ring.pred_group, tag=step)
        if ring.rank % 2 == 1:
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        tokens.append(received)
    return sum(float(token) for token in tokens)


def with_calls(**changes: Any) -> Answer:
    """The right answer, with other arguments of its isend and recv."""

    def answer(token: torch.Tensor) -> torch.Tensor:
        ring = ringsim.current_ring()
        choose = {"pred": ring.pred, "succ": ring.succ, "pred_group": ring.pred_group, "succ_group": ring.succ_group, "world": None}
        total = token.clone()
        for _ in range(ring.world_size - 1 + changes.get("more", 0)):
            sent = dist.isend(token, choose[changes.get("to", "succ")], group=choose[changes.get("on", "succ_group")])
            received = torch.empty_like(token)
            dist.recv(received, choose[changes.get("source", "pred")], group=choose[changes.get("source_on", "pred_group")])
            sent.wait()
            token = received
            total += token
        return total

    return answer


@pytest.mark.parametrize("answer", [pass_round, with_calls(), pass_round_by_turns])
def test_ring_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.ring, answer, seed)
        assert result.passed, result


def only_rank_0(token: torch.Tensor) -> torch.Tensor | None:
    return pass_round(token) if ringsim.current_ring().rank == 0 else None


def sends_first(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    dist.send(token, ring.succ, group=ring.succ_group)
    dist.recv(token, ring.pred, group=ring.pred_group)
    return token


def hangs_in_recv(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    dist.recv(token, ring.pred, group=ring.pred_group)
    return token


def sends_but_adds_nothing(token: torch.Tensor) -> torch.Tensor:
    own = token.clone()
    pass_round(token)
    return own


def sends_the_same_token_again(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    total = token.clone()
    for _ in range(ring.world_size - 1):
        sent = dist.isend(token, ring.succ, group=ring.succ_group)
        received = torch.empty_like(token)
        dist.recv(received, ring.pred, group=ring.pred_group)
        sent.wait()
        total += received
    return total


def adds_by_all_reduce(token: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(token)
    return token


def looks_and_then_adds_by_all_reduce(token: torch.Tensor) -> torch.Tensor:
    pass_round(token)
    return adds_by_all_reduce(token)


def calls_its_successor_on_the_other_group(token: torch.Tensor) -> None:
    ring = ringsim.current_ring()
    dist.isend(token, ring.succ, group=ring.pred_group)


def recurses_at_one(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    if ring.world_size == 1:
        dist.send(token, ring.succ, group=ring.succ_group)
    return pass_round(token)


def recv_from_anybody(token: torch.Tensor) -> None:
    ring = ringsim.current_ring()
    sent = dist.isend(token, ring.succ, group=ring.succ_group)
    dist.recv(torch.empty(1), group=ring.pred_group)
    sent.wait()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda token: None, "Rank 0 of 3 must send 2 tokens to its successor, sent none."),
        (lambda token: 6.0, "Rank 0 of 3 must send 2 tokens to its successor, sent none."),
        (lambda token: (pass_round(token), None)[1], "Rank 0 of 3 must return the sum of all numbers, "),
        (lambda token: (pass_round(token), 1234.0)[1], ", got 1234."),
        (sends_but_adds_nothing, ", its own number alone."),
        (sends_the_same_token_again, "Rank 0 of 3 must return the sum of all numbers, "),
        (only_rank_0, "waited in vain: rank 0 in recv from rank 2 (line "),
        (with_calls(more=-1), "Rank 0 of 3 must send 2 tokens to its successor, sent 1."),
        (with_calls(more=1), "Rank 0 of 3 must send 2 tokens to its successor, sent 3."),
        (with_calls(to="pred", on="pred_group", source="succ", source_on="succ_group"), "Rank 0 of 3 sent to rank 2, its predecessor"),
        (with_calls(source="succ", source_on="succ_group"), "Rank 0 of 3 received from rank 1, its successor"),
        (with_calls(on="world", source_on="world"), 'on the group "world", and must do so on its successor group "ring:0>1".'),
        (with_calls(source_on="world"), 'on the group "world", and must do so on its predecessor group "ring:2>0".'),
        (recv_from_anybody, "Rank 0 of 3 must send 2 tokens"),
        (adds_by_all_reduce, "Rank 0 of 3 called all_reduce, and only messages between neighbours are allowed."),
        (looks_and_then_adds_by_all_reduce, "Rank 0 of 3 called all_reduce"),
        (sends_first, "The run never ended, because these waited in vain: rank 0 in send to rank 1 (line "),
        (hangs_in_recv, "rank 2 in recv from rank 1 (line "),
        (calls_its_successor_on_the_other_group, "ust be a global rank of the group, one of [2, 0], got 1 "),
        (recurses_at_one, "ust be another rank, got this rank itself (rank 0 of 1)"),
        (lambda token: 1 / 0, "raised ZeroDivisionError: division by zero (line "),
        (None, "The answer must be a function, got None."),
    ],
)
def test_ring_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.ring, answer)
    assert not result.passed
    assert reason in result.reason


def test_a_ring_of_two_must_use_the_right_one_of_its_two_groups() -> None:
    def turned(token: torch.Tensor) -> torch.Tensor:
        """Right but for two ranks, where predecessor and successor are the same rank."""
        ring = ringsim.current_ring()
        if ring.world_size == 2:
            return with_calls(on="pred_group", source_on="succ_group")(token)
        return pass_round(token)

    result = verdict(check.ring, turned)
    assert result.reason == 'Rank 0 of 2 sent to rank 1 on the group "ring:1>0", and must do so on its successor group "ring:0>1".'


def test_a_failing_result_shows_text_and_then_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", lambda value, **options: displayed.append(value))
    wrong = verdict(check.ring, with_calls(on="world", source_on="world"))
    wrong._ipython_display_()
    assert displayed == [{"text/plain": repr(wrong)}, wrong.trace]
    data, about = wrong.trace._repr_mimebundle_()  # type: ignore[union-attr]
    assert "image/png" in data
    assert about["image/png"]["alt"]
    displayed.clear()
    right = verdict(check.ring, pass_round)
    right._ipython_display_()
    assert displayed == [{"text/plain": repr(right)}]
