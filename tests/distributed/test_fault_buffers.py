"""Teaching mode: buffers that are used too early, and handles that are mistreated, raise at the line that does it; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import read_notice

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
LIMIT_S = 40


def changed() -> None:
    data = torch.zeros(8)
    work: Any = dist.isend(data, 1)
    data.add_(1)  # here
    work.wait()


def changed_unseen() -> None:
    data = torch.zeros(8)
    work: Any = dist.isend(data, 1)
    data.numpy()[3] = 1.0
    work.wait()  # here


def changed_as_a_part() -> None:
    data = torch.zeros(4, 4)
    work: Any = dist.isend(data, 1)
    data[2, 1] = 1.0  # here
    work.wait()


def read_early() -> None:
    data = torch.zeros(8)
    work: Any = dist.irecv(data, 1)
    print(float(data[2]))  # here
    work.wait()


def written_early() -> None:
    data = torch.zeros(8)
    work: Any = dist.irecv(data, 1)
    torch.add(torch.ones(8), 1, out=data)  # here
    work.wait()


def overlapping() -> None:
    data = torch.zeros(12)
    first: Any = dist.irecv(data[:8], 1)
    second: Any = dist.irecv(data[4:], 1, tag=2)  # here
    first.wait()
    second.wait()


def sent_while_received() -> None:
    data = torch.zeros(8)
    first: Any = dist.irecv(data, 1)
    second: Any = dist.isend(data, 1)  # here
    first.wait()
    second.wait()


def waited_twice() -> None:
    work: Any = dist.isend(torch.zeros(8), 1)
    work.wait()
    work.wait()  # here


def dropped() -> None:
    dist.isend(torch.zeros(8), 1)  # here


def dropped_recv() -> None:
    dist.irecv(torch.zeros(8), 1)  # here


def answer(send: int, recv: int) -> None:
    """Does what rank 1 has to do, so that rank 0 could go on."""
    works: list[Any] = [dist.isend(torch.zeros(8), 0, tag=2 * index) for index in range(send)]
    works += [dist.irecv(torch.zeros(8), 0) for _ in range(recv)]
    for work in works:
        work.wait()


def play(mistake: Callable[[], None], send: int, recv: int) -> None:
    if ringsim.current_ring().rank == 0:
        mistake()
    else:
        answer(send, recv)


MISTAKES: list[tuple[Callable[[], None], int, int, str, type[RingError], str]] = [
    (changed, 0, 1, "buffer_hazard", RingError, "must not be changed before its message was waited for, got add_"),
    (changed_unseen, 0, 1, "buffer_hazard", RingError, "must stay as it is until its send was waited for, got other contents"),
    (read_early, 1, 0, "buffer_hazard", RingError, "must not be read before its message was waited for, got _local_scalar_dense"),
    (written_early, 1, 0, "buffer_hazard", RingError, "must not be changed before its message was waited for, got add"),
    (overlapping, 2, 0, "buffer_hazard", RingError, "must belong to one message at a time, got two that overlap"),
    (sent_while_received, 1, 1, "buffer_hazard", RingError, "must belong to one message at a time, got two that overlap"),
    (waited_twice, 0, 1, "invalid_argument", ArgumentError, "must be waited for once, got a second wait()"),
    (dropped, 0, 1, "leaked_request", RingError, "every handle must be waited for, got one that never was"),
    (dropped_recv, 1, 0, "leaked_request", RingError, "every handle must be waited for, got one that never was"),
]


@pytest.mark.parametrize(("mistake", "send", "recv", "kind", "error", "words"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_raises_at_its_line(
    mistake: Callable[[], None], send: int, recv: int, kind: str, error: type[RingError], words: str
) -> None:
    with pytest.raises(RingError) as caught:
        ringsim.trace(play, world_size=2, args=(mistake, send, recv), check="full", limit_s=LIMIT_S)
    assert type(caught.value) is error
    text, trace = str(caught.value), caught.value.trace
    assert words in text
    assert "rank 0 of 2" in text
    line = line_of(mistake)
    assert f'{__file__}", line {line},' in text or f" at test_fault_buffers.py:{line}" in text
    assert trace is not None
    assert kind in [notice[0] for label in trace.events.tables.labels if (notice := read_notice(label))]


def test_a_part_of_a_buffer_counts() -> None:
    with pytest.raises(RingError, match="must not be changed before its message was waited for"):
        ringsim.trace(pair_of_sixteen, world_size=2, check="full", limit_s=LIMIT_S)


def pair_of_sixteen() -> None:
    if ringsim.current_ring().rank == 0:
        changed_as_a_part()
    else:
        dist.recv(torch.zeros(4, 4), 0)


def test_without_it_nobody_looks() -> None:
    trace = ringsim.trace(play, world_size=2, args=(changed, 0, 1), limit_s=LIMIT_S)
    assert len(trace.messages) == 1


def receives_into_leaves() -> list[float]:
    """The warning is given once for each line that makes it."""
    leaf, plain = torch.zeros(4, requires_grad=True), torch.zeros(4)
    if ringsim.current_ring().rank == 0:
        for _ in range(3):
            dist.send(torch.ones(4, requires_grad=True), 1)
    else:
        dist.recv(plain, 0)
        for _ in range(2):
            dist.recv(leaf, 0)  # here
    return leaf.tolist()


@pytest.mark.parametrize("check", ["basic", "full"])
def test_a_recv_that_autograd_does_not_see_is_warned_of(check: str) -> None:
    trace = ringsim.trace(receives_into_leaves, world_size=2, check=check, limit_s=LIMIT_S)
    assert trace.results[1] == [1.0] * 4
    assert trace.output[0] == ""
    warned = f"test_fault_buffers.py:{line_of(receives_into_leaves)}: UserWarning: a tensor to be received into must not require grad"
    assert trace.output[1].count(warned) == (check == "full")
    assert [finding.kind for finding in trace.explain().findings if not finding.kind.startswith("late_")] == []


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
    gathered: list[Any] = [None] * ring.world_size
    dist.all_gather_object(gathered, ring.rank)
    words: list[Any] = ["a", 1] if ring.rank == 0 else [None, None]
    dist.broadcast_object_list(words, 0)
    assert weight.grad is not None
    return float(weight.grad.sum()), gathered, words


def test_a_correct_program_passes_and_gives_what_it_gives_unchecked() -> None:
    checked = ringsim.trace(correct, world_size=3, check="full", limit_s=LIMIT_S)
    assert checked.results == ringsim.trace(correct, world_size=3, check="off", limit_s=LIMIT_S).results
    assert checked.results == [(72.0, [0, 1, 2], ["a", 1])] * 3


def line_of(function: Callable[[], None]) -> int:
    """The line of a function of this file that ends with ``# here``."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines, 1) if number > first and line.endswith("# here"))
