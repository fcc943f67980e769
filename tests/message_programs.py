"""Random message programs, and the right diagnosis of those that get stuck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from rendezvous_machine import Instruction, Machine
from trace_file import ANY_SOURCE

Programs = list[list[Instruction]]


class Awaits(NamedTuple):
    """A rank that waits forever: its operation, and the rank that it waits for."""

    rank: int
    peer: int
    sends: bool
    group: str
    tag: int


@st.composite
def programs_of_messages(
    draw: st.DrawFn,
    groups: Sequence[Any],
    *,
    collectives: bool = False,
    anybody: bool = False,
    apart: bool = False,
    at_once: bool = False,
) -> Programs:
    """Draws programs, about half of which finish.

    They consist of complete messages, some of them damaged. Ranks wait for their operations in any
    order, never, or twice. The first group contains all ranks. ``anybody``: some messages are
    received from any source, and ``apart``: those have a separate tag. ``at_once``: programs end
    with one wait for all open operations.
    """
    posts: Programs = [[] for _ in groups[0].ranks]
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(groups) - 1))
        if collectives and draw(st.integers(0, 3)) == 0:
            for rank in groups[number].ranks:
                posts[rank].append(
                    (draw(st.sampled_from(["barrier"] * 7 + ["all_reduce"])), number)
                )
            continue
        source, target = draw(st.permutations(groups[number].ranks))[:2]
        from_any = anybody and draw(st.booleans())
        tag = 9 if from_any and apart else draw(st.integers(0, 1))
        posts[source].append(("isend", target, tag, number))
        posts[target].append(("irecv", ANY_SOURCE if from_any else source, tag, number))
    return [draw(_with_waits(draw(_spoilt(mine)), at_once)) for mine in posts]


@st.composite
def _spoilt(draw: st.DrawFn, posts: list[Instruction]) -> list[Instruction]:
    """Occasionally drops a post, moves it to the front, repeats it, or changes its tag."""
    what = draw(st.sampled_from(["no"] * 12 + ["drop", "swap", "tag", "again"])) if posts else "no"
    if what == "no":
        return posts
    at = draw(st.integers(0, len(posts) - 1))
    op, *about = posts[at]
    rest = posts[:at] + posts[at + 1 :]
    if what == "tag" and len(about) == 3:
        peer, tag, number = about
        return [*posts[:at], (op, peer, tag ^ 1, number), *posts[at + 1 :]]
    return {"drop": rest, "swap": [posts[at], *rest]}.get(what, [posts[at], *posts])


@st.composite
def _with_waits(draw: st.DrawFn, posts: list[Instruction], at_once: bool) -> list[Instruction]:
    """Adds waits after posts.

    A wait comes immediately (or the call blocks), a few posts later, at the end in any order,
    never, or twice.
    """
    program: list[Instruction] = []
    later: list[int] = []  # handles to wait for later
    handles, patient = 0, draw(st.booleans())  # patient: post everything before the first wait
    for op, *about in posts:
        how = (
            "later"
            if patient
            else draw(
                st.sampled_from(["blocks", "blocks", "later", "later", "later", "twice", "never"])
            )
        )
        if op not in ("isend", "irecv"):
            program.append((op, *about))
        elif how == "blocks" and draw(st.booleans()):
            program.append((op[1:], *about))
        else:
            program += [(op, *about), *[("wait", handles)] * (how in ("blocks", "twice"))]
            later += [handles] * (how in ("later", "twice"))
            handles += 1
        if later and not patient and draw(st.integers(0, 3)) == 0:
            program.append(("wait", later.pop(draw(st.integers(0, len(later) - 1)))))
    return (
        [*program, ("wait_all",)]
        if at_once
        else program + [("wait", handle) for handle in draw(st.permutations(later))]
    )


def joined(parts: Sequence[Programs], size: int) -> Programs:
    """Concatenates message programs, each with its own tags."""
    whole: Programs = [[] for _ in range(size)]
    for number, part in enumerate(parts):
        for program, mine in zip(whole, part, strict=True):
            handles = sum(op in ("isend", "irecv") for op, *_ in program)
            for op, *about in mine:
                if op == "wait":
                    program.append(("wait", about[0] + handles))
                else:
                    peer, tag, group = about
                    program.append((op, peer, tag + 10 * number, group))
    return whole


def run_to_the_end(programs: Programs, groups: Sequence[Any]) -> Machine:
    machine = Machine(programs, groups)
    machine.run(lambda ranks: ranks[0])
    return machine


def awaited(machine: Machine) -> set[Awaits]:
    """Returns the ranks that a machine leaves waiting at the end, with their messages."""
    return {
        Awaits(op.rank, op.peer, op.op.endswith("send"), machine.groups[op.group].name, op.tag)
        for ops in machine.awaited
        for op in ops
        if not machine.is_matched(op)
    }


def said(diagnosis: Any) -> set[Awaits]:
    """Returns the ranks that wait forever according to a diagnosis, with their messages."""
    return {
        Awaits(
            edge.rank,
            edge.peer,
            edge.operation.op.endswith("send"),
            edge.operation.group,
            edge.operation.tag,
        )
        for edge in diagnosis.edges
        if edge.operation is not None
    }


def circles(following: dict[int, int]) -> set[frozenset[int]]:
    """Returns the cycles of ranks that wait for each other."""
    found = set()
    for rank in following:
        way = [rank]
        while following.get(way[-1], rank) not in way:
            way.append(following[way[-1]])
        if following.get(way[-1]) == rank:
            found.add(frozenset(way))
    return found


def circles_of(machine: Machine) -> set[frozenset[int]]:
    return circles({one.rank: one.peer for one in awaited(machine)})


def said_circles(diagnosis: Any) -> set[frozenset[int]]:
    """Returns the cycles that a diagnosis marks."""
    return circles({edge.rank: edge.peer for edge in diagnosis.edges if edge.in_cycle})


def named(diagnosis: Any) -> set[int]:
    """Returns all ranks named by the findings, including nested ones."""
    return {
        rank
        for root in diagnosis.findings
        for finding in (root, *root.consequences)
        for rank in finding.ranks
    }
