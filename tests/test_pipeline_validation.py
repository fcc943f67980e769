"""Which schedules are refused, and what is said: one case a rule, and drawn orders against a graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import Deadlock, ScheduleError
from ringsim.schedules import make_schedule
from ringsim.schedules.engine import evaluate, validate
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, parse_action


def of_rows(stage_ranks: tuple[int, ...], num_microbatches: int, *rows: str) -> Schedule:
    """Reads a schedule of rows of actions."""
    return Schedule("typed", num_microbatches, stage_ranks, tuple(tuple(map(parse_action, row.split())) for row in rows))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        # places
        (of_rows((0,), 0, ""), "num_microbatches must be 1 or more, got 0"),
        (of_rows((0, 2), 1, "0F0 0B0", ""), "stage 1 must be on a rank below 2, got 2"),
        (of_rows((0,), 1, "0F0 1F0 0B0"), r"1F0 must be of a stage below 1, got 1 \(rank 0, position 1\)"),
        (of_rows((0, 1), 1, "0F0 0B0 1F0", "1B0"), r"1F0 must be done by rank 1, which has stage 1, got rank 0 \(rank 0, position 2\)"),
        (of_rows((0,), 1, "0F0 0B0 0F1 0B1"), r"0F1 must be of a microbatch below 1, got 1 \(rank 0, position 2\)"),
        (of_rows((0,), 1, "0F0 0B0 0B0"), r"0B0 must be done once, got a second one \(rank 0, position 2\)"),
        (of_rows((0,), 1, "0F0 0I0 0W0 0B0"), r"0B0 must be the only gradient of its input, got I before it \(rank 0, position 3\)"),
        (Schedule("x", 1, (0,), ((Action(0, "G", 0),),)), r"an action must be one of F, B, I, W, .*, got 0G0 \(rank 0, position 0\)"),
        (of_rows((0, 0), 1, "0F0 0SEND_F0 1F0 1B0 0B0"), r"0SEND_F0 must go between two ranks, got stage 1 on rank 0 too"),
        (of_rows((0, 1), 1, "0F0 0SEND_B0", "1F0"), r"0SEND_B0 must go between two ranks, got stage -1 that does not exist"),
        # complete
        (
            of_rows((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0"),
            r"stage 1 must do the forward pass of microbatch 1, got none \(rank 1\). Add 1F1",
        ),
        (of_rows((0,), 1, "0F0"), r"stage 0 must do the backward pass of microbatch 0, got none \(rank 0\). Add 0B0, or 0I0 and 0W0"),
        (of_rows((0,), 1, "0F0 0I0"), r"stage 0 must make the weights' gradients of microbatch 0, got none \(rank 0\). Add 0W0 after 0I0"),
        # in order
        (of_rows((0,), 1, "0B0 0F0"), r"0B0 must come after 0F0, got it before or without \(rank 0, position 0\)"),
        (of_rows((0,), 1, "0F0 0W0 0I0"), r"0W0 must come after 0I0, got it before or without \(rank 0, position 1\)"),
        (of_rows((0,), 1, "0F0 0B0 0W0"), r"0W0 must come after 0I0, got it before or without \(rank 0, position 2\)"),
        (of_rows((0, 0), 1, "1F0 0F0 1B0 0B0"), r"1F0 must come after 0F0, got it before or without \(rank 0, position 0\)"),
        (of_rows((0, 0), 1, "0F0 1F0 0B0 1B0"), r"0B0 must come after 1B0 or 1I0, got it before or without \(rank 0, position 2\)"),
        # with messages
        (
            of_rows((0, 1), 1, "0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            r"0SEND_F0 must come after 0F0, got it before or without \(rank 0, position 0\)",
        ),
        (
            of_rows((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
            r"1F0 must come after 1RECV_F0, got it before or without \(rank 1, position 0\)",
        ),
        (
            of_rows((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"),
            r"0RECV_B0 must meet 1SEND_B0, got nothing \(rank 0, position 2, from rank 1\)",
        ),
    ],
)
def test_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


# Each rank's own order is fine, but rank 0 wants the gradient of microbatch 1 before it gives microbatch 0 away, and rank 1 the other way.
CIRCLE = of_rows((0, 1), 2, "0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")


def test_says_who_waits_for_whom() -> None:
    with pytest.raises(ScheduleError) as refused:
        validate(CIRCLE)
    assert str(refused.value) == (
        "a schedule must let every rank go on, got a circle: rank 0 waits in 0B1 for 1SEND_B1 of rank 1; rank 1 waits in 1F0 for 0SEND_F0 "
        "of rank 0. Do what one of them waits for earlier. The first is 0B1 (rank 0, position 1)."
    )


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered"])
def test_the_evaluator_finds_the_circle(semantics: str) -> None:
    for schedule in (CIRCLE, lower(CIRCLE)):
        with pytest.raises(Deadlock) as stuck:
            evaluate(schedule, semantics=semantics)  # type: ignore[arg-type]
        assert stuck.value.diagnosis == ((0, Action(0, "B", 1)), (1, Action(1, "F", 0)))


def test_a_circle_of_three_leaves_the_fourth_out() -> None:
    schedule = make_schedule("1f1b", 4, 4)
    rows = list(schedule.actions)
    rows[0] = tuple(map(parse_action, "0F3 0B3 0F0 0B0 0F1 0B1 0F2 0B2".split()))
    with pytest.raises(Deadlock) as stuck:
        evaluate(replace(schedule, actions=tuple(rows)))
    assert stuck.value.diagnosis == ((0, parse_action("0B3")), (1, parse_action("1F0")))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_every_action_is_missed(name: str) -> None:
    for schedule in (make_schedule(name, 2, 3), lower(make_schedule(name, 2, 3))):
        for rank, row in enumerate(schedule.actions):
            for position in range(len(row)):
                shorter = (*row[:position], *row[position + 1 :])
                actions = (*schedule.actions[:rank], shorter, *schedule.actions[rank + 1 :])
                with pytest.raises(ScheduleError):
                    validate(replace(schedule, actions=actions))


@st.composite
def shuffled(draw: st.DrawFn) -> Schedule:
    """Draws a schedule whose rows were changed by a few swaps of neighbours, or shuffled."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]))
    schedule = make_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    rows = [list(row) for row in schedule.actions]
    if draw(st.booleans()):
        rows = [draw(st.permutations(row)) for row in rows]
    for _ in range(draw(st.integers(0, 6))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        place = draw(st.integers(0, len(row) - 2))
        row[place], row[place + 1] = row[place + 1], row[place]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def has_an_order(schedule: Schedule) -> bool:
    """Says whether all computations can be put into one order: an arrow from each to what needs it, and along the rows, and no circle."""
    everything = {action for row in schedule.actions for action in row}
    graph = nx.DiGraph()
    for row in schedule.actions:
        graph.add_edges_from(pairwise(row))
    for stage, kind, microbatch in everything:
        before = {"F": [(stage - 1, "F")], "W": [(stage, "I")]}.get(kind, [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")])
        for place, made_by in before:
            if Action(place, made_by, microbatch) in everything:
                graph.add_edge(Action(place, made_by, microbatch), Action(stage, kind, microbatch))
    return nx.is_directed_acyclic_graph(graph)


@given(shuffled(), st.sampled_from([0, 1, 3]))
def test_valid_means_that_there_is_an_order(schedule: Schedule, ahead: int) -> None:
    def is_valid(schedule: Schedule) -> bool:
        try:
            validate(schedule)
        except ScheduleError:
            return False
        return True

    assert is_valid(schedule) == has_an_order(schedule) == is_valid(lower(schedule, ahead=ahead))
