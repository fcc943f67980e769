"""How long things take on the virtual clock: closed forms, schedules, injections."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, RankFailed, RunTimeout
from ringsim.simulator.api import simulate
from ringsim.state import get_state
from ringsim.traces.value import Trace

ALPHA, BETA = 1e-5, 1e-9
LINK = ringsim.Link(alpha_s=ALPHA, beta_s_per_byte=BETA)


def run(worker: Any, world_size: int, *args: Any, **kwargs: Any) -> Trace:
    return simulate(worker, world_size=world_size, args=args, **{"link": LINK, **kwargs})


def ring_all_reduce(elements: int) -> list[float]:
    """Written with messages, as in the textbook: each rank ends with the sum of all."""
    ring = ringsim.current_ring()
    size = ring.world_size
    chunks = list(torch.full((elements,), float(ring.rank)).chunk(size))
    for turn in range(2 * (size - 1)):
        out, place = chunks[(ring.rank - turn) % size], (ring.rank - turn - 1) % size
        inbox = torch.empty_like(chunks[place])
        handles = [dist.isend(out, ring.succ, group=ring.succ_group), dist.irecv(inbox, ring.pred, group=ring.pred_group)]
        for handle in handles:
            handle.wait()
        chunks[place] = chunks[place] + inbox if turn < size - 1 else inbox
    return torch.cat(chunks).tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_a_ring_all_reduce_takes_what_its_formula_says(size: int) -> None:
    trace = run(ring_all_reduce, size, 4 * size)
    assert trace.results == [[float(sum(range(size)))] * 4 * size] * size
    assert trace.metadata["end_ns"] * 1e-9 == pytest.approx(2 * (size - 1) * (ALPHA + 16 * BETA), abs=1e-9)
    built_in = run(lambda: dist.all_reduce(torch.zeros(4 * size)), size)
    assert built_in.makespan_s == pytest.approx(trace.makespan_s, abs=2e-9)


@pytest.mark.parametrize("size", [4, 16])
def test_one_slow_link_slows_the_whole_ring(size: int) -> None:
    """The link is busy five times as long, and every step waits for it."""
    trace = run(ring_all_reduce, size, 4 * size, inject=[ringsim.Degrade(1, 2, factor=5)])
    assert trace.makespan_s == pytest.approx(2 * (size - 1) * 5 * (ALPHA + 16 * BETA), rel=0.2)
    assert trace.makespan_s > 1.5 * (size - 1) * 5 * (ALPHA + 16 * BETA)


def talk(rounds: int) -> int:
    ring = ringsim.current_ring()
    for _ in range(rounds):
        handles = [
            dist.isend(torch.zeros(2), ring.succ, group=ring.succ_group),
            dist.irecv(torch.zeros(2), ring.pred, group=ring.pred_group),
        ]
        for handle in handles:
            handle.wait()
        dist.barrier()
    return rounds


@pytest.mark.parametrize("at_op", [0, 1, 2, 5, 7])
def test_a_rank_fails_in_place_of_an_operation(at_op: int) -> None:
    with pytest.raises(RankFailed, match=f"rank 1 of 3 was made to fail in place of its operation {at_op}") as caught:
        run(talk, 3, 3, inject=[ringsim.Fail(1, at_op)])
    assert caught.value.rank == 1
    assert caught.value.trace is not None
    assert int((caught.value.trace.events.rank == 1).sum()) == at_op
    assert run(talk, 3, 3, inject=[ringsim.Fail(1, 9)]).results == [3, 3, 3]


def wait_for_nobody() -> tuple[float, float]:
    ring = ringsim.current_ring()
    inbox = torch.zeros(1)
    handle = dist.irecv(inbox, ring.pred, group=ring.pred_group)
    with pytest.raises(RunTimeout, match=r"within 0\.25 s of virtual time"):
        handle.wait(0.25)
    clock = get_state().clock
    assert clock is not None
    begun_s = clock.now_s()
    sending = dist.isend(torch.ones(1), ring.succ, group=ring.succ_group)
    handle.wait()  # the operation went on
    sending.wait()
    return begun_s, inbox.item()


def test_a_wait_ends_at_its_limit_in_virtual_time() -> None:
    assert run(wait_for_nobody, 3).results == [(0.25, 1.0)] * 3


def poll() -> bool:
    ring = ringsim.current_ring()
    if ring.rank == 0:
        ringsim.compute(1.0)
        dist.send(torch.zeros(1), 1)
        return True
    handle = dist.irecv(torch.zeros(1), 0)
    asked = 0
    while not handle.is_completed():
        asked += 1
    return asked < 10


def test_who_asks_lets_time_pass() -> None:
    assert run(poll, 2).results == [True, True]


def ask_for_ever() -> None:
    handle = dist.irecv(torch.zeros(1), 1 - ringsim.current_ring().rank)
    while not handle.is_completed():
        pass


def test_asking_for_ever_ends() -> None:
    with pytest.raises(ringsim.errors.Deadlock, match="questions in a row"):
        run(ask_for_ever, 2)


def compute_for_real(times: int) -> float:
    ring = ringsim.current_ring()
    matrix = torch.rand(100, 100) @ torch.rand(100, 100) * 1e-3  # what only a process's first product needs is no part of the span
    with ringsim.span("work"):
        for _ in range(times * (1 + 15 * ring.rank)):  # far more than other work on the machine can hide
            matrix = matrix @ matrix * 1e-3
    dist.barrier()
    clock = get_state().clock
    assert clock is not None
    return clock.now_s()


def test_computing_takes_what_it_takes_where_that_is_asked_for() -> None:
    free = run(compute_for_real, 3, 50)
    assert free.results == pytest.approx([2 * ALPHA] * 3)
    measured = run(compute_for_real, 3, 50, compute="measured")
    assert min(measured.results) > 1e-4
    frame = measured.to_pandas()
    took = (frame.done_ns - frame.post_ns)[frame.op == "span"].tolist()
    assert took[2] > took[0] > 0
    assert measured.metadata["constants"]["compute"] == "measured"
    assert "another run gives other times" in measured.metadata["notes"][0]


def receive_or_send() -> None:
    ring = ringsim.current_ring()
    (dist.recv if ring.rank else dist.send)(torch.zeros(1), 1 - ring.rank)


def compute_twice(seconds: float) -> None:
    ringsim.compute(seconds)
    ringsim.compute(seconds)


def test_times_that_no_trace_can_hold_are_refused() -> None:
    """A trace counts nanoseconds in 64 bits: 2**63 of them are 9,223,372,036.8 s."""
    assert run(compute_twice, 1, 4.5e9).to_pandas()["done_ns"].tolist() == [4_500_000_000_000_000_000, 9_000_000_000_000_000_000]
    for seconds in (5e9, 1e10, 1e300, 1.7e308):
        with pytest.raises(ArgumentError, match="a time must fit into a trace"):
            run(compute_twice, 2, seconds)
    for link in (ringsim.Link(5e9, 0), ringsim.Link(0, 1e300)):
        for operation in (receive_or_send, dist.barrier, lambda: dist.all_reduce(torch.zeros(1))):
            if operation is dist.barrier and link.alpha_s == 0:
                continue  # no bytes
            with pytest.raises(ArgumentError, match="a time must fit into a trace"):
                run(lambda operation=operation: [operation() for _ in range(2)], 2, link=link)
    for link in (ringsim.Link(1e12, 0), ringsim.Link(0, 1e300)):
        with pytest.raises(ArgumentError, match="a time must fit into a trace"):
            run(receive_or_send, 2, link=None, topology=ringsim.topologies.FullBisection(link))
    with pytest.raises(ArgumentError, match=r"alpha_s of link must be from 0 to 9e\+09 s, got 1000000000000\.0\. Give seconds"):
        run(receive_or_send, 2, link=ringsim.Link(1e12, 0))
