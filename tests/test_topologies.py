"""Links and networks of links: the times and the routes of messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim import Link, topologies
from ringsim.errors import ArgumentError
from ringsim.topologies import GlooCosts, GraphLinks

LINK = Link(2.0, 0.5)


def edges(
    topology: topologies.Topology, src: int, dst: int, world_size: int
) -> list[tuple[object, object]]:
    return [hop.edge for hop in topology.route(src, dst, world_size)]


def graph_of(graph: nx.Graph, link: Link = LINK) -> nx.Graph:
    nx.set_edge_attributes(graph, link, "link")
    return graph


@pytest.mark.parametrize(
    ("size", "src", "dst", "expected"),
    [
        (6, 5, 0, [(5, 0)]),
        (6, 0, 3, [(0, 1), (1, 2), (2, 3)]),  # equally far both ways, so ascending
        (6, 3, 0, [(3, 4), (4, 5), (5, 0)]),
        (6, 0, 4, [(0, 5), (5, 4)]),
        (2, 0, 1, [(0, 1)]),  # a ring of two has one link in each direction
        (2, 1, 0, [(1, 0)]),
    ],
)
def test_a_ring_by_hand(size: int, src: int, dst: int, expected: list[tuple[int, int]]) -> None:
    assert edges(topologies.RingLinks(LINK), src, dst, size) == expected


@given(st.integers(2, 40), st.data())
def test_a_ring_takes_the_shorter_way(world_size: int, data: st.DataObject) -> None:
    src, dst = data.draw(
        st.lists(st.integers(0, world_size - 1), min_size=2, max_size=2, unique=True)
    )
    hops = edges(topologies.RingLinks(LINK), src, dst, world_size)
    assert len(hops) == nx.shortest_path_length(nx.cycle_graph(world_size), src, dst)
    assert (hops[0][0], hops[-1][1]) == (src, dst)


def test_an_undisturbed_message_pays_the_outer_link_once() -> None:
    hosts = topologies.Hosts(4, inner=Link(1.0, 0.25), outer=LINK)
    inside, outside = hosts.route(4, 7, 8), hosts.route(3, 4, 8)
    assert inside == [topologies.Hop((4, 7), Link(1.0, 0.25))]
    assert [hop.edge for hop in outside] == [("host 0", "network"), ("network", "host 1")]
    assert sum(hop.link.alpha_s for hop in outside) == LINK.alpha_s
    assert max(hop.link.beta_s_per_byte for hop in outside) == LINK.beta_s_per_byte
    assert topologies.OneMachine(LINK, cores=2).route(6, 2, 8) == [topologies.Hop((6, 2), LINK)]


@pytest.mark.parametrize(("direct_s", "over_far"), [(3.0, True), (2.0, False)])
def test_a_graph_goes_by_latency_then_by_hops(direct_s: float, over_far: bool) -> None:
    graph = nx.DiGraph()
    for here, there, latency_s in ((0, "far", 1.0), ("far", 1, 1.0), (0, 1, direct_s), (1, 0, 5.0)):
        graph.add_edge(here, there, link=Link(latency_s, 0.0))
    topology = GraphLinks(graph)
    assert edges(topology, 0, 1, 2) == ([(0, "far"), ("far", 1)] if over_far else [(0, 1)])
    assert edges(topology, 1, 0, 2) == [(1, 0)]  # directed: no way back over "far"


@given(st.integers(2, 9), st.integers(0, 10**6), st.data())
def test_a_graph_finds_the_least_latency(world_size: int, seed: int, data: st.DataObject) -> None:
    graph = nx.gnp_random_graph(world_size, 0.4, seed=seed, directed=True)
    for here, there in graph.edges:
        graph.edges[here, there]["link"] = Link(float(data.draw(st.integers(0, 9))), 1.0)
    topology = GraphLinks(graph)
    best = dict(
        nx.all_pairs_dijkstra_path_length(graph, weight=lambda _, __, data: data["link"].alpha_s)
    )
    for src in range(world_size):
        for dst in set(range(world_size)) - {src}:
            if dst in best[src]:
                hops = topology.route(src, dst, world_size)
                assert sum(hop.link.alpha_s for hop in hops) == best[src][dst]
            else:
                with pytest.raises(ArgumentError, match=f"from rank {src} to rank {dst}"):
                    topology.route(src, dst, world_size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topologies.RingLinks("fast"), "link must be a Link, got 'fast'"),
        (lambda: topologies.Hosts(0, LINK, LINK), "ranks_per_host must be a positive integer"),
        (lambda: topologies.Hosts(2, LINK, 1.0), "outer must be a Link, got 1.0"),
        (lambda: topologies.OneMachine(LINK, 1.5), "cores must be a positive integer, got 1.5"),
        (lambda: GlooCosts(LINK, stall_share=1.5), "stall_share must be .* to 1, got 1.5"),
        (lambda: GlooCosts(LINK, stall_s=-1.0), "stall_s must be from 0"),
        (lambda: GraphLinks({0: [1]}), "graph must be a networkx Graph or DiGraph"),
        (lambda: GraphLinks(nx.MultiGraph([(0, 1)])), "graph must be a networkx Graph or DiGraph"),
        (lambda: GraphLinks(nx.path_graph(2)), r"link of edge \(0, 1\) must be a Link, got None"),
        (
            lambda: GraphLinks(graph_of(nx.path_graph(2))).check(8),
            "no node for ranks 2, 3, 4, 5, 6 and 7, but the run has 8 ranks",
        ),
        (lambda: LINK.time_s(-1), "size_bytes must be non-negative, got -1"),
        *(
            (lambda numbers=numbers: Link(*numbers), "must be a non-negative number")
            for numbers in (
                *((-1e-6, 0.0), (math.nan, 0.0), (0.0, math.inf), (0.0, -1.0)),
                *(("fast", 0.0), (0.0, 0.0, -1.0), (True, 0.0)),
            )
        ),
    ],
)
def test_what_is_no_link_or_topology_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_topologies_say_their_links_and_no_addresses() -> None:
    graph = graph_of(nx.path_graph(3))
    graph.edges[0, 1]["link"] = Link(3.0, 0.0)
    shown = repr(GraphLinks(graph))
    assert shown == f"GraphLinks(3 nodes, 2 x {Link(3.0, 0.0)!r}, 2 x {LINK!r})"
    shown = repr(topologies.Hosts(2, LINK, LINK))
    assert shown == f"Hosts(ranks_per_host=2, inner={LINK!r}, outer={LINK!r})"


def test_the_numbers_of_a_link() -> None:
    link = Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
    assert (link.alpha_error_s, link.beta_error_s_per_byte) == (0.0, 0.0)
    assert link.bandwidth_gb_per_s == pytest.approx(12.5)
    assert link.n_half_bytes == pytest.approx(125_000)
    assert link.time_s(0) == 10e-6
    assert link.time_s(link.n_half_bytes) == pytest.approx(2 * link.alpha_s)
    free = Link(1e-6, 0.0)
    assert math.isinf(free.bandwidth_gb_per_s)
    assert math.isinf(free.n_half_bytes)
