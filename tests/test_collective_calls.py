"""The grouping of collectives into calls, and the wait of each rank for the last one."""

from __future__ import annotations

from typing import Any

import pytest
from trace_file import NONE, make_trace

from ringsim.traces.events import Events
from ringsim.traces.matching import CollectiveCalls, wait_for_last


def collectives(*rows: dict[str, Any]) -> Events:
    """Returns collectives with these times of post, wait and done; by default world barriers."""
    common = {"op": "barrier", "group": "world", "post_ns": 0, "done_ns": 100}
    full = [{**common, "wait_ns": row.get("post_ns", 0), **row} for row in rows]
    return make_trace(full, groups={"world": (0, 1, 2), "pair": (0, 1)}).events


def test_which_collectives_are_one_call() -> None:
    events = collectives(
        {"rank": 0, "post_ns": 7},
        {"rank": 0, "op": "mark", "post_ns": 8},
        {"rank": 0, "group": "pair", "post_ns": 9},
        {"rank": 0, "post_ns": 10},
        {"rank": 0, "op": "mark", "post_ns": 11},
        {"rank": 1, "post_ns": 1, "status": "error", "wait_ns": NONE},  # it was rejected
        {"rank": 1, "group": "pair", "post_ns": 2},
        {"rank": 1, "post_ns": 3},
        {"rank": 1, "post_ns": 4, "status": "in_flight"},
        {"rank": 2, "post_ns": 5},
    )
    calls = CollectiveCalls.of(events)
    members = {
        calls.events_of(call): (int(calls.last[call]), bool(calls.complete[call]))
        for call in range(len(calls.last))
    }
    assert members == {(0, 7, 9): (0, True), (3, 8): (3, False), (2, 6): (2, True)}
    assert calls.place.tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert [calls.call_of(one) for one in (1, 4, 5)] == [NONE] * 3
    assert calls.call_of(0) == calls.call_of(7) == calls.call_of(9) != calls.call_of(3)


def test_collectives_whose_call_was_left_out_take_no_part() -> None:
    events = collectives(
        *({"rank": rank, "post_ns": turn} for rank in range(3) for turn in range(2))
    )
    assert len(CollectiveCalls.of(events).last) == 2
    calls = CollectiveCalls.of(events, apart=[0, 2, 4])
    assert (calls.event.tolist(), calls.place.tolist()) == ([1, 3, 5], [0, 0, 0])


@pytest.mark.parametrize(
    ("first", "length_ns"),
    [
        ({"wait_ns": 30}, 20),  # from its wait until the last rank arrived
        ({"wait_ns": 30, "done_ns": 40}, 10),  # it was done earlier
        ({"wait_ns": 70}, 0),  # the last rank had arrived
        ({"wait_ns": NONE}, 0),
        ({"wait_ns": 30, "done_ns": NONE, "status": "in_flight"}, 0),
    ],
)
def test_a_collective_waits_for_the_last_rank(first: dict[str, Any], length_ns: int) -> None:
    rows = (
        {"rank": 0, "post_ns": 10, **first},
        {"rank": 1, "post_ns": 50},
        {"rank": 2, "post_ns": 20},
    )
    assert wait_for_last(collectives(*rows)).tolist() == [length_ns, 0, 30]
    assert wait_for_last(collectives(*rows[:2])).tolist() == [0, 0]  # rank 2 never arrived
    assert wait_for_last(collectives(*rows), apart=[0, 1, 2]).tolist() == [0, 0, 0]
