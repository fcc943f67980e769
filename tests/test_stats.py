"""``Trace.stats``: a run typed out, and what it comes to."""

from __future__ import annotations

import json
import math

import pytest

from ringsim import Trace
from ringsim.traces.events import (
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    Group,
    Payload,
    Tables,
    make_events,
)

WORLD, PAIR = range(2)
TABLES = Tables(
    groups=(Group("world", (0, 1, 2)), Group("ring:0>1", (0, 1))),
    payloads=(Payload("float32", (250,), 1000), Payload("float32", (750,), 3000)),
)
# An event: its rank, operation, group, payload and peer; when it was posted, awaited and done, in
# us; its status.
EVENTS = [
    (0, "all_reduce", WORLD, 1, NONE, 0, 10, 40, OK),
    (0, "isend", PAIR, 0, 1, 40, 50, 52, OK),
    (0, "all_reduce", WORLD, 1, NONE, 60, NONE, 90, OK),  # C++ waits for it
    (0, "all_reduce", WORLD, 1, NONE, 95, 96, NONE, IN_FLIGHT),
    (0, "barrier", WORLD, NONE, NONE, 99, 99, 100, OK),
    (1, "all_reduce", WORLD, 1, NONE, 20, 20, 40, OK),
    (1, "irecv", PAIR, 0, 0, 41, 42, 52, OK),
    (1, "all_reduce", WORLD, 1, NONE, 60, NONE, 80, OK),
    (1, "barrier", WORLD, NONE, NONE, 90, 90, 100, OK),
    (1, "span", NONE, NONE, NONE, 0, NONE, 100, OK),
    (2, "all_reduce", WORLD, 1, NONE, 30, 30, 40, OK),
    (2, "all_reduce", WORLD, 1, NONE, 60, NONE, 70, ERROR),
    (2, "barrier", WORLD, NONE, NONE, 95, 95, 100, OK),
]


@pytest.fixture
def trace() -> Trace:
    names = ("rank", "op", "group", "payload", "peer", "post_ns", "wait_ns", "done_ns", "status")
    columns = dict(zip(names, map(list, zip(*EVENTS, strict=True)), strict=True))
    columns["op"] = [OP_CODES[op] for op in columns["op"]]
    columns |= {
        name: [time if time == NONE else 1000 * time for time in columns[name]]
        for name in names[5:8]
    }
    return Trace(make_events(columns, TABLES), {"world_size": 3})


def test_every_operation_and_group_has_its_numbers(trace: Trace) -> None:
    rows = {(row.op, row.group): row for row in trace.stats().rows}
    # longest first
    assert list(rows) == [
        ("all_reduce", "world"),
        ("barrier", "world"),
        ("irecv", "ring:0>1"),
        ("isend", "ring:0>1"),
    ]
    reduced = rows["all_reduce", "world"]
    # one call is still under way
    assert (reduced.count, reduced.size_bytes, reduced.group_size) == (3, 9000, 3)
    assert (reduced.blocked_p50_us, reduced.blocked_p90_us, reduced.blocked_max_us) == (20, 28, 30)
    assert reduced.share == pytest.approx((30 + 20 + 10) / 300)
    # 3,000 bytes in 40, 30, 20, 20 and 10 us: the median is 0.15 GB/s; nccl-tests: 2 (n - 1) / n of
    # it on the bus.
    assert (reduced.algbw_gb_per_s, reduced.busbw_gb_per_s) == (
        pytest.approx(0.15),
        pytest.approx(0.2),
    )
    sent = rows["isend", "ring:0>1"]
    assert (sent.count, sent.size_bytes, sent.blocked_max_us, sent.busbw_gb_per_s) == (
        1,
        1000,
        2,
        pytest.approx(1 / 12),
    )
    assert math.isnan(rows["barrier", "world"].algbw_gb_per_s)


def test_it_is_a_table_and_json(trace: Trace) -> None:
    stats = trace.stats()
    frame = stats.to_pandas()
    assert frame["count"].tolist() == [3, 1, 1, 1]
    assert json.loads(json.dumps(stats.to_dict(), allow_nan=False))[1]["algbw_gb_per_s"] is None
    lines = str(stats).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns stand below each other"
    assert lines[1].split() == [
        "all_reduce",
        "world",
        "3",
        "3",
        "8.79",
        "KiB",
        "20",
        "µs",
        "28",
        "µs",
        "30",
        "µs",
        "0.15",
        "0.20",
        "20",
        "%",
    ]


def test_a_program_of_collectives_is_summed_up(trace: Trace) -> None:
    only = Trace(trace.events.select(trace.events.group != PAIR), trace.metadata)
    assert "collectives   4 calls, 8.79 KiB" in only.summary()
    assert (
        "all_reduce on world: 3 calls, 8.79 KiB, blocked 20 µs each (median), 20 % of the run"
        in only.summary()
    )
    assert only.describe().startswith("Trace of 3 ranks that called 4 collectives in 100 µs")
