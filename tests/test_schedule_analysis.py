"""What follows from a simulated schedule: its critical path, slack, sensitivity, many costs at once; and what is refused."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_reference import draw_schedule, reckon

from ringsim import Link, simulate_schedule
from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import SEMANTICS, Semantics
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, parse_action
from ringsim.simulator.critical_path import REASONS, Hop
from ringsim.simulator.schedules import ScheduleRun

seeds = st.integers(0, 2**32)


def draw_run(seed: int, semantics: Semantics, ahead: int) -> tuple[Schedule, Costs, dict[tuple[int, int], Link], ScheduleRun]:
    chance = random.Random(seed)
    name = chance.choice((*SCHEDULE_NAMES, "drawn"))
    schedule = draw_schedule(chance) if name == "drawn" else make_schedule(name, chance.randint(1, 4), chance.randint(1, 6))
    costs = Costs(*([chance.random() for _ in range(schedule.num_stages)] for _ in range(4)))
    links = {pair: Link(chance.random(), chance.random()) for pair in product(range(schedule.num_ranks), repeat=2)}
    return schedule, costs, links, simulate_schedule(schedule, costs, link=links, size_bytes=1, semantics=semantics, ahead=ahead)


# -- the critical path


def check_reason(before: Hop | None, hop: Hop, lowered: Schedule) -> None:
    """Holds a hop's reason against where the two stand in the rows."""
    if before is None:
        assert hop.reason == "start"
        return
    own = lowered.actions[lowered.stage_ranks[hop.action.stage]]
    computations = [action for action in own if action.is_compute]
    if hop.reason == "program order":
        assert computations.index(before.action) == computations.index(hop.action) - 1
    elif hop.reason == "link busy":
        assert (before.source, before.rank) == (hop.source, hop.rank)
        sends = [action for action in own if action.kind.startswith("SEND") and lowered.stage_ranks[action.other_side.stage] == hop.rank]
        assert sends.index(before.action) == sends.index(hop.action) - 1
    elif hop.reason == "receiver late":
        row = lowered.actions[hop.rank]
        posted = row.index(hop.action.other_side)
        assert before.action == [action for action in row[:posted] if action.is_compute][-1]
    elif hop.source < 0:
        assert before.action.other_side in own
        assert (before.rank, before.action.other_side.stage) == (hop.rank, hop.action.stage)
    else:
        assert before.action == [action for action in own[: own.index(hop.action)] if action.is_compute][-1]


def test_critical_paths_hold_together() -> None:
    seen = dict.fromkeys(REASONS, 0)
    for seed, semantics, ahead in product(range(60), SEMANTICS, (0, 1)):
        schedule, costs, _, run = draw_run(seed, semantics, ahead)
        path, lowered = run.critical_path, lower(schedule, ahead=ahead)
        assert (path.hops[0].start, path.hops[-1].end) == (0, run.makespan)
        assert path.computing + path.travelling == pytest.approx(run.makespan)
        for before, hop in pairwise((None, *path.hops)):
            assert before is None or before.end == hop.start
            if hop.source < 0:
                assert hop.end - hop.start == pytest.approx(costs.get_duration(hop.action))
            check_reason(before, hop, lowered)
            seen[hop.reason] += 1
    assert min(seen.values()) > 100


def test_receiver_late() -> None:
    # rank 0   01................      a receive that blocks: message 1 is made at 2, and travels from 3, when rank 1 is done with 0
    # rank 1   ..0.1...
    schedule = Schedule("forward", 2, (0, 1), (tuple(map(parse_action, ("0F0", "0F1"))), tuple(map(parse_action, ("1F0", "1F1")))))
    run = simulate_schedule(schedule, Costs(latency=Fraction(1)), ahead=0)
    assert [(str(hop.action), hop.start, hop.end, hop.reason) for hop in run.critical_path.hops] == [
        ("0F0", 0, 1, "start"),
        ("0SEND_F0", 1, 2, "data"),
        ("1F0", 2, 3, "data"),
        ("0SEND_F1", 3, 4, "receiver late"),
        ("1F1", 4, 5, "data"),
    ]
    assert repr(run.critical_path) == "Critical path of 5 hops: computing 3, on links 2; start 1, data 3, receiver late 1"


def test_path_of_nothing() -> None:
    run = simulate_schedule(Schedule("empty", 1, (0,), ((),)))
    assert (run.makespan, len(run.critical_path), run.bubble, len(run.trace().events)) == (0, 0, 0, 0)


# -- slack and sensitivity


@given(seeds, st.sampled_from(SEMANTICS), st.integers(0, 1))
def test_slack_is_what_a_computation_may_be_slower_by(seed: int, semantics: Semantics, ahead: int) -> None:
    schedule, costs, links, run = draw_run(seed, semantics, ahead)
    lowered = lower(schedule, ahead=ahead)
    assert min(run.slack) < 1e-9 if len(run.operations) else True

    def link_of(send: Action) -> Link:
        return links[schedule.stage_ranks[send.stage], schedule.stage_ranks[send.other_side.stage]]

    def makespan(slower: Action, by: float) -> float:
        ends = reckon(
            lowered,
            lambda action: costs.get_duration(action) + (by if action == slower else 0),
            lambda send: link_of(send).beta_s_per_byte,
            lambda send: link_of(send).alpha_s,
            rendezvous=semantics == "rendezvous",
        )
        return float(max(end for action, end in ends.items() if action.is_compute))

    for number in random.Random(seed).sample(range(len(run.operations)), min(4, len(run.operations))):
        action, slack = run.operations.action(number), float(run.slack[number])
        assert makespan(action, slack) == pytest.approx(run.makespan)
        assert makespan(action, slack + 0.5) == pytest.approx(run.makespan + 0.5)


def test_sensitivity_is_what_simulating_again_gives() -> None:
    link = Link(alpha_s=0.05, beta_s_per_byte=0.25)
    costs = Costs([1.0, 1.0, 1.5, 1.0], [0.5, 0.5, 1.0, 0.5], 0.5)

    def makespan(costs: Costs, links: Any, size: int) -> float:
        return float(simulate_schedule("1f1b", costs, num_ranks=4, num_microbatches=6, link=links, size_bytes=size).makespan)

    run = simulate_schedule("1f1b", costs, num_ranks=4, num_microbatches=6, link=link, size_bytes=2)
    found = run.sensitivity(by=0.5, most=20)
    assert [lever.gain for lever in found.levers] == sorted((lever.gain for lever in found.levers), reverse=True)
    gains = {lever.what: lever.gain for lever in found.levers}
    assert gains["stage 2"] == max(gains.values()) > 0
    slower = [1.0, 1.0, 1.5 / 2, 1.0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.25, 0.5]
    assert gains["stage 2"] == pytest.approx(run.makespan - makespan(Costs(*slower), link, 2))
    links = dict.fromkeys(product(range(4), repeat=2), link)
    better = links | {(1, 2): Link(0.025, 0.125)}
    assert gains["link 1>2"] == pytest.approx(run.makespan - makespan(costs, better, 2))
    assert gains["message size"] == pytest.approx(run.makespan - makespan(costs, link, 1))
    for lever in found.levers:
        assert lever.bound == 0.5 * lever.on_path
        assert lever.gain <= lever.bound + 1e-12
    assert repr(found).startswith("Improved by 50%:    gain    of the step   at most\n  stage 2 ")
    assert len(run.sensitivity(most=2).levers) == 2
    for wrong in ({"by": 0}, {"by": 1}, {"most": 0}):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} must be"):
            run.sensitivity(**wrong)


# -- many at once


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_v", "interleaved_1f1b"])
def test_many_costs_at_once_are_each_alone(name: str) -> None:
    chance = random.Random(name)
    costs = [Costs(*(chance.random() for _ in range(4))) for _ in range(30)]
    links = [Link(chance.random(), chance.random()) for _ in range(30)]
    many = simulate_schedule(name, costs, num_ranks=5, num_microbatches=9, link=links, size_bytes=1)
    alone = [
        simulate_schedule(name, cost, num_ranks=5, num_microbatches=9, link=link, size_bytes=1)
        for cost, link in zip(costs, links, strict=True)
    ]
    assert many.makespan.tolist() == [run.makespan for run in alone]
    assert np.array_equal(many.busy, np.stack([run.busy for run in alone]))
    assert many.bubble == pytest.approx([run.bubble for run in alone])
    assert (len(many), many.idle.shape) == (30, (30, 5))
    assert repr(many).startswith(f"30 what-ifs of {name}: ")


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "2f2b"}, "a schedule must be one of gpipe, .*, got '2f2b'"),
        ({"num_ranks": None}, "num_ranks must be given with a schedule's name, got none"),
        ({"num_microbatches": None}, "num_microbatches must be given"),
        ({"num_ranks": 0}, "num_ranks must be 1 or more, got 0"),
        ({"num_chunks": 2}, "num_chunks of 1f1b must be 1, got 2"),
        ({"schedule": make_schedule("1f1b", 2, 2)}, "num_ranks must be left out, got 2: the schedule says it"),
        ({"semantics": "eager"}, "semantics must be one of rendezvous, buffered, got 'eager'"),
        ({"ahead": -1}, "ahead must be 0 or more, got -1"),
        ({"costs": Costs(forward=-1)}, r"a time must be a number from 0, got -1 \(F of every stage\)"),
        ({"costs": Costs(weight=[1, float("nan")])}, r"a time must be a number from 0, got nan \(W of stage 1\)"),
        ({"costs": Costs(latency=float("inf"))}, "a time must be a number from 0, got inf"),
        ({"costs": Costs(forward=[1])}, "forward must have one time for each stage, got 1"),
        ({"costs": Costs(latency=1), "link": Link(1, 1)}, "latency must be 0 where link is given, got 1"),
        ({"size_bytes": 8}, "size_bytes must be left out where no link is given, got 8"),
        ({"link": Link(1, 1), "size_bytes": [1, 2]}, "size_bytes must be one number, or one for each of 1 boundaries, got 2"),
        ({"link": Link(1, 1), "size_bytes": -1}, "size_bytes must be from 0 to 2\\*\\*53, got -1"),
        ({"link": Link(1, 1), "size_bytes": 2**63}, "size_bytes must be from 0 to 2\\*\\*53, got 9223372036854775808"),
        ({"link": {(0, 1): Link(1, 1)}}, r"link must have one for every pair of ranks that talk, got none for 1 -> 0"),
        ({"costs": []}, "costs and link must be as many, 1 or more, got 0 and 0"),
        ({"costs": [Costs()], "link": [Link(1, 1)] * 2}, "costs and link must be as many, 1 or more, got 1 and 2"),
        ({"link": [Link(1, 1)]}, "link must be one where costs are one, got 1 links"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"schedule": "1f1b", "num_ranks": 2, "num_microbatches": 2, **arguments}
    with pytest.raises((ArgumentError, ScheduleError), match=message):
        simulate_schedule(**given)
