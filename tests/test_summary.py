"""The summary of a trace and of a file, as text and as a table."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import WORLD_SIZE, traces
from synthetic import pipeline, trace_of
from trace_file import NONE, TIMES, make_trace

from ringsim import Trace, load
from ringsim.cli import main
from ringsim.pipeline import evaluate
from ringsim.schedules import make_schedule

TWO_WITH_A_RING = {"world": (0, 1, 2), "ring:0>1": (0, 1)}
# An event: its rank, operation, group, size and peer; the times of post, wait and done in us; its
# status.
EVENTS = [
    (0, "all_reduce", "world", 3000, NONE, (0, 10, 40), "ok"),
    (0, "isend", "ring:0>1", 1000, 1, (40, 50, 52), "ok"),
    (0, "all_reduce", "world", 3000, NONE, (60, NONE, 90), "ok"),  # C++ waits for it
    (0, "all_reduce", "world", 3000, NONE, (95, 96, NONE), "in_flight"),
    (0, "barrier", "world", 0, NONE, (99, 99, 100), "ok"),
    (1, "all_reduce", "world", 3000, NONE, (20, 20, 40), "ok"),
    (1, "irecv", "ring:0>1", 1000, 0, (41, 42, 52), "ok"),
    (1, "all_reduce", "world", 3000, NONE, (60, NONE, 80), "ok"),
    (1, "barrier", "world", 0, NONE, (90, 90, 100), "ok"),
    (1, "span", "", 0, NONE, (0, NONE, 100), "ok"),
    (2, "all_reduce", "world", 3000, NONE, (30, 30, 40), "ok"),
    (2, "all_reduce", "world", 3000, NONE, (60, NONE, 70), "error"),
    (2, "barrier", "world", 0, NONE, (95, 95, 100), "ok"),
]


def collectives() -> Trace:
    rows: list[dict[str, Any]] = []
    for rank, op, group, size_bytes, peer, times, status in EVENTS:
        row = {"rank": rank, "op": op, "peer": peer, "status": status}
        row["times"] = [NONE if time == NONE else 1000 * time for time in times]
        row |= {"group": group} if group else {}
        rows.append(row | ({"size_bytes": size_bytes} if size_bytes else {}))
    return make_trace(rows, groups=TWO_WITH_A_RING, world_size=3)


def test_every_operation_and_group_has_its_numbers() -> None:
    stats = collectives().stats()
    rows = {(row.op, row.group): row for row in stats.rows}
    reduced, sent = rows["all_reduce", "world"], rows["isend", "ring:0>1"]
    # longest first
    assert [op for op, _ in rows] == ["all_reduce", "barrier", "irecv", "isend"]
    # one call is still in flight
    assert (reduced.count, reduced.size_bytes, reduced.group_size) == (3, 9000, 3)
    assert (reduced.blocked_p50_us, reduced.blocked_p90_us, reduced.blocked_max_us) == (20, 28, 30)
    assert reduced.share == pytest.approx((30 + 20 + 10) / 300)
    # 3,000 bytes in 40, 30, 20, 20 and 10 us: the median is 0.15 GB/s. nccl-tests: 2 (n - 1) / n
    # times
    # as much on the bus.
    assert reduced.algbw_gb_per_s == pytest.approx(0.15)
    assert reduced.busbw_gb_per_s == pytest.approx(0.2)
    assert (sent.count, sent.size_bytes, sent.blocked_max_us) == (1, 1000, 2)
    assert sent.busbw_gb_per_s == pytest.approx(1 / 12)
    assert math.isnan(rows["barrier", "world"].algbw_gb_per_s)
    assert stats.to_pandas()["count"].tolist() == [3, 1, 1, 1]
    assert json.loads(json.dumps(stats.to_dict(), allow_nan=False))[1]["algbw_gb_per_s"] is None
    lines = str(stats).splitlines()
    assert len({len(line) for line in lines}) == 1, "the columns must be aligned"
    said = "all_reduce world 3 3 8.79 KiB 20 µs 28 µs 30 µs 0.15 0.20 20 %"
    assert lines[1].split() == said.split()


def test_a_program_of_collectives_is_summed_up() -> None:
    only = collectives().filter(groups="world")
    said = "all_reduce on world: 3 calls, 8.79 KiB, blocked 20 µs each (median), 20 % of the run"
    assert "collectives   4 calls, 8.79 KiB" in only.summary()
    assert said in only.summary()
    assert "of 3 ranks that called 4 collectives in 100 µs" in only.describe()


# -- summaries of a file


def show(*words: object) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["show", *map(str, words)]) == 0
    return printed.getvalue()


def check(trace: Trace, group_rows: int) -> None:
    """Compares the summary of the file with that of the trace, with row groups of this size."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringsim.traces.files.GROUP_ROWS", group_rows)
        trace.save(path := Path(directory, "run.ringtrace"))
        whole, shown, numbers = load(path), show(path), json.loads(show(path, "--json"))
    assert shown == whole.summary() + "\n"
    assert numbers["operations"] == whole.stats().to_dict()
    assert (numbers["events"], numbers["messages"]) == (len(whole), len(whole.messages))


HOSTS = st.lists(st.sampled_from(["", "one", "two"]), min_size=WORLD_SIZE, max_size=WORLD_SIZE)
REFERENCE = {"ranks": [0, 2], "how": "reference", "samples": [[0, 0, 0]]}
OTHER = {"ranks": [1], "how": "store", "samples": [[0, 700, 9], [900, 705, 4]]}


@given(traces, HOSTS, st.sampled_from([[], [REFERENCE, OTHER]]), st.integers(1, 40), st.booleans())
def test_a_file_says_what_its_trace_says(
    trace: Trace, hosts: list[str], clocks: list[Any], group_rows: int, is_part: bool
) -> None:
    """Times are small, so that their sums do not overflow, and larger than the offsets."""
    times = {name: getattr(trace.events, name) for name in TIMES}
    small = {name: np.where(one == NONE, NONE, one % 1000 + 1000) for name, one in times.items()}
    about = {"ranks": [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]}
    metadata = {"world_size": WORLD_SIZE, "clocks": clocks, **about}
    run = Trace(replace(trace.events, **small), metadata)
    check(run.filter(ranks=[0, 2]) if is_part else run, group_rows)


def one_step_less(trace: Trace) -> Trace:
    """Returns the trace as if rank 1 had been killed before its last step."""
    events = trace.events
    late = (events.rank == 1) & (events.post_ns > 0.45 * events.post_ns.max())
    return Trace(events.select(~late), trace.metadata)


TWICE = trace_of(*[evaluate(make_schedule("1f1b", 4, 6))] * 2)
RUNS: dict[str, Callable[[], Trace]] = {
    "a pipeline": lambda: pipeline(5, 4),
    "a rank that did not come to its last step": lambda: one_step_less(TWICE),
    "a part": lambda: pipeline(4, 4).filter(ranks=[0, 1, 3]),
    "no event": lambda: make_trace([], world_size=3),
    "no number of ranks": lambda: Trace(pipeline(3, 2).events, {}),
}


@pytest.mark.parametrize("rows", [3, 10_000])
@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, rows: int) -> None:
    check(RUNS[run](), rows)


def test_what_one_rank_did_not_do_is_no_step() -> None:
    assert "2 steps" in TWICE.summary()
    assert "1 step, the last one (1f1b) with a bubble of" in one_step_less(TWICE).summary()
