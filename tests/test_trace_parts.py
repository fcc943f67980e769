"""Tests of following a rank's records while it writes, compared with reading them as a whole."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from part_writer import Writer

from ringsim.diagnose.mismatches import find_new_mismatches
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.waitfor import analyse
from ringsim.launch.watcher import LiveRecords
from ringsim.traces.events import (
    ANY_SOURCE,
    ERROR,
    NONE,
    OK,
    OP_CODES,
    RECORD,
    concatenate,
)
from ringsim.traces.parts import PartReader
from ringsim.traces.run_parts import Parts, read_parts
from ringsim.traces.store import FIRST_CHUNK

Start = Callable[..., Writer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Starts writers, and closes them at the end."""
    made: list[Writer] = []
    yield lambda *args, **more: (made.append(Writer(tmp_path, *args, **more)), made[-1])[1]
    for writer in made:
        writer.recorder.close()


@pytest.mark.parametrize("look", range(4))  # the last two read slots in flight again
def test_a_part_that_somebody_cuts_short_is_a_short_read(
    look: int, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that maps a file dies of SIGBUS if another process truncates it."""
    writer, reader = start(0, 1), PartReader(tmp_path, 0, 1)
    for tag in range(30):
        writer.post("isend", 0, 0, tag)
    pread, looks = os.pread, itertools.count()

    def cut_and_read(*where: int) -> bytes:
        if next(looks) == look:
            os.truncate(tmp_path / "rank-0.events", RECORD.itemsize * 10 + 40)
        return pread(*where)

    monkeypatch.setattr(os, "pread", cut_and_read)
    assert reader.advance().records["tag"].tolist() == list(range(10))
    os.truncate(tmp_path / "rank-0.events", 0)
    os.truncate(tmp_path / "rank-0.names", 10)
    assert (len(reader.advance().slots), len(read_parts(tmp_path)[0])) == (0, 0)


@pytest.mark.parametrize("ended", [False, True])
def test_a_long_part_is_read_in_pieces_once_its_rank_has_ended_it(
    ended: bool, start: Start, tmp_path: Path
) -> None:
    writer, most = start(0, 1), 30_000
    for tag in range(most):
        writer.post("isend", 0, 0, tag)
        if tag == 9:
            writer.recorder.bookmark()
        if tag not in (7, most - 2):  # these are in flight to the end
            writer.act("finish", -1)
    writer.post("isend", 0, 0, most)
    whole = PartReader(tmp_path, 0, 1).read_all()
    if ended:
        writer.recorder.close()
    pieces = list(Parts(tmp_path, 1).read())
    assert (len(pieces) >= 3) is ended
    joined = concatenate(pieces)
    for name in ("op", "tag", "post_ns", "wait_ns", "done_ns", "status"):
        assert np.array_equal(getattr(joined, name), whole[name])
    assert joined.seq.tolist() == list(range(most + 1))


@pytest.mark.parametrize("before", [62, 63, 64, 63 + 256])
def test_bookmarks_at_the_end_of_a_read_end_no_record(
    start: Start, tmp_path: Path, before: int
) -> None:
    writer, reader = start(0, 1), PartReader(tmp_path, 0, 1)
    for tag in range(before + 200):
        for _ in range(100 if tag == before else 0):
            writer.recorder.bookmark()
        writer.post("isend", 0, 0, tag)
    assert read_parts(tmp_path)[0].tag.tolist() == list(range(before + 200))
    assert reader.advance().records["tag"].tolist() == list(range(before + 200))


def test_what_is_in_flight_was_so_when_the_newest_record_was_written(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that continues during a read posts the next message after the previous one is done."""
    writer, reader, pread = start(0, 1), PartReader(tmp_path, 0, 1), os.pread
    slots = [writer.post("recv", 0, 0, 0)]

    def go_on_and_read(*where: int) -> bytes:
        for _ in range(7):
            writer.recorder.complete(slots[-1])
            slots.append(writer.post("recv", 0, 0, len(slots)))
        return pread(*where)

    status = np.zeros(10_000, dtype=np.int64)
    monkeypatch.setattr(os, "pread", go_on_and_read)
    for _ in range(60):  # the reads end everywhere in a window
        before = len(slots)
        batch = reader.advance()
        assert len(slots) - before < 100  # no read lasts as long as the rank writes
        status[batch.slots] = batch.records["status"]
        assert (status[: batch.slots.max()] == OK).all()
    assert len(slots) > FIRST_CHUNK, "the file must have grown"


def test_what_has_a_status_is_whole_though_it_is_written_during_a_look(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may copy the front of a record before it is written, and its status afterwards."""
    writer, reader, pread = start(0, 1), PartReader(tmp_path, 0, 1), os.pread
    slots = [writer.post("recv", 0, 0, 0)]

    def go_on() -> None:
        writer.recorder.wait(slots[-1])
        writer.recorder.complete(slots[-1])
        slots.append(writer.post("recv", 0, 0, len(slots)))

    def torn(*where: int) -> bytes:
        go_on()
        front = np.frombuffer(bytearray(pread(*where)), dtype=RECORD)
        go_on()
        front["status"] = np.frombuffer(pread(*where), dtype=RECORD)["status"][: len(front)]
        return front.tobytes()

    monkeypatch.setattr(os, "pread", torn)
    shown = [reader.advance().records for _ in range(20)]
    monkeypatch.undo()
    records = np.concatenate([*shown, reader.advance().records])
    assert set(records["tag"].tolist()) == set(range(len(slots)))
    assert (records["post_ns"] > 0).all()
    done = records[records["status"] == OK]
    assert len(done) >= 40
    assert ((done["post_ns"] <= done["wait_ns"]) & (done["wait_ns"] <= done["done_ns"])).all()


DO = "isend irecv any barrier all_reduce skip wait wait finish finish fail span".split()
# the rank, the action, the operation, and the group
STEPS = st.tuples(st.integers(0, 2), st.sampled_from(DO), st.integers(0, 5), st.integers(0, 1))


def play(writer: Writer, what: str, which: int, group: int, peer: int) -> None:
    """Performs one step of one rank."""
    if what in ("isend", "irecv"):
        writer.post(what, group, peer, which // 2)
    elif what == "any":
        writer.post("irecv", group, ANY_SOURCE, which // 2)
    elif what in ("barrier", "all_reduce"):
        writer.post(what, group, NONE, NONE)
    elif what == "skip":
        writer.recorder.bookmark()
    elif what == "span":
        writer.recorder.span_end(writer.recorder.span_begin("compute") or 0)
    else:
        writer.act(what, which, source=peer)


@given(steps=st.lists(STEPS, max_size=60), looks=st.sets(st.integers(0, 59)))
@example(
    steps=[(0, "isend", 0, 0), (1, "irecv", 0, 0), (0, "wait", 0, 0), (1, "wait", 0, 0)], looks={1}
)
def test_reading_bit_by_bit_is_reading_whole(
    steps: list[tuple[int, str, int, int]], looks: set[int]
) -> None:
    size = 3
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writers = [Writer(directory, rank, size) for rank in range(size)]
        live = LiveRecords(directory, size)
        for number, (rank, what, which, group) in enumerate(steps):
            play(writers[rank], what, which, group, peer=(rank + 1 + which % 2) % size)
            if number in looks:
                live.look()
                find_new_mismatches(live.builder)  # which drops finished operations
                live.builder.build(["running"] * size, 0)
        live.look()
        world = live.builder.build(["running"] * size, 0)
        events, _ = read_parts(directory, start_ns=0, world_size=size)
        whole = snapshot_of_events(events, size)
        live_ranks, ranks = (
            set(one.ranks) if one else set() for one in map(analyse, (world, whole))
        )
        if not (events.status == ERROR).any():
            assert live_ranks <= ranks
            # of a recv from any source, the live records may know less
            assert live_ranks == ranks or (events.peer == ANY_SOURCE).any()
        for writer in writers:
            writer.recorder.close()


def test_a_slot_that_another_thread_fills_late_is_found(start: Start, tmp_path: Path) -> None:
    writer, live = start(0, 2), LiveRecords(tmp_path, 1)
    writer.post("isend", 0, 1, 0)
    memory = writer.recorder._store.memory
    record = bytes(memory[:72])
    memory[:72] = bytes(72)  # claimed, and not yet written
    writer.post("isend", 0, 1, 0)
    assert live.look()[0][:2] == live.look()[0][:2] == (1, 1)
    memory[:72] = record[:-2] + bytes(2)  # while it is being written
    assert live.look()[0][:2] == (1, 1)
    memory[:72] = record
    assert live.look()[0][:2] == (2, 2)
    assert [one.index for one in live.builder.build(["running"], 0).ranks[0].posted] == [0, 1]


def test_a_part_of_another_run_or_of_a_dead_process_is_let_go(start: Start, tmp_path: Path) -> None:
    start(0, 2).post("isend", 0, 1, 0)
    live = LiveRecords(tmp_path, 2)
    assert live.look()[0].open == 1
    new = start(0, 2)
    assert live.look()[0].written == 0
    new.post("irecv", 0, 1, 0)
    new.post("irecv", 0, 1, 0)
    assert live.look()[0].open == 2
    assert LiveRecords(tmp_path, 1, strangers=True).look()[0].open == 2
    new.recorder.set_meta("pid", 2**22 + 1)  # no such process exists
    assert LiveRecords(tmp_path, 1, strangers=True).look()[0].open == 0


@pytest.mark.parametrize("what", ["nothing", "elsewhere", "stopped", "ended"])
def test_a_rank_that_does_not_show_what_it_does_counts_as_unknown(
    start: Start, tmp_path: Path, what: str
) -> None:
    if what != "nothing":
        writer = start(0, 1, max_records=8)
        writer.post("irecv", 0, 0, 0)
        writer.act("wait", 0)
        if what == "elsewhere":
            writer.recorder.set_meta("host", "another machine")
        elif what == "stopped":
            post: Any = writer.recorder.make_post(OP_CODES["isend"])
            assert [post(0, 0, 0, 0) for _ in range(9)][-1] is None
        else:
            writer.recorder.close()
    live = LiveRecords(tmp_path, 1)
    live.look()
    assert [live.state(0, state) for state in ("running", "exited")] == ["unknown", "exited"]
    assert analyse(live.builder.build([live.state(0, "running")], 0)) is None
