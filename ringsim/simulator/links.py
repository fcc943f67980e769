"""Models links between simulated ranks, which carry messages and determine their arrival.

**Private links**: each ordered pair of ranks has its own link, which carries one message after
another. A message occupies the link while its bytes enter the link, and arrives one latency after
the last byte has entered::

    ready    start             free       arrive
      |--------|=================|----------|
        busy     size * beta       alpha              start = max(ready, free of the message before)

**Shared cores**: ranks have private links, but share a machine with fewer cores than ranks. Both
carrying a message and posting it require a core::

    core 0  |== rank 0 posts ==|== rank 2 posts ==|          rank 2 requests a core last, and waits
    core 1  |== rank 1 posts ==|== 0 -> 1 is carried ====|  for the first core that is free

With Gloo's costs (`ringsim.topologies.GlooCosts`), a message needs a core on each side, each for
half of the time that carrying the message takes. If both ranks use their connection at about the
same time, some messages stall, and the run's seed determines which. A stalled message arrives
later, as do other messages to the same rank in the meantime, and a core is busy until then. Cores
that have been idle for a while must first be woken::

    rank 0    |= posts =|                             |= continues
    rank 1       |= posts =|......... stall ..........|= continues

**Shared links**: messages that are in flight at the same time share the links of a topology fairly.
A message is a flow that passes through all links of its route at the same time. When a flow begins
or ends, the flows that it met get new paces. The messages from one rank to another run one after
another. So do the flows of one group's collectives, but these run at the same time as messages::

    0 -> 2, 8 bytes  |==== half the link ====|== alone ==|  arrives one latency after its last byte
    1 -> 2, 4 bytes  |==== half the link ====|              so does this one

Sharing is max-min fair: all flows speed up together until a link is full. The flows on this link
then keep their speed, and the other flows speed up further. ::

    link A, 10 bytes/s:  flow 1, flow 2          flow 2 is held at 2 by link B, so flow 1 gets the
                                                 other 8 of A
    link B,  4 bytes/s:          flow 2, flow 3  flow 3 is held at 2

Speeds are expressed as *paces*, in seconds per byte like a link's beta. A flow that shares no link
has exactly the pace of its slowest link.

Source:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition (1992), section 6.5.2: max-min fairness
    and its algorithm.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ringsim.errors import ArgumentError, say
from ringsim.faults import Degrade, degraded_by
from ringsim.link import GivenLinks, Link
from ringsim.ring.pairs import Pair
from ringsim.simulator.cores import Cores
from ringsim.simulator.settings import Settings
from ringsim.topologies import GlooCosts, Hop, OneMachine, Topology
from ringsim.traces.events import NONE

if TYPE_CHECKING:
    from ringsim.simulator.clock import Clock

Arrived = Callable[[float], None]  # called at the time of an arrival, with this time
Factors = Mapping[Pair, float]  # how much slower a link is, by (src, dst)

AWAKE_S = 300e-6  # the cores stay awake for this long after a message
# two posts on a connection within this time count as overlapping, because the first one's bytes are
# about to arrive
CLOSE_S = 150e-6


@dataclass(slots=True)
class _Line:
    """The state of one private link."""

    alpha_s: float
    beta_s: float
    free_s: float = 0.0  # the time at which all bytes so far have entered the link


class PrivateLinks:
    """Private links for each ordered pair of ranks. Arrival times are known immediately.

    Args:
        link: the cost of a message: one link for all pairs, or one for each ordered pair (src, dst)
            that communicates.
        slower: the factor by which a link is slower, by (src, dst).

    Example:
        >>> links = PrivateLinks(Link(alpha_s=1.0, beta_s_per_byte=0.5), {})
        >>> links.carry(0, 1, size_bytes=4, now_s=0.0)  # occupies the link until 2.0
        3.0
        >>> links.carry(0, 1, size_bytes=4, now_s=0.0)  # waits for the first message's last byte
        5.0
        >>> links.carry(1, 0, size_bytes=4, now_s=0.0)  # the other direction has its own link
        3.0
    """

    def __init__(
        self,
        link: GivenLinks,
        slower: Factors,
    ) -> None:
        self._link, self._slower = link, slower
        self._lines: dict[Pair, _Line] = {}  # by (src, dst)

    def carry(
        self, src: int, dst: int, size_bytes: int, now_s: float, apart_s: float = math.inf
    ) -> float:
        """Accepts a message, and returns its arrival time in seconds.

        Messages from one source to one destination arrive in the order of the calls.

        Args:
            src: the rank that sends the message.
            dst: the rank that receives the message.
            size_bytes: the size of the message, at least 0.
            now_s: the present time, at which the message may leave.
            apart_s: the time since one of the two ranks last used their connection, for shared
                cores.
        """
        line = self._lines.get((src, dst))
        if line is None:
            link = self.link_of(src, dst)
            line = self._lines[src, dst] = _Line(link.alpha_s, link.beta_s_per_byte)
        free_s = line.free_s
        line.free_s = free_s = (now_s if now_s > free_s else free_s) + size_bytes * line.beta_s
        return free_s + line.alpha_s

    def link_of(self, src: int, dst: int) -> Link:
        """Returns the cost of an undisturbed message, without sending one.

        Raises ArgumentError if there is no link.
        """
        return degraded(find_link(self._link, src, dst), self._slower.get((src, dst), 1.0))


def find_link(link: GivenLinks, src: int, dst: int) -> Link:
    """Returns the link for a pair of ranks, from one link for all pairs or a dict of links.

    Raises ArgumentError if there is no link for the pair.
    """
    if isinstance(link, Link):
        return link
    if (src, dst) not in link:
        raise ArgumentError(
            f"link contains no entry for ({src}, {dst}), but rank {src} sends to rank {dst}. Add "
            f"({src}, {dst}): Link(...)."
        )
    return link[src, dst]


def degraded(link: Link, factor: float) -> Link:
    """Returns a link on which every message takes ``factor`` times as long.

    With a factor of 1, this is the link itself.

    Example:
        >>> degraded(Link(alpha_s=1.0, beta_s_per_byte=0.5), 5).time_s(4)
        15.0
    """
    return link if factor == 1.0 else Link(link.alpha_s * factor, link.beta_s_per_byte * factor)


Edge = tuple[Hashable, Hashable]


def fair_paces(routes: Sequence[Sequence[Edge]], paces: Mapping[Edge, float]) -> list[float]:
    """Returns the paces of flows that share the links of their routes max-min fairly.

    A flow's pace is 0 if none of the links on its route is ever full.

    Args:
        routes: the links of each flow, without duplicates.
        paces: the seconds per byte of each link, or 0 for a link that is never full.

    Example:
        >>> fair_paces([["A"], ["A", "B"], ["B"]], {"A": 1 / 10, "B": 1 / 4})
        [0.125, 0.5, 0.5]
    """
    found = [0.0] * len(routes)
    # the flows on each link that still speed up; not sets, because the order of a set may differ
    # from run to run
    moving: dict[Edge, dict[int, None]] = {}
    for flow, route in enumerate(routes):
        for link in route:
            if paces[link] > 0:
                moving.setdefault(link, {})[flow] = None
    taken = dict.fromkeys(moving, 0.0)  # the bytes per second of flows at their final pace
    pace = math.inf
    while moving:
        offers = {}  # for each link, the pace if it became full next
        for link, flows in moving.items():
            left = 1 - taken[link] * paces[link]  # the share of the link that is still free
            offers[link] = len(flows) * paces[link] / left if left > 0 else math.inf
        pace = min(pace, max(offers.values()))  # without min, rounding could raise it again
        for link in [link for link, offer in offers.items() if offer >= pace]:
            for flow in moving.pop(link, ()):
                found[flow] = pace
                for other in routes[flow]:
                    if other in moving:
                        del moving[other][flow]
                        taken[other] += 1 / pace
                        if not moving[other]:
                            del moving[other]
    return found


@dataclass(slots=True, eq=False)
class _Flow:
    """A message that is in flight, or waits for the message before it."""

    route: _Route
    left_bytes: float  # the bytes left at settled_s
    latency_s: float
    arrived: Arrived
    pace: float = -1.0  # seconds per byte, or negative if not yet known
    settled_s: float = 0.0
    end_s: float = math.inf  # the expected end
    end: Callable[[], None] = field(init=False)  # called at end_s


@dataclass(slots=True, eq=False)
class _Route:
    """The route from one rank to another, and its messages, of which the first is in flight."""

    alpha_s: float
    edges: tuple[Edge, ...]
    flows: deque[_Flow] = field(default_factory=deque)


class SharedLinks:
    """The links of a topology, on which arrivals are known only when they happen.

    ``slower`` lists, by (src, dst), the factor by which a message is slower in an otherwise empty
    network.
    """

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        world_size: int,
        slower: Factors,
    ) -> None:
        topology.check(world_size)
        self._clock = clock
        self._topology = topology
        self._world_size = world_size
        self._slower = slower
        # by source, destination and group; the group of messages is NONE
        self._routes: dict[tuple[int, int, int], _Route] = {}
        self._paces: dict[Edge, float] = {}  # the paces of the links that some route has used
        # the current flows on each link; not sets, because the order of a set may differ from run
        # to run
        self._users: defaultdict[Edge, dict[_Flow, None]] = defaultdict(dict)
        # links whose flows have changed since the paces were last computed
        self._changed: dict[Edge, None] = {}

    def carry(
        self,
        src: int,
        dst: int,
        size_bytes: float,
        arrived: Arrived,
        group: int = NONE,
        latencies: int = 1,
    ) -> None:
        """Accepts a message, or the bytes that a collective moves from one rank to another.

        The bytes wait for earlier messages between the two ranks, or for earlier bytes of the
        group, and share the links with everything else. If several steps of a collective use the
        same links, their bytes may form a single flow. After its last byte, the flow takes the
        route's latency once per step.

        Args:
            src: the rank that sends the bytes.
            dst: the rank that receives the bytes.
            size_bytes: the number of bytes.
            arrived: the function to call when the bytes arrive. The time is not known earlier,
                because it depends on messages that are still to come.
            group: the number of the collective's group, or NONE for a message.
            latencies: the number of steps.
        """
        route = self._routes.get((src, dst, group))
        if route is None:
            route = self._routes[src, dst, group] = self._open(src, dst)
        flow = _Flow(route, size_bytes, latencies * route.alpha_s, arrived)
        route.flows.append(flow)
        if len(route.flows) == 1:
            self._begin(flow)

    def link_of(self, src: int, dst: int) -> Link:
        """Returns the cost of an undisturbed message, as `PrivateLinks.link_of` does."""
        links = [hop.link for hop in self._topology.route(src, dst, self._world_size)]
        whole = Link(
            sum(link.alpha_s for link in links),
            max((link.beta_s_per_byte for link in links), default=0.0),
        )
        return degraded(whole, self._slower.get((src, dst), 1.0))

    def _open(self, src: int, dst: int) -> _Route:
        whole, hops = self.link_of(src, dst), [*self._topology.route(src, dst, self._world_size)]
        # an extra hop, as slow as the degraded route should be
        if (src, dst) in self._slower:
            hops.append(Hop((("degraded", src), dst), whole))
        # A link that is never full delays no flow, and would only connect unrelated flows.
        limiting = {hop.edge: hop.link.beta_s_per_byte for hop in hops if hop.link.beta_s_per_byte}
        self._paces.update(limiting)
        return _Route(whole.alpha_s, tuple(limiting))

    def _begin(self, flow: _Flow) -> None:
        if flow.left_bytes == 0 or not flow.route.edges:
            self._end(flow)
            return
        flow.settled_s = self._clock.now
        flow.end = partial(self._end, flow)
        for edge in flow.route.edges:
            self._users[edge][flow] = None
        self._change(flow.route.edges)

    def _end(self, flow: _Flow) -> None:
        now_s, route = self._clock.now, flow.route
        route.flows.popleft()
        if flow.pace >= 0:
            for edge in route.edges:
                del self._users[edge][flow]
            self._change(route.edges)
        arrives_s = now_s + flow.latency_s
        self._clock.at(arrives_s, partial(flow.arrived, arrives_s))
        if route.flows:
            self._begin(route.flows[0])

    def _change(self, edges: tuple[Edge, ...]) -> None:
        """Schedules new paces for when everything that is due now has happened.

        Many flows may begin or end at the same time.
        """
        if not self._changed:
            self._clock.at(self._clock.now, self._share)
        self._changed.update(dict.fromkeys(edges))

    def _share(self) -> None:
        """Computes new paces for the flows on changed links, for the flows they meet, and so on."""
        flows = self._meeting(self._changed)
        self._changed.clear()
        now_s = self._clock.now
        for flow, pace in zip(
            flows, fair_paces([flow.route.edges for flow in flows], self._paces), strict=True
        ):
            if pace != flow.pace and flow.end_s > now_s:
                if flow.pace > 0:
                    flow.left_bytes = max(
                        0.0, flow.left_bytes - (now_s - flow.settled_s) / flow.pace
                    )
                flow.settled_s = now_s
                flow.pace = pace
                self._clock.cancel(flow.end_s, flow.end)
                flow.end_s = now_s + flow.left_bytes * pace
                self._clock.at(flow.end_s, flow.end)

    def _meeting(self, edges: Mapping[Edge, None]) -> list[_Flow]:
        seen_edges, waiting = dict(edges), list(edges)
        seen_flows: dict[_Flow, None] = {}
        while waiting:
            for flow in self._users[waiting.pop()]:
                if flow not in seen_flows:
                    seen_flows[flow] = None
                    new = [edge for edge in flow.route.edges if edge not in seen_edges]
                    seen_edges.update(dict.fromkeys(new))
                    waiting += new
        return list(seen_flows)


class SharedCores(PrivateLinks):
    """Private links for each ordered pair of ranks, and cores shared by all ranks.

    Each message needs a core for the time that it would take on an idle machine, or for the time
    that the machine's Gloo costs determine. The additional time due to ``slower`` needs no core.

    Args:
        machine: the link, the cores, and Gloo's costs.
        slower: the factor by which a link is slower, by (src, dst).
        world_size: the number of ranks that share the cores.
        seed: the seed that determines which messages stall.

    Example:
        >>> machine = OneMachine(Link(alpha_s=1.0, beta_s_per_byte=0.5), cores=1)
        >>> links = SharedCores(machine, {}, world_size=4, seed=0)
        >>> (
        ...     links.carry(0, 1, size_bytes=4, now_s=0.0),
        ...     links.carry(2, 3, size_bytes=4, now_s=0.0),
        ... )
        (3.0, 6.0)
    """

    def __init__(
        self,
        machine: OneMachine,
        slower: Factors,
        world_size: int,
        seed: int,
    ) -> None:
        super().__init__(machine.link, slower)
        self.gloo, self.cores = machine.gloo, Cores(machine.cores)
        self._alone = machine.link
        self._draw = random.Random(seed).random
        self._stalled_s: dict[int, float] = {}  # the end of the stall of each rank
        # a rank that waits for a core stays busy for longer
        self._close_s = CLOSE_S * max(1.0, world_size / machine.cores)
        self._handled_s = -math.inf  # the time at which the last message was handled

    def carry(
        self, src: int, dst: int, size_bytes: int, now_s: float, apart_s: float = math.inf
    ) -> float:
        """Accepts a message, as `PrivateLinks.carry` does. The message needs a core to begin."""
        line = self._lines.get((src, dst))
        begin_s = now_s if line is None else max(now_s, line.free_s)
        arrives_s = super().carry(src, dst, size_bytes, now_s)
        gloo = self.gloo
        if gloo is None:
            return max(arrives_s, self.cores.book(begin_s, self._alone.time_s(size_bytes)))
        if gloo.awake is not None and begin_s - self._handled_s < AWAKE_S:
            arrives_s += gloo.awake.time_s(size_bytes) - self._alone.time_s(size_bytes)
        return self.carry_piece(gloo, dst, size_bytes, begin_s, apart_s, arrives_s)

    def carry_piece(
        self, gloo: GlooCosts, dst: int, size_bytes: float, begin_s: float, apart_s: float,
        arrives_s: float = 0.0,
    ) -> float:  # fmt: skip
        """Reserves a core for each side of a message, and returns its arrival time.

        Args:
            gloo: Gloo's costs.
            dst: the rank that receives the message.
            size_bytes: the size of the message.
            begin_s: the time from which the cores are needed.
            apart_s: the time since one of the two ranks last used their connection.
            arrives_s: the earliest arrival that the link permits; no link delays a collective.
        """
        half_s = gloo.carrying.time_s(size_bytes) / 2
        self._handled_s = max(self.cores.book(begin_s, half_s) for _ in range(2))
        arrives_s = max(arrives_s, self._handled_s)
        until_s = self._stalled_s.get(dst, 0.0)
        if until_s > arrives_s:
            return until_s
        if apart_s < self._close_s and self._draw() < gloo.stall_share:
            self.cores.book(arrives_s, gloo.stall_s)
            arrives_s = self._stalled_s[dst] = arrives_s + gloo.stall_s
        return arrives_s


Links = PrivateLinks | SharedLinks


def make_links(clock: Clock, settings: Settings) -> Links:
    """Creates the links of a run. Each `Degrade` slows down the messages between two ranks."""
    link, topology = settings.link, settings.topology
    if (link is None) == (topology is None):
        got = "none" if link is None else "both"
        raise ArgumentError(
            f"exactly one of link and topology must be given, got {got}. "
            "Pass link, or a topology, which contains its own links."
        )
    pairs = [(each.src, each.dst) for each in settings.inject if isinstance(each, Degrade)]
    slower = {pair: degraded_by(settings.inject, *pair) for pair in pairs}
    if link is not None:
        return PrivateLinks(link, slower)
    if isinstance(topology, OneMachine):
        return SharedCores(topology, slower, settings.world_size, settings.seed)
    assert topology is not None
    if isinstance(topology, type) or not all(
        callable(getattr(topology, name, None)) for name in ("check", "route")
    ):
        raise ArgumentError(
            f"topology must have the methods check and route, got {say(topology)}. Use a topology "
            "from ringsim.topologies."
        )
    return SharedLinks(clock, topology, settings.world_size, slower)
