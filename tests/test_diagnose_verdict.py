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
# an operation, its peer or the number of a handle, its tag, and its group
Instruction = tuple[str, int | None, int, int]


def read(text: str) -> list[list[Instruction]]:
    """Reads programs such as ``isend 1 tag5, wait 0 | recv any on1``, one for each rank.

    Group 0 is the world, 1 and 2 are those of a ring of two. "refused" is a refused send.
    """
    programs = []
    for program in text.split("|"):
        instructions = [words.split() for words in program.split(",") if words.strip()]
        programs.append([_read(*words) for words in instructions])
    return programs


def _read(what: str, *words: str) -> Instruction:
    numbers = {"": "", "tag": "0", "on": "0"}
    for word in words:
        name = word.rstrip("0123456789")
        numbers["" if name == "any" else name] = word.removeprefix(name)
    return what, int(numbers[""]) if numbers[""] else None, int(numbers["tag"]), int(numbers["on"])


def follow(programs: list[list[Instruction]]) -> None:
    ring = ringsim.current_ring()
    pairs = [ring.succ_group, ring.pred_group]
    groups = [None, *(pairs if ring.rank == 0 else pairs[::-1])]
    handles = []
    for what, number, tag, group in programs[ring.rank]:
        if what == "wait":
            handles[number].wait()
        elif what == "raise":
            raise ValueError("no such layer")
        elif what == "refused":
            with pytest.raises(ArgumentError):
                dist.send(torch.zeros(2, 4).t(), number, tag=tag)
        elif what == "barrier":
            dist.barrier(group=groups[group])
        elif what == "all_reduce":
            dist.all_reduce(torch.zeros(8), group=groups[group])
        else:
            post: Callable[..., Any] = getattr(dist, what)
            handles.append(post(torch.zeros(8), number, group=groups[group], tag=tag))


def diagnose(programs: str) -> Any:
    """Returns the diagnosis of a run of these programs, one per rank."""
    read_programs = read(programs)
    sizes: dict[str, Any] = {"world_size": len(read_programs), "link": LINK}
    try:
        trace = ringsim.simulate(follow, args=(read_programs,), **sizes)
    except RingError as error:
        return error.diagnosis
    return trace.explain()


def all_round(size: int, program: str) -> str:
    """Returns the same program for all ranks, where {rank}, {succ} and {pred} are filled in."""
    return "|".join(
        program.format(rank=rank, succ=(rank + 1) % size, pred=(rank - 1) % size)
        for rank in range(size)
    )


POSTED_5 = "isend 1 tag5, irecv 1 tag5, wait 0 | isend 0 tag6, irecv 0 tag6"
MISTAKES_OF_TWO: list[tuple[str, str, list[str]]] = [  # and words of the message or the hint
    ("deadlock", "send 1 | send 0", ["a send returns only after its recv is posted"]),
    ("deadlock", "barrier on1, barrier | barrier, barrier on1", ["ring:0>1"]),
    (  # each rank also listens under tag 99, which is not the other side
        "deadlock",
        "irecv 1 tag99, send 1, recv 1, send 1 | irecv 0 tag99, recv 0, send 0, send 0",
        ["Hint: Receive first on one rank"],
    ),
    (  # no hint to post both sides to a rank that has; missing ones are counted
        "deadlock",
        "isend 1, irecv 1, wait 0, wait 1 | irecv 0, irecv 0, wait 0, wait 1",
        [
            "rank 1 posted no send (group world, tag 0), but rank 0 posted 1 recv",
            "rank 0 posted only 1 send (",
        ],
    ),
    (
        "tag_mismatch",
        "send 1 tag1 | recv 0 tag2",
        ["rank 0 sends with tag 1, but rank 1 receives with tag 2.", "same tag: 1 or 2."],
    ),
    ("tag_mismatch", "isend 1 tag1 | recv 0 tag2", ["rank 0 has returned from its worker"]),
    ("tag_mismatch", "send 1 tag1, send 1 tag2 | recv 0 tag2, recv 0 tag1", []),
    ("tag_mismatch", "recv any tag1 | isend 0 tag2", ["rank 1 has returned"]),
    *(
        ("tag_mismatch", f"{POSTED_5}, {last}", ["isend to 1 (world, tag 5", "same tag: 5 or 6."])
        for last in ("wait 0", "wait 1", "barrier")
    ),
    ("group_mismatch", "send 1 on1 | recv 0", ["same group on both sides: group ring:0>1 or"]),
    ("group_mismatch", "recv any tag1 | isend 0 tag1 on1", ["rank 1 has returned"]),
    ("group_mismatch", "isend 1 on1, recv 1 on1 | isend 0 on2, recv 0 on2", ["ring:1>0"]),
    (
        "peer_exited",
        "send 1, send 1 | recv 0, recv 0, recv 0",
        ["only 2 sends (", "posted 3 recvs"],
    ),
    (  # the refused send does not count, so this is the second one
        "peer_exited",
        "send 1 tag3, refused 1 tag3 | recv 0 tag3, recv 0 tag3",
        ["rank 0 caught: its send to 1 (world, tag 3, float32[4,2], 32 bytes) at "],
    ),
    ("peer_exited", "refused 1, send 1 | recv 0, recv 0", ["posted only 1 send"]),
    (
        "collective_mismatch",
        "send 1, barrier | barrier",
        [
            "Post the recv on rank 1 before its barrier at test_diagnose_verdict.py:",
            "or leave out this send on rank 0",
            "call the barrier first on rank 0.",
        ],
    ),
    (
        "collective_mismatch",
        "send 1, send 1, barrier | recv 0, recv 0, recv 0, barrier",
        ["rank 0 posted only 2 sends (group world, tag 0), but rank 1 posted 3 recvs"],
    ),
    ("collective_mismatch", "recv any, barrier | barrier", ["no rank posted a send for rank 0"]),
    ("collective_mismatch", "refused 1, barrier | recv 0, barrier", ["rank 0 caught: its send"]),
]


@pytest.mark.parametrize(("kind", "programs", "words"), MISTAKES_OF_TWO)
def test_what_a_mistake_of_two_ranks_is_called(kind: str, programs: str, words: list[str]) -> None:
    diagnosis = diagnose(programs)
    finding = diagnosis.findings[0]
    assert (finding.kind, finding.ranks, finding.consequences) == (kind, (0, 1), ())
    assert [each for each in words if each not in str(diagnosis)] == []


# the kind, the ranks, those of the consequences, and words
Called = tuple[str, tuple[int, ...], list[tuple[int, ...]], list[str]]
MISTAKES_OF_MORE: dict[str, Called] = {
    "recv 1 | recv 0 | recv 1 | recv 2": ("deadlock", (0, 1), [(2,), (3,)], []),
    all_round(30, "recv {succ}"): ("deadlock", tuple(range(30)), [], ["... and 22 more"]),
    all_round(4, "irecv {pred} tag{rank}, isend {succ} tag{rank}, wait 1"): (
        "tag_mismatch",
        (0, 1, 2, 3),
        [],
        ["receives with tag 1.", "and 3 more pairs of ranks"],
    ),
    # a rank that has posted both sides gets the likely peer
    all_round(4, "isend {succ}, irecv {succ}, wait 0, wait 1"): (
        "deadlock",
        (0, 1, 2, 3),
        [],
        [
            "Hint: Post the recv on rank 1 before that rank waits, or leave out this isend: ",
            "rank 1 posted no recv (group world, tag 0), but rank 0 posted 1 send.",
            "Hint: Check peer 1 of rank 0's isend: rank 3 posted irecv from 0 ",
        ],
    ),
    "| recv 0, send 2 | recv 1": ("peer_exited", (0, 1), [(2,)], ["rank 0 posted no send ("]),
    "send 2 tag5 | recv 0 tag5 |": ("peer_exited", (2, 0), [(1,)], ["Check peer 2 of rank 0"]),
    "raise | recv 0 | recv 1": ("rank_failed", (0,), [(1,), (2,)], ["ValueError: no such layer"]),
    "barrier | barrier |": (
        "missing_participant",
        (2, 0, 1),
        [],
        ["barrier (collective 1 of group w"],
    ),
    "barrier | barrier | recv 0": ("collective_mismatch", (0, 2), [(1,)], []),
    "barrier, barrier | barrier, all_reduce": (
        "collective_mismatch",
        (0, 1),
        [(0,)],
        ["all_reduce here and barrier in"],
    ),
    "send 1, barrier | barrier | barrier | barrier": (
        "collective_mismatch",
        (0, 1),
        [(2,), (3,)],
        ["Post the recv on rank 1 before"],
    ),
    "barrier | recv 2, barrier | recv 0, send 1, barrier": (
        "collective_mismatch",
        (0, 1, 2),
        [],
        ["Post the send on rank 0 before"],
    ),
}


@pytest.mark.parametrize("programs", MISTAKES_OF_MORE)
def test_what_a_mistake_of_more_ranks_is_called(programs: str) -> None:
    kind, ranks, echoes, words = MISTAKES_OF_MORE[programs]
    diagnosis = diagnose(programs)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert [one.ranks for one in finding.consequences] == echoes
    assert [each for each in words if each not in str(diagnosis)] == []
    assert len(str(diagnosis)) < 2500


def test_both_sides_of_a_mismatch_are_named_and_a_notebook_shows_text_and_picture() -> None:
    diagnosis = diagnose("send 1 tag1 | recv 0 tag2")
    (finding,) = diagnosis.findings
    operations = [(one.rank, one.op, one.peer, one.tag) for one in finding.operations]
    assert operations == [(0, "send", 1, 1), (1, "recv", 0, 2)]
    assert all(one.place.startswith("test_diagnose_verdict.py:") for one in finding.operations)
    shown = diagnosis._repr_mimebundle_()
    assert shown["text/plain"] == str(diagnosis)
    assert "but rank 1 receives with tag 2" in shown["text/html"]
    assert 'src="data:image/svg+xml;base64,' in shown["text/html"]


def test_order_is_no_matter_if_all_is_posted_at_once() -> None:
    programs = "isend 1 tag1, isend 1 tag2, wait 0, wait 1 | recv 0 tag2, recv 0 tag1"
    assert diagnose(programs).findings == ()


def test_no_other_rank_is_meant_that_waits_under_another_tag() -> None:
    assert "Check the peer" not in str(diagnose("send 2 tag5 | recv 0 tag6 |"))
