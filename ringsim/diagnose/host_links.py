"""Finds links between hosts that stalled or were slow in a finished run.

The search uses only messages. A message's travel time is known if its receiver waited for it: the
time from the moment when both sides were posted to the arrival. A busy sender, a queue or a loaded
machine delays some messages, and a slow link delays all of them. So a link is represented by the
shortest time of several messages of the same size, and compared with the other links::

    host0 - host1     4.4 ms
    host0 - host2     4.3 ms
    host1 - host2    33.6 ms     slow

Slow links are reported even if most links are slow, because a host with a bad interface has slow
links to all other hosts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringsim.diagnose.snapshot import is_on_nccl, operation_of
from ringsim.diagnose.verdict import acts_text
from ringsim.traces.events import NONE, Ints
from ringsim.traces.findings import Finding
from ringsim.traces.matching import number_rows
from ringsim.traces.units import bytes_text, count, time_text

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# a message takes at least this many times as long on a slow link as on other links of the run,
SLOW_TIMES = 4
SLOW_NS = 1_000_000  # and at least this much longer;
SLOW_SHARE = 0.05  # the total is at least this share of the run.
LEAST_MESSAGES = 8  # of the same size and direction, for a link to be examined
STILL_NS = 2_000_000_000  # shortest time without an arrival on a stalled link,
# longer for a large message: few transports are slower than this
STALL_BYTES_PER_S = 50e6
MOST_FINDINGS = 5
_SLOW_HINT = (
    "Check the cable, the interfaces at both ends, and any other traffic on them. Alternatively, "
    "use ring_ranks to order the ring so that it sends little over this link."
)
_STILL_HINT = (
    "Check the logs of the hosts and switches for that time. A host whose processes were stopped "
    "looks the same."
)

Pair = tuple[str, str]  # of hosts, in alphabetical order


class _Way(NamedTuple):
    """The times of equally sized messages from one host to another."""

    src: str  # host
    dst: str
    size_bytes: int
    number: int  # of messages
    least_ns: int  # the shortest time of a message
    sure_ns: float  # ``least_ns``, less the possible error of both clocks
    shortest: int  # the message with that time

    @property
    def pair(self) -> Pair:
        return (self.src, self.dst) if self.src < self.dst else (self.dst, self.src)


_SlowWay = tuple[int, int, _Way]  # the delay of all its messages, and the time on other links


class _Crossings(NamedTuple):
    """Messages between hosts, as columns of the same length."""

    message: Ints
    src: Ints  # number of the host among ``names``
    dst: Ints
    size_bytes: Ints
    posted_ns: Ints  # the time when both sides had posted
    done_ns: Ints
    seen: Ints  # bool: whether its receiver waited for it, so that ``done_ns`` is its arrival
    wrong_ns: Ints  # the possible error of the two clocks (float64)
    names: list[str]


def find_links(trace: Trace) -> tuple[Finding, ...]:
    """Finds links between hosts that stalled for seconds, and slow links.

    On a slow link, messages take several times as long as on other links.

    Args:
        trace: the trace of a run on several hosts. There are no findings for other runs, or with
            NCCL, because a GPU starts a message long after the post.

    Returns:
        A finding for each such link, at most ``MOST_FINDINGS`` of each kind: stalled links first,
        then slow links, the costliest first.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> posted, took = (
        ...     np.repeat(range(0, 160, 20), 4) * 1_000_000,
        ...     np.tile([2, 2, 16, 16], 8) * 1_000_000,
        ... )
        >>> events = make_events(
        ...     {  # eight times, rank 0 sends to rank 1 in 2 ms, and rank 1 to rank 2 in 16 ms
        ...         "rank": [0, 1, 1, 2] * 8,
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]] * 16,
        ...         "peer": [1, 0, 2, 1] * 8,
        ...         "tag": [0] * 32,
        ...         "payload": [0] * 32,
        ...         "post_ns": posted,
        ...         "wait_ns": posted,
        ...         "done_ns": posted + took,
        ...     },
        ...     Tables(payloads=(Payload("float32", (256,), 1024),)),
        ... )
        >>> about = {
        ...     "world_size": 3,
        ...     "ranks": [{"rank": rank, "host": f"node{rank}"} for rank in range(3)],
        ... }
        >>> print(find_links(Trace(events, about))[0].message)
        the link between hosts node1 and node2 is slow.
          each of 8 messages of 1 KiB from node1 to node2 took at least 16 ms
          between other hosts, such a message takes as little as 2 ms
          over all messages on this link, the delay adds up to at least 112 ms
    """
    if is_on_nccl(trace):
        return ()
    crossings = _list_crossings(trace)
    ways = _list_ways(crossings)
    return (
        *_find_still(trace, crossings, ways),
        *_find_slow(trace, [way for way in ways if way.number >= LEAST_MESSAGES]),
    )


def _list_crossings(trace: Trace) -> _Crossings:
    events, messages = trace.events, trace.messages
    across = np.flatnonzero(trace.crosses(messages.src, messages.dst))
    send, recv = messages.send[across], messages.recv[across]
    src, dst = messages.src[across], messages.dst[across]
    posted_ns = np.maximum(events.post_ns[send], events.post_ns[recv])
    done_ns, wait_ns = events.done_ns[recv], events.wait_ns[recv]
    size_bytes = events.size_bytes[send]
    told = (wait_ns != NONE) & (done_ns != NONE) & (size_bytes != NONE)
    seen = told & (2 * (done_ns - np.maximum(posted_ns, wait_ns)) >= done_ns - posted_ns)
    by_rank = np.zeros(trace.world_size)
    for clock in trace.clocks:
        compared = clock.uncertainty_ns is not None
        by_rank[[*clock.ranks]] = clock.uncertainty_ns if compared else np.inf
    wrong_ns = by_rank[src] + by_rank[dst]
    names, host = np.unique(trace.hosts, return_inverse=True)
    columns = across, host[src], host[dst], size_bytes, posted_ns, done_ns, seen, wrong_ns
    kept = (done_ns != NONE) & np.isfinite(wrong_ns)
    return _Crossings._make([*(column[kept] for column in columns), names.tolist()])


def _list_ways(crossings: _Crossings) -> list[_Way]:
    seen = np.flatnonzero(crossings.seen)
    took_ns = (crossings.done_ns - crossings.posted_ns)[seen]
    sides = np.stack([crossings.src, crossings.dst, crossings.size_bytes])[:, seen]
    kinds, kind, numbers = np.unique(sides, axis=1, return_inverse=True, return_counts=True)
    order = np.lexsort((took_ns, kind))
    first = order[np.searchsorted(kind[order], np.arange(len(numbers)))]
    least_ns = took_ns[first].clip(0)
    sure_ns, shortest = least_ns - crossings.wrong_ns[seen[first]], crossings.message[seen[first]]
    columns = *kinds, numbers, least_ns, sure_ns, shortest
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [_Way(crossings.names[src], crossings.names[dst], *rest) for src, dst, *rest in rows]


def _find_quickest(ways: Sequence[_Way]) -> dict[int, dict[Pair, int]]:
    """Returns the time in ns that each link's faster direction takes, by message size."""
    found = defaultdict[int, dict[Pair, int]](dict)
    for way in ways:
        links = found[way.size_bytes]
        links[way.pair] = min(way.least_ns, links.get(way.pair, way.least_ns))
    return found


# -- links that stalled


def _find_still(trace: Trace, crossings: _Crossings, ways: Sequence[_Way]) -> list[Finding]:
    """Finds links on which nothing arrived for a long time although both sides had posted.

    A link counts only if other messages of the same size are fast on it.
    """
    quickest = _find_quickest(ways)
    low, high = np.minimum(crossings.src, crossings.dst), np.maximum(crossings.src, crossings.dst)
    link = number_rows(low, high)
    order = np.lexsort((crossings.done_ns, link))
    before = np.concatenate([order[:1], order[:-1]])  # the previous arrival on the same link
    same = (link[order] == link[before]) & (order != before)
    since_ns = np.maximum(crossings.posted_ns[order], np.where(same, crossings.done_ns[before], 0))
    still_ns = crossings.done_ns[order] - since_ns
    least_ns = (
        STILL_NS
        + crossings.wrong_ns
        + (1e9 * crossings.size_bytes / STALL_BYTES_PER_S).astype(np.int64)
    )
    long = crossings.seen[order] & (still_ns >= least_ns[order])
    times = defaultdict[Pair, list[tuple[int, int]]](list)  # the length, and the message
    for one, lasted_ns in zip(order[long].tolist(), still_ns[long].tolist(), strict=True):
        pair = crossings.names[low[one]], crossings.names[high[one]]
        if SLOW_TIMES * quickest[crossings.size_bytes[one]][pair] <= lasted_ns:
            times[pair].append((lasted_ns, one))
    longest = sorted(times, key=lambda pair: -max(times[pair])[0])
    return [
        _describe_still(trace, crossings, pair, times[pair]) for pair in longest[:MOST_FINDINGS]
    ]


def _describe_still(
    trace: Trace, crossings: _Crossings, pair: Pair, times: Sequence[tuple[int, int]]
) -> Finding:
    events, messages = trace.events, trace.messages
    lasted_ns, one = max(times)
    message = crossings.message[one]
    send, recv = (operation_of(events, side[message]) for side in (messages.send, messages.recv))
    began = time_text(crossings.done_ns[one] - lasted_ns)
    text = (
        f"nothing moved on the link between hosts {pair[0]} and {pair[1]} for "
        f"{time_text(lasted_ns)}, and then the link recovered.\n"
        f"  the link stopped {began} after the start of the run, when both sides had "
        f"posted{acts_text((send, recv))}"
    )
    if len(times) > 1:
        text += (
            f"\n  the link stopped {count(len(times), 'time')}, for "
            f"{time_text(sum(lasted for lasted, _ in times))} in total"
        )
    return Finding("link", tuple(sorted((send.rank, recv.rank))), (recv, send), text, _STILL_HINT)


# -- slow links


def _find_slow(trace: Trace, ways: Sequence[_Way]) -> list[Finding]:
    quickest = _find_quickest(ways)
    ascending = {size_bytes: sorted(links.values()) for size_bytes, links in quickest.items()}
    slow = defaultdict[Pair, list[_SlowWay]](list)
    for way in ways:
        others_ns = _median_of_others(ascending[way.size_bytes], quickest[way.size_bytes][way.pair])
        if others_ns is not None and way.sure_ns >= max(
            SLOW_TIMES * others_ns, others_ns + SLOW_NS
        ):
            slow[way.pair].append((way.number * (way.least_ns - others_ns), others_ns, way))
    lost_ns = {pair: sum(delay_ns for delay_ns, _, _ in found) for pair, found in slow.items()}
    costly = [
        pair
        for pair in sorted(slow, key=lambda pair: -lost_ns[pair])
        if lost_ns[pair] >= SLOW_SHARE * trace.makespan_s * 1e9
    ]
    shared = set(costly[0]).intersection(*costly) if len(costly) > 1 else set[str]()
    return [
        _describe_slow(trace, slow[pair], lost_ns[pair], shared) for pair in costly[:MOST_FINDINGS]
    ]


def _median_of_others(ascending: Sequence[int], own: int) -> int | None:
    """Returns the lower median of all numbers except one.

    Returns None if there is no other number.

    Example:
        >>> (
        ...     _median_of_others([1, 2, 9], 9),
        ...     _median_of_others([1, 2, 9], 1),
        ...     _median_of_others([3], 3),
        ... )
        (1, 2, None)
    """
    middle = (len(ascending) - 2) // 2
    if middle < 0:
        return None
    return ascending[middle + (middle >= bisect_left(ascending, own))]


def _describe_slow(
    trace: Trace, found: Sequence[_SlowWay], lost_ns: int, shared: set[str]
) -> Finding:
    events, messages = trace.events, trace.messages
    _, others_ns, way = max(found, key=itemgetter(0))
    host = np.array(trace.hosts)
    over = (
        trace.crosses(messages.src, messages.dst)
        & np.isin(host[messages.src], way.pair)
        & np.isin(host[messages.dst], way.pair)
    )
    ranks = np.union1d(messages.src[over], messages.dst[over]).tolist()
    message = (
        f"the link between hosts {way.pair[0]} and {way.pair[1]} is slow.\n"
        f"  each of {count(way.number, 'message')} of {bytes_text(way.size_bytes)} from {way.src} "
        f"to {way.dst} took at least {time_text(way.least_ns)}\n"
        f"  between other hosts, such a message takes as little as {time_text(others_ns)}\n"
        f"  over all messages on this link, the delay adds up to at least {time_text(lost_ns)}"
    )
    hint = (
        "".join(
            f"Check the interface of host {name} first: all slow links lead to that host.\n"
            for name in sorted(shared)
        )
        + _SLOW_HINT
    )
    operations = tuple(
        operation_of(events, side[way.shortest]) for side in (messages.recv, messages.send)
    )
    return Finding("slow_link", tuple(ranks), operations, message, hint)
