"""What the links between ranks look like, for the virtual clock.

Which of them a message passes, and who else uses these. A message passes a route of hops. Its bytes
go over all of them at once, at the pace of the slowest; its latency is the sum of theirs. Messages
that pass the same hop at the same time share it fairly (`ringsim.simulator.links`)::

    RingLinks(link)         0 <=> 1 <=> 2 <=> 3 <=> 0      messages go the shorter way round,
                                                           through the ranks between

    Hosts(2, inner, outer)  0 <-> 1 |out ====> network     two ranks a host: a link for each pair
                                    |in  <====             of them, and one way out and one way in
                                                           that they share

    OneMachine(link, cores) 0 <-> 1                        a link for each pair; all that ranks do
                                                           but sleep needs a core

    FullBisection(link)     0 |out ====> network ====> in| 1
                                                           each rank has one way out and one way in;
                                                           the network between never is too small

    GraphLinks(graph)       any networkx graph: ranks and switches, each edge with its link

Links are one-way: what goes from 0 to 1 never waits for what goes from 1 to 0.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from ringsim.errors import ArgumentError, check_duration, check_integer, is_number, say
from ringsim.link import Link, check_link

__all__ = [
    "FullBisection",
    "GlooCosts",
    "GraphLinks",
    "Hop",
    "Hosts",
    "OneMachine",
    "RingLinks",
    "Topology",
]


class Hop(NamedTuple):
    """One link on the way of a message.

    Attributes:
        edge: names the link: from where to where. Messages whose routes hold the same edge share
            it.
        link: what it costs.
    """

    edge: tuple[Hashable, Hashable]
    link: Link


class Topology(Protocol):
    """Knows the way from each rank to each other one.

    A class of one's own with these two methods will do. Its ``repr`` goes into the trace, and
    should say its links: the same arguments are to give the same trace.
    """

    def check(self, world_size: int) -> None:
        """Raises ArgumentError unless it has a place for so many ranks."""
        ...

    def route(self, src: int, dst: int, world_size: int) -> Sequence[Hop]:
        """Returns the hops that a message from a rank to another one passes, in order.

        None for one that is there at once.
        """
        ...


class _Roomy:
    """What has room for any number of ranks."""

    def check(self, world_size: int) -> None:
        """Accepts any number of ranks."""


@dataclass(frozen=True)
class RingLinks(_Roomy):
    """Ranks in a ring, each with a link to both neighbours.

    A message to another rank passes those between.

    Args:
        link: what each link costs.

    Raises:
        ArgumentError: ``link`` is none.

    Example:
        >>> [hop.edge for hop in RingLinks(Link(1e-6, 1e-10)).route(0, 6, world_size=8)]
        [(0, 7), (7, 6)]
    """

    link: Link

    def __post_init__(self) -> None:
        check_link("link", self.link)

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Goes the shorter way round, and onwards if both are equally long."""
        onwards = (dst - src) % world_size
        step = 1 if 2 * onwards <= world_size else -1
        passed = [
            (src + step * index) % world_size
            for index in range(min(onwards, world_size - onwards) + 1)
        ]
        return [Hop((here, there), self.link) for here, there in pairwise(passed)]


@dataclass(frozen=True)
class Hosts(_Roomy):
    """Hosts of several ranks each.

    Between two ranks of a host a link of their own, out of each host and into it one link for all.
    Rank r is on host ``r // ranks_per_host``. An undisturbed message takes ``inner.time_s``
    within a host, and ``outer.time_s`` between two.

    Args:
        ranks_per_host: 1 or more; the last host may have fewer.
        inner: what the link between two ranks of a host costs.
        outer: what the way from one host to another costs.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> hosts = Hosts(4, inner=Link(1e-6, 1e-11), outer=Link(5e-6, 4e-11))
        >>> [hop.edge for hop in hosts.route(2, 9, world_size=16)]
        [('host 0', 'network'), ('network', 'host 2')]
    """

    ranks_per_host: int
    inner: Link
    outer: Link

    def __post_init__(self) -> None:
        check_integer("ranks_per_host", self.ranks_per_host, 1, "Say how many ranks a host has.")
        check_link("inner", self.inner)
        check_link("outer", self.outer)

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Stays within a host if it can."""
        here, there = src // self.ranks_per_host, dst // self.ranks_per_host
        if here == there:
            return [Hop((src, dst), self.inner)]
        return _over_network(f"host {here}", f"host {there}", self.outer)


@dataclass(frozen=True)
class GlooCosts:
    """What Gloo's messages and collectives cost on shared cores, besides what a message takes.

    ``ringsim.calibrate`` finds it. All but the stalls is time of cores: on a machine with fewer
    cores than ranks it is what decides.

    Args:
        carrying: core time of a message, without posting it, half of it on each side.
        collective_s: core time of a collective on each rank, before its first message: Gloo hands
            it to another thread.
        first_use_s: core time of each rank as it posts its first operation: fresh processes load
            pages and libraries as they need them.
        awake: what a message alone takes while the cores are at work, and need not be woken; None
            for as long as ever.
        stall_s: how long a stall lasts, in seconds. A thread of Gloo's that finds a connection
            locked asks again and again, until the scheduler takes the core from it.
        stall_share: which part of the messages stall, of those on whose connection both ranks are
            at work at one time; from 0 to 1.

    Raises:
        ArgumentError: a value breaks its rule.
    """

    carrying: Link
    collective_s: float = 0.0
    first_use_s: float = 0.0
    awake: Link | None = None
    stall_s: float = 0.0
    stall_share: float = 0.0

    def __post_init__(self) -> None:
        check_link("carrying", self.carrying)
        if self.awake is not None:
            check_link("awake", self.awake)
        for name in ("collective_s", "first_use_s", "stall_s"):
            check_duration(name, getattr(self, name))
        if not is_number(self.stall_share) or not 0 <= self.stall_share <= 1:
            raise ArgumentError(
                f"stall_share must be a number from 0 to 1, got {say(self.stall_share)}. It is a "
                "part of the messages."
            )


@dataclass(frozen=True)
class OneMachine(_Roomy):
    """Ranks of one machine: each pair has a link of its own, and all share the cores.

    A message needs a core while it is brought over, and so does what a calibration says that a rank
    takes around its computing and its messages. Who finds no core free waits for one.
    ``ringsim.compute`` needs none: real ranks sleep.

    Args:
        link: what a message costs that is alone.
        cores: how many there are, from 1.
        gloo: what else Gloo costs; collectives then go as Gloo's do. None: a message takes a core
            for as long as it is in flight.

    Raises:
        ArgumentError: a value breaks its rule.

    Example:
        >>> [hop.edge for hop in OneMachine(Link(1e-4, 3e-10), cores=2).route(0, 5, world_size=8)]
        [(0, 5)]
    """

    link: Link
    cores: int
    gloo: GlooCosts | None = None

    def __post_init__(self) -> None:
        check_link("link", self.link)
        check_integer("cores", self.cores, 1, "Take what os.cpu_count() says.")
        if self.gloo is not None and not isinstance(self.gloo, GlooCosts):
            raise ArgumentError(
                f"gloo must be a GlooCosts or None, got {say(self.gloo)}. Take that of a "
                "calibration."
            )

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Goes over the pair's link."""
        return [Hop((src, dst), self.link)]


@dataclass(frozen=True)
class FullBisection(_Roomy):
    """Each rank has one way out and one way in; between them, all can talk at once without meeting.

    So a rank that sends to two others at a time gives each half of its way out, and one that
    receives from two has half of its way in for each.

    Args:
        link: what the way from one rank to another costs.

    Raises:
        ArgumentError: ``link`` is none.

    Example:
        >>> [hop.edge for hop in FullBisection(Link(1e-6, 1e-10)).route(0, 5, world_size=8)]
        [(0, 'network'), ('network', 5)]
    """

    link: Link

    def __post_init__(self) -> None:
        check_link("link", self.link)

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Goes out, and in."""
        return _over_network(src, dst, self.link)


def _over_network(here: Hashable, there: Hashable, link: Link) -> list[Hop]:
    """Both hops go at the pace of the link; its latency is paid once."""
    return [Hop((here, "network"), link), Hop(("network", there), Link(0.0, link.beta_s_per_byte))]


@dataclass(frozen=True, repr=False)
class GraphLinks:
    """The links of a graph: its nodes 0, 1, ... are ranks, all others switches.

    A message takes the way with the least latency; among several of these the one with the fewest
    hops, and then the one whose links the graph named first.

    Args:
        graph: a networkx graph (each edge is two links, one each way) or directed graph, each edge
            with the attribute ``link``.

    Raises:
        ArgumentError: ``graph`` is no such graph, has several edges between two nodes, or an edge
            of it has no link.

    Example:
        >>> import networkx as nx
        >>> star = nx.Graph()
        >>> star.add_edges_from([(rank, "switch") for rank in range(4)], link=Link(1e-6, 1e-10))
        >>> [hop.edge for hop in GraphLinks(star).route(0, 3, world_size=4)]
        [(0, 'switch'), ('switch', 3)]
    """

    graph: Any
    _out: dict[Hashable, dict[Hashable, Link]] = field(init=False, compare=False)
    # filled as ranks first send
    _trees: dict[int, dict[Hashable, Hashable]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        graph = self.graph
        if (
            not all(
                hasattr(graph, name) for name in ("edges", "nodes", "is_directed", "is_multigraph")
            )
            or graph.is_multigraph()
        ):
            raise ArgumentError(
                f"graph must be a networkx Graph or DiGraph, got {graph!r}. Add edges with "
                "link=Link(...)."
            )
        out: dict[Hashable, dict[Hashable, Link]] = {node: {} for node in graph.nodes}
        for here, there, link in graph.edges(data="link"):
            check_link(f"link of edge ({here!r}, {there!r})", link)
            out[here][there] = link
            if not graph.is_directed():
                out[there][here] = link
        object.__setattr__(self, "_out", out)
        object.__setattr__(self, "_trees", {})

    def __repr__(self) -> str:
        """Says how many links there are of each kind.

        A graph's own would say where it lies in memory.
        """
        kinds = Counter(link for links in self._out.values() for link in links.values())
        links = ", ".join(f"{count} x {link!r}" for link, count in kinds.items())
        return f"GraphLinks({len(self._out)} nodes, {links})"

    def check(self, world_size: int) -> None:
        """Raises ArgumentError unless each rank is a node."""
        missing = [rank for rank in range(world_size) if rank not in self._out]
        if missing:
            raise ArgumentError(
                f"graph must have a node for each of {world_size} ranks, got none for "
                f"{_some(missing)}. Name the nodes 0, 1, ..."
            )

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Takes the way with the least latency; raises ArgumentError if there is none."""
        tree = self._trees.get(src)
        if tree is None:
            tree = self._trees[src] = _cheapest_ways(self._out, src)
        if dst not in tree:
            raise ArgumentError(
                "graph must have a way between ranks that talk, got none "
                f"from {src} to {dst}. Add edges."
            )
        passed: list[Hashable] = [dst]
        while passed[-1] != src:
            passed.append(tree[passed[-1]])
        passed.reverse()
        return [Hop((here, there), self._out[here][there]) for here, there in pairwise(passed)]


def _cheapest_ways(
    out: dict[Hashable, dict[Hashable, Link]], src: Hashable
) -> dict[Hashable, Hashable]:
    """Returns each node that can be reached -> the node before it on the way there (Dijkstra)."""
    before: dict[Hashable, Hashable] = {}
    best: dict[Hashable, tuple[float, int]] = {src: (0.0, 0)}
    waiting: list[tuple[float, int, int, Hashable]] = [(0.0, 0, 0, src)]
    # of what was put in: nodes of different types do not compare, and the first one named wins
    number = 0
    while waiting:
        latency_s, hops, _, here = heapq.heappop(waiting)
        if (latency_s, hops) > best[here]:
            continue
        for there, link in out[here].items():
            cost = (latency_s + link.alpha_s, hops + 1)
            if cost < best.get(there, (math.inf, 0)):
                best[there] = cost
                before[there] = here
                number += 1
                heapq.heappush(waiting, (*cost, number, there))
    return before


def _some(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:4]))
    return f"{text} and {len(ranks) - 4} more" if len(ranks) > 4 else text
