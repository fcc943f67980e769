"""Tests of simulated ranks from the view of their programs.

They cover arguments, rings, groups, output, and unsupported features.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from simulated_runs import LINK, exchange, now_s, run, switch

import ringsim
from ringsim import comm as dist
from ringsim import simulate
from ringsim.errors import ArgumentError, RingError


def own_arguments(values: list[int]) -> list[int]:
    values.append(ringsim.current_ring().rank)
    switch()
    return values


def test_arguments_are_the_ranks_own() -> None:
    values: list[int] = []
    assert run(own_arguments, 3, values) == [[0], [1], [2]]
    assert values == []


def test_what_cannot_be_copied_is_named_with_its_line_and_what_is_large_too() -> None:
    lock, table = threading.Lock(), bytes(11_000_000)
    where = r"test_simulated_ranks\.py, line \d+, in <lambda>"
    with pytest.raises(ArgumentError, match=rf"the variable 'lock'.*{where}"):
        run(lambda: lock.acquire())
    with pytest.warns(UserWarning, match="the largest part is the variable 'table'") as caught:
        simulate(lambda: len(table), world_size=1, link=LINK)
    assert caught[0].filename == __file__  # the line that called simulate


def pass_on(sent: torch.Tensor, into: torch.Tensor) -> None:
    if ringsim.current_ring().rank == 0:
        dist.send(sent, 1)
        dist.send(sent.clone(), 1)
    else:
        dist.recv(torch.zeros(3, 2), 0)
        dist.recv(into, 0)


FLAT, ACROSS, ONE = torch.zeros(3, 2), torch.zeros(2, 3).t(), torch.zeros(1, 2).expand(3, 2)


@pytest.mark.parametrize(
    ("sent", "into", "says"),
    [
        (ACROSS, FLAT, r"stride \(1, 3\).*rank 0 of 2, send to 1,"),
        (FLAT, ACROSS, r"stride \(1, 3\).*rank 1 of 2, recv from 0,"),
        (FLAT, ONE, "rank 1 of 2, recv from 0,"),
    ],
)
def test_a_message_is_contiguous_as_on_gloo(
    sent: torch.Tensor, into: torch.Tensor, says: str
) -> None:
    """Version 0.2.0 carried a transposed tensor, and failed inside ringsim for an expanded one."""
    with pytest.raises(ArgumentError, match=f"contiguous.*{says}") as caught:
        run(pass_on, 2, sent, into)
    assert "point_to_point.py" not in str(caught.value)


def own_state() -> tuple[int, bool]:
    ring = ringsim.current_ring()
    with ringsim.span("outer", microbatch=ring.rank):
        switch()
        with ringsim.span("inner"):
            switch()
    return ring.rank, ringsim.current_ring() is ring


def test_spans_and_rings_are_the_ranks_own() -> None:
    trace = simulate(own_state, world_size=3, link=LINK)
    assert trace.results == [(0, True), (1, True), (2, True)]
    frame = trace.to_pandas()
    assert (frame.microbatch == frame["rank"]).all()
    with pytest.raises(RingError, match="initialize_distributed"):
        ringsim.current_ring()


def printing() -> None:
    rank = ringsim.current_ring().rank
    print("one", rank)
    switch()
    print("two", rank, force=rank == 2)  # type: ignore[call-overload]
    switch()
    ringsim.suppress_output(0)
    print("three", rank)


def test_prints_are_kept_by_rank_and_shown_as_those_of_real_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = simulate(printing, world_size=3, link=LINK)
    assert trace.output == [f"one {rank}\ntwo {rank}\nthree {rank}\n" for rank in range(3)]
    shown = [f"[rank {rank}] three {rank}" for rank in range(3)]
    shown += ["[rank 0] one 0", "[rank 0] two 0", "[rank 2] two 2"]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(shown)


def asks_for_the_ring_again() -> tuple[str, tuple[int, ...], float]:
    ringsim.initialize_distributed(world_size=4, rank=dist.get_rank())
    ringsim.initialize_distributed()
    ringsim.destroy_distributed()
    rank = dist.get_rank()
    first = rank // 2 * 2
    ringsim.initialize_distributed(
        "127.0.0.1", 29501, 4, rank, 0, "cpu", ring_ranks=[first, first + 1]
    )
    back = exchange(torch.full((1,), float(rank)), torch.zeros(1))
    return ringsim.get_comm_device(), ringsim.current_ring().ranks, back.item()


def test_rings_are_asked_for_again_and_made_anew() -> None:
    assert run(asks_for_the_ring_again, 4) == [
        ("cpu", (rank & 2, rank & 2 | 1), float(rank ^ 1)) for rank in range(4)
    ]


def makes_its_world() -> str:
    said = ""
    for arguments in ({"world_size": 3}, {"backend": "gloo", "world_size": 2}):
        try:
            dist.init_process_group(**arguments)  # type: ignore[arg-type]
        except RingError as error:
            said = str(error)
    with pytest.raises(ValueError, match="initialize the default process group twice"):  # torch's
        dist.init_process_group()
    dist.destroy_process_group()
    dist.init_process_group()
    dist.barrier()
    return said


def test_a_worker_that_makes_its_world_joins_the_one_that_is_there() -> None:
    for said in run(makes_its_world, 2):
        assert "ringsim.simulate" in said
        assert "world_size" in said


def calls_back_when_a_message_arrives() -> list[str]:
    if dist.get_rank() == 0:
        ringsim.compute(1.0)
        dist.send(torch.ones(1), 1)
        ringsim.compute(1.0)
        dist.barrier()
        return []
    seen: list[str] = []
    handle = dist.irecv(torch.zeros(1), 0)
    assert handle is not None
    handle.get_future().then(lambda future: seen.append("arrived"))
    dist.barrier()
    seen.append("waited")
    handle.wait()
    return seen


def test_a_future_is_completed_when_its_message_arrives_not_when_it_is_waited_for() -> None:
    assert run(calls_back_when_a_message_arrives, 2) == [[], ["arrived", "waited"]]


# -- supported and unsupported features


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (lambda: simulate(switch, world_size=2, link=LINK), "from a simulated rank"),
        (lambda: dist.configure(enabled=True, prof_all=True), "record=False"),
    ],
)
def test_what_is_not_there_says_so(worker: Callable[[], None], words: str) -> None:
    with pytest.raises(RingError, match=words):
        run(worker, record=False)


# -- groups


def come_late() -> tuple[float, float]:
    rank = ringsim.current_ring().rank
    ringsim.compute(rank)
    dist.new_group([1, 3])
    first_s = now_s()
    dist.new_group([0])
    return first_s, now_s()


def test_members_wait_for_each_other_and_others_pass() -> None:
    trace = simulate(come_late, world_size=4, link=LINK)
    assert trace.results == [(0.0, 0.0), (3.0, 3.0), (2.0, 2.0), (3.0, 3.0)]
    made = trace.to_pandas().query("op == 'new_group'")
    assert made["shape"].tolist() == ["1x3", "0"] * 4
