"""Random programs in which recvs from any rank and from a particular one share a tag: what the records leave open, and rest settles."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from contested_machine import ContestedMachine
from hypothesis import given
from hypothesis import strategies as st
from part_writer import GROUPS
from rendezvous_machine import Instruction, Machine, wait_for_each
from watched_machine import WatchedMachine

from ringsim.diagnose.explain import explain
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.waitfor import Stuck, analyse
from ringsim.traces.events import ANY_SOURCE, Group
from ringsim.traces.value import Trace

SIZE = 3
WORLDS = [Group(name, tuple(range(SIZE))) for name in GROUPS]


@st.composite
def contested_programs(draw: st.DrawFn, *, at_once: bool = False) -> list[list[Instruction]]:
    """Draws programs of messages under few tags, of which any may be received from anybody; some lack their other side.

    Handles are waited for one after the other, as Gloo's are, or ``at_once``.
    """
    programs: list[list[Instruction]] = [[] for _ in range(SIZE)]
    for _ in range(draw(st.integers(1, 7))):
        source, target = draw(st.permutations(range(SIZE)))[:2]
        group, tag = draw(st.sampled_from([0, 0, 0, 1])), draw(st.sampled_from([0, 0, 1]))
        if draw(st.integers(0, 6)):
            programs[source].append((draw(st.sampled_from(["send", "isend"])), target, tag, group))
        if draw(st.integers(0, 6)):
            programs[target].append((draw(st.sampled_from(["recv", "irecv"])), draw(st.sampled_from([source, ANY_SOURCE])), tag, group))
    for program in programs:
        if draw(st.booleans()):
            program.extend([("wait_all",)] if at_once else wait_for_each(program))
    return programs


def ranks_of(stuck: Stuck | None) -> set[int]:
    return set(stuck.ranks) if stuck is not None else set()


@given(programs=contested_programs(), order=st.randoms(use_true_random=False))
def test_a_trace(programs: list[list[Instruction]], order: Any) -> None:
    machine = ContestedMachine(programs, WORLDS, order.choice)
    suspected: list[set[int]] = []

    def look(now: Machine) -> None:
        suspected.append(ranks_of(analyse(snapshot_of_events(now.events(), SIZE, dict.fromkeys(now.finished, ("exited", ""))))))

    machine.run(order.choice, lambda now: look(now) if order.random() < 0.4 else None)
    look(machine)
    assert all(ranks <= machine.unfinished for ranks in suspected)  # the records alone: no false alarm
    world = snapshot_of_events(machine.events(), SIZE, dict.fromkeys(machine.finished, ("exited", "")))
    assert ranks_of(analyse(world.settle())) == machine.unfinished  # with the knowledge that all has come to rest: none missed either
    ends = [{"rank": rank, "state": "exited"} for rank in machine.finished]
    trace = Trace(machine.events(), {"world_size": SIZE, "ends": ends, "at_rest": True})
    assert bool(explain(trace).edges) == bool(machine.unfinished)


@given(programs=contested_programs(), order=st.randoms(use_true_random=False))
def test_the_watcher(programs: list[list[Instruction]], order: Any) -> None:
    machine = ContestedMachine(programs, WORLDS, order.choice)
    with tempfile.TemporaryDirectory() as directory, WatchedMachine(Path(directory), machine) as watched:
        on_the_way = watched.run(order)
        at_the_end = watched.look_at_the_end()
    assert all(set(verdict.ranks) <= machine.unfinished for verdict in on_the_way)
    # At the end, of whom the records tell for certain come first; the others are their consequence, or come without them.
    assert bool(at_the_end) == bool(machine.unfinished)


@given(programs=contested_programs(at_once=True), order=st.randoms(use_true_random=False))
def test_the_watcher_keeps_quiet_where_any_of_several_may_be_missing(programs: list[list[Instruction]], order: Any) -> None:
    machine = ContestedMachine(programs, WORLDS, order.choice)
    with tempfile.TemporaryDirectory() as directory, WatchedMachine(Path(directory), machine) as watched:
        on_the_way = watched.run(order)
    assert all(set(verdict.ranks) <= machine.unfinished for verdict in on_the_way)


def test_who_waits_for_another_message_too_may_have_got_the_one_in_doubt() -> None:
    """Rank 0 waits at once for a send that rank 1, gone by now, has received from anybody, and for one that rank 2 will receive."""
    programs: list[list[Instruction]] = [
        [("isend", 1, 0, 0), ("isend", 2, 0, 0), ("wait_all",)],
        [("irecv", ANY_SOURCE, 0, 0)],
        [("recv", 0, 0, 0)],
    ]
    machine = Machine(programs, WORLDS)
    for rank in (0, 0, 0, 1):
        machine.step(rank)
    before = snapshot_of_events(machine.events(), SIZE, {1: ("exited", "")})
    assert ranks_of(analyse(before.settle())) == set()
    machine.step(2)
    assert machine.step(0)
    assert 0 in machine.finished
