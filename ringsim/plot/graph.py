"""Who could talk to whom, and who did: a trace as a networkx graph.

A group that was built is an edge, whether or not anything was sent on it; so are the messages that went elsewhere::

    rank 0 --ring:0>1--> rank 1        lane "forward": along the group, activations
    rank 0 <--ring:0>1-- rank 1        lane "backward": against it, gradients
    rank 0 ---world----> rank 2        lane "outside": on none of the ring's groups
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import networkx as nx
import numpy as np

from ringsim.traces.events import COLLECTIVE, NONE, OK, SEND, Ints

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["communication_graph"]

RING_NAME: Final = re.compile(r"ring:(\d{1,9})>(\d{1,9})")  # a name is anybody's: int() refuses thousands of digits


def communication_graph(trace: Trace) -> nx.MultiDiGraph:
    """Counts the messages between each pair of ranks, apart for each process group.

    A message counts where it was sent, once the send or its recv is done: a sender that never waits does not hear that it arrived. What
    the collectives carried is not in here.

    Args:
        trace: any trace.

    Returns:
        A graph with a node for each rank (``pid`` where known). The key of an edge is the name of its group; an edge has ``lane``
        ("forward", "backward" or "outside"), ``messages`` and ``size_bytes``. The graph itself has ``ring`` (name of a built ring group to
        its pred and succ), ``unfinished`` (sends of which neither side got done) and ``collectives`` (collective operations posted).

    Example:
        >>> from ringsim.traces.events import Group, OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> tables = Tables(groups=(Group("ring:0>1", (0, 1)),), payloads=(Payload("float32", (2,), 8),))
        >>> send = {"rank": [0, 0], "op": [OP_CODES["send"]] * 2, "peer": [1, 1], "group": [0, 0], "payload": [0, 0]}
        >>> graph = communication_graph(Trace(make_events(send, tables), {"world_size": 2}))
        >>> graph.edges[0, 1, "ring:0>1"]
        {'lane': 'forward', 'messages': 2, 'size_bytes': 16}
    """
    events = trace.events
    ring = _ring_groups(trace)
    sends = events.kind == SEND
    sent = sends & (events.status == OK)
    messages = trace.messages
    sent[messages.send[events.status[messages.recv] == OK]] = True
    graph = nx.MultiDiGraph(
        ring=ring,
        unfinished=int((sends & ~sent).sum()),
        collectives=int((events.kind == COLLECTIVE).sum()),
    )
    known = {piece.get("rank"): piece for piece in trace.metadata.get("ranks", [])}
    for rank in range(trace.world_size):
        graph.add_node(rank, pid=known.get(rank, {}).get("pid"))
    for name, (pred, succ) in ring.items():
        graph.add_edge(pred, succ, key=name, lane="forward", messages=0, size_bytes=0)

    done = np.flatnonzero(sent & (events.peer >= 0))
    for group, src, dst, number, size_bytes in _totals(events.group[done], events.rank[done], events.peer[done], events.size_bytes[done]):
        name = events.tables.groups[group].name if group != NONE else "no group"
        lane = "forward" if ring.get(name) == (src, dst) else "backward" if ring.get(name) == (dst, src) else "outside"
        graph.add_edge(src, dst, key=name, lane=lane, messages=number, size_bytes=size_bytes)
    return graph


def _ring_groups(trace: Trace) -> dict[str, tuple[int, int]]:
    """Groups of the ring that were built, by name: (pred, succ). Torch sorts a group's ranks, so the direction is in the name alone."""
    listed: list[Any] = trace.metadata.get("ring_groups", [])
    names = [name for name, _ in listed] or [group.name for group in trace.events.tables.groups]
    found = {name: RING_NAME.fullmatch(name) for name in names}
    ring = {name: (int(match[1]), int(match[2])) for name, match in found.items() if match}
    return {name: ends for name, ends in ring.items() if max(ends) < trace.world_size and ends[0] != ends[1]}


def _totals(group: Ints, src: Ints, dst: Ints, size_bytes: Ints) -> list[tuple[int, int, int, int, int]]:
    """Number of messages and of bytes for each (group, src, dst), in ascending order."""
    keys, which = np.unique(np.stack([group, src, dst]), axis=1, return_inverse=True)
    messages = np.bincount(which, minlength=keys.shape[1])
    total = np.zeros(keys.shape[1], dtype=np.int64)
    np.add.at(total, which, np.maximum(size_bytes, 0))
    return list(zip(*keys.tolist(), messages.tolist(), total.tolist(), strict=True)) if len(group) else []
