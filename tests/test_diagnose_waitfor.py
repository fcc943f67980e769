"""The wait-for analysis against a machine that runs the same programs: it says "stuck" of those, and only those, that never finish."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_machine import Instruction, Machine

from ringsim.diagnose.snapshot import Posted, RankSnapshot, Snapshot, snapshot_of_events
from ringsim.diagnose.waitfor import analyse, find_cycle
from ringsim.traces.events import ANY_SOURCE, Group
from ringsim.traces.findings import Operation

RANKS = 4
WORLD = Group("world", tuple(range(RANKS)))
GROUPS = (WORLD, Group("ring:0>1", (0, 1)), Group("ring:1>2", (1, 2)), Group("odd", (1, 3)))


def stuck_ranks(machine: Machine) -> set[int]:
    """Whom the analysis calls stuck, from what a machine has recorded so far."""
    size = len(machine.programs)
    ends = dict.fromkeys(machine.finished, ("exited", ""))
    stuck = analyse(snapshot_of_events(machine.events(), size, ends))
    return set(stuck.ranks) if stuck is not None else set()


def message(rank: int) -> st.SearchStrategy[Instruction]:
    group = st.sampled_from([number for number, group in enumerate(GROUPS) if rank in group.ranks])
    return group.flatmap(
        lambda number: st.tuples(
            st.sampled_from(["send", "recv", "isend", "irecv"]),
            st.sampled_from([peer for peer in GROUPS[number].ranks if peer != rank]),
            st.integers(0, 1),
            st.just(number),
        )
    )


def instruction(rank: int) -> st.SearchStrategy[Instruction]:
    collective = st.tuples(
        st.sampled_from(["barrier", "all_reduce"]), st.sampled_from([number for number, group in enumerate(GROUPS) if rank in group.ranks])
    )
    return st.one_of(
        message(rank), message(rank), message(rank), st.just(("wait_all",)), st.tuples(st.just("wait"), st.integers(0, 3)), collective
    )


@st.composite
def agreeing_programs(draw: st.DrawFn) -> list[list[Instruction]]:
    """Programs made of whole messages, so that many of them finish, with a few instructions then swapped or dropped."""
    programs: list[list[Instruction]] = [[] for _ in range(RANKS)]
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(GROUPS) - 1))
        ranks = GROUPS[number].ranks
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


random_programs = st.tuples(*(st.lists(instruction(rank), max_size=6) for rank in range(RANKS))).map(list)


@given(programs=st.one_of(agreeing_programs(), random_programs), order=st.randoms(use_true_random=False))
def test_stuck_are_exactly_those_that_never_finish(programs: list[list[Instruction]], order: Any) -> None:
    machine = Machine(programs, GROUPS)
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
        machine = Machine(programs, GROUPS)
        machine.run(lambda ranks: ranks[0])
        ends[not machine.unfinished] += 1

    count()
    assert min(ends.values()) > 20, ends


def view(rank: int, *waits: tuple[str, int], state: str = "blocked", group: Group = WORLD, **more: Any) -> RankSnapshot:
    posted = tuple(Posted(Operation(rank, op, peer=peer, tag=0, group=group.name), group, awaited=True, **more) for op, peer in waits)
    return RankSnapshot(state, posted)


RUNNING = RankSnapshot("running")


def test_unmatched_operation_of_a_rank_that_runs_is_no_deadlock() -> None:
    assert analyse(Snapshot((view(0, ("recv", 1)), view(1, ("recv", 2)), RUNNING))) is None


@pytest.mark.parametrize("state", ["stopped", "unknown", "running"])
def test_who_may_go_on_helps(state: str) -> None:
    assert analyse(Snapshot((view(0, ("recv", 1)), RankSnapshot(state)))) is None


@pytest.mark.parametrize("state", ["exited", "failed", "killed"])
def test_who_is_gone_does_not(state: str) -> None:
    stuck = analyse(Snapshot((view(0, ("recv", 1)), RankSnapshot(state), view(2, ("send", 0)))))
    assert stuck is not None
    assert (stuck.ranks, stuck.cycle) == ((0, 2), ())


def test_matched_operation_finishes_unless_its_peer_is_dead() -> None:
    matched = {"counterparts": 1}
    assert analyse(Snapshot((view(0, ("recv", 1), **matched), RankSnapshot("exited")))) is None
    dead = analyse(Snapshot((view(0, ("recv", 1), **matched), RankSnapshot("killed"))))
    assert dead is not None
    assert dead.ranks == (0,)


def test_batch_needs_all_its_operations() -> None:
    stuck = analyse(Snapshot((view(0, ("recv", 1), ("recv", 2)), RUNNING, view(2, ("recv", 0)))))
    assert stuck is not None
    assert stuck.ranks == (0, 2)


def test_batch_is_not_freed_by_half_of_it() -> None:
    """Rank 1 is set free by rank 3, which frees one of the two recvs of rank 0; the other never comes."""
    stuck = analyse(Snapshot((view(0, ("recv", 1), ("recv", 2)), view(1, ("recv", 3)), view(2, ("recv", 0)), RUNNING)))
    assert stuck is not None
    assert stuck.ranks == (0, 2)
    assert [(one.rank, one.peers) for one in stuck.hindrances] == [(0, (2,)), (2, (0,))]


def test_recv_from_any_source_needs_one() -> None:
    any_source = view(0, ("recv", ANY_SOURCE))
    assert analyse(Snapshot((any_source, view(1, ("recv", 0)), RUNNING, RankSnapshot("exited")))) is None
    stuck = analyse(Snapshot((any_source, view(1, ("recv", 0)), RankSnapshot("exited"), RankSnapshot("exited"))))
    assert stuck is not None
    assert (stuck.ranks, stuck.cycle) == ((0, 1), (0, 1))
    assert analyse(Snapshot((view(0, ("recv", ANY_SOURCE), counterparts=1), *[RankSnapshot("exited")] * 3))) is None


def test_collective_needs_everybody_in_the_same_one() -> None:
    def barrier(rank: int, *entered: tuple[int, str]) -> RankSnapshot:
        return view(rank, ("barrier", -1), entered=tuple(Operation(other, op) for other, op in entered))

    both = Snapshot((barrier(0, (1, "barrier")), barrier(1, (0, "barrier")), RUNNING, RUNNING))
    assert analyse(both) is None
    missing = analyse(Snapshot((barrier(0, (1, "barrier")), barrier(1, (0, "barrier")), RankSnapshot("exited"), RUNNING)))
    assert missing is not None
    assert missing.ranks == (0, 1)
    assert {one.peers for one in missing.hindrances} == {(2,)}
    other = analyse(
        Snapshot((barrier(0, (1, "all_reduce")), view(1, ("all_reduce", -1), entered=(Operation(0, "barrier"),)), RUNNING, RUNNING))
    )
    assert other is not None
    assert (other.ranks, other.cycle) == ((0, 1), (0, 1))


def makes(rank: int, members: tuple[int, ...], *entered: tuple[int, tuple[int, ...]]) -> RankSnapshot:
    others = tuple(Operation(other, "new_group", shape=theirs) for other, theirs in entered)
    return RankSnapshot("blocked", (Posted(Operation(rank, "new_group", shape=members), WORLD, awaited=True, entered=others),))


def test_new_group_needs_its_members_only_and_the_same_from_them() -> None:
    assert analyse(Snapshot((makes(0, (0, 1)), RUNNING, RankSnapshot("exited"), RankSnapshot("exited")))) is None
    assert analyse(Snapshot((makes(0, (0, 1), (1, (0, 1))), RankSnapshot("exited")))) is None
    stuck = analyse(Snapshot((makes(0, (0, 1), (1, (1, 2))), makes(1, (1, 2), (0, (0, 1))), RUNNING)))
    assert stuck is not None
    assert stuck.ranks == (0,)  # rank 2 may yet make [1, 2] with rank 1


def test_cycle_is_a_shortest_one() -> None:
    waits = {0: 1, 1: 2, 2: 3, 3: 0, 4: 5, 5: 4, 6: 0}
    world = Snapshot(tuple(view(rank, ("recv", peer)) for rank, peer in waits.items()))
    stuck = analyse(world)
    assert stuck is not None
    assert stuck.ranks == tuple(range(7))
    assert stuck.cycle == (4, 5)
    assert find_cycle([one for one in stuck.hindrances if one.rank < 4]) == (0, 1, 2, 3)


def test_peers_out_of_the_world_are_nobodys_fault() -> None:
    assert analyse(Snapshot((view(0, ("send", 7)), view(1, ("recv", -1))))) is None


def test_large_ring_is_looked_at_in_one_pass() -> None:
    """Each rank waits for the next: whoever is set free sets free the one behind, a thousand times."""
    size = 1000
    ring = [view(rank, ("recv", rank + 1)) for rank in range(size)]
    assert analyse(Snapshot((*ring, RUNNING))) is None
    stuck = analyse(Snapshot((*ring[:-1], view(size - 1, ("recv", 0)))))
    assert stuck is not None
    assert len(stuck.cycle) == size
