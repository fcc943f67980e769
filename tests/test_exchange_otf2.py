"""Archives of OTF2, written and read by the package otf2 itself; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from random_traces import traces
from trace_mutations import DATA, flip, read_in_full

import ringsim
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.exchange import read_otf2
from ringsim.traces.value import Trace

needs_otf2 = pytest.mark.skipif(importlib.util.find_spec("otf2") is None, reason="the package otf2 is not installed")
KEPT = ["rank", "kind", "peer", "group", "size_bytes", "label", "stage", "microbatch", "status"]
PLAIN = {"batch_isend": "isend", "batch_irecv": "irecv", "send": "isend", "recv": "irecv"}


def told(trace: Trace) -> list[list[str]]:
    """What both sides must agree on, with the times counted from the first event."""
    frame = trace.to_pandas().reset_index(drop=True)
    first = frame["post_ns"].min()
    for name in ("post_ns", "done_ns"):
        frame[name] = frame[name] - first
    frame["size_bytes"] = frame["size_bytes"].fillna(0)  # nothing of spans, and of what is in flight
    return sorted(map(str, frame[[*KEPT, "post_ns", "done_ns"]].to_numpy().tolist()))


@needs_otf2
@pytest.mark.parametrize("file", sorted(DATA.glob("*.ringtrace")), ids=lambda path: path.stem)
def test_a_real_trace_comes_back(tmp_path: Path, file: Path) -> None:
    trace = ringsim.load(file)
    trace.to_otf2(tmp_path / "run")
    there = read_otf2(tmp_path / "run")
    assert there.metadata["source"] == "measured"
    done = [one.select((one.status == 2) & (one.op != 27)) for one in (trace.events, there.events)]
    mine, theirs = (told(Trace(events, {"world_size": trace.world_size})) for events in done)
    assert theirs == mine
    assert len(there.messages) == len(trace.messages)
    read_in_full(there, draw=False)


@needs_otf2
def test_blocking_calls_of_mpi_are_read(tmp_path: Path) -> None:
    """As Score-P writes them: MpiSend and MpiRecv within the region of the function."""
    import otf2

    with otf2.writer.open(str(tmp_path / "run"), timer_resolution=10**6) as archive:
        define, mpi = archive.definitions, {"paradigm": otf2.Paradigm.MPI}
        node = define.system_tree_node("node")
        places = [define.location(f"rank {rank}", group=define.location_group(f"rank {rank}", system_tree_parent=node)) for rank in (0, 1)]
        define.group("all", group_type=otf2.GroupType.COMM_LOCATIONS, members=places, **mpi)
        world = define.comm("MPI_COMM_WORLD", define.group("world", group_type=otf2.GroupType.COMM_GROUP, members=places, **mpi))
        send, recv, bcast = (define.region(name, **mpi) for name in ("MPI_Send", "MPI_Recv", "MPI_Bcast"))
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


@needs_otf2
@given(trace=traces)
def test_any_trace_is_written(tmp_path: Path, trace: Trace) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    trace.to_otf2(tmp_path / "run")
    try:
        read_in_full(read_otf2(tmp_path / "run"), draw=False)
    except TraceFileError as error:
        assert str(error).isprintable()  # noqa: PT017  # such as a trace without events


HARMED = """
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
def test_damage_gives_one_error(tmp_path: Path) -> None:
    """In a process of its own: the library in C writes to its standard error, and if it fell, this would be seen."""
    ringsim.load(DATA / "straggler.ringtrace").to_otf2(tmp_path / "whole")
    paths = []
    for seed in range(30):
        choices = random.Random(seed)
        path = tmp_path / f"damaged-{seed}"
        shutil.copytree(tmp_path / "whole", path)
        harmed = choices.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        harmed.write_bytes(flip(harmed.read_bytes(), choices.randint))
        paths.append(str(path))
    done = subprocess.run([sys.executable, "-c", HARMED, *paths], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 30
    assert "refused" in done.stdout


@needs_otf2
def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="must be new and writable"):
        ringsim.load(DATA / "straggler.ringtrace").to_otf2(tmp_path)
    with pytest.raises(TraceFileError, match="must exist"):
        read_otf2(tmp_path)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (lambda: read_otf2(tmp_path), lambda: ringsim.load(DATA / "straggler.ringtrace").to_otf2(tmp_path / "run")):
        with pytest.raises(ArgumentError, match=r"pip install 'ringsim\[otf2\]'"):
            call()
