"""Files for viewers load unchanged; files of other tools become traces, or are refused."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_schemas import PERFETTO, compile_schema, parse_whole
from random_traces import any_traces, may_be_read
from synthetic import Story
from trace_mutations import DATA

import ringsim
from ringsim import Trace
from ringsim.errors import TraceFileError
from ringsim.exchange import (
    read_chrome,
    read_flight_recorder,
    read_perfetto,
    read_profiler,
)

VIEWERS = ("perfetto", "chrome")
READERS: dict[str, Callable[..., Trace]] = {
    "perfetto": read_perfetto,
    "chrome": read_chrome,
    "profiler": read_profiler,
    "flight recorder": read_flight_recorder,
}


def export(trace: Trace, name: str, path: Path) -> Path:
    getattr(trace, f"to_{name}")(path)
    return path


def small() -> Trace:
    """Rank 0 sends twice, the second time before the first send is done.

    Rank 1 was waiting, and one of its receives is never matched.
    """
    story = Story(2)
    story.span(0, "outer", 0, 9, microbatch=1)
    story.span(0, "inner", 1, 2)
    story.message(0, 1, (1, 3, 4), (0, 0, 4))
    story.message(0, 1, (2, 4, 5), (4, 4, 6), tag=-3)
    story.op(1, "irecv", (7, 8, -1), peer=0, tag=9, group="world", size_bytes=8)
    story.op(1, "mark", (8, -1, -1), label="here", status=2)
    return story.trace()


@pytest.mark.parametrize("name", VIEWERS)
@given(trace=any_traces)
def test_any_trace_comes_back_or_is_not_written(tmp_path: Path, trace: Trace, name: str) -> None:
    """Version 0.2.0 wrote metadata such as ``{"notes": None}``, and then refused its own file."""
    if not may_be_read(trace):
        with pytest.raises(TraceFileError, match="cannot save a trace to"):
            export(trace, name, tmp_path / name)
        return
    assert READERS[name](export(trace, name, tmp_path / name)) == trace
    if name == "perfetto":
        assert_nested(tmp_path / "perfetto")


def assert_nested(path: Path) -> None:
    """Checks that Perfetto slices are in order of time on every lane, and nest."""
    open_slices, times = defaultdict[int, int](int), defaultdict[int, int](int)
    for packet in parse_whole(compile_schema(PERFETTO)["Trace"], path.read_bytes()).packet:
        if packet.HasField("track_event"):
            lane = packet.track_event.track_uuid
            assert packet.timestamp >= times[lane]
            times[lane] = packet.timestamp
            open_slices[lane] += {1: 1, 2: -1, 3: 0}[packet.track_event.type]
            assert open_slices[lane] >= 0


@pytest.mark.parametrize("name", VIEWERS)
def test_a_real_trace_comes_back_also_from_a_packed_file(tmp_path: Path, name: str) -> None:
    trace = ringsim.load(DATA / "pipeline.ringtrace")
    path = export(trace, name, tmp_path / "run")
    assert READERS[name](path) == trace
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert READERS[name](path) == trace


# -- files of other programs


def columns(trace: Trace, *names: str) -> list[list[Any]]:
    frame = trace.to_pandas()[list(names)].astype(object)
    return frame.where(frame.notna(), None).to_numpy().tolist()


THEIRS = [
    {"ph": "B", "pid": "a word", "tid": "main", "ts": 10, "name": "load"},
    {"ph": "X", "pid": 31, "tid": 1, "ts": 11.5, "dur": 2, "name": "one"},
    {"ph": "E", "pid": "a word", "tid": "main", "ts": 12},
    {"ph": "i", "pid": 31, "tid": 1, "ts": 13, "name": "here"},
    {"ph": "M", "pid": 31, "name": "process_name", "args": {"name": "x"}},
]
PROFILED: dict[str, Any] = {
    "distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo",
                        "pg_config": [{"ranks": [0, 1]}]},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "c10d::send", "ts": 1, "dur": 1, "tid": 1,
         "args": {"Concrete Inputs": ["", "", "1", "3"]}},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:send", "ts": 1.5, "dur": 2, "tid": 2,
         "args": {"Input type": ["float"], "Input Dims": [[6]]}},
        {"ph": "X", "cat": "user_annotation", "name": "mine", "ts": 0, "dur": 9, "tid": 1},
    ],
}  # fmt: skip

ENTRY: dict[str, Any] = {
    "record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1,
    "profiling_name": "gloo:all_reduce", "time_created_ns": 5,
    "input_sizes": [[2]], "output_sizes": [[2]], "input_dtypes": ["Float"],
    "frames": [{"name": "f", "filename": "x.py", "line": 3}],
}  # fmt: skip
DUMPED = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [
    ENTRY, {**ENTRY, "record_id": 1, "profiling_name": "nccl:send 0->1",
            "is_p2p": True}]}  # fmt: skip


def test_what_others_wrote_becomes_spans_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(THEIRS))
    assert columns(read_chrome(path), "rank", "kind", "label", "post_ns", "done_ns") == [
        [0, "span", "one", 1500, 3500], [0, "mark", "here", 3000, None],
        [1, "span", "load", 0, 2000],
    ]  # fmt: skip
    path.write_text(json.dumps(PROFILED))
    assert columns(read_profiler(tmp_path), "op", "peer", "tag", "size_bytes", "post_ns",
                   "done_ns") == [
        ["span", None, None, None, 0, 9000], ["isend", 1, 3, 24, 1000, 3500],
    ]  # fmt: skip
    theirs = compile_schema(PERFETTO)["Trace"]()
    packets: tuple[dict[str, Any], ...] = (
        {"track_descriptor": {"uuid": 5, "process": {"pid": 900}}},
        {"track_descriptor": {"uuid": 6, "parent_uuid": 5}},
        {"timestamp": 1000, "interned_data": {"event_names": [{"iid": 1, "name": "work"}]},
         "track_event": {"type": 1, "track_uuid": 6, "name_iid": 1}},
        {"timestamp": 1500, "track_event": {"type": 2, "track_uuid": 6}},
    )  # fmt: skip
    for number, packet in enumerate(packets):
        theirs.packet.add(sequence=7, flags=int(number == 0), **packet)
    path.write_bytes(theirs.SerializeToString())
    assert columns(read_perfetto(path), "rank", "kind", "label", "done_ns") == [
        [0, "span", "work", 500]
    ]


def test_a_perfetto_file_of_several_writers_that_begin_again(tmp_path: Path) -> None:
    """Each writer has its own names and track, which are invalid once its state was cleared."""
    theirs = compile_schema(PERFETTO)["Trace"]()

    def say(sequence: int, time_ns: int, number: int, **more: Any) -> None:
        event = {"type": 3, "name_iid": number}
        theirs.packet.add(sequence=sequence, timestamp=time_ns, track_event=event, **more)

    def stands_on(track: int) -> dict[str, Any]:
        return {"track_event_defaults": {"track_uuid": track}}

    for uuid in (5, 6):
        theirs.packet.add(track_descriptor={"uuid": uuid, "process": {"pid": uuid}})
    for sequence, track, name in ((7, 5, "first"), (8, 6, "second")):
        names = {"event_names": [{"iid": 1, "name": name}, {"iid": 2, "name": f"{name}, too"}]}
        theirs.packet.add(
            sequence=sequence, flags=1, interned_data=names, defaults=stands_on(track)
        )
    for sequence in (7, 8):
        say(sequence, 10, 1)
    names = {"event_names": [{"iid": 1, "name": "renamed"}]}
    say(7, 20, 1, flags=1, interned_data=names, defaults=stands_on(5))
    say(7, 30, 2)
    say(8, 40, 2)
    path = tmp_path / "theirs.pftrace"
    path.write_bytes(theirs.SerializeToString())
    labels = [[0, "first"], [0, "renamed"], [0, ""], [1, "second"], [1, "second, too"]]
    assert columns(read_perfetto(path), "rank", "label") == labels


def test_an_arrow_of_chrome_ends_within_the_slice_of_its_recv(tmp_path: Path) -> None:
    """It ends one ns earlier: at the end itself a viewer would find the next slice."""
    story = Story(2)
    story.message(0, 1, (1, 1, 4), (2, 2, 4))
    story.message(0, 1, (5, 5, 6), (6, 6, 6))  # it takes no time
    story.message(0, 1, (7, 7, 8), (7, 7, -1))  # in flight
    said = json.loads(export(story.trace(), "chrome", tmp_path / "run.json").read_text())
    ends = [round(event["ts"] * 1000) for event in said["traceEvents"] if event["ph"] == "f"]
    assert ends == [4_000_000 - 1, 6_000_000, 7_000_000]


# -- damaged and refused files


def write_small(name: str, path: Path) -> None:
    if name == "profiler":
        path.write_text(json.dumps(PROFILED))
    elif name == "flight recorder":
        path.mkdir(exist_ok=True)
        (path / "dump_0").write_text(json.dumps(DUMPED))
        (path / "dump_1").write_bytes(pickle.dumps(DUMPED))
    else:
        export(small(), name, path)


def test_a_number_in_the_place_of_a_name_asks_for_no_memory(tmp_path: Path) -> None:
    theirs = compile_schema({**PERFETTO, "TrackEvent": "9 type int32, 23 name uint64"})["Trace"]()
    event = theirs.packet.add().track_event
    event.type, event.name = 1, 2**40  # bytes(2**40) would be a terabyte of zeros
    (tmp_path / "hostile").write_bytes(theirs.SerializeToString())
    assert read_perfetto(tmp_path / "hostile").events.tables.labels == ("",)


@pytest.mark.parametrize("name", READERS)
def test_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match="cannot open"):
        READERS[name](tmp_path / "none_0")
    packed = gzip.compress(b"x" * 100, mtime=0)
    for content in (b"", b"\xff" * 30, b"{}", b"[1]", b"\x1f\x8b", b"[" * 100_000, packed[:-9]):
        (tmp_path / "other_0").write_bytes(content)
        with pytest.raises(TraceFileError, match=r"cannot read .* as "):
            READERS[name](tmp_path / "other_0")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    # the free part is read, and is not a trace
    for size, refused in ((2**24, "a Chrome trace"), (2**26, "more than 100 times its size")):
        (tmp_path / "packed").write_bytes(gzip.compress(b" " * size, mtime=0))
        with pytest.raises(TraceFileError, match=refused):
            read_chrome(tmp_path / "packed")


def test_a_run_on_nccl_has_its_messages_and_gpu_times() -> None:
    run = Path(__file__).parent / "golden" / "nccl"
    trace = ringsim.load(run / "run.ringtrace")
    events = trace.to_pandas()
    assert len(trace.messages) == 16  # two single messages and a batch of two, four times
    assert not trace.unmatched
    operations = events[events["kind"] != "span"]
    assert (operations["post_ns"] < operations["wait_ns"]).all()
    for _, mine in operations.groupby("rank"):
        single = mine[~mine["op"].str.startswith("batch")]
        assert single["done_ns"].is_monotonic_increasing  # on one stream


def test_what_a_file_of_the_profiler_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    without_shapes = [{**event, "args": {}} for event in PROFILED["traceEvents"]]
    huge = json.loads(json.dumps(PROFILED).replace("[[6]]", "[[1" + "0" * 30 + "]]"))
    for change, said in (
        ({"distributedInfo": {}}, "names no rank"),
        (huge, "payload .* whole numbers|number of bytes"),
        ({"traceEvents": without_shapes}, "record_shapes=True"),
    ):
        path.write_text(json.dumps({**PROFILED, **change}))
        with pytest.raises(TraceFileError, match=said):
            read_profiler(tmp_path)
    path.write_text(json.dumps(PROFILED))
    assert "no file from rank 1" in read_profiler([path]).metadata["notes"]
    with pytest.raises(TraceFileError, match="two files are from rank 0"):
        read_profiler([path, path])
    path.unlink()
    with pytest.raises(TraceFileError, match="found no files to import in"):
        read_profiler(tmp_path)


# -- lanes


SLICES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20)


@given(slices=SLICES)
def test_no_slice_on_a_lane_cuts_another(slices: list[tuple[int, int]]) -> None:
    """Spans nest, and operations use as many lanes as operations are open at the same time."""
    story = Story(1)
    for begin, length in slices:
        story.span(0, "span", begin, begin + length)
        story.op(0, "isend", (begin, -1, begin + length), peer=0)
    with TemporaryDirectory() as directory:
        path = export(story.trace(), "chrome", Path(directory, "run.json"))
        events = json.loads(path.read_text())["traceEvents"]
    lanes = defaultdict[Any, list[tuple[float, float]]](list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["cat"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (kind, _), mine in lanes.items():
        for (start, end), (later, last) in combinations(sorted(mine), 2):
            overlap = min(end, last) > max(start, later)
            inside = (start <= later and last <= end) or (later <= start and end <= last)
            assert not overlap or (kind == "span" and inside)
    moments = [begin for begin, _ in slices]
    most = max(sum(one <= now < one + length for one, length in slices) for now in moments)
    lasting = [kind for (kind, _), mine in lanes.items() if any(end > start for start, end in mine)]
    assert lasting.count("send") <= max(most, 1) + sum(not length for _, length in slices)
