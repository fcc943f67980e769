"""Rules for handles. The last one leaves an unanswered recv behind, so it must come last."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from conformance import make, refused, rule, same


@rule(least=2)
def a_second_wait_is_harmless(dist: Any, rank: int, size: int) -> None:
    received = torch.empty(6)
    receiving = dist.irecv(received, (rank - 1) % size)
    sending = dist.isend(make(rank), (rank + 1) % size)
    for _ in range(3):
        assert receiving.wait()
        assert sending.wait()
    same(received, make((rank - 1) % size))


@rule()
def is_completed_turns_true_without_a_wait(dist: Any, rank: int, size: int) -> None:
    tensor = make(rank)
    handle = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 10
    while not handle.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    same(tensor, sum(make(each) for each in range(size)))


@rule()
def collectives_in_flight_are_waited_for_in_any_order(dist: Any, rank: int, size: int) -> None:
    tensors = [make(rank, salt=number) for number in range(4)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
        assert handle.is_completed()
    for number, tensor in enumerate(tensors):
        same(tensor, sum(make(each, salt=number) for each in range(size)))


@rule()
def a_future_holds_the_result(dist: Any, rank: int, size: int) -> None:
    tensor = make(rank)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    (value,) = future.wait()
    same(value, sum(make(each) for each in range(size)))


@rule()
def a_wait_within_its_limit_succeeds(dist: Any, rank: int, size: int) -> None:
    dist.barrier(async_op=True).wait(timedelta(seconds=20))


@rule(least=2, each={"seconds": 0.2, "timedelta": timedelta(seconds=0.2)})
def a_wait_ends_at_its_limit(dist: Any, rank: int, size: int, timeout: Any) -> None:
    received = torch.empty(6)
    handle = dist.irecv(received, (rank - 1) % size, tag=99)
    begin = time.monotonic()
    refused(lambda: handle.wait(timeout))
    assert 0.19 < time.monotonic() - begin < 10
    dist.barrier()
    dist.isend(make(rank), (rank + 1) % size, tag=99).wait()
    handle.wait()  # the operation continued
    same(received, make((rank - 1) % size))
