"""Random programs of messages: what the diagnosis says, against the evaluator of lists, which knows no records."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from message_programs import Groups, Programs, awaited, circles, joined, named, programs_of_messages, said, said_circles
from part_writer import GROUPS
from rendezvous_machine import Instruction, Machine
from watched_machine import WatchedMachine

from ringsim.diagnose.failure import error_of_kind
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.verdict import judge
from ringsim.schedules.engine import Receive, Run, Send, Wait, run_programs
from ringsim.traces.events import Group
from ringsim.traces.findings import Diagnosis

SIZE = 4
SOME: Groups = {"world": (0, 1, 2, 3), "ring:0>1": (0, 1), "ring:1>2": (1, 2), "odd": (1, 3)}
ALL: Groups = dict.fromkeys(GROUPS, (0, 1, 2, 3))  # those of the parts that are written by hand


def machine_of(programs: Programs, groups: Groups) -> Machine:
    """Returns a machine that will run programs one step after the other, and records them."""
    numbers = {name: number for number, name in enumerate(groups)}
    instructions: list[list[Instruction]] = []
    for program in programs:
        mine: list[Instruction] = []
        handles: list[int] = []  # positions of the posts, in order: the machine counts handles
        for position, operation in enumerate(program):
            if isinstance(operation, Wait):
                mine.append(("wait", handles.index(operation.position)))
            elif isinstance(operation, Send | Receive):
                group, tag = operation.tag  # type: ignore[misc]
                handles.append(position)
                mine.append(("isend" if isinstance(operation, Send) else "irecv", operation.peer, tag, numbers[group]))
        instructions.append(mine)
    return Machine(instructions, [Group(name, ranks) for name, ranks in groups.items()])


def diagnosis_of(machine: Machine) -> Diagnosis:
    """Returns what the diagnosis says of all that a machine has recorded so far."""
    ends = dict.fromkeys(machine.finished, ("exited", "has returned"))
    return judge(snapshot_of_events(machine.events(), len(machine.programs), ends))


def agree(diagnosis: Diagnosis, programs: Programs, run: Run) -> None:
    """Compares a diagnosis of the end with what the evaluator says."""
    assert said(diagnosis) == awaited(programs, run)
    assert said_circles(diagnosis) == circles(run)
    assert bool(diagnosis.findings) == bool(run.blocked)
    assert named(diagnosis) >= {blocked.rank for blocked in run.blocked}
    kinds = {finding.kind for finding in diagnosis.findings}
    assert kinds <= {"deadlock", "tag_mismatch", "group_mismatch", "peer_exited"}
    waits_for_gone = {one.peer for one in run.blocked} - {one.rank for one in run.blocked}
    if not waits_for_gone:
        assert "peer_exited" not in kinds
    if not circles(run):
        assert "deadlock" not in kinds
    if run.blocked:
        assert error_of_kind(diagnosis.kind).__name__ == ("PeerExited" if diagnosis.kind == "peer_exited" else "Deadlock")


@given(programs=programs_of_messages(SIZE, SOME), order=st.randoms(use_true_random=False))
def test_a_trace_is_called_stuck_where_the_evaluator_says_so(programs: Programs, order: Any) -> None:
    run = run_programs(programs)
    machine = machine_of(programs, SOME)
    on_the_way: list[Diagnosis] = []
    machine.run(order.choice, lambda now: on_the_way.append(diagnosis_of(now)) if order.random() < 0.3 else None)
    assert machine.unfinished == {blocked.rank for blocked in run.blocked}
    for one in on_the_way:  # no false alarm at any moment, and never for another reason than that of the end
        assert said(one) <= awaited(programs, run)
    assert all(said(before) <= said(after) for before, after in itertools.pairwise(on_the_way))
    agree(diagnosis_of(machine), programs, run)


@given(programs=programs_of_messages(SIZE, ALL), order=st.randoms(use_true_random=False))
def test_the_watcher_calls_ranks_stuck_where_the_evaluator_says_so(programs: Programs, order: Any) -> None:
    run = run_programs(programs)
    with tempfile.TemporaryDirectory() as directory, WatchedMachine(Path(directory), machine_of(programs, ALL)) as watched:
        on_the_way = watched.run(order)
        at_the_end = watched.look_at_the_end()
    for verdict in on_the_way:
        assert said(verdict.diagnosis) <= awaited(programs, run)
    assert (at_the_end is not None) == bool(run.blocked)
    if at_the_end is not None:
        agree(at_the_end.diagnosis, programs, run)


def count_ends(draw_programs: Callable[[], st.SearchStrategy[Programs]]) -> dict[str, int]:
    """Counts how drawn programs end."""
    ends = {"end": 0, "circle": 0, "wait for one that has ended": 0}

    @settings(max_examples=300, database=None, derandomize=True)  # one draw, the same in every run
    @given(draw_programs())
    def count(programs: Programs) -> None:
        run = run_programs(programs)
        ends["circle" if run.cycle else "wait for one that has ended" if run.blocked else "end"] += 1

    count()
    return ends


def test_drawn_programs_end_in_all_ways() -> None:
    """The properties would say little of programs that all end alike."""
    ends = count_ends(lambda: programs_of_messages(SIZE, SOME))
    assert min(ends.values()) > 20, ends


@given(parts=st.lists(programs_of_messages(SIZE, SOME), max_size=3))
def test_programs_one_behind_the_other_are_stuck_where_one_of_them_is(parts: list[Programs]) -> None:
    runs = [run_programs(part) for part in parts]
    whole = run_programs(joined(parts, SIZE))
    assert bool(whole.blocked) == any(run.blocked for run in runs)
    assert len(whole.messages) <= sum(len(run.messages) for run in runs)


def test_messages_of_two_groups_never_meet() -> None:
    apart: Programs = [
        [Send(1, ("world", 0)), Wait(0)],
        [Receive(0, ("ring:0>1", 0)), Wait(0)],
    ]
    run = run_programs(apart)
    assert [(blocked.rank, blocked.peer) for blocked in run.cycle] == [(0, 1), (1, 0)]
    groups = {"world": (0, 1), "ring:0>1": (0, 1)}
    machine = machine_of(apart, groups)
    machine.run(lambda ranks: ranks[0])
    diagnosis = diagnosis_of(machine)
    agree(diagnosis, apart, run)
    assert diagnosis.kind == "group_mismatch"
