"""Programs that a machine runs, step by step in any order: "stuck" is said of those, and only those, that never finish."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contested_machine import ContestedMachine
from hypothesis import given, settings
from hypothesis import strategies as st
from message_programs import Groups, Programs, awaited, circles, joined, named, programs_of_messages, said, said_circles
from part_writer import GROUPS
from rendezvous_machine import Instruction, Machine, wait_for_each
from watched_machine import WatchedMachine

from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import error_of_kind
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.diagnose.verdict import judge
from ringsim.diagnose.waitfor import analyse
from ringsim.schedules.engine import Receive, Run, Send, Wait, run_programs
from ringsim.traces.events import ANY_SOURCE, Group
from ringsim.traces.findings import Diagnosis
from ringsim.traces.value import Trace

SIZE = 4
SOME_GROUPS = (Group("world", tuple(range(SIZE))), Group("ring:0>1", (0, 1)), Group("ring:1>2", (1, 2)), Group("odd", (1, 3)))
FEW = 3  # ranks, where recvs from any source take part
WORLDS = [Group(name, tuple(range(FEW))) for name in GROUPS]


# -- messages and collectives


def stuck_ranks(machine: Machine, *, settled: bool = False) -> set[int]:
    """Whom the analysis calls stuck, from what a machine has recorded so far."""
    snapshot = snapshot_of_events(machine.events(), len(machine.programs), dict.fromkeys(machine.finished, ("exited", "")))
    stuck = analyse(snapshot.settle() if settled else snapshot)
    return set(stuck.ranks) if stuck is not None else set()


def message(rank: int) -> st.SearchStrategy[Instruction]:
    group = st.sampled_from([number for number, group in enumerate(SOME_GROUPS) if rank in group.ranks])
    return group.flatmap(
        lambda number: st.tuples(
            st.sampled_from(["send", "recv", "isend", "irecv"]),
            st.sampled_from([peer for peer in SOME_GROUPS[number].ranks if peer != rank]),
            st.integers(0, 1),
            st.just(number),
        )
    )


def instruction(rank: int) -> st.SearchStrategy[Instruction]:
    collective = st.tuples(
        st.sampled_from(["barrier", "all_reduce"]),
        st.sampled_from([number for number, group in enumerate(SOME_GROUPS) if rank in group.ranks]),
    )
    return st.one_of(
        message(rank), message(rank), message(rank), st.just(("wait_all",)), st.tuples(st.just("wait"), st.integers(0, 3)), collective
    )


@st.composite
def agreeing_programs(draw: st.DrawFn) -> list[list[Instruction]]:
    """Programs made of whole messages, so that many of them finish, with a few instructions then swapped or dropped."""
    programs: list[list[Instruction]] = [[] for _ in range(SIZE)]
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(SOME_GROUPS) - 1))
        ranks = SOME_GROUPS[number].ranks
        if draw(st.integers(0, 5)) == 0:
            for rank in ranks:
                programs[rank].append(("barrier", number))
            continue
        src, dst = draw(st.permutations(ranks))[:2]
        tag = draw(st.integers(0, 1))
        programs[src].append((draw(st.sampled_from(["send", "isend"])), dst, tag, number))
        programs[dst].append((draw(st.sampled_from(["recv", "irecv"])), src, tag, number))
    for rank, program in enumerate(programs):
        if program and draw(st.booleans()):
            program.insert(draw(st.integers(0, len(program))), ("wait_all",))
        if len(program) > 1 and draw(st.integers(0, 3)) == 0:
            first = draw(st.integers(0, len(program) - 2))
            program[first : first + 2] = program[first : first + 2][::-1]
        if program and draw(st.integers(0, 5)) == 0:
            program.pop(draw(st.integers(0, len(program) - 1)))
        if draw(st.integers(0, 5)) == 0:
            program.append(draw(instruction(rank)))
    return programs


random_programs = st.tuples(*(st.lists(instruction(rank), max_size=6) for rank in range(SIZE))).map(list)


@given(programs=st.one_of(agreeing_programs(), random_programs), order=st.randoms(use_true_random=False))
def test_stuck_are_exactly_those_that_never_finish(programs: list[list[Instruction]], order: Any) -> None:
    machine = Machine(programs, SOME_GROUPS)
    suspected: list[set[int]] = []
    machine.run(order.choice, lambda now: suspected.append(stuck_ranks(now)))
    # No false alarm at any moment, whatever had been posted by then; once stuck, always stuck; and in the end all who did not finish.
    assert all(ranks <= machine.unfinished for ranks in suspected)
    assert all(before <= after for before, after in itertools.pairwise(suspected))
    assert stuck_ranks(machine) == machine.unfinished


def test_programs_of_the_property_end_both_ways() -> None:
    """The property would say little if all its programs finished, or none."""
    ends = {True: 0, False: 0}

    @settings(max_examples=200, database=None, derandomize=True)  # one draw, the same in every run
    @given(agreeing_programs())
    def count(programs: list[list[Instruction]]) -> None:
        machine = Machine(programs, SOME_GROUPS)
        machine.run(lambda ranks: ranks[0])
        ends[not machine.unfinished] += 1

    count()
    assert min(ends.values()) > 20, ends


# -- recvs from any source


@st.composite
def programs_from_anybody(draw: st.DrawFn, *, apart: bool, at_once: bool = False) -> list[list[Instruction]]:
    """Draws programs of messages under few tags, of which any may be received from anybody; some lack their other side.

    Where they are kept ``apart``, such messages have a tag of their own. Handles are waited for one after the other, as Gloo's are, or
    ``at_once``.
    """
    programs: list[list[Instruction]] = [[] for _ in range(FEW)]
    for _ in range(draw(st.integers(1, 7))):
        source, target = draw(st.permutations(range(FEW)))[:2]
        group, tag, from_any = draw(st.sampled_from([0, 0, 0, 1])), draw(st.sampled_from([0, 0, 1])), draw(st.booleans())
        tag = 9 if apart and from_any else tag
        if draw(st.integers(0, 6)):
            programs[source].append((draw(st.sampled_from(["send", "isend"])), target, tag, group))
        if draw(st.integers(0, 6)):
            programs[target].append((draw(st.sampled_from(["recv", "irecv"])), ANY_SOURCE if from_any else source, tag, group))
    for program in programs:
        if draw(st.booleans()):
            program.extend([("wait_all",)] if at_once else wait_for_each(program))
    return programs


def unknown_sources(machine: Machine) -> bool:
    """Tells whether a recv from anybody has got a message, and nobody has waited for it yet: which one it has is not in the records."""
    return any(op.peer == ANY_SOURCE and op.done < 0 and machine.source(op) is not None for posted in machine.posted for op in posted)


@pytest.mark.parametrize("apart", [True, False])
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_a_trace_with_recvs_from_anybody(apart: bool, data: st.DataObject, order: Any) -> None:
    machine = ContestedMachine(data.draw(programs_from_anybody(apart=apart)), WORLDS, order.choice)
    suspected: list[set[int]] = []
    machine.run(order.choice, lambda now: suspected.append(stuck_ranks(now)) if order.random() < 0.4 else None)
    suspected.append(stuck_ranks(machine))
    assert all(ranks <= machine.unfinished for ranks in suspected)  # the records alone: no false alarm
    if apart and not unknown_sources(machine):
        assert suspected[-1] == machine.unfinished
    assert stuck_ranks(machine, settled=True) == machine.unfinished  # with the knowledge that all has come to rest: none missed either
    ends = [{"rank": rank, "state": "exited"} for rank in machine.finished]
    trace = Trace(machine.events(), {"world_size": FEW, "ends": ends, "at_rest": True})
    assert bool(explain(trace).edges) == bool(machine.unfinished)


@pytest.mark.parametrize(("apart", "at_once"), [(True, False), (False, False), (False, True)])
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_the_watcher_with_recvs_from_anybody(apart: bool, at_once: bool, data: st.DataObject, order: Any) -> None:
    machine = ContestedMachine(data.draw(programs_from_anybody(apart=apart, at_once=at_once)), WORLDS, order.choice)
    with tempfile.TemporaryDirectory() as directory, WatchedMachine(Path(directory), machine) as watched:
        on_the_way = watched.run(order)
        at_the_end = watched.look_at_the_end()
    assert all(set(verdict.ranks) <= machine.unfinished for verdict in on_the_way)
    if not at_once:  # else any of several may be what is missing
        # Of whom the records tell for certain come first; the others are their consequence, or come without them.
        assert bool(at_the_end) == bool(machine.unfinished)
        if apart and not unknown_sources(machine):
            assert (set(at_the_end.ranks) if at_the_end is not None else set()) == machine.unfinished


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
    assert stuck_ranks(machine, settled=True) == set()
    machine.step(2)
    assert machine.step(0)
    assert 0 in machine.finished


# -- what is said, against the evaluator of lists, which knows no records

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
    apart: Programs = [[Send(1, ("world", 0)), Wait(0)], [Receive(0, ("ring:0>1", 0)), Wait(0)]]
    run = run_programs(apart)
    assert [(blocked.rank, blocked.peer) for blocked in run.cycle] == [(0, 1), (1, 0)]
    groups = {"world": (0, 1), "ring:0>1": (0, 1)}
    machine = machine_of(apart, groups)
    machine.run(lambda ranks: ranks[0])
    diagnosis = diagnosis_of(machine)
    agree(diagnosis, apart, run)
    assert diagnosis.kind == "group_mismatch"
