"""Links that several pairs of ranks use: messages that are under way together share them fairly.

A message is a flow. It passes all links of its route at once, at the pace that `fair_share` gives it among the others; when a flow begins
or ends, those that it met get new paces. Messages from one rank to another go one after the other, as on a link of their own; so do the
flows of one group's collectives, beside them::

    0 -> 2, 8 bytes    |==== half the link ====|== alone ==|           arrives one latency after its last byte
    1 -> 2, 4 bytes    |==== half the link ====|                       so does this one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Final

from ringsim.link import Link
from ringsim.simulator.carriers import Agenda, Arrived, degraded
from ringsim.simulator.fair_share import fair_paces
from ringsim.topologies import Hop, Topology

__all__ = ["SharedLinks"]

Edge = tuple[Hashable, Hashable]


class _Flow:
    """A message under way, or waiting for the one before it."""

    __slots__ = ("arrived", "latency_s", "left_bytes", "pace", "plan", "ready_s", "route", "settled_s")

    def __init__(self, route: _Route, size_bytes: float, latency_s: float, ready_s: float, arrived: Arrived | None) -> None:
        self.route = route
        self.left_bytes = size_bytes  # at settled_s
        self.latency_s = latency_s
        self.ready_s = ready_s
        self.settled_s = ready_s
        self.arrived = arrived
        self.pace = -1.0  # seconds for each byte; none yet
        self.plan = 0  # counts the times that an end was foreseen: the last one holds


class _Route:
    """The way from one rank to another, with the messages that take it: the first is under way."""

    __slots__ = ("alpha_s", "edges", "flows")

    def __init__(self, alpha_s: float, edges: tuple[Edge, ...]) -> None:
        self.alpha_s = alpha_s
        self.edges = edges
        self.flows: deque[_Flow] = deque()


class SharedLinks:
    """The links of a topology; arrivals are known as they happen.

    Args:
        agenda: the virtual clock.
        topology: which links a message passes.
        world_size: how many ranks there are.
        slower: how many times as long a message takes, by (src, dst), in a network that is otherwise empty.

    Raises:
        ArgumentError: the topology has no place for the ranks.
    """

    def __init__(self, agenda: Agenda, topology: Topology, world_size: int, slower: Mapping[tuple[int, int], float]) -> None:
        topology.check(world_size)
        self._agenda: Final = agenda
        self._topology: Final = topology
        self._world_size: Final = world_size
        self._slower: Final = slower
        self._routes: dict[tuple[int, ...], _Route] = {}  # by src, dst; those of collectives by group, too
        self._paces: dict[Edge, float] = {}  # of the links that some route has used
        self._users: dict[Edge, dict[_Flow, None]] = {}  # who is on each link now; no sets, whose order may differ by run
        self._changed: dict[Edge, None] = {}  # links whose users are no longer those that the paces were made for

    def carry(self, src: int, dst: int, size_bytes: int, ready_s: float, arrived: Arrived | None = None) -> float | None:
        """Takes a message, as `Carrier.carry` says.

        Returns:
            None, and calls ``arrived`` when the message arrives; for a message to the rank itself ``ready_s``.
        """
        if src == dst:
            return ready_s
        route = self._routes.get((src, dst)) or self._open(src, dst)
        self._queue(_Flow(route, size_bytes, route.alpha_s, ready_s, arrived))
        return None

    def carry_part(self, group: int, src: int, dst: int, size_bytes: float, latencies: int, arrived: Arrived) -> None:
        """Takes what a collective moves from one rank to another, now: it waits for earlier ones of its group, and shares with all others.

        Args:
            group: the number of the group.
            src: the rank that it comes from.
            dst: the rank that it goes to, another one.
            size_bytes: how much, 0 or more; what many steps move over one link may be one flow.
            latencies: how many times the latency of the way is paid, after the last byte.
            arrived: called when all is there, with the time.
        """
        route = self._routes.get((src, dst, group))
        if route is None:
            own = self._routes.get((src, dst)) or self._open(src, dst)
            route = self._routes[src, dst, group] = _Route(own.alpha_s, own.edges)
        self._queue(_Flow(route, size_bytes, latencies * route.alpha_s, self._agenda.now_s(), arrived))

    def _queue(self, flow: _Flow) -> None:
        flows = flow.route.flows
        flows.append(flow)
        if len(flows) == 1:
            self._begin_when_ready(flow)

    def link_of(self, src: int, dst: int) -> Link:
        """Returns what a message that nobody disturbs costs, as `Carrier.link_of` says.

        Raises:
            ArgumentError: the topology has no way.
        """
        return self._whole(src, dst, self._topology.route(src, dst, self._world_size))

    def _whole(self, src: int, dst: int, hops: Sequence[Hop]) -> Link:
        """Returns what hops cost together, the degradation of the pair included."""
        link = Link(sum(hop.link.alpha_s for hop in hops), max((hop.link.beta_s_per_byte for hop in hops), default=0.0))
        return degraded(link, self._slower.get((src, dst), 1.0))

    def _open(self, src: int, dst: int) -> _Route:
        hops = list(self._topology.route(src, dst, self._world_size))
        whole = self._whole(src, dst, hops)
        if (src, dst) in self._slower:  # a hop of its own, so slow that the whole takes so much longer
            hops.append(Hop((("degraded", src), dst), whole))
        # A link that is never full holds nobody up, and would only join flows that do not meet.
        limiting = {hop.edge: hop.link.beta_s_per_byte for hop in hops if hop.link.beta_s_per_byte}
        for edge in limiting:
            self._users.setdefault(edge, {})
        self._paces.update(limiting)
        route = self._routes[src, dst] = _Route(whole.alpha_s, tuple(limiting))
        return route

    def _begin_when_ready(self, flow: _Flow) -> None:
        if flow.ready_s > self._agenda.now_s():
            self._agenda.at(flow.ready_s, partial(self._begin, flow))
        else:  # in the same breath, so that paces are made once for all that happens now
            self._begin(flow)

    def _begin(self, flow: _Flow) -> None:
        if flow.left_bytes == 0 or not flow.route.edges:
            self._end(flow, flow.plan)
            return
        flow.settled_s = self._agenda.now_s()
        for edge in flow.route.edges:
            self._users[edge][flow] = None
        self._change(flow.route.edges)

    def _end(self, flow: _Flow, plan: int) -> None:
        if plan != flow.plan:  # its pace has changed since this end was foreseen
            return
        now_s, route = self._agenda.now_s(), flow.route
        route.flows.popleft()
        if flow.pace >= 0:
            for edge in route.edges:
                del self._users[edge][flow]
            self._change(route.edges)
        if flow.arrived is not None:
            self._agenda.at(now_s + flow.latency_s, partial(flow.arrived, now_s + flow.latency_s))
        if route.flows:
            self._begin_when_ready(route.flows[0])

    def _change(self, edges: tuple[Edge, ...]) -> None:
        """Has the paces made anew once everything that is due now has happened: many flows may begin or end at one time."""
        if not self._changed:
            self._agenda.at(self._agenda.now_s(), self._share)
        self._changed.update(dict.fromkeys(edges))

    def _share(self) -> None:
        """Gives new paces to the flows on links that have changed, and to those that they meet, and so on."""
        flows = self._meeting(self._changed)
        self._changed.clear()
        now_s = self._agenda.now_s()
        for flow, pace in zip(flows, fair_paces([flow.route.edges for flow in flows], self._paces), strict=True):
            if pace != flow.pace:
                if flow.pace > 0:
                    flow.left_bytes = max(0.0, flow.left_bytes - (now_s - flow.settled_s) / flow.pace)
                flow.settled_s = now_s
                flow.pace = pace
                flow.plan += 1
                self._agenda.at(now_s + flow.left_bytes * pace, partial(self._end, flow, flow.plan))

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
