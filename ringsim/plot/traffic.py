"""Counts the messages and bytes between ranks, by process group.

The result includes groups without messages, and messages on groups outside the ring::

    rank 0 --ring:0>1--> rank 1        lane "forward": in the group's direction, activations
    rank 0 <--ring:0>1-- rank 1        lane "backward": against that direction, gradients
    rank 0 ---world----> rank 2        lane "outside": not on any of the ring's groups
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringsim.traces.events import COLLECTIVE, NONE, OK, SEND, find_ring
from ringsim.traces.value import Trace


class TrafficEdge(NamedTuple):
    """The messages between two ranks on one process group; ``lane`` is their direction."""

    src: int
    dst: int
    group: str
    lane: str
    messages: int
    size_bytes: int


class Traffic(NamedTuple):
    """The messages in a trace.

    Attributes:
        trace: the trace.
        ring: for each of the ring's groups, by name, its predecessor and successor.
        edges: the messages by source, destination and group.
        unfinished: the number of sends that finished on neither side.
        collectives: the number of collective operations.
    """

    trace: Trace
    ring: dict[str, tuple[int, int]]
    edges: list[TrafficEdge]
    unfinished: int
    collectives: int

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(edge.messages for edge in self.edges)

    @property
    def lanes(self) -> set[str]:
        """The directions in which messages travelled."""
        return {edge.lane for edge in self.edges}

    @property
    def used(self) -> set[str]:
        """The names of the ring's groups that carried messages."""
        return {edge.group for edge in self.edges} & self.ring.keys()


def count_traffic(trace: Trace) -> Traffic:
    """Counts the messages between each pair of ranks on each process group.

    A message counts if either its send or its recv is done, because a sender that never waits does
    not know that the message arrived. The bytes of collectives do not count.

    Example:
        >>> from ringsim.traces.events import Group, OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> tables = Tables(
        ...     groups=(Group("ring:0>1", (0, 1)),), payloads=(Payload("float32", (2,), 8),)
        ... )
        >>> send = {
        ...     "rank": [0, 0],
        ...     "op": [OP_CODES["send"]] * 2,
        ...     "peer": [1, 1],
        ...     "group": [0, 0],
        ...     "payload": [0, 0],
        ... }
        >>> count_traffic(Trace(make_events(send, tables), {"world_size": 2})).edges
        [TrafficEdge(src=0, dst=1, group='ring:0>1', lane='forward', messages=2, size_bytes=16)]
    """
    events, messages = trace.events, trace.messages
    listed = trace.metadata.get("ring_groups", [])
    names = [name for name, _ in listed] or [group.name for group in events.tables.groups]
    ring = find_ring(names, trace.world_size)
    sends = events.kind == SEND
    sent = sends & (events.status == OK)
    sent[messages.send[events.status[messages.recv] == OK]] = True
    done = np.flatnonzero(sent & (events.peer >= 0))
    keys = np.stack([events.rank[done], events.peer[done], events.group[done]])
    found, which, numbers = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    totals = np.zeros(found.shape[1], dtype=np.int64)
    np.add.at(totals, which, np.maximum(events.size_bytes[done], 0))
    edges = []
    for src, dst, group, number, total in np.vstack([found, numbers, totals]).T.tolist():
        name = events.tables.groups[group].name if group != NONE else "no group"
        ends = ring.get(name)
        lane = "forward" if ends == (src, dst) else "backward" if ends == (dst, src) else "outside"
        edges.append(TrafficEdge(src, dst, name, lane, number, total))
    collectives = int((events.kind == COLLECTIVE).sum())
    return Traffic(trace, ring, edges, int((sends & ~sent).sum()), collectives)
