"""Tests of times on the virtual clock.

They use closed forms, injections, shared cores, and collectives computed by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from simulated_runs import exchange, now_s, run, switch

import ringsim
from ringsim import Link, Trace, simulate
from ringsim import comm as dist
from ringsim.errors import ArgumentError, PeerExited, RankFailed, RingError, RunTimeout
from ringsim.topologies import FullBisection, GraphLinks, Hosts, OneMachine, RingLinks, Topology

ALPHA, BETA = 1e-5, 1e-9
LINK = ringsim.Link(alpha_s=ALPHA, beta_s_per_byte=BETA)


def simulated(worker: Any, world_size: int, *args: Any, **kwargs: Any) -> Trace:
    return simulate(worker, world_size=world_size, args=args, **{"link": LINK, **kwargs})


def ring_all_reduce(elements: int) -> list[float]:
    """An all_reduce of messages, as in the textbook: each rank ends with the sum of all."""
    ring = ringsim.current_ring()
    size = ring.world_size
    chunks = list(torch.full((elements,), float(ring.rank)).chunk(size))
    for turn in range(2 * (size - 1)):
        out, place = chunks[(ring.rank - turn) % size], (ring.rank - turn - 1) % size
        inbox = exchange(out, torch.empty_like(chunks[place]))
        chunks[place] = chunks[place] + inbox if turn < size - 1 else inbox
    return torch.cat(chunks).tolist()


def tree_all_reduce(elements: int) -> list[float]:
    """An all_reduce through a binomial tree: to rank 0, and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, theirs = torch.full((elements,), float(rank)), torch.empty(elements)
    hops = [1 << step for step in range((size - 1).bit_length())]
    for hop in hops:
        if rank % (2 * hop) == hop:
            dist.send(total, rank - hop)
        elif rank % (2 * hop) == 0 and rank + hop < size:
            dist.recv(theirs, rank + hop)
            total += theirs
    for hop in reversed(hops):
        if rank % (2 * hop) == hop:
            dist.recv(total, rank - hop)
        elif rank % (2 * hop) == 0 and rank + hop < size:
            dist.send(total, rank + hop)
    return total.tolist()


@pytest.mark.parametrize(
    ("how", "a_rank", "size"),
    [
        *((ring_all_reduce, 4000, size) for size in (2, 4, 8)),
        *((tree_all_reduce, 4, size) for size in (3, 8, 64)),
    ],
)
def test_an_all_reduce_takes_what_its_messages_take(
    how: Callable[[int], list[float]], a_rank: int, size: int
) -> None:
    """A large all_reduce uses a ring, a small one a tree.

    With two or three ranks, the ring has as few steps, and moves fewer bytes.
    """
    elements, by_ring = a_rank * size, how is ring_all_reduce or size < 4
    trace = simulated(ring_all_reduce if by_ring else how, size, elements)
    assert trace.results == [[float(sum(range(size)))] * elements] * size
    steps, moved = (
        (2 * (size - 1), 4 * a_rank) if by_ring else (2 * (size - 1).bit_length(), 4 * elements)
    )
    assert trace.metadata["end_ns"] * 1e-9 == pytest.approx(
        steps * (ALPHA + moved * BETA), abs=steps * 1e-9
    )
    built_in = simulated(lambda: dist.all_reduce(torch.zeros(elements)), size)
    assert built_in.makespan_s == pytest.approx(trace.makespan_s, abs=steps * 1e-9)
    assert built_in.metadata["algorithms"] == {f"all_reduce: {'ring' if by_ring else 'tree'}": 1}
    shared = simulated(
        lambda: dist.all_reduce(torch.zeros(elements)),
        size,
        link=None,
        topology=FullBisection(LINK),
    )
    assert shared.makespan_s == pytest.approx(trace.makespan_s, abs=steps * 1e-9)


def talk(rounds: int) -> int:
    for _ in range(rounds):
        switch()
        dist.barrier()
    return rounds


@pytest.mark.parametrize("at_op", [0, 1, 2, 5, 7])
def test_a_rank_fails_in_place_of_an_operation(at_op: int) -> None:
    with pytest.raises(
        RankFailed, match=f"rank 1 of 3 was made to fail instead of posting operation {at_op}"
    ) as caught:
        run(talk, 3, 3, inject=[ringsim.Fail(1, at_op)])
    assert caught.value.rank == 1
    assert caught.value.trace is not None
    assert int((caught.value.trace.events.rank == 1).sum()) == at_op
    assert run(talk, 3, 3, inject=[ringsim.Fail(1, 9)]) == [3, 3, 3]


def wait_for_nobody() -> tuple[float, float]:
    ring, inbox = ringsim.current_ring(), torch.zeros(1)
    handle = dist.irecv(inbox, ring.pred, group=ring.pred_group)
    with pytest.raises(RunTimeout, match=r"not done within 0\.25 s of virtual time"):
        handle.wait(0.25)
    begun_s = now_s()
    with pytest.raises(RuntimeError, match=r"the connection to rank \d is closed"):  # as on Gloo
        dist.isend(torch.ones(1), ring.pred, group=ring.pred_group)
    sending = dist.isend(torch.ones(1), ring.succ)  # another group has its own connection
    dist.recv(inbox, ring.pred)
    sending.wait()
    return begun_s, inbox.item()


def test_a_wait_ends_at_its_limit_in_virtual_time() -> None:
    assert run(wait_for_nobody, 3) == [(0.25, 1.0)] * 3


def wait_long_and_then_for_ever() -> None:
    if dist.get_rank() == 0:
        ringsim.compute(0.003)
        dist.send(torch.zeros(1), 1)
        dist.recv(torch.zeros(1), 1)
    else:
        handle = dist.irecv(torch.zeros(1), 0)
        assert handle is not None
        handle.wait(timedelta(seconds=100))


def test_a_limit_that_was_not_needed_takes_no_time() -> None:
    """Version 0.1.0 reported that rank 0 waited for 100 s.

    It moved the clock to the time limit of a wait that had already ended.
    """
    with pytest.raises(PeerExited) as raised:
        simulated(wait_long_and_then_for_ever, 2)
    assert raised.value.trace is not None
    assert raised.value.trace.metadata["end_ns"] == pytest.approx(
        (0.003 + ALPHA + 4 * BETA) * 1e9, abs=2
    )
    assert "waits in recv" in str(raised.value)


def wait_on_a_group_with_a_limit(op: str, seconds: float) -> tuple[str, float]:
    group, said = dist.new_group(timeout=timedelta(seconds=seconds)), ""
    if dist.get_rank() == 0:
        try:
            dist.recv(torch.zeros(1), 1, group) if op == "recv" else dist.all_reduce(
                torch.zeros(1), group=group
            )
        except RuntimeError as error:
            said = type(error).__name__
    dist.barrier()
    return said, round(now_s(), 3)


@pytest.mark.parametrize("op", ["recv", "all_reduce"])
def test_the_time_out_of_a_group_is_the_programs_own(op: str) -> None:
    """As on real ranks; version 0.2.0 reported the two ranks as stuck.

    A longer timeout may only be a safeguard against hangs, so the diagnosis comes first.
    """
    assert run(wait_on_a_group_with_a_limit, 2, op, 2.0) == [("RunTimeout", 2.0), ("", 2.0)]
    with pytest.raises(RingError):
        run(wait_on_a_group_with_a_limit, 2, op, 60.0)


def ask(answers: bool) -> bool:
    """Asks whether a message has come, which rank 0 sends after a second if it ``answers``."""
    rank = dist.get_rank()
    if answers and rank == 0:
        ringsim.compute(1.0)
        dist.send(torch.zeros(1), 1)
        return True
    handle, asked = dist.irecv(torch.zeros(1), 1 - rank), 0
    while not handle.is_completed():
        asked += 1
    return asked < 10


def test_who_asks_lets_time_pass_but_not_for_ever() -> None:
    assert run(ask, 2, True) == [True, True]
    with pytest.raises(ringsim.errors.Deadlock, match="calls in a row"):
        run(ask, 2, False)


def compute_for_real(times: int) -> float:
    ring = ringsim.current_ring()
    # the start-up cost of a process's first product is not part of the span
    matrix = torch.rand(100, 100) @ torch.rand(100, 100) * 1e-3
    with ringsim.span("work"):
        # much more than other work on the machine can hide
        for _ in range(times * (1 + 15 * ring.rank)):
            matrix = matrix @ matrix * 1e-3
    dist.barrier()
    return now_s()


def test_computing_takes_what_it_takes_where_that_is_asked_for() -> None:
    free = simulated(compute_for_real, 3, 50)
    assert free.results == pytest.approx([2 * ALPHA] * 3)
    measured = simulated(compute_for_real, 3, 50, compute="measured")
    assert min(measured.results) > 1e-4
    frame = measured.to_pandas()
    took = (frame.done_ns - frame.post_ns)[frame.op == "span"].tolist()
    assert took[2] > took[0] > 0
    assert measured.metadata["constants"]["compute"] == "measured"
    assert "another run gives different times" in measured.metadata["notes"][0]


def compute_twice(seconds: float) -> None:
    ringsim.compute(seconds)
    ringsim.compute(seconds)


def twice(operation: str) -> None:
    for _ in range(2):
        if operation == "message":
            (dist.recv if dist.get_rank() else dist.send)(torch.zeros(1), 1 - dist.get_rank())
        else:
            dist.barrier() if operation == "barrier" else dist.all_reduce(torch.zeros(1))


def test_times_that_no_trace_can_hold_are_refused() -> None:
    """A trace counts nanoseconds in 64 bits.

    2**63 ns are 9,223,372,036.8 s, of which 9e9 s may be used.
    """
    frame = simulated(compute_twice, 1, 4.5e9).to_pandas()
    assert frame["done_ns"].tolist() == [4_500_000_000_000_000_000, 9_000_000_000_000_000_000]
    slow: list[Any] = [
        (compute_twice, seconds, {}) for seconds in (4.55e9, 5e9, 1e10, 1e300, 1.7e308)
    ]
    slow += [
        (twice, what, {"link": link})
        for what in ("message", "all_reduce")
        for link in (Link(5e9, 0), Link(0, 1e300))
    ]
    slow += [
        (twice, "message", {"link": None, "topology": FullBisection(link)})
        for link in (Link(1e12, 0), Link(0, 1e300))
    ]
    for worker, what, network in [*slow, (twice, "barrier", {"link": Link(5e9, 0)})]:
        with pytest.raises(
            ArgumentError,
            match=r"a time must be at most 9e\+09 s \(285 years",
        ):
            run(worker, 2, what, **network)
    with pytest.raises(
        ArgumentError,
        match=r"alpha_s of link must be from 0 to 9e\+09 s, got 1000000000000\.0\. Give seconds",
    ):
        run(twice, 2, "message", link=Link(1e12, 0))


LATENCY = Link(alpha_s=0.004, beta_s_per_byte=0.0)
RECORDED = Path(__file__).parent.parent / "figures" / "data" / "straggler.ringtrace"
CALIBRATION = replace(  # with these known values
    ringsim.calibrate(ringsim.load(RECORDED)),
    link=LATENCY,
    sending=Link(0.0, 0.0),
    sending_early_s=0.0,
    receiving_s=0.0,
    around_s=0.001,
)


def send_to_neighbour() -> float:
    """Sends from rank 0 to 1 and 2 to 3 at the same time; returns the end of this rank in ms."""
    rank = dist.get_rank()
    (dist.recv if rank % 2 else dist.send)(torch.zeros(1), rank ^ 1)
    return round(now_s() * 1e3, 6)


def compute_10_ms() -> float:
    ringsim.compute(0.010)
    return round(now_s() * 1e3, 6)


@pytest.mark.parametrize(("cores", "done_ms"), [(1, [4, 4, 8, 8]), (2, [4, 4, 4, 4])])
def test_messages_wait_for_a_core(cores: int, done_ms: list[float]) -> None:
    assert run(send_to_neighbour, 4, link=None, topology=OneMachine(LATENCY, cores)) == done_ms


@pytest.mark.parametrize(
    ("cores", "done_ms"), [(1, [11, 12, 13, 14]), (2, [11, 11, 12, 12]), (4, [11] * 4)]
)
def test_ranks_sleep_side_by_side_and_go_on_one_after_the_other(
    cores: int, done_ms: list[float]
) -> None:
    network: dict[str, Any] = {"link": None, "topology": OneMachine(LATENCY, cores)}
    assert run(compute_10_ms, 4, compute=CALIBRATION, **network) == done_ms


def test_links_alone_share_no_cores() -> None:
    assert run(compute_10_ms, 4, link=LATENCY, compute=CALIBRATION) == [11] * 4


def test_slower_link_needs_no_more_of_a_core() -> None:
    slow = [ringsim.Degrade(0, 1, factor=10)]
    done_ms = run(send_to_neighbour, 4, link=None, topology=OneMachine(LATENCY, 1), inject=slow)
    assert done_ms == [40, 40, 8, 8]  # after the 4 ms of the first post


A_FLOAT_A_SECOND = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.25)  # one second per float


def finished(handle: Any) -> float:
    handle.wait()
    return now_s()


def numbers(count: int) -> torch.Tensor:
    return torch.zeros(count)


def pieces(size: int) -> list[torch.Tensor]:
    return [numbers(3) for _ in range(size)]


# name -> the call of each of N ranks, with 3 floats for each rank (for a tree: 3 in total)
CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, size: dist.all_reduce(numbers(3 * size)),
    "all_gather": lambda rank, size: dist.all_gather(pieces(size), numbers(3)),
    "all_gather_into_tensor": lambda rank, size: dist.all_gather_into_tensor(
        numbers(3 * size), numbers(3)
    ),
    "reduce_scatter": lambda rank, size: dist.reduce_scatter(numbers(3), pieces(size)),
    "reduce_scatter_tensor": lambda rank, size: dist.reduce_scatter_tensor(
        numbers(3), numbers(3 * size)
    ),
    "all_to_all": lambda rank, size: dist.all_to_all(pieces(size), pieces(size)),
    "all_to_all_single": lambda rank, size: dist.all_to_all_single(
        numbers(3 * size), numbers(3 * size)
    ),
    "broadcast": lambda rank, size: dist.broadcast(numbers(3), src=size - 1),
    "reduce": lambda rank, size: dist.reduce(numbers(3), dst=1),
    "gather": lambda rank, size: dist.gather(
        numbers(3), pieces(size) if rank == 1 else None, dst=1
    ),
    "scatter": lambda rank, size: dist.scatter(
        numbers(3), pieces(size) if rank == 1 else None, src=1
    ),
    "barrier": lambda rank, size: dist.barrier(),
}


def expected_s(name: str, size: int) -> float:
    """Returns the time, with 3 s for the bytes of a step, and 1 s of latency."""
    hops = (size - 1).bit_length()
    if name == "all_reduce":
        return 2 * (size - 1) * 4.0
    if name in ("broadcast", "reduce"):
        return hops * 4.0
    if name in ("gather", "scatter"):
        return 1.0 + 3.0 * (size - 1)
    return hops * 1.0 if name == "barrier" else (size - 1) * 4.0


def complete_graph(size: int) -> GraphLinks:
    graph = nx.complete_graph(size)
    nx.set_edge_attributes(graph, A_FLOAT_A_SECOND, "link")
    return GraphLinks(graph)


def call(name: str) -> None:
    ring = ringsim.current_ring()
    CALLS[name](ring.rank, ring.world_size)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", CALLS)
def test_where_nobody_is_met_the_formula_holds_on_any_network(name: str, size: int) -> None:
    networks: list[dict[str, Any]] = [{"link": A_FLOAT_A_SECOND}]
    networks += [
        {"topology": topology}
        for topology in (complete_graph(size), FullBisection(A_FLOAT_A_SECOND))
    ]
    times = [
        simulate(call, world_size=size, args=(name,), **network).makespan_s for network in networks
    ]
    assert times == pytest.approx([expected_s(name, size)] * 3, rel=1e-9)


def reduce_and_send() -> list[float]:
    """Ranks 0 and 1 reduce 8 floats while 0 sends 8 to 2: both leave rank 0 on the same link."""
    ring = ringsim.current_ring()
    pair = dist.new_group([0, 1])
    handles = [dist.all_reduce(numbers(8), group=pair, async_op=True)] if ring.rank < 2 else []
    if ring.rank == 0:
        handles.append(dist.isend(numbers(8), 2))
    if ring.rank == 2:
        handles.append(dist.irecv(numbers(8), 0))
    return sorted(finished(handle) for handle in handles[::-1])


def test_a_collective_and_a_message_share_a_link() -> None:
    alone = 2 * (1 + 4.0)  # two steps of four floats
    assert simulate(reduce_and_send, world_size=3, link=A_FLOAT_A_SECOND).results == [
        [9.0, alone],
        [alone],
        [9.0],
    ]
    shared = simulate(reduce_and_send, world_size=3, topology=FullBisection(A_FLOAT_A_SECOND))
    # Eight seconds of bytes each at half the pace, and one latency for the message, two for the
    # collective.
    assert shared.results == [[17.0, 18.0], [18.0], [17.0]]


def reduce_twice() -> tuple[float, float]:
    first, second = (dist.all_reduce(numbers(8), async_op=True) for _ in range(2))
    return finished(first), finished(second)


@pytest.mark.parametrize(
    "network", [{"link": A_FLOAT_A_SECOND}, {"topology": FullBisection(A_FLOAT_A_SECOND)}]
)
def test_collectives_of_a_group_go_one_after_the_other(network: dict[str, Any]) -> None:
    trace = simulate(reduce_twice, world_size=2, **network)
    # the bytes of the second are in flight during the latency of the first
    assert trace.results == [(10.0, 18.0)] * 2


def exchange_unevenly() -> None:
    rank = ringsim.current_ring().rank
    given, taken = (
        ([1, 8, 1], [1, 1, 1]) if rank == 0 else ([1, 1, 1], [8, 1, 1] if rank == 1 else [1, 1, 1])
    )
    dist.all_to_all_single(numbers(sum(taken)), numbers(sum(given)), taken, given)


def test_an_all_to_all_moves_the_pieces_that_there_are() -> None:
    trace = simulate(exchange_unevenly, world_size=3, topology=FullBisection(A_FLOAT_A_SECOND))
    # the step with the long piece, and the other step
    assert trace.makespan_s == pytest.approx((8 + 1) + (1 + 1))


@pytest.mark.parametrize(
    "topology",
    [FullBisection(A_FLOAT_A_SECOND), Hosts(8, inner=A_FLOAT_A_SECOND, outer=A_FLOAT_A_SECOND)],
)
def test_a_ring_of_many_ranks_costs_a_flow_for_each(topology: Topology) -> None:
    trace = simulate(call, world_size=1000, args=("all_reduce",), topology=topology, record=False)
    assert trace.makespan_s == pytest.approx(expected_s("all_reduce", 1000)), (
        "also known without events"
    )


def reduce_beside_a_message(built_in: bool, elements: int) -> float:
    """All ranks reduce while rank 0 sends to rank 2.

    The reduction is torch's, or the same steps written with messages.
    """
    ring, group = ringsim.current_ring(), dist.new_group()
    handles: list[Any] = [dist.isend(numbers(elements), 2)] if ring.rank == 0 else []
    handles += [dist.irecv(numbers(elements), 0)] if ring.rank == 2 else []
    if built_in:
        dist.all_reduce(numbers(4000), group=group)
    else:
        for _ in range(2 * (ring.world_size - 1)):
            for handle in (
                dist.isend(numbers(1000), ring.succ, group),
                dist.irecv(numbers(1000), ring.pred, group),
            ):
                handle.wait()
    reduced_s = now_s()
    for handle in handles:
        handle.wait()
    return reduced_s


@pytest.mark.parametrize("elements", [10, 1000])
@pytest.mark.parametrize(
    "topology",
    [
        FullBisection(A_FLOAT_A_SECOND),
        RingLinks(A_FLOAT_A_SECOND),
        Hosts(2, A_FLOAT_A_SECOND, A_FLOAT_A_SECOND),
    ],
)
def test_beside_a_message_the_flows_take_what_the_steps_take(
    topology: Topology, elements: int
) -> None:
    built_in, by_hand = (
        max(run(reduce_beside_a_message, 4, how, elements, link=None, topology=topology))
        for how in (True, False)
    )
    assert built_in == pytest.approx(by_hand, rel=1e-9)
    assert built_in > expected_s("all_reduce", 4) * 1000 / 4  # the message slows it down
