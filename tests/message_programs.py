"""Programs of messages drawn at random, as the lists of operations that ``run_programs`` evaluates, and what must be said of them.

A tag is (group, tag): messages of two groups never meet, whatever their tags, and that is all that a group is to the evaluator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from ringsim.schedules.engine import Blocked, Operation, Receive, Run, Send, Wait
from ringsim.traces.events import SEND
from ringsim.traces.findings import Diagnosis

Programs = list[list[Operation]]
Groups = dict[str, tuple[int, ...]]  # members by name


class Awaits(NamedTuple):
    """A rank that waits in vain: in what, and for whom."""

    rank: int
    peer: int
    sends: bool
    group: str
    tag: int


@st.composite
def programs_of_messages(draw: st.DrawFn, size: int, groups: Groups, most: int = 8, tags: int = 2) -> Programs:
    """Draws programs of which about half come to an end: whole messages, some spoilt, waited for in any order, never, or twice.

    Args:
        draw: hypothesis's.
        size: number of ranks.
        groups: those that messages may use.
        most: messages at most.
        tags: number of tags.
    """
    posts: list[list[Send | Receive]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(0, most))):
        group = draw(st.sampled_from(sorted(groups)))
        source, target = draw(st.permutations(groups[group]))[:2]
        tag = group, draw(st.integers(0, tags - 1))
        posts[source].append(Send(target, tag))
        posts[target].append(Receive(source, tag))
    spoil = st.sampled_from(["no"] * 12 + ["drop", "swap", "tag", "again"])
    programs: Programs = []
    for mine in posts:
        what = draw(spoil) if mine else "no"
        at = draw(st.integers(0, len(mine) - 1)) if mine else 0
        if what == "drop":
            del mine[at]
        elif what == "swap":
            mine.insert(0, mine.pop(at))
        elif what == "again":
            mine.insert(0, mine[at])
        elif what == "tag":
            group, tag = mine[at].tag  # type: ignore[misc]  # the tags of these programs are pairs
            mine[at] = type(mine[at])(mine[at].peer, (group, (tag + 1) % tags))
        programs.append(draw(_with_waits(mine)))
    return programs


@st.composite
def _with_waits(draw: st.DrawFn, posts: Sequence[Send | Receive]) -> list[Operation]:
    """Puts waits behind posts: at once (a blocking call), a few posts later, at the end in any order, never, or twice."""
    program: list[Operation] = []
    later: list[int] = []  # positions of posts that are still to be waited for
    patient = draw(st.booleans())  # waits for nothing before all is posted
    for post in posts:
        position = len(program)
        program.append(post)
        how = "later" if patient else draw(st.sampled_from(["at once", "at once", "later", "later", "later", "twice", "never"]))
        if how in ("at once", "twice"):
            program.append(Wait(position))
        if how in ("later", "twice"):
            later.append(position)
        if later and not patient and draw(st.integers(0, 3)) == 0:
            program.append(Wait(later.pop(draw(st.integers(0, len(later) - 1)))))
    return program + [Wait(position) for position in draw(st.permutations(later))]


def joined(parts: Sequence[Programs], size: int) -> Programs:
    """Writes programs one behind the other, each with tags of its own."""
    whole: Programs = [[] for _ in range(size)]
    for number, part in enumerate(parts):
        for program, mine in zip(whole, part, strict=True):
            begin = len(program)
            for operation in mine:
                if isinstance(operation, Wait):
                    program.append(Wait(begin + operation.position))
                elif isinstance(operation, Send | Receive):
                    group, tag = operation.tag  # type: ignore[misc]
                    program.append(type(operation)(operation.peer, (group, tag + 10 * number)))
    return whole


def awaited(programs: Programs, run: Run) -> set[Awaits]:
    """Returns who waits for ever, and in what, by the evaluator."""
    found = set()
    for blocked in run.blocked:
        post = programs[blocked.rank][blocked.post]
        assert isinstance(post, Send | Receive)
        group, tag = post.tag  # type: ignore[misc]
        found.add(Awaits(blocked.rank, blocked.peer, isinstance(post, Send), group, tag))
    return found


def circles(run: Run) -> set[frozenset[int]]:
    """Returns all circles of ranks that wait for each other: each waits for one other, so no two of them touch."""
    left, found = list(run.blocked), set()
    while cycle := _first_cycle(run, left):
        found.add(frozenset(blocked.rank for blocked in cycle))
        left = [blocked for blocked in left if blocked not in cycle]
    return found


def _first_cycle(run: Run, blocked: Sequence[Blocked]) -> tuple[Blocked, ...]:
    return Run(run.times, run.messages, tuple(blocked)).cycle


def said(diagnosis: Diagnosis) -> set[Awaits]:
    """Returns who waits for ever, and in what, by a diagnosis."""
    return {
        Awaits(edge.rank, edge.peer, edge.operation.kind == SEND, edge.operation.group, edge.operation.tag)
        for edge in diagnosis.edges
        if edge.operation is not None
    }


def said_circles(diagnosis: Diagnosis) -> set[frozenset[int]]:
    """Returns the circles that a diagnosis marks."""
    following = {edge.rank: edge.peer for edge in diagnosis.edges if edge.in_cycle}
    found = set()
    for rank in following:
        circle = [rank]
        while following[circle[-1]] not in circle:
            circle.append(following[circle[-1]])
        found.add(frozenset(circle))
    return found


def named(diagnosis: Diagnosis) -> set[int]:
    """Returns all ranks that the findings name, and what is folded under them."""
    return {rank for root in diagnosis.findings for finding in (root, *root.consequences) for rank in finding.ranks}
