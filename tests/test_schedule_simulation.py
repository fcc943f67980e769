"""Simulated schedules against the evaluator, closed forms in fractions, an independent reckoning, and SimPy."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_reference import draw_schedule, move_posts, reckon

from ringsim import Link, simulate_schedule
from ringsim.errors import Deadlock
from ringsim.schedules import SCHEDULE_NAMES, closed_forms, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import SEMANTICS, Evaluation, Semantics, evaluate
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, parse_action
from ringsim.simulator.schedules import ScheduleRun

CASES = [*((name, None) for name in SCHEDULE_NAMES), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]
seeds = st.integers(0, 2**32)


def ends_of(run: ScheduleRun) -> dict[Action, Time]:
    return {run.operations.action(number): end for number, end in enumerate(run.ends.tolist())}


def draw_costs(chance: random.Random, num_stages: int, *, latency: Fraction | int = 0) -> Costs:
    def draw() -> list[Fraction]:
        return [Fraction(chance.randint(0, 12), chance.randint(1, 5)) for _ in range(num_stages)]

    return Costs(draw(), draw(), draw(), chance.choice((None, draw())), latency=latency)


def draw_links(chance: random.Random, ranks: int) -> dict[tuple[int, int], Link]:
    return {pair: Link(chance.random(), chance.random()) for pair in product(range(ranks), repeat=2)}


# -- the evaluator, in exact fractions


@given(st.sampled_from(CASES), st.integers(1, 5), st.integers(1, 8), st.integers(0, 3), st.sampled_from(SEMANTICS), seeds)
def test_every_schedule_ends_as_the_evaluator_says(
    case: tuple[str, int | None], p: int, m: int, ahead: int, semantics: Semantics, seed: int
) -> None:
    chance = random.Random(seed)
    schedule = make_schedule(case[0], p, m, case[1])
    costs = draw_costs(chance, schedule.num_stages, latency=Fraction(chance.randint(0, 9), 4))
    expected = evaluate(lower(schedule, ahead=ahead), costs, semantics)
    run = simulate_schedule(case[0], costs, num_ranks=p, num_microbatches=m, num_chunks=case[1], semantics=semantics, ahead=ahead)
    assert run.makespan == expected.makespan
    assert ends_of(run) == {timed.action: timed.end for rank in range(p) for timed in expected.get_computations(rank)}
    assert (tuple(run.busy), tuple(run.idle)) == (expected.busy, expected.idle)
    assert ends_of(simulate_schedule(lower(schedule, ahead=ahead), costs, semantics=semantics)) == ends_of(run)


def evaluate_or_deadlock(schedule: Schedule, costs: Costs, semantics: Semantics) -> Evaluation | Deadlock:
    try:
        return evaluate(schedule, costs, semantics)
    except Deadlock as stuck:
        return stuck


@given(seeds, st.sampled_from(SEMANTICS))
def test_schedules_of_ones_own(seed: int, semantics: Semantics) -> None:
    chance = random.Random(seed)
    schedule = draw_schedule(chance)
    costs = draw_costs(chance, schedule.num_stages, latency=Fraction(chance.randint(0, 9), 4))
    moved = move_posts(lower(schedule), chance)
    for each in (schedule, moved):
        expected = evaluate_or_deadlock(each, costs, semantics)
        if isinstance(expected, Deadlock):
            with pytest.raises(Deadlock, match="a schedule must let every rank go on") as raised:
                simulate_schedule(each, costs, semantics=semantics)
            assert raised.value.diagnosis == expected.diagnosis
            continue
        run = simulate_schedule(each, costs, semantics=semantics)
        assert run.makespan == expected.makespan
        assert ends_of(run) == {timed.action: timed.end for rank in range(each.num_ranks) for timed in expected.get_computations(rank)}


@pytest.mark.parametrize("idle_ranks", [0, 12])  # few ranks go through a list, many level by level
@pytest.mark.parametrize("costs", [None, [Costs(), Costs()]])
def test_a_circle_is_a_deadlock(idle_ranks: int, costs: list[Costs] | None) -> None:
    text = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]  # 1B0 comes after 1F1, which waits for rank 0, which waits for 1B0
    rows = [tuple(map(parse_action, row.split())) for row in text]
    schedule = Schedule("stuck", 2, (0, 1), (*rows, *[()] * idle_ranks))
    with pytest.raises(Deadlock, match="rank 0 waits in 0B0 for 1SEND_B0 of rank 1; rank 1 waits in 1F1 for 0SEND_F1 of rank 0") as raised:
        simulate_schedule(schedule, costs)
    assert raised.value.diagnosis == ((0, Action(0, "B", 0)), (1, Action(1, "F", 1)))


# -- closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_forms_at_full_width(name: str) -> None:
    run = simulate_schedule(name, Costs(latency=0.125), num_ranks=300, num_microbatches=500, semantics="buffered")
    assert run.makespan == run.closed_form == closed_forms.makespan(closed_forms.Step(name, 300, 500), Costs(latency=0.125))
    link = Link(alpha_s=0.125, beta_s_per_byte=0.25)
    run = simulate_schedule(name, Costs(), num_ranks=300, num_microbatches=500, link=link, size_bytes=4, semantics="buffered")
    assert run.makespan == run.closed_form == closed_forms.makespan(closed_forms.Step(name, 300, 500), Costs(latency=1.125))
    assert simulate_schedule(name, Costs(), num_ranks=4, num_microbatches=5, link=link, size_bytes=5).closed_form is None  # they queue


# -- links that messages keep busy


def test_messages_queue_for_a_busy_link() -> None:
    # rank 0   012..........0.1.2      one unit each; a message has the link for 2, and arrives 1 later
    # link     .00.11.22               so each leaves when the one before it has left
    # rank 1   ....0.1.2012......
    costs, link = Costs(1, 1, 0), Link(alpha_s=1, beta_s_per_byte=0.5)
    run = simulate_schedule("gpipe", costs, num_ranks=2, num_microbatches=3, link=link, size_bytes=4, semantics="buffered")
    assert run.ends.tolist() == [1, 2, 3, 14, 16, 18, 5, 7, 9, 10, 11, 12]
    assert run.message_starts.tolist()[3:9] == [10, 12, 14, 1, 3, 5]
    assert [str(hop.action) for hop in run.critical_path.hops] == [
        *("0F0", "0SEND_F0", "0SEND_F1", "0SEND_F2", "1F2", "1B0", "1SEND_B0", "1SEND_B1", "1SEND_B2", "0B2")
    ]
    assert [hop.reason for hop in run.critical_path.hops] == [
        *("start", "data", "link busy", "link busy", "data", "program order", "data", "link busy", "link busy", "data")
    ]


def reckoned(schedule: Schedule, costs: Costs, links: dict[tuple[int, int], Link], sizes: list[int], semantics: str) -> dict[Action, Time]:
    def link_of(send: Action) -> Link:
        return links[schedule.stage_ranks[send.stage], schedule.stage_ranks[send.other_side.stage]]

    def occupancy(send: Action) -> Time:
        return sizes[min(send.stage, send.other_side.stage)] * link_of(send).beta_s_per_byte

    ends = reckon(schedule, costs.get_duration, occupancy, lambda send: link_of(send).alpha_s, rendezvous=semantics == "rendezvous")
    return {action: end for action, end in ends.items() if action.is_compute}


@given(seeds, st.sampled_from(SEMANTICS), st.integers(0, 2))
def test_random_links_against_an_independent_reckoning(seed: int, semantics: Semantics, ahead: int) -> None:
    chance = random.Random(seed)
    name = chance.choice((*SCHEDULE_NAMES, "drawn"))
    schedule = draw_schedule(chance) if name == "drawn" else make_schedule(name, chance.randint(1, 5), chance.randint(1, 8))
    costs = Costs(*([chance.random() for _ in range(schedule.num_stages)] for _ in range(4)))
    links, sizes = draw_links(chance, schedule.num_ranks), [chance.randint(0, 3) for _ in range(schedule.num_stages - 1)]
    expected = reckoned(lower(schedule, ahead=ahead), costs, links, sizes, semantics)
    run = simulate_schedule(schedule, costs, link=links, size_bytes=sizes, semantics=semantics, ahead=ahead)
    assert ends_of(run) == expected
    many = simulate_schedule(schedule, [costs, Costs(), costs], link=links, size_bytes=sizes, semantics=semantics, ahead=ahead)
    assert many.makespan[0] == many.makespan[2] == run.makespan


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 20), st.integers(1, 24), st.integers(0, 3), st.sampled_from(SEMANTICS), seeds)
def test_waves_are_the_same_as_any_schedule(name: str, p: int, m: int, ahead: int, semantics: Semantics, seed: int) -> None:
    chance = random.Random(seed)
    costs = Costs(*([chance.random() for _ in range(p)] for _ in range(4)))
    links, size = draw_links(chance, p), chance.randint(0, 2)
    schedule = make_schedule(name, p, m)
    listed = replace(schedule, actions=tuple(schedule.actions))  # as any schedule, level by level
    written = simulate_schedule(listed, costs, link=links, size_bytes=size, semantics=semantics, ahead=ahead)
    named = simulate_schedule(name, costs, num_ranks=p, num_microbatches=m, link=links, size_bytes=size, semantics=semantics, ahead=ahead)
    assert named.makespan == written.makespan
    for column in ("stage", "kind", "microbatch", "sent_after", "posted_after", "queued_after", "before"):
        assert np.array_equal(getattr(named.operations, column), getattr(written.operations, column)), column
    assert np.array_equal(named.ends, written.ends)
    assert np.array_equal(named.message_starts, written.message_starts)
    assert named.critical_path == written.critical_path
