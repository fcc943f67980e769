"""The rules of the wait-for analysis, its findings at any moment, and its cost for many ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from part_writer import Writer
from synthetic import Story

from ringsim.diagnose import waitfor
from ringsim.diagnose.snapshot import OpenOperation, RankSnapshot, Snapshot, snapshot_of_events
from ringsim.diagnose.verdict import judge
from ringsim.diagnose.waitfor import analyse
from ringsim.launch.watcher import LiveRecords
from ringsim.traces.events import ANY_SOURCE, NONE, Group
from ringsim.traces.findings import Operation
from ringsim.traces.run_parts import read_parts

CALLS = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "new_group")
WORLD, PAIR = Group("world", (0, 1, 2, 3)), Group("pair", (0, 1))
RUNS, LEFT, KILLED, FAILED = map(RankSnapshot, ("running", "exited", "killed", "failed"))


def post(
    rank: int, op: str, peer: int, group: Group = WORLD, tag: int = 0, **more: Any
) -> OpenOperation:
    return OpenOperation(
        Operation(rank, op, peer=peer, tag=tag), group, **{"awaited": True, **more}
    )


def waits(*posted: OpenOperation) -> RankSnapshot:
    return RankSnapshot("blocked", posted)


def receives(rank: int, peer: int, group: Group = WORLD, **more: Any) -> RankSnapshot:
    return waits(post(rank, "recv", peer, group, **more))


def both(rank: int) -> RankSnapshot:
    """One thread waits for a message that is not posted, another for one that is."""
    return waits(post(rank, "recv", 1), post(rank, "send", 1, counterparts=1, thread=1))


def calls(rank: int, op: str, *entered: tuple[int, str]) -> RankSnapshot:
    others = tuple(Operation(other, theirs) for other, theirs in entered)
    return waits(post(rank, op, NONE, entered=others))


def in_calls(mine: str, theirs: str) -> tuple[RankSnapshot, RankSnapshot]:
    return calls(0, mine, (1, theirs)), calls(1, theirs, (0, mine))


def makes(
    rank: int, members: tuple[int, ...], *entered: tuple[int, tuple[int, ...]]
) -> RankSnapshot:
    others = tuple(
        Operation(other, "new_group", dtype="ranks", shape=theirs) for other, theirs in entered
    )
    mine = Operation(rank, "new_group", dtype="ranks", shape=members)
    return waits(OpenOperation(mine, WORLD, awaited=True, entered=others))


@pytest.mark.parametrize(
    ("views", "ranks", "cycle"),
    [
        ((receives(0, 1), receives(1, 2), RUNS), (), ()),
        ((receives(0, 1), FAILED, waits(post(2, "send", 0))), (0, 2), ()),
        # posted messages still arrive, unless the peer is dead
        ((receives(0, 1, counterparts=1), LEFT), (), ()),
        ((receives(0, 1, counterparts=1), KILLED), (0,), ()),
        ((receives(0, 1, counterparts=1), FAILED), (0,), ()),
        ((calls(0, "barrier", (1, "barrier")), FAILED, RUNS, RUNS), (0,), ()),
        # there is no sender to wait for
        ((receives(0, ANY_SOURCE, Group("alone", (0,))), LEFT), (), ()),
        # the thread whose message is in flight may send the other one afterwards
        ((both(0), receives(1, 0)), (), ()),
        ((both(0), KILLED), (0,), ()),
        # a batch needs all its operations
        ((waits(post(0, "recv", 1), post(0, "recv", 2)), RUNS, receives(2, 0)), (0, 2), (0, 2)),
        # one sender is enough
        ((receives(0, ANY_SOURCE), receives(1, 0), RUNS, LEFT), (), ()),
        ((receives(0, ANY_SOURCE), receives(1, 0), LEFT, LEFT), (0, 1), (0, 1)),
        # any member of its group, and any unknown rank, may send
        ((receives(0, ANY_SOURCE, PAIR), LEFT, RUNS, receives(3, ANY_SOURCE)), (0,), ()),
        ((receives(0, ANY_SOURCE, Group("some", (0, 1, 5))), receives(1, 0)), (), ()),
        ((*in_calls("barrier", "barrier"), RUNS, RUNS), (), ()),
        ((*in_calls("barrier", "barrier"), LEFT, RUNS), (0, 1), ()),
        ((*in_calls("barrier", "all_reduce"), RUNS, RUNS), (0, 1), (0, 1)),
        ((makes(0, (0, 1)), RUNS, LEFT, LEFT), (), ()),  # only the members
        ((makes(0, (0, 1)), LEFT, makes(2, (2, 3)), RUNS), (0,), ()),
        # rank 2 may still create [1, 2] with rank 1
        ((makes(0, (0, 1), (1, (1, 2))), makes(1, (1, 2), (0, (0, 1))), RUNS), (0,), ()),
        # peers outside the world block no rank
        ((waits(post(0, "send", 7)), receives(1, -1)), (), ()),
        ([receives(*pair) for pair in enumerate([1, 2, 3, 0, 5, 4, 0])], (*range(7),), (4, 5)),
    ],
)
def test_who_is_stuck_by_hand(
    views: tuple[RankSnapshot, ...], ranks: tuple[int, ...], cycle: tuple[int, ...]
) -> None:
    stuck = analyse(Snapshot(tuple(views)))
    assert (stuck.ranks, stuck.cycle) == (ranks, cycle) if stuck is not None else ranks == ()


def test_a_recv_that_can_still_be_served_is_no_reason() -> None:
    either = waits(post(0, "recv", ANY_SOURCE), post(0, "recv", 1))
    stuck = analyse(Snapshot((either, LEFT, RUNS, RUNS)))
    assert stuck is not None
    assert [(one.posted.operation.peer, one.peers) for one in stuck.hindrances] == [(1, (1,))]


DOUBTFUL, SURE, LACKING = {"counterparts": 1, "contested": 1}, {"counterparts": 1}, {}


@pytest.mark.parametrize(
    ("batch", "taken"),
    [
        ([DOUBTFUL], [True]),
        ([SURE, DOUBTFUL], [False, True]),
        ([SURE], [False]),
        ([DOUBTFUL, DOUBTFUL], [False, False]),  # either may be the missing one
        ([DOUBTFUL, LACKING], [False, False]),
    ],
)
def test_at_rest_the_only_one_in_doubt_is_taken(
    batch: list[dict[str, int]], taken: list[bool]
) -> None:
    mine = waits(*(post(0, "recv", 1, **facts) for facts in batch))
    settled = Snapshot((mine, LEFT)).settle()
    assert [one.taken for one in settled.ranks[0].posted] == taken


# -- the finding of a moment


ROW = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["irecv", "barrier", "all_reduce"]),
    st.integers(0, 2),
    st.booleans(),
)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    rows=st.lists(ROW, min_size=2, max_size=6),
    states=st.tuples(*[st.sampled_from(["blocked", "running", "exited", "killed"])] * 3),
)
def test_whoever_is_stuck_has_a_finding(
    rows: list[tuple[int, str, int, bool]], states: tuple[str, ...]
) -> None:
    """Also behind a rank that has posted another collective and computes."""
    story = Story(3)
    for rank, op, peer, awaited in rows:
        story.op(rank, op, (0, 5 if awaited else -1, -1), peer=peer, group="world")
    ends = {rank: (state, "") for rank, state in enumerate(states)}
    snapshot = snapshot_of_events(story.trace().events, 3, ends)
    stuck = analyse(snapshot)
    if stuck is not None:
        findings = judge(snapshot, stuck).findings
        named = {
            rank for one in findings for each in (one, *one.consequences) for rank in each.ranks
        }
        assert named >= set(stuck.ranks)


def said(*views: RankSnapshot) -> str:
    return str(judge(Snapshot(views)))


@pytest.mark.parametrize(("counterparts", "meant"), [(0, True), (1, False)])
def test_what_has_met_its_other_side_is_meant_for_no_other(counterparts: int, meant: bool) -> None:
    third = waits(post(2, "send", 0, counterparts=counterparts))
    words = said(receives(0, 1), receives(1, 0), third)
    assert ("Check peer 1 of rank 0's recv" in words) is meant


@pytest.mark.parametrize(("taken", "kind"), [(False, "tag mismatch"), (True, "deadlock")])
def test_what_others_have_got_is_no_counterpart(taken: bool, kind: str) -> None:
    theirs = post(1, "recv", 0, tag=2, counterparts=1, index=1, taken=taken)
    assert said(waits(post(0, "send", 1, tag=1)), waits(theirs)).startswith(f"{kind}: ")


def test_the_plainest_mismatch_of_a_circle_is_named() -> None:
    """The isend of rank 0 also fits, but the send and the recv are both awaited."""
    first = waits(post(0, "recv", 1, tag=7), post(0, "send", 1, tag=1))
    second = waits(post(1, "isend", 0, tag=8, awaited=False), post(1, "recv", 0, tag=2))
    words = said(first, second)
    assert words.startswith(
        "tag mismatch: rank 0 sends with tag 1, but rank 1 receives with tag 2.\n"
        "  rank 0 posted send to 1 (tag 1)\n"
        "  rank 1 posted recv from 0 (tag 2)\n"
    )


def test_another_group_than_that_of_a_rank_that_has_left() -> None:
    words = said(LEFT, makes(1, (0, 1, 2), (0, (0, 1))), RUNS)
    assert words.startswith(
        "group order mismatch: the ranks create different groups as group number 1.\n"
        "  rank 1 calls new_group (ranks[0,1,2])\n"
        "  rank 0 calls new_group (ranks[0,1])\n"
    )


# -- the cost of the analysis


def in_a_call(size: int, missing: tuple[int, ...], state: str, *, kinds: int = 1) -> Snapshot:
    """All ranks but some wait in a collective, of one kind or of several."""
    group = Group("world", tuple(range(size)))
    posted = [Operation(rank, CALLS[rank % kinds], group="world") for rank in range(size)]
    entered = tuple(one for one in posted if one.rank not in missing)
    return Snapshot(
        tuple(
            RankSnapshot(state)
            if one.rank in missing
            else waits(OpenOperation(one, group, awaited=True, entered=entered))
            for one in posted
        )
    )


WORLDS: dict[str, Callable[[int], Snapshot]] = {
    "all are there": lambda size: in_a_call(size, (), "exited"),
    "half have left": lambda size: in_a_call(size, tuple(range(0, size, 2)), "exited"),
    "two kinds": lambda size: in_a_call(size, (), "exited", kinds=2),
    "a ring": lambda size: Snapshot(
        tuple(
            receives(rank, (rank + 1) % size, Group("world", tuple(range(size))))
            for rank in range(size)
        )
    ),
}


def count_work(call: Callable[[], Any]) -> int:
    """Returns the number of lines of the analysis that a call executes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != waitfor.__file__:
            return None
        lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("name", list(WORLDS))
def test_work_grows_with_the_ranks_and_not_with_their_square(name: str) -> None:
    few, many = (WORLDS[name](size) for size in (64, 256))
    assert count_work(lambda: analyse(many)) < 5 * count_work(lambda: analyse(few))


def test_all_members_of_a_call_share_what_is_known_of_it(tmp_path: Path) -> None:
    """Otherwise, each look and each pass over a trace would compare all pairs."""
    size = 5
    writers = [Writer(tmp_path, rank, size) for rank in range(size)]
    for rank, writer in enumerate(writers):
        # rank 0 has not reached the second
        for op in ("all_reduce", "barrier")[: 2 if rank else 1]:
            writer.post(op, 0, NONE, NONE)
            writer.act("wait", -1)
    live = LiveRecords(tmp_path, size)
    live.look()
    now = live.builder.build(["running"] * size, 0)
    events, _ = read_parts(tmp_path, start_ns=0, world_size=size)
    for world in (now, snapshot_of_events(events, size)):
        for op, members in (("all_reduce", [0, 1, 2, 3, 4]), ("barrier", [1, 2, 3, 4])):
            entered = [
                one.entered for view in world.ranks for one in view.posted if one.operation.op == op
            ]
            assert len({id(one) for one in entered}) == 1
            assert [one.rank for one in entered[0]] == members
    for writer in writers:
        writer.recorder.close()
