"""Both sides of an operation, compared through the parts of two recorders: no rank is started."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.comm.counterparts import Counterparts
from ringsim.comm.follower import disagreement
from ringsim.errors import MessageMismatch
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES, Payload
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import CHUNK, FIRST_CHUNK, Recorder

SIZES = (4, 8)  # of the payloads, by number


class Rank:
    """A rank without torch: posts what it is told, as the hooks do, and says whether the other side disagreed."""

    def __init__(self, directory: Path, rank: int, world_size: int = 2, *, fresh: bool = True) -> None:
        self.recorder = Recorder(directory, rank, world_size)
        ranks = list(range(world_size))
        self.group = self.recorder.group("world", ranks, fresh=fresh)
        for size in SIZES:
            self.recorder.payload("float32", [size], 4 * size)
        self.counterparts = Counterparts(self.recorder)
        if fresh:
            self.counterparts.meet_group(self.group, "world", ranks)
        self._posts = {sends: self.recorder.make_post(OP_CODES["isend" if sends else "irecv"]) for sends in (True, False)}
        self._compare = {sends: self.counterparts.make_compare(sends) for sends in (True, False)}
        self._collective = self.recorder.make_post(OP_CODES["all_reduce"])

    def post(self, peer: int, payload: int, *, sends: bool, tag: int = 0, waits: bool = True) -> bool:
        slot = self._posts[sends](self.group, peer, tag, payload)
        try:
            self._compare[sends](self.group, peer, tag, payload)
        except MessageMismatch:
            assert slot is not None
            self.recorder.complete(slot, ERROR)
            return True
        if waits:
            assert slot is not None
            self.recorder.wait(slot)
        return False

    def post_from_any(self, payload: int) -> int:
        self.counterparts.meet_recv_from_any(self.group, 0)
        slot = self._posts[False](self.group, ANY_SOURCE, 0, payload)
        assert slot is not None
        return slot

    def reduce(self, payload: int) -> bool:
        slot = self._collective(self.group, NONE, NONE, payload)
        assert slot is not None
        try:
            self.counterparts.compare_collective(self.group, OP_CODES["all_reduce"], payload, NONE)
        except MessageMismatch:
            return True
        self.recorder.wait(slot)
        return False


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Rank, Rank]:
    return Rank(tmp_path, 0), Rank(tmp_path, 1)


@given(st.data())
def test_a_mismatch_is_found_by_whoever_posts_second_and_nothing_else_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random messages on several channels, the two ranks' posts interleaved at will; the k-th of each side belong together."""
    directory = tmp_path_factory.mktemp("run")
    ranks = Rank(directory, 0), Rank(directory, 1)
    channel = st.tuples(st.booleans(), st.integers(0, 1))  # does rank 0 send?, tag
    sizes = st.integers(0, 1)
    messages = data.draw(st.lists(st.tuples(channel, sizes, sizes), max_size=12))
    posts: list[list[tuple[int, tuple[bool, int], int]]] = [[], []]
    for number, (where, *payloads) in enumerate(messages):
        for rank in (0, 1):
            posts[rank].append((number, where, payloads[rank]))
    posted: list[set[int]] = [set(), set()]
    while any(posts):
        rank = data.draw(st.sampled_from([rank for rank in (0, 1) if posts[rank]]))
        number, (zero_sends, tag), payload = posts[rank].pop(0)
        complains = ranks[rank].post(1 - rank, payload, sends=zero_sends == (rank == 0), tag=tag)
        wrong = messages[number][1] != messages[number][2] and number in posted[1 - rank]
        assert complains == wrong
        posted[rank].add(number)
        if wrong:
            return  # the program ends here


def test_the_file_may_grow_and_slots_may_stay_empty(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    for index in range(FIRST_CHUNK + CHUNK):
        assert not one.post(0, 0, sends=False)
        if index % 100 == 0:
            one.recorder.bookmark()
    for _ in range(FIRST_CHUNK + CHUNK):
        assert not zero.post(1, 0, sends=True)
    assert not one.post(0, 1, sends=False)
    assert zero.post(1, 0, sends=True)


def test_a_rank_that_begins_to_record_later_is_compared_from_its_first_operation(tmp_path: Path) -> None:
    zero = Rank(tmp_path, 0)
    for _ in range(5):
        assert not zero.post(1, 0, sends=True)
    one = Rank(tmp_path, 1)
    assert one.post(0, 1, sends=False)  # it sees all five
    assert [one.post(0, 0, sends=False) for _ in range(9)] == [False] * 9
    found = [zero.post(1, 1, sends=True) for _ in range(9)]
    assert found[-1]  # rank 0 looked for it at its 8th operation: 5 + 3


def test_a_new_tag_for_every_message_is_forgotten_and_mismatches_are_found_all_the_same(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    assert not zero.post(1, 0, sends=True, tag=2**20)  # stays open all the time
    for tag in range(9000):
        assert not one.post(0, tag % 2, sends=False, tag=tag)
        assert not zero.post(1, tag % 2, sends=True, tag=tag)
    assert one.post(0, 1, sends=False, tag=2**20)
    assert not one.post(0, 1, sends=False, tag=7)
    assert zero.post(1, 0, sends=True, tag=7)
    for rank in pair:
        (follower,) = rank.counterparts._followers.values()
        assert len(follower._channels) < 5000


def test_a_failed_operation_is_not_counted(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    assert not zero.post(1, 0, sends=True)
    assert one.post(0, 1, sends=False)  # the program catches that and receives again
    assert not one.post(0, 0, sends=False)
    assert not zero.post(1, 1, sends=True)
    assert not one.post(0, 1, sends=False)


def test_what_the_library_refuses_ends_the_comparison(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    zero.post(1, 0, sends=True)
    zero.counterparts.forget(zero.group, 1, 0, True)
    assert not one.post(0, 0, sends=False)
    assert not one.post(0, 1, sends=False)
    assert not zero.post(1, 0, sends=True)


def test_an_operation_that_is_refused_a_little_later_accuses_nobody(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    slot = one.recorder.make_post(OP_CODES["irecv"])(one.group, 0, 0, 1)
    refusal = threading.Timer(0.1, one.recorder.complete, [slot, ERROR])
    refusal.start()
    assert not zero.post(1, 0, sends=True)  # sees a recv of another size, and waits for what becomes of it
    refusal.join()
    assert not one.post(0, 0, sends=False)
    assert one.post(0, 1, sends=False) is False
    assert zero.post(1, 0, sends=True)  # what follows is compared as before


def test_whoever_goes_on_was_not_refused(pair: tuple[Rank, Rank]) -> None:
    """An operation that nobody waits for yet is a mismatch all the same: here its thread has posted another."""
    zero, one = pair
    assert not one.post(0, 1, sends=False, waits=False)
    assert not one.post(0, 1, sends=False, tag=1, waits=False)
    begin = time.monotonic()
    assert zero.post(1, 0, sends=True)
    decided_s = time.monotonic() - begin
    assert zero.post(1, 0, sends=True, tag=1)  # the last one: only time tells
    assert decided_s < time.monotonic() - begin - decided_s


def test_an_operation_that_was_counted_and_then_refused_accuses_nobody(pair: tuple[Rank, Rank]) -> None:
    """The program catches the error and tries again: from here on one of the other rank's would be held against the one before."""
    zero, one = pair
    slot = one.recorder.make_post(OP_CODES["irecv"])(one.group, 0, 0, 0)
    assert not zero.post(1, 0, sends=True)
    one.recorder.complete(slot, ERROR)
    assert not one.post(0, 0, sends=False)  # the second try
    assert not zero.post(1, 1, sends=True)
    assert not one.post(0, 1, sends=False)


def test_a_collective_that_was_counted_and_then_refused_accuses_nobody(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    slot = one.recorder.make_post(OP_CODES["all_reduce"])(one.group, NONE, NONE, 0)
    assert not zero.reduce(0)
    one.recorder.complete(slot, ERROR)
    assert not one.reduce(0)
    assert not zero.reduce(1)
    assert not one.reduce(1)


def test_a_recv_from_anybody_is_passed_over(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    one.post_from_any(1)
    assert not zero.post(1, 0, sends=True)
    assert not one.post(0, 1, sends=False)
    assert not zero.post(1, 0, sends=True)


def test_a_recv_from_anybody_that_met_its_message_counts_for_the_sender(pair: tuple[Rank, Rank]) -> None:
    zero, one = pair
    slot = one.post_from_any(0)
    assert not zero.post(1, 0, sends=True, tag=5)  # looks before the message has come
    one.recorder.amend(slot, peer=0)
    one.recorder.complete(slot)
    assert not zero.post(1, 0, sends=True)
    assert not one.post(0, 1, sends=False)


def test_a_group_that_was_used_before_is_not_compared(tmp_path: Path) -> None:
    zero, one = Rank(tmp_path, 0), Rank(tmp_path, 1, fresh=False)
    one.counterparts.pass_over_group("world")
    assert not one.post(0, 1, sends=False)
    assert not zero.post(1, 0, sends=True)
    assert not one.post(0, 0, sends=False)
    (sentence,) = read_parts(tmp_path)[1]["not_checked"]
    assert "not compared on group world" in sentence


def test_collectives_are_compared_in_order_with_every_rank_of_a_small_group(tmp_path: Path) -> None:
    for number, order in enumerate(permutations(range(4))):
        ranks = [Rank(tmp_path / str(number), rank, 4) for rank in range(4)]
        for rank in order:
            assert not ranks[rank].reduce(0)
        for rank in order[:-1]:
            assert not ranks[rank].reduce(1)
        assert ranks[order[-1]].reduce(0)
        for each in ranks:
            each.recorder.close()


@pytest.mark.parametrize("size", [2, 3, 5, 8, 33])
def test_no_rank_of_a_group_stands_apart(tmp_path: Path, size: int) -> None:
    """Whoever disagrees with all others is found, whatever the size of the group: its neighbours are compared with it."""
    recorder = Recorder(tmp_path, rank=size - 1, world_size=size)
    counterparts = Counterparts(recorder)
    counterparts.meet_group(0, "world", range(size))
    partners = counterparts._partners[0]
    assert {(size - 2) % size, 0} - {size - 1} <= set(partners)
    assert len(partners) <= 2 * size.bit_length()
    assert size - 1 not in partners


def test_what_an_earlier_run_left_is_not_taken_for_the_present(tmp_path: Path) -> None:
    """A part whose process is gone, or began later than the part."""
    for change in ({"pid": 2**22 + 1}, {"start_ns": 1}):
        one = Rank(tmp_path, 1)
        one.post(0, 1, sends=False)
        one.recorder.close()
        rewrite_meta(tmp_path / "rank-1.names", change)
        assert not Rank(tmp_path, 0).post(1, 0, sends=True)


def test_a_rank_on_another_machine_is_not_compared_and_the_trace_says_so(tmp_path: Path) -> None:
    one = Rank(tmp_path, 1)
    one.post(0, 1, sends=False)
    rewrite_meta(tmp_path / "rank-1.names", {"host": socket.gethostname() + "-other"})
    zero = Rank(tmp_path, 0)
    assert not zero.post(1, 0, sends=True)
    facts = read_parts(tmp_path)[1]
    assert facts["not_checked"] == ["Both sides of an operation were not compared between ranks 0 and 1: they run on two machines."]


def rewrite_meta(path: Path, change: dict[str, Any]) -> None:
    """Changes what a rank says of itself."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["table"] == "meta" and line["key"] in change:
            line["value"] = change[line["key"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


payloads = st.builds(
    lambda dtype, shape, reduction: Payload(dtype, tuple(shape), 4 * _count(shape), reduction),
    st.sampled_from(["float32", "int32"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["", "SUM", "MAX"]),
)


def _count(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@given(payloads, payloads)
def test_disagreement_is_mutual_and_no_payload_disagrees_with_itself(mine: Payload, theirs: Payload) -> None:
    assert disagreement(mine, mine) == ""
    assert disagreement(mine, theirs) == disagreement(theirs, mine)
    if mine.size_bytes != theirs.size_bytes:
        assert disagreement(mine, theirs) == "size"


@pytest.mark.parametrize(
    ("mine", "theirs", "what"),
    [
        (((2, 3), "float32"), ((3, 2), "float32"), "shape"),
        (((2, 3), "float32"), ((6,), "float32"), ""),  # a flat buffer
        (((1, 2, 3), "float32"), ((2, 3, 1), "float32"), ""),
        (((2, 3), "float32"), ((2, 3), "int32"), "dtype"),
        (((0, 3), "float32"), ((3, 0), "int32"), ""),  # nothing is carried
        (((), "float32"), ((1,), "float32"), ""),
        (((2, 2, 3), "float32"), ((4, 3), "float32"), "shape"),
    ],
)
def test_what_counts_as_disagreement(mine: tuple[Any, str], theirs: tuple[Any, str], what: str) -> None:
    def make(described: tuple[Any, str]) -> Payload:
        return Payload(described[1], described[0], 4 * _count(list(described[0])))

    assert disagreement(make(mine), make(theirs)) == what


def test_no_file_stays_open(tmp_path: Path) -> None:
    open_files = []
    for _ in range(3):
        zero, one = Rank(tmp_path, 0), Rank(tmp_path, 1)
        zero.post(1, 0, sends=True)
        one.post(0, 0, sends=False)
        zero.recorder.close()
        one.recorder.close()
        del zero, one
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files == [open_files[0]] * 3
