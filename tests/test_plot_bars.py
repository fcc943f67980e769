"""Tests that bars cover the time of every event once, and that merging keeps this time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story

from ringsim import Trace
from ringsim.plot.bars import PROGRAM, make_bars, merge, time_range
from ringsim.traces.events import MARK, SPAN
from ringsim.traces.program import find_program

TIMES = st.integers(-1, 1000)
OPS = st.sampled_from(["span", "mark", "isend", "irecv", "all_reduce"])
ROWS = st.tuples(st.integers(0, 3), OPS, st.integers(0, 500), TIMES, TIMES)


def trace_of(rows: list[tuple[int, str, int, int, int]]) -> Trace:
    """Draws possible events: no wait before the post, no end before the wait."""
    story = Story(4)
    for rank, op, post, wait, done in rows:
        waits = -1 if wait < 0 or op in ("span", "mark") else post + wait
        ends = -1 if done < 0 or op == "mark" else max(post, waits) + done
        more = {} if op in ("span", "mark") else {"peer": 1 - rank % 2, "group": "world", "tag": 0}
        status = 2 if ends >= 0 or op == "mark" else 1
        story.op(rank, op, (post, waits, ends), status=status, **more)
    return story.trace()


@given(st.lists(ROWS, max_size=20).map(trace_of))
def test_the_program_runs_when_its_rank_is_in_no_span_and_no_wait(trace: Trace) -> None:
    events, gaps = trace.events, find_program(trace.events)
    for rank in range(4):
        own = (events.rank == rank) & (events.kind != MARK)
        columns = events.post_ns[own], events.wait_ns[own], events.done_ns[own]
        post, wait, done = columns
        begin = np.where(events.kind[own] == SPAN, post, wait)
        last = max(np.maximum(post, begin), default=0)  # what follows is unknown
        moments = sorted({time for column in columns for time in column.tolist() if time >= 0})
        for start, end in pairwise(moments):
            is_busy = ((begin >= 0) & (begin <= start) & ((done < 0) | (done >= end))).any()
            found = (
                (gaps.start_ns <= start) & (end <= gaps.end_ns) & (events.rank[gaps.after] == rank)
            )
            assert found.sum() == (not is_busy and end <= last)


@given(st.lists(ROWS, max_size=40).map(trace_of), st.integers(1, 300), st.sampled_from([1, 2]))
def test_bars_cover_every_event_once_and_merging_keeps_all_of_their_time(
    trace: Trace, slot_ms: int, ranks: int
) -> None:
    events, bars, slot_ns = trace.events, make_bars(trace), slot_ms * 1_000_000
    lasts = bars.end_ns - bars.start_ns
    of_events = bars.look != PROGRAM  # the program's time is between events
    covered = np.bincount(bars.event, weights=lasts * of_events, minlength=len(events))
    end = np.where(events.done_ns < 0, time_range(events)[1], events.done_ns)
    assert (covered == np.where(events.kind == MARK, 0, end - events.post_ns)).all()
    assert set(bars.event[of_events].tolist()) == set(np.flatnonzero(events.kind != MARK).tolist())

    short = lasts < slot_ns
    merged = merge(bars, short, 0, slot_ns, ranks, 4)
    rows = zip(merged.rank, merged.lane, merged.slot, merged.look, merged.share, strict=True)
    for rank, lane, slot, look, share in rows:
        same = short & (bars.rank // ranks * ranks == rank)
        same &= (bars.lane == lane) & (bars.look == look)
        begin, end = (
            np.clip(times[same], slot * slot_ns, (slot + 1) * slot_ns)
            for times in (bars.start_ns, bars.end_ns)
        )
        assert share * ranks * slot_ns == pytest.approx((end - begin).sum())
    starts = bars.rank // ranks * ranks, bars.lane, bars.start_ns // slot_ns, bars.look
    found = set(zip(merged.rank, merged.lane, merged.slot, merged.look, strict=True))
    # bars without length are also drawn
    assert set(zip(*(column[short] for column in starts), strict=True)) <= found
    assert merged.share.sum() * ranks * slot_ns == pytest.approx(lasts[short].sum())
    assert ((merged.low >= 0) & (merged.low <= merged.high) & (merged.high <= 1)).all()
