"""What a timeline shows, as numbers: one bar for each stretch of time that an event spent in one way.

A bar lies in a lane of its rank's row. Spans have a lane for each depth of nesting, sends and recvs one each under them::

    rank 0   | forward                |        span, depth 0
             | attention | | mlp |             span, depth 1
                              ..======         send: posted, then blocked
                 ............//////===         recv: posted, late sender, transfer

A collective takes both of the lower lanes: while it lasts, its rank does neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.plot.style import BLUE, INK, MUTED, ORANGE, PURPLE, VERMILLION, Look
from ringsim.traces.events import COLLECTIVE, ERROR, MARK, NONE, RECV, SEND, SPAN, Events, Ints

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["OPERATION_LOOKS", "SPAN_LOOKS", "Bars", "make_bars", "time_range"]

POSTED, TRANSFER, LATE_SENDER, LATE_RECEIVER, BLOCKED, COLLECTIVE_BLOCKED, UNWAITED, UNFINISHED, FAILED = range(9)
OPERATION_LOOKS: Final = (
    Look("posted, not waited for yet", "#E4E4E4", "", MUTED),
    Look("transfer", BLUE, "", "white"),
    Look("blocked: late sender", VERMILLION, "////", "white"),
    Look("blocked: late receiver", ORANGE, "\\\\\\\\", INK),
    Look("blocked, other side unknown", "#9A9A9A", "||", "white"),
    Look("collective", PURPLE, "++", "white"),
    Look("never waited for", "#FFFFFF", "----", MUTED),
    Look("never finished", "#FFFFFF", "xxxx", VERMILLION),
    Look("failed", INK, "xxxx", "white"),
)
# Paler than what tells of waiting and sending, so that names can be read inside.
SPAN_LOOKS: Final = (
    Look("span", "#9AD2F4", "", "white"),
    Look("span", "#F6EE96", "////", "#DDCF3A"),
    Look("span", "#8AD0BB", "||", "white"),
    Look("span", "#CFCFCF", "\\\\\\\\", "white"),
    Look("span", "#9AD2F4", "--", "white"),
    Look("span", "#F6EE96", "xx", "#DDCF3A"),
    Look("span", "#8AD0BB", "++", "white"),
    Look("span", "#CFCFCF", "/|", "white"),
)


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars as columns: numpy arrays of one length.

    Attributes:
        rank: the row (int32).
        lane: 0 and up for the depths of spans, then ``depths`` for sends, ``depths + 1`` for recvs, ``depths + 2`` for collectives (int64).
        start_ns: from the start of the run (int64).
        end_ns: likewise; of a bar that never ended, the end of the trace (int64).
        look: number in ``OPERATION_LOOKS``; a span has their number plus the place of its label in ``labels`` (int64).
        event: index of its event (int64).
        is_open: it never ended (bool).
        depths: lanes that spans need.
        labels: numbers of the labels that spans have, ascending; -1 for spans without one.
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
    """First and last moment of a trace in ns; (0, 0) where there is nothing."""
    if len(events) == 0:
        return 0, 0
    return int(events.post_ns.min()), int(max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max()))


def make_bars(trace: Trace) -> Bars:
    """Cuts the events of a trace into bars.

    Args:
        trace: any trace.

    Returns:
        The bars. Every event but a mark has at least one, if of no length.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events({"rank": [0], "op": [OP_CODES["send"]], "post_ns": [0], "wait_ns": [10], "done_ns": [50]})
        >>> bars = make_bars(Trace(events, {"world_size": 2}))
        >>> [OPERATION_LOOKS[look].name for look in bars.look], bars.end_ns.tolist()
        (['posted, not waited for yet', 'blocked, other side unknown'], [10, 50])
    """
    events = trace.events
    first, last = time_range(events)
    depth, depths = _depths(events, last)
    pieces = _operation_pieces(trace, last)
    spans = np.flatnonzero(events.kind == SPAN)
    done = np.where(events.done_ns[spans] == NONE, last, events.done_ns[spans])
    labels, label = np.unique(events.label[spans], return_inverse=True)
    pieces.append((spans, events.post_ns[spans], done, len(OPERATION_LOOKS) + label))

    event = np.concatenate([piece[0] for piece in pieces])
    kind = events.kind[event]
    look = np.concatenate([np.broadcast_to(piece[3], piece[0].shape) for piece in pieces]).astype(np.int64)
    lane = np.select([kind == SPAN, kind == SEND, kind == RECV], [depth[event], depths, depths + 1], depths + 2)
    # In a file that no run has left, something may end before it began: it takes no time, and nothing lies before the first moment.
    start = np.maximum(np.concatenate([piece[1] for piece in pieces]), first)
    end = np.maximum(np.concatenate([piece[2] for piece in pieces]), start)
    return Bars(
        rank=events.rank[event],
        lane=lane,
        start_ns=start,
        end_ns=end,
        look=look,
        event=event,
        is_open=(look == UNFINISHED) | (look == UNWAITED) | ((kind == SPAN) & (events.done_ns[event] == NONE)),
        depths=depths,
        labels=tuple(labels.tolist()),
    )


def _operation_pieces(trace: Trace, last: int) -> list[tuple[Ints, Ints, Ints, int | Ints]]:
    """Stretches of the sends, recvs and collectives: (events, starts, ends, look)."""
    events, waits = trace.events, trace.waits
    pieces: list[tuple[Ints, Ints, Ints, int | Ints]] = []

    def add(which: Ints, start: Ints, end: Ints, look: int) -> None:
        index = np.flatnonzero(which)
        pieces.append((index, start[index], end[index], look))

    communicates = (events.kind != SPAN) & (events.kind != MARK)
    post, wait, done = events.post_ns, events.wait_ns, events.done_ns
    waited, finished = communicates & (wait != NONE), communicates & (done != NONE)
    failed = communicates & (events.status == ERROR)
    begin = np.where(wait != NONE, wait, post)
    end = np.where(done != NONE, done, last)
    # An operation that is finished and was not waited for (a collective seen to be done) is posted all along.
    posted_until = np.where(waited, wait, end)
    add(communicates & ~failed & (waited | finished) & (posted_until > post), post, posted_until, POSTED)
    add(failed & (begin > post), post, begin, POSTED)
    add(failed, begin, end, FAILED)
    add(communicates & ~failed & ~finished & waited, begin, end, UNFINISHED)
    add(communicates & ~failed & ~finished & ~waited, post, end, UNWAITED)

    blocked = waited & finished & ~failed
    matched = np.zeros(len(events), dtype=bool)
    matched[trace.messages.send] = matched[trace.messages.recv] = True
    late = wait + waits.late_sender_ns + waits.late_receiver_ns
    add(blocked & (waits.late_sender_ns > 0), wait, late, LATE_SENDER)
    add(blocked & (waits.late_receiver_ns > 0), wait, late, LATE_RECEIVER)
    add(blocked & matched & (events.kind != COLLECTIVE), late, done, TRANSFER)
    add(blocked & ~matched & (events.kind != COLLECTIVE), wait, done, BLOCKED)
    add(blocked & (events.kind == COLLECTIVE), wait, done, COLLECTIVE_BLOCKED)
    # Done at the very moment of its posting, never waited for: a bar of no length, so that it is counted.
    add(finished & ~waited & ~failed & (posted_until <= post), post, done, POSTED)
    return pieces


def _depths(events: Events, last: int) -> tuple[Ints, int]:
    """Lane of each span: how many others of its thread are open when it starts, threads below each other; and lanes in all."""
    depth = np.zeros(len(events), dtype=np.int64)
    deepest = 0
    spans = np.flatnonzero(events.kind == SPAN)
    end = np.where(events.done_ns == NONE, last, events.done_ns)
    order = spans[np.lexsort((-end[spans], events.post_ns[spans], events.thread[spans], events.rank[spans]))]
    where = np.stack([events.rank[order], events.thread[order]])
    cuts = np.flatnonzero(np.any(where[:, 1:] != where[:, :-1], axis=0)) + 1
    rank_before, lanes_before = -1, 0
    for thread in np.split(order, cuts):
        if len(thread) == 0:
            continue
        rank = int(events.rank[thread[0]])
        lanes_before = lanes_before if rank == rank_before else 0
        # Spans of no length open nothing: on a virtual clock many may share a moment.
        lasting = end[thread] > events.post_ns[thread]
        starts, ends = events.post_ns[thread][lasting], np.sort(end[thread][lasting])
        opened = np.searchsorted(starts, events.post_ns[thread], side="right")
        opened[lasting] = np.arange(lasting.sum())
        depth[thread] = lanes_before + np.maximum(opened - np.searchsorted(ends, events.post_ns[thread], side="right"), 0)
        lanes_before = int(depth[thread].max()) + 1
        deepest, rank_before = max(deepest, lanes_before), rank
    return depth, deepest
