"""What a rank did during a stretch of time: how long it was blocked, and in which span it was."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ringsim.diagnose.world_of_events import operation_of
from ringsim.traces.events import COLLECTIVE, NONE, RECV, SEND, SPAN, Events, Ints

__all__ = ["Activity"]


class Activity:
    """Answers questions on what ranks did when.

    Args:
        events: the events of a run.
        world_size: number of ranks.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> names = Tables(labels=("compute",))
        >>> events = make_events({"rank": [0, 0], "op": [OP_CODES["span"], OP_CODES["recv"]], "label": [0, -1], "stage": [1, -1],
        ...                       "microbatch": [3, -1], "post_ns": [0, 80], "wait_ns": [-1, 80], "done_ns": [70, 100]}, names)
        >>> activity = Activity(events, 1)
        >>> activity.doing(0, 10, 60), int(activity.blocked_between(0, np.array([60]), np.array([90]))[0])
        ('still computing stage 1, microbatch 3', 10)
    """

    def __init__(self, events: Events, world_size: int) -> None:
        self._events = events
        self._size = world_size
        self._ends: dict[int, tuple[Ints, Ints]] = {}

    def blocked_between(self, rank: int, start_ns: Ints, end_ns: Ints) -> Ints:
        """Returns for how long a rank was blocked in its operations within each stretch, in ns (int64)."""
        times, blocked = self._blocked_until(rank)
        if len(times) == 0:
            return np.zeros(len(start_ns), dtype=np.int64)
        return (np.interp(end_ns, times, blocked) - np.interp(start_ns, times, blocked)).astype(np.int64)

    def busy_shares(self, length_ns: float) -> Ints:
        """Returns the share of the run, ``length_ns`` long, for which each rank was not blocked (float64)."""
        blocked = [self._blocked_until(rank)[1] for rank in range(self._size)]
        return np.array([1 - (float(one[-1]) / max(length_ns, 1) if len(one) else 0) for one in blocked])

    def doing(self, rank: int, start_ns: int, end_ns: int) -> str:
        """Says what a rank did for most of a stretch of time: "still computing stage 1, microbatch 3"."""
        events, spans = self._events, self._spans
        mine = spans[events.rank[spans] == rank]
        done = np.where(events.done_ns[mine] == NONE, end_ns, events.done_ns[mine])
        overlap = np.minimum(done, end_ns) - np.maximum(events.post_ns[mine], start_ns)
        # Spans nest: of those that cover about as much, the one that began last is the innermost.
        if len(mine) and 2 * int(overlap.max()) > end_ns - start_ns:
            wide = mine[overlap >= 0.9 * overlap.max()]
            return f"still {self._span_text(int(wide[np.argmax(events.post_ns[wide])]))}"
        last = np.flatnonzero((events.rank == rank) & self._speaks & (events.post_ns <= start_ns))
        if len(last) and events.file[last[-1]] != NONE:
            latest = operation_of(events, int(last[-1]))
            return f"busy with something that no span names, after its {latest.op} at {latest.place}"
        return "busy with something that no span names"

    @cached_property
    def _spans(self) -> Ints:
        return np.flatnonzero(self._events.kind == SPAN)

    @cached_property
    def _speaks(self) -> Ints:
        kind = self._events.kind
        speaks: Ints = (kind == SEND) | (kind == RECV) | (kind == COLLECTIVE)
        return speaks

    def _span_text(self, event: int) -> str:
        events = self._events
        label, stage, microbatch = int(events.label[event]), int(events.stage[event]), int(events.microbatch[event])
        name = events.tables.labels[label] if label != NONE else "a span"
        about = [f"stage {stage}" if stage != NONE else "", f"microbatch {microbatch}" if microbatch != NONE else ""]
        words = ", ".join(filter(None, about))
        if name == "compute":
            return f"computing {words}".rstrip()
        return f'in "{name}"' + (f" ({words})" if words else "")

    def _blocked_until(self, rank: int) -> tuple[Ints, Ints]:
        """Returns moments, ascending, and for how long the rank had been blocked until each; what overlaps counts once."""
        if rank not in self._ends:
            events = self._events
            mine = np.flatnonzero((events.rank == rank) & self._speaks & (events.wait_ns != NONE) & (events.done_ns != NONE))
            mine = mine[np.argsort(events.wait_ns[mine], kind="stable")]
            end = np.maximum.accumulate(np.maximum(events.done_ns[mine], events.wait_ns[mine])) if len(mine) else mine
            start = np.maximum(events.wait_ns[mine], np.concatenate([end[:0], [0], end[:-1]])[: len(mine)])
            start = np.minimum(start, end)
            total = np.cumsum(end - start)
            times = np.stack([start, end], axis=1).ravel()
            self._ends[rank] = times, np.stack([total - (end - start), total], axis=1).ravel()
        return self._ends[rank]
