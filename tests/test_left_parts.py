"""Tests that read parts that ranks left behind: complete, cut at any byte, and damaged."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from part_files import BILLION, RECORD, meta, two_ranks, write
from trace_file import NONE, make_trace

from ringsim import Trace, load
from ringsim.cli import main
from ringsim.errors import TraceFileError


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    directory = tmp_path / "run.ringtrace.parts"
    directory.mkdir()
    return directory


def test_two_ranks_become_one_trace(parts: Path) -> None:
    two_ranks(parts)
    trace = load(parts)
    events = trace.events
    assert (events.rank.tolist(), events.seq.tolist()) == ([0, 1, 1, 1], [0, 0, 1, 2])
    # threads are numbered per rank, in the order of their first event
    assert events.thread.tolist() == [0, 0, 1, 0]
    assert events.post_ns.tolist() == [100, 50, 70, 200]
    assert events.wait_ns.tolist() == [110, NONE, NONE, NONE]
    assert events.done_ns.tolist() == [120, 60, NONE, NONE]
    assert [event.status for event in trace] == ["ok", "ok", "in_flight", "in_flight"]
    assert [event.group for event in trace] == ["world", None, "world", None]
    assert [group.name for group in events.tables.groups] == ["world", "ring"]
    assert [event.label for event in trace] == [None, "compute", None, "compute"]
    assert (len(events.tables.payloads), events.tables.files) == (1, ("/home/student/ring.py",))
    assert len(trace.messages) == 1
    ranks = [{"rank": rank, "pid": 10 + rank, "host": "a", "num_threads": 1} for rank in (0, 1)]
    about = {"world_size": 2, "ranks": ranks, "not_recorded": ["C++"], "backend": "gloo"}
    about |= {"start_unix_ns": 5000 * BILLION, "date": "1970-01-01"}
    assert trace.metadata.items() >= about.items()


@pytest.mark.parametrize(
    ("start_ns", "posted"),
    [(BILLION - 1000, [1100, 1050, 1070, 1200]), (BILLION + 90, [50, 0, 20, 150])],
)
def test_times_count_from_the_start_that_is_given_and_none_is_negative(
    parts: Path, start_ns: int, posted: list[int]
) -> None:
    two_ranks(parts)
    (parts / "run.json").write_text(json.dumps({"start_ns": start_ns}))
    trace = load(parts)
    assert trace.events.post_ns.tolist() == posted
    began_ns = min(start_ns, BILLION + 50)
    assert trace.metadata["start_unix_ns"] == 4999 * BILLION + began_ns
    assert "start_ns" not in trace.metadata


def test_what_is_missing_or_cut_is_named_and_the_rest_is_read(parts: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read either: no rank left a record"):
        load(parts)
    two_ranks(parts)
    (parts / "rank-x.events").write_text("?")  # not the part of a rank
    (parts / "rank-0.events.bak").write_text("?")
    assert len(load(parts)) == 4
    names = parts / "rank-1.names"
    names.write_bytes(names.read_bytes()[:-5])  # in the middle of the group "world"
    trace = load(parts)
    assert [event.group for event in trace] == ["world", None, None, None]
    assert "rank 1 left unreadable records, which were skipped" in trace.metadata["notes"]
    (parts / "rank-0.events").unlink()
    (parts / "rank-0.names").unlink()
    (parts / "run.json").write_text('{"world_size": 4}')
    trace = load(parts)
    assert set(trace.events.rank.tolist()) == {1}
    assert trace.metadata["notes"][0] == "ranks 0, 2 and 3 left no record"
    assert trace.metadata["complete"] is False


def test_what_the_ranks_say_of_themselves(parts: Path) -> None:
    note = "Recording of rank 0 stopped: the disk was full."
    write(parts, 0, [], meta(world_size=2, host="a", stopped_at_max=True, note=note))
    write(parts, 1, [], meta(world_size=5) + meta(world_size=2, host="b", stopped_at_max=True))
    trace = load(parts)
    assert trace.world_size == 2, "the last value must count"
    assert trace.metadata["notes"][0] == note
    assert "rank 1 stopped recording" in trace.metadata["notes"][1]
    assert "clocks of the 2 hosts were not compared" in trace.metadata["notes"][2]
    assert (trace.hosts, trace.metadata["complete"]) == (["a", "b"], False)


def test_run_json_says_what_the_ranks_cannot(parts: Path) -> None:
    two_ranks(parts)
    (parts / "run.json").write_text(json.dumps({"run_id": "\ud800", "notes": ["a\x1b"]}))
    trace = load(parts)
    said = trace.to_pandas()["run"][0], trace.metadata["notes"][0]
    assert said == ("\\ud800", "a\\x1b"), "names must be escaped as in a file"
    about = {"run_id": "r1", "world_size": 3, "machine": {"cores": 2}}
    about |= {"not_recorded": ["C++", "more"]}
    (parts / "run.json").write_text(json.dumps(about | {"notes": ["n"]}))
    metadata = load(parts).metadata
    assert metadata.items() >= (about | {"source": "measured"}).items()
    assert metadata["notes"][:2] == ["n", "rank 2 left no record"]


DAMAGED_RUNS = (
    *(None, b"[]", b"{", b'{"world_size": "x", "start_ns": 1.5, "notes": 3}'),
    b'{"world_size": 1e99, "machine": 7, "start_ns": -99999999999999999999999}',
    b'{"world_size": 99999999999999999999999, "date": 3, "start_unix_ns": 99999999999999999999999}',
)


@pytest.mark.parametrize("content", DAMAGED_RUNS)
def test_run_json_may_be_missing_or_damaged(parts: Path, content: bytes | None) -> None:
    two_ranks(parts)
    if content is not None:
        (parts / "run.json").write_bytes(content)
    trace = load_and_save(parts)
    assert (len(trace), trace.world_size, trace.metadata["date"]) == (4, 2, "1970-01-01")


def load_and_save(parts: Path) -> Trace:
    """Checks that the readable content can be saved and loaded."""
    trace = load(parts)
    trace.save(file := parts.with_name("again.ringtrace"))
    assert load(file) == trace
    return trace


@contextmanager
def left_by_two_ranks() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        parts = Path(name, "run.ringtrace.parts")
        parts.mkdir()
        two_ranks(parts)
        yield parts


@given(st.integers(0, 3 * RECORD.itemsize), st.integers(0, 700))
@example(3 * RECORD.itemsize, 700)
def test_cut_anywhere_leaves_what_came_before(events_bytes: int, names_bytes: int) -> None:
    with left_by_two_ranks() as parts:
        for suffix, length in ((".events", events_bytes), (".names", names_bytes)):
            os.truncate(part := parts / f"rank-1{suffix}", min(length, part.stat().st_size))
        trace = load_and_save(parts)
        assert np.count_nonzero(trace.events.rank == 1) == events_bytes // RECORD.itemsize


@given(st.data())
def test_any_damage_gives_a_trace_that_can_be_saved(data: st.DataObject) -> None:
    with left_by_two_ranks() as parts:
        about = {"run_id": "r1", "world_size": 2, "start_ns": BILLION, "notes": ["n"]}
        (parts / "run.json").write_text(json.dumps(about))
        for path in sorted(parts.iterdir()):
            content = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(0, 3))):
                place = data.draw(st.integers(0, len(content) - 1))
                content[place] = data.draw(st.integers(0, 255))
            path.write_bytes(content)
        load_and_save(parts)


def test_a_record_that_a_thread_still_writes_ends_no_record(parts: Path) -> None:
    """The rank was killed while writing slot 63, the last of the first read."""
    records = [{"op": "isend", "peer": 0, "tag": tag, "post_ns": tag} for tag in range(200)]
    records[63]["status"] = 0
    write(parts, 0, records, meta(world_size=1))
    assert load(parts).events.tag.tolist() == [tag for tag in range(200) if tag != 63]


@pytest.mark.parametrize("end", [{}, {"end_ns": 9}])
def test_an_end_without_its_status_is_not_shown(end: dict[str, int], parts: Path) -> None:
    """The rank was killed after writing the end time, before the status: it is in flight."""
    record = {"op": "irecv", "peer": 0, "post_ns": 3, "wait_ns": 4, "done_ns": 5, "status": 1}
    write(parts, 0, [record], meta(start_ns=0, world_size=1, **end))
    (event,) = load(parts)
    assert (event.wait_ns, event.done_ns, event.status) == (4, None, "in_flight")


def test_parts_stand_in_for_a_missing_or_damaged_file(parts: Path) -> None:
    path = parts.with_suffix("")
    two_ranks(parts)
    missing = load(path)
    note = missing.metadata["notes"][-1]
    assert note.startswith("recovered from run.ringtrace.parts")
    assert note in missing.summary()
    missing.save(path)
    assert load(path) == missing
    path.write_bytes(path.read_bytes()[:-1])
    assert load(path) == missing
    other = make_trace([{"rank": 0, "op": "mark"}])
    other.save(path)
    assert load(path) == other


def test_of_two_copies_of_a_part_the_longer_one_is_merged(tmp_path: Path) -> None:
    longer, shorter = (tmp_path / name for name in ("a.parts", "b.parts"))
    for copy in (longer, shorter):
        copy.mkdir()
        two_ranks(copy)
    os.truncate(shorter / "rank-1.events", RECORD.itemsize)

    def merge(*directories: Path) -> Trace:
        assert main(["merge", str(tmp_path / "run"), *map(str, directories)]) == 0
        return load(tmp_path / "run")

    whole = merge(longer)
    assert merge(longer, shorter) == merge(shorter, longer) == whole
    assert len(merge(shorter)) < len(whole)
