"""A run on several hosts: the clocks in its file, and its summary."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from trace_file import make_trace, put_together, take_apart

from ringsim import Trace, load
from ringsim.errors import TraceFileError

SECOND = 10**9
DRIFT_PPM = 100  # of two quartz crystals, at most


def two_hosts(*rows: dict[str, Any], samples: list[list[int]]) -> Trace:
    """Ranks 0 and 1, each on its own host, whose clocks were compared."""
    clocks = [
        {"ranks": [0], "how": "reference", "samples": [[0, 0, 0]]},
        {"ranks": [1], "how": "store", "samples": samples},
    ]
    about = [{"rank": rank, "host": f"node{rank}"} for rank in range(2)]
    return make_trace(rows, world_size=2, ranks=about, clocks=clocks)


def test_a_file_has_raw_times_and_reading_aligns_them(tmp_path: Path) -> None:
    marks = [(0, 50), (0, 850), (1, 1150), (1, SECOND + 950)]
    trace = two_hosts(
        *({"rank": rank, "op": "mark", "post_ns": time_ns} for rank, time_ns in marks),
        samples=[[0, -5 * SECOND, 30_000], [SECOND, -5 * SECOND + 1000, 20_000]],
    )
    trace.save(tmp_path / "run.ringtrace")
    assert load(tmp_path / "run.ringtrace") == trace
    _, rows = take_apart(tmp_path / "run.ringtrace")
    shown = pq.read_table(io.BytesIO(rows))["post_ns"].to_pylist()
    # the clock of rank 1 is 5 s ahead; it lost 1 us in its first second
    assert shown == [50, 850, 5 * SECOND + 150, 6 * SECOND - 50]
    reference, clock = trace.clocks
    assert (reference.how, reference.offset_ns, reference.uncertainty_ns) == ("reference", 0, 0)
    assert (clock.ranks, clock.host, clock.how) == ((1,), "node1", "store")
    assert (clock.offset_ns, clock.drift_ppm) == (-5 * SECOND, 1.0)
    assert clock.uncertainty_ns == pytest.approx(20_000 + 5e9 * DRIFT_PPM * 1e-6, rel=0.01)


def test_the_summary_tells_what_went_across_hosts_and_counts_what_cannot_be() -> None:
    """Two messages from rank 0 to rank 1; the second arrives before it is sent."""
    send = {"rank": 0, "op": "send", "peer": 1, "size_bytes": 3000, "dtype": "uint8", "tag": 0}
    recv = send | {"rank": 1, "op": "recv", "peer": 0}
    said = two_hosts(
        send | {"times": (0, 0, 3000)},
        send | {"times": (4000, 4000, 4500)},
        recv | {"times": (0, 0, 3000)},
        recv | {"times": (3500, 3500, 3900)},
        samples=[[time_ns, -5 * SECOND, 600] for time_ns in (0, 10 * SECOND)],
    ).summary()
    line = r"hosts +node0, node1; clocks known to ±(.*); 1 message arrived before being sent"
    assert re.findall(line, said) == ["5.6 µs"], "the bound must be that in the middle of 10 s"
    assert "    across hosts: 2 messages, 5.86 KiB, 2 GB/s, blocked 6.9 µs" in said
    assert "within hosts" not in said


@pytest.mark.parametrize(
    ("rings", "places", "said"),
    [
        ("0>1 1>2 2>3 3>0", "abab", "the ring crosses hosts 4 times instead of 2"),
        ("0>2 2>1 1>3 3>0", "abab", ""),
        ("0>1 1>0 2>3 3>2 0>9", "abab", ""),
        ("0>1 1>2 2>0", "ab ", ""),
    ],
)
def test_the_summary_tells_of_a_ring_that_crosses_more_often_than_it_must(
    rings: str, places: str, said: str
) -> None:
    about = [{"rank": rank, "host": place.strip()} for rank, place in enumerate(places)]
    groups = {f"ring:{name}": () for name in rings.split()}
    text = make_trace([], groups=groups, world_size=len(places), ranks=about).summary()
    assert said in text
    assert bool(said) == ("crosses" in text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": []},
        {"samples": [[0, 0, -1]]},
        {"samples": [[5, 0, 0], [5, 0, 0]]},
        {"samples": [[0, 0, 0], [10, 9, 0]]},
        {"samples": [[0, -10, 0]]},  # gives times before the start of the run
        {"samples": "text"},
        {"ranks": ["0"]},
        {"how": None},
    ],
)
def test_a_file_with_impossible_clocks_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    make_trace([{"rank": 0, "op": "mark", "post_ns": 5}], world_size=1).save(path)
    text, rows = take_apart(path)
    meta = json.loads(text)
    meta["metadata"]["clocks"] = [{"ranks": [0], "how": "store", "samples": [[0, 0, 0]], **wrong}]
    path.write_bytes(put_together(json.dumps(meta).encode(), rows))
    with pytest.raises(TraceFileError, match=r"clocks|post_ns"):
        load(path)
