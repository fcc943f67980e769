"""The checks of the generation ring: messages in an order that never jams, and settings that keep stages busy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from verdicts import verdict

import ringsim
from ringsim import check

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Tensor = torch.Tensor
Answer = Callable[..., Any]


def send(output: Tensor | None) -> None:
    ring = ringsim.current_ring()
    if output is not None:
        dist.send(output, ring.succ, group=ring.succ_group)


def receive(space: Tensor | None) -> None:
    ring = ringsim.current_ring()
    if space is not None:
        dist.recv(space, ring.pred, group=ring.pred_group)


def rank_0_receives_first(output: Tensor | None, space: Tensor | None) -> None:
    if ringsim.current_ring().rank == 0:
        receive(space)
        send(output)
    else:
        send(output)
        receive(space)


def posted_first(output: Tensor | None, space: Tensor | None) -> None:
    ring = ringsim.current_ring()
    sent = dist.isend(output, ring.succ, group=ring.succ_group) if output is not None else None
    receive(space)
    if sent is not None:
        sent.wait()


def all_send_first(output: Tensor | None, space: Tensor | None) -> None:
    send(output)
    receive(space)


def all_receive_first(output: Tensor | None, space: Tensor | None) -> None:
    receive(space)
    send(output)


def into_another_tensor(output: Tensor | None, space: Tensor | None) -> None:
    posted_first(output, None if space is None else torch.empty_like(space))


def on_the_world(output: Tensor | None, space: Tensor | None) -> None:
    ring = ringsim.current_ring()
    if ring.rank == 0 and space is not None:
        dist.recv(space, ring.pred)
    if output is not None:
        dist.send(output, ring.succ)
    if ring.rank and space is not None:
        dist.recv(space, ring.pred)


def without_looking(output: Tensor | None, space: Tensor | None) -> None:
    ring = ringsim.current_ring()
    dist.send(output, ring.succ, group=ring.succ_group)


@pytest.mark.parametrize("answer", [rank_0_receives_first, posted_first])
def test_token_ring_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.token_ring, answer, seed)
        assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (all_send_first, "The run never ended, because these waited in vain: rank 0 in send to rank 1", "if every rank sends first"),
        (all_receive_first, "The run never ended, because these waited in vain: rank 0 in recv from rank 2", "needs a send to meet"),
        (into_another_tensor, "Token 0 of batch 0 must be ", "Receive into space itself"),
        (on_the_world, 'on the group "world", and must do so on its', "Name the group"),
        (without_looking, "ust be a torch.Tensor, got NoneType", "Send output unless it is None"),
        (lambda output, space: None, "Rank 0 of 3 must send 12 outputs, sent none.", "Send output unless it is None"),
        (7, "The answer must be a function", ""),
    ],
)
def test_token_ring_says_what_is_wrong(answer: Any, words: str, hint: str) -> None:
    result = verdict(check.token_ring, answer)
    assert not result.passed
    assert words in result.reason
    assert hint in result.hint


# -- the settings


def fewest(stages: int) -> tuple[int, bool]:
    return math.ceil(4 * stages / 5), True


def fewest_counted(stages: int) -> tuple[int, bool]:
    turns = 1
    while turns < 0.8 * stages:
        turns += 1
    return turns, True


@pytest.mark.parametrize("answer", [fewest, fewest_counted])
def test_inner_iterations_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.inner_iterations, answer, seed)
        assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda stages: (stages, False),
            "With 10 stages (10, False) keeps a stage at work 100 % of the time, and 8 inner iterations would",
        ),
        (lambda stages: (stages - 1, True), "With 10 stages (9, True) keeps a stage at work 90 % of the time, and 8 inner iterations"),
        (lambda stages: (1, False), "With 10 stages (1, False) never finishes."),
        (lambda stages: (stages + 1, False), "With 10 stages (11, False) never finishes."),
        (lambda stages: (2 * stages, True), "With 10 stages (20, True) never finishes."),
        (lambda stages: (math.ceil(0.8 * stages), False), "(8, False) keeps a stage at work 78 % of the time, which is less than 80 %."),
        (lambda stages: (max(stages // 2, 1), True), "(5, True) keeps a stage at work 50 % of the time, which is less than 80 %."),
        (lambda stages: stages, "the answer must be a number of 1 or more and True or False, got 10."),
        (lambda stages: (0.8 * stages + 0.5, True), "got (8.5, True)."),
        (lambda stages: (0, True), "got (0, True)."),
        (lambda stages: None, "got None."),
        (lambda stages: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_inner_iterations_says_what_is_wrong(answer: Answer, words: str) -> None:
    result = verdict(check.inner_iterations, answer)
    assert not result.passed
    assert words in result.reason
