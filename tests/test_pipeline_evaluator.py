"""The times of schedules: drawn, and against longest paths with drawn costs. The closed forms have tests of their own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import Evaluation, Semantics, TimedMessage, evaluate
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, parse_action

CASES = [*((name, None) for name in SCHEDULE_NAMES), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]


def draw(evaluation: Evaluation) -> list[str]:
    """Draws one character a unit of time: the microbatch of a forward, = in a backward, . where nothing is done."""
    rows = []
    for rank in range(evaluation.schedule.num_ranks):
        units = ["."] * int(evaluation.makespan)
        for action, start, end in evaluation.get_computations(rank):
            units[int(start) : int(end)] = ([str(action.microbatch)] if action.kind == "F" else ["="]) * int(end - start)
        rows.append("".join(units))
    return rows


@pytest.mark.parametrize(
    ("name", "ahead", "semantics", "drawing"),
    [
        # A receive that blocks: a message starts when its receiver has nothing else to do.
        ("gpipe", 0, "rendezvous", ["012............==.==.==", "..0.1.2.....==.==.==...", "....0.1.2======........"]),
        # Posted one computation ahead, it travels meanwhile: the fill and the drain pay once each.
        ("gpipe", 1, "rendezvous", ["012..........======", "..012.....======...", "....012======......"]),
        ("gpipe", 1, "buffered", ["012..........======", "..012.....======...", "....012======......"]),
        # 1F1B pays for every microbatch, whoever waits for whom.
        ("1f1b", 0, "rendezvous", ["012........==...==..==", "..0.1...==.2.==..==...", "....0==.1==..2==......"]),
        ("1f1b", 1, "rendezvous", ["012........==.==...==", "..01....==2==...==...", "....0==1==..2==......"]),
        ("1f1b", 1, "buffered", ["012........==.==...==", "..01....==2==...==...", "....0==1==..2==......"]),
    ],
)
def test_messages_that_take_time(name: str, ahead: int, semantics: Semantics, drawing: list[str]) -> None:
    assert draw(evaluate(lower(make_schedule(name, 3, 3), ahead=ahead), Costs(latency=1), semantics)) == drawing


def test_times_of_messages() -> None:
    #           0    1    2    3    4    5    6    7    8    9
    # rank 0    0F0  .    .    .    .    .    .    .    0B0 ---      0B0 needs the gradient, which travels from 6 to 8
    # rank 1    .    .    .    1F0  1B0 --- ...                      1F0 waits for the activation, which travels from 1 to 3
    evaluation = evaluate(make_schedule("1f1b", 2, 1), Costs(latency=2))
    forward, backward = parse_action("0SEND_F0"), parse_action("1SEND_B0")
    assert evaluation.messages == (TimedMessage(backward, 1, 0, 6, 8), TimedMessage(forward, 0, 1, 1, 3))
    assert {str(action): (start, end) for row in evaluation.actions for action, start, end in row} == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 3),
        "0RECV_B0": (0, 8),
        "0B0": (8, 10),
        "1RECV_F0": (0, 3),
        "1F0": (3, 4),
        "1B0": (4, 6),
        "1SEND_B0": (6, 8),
    }
    assert (evaluation.makespan, evaluation.busy, evaluation.idle, evaluation.span_idle) == (10, (3, 3), (7, 7), (7, 0))


def test_live_activations_over_time() -> None:
    evaluation = evaluate(make_schedule("1f1b", 2, 3))
    assert draw(evaluation) == ["01..==2==.==", ".0==1==2==.."]
    assert evaluation.list_live(0) == [(0, 1), (1, 2), (6, 1), (6, 2), (9, 1), (12, 0)]
    assert evaluation.peak_live == (2, 1)
    split = evaluate(Schedule("split", 1, (0,), (tuple(map(parse_action, "0F0 0I0 0W0".split())),)), Costs(1, 2, 4))
    assert split.list_live(0) == [(0, 1), (7, 0)]  # held until the weights have their gradients


def test_costs_by_stage_and_of_a_whole_backward() -> None:
    costs = Costs(forward=[1, 2], input=(3, 4), weight=5, backward=None)
    assert [costs.get_duration(Action(1, kind, 0)) for kind in "FIWB"] == [2, 4, 5, 9]
    assert Costs(backward=[7, 8]).get_duration(Action(1, "B", 0)) == 8
    with pytest.raises(ArgumentError, match=r"forward must have one time for each stage, got 2 \(stage 2\)"):
        evaluate(make_schedule("gpipe", 3, 1), costs)
    with pytest.raises(ArgumentError, match="an action with a duration must be a computation, got 0SEND_F0"):
        costs.get_duration(parse_action("0SEND_F0"))


def test_part_of_a_step_has_times_too() -> None:
    forward_only = Schedule("forward", 2, (0, 1), (tuple(map(parse_action, ("0F0", "0F1"))), tuple(map(parse_action, ("1F0", "1F1")))))
    assert evaluate(forward_only).makespan == 3


# Drawn costs, against the longest path: each computation starts when the one before it in its row, and what it needs, are done.


def longest_path(schedule: Schedule, costs: Costs) -> dict[Action, Time]:
    """Finds when each computation ends where messages travel as soon as they are sent, by going over all of them until nothing changes."""
    ends: dict[Action, Time] = {action: 0 for row in schedule.actions for action in row}
    changed = True
    while changed:
        changed = False
        for row in schedule.actions:
            for before, action in pairwise((None, *row)):
                assert action is not None
                stage, kind, microbatch = action
                needs = [(stage - 1, "F")] if kind == "F" else [(stage + 1, "B"), (stage + 1, "I")] if kind != "W" else []
                starts: list[Time] = [ends[before] if before is not None else 0]
                for other, made_by in needs:
                    need = Action(other, made_by, microbatch)
                    if need in ends:
                        away = schedule.stage_ranks[other] != schedule.stage_ranks[stage]
                        starts.append(ends[need] + (costs.latency if away else 0))
                end = max(starts) + costs.get_duration(action)
                changed |= end != ends[action]
                ends[action] = end
    return ends


times = st.fractions(min_value=0, max_value=5, max_denominator=6)


@given(st.sampled_from(CASES), st.integers(1, 4), st.integers(1, 6), st.data())
def test_drawn_costs_against_longest_paths(case: tuple[str, int | None], p: int, m: int, data: st.DataObject) -> None:
    schedule = make_schedule(case[0], p, m, case[1])
    by_stage = st.lists(times, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(*(data.draw(by_stage) for _ in range(3)), backward=data.draw(st.none() | by_stage), latency=data.draw(times))
    evaluation = evaluate(schedule, costs, "buffered")
    found = {timed.action: timed.end for rank in range(p) for timed in evaluation.get_computations(rank)}
    assert found == longest_path(schedule, costs)
    assert evaluate(schedule, costs).makespan >= evaluation.makespan
