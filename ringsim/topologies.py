"""The network between simulated ranks: its links and the routes that messages take over them.

A message takes a route of one or more hops. The message's bytes cross all hops at the same time, at
the speed of the slowest hop. The message's latency is the sum of the hops' latencies. Messages that
use a hop at the same time share it fairly (`ringsim.simulator.links`)::

    RingLinks(link)         0 <=> 1 <=> 2 <=> 3 <=> 0      messages take the shorter way around,
                                                           through the ranks between

    Hosts(2, inner, outer)  0 <-> 1 |out ====> network     two ranks per host: a link for each pair
                                    |in  <====             of ranks on a host, and one link out and
                                                           one link in that they share

    OneMachine(link, cores) 0 <-> 1                        a link for each pair; ranks need a core
                                                           for everything except sleeping

    FullBisection(link)     0 |out ====> network ====> in| 1
                                                           each rank has one link out and one link
                                                           in; the network between has no limit

    GraphLinks(graph)       any networkx graph of ranks and switches, whose edges have links

Links are one-way: messages from 0 to 1 never wait for messages from 1 to 0.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from ringsim.errors import (
    ArgumentError,
    check_duration,
    check_integer,
    is_number,
    name_ranks,
    say,
)
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


_Edges = dict[Hashable, dict[Hashable, Link]]  # the links of a graph, by their two ends


class Hop(NamedTuple):
    """One link on a message's route.

    Attributes:
        edge: the two ends of the link. Messages share a link if their routes contain the same edge.
        link: the cost of the link.
    """

    edge: tuple[Hashable, Hashable]
    link: Link


class Topology(Protocol):
    """The routes between ranks; any class with the methods ``check`` and ``route`` is accepted.

    The topology's ``repr`` is written to the trace. It should describe the links, so that the same
    arguments produce the same trace.
    """

    def check(self, world_size: int) -> None:
        """Raises ArgumentError if the network cannot hold this many ranks."""
        ...

    def route(self, src: int, dst: int, world_size: int) -> Sequence[Hop]:
        """Returns the hops of a message from one rank to another, in order.

        If the route has no hops, the message arrives immediately.
        """
        ...


class _Roomy:
    """The base class for networks that accept any number of ranks."""

    def check(self, world_size: int) -> None:
        """Accepts any number of ranks."""


@dataclass(frozen=True)
class _OneLink(_Roomy):
    """The base class for networks whose links all cost the same."""

    link: Link

    def __post_init__(self) -> None:
        check_link("link", self.link)


@dataclass(frozen=True)
class RingLinks(_OneLink):
    """A ring of ranks, each with links to both neighbours.

    A message to a more distant rank passes through the ranks in between.

    Args:
        link: the cost of each link.

    Raises:
        ArgumentError: ``link`` is not a Link.

    Example:
        >>> [hop.edge for hop in RingLinks(Link(1e-6, 1e-10)).route(0, 6, world_size=8)]
        [(0, 7), (7, 6)]
    """

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Returns the shorter way around, or the ascending one if both are equally long."""
        onwards = (dst - src) % world_size
        step = 1 if 2 * onwards <= world_size else -1
        passed = [
            (src + step * index) % world_size
            for index in range(min(onwards, world_size - onwards) + 1)
        ]
        return [Hop((here, there), self.link) for here, there in pairwise(passed)]


@dataclass(frozen=True)
class Hosts(_Roomy):
    """Hosts with several ranks each.

    Each pair of ranks on a host has its own link. Each host has one outgoing and one incoming link,
    which its ranks share. Rank r is on host ``r // ranks_per_host``. A message that shares no link
    takes ``inner.time_s`` within a host and ``outer.time_s`` between hosts.

    Args:
        ranks_per_host: the number of ranks per host, at least 1; the last host may have fewer.
        inner: the cost of a link between two ranks on the same host.
        outer: the cost of the route from one host to another.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> hosts = Hosts(4, inner=Link(1e-6, 1e-11), outer=Link(5e-6, 4e-11))
        >>> [hop.edge for hop in hosts.route(2, 9, world_size=16)]
        [('host 0', 'network'), ('network', 'host 2')]
    """

    ranks_per_host: int
    inner: Link
    outer: Link

    def __post_init__(self) -> None:
        check_integer(
            "ranks_per_host", self.ranks_per_host, 1, "Pass the number of ranks per host."
        )
        check_link("inner", self.inner)
        check_link("outer", self.outer)

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Returns the link within a host, or the hops out of one host and into the other."""
        here, there = src // self.ranks_per_host, dst // self.ranks_per_host
        if here == there:
            return [Hop((src, dst), self.inner)]
        return _over_network(f"host {here}", f"host {there}", self.outer)


@dataclass(frozen=True)
class GlooCosts:
    """The core time that Gloo's messages and collectives take in addition to the link's cost.

    ``ringsim.calibrate`` measures these costs. All values except the stalls are core time, which
    dominates on a machine with fewer cores than ranks.

    Args:
        carrying: the core time of a message, excluding the time to post it; half of it is spent on
            each side.
        collective_s: the core time on each rank before the first message of a collective, because
            Gloo hands the collective to a different thread.
        first_use_s: the core time that each rank spends when it posts its first operation, because
            new processes load pages and libraries on demand.
        awake: the cost of a single message while the cores are busy and need not wake up; None if
            the cost is the same as on idle cores.
        stall_s: the length of a stall, in seconds. A Gloo thread that finds a connection locked
            keeps retrying until the scheduler takes its core away.
        stall_share: the fraction (from 0 to 1) of messages that stall, among those on whose
            connection both ranks are working at the same time.

    Raises:
        ArgumentError: a value is invalid.
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
                f"stall_share must be a number from 0 to 1, got {say(self.stall_share)}. Pass "
                "the fraction of messages that stall."
            )


@dataclass(frozen=True)
class OneMachine(_OneLink):
    """Ranks on one machine: each pair has its own link, and all ranks share the cores.

    A message occupies a core while it is being carried, and a rank occupies a core for the
    calibrated time around its computations and messages. Both wait if no core is free.
    ``ringsim.compute`` needs no core, because real ranks sleep during the call.

    Args:
        link: the cost of a message that shares neither a link nor a core.
        cores: the number of cores, at least 1.
        gloo: Gloo's other costs; collectives then run as they do in Gloo. With None, a message
            occupies a core while it is in flight.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> [hop.edge for hop in OneMachine(Link(1e-4, 3e-10), cores=2).route(0, 5, world_size=8)]
        [(0, 5)]
    """

    cores: int
    gloo: GlooCosts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("cores", self.cores, 1, "Pass os.cpu_count(), for example.")
        if self.gloo is not None and not isinstance(self.gloo, GlooCosts):
            raise ArgumentError(
                f"gloo must be a GlooCosts or None, got {say(self.gloo)}. Use a GlooCosts from "
                "ringsim.calibrate."
            )

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Returns the link between the two ranks."""
        return [Hop((src, dst), self.link)]


@dataclass(frozen=True)
class FullBisection(_OneLink):
    """A network with one outgoing and one incoming link per rank, and no other bottleneck.

    If a rank sends to two others at the same time, each message gets half the bandwidth of the
    rank's outgoing link. If a rank receives from two others at the same time, each message gets
    half the bandwidth of the rank's incoming link.

    Args:
        link: the cost of the route from one rank to another.

    Raises:
        ArgumentError: ``link`` is not a Link.

    Example:
        >>> [hop.edge for hop in FullBisection(Link(1e-6, 1e-10)).route(0, 5, world_size=8)]
        [(0, 'network'), ('network', 5)]
    """

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Returns the link out of one rank and the link into the other."""
        return _over_network(src, dst, self.link)


def _over_network(here: Hashable, there: Hashable, link: Link) -> list[Hop]:
    """Returns two hops with a link's speed; only the first hop has the link's latency."""
    return [Hop((here, "network"), link), Hop(("network", there), Link(0.0, link.beta_s_per_byte))]


@dataclass(frozen=True, repr=False)
class GraphLinks:
    """The links of a graph whose nodes 0, 1, ... are ranks and whose other nodes are switches.

    A message takes the route with the lowest latency. If several routes have the same latency, the
    message takes the route with the fewest hops, and then the route whose links come first in the
    graph.

    Args:
        graph: a networkx graph, in which each edge represents two links, one in each direction, or
            a directed graph. Each edge must have a ``link`` attribute.

    Raises:
        ArgumentError: ``graph`` is not a networkx graph, has several edges between two nodes, or
            has an edge without a link.

    Example:
        >>> import networkx as nx
        >>> star = nx.Graph()
        >>> star.add_edges_from([(rank, "switch") for rank in range(4)], link=Link(1e-6, 1e-10))
        >>> [hop.edge for hop in GraphLinks(star).route(0, 3, world_size=4)]
        [(0, 'switch'), ('switch', 3)]
    """

    graph: Any
    _out: _Edges = field(init=False, compare=False)
    # filled when ranks first send
    _trees: dict[int, dict[Hashable, Hashable]] = field(
        default_factory=dict, init=False, compare=False
    )

    def __post_init__(self) -> None:
        graph = self.graph
        if (
            not all(
                hasattr(graph, name) for name in ("edges", "nodes", "is_directed", "is_multigraph")
            )
            or graph.is_multigraph()
        ):
            raise ArgumentError(
                f"graph must be a networkx Graph or DiGraph, got {graph!r}. Add each edge with "
                "link=Link(...)."
            )
        out: _Edges = {node: {} for node in graph.nodes}
        for here, there, link in graph.edges(data="link"):
            check_link(f"link of edge ({here!r}, {there!r})", link)
            out[here][there] = link
            if not graph.is_directed():
                out[there][here] = link
        object.__setattr__(self, "_out", out)

    def __repr__(self) -> str:
        """Returns the number of links of each kind.

        The repr of the graph itself would contain its memory address.
        """
        kinds = Counter(link for links in self._out.values() for link in links.values())
        links = ", ".join(f"{count} x {link!r}" for link, count in kinds.items())
        return f"GraphLinks({len(self._out)} nodes, {links})"

    def check(self, world_size: int) -> None:
        """Raises ArgumentError unless each rank is a node."""
        missing = [rank for rank in range(world_size) if rank not in self._out]
        if missing:
            raise ArgumentError(
                f"graph has no node for {name_ranks(missing)}, but the run has {world_size} "
                "ranks. Name the nodes after the ranks: 0, 1, ..."
            )

    def route(self, src: int, dst: int, world_size: int) -> list[Hop]:
        """Returns the route with the lowest latency; raises ArgumentError if no route exists."""
        tree = self._trees.get(src)
        if tree is None:
            tree = self._trees[src] = _cheapest_ways(self._out, src)
        if dst not in tree:
            raise ArgumentError(
                f"graph has no route for messages from rank {src} to rank {dst}. Add edges that "
                "connect the two ranks."
            )
        passed: list[Hashable] = [dst]
        while passed[-1] != src:
            passed.append(tree[passed[-1]])
        passed.reverse()
        return [Hop((here, there), self._out[here][there]) for here, there in pairwise(passed)]


def _cheapest_ways(out: _Edges, src: Hashable) -> dict[Hashable, Hashable]:
    """Returns the preceding node on the route to each reachable node (Dijkstra's algorithm)."""
    before: dict[Hashable, Hashable] = {}
    best: dict[Hashable, tuple[float, int]] = {src: (0.0, 0)}
    waiting: list[tuple[float, int, int, Hashable]] = [(0.0, 0, 0, src)]
    # the order of insertion: nodes of different types do not compare, and the first node wins
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
