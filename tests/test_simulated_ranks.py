"""Tests of simulated ranks from the view of their programs.

They cover arguments, rings, groups, output, and unsupported features.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
import torch
from simulated_runs import LINK, exchange, now_s, run, switch

import ringsim
from ringsim import comm as dist
from ringsim import simulate
from ringsim.errors import ArgumentError, PeerExited, RendezvousFailed, RingError


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
    with pytest.raises(
        ArgumentError,
        match=(
            r"the variable 'lock' must be picklable .*test_simulated_ranks\.py, "
            r"line \d+, in <lambda>"
        ),
    ):
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


@pytest.mark.parametrize(
    ("sent", "into", "says"),
    [
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), r"stride \(1, 3\) \(rank 0 of 2, send to 1,"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), r"stride \(1, 3\) \(rank 1 of 2, recv from 0,"),
        (torch.zeros(3, 2), torch.zeros(1, 2).expand(3, 2), r"\(rank 1 of 2, recv from 0,"),
    ],
)
def test_a_message_is_contiguous_as_on_gloo(
    sent: torch.Tensor, into: torch.Tensor, says: str
) -> None:
    """Version 0.2.0 carried a transposed tensor, and failed inside ringsim for an expanded one."""
    with pytest.raises(ArgumentError, match=f"must be contiguous, got one with .*{says}") as caught:
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
    expected = [
        f"[rank {rank}] {word} {rank}"
        for rank, word in (
            (0, "one"),
            (0, "three"),
            (0, "two"),
            (1, "three"),
            (2, "three"),
            (2, "two"),
        )
    ]
    assert sorted(capsys.readouterr().out.splitlines()) == expected


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


def orders_the_ring_by_hosts() -> tuple[tuple[int, ...], float, tuple[int, ...]]:
    """The ranks alternate between two hosts; the order is requested twice, and overridden."""
    rank, size = dist.get_rank(), dist.get_world_size()
    socket.gethostname = lambda: f"node{rank % 2}"  # no other rank runs before it is asked
    ringsim.destroy_distributed()
    for _ in range(2):
        ringsim.initialize_distributed("127.0.0.1", 29501, size, rank, 0, "cpu", ring_order="hosts")
    back = exchange(torch.full((1,), float(rank)), torch.zeros(1))
    ranks = ringsim.current_ring().ranks
    ringsim.destroy_distributed()
    ringsim.initialize_distributed(
        "127.0.0.1", 29501, size, rank, 0, "cpu", ring_order="hosts", ring_ranks=range(size)
    )
    return ranks, back.item(), ringsim.current_ring().ranks


def test_a_ring_is_ordered_by_hosts_where_that_is_asked_for() -> None:
    assert run(orders_the_ring_by_hosts, 4) == [
        ((0, 2, 1, 3), float(pred), (0, 1, 2, 3)) for pred in (3, 2, 0, 1)
    ]


def makes_its_world() -> list[str]:
    said = []
    for arguments in (
        {"world_size": 3},
        {"backend": "gloo", "world_size": 2, "rank": dist.get_rank()},
        {},
    ):
        try:
            dist.init_process_group(**arguments)  # type: ignore[arg-type]
        except (RingError, ValueError) as error:
            said.append(f"{error}")
    dist.destroy_process_group()
    dist.init_process_group()
    dist.barrier()
    return said


def test_a_worker_that_makes_its_world_joins_the_one_that_is_there() -> None:
    assert run(makes_its_world, 2)[0] == [
        "world_size must be 2, as in the process group created by ringsim.simulate, got 3 "
        "(rank 0 of 2). Leave it out.",
        "trying to initialize the default process group twice!",  # torch's own text
    ]


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


def in_torchs_own_words() -> list[float]:
    ring, found = ringsim.current_ring(), torch.zeros(1)
    if ring.rank == 0:
        torch.distributed.send(torch.full((1,), 7.0), ring.succ, group=ring.succ_group)
        torch.distributed.recv(found, ring.pred, group=ring.pred_group)
    else:
        torch.distributed.recv(found, ring.pred, group=ring.pred_group)
        torch.distributed.send(found + 1, ring.succ, group=ring.succ_group)
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    torch.distributed.barrier()
    return [found.item(), *total.tolist()]


def test_torchs_own_functions_are_simulated() -> None:
    trace = simulate(in_torchs_own_words, world_size=3, link=LINK)
    assert trace.results == [[9.0, 3.0, 3.0], [7.0, 3.0, 3.0], [8.0, 3.0, 3.0]]
    frame = trace.to_pandas()
    assert set(frame.op) == {"send", "recv", "all_reduce", "barrier"}
    assert {str(file).rpartition("/")[2] for file in frame.file} == {"test_simulated_ranks.py"}


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (lambda: simulate(switch, world_size=2, link=LINK), "from a simulated rank"),
        (lambda: dist.configure(enabled=True, prof_all=True), "has record=False"),
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
    assert [
        operation.shape
        for operation in trace.to_pandas().itertuples()
        if operation.op == "new_group"
    ] == ["1x3", "0"] * 4


def stay_away() -> None:
    if ringsim.current_ring().rank != 2:
        dist.new_group([0, 1, 2])


@pytest.mark.parametrize("record", [True, False])
def test_a_member_that_never_comes_is_named(record: bool) -> None:
    with pytest.raises(PeerExited) as caught:
        simulate(stay_away, world_size=4, link=LINK, record=record)
    assert caught.value.diagnosis is not None
    finding = caught.value.diagnosis.findings[0]
    assert (finding.kind, finding.ranks) == ("missing_participant", (2, 0, 1))


def disagree() -> None:
    dist.new_group([0, 1] if ringsim.current_ring().rank != 1 else [1, 2])


def test_another_group_in_its_place_is_refused_with_the_line_of_the_first() -> None:
    place = (
        r"got \[1, 2\] here and \[0, 1\] in rank 0's new_group at "
        rf"{__file__.rsplit('/', 1)[1]}:\d+ \(rank 1 of 3\)"
    )
    with pytest.raises(RendezvousFailed, match=place) as caught:
        simulate(disagree, world_size=3, link=LINK)
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().query(
        "op == 'new_group' and rank == 1"
    ).status.tolist() == ["error"]
