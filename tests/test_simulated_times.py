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
from simulated_runs import now_s, run

import ringsim
from ringsim import Link, Trace, simulate
from ringsim import comm as dist
from ringsim.errors import ArgumentError, RingError, RunTimeout
from ringsim.topologies import FullBisection, GraphLinks, Hosts, OneMachine, RingLinks, Topology

ALPHA, BETA = 1e-5, 1e-9
LINK = ringsim.Link(alpha_s=ALPHA, beta_s_per_byte=BETA)


def simulated(worker: Any, world_size: int, *args: Any, **kwargs: Any) -> Trace:
    return simulate(worker, world_size=world_size, args=args, **{"link": LINK, **kwargs})


@pytest.mark.parametrize(
    ("how", "elements", "size"),
    [
        ("ring", 8000, 2),
        ("ring", 32000, 8),
        ("ring", 12, 3),  # as few steps as a tree, and fewer bytes
        ("tree", 12, 8),
        ("tree", 256, 64),
    ],
)
def test_a_large_all_reduce_uses_a_ring_and_a_small_one_a_tree(
    how: str, elements: int, size: int
) -> None:
    trace = simulated(lambda: dist.all_reduce(torch.zeros(elements)), size)
    steps, moved = 2 * (size - 1), elements * 4 / size
    if how == "tree":
        steps, moved = 2 * (size - 1).bit_length(), elements * 4
    assert trace.makespan_s == pytest.approx(steps * (ALPHA + moved * BETA), abs=steps * 1e-9)
    assert trace.metadata["algorithms"] == {f"all_reduce: {how}": 1}


def wait_for_nobody() -> tuple[float, float]:
    ring, inbox = ringsim.current_ring(), torch.zeros(1)
    handle = dist.irecv(inbox, ring.pred, group=ring.pred_group)
    with pytest.raises(RunTimeout, match=r"within 0\.25 s of virtual time"):
        handle.wait(0.25)
    begun_s = now_s()
    with pytest.raises(RuntimeError, match="is closed"):  # as on Gloo
        dist.isend(torch.ones(1), ring.pred, group=ring.pred_group)
    sending = dist.isend(torch.ones(1), ring.succ)  # another group has its own connection
    dist.recv(inbox, ring.pred)
    sending.wait()
    return begun_s, inbox.item()


def test_a_wait_ends_at_its_limit_in_virtual_time() -> None:
    assert run(wait_for_nobody, 3) == [(0.25, 1.0)] * 3


def wait_on_a_group_with_a_limit(op: str, seconds: float) -> tuple[str, float]:
    group, said = dist.new_group(timeout=timedelta(seconds=seconds)), ""
    if dist.get_rank() == 0:
        try:
            if op == "recv":
                dist.recv(torch.zeros(1), 1, group)
            else:
                dist.all_reduce(torch.zeros(1), group=group)
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


def ask(what: str) -> list[float]:
    """Rank 1 asks until its receive, or its collective, is done, and does not wait."""
    rank, tensor = dist.get_rank(), torch.full((2,), float(dist.get_rank()))
    if what == "message" and rank == 0:
        ringsim.compute(0.01)
        dist.send(tensor, 1)
        return tensor.tolist()
    handle: Any = (
        dist.all_reduce(tensor, async_op=True)
        if what == "all_reduce"
        else dist.irecv(tensor, 1 - rank)
    )
    while not handle.is_completed():
        pass
    return tensor.tolist()


@pytest.mark.parametrize(
    ("what", "semantics"),
    [("message", "rendezvous"), ("message", "buffered"), ("all_reduce", "grouped")],
)
def test_what_was_asked_for_until_done_is_done(what: str, semantics: str) -> None:
    trace = simulated(ask, 2, what, link=Link(1e-3, 1e-9), semantics=semantics)
    assert trace.results[1] == ([0, 0] if what == "message" else [1, 1])
    frame = trace.to_pandas().query("op in ['irecv', 'all_reduce']")
    done_ns = 11_000_008 if what == "message" else 2_000_008  # each question takes 1,000
    assert frame.done_ns.between(done_ns, done_ns + 1000).all()
    assert set(frame.status) == {"ok"}
    assert trace.explain().findings == ()


def test_who_asks_for_ever_is_told() -> None:
    with pytest.raises(ringsim.errors.Deadlock, match="calls in a row"):
        run(ask, 2, "nothing")


def compute_for_real(times: int) -> float:
    # the start-up cost of a process's first product is not part of the span
    matrix = torch.rand(100, 100) @ torch.rand(100, 100) * 1e-3
    with ringsim.span("work"):
        # much more than other work on the machine can hide
        for _ in range(times * (1 + 15 * dist.get_rank())):
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
    assert "will produce different times" in measured.metadata["notes"][0]


def twice(what: Any) -> None:
    for _ in range(2):
        if what == "message":
            (dist.recv if dist.get_rank() else dist.send)(torch.zeros(1), 1 - dist.get_rank())
        elif what == "barrier":
            dist.barrier()
        elif what == "all_reduce":
            dist.all_reduce(torch.zeros(1))
        else:
            ringsim.compute(what)


@pytest.mark.parametrize(
    ("what", "network"),
    [
        (4.55e9, {}),
        (1.7e308, {}),
        ("message", {"link": Link(5e9, 0)}),
        ("message", {"link": Link(0, 1e300)}),
        ("all_reduce", {"link": Link(5e9, 0)}),
        ("all_reduce", {"link": Link(0, 1e300)}),
        ("barrier", {"link": Link(5e9, 0)}),
        ("message", {"link": None, "topology": FullBisection(Link(1e12, 0))}),
        ("message", {"link": None, "topology": FullBisection(Link(0, 1e300))}),
    ],
)
def test_times_that_no_trace_can_hold_are_refused(what: Any, network: dict[str, Any]) -> None:
    """A trace counts nanoseconds in 64 bits: 2**63 ns are 9,223,372,036.8 s."""
    with pytest.raises(ArgumentError, match=r"at most 9e\+09 s \(285 years"):
        simulated(twice, 2, what, **network)


def test_the_longest_time_is_9e9_seconds() -> None:
    frame = simulated(twice, 1, 4.5e9).to_pandas()
    assert frame["done_ns"].tolist() == [4_500_000_000_000_000_000, 9_000_000_000_000_000_000]
    with pytest.raises(ArgumentError, match=r"alpha_s of link must be from 0 to 9e\+09 s"):
        simulated(twice, 2, "message", link=Link(1e12, 0))


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
    ("network", "done_ms"),
    [
        (OneMachine(LATENCY, 1), [11, 12, 13, 14]),
        (OneMachine(LATENCY, 2), [11, 11, 12, 12]),
        (OneMachine(LATENCY, 4), [11] * 4),
        (FullBisection(LATENCY), [11] * 4),  # links alone share no cores
    ],
)
def test_ranks_sleep_side_by_side_and_go_on_one_after_the_other(
    network: Topology, done_ms: list[float]
) -> None:
    assert run(compute_10_ms, 4, compute=CALIBRATION, link=None, topology=network) == done_ms


def test_slower_link_needs_no_more_of_a_core() -> None:
    slow = [ringsim.Degrade(0, 1, factor=10)]
    done_ms = run(send_to_neighbour, 4, link=None, topology=OneMachine(LATENCY, 1), inject=slow)
    assert done_ms == [40, 40, 8, 8]  # after the 4 ms of the first post


A_FLOAT_A_SECOND = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.25)  # one second per float


def numbers(count: int) -> torch.Tensor:
    return torch.zeros(count)


def pieces(size: int) -> list[torch.Tensor]:
    return [numbers(3) for _ in range(size)]


# name -> the call of each of N ranks, with 3 floats for each rank (for a tree: 3 in total)
CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, size: dist.all_reduce(numbers(3 * size)),
    "all_gather": lambda rank, size: dist.all_gather(pieces(size), numbers(3)),
    "reduce_scatter": lambda rank, size: dist.reduce_scatter(numbers(3), pieces(size)),
    "all_to_all": lambda rank, size: dist.all_to_all(pieces(size), pieces(size)),
    "broadcast": lambda rank, size: dist.broadcast(numbers(3), src=size - 1),
    "reduce": lambda rank, size: dist.reduce(numbers(3), dst=1),
    "gather": lambda rank, size: dist.gather(numbers(3), pieces(size) if rank == 1 else None, 1),
    "scatter": lambda rank, size: dist.scatter(numbers(3), pieces(size) if rank == 1 else None, 1),
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


def call(name: str) -> None:
    CALLS[name](dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", CALLS)
def test_where_nobody_is_met_the_formula_holds_on_any_network(name: str, size: int) -> None:
    graph = nx.complete_graph(size)
    nx.set_edge_attributes(graph, A_FLOAT_A_SECOND, "link")
    networks: list[dict[str, Any]] = [
        {"link": A_FLOAT_A_SECOND},
        {"topology": GraphLinks(graph)},
        {"topology": FullBisection(A_FLOAT_A_SECOND)},
    ]
    for network in networks:
        took_s = simulate(call, world_size=size, args=(name,), **network).makespan_s
        assert took_s == pytest.approx(expected_s(name, size), rel=1e-9)


def reduce_twice() -> tuple[float, float]:
    first, second = (dist.all_reduce(numbers(8), async_op=True) for _ in range(2))
    assert first is not None
    assert second is not None
    first.wait()
    first_s = now_s()
    second.wait()
    return first_s, now_s()


@pytest.mark.parametrize(
    "network", [{"link": A_FLOAT_A_SECOND}, {"topology": FullBisection(A_FLOAT_A_SECOND)}]
)
def test_collectives_of_a_group_go_one_after_the_other(network: dict[str, Any]) -> None:
    trace = simulate(reduce_twice, world_size=2, **network)
    # the bytes of the second are in flight during the latency of the first
    assert trace.results == [(10.0, 18.0)] * 2


PIECES = [[1, 8, 1], [1, 1, 1], [1, 1, 1]]  # from each rank to each


def exchange_unevenly() -> None:
    given = PIECES[dist.get_rank()]
    taken = [pieces[dist.get_rank()] for pieces in PIECES]
    dist.all_to_all_single(numbers(sum(taken)), numbers(sum(given)), taken, given)


def test_an_all_to_all_moves_the_pieces_that_there_are() -> None:
    trace = simulate(exchange_unevenly, world_size=3, topology=FullBisection(A_FLOAT_A_SECOND))
    # the step with the long piece, and the other step
    assert trace.makespan_s == pytest.approx((8 + 1) + (1 + 1))


def test_a_ring_of_many_ranks_costs_a_flow_for_each() -> None:
    topology = Hosts(8, inner=A_FLOAT_A_SECOND, outer=A_FLOAT_A_SECOND)
    trace = simulate(call, world_size=1000, args=("all_reduce",), topology=topology, record=False)
    assert trace.makespan_s == pytest.approx(expected_s("all_reduce", 1000))


def reduce_beside_a_message(built_in: bool, elements: int) -> float:
    """All ranks reduce while rank 0 sends to rank 2.

    The reduction is torch's, or the same steps written with messages.
    """
    ring, group = ringsim.current_ring(), dist.new_group()
    handles: list[Any] = []
    if ring.rank == 0:
        handles.append(dist.isend(numbers(elements), 2))
    elif ring.rank == 2:
        handles.append(dist.irecv(numbers(elements), 0))
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


def test_a_message_does_not_slow_a_collective_on_private_links() -> None:
    ends = run(reduce_beside_a_message, 4, True, 1000, link=A_FLOAT_A_SECOND)
    assert ends == pytest.approx([6 * 1001.0] * 4)
