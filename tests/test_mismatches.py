"""Both sides of an operation, compared in the growing records of ranks; no rank is started."""

from __future__ import annotations

import socket
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.launch.watcher import LiveRecords
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES
from ringsim.traces.recorder import Recorder
from ringsim.traces.store import CHUNK, FIRST_CHUNK

SIZES = (4, 8)  # payloads by number
DIFFERS = ["the size differs."]


class Rank:
    """A rank without torch: posts operations as the hooks do."""

    def __init__(
        self, directory: Path, rank: int, world_size: int = 2, *, fresh: bool = True
    ) -> None:
        self.recorder = Recorder(directory, rank, world_size)
        self.group = self.recorder.group("world", list(range(world_size)), fresh=fresh)
        for size in SIZES:
            self.recorder.payload("float32", [size], 4 * size)

    def post(
        self,
        op: str,
        peer: int = NONE,
        payload: int = 0,
        tag: int = 0,
        *,
        waits: bool = True,
        done: bool = False,
    ) -> int:
        tag = tag if peer != NONE else NONE
        slot = self.recorder.make_post(OP_CODES[op])(self.group, peer, tag, payload)
        assert slot is not None
        if waits or done:
            self.recorder.wait(slot)
        if done:
            self.recorder.complete(slot)
        return slot


class Run:
    """Ranks, and a reader of their records."""

    def __init__(self, directory: Path, size: int = 2) -> None:
        self.ranks = [Rank(directory, rank, size) for rank in range(size)]
        self.live = LiveRecords(directory, size)

    def look(self) -> list[str]:
        """Returns the new mismatches; it reads twice, to see which ranks continue."""
        self.live.look()
        self.live.look()
        found = self.live.find_mismatch()
        findings = found.findings if found else ()
        return [one.message.partition("\n")[0].rpartition(": ")[2] for one in findings]

    def send(self, sent: int = 0, received: int = 1) -> None:
        """Rank 0 sends one payload, and rank 1 receives another."""
        self.ranks[1].post("irecv", 0, received)
        self.ranks[0].post("isend", 1, sent)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@given(st.data())
def test_a_mismatch_is_found_and_nothing_else_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of random messages on several channels, the k-th of each side belong together."""
    run = Run(tmp_path_factory.mktemp("run"))
    channel = st.tuples(st.booleans(), st.integers(0, 1))  # does rank 0 send?, tag
    messages = data.draw(
        st.lists(st.tuples(channel, st.sampled_from([(0, 0), (0, 0), (1, 1), (0, 1)])), max_size=12)
    )
    left = [list(enumerate(messages)) for _ in range(2)]
    posted: list[set[int]] = [set(), set()]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in (0, 1) if left[rank]]))
        number, ((zero_sends, tag), payloads) = left[rank].pop(0)
        op = "isend" if zero_sends == (rank == 0) else "irecv"
        done = data.draw(st.booleans())
        run.ranks[rank].post(op, 1 - rank, payloads[rank], tag, done=done)
        posted[rank].add(number)
        wrong = any(messages[one][1] == (0, 1) for one in posted[0] & posted[1])
        if wrong or data.draw(st.booleans()):
            assert bool(run.look()) == wrong
        if wrong:
            return  # the program ends here


def test_a_long_run_is_compared_to_its_end_and_what_is_done_is_forgotten(run: Run) -> None:
    zero, one = run.ranks
    for index in range(FIRST_CHUNK + CHUNK):
        one.post("irecv", 0, index % 2, index % 7, done=True)
        zero.post("isend", 1, index % 2, index % 7, done=True)
        if index % 100 == 0:
            one.recorder.bookmark()
        if index % 500 == 0:
            assert run.look() == []
    assert run.look() == []
    assert len(run.live.builder.events()) == 0
    run.send()
    assert run.look() == DIFFERS
    expected = -(-(FIRST_CHUNK + CHUNK) // 7)  # those with tag 0
    zero.post("isend", 1, 0)
    run.live.look()
    (waits,) = run.live.builder.build(["running"] * 2, 0).ranks[0].posted[1:]
    assert (waits.index, waits.counterparts) == (expected + 1, expected + 1)


def test_a_rank_that_begins_to_record_later_is_compared_from_its_first_operation(
    tmp_path: Path,
) -> None:
    live, zero = LiveRecords(tmp_path, 2), Rank(tmp_path, 0)
    for payload in (0, 0, 1):
        zero.post("isend", 1, payload)
    live.look()
    assert live.find_mismatch() is None
    one = Rank(tmp_path, 1)
    for payload in (0, 0, 0):
        one.post("irecv", 0, payload)
    live.look()
    assert live.find_mismatch() is not None


def test_an_operation_that_may_still_be_refused_accuses_nobody(run: Run) -> None:
    zero, one = run.ranks
    slot = one.post("irecv", 0, 1, waits=False)
    zero.post("isend", 1, 0)
    assert run.look() == run.look() == []
    one.recorder.complete(slot, ERROR)  # the program catches that, and receives again
    one.post("irecv", 0, 0)
    assert run.look() == []
    run.send()
    assert run.look() == DIFFERS


def test_whoever_goes_on_was_not_refused(run: Run) -> None:
    """An operation is compared after its thread has posted another, even before a wait."""
    zero, one = run.ranks
    one.post("irecv", 0, 1, waits=False)
    zero.post("isend", 1, 0)
    assert run.look() == []
    one.recorder.mark("goes on")
    assert run.look() == DIFFERS


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_collective_that_was_refused_takes_no_place(run: Run, refused_first: bool) -> None:
    zero, one = run.ranks
    slot = one.post("all_reduce", waits=False)
    if not refused_first:
        zero.post("all_reduce")
        assert run.look() == []
    one.recorder.complete(slot, ERROR)
    one.post("all_reduce")
    if refused_first:
        zero.post("all_reduce")
    zero.post("all_reduce", payload=1)
    one.post("all_reduce", payload=1)
    assert run.look() == []
    zero.post("all_reduce")
    one.post("barrier")
    assert run.look() == ["the kind differs."]


@pytest.mark.parametrize("seen", [True, False])
def test_what_may_come_from_anybody_is_passed_over(run: Run, seen: bool) -> None:
    """The reader saw the recv while it was open, or the rank has recorded it."""
    zero, one = run.ranks
    if not seen:
        one.recorder.set_meta("from_any", [one.group])
    slot = one.post("irecv", ANY_SOURCE, 1)
    if seen:
        assert run.look() == []
    one.recorder.amend(slot, peer=0)
    one.recorder.complete(slot)
    zero.post("isend", 1, 0, done=True)
    run.send()
    assert run.look() == []
    one.post("isend", 0, 0)
    zero.post("irecv", 1, 1)
    assert run.look() == DIFFERS


def test_a_group_that_was_used_before_is_not_compared(tmp_path: Path) -> None:
    zero, one = Rank(tmp_path, 0), Rank(tmp_path, 1, fresh=False)
    live = LiveRecords(tmp_path, 2)
    one.post("irecv", 0, 1)
    zero.post("isend", 1, 0)
    zero.post("all_reduce", payload=0)
    one.post("all_reduce", payload=1)
    live.look()
    assert live.find_mismatch() is None


def test_collectives_are_compared_in_any_order(tmp_path: Path) -> None:
    for number, order in enumerate(permutations(range(3))):
        run = Run(tmp_path / str(number), 3)
        for rank in order:
            run.ranks[rank].post("all_reduce", done=True)
        assert run.look() == []
        for rank in order[:-1]:
            run.ranks[rank].post("all_reduce", payload=1)
        assert run.look() == []
        run.ranks[order[-1]].post("all_reduce")
        assert run.look() == DIFFERS
        for rank in run.ranks:
            rank.recorder.close()


def test_a_rank_on_another_machine_is_not_compared_nor_kept(run: Run) -> None:
    run.ranks[1].recorder.set_meta("host", socket.gethostname() + "-other")
    run.ranks[0].post("isend", 1, 0, done=True)
    run.ranks[0].post("all_reduce", done=True)
    assert run.look() == []
    assert (run.live.builder.events().rank == 0).sum() == 0
