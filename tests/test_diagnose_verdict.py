"""The kind, the ranks and the hints of each mistake, for wrong programs on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, RingError

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
# (operation, peer, tag, group), a collective with its group, ("wait", number of the handle),
# ("refused", peer, tag) for a refused send, or ("raise",)
Instruction = tuple[Any, ...]
ANY = None
BARRIER: Instruction = ("barrier", 0)


def follow(programs: list[list[Instruction]]) -> None:
    """Runs the instructions of the rank.

    Group 0 is the world, 1 and 2 are those of a ring of two.
    """
    ring = ringsim.current_ring()
    pairs = [ring.succ_group, ring.pred_group]
    groups = [None, *(pairs if ring.rank == 0 else pairs[::-1])]
    handles = []
    for what, *about in programs[ring.rank]:
        if what == "wait":
            handles[about[0]].wait()
        elif what == "raise":
            raise ValueError("no such layer")
        elif what == "refused":
            with pytest.raises(ArgumentError):
                dist.send(torch.zeros(2, 4).t(), about[0], tag=about[1])
        elif what == "barrier":
            dist.barrier(group=groups[about[0]])
        elif what == "all_reduce":
            dist.all_reduce(torch.zeros(8), group=groups[about[0]])
        else:
            peer, tag, group = about
            post: Callable[..., Any] = getattr(dist, what)
            handles.append(post(torch.zeros(8), peer, group=groups[group], tag=tag))


def diagnose(*programs: list[Instruction]) -> Any:
    """Returns the diagnosis of a run of these programs, one per rank."""
    try:
        trace = ringsim.simulate(follow, world_size=len(programs), args=(programs,), link=LINK)
    except RingError as error:
        return error.diagnosis
    return trace.explain()


def all_round(size: int, *program: Callable[[int], Instruction]) -> list[list[Instruction]]:
    """Returns the same program for all ranks, with instructions made from the rank's number."""
    return [[make(rank) for make in program] for rank in range(size)]


WAITS_FOR_THE_SECOND = [("isend", 1, 5, 0), ("irecv", 1, 5, 0), ("wait", 0)]
POSTED_6 = [("isend", 0, 6, 0), ("irecv", 0, 6, 0)]
PAIRS: dict[str, list[tuple[list[list[Instruction]], list[str]]]] = {
    # programs of ranks 0 and 1 by kind, and words of the message or the hint
    "deadlock": [
        (
            [[("send", 1, 0, 0)], [("send", 0, 0, 0)]],
            ["a send returns only after its recv is posted"],
        ),
        ([[("barrier", 1), BARRIER], [BARRIER, ("barrier", 1)]], ["ring:0>1"]),
        (  # each rank also listens under tag 99, which is not the other side
            [
                [("irecv", 1, 99, 0), ("send", 1, 0, 0), ("recv", 1, 0, 0), ("send", 1, 0, 0)],
                [("irecv", 0, 99, 0), ("recv", 0, 0, 0), ("send", 0, 0, 0), ("send", 0, 0, 0)],
            ],
            ["Let one rank receive first"],
        ),
        (  # no hint to post both sides to a rank that has; missing ones are counted
            [
                [("isend", 1, 0, 0), ("irecv", 1, 0, 0), ("wait", 0), ("wait", 1)],
                [("irecv", 0, 0, 0), ("irecv", 0, 0, 0), ("wait", 0), ("wait", 1)],
            ],
            [
                "rank 1 posted no send (group world, tag 0), but rank 0 posted 1 recv",
                "rank 0 posted only 1 send (",
            ],
        ),
    ],
    "tag_mismatch": [
        (
            [[("send", 1, 1, 0)], [("recv", 0, 2, 0)]],
            ["rank 0 sends with tag 1, but rank 1 receives with tag 2.", "same tag: 1 or 2."],
        ),
        ([[("isend", 1, 1, 0)], [("recv", 0, 2, 0)]], ["rank 0 has returned from its worker"]),
        (
            [
                [("send", 1, 1, 0), ("send", 1, 2, 0)],
                [("recv", 0, 2, 0), ("recv", 0, 1, 0)],
            ],
            [],
        ),
        ([[("recv", ANY, 1, 0)], [("send", 0, 2, 0)]], []),
        ([[("recv", ANY, 1, 0)], [("isend", 0, 2, 0)]], ["rank 1 has returned"]),
        *(
            (
                [WAITS_FOR_THE_SECOND, [*POSTED_6, *waits]],
                ["isend to 1 (world, tag 5", "same tag: 5 or 6."],
            )
            for waits in ([("wait", 0)], [("wait", 1)], [BARRIER])
        ),
    ],
    "group_mismatch": [
        (
            [[("send", 1, 0, 1)], [("recv", 0, 0, 0)]],
            ["Use the same group on both sides: group ring:0>1 or group w"],
        ),
        ([[("recv", ANY, 1, 0)], [("send", 0, 1, 1)]], []),
        ([[("recv", ANY, 1, 0)], [("isend", 0, 1, 1)]], ["rank 1 has returned"]),
        (
            [
                [("isend", 1, 0, 1), ("recv", 1, 0, 1)],
                [("isend", 0, 0, 2), ("recv", 0, 0, 2)],
            ],
            ["ring:1>0"],
        ),
        (
            all_round(
                2,
                lambda r: ("isend", 1 - r, 0, 1 + r),
                lambda r: ("irecv", 1 - r, 0, 1 + r),
                lambda _: ("wait", 0),
            ),
            [],
        ),
    ],
    "peer_exited": [
        (
            [[("send", 1, 0, 0)] * 2, [("recv", 0, 0, 0)] * 3],
            ["only 2 sends (", "but rank 1 posted 3 recvs"],
        ),
        (  # the refused send does not count, so this is the second one
            [[("send", 1, 3, 0), ("refused", 1, 3)], [("recv", 0, 3, 0)] * 2],
            ["rank 0 caught: its send to 1 (world, tag 3, float32[4,2], 32 bytes) at "],
        ),
        (
            [[("refused", 1, 3), ("send", 1, 3, 0)], [("recv", 0, 3, 0)] * 2],
            ["rank 0 posted only 1 send ("],
        ),
    ],
    "collective_mismatch": [
        (
            [[("send", 1, 0, 0), BARRIER], [BARRIER]],
            [
                "Let rank 1 post the recv before its barrier at test_diagnose_verdict.py:",
                "or leave out this send",
                "let rank 0 call the barrier first.",
            ],
        ),
        (
            [[*[("send", 1, 0, 0)] * 2, BARRIER], [*[("recv", 0, 0, 0)] * 3, BARRIER]],
            ["rank 0 posted only 2 sends (group world, tag 0), but rank 1 posted 3 recvs"],
        ),
        (
            [[("recv", ANY, 0, 0), BARRIER], [BARRIER]],
            ["no rank posted a send for the recv of rank 0"],
        ),
        ([[("refused", 1, 3), BARRIER], [("recv", 0, 3, 0), BARRIER]], ["rank 0 caught: its send"]),
    ],
}


@pytest.mark.parametrize(
    ("kind", "programs", "words"),
    [(kind, *case) for kind, cases in PAIRS.items() for case in cases],
)
def test_what_a_mistake_of_two_ranks_is_called(
    kind: str, programs: list[list[Instruction]], words: list[str]
) -> None:
    diagnosis = diagnose(*programs)
    finding = diagnosis.findings[0]
    assert (finding.kind, finding.ranks, finding.consequences) == (kind, (0, 1), ())
    assert [each for each in words if each not in str(diagnosis)] == []


@pytest.mark.parametrize(
    ("programs", "kind", "ranks", "echoes", "words"),
    [
        (
            [
                [("recv", 1, 0, 0)],
                [("recv", 0, 0, 0)],
                [("recv", 1, 0, 0)],
                [("recv", 2, 0, 0)],
            ],
            *("deadlock", (0, 1), [(2,), (3,)], []),
        ),
        (
            all_round(30, lambda rank: ("recv", (rank + 1) % 30, 0, 0)),
            *("deadlock", tuple(range(30)), [], ["... and 22 more"]),
        ),
        (
            all_round(
                4,
                lambda r: ("irecv", (r - 1) % 4, r, 0),
                lambda r: ("isend", (r + 1) % 4, r, 0),
                lambda _: ("wait", 1),
            ),
            *("tag_mismatch", (0, 1, 2, 3), []),
            ["receives with tag 1.", "and 3 more pairs of ranks"],
        ),
        (  # a rank that has posted both sides gets the likely peer
            all_round(
                4,
                lambda r: ("isend", (r + 1) % 4, 0, 0),
                lambda r: ("irecv", (r + 1) % 4, 0, 0),
                lambda _: ("wait", 0),
                lambda _: ("wait", 1),
            ),
            *("deadlock", (0, 1, 2, 3), []),
            [
                "Hint: Let rank 1 post the recv before that rank waits, or leave out this isend: rank 1 "
                "posted no recv (group world, tag 0), but rank 0 posted 1 send.",
                "Hint: Check peer 1 of rank 0's isend: rank 3 posted irecv from 0 ",
            ],
        ),
        (
            [[], [("recv", 0, 0, 0), ("send", 2, 0, 0)], [("recv", 1, 0, 0)]],
            *("peer_exited", (0, 1), [(2,)], ["rank 0 posted no send ("]),
        ),
        (
            [[("send", 2, 5, 0)], [("recv", 0, 5, 0)], []],
            *("peer_exited", (2, 0), [(1,)], ["Check peer 2 of rank 0's send: rank 1 waits"]),
        ),
        (
            [[("raise",)], [("recv", 0, 0, 0)], [("recv", 1, 0, 0)]],
            *("rank_failed", (0,), [(1,), (2,)], ["rank 0 raised ValueError: no such layer ("]),
        ),
        (
            [[BARRIER], [BARRIER], []],
            *(
                "missing_participant",
                (2, 0, 1),
                [],
                ["ranks 0 and 1 wait in barrier (collective 1 of group w"],
            ),
        ),
        (
            [[BARRIER], [BARRIER], [("recv", 0, 0, 0)]],
            *("collective_mismatch", (0, 2), [(1,)], []),
        ),
        (
            [[BARRIER] * 2, [BARRIER, ("all_reduce", 0)]],
            *("collective_mismatch", (0, 1), [(0,)], ["got all_reduce here and barrier in rank 0"]),
        ),
        (
            [[("send", 1, 0, 0), BARRIER], *[[BARRIER]] * 3],
            *("collective_mismatch", (0, 1), [(2,), (3,)], ["Let rank 1 post the recv before"]),
        ),
        (
            [
                [BARRIER],
                [("recv", 2, 0, 0), BARRIER],
                [("recv", 0, 0, 0), ("send", 1, 0, 0), BARRIER],
            ],
            *("collective_mismatch", (0, 1, 2), [], ["Let rank 0 post the send before its barr"]),
        ),
    ],
)
def test_what_a_mistake_of_more_ranks_is_called(
    programs: list[list[Instruction]],
    kind: str,
    ranks: tuple[int, ...],
    echoes: list[tuple[int, ...]],
    words: list[str],
) -> None:
    diagnosis = diagnose(*programs)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert [one.ranks for one in finding.consequences] == echoes
    assert [each for each in words if each not in str(diagnosis)] == []
    assert len(str(diagnosis)) < 2500


def test_both_sides_of_a_mismatch_are_named() -> None:
    (finding,) = diagnose([("send", 1, 1, 0)], [("recv", 0, 2, 0)]).findings
    assert [(one.rank, one.op, one.peer, one.tag) for one in finding.operations] == [
        (0, "send", 1, 1),
        (1, "recv", 0, 2),
    ]
    assert all(one.place.startswith("test_diagnose_verdict.py:") for one in finding.operations)


def test_order_is_no_matter_if_all_is_posted_at_once() -> None:
    sends = [("isend", 1, 1, 0), ("isend", 1, 2, 0), ("wait", 0), ("wait", 1)]
    assert diagnose(sends, [("recv", 0, 2, 0), ("recv", 0, 1, 0)]).findings == ()


def test_no_other_rank_is_meant_that_waits_under_another_tag() -> None:
    said = str(diagnose([("send", 2, 5, 0)], [("recv", 0, 6, 0)], []))
    assert "Check the peer" not in said


def test_a_notebook_shows_text_and_picture() -> None:
    diagnosis = diagnose([("send", 1, 1, 0)], [("recv", 0, 2, 0)])
    shown = diagnosis._repr_mimebundle_()
    assert shown["text/plain"] == str(diagnosis)
    assert "but rank 1 receives with tag 2" in shown["text/html"]
    assert 'src="data:image/png;base64,' in shown["text/html"]
