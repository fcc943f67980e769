"""Files for viewers: what they say, that nothing on a lane cuts anything else, and that they come back as they were."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_schemas import PERFETTO, compile_schema, parse_whole
from random_traces import traces
from synthetic import Story
from trace_mutations import DATA, flip, read_in_full

import ringsim
from ringsim.errors import TraceFileError
from ringsim.exchange import read_chakra, read_chrome, read_goal, read_perfetto, read_profiler
from ringsim.exchange.slices import place_apart, place_nested, unfold
from ringsim.traces.value import Trace

READERS = {"perfetto": read_perfetto, "chrome": read_chrome}
FILES = sorted(DATA.glob("*.ringtrace"))


def export(trace: Trace, name: str, path: Path) -> Path:
    getattr(trace, f"to_{name}")(path)
    return path


def small() -> Trace:
    """Rank 0 sends twice, the second time before the first is through; rank 1 was waiting; one receive is never served."""
    story = Story(2)
    story.span(0, "outer", 0, 9, microbatch=1)
    story.span(0, "inner", 1, 2)
    story.message(0, 1, (1, 3, 4), (0, 0, 4))
    story.message(0, 1, (2, 4, 5), (4, 4, 6), tag=3)
    story.op(1, "irecv", (7, 8, -1), peer=0, tag=9, group="world", size_bytes=8)
    story.op(1, "mark", (8, -1, -1), label="here")
    return story.trace()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_real_trace_comes_back(tmp_path: Path, file: Path, name: str) -> None:
    trace = ringsim.load(file)
    assert READERS[name](export(trace, name, tmp_path / "file")) == trace


@pytest.mark.parametrize("name", READERS)
@given(trace=traces)
def test_any_trace_comes_back(tmp_path: Path, trace: Trace, name: str) -> None:
    written = export(trace, name, tmp_path / "file")
    assert READERS[name](written) == trace
    open_slices: dict[int, int] = {}
    times: dict[int, int] = {}
    for packet in read_packets(written) if name == "perfetto" else ():
        event = packet.track_event
        if packet.HasField("track_event"):
            assert packet.timestamp >= times.get(event.track_uuid, 0)
            times[event.track_uuid] = packet.timestamp
            open_slices[event.track_uuid] = open_slices.get(event.track_uuid, 0) + {1: 1, 2: -1, 3: 0}[event.type]
            assert open_slices[event.track_uuid] >= 0, "slices nest on every lane"


@pytest.mark.parametrize("name", READERS)
def test_the_same_trace_gives_the_same_bytes_and_may_be_packed(tmp_path: Path, name: str) -> None:
    first, second = (export(small(), name, tmp_path / which).read_bytes() for which in ("one", "two"))
    assert first == second
    (tmp_path / "packed").write_bytes(gzip.compress(first))
    assert READERS[name](tmp_path / "packed") == small()


def read_packets(path: Path) -> list[Any]:
    return list(parse_whole(compile_schema("perfetto", PERFETTO)["Trace"], path.read_bytes()).packet)


def test_slices_of_others_become_spans(tmp_path: Path) -> None:
    theirs = [
        {"ph": "B", "pid": 70, "tid": "main", "ts": 10, "name": "load"},
        {"ph": "X", "pid": 31, "tid": 1, "ts": 11.5, "dur": 2, "name": "one"},
        {"ph": "E", "pid": 70, "tid": "main", "ts": 12},
        {"ph": "i", "pid": 31, "tid": 1, "ts": 13, "name": "here"},
        {"ph": "M", "pid": 31, "name": "process_name", "args": {"name": "x"}},
    ]
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    frame = read_chrome(tmp_path / "theirs.json").to_pandas()[["rank", "kind", "label", "post_ns", "done_ns"]].astype(object)
    assert frame.where(frame.notna(), None).to_numpy().tolist() == [
        [0, "span", "one", 1500, 3500], [0, "mark", "here", 3000, None], [1, "span", "load", 0, 2000],
    ]  # fmt: skip


def test_packets_of_others_become_spans(tmp_path: Path) -> None:
    theirs = compile_schema("perfetto", PERFETTO)["Trace"]()
    for number, packet in enumerate(
        (
            {"track_descriptor": {"uuid": 5, "process": {"pid": 900}}},
            {"track_descriptor": {"uuid": 6, "parent_uuid": 5}},
            {"timestamp": 1000, "interned_data": {"event_names": [{"iid": 1, "name": "work"}]},
             "track_event": {"type": 1, "track_uuid": 6, "name_iid": 1}},
            {"timestamp": 1500, "track_event": {"type": 2, "track_uuid": 6}},
        )
    ):  # fmt: skip
        theirs.packet.add(sequence=7, flags=int(number == 0), **packet)
    (tmp_path / "theirs").write_bytes(theirs.SerializeToString())
    trace = read_perfetto(tmp_path / "theirs")
    assert (trace.world_size, trace.events.tables.labels, trace.events.done_ns.tolist()) == (1, ("work",), [500])


PROFILED = {
    "distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo", "pg_config": [{"ranks": [0, 1]}]},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "c10d::send", "ts": 1, "dur": 1, "tid": 1, "args": {"Concrete Inputs": ["", "", "1", "3"]}},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:send", "ts": 1.5, "dur": 2, "tid": 2,
         "args": {"Input type": ["float"], "Input Dims": [[6]]}},
        {"ph": "X", "cat": "user_annotation", "name": "mine", "ts": 0, "dur": 9, "tid": 1},
    ],
}  # fmt: skip


def test_a_file_of_the_profiler_says_what_a_rank_did(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(PROFILED))
    frame = read_profiler(tmp_path).to_pandas()[["op", "peer", "tag", "size_bytes", "post_ns", "done_ns"]].astype(object)
    assert frame.where(frame.notna(), None).to_numpy().tolist() == [["span", None, None, None, 0, 9000], ["isend", 1, 3, 24, 1000, 3500]]


LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
WRITTEN = {  # how a whole file is written, and how it is read
    "perfetto": (lambda path: small().to_perfetto(path), read_perfetto),
    "chrome": (lambda path: small().to_chrome(path), read_chrome),
    "profiler": (lambda path: path.write_text(json.dumps(PROFILED)), read_profiler),
    "goal": (lambda path: small().to_goal(path), lambda path: read_goal(path, link=LINK)),
    "chakra": (lambda path: small().to_chakra(path), lambda path: read_chakra(path, link=LINK)),
}


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_damage_gives_one_error(tmp_path: Path, data: st.DataObject, name: str) -> None:
    write, read = WRITTEN[name]
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    write(tmp_path / "run")
    file = tmp_path / "run"
    file = data.draw(st.sampled_from(sorted(file.iterdir()))) if file.is_dir() else file
    file.write_bytes(flip(file.read_bytes(), lambda low, high: data.draw(st.integers(low, high))))
    try:
        trace = read(tmp_path / "run")
    except TraceFileError as error:
        assert str(error).isprintable()  # noqa: PT017  # whether it is raised depends on the damage
    else:
        read_in_full(trace, draw=False)


def test_a_number_in_the_place_of_a_name_asks_for_no_memory(tmp_path: Path) -> None:
    theirs = compile_schema("perfetto", {**PERFETTO, "TrackEvent": "9 type int32, 23 name uint64"})["Trace"]()
    event = theirs.packet.add().track_event
    event.type, event.name = 1, 2**40  # bytes(2**40) would be a terabyte of zeros
    (tmp_path / "hostile").write_bytes(theirs.SerializeToString())
    assert read_perfetto(tmp_path / "hostile").events.tables.labels == ("",)


@pytest.mark.parametrize("name", READERS)
def test_something_else_is_refused(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(b"x" * 100, mtime=0)
    for content in (b"", b"\xff" * 30, b"{}", b"[1]", b"\x1f\x8b", b"[" * 100_000, packed[:-9]):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(TraceFileError, match="A file to import must be"):
            READERS[name](tmp_path / "other")
    with pytest.raises(TraceFileError, match="must exist"):
        READERS[name](tmp_path / "none")


SLICES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20).map(
    lambda pairs: sorted(((start, start + length) for start, length in pairs), key=lambda one: (one[0], -one[1]))
)


@given(slices=SLICES)
def test_lanes_hold_what_they_promise(slices: list[tuple[int, int]]) -> None:
    starts, ends = [start for start, _ in slices], [end for _, end in slices]
    apart, nested = place_apart(starts, ends), place_nested(starts, ends)
    for first in range(len(slices)):
        for second in range(first):
            overlap = min(ends[first], ends[second]) > max(starts[first], starts[second])
            inside = starts[second] <= starts[first] and ends[first] <= ends[second]
            assert not overlap or apart[first] != apart[second]
            assert not overlap or inside or nested[first] != nested[second]
    most = max((sum(start <= time < end for start, end in slices) for time in starts), default=0)
    assert len({lane for lane, (start, end) in zip(apart, slices, strict=True) if end > start}) <= max(most, 1) + sum(
        s == e for s, e in slices
    )


@given(slices=SLICES)
def test_slices_unfold_in_time_and_in_pairs(slices: list[tuple[int, int]]) -> None:
    lanes = place_nested([start for start, _ in slices], [end for _, end in slices])
    placed = [one for one, lane in zip(slices, lanes, strict=True) if lane == 0]
    told = list(unfold([start for start, _ in placed], [end for _, end in placed]))
    times = [placed[index][0 if begins else 1] for index, begins in told]
    assert times == sorted(times)
    stack: list[int] = []
    for index, begins in told:
        if begins:
            stack.append(index)
        else:
            assert stack.pop() == index
    assert stack == []
