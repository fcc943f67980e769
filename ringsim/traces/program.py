"""Finds the time that a rank's own program takes between recorded events.

The program's time is the time on the rank's first thread that is neither inside a span nor inside a
wait. Spans that only mark a step do not count. Time before the thread's first event, and after its
last one, is unknown::

    | recv ..... |  program  | isend |  program  | wait ..... |  program  | span "forward" |
                 ^ train.py:12                   ^ train.py:15

The page computes the same gaps in JavaScript (``program.js``), when it first needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringsim.traces.events import MARK, NONE, SPAN, Events, Ints
from ringsim.traces.steps import is_step

_NEVER = np.iinfo(np.int64).max


class Gaps(NamedTuple):
    """The stretches in which ranks ran their own program, as columns of equal length.

    Attributes:
        before: the index of the event that ended last before the stretch.
        after: the index of the event that ends the stretch.
        start_ns: the starts of the stretches.
        end_ns: the ends of the stretches.
    """

    before: Ints
    after: Ints
    start_ns: Ints
    end_ns: Ints


def find_program(events: Events) -> Gaps:
    """Finds the stretches in which the ranks ran their own program.

    Args:
        events: the events of a run.

    Returns:
        The stretches, ordered by rank, then by time.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> columns = {"rank": [0, 0], "op": [OP_CODES["send"], OP_CODES["recv"]]}
        >>> times = {"post_ns": [0, 5], "wait_ns": [0, 5], "done_ns": [2, 9]}
        >>> gaps = find_program(make_events(columns | times))
        >>> gaps.start_ns.tolist(), gaps.end_ns.tolist()
        ([2], [5])
    """
    covers = (events.kind == SPAN) & ~is_step(events)
    waits = (events.kind != SPAN) & (events.wait_ns != NONE)
    done_ns = np.where(events.done_ns == NONE, _NEVER, events.done_ns)
    found = [np.zeros((4, 0), dtype=np.int64)]
    for _, thread, own in events.by_thread():
        if thread:
            continue
        own = own[events.kind[own] != MARK]
        waiting = own[waits[own]]
        ended = own[(events.kind[own] == SPAN) & ~covers[own] & (events.done_ns[own] != NONE)]
        index = np.concatenate([own, waiting, ended])
        start = np.concatenate(
            [events.post_ns[own], events.wait_ns[waiting], events.done_ns[ended]]
        )
        posted = np.where(covers[own], done_ns[own], events.post_ns[own])
        end = np.concatenate([posted, done_ns[waiting], events.done_ns[ended]])
        before, after = find_gaps(start, end)
        found.append(np.stack([index[before], index[after], end[before], start[after]]))
    return Gaps(*np.concatenate(found, axis=1))


def find_gaps(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Finds the gaps between intervals, which may overlap.

    Returns:
        For each gap, the index of the interval that ended last before it, and of the next one.

    Example:
        >>> [side.tolist() for side in find_gaps(np.array([7, 0, 1]), np.array([9, 4, 3]))]
        [[1], [0]]
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    free = np.maximum.accumulate(end)
    latest = np.maximum.accumulate(np.where(end == free, np.arange(len(end)), 0))
    gap = np.flatnonzero(start[1:] > free[:-1])
    return order[latest[gap]], order[gap + 1]
