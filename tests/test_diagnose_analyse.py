"""The wait-for analysis against its own rules, applied one by one until nothing changes.

Also how much work it takes for many ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from part_writer import Writer

from ringsim.diagnose import waitfor
from ringsim.diagnose.snapshot import Posted, RankSnapshot, Snapshot, snapshot_of_events
from ringsim.diagnose.waitfor import Hindrance, analyse, find_cycle
from ringsim.launch.watcher import LiveRecords
from ringsim.traces.events import ANY_SOURCE, NONE, Group
from ringsim.traces.findings import Operation
from ringsim.traces.runs import read_parts

CALLS = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "new_group")


WORLD, PAIR = Group("world", (0, 1, 2, 3)), Group("pair", (0, 1))


def view(rank: int, *waits: tuple[str, int], group: Group = WORLD, **more: Any) -> RankSnapshot:
    return RankSnapshot(
        "blocked",
        tuple(
            Posted(Operation(rank, op, peer=peer, tag=0), group, awaited=True, **more)
            for op, peer in waits
        ),
    )


def both(rank: int) -> RankSnapshot:
    """One thread waits for a message that is not posted, another for one that is."""
    first, second = view(rank, ("recv", 1)), view(rank, ("send", 1), counterparts=1, thread=1)
    return RankSnapshot("blocked", (*first.posted, *second.posted))


def calls(rank: int, op: str, *entered: tuple[int, str]) -> RankSnapshot:
    return view(
        rank, (op, NONE), entered=tuple(Operation(other, theirs) for other, theirs in entered)
    )


def makes(
    rank: int, members: tuple[int, ...], *entered: tuple[int, tuple[int, ...]]
) -> RankSnapshot:
    others = tuple(Operation(other, "new_group", shape=theirs) for other, theirs in entered)
    mine = Posted(Operation(rank, "new_group", shape=members), WORLD, awaited=True, entered=others)
    return RankSnapshot("blocked", (mine,))


RUNS, LEFT, KILLED = RankSnapshot("running"), RankSnapshot("exited"), RankSnapshot("killed")


@pytest.mark.parametrize(
    ("views", "ranks", "cycle"),
    [
        ((view(0, ("recv", 1)), view(1, ("recv", 2)), RUNS), (), ()),
        ((view(0, ("recv", 1)), RankSnapshot("stopped")), (), ()),
        ((view(0, ("recv", 1)), LEFT, view(2, ("send", 0))), (0, 2), ()),
        ((view(0, ("recv", 1)), RankSnapshot("failed"), view(2, ("send", 0))), (0, 2), ()),
        # what has been posted still arrives, unless the peer is dead
        ((view(0, ("recv", 1), counterparts=1), LEFT), (), ()),
        ((view(0, ("recv", 1), counterparts=1), KILLED), (0,), ()),
        ((view(0, ("recv", 1), counterparts=1), RankSnapshot("failed")), (0,), ()),
        ((calls(0, "barrier", (1, "barrier")), RankSnapshot("failed"), RUNS, RUNS), (0,), ()),
        # there is no sender to wait for
        ((view(0, ("recv", ANY_SOURCE), group=Group("alone", (0,))), LEFT), (), ()),
        # the thread whose message is on its way may send the other afterwards
        ((both(0), view(1, ("recv", 0))), (), ()),
        ((both(0), KILLED), (0,), ()),
        # a batch needs all its operations
        ((view(0, ("recv", 1), ("recv", 2)), RUNS, view(2, ("recv", 0))), (0, 2), (0, 2)),
        # one sender is enough
        ((view(0, ("recv", ANY_SOURCE)), view(1, ("recv", 0)), RUNS, LEFT), (), ()),
        ((view(0, ("recv", ANY_SOURCE)), view(1, ("recv", 0)), LEFT, LEFT), (0, 1), (0, 1)),
        (
            (calls(0, "barrier", (1, "barrier")), calls(1, "barrier", (0, "barrier")), RUNS, RUNS),
            (),
            (),
        ),
        (
            (calls(0, "barrier", (1, "barrier")), calls(1, "barrier", (0, "barrier")), LEFT, RUNS),
            (0, 1),
            (),
        ),
        (
            (
                calls(0, "barrier", (1, "all_reduce")),
                calls(1, "all_reduce", (0, "barrier")),
                RUNS,
                RUNS,
            ),
            (0, 1),
            (0, 1),
        ),
        # anybody of its own group
        (
            (view(0, ("recv", ANY_SOURCE), group=PAIR), LEFT, RUNS, view(3, ("recv", ANY_SOURCE))),
            (0,),
            (),
        ),
        ((makes(0, (0, 1)), RUNS, LEFT, LEFT), (), ()),  # the members alone
        ((makes(0, (0, 1)), LEFT, makes(2, (2, 3)), RUNS), (0,), ()),
        # rank 2 may yet make [1, 2] with rank 1
        ((makes(0, (0, 1), (1, (1, 2))), makes(1, (1, 2), (0, (0, 1))), RUNS), (0,), ()),
        # peers out of the world are nobody's fault
        ((view(0, ("send", 7)), view(1, ("recv", -1))), (), ()),
        (
            tuple(view(rank, ("recv", peer)) for rank, peer in enumerate([1, 2, 3, 0, 5, 4, 0])),
            tuple(range(7)),
            (4, 5),
        ),
    ],
)
def test_who_is_stuck_by_hand(
    views: tuple[RankSnapshot, ...], ranks: tuple[int, ...], cycle: tuple[int, ...]
) -> None:
    stuck = analyse(Snapshot(views))
    assert (stuck.ranks, stuck.cycle) == (ranks, cycle) if stuck is not None else ranks == ()


@pytest.mark.parametrize(("members", "stuck"), [((0, 1), True), ((0, 1, 5), False)])
def test_a_member_of_which_nothing_is_known_may_send(members: tuple[int, ...], stuck: bool) -> None:
    group = Group("some", members)
    views = [
        RankSnapshot("blocked", (Posted(Operation(rank, "recv", peer=peer), group, awaited=True),))
        for rank, peer in ((0, ANY_SOURCE), (1, 0))
    ]
    assert (analyse(Snapshot(tuple(views))) is not None) is stuck


def test_a_cycle_starts_at_its_lowest_rank_in_whatever_order_it_is_given() -> None:
    one = Posted(Operation(0, "recv"), WORLD, awaited=True)
    links = [Hindrance(rank, one, (peer,)) for rank, peer in ((2, 0), (1, 2), (0, 1))]
    assert find_cycle(links) == (0, 1, 2)


def test_a_recv_that_can_still_be_served_is_no_reason() -> None:
    stuck = analyse(Snapshot((view(0, ("recv", ANY_SOURCE), ("recv", 1)), LEFT, RUNS, RUNS)))
    assert stuck is not None
    assert [(one.posted.operation.peer, one.peers) for one in stuck.hindrances] == [(1, (1,))]


DOUBTFUL, SURE, LACKING = {"counterparts": 1, "contested": 1}, {"counterparts": 1}, {}


@pytest.mark.parametrize(
    ("batch", "taken"),
    [
        ([DOUBTFUL], [True]),
        ([SURE, DOUBTFUL], [False, True]),
        ([SURE], [False]),
        ([DOUBTFUL, DOUBTFUL], [False, False]),  # either may be what is missing
        ([DOUBTFUL, LACKING], [False, False]),
    ],
)
def test_at_rest_the_only_one_in_doubt_is_taken(
    batch: list[dict[str, int]], taken: list[bool]
) -> None:
    posted = tuple(one for facts in batch for one in view(0, ("recv", 1), **facts).posted)
    settled = Snapshot((RankSnapshot("blocked", posted), LEFT)).settle()
    assert [one.taken for one in settled.ranks[0].posted] == taken


def shortest_cycle(edges: set[tuple[int, int]], size: int) -> int:
    """Length of a shortest cycle, 0 for none.

    The first power of the graph that leads from a rank back to itself.
    """
    reached = {(rank, rank) for rank in range(size)}
    for length in range(1, size + 1):
        reached = {
            (start, end) for start, middle in reached for begin, end in edges if begin == middle
        }
        if any(start == end for start, end in reached):
            return length
    return 0


@given(
    st.integers(1, 7).flatmap(
        lambda size: st.tuples(
            st.just(size), st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
        )
    )
)
def test_the_cycle_is_a_shortest_one(graph: tuple[int, set[tuple[int, int]]]) -> None:
    size, edges = graph
    one = Posted(Operation(0, "barrier"), Group("", ()), awaited=True)
    links = [
        waitfor.Hindrance(rank, one, tuple(sorted(peer for start, peer in edges if start == rank)))
        for rank in range(size)
    ]
    cycle = find_cycle(links)
    assert len(cycle) == shortest_cycle(edges, size)
    assert all(edge in edges for edge in pairwise([*cycle, *cycle[:1]]))
    assert cycle == () or cycle[0] == min(cycle)


def in_a_call(size: int, missing: tuple[int, ...], state: str, *, kinds: int = 1) -> Snapshot:
    """All ranks but some wait in a collective, of one kind or of several."""
    group = Group("world", tuple(range(size)))
    posted = [Operation(rank, CALLS[rank % kinds], group="world") for rank in range(size)]
    entered = tuple(one for one in posted if one.rank not in missing)
    return Snapshot(
        tuple(
            RankSnapshot(state)
            if one.rank in missing
            else RankSnapshot("blocked", (Posted(one, group, awaited=True, entered=entered),))
            for one in posted
        )
    )


def in_messages(size: int, peers: Callable[[int], int]) -> Snapshot:
    group = Group("world", tuple(range(size)))
    return Snapshot(
        tuple(
            RankSnapshot(
                "blocked", (Posted(Operation(rank, "recv", peers(rank), 0), group, awaited=True),)
            )
            for rank in range(size)
        )
    )


WORLDS: dict[str, Callable[[int], Snapshot]] = {
    "all are there": lambda size: in_a_call(size, (), "exited"),
    "one computes": lambda size: in_a_call(size, (3,), "running"),
    "one has left": lambda size: in_a_call(size, (3,), "exited"),
    "half have left": lambda size: in_a_call(size, tuple(range(0, size, 2)), "exited"),
    "two kinds": lambda size: in_a_call(size, (), "exited", kinds=2),
    "a ring": lambda size: in_messages(size, lambda rank: (rank + 1) % size),
}


def count_work(call: Callable[[], Any]) -> int:
    """Returns how many lines of the analysis a call executes."""
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
    """A barrier of 256 ranks took 2.5 million steps at each look."""
    few, many = (WORLDS[name](size) for size in (64, 256))
    assert count_work(lambda: analyse(many)) < 5 * count_work(lambda: analyse(few))


def test_all_members_of_a_call_share_what_is_known_of_it(tmp_path: Path) -> None:
    """Else each would be looked at by each.

    256 ranks in a barrier made 65,000 operations at each look, and 256 passes over a trace.
    """
    size = 5
    writers = [Writer(tmp_path, rank, size) for rank in range(size)]
    for rank, writer in enumerate(writers):
        # rank 0 has not come to the second
        for op in ("all_reduce", "barrier")[: 2 if rank else 1]:
            writer.post(op, 0, NONE, NONE)
            writer.act("wait", -1)
    live = LiveRecords(tmp_path, size)
    live.look()
    now = live.builder.build(["running"] * size, 0)
    events, _ = read_parts(tmp_path, start_ns=0, world_size=size)
    for world in (now, snapshot_of_events(events, size)):
        calls = [
            [one.entered for one in view.posted if one.operation.op == op]
            for op in ("all_reduce", "barrier")
            for view in world.ranks
        ]
        shared = [calls[:size], calls[size:]]
        assert [len({id(entered) for its in call for entered in its}) for call in shared] == [1, 1]
        assert [[one.rank for one in call[1][0]] for call in shared] == [
            [0, 1, 2, 3, 4],
            [1, 2, 3, 4],
        ]
    for writer in writers:
        writer.recorder.close()
