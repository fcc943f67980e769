"""Links and networks of links: times, fits, and who shares what."""

from __future__ import annotations

import math
from functools import partial

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import Link, topologies
from ringsim.errors import ArgumentError
from ringsim.link import fit_link

LINK = Link(2.0, 0.5)


def edges(
    topology: topologies.Topology, src: int, dst: int, world_size: int
) -> list[tuple[object, object]]:
    return [hop.edge for hop in topology.route(src, dst, world_size)]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (0, 1, [(0, 1)]),
        (1, 0, [(1, 0)]),
        (5, 0, [(5, 0)]),
        (0, 3, [(0, 1), (1, 2), (2, 3)]),  # equally far both ways: onwards
        (3, 0, [(3, 4), (4, 5), (5, 0)]),
        (0, 4, [(0, 5), (5, 4)]),
    ],
)
def test_a_ring_of_six(src: int, dst: int, expected: list[tuple[int, int]]) -> None:
    assert edges(topologies.RingLinks(LINK), src, dst, 6) == expected
    assert edges(topologies.RingLinks(LINK), src % 2, 1 - src % 2, 2) == [(src % 2, 1 - src % 2)], (
        "a ring of two has one link each way"
    )


@given(st.integers(2, 40), st.data())
def test_a_ring_takes_the_shorter_way(world_size: int, data: st.DataObject) -> None:
    src, dst = data.draw(
        st.lists(st.integers(0, world_size - 1), min_size=2, max_size=2, unique=True)
    )
    hops = topologies.RingLinks(LINK).route(src, dst, world_size)
    assert len(hops) == nx.shortest_path_length(nx.cycle_graph(world_size), src, dst)
    assert hops[0].edge[0] == src
    assert hops[-1].edge[1] == dst


def test_an_undisturbed_message_pays_the_outer_link_once() -> None:
    hosts = topologies.Hosts(4, inner=Link(1.0, 0.25), outer=LINK)
    inside, outside = hosts.route(4, 7, 8), hosts.route(3, 4, 8)
    assert inside == [topologies.Hop((4, 7), Link(1.0, 0.25))]
    assert [hop.edge for hop in outside] == [("host 0", "network"), ("network", "host 1")]
    assert sum(hop.link.alpha_s for hop in outside) == LINK.alpha_s
    assert max(hop.link.beta_s_per_byte for hop in outside) == LINK.beta_s_per_byte


@pytest.mark.parametrize(("direct_s", "over_far"), [(3.0, True), (2.0, False)])
def test_a_graph_goes_by_latency_then_by_hops(direct_s: float, over_far: bool) -> None:
    graph = nx.DiGraph()
    for here, there, latency_s in ((0, "far", 1.0), ("far", 1, 1.0), (0, 1, direct_s), (1, 0, 5.0)):
        graph.add_edge(here, there, link=Link(latency_s, 0.0))
    topology = topologies.GraphLinks(graph)
    assert edges(topology, 0, 1, 2) == ([(0, "far"), ("far", 1)] if over_far else [(0, 1)])
    assert edges(topology, 1, 0, 2) == [(1, 0)]  # directed: no way back over "far"


@given(st.integers(2, 9), st.integers(0, 10**6), st.data())
def test_a_graph_finds_the_least_latency(world_size: int, seed: int, data: st.DataObject) -> None:
    graph = nx.gnp_random_graph(world_size, 0.4, seed=seed, directed=True)
    for here, there in graph.edges:
        graph.edges[here, there]["link"] = Link(float(data.draw(st.integers(0, 9))), 1.0)
    topology = topologies.GraphLinks(graph)
    best = dict(
        nx.all_pairs_dijkstra_path_length(graph, weight=lambda _, __, data: data["link"].alpha_s)
    )
    for src in range(world_size):
        for dst in set(range(world_size)) - {src}:
            if dst in best[src]:
                assert (
                    sum(hop.link.alpha_s for hop in topology.route(src, dst, world_size))
                    == best[src][dst]
                )
            else:
                with pytest.raises(ArgumentError, match=f"got none from {src} to {dst}"):
                    topology.route(src, dst, world_size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topologies.RingLinks("fast"), "link must be a Link, got 'fast'"),
        (lambda: topologies.FullBisection(None), "link must be a Link, got None"),
        (
            lambda: topologies.Hosts(0, LINK, LINK),
            "ranks_per_host must be an integer from 1, got 0",
        ),
        (
            lambda: topologies.Hosts(True, LINK, LINK),
            "ranks_per_host must be an integer from 1, got True",
        ),
        (lambda: topologies.Hosts(2, LINK, 1.0), "outer must be a Link, got 1.0"),
        *(
            (
                partial(topologies.OneMachine, LINK, cores),
                f"cores must be an integer from 1, got {cores}",
            )
            for cores in (0, True, 1.5)
        ),
        (lambda: topologies.GraphLinks({0: [1]}), "graph must be a networkx Graph or DiGraph"),
        (
            lambda: topologies.GraphLinks(nx.path_graph(2, create_using=nx.MultiGraph)),
            "graph must be a networkx Graph or DiGraph",
        ),
        (
            lambda: topologies.GraphLinks(nx.path_graph(2)),
            r"link of edge \(0, 1\) must be a Link, got None",
        ),
    ],
)
def test_what_is_no_topology_is_refused(make, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_topologies_say_their_links_and_no_addresses() -> None:
    graph = nx.path_graph(3)
    nx.set_edge_attributes(graph, LINK, "link")
    graph.edges[0, 1]["link"] = Link(3.0, 0.0)
    shown = repr(topologies.GraphLinks(graph))
    assert shown == f"GraphLinks(3 nodes, 2 x {Link(3.0, 0.0)!r}, 2 x {LINK!r})"
    assert (
        repr(topologies.Hosts(2, LINK, LINK))
        == f"Hosts(ranks_per_host=2, inner={LINK!r}, outer={LINK!r})"
    )


def test_ranks_must_be_nodes() -> None:
    graph = nx.Graph()
    graph.add_edge(0, 1, link=LINK)
    topologies.GraphLinks(graph).check(2)
    with pytest.raises(
        ArgumentError,
        match=r"graph must have a node for each of 8 ranks, got none for 2, 3, 4, 5 and 2 more",
    ):
        topologies.GraphLinks(graph).check(8)


def test_ranks_of_one_machine_have_a_link_for_each_pair() -> None:
    assert topologies.OneMachine(LINK, cores=2).route(6, 2, 8) == [topologies.Hop((6, 2), LINK)]


SIZES = [2**power for power in range(3, 29)]


def test_the_numbers_of_a_link() -> None:
    link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
    assert (link.alpha_error_s, link.beta_error_s_per_byte) == (0.0, 0.0)
    assert link.bandwidth_gb_per_s == pytest.approx(12.5)
    assert link.n_half_bytes == pytest.approx(125_000)
    assert link.time_s(0) == 10e-6
    assert link.time_s(link.n_half_bytes) == pytest.approx(2 * link.alpha_s)
    free = Link(1e-6, 0.0)
    assert math.isinf(free.bandwidth_gb_per_s)
    assert math.isinf(free.n_half_bytes)
    with pytest.raises(ArgumentError, match="size_bytes must be 0 or more, got -1"):
        link.time_s(-1)


@pytest.mark.parametrize(
    "numbers",
    [
        (-1e-6, 0.0),
        (math.nan, 0.0),
        (0.0, math.inf),
        (0.0, -1.0),
        ("fast", 0.0),
        (0.0, 0.0, -1.0),
        (True, 0.0),
    ],
)
def test_a_link_of_impossible_numbers_is_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="must be a number from 0"):
        Link(*numbers)


@given(
    alpha=st.floats(1e-8, 1e-1),
    beta=st.floats(1e-13, 1e-6),
    sizes=st.lists(st.integers(0, 2**40), min_size=2, max_size=30, unique=True),
)
def test_times_that_follow_the_model_give_it_back(
    alpha: float, beta: float, sizes: list[int]
) -> None:
    link = fit_link(sizes, [alpha + beta * size for size in sizes])
    for size in sizes:
        assert link.time_s(size) == pytest.approx(alpha + beta * size, rel=1e-6)


def test_the_fit_minimises_relative_errors() -> None:
    rng = np.random.default_rng(0)
    times = (40e-6 + 3e-10 * np.array(SIZES)) * rng.uniform(0.8, 1.25, len(SIZES))
    # numpy's least squares of (w * residual), an independent way
    slope, start = np.polyfit(SIZES, times, 1, w=1 / times)
    link = fit_link(SIZES, times)
    assert link.alpha_s == pytest.approx(start, rel=1e-6)
    assert link.beta_s_per_byte == pytest.approx(slope, rel=1e-6)


def test_small_sizes_count() -> None:
    times = [50e-6 + size / 4e9 for size in SIZES]
    # 7 ms too much at 256 MiB: unweighted, that would move alpha by more than alpha
    times[-1] *= 1.1
    assert fit_link(SIZES, times).alpha_s == pytest.approx(50e-6, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_the_errors_say_how_far_fits_scatter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    exact = 40e-6 + 3e-10 * np.array(SIZES)
    fits = [fit_link(SIZES, exact * rng.normal(1, 0.05, len(SIZES))) for _ in range(300)]
    for value, error in (
        ("alpha_s", "alpha_error_s"),
        ("beta_s_per_byte", "beta_error_s_per_byte"),
    ):
        scatter = np.std([getattr(fit, value) for fit in fits])
        assert np.median([getattr(fit, error) for fit in fits]) == pytest.approx(scatter, rel=0.25)


def test_two_points_leave_nothing_to_tell_an_error_from() -> None:
    link = fit_link([0, 1000], [1e-6, 2e-6])
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-6, 1e-9))
    assert math.isnan(link.alpha_error_s)
    assert math.isnan(link.beta_error_s_per_byte)


def test_neither_number_comes_out_negative() -> None:
    falling = fit_link([8, 16, 32], [3e-6, 2e-6, 1e-6])
    assert falling.beta_s_per_byte == 0
    assert 1e-6 < falling.alpha_s < 3e-6
    steep = fit_link([10, 20, 30], [1e-6, 3e-6, 5e-6])  # would start at -1e-6
    assert steep.alpha_s == 0
    assert 1e-7 < steep.beta_s_per_byte < 5e-6 / 30
    level = [3e-6, 2e-6, 1e-6]  # the best level line weighs relative errors: sum(1/t) / sum(1/t**2)
    assert falling.alpha_s == pytest.approx(
        sum(1 / t for t in level) / sum(1 / t**2 for t in level)
    )


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([8], [1e-6], "two sizes or more, got 1"),
        ([8, 8, 8], [1e-6, 2e-6, 3e-6], "two sizes or more, got 1"),
        ([], [], "two sizes or more, got 0"),
        ([8, 16], [1e-6], "two lists of one length"),
        ([[8, 16]], [[1e-6, 2e-6]], "two lists of one length"),
        ([8, 16], [1e-6, 0.0], "times_s must be above 0"),
        ([8, 16], [1e-6, math.nan], "times_s must be above 0"),
        ([-8, 16], [1e-6, 2e-6], "sizes_bytes must be 0 or more"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    sizes: list[float], times: list[float], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        fit_link(sizes, times)
