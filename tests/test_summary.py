"""What a trace says in a few lines is the same for a file that is read rank by rank.

Whatever lies in its row groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import WORLD_SIZE, traces
from synthetic import pipeline, trace_of
from test_trace_filter import pass_on

import ringsim
from ringsim import Trace, load
from ringsim.pipeline import evaluate
from ringsim.schedules import make_schedule
from ringsim.traces import files
from ringsim.traces.events import (
    COLUMN_DTYPES,
    NONE,
    OP_CODES,
    Group,
    Tables,
    concatenate,
    make_events,
)
from ringsim.traces.files import read_by_rank
from ringsim.traces.summary import count_file, count_trace

HOSTS = st.lists(st.sampled_from(["", "one", "two"]), min_size=WORLD_SIZE, max_size=WORLD_SIZE)
REFERENCE = {"ranks": [0, 2], "how": "reference", "samples": [[0, 0, 0]]}
CLOCKS = st.sampled_from(
    [[], [REFERENCE, {"ranks": [1], "how": "store", "samples": [[0, 700, 9], [900, 705, 4]]}]]
)


def with_hosts(trace: Trace, hosts: list[str], clocks: list[dict[str, object]]) -> Trace:
    """The run on several hosts.

    Times are small, so that no sum of them is too large for int64, and above the offsets.
    """
    events = trace.events
    times = {
        name: np.where((column := getattr(events, name)) == NONE, NONE, column % 1000 + 1000)
        for name in ("post_ns", "wait_ns", "done_ns")
    }
    about = {
        "world_size": WORLD_SIZE,
        "ranks": [{"rank": rank, "host": host} for rank, host in enumerate(hosts)],
        "clocks": clocks,
    }
    return Trace(replace(events, **times), about)


def check(trace: Trace, group_rows: int) -> None:
    """Compares what the file says with what the trace says, with so many rows in a group."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "GROUP_ROWS", group_rows)
        trace.save(path := Path(directory, "run.ringtrace"))
        whole, read = load(path), list(read_by_rank(path))
        counted, table = count_file(path), count_file(path, whole_table=True).stats
    events = concatenate([piece.events for piece in read])
    assert all(
        np.array_equal(getattr(events, name), getattr(whole.events, name)) for name in COLUMN_DTYPES
    )
    ranks = [rank for piece in read for rank in np.unique(piece.events.rank).tolist()]
    assert ranks == sorted(set(ranks)), "each rank is whole"
    assert str(counted) == whole.summary()
    assert str(table) == str(whole.stats())
    assert counted.total_bytes == count_trace(whole).total_bytes


@given(traces, HOSTS, CLOCKS, st.integers(1, 40), st.booleans())
def test_a_file_says_what_its_trace_says(
    trace: Trace, hosts: list[str], clocks: list[dict[str, object]], rows: int, is_part: bool
) -> None:
    run = with_hosts(trace, hosts, clocks)
    check(run.filter(ranks=[0, 2]) if is_part else run, rows)


def one_step_less(trace: Trace) -> Trace:
    """The same, but rank 1 was killed before its last step."""
    return Trace(
        trace.events.select(
            ~((trace.events.rank == 1) & (trace.events.post_ns > 0.45 * trace.events.post_ns.max()))
        ),
        trace.metadata,
    )


TWICE = trace_of(*[evaluate(make_schedule("1f1b", 4, 6))] * 2)
ACROSS = {
    "rank": [0, 1, 2, 3],
    "op": [OP_CODES[name] for name in ("send", "send", "recv", "recv")],
    "peer": [3, 2, 1, 0],
}
RUNS: dict[str, Callable[[], Trace]] = {
    "a pipeline": lambda: pipeline(5, 4),
    "two steps": lambda: TWICE,
    "a rank that did not come to its last step": lambda: one_step_less(TWICE),
    "a ring": lambda: ringsim.simulate(pass_on, world_size=4, link=ringsim.Link(1e-6, 1e-9)),
    "messages alike": lambda: Trace(
        make_events(
            {**ACROSS, "group": [0] * 4, "post_ns": [0] * 4}, Tables((Group("world", ()),))
        ),
        {},
    ),
    "a part": lambda: ringsim.simulate(pass_on, world_size=4, link=ringsim.Link(1e-6, 1e-9)).filter(
        ranks=[0, 1, 3]
    ),
    "no event": lambda: Trace(pipeline().events.select([]), {"world_size": 3}),
    "no number of ranks": lambda: Trace(pipeline(3, 2).events, {}),
}


@pytest.mark.parametrize("rows", [3, 50, 10_000])
@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, rows: int) -> None:
    check(RUNS[run](), rows)


def test_what_one_rank_did_not_do_is_no_step() -> None:
    assert "2 steps" in TWICE.summary()
    assert "1 step, the last one of" in one_step_less(TWICE).summary()
