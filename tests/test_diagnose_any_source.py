"""Random programs with recvs from any rank: no false alarm, whoever comes first, and none missed where it is known who came."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from part_writer import GROUPS
from rendezvous_machine import Instruction, Machine, wait_for_each
from watched_machine import WatchedMachine

from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.waitfor import analyse
from ringsim.traces.events import ANY_SOURCE, Group

SIZE = 4
WORLDS = [Group(name, tuple(range(SIZE))) for name in GROUPS]
ANY_TAG = 9


@st.composite
def programs_with_servers(draw: st.DrawFn) -> list[list[Instruction]]:
    """Draws programs of messages, of which some go to a rank that takes them from anybody."""
    programs: list[list[Instruction]] = [[] for _ in range(SIZE)]
    for _ in range(draw(st.integers(1, 8))):
        source, target = draw(st.permutations(range(SIZE)))[:2]
        group = draw(st.integers(0, len(WORLDS) - 1))
        from_any = draw(st.booleans())
        tag = ANY_TAG if from_any else draw(st.integers(0, 1))
        if draw(st.integers(0, 12)):
            programs[source].append((draw(st.sampled_from(["send", "isend"])), target, tag, group))
        if draw(st.integers(0, 12)):
            programs[target].append((draw(st.sampled_from(["recv", "irecv"])), ANY_SOURCE if from_any else source, tag, group))
    for program in programs:
        program.extend(draw(st.sampled_from([[], [("wait_all",)], wait_for_each(program)])))
    return programs


def unknown_sources(machine: Machine) -> bool:
    """Tells whether a recv from anybody has got a message, and nobody has waited for it yet: which one it has is not in the records."""
    return any(op.peer == ANY_SOURCE and op.done < 0 and machine.source(op) is not None for posted in machine.posted for op in posted)


@given(programs=programs_with_servers(), order=st.randoms(use_true_random=False))
def test_a_trace(programs: list[list[Instruction]], order: Any) -> None:
    machine = Machine(programs, WORLDS)
    suspected: list[set[int]] = []

    def look(now: Machine) -> None:
        stuck = analyse(snapshot_of_events(now.events(), SIZE, dict.fromkeys(now.finished, ("exited", ""))))
        suspected.append(set(stuck.ranks) if stuck is not None else set())

    machine.run(order.choice, lambda now: look(now) if order.random() < 0.4 else None)
    look(machine)
    assert all(ranks <= machine.unfinished for ranks in suspected)
    if not unknown_sources(machine):
        assert suspected[-1] == machine.unfinished


@given(programs=programs_with_servers(), order=st.randoms(use_true_random=False))
def test_the_watcher(programs: list[list[Instruction]], order: Any) -> None:
    machine = Machine(programs, WORLDS)
    with tempfile.TemporaryDirectory() as directory, WatchedMachine(Path(directory), machine) as watched:
        on_the_way = watched.run(order)
        at_the_end = watched.look_at_the_end()
    assert all(set(verdict.ranks) <= machine.unfinished for verdict in on_the_way)
    if not unknown_sources(machine):
        assert (set(at_the_end.ranks) if at_the_end is not None else set()) == machine.unfinished


def test_one_message_may_be_got_by_either_of_two_recvs() -> None:
    """Gloo gives it to the recv that was open when it came: here the one from anybody, or the one from rank 1."""
    receives: list[Instruction] = [("irecv", ANY_SOURCE, ANY_TAG, 0), ("irecv", 1, ANY_TAG, 0), ("wait", 0)]
    for sends, ranks in [([("isend", 0, ANY_TAG, 0)], ()), ([], (0,))]:
        machine = Machine([receives, sends], [Group("world", (0, 1))])
        for rank in (0, 1, 0, 0):
            machine.step(rank)
        stuck = analyse(snapshot_of_events(machine.events(), 2, {1: ("exited", "")}))
        assert (stuck.ranks if stuck is not None else ()) == ranks
