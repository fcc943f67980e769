"""Files for viewers and programs for simulators.

What they say of a trace, and that they come back, and run, as they were.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import math
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_schemas import PERFETTO, compile_schema, parse_whole
from random_traces import any_traces, may_be_read, traces
from synthetic import Story
from trace_mutations import DATA, flip, read_in_full

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.exchange import (
    read_chakra,
    read_chrome,
    read_flight_recorder,
    read_goal,
    read_otf2,
    read_perfetto,
    read_profiler,
)
from ringsim.exchange.programs import Step, make_programs, replay
from ringsim.exchange.slices import place_apart, place_nested
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.collectives import bus_factor, count_rounds, make_rounds
from ringsim.traces.value import Trace

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
needs_otf2 = pytest.mark.skipif(
    importlib.util.find_spec("otf2") is None, reason="the package otf2 is not installed"
)
OTF2 = pytest.param("otf2", marks=needs_otf2)
VIEWERS, PROGRAMS = ("perfetto", "chrome"), ("goal", "chakra")
READERS: dict[str, Callable[..., Trace]] = {
    "perfetto": read_perfetto,
    "chrome": read_chrome,
    "goal": read_goal,
    "chakra": read_chakra,
    "otf2": read_otf2,
    "profiler": read_profiler,
    "flight recorder": read_flight_recorder,
}


def export(trace: Trace, name: str, path: Path) -> Path:
    """Writes a trace in the place of what is there."""
    shutil.rmtree(path, ignore_errors=True)
    getattr(trace, f"to_{name}")(path)
    return path


def take_in(name: str, path: Path, link: Any = LINK) -> Trace:
    return READERS[name](path, link=link) if name in PROGRAMS else READERS[name](path)


def there_and_back(trace: Trace, name: str, directory: Path, link: Any = LINK) -> Trace:
    return take_in(name, export(trace, name, directory / name), link)


def small() -> Trace:
    """Rank 0 sends twice, the second time before the first is through.

    Rank 1 was waiting; one receive is never served.
    """
    story = Story(2)
    story.span(0, "outer", 0, 9, microbatch=1)
    story.span(0, "inner", 1, 2)
    story.message(0, 1, (1, 3, 4), (0, 0, 4))
    story.message(0, 1, (2, 4, 5), (4, 4, 6), tag=-3)
    story.op(1, "irecv", (7, 8, -1), peer=0, tag=9, group="world", size_bytes=8)
    story.op(1, "mark", (8, -1, -1), label="here", status=2)
    return story.trace()


KEPT = [
    "rank",
    "kind",
    "peer",
    "group",
    "tag",
    "size_bytes",
    "label",
    "stage",
    "microbatch",
    "status",
    "post_ns",
    "done_ns",
]


def kept_by_otf2(trace: Trace) -> list[str]:
    """Of the events that are over, what both sides must agree on.

    With the times counted from the first one.
    """
    events = trace.events.select((trace.events.status == 2) & (trace.events.op != 27))
    frame = Trace(events, {"world_size": trace.world_size}).to_pandas().reset_index(drop=True)
    frame[["post_ns", "done_ns"]] -= frame["post_ns"].min()
    frame["size_bytes"] = frame["size_bytes"].fillna(0)  # nothing of spans
    return sorted(map(str, frame[KEPT].to_numpy().tolist()))


@pytest.mark.parametrize("file", ["small", *sorted(path.stem for path in DATA.glob("*.ringtrace"))])
@pytest.mark.parametrize("name", [*VIEWERS, *PROGRAMS, OTF2])
def test_a_trace_comes_back_or_runs_there(tmp_path: Path, file: str, name: str) -> None:
    trace = small() if file == "small" else ringsim.load(DATA / f"{file}.ringtrace")
    there = there_and_back(trace, name, tmp_path)
    if name in VIEWERS:
        assert there == trace
        return
    assert there.world_size == trace.world_size
    read_in_full(there, draw=False)
    if name == "otf2":
        assert there.metadata["source"] == "measured"
        assert kept_by_otf2(there) == kept_by_otf2(trace)
        assert len(there.messages) == len(trace.messages)
    else:
        assert there.unmatched == []
        assert there.metadata["source"] == "simulated"
        assert there.makespan_s >= sum(step.work_ns for step in make_programs(trace)[0]) * 1e-9


@pytest.mark.parametrize("name", VIEWERS)
@given(trace=any_traces)
def test_any_trace_comes_back_or_is_not_written(tmp_path: Path, trace: Trace, name: str) -> None:
    """Version 0.2.0 wrote metadata such as ``{"notes": None}``, and refused its own file."""
    if not may_be_read(trace):
        with pytest.raises(TraceFileError, match="A trace must be plain data to be saved"):
            export(trace, name, tmp_path / name)
        return
    assert there_and_back(trace, name, tmp_path) == trace
    if name == "perfetto":
        assert_nested(tmp_path / "perfetto")


@pytest.mark.parametrize("name", [*PROGRAMS, OTF2])
@given(trace=traces)
def test_any_trace_runs_there_or_is_refused(tmp_path: Path, trace: Trace, name: str) -> None:
    try:
        read_in_full(there_and_back(trace, name, tmp_path), draw=False)
    except TraceFileError as error:
        # such as a time of 292 years, or a trace without events
        assert str(error).isprintable()  # noqa: PT017


def assert_nested(path: Path) -> None:
    """Slices of Perfetto follow one another in time on every lane, and nest."""
    open_slices: dict[int, int] = {}
    times: dict[int, int] = {}
    for packet in parse_whole(
        compile_schema("perfetto", PERFETTO)["Trace"], path.read_bytes()
    ).packet:
        if packet.HasField("track_event"):
            lane = packet.track_event.track_uuid
            assert packet.timestamp >= times.get(lane, 0)
            times[lane] = packet.timestamp
            open_slices[lane] = (
                open_slices.get(lane, 0) + {1: 1, 2: -1, 3: 0}[packet.track_event.type]
            )
            assert open_slices[lane] >= 0


@pytest.mark.parametrize("name", VIEWERS)
def test_a_file_may_be_packed(tmp_path: Path, name: str) -> None:
    (tmp_path / "packed").write_bytes(
        gzip.compress(export(small(), name, tmp_path / "run").read_bytes())
    )
    assert READERS[name](tmp_path / "packed") == small()


# -- files of others


def columns(trace: Trace, *names: str) -> list[list[Any]]:
    frame = trace.to_pandas()[list(names)].astype(object)
    return frame.where(frame.notna(), None).to_numpy().tolist()


THEIRS = [
    {"ph": "B", "pid": 70, "tid": "main", "ts": 10, "name": "load"},
    {"ph": "X", "pid": 31, "tid": 1, "ts": 11.5, "dur": 2, "name": "one"},
    {"ph": "E", "pid": 70, "tid": "main", "ts": 12},
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
    theirs = compile_schema("perfetto", PERFETTO)["Trace"]()
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


def test_processes_of_others_come_in_order_numbers_before_words(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    pids = ["b", 31, "a", 4]
    path.write_text(
        json.dumps(
            [
                {"ph": "X", "pid": pid, "tid": 1, "ts": 1, "dur": 1, "name": f"of {pid}"}
                for pid in pids
            ]
        )
    )
    assert columns(read_chrome(path), "rank", "label") == [
        [0, "of 4"],
        [1, "of 31"],
        [2, "of a"],
        [3, "of b"],
    ]


def test_a_perfetto_file_of_several_writers_that_begin_again(tmp_path: Path) -> None:
    """Each writer has names and a track of its own.

    If its state was cleared, names of before count no more.
    """
    theirs = compile_schema("perfetto", PERFETTO)["Trace"]()

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
    say(
        7,
        20,
        1,
        flags=1,
        interned_data={"event_names": [{"iid": 1, "name": "renamed"}]},
        defaults=stands_on(5),
    )
    say(7, 30, 2)
    say(8, 40, 2)
    path = tmp_path / "theirs.pftrace"
    path.write_bytes(theirs.SerializeToString())
    assert columns(read_perfetto(path), "rank", "label") == [
        [0, "first"],
        [0, "renamed"],
        [0, ""],
        [1, "second"],
        [1, "second, too"],
    ]


def test_an_arrow_of_chrome_ends_within_the_slice_of_its_recv(tmp_path: Path) -> None:
    """One ns before its end: at the end itself a viewer finds the next slice."""
    story = Story(2)
    story.message(0, 1, (1, 1, 4), (2, 2, 4))
    story.message(0, 1, (5, 5, 6), (6, 6, 6))  # it takes no time
    story.message(0, 1, (7, 7, 8), (7, 7, -1))  # it is in flight
    events = json.loads(export(story.trace(), "chrome", tmp_path / "run.json").read_text())[
        "traceEvents"
    ]
    ends = [round(event["ts"] * 1000) for event in events if event["ph"] == "f"]
    assert ends == [4_000_000 - 1, 6_000_000, 7_000_000]


@needs_otf2
def test_blocking_calls_of_mpi_are_read(tmp_path: Path) -> None:
    """As Score-P writes them: MpiSend and MpiRecv within the region of the function."""
    import otf2

    with otf2.writer.open(str(tmp_path / "run"), timer_resolution=10**6) as archive:
        define, mpi = archive.definitions, {"paradigm": otf2.Paradigm.MPI}
        node = define.system_tree_node("node")
        places = [
            define.location(
                f"rank {rank}", group=define.location_group(f"rank {rank}", system_tree_parent=node)
            )
            for rank in (0, 1)
        ]
        define.group("all", group_type=otf2.GroupType.COMM_LOCATIONS, members=places, **mpi)
        world = define.comm(
            "MPI_COMM_WORLD",
            define.group("world", group_type=otf2.GroupType.COMM_GROUP, members=places, **mpi),
        )
        send, recv, bcast = (
            define.region(name, **mpi) for name in ("MPI_Send", "MPI_Recv", "MPI_Bcast")
        )
        main = define.region("main", paradigm=otf2.Paradigm.COMPILER)
        first, second = map(archive.event_writer_from_location, places)
        for writer in (first, second):
            writer.enter(0, main)
        first.enter(10, send)
        first.mpi_send(11, 1, world, 7, 800)
        first.leave(15, send)
        second.enter(5, recv)
        second.mpi_recv(16, 0, world, 7, 800)
        second.leave(17, recv)
        for writer in (first, second):
            writer.enter(20, bcast)
            writer.mpi_collective_begin(20)
            writer.mpi_collective_end(25, otf2.CollectiveOp.BCAST, world, 1, 0, 400)
            writer.leave(25, bcast)
            writer.leave(30, main)
    trace = read_otf2(tmp_path / "run" / "traces.otf2")
    frame = trace.to_pandas().sort_values(["rank", "post_ns"])
    assert frame[["rank", "op", "post_ns"]].to_numpy().tolist() == [
        *([0, "span", 0], [0, "send", 10_000], [0, "broadcast", 20_000]),
        *([1, "span", 0], [1, "recv", 5_000], [1, "broadcast", 20_000]),
    ]
    assert frame["label"].dropna().tolist() == ["main", "main"]
    assert frame["done_ns"].tolist() == [30_000, 15_000, 25_000, 30_000, 16_000, 25_000]
    assert frame["peer"].dropna().tolist() == [1, 1, 0, 1]
    assert trace.unmatched == []


# -- damage, and what is refused


def write_small(name: str, path: Path) -> None:
    if name == "profiler":
        path.write_text(json.dumps(PROFILED))
    elif name == "flight recorder":
        path.mkdir(exist_ok=True)
        (path / "dump_0").write_text(json.dumps(DUMPED))
        (path / "dump_1").write_bytes(pickle.dumps(DUMPED))
    else:
        export(small(), name, path)


def harm(path: Path, choose: Callable[[int, int], int]) -> None:
    """Changes one file of what was written."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) or [path]
    file = files[choose(0, len(files) - 1)]
    file.write_bytes(flip(file.read_bytes(), choose))


READ_HARMED = """
import sys
from ringsim.errors import TraceFileError
from ringsim.exchange import read_otf2
for path in sys.argv[1:]:
    try:
        print(len(read_otf2(path).events))
    except TraceFileError as error:
        assert str(error).isprintable()
        print("refused")
"""


@needs_otf2
def test_damage_to_otf2_gives_one_error(tmp_path: Path) -> None:
    """In a process of its own.

    The library in C writes to its standard error, and if it fell, this would be seen.
    """
    whole = export(ringsim.load(DATA / "straggler.ringtrace"), "otf2", tmp_path / "whole")
    paths = [tmp_path / f"damaged-{seed}" for seed in range(30)]
    for seed, path in enumerate(paths):
        harm(shutil.copytree(whole, path), random.Random(seed).randint)
    done = subprocess.run(
        [sys.executable, "-c", READ_HARMED, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 30
    assert "refused" in done.stdout


def test_without_the_package_otf2_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (read_otf2, small().to_otf2):
        with pytest.raises(ArgumentError, match=r"pip install 'ringsim\[otf2\]'"):
            call(tmp_path / "run")


def test_a_number_in_the_place_of_a_name_asks_for_no_memory(tmp_path: Path) -> None:
    theirs = compile_schema("perfetto", {**PERFETTO, "TrackEvent": "9 type int32, 23 name uint64"})[
        "Trace"
    ]()
    event = theirs.packet.add().track_event
    event.type, event.name = 1, 2**40  # bytes(2**40) would be a terabyte of zeros
    (tmp_path / "hostile").write_bytes(theirs.SerializeToString())
    assert read_perfetto(tmp_path / "hostile").events.tables.labels == ("",)


@pytest.mark.parametrize("name", VIEWERS)
def test_something_else_is_refused(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(b"x" * 100, mtime=0)
    for content in (b"", b"\xff" * 30, b"{}", b"[1]", b"\x1f\x8b", b"[" * 100_000, packed[:-9]):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(TraceFileError, match="A file to import must be"):
            READERS[name](tmp_path / "other")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    for size, refused in (
        (2**24, "a Chrome trace"),
        (2**26, "more than 100 times its size"),
    ):  # the free part is read, and found to be none
        (tmp_path / "packed").write_bytes(gzip.compress(b" " * size, mtime=0))
        with pytest.raises(TraceFileError, match=refused):
            read_chrome(tmp_path / "packed")


def test_what_a_file_of_the_profiler_lacks_is_named(tmp_path: Path) -> None:
    about, path = PROFILED["distributedInfo"], tmp_path / "one.json"
    for change, said in (
        ({"distributedInfo": {}}, "names no rank"),
        ({"distributedInfo": {**about, "backend": "nccl"}}, "only those on Gloo"),
        (
            json.loads(json.dumps(PROFILED).replace("[[6]]", "[[1" + "0" * 30 + "]]")),
            "payload .* whole numbers|number of bytes",
        ),
        (
            {"traceEvents": [{**event, "args": {}} for event in PROFILED["traceEvents"]]},
            "record_shapes=True",
        ),
    ):
        path.write_text(json.dumps({**PROFILED, **change}))
        with pytest.raises(TraceFileError, match=said):
            read_profiler(tmp_path)
    path.write_text(json.dumps(PROFILED))
    assert "no file of rank 1" in read_profiler([path]).metadata["notes"]
    with pytest.raises(TraceFileError, match="of rank 0, as another file is"):
        read_profiler([path, path])
    path.unlink()
    with pytest.raises(TraceFileError, match="must be one or more, got none"):
        read_profiler(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not begin with num_ranks"),
        ("num_ranks 99999999999", "does not begin"),
        ("num_ranks 1\nrank 1 {\n}", "rank 1 is not one of 1"),
        ("num_ranks 1\nhello", "'hello' stands outside"),
        ("num_ranks 1\nrank 0 {\ncalc x\n}", "'calc x' is no line of GOAL"),
        # in a moment, not in an hour
        ("num_ranks 1\n" + "/* " * 10**6, "num_ranks is 1, and 0 ranks"),
        ("num_ranks 1000000\nrank 0 {\n}", "num_ranks is 1000000, and 1 ranks are there"),
        ("num_ranks 2\nrank 0 {\nrecv 1b from 0\n}\nrank 1 {\n}", "receives from rank 0 of 2"),
        (
            "num_ranks 1\nrank 0 {\na: calc 1\nb: calc 1\na requires b\nb requires a\n}",
            "steps of it need each other",
        ),
    ],
    ids=range(9),
)
def test_what_is_no_program_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.goal").write_text(text)
    with pytest.raises(TraceFileError, match=said):
        read_goal(tmp_path / "run.goal", link=LINK)


def test_places_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for link, name in itertools.product((None, {(0, 1): LINK}), PROGRAMS):
        with pytest.raises(ArgumentError, match="link must be"):
            there_and_back(small(), name, tmp_path, link)
    for name in (
        *VIEWERS,
        "goal",
        "chakra",
        *(["otf2"] if importlib.util.find_spec("otf2") else []),
    ):
        with pytest.raises(TraceFileError, match=r"must (exist|be there)"):
            take_in(name, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceFileError, match=r"named <name>.<rank>.et"):
        read_chakra(tmp_path / "empty", link=LINK)
    (tmp_path / "file").touch()
    with pytest.raises(TraceFileError, match="must be writable"):
        small().to_chakra(tmp_path / "file")
    export(small(), "chakra", tmp_path / "run")
    with pytest.raises(TraceFileError, match="it holds files of another run"):
        small().to_chakra(tmp_path / "run")


@needs_otf2
def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="must be new and writable"):
        small().to_otf2(tmp_path)


# -- lanes


SLICES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20).map(
    lambda pairs: sorted(
        ((start, start + length) for start, length in pairs), key=lambda one: (one[0], -one[1])
    )
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
    assert len(
        {lane for lane, (start, end) in zip(apart, slices, strict=True) if end > start}
    ) <= max(most, 1) + sum(s == e for s, e in slices)


# -- programs, run on the virtual clock


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("gpipe", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zb_h1", 4)]
)
def test_a_simulated_step_takes_as_long_there(
    tmp_path: Path, name: str, schedule: str, num_ranks: int
) -> None:
    link = ringsim.Link(alpha_s=0.05, beta_s_per_byte=1e-4)
    settings = {
        "num_ranks": num_ranks,
        "num_microbatches": 4,
        "num_chunks": 2 if "inter" in schedule else None,
        "size_bytes": 1000,
    }
    here = simulate_schedule(schedule, link=link, semantics="buffered", **settings)
    there = there_and_back(here.trace(), name, tmp_path, link)
    assert there.makespan_s == pytest.approx(float(here.makespan), abs=1e-6)
    assert len(there.messages) == len(here.trace().messages)


def pass_round(rounds: int) -> None:
    """Works unevenly, passes something on while it works on, and adds it up with all others."""
    ring = ringsim.current_ring()
    token = torch.zeros(250)
    for _ in range(rounds):
        ringsim.compute(1e-3 * (1 + ring.rank % 3))
        received = torch.empty(250)
        works = [
            dist.isend(token, (ring.rank + 1) % ring.world_size),
            dist.irecv(received, (ring.rank - 1) % ring.world_size),
        ]
        ringsim.compute(5e-4)
        for work in works:
            work.wait()
    dist.all_reduce(torch.zeros(250_000))  # so much that it goes round the ring, as it does there


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_simulated_worker_takes_as_long_there(tmp_path: Path, name: str) -> None:
    here = ringsim.simulate(pass_round, world_size=8, args=(5,), link=LINK, semantics="buffered")
    assert there_and_back(here, name, tmp_path).makespan_s == pytest.approx(
        here.makespan_s, abs=1e-7
    )


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """Programs of three ranks, each one after the other but for messages that are waited for later.

    Every message meets its other side.
    """
    ranks: list[list[Step]] = [[], [], []]
    front: list[tuple[int, ...]] = [(), (), ()]
    loose: list[list[int]] = [[], [], []]

    def add(rank: int, step: Step) -> None:
        ranks[rank].append(step)
        if step.kind == "work":
            front[rank] = (len(ranks[rank]) - 1,)
        else:
            loose[rank].append(len(ranks[rank]) - 1)

    for _ in range(draw(st.integers(1, 12))):
        src, dst = draw(st.permutations([0, 1, 2]))[:2]
        for rank in (0, 1, 2):
            if draw(st.booleans()):
                if draw(st.booleans()):
                    front[rank], loose[rank] = (*front[rank], *loose[rank]), []
                add(
                    rank,
                    Step(
                        "work", front[rank], work_ns=draw(st.integers(1, 4)) * 10**6, label="work"
                    ),
                )
        size, tag = draw(st.integers(1, 3)) * 1000, draw(st.integers(0, 1))
        add(src, Step("send", front[src], peer=dst, tag=tag, size_bytes=size))
        add(dst, Step("recv", front[dst], peer=src, tag=tag, size_bytes=size))
    return ranks


@pytest.mark.parametrize("name", PROGRAMS)
@given(found=programs())
def test_any_program_runs_as_it_ran(tmp_path: Path, name: str, found: list[list[Step]]) -> None:
    here = replay(
        [
            [*program, Step("work", tuple(range(len(program))), work_ns=10**6, label="end")]
            for program in found
        ],
        LINK,
        "a test",
    )
    there = there_and_back(here, name, tmp_path)
    ends = [
        trace.to_pandas().query("kind == 'span'").groupby("rank")["done_ns"].max().tolist()
        for trace in (here, there)
    ]
    assert ends[1] == pytest.approx(ends[0], abs=10)
    assert len(there.messages) == len(here.messages)


def test_a_rank_waits_from_when_the_first_step_that_needs_a_message_lacks_nothing_else() -> None:
    receiver = [
        Step("recv", peer=0),
        Step("work", (0,), work_ns=100),
        Step("work", (0, 1), work_ns=100),
    ]
    events = replay([[Step("send", peer=1, size_bytes=1000)], receiver], LINK, "a test").events
    assert (events.wait_ns[1], events.done_ns[1]) == (0, 2_000_000)


def test_a_tree_of_loggopsim_takes_its_depth(tmp_path: Path) -> None:
    """The broadcast of binary_tree_16.goal.

    Rank r sends to r + 2^k wherever 2^k is larger than r.
    """
    lines = ["num_ranks 16", "// comment", "/* another", "one */"]
    for rank in range(16):
        sends = [rank + 2**k for k in range(4) if 2**k > rank]
        parent = rank - 2 ** (rank.bit_length() - 1) if rank else None
        lines += [
            f"rank {rank} {{",
            *([f"l1: recv 1b from {parent} tag 0 cpu 0 nic 0"] if rank else []),
        ]
        for number, other in enumerate(sends, start=2):
            lines += [
                f"\tl{number}: send 1b to {other}",
                *([f"l{number} requires l1"] if rank else []),
            ]
        lines.append("}")
    (tmp_path / "tree.goal").write_text("\r\n".join(lines))
    trace = read_goal(tmp_path / "tree.goal", link=LINK)
    assert len(trace.messages) == 15
    assert trace.makespan_s == pytest.approx(4 * LINK.time_s(1))


def test_what_begins_with_another_and_one_cpu_for_two(tmp_path: Path) -> None:
    (tmp_path / "run.goal").write_text(
        "num_ranks 1\nrank 0 {\na: calc 100\nb: calc 50\nb irequires a\nc: calc 30 cpu 1\nc "
        "irequires a\nd: calc 1\nd requires c\n}"
    )
    spans = (
        read_goal(tmp_path / "run.goal", link=LINK).to_pandas().sort_values(["post_ns", "done_ns"])
    )
    assert spans[["thread", "post_ns", "done_ns"]].to_numpy().tolist() == [
        [1, 0, 30],
        [0, 0, 100],
        [0, 100, 150],
        [0, 150, 151],
    ]


def test_who_waits_for_ever_is_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "run.goal"
    path.write_text(
        "num_ranks 2\nrank 0 {\nrecv 4b from 1\n}\nrank 1 {\na: recv 4b from 0\nb: send 4b to 0\n"
        "b requires a\n}"
    )
    trace = read_goal(path, link=LINK)
    assert [one.status for one in trace.unmatched] == ["in_flight", "in_flight"]
    assert "wait" in str(trace.explain())


ROUNDS = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 0,
    "reduce": 0, "gather": 1, "scatter": 1,
    "barrier": None,
}  # fmt: skip


@pytest.mark.parametrize("op", ROUNDS)
@given(size=st.integers(1, 9), data=st.data())
def test_rounds_move_what_a_collective_must(op: str, size: int, data: st.DataObject) -> None:
    root, share = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 50))
    rounds = list(make_rounds(op, size, root, share * size))
    count, amount = count_rounds(op, size, share * size)
    assert len(rounds) == count
    assert {bytes_ for messages in rounds for _, _, bytes_ in messages} <= {amount}
    assert all(source != to for messages in rounds for source, to, _ in messages)
    if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        sent = [
            sum(bytes_ for messages in rounds for source, _, bytes_ in messages if source == rank)
            for rank in range(size)
        ]
        assert sent == [round(share * size * bus_factor(op, size))] * size
    elif op in ("broadcast", "reduce"):
        have = {root}
        for messages in (
            rounds
            if op == "broadcast"
            else [[(to, source, _) for source, to, _ in one] for one in rounds[::-1]]
        ):
            assert {source for source, _, _ in messages} <= have
            have |= {to for _, to, _ in messages}
        assert have == set(range(size))
        assert count == math.ceil(math.log2(size))
    elif op == "barrier":
        knows = [{rank} for rank in range(size)]
        for messages in rounds:
            knows = [
                knows[rank].union(*(knows[source] for source, to, _ in messages if to == rank))
                for rank in range(size)
            ]
        assert all(known == set(range(size)) for known in knows)
