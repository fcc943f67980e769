"""Tests that align the times of several clocks.

They check the bounds that follow from clock comparisons, and that nothing else changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trace_file import NONE, make_trace

from ringsim.traces.clocks import (
    CLOSE_NS,
    DRIFT_PPM,
    WANDER_PPM,
    align,
    align_run,
    find_clocks,
    shift_ns,
    unalign,
    uncertainty_ns,
)

SECOND = 10**9


@given(
    data=st.data(),
    ppm=st.floats(-DRIFT_PPM + WANDER_PPM, DRIFT_PPM - WANDER_PPM),
    offset_ns=st.integers(-(10**16), 10**16),
)
def test_the_true_offset_is_within_the_bound(
    data: st.DataObject, ppm: float, offset_ns: int
) -> None:
    """The clock drifts, and its speed changes from second to second.

    The way to the other clock and the way back take different times.
    """
    seconds = data.draw(st.integers(1, 40), "seconds")
    wander = data.draw(
        st.lists(st.floats(-WANDER_PPM, WANDER_PPM), min_size=seconds, max_size=seconds), "wander"
    )
    # ns, at each full second
    gained = np.concatenate([[0], np.cumsum((ppm + np.array(wander)) * 1e3)])

    def truth(time_ns: int) -> float:
        return offset_ns + float(np.interp(time_ns, np.arange(seconds + 1) * float(SECOND), gained))

    moments = st.integers(0, seconds * SECOND)
    metas: dict[int, dict[str, Any]] = {
        0: {"clock": "a", "clock_number": 0},
        1: {"clock": "b", "clock_number": 1},
    }
    for number, time_ns in enumerate(
        data.draw(st.lists(moments, min_size=1, max_size=5), "compared at")
    ):
        # share: of the way to the other clock
        round_trip_ns, share = data.draw(st.integers(0, 200_000)), data.draw(st.floats(0, 1))
        measured = truth(time_ns) + (share - 0.5) * round_trip_ns
        metas[1][f"clock {number}"] = [0, time_ns, round(measured), round_trip_ns]
    samples = find_clocks(metas, 0)[1]["samples"]
    times = np.array(data.draw(st.lists(moments, min_size=1, max_size=9), "asked at"))
    error = np.abs(shift_ns(samples, times) - [truth(int(time_ns)) for time_ns in times])
    assert (error <= uncertainty_ns(samples, times) + 3).all()  # rounding adds a little
    assert min(np.diff([sample[0] for sample in samples]), default=CLOSE_NS) >= CLOSE_NS


@given(
    offsets=st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=4),
    first_ns=st.integers(-(10**15), 10**15),
    times=st.lists(st.integers(0, 5 * SECOND), min_size=1, max_size=30),
)
def test_what_the_clocks_showed_comes_back(
    offsets: list[int], first_ns: int, times: list[int]
) -> None:
    samples = [[number * SECOND, first_ns + offset, 7] for number, offset in enumerate(offsets)]
    clocks = [
        {"ranks": [0], "how": "reference", "samples": [[0, 0, 0]]},
        {"ranks": [1], "how": "store", "samples": samples},
    ]
    shown = [(0, 5), *((1, time_ns) for time_ns in sorted(times))]
    raw = make_trace({"rank": rank, "op": "mark", "times": (at, at, NONE)} for rank, at in shown)
    events, moved, _ = align_run(raw.events, clocks, None)
    assert events.post_ns.min() == 0
    back = unalign(events, moved).post_ns
    apart = (back - back.min()) - (raw.events.post_ns - raw.events.post_ns.min())
    assert np.abs(apart).max() <= 1, "times must be restored up to rounding"
    again = align(unalign(events, moved), moved)
    for name in ("post_ns", "wait_ns", "done_ns"):
        assert np.array_equal(getattr(again, name), getattr(events, name))


def test_clocks_that_ask_clocks_and_some_that_nobody_asked() -> None:
    metas: dict[int, dict[str, Any]] = {
        0: {"clock": "a", "clock_number": 0},
        1: {"clock": "b", "clock_number": 1, "clock 0": [0, 100, 1000, 60]},
        2: {
            "clock": "c",
            "clock_number": 2,
            "clock 0": [1, 500, -5000, 40],
            "clock 1": [1, 500 + 2 * SECOND, -5000, 40],
        },
        3: {"clock": "c"},
        4: {"clock": "d"},
        5: {
            "clock": "e",
            "clock_number": 3,
            "clock 0": [9, 1, 1, 1],
            "clock 1": ["x"],
            "clock 2": [0, 1, 1, -1],
        },
        6: {"clock": 7},
    }
    found = find_clocks(metas, 0)
    assert [(entry["ranks"], entry["how"]) for entry in found] == [
        ([0], "reference"), ([1], "store"), ([2, 3], "store"), ([4], "not compared"),
        ([5], "not compared"),
    ]  # fmt: skip
    assert found[2]["samples"][0][:2] == [500, -4000]
    assert abs(found[2]["samples"][0][2] - 50) <= 1
    assert found[2]["samples"][1][2] > 50 + DRIFT_PPM * 1e-6 * SECOND, (
        "the drift of the other clock since its own comparison must count"
    )
    assert find_clocks({0: metas[0], 1: {"clock": "a"}}, 0) == []
