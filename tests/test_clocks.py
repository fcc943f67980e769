"""Times of several clocks, made comparable.

What the comparisons prove, and that nothing else changes.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import Trace
from ringsim.errors import TraceFileError
from ringsim.traces import files
from ringsim.traces.clocks import (
    CLOSE_NS,
    DRIFT_PPM,
    TIMES,
    WANDER_PPM,
    align,
    align_run,
    find_clocks,
    shift_ns,
    unalign,
    uncertainty_ns,
)
from ringsim.traces.events import NONE, OP_CODES, Events, Group, Payload, Tables, make_events

SECOND = 10**9


def events_at(times: list[list[int]]) -> Events:
    """One mark and one open operation a time, by rank."""
    rank = np.repeat(np.arange(len(times)), [len(one) for one in times])
    post = np.concatenate(times)
    return make_events(
        {
            "rank": rank,
            "op": np.full(len(post), OP_CODES["mark"]),
            "post_ns": post,
            "wait_ns": post,
            "done_ns": np.full(len(post), NONE),
        }
    )


@given(
    data=st.data(),
    ppm=st.floats(-DRIFT_PPM + WANDER_PPM, DRIFT_PPM - WANDER_PPM),
    offset_ns=st.integers(-(10**16), 10**16),
)
def test_the_true_offset_is_within_the_bound(
    data: st.DataObject, ppm: float, offset_ns: int
) -> None:
    """A clock that drifts, the speed of which wanders from second to second.

    Replies of which the way there and back differ.
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
        # share: of the way there
        round_trip_ns, share = data.draw(st.integers(0, 200_000)), data.draw(st.floats(0, 1))
        measured = truth(time_ns) + (share - 0.5) * round_trip_ns
        metas[1][f"clock {number}"] = [0, time_ns, round(measured), round_trip_ns]
    samples = find_clocks(metas, 0)[1]["samples"]
    times = np.array(data.draw(st.lists(moments, min_size=1, max_size=9), "asked at"))
    error = np.abs(shift_ns(samples, times) - [truth(int(time_ns)) for time_ns in times])
    assert (error <= uncertainty_ns(samples, times) + 3).all()  # what rounding adds
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
    raw = events_at([[5], sorted(times)])
    events, moved, _ = align_run(raw, clocks, None)
    assert events.post_ns.min() == 0
    back = unalign(events, moved)
    # of two times that became one
    assert (
        np.abs((back.post_ns - back.post_ns.min()) - (raw.post_ns - raw.post_ns.min())).max() <= 1
    )
    again = align(back, moved)
    assert (again.post_ns.tolist(), again.wait_ns.tolist(), set(again.done_ns)) == (
        events.post_ns.tolist(),
        events.wait_ns.tolist(),
        {NONE},
    )


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
    assert found[2]["samples"][0][2] == pytest.approx(50, abs=1)
    assert found[2]["samples"][1][2] > 50 + DRIFT_PPM * 1e-6 * SECOND, (
        "what the asked clock drifted since it was compared counts"
    )
    assert find_clocks({0: metas[0], 1: {"clock": "a"}}, 0) == []


def test_a_file_has_raw_times_and_reading_aligns_them(tmp_path: Path) -> None:
    clocks = [
        {"ranks": [0], "how": "reference", "samples": [[0, 0, 0]]},
        {
            "ranks": [1],
            "how": "store",
            "samples": [[0, -5 * SECOND, 30_000], [SECOND, -5 * SECOND + 1000, 20_000]],
        },
    ]
    events, moved, start_ns = align_run(
        events_at([[100, 900], [5 * SECOND + 200, 6 * SECOND]]), clocks, 50
    )
    assert start_ns == 50
    trace = Trace(events, {"world_size": 2, "ranks": [{"rank": 1, "host": "far"}], "clocks": moved})
    trace.save(tmp_path / "run.ringtrace")
    loaded = ringsim.load(tmp_path / "run.ringtrace")
    assert loaded == trace
    assert trace.events.post_ns.tolist() == [50, 850, 1150, SECOND + 950]
    reference, clock = trace.clocks
    assert (reference.how, reference.offset_ns, reference.uncertainty_ns) == ("reference", 0, 0)
    assert (clock.ranks, clock.host, clock.offset_ns, clock.how, clock.drift_ppm) == (
        (1,),
        "far",
        -5 * SECOND,
        "store",
        1.0,
    )
    assert clock.uncertainty_ns == pytest.approx(20_000 + 5e9 * DRIFT_PPM * 1e-6, rel=0.01)


def messages_between_hosts(*, uncertainty_ns: int = 30) -> Trace:
    """Two messages from rank 0 to rank 1, whose clock is 5 s ahead.

    The second one arrives before it is sent.
    """
    tables = Tables(payloads=(Payload("uint8", (3000,), 3000),))
    columns: dict[str, Any] = {
        "rank": [0, 0, 1, 1],
        "op": [OP_CODES["send"]] * 2 + [OP_CODES["recv"]] * 2,
        "peer": [1, 1, 0, 0],
    }
    columns |= {
        "group": [-1] * 4,
        "tag": [0] * 4,
        "payload": [0] * 4,
        "status": [2] * 4,
        "post_ns": np.array([0, 4000, 0, 3500]),
    }
    columns |= {"wait_ns": columns["post_ns"], "done_ns": np.array([3000, 4500, 3000, 3900])}
    raw = make_events(
        columns | {name: columns[name] + 5 * SECOND * np.array([0, 0, 1, 1]) for name in TIMES},
        tables,
    )
    clocks = [
        {"ranks": [0], "how": "reference", "samples": [[0, 0, 0]]},
        {
            "ranks": [1],
            "how": "store",
            "samples": [
                [0, -5 * SECOND, uncertainty_ns],
                [10 * SECOND, -5 * SECOND, uncertainty_ns],
            ],
        },
    ]
    events, moved, _ = align_run(raw, clocks, None)
    hosts = [{"rank": rank, "host": f"node{rank}"} for rank in range(2)]
    return Trace(events, {"world_size": 2, "ranks": hosts, "clocks": moved})


def test_the_summary_tells_what_went_across_hosts_and_counts_what_cannot_be() -> None:
    said = messages_between_hosts(uncertainty_ns=600).summary()
    (clocks,) = re.findall(
        r"hosts +node0, node1; clocks known to ±(.*); 1 message arrived before being sent", said
    )
    assert clocks == "5.6 µs", "in the middle of 10 s"
    assert "    across hosts: 2 messages, 5.86 KiB, 2 GB/s, blocked 6.9 µs" in said
    assert "within hosts" not in said


@pytest.mark.parametrize(
    ("rings", "places", "said"),
    [
        (["0>1", "1>2", "2>3", "3>0"], "abab", "the ring crosses hosts 4 times, 2 would do"),
        (["1>2", "2>3", "0>1"], "abab", "the ring crosses hosts 4 times, 2 would do"),
        (["0>2", "2>1", "1>3", "3>0"], "abab", ""),
        (["0>2", "2>0", "1>3", "3>1"], "abab", ""),
        (["0>1", "1>0", "2>3", "3>2", "0>9"], "abab", ""),
        (["0>1", "1>2", "2>0"], "ab ", ""),
    ],
)
def test_the_summary_tells_of_a_ring_that_crosses_more_often_than_it_must(
    rings: list[str], places: str, said: str
) -> None:
    tables = Tables(groups=tuple(Group(f"ring:{name}", ()) for name in rings))
    about = [{"rank": rank, "host": place.strip()} for rank, place in enumerate(places)]
    text = Trace(
        make_events({"rank": [], "op": []}, tables), {"world_size": len(places), "ranks": about}
    ).summary()
    assert said in text
    assert bool(said) == ("crosses" in text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": []},
        {"samples": [[0, 0]]},
        {"samples": [[0, 0, -1]]},
        {"samples": [[0, 0, 2**63]]},
        {"samples": [[5, 0, 0], [5, 0, 0]]},
        {"samples": [[0, 0, 0], [10, 9, 0]]},
        {"samples": [[0, -10, 0]]},  # gives times before the start of the run
        {"samples": "text"},
        {"ranks": []},
        {"ranks": ["0"]},
        {"how": None},
    ],
)
def test_a_file_with_impossible_clocks_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    trace = Trace(
        events_at([[5]]),
        {
            "world_size": 1,
            "clocks": [{"ranks": [0], "how": "store", "samples": [[0, 0, 0]], **wrong}],
        },
    )
    rows = io.BytesIO()
    files._write_events(rows, [trace.events], {})
    rows.seek(0)
    members = {
        files.META: io.BytesIO(files._pack_meta(1, trace.events.tables, trace.metadata)),
        files.EVENTS: rows,
    }
    files.write_whole(tmp_path / "run.ringtrace", lambda file: files._write_zip(file, members))
    with pytest.raises(TraceFileError, match=r"clocks|post_ns"):
        ringsim.load(tmp_path / "run.ringtrace")
