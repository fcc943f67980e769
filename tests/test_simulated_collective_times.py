"""How long simulated collectives take: formulas where nobody is met, and worked out by hand where links are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.simulator.api import simulate
from ringsim.state import get_state
from ringsim.topologies import FullBisection, GraphLinks, Hosts, RingLinks, Topology

LINK = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.25)  # a float takes a second


def finished(handle: Any) -> float:
    handle.wait()
    clock = get_state().clock
    assert clock is not None
    return clock.now_s()


def numbers(count: int) -> torch.Tensor:
    return torch.zeros(count)


def pieces(size: int) -> list[torch.Tensor]:
    return [numbers(3) for _ in range(size)]


# name -> what each of N ranks calls, with 3 floats for each of them (for a tree: 3 in all)
CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, size: dist.all_reduce(numbers(3 * size)),
    "all_gather": lambda rank, size: dist.all_gather(pieces(size), numbers(3)),
    "all_gather_into_tensor": lambda rank, size: dist.all_gather_into_tensor(numbers(3 * size), numbers(3)),
    "reduce_scatter": lambda rank, size: dist.reduce_scatter(numbers(3), pieces(size)),
    "reduce_scatter_tensor": lambda rank, size: dist.reduce_scatter_tensor(numbers(3), numbers(3 * size)),
    "all_to_all": lambda rank, size: dist.all_to_all(pieces(size), pieces(size)),
    "all_to_all_single": lambda rank, size: dist.all_to_all_single(numbers(3 * size), numbers(3 * size)),
    "broadcast": lambda rank, size: dist.broadcast(numbers(3), src=size - 1),
    "reduce": lambda rank, size: dist.reduce(numbers(3), dst=1),
    "gather": lambda rank, size: dist.gather(numbers(3), pieces(size) if rank == 1 else None, dst=1),
    "scatter": lambda rank, size: dist.scatter(numbers(3), pieces(size) if rank == 1 else None, src=1),
    "barrier": lambda rank, size: dist.barrier(),
}


def expected_s(name: str, size: int) -> float:
    """With 3 s for the bytes of a step, and 1 s of latency."""
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
    nx.set_edge_attributes(graph, LINK, "link")
    return GraphLinks(graph)


def call(name: str) -> None:
    ring = ringsim.current_ring()
    CALLS[name](ring.rank, ring.world_size)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", CALLS)
def test_where_nobody_is_met_the_formula_holds_on_any_network(name: str, size: int) -> None:
    networks: list[dict[str, Any]] = [{"link": LINK}, {"topology": complete_graph(size)}, {"topology": FullBisection(LINK)}]
    times = [simulate(call, world_size=size, args=(name,), **network).makespan_s for network in networks]
    assert times == pytest.approx([expected_s(name, size)] * 3, rel=1e-9)


def reduce_and_send() -> list[float]:
    """Ranks 0 and 1 reduce 8 floats while 0 sends 8 to 2: both go out of rank 0."""
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
    assert simulate(reduce_and_send, world_size=3, link=LINK).results == [[9.0, alone], [alone], [9.0]]
    shared = simulate(reduce_and_send, world_size=3, topology=FullBisection(LINK))
    # Eight seconds of bytes each at half the pace, and one latency for the message, two for the collective.
    assert shared.results == [[17.0, 18.0], [18.0], [17.0]]


def reduce_twice() -> tuple[float, float]:
    first, second = (dist.all_reduce(numbers(8), async_op=True) for _ in range(2))
    return finished(first), finished(second)


@pytest.mark.parametrize("network", [{"link": LINK}, {"topology": FullBisection(LINK)}], ids=["private", "shared"])
def test_collectives_of_a_group_go_one_after_the_other(network: dict[str, Any]) -> None:
    trace = simulate(reduce_twice, world_size=2, **network)
    assert trace.results == [(10.0, 18.0)] * 2  # the second has its bytes on the way while the first one's latency passes


def exchange_unevenly() -> None:
    rank = ringsim.current_ring().rank
    given, taken = ([1, 8, 1], [1, 1, 1]) if rank == 0 else ([1, 1, 1], [8, 1, 1] if rank == 1 else [1, 1, 1])
    dist.all_to_all_single(numbers(sum(taken)), numbers(sum(given)), taken, given)


def test_an_all_to_all_moves_the_pieces_that_there_are() -> None:
    trace = simulate(exchange_unevenly, world_size=3, topology=FullBisection(LINK))
    assert trace.makespan_s == pytest.approx((8 + 1) + (1 + 1))  # the step with the long piece, and the other one


@pytest.mark.timeout(60)
@pytest.mark.parametrize("topology", [FullBisection(LINK), Hosts(8, inner=LINK, outer=LINK)], ids=["bisection", "hosts"])
def test_a_ring_of_many_ranks_costs_a_flow_for_each(topology: Topology) -> None:
    trace = simulate(call, world_size=1000, args=("all_reduce",), topology=topology, record=False)
    assert trace.metadata["end_ns"] * 1e-9 == pytest.approx(expected_s("all_reduce", 1000))


def reduce_beside_a_message(built_in: bool, elements: int) -> float:
    """All ranks reduce while 0 sends to 2; the reduction is torch's, or the same steps written out with messages."""
    ring, group = ringsim.current_ring(), dist.new_group()
    handles: list[Any] = [dist.isend(numbers(elements), 2)] if ring.rank == 0 else []
    handles += [dist.irecv(numbers(elements), 0)] if ring.rank == 2 else []
    if built_in:
        dist.all_reduce(numbers(4000), group=group)
    else:
        for _ in range(2 * (ring.world_size - 1)):
            step = [dist.isend(numbers(1000), ring.succ, group), dist.irecv(numbers(1000), ring.pred, group)]
            for handle in step:
                handle.wait()
    clock = get_state().clock
    assert clock is not None
    reduced_s = clock.now_s()
    for handle in handles:
        handle.wait()
    return reduced_s


@pytest.mark.parametrize("elements", [10, 1000])
@pytest.mark.parametrize("topology", [FullBisection(LINK), RingLinks(LINK), Hosts(2, LINK, LINK)], ids=["bisection", "ring", "hosts"])
def test_beside_a_message_the_flows_take_what_the_steps_take(topology: Topology, elements: int) -> None:
    built_in, by_hand = (
        max(simulate(reduce_beside_a_message, world_size=4, args=(built_in, elements), topology=topology).results)
        for built_in in (True, False)
    )
    assert built_in == pytest.approx(by_hand, rel=1e-9)
    assert built_in > expected_s("all_reduce", 4) * 1000 / 4  # the message is felt
