"""Simulated schedules against the evaluator, an independent reckoning and rehearsed steps.

Critical path, slack, sensitivity, traces.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import Link, simulate, simulate_schedule
from ringsim.errors import ArgumentError, Deadlock
from ringsim.pipeline import (
    Action,
    Costs,
    Evaluation,
    Schedule,
    evaluate,
    lower,
    parse_action,
    rehearse,
)
from ringsim.schedules import SCHEDULE_NAMES, ScheduleError, closed_forms, make_schedule
from ringsim.schedules.costs import Time
from ringsim.schedules.engine import SEMANTICS, Semantics
from ringsim.schedules.lowering import get_recv
from ringsim.simulator import critical_path
from ringsim.simulator.critical_path import REASONS, Hop
from ringsim.simulator.schedules import ScheduleRun
from ringsim.traces.events import Events
from ringsim.traces.steps import find_step

CASES = [
    *((name, None) for name in SCHEDULE_NAMES),
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 3),
]
seeds = st.integers(0, 2**32)
Links = dict[tuple[int, int], Link]


def ends_of(run: ScheduleRun) -> dict[Action, Time]:
    return {run.operations.action(number): end for number, end in enumerate(run.ends.tolist())}


def draw_costs(chance: random.Random, num_stages: int, *, latency: Fraction | int = 0) -> Costs:
    def draw() -> list[Fraction]:
        return [Fraction(chance.randint(0, 12), chance.randint(1, 5)) for _ in range(num_stages)]

    return Costs(draw(), draw(), draw(), chance.choice((None, draw())), latency=latency)


# -- the evaluator, in exact fractions


@given(
    st.sampled_from(CASES),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(SEMANTICS),
    seeds,
)
def test_every_schedule_ends_as_the_evaluator_says(
    case: tuple[str, int | None], p: int, m: int, ahead: int, semantics: Semantics, seed: int
) -> None:
    chance = random.Random(seed)
    schedule = make_schedule(case[0], p, m, case[1])
    costs = draw_costs(chance, schedule.num_stages, latency=Fraction(chance.randint(0, 9), 4))
    expected = evaluate(lower(schedule, ahead=ahead), costs, semantics)
    run = simulate_schedule(
        case[0],
        costs,
        num_ranks=p,
        num_microbatches=m,
        num_chunks=case[1],
        semantics=semantics,
        ahead=ahead,
    )
    assert run.makespan == expected.makespan
    assert ends_of(run) == {
        timed.action: timed.end for rank in range(p) for timed in expected.get_computations(rank)
    }
    assert (tuple(run.busy), tuple(run.idle)) == (expected.busy, expected.idle)
    assert ends_of(
        simulate_schedule(lower(schedule, ahead=ahead), costs, semantics=semantics)
    ) == ends_of(run)


def evaluate_or_deadlock(
    schedule: Schedule, costs: Costs, semantics: Semantics
) -> Evaluation | Deadlock:
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
        assert ends_of(run) == {
            timed.action: timed.end
            for rank in range(each.num_ranks)
            for timed in expected.get_computations(rank)
        }


@pytest.mark.parametrize("idle_ranks", [0, 12])  # few ranks go through a list, many level by level
@pytest.mark.parametrize("costs", [None, [Costs(), Costs()]])
def test_a_circle_is_a_deadlock(idle_ranks: int, costs: list[Costs] | None) -> None:
    # 1B0 comes after 1F1, which waits for rank 0, which waits for 1B0
    text = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    rows = [tuple(map(parse_action, row.split())) for row in text]
    schedule = Schedule("stuck", 2, (0, 1), (*rows, *[()] * idle_ranks))
    with pytest.raises(
        Deadlock,
        match=(
            "rank 0 waits in 0B0 for 1SEND_B0 of rank 1; rank 1 waits in 1F1 for 0SEND_F1 of rank 0"
        ),
    ) as raised:
        simulate_schedule(schedule, costs)
    assert raised.value.diagnosis == ((0, Action(0, "B", 0)), (1, Action(1, "F", 1)))


# -- closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_forms_at_full_width(name: str) -> None:
    run = simulate_schedule(
        name, Costs(latency=0.125), num_ranks=300, num_microbatches=500, semantics="buffered"
    )
    assert (
        run.makespan
        == run.closed_form
        == closed_forms.makespan(closed_forms.Step(name, 300, 500), Costs(latency=0.125))
    )
    link = Link(alpha_s=0.125, beta_s_per_byte=0.25)
    run = simulate_schedule(
        name,
        Costs(),
        num_ranks=300,
        num_microbatches=500,
        link=link,
        size_bytes=4,
        semantics="buffered",
    )
    assert (
        run.makespan
        == run.closed_form
        == closed_forms.makespan(closed_forms.Step(name, 300, 500), Costs(latency=1.125))
    )
    # they queue
    assert (
        simulate_schedule(
            name, Costs(), num_ranks=4, num_microbatches=5, link=link, size_bytes=5
        ).closed_form
        is None
    )


# -- links that messages keep busy


class Drawn(NamedTuple):
    """A step that was drawn, and simulated."""

    lowered: Schedule
    costs: Costs
    links: Links
    sizes: list[int]
    run: ScheduleRun


def draw_run(seed: int, semantics: Semantics, ahead: int) -> Drawn:
    chance = random.Random(seed)
    name = chance.choice((*SCHEDULE_NAMES, "drawn"))
    schedule = (
        draw_schedule(chance)
        if name == "drawn"
        else make_schedule(name, chance.randint(1, 4), chance.randint(1, 6))
    )
    costs = Costs(*([chance.random() for _ in range(schedule.num_stages)] for _ in range(4)))
    links, sizes = (
        draw_links(chance, schedule.num_ranks),
        [chance.randint(0, 3) for _ in range(schedule.num_stages - 1)],
    )
    run = simulate_schedule(
        schedule, costs, link=links, size_bytes=sizes, semantics=semantics, ahead=ahead
    )
    return Drawn(lower(schedule, ahead=ahead), costs, links, sizes, run)


@given(seeds, st.sampled_from(SEMANTICS), st.integers(0, 2))
def test_random_links_against_an_independent_reckoning(
    seed: int, semantics: Semantics, ahead: int
) -> None:
    drawn = draw_run(seed, semantics, ahead)
    assert ends_of(drawn.run) == reckon(drawn, semantics)
    costs = [drawn.costs, Costs(), drawn.costs]
    many = simulate_schedule(
        drawn.lowered, costs, link=drawn.links, size_bytes=drawn.sizes, semantics=semantics
    )
    assert many.makespan[0] == many.makespan[2] == drawn.run.makespan


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 20),
    st.integers(1, 24),
    st.integers(0, 3),
    st.sampled_from(SEMANTICS),
    seeds,
)
def test_waves_are_the_same_as_any_schedule(
    name: str, p: int, m: int, ahead: int, semantics: Semantics, seed: int
) -> None:
    chance = random.Random(seed)
    costs = Costs(*([chance.random() for _ in range(p)] for _ in range(4)))
    links, size = draw_links(chance, p), chance.randint(0, 2)
    schedule = make_schedule(name, p, m)
    listed = replace(schedule, actions=tuple(schedule.actions))  # as any schedule, level by level
    written = simulate_schedule(
        listed, costs, link=links, size_bytes=size, semantics=semantics, ahead=ahead
    )
    named = simulate_schedule(
        name,
        costs,
        num_ranks=p,
        num_microbatches=m,
        link=links,
        size_bytes=size,
        semantics=semantics,
        ahead=ahead,
    )
    assert named.makespan == written.makespan
    for column in (
        "stage",
        "kind",
        "microbatch",
        "sent_after",
        "posted_after",
        "queued_after",
        "before",
    ):
        assert np.array_equal(
            getattr(named.operations, column), getattr(written.operations, column)
        ), column
    assert np.array_equal(named.ends, written.ends)
    assert np.array_equal(named.message_starts, written.message_starts)
    assert named.critical_path == written.critical_path


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
        sends = [
            action
            for action in own
            if action.kind.startswith("SEND")
            and lowered.stage_ranks[action.other_side.stage] == hop.rank
        ]
        assert sends.index(before.action) == sends.index(hop.action) - 1
    elif hop.reason == "receiver late":
        row = lowered.actions[hop.rank]
        posted = row.index(hop.action.other_side)
        assert before.action == [action for action in row[:posted] if action.is_compute][-1]
    elif hop.source < 0:
        assert before.action.other_side in own
        assert (before.rank, before.action.other_side.stage) == (hop.rank, hop.action.stage)
    else:
        assert (
            before.action
            == [action for action in own[: own.index(hop.action)] if action.is_compute][-1]
        )


def test_critical_paths_hold_together() -> None:
    seen = dict.fromkeys(REASONS, 0)
    for seed, semantics, ahead in product(range(70), SEMANTICS, (0, 1)):
        lowered, costs, _, _, run = draw_run(seed, semantics, ahead)
        path = run.critical_path
        assert (path.hops[0].start, path.hops[-1].end) == (0, run.makespan)
        assert path.computing + path.travelling == pytest.approx(run.makespan)
        for before, hop in pairwise((None, *path.hops)):
            assert before is None or before.end == hop.start
            if hop.source < 0:
                assert hop.end - hop.start == pytest.approx(costs.get_duration(hop.action))
            check_reason(before, hop, lowered)
            seen[hop.reason] += 1
    assert min(seen.values()) > 100


def test_path_of_nothing() -> None:
    run = simulate_schedule(Schedule("empty", 1, (0,), ((),)))
    assert (run.makespan, len(run.critical_path), run.bubble, len(run.trace().events)) == (
        0,
        0,
        0,
        0,
    )


# -- slack and sensitivity


@given(seeds, st.sampled_from(SEMANTICS), st.integers(0, 1))
def test_slack_is_what_a_computation_may_be_slower_by(
    seed: int, semantics: Semantics, ahead: int
) -> None:
    drawn = draw_run(seed, semantics, ahead)
    run = drawn.run
    assert min(run.slack) < 1e-9 if len(run.operations) else True

    def makespan(slower: Action, by: float) -> float:
        return float(max(reckon(drawn, semantics, slower, by).values()))

    for number in random.Random(seed).sample(
        range(len(run.operations)), min(4, len(run.operations))
    ):
        action, slack = run.operations.action(number), float(run.slack[number])
        assert makespan(action, slack) == pytest.approx(run.makespan)
        assert makespan(action, slack + 0.5) == pytest.approx(run.makespan + 0.5)


def test_sensitivity_is_what_simulating_again_gives() -> None:
    link = Link(alpha_s=0.05, beta_s_per_byte=0.25)
    costs = Costs([1.0, 1.0, 1.5, 1.0], [0.5, 0.5, 1.0, 0.5], 0.5)

    def makespan(costs: Costs, links: Any, size: int) -> float:
        return float(
            simulate_schedule(
                "1f1b", costs, num_ranks=4, num_microbatches=6, link=links, size_bytes=size
            ).makespan
        )

    run = simulate_schedule("1f1b", costs, num_ranks=4, num_microbatches=6, link=link, size_bytes=2)
    found = run.sensitivity(by=0.5, most=20)
    assert [lever.gain for lever in found.levers] == sorted(
        (lever.gain for lever in found.levers), reverse=True
    )
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


def test_many_costs_at_once_are_each_alone() -> None:
    costs, link = [Costs(forward=forward) for forward in (1, 2, 3)], Link(0.25, 0.125)
    for name in ("1f1b", "zb_v"):
        many = simulate_schedule(
            name, costs, num_ranks=5, num_microbatches=9, link=link, size_bytes=1
        )
        alone = [
            simulate_schedule(name, cost, num_ranks=5, num_microbatches=9, link=link, size_bytes=1)
            for cost in costs
        ]
        assert many.makespan.tolist() == [run.makespan for run in alone]
        assert np.array_equal(many.busy, np.stack([run.busy for run in alone]))
        assert many.bubble == pytest.approx([run.bubble for run in alone])
        assert repr(many).startswith(f"{len(many)} what-ifs of {name}: ")


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "2f2b"}, "a schedule must be one of gpipe, .*, got '2f2b'"),
        ({"num_ranks": None}, "num_ranks must be given with a schedule's name, got none"),
        ({"num_microbatches": None}, "num_microbatches must be given"),
        ({"num_ranks": 0}, "num_ranks must be an integer from 1, got 0"),
        ({"num_chunks": 2}, "num_chunks of 1f1b must be 1, got 2"),
        (
            {"schedule": make_schedule("1f1b", 2, 2)},
            "num_ranks must be left out, got 2: the schedule says it",
        ),
        ({"semantics": "eager"}, "semantics must be one of rendezvous, buffered, got 'eager'"),
        ({"ahead": -1}, "ahead must be an integer from 0, got -1"),
        (
            {"costs": Costs(forward=-1)},
            r"a time must be a number from 0, got -1 \(F of every stage\)",
        ),
        (
            {"costs": Costs(weight=[1, float("nan")])},
            r"a time must be a number from 0, got nan \(W of stage 1\)",
        ),
        ({"costs": Costs(latency=float("inf"))}, "a time must be a number from 0, got inf"),
        ({"costs": Costs(forward=[1])}, "forward must have one time for each stage, got 1"),
        (
            {"costs": Costs(latency=1), "link": Link(1, 1)},
            "latency must be 0 where link is given, got 1",
        ),
        ({"size_bytes": 8}, "size_bytes must be left out where no link is given, got 8"),
        (
            {"link": Link(1, 1), "size_bytes": [1, 2]},
            "size_bytes must be one number, or one for each of 1 boundaries, got 2",
        ),
        ({"link": Link(1, 1), "size_bytes": -1}, "size_bytes must be from 0 to 2\\*\\*53, got -1"),
        (
            {"link": Link(1, 1), "size_bytes": 2**63},
            "size_bytes must be from 0 to 2\\*\\*53, got 9223372036854775808",
        ),
        (
            {"link": {(0, 1): Link(1, 1)}},
            r"link must have one for every pair of ranks that talk, got none for 1 -> 0",
        ),
        ({"costs": []}, "costs and link must be as many, 1 or more, got 0 and 0"),
        (
            {"costs": [Costs()], "link": [Link(1, 1)] * 2},
            "costs and link must be as many, 1 or more, got 1 and 2",
        ),
        ({"link": [Link(1, 1)]}, "link must be one where costs are one, got 1 links"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"schedule": "1f1b", "num_ranks": 2, "num_microbatches": 2, **arguments}
    with pytest.raises((ArgumentError, ScheduleError), match=message):
        simulate_schedule(**given)


def draw_links(chance: random.Random, ranks: int) -> Links:
    return {
        pair: Link(chance.random(), chance.random()) for pair in product(range(ranks), repeat=2)
    }


def reckon(
    drawn: Drawn, semantics: str, slower: Action | None = None, by: float = 0
) -> dict[Action, Time]:
    """Finds when each computation ends, by going through the rows until nothing changes.

    One computation is slower ``by`` some time.
    """
    lowered, ranks = drawn.lowered, drawn.lowered.stage_ranks
    ends: dict[Action, Time] = {}  # of computations, and of receives: when their message arrives
    while True:
        before, posts = dict(ends), {}
        for row in lowered.actions:
            clock: Time = 0
            for action in row:
                if action.is_compute:
                    recv = get_recv(action, ranks)
                    arrived = ends.get(recv, 0) if recv is not None else 0
                    clock = (
                        max(clock, arrived)
                        + drawn.costs.get_duration(action)
                        + (by if action == slower else 0)
                    )
                    ends[action] = clock
                else:
                    posts[action] = clock
        free: dict[tuple[int, int], Time] = {}  # a link takes messages in the order of their sends
        for rank, row in enumerate(lowered.actions):
            for send in row:
                if send.kind.startswith("SEND"):
                    recv = send.other_side
                    channel = rank, ranks[recv.stage]
                    start = max(
                        posts[send],
                        free.get(channel, 0),
                        posts[recv] if semantics == "rendezvous" else 0,
                    )
                    size, link = drawn.sizes[min(send.stage, recv.stage)], drawn.links[channel]
                    free[channel] = start + size * link.beta_s_per_byte
                    ends[recv] = free[channel] + link.alpha_s
        if ends == before:
            return {action: end for action, end in ends.items() if action.is_compute}


def draw_schedule(chance: random.Random) -> Schedule:
    """Draws a whole step that nobody has named.

    Any placement, whole and split backwards, in any order that can end.
    """
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 5)
    stage_ranks = tuple(chance.randrange(ranks) for _ in range(chance.randint(1, 6)))
    stages = range(len(stage_ranks))
    # Each microbatch goes up through the stages and comes down again, in one order; only the
    # gradients of weights may wait.
    todo = [
        [Action(stage, "F", each) for stage in stages]
        + [Action(stage, chance.choice("BI"), each) for stage in reversed(stages)]
        for each in range(microbatches)
    ]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while todo:
        chain = chance.choice(todo)
        action = chain.pop(0)
        rows[stage_ranks[action.stage]].append(action)
        if action.kind == "I":
            todo.append([action._replace(kind="W")])
        todo = [chain for chain in todo if chain]
    return Schedule("drawn", microbatches, stage_ranks, tuple(map(tuple, rows)))


def move_posts(lowered: Schedule, chance: random.Random) -> Schedule:
    """Posts some messages later than `lower` does, in the same order.

    Whether the ranks still come to an end is not said.
    """
    rows = []
    for row in map(list, lowered.actions):
        for place in range(len(row) - 1):
            first, second = row[place : place + 2]
            own = get_recv(second, lowered.stage_ranks) if second.is_compute else None
            if (
                not first.is_compute
                and second.is_compute
                and first != own
                and chance.random() < 0.4
            ):
                row[place], row[place + 1] = second, first
        rows.append(tuple(row))
    return Schedule(lowered.name, lowered.num_microbatches, lowered.stage_ranks, tuple(rows))


def simulate_small(name: str = "1f1b", p: int = 3, m: int = 5, **given: object) -> ScheduleRun:
    settings = {"link": Link(alpha_s=0.125, beta_s_per_byte=0.25), "size_bytes": 2, **given}
    return simulate_schedule(name, Costs(1, 0.5, 1.5), num_ranks=p, num_microbatches=m, **settings)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_trace_holds_the_schedule_and_its_times(name: str) -> None:
    run = simulate_small(name)
    trace, schedule = run.trace(), make_schedule(name, 3, 5)
    step = find_step(trace)
    assert [step.list_actions(rank) for rank in range(3)] == list(schedule.actions)
    assert step.schedule == schedule.name
    assert np.array_equal(step.end, run.ends * 1e9)
    assert np.array_equal(step.start, run.starts * 1e9)
    assert trace.makespan_s >= run.makespan  # a send may arrive after the last computation
    assert trace.bubble().of_total == pytest.approx(run.bubble)
    known = closed_forms.Step(name, 3, 5)
    assert len(trace.messages) == sum(closed_forms.messages(known))
    assert trace.unmatched == []
    assert trace.metadata["source"] == "simulated"
    assert (trace.events.size_bytes[trace.messages.send] == 2).all()


def test_trace_is_the_same_byte_for_byte_and_keeps_in_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one.ringtrace", tmp_path / "two.ringtrace"]
    for path in paths:
        simulate_small().trace().save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = ringsim.load(paths[0])
    assert loaded == simulate_small().trace()
    assert loaded.metadata["constants"] == {
        "semantics": "rendezvous", "ahead": 1, "forward": 1.0, "input": 0.5, "weight": 1.5,
        "backward": None, "latency": 0.0,
        "links": {"all": {"alpha_s": 0.125, "beta_s_per_byte": 0.25}}, "size_bytes": [2, 2],
    }  # fmt: skip


def test_part_of_a_trace() -> None:
    run = simulate_small("1f1b", p=6, m=9)
    whole = run.trace()
    some = run.trace(ranks=[2, 3])
    assert set(some.events.rank.tolist()) == {2, 3}
    assert {
        (int(src), int(dst)) for src, dst in zip(some.messages.src, some.messages.dst, strict=True)
    } == {(2, 3), (3, 2)}
    assert (len(some.messages), some.unmatched) == (18, [])
    assert np.array_equal(
        find_step(some).end, find_step(whole).end[np.isin(find_step(whole).rank, [2, 3])]
    )
    assert some.metadata["notes"] == ["only ranks 2, 3"]
    assert find_step(some).schedule == "part of 1f1b"  # no closed form is meant for it
    early = run.trace(between=(0.0, 4.0))
    step, every = find_step(early), find_step(whole)
    assert np.array_equal(step.end, every.end[every.start <= 4e9])
    assert early.unmatched == []
    assert 0 < len(early.messages) < len(whole.messages)
    with pytest.raises(ArgumentError, match="ranks must be from 0 to 5, got 6"):
        run.trace(ranks=[6])


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_path, "MOST_EVENTS", 100)
    run = simulate_small("1f1b", p=4, m=20)
    with pytest.raises(
        ArgumentError, match=r"a trace must have 100 events or fewer, got 400. Ask for a part"
    ):
        run.trace()
    assert len(run.trace(ranks=[0]).events) == 41


def where(events: Events) -> list[tuple[int, int, int, int, str]]:
    groups = [events.tables.groups[number].name for number in events.group]
    return sorted(
        zip(
            events.rank.tolist(),
            events.peer.tolist(),
            events.tag.tolist(),
            events.size_bytes.tolist(),
            groups,
            strict=True,
        )
    )


def compare(
    schedule: Schedule, chance: random.Random, ahead: int, semantics: Semantics = "rendezvous"
) -> int:
    """Holds the computations and the messages of both against each other, to the nanosecond.

    Returns how many messages there were.
    """
    p, size = schedule.num_ranks, 1000
    costs = Costs(
        *([chance.uniform(1e-3, 3e-3) for _ in range(schedule.num_stages)] for _ in range(4))
    )
    links = {
        (src, dst): Link(chance.uniform(0, 1e-3), chance.uniform(0, 2e-6))
        for src, dst in product(range(p), repeat=2)
        if src != dst
    }
    worked = simulate(
        rehearse,
        world_size=p,
        args=(schedule, costs),
        kwargs={"size_bytes": size, "ahead": ahead},
        link=links,
        semantics=semantics,
    )
    alone = simulate_schedule(
        schedule, costs, link=links, size_bytes=size, ahead=ahead, semantics=semantics
    ).trace()
    mine, theirs = find_step(alone), find_step(worked)
    assert [mine.list_actions(rank) for rank in mine.ranks] == [
        theirs.list_actions(rank) for rank in theirs.ranks
    ]
    for name in ("start", "end"):
        assert np.abs(getattr(mine, name) - getattr(theirs, name)).max() <= 1, name
    sends = worked.events.select(worked.messages.send)
    about = [
        (action.stage, action.microbatch)
        for row in lower(schedule).actions
        for action in row
        if action.kind.startswith("SEND")
    ]
    assert sorted(zip(sends.stage.tolist(), sends.microbatch.tolist(), strict=True)) == sorted(
        about
    )
    for name in ("send", "recv"):
        ours, others = (
            trace.events.select(getattr(trace.messages, name)) for trace in (alone, worked)
        )
        assert where(ours) == where(others)
        for rank in range(p):
            for column in ("post_ns", "done_ns") if name == "recv" else ("post_ns",):
                one, other = (
                    np.sort(getattr(events, column)[events.rank == rank])
                    for events in (ours, others)
                )
                assert np.abs(one - other).max(initial=0) <= 1, (name, column, rank)
    return len(alone.messages)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule(name: str, semantics: Semantics) -> None:
    chance, sizes = random.Random(name), [(1, 2, 1), (2, 3, 1), (3, 6, 0), (4, 8, 1), (5, 4, 2)]
    assert sum(
        compare(make_schedule(name, p, m), chance, ahead, semantics) for p, m, ahead in sizes
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"costs": Costs(latency=1)}, "latency must be 0, got 1"),
        ({"size_bytes": -1}, "size_bytes must be an integer from 0, got -1"),
        ({"steps": 0}, "steps must be an integer from 1, got 0"),
        (
            {"schedule": make_schedule("gpipe", 2, 1)},
            "schedule must be for the 1 ranks of the ring, got one for 2",
        ),
    ],
)
def test_rehearsals_that_cannot_be_are_refused(changes: dict[str, Any], what: str) -> None:
    arguments = {
        "schedule": make_schedule("gpipe", 1, 1),
        "costs": Costs(forward=0, backward=0),
        **changes,
    }
    with pytest.raises(ArgumentError, match=what):
        simulate(rehearse, world_size=1, kwargs=arguments, link=Link(0, 0))


def test_rehearsals_post_in_one_order_where_messages_go_one_after_the_other() -> None:
    schedule, costs = make_schedule("1f1b", 2, 4), Costs(1e-3, 1e-3, 1e-3)
    trace = simulate(
        rehearse,
        world_size=2,
        args=(schedule, costs),
        kwargs={"size_bytes": 8},
        link=Link(0, 0),
        semantics="grouped",
    )
    assert (len(trace.messages), trace.unmatched) == (8, [])
