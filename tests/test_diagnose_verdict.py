"""What a diagnosis calls a mistake, whom it names, and how it reads, for programs that the machine has run to their end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rendezvous_machine import Instruction, Machine

from ringsim.diagnose.explain import explain
from ringsim.diagnose.snapshot import Posted, RankSnapshot, Snapshot
from ringsim.diagnose.verdict import judge
from ringsim.traces.events import ANY_SOURCE, Group
from ringsim.traces.findings import KINDS, Diagnosis, Operation
from ringsim.traces.value import Trace

SEND, RECV = "send", "recv"


def diagnose(*programs: list[Instruction], ends: dict[int, tuple[str, str]] | None = None) -> Diagnosis:
    """Runs programs until nobody can go on and explains what was recorded; group 0 is the world, 1 and 2 hold ranks 0 and 1."""
    size = len(programs)
    groups = (Group("world", tuple(range(size))), Group("ring:0>1", (0, 1)), Group("ring:1>0", (0, 1)))
    machine = Machine(programs, groups)
    machine.run(lambda ranks: ranks[0])
    known = dict.fromkeys(machine.finished, ("exited", "has returned from its worker")) | (ends or {})
    said = [{"rank": rank, "state": state, "about": about} for rank, (state, about) in known.items()]
    return explain(Trace(machine.events(), {"world_size": size, "ends": said, "complete": not machine.unfinished}))


def root(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...]]:
    return diagnosis.findings[0].kind, diagnosis.findings[0].ranks


def test_recv_recv() -> None:
    diagnosis = diagnose([(RECV, 1, 0, 0)], [(RECV, 0, 0, 0)])
    assert root(diagnosis) == ("deadlock", (0, 1))
    words = re.sub(r" for \d+ ns", "", str(diagnosis))  # the machine's clock counts steps
    assert words == (
        "deadlock: ranks 0 and 1 wait for each other: rank 0 waits in recv from 1 (world, tag 0, float32[8], 32 bytes) at program.py:1; "
        "rank 1 waits in recv from 0 (world, tag 0, float32[8], 32 bytes) at program.py:1.\n"
        "  Hint: All of them receive before they send. Let one of them send first, or post with batch_isend_irecv."
    )


def test_send_send_says_why_a_send_waits() -> None:
    diagnosis = diagnose([(SEND, 1, 0, 0), (RECV, 1, 0, 0)], [(SEND, 0, 0, 0), (RECV, 0, 0, 0)])
    assert root(diagnosis) == ("deadlock", (0, 1))
    assert "A send returns only once the other side has posted its recv" in diagnosis.findings[0].hint


@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("op", [SEND, RECV])
def test_ring_of_one_kind(size: int, op: str) -> None:
    step = 1 if op == SEND else -1
    diagnosis = diagnose(*[[(op, (rank + step) % size, 0, 0)] for rank in range(size)])
    kind, ranks = root(diagnosis)
    assert kind == "deadlock"
    assert ranks == tuple((step * place) % size for place in range(size))
    assert [edge.in_cycle for edge in diagnosis.edges] == [True] * size


def test_who_waits_behind_a_cycle_is_folded() -> None:
    diagnosis = diagnose([(RECV, 1, 0, 0)], [(RECV, 0, 0, 0)], [(RECV, 1, 0, 0)], [(RECV, 2, 0, 0)])
    assert len(diagnosis.findings) == 1
    assert root(diagnosis) == ("deadlock", (0, 1))
    assert [one.ranks for one in diagnosis.findings[0].consequences] == [(2,), (3,)]


def test_two_cycles_are_two_findings() -> None:
    diagnosis = diagnose([(RECV, 1, 0, 0)], [(RECV, 0, 0, 0)], [(SEND, 3, 0, 0)], [(SEND, 2, 0, 0)])
    assert [finding.ranks for finding in diagnosis.findings] == [(0, 1), (2, 3)]


def test_wrong_tag() -> None:
    diagnosis = diagnose([(SEND, 1, 1, 0)], [(RECV, 0, 2, 0)])
    assert root(diagnosis) == ("tag_mismatch", (0, 1))
    (finding,) = diagnosis.findings
    assert "tag 1 is not tag 2" in finding.message
    assert finding.hint == "Give both the same tag: 1 or 2."
    assert [(one.rank, one.op, one.peer, one.tag, one.line) for one in finding.operations] == [(0, "send", 1, 1, 1), (1, "recv", 0, 2, 1)]


def test_wrong_tag_of_a_rank_that_has_left() -> None:
    diagnosis = diagnose([("isend", 1, 1, 0)], [(RECV, 0, 2, 0)])
    assert root(diagnosis) == ("tag_mismatch", (0, 1))
    assert "Rank 0 has returned from its worker." in diagnosis.findings[0].message


def test_tags_in_another_order() -> None:
    sender: list[Instruction] = [("isend", 1, 1, 0), ("isend", 1, 2, 0), ("wait", 0), ("wait", 1)]
    assert diagnose(sender, [(RECV, 0, 2, 0), (RECV, 0, 1, 0)]).findings == ()  # posted at once: no matter
    diagnosis = diagnose([(SEND, 1, 1, 0), (SEND, 1, 2, 0)], [(RECV, 0, 2, 0), (RECV, 0, 1, 0)])
    assert root(diagnosis) == ("tag_mismatch", (0, 1))


def test_wrong_group() -> None:
    diagnosis = diagnose([(SEND, 1, 0, 1)], [(RECV, 0, 0, 0)])
    assert root(diagnosis) == ("group_mismatch", (0, 1))
    assert diagnosis.findings[0].hint == "Use one group on both sides: group ring:0>1 or group world."


def test_both_use_their_own_group_of_the_pair() -> None:
    diagnosis = diagnose([("isend", 1, 0, 1), (RECV, 1, 0, 1)], [("isend", 0, 0, 2), (RECV, 0, 0, 2)])
    assert root(diagnosis) == ("group_mismatch", (0, 1))
    assert "ring:1>0" in str(diagnosis)
    both: list[list[Instruction]] = [[("isend", 1 - rank, 0, 1 + rank), ("irecv", 1 - rank, 0, 1 + rank), ("wait", 0)] for rank in range(2)]
    assert root(diagnose(*both)) == ("group_mismatch", (0, 1))


@pytest.mark.parametrize("waits", [("wait", 0), ("wait", 1), ("wait_all",), ("barrier", 0)], ids=str)
def test_the_other_side_is_posted_and_not_waited_for(waits: Instruction) -> None:
    sides: list[list[Instruction]] = [[("isend", 1 - rank, 5 + rank, 0), ("irecv", 1 - rank, 5 + rank, 0)] for rank in range(2)]
    diagnosis = diagnose([*sides[0], ("wait", 0)], [*sides[1], waits])
    assert root(diagnosis) == ("tag_mismatch", (0, 1))
    assert "rank 0's isend to 1 (world, tag 5" in diagnosis.findings[0].message
    assert diagnosis.findings[0].hint.startswith("Give both the same tag: 5 or 6.")


def test_wrong_tags_all_round_the_ring() -> None:
    programs: list[list[Instruction]] = [
        [("irecv", (rank - 1) % 4, rank, 0), ("isend", (rank + 1) % 4, rank, 0), ("wait", 1), ("wait", 0)] for rank in range(4)
    ]
    diagnosis = diagnose(*programs)
    assert root(diagnosis) == ("tag_mismatch", (0, 1, 2, 3))
    assert diagnosis.findings[0].message.endswith("tag 0 is not tag 1. The same holds for 3 more pairs of ranks.")
    assert diagnosis.findings[0].consequences == ()
    assert len(diagnosis.findings) == 1


def test_a_recv_that_has_been_open_for_long_is_not_the_other_side() -> None:
    """Each listens for a word under tag 99 all the time, and in the second round both send first."""
    first: list[Instruction] = [(SEND, 1, 0, 0), (RECV, 1, 0, 0)]
    second: list[Instruction] = [(RECV, 0, 0, 0), (SEND, 0, 0, 0)]
    diagnosis = diagnose([("irecv", 1, 99, 0), *first, (SEND, 1, 0, 0)], [("irecv", 0, 99, 0), *second, (SEND, 0, 0, 0)])
    assert root(diagnosis) == ("deadlock", (0, 1))
    assert "Let one of them receive first" in diagnosis.findings[0].hint


@pytest.mark.parametrize(("tag", "group", "kind"), [(2, 0, "tag_mismatch"), (1, 1, "group_mismatch")])
def test_from_anybody_under_another_tag_or_group(tag: int, group: int, kind: str) -> None:
    assert root(diagnose([(RECV, ANY_SOURCE, 1, 0)], [(SEND, 0, tag, group)])) == (kind, (0, 1))
    left = diagnose([(RECV, ANY_SOURCE, 1, 0)], [("isend", 0, tag, group)])
    assert root(left) == (kind, (0, 1))
    assert "Rank 1 has returned" in str(left)


def test_who_has_posted_both_sides_is_not_told_to_post_them() -> None:
    programs: list[list[Instruction]] = [
        [("isend", (rank + 1) % 4, 0, 0), ("irecv", (rank + 1) % 4, 0, 0), ("wait", 0), ("wait", 1)] for rank in range(4)
    ]
    diagnosis = diagnose(*programs)
    assert root(diagnosis) == ("deadlock", (0, 1, 2, 3))
    lines = diagnosis.findings[0].hint.splitlines()
    assert lines[0].startswith("Rank 1 posted no recv for it (group world, tag 0), and this is isend number 1 of rank 0: ")
    assert lines[2].startswith("Rank 3 has posted irecv from 0 ")
    assert lines[2].endswith("should the isend of rank 0 go there? Its peer is 1.")
    assert len(lines) == 4

    extra: list[Instruction] = [("irecv", 0, 0, 0), ("irecv", 0, 0, 0), ("wait_all",)]
    hint = diagnose([("isend", 1, 0, 0), ("irecv", 1, 0, 0), ("wait_all",)], extra).findings[0].hint
    assert "Rank 1 posted no send for it (group world, tag 0), and this is irecv number 1 of rank 0" in hint
    assert "Rank 0 posted only 1 send for it (group world, tag 0), and this is irecv number 2 of rank 1" in hint


def test_peer_has_left() -> None:
    diagnosis = diagnose([], [(RECV, 0, 0, 0), (SEND, 2, 0, 0)], [(RECV, 1, 0, 0)])
    assert root(diagnosis) == ("peer_exited", (0, 1))
    (finding,) = diagnosis.findings
    assert finding.message.endswith("but rank 0 has returned from its worker.")
    assert "Rank 0 posted no send for it" in finding.hint
    assert [one.ranks for one in finding.consequences] == [(2,)]


def test_who_left_in_the_middle_is_not_told_to_post_something() -> None:
    diagnosis = diagnose([], [(RECV, 0, 0, 0)], ends={0: ("exited", "left with sys.exit(0) (train.py, line 7, in step)")})
    assert root(diagnosis) == ("peer_exited", (0, 1))
    assert diagnosis.findings[0].hint == "Rank 0 ended in the middle of its worker: let it do what the others wait for, and then return."


@pytest.mark.parametrize(("place", "tried"), [(0, False), (1, True)])
@pytest.mark.parametrize("state", ["exited", "blocked"])
def test_a_send_that_was_refused_is_not_called_missing(state: str, place: int, tried: bool) -> None:
    """The recv that waits is the second one; another of the first send, that raised, was posted in its place."""
    world = Group("world", (0, 1))
    raised = Posted(Operation(0, SEND, peer=1, tag=3, group="world", file="train.py", line=7), world, awaited=False, index=place)
    waits = Posted(Operation(1, RECV, peer=0, tag=3, group="world"), world, awaited=True, index=1, counterparts=1)
    barrier = Posted(Operation(0, "barrier", group="world"), world, awaited=True, entered=(Operation(0, "barrier", group="world"),))
    other = RankSnapshot(state, (barrier,) if state == "blocked" else (), refused=(raised,))
    said = str(judge(Snapshot((other, RankSnapshot("blocked", (waits,))))))
    assert ("Rank 0 tried: its send to 1 (world, tag 3) at train.py:7 raised an error" in said) is tried
    assert ("Rank 0 posted only 1 send for it" in said) is not tried


def test_number_of_missing_messages() -> None:
    diagnosis = diagnose([(SEND, 1, 0, 0)] * 2, [(RECV, 0, 0, 0)] * 3)
    assert "posted only 2 sends for it (group world, tag 0), and this is recv number 3 of rank 1" in diagnosis.findings[0].hint


def test_wrong_peer_is_guessed() -> None:
    diagnosis = diagnose([(SEND, 2, 5, 0)], [(RECV, 0, 5, 0)], [])
    assert root(diagnosis) == ("peer_exited", (0, 2))
    assert "Rank 1 waits in recv from 0" in diagnosis.findings[0].hint
    assert "should the send of rank 0 go there?" in diagnosis.findings[0].hint


def test_first_failure_is_the_root() -> None:
    ends = {0: ("failed", "raised ValueError: no such layer")}
    diagnosis = diagnose([], [(RECV, 0, 0, 0)], [(RECV, 1, 0, 0)], ends=ends)
    assert root(diagnosis) == ("rank_failed", (0,))
    assert diagnosis.findings[0].message == "rank 0 raised ValueError: no such layer."
    assert [one.ranks for one in diagnosis.findings[0].consequences] == [(1,), (2,)]


def test_killed_peer_even_when_the_message_was_on_its_way() -> None:
    ends = {0: ("killed", "was ended by signal 9 (SIGKILL)")}
    none = diagnose([], [(RECV, 0, 0, 0)], ends=ends)
    assert root(none) == ("peer_exited", (0, 1))
    assert "SIGKILL" in none.findings[0].message
    operation = Operation(1, "recv", peer=0, tag=0)
    posted = Posted(operation, Group("world", (0, 1)), awaited=True, counterparts=1)
    assert judge(Snapshot((RankSnapshot("killed"), RankSnapshot("blocked", (posted,))))).kind == "peer_exited"
    assert judge(Snapshot((RankSnapshot("killed", about="is dead"), RankSnapshot("running")))).kind == "rank_failed"


def test_barrier_by_a_subset() -> None:
    diagnosis = diagnose([("barrier", 0)], [("barrier", 0)], [])
    assert root(diagnosis) == ("missing_participant", (0, 1, 2))
    assert diagnosis.findings[0].message.startswith("ranks 0 and 1 wait in barrier (world")


def test_barrier_against_recv() -> None:
    diagnosis = diagnose([("barrier", 0)], [("barrier", 0)], [(RECV, 0, 0, 0)])
    assert root(diagnosis) == ("collective_mismatch", (0, 2))
    assert [one.ranks for one in diagnosis.findings[0].consequences] == [(1,)]


@pytest.mark.parametrize("size", [2, 4])
def test_a_forgotten_recv_before_a_barrier(size: int) -> None:
    others: list[list[Instruction]] = [[("barrier", 0)] for _ in range(size - 1)]
    diagnosis = diagnose([(SEND, 1, 0, 0), ("barrier", 0)], *others)
    assert root(diagnosis) == ("collective_mismatch", (0, 1))
    (finding,) = diagnosis.findings
    assert finding.message.endswith("Rank 1 posted no recv for it (group world, tag 0), and this is send number 1 of rank 0.")
    assert finding.hint.splitlines() == [
        "Let rank 1 post the recv before its barrier at program.py:1, or leave this send of rank 0 out.",
        "If the send belongs behind the barrier, let rank 0 call that first, too.",
    ]
    assert [one.ranks for one in finding.consequences] == [(rank,) for rank in range(2, size)]


def test_one_send_too_few_before_a_barrier() -> None:
    diagnosis = diagnose([*[(SEND, 1, 0, 0)] * 2, ("barrier", 0)], [*[(RECV, 0, 0, 0)] * 3, ("barrier", 0)])
    assert root(diagnosis) == ("collective_mismatch", (0, 1))
    assert "Rank 0 posted only 2 sends for it (group world, tag 0), and this is recv number 3 of rank 1." in diagnosis.findings[0].message
    diagnosis = diagnose([(RECV, ANY_SOURCE, 0, 0), ("barrier", 0)], [("barrier", 0)])
    assert diagnosis.findings[0].message.endswith("Nobody has posted a send for the recv of rank 0.")


def test_a_collective_and_two_messages_in_a_circle() -> None:
    diagnosis = diagnose([("barrier", 0)], [(RECV, 2, 0, 0), ("barrier", 0)], [(RECV, 0, 0, 0), (SEND, 1, 0, 0), ("barrier", 0)])
    assert root(diagnosis) == ("collective_mismatch", (0, 1, 2))
    assert "Let rank 0 post the send before its barrier" in diagnosis.findings[0].hint


def test_different_collectives() -> None:
    diagnosis = diagnose([("barrier", 0), ("barrier", 0)], [("barrier", 0), ("all_reduce", 0)])
    assert root(diagnosis) == ("collective_mismatch", (0, 1))
    assert "as collective 2 of group world: the kind differs" in diagnosis.findings[0].message


def test_other_group_than_that_of_a_rank_that_has_left() -> None:
    theirs = Operation(0, "new_group", shape=(0, 1), file="train.py", line=3)
    mine = Operation(1, "new_group", shape=(0, 1, 2), file="train.py", line=5)
    waits = RankSnapshot("blocked", (Posted(mine, Group("all", (0, 1, 2)), awaited=True, entered=(theirs,)),))
    diagnosis = judge(Snapshot((RankSnapshot("exited"), waits, RankSnapshot("running"))))
    assert root(diagnosis) == ("group_order_mismatch", (0, 1))
    assert "as number 1 rank 1 makes [0, 1, 2] at train.py:5, rank 0 makes [0, 1] at train.py:3" in str(diagnosis)


def test_message_to_oneself() -> None:
    operation = Operation(0, "recv", peer=0, tag=0)
    diagnosis = judge(Snapshot((RankSnapshot("blocked", (Posted(operation, Group("world", (0,)), awaited=True),)),)))
    assert root(diagnosis) == ("deadlock", (0,))
    assert "a message of its own" in str(diagnosis)


def test_run_that_finished_has_nothing_wrong() -> None:
    diagnosis = diagnose([(SEND, 1, 0, 0), ("barrier", 0)], [(RECV, 0, 0, 0), ("barrier", 0)])
    assert diagnosis.findings == ()
    assert str(diagnosis) == "Nothing wrong was found in this run of 2 ranks."


def test_run_that_was_ended_while_somebody_might_have_helped() -> None:
    diagnosis = diagnose([(RECV, 1, 0, 0)], [("isend", 0, 1, 0)], ends={1: ("running", "")})
    kind, ranks = root(diagnosis)
    assert (kind, ranks) == ("stalled", (0,))
    assert "Meanwhile rank 1 was busy" in diagnosis.findings[0].message


def test_every_kind_is_known() -> None:
    assert len(set(KINDS)) == 18


def test_long_cycle_is_not_spelled_out() -> None:
    diagnosis = diagnose(*[[(RECV, (rank + 1) % 30, 0, 0)] for rank in range(30)])
    assert "and 26 more alike" in str(diagnosis)
    assert len(str(diagnosis)) < 1000


def test_many_in_a_circle_of_collectives() -> None:
    """Rank 0 waits in a barrier of the pair for rank 1, which waits in one of the world."""
    diagnosis = diagnose([("barrier", 1), ("barrier", 0)], [("barrier", 0), ("barrier", 1)])
    assert root(diagnosis)[0] == "deadlock"
    assert "ring:0>1" in str(diagnosis)


def text_of(diagnosis: Diagnosis, name: str) -> Any:
    return diagnosis._repr_mimebundle_()[name]


def test_notebook_shows_text_and_picture() -> None:
    diagnosis = diagnose([(SEND, 1, 1, 0)], [(RECV, 0, 2, 0)])
    assert text_of(diagnosis, "text/plain") == str(diagnosis)
    page = text_of(diagnosis, "text/html")
    assert "never meet" in page
    assert 'src="data:image/png;base64,' in page
