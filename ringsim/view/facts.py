"""Computes the facts about runs that the page only draws.

A table is a list of columns of equal length. The first column is the rank; the rows are ordered by
rank, then by time, except in the table of the critical path. Times are in ns since the run's first
operation or span, as on the page's axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ringsim.errors import escape_line
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import NONE, Events, Ints
from ringsim.traces.matching import CollectiveCalls
from ringsim.traces.program import find_gaps, find_program
from ringsim.traces.steps import list_live, read_actions, split_steps, split_where
from ringsim.traces.value import Trace

Table = Sequence[Ints]
CAUSE = 1.5  # computing longer than others counts more than waiting, which it causes


def find_steps(events: Events, begin_ns: int) -> tuple[list[JsonObject], Table, Table]:
    """Finds the pipeline steps, their bubbles, and the numbers of live activations.

    Returns:
        The name, begin, end and bubble share of each step, and two tables. The columns of bubbles
        are the rank, the end, the begin, and an event on the lane of the rank's computations. The
        columns of live activations are the rank, the time of a change, and the new number.
    """
    steps, bubbles, live = [], list[Table](), list[Table]()
    for name, own in split_steps(events):
        begin, end = events.post_ns[own].min(), events.done_ns[own].max()
        parts, idle = split_where(own, events.rank[own]), 0
        for part in parts:
            actions = read_actions(events, part)
            # a rank also waits before its first computation, and after its last one
            start = np.append(actions.start, [begin, end])
            done = np.append(actions.end, [begin, end])
            before, after = find_gaps(start, done)
            bubbles.append([actions.rank[0], start[after], done[before], part[0]])
            live.append([actions.rank[0], *list_live(actions)])
            idle += (start[after] - done[before]).sum()
        times = {"begin": int(begin - begin_ns), "end": int(end - begin_ns)}
        share = float(idle / max(1, (end - begin) * len(parts)))
        steps.append({"name": escape_line(name), **times, "bubble": share})
    return steps, _join(bubbles, [0, begin_ns, begin_ns, 0]), _join(live, [0, begin_ns, 0])


def _join(pieces: list[Table], zeros: list[int]) -> Table:
    """Joins tables, whose columns count from ``zeros``, and sorts the rows by rank and time."""
    pieces = [np.broadcast_arrays(*piece) for piece in pieces] or [[np.zeros(0, int)] * len(zeros)]
    table = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    order = np.lexsort((table[1], table[0]))
    return [column[order] - zero for column, zero in zip(table, zeros, strict=True)]


def find_extents(events: Events, begin_ns: int) -> Table:
    """Returns a table of the time in which ranks run their own program: rank, begin, end."""
    gaps = find_program(events)
    ranks, first = np.unique(events.rank[gaps.before], return_index=True)
    end = np.maximum.reduceat(gaps.end_ns, first) if len(first) else gaps.end_ns
    return [ranks, gaps.start_ns[first] - begin_ns, end - begin_ns]


def find_path(trace: Trace, calls: CollectiveCalls, begin_ns: int) -> Table:
    """Finds the critical path, backwards from the event that ended last.

    The path stays on a rank until a wait, and then moves to the rank that caused the wait.

    Returns:
        A table of segments in the order of time: rank, the rank to which the path moves or -1 if it
        stays, begin, end.
    """
    events, messages = trace.events, trace.messages
    ranks, post_ns, done_ns = events.rank, events.post_ns, events.done_ns
    if done_ns.max(initial=NONE) == NONE:
        return [np.zeros(0, dtype=np.int64)] * 4
    cause = np.full(len(events), NONE)
    cause[messages.send], cause[messages.recv] = messages.recv, messages.send
    cause[calls.event] = calls.last[calls.call]
    held = np.flatnonzero((cause != NONE) & (events.wait_ns != NONE) & (done_ns > events.wait_ns))
    wait, done, posted = events.wait_ns[held], done_ns[held], post_ns[cause[held]]
    # A message already in flight counts only if the rank waited for at least half its travel time,
    # because returning also takes a moment.
    counts = (posted > wait) | (2 * (done - wait) >= done - posted)
    counts &= (ranks[cause[held]] != ranks[held]) & (posted > post_ns[held]) & (posted <= done)
    waits = defaultdict[int, list[int]](list)  # of each rank, in the order of their ends
    for event in held[counts][np.argsort(done[counts], kind="stable")].tolist():
        waits[ranks[event]].append(event)
    rank, time, path = ranks[done_ns.argmax()], done_ns.max(), []
    while True:
        own = waits[rank]
        while own and done_ns[own[-1]] > time:
            own.pop()
        if not own:
            break
        event = own.pop()
        other = cause[event]
        path.append((rank, NONE, done_ns[event], time))
        path.append((ranks[other], rank, post_ns[other], done_ns[event]))
        rank, time = ranks[other], post_ns[other]
    path.append((rank, NONE, post_ns[np.searchsorted(ranks, rank)], time))
    columns = np.array(path[::-1], dtype=np.int64).T
    return [*columns[:2], *(columns[2:] - begin_ns)]


def find_lags(first: Trace, second: Trace, begins_ns: tuple[int, int]) -> Table:
    """Pairs the events of two runs, and returns a table: rank, end in the second run, its lag."""
    from ringsim.prediction.differences import pair

    runs = first.events, second.events
    pairs = pair(first, second, [np.zeros(len(events), dtype=np.int64) for events in runs])
    ends = np.stack([events.done_ns[index] for events, index in zip(runs, pairs, strict=True)])
    ended = (ends != NONE).all(axis=0)
    then, now = ends[:, ended] - np.array(begins_ns)[:, None]
    rank = second.events.rank[pairs[1][ended]]
    order = np.lexsort((now, rank))
    return [rank[order], now[order], (now - then)[order]]


def find_stages(events: Events, size: int) -> list[int] | None:
    """Returns the lowest stage of each rank, or -1; or None for a run without stages."""
    stages = np.full(size, NONE).astype(np.uint32)  # -1 is the largest number
    np.minimum.at(stages, events.rank, events.stage.astype(np.uint32))
    return stages.astype(np.int32).tolist() if (events.stage != NONE).any() else None


def find_oddness(trace: Trace) -> list[float]:
    """Returns the deviation of each rank's time without waits; above 1, the rank is unlike most."""
    events, waits = trace.events, trace.waits
    last = np.zeros(trace.world_size)
    np.maximum.at(last, events.rank, np.maximum(events.post_ns, events.done_ns))
    waited = np.maximum(waits.blocked_ns, 0) - waits.transfer_ns
    longer = last - np.bincount(events.rank, waited, minlength=len(last))
    longer -= np.median(longer)
    away = np.where(longer > 0, CAUSE, 1) * np.abs(longer)
    usual = max(4 * np.median(np.abs(longer)), 2e7 * trace.makespan_s, 1)  # 2 % of the run
    return list((away / usual).round(3).tolist())
