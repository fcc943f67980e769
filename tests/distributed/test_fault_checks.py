"""Checks on real ranks: what is refused ends the run, sides that disagree are found and told to whoever waits, what is right passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, MessageMismatch, RingError
from ringsim.traces.events import read_notice

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
LIMIT_S = 40  # nothing here comes near it


def found_in(trace: Any) -> list[str]:
    return [notice[0] for label in trace.events.tables.labels if (notice := read_notice(label))]


def sends_a_transpose() -> None:
    if ringsim.current_ring().rank == 0:
        dist.isend(torch.zeros(2, 3).t(), 1)


def changes_a_buffer() -> None:
    data = torch.zeros(8)
    if ringsim.current_ring().rank == 0:
        work: Any = dist.isend(data, 1)
        data.add_(1)
        work.wait()
    elif ringsim.current_ring().rank == 1:
        dist.recv(data, 0)


def reduces_in_two_orders() -> None:
    """Gloo takes the memory as it is: a tensor and its transpose would be mixed up. All ranks have returned when it is found."""
    dist.all_reduce(torch.zeros(3, 4) if ringsim.current_ring().rank else torch.zeros(4, 3).t())


@pytest.mark.parametrize(
    ("worker", "check", "error", "words", "found"),
    [
        (
            sends_a_transpose,
            "basic",
            ArgumentError,
            ("must be contiguous", "rank 0 of 3", "dist.isend(torch.zeros(2, 3).t(), 1)"),
            ["invalid_argument"],
        ),
        (changes_a_buffer, "full", RingError, ("must not be changed before its message", "rank 0 of 3", "data.add_(1)"), ["buffer_hazard"]),
        (reduces_in_two_orders, "basic", MessageMismatch, ("the order of elements in memory differs",), []),
    ],
)
def test_what_is_refused_ends_the_run_at_its_line(
    worker: Callable[[], None], check: str, error: type[RingError], words: tuple[str, ...], found: list[str]
) -> None:
    with pytest.raises(error) as caught:
        ringsim.trace(worker, world_size=3, limit_s=LIMIT_S, check=check)
    assert type(caught.value) is error
    assert [each for each in words if each not in str(caught.value)] == []
    assert caught.value.trace is not None
    assert found_in(caught.value.trace) == found
    if error is MessageMismatch:
        assert caught.value.diagnosis is not None
        assert caught.value.diagnosis.states == ("exited",) * 3


def test_what_is_not_asked_for_is_not_checked() -> None:
    """A receiver with room to spare: Gloo fills a part of it."""

    def worker() -> list[float]:
        received = torch.zeros(8)
        if ringsim.current_ring().rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(received, 0)
        return received.tolist()

    trace = ringsim.trace(worker, world_size=2, check="off", limit_s=LIMIT_S)
    assert trace.results[1] == [1.0] * 4 + [0.0] * 4
    with pytest.raises(ArgumentError, match="check must be one of 'basic', 'full', 'off', got 'ful'"):
        ringsim.trace(worker, world_size=1, check="ful")


def correct() -> tuple[float, list[int], list[Any]]:
    """Uses many buffers while messages are on their way, but never one of theirs."""
    ring = ringsim.current_ring()
    weight, buffer = torch.ones(8, requires_grad=True), torch.zeros(17)
    for _ in range(3):
        sent = (weight * 2).detach().clone()
        works: list[Any] = [
            dist.isend(sent, ring.succ),
            dist.isend(sent, ring.succ, tag=3),  # two that only read may share
            dist.irecv(buffer[:8], ring.pred),
            dist.irecv(buffer[8:16], ring.pred, tag=3),
        ]
        loss = (weight.sum() * 3) + sent.sum()  # reading what is being sent is fine
        loss.backward()
        other, view = torch.empty_like(buffer), buffer.view(17)[:4]
        buffer[16] = 1.0  # beside the messages
        assert view.shape == other[:4].shape
        for work in reversed(works):
            work.wait()
        assert float(buffer.sum()) == 33.0
        dist.all_reduce(buffer)
        buffer.zero_()
    dist.all_reduce(torch.zeros(4, 3).t())  # in another order, the same on all ranks
    gathered: list[Any] = [None] * ring.world_size
    dist.all_gather_object(gathered, ring.rank)
    words: list[Any] = ["a", 1] if ring.rank == 0 else [None, None]
    dist.broadcast_object_list(words, 0)
    assert weight.grad is not None
    return float(weight.grad.sum()), gathered, words


def test_a_correct_program_passes() -> None:
    trace = ringsim.trace(correct, world_size=3, check="full", limit_s=LIMIT_S)
    assert trace.results == [(72.0, [0, 1, 2], ["a", 1])] * 3
    assert found_in(trace) == []


def test_whoever_waits_when_sides_disagree_is_woken(tmp_path: Path) -> None:
    """Gloo takes one dtype for the other without a word; the program goes on, and one rank waits for the other."""

    def worker() -> None:
        if ringsim.current_ring().rank == 1:
            dist.recv(torch.zeros(4, dtype=torch.int32), 0)
            time.sleep(LIMIT_S)
        dist.send(torch.zeros(4), 1)
        try:
            dist.barrier()
        except MessageMismatch as error:
            print(f"heard: {error}")
            raise

    begin_s = time.monotonic()
    with pytest.raises(MessageMismatch, match="the dtype differs") as caught:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    assert time.monotonic() - begin_s < LIMIT_S / 2
    error = caught.value
    assert error.trace is not None
    assert error.trace.output[0].startswith("heard: message_mismatch: rank 0 sends float32[4]")
    error.trace.save(tmp_path / "run.ringtrace")
    for trace in (error.trace, ringsim.load(tmp_path / "run.ringtrace")):
        finding = trace.explain().findings[0]
        assert (finding.kind, finding.ranks) == ("message_mismatch", (0, 1))
