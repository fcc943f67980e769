"""Real trace files, damaged in every way: what reads them gives an answer or one of ringsim's own errors, and never another one.

The damage is in ``trace_mutations``; ``benchmarks/soak_files.py`` does the same a million times.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from trace_mutations import (
    Choose,
    change_columns,
    change_meta,
    flip,
    load_damaged,
    mutate,
    put_together,
    real_files,
    with_rows,
    write_columns,
)

import ringsim
from ringsim.errors import TraceFileError
from ringsim.plot.layout import make_bars
from ringsim.traces import files
from ringsim.traces.events import COLUMN_DTYPES, OP_CODES, Tables, make_events
from ringsim.traces.value import Trace

WHOLES = real_files()
MEMORY_BYTES = 2 * 2**30  # more than what is here already: a reader of files of 5 kB that needs it has been led astray


@pytest.fixture(scope="module", autouse=True)
def limited_memory() -> Iterator[None]:
    """What asks for much memory gets none here, so that it shows."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc/self/statm").exists() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if now is not None:
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def chooser(data: st.DataObject) -> Choose:
    return lambda low, high: data.draw(st.integers(low, high))


def test_the_mutations_leave_a_file_that_loads_where_they_change_nothing(tmp_path: Path) -> None:
    for number, whole in enumerate(WHOLES):
        path = tmp_path / f"{number}.ringtrace"
        path.write_bytes(put_together(whole.meta, write_columns(whole.columns)))
        trace = ringsim.load(path)
        assert {name: getattr(trace.events, name).tolist() for name in COLUMN_DTYPES} == whole.columns
        assert load_damaged(path.read_bytes(), draw=True)


@given(st.sampled_from(WHOLES), st.data())
def test_bytes_of_the_meta_member(whole: Any, data: st.DataObject) -> None:
    load_damaged(put_together(flip(whole.meta, chooser(data)), whole.events), draw=False)


@given(st.sampled_from(WHOLES), st.data())
def test_bytes_of_the_parquet_member(whole: Any, data: st.DataObject) -> None:
    load_damaged(put_together(whole.meta, flip(whole.events, chooser(data))), draw=False)


@given(st.sampled_from(WHOLES), st.data())
def test_values_of_the_meta_member(whole: Any, data: st.DataObject) -> None:
    load_damaged(put_together(change_meta(whole.meta, chooser(data)), whole.events), draw=False)


@given(st.sampled_from(WHOLES), st.data())
def test_numbers_of_the_events(whole: Any, data: st.DataObject) -> None:
    load_damaged(put_together(*with_rows(whole.meta, change_columns(whole.columns, chooser(data)))), draw=False)


@given(st.data())
def test_everything_at_once_and_drawn(data: st.DataObject) -> None:
    load_damaged(mutate(WHOLES, chooser(data)), draw=True)


# --- what the fuzzing found: each of these came out of a file as an error of Python's own ------------------------------------------------


def damaged_meta(tmp_path: Path, **metadata: Any) -> Path:
    meta = json.loads(WHOLES[0].meta)
    meta["metadata"].update(metadata)
    path = tmp_path / "x.ringtrace"
    path.write_bytes(put_together(json.dumps(meta).encode(), WHOLES[0].events))
    return path


@pytest.mark.parametrize("value", [[["ring:0>1"]], [3], 7, "ab", [[0, [0, 1]]], {}])
def test_groups_of_the_ring_of_another_form(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceFileError, match="ring_groups is not a list of names and members"):
        ringsim.load(damaged_meta(tmp_path, ring_groups=value))


@pytest.mark.parametrize("value", [7, "ab", ["ab"], [{"rank": []}], {}])
def test_ranks_of_another_form(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceFileError, match="ranks is not a list of what is known of each rank"):
        ringsim.load(damaged_meta(tmp_path, ranks=value))


def test_a_group_of_the_ring_whose_ranks_have_thousands_of_digits(tmp_path: Path) -> None:
    trace = ringsim.load(damaged_meta(tmp_path, ring_groups=[["ring:" + "9" * 5000 + ">1", [0, 1]]]))
    trace.plot_ring(ax=Figure().add_subplot())


def test_what_no_reader_can_take_is_written_out(tmp_path: Path) -> None:
    """Half a character breaks pandas, fonts and terminals; an escape sequence commands a terminal."""
    labels = ("a\ud800b", "red \x1b[31m", "null\0", "C1 \x9b2J", "tab\tline\nend")
    columns = {"rank": [0] * 5, "op": [OP_CODES["mark"]] * 5, "post_ns": [1] * 5, "label": [0, 1, 2, 3, 4]}
    Trace(make_events(columns, Tables(labels=labels)), {"world_size": 1, "notes": ["bell \a"]}).save(tmp_path / "x.ringtrace")
    trace = ringsim.load(tmp_path / "x.ringtrace")
    expected = ["a\\ud800b", "red \\x1b[31m", "null\\x00", "C1 \\x9b2J", "tab\tline\nend"]
    assert list(trace.to_pandas()["label"]) == list(trace.events.tables.labels) == expected
    assert trace.metadata["notes"] == ["bell \\x07"]


def test_what_ends_before_it_began_takes_no_time() -> None:
    columns = {"rank": [0, 0], "op": [OP_CODES["isend"]] * 2, "post_ns": [900, 1000], "wait_ns": [50, 2000], "done_ns": [10, 5]}
    trace = Trace(make_events(columns), {"world_size": 2})
    bars = make_bars(trace)
    assert (bars.start_ns >= 900).all()
    assert (bars.end_ns >= bars.start_ns).all()
    trace.plot_timeline(ax=Figure().add_subplot())


def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet says one number ten million times in a few bytes: a file of 4 MB could hold a hundred million events, 8 GB of memory."""
    count = 50_000
    columns = {"rank": np.zeros(count, dtype=np.int32), "op": np.full(count, OP_CODES["mark"]), "post_ns": np.zeros(count, dtype=np.int64)}
    trace = Trace(make_events(columns), {"world_size": 1})
    trace.save(tmp_path / "x.ringtrace")
    assert (tmp_path / "x.ringtrace").stat().st_size * files.MAX_EVENTS_PER_BYTE < count
    assert len(ringsim.load(tmp_path / "x.ringtrace").events) == count, "few events are free"
    monkeypatch.setattr(files, "FREE_EVENTS", 1000)
    for use in (lambda: ringsim.load(tmp_path / "x.ringtrace"), lambda: trace.save(tmp_path / "y.ringtrace")):
        with pytest.raises(TraceFileError, match=r"50000 events in [0-9]+ bytes, more than 4 a byte"):
            use()


def test_no_memory_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("malloc of size 10 failed")

    monkeypatch.setattr(files, "make_events", fail)
    with pytest.raises(TraceFileError, match="malloc of size 10 failed"):
        ringsim.load(damaged_meta(tmp_path))
