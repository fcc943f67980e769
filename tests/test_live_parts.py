"""Reading parts while they grow: at any moment the same as reading them whole, by other code, at that moment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from part_writer import Writer

from ringsim.diagnose.mismatches import find_new_mismatches
from ringsim.diagnose.snapshot import Posted, Snapshot, snapshot_of_events
from ringsim.diagnose.waitfor import analyse
from ringsim.launch.watcher import LiveRecords
from ringsim.traces.events import ANY_SOURCE, ERROR, IN_FLIGHT, NONE, OP_CODES
from ringsim.traces.parts import PartReader, read_parts
from ringsim.traces.recorder import CHUNK, FIRST_CHUNK

STEPS = st.tuples(
    st.integers(0, 2),  # rank
    st.sampled_from(["isend", "irecv", "any", "barrier", "all_reduce", "skip", "wait", "wait", "finish", "finish", "fail", "span"]),
    st.integers(0, 5),
    st.integers(0, 1),
)


def agree(live: Snapshot, whole: Snapshot) -> None:
    """Compares two worlds in what both of them must know."""
    assert [view.state == "blocked" for view in live.ranks] == [view.state == "blocked" for view in whole.ranks]
    for mine, theirs in zip(live.ranks, whole.ranks, strict=True):
        known = {_name(one): one for one in mine.posted}
        for one in theirs.posted:
            other = known[_name(one)]
            assert (other.awaited, other.counterparts) == (one.awaited, one.counterparts)
            assert [(enters.rank, enters.op) for enters in other.entered] == [(enters.rank, enters.op) for enters in one.entered]
        assert all(one.matched for one in mine.posted if _name(one) not in {_name(its) for its in theirs.posted})


def _name(one: Posted) -> tuple[object, ...]:
    return one.operation.op, one.operation.group, one.operation.peer, one.operation.tag, one.index


@given(steps=st.lists(STEPS, max_size=60), looks=st.sets(st.integers(0, 59)))
@example(steps=[(0, "isend", 0, 0), (1, "irecv", 0, 0), (0, "wait", 0, 0), (1, "wait", 0, 0)], looks={1})
def test_reading_bit_by_bit_is_reading_whole(steps: list[tuple[int, str, int, int]], looks: set[int]) -> None:
    size = 3
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writers = [Writer(directory, rank, size) for rank in range(size)]
        live = LiveRecords(directory, size)
        for number, (rank, what, which, group) in enumerate(steps):
            writer = writers[rank]
            peer = (rank + 1 + which % 2) % size
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
            if number in looks:
                live.look()
                find_new_mismatches(live.builder)  # which lets go of what is done
                live.builder.build(["running"] * size, 0)
        live.look()
        world = live.builder.build(["running"] * size, 0)
        events, _ = read_parts(directory, start_ns=0, world_size=size)
        whole = snapshot_of_events(events, size)
        stuck, expected = analyse(world), analyse(whole)
        if not (events.status == ERROR).any():
            # Of a recv from anybody the two know different things for certain; neither calls stuck what is not.
            assert stuck is None or (expected is not None and set(stuck.ranks) <= set(expected.ranks))
        if not (events.peer == ANY_SOURCE).any() and not (events.status == ERROR).any():
            agree(world, whole)
            assert (stuck and stuck.ranks) == (expected and expected.ranks)
        for writer in writers:
            writer.recorder.close()


def test_a_part_is_followed_across_its_growth(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 2)
    part = PartReader(tmp_path, 0)
    total = FIRST_CHUNK + 2 * CHUNK
    seen: dict[int, int] = {}  # status by slot
    for number in range(total):
        slot = writer.post("isend", 0, 1, number % 3)
        if number % 997 == 0:
            seen.update(read(part))
        if number < total - 5:
            writer.recorder.complete(slot)
    seen.update(read(part))
    assert list(seen) == sorted(seen) == list(range(total))
    assert [slot for slot, status in seen.items() if status == IN_FLIGHT] == list(range(total - 5, total))
    assert read(part) == {}
    writer.recorder.close()


def read(part: PartReader) -> dict[int, int]:
    batch = part.advance()
    return dict(zip(batch.slots.tolist(), batch.records["status"].tolist(), strict=True))


def test_a_slot_that_another_thread_fills_late_is_found(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 2)
    writer.post("isend", 0, 1, 0)
    record = bytes(writer.recorder._memory[:72])
    writer.recorder._memory[:72] = bytes(72)  # claimed, and not yet written
    writer.post("isend", 0, 1, 0)
    live = LiveRecords(tmp_path, 1)
    assert live.look()[0][:2] == live.look()[0][:2] == (1, 1)
    writer.recorder._memory[:72] = record[:-2] + bytes(2)  # in the middle of being written
    assert live.look()[0][:2] == (1, 1)
    writer.recorder._memory[:72] = record
    assert live.look()[0][:2] == (2, 2)
    assert [one.index for one in live.builder.build(["running"], 0).ranks[0].posted] == [0, 1]
    writer.recorder.close()


def test_an_earlier_runs_part_is_let_go_when_another_takes_its_place(tmp_path: Path) -> None:
    old = Writer(tmp_path, 0, 2)
    old.post("isend", 0, 1, 0)
    old.recorder.close()
    live = LiveRecords(tmp_path, 2)
    assert live.look()[0].open == 1
    new = Writer(tmp_path, 0, 2)
    assert live.look()[0].written == 0
    new.post("irecv", 0, 1, 0)
    new.post("irecv", 0, 1, 0)
    assert live.look()[0].open == 2
    new.recorder.close()


def test_a_part_of_a_dead_process_is_a_strangers(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 1)
    writer.post("isend", 0, 0, 0)
    live = [LiveRecords(tmp_path, 1, strangers=True) for _ in range(2)]
    assert live[0].look()[0].open == 1
    writer.recorder.set_meta("pid", 2**22 + 1)  # there is no such process
    assert live[1].look()[0].open == 0
    writer.recorder.close()


@pytest.mark.parametrize("what", ["nothing", "elsewhere", "stopped", "ended"])
def test_a_rank_that_does_not_show_what_it_does_counts_as_unknown(tmp_path: Path, what: str) -> None:
    if what != "nothing":
        writer = Writer(tmp_path, 0, 1, max_records=8)
        writer.post("irecv", 0, 0, 0)
        writer.act("wait", 0)
        if what == "elsewhere":
            writer.recorder.set_meta("host", "another machine")
        elif what == "stopped":
            post: Any = writer.recorder.make_post(OP_CODES["isend"])
            assert [post(0, 0, 0, 0) for _ in range(9)][-1] is None
        writer.recorder.close() if what == "ended" else None
    live = LiveRecords(tmp_path, 1)
    live.look()
    assert live.state(0, "running") == "unknown"
    assert live.state(0, "exited") == "exited"
    assert analyse(live.builder.build([live.state(0, "running")], 0)) is None


def test_what_was_refused_is_kept_with_the_place_that_it_would_have_had(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, 2)
    posted = [writer.post("isend", 0, 1, tag) for tag in (3, 4, 3, 3)]
    writer.recorder.complete(posted[2], ERROR)  # nobody has waited for it: it raised when it was posted
    live = LiveRecords(tmp_path, 2)
    live.look()
    find_new_mismatches(live.builder)
    found = [live.builder.build(["running"] * 2, 0), snapshot_of_events(read_parts(tmp_path, start_ns=0, world_size=2)[0], 2)]
    for world in found:
        assert [(one.operation.op, one.operation.tag, one.group.name, one.index) for one in world.ranks[0].refused] == [
            ("isend", 3, "world", 1)
        ]
        assert world.ranks[1].refused == ()
    writer.recorder.close()
