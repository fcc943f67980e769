"""The files that a rank writes: they grow, end where they should, and survive whatever happens to the rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim.traces.recorder as buffer_module
from ringsim.errors import TraceFileError
from ringsim.traces.events import MARK, OK, OP_CODES, RECORD, RECORD_FORMAT
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import CHUNK, FIRST_CHUNK, RECORD_BYTES, PartBuffer, Recorder


def write(buffer: PartBuffer, slot: int) -> bool:
    memory = buffer.grow(slot * RECORD_BYTES)
    if memory is None:
        return False
    struct.pack_into(RECORD_FORMAT, memory, slot * RECORD_BYTES, slot, *[0] * 13, OK)
    return True


def read(directory: Path) -> np.ndarray:
    return np.fromfile(directory / "rank-0.events", dtype=RECORD)


def test_the_format_for_struct_is_the_format_for_numpy() -> None:
    assert struct.calcsize(RECORD_FORMAT) == RECORD.itemsize
    values = (1, 2, 3, 2**64 - 1, *range(-9, 0), 15, 16)
    assert np.frombuffer(struct.pack(RECORD_FORMAT, *values), dtype=RECORD)[0].item() == values


def test_it_grows_chunk_by_chunk_and_keeps_what_was_written(tmp_path: Path) -> None:
    buffer = PartBuffer(tmp_path, 0, max_records=20 * CHUNK)
    sizes = set()
    last = CHUNK * 4 + 17
    for slot in range(last):
        assert write(buffer, slot)
        sizes.add(len(buffer.memory) // RECORD_BYTES)
    assert sizes == {FIRST_CHUNK + n * CHUNK for n in range(5)}
    assert write(buffer, 15 * CHUNK)  # several chunks at once
    assert buffer.count == last + 1
    assert (read(tmp_path)["post_ns"][:last] == np.arange(last)).all()
    buffer.close()


def test_it_ends_at_the_maximum(tmp_path: Path) -> None:
    buffer = PartBuffer(tmp_path, 0, max_records=CHUNK + 3)
    assert [write(buffer, CHUNK + extra) for extra in (2, 3, 4)] == [True, False, False]
    assert len(read(tmp_path)) == CHUNK + 3
    buffer.close()
    assert buffer.grow(0) is None


def test_a_map_stays_writable_after_growth(tmp_path: Path) -> None:
    """A thread that got the old map a moment ago still writes to the file through it."""
    buffer = PartBuffer(tmp_path, 0, max_records=4 * CHUNK)
    old = buffer.memory
    write(buffer, CHUNK)
    struct.pack_into(RECORD_FORMAT, old, 0, *range(14), OK)
    assert buffer.memory is not old
    assert buffer.count == 2
    buffer.close()


def test_a_full_disk_is_an_error_when_the_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = PartBuffer(tmp_path / "a", 0, max_records=4 * CHUNK)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left"):
        buffer.grow(CHUNK * RECORD_BYTES)
    assert write(buffer, FIRST_CHUNK - 1)  # what there is stays usable
    buffer.close()
    with pytest.raises(TraceFileError, match=r"must be writable .* No space left .*rank 3.*Choose another path"):
        PartBuffer(tmp_path / "b", 3, max_records=4)


def test_systems_without_fallocate_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    buffer = PartBuffer(tmp_path, 0, max_records=4 * CHUNK)
    assert write(buffer, CHUNK + 1)
    assert len(read(tmp_path)) == FIRST_CHUNK + CHUNK
    assert buffer.count == 1
    buffer.close()


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceFileError, match=r"directory of a run must be writable"):
        PartBuffer(tmp_path / "file" / "parts", 0, max_records=4)


names = st.text(max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["label", "file"]), names), max_size=30))
def test_names_are_numbered_once_and_in_order(tmp_path_factory: pytest.TempPathFactory, uses: list[tuple[str, str]]) -> None:
    directory = tmp_path_factory.mktemp("names")
    buffer = PartBuffer(directory, 0, max_records=1)
    numbers = [buffer.number(table, name=name) for table, name in uses]
    buffer.close()
    lines = [json.loads(line) for line in (directory / "rank-0.names").read_text().splitlines()]
    written = {(line["table"], line["id"]): line["name"] for line in lines}
    assert [written[table, number] for (table, _), number in zip(uses, numbers, strict=True)] == [name for _, name in uses]
    assert len(lines) == len(set(uses))
    for table in ("label", "file"):
        assert sorted(number for name, number in written if name == table) == list(range(len({u for u in uses if u[0] == table})))


def test_a_name_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = PartBuffer(tmp_path, 0, max_records=1)
    writes = []
    monkeypatch.setattr(buffer_module.os, "write", lambda _, data: writes.append(data))
    buffer.number("group", name="world", ranks=[0, 1])
    buffer.set_meta("pid", 7)
    monkeypatch.undo()
    assert [data.count(b"\n") for data in writes] == [1, 1]
    assert all(data.endswith(b"\n") for data in writes)
    buffer.close()


KILLED = """
import sys, threading
from ringsim.traces.events import OP_CODES
from ringsim.traces.recorder import Recorder

recorder = Recorder(sys.argv[1], rank=0, world_size=1)
post = recorder.hot.make_post(OP_CODES["isend"])
payload = recorder.number("payload", dtype="float32", shape=[2], size_bytes=8)
def work():
    for tag in range(10**9):
        slot = post(0, 0, tag, payload)
        if tag % 2:
            recorder.hot.begin_wait(slot)
            recorder.hot.finish(slot)
        if tag == 20_000:
            print("go on", flush=True)
work()
"""


def test_a_killed_process_leaves_every_record_up_to_that_moment(tmp_path: Path) -> None:
    """And a watcher reads the file while it is being written."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go on\n"
        views = [read_parts(tmp_path)[0] for _ in range(4)]
        os.kill(process.pid, signal.SIGKILL)
    events, pieces = read_parts(tmp_path)
    views.append(events)
    assert pieces["complete"]
    assert len(views[0]) > 20_000
    assert [len(one) for one in views] == sorted(len(one) for one in views)
    for seen in views:
        assert (seen.tag == np.arange(len(seen))).all()  # none is missing, none is torn
        assert (seen.post_ns[1:] >= seen.post_ns[:-1]).all()
        finished = seen.status == OK
        assert finished[1:-1:2].all()
        assert not finished[::2].any()
        assert (seen.done_ns[finished] >= seen.wait_ns[finished]).all()


def test_threads_lose_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    post = recorder.hot.make_post(OP_CODES["isend"])
    each, threads = 6000, 4

    def work(number: int) -> None:
        for tag in range(each):
            slot = post(0, number, tag, 0)
            recorder.hot.begin_wait(slot)
            recorder.hot.finish(slot)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    recorder.close()
    records = read(tmp_path)
    records = records[records["status"] != 0]
    assert len(records) == each * threads == recorder.count
    assert (records["status"] == OK).all()
    assert (records["done_ns"] >= records["wait_ns"]).all()
    assert (records["wait_ns"] >= records["post_ns"]).all()
    for number in range(threads):
        mine = records[records["peer"] == number]
        assert (mine["tag"] == np.arange(each)).all()
        assert len(set(mine["thread"])) == 1


def test_a_forked_process_leaves_the_records_of_the_rank_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    slot = recorder.span_begin("parent")
    assert slot is not None
    child = os.fork()
    if child == 0:
        try:
            recorder.span_end(slot, failed=True)
            for number in range(CHUNK + 10):
                recorder.mark(f"child {number}")
            recorder.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.mark("parent again")
    recorder.span_end(slot)
    recorder.close()
    events, pieces = read_parts(tmp_path)
    assert [events.tables.labels[label] for label in events.label] == ["parent", "parent again"]
    assert list(events.status) == [OK, OK]
    assert pieces["complete"]


def test_recording_stops_at_the_maximum_and_says_so_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1, max_records=10)
    slots = [recorder.hot.make_post(OP_CODES["isend"])(0, 0, tag, 0) for tag in range(5)]
    assert None not in slots
    for _ in range(20):
        recorder.mark("late")
    recorder.close()
    assert recorder.count == 10
    events, pieces = read_parts(tmp_path)
    assert (events.kind == MARK).sum() == 5
    assert pieces["notes"] == ["Recording of rank 0 stopped: the maximum of 10 records was reached. What came later is not in the trace."]
    assert not pieces["complete"]


def test_recording_stops_on_a_full_disk_and_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    for _ in range(CHUNK + 100):
        recorder.mark("here")
    recorder.close()
    assert recorder.count == FIRST_CHUNK
    assert "No space left on device" in read_parts(tmp_path)[1]["notes"][0]
