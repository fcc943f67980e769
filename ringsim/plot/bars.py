"""Bars: what a timeline draws, computed before anything is drawn.

A bar is a stretch of time that an event spent in one way. It lies in a lane of its rank's row:
spans first, one lane for each depth of nesting, then sends and recvs::

    rank 0   | forward                |        span, depth 0
             | attention | | mlp |             span, depth 1
                              ..======         send: posted, then blocked
                 ............//////===         recv: posted, late sender, transfer

A collective takes both lanes of sends and recvs: while it lasts, its rank does neither.

Bars that are too short for a pixel are added up, never left out. Time is cut into slots one pixel
wide, and a slot is drawn as small stacked bars, whose height is the share of its time that they
take::

    100 % |                        lane
          |     _                  in slot 2, transfers take 60 % of the time and late senders 30 %
          |  _ |/|  _
          |_|=||=|_|=|___
           0 1  2 3 4  5           slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ringsim.traces.events import COLLECTIVE, ERROR, MARK, NONE, RECV, SEND, SPAN, Events, Ints

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# what a bar shows, besides a span
(
    POSTED,
    TRANSFER,
    LATE_SENDER,
    LATE_RECEIVER,
    BLOCKED,
    COLLECTIVE_BLOCKED,
    UNWAITED,
    UNFINISHED,
    FAILED,
    FIRST_SPAN,
) = range(10)


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars as columns: numpy arrays of one length.

    The first ``depths`` lanes are for spans, and sends, recvs and collectives have one each after
    them. ``look`` is what the bar shows; a span has ``FIRST_SPAN`` plus the place of its label in
    ``labels``, which are ascending, -1 for none. What never ended ``is_open`` and lasts to the end
    of the trace.
    """

    rank: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    look: Ints
    event: Ints
    is_open: Ints
    depths: int
    labels: tuple[int, ...]

    def __len__(self) -> int:
        """Returns the number of bars."""
        return len(self.rank)


def time_range(events: Events) -> tuple[int, int]:
    """First and last moment of a trace in ns; (0, 0) if it has no events."""
    if len(events) == 0:
        return 0, 0
    last = max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
    return int(events.post_ns.min()), int(last)


def make_bars(trace: Trace) -> Bars:
    """Cuts the events of a trace into bars.

    Every event but a mark has at least one, be it of no length.
    """
    events = trace.events
    first, last = time_range(events)
    is_done = events.done_ns != NONE
    until = np.where(is_done, events.done_ns, last)
    depth, depths = _find_depths(events, until)
    is_span = events.kind == SPAN
    span_look = np.zeros(len(events), dtype=np.int64)
    labels, span_look[is_span] = np.unique(events.label[is_span], return_inverse=True)
    pieces = [
        *_cut_operations(trace, until),
        (is_span, events.post_ns, until, FIRST_SPAN + span_look),
    ]
    event = np.concatenate([np.flatnonzero(which) for which, *_ in pieces])
    start = np.concatenate([starts[which] for which, starts, _, _ in pieces])
    end = np.concatenate([ends[which] for which, _, ends, _ in pieces])
    look = np.concatenate([np.broadcast_to(look, which.shape)[which] for which, *_, look in pieces])
    kind = events.kind[event]
    lane = np.select(
        [kind == SPAN, kind == SEND, kind == RECV], [depth[event], depths, depths + 1], depths + 2
    )
    # In a file that no run has left, something may end before it began: it takes no time, and
    # nothing lies before the first moment.
    start = np.maximum(start, first)
    end = np.maximum(end, start)
    is_open = (look == UNFINISHED) | (look == UNWAITED) | (is_span & ~is_done)[event]
    rank = events.rank[event]
    return Bars(rank, lane, start, end, look, event, is_open, depths, tuple(labels.tolist()))


def _cut_operations(trace: Trace, end: Ints) -> list[tuple[Ints, Ints, Ints, int | Ints]]:
    """Stretches of the sends, recvs and collectives: (mask of events, starts, ends, look).

    ``end`` is when each event is over, at the latest when the trace is.
    """
    events, waits = trace.events, trace.waits
    post, wait, done = events.post_ns, events.wait_ns, events.done_ns
    communicates = (events.kind != SPAN) & (events.kind != MARK)
    failed = communicates & (events.status == ERROR)
    going = communicates & ~failed
    waited, finished = wait != NONE, done != NONE
    begin = np.where(waited, wait, post)
    # an operation that is finished and was not waited for is posted all along; if it was done as it
    # was posted its bar has no length, so that it is counted
    posted = communicates & np.where(waited, wait > post, finished & ~failed)
    blocked = going & waited & finished
    matched = np.zeros(len(events), dtype=bool)
    matched[trace.messages.send] = matched[trace.messages.recv] = True
    message, late = events.kind != COLLECTIVE, wait + waits.late_sender_ns + waits.late_receiver_ns
    return [
        (posted, post, np.where(waited, wait, end), POSTED),
        (failed, begin, end, FAILED),
        (going & ~finished & waited, begin, end, UNFINISHED),
        (going & ~finished & ~waited, post, end, UNWAITED),
        (blocked & (waits.late_sender_ns > 0), wait, late, LATE_SENDER),
        (blocked & (waits.late_receiver_ns > 0), wait, late, LATE_RECEIVER),
        (blocked & matched & message, late, done, TRANSFER),
        (blocked & ~matched & message, wait, done, BLOCKED),
        (blocked & ~message, wait, done, COLLECTIVE_BLOCKED),
    ]


def _find_depths(events: Events, done: Ints) -> tuple[Ints, int]:
    """Returns the lane of each span, and the number of lanes.

    The lane is the number of spans of the same thread that are open when it starts; threads lie
    below each other.
    """
    depth, spans = np.zeros(len(events), dtype=np.int64), np.flatnonzero(events.kind == SPAN)
    if len(spans) == 0:
        return depth, 0
    last = time_range(events)[1]
    both = events.thread[spans].astype(np.int64) + (events.rank[spans].astype(np.int64) << 32)
    threads, thread = np.unique(both, return_inverse=True)
    # of a trace that lasts for centuries, lest it overflows
    coarser = max((len(threads) * (last + 1)).bit_length() - 62, 0)
    # Each thread after the one before: all counts in one go.
    start, end = (np.stack([events.post_ns[spans], done[spans]]) >> coarser) + thread * (
        (last >> coarser) + 1
    )
    order = np.lexsort((-end, start))
    start, end, thread = start[order], end[order], thread[order]
    # spans of no length open nothing: on a virtual clock many may share a moment
    lasting = end > start
    opened = np.cumsum(lasting) - lasting
    closed = np.searchsorted(np.sort(end[lasting]), start, side="right")
    own = np.maximum(opened - closed, 0)
    lanes = np.zeros(len(threads), dtype=np.int64)
    np.maximum.at(lanes, thread, own + 1)
    above = np.cumsum(lanes) - lanes
    # from the first thread of its rank on
    above -= above[np.searchsorted(threads >> 32, threads >> 32)]
    depth[spans[order]] = above[thread] + own
    return depth, int((above + lanes).max())


# -- level of detail

# share of a lane that a slot with anything in it takes, so that it can be seen
LEAST_HEIGHT: Final = 0.2


class Merged(NamedTuple):
    """What bars add up to.

    Columns, one row for each (rank, lane, slot, look) that occurs; of ranks in one row, the first
    stands for all. Together they take ``share`` of the slot's time; drawn from ``low`` to ``high``,
    as shares of the lane's height.
    """

    rank: Ints
    lane: Ints
    slot: Ints
    look: Ints
    share: Ints
    low: Ints
    high: Ints


def merge(
    bars: Bars, which: Ints, first_ns: int, slot_ns: float, ranks: int, world_size: int
) -> Merged:
    """Adds up the bars of a mask in slots of ``slot_ns``, the first from ``first_ns`` on.

    If a row has several ``ranks``, ``share`` is that of the time of all of them.
    """
    start, end = (bars.start_ns - first_ns) / slot_ns, (bars.end_ns - first_ns) / slot_ns
    first = np.floor(start).astype(np.int64)
    pieces = np.where(which, np.maximum(np.ceil(end).astype(np.int64) - first, 1), 0)
    bar = np.repeat(np.arange(len(first)), pieces)
    slot = first[bar] + np.arange(len(bar)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    share = np.minimum(end[bar], slot + 1) - np.maximum(start[bar], slot)
    rank = bars.rank[bar] // ranks * ranks
    columns = np.stack([rank, bars.lane[bar], slot, bars.look[bar]]).astype(np.int64)
    if len(bar):
        sizes = tuple(columns.max(axis=1) + 1)
        keys, place = np.unique(np.ravel_multi_index(tuple(columns), sizes), return_inverse=True)
        columns, share = np.stack(np.unravel_index(keys, sizes)), np.bincount(place, weights=share)
    rank, lane, slot, look = columns
    share = share / np.minimum(ranks, world_size - rank)
    low, high = _stack(columns, share, LEAST_HEIGHT if ranks == 1 else 0.0)
    return Merged(rank, lane, slot, look, share, low, high)


def _stack(columns: Ints, share: Ints, least: float) -> tuple[Ints, Ints]:
    """Stacks what shares a slot, each at least ``least`` high, as (low, high).

    Stacks higher than the lane are shrunk.
    """
    begins = np.append(True, np.diff(columns[:3], axis=1).any(axis=0))[: len(share)]
    stack = np.cumsum(begins) - 1
    height = np.maximum(share, least)
    height /= np.maximum(np.bincount(stack, weights=height), 1.0)[stack]
    running = np.cumsum(height)
    high = np.clip(running - (running - height)[begins][stack], 0, 1)
    return np.clip(high - height, 0, 1), high


MOST_ARROWS: Final = 160


def choose_messages(trace: Trace, ranks: int = 1) -> Ints:
    """Picks the messages that get an arrow.

    All whose recv is done, or at most ``MOST_ARROWS``, evenly in time, of each way as many. A way
    leads from one row to another, and a row has ``ranks`` ranks; what stays in one gets no arrow.
    """
    messages, events = trace.messages, trace.events
    src, dst = messages.src.astype(np.int64) // ranks, messages.dst // ranks
    done = np.flatnonzero((events.done_ns[messages.recv] != NONE) & ((src != dst) | (ranks == 1)))
    if len(done) <= MOST_ARROWS:
        return done
    ends = src[done] * trace.world_size + dst[done]
    _, ways, sizes = np.unique(ends, return_inverse=True, return_counts=True)
    in_time = done[np.lexsort((events.post_ns[messages.send[done]], ways))]
    each = max(MOST_ARROWS // len(sizes), 1)
    # Ways take turns: arrows at one moment would stand in a line.
    turns = np.arange(each) + (np.arange(len(sizes)) * 0.618 % 1)[:, None]
    chosen = np.unique(
        (turns * sizes[:, None] / each).astype(np.int64) + (np.cumsum(sizes) - sizes)[:, None]
    )
    # of more ways than arrows every n-th
    return np.sort(in_time[chosen[:: -(-len(chosen) // MOST_ARROWS)]])
