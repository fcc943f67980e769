"""The recorder.

Its records and names are in memory, or in files that survive the death of the rank.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringsim.errors import TraceFileError
from ringsim.traces.events import ANY_SOURCE, ERROR, MARK, NONE, OK, OP_CODES, OP_NAMES, RECORD
from ringsim.traces.findings import Operation
from ringsim.traces.recorder import Recorder
from ringsim.traces.run_parts import read_parts
from ringsim.traces.store import CHUNK, FIRST_CHUNK


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves room for names, but not for records."""
    write = os.write

    def no_space(file: int, data: Any) -> int:
        if len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", no_space)


def test_directories_that_do_not_do_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceFileError, match="cannot record rank 0 in"):
        Recorder(tmp_path / "file" / "parts", 0, 1)
    fill_disk(monkeypatch)
    with pytest.raises(
        TraceFileError, match=r"rank 3 in .* No space left .*Choose a different path"
    ):
        Recorder(tmp_path, 3, 4)


def test_names_are_numbered_once_and_each_is_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, 0, 1)
    writes: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _, data: writes.append(data))
    for _ in range(2):
        assert [recorder.label(name) for name in ("one", "two", "one")] == [0, 1, 0]
        groups = [("pair", [0, 1], False), ("pair", [0, 1], True), ("two", [0], False)]
        assert [recorder.group(name, of, fresh=fresh) for name, of, fresh in groups] == [0, 1, 2]
        assert recorder.payload("float32", [2, 3], 24, "SUM", [(1, 2)]) == 0
    monkeypatch.undo()
    payload = {"dtype": "float32", "shape": [2, 3], "size_bytes": 24, "reduction": "SUM"}
    assert b"".join(writes).count(b"\n") == len(writes)
    assert [json.loads(data) for data in writes] == [
        {"table": "label", "id": 0, "name": "one"},
        {"table": "label", "id": 1, "name": "two"},
        {"table": "group", "id": 0, "name": "pair", "ranks": [0, 1]},
        {"table": "group", "id": 1, "name": "pair", "ranks": [0, 1], "fresh": True},
        {"table": "group", "id": 2, "name": "two", "ranks": [0]},
        {"table": "payload", "id": 0, **payload, "strides": [[1, 2]]},
    ]
    recorder.close()


def test_a_recorder_in_memory_serves_all_simulated_ranks() -> None:
    now_ns, rank = 0, 0
    recorder = Recorder(None, 0, 2, now=lambda: now_ns, who=lambda: rank)
    group, payload = recorder.group("world", [0, 1]), recorder.payload("float32", [2], 8)
    post, slots = recorder.make_post(OP_CODES["isend"]), []

    def isend(peer: Any, tag: int) -> int:
        return post(group, peer, tag, payload) or 0

    for now_ns in range(3 * CHUNK):  # memory grows
        rank = now_ns % 2
        # neither the peer nor the tag of the first two fits its column
        peer, tag = [("one", 0), (ANY_SOURCE, 2**40)][rank] if now_ns < 2 else (1 - rank, now_ns)
        slots.append(isend(peer, tag))
    now_ns = 10**6
    recorder.wait(slots[2])
    recorder.complete(slots[2], ERROR)
    recorder.complete(slots[1], waited=False)
    recorder.amend(slots[0], peer=1, wait_ns=5, done_ns=7)
    seen = recorder.bookmark()
    assert recorder.rank == 1
    recorder.mark("there")
    rank = 0
    recorder.post_for(1, sys._getframe(), OP_CODES["all_reduce"], group, NONE, NONE, payload)
    assert len(recorder.records_since(seen)) == 0
    rank = 1
    assert [OP_NAMES[op] for op in recorder.records_since(seen)["op"]] == ["mark", "all_reduce"]
    assert recorder.count == 3 * CHUNK // 2 + 2
    events, mine = recorder.read(), recorder.read(1)
    assert len(events) == 3 * CHUNK + 2
    assert events.rank.tolist() == sorted(events.rank.tolist())
    assert events.seq[:3].tolist() == [0, 1, 2]
    times = events.post_ns[:2].tolist(), events.wait_ns[0], events.done_ns[:2].tolist()
    assert times == ([0, 2], 5, [7, 10**6])
    assert (events.peer[0], events.status[1], events.tables.files) == (1, ERROR, (__file__,))
    assert set(events.thread.tolist()) == {0}
    assert (set(mine.rank.tolist()), mine.wait_ns[0], mine.done_ns[0]) == ({1}, 1, 10**6)
    assert (mine.peer[0], mine.tag[0]) == (ANY_SOURCE, NONE)
    assert events.line[-1] == events.line[-2] + 2


KILLED = """
import sys
from ringsim.traces.events import OP_CODES
from ringsim.traces.recorder import Recorder

recorder = Recorder(sys.argv[1], rank=0, world_size=1)
post = recorder.make_post(OP_CODES["isend"])
for tag in range(10**9):
    slot = post(0, 0, tag, 0)
    if tag % 2:
        recorder.wait(slot)
        recorder.complete(slot)
    if tag == 20_000:
        print("go on", flush=True)
"""


def test_a_killed_process_leaves_every_record_up_to_that_moment(tmp_path: Path) -> None:
    """A watcher also reads the file while it is being written."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go on\n"
        views = [read_parts(tmp_path)[0] for _ in range(3)]
        process.kill()
    events, pieces = read_parts(tmp_path)
    views.append(events)
    assert pieces["complete"]
    assert len(views[0]) > 20_000
    assert [len(one) for one in views] == sorted(len(one) for one in views)
    for seen in views:
        assert (seen.tag == np.arange(len(seen))).all()  # none is missing or torn
        assert (seen.post_ns[1:] >= seen.post_ns[:-1]).all()
        finished = seen.status == OK
        assert finished[1:-1:2].all()
        assert not finished[::2].any()
        assert (seen.done_ns[finished] >= seen.wait_ns[finished]).all()


def test_threads_lose_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=1)
    post = recorder.make_post(OP_CODES["isend"])
    each, threads = 6000, 4

    def work(number: int) -> None:
        for tag in range(each):
            slot = post(0, number, tag, 0)
            recorder.wait(slot)
            recorder.complete(slot)

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
    records = np.fromfile(tmp_path / "rank-0.events", dtype=RECORD)
    records = records[records["status"] != 0]
    assert len(records) == each * threads == recorder.count
    assert (records["status"] == OK).all()
    assert (records["done_ns"] >= records["wait_ns"]).all()
    assert (records["wait_ns"] >= records["post_ns"]).all()
    for number in range(threads):
        mine = records[records["peer"] == number]
        assert (mine["tag"] == np.arange(each)).all()
        assert len(set(mine["thread"])) == 1


HANDLED = """
import os, signal, sys, threading
import ringsim
from ringsim.state import change_state
from ringsim.traces.recorder import Recorder

def note(*_):
    for _ in range(int(sys.argv[3])):
        ringsim.mark("handled")
    with ringsim.span("in the handler"):
        pass

def write(file, data):
    if len(data) > 1000 if sys.argv[2] == "grows" else b'"main 7"' in data:
        os.write = unpatched
        signal.raise_signal(signal.SIGUSR1)
    return unpatched(file, data)

recorder, unpatched = Recorder(sys.argv[1], 0, 1), os.write
change_state(recorder=recorder)
signal.signal(signal.SIGUSR1, note)
os.write = write
for number in range(9):
    for _ in range(100):
        ringsim.mark(f"main {number}")
recorder.close()
"""


@pytest.mark.parametrize(("within", "marks"), [("names", 1), ("grows", 2 * CHUNK)])
def test_a_signal_handler_may_record_in_the_middle_of_the_recorder(
    within: str, marks: int, tmp_path: Path
) -> None:
    """0.2.0 hung: the main thread waited for a lock that it held itself."""
    command = [sys.executable, "-c", HANDLED, str(tmp_path), within, str(marks)]
    subprocess.run(command, check=True, timeout=60)
    events, pieces = read_parts(tmp_path)
    assert (events.status == OK).all()
    assert (pieces["complete"], pieces["notes"]) == (True, [])
    labels = Counter(events.tables.labels[label] for label in events.label)
    mine = {f"main {number}": 100 for number in range(9)}
    assert labels == mine | {"handled": marks, "in the handler": 1}


def test_the_file_does_not_grow_while_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0 wrote zeros into a file that was opened later under the same number."""
    recorder, write = Recorder(tmp_path, rank=0, world_size=1), os.write
    others: list[int] = []

    def close() -> None:
        recorder.close()
        others.extend(os.open(tmp_path / f"other-{n}", os.O_RDWR | os.O_CREAT) for n in range(4))

    closing = threading.Thread(target=close)

    def write_late(file: int, data: Any) -> int:
        if len(data) > 1000 and not closing.ident:
            closing.start()
            closing.join(0.5)
        return write(file, data)

    monkeypatch.setattr(os, "write", write_late)
    for _ in range(FIRST_CHUNK + 20):
        recorder.mark("here")
    closing.join()
    assert [os.fstat(file).st_size for file in others] == [0] * 4
    for file in others:
        os.close(file)


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


STOPPED = "stopped: the maximum of {} records was reached. Later events are not in the trace."


@pytest.mark.parametrize("records", [10, FIRST_CHUNK + 7, None])
def test_recording_stops_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int | None
) -> None:
    """Recording stops at the maximum or on a full disk; the program continues."""
    recorder = Recorder(tmp_path, rank=0, world_size=1, max_records=records or 1 << 21)
    if records is None:
        fill_disk(monkeypatch)
    for _ in range(FIRST_CHUNK + 20):
        recorder.mark("here")
    recorder.close()
    assert recorder.count == (records or FIRST_CHUNK)
    events, pieces = read_parts(tmp_path)
    assert (events.kind == MARK).sum() == (records or FIRST_CHUNK)
    (note,) = pieces["notes"]
    assert ("No space left" if records is None else STOPPED.format(records)) in note
    assert not pieces["complete"]


def test_ways_through_the_library_are_told_apart() -> None:
    """Calls on one line may reach the recorder through different functions at the same depth.

    The names of the operations differ, and so do the lines.
    """
    recorder = Recorder(None, 0, 2, now=lambda: 0, who=lambda: 0)
    recorder.sites.declare_library("/library", speaker="/library/speaker.py")
    codes = {"isend": OP_CODES["isend"], "batch_isend_irecv": OP_CODES["batch_isend"]}
    post = recorder.make_post(OP_CODES["isend"], codes)
    library: dict[str, Any] = {"post": post}
    source = (
        "def hook(): post(0, 1, 0, 0)\ndef isend(): hook()\ndef batch_isend_irecv(): hook()\ndef "
        "via(function): function()"
    )
    exec(compile(source, "/library/speaker.py", "exec"), library)

    def own() -> None:
        library["hook"]()

    def wrapper(function: Any) -> None:
        function()

    for _ in range(2):
        for way in (library["isend"], library["batch_isend_irecv"], own):
            library["via"](way)
        wrapper(library["isend"])
        library["via"](lambda: wrapper(library["isend"]))
        code = compile("wrapper(isend)", "/venv/site-packages/runner.py", "exec")
        exec(code, {"wrapper": wrapper, **library})
    events = recorder.read()
    assert [OP_NAMES[op] for op in events.op] == ["isend", "batch_isend", *["isend"] * 4] * 2
    here = own.__code__.co_firstlineno
    assert (events.line - here).tolist() == [8, 8, 1, 4, 4, 4] * 2
    called = [f"{__file__}:{here + line} > {__file__}" for line in (9, 10)]
    files = [events.tables.files[file] for file in events.file]
    assert files == [*[__file__] * 3, *called, __file__] * 2
    place = Operation(0, "isend", file=called[0], line=here + 4).place
    assert place == f"test_recorder.py:{here + 9} > test_recorder.py:{here + 4}"
