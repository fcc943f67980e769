"""The check of the lesson on deadlocks: exchanges that end, and the many ways in which they do not."""

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
from ringsim.errors import ArgumentError
from ringsim.traces.findings import Diagnosis

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]


def steps(*names: str, sends: str = "send", tag_shift: int = 0, on_world: bool = False) -> Callable[[Any], Any]:
    """An exchange that sends and receives in the order given."""

    def answer(mine: torch.Tensor) -> torch.Tensor:
        ring = ringsim.current_ring()
        received = torch.empty_like(mine)
        handle = None
        for name in names:
            if name == "send":
                handle = getattr(dist, sends)(mine, ring.succ, group=ring.succ_group)
            else:
                dist.recv(received, ring.pred, group=None if on_world else ring.pred_group, tag=tag_shift)
        if sends == "isend" and handle is not None:
            handle.wait()
        return received

    return answer


def by_order(mine: torch.Tensor) -> torch.Tensor:
    return steps("recv", "send")(mine) if ringsim.current_ring().rank == 0 else steps("send", "recv")(mine)


def by_parity(mine: torch.Tensor) -> torch.Tensor:
    return steps("recv", "send")(mine) if ringsim.current_ring().rank % 2 else steps("send", "recv")(mine)


def by_batch(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    both = [
        dist.P2POp(dist.irecv, received, ring.pred, group=ring.pred_group),
        dist.P2POp(dist.isend, mine, ring.succ, group=ring.succ_group),
    ]
    handles = [handle for each in both for handle in dist.batch_isend_irecv([each])]  # a batch is of one group
    for handle in handles:
        handle.wait()
    return received


def by_one_batch_on_the_world(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, ring.succ), dist.P2POp(dist.irecv, received, ring.pred)]
    for handle in dist.batch_isend_irecv(both):
        handle.wait()
    return received


by_isend = steps("send", "recv", sends="isend")


@pytest.mark.parametrize(
    ("answer", "way"),
    [
        (by_order, "order"),
        (by_parity, "order"),
        (by_isend, "isend"),
        (by_batch, "batch"),
        (by_one_batch_on_the_world, "batch"),
        (by_isend, None),
    ],
)
def test_no_deadlock_passes_every_way_out(answer: Answer, way: str | None) -> None:
    result = verdict(lambda function, seed: check.no_deadlock(function, way=way, seed=seed), answer)
    assert result.passed, result
    assert "rings of 2, 3, 4 and 5 ranks" in result.reason
    assert result.trace.world_size == 5
    assert result.diagnosis is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (steps("send", "recv"), "In a ring of 3, ranks 0, 1 and 2 wait for each other: rank 0 waits "),
        (steps("recv", "send"), "In a ring of 3, ranks 0, 2 and 1 wait for each other: rank 0 waits "),
        (steps("send", "recv", sends="isend", tag_shift=1), "never meet: tag 0 is not tag 1. The same holds for 2 more pairs of ranks."),
        (steps("send", "recv", sends="isend", on_world=True), "never meet: group "),
        (steps("recv"), "ranks 0, 2 and 1 wait for each other"),
        (steps("send", "recv", "recv", sends="isend"), "wait for each other"),
    ],
)
def test_no_deadlock_names_who_waits_for_whom(answer: Answer, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = verdict(check.no_deadlock, answer)
    assert not result.passed
    assert reason in result.reason
    assert "test_check_exchanges.py:" in result.reason
    assert result.diagnosis.edges
    shown: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", lambda what, raw=False: shown.append(what))
    result._ipython_display_()
    assert isinstance(shown[1], Diagnosis), "the picture of who waits for whom"


def returns_before_it_is_there(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    handles = [dist.isend(mine, ring.succ, group=ring.succ_group), dist.irecv(received, ring.pred, group=ring.pred_group)]
    copy = received.clone().fill_(-1.0)
    for handle in handles:
        handle.wait()
    return copy


def gathers(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    every = [torch.empty_like(mine) for _ in range(ring.world_size)]
    dist.all_gather(every, mine)
    return every[ring.pred]


def turns_round(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    sent = dist.isend(mine, ring.pred, group=ring.pred_group)
    dist.recv(received, ring.succ, group=ring.succ_group)
    sent.wait()
    return received


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda mine: mine, "Rank 0 of 3 must send 3 tensors to its successor, sent none."),
        (turns_round, "Rank 0 of 3 must send 3 tensors to its successor, sent none, and 3 others."),
        (gathers, "Rank 0 of 3 called all_gather, and only messages between neighbours are allowed."),
        (lambda mine: (by_isend(mine), None)[1], "Rank 0 of 3 must return the tensor of its predecessor, of shape (1,), got None."),
        (lambda mine: (by_isend(mine), mine)[1], "of shape (1,), got its own."),
        (lambda mine: by_isend(mine)[:1], ", got one of shape (1,)."),
        (returns_before_it_is_there, ", and number 0 of it differs."),
        (lambda mine: 1 / 0, "raised ZeroDivisionError: division by zero (line "),
        (None, "The answer must be a function, got None."),
    ],
)
def test_no_deadlock_says_what_else_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.no_deadlock, answer)
    assert not result.passed
    assert reason in result.reason


@pytest.mark.parametrize(
    ("answer", "way", "reason"),
    [
        (by_isend, "order", "with isend and recv: this exercise is about the way called order."),
        (by_order, "isend", "with recv and send: this exercise"),
        (by_order, "batch", "with recv and send: this exercise"),
        (by_batch, "isend", "with batch_irecv and batch_isend: this exercise"),
    ],
)
def test_no_deadlock_wants_the_way_that_was_asked_for(answer: Answer, way: str, reason: str) -> None:
    result = verdict(lambda function, seed: check.no_deadlock(function, way=way, seed=seed), answer)
    assert not result.passed
    assert reason in result.reason


def test_no_deadlock_refuses_a_way_that_there_is_not() -> None:
    with pytest.raises(ArgumentError, match="way must be one of 'order', 'isend', 'batch' or None, got 'luck'"):
        check.no_deadlock(by_order, way="luck")
