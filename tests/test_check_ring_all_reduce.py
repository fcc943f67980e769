"""The check of the lesson on the communication layer: an all-reduce in chunks, by the bytes that it sends."""

from __future__ import annotations

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

Answer = Callable[..., Any]


def all_reduce(steps: Callable[[int], int] = lambda n: 2 * (n - 1), **changes: Any) -> Answer:
    """The right answer, or one with another number of steps, other chunks, or other arguments of its calls."""

    def answer(tensor: torch.Tensor) -> Any:
        ring = ringsim.current_ring()
        n, shift = ring.world_size, changes.get("shift", 0)
        pieces = 1 if changes.get("whole") else n
        chunks = list(tensor.clone().chunk(pieces))
        choose = {"succ": ring.succ, "pred": ring.pred, "succ_group": ring.succ_group, "pred_group": ring.pred_group, "world": None}
        for step in range(steps(n)):
            out, into = (ring.rank - step + shift) % n % pieces, (ring.rank - step - 1 + shift) % n % pieces
            to, on = choose[changes.get("to", "succ")], choose[changes.get("on", "succ_group")]
            sent = dist.isend(chunks[out], to, group=on)
            received = torch.empty_like(chunks[into])
            dist.recv(received, choose[changes.get("source", "pred")], group=choose[changes.get("source_on", "pred_group")])
            sent.wait()
            if step < n - 1 or changes.get("always_add"):
                chunks[into] += received
            else:
                chunks[into] = received
        return changes.get("end", torch.cat)(chunks)

    return answer


right = all_reduce()


def by_turns(tensor: torch.Tensor) -> torch.Tensor:
    """Right, in place, without isend: even ranks send first; and with messages of one number each."""
    ring = ringsim.current_ring()
    n = ring.world_size
    chunks = tensor.view(n, -1)
    for step in range(2 * (n - 1)):
        out, into = (ring.rank - step) % n, (ring.rank - step - 1) % n
        for place in range(chunks.shape[1]):
            received = torch.empty(1)
            if ring.rank % 2 == 0:
                dist.send(chunks[out, place : place + 1], ring.succ, group=ring.succ_group)
            dist.recv(received, ring.pred, group=ring.pred_group)
            if ring.rank % 2 == 1:
                dist.send(chunks[out, place : place + 1], ring.succ, group=ring.succ_group)
            chunks[into, place] = received[0] + (chunks[into, place] if step < n - 1 else 0)
    return tensor


@pytest.mark.parametrize("answer", [right, by_turns])
def test_ring_all_reduce_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.ring_all_reduce, answer, seed)
        assert result.passed, result


def by_torch(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def all_send_first(tensor: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    dist.send(tensor, ring.succ, group=ring.succ_group)
    dist.recv(tensor, ring.pred, group=ring.pred_group)
    return tensor


def round_and_back(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor is added up along the ring to the last rank, and the sum is sent round once more: right, and rank 0 sends more."""
    ring = ringsim.current_ring()
    total, first, last = tensor.clone(), ring.rank == 0, ring.rank == ring.world_size - 1
    for lap in (0, 1):
        if lap or not first:
            received = torch.empty_like(total)
            dist.recv(received, ring.pred, group=ring.pred_group)
            total = received if lap else total + received
        if not (lap and last):
            dist.send(total, ring.succ, group=ring.succ_group)
    return total


def only_in_a_ring(tensor: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    if ring.world_size == 1:
        dist.barrier()
    return right(tensor)


def does_nothing_alone(tensor: torch.Tensor) -> torch.Tensor | None:
    return right(tensor) if ringsim.current_ring().world_size > 1 else None


def for_three_only(tensor: torch.Tensor) -> torch.Tensor:
    return all_reduce(lambda n: 4)(tensor)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda tensor: tensor, "Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, sent none."),
        (all_reduce(lambda n: n - 1), "must send 2 * 2/3 * 492 = 656 bytes, sent 328 in 2 messages."),
        (all_reduce(lambda n: n - 1, whole=True), "must send 2 * 2/3 * 492 = 656 bytes, sent 984 in 2 messages."),
        (all_reduce(lambda n: 2 * n), "sent 984 in 6 messages."),
        (for_three_only, "Rank 0 of 2 must send 2 * 1/2 * "),
        (round_and_back, "Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, sent 984 in 2 messages."),
        (by_torch, "Rank 0 of 3 called all_reduce, and only messages between neighbours are allowed."),
        (all_send_first, "waited in vain: rank 0 in send to rank 1 (line "),
        (all_reduce(to="pred", on="pred_group", source="succ", source_on="succ_group"), "Rank 0 of 3 sent to rank 2, its predecessor"),
        (all_reduce(on="world", source_on="world"), 'on the group "world", and must do so on its successor group "ring:0>1".'),
        (all_reduce(always_add=True), "must return the sum of all tensors: number "),
        (lambda tensor: (right(tensor), tensor)[1], "number 0, in chunk 0, must be "),
        (lambda tensor: (right(tensor), tensor)[1], ", its own number alone."),
        (lambda tensor: (right(tensor), None)[1], "must return a tensor of shape (123,), got None."),
        (all_reduce(end=lambda chunks: chunks[0]), "must return a tensor of shape (123,), got a tensor of shape (41,)."),
        (all_reduce(end=lambda chunks: chunks), "must return a tensor of shape (123,), got [tensor(["),
        (only_in_a_ring, "A single rank has nobody to talk to, and called barrier."),
        (does_nothing_alone, "Rank 0 of 1 must return a tensor of shape ("),
        (lambda tensor: 1 / 0, "raised ZeroDivisionError: division by zero (line "),
        (None, "The answer must be a function, got None."),
    ],
)
def test_ring_all_reduce_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.ring_all_reduce, answer)
    assert not result.passed
    assert reason in result.reason


def test_hints_know_the_two_usual_mistakes() -> None:
    half, whole = (all_reduce(lambda n: n - 1, whole=each) for each in (False, True))
    assert verdict(check.ring_all_reduce, half).hint.startswith("That is one of the two halves.")
    assert verdict(check.ring_all_reduce, whole).hint.startswith("The whole tensor goes round here.")


def test_the_verdict_states_the_bytes() -> None:
    result = verdict(check.ring_all_reduce, right)
    assert result.trace is not None
    size = result.trace.world_size
    sent = result.trace.to_pandas("messages").groupby("src")["size_bytes"].sum().tolist()
    assert len(set(sent)) == 1
    assert len(sent) == size
    assert result.reason.endswith(f"each sent 2 * {size - 1}/{size} * {sent[0] * size // (2 * (size - 1))} = {sent[0]} bytes.")
