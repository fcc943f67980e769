"""What a diagnosis calls a mistake, whom it names, and how it reads.

For programs that the machine has run to their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_machine import Instruction, Machine

from ringsim import Trace
from ringsim.diagnose.explain import explain
from ringsim.diagnose.snapshot import End, Posted, RankSnapshot, Snapshot, snapshot_of_events, until
from ringsim.diagnose.verdict import blame_threads, judge
from ringsim.diagnose.waitfor import analyse
from ringsim.traces.events import (
    ANY_SOURCE,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    Group,
    Tables,
    make_events,
)
from ringsim.traces.findings import Diagnosis, Finding, Operation

SEND, RECV = "send", "recv"
ANY = ANY_SOURCE
BARRIER: Instruction = ("barrier", 0)


def diagnose(
    *programs: list[Instruction], ends: dict[int, tuple[str, str, str]] | None = None
) -> Diagnosis:
    """Runs programs until nobody can go on and explains what was recorded.

    Group 0 is the world, 1 and 2 hold ranks 0 and 1.
    """
    size = len(programs)
    groups = (
        Group("world", tuple(range(size))),
        Group("ring:0>1", (0, 1)),
        Group("ring:1>0", (0, 1)),
    )
    machine = Machine(programs, groups)
    machine.run(lambda ranks: ranks[0])
    known = dict.fromkeys(machine.finished, ("exited", "has returned from its worker", "")) | (
        ends or {}
    )
    said = [
        {"rank": rank, "state": state, "about": about, "error": error}
        for rank, (state, about, error) in known.items()
    ]
    return explain(
        Trace(
            machine.events(), {"world_size": size, "ends": said, "complete": not machine.unfinished}
        )
    )


def root(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...]]:
    return diagnosis.findings[0].kind, diagnosis.findings[0].ranks


RANKS = 3
ROW = st.fixed_dictionaries(
    {
        "rank": st.integers(0, RANKS - 1),
        "op": st.sampled_from(["irecv", "barrier", "all_reduce"]),
        "peer": st.integers(0, RANKS - 1),
        "wait_ns": st.sampled_from([-1, 5]),
    }
)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    rows=st.lists(ROW, min_size=2, max_size=6),
    states=st.tuples(*[st.sampled_from(["blocked", "running", "exited", "killed"])] * RANKS),
)
def test_whoever_is_stuck_has_a_finding(
    rows: list[dict[str, Any]], states: tuple[str, ...]
) -> None:
    """A rank that had posted another collective, and computed, was no reason.

    A verdict said that nothing was wrong.
    """
    columns = {name: [row[name] for row in rows] for name in ("rank", "peer", "wait_ns")}
    columns |= {
        "op": [OP_CODES[row["op"]] for row in rows],
        "group": [0] * len(rows),
        "status": [IN_FLIGHT] * len(rows),
    }
    events = make_events(columns, Tables(groups=(Group("world", tuple(range(RANKS))),)))
    ends = {rank: End(state, "") for rank, state in enumerate(states)}
    snapshot = snapshot_of_events(events, RANKS, ends)
    stuck = analyse(snapshot)
    if stuck is not None:
        findings = judge(snapshot, stuck).findings
        named = {
            rank for one in findings for each in (one, *one.consequences) for rank in each.ranks
        }
        assert named >= set(stuck.ranks)


def all_round(size: int, *program: Callable[[int], Instruction]) -> list[list[Instruction]]:
    """Programs that are alike on all ranks: each instruction is made of the rank's number."""
    return [[make(rank) for make in program] for rank in range(size)]


WAITS_FOR_THE_SECOND = [("isend", 1, 5, 0), ("irecv", 1, 5, 0), ("wait", 0)]
POSTED_6 = [("isend", 0, 6, 0), ("irecv", 0, 6, 0)]
GOES_ON = {0: ("exited", "left with sys.exit(0) (train.py, line 7, in step)", "SystemExit")}
RAISED = {0: ("failed", "raised ValueError: no such layer", "ValueError")}
DIED = {0: ("killed", "was ended by signal 9 (SIGKILL)", "")}


@pytest.mark.parametrize(
    ("programs", "ends", "kind", "ranks", "echoes", "words"),
    [
        # ranks that wait for each other
        (
            [[(SEND, 1, 0, 0)], [(SEND, 0, 0, 0)]],
            {},
            "deadlock",
            (0, 1),
            [],
            ["A send returns only once the other side has posted"],
        ),
        (
            [[(RECV, 1, 0, 0)], [(RECV, 0, 0, 0)], [(RECV, 1, 0, 0)], [(RECV, 2, 0, 0)]],
            {},
            "deadlock",
            (0, 1),
            [(2,), (3,)],
            [],
        ),
        (
            all_round(30, lambda rank: (RECV, (rank + 1) % 30, 0, 0)),
            {},
            "deadlock",
            tuple(range(30)),
            [],
            ["and 26 more alike"],
        ),
        (
            [[("barrier", 1), BARRIER], [BARRIER, ("barrier", 1)]],
            {},
            "deadlock",
            (0, 1),
            [],
            ["ring:0>1"],
        ),
        # each listens for a word under tag 99 all the time, which is not the other side; and in the
        # second round both send first
        (
            [
                [("irecv", 1, 99, 0), (SEND, 1, 0, 0), (RECV, 1, 0, 0), (SEND, 1, 0, 0)],
                [("irecv", 0, 99, 0), (RECV, 0, 0, 0), (SEND, 0, 0, 0), (SEND, 0, 0, 0)],
            ],
            *({}, "deadlock", (0, 1), [], ["Let one of them receive first"]),
        ),
        # other tags
        (
            [[(SEND, 1, 1, 0)], [(RECV, 0, 2, 0)]],
            {},
            "tag_mismatch",
            (0, 1),
            [],
            ["tag 1 is not tag 2", "same tag: 1 or 2."],
        ),
        (
            [[("isend", 1, 1, 0)], [(RECV, 0, 2, 0)]],
            {},
            "tag_mismatch",
            (0, 1),
            [],
            ["Rank 0 has returned from its worker."],
        ),
        (
            [[(SEND, 1, 1, 0), (SEND, 1, 2, 0)], [(RECV, 0, 2, 0), (RECV, 0, 1, 0)]],
            {},
            "tag_mismatch",
            (0, 1),
            [],
            [],
        ),
        ([[(RECV, ANY, 1, 0)], [(SEND, 0, 2, 0)]], {}, "tag_mismatch", (0, 1), [], []),
        (
            [[(RECV, ANY, 1, 0)], [("isend", 0, 2, 0)]],
            {},
            "tag_mismatch",
            (0, 1),
            [],
            ["Rank 1 has returned"],
        ),
        *(
            (
                [WAITS_FOR_THE_SECOND, [*POSTED_6, waits]],
                {},
                "tag_mismatch",
                (0, 1),
                [],
                ["isend to 1 (world, tag 5", "same tag: 5 or 6."],
            )
            for waits in (("wait", 0), ("wait", 1), ("wait_all",), BARRIER)
        ),
        (
            all_round(
                4,
                lambda r: ("irecv", (r - 1) % 4, r, 0),
                lambda r: ("isend", (r + 1) % 4, r, 0),
                lambda _: ("wait", 1),
            ),
            *(
                {},
                "tag_mismatch",
                (0, 1, 2, 3),
                [],
                ["tag 0 is not tag 1. The same holds for 3 more pairs of ranks."],
            ),
        ),
        # other groups
        (
            [[(SEND, 1, 0, 1)], [(RECV, 0, 0, 0)]],
            {},
            "group_mismatch",
            (0, 1),
            [],
            ["Use one group on both sides: group ring:0>1 or group w"],
        ),
        ([[(RECV, ANY, 1, 0)], [(SEND, 0, 1, 1)]], {}, "group_mismatch", (0, 1), [], []),
        (
            [[(RECV, ANY, 1, 0)], [("isend", 0, 1, 1)]],
            {},
            "group_mismatch",
            (0, 1),
            [],
            ["Rank 1 has returned"],
        ),
        (
            [[("isend", 1, 0, 1), (RECV, 1, 0, 1)], [("isend", 0, 0, 2), (RECV, 0, 0, 2)]],
            {},
            "group_mismatch",
            (0, 1),
            [],
            ["ring:1>0"],
        ),
        (
            all_round(
                2,
                lambda r: ("isend", 1 - r, 0, 1 + r),
                lambda r: ("irecv", 1 - r, 0, 1 + r),
                lambda _: ("wait", 0),
            ),
            *({}, "group_mismatch", (0, 1), [], []),
        ),
        # who has posted both sides is not told to post them, and what is missing is counted
        (
            [
                [("isend", 1, 0, 0), ("irecv", 1, 0, 0), ("wait_all",)],
                [("irecv", 0, 0, 0), ("irecv", 0, 0, 0), ("wait_all",)],
            ],
            *({}, "deadlock", (0, 1), []),
            [
                (
                    "Rank 1 posted no send for it (group world, tag 0), and "
                    "this is irecv number 1 of rank 0"
                ),
                "Rank 0 posted only 1 send for it",
            ],
        ),
        # peers that are gone
        (
            [[], [(RECV, 0, 0, 0), (SEND, 2, 0, 0)], [(RECV, 1, 0, 0)]],
            {},
            "peer_exited",
            (0, 1),
            [(2,)],
            ["Rank 0 posted no send for it"],
        ),
        (
            [[], [(RECV, 0, 0, 0)]],
            GOES_ON,
            "peer_exited",
            (0, 1),
            [],
            ["Rank 0 ended in the middle of its worker: let it do"],
        ),
        (
            [[(SEND, 1, 0, 0)] * 2, [(RECV, 0, 0, 0)] * 3],
            {},
            "peer_exited",
            (0, 1),
            [],
            ["only 2 sends for it", "recv number 3 of rank 1"],
        ),
        (
            [[(SEND, 2, 5, 0)], [(RECV, 0, 5, 0)], []],
            {},
            "peer_exited",
            (2, 0),
            [(1,)],
            ["should the send of rank 0 go there?"],
        ),
        (
            [[], [(RECV, 0, 0, 0)], [(RECV, 1, 0, 0)]],
            RAISED,
            "rank_failed",
            (0,),
            [(1,), (2,)],
            ["rank 0 raised ValueError: no such layer."],
        ),
        ([[], [(RECV, 0, 0, 0)]], DIED, "peer_exited", (0, 1), [], ["SIGKILL"]),
        (
            [[(RECV, 1, 0, 0)], [("isend", 0, 1, 0)]],
            {1: ("running", "", "")},
            "stalled",
            (1, 0),
            [],
            ["Meanwhile rank 1 was busy"],
        ),
        # collectives
        (
            [[BARRIER], [BARRIER], []],
            {},
            "missing_participant",
            (2, 0, 1),
            [],
            ["ranks 0 and 1 wait in barrier (world"],
        ),
        ([[BARRIER], [BARRIER], [(RECV, 0, 0, 0)]], {}, "collective_mismatch", (0, 2), [(1,)], []),
        (
            [[BARRIER] * 2, [BARRIER, ("all_reduce", 0)]],
            {},
            "collective_mismatch",
            (0, 1),
            [],
            ["as collective 2 of group world: the kind"],
        ),
        *(
            (
                [[(SEND, 1, 0, 0), BARRIER], *[[BARRIER]] * (size - 1)],
                *({}, "collective_mismatch", (0, 1), [(rank,) for rank in range(2, size)]),
                [
                    (
                        "Let rank 1 post the recv before its barrier at program.py:1, "
                        "or leave this send"
                    ),
                    "let rank 0 call that first, too.",
                ],
            )
            for size in (2, 4)
        ),
        (
            [[*[(SEND, 1, 0, 0)] * 2, BARRIER], [*[(RECV, 0, 0, 0)] * 3, BARRIER]],
            *(
                {},
                "collective_mismatch",
                (0, 1),
                [],
                [
                    (
                        "Rank 0 posted only 2 sends for it (group world, tag "
                        "0), and this is recv number 3"
                    )
                ],
            ),
        ),
        (
            [[(RECV, ANY, 0, 0), BARRIER], [BARRIER]],
            {},
            "collective_mismatch",
            (0, 1),
            [],
            ["Nobody has posted a send for the recv of rank 0."],
        ),
        (
            [[BARRIER], [(RECV, 2, 0, 0), BARRIER], [(RECV, 0, 0, 0), (SEND, 1, 0, 0), BARRIER]],
            *(
                {},
                "collective_mismatch",
                (0, 1, 2),
                [],
                ["Let rank 0 post the send before its barrier"],
            ),
        ),
    ],
)
def test_what_a_mistake_is_called(
    programs: list[list[Instruction]],
    ends: dict[int, tuple[str, str, str]],
    kind: str,
    ranks: tuple[int, ...],
    echoes: list[tuple[int, ...]],
    words: list[str],
) -> None:
    diagnosis = diagnose(*programs, ends=ends)
    finding, *others = diagnosis.findings
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert {one.kind for one in others} <= {"leaked_request"}  # what it left open when it returned
    assert [one.ranks for one in finding.consequences] == echoes
    for each in words:
        assert each in str(diagnosis)
    assert len(str(diagnosis)) < 2000


def test_both_sides_of_a_mismatch_are_named_and_order_is_no_matter_where_all_is_posted_at_once() -> (  # noqa: E501
    None
):
    (finding,) = diagnose([(SEND, 1, 1, 0)], [(RECV, 0, 2, 0)]).findings
    assert [(one.rank, one.op, one.peer, one.tag, one.line) for one in finding.operations] == [
        (0, "send", 1, 1, 1),
        (1, "recv", 0, 2, 1),
    ]
    sender: list[Instruction] = [("isend", 1, 1, 0), ("isend", 1, 2, 0), ("wait", 0), ("wait", 1)]
    assert diagnose(sender, [(RECV, 0, 2, 0), (RECV, 0, 1, 0)]).findings == ()


def test_who_has_posted_both_sides_all_round_the_ring_is_told_who_may_be_meant() -> None:
    programs: list[list[Instruction]] = [
        [("isend", (rank + 1) % 4, 0, 0), ("irecv", (rank + 1) % 4, 0, 0), ("wait", 0), ("wait", 1)]
        for rank in range(4)
    ]
    diagnosis = diagnose(*programs)
    assert root(diagnosis) == ("deadlock", (0, 1, 2, 3))
    lines = diagnosis.findings[0].hint.splitlines()
    assert lines[0].startswith(
        "Rank 1 posted no recv for it (group world, tag 0), and this is isend number 1 of rank 0: "
    )
    assert lines[2].startswith("Rank 3 has posted irecv from 0 ")
    assert lines[2].endswith("should the isend of rank 0 go there? Its peer is 1.")
    assert len(lines) == 4


@pytest.mark.parametrize(("place", "tried"), [(0, False), (1, True)])
@pytest.mark.parametrize("state", ["exited", "blocked"])
def test_a_send_that_was_refused_is_not_called_missing(state: str, place: int, tried: bool) -> None:
    """The recv that waits is the second one.

    Another of the first send, that raised, was posted in its place.
    """
    world = Group("world", (0, 1))
    raised = Posted(
        Operation(0, SEND, peer=1, tag=3, group="world", file="train.py", line=7),
        world,
        awaited=False,
        index=place,
    )
    waits = Posted(
        Operation(1, RECV, peer=0, tag=3, group="world"),
        world,
        awaited=True,
        index=1,
        counterparts=1,
    )
    barrier = Posted(
        Operation(0, "barrier", group="world"),
        world,
        awaited=True,
        entered=(Operation(0, "barrier", group="world"),),
    )
    other = RankSnapshot(state, (barrier,) if state == "blocked" else (), refused=(raised,))
    said = str(judge(Snapshot((other, RankSnapshot("blocked", (waits,))))))
    assert (
        "Rank 0 tried: its send to 1 (world, tag 3) at train.py:7 raised an error" in said
    ) is tried
    assert ("Rank 0 posted only 1 send for it" in said) is not tried


@pytest.mark.parametrize(
    ("wait_ns", "done_ns", "then"),
    [
        ([4, 4], [6, 20], ([4, 4], [6, NONE], [OK, IN_FLIGHT])),
        ([4, 15], [6, 20], ([4, NONE], [6, NONE], [OK, IN_FLIGHT])),
        # it was kept if nothing else came later
        ([4, 15], [6, NONE], ([4, NONE], [6, NONE], [OK, IN_FLIGHT])),
        ([4, 10], [6, 10], ([4, 10], [6, 10], [OK, OK])),
    ],
)
def test_what_came_after_a_moment_is_left_out(
    wait_ns: list[int], done_ns: list[int], then: tuple[list[int], ...]
) -> None:
    columns = {
        "rank": [0, 1],
        "op": [OP_CODES["isend"], OP_CODES["irecv"]],
        "peer": [1, 0],
        "post_ns": [1, 2],
    }
    status = [IN_FLIGHT if done == NONE else OK for done in done_ns]
    events = until(
        make_events({**columns, "wait_ns": wait_ns, "done_ns": done_ns, "status": status}), 10
    )
    assert (events.wait_ns.tolist(), events.done_ns.tolist(), events.status.tolist()) == then


@pytest.mark.parametrize(
    ("about", "error", "message"),
    [
        # which says where
        (
            "raised ValueError: no such layer",
            "ValueError",
            "rank 0 raised ValueError: no such layer.",
        ),
        ("", "", "rank 0 has failed. The last that rank 0 posted was send to 1 (world, tag 0"),
    ],
)
def test_what_a_rank_that_failed_posted_last_is_told_if_its_error_does_not_say_where(
    about: str, error: str, message: str
) -> None:
    diagnosis = diagnose(
        [(SEND, 1, 0, 0)], [(RECV, 0, 0, 0), (RECV, 0, 0, 0)], ends={0: ("failed", about, error)}
    )
    said = diagnosis.findings[0].message
    assert said.startswith(message)
    assert ("The last" in said) is (about == "")


def test_failures_come_in_order_of_time_and_those_of_unknown_time_last() -> None:
    states: list[tuple[str, int | None]] = [
        ("failed", 9),
        ("killed", None),
        ("killed", 5),
        ("failed", None),
    ]
    views = tuple(RankSnapshot(state, end=End(state, at_ns=at_ns)) for state, at_ns in states)
    assert [one.ranks for one in judge(Snapshot(views)).findings] == [(2,), (0,), (3,), (1,)]


def receives(rank: int, peer: int) -> RankSnapshot:
    operation = Operation(rank, RECV, peer=peer, tag=0, group="world")
    return RankSnapshot(
        "blocked", (Posted(operation, Group("world", tuple(range(6))), awaited=True),)
    )


@pytest.mark.parametrize(
    ("killed_ns", "kinds"),
    [
        (5, ["peer_exited", "rank_failed", "deadlock"]),
        (12, ["rank_failed", "peer_exited", "deadlock"]),
        (None, ["rank_failed", "deadlock", "peer_exited"]),
    ],
)
def test_who_was_killed_takes_its_turn_among_the_failures_if_it_is_known_when(
    killed_ns: int | None, kinds: list[str]
) -> None:
    ended = (
        RankSnapshot("failed", end=End("failed", at_ns=9)),
        RankSnapshot("killed", end=End("killed", at_ns=killed_ns)),
    )
    snapshot = Snapshot((*ended, receives(2, 0), receives(3, 1), receives(4, 5), receives(5, 4)))
    assert [one.kind for one in judge(snapshot).findings] == kinds


@pytest.mark.parametrize(("tag", "meant"), [(5, True), (6, False)])
def test_another_rank_may_be_meant_if_it_waits_under_the_same_tag(tag: int, meant: bool) -> None:
    said = str(diagnose([(SEND, 2, 5, 0)], [(RECV, 0, tag, 0)], []))
    assert ("should the send of rank 0 go there?" in said) is meant


def posts(op: str, rank: int, peer: int, tag: int, **known: Any) -> Posted:
    operation = Operation(rank, op, peer=peer, tag=tag, group="world")
    return Posted(operation, Group("world", (0, 1, 2)), **{"awaited": True, **known})


def blocked(*posted: Posted) -> RankSnapshot:
    return RankSnapshot("blocked", posted)


@pytest.mark.parametrize(("counterparts", "meant"), [(0, True), (1, False)])
def test_what_has_met_its_other_side_is_meant_for_no_other(counterparts: int, meant: bool) -> None:
    third = posts(SEND, 2, 0, 5, counterparts=counterparts)
    ring = blocked(posts(RECV, 0, 1, 5)), blocked(posts(RECV, 1, 0, 5))
    said = str(judge(Snapshot((*ring, blocked(third)))))
    assert ("should the recv of rank 0 go there?" in said) is meant


@pytest.mark.parametrize(("taken", "kind"), [(False, "tag_mismatch"), (True, "deadlock")])
def test_what_others_have_got_is_no_counterpart(taken: bool, kind: str) -> None:
    theirs = posts(RECV, 1, 0, 2, counterparts=1, index=1, taken=taken)
    diagnosis = judge(Snapshot((blocked(posts(SEND, 0, 1, 1)), blocked(theirs))))
    assert root(diagnosis)[0] == kind


def test_the_plainest_mismatch_of_a_circle_is_named() -> None:
    """Rank 0 might have meant the isend, but the send and the recv are both awaited."""
    first = blocked(posts(RECV, 0, 1, 7), posts(SEND, 0, 1, 1))
    second = blocked(posts("isend", 1, 0, 8, awaited=False), posts(RECV, 1, 0, 2))
    (finding,) = judge(Snapshot((first, second))).findings
    assert finding.message.startswith("rank 0's send to 1 (world, tag 1")
    assert "tag 1 is not tag 2" in finding.message


def test_the_end_of_a_thread_is_why_all_stand_still_also_of_ranks_that_do_not_name_it() -> None:
    for kind, blamed in (("stalled", True), ("deadlock", False)):
        found = Finding(kind, (0, 1), (), "ranks 0 and 1 wait.")
        kinds = [
            one.kind for one in blame_threads([found], {2: "raised ValueError: no such layer"})
        ]
        assert kinds == (["rank_failed"] if blamed else [kind])


def test_other_group_than_that_of_a_rank_that_has_left() -> None:
    theirs = Operation(0, "new_group", shape=(0, 1), file="train.py", line=3)
    mine = Operation(1, "new_group", shape=(0, 1, 2), file="train.py", line=5)
    waits = RankSnapshot(
        "blocked", (Posted(mine, Group("all", (0, 1, 2)), awaited=True, entered=(theirs,)),)
    )
    diagnosis = judge(Snapshot((RankSnapshot("exited"), waits, RankSnapshot("running"))))
    assert root(diagnosis) == ("group_order_mismatch", (0, 1))
    assert (
        "as number 1 rank 1 makes [0, 1, 2] at train.py:5, rank 0 makes [0, 1] at train.py:3"
        in str(diagnosis)
    )


def test_notebook_shows_text_and_picture() -> None:
    diagnosis = diagnose([(SEND, 1, 1, 0)], [(RECV, 0, 2, 0)])
    shown = diagnosis._repr_mimebundle_()
    assert shown["text/plain"] == str(diagnosis)
    assert "never meet" in shown["text/html"]
    assert 'src="data:image/png;base64,' in shown["text/html"]
