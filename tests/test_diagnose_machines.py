"""Programs that a state machine runs in any order: stuck are the ranks that never finish."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_programs import (
    Programs,
    awaited,
    circles_of,
    named,
    programs_of_messages,
    said,
    said_circles,
)
from part_writer import GROUPS
from rendezvous_machine import Machine
from watched_parts import Bench, WatchedMachine

from ringsim import Trace
from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import error_of_kind
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.verdict import judge
from ringsim.diagnose.waitfor import analyse
from ringsim.traces.events import ANY_SOURCE, Group
from ringsim.traces.findings import Diagnosis

SIZE = 4
SOME_GROUPS = (
    Group("world", tuple(range(SIZE))),
    Group("ring:0>1", (0, 1)),
    Group("ring:1>2", (1, 2)),
    Group("odd", (1, 3)),
)
FEW = 3  # ranks, where recvs from any source take part
WORLDS = [Group(name, tuple(range(FEW))) for name in GROUPS]  # of hand-written parts


def stuck_ranks(machine: Machine, *, settled: bool = False) -> set[int]:
    """Returns the ranks that the analysis calls stuck, from the records of a machine."""
    ends = dict.fromkeys(machine.finished, ("exited", ""))
    snapshot = snapshot_of_events(machine.events(), len(machine.programs), ends)
    stuck = analyse(snapshot.settle() if settled else snapshot)
    return set(stuck.ranks) if stuck is not None else set()


def diagnosis_of(machine: Machine) -> Diagnosis:
    """Returns the diagnosis of all records of a machine so far."""
    ends = dict.fromkeys(machine.finished, ("exited", "has returned"))
    return judge(snapshot_of_events(machine.events(), len(machine.programs), ends))


def agree(diagnosis: Diagnosis, machine: Machine) -> None:
    """Compares a diagnosis of the end with a machine that has run only messages of two ranks."""
    stuck = awaited(machine)
    assert said(diagnosis) == stuck
    assert said_circles(diagnosis) == circles_of(machine)
    assert bool(diagnosis.findings) == bool(stuck)
    assert named(diagnosis) >= machine.unfinished == {one.rank for one in stuck}
    kinds = {finding.kind for finding in diagnosis.findings}
    assert kinds <= {"deadlock", "tag_mismatch", "group_mismatch", "peer_exited"}
    assert {one.peer for one in stuck} - machine.unfinished or "peer_exited" not in kinds
    assert circles_of(machine) or "deadlock" not in kinds
    if stuck:
        error = "PeerExited" if diagnosis.kind == "peer_exited" else "Deadlock"
        assert error_of_kind(diagnosis.kind).__name__ == error


@given(
    programs=programs_of_messages(SOME_GROUPS, collectives=True),
    order=st.randoms(use_true_random=False),
)
def test_stuck_are_exactly_those_that_never_finish(programs: Programs, order: Any) -> None:
    machine = Machine(programs, SOME_GROUPS)
    suspected: list[set[int]] = []
    machine.run(order.choice, lambda now: suspected.append(stuck_ranks(now)))
    # No false alarm at any moment, whatever was posted; once stuck, always stuck; and
    # at the end, all ranks that did not finish.
    assert all(ranks <= machine.unfinished for ranks in suspected)
    assert all(before <= after for before, after in itertools.pairwise(suspected))
    assert stuck_ranks(machine) == machine.unfinished


@given(programs=programs_of_messages(SOME_GROUPS), order=st.randoms(use_true_random=False))
def test_what_is_said_of_messages_is_what_they_wait_for(programs: Programs, order: Any) -> None:
    machine = Machine(programs, SOME_GROUPS)
    on_the_way: list[Diagnosis] = []
    machine.run(
        order.choice,
        lambda now: on_the_way.append(diagnosis_of(now)) if order.random() < 0.3 else None,
    )
    for one in on_the_way:  # always for the same reason as at the end
        assert said(one) <= awaited(machine)
    assert all(said(before) <= said(after) for before, after in itertools.pairwise(on_the_way))
    agree(diagnosis_of(machine), machine)


def unknown_sources(machine: Machine) -> bool:
    """Returns whether a recv from any source has got an unknown message and is not awaited yet."""
    return any(
        op.peer == ANY_SOURCE and op.done < 0 and op.partner is not None
        for posted in machine.posted
        for op in posted
    )


@pytest.mark.parametrize("apart", [True, False])
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_a_trace_with_recvs_from_anybody(apart: bool, data: st.DataObject, order: Any) -> None:
    programs = data.draw(programs_of_messages(WORLDS, anybody=True, apart=apart))
    machine = Machine(programs, WORLDS, order.choice)
    suspected: list[set[int]] = []
    machine.run(
        order.choice,
        lambda now: suspected.append(stuck_ranks(now)) if order.random() < 0.4 else None,
    )
    suspected.append(stuck_ranks(machine))
    # the records alone: no false alarm
    assert all(ranks <= machine.unfinished for ranks in suspected)
    if apart and not unknown_sources(machine):
        assert suspected[-1] == machine.unfinished
    # knowing that no message is in flight: also no missed rank
    assert stuck_ranks(machine, settled=True) == machine.unfinished
    ends = [{"rank": rank, "state": "exited"} for rank in machine.finished]
    trace = Trace(machine.events(), {"world_size": FEW, "ends": ends, "at_rest": True})
    assert bool(explain(trace).edges) == bool(machine.unfinished)


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), FEW) as made:
        yield made


@pytest.mark.parametrize(
    ("anybody", "apart", "at_once"),
    [(False, False, False), (True, True, False), (True, False, True)],
)
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_the_watcher_tells_who_never_finishes(
    anybody: bool, apart: bool, at_once: bool, data: st.DataObject, order: Any
) -> None:
    programs = data.draw(
        programs_of_messages(WORLDS, anybody=anybody, apart=apart, at_once=at_once)
    )
    machine = Machine(programs, WORLDS, order.choice)
    with bench() as made:
        on_the_way = WatchedMachine(made, machine).run(order)
        at_the_end, _ = made.look_for(10.0, tick_s=0.5)
    assert all(set(verdict.ranks) <= machine.unfinished for verdict in on_the_way)
    if at_once:  # then any of several may be the missing one
        return
    # Ranks that are certain from the records come first; the others are consequences, or appear
    # without them.
    assert bool(at_the_end) == bool(machine.unfinished)
    if (apart or not anybody) and not unknown_sources(machine):
        assert (set(at_the_end.ranks) if at_the_end is not None else set()) == machine.unfinished
    if not anybody:
        assert all(said(verdict.diagnosis) <= awaited(machine) for verdict in on_the_way)
        if at_the_end is not None:
            agree(at_the_end.diagnosis, machine)


def test_who_waits_for_another_message_too_may_have_got_the_one_in_doubt() -> None:
    """Rank 1 has received one of rank 0's sends and is gone; rank 2 will receive the other one."""
    programs: Programs = [
        [("isend", 1, 0, 0), ("isend", 2, 0, 0), ("wait_all",)],
        [("irecv", ANY_SOURCE, 0, 0)],
        [("recv", 0, 0, 0)],
    ]
    machine = Machine(programs, WORLDS)
    for rank in (0, 0, 0, 1):
        machine.step(rank)
    assert stuck_ranks(machine, settled=True) == set()
    machine.step(2)
    assert machine.step(0)
    assert 0 in machine.finished
