"""Computes the bars of a timeline.

A bar is a period during which an event is in one state. It belongs to a lane in its rank's row. The
lanes for spans, one per nesting depth, come first, followed by those for sends and recvs::

    rank 0   | forward                |------  span, depth 0; then the program's own time
             | attention | | mlp |             span, depth 1
                              ..======         send: posted, then blocked
                 ............//////===         recv: posted, late sender, transfer

A collective takes up the lanes of both sends and recvs, because its rank does neither in the
meantime.

Bars that are shorter than a pixel are added up, never omitted. Time is cut into slots one pixel
wide. Each slot is drawn as a stack of small bars, whose heights are their shares of the slot's
time::

    100 % |                        lane
          |     _                  in slot 2, transfers take 60 % of the time and late senders 30 %
          |  _ |/|  _
          |_|=||=|_|=|___
           0 1  2 3 4  5           slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringsim.traces.events import (
    COLLECTIVE,
    ERROR,
    IN_FLIGHT,
    NONE,
    RECV,
    SEND,
    SPAN,
    Events,
    Ints,
)
from ringsim.traces.matching import number_rows
from ringsim.traces.program import find_program
from ringsim.traces.steps import split_where
from ringsim.traces.value import Trace

STUCK_PART = 12  # stuck operations are drawn for at least this part of the run

# the states of operations' bars, and the program's time between them; spans have numbers from
# FIRST_SPAN
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
    PROGRAM,
    FIRST_SPAN,
) = range(11)


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars, stored as columns, which are numpy arrays of equal length.

    The first ``depths`` lanes are for spans and the program's time, and the next three for sends,
    recvs and collectives. ``look`` is the state of the bar; for a span, it is ``FIRST_SPAN`` plus
    the index of the span's label in ``labels``, which contain "" if there are spans without a
    label. The ``event`` of the program's time is the one before it. ``is_open`` marks unfinished
    bars, which last to the end of the trace.
    """

    rank: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    look: Ints
    event: Ints
    is_open: Ints
    depths: int
    labels: tuple[str, ...]


def time_range(events: Events) -> tuple[int, int]:
    """Returns the first and last times in a trace, in ns, or (0, 0) if the trace has no events.

    If an operation is stuck at the end, some time is added, so that the operation can be seen.
    """
    if len(events) == 0:
        return 0, 0
    first = int(events.post_ns.min())
    last = int(events.last_ns.max())
    stuck = (events.status == IN_FLIGHT) & (events.wait_ns != NONE)
    if stuck.any():
        last = max(last, int(events.wait_ns[stuck].max()) + (last - first) // STUCK_PART)
    return first, last


def make_bars(trace: Trace) -> Bars:
    """Divides a trace's events into bars.

    Every event except a mark gets at least one bar, which may have length 0.
    """
    events = trace.events
    first, last = time_range(events)
    is_done = events.done_ns != NONE
    until = np.where(is_done, events.done_ns, last)
    spans, gaps = np.flatnonzero(events.kind == SPAN), find_program(events)
    labels, number = np.unique(events.label[spans], return_inverse=True)
    both = np.append(spans, gaps.before)
    start = np.append(events.post_ns[spans], gaps.start_ns)
    end = np.append(until[spans], gaps.end_ns)
    thread = events.rank[both].astype(np.int64) << 32 | events.thread[both]
    depth, depths = _find_depths(thread, start, end)
    look = np.append(FIRST_SPAN + number, np.full(len(gaps.before), PROGRAM))
    pieces = [
        (np.flatnonzero(which), starts[which], ends[which], np.full(which.sum(), state))
        for which, starts, ends, state in _cut_operations(trace, until)
    ]
    columns = zip(*pieces, (both, start, end, look), strict=True)
    event, start, end, look = map(np.concatenate, columns)
    kind = events.kind[event]
    lane = np.select([kind == SEND, kind == RECV], [depths, depths + 1], depths + 2)
    lane[look >= PROGRAM] = depth
    # In an edited file, an event may end before it began. Its bar gets length 0, and no bar begins
    # before the first time.
    start = np.maximum(start, first)
    end = np.maximum(end, start)
    is_open = np.isin(look, (UNFINISHED, UNWAITED)) | (look >= FIRST_SPAN) & ~is_done[event]
    rank = events.rank[event]
    known = (*events.tables.labels, "")  # the last is for spans without a label
    names = tuple(known[label] for label in labels.tolist())
    return Bars(rank, lane, start, end, look, event, is_open, depths, names)


def _cut_operations(trace: Trace, end: Ints) -> list[tuple[Ints, Ints, Ints, int]]:
    """Returns the bars for sends, recvs and collectives as (mask of events, starts, ends, look).

    ``end`` is the end of each event, or the end of the trace for events that did not finish.
    """
    events, waits = trace.events, trace.waits
    post, wait, done = events.post_ns, events.wait_ns, events.done_ns
    communicates = events.communicates
    failed = communicates & (events.status == ERROR)
    going = communicates & ~failed
    waited, finished = wait != NONE, done != NONE
    begin = np.where(waited, wait, post)
    # a finished operation without a wait counts as posted all the time; if it was done immediately,
    # it still gets a bar of length 0, so that it is counted
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


def _find_depths(lane: Ints, start: Ints, done: Ints) -> tuple[Ints, int]:
    """Returns each span's depth and the number of depths.

    A span's depth is the number of open spans on the same thread at its start. The depths of
    different threads are below each other. ``lane`` is the rank (upper half) and the thread.
    """
    depth = np.zeros(len(lane), dtype=np.int64)
    order = np.lexsort((-done, start, lane))
    rank, above, depths = NONE, 0, 0
    for own in split_where(order, lane[order]) if len(lane) else ():
        if lane[own[0]] >> 32 != rank:
            rank, above = lane[own[0]] >> 32, 0
        # spans of length 0 open no lane, because on a virtual clock many may have the same time
        lasting: Ints = done[own] > start[own]
        opened = np.cumsum(lasting) - lasting
        closed = np.searchsorted(np.sort(done[own][lasting]), start[own], side="right")
        depth[own] = above + np.maximum(opened - closed, 0)
        above = int(depth[own].max()) + 1
        depths = max(depths, above)
    return depth, depths


# -- level of detail

# the least height of a bar in a slot, as a share of its lane, so that it is visible
LEAST_HEIGHT = 0.2


class Merged(NamedTuple):
    """Short bars, added up.

    The columns have one entry for each (rank, lane, slot, look) that occurs. If several ranks share
    a row, ``rank`` is the first of these ranks. The bars take up ``share`` of the slot's time, and
    are drawn from ``low`` to ``high``, both as shares of the lane's height.
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
    """Adds up the selected bars in slots of length ``slot_ns``, starting at ``first_ns``.

    If a row combines several ``ranks``, ``share`` refers to the time of all these ranks.
    """
    start, end = (bars.start_ns - first_ns) / slot_ns, (bars.end_ns - first_ns) / slot_ns
    first = np.floor(start).astype(np.int64)
    pieces = np.where(which, np.maximum(np.ceil(end).astype(np.int64) - first, 1), 0)
    bar = np.repeat(np.arange(len(first)), pieces)
    slot = first[bar] + np.arange(len(bar)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    share = np.minimum(end[bar], slot + 1) - np.maximum(start[bar], slot)
    rank = bars.rank[bar] // ranks * ranks
    columns = np.stack([rank, bars.lane[bar], slot, bars.look[bar]]).astype(np.int64)
    place = number_rows(*columns)
    columns = columns[:, np.unique(place, return_index=True)[1]]
    share = np.bincount(place, weights=share)
    rank, lane, slot, look = columns
    share = share / np.minimum(ranks, world_size - rank)
    low, high = _stack(columns, share, LEAST_HEIGHT if ranks == 1 else 0.0)
    return Merged(rank, lane, slot, look, share, low, high)


def _stack(columns: Ints, share: Ints, least: float) -> tuple[Ints, Ints]:
    """Stacks each slot's bars, each at least ``least`` high, and returns their (low, high).

    A stack that is higher than the lane is shrunk to fit.
    """
    begins = np.append(True, np.diff(columns[:3], axis=1).any(axis=0))[: len(share)]
    stack = np.cumsum(begins) - 1
    height = np.maximum(share, least)
    height /= np.maximum(np.bincount(stack, weights=height), 1.0)[stack]
    running = np.cumsum(height)
    high = np.clip(running - (running - height)[begins][stack], 0, 1)
    return np.clip(high - height, 0, 1), high


MOST_ARROWS = 160


def choose_messages(trace: Trace, ranks: int) -> Ints:
    """Chooses the messages that get an arrow.

    These are the messages whose recv is done. If there are more than ``MOST_ARROWS``, the choice is
    spread evenly over time and over the pairs of rows. A row combines ``ranks`` ranks, and messages
    within a row get no arrow.
    """
    messages, events = trace.messages, trace.events
    src, dst = messages.src.astype(np.int64) // ranks, messages.dst // ranks
    done = np.flatnonzero((events.done_ns[messages.recv] != NONE) & ((src != dst) | (ranks == 1)))
    if len(done) <= MOST_ARROWS:
        return done
    ways = number_rows(src[done], dst[done])
    sizes = np.bincount(ways)
    in_time = done[np.lexsort((events.post_ns[messages.send[done]], ways))]
    each = max(MOST_ARROWS // len(sizes), 1)
    # The choices for different pairs of rows are shifted in time; otherwise the arrows would line
    # up.
    turns = np.arange(each) + (np.arange(len(sizes)) * 0.618 % 1)[:, None]
    chosen = np.unique(
        (turns * sizes[:, None] / each).astype(np.int64) + (np.cumsum(sizes) - sizes)[:, None]
    )
    # if there are more pairs of rows than arrows, take every n-th message
    return np.sort(in_time[chosen[:: -(-len(chosen) // MOST_ARROWS)]])
