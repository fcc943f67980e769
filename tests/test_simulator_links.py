"""Tests of private links, fair shares and shared links.

The expected times are computed by hand, or as exact fractions.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import follow_steps, post_all, run

import ringsim
from ringsim import Degrade, Link, Slow
from ringsim.errors import ArgumentError
from ringsim.topologies import FullBisection, GraphLinks, Hop, Hosts, RingLinks, Topology

PLAIN = Link(alpha_s=1.0, beta_s_per_byte=0.5)
LINK = Link(alpha_s=100.0, beta_s_per_byte=1.0)
Message = tuple[int, int, int, float]  # src, dst, bytes, ready


def arrivals(world_size: int, messages: Sequence[Message], **network: Any) -> list[float]:
    """Returns the arrival of each message, which leaves when it is ready."""
    plan = [(*message, 0.0) for message in messages]
    network = {"link": None, "semantics": "buffered", **network}
    by_rank = run(post_all, world_size, plan, record=False, **network)
    return [max(ends[index] for ends in by_rank) for index in range(len(plan))]


# -- private links


def test_each_edge_may_have_its_link() -> None:
    links = {(0, 1): PLAIN, (1, 0): Link(0.0, 0.0)}
    assert arrivals(3, [(0, 1, 4, 10.0), (1, 0, 4, 10.0)], link=links) == [13.0, 10.0]
    with pytest.raises(ArgumentError, match=r"link .*\(1, 2\)"):
        arrivals(3, [(1, 2, 4, 10.0)], link=links)


def test_a_degraded_link_takes_its_factor_longer() -> None:
    slow = [Degrade(0, 1, 2), Degrade(0, 1, 3), Slow(1, 9)]
    assert arrivals(2, [(0, 1, 4, 0.0), (1, 0, 4, 0.0)], link=PLAIN, inject=slow) == [18.0, 3.0]


# -- shared links


def test_a_degraded_pair_takes_its_factor_longer_and_leaves_room_to_others() -> None:
    network: dict[str, Any] = {"topology": FullBisection(LINK), "inject": [Degrade(0, 1, 5)]}
    assert arrivals(3, [(0, 1, 8, 0.0)], **network) == [540.0]
    # One fifth of the outgoing link is for 0 -> 1; 0 -> 2 has four fifths: 10 s for its 8 bytes.
    both = arrivals(3, [(0, 1, 8, 0.0), (0, 2, 8, 0.0)], **network)
    assert both == pytest.approx([540.0, 110.0])


def test_free_bytes_take_no_time() -> None:
    free = FullBisection(Link(2.0, 0.0))
    assert arrivals(3, [(0, 2, 10**6, 0.0), (1, 2, 10**6, 1.0)], topology=free) == [2.0, 3.0]


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 100), st.integers(0, 50)),
    min_size=1,
    max_size=14,
).map(lambda all_: [(src, 4 if src == dst else dst, size, 1.0 * at) for src, dst, size, at in all_])


@given(MESSAGES, st.floats(0, 1), st.floats(1e-9, 1))
def test_where_nobody_meets_it_is_a_private_link_to_the_bit(
    messages: list[Message], alpha: float, beta: float
) -> None:
    link = Link(alpha, beta)
    graph = nx.complete_graph(5)
    nx.set_edge_attributes(graph, link, "link")
    shared = arrivals(5, messages, topology=GraphLinks(graph))
    assert shared == arrivals(5, messages, link=link)


class Bus:
    """A topology with one link for all; ranks of one parity are the same machine."""

    def check(self, world_size: int) -> None:
        pass

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        return [] if src % 2 == dst % 2 else [Hop(("bus", "bus"), LINK)]


def test_a_topology_of_ones_own() -> None:
    messages = [(0, 1, 8, 0.0), (2, 1, 8, 0.0), (3, 0, 4, 0.0), (0, 2, 8, 5.0)]
    # a third each until 12, then a half each
    assert arrivals(4, messages, topology=Bus()) == [120.0, 120.0, 112.0, 5.0]


# -- whole programs

# ("work", seconds) | ("send" or "recv", peer, bytes) | ("wait", number of the message among the
# rank's own)
Step = tuple[Any, ...]

TOPOLOGIES = [
    RingLinks(LINK),
    FullBisection(Link(3.0, 0.25)),
    Hosts(2, inner=Link(1.0, 0.125), outer=Link(7.0, 1.0)),
]


def filled(routes: Sequence[Sequence[int]], speeds: Mapping[int, Fraction]) -> list[Fraction]:
    """Progressive filling as in textbooks.

    Raise all speeds together until a link is full; infinite speeds are not needed here.
    """
    rates = [Fraction(0)] * len(routes)
    moving = set(range(len(routes)))
    while moving:
        room = {}
        for link, speed in speeds.items():
            users = sum(link in routes[flow] for flow in moving)
            if users:
                used = sum(rate for rate, route in zip(rates, routes, strict=True) if link in route)
                room[link] = (speed - used) / users
        step = min(room.values())
        for flow in moving:
            rates[flow] += step
        full = {link for link, left in room.items() if left == step}
        moving -= {flow for flow in moving if full & set(routes[flow])}
    return rates


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """Generates programs that finish.

    Each rank posts its messages in one order that all share, and waits for some, sooner or later.
    """
    size = draw(st.integers(2, 5))
    steps: list[list[Step]] = [[] for _ in range(size)]
    posted = [0] * size
    for number in range(draw(st.integers(1, 8))):
        src, dst = draw(st.permutations(range(size)))[:2]
        bytes_ = draw(st.integers(1, 40))
        for rank, op, peer in ((src, "send", dst), (dst, "recv", src)):
            if draw(st.booleans()):
                apart = Fraction(2 * number + (rank == src) + 1, 64)
                steps[rank].append(("work", draw(st.integers(1, 30)) + apart))
            steps[rank].append((op, peer, bytes_))
            posted[rank] += 1
            if draw(st.booleans()):
                steps[rank].append(("wait", draw(st.integers(0, posted[rank] - 1))))
    for rank, its in enumerate(steps):
        handles = st.integers(0, max(posted[rank] - 1, 0))
        waits = draw(st.lists(handles, max_size=3 * bool(posted[rank])))
        its += [("wait", handle) for handle in waits]
        its += [("work", Fraction(3))] * draw(st.integers(0, 1))
    return steps


def exact_end(topology: Topology, steps: list[list[Step]]) -> Fraction:
    """Returns the end of the last rank, in exact numbers.

    A message leaves once both sides are posted, and links are shared.
    """
    size = len(steps)
    routes = {pair: topology.route(*pair, size) for pair in itertools.permutations(range(size), 2)}
    hops = {hop.edge: hop.link for route in routes.values() for hop in route}
    speeds = {edge: 1 / Fraction(link.beta_s_per_byte) for edge, link in hops.items()}
    names = {edge: number for number, edge in enumerate(sorted(speeds, key=str))}
    at, due, ends = [0] * size, [Fraction(0)] * size, [Fraction(-1)] * size
    # for each rank, its messages: source, destination, place
    own: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    sides: dict[tuple[int, int, int], int] = defaultdict(int)
    left: dict[tuple[int, int, int], Fraction] = {}
    arrives: dict[tuple[int, int, int], Fraction] = {}
    now = Fraction(0)

    def advance(rank: int) -> None:
        while due[rank] <= now and ends[rank] < 0:
            if at[rank] == len(steps[rank]):
                ends[rank] = now
                return
            op, about, *rest = steps[rank][at[rank]]
            if op == "wait" and not arrives.get(own[rank][about], now + 1) <= now:
                return
            at[rank] += 1
            if op == "work":
                due[rank] = now + about
            elif op != "wait":
                pair = (rank, about) if op == "send" else (about, rank)
                message = (*pair, sum(one[:2] == pair for one in own[rank]))
                own[rank].append(message)
                sides[message] += 1
                left.setdefault(message, Fraction(rest[0]))

    while True:
        for rank in range(size):
            advance(rank)
        if min(ends) >= 0:
            return max(ends)
        heads: dict[tuple[int, int], tuple[int, int, int]] = {}
        for message in sorted(left):
            if sides[message] == 2 and message not in arrives:
                heads.setdefault(message[:2], message)
        active = list(heads.values())
        rates = filled(
            [[names[hop.edge] for hop in routes[one[:2]]] for one in active],
            {names[edge]: speed for edge, speed in speeds.items()},
        )
        moments = [due[rank] for rank in range(size) if ends[rank] < 0] + list(arrives.values())
        steps_s = [moment - now for moment in moments if moment > now]
        step = min(steps_s + [left[one] / rate for one, rate in zip(active, rates, strict=True)])
        now += step
        for one, rate in zip(active, rates, strict=True):
            left[one] -= step * rate
            if left[one] == 0:
                arrives[one] = now + sum(Fraction(hop.link.alpha_s) for hop in routes[one[:2]])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: type(topology).__name__)
@given(steps=programs(), limits=st.booleans())
def test_a_program_ends_with_its_last_rank_recorded_or_not(
    topology: Topology, steps: list[list[Step]], limits: bool
) -> None:
    """Version 0.1.0 moved the clock to the time limits of waits that had ended long before."""
    size = len(steps)
    runs = [
        ringsim.simulate(
            follow_steps, world_size=size, args=(steps, limits), topology=topology, record=record
        )
        for record in (True, False)
    ]
    expected = float(exact_end(topology, steps))
    assert [run.makespan_s for run in runs] == pytest.approx([expected] * 2, rel=1e-9, abs=1e-9)
    assert runs[0].metadata["end_ns"] == runs[1].metadata["end_ns"]


HASHED = """
import ringsim, torch
import torch.distributed as dist
from ringsim.topologies import Hosts

def worker():
    rank, handles = dist.get_rank(), []
    for number in range(40):
        src, dst = number * 7 % 12, (number * 5 + 1) % 12
        if src != dst and rank in (src, dst):
            tensor = torch.zeros(1000 + 37 * number)
            handles.append(dist.isend(tensor, dst) if rank == src else dist.irecv(tensor, src))
    for handle in handles:
        handle.wait()

topology = Hosts(3, ringsim.Link(1e-6, 1e-10), ringsim.Link(3e-6, 7e-10))
trace = ringsim.simulate(worker, world_size=12, topology=topology)
print(trace.to_pandas("messages").to_csv())
"""


def test_the_order_of_hashes_decides_nothing() -> None:
    one, other = (
        subprocess.check_output(
            [sys.executable, "-c", HASHED], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2")
    )
    assert one == other
    assert one.count("\n") > 30
