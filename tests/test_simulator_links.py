"""Links: private ones, fair shares, and shared ones.

Worked out by hand, by definition, and in exact numbers.
"""

from __future__ import annotations

import heapq
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import follow_steps

import ringsim
from ringsim import Degrade, Link, Slow
from ringsim.errors import ArgumentError
from ringsim.simulator.links import PrivateLinks, SharedLinks, degraded, fair_paces, make_links
from ringsim.topologies import FullBisection, GraphLinks, Hop, Hosts, RingLinks, Topology


class Agenda:
    """Calls what is due in order of time, and of asking where the time is the same."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._asked = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._time_s

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self._time_s, "nothing can happen in the past"
        heapq.heappush(self._due, (time_s, self._asked, call))
        self._asked += 1

    def cancel(self, time_s: float, call: Callable[[], None]) -> None:
        self._due = [due for due in self._due if due[0] != time_s or due[2] is not call]
        heapq.heapify(self._due)

    def run(self) -> int:
        """Runs until nothing is due, and returns how many calls that took."""
        while self._due:
            self._time_s, _, call = heapq.heappop(self._due)
            call()
        return self._asked


# -- private links

PLAIN = Link(alpha_s=1.0, beta_s_per_byte=0.5)


def test_each_edge_may_have_its_link() -> None:
    carrier = PrivateLinks({(0, 1): PLAIN, (1, 0): Link(0.0, 0.0)})
    assert carrier.carry(0, 1, 4, 10.0) == 13.0
    assert carrier.carry(1, 0, 4, 10.0) == 10.0
    with pytest.raises(
        ArgumentError,
        match=r"link must have an entry for each pair that talks, got none for \(1, 2\)",
    ):
        carrier.carry(1, 2, 4, 10.0)


def test_a_degraded_link_takes_its_factor_longer() -> None:
    carrier = make_links(
        Agenda(), 4, link=PLAIN, inject=[Degrade(0, 1, 2), Degrade(0, 1, 3), Slow(1, 9)]
    )
    assert carrier.link_of(0, 1) == Link(6.0, 3.0)
    assert [carrier.carry(0, 1, 4, 0.0), carrier.carry(1, 0, 4, 0.0)] == [18.0, 3.0]
    assert degraded(PLAIN, 1.0) is PLAIN


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=20))
def test_the_last_arrival_is_the_longest_chain(messages: list[tuple[int, int]]) -> None:
    # All numbers are dyadic and small, so floats are exact. The link is free again at max over i of
    # (ready_i + all bytes from i on).
    carrier = PrivateLinks(Link(alpha_s=0.25, beta_s_per_byte=0.5))
    arrivals = [carrier.carry(0, 1, size, float(ready)) for size, ready in messages]
    for last, arrival in enumerate(arrivals):
        chains = [
            messages[first][1] + Fraction(sum(size for size, _ in messages[first : last + 1]), 2)
            for first in range(last + 1)
        ]
        assert Fraction(arrival) == max(0, *chains) + Fraction(1, 4)


# -- fair shares


def filled(routes: Sequence[Sequence[int]], speeds: Mapping[int, Fraction]) -> list[Fraction]:
    """Progressive filling as the books have it.

    Raise all speeds together until a link is full; infinite is not needed here.
    """
    rates = [Fraction(0)] * len(routes)
    moving = set(range(len(routes)))
    while moving:
        room = {}
        for link, speed in speeds.items():
            users = sum(link in routes[flow] for flow in moving)
            if users:
                room[link] = (
                    speed
                    - sum(rate for rate, route in zip(rates, routes, strict=True) if link in route)
                ) / users
        step = min(room.values())
        for flow in moving:
            rates[flow] += step
        full = {link for link, left in room.items() if left == step}
        moving -= {flow for flow in moving if full & set(routes[flow])}
    return rates


def test_a_link_without_limit_shares_nothing() -> None:
    assert fair_paces([["A", "B"], ["B"], ["A"]], {"A": 0.25, "B": 0.0}) == [0.5, 0.0, 0.5]
    third = 1 / 3e9
    # one alone has the very pace of its slowest link
    assert fair_paces([["A", "B"]], {"A": third, "B": third / 7}) == [third]


LINKS = st.dictionaries(st.integers(0, 5), st.integers(1, 50), min_size=1)


@given(st.data(), LINKS)
def test_fair_shares_are_those_in_exact_numbers(
    data: st.DataObject, speeds: dict[int, int]
) -> None:
    routes = data.draw(
        st.lists(
            st.lists(st.sampled_from(sorted(speeds)), min_size=1, unique=True),
            min_size=1,
            max_size=12,
        )
    )
    found = fair_paces(routes, {link: 1 / speed for link, speed in speeds.items()})
    expected = filled(routes, {link: Fraction(speed) for link, speed in speeds.items()})
    assert [1 / pace for pace in found] == pytest.approx(
        [float(rate) for rate in expected], rel=1e-9
    )


# -- shared links


LINK = Link(alpha_s=100.0, beta_s_per_byte=1.0)

Message = tuple[int, int, int, float]  # src, dst, bytes, ready


def arrivals(
    topology: Topology,
    world_size: int,
    messages: list[Message],
    slower: dict[tuple[int, int], float] | None = None,
) -> list[float]:
    """Hands each message over when it is ready, and returns when each arrived."""
    agenda = Agenda()
    carrier = SharedLinks(agenda, topology, world_size, slower or {})
    found = [-1.0] * len(messages)

    def arrive(index: int, time_s: float) -> None:
        assert agenda.now_s() == time_s
        found[index] = time_s

    def send(index: int) -> None:
        assert carrier.carry(*messages[index], partial(arrive, index)) is None

    for index, message in enumerate(messages):
        agenda.at(message[3], partial(send, index))
    agenda.run()
    return found


def test_a_degraded_pair_takes_its_factor_longer_and_leaves_room_to_others() -> None:
    topology = FullBisection(LINK)
    assert arrivals(topology, 3, [(0, 1, 8, 0.0)], {(0, 1): 5.0}) == [540.0]
    # A fifth of the way out is 0 -> 1's; 0 -> 2 has the other four fifths: 10 s for its 8 bytes.
    assert arrivals(topology, 3, [(0, 1, 8, 0.0), (0, 2, 8, 0.0)], {(0, 1): 5.0}) == pytest.approx(
        [540.0, 110.0]
    )


def test_free_bytes_take_no_time() -> None:
    assert arrivals(FullBisection(Link(2.0, 0.0)), 3, [(0, 2, 10**9, 0.0), (1, 2, 10**9, 1.0)]) == [
        2.0,
        3.0,
    ]


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 100), st.integers(0, 50)),
    min_size=1,
    max_size=14,
).map(
    lambda messages: [
        (src, dst if dst != src else 4, size, float(ready)) for src, dst, size, ready in messages
    ]
)


@given(MESSAGES, st.floats(0, 1), st.floats(1e-12, 1))
def test_where_nobody_meets_it_is_a_private_link_to_the_bit(
    messages: list[Message], alpha: float, beta: float
) -> None:
    in_order = sorted(messages, key=lambda message: message[3])
    link = Link(alpha, beta)
    graph = nx.complete_graph(5)
    nx.set_edge_attributes(graph, link, "link")
    private = PrivateLinks(link)
    assert arrivals(GraphLinks(graph), 5, in_order) == [
        private.carry(*message) for message in in_order
    ]


def exact_arrivals(topology: Topology, world_size: int, messages: list[Message]) -> list[Fraction]:
    """The same model in exact numbers, from event to event, all rates made anew at each.

    Slow, and none of its code is the carrier's.
    """
    routes = [topology.route(src, dst, world_size) for src, dst, _, _ in messages]
    names = sorted({hop.edge for route in routes for hop in route}, key=str)
    speeds = {index: 1 / Fraction(next(hop for route in routes for hop in route if hop.edge == name)
                                  .link.beta_s_per_byte)
              for index, name in enumerate(names)}  # fmt: skip
    left = [Fraction(size) for _, _, size, _ in messages]
    done: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(done) < len(messages):
        heads: dict[tuple[int, int], int] = {}
        for index, (src, dst, _, _) in enumerate(messages):
            if index not in done:
                heads.setdefault((src, dst), index)
        active = [index for index in heads.values() if messages[index][3] <= now]
        ended = [index for index in active if left[index] == 0]
        if ended:
            done.update(dict.fromkeys(ended, now))
            continue
        coming = [
            Fraction(messages[index][3]) - now
            for index in heads.values()
            if messages[index][3] > now
        ]
        rates = filled(
            [[names.index(hop.edge) for hop in routes[index]] for index in active], speeds
        )
        step = min(
            [*coming, *(left[index] / rate for index, rate in zip(active, rates, strict=True))]
        )
        for index, rate in zip(active, rates, strict=True):
            left[index] -= step * rate
        now += step
    return [
        done[index] + sum(Fraction(hop.link.alpha_s) for hop in routes[index])
        for index in range(len(messages))
    ]


TOPOLOGIES = [
    RingLinks(LINK),
    FullBisection(Link(3.0, 0.25)),
    Hosts(2, inner=Link(1.0, 0.125), outer=Link(7.0, 1.0)),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: type(topology).__name__)
@given(messages=MESSAGES)
def test_arrivals_are_those_in_exact_numbers(topology: Topology, messages: list[Message]) -> None:
    in_order = sorted(messages, key=lambda message: message[3])
    expected = [float(time) for time in exact_arrivals(topology, 5, in_order)]
    assert arrivals(topology, 5, in_order) == pytest.approx(expected, rel=1e-9)


# -- whole programs

# ("work", seconds) | ("send" or "recv", peer, bytes) | ("wait", number of the message among the
# rank's own)
Step = tuple[Any, ...]


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """Programs that come to an end.

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
                steps[rank].append(
                    (
                        "work",
                        draw(st.integers(1, 30)) + Fraction(2 * number + (rank == src) + 1, 64),
                    )
                )
            steps[rank].append((op, peer, bytes_))
            posted[rank] += 1
            if draw(st.booleans()):
                steps[rank].append(("wait", draw(st.integers(0, posted[rank] - 1))))
    for rank, its in enumerate(steps):
        its += [
            ("wait", handle)
            for handle in draw(
                st.lists(st.integers(0, max(posted[rank] - 1, 0)), max_size=3 * bool(posted[rank]))
            )
        ]
        its += [("work", Fraction(3))] * draw(st.integers(0, 1))
    return steps


def exact_end(topology: Topology, steps: list[list[Step]]) -> Fraction:
    """When the last rank has come to its end, in exact numbers.

    A message leaves once both sides are posted, and links are shared.
    """
    size = len(steps)
    routes = {pair: topology.route(*pair, size) for pair in itertools.permutations(range(size), 2)}
    hops = {hop.edge: hop.link for route in routes.values() for hop in route}
    speeds = {edge: 1 / Fraction(link.beta_s_per_byte) for edge, link in hops.items()}
    names = {edge: number for number, edge in enumerate(sorted(speeds, key=str))}
    at, due, ends = [0] * size, [Fraction(0)] * size, [Fraction(-1)] * size
    # of each rank, its messages: source, destination, place
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
    """0.1.0 let the clock go to every end that was once foreseen.

    Also to the limits of waits that had ended long before.
    """
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


def test_ranks_that_do_not_meet_cost_nothing_more_the_more_there_are() -> None:
    def calls(ranks: int) -> int:
        agenda = Agenda()
        carrier = SharedLinks(agenda, FullBisection(LINK), ranks, {})
        for rank in range(ranks):
            carrier.carry(rank, (rank + 1) % ranks, 8, 0.0)
        return agenda.run()

    assert calls(512) <= 4 * calls(128)


def test_what_a_message_costs_that_nobody_disturbs() -> None:
    carrier = SharedLinks(Agenda(), RingLinks(LINK), 6, {(0, 1): 5.0})
    assert [carrier.link_of(0, 2), carrier.link_of(0, 1)] == [Link(200.0, 1.0), Link(500.0, 5.0)]
    assert carrier.carry(1, 1, 8, 3.0) == 3.0  # one to oneself is there at once


def test_a_topology_of_ones_own() -> None:
    class Bus:
        """All share one link; ranks of one parity are the same machine."""

        def check(self, world_size: int) -> None:
            pass

        def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
            return [] if src % 2 == dst % 2 else [Hop(("bus", "bus"), LINK)]

    messages = [(0, 1, 8, 0.0), (2, 1, 8, 0.0), (3, 0, 4, 0.0), (0, 2, 8, 5.0)]
    # thirds until 12, then halves
    assert arrivals(Bus(), 4, messages) == [120.0, 120.0, 112.0, 5.0]
    assert SharedLinks(Agenda(), Bus(), 4, {}).link_of(0, 2) == Link(0.0, 0.0)


# -- who is chosen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of link and topology must be given, got none"),
        ({"link": LINK, "topology": RingLinks(LINK)}, "got both"),
        ({"topology": "ring"}, "topology must have the methods check and route, got 'ring'"),
        (
            {"topology": GraphLinks(nx.path_graph(0))},
            "graph must have a node for each of 4 ranks, got none for 0, 1, 2, 3",
        ),
        ({"link": 3.0}, "must be a Link"),
        ({"link": {(0, 1): "fast"}}, "must be a Link"),
    ],
)
def test_what_are_no_links_is_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make_links(Agenda(), 4, **given)


def test_the_order_of_hashes_decides_nothing() -> None:
    code = """
from test_simulator_links import Agenda
from ringsim.link import Link
from ringsim.simulator.links import SharedLinks
from ringsim.topologies import Hosts
agenda, arrivals = Agenda(), []
carrier = SharedLinks(agenda, Hosts(3, Link(1e-6, 1e-10), Link(3e-6, 7e-10)), 12, {})
for number in range(100):
    src, dst = number * 7 % 12, (number * 5 + 1) % 12
    if src != dst:
        carrier.carry(src, dst, 1000 + 37 * number, 0.0, lambda time, number=number: arrivals.append((number, time.hex())))
agenda.run()
print(arrivals)
"""  # noqa: E501
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate()[0] for process in processes)
    assert one == other
    assert one.count("(") > 50
