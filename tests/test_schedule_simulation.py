"""Tests that compare simulated schedules with the evaluator, another calculation and real steps.

They also cover critical paths, slack, sensitivity, and traces.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import Link, Trace, simulate, simulate_schedule
from ringsim.errors import ArgumentError, Deadlock
from ringsim.pipeline import Action, Costs, Schedule, evaluate, lower, rehearse
from ringsim.schedules import SCHEDULE_NAMES, closed_forms, make_schedule

Semantics = Literal["rendezvous", "buffered"]
SEMANTICS = ("rendezvous", "buffered")
CASES = [
    *((name, None) for name in SCHEDULE_NAMES),
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 3),
]
# the message that a computation waits for, if another rank sends it
RECEIVES = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
# the names of the spans of a trace
KINDS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
TIMES = ["post_ns", "done_ns"]
seeds = st.integers(0, 2**32)


def ends_of(run: Any) -> dict[Action, Any]:
    return {run.operations.action(number): end for number, end in enumerate(run.ends.tolist())}


def received_for(action: Action) -> Action:
    return action._replace(kind=RECEIVES.get(action.kind, "none"))


def draw_costs(chance: random.Random, num_stages: int) -> Costs:
    def draw() -> list[Fraction]:
        return [Fraction(chance.randint(0, 12), chance.randint(1, 5)) for _ in range(num_stages)]

    latency = Fraction(chance.randint(0, 9), 4)
    return Costs(draw(), draw(), draw(), chance.choice((None, draw())), latency=latency)


def draw_links(chance: random.Random, ranks: int) -> dict[tuple[int, int], Link]:
    pairs = product(range(ranks), repeat=2)
    return {pair: Link(chance.random(), chance.random()) for pair in pairs}


def draw_schedule(chance: random.Random) -> Schedule:
    """Draws an unnamed schedule of a whole step.

    It may have any placement, whole or split backwards, and any order that can finish.
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

    The ranks may no longer finish.
    """
    rows = []
    for row in map(list, lowered.actions):
        for place in range(len(row) - 1):
            first, second = row[place : place + 2]
            passes = not first.is_compute and second.is_compute and first != received_for(second)
            if passes and chance.random() < 0.4:
                row[place], row[place + 1] = second, first
        rows.append(tuple(row))
    return replace(lowered, actions=tuple(rows))


# -- the evaluator, in exact fractions


def attempt(time: Any, schedule: Schedule, costs: Costs, **options: Any) -> tuple[Any, ...]:
    """Returns the times that a clock finds, or its deadlock."""
    try:
        run = time(schedule, costs, **options)
    except Deadlock as stuck:
        return str(stuck), stuck.diagnosis
    if time is simulate_schedule:
        ends = ends_of(run)
    else:
        own = [run.get_computations(rank) for rank in range(schedule.num_ranks)]
        ends = {timed.action: timed.end for row in own for timed in row}
    return ends, run.makespan, tuple(run.busy), tuple(run.idle)


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
    for schedule in (make_schedule(case[0], p, m, case[1]), draw_schedule(chance)):
        costs = draw_costs(chance, schedule.num_stages)
        lowered = lower(schedule, ahead=ahead)
        moved = move_posts(lowered, chance)
        for written, each in ((lowered, schedule), (lowered, lowered), (moved, moved)):
            expected = attempt(evaluate, written, costs, semantics=semantics)
            found = attempt(simulate_schedule, each, costs, semantics=semantics, ahead=ahead)
            assert found == expected


# -- closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_forms_at_full_width(name: str) -> None:
    step, link = closed_forms.Step(name, 300, 500), Link(alpha_s=0.125, beta_s_per_byte=0.25)
    sizes: dict[str, Any] = {"num_ranks": 300, "num_microbatches": 500, "semantics": "buffered"}
    run = simulate_schedule(name, Costs(latency=0.125), **sizes)
    assert run.makespan == run.closed_form == closed_forms.makespan(step, Costs(latency=0.125))
    run = simulate_schedule(name, link=link, size_bytes=4, **sizes)
    assert run.makespan == run.closed_form == closed_forms.makespan(step, Costs(latency=1.125))
    queued = simulate_schedule(name, num_ranks=4, num_microbatches=5, link=link, size_bytes=5)
    assert queued.closed_form is None


# -- links that messages keep busy


class Drawn(NamedTuple):
    """A randomly drawn and simulated step."""

    lowered: Schedule
    costs: Costs
    links: dict[tuple[int, int], Link]
    sizes: list[int]
    run: Any


def draw_run(seed: int, semantics: Semantics, ahead: int) -> Drawn:
    chance = random.Random(seed)
    name = chance.choice((*SCHEDULE_NAMES, "drawn"))
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 6)
    schedule = (
        draw_schedule(chance) if name == "drawn" else make_schedule(name, ranks, microbatches)
    )
    costs = Costs(*([chance.random() for _ in range(schedule.num_stages)] for _ in range(4)))
    links = draw_links(chance, schedule.num_ranks)
    sizes = [chance.randint(0, 3) for _ in range(schedule.num_stages - 1)]
    run = simulate_schedule(
        schedule, costs, link=links, size_bytes=sizes, semantics=semantics, ahead=ahead
    )
    return Drawn(lower(schedule, ahead=ahead), costs, links, sizes, run)


def reckon(
    drawn: Drawn, semantics: str, slower: Action | None = None, by: float = 0
) -> dict[Action, Any]:
    """Computes the end of each computation by going through the rows until nothing changes.

    One computation is slower ``by`` some time.
    """
    ranks = drawn.lowered.stage_ranks
    ends: dict[Action, Any] = {}  # of computations, and of receives: when their message arrives
    while True:
        before, posts = dict(ends), {}
        for row in drawn.lowered.actions:
            clock: Any = 0
            for action in row:
                if action.is_compute:
                    clock = max(clock, ends.get(received_for(action), 0))
                    clock += drawn.costs.get_duration(action) + (by if action == slower else 0)
                    ends[action] = clock
                else:
                    posts[action] = clock
        free: dict[tuple[int, int], Any] = {}  # a link takes messages in the order of their sends
        for rank, row in enumerate(drawn.lowered.actions):
            for send in row:
                if send.kind.startswith("SEND"):
                    recv = send.other_side
                    channel = rank, ranks[recv.stage]
                    start = max(posts[send], free.get(channel, 0))
                    if semantics == "rendezvous":
                        start = max(start, posts[recv])
                    size, link = drawn.sizes[min(send.stage, recv.stage)], drawn.links[channel]
                    free[channel] = start + size * link.beta_s_per_byte
                    ends[recv] = free[channel] + link.alpha_s
        if ends == before:
            return {action: end for action, end in ends.items() if action.is_compute}


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
    given: dict[str, Any] = {"link": draw_links(chance, p), "size_bytes": chance.randint(0, 2)}
    schedule = make_schedule(name, p, m)
    listed = replace(schedule, actions=tuple(schedule.actions))  # as any schedule, level by level
    named, written = (
        simulate_schedule(each, costs, semantics=semantics, ahead=ahead, **given)
        for each in (schedule, listed)
    )
    assert named.makespan == written.makespan
    assert ends_of(named) == ends_of(written)
    assert np.array_equal(named.message_starts, written.message_starts)
    assert named.critical_path == written.critical_path


# -- the critical path


def check_reason(before: Any, hop: Any, lowered: Schedule) -> None:
    """Compares a hop's reason with the positions of the two actions in the rows."""
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
        earlier = own[: own.index(hop.action)]
        assert before.action == [action for action in earlier if action.is_compute][-1]


def test_critical_paths_hold_together() -> None:
    seen: Counter[str] = Counter()
    for seed, semantics, ahead in product(range(70), SEMANTICS, (0, 1)):
        lowered, costs, _, _, run = draw_run(seed, semantics, ahead)  # type: ignore[arg-type]
        path = run.critical_path
        assert (path.hops[0].start, path.hops[-1].end) == (0, run.makespan)
        assert path.computing + path.travelling == pytest.approx(run.makespan)
        for before, hop in pairwise((None, *path.hops)):
            assert before is None or before.end == hop.start
            if hop.source < 0:
                assert hop.end - hop.start == pytest.approx(costs.get_duration(hop.action))
            check_reason(before, hop, lowered)
            seen[hop.reason] += 1
    assert set(seen) == {"start", "program order", "data", "link busy", "receiver late"}
    assert min(seen.values()) > 100


def test_path_of_nothing() -> None:
    run = simulate_schedule(Schedule("empty", 1, (0,), ((),)))
    assert (run.makespan, len(run.critical_path), run.bubble) == (0, 0, 0)
    assert len(run.trace().events) == 0


# -- slack and sensitivity


@given(seeds, st.sampled_from(SEMANTICS), st.integers(0, 1))
def test_slack_is_what_a_computation_may_be_slower_by(
    seed: int, semantics: Semantics, ahead: int
) -> None:
    drawn = draw_run(seed, semantics, ahead)
    run, count = drawn.run, len(drawn.run.operations)
    assert not count or min(run.slack) < 1e-9
    for number in random.Random(seed).sample(range(count), min(4, count)):
        action, slack = run.operations.action(number), float(run.slack[number])
        for more in (0.0, 0.5):
            makespan = max(reckon(drawn, semantics, action, slack + more).values())
            assert makespan == pytest.approx(run.makespan + more)


def test_sensitivity_is_what_simulating_again_gives() -> None:
    link = Link(alpha_s=0.05, beta_s_per_byte=0.25)
    costs = Costs([1.0, 1.0, 1.5, 1.0], [0.5, 0.5, 1.0, 0.5], 0.5)

    def simulated(costs: Costs, links: Any, size: int) -> Any:
        return simulate_schedule(
            "1f1b", costs, num_ranks=4, num_microbatches=6, link=links, size_bytes=size
        )

    run = simulated(costs, link, 2)
    found = run.sensitivity(by=0.5, most=20)
    gains = {lever.what: lever.gain for lever in found.levers}
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert gains["stage 2"] == max(gains.values()) > 0
    slower = [1.0, 1.0, 1.5 / 2, 1.0], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.25, 0.5]
    links = dict.fromkeys(product(range(4), repeat=2), link)
    again = {
        "stage 2": simulated(Costs(*slower), link, 2),
        "link 1>2": simulated(costs, links | {(1, 2): Link(0.025, 0.125)}, 2),
        "message size": simulated(costs, link, 1),
    }
    for what, better in again.items():
        assert gains[what] == pytest.approx(run.makespan - better.makespan)
    for lever in found.levers:
        assert lever.bound == 0.5 * lever.on_path
        assert lever.gain <= lever.bound + 1e-12
    assert repr(found).startswith("Improved by 50%:    gain    of the step   at most\n  stage 2 ")
    assert len(run.sensitivity(most=2).levers) == 2


def test_many_costs_at_once_are_each_alone() -> None:
    costs = [Costs(forward=forward) for forward in (1, 2, 3)]
    given: dict[str, Any] = {"num_ranks": 5, "num_microbatches": 9, "size_bytes": 1}
    for name in ("1f1b", "zb_v"):
        many = simulate_schedule(name, costs, link=Link(0.25, 0.125), **given)
        alone = [simulate_schedule(name, one, link=Link(0.25, 0.125), **given) for one in costs]
        assert many.makespan.tolist() == [run.makespan for run in alone]
        assert np.array_equal(many.busy, np.stack([run.busy for run in alone]))
        assert many.bubble == pytest.approx([run.bubble for run in alone])
        assert repr(many).startswith(f"{len(many)} what-ifs of {name}: ")


# -- traces


def simulate_small(name: str = "1f1b", p: int = 3, m: int = 5) -> Any:
    link = Link(alpha_s=0.125, beta_s_per_byte=0.25)
    return simulate_schedule(
        name, Costs(1, 0.5, 1.5), num_ranks=p, num_microbatches=m, link=link, size_bytes=2
    )


def computed(trace: Trace, kind: str = "span") -> pd.DataFrame:
    """Returns the computations of a trace, or its sends or receives, by rank and in their order."""
    frame = trace.to_pandas()
    own = frame.label.isin(KINDS) if kind == "span" else frame.kind == kind
    return frame[own].sort_values(["rank", "post_ns"])


def actions_of(trace: Trace) -> list[list[tuple[int, str, int]]]:
    """Returns the stage, kind and microbatch of each computation of each rank."""
    frame = computed(trace)
    return [
        list(zip(own.stage, own.label.map(KINDS), own.microbatch, strict=True))
        for _, own in frame.groupby("rank")
    ]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_trace_holds_the_schedule_and_its_times(name: str) -> None:
    run = simulate_small(name)
    trace, schedule = run.trace(), make_schedule(name, 3, 5)
    frame, messages = computed(trace), trace.to_pandas("messages")
    assert actions_of(trace) == list(map(list, schedule.actions))
    assert f"step {schedule.name}" in set(trace.to_pandas().label)
    assert np.array_equal(frame.done_ns, run.ends * 1e9)
    assert np.array_equal(frame.post_ns, run.starts * 1e9)
    assert trace.makespan_s >= run.makespan  # a send may arrive after the last computation
    assert trace.bubble().of_total == pytest.approx(run.bubble)
    assert len(messages) == sum(closed_forms.messages(closed_forms.Step(name, 3, 5)))
    assert trace.unmatched == []
    assert trace.metadata["source"] == "simulated"
    assert (messages.size_bytes == 2).all()


def test_trace_is_the_same_byte_for_byte_and_keeps_in_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one.ringtrace", tmp_path / "two.ringtrace"]
    for path in paths:
        simulate_small().trace().save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = ringsim.load(paths[0])
    assert loaded == simulate_small().trace()
    assert loaded.metadata["constants"] == {
        "semantics": "rendezvous", "ahead": 1, "forward": 1.0, "input": 0.5, "weight": 1.5,
        "backward": None, "latency": 0.0, "overlap": 0.0,
        "links": {"all": {"alpha_s": 0.125, "beta_s_per_byte": 0.25}}, "size_bytes": [2, 2],
    }  # fmt: skip


def test_part_of_a_trace() -> None:
    run = simulate_small("1f1b", p=6, m=9)
    some, early, whole = run.trace(ranks=[2, 3]), run.trace(between=(0.0, 4.0)), run.trace()
    messages, every = some.to_pandas("messages"), computed(whole)
    assert set(some.to_pandas()["rank"]) == {2, 3}
    assert set(zip(messages.src, messages.dst, strict=True)) == {(2, 3), (3, 2)}
    assert (len(messages), some.unmatched, early.unmatched) == (18, [], [])
    assert computed(some).done_ns.tolist() == every[every["rank"].isin([2, 3])].done_ns.tolist()
    assert some.metadata["notes"] == ["only ranks 2, 3"]
    assert "step part of 1f1b" in set(some.to_pandas().label)  # no closed form applies to it
    assert computed(early).done_ns.tolist() == every[every.post_ns <= 4e9].done_ns.tolist()
    assert 0 < len(early.messages) < len(whole.messages)


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringsim.simulator.step_trace.MOST_EVENTS", 100)
    run = simulate_small("1f1b", p=4, m=20)
    words = r"a trace must have at most 100 events, got 400. Select a part"
    with pytest.raises(ArgumentError, match=words):
        run.trace()
    assert len(run.trace(ranks=[0]).events) == 41


# -- rehearsed steps


def compare(
    schedule: Schedule, chance: random.Random, ahead: int, semantics: Semantics = "rendezvous"
) -> int:
    """Compares the computations and the messages of both, to the nanosecond.

    Returns the number of messages.
    """
    p, stages = schedule.num_ranks, range(schedule.num_stages)
    costs = Costs(*([chance.uniform(1e-3, 3e-3) for _ in stages] for _ in range(4)))
    links = {
        pair: Link(chance.uniform(0, 1e-3), chance.uniform(0, 2e-6))
        for pair in permutations(range(p), 2)
    }
    given: dict[str, Any] = {"size_bytes": 1000, "ahead": ahead}
    network: dict[str, Any] = {"link": links, "semantics": semantics}
    worked = simulate(rehearse, world_size=p, args=(schedule, costs), kwargs=given, **network)
    alone = simulate_schedule(schedule, costs, **given, **network).trace()
    assert actions_of(alone) == actions_of(worked)
    sent = worked.to_pandas("messages")
    posts = [action for row in lower(schedule).actions for action in row if "SEND" in action.kind]
    assert Counter(zip(sent.stage, sent.microbatch, strict=True)) == Counter(
        (action.stage, action.microbatch) for action in posts
    )
    where = ["rank", "peer", "tag", "size_bytes", "group"]
    for kind, times in (("span", TIMES), ("send", TIMES[:1]), ("recv", TIMES)):
        both = [computed(trace, kind) for trace in (alone, worked)]
        counts = [Counter(map(tuple, frame[where].values)) for frame in both]
        assert counts[0] == counts[1]
        for name in times:
            ours, theirs = (frame.sort_values(["rank", name])[name].to_numpy() for frame in both)
            assert np.abs(ours - theirs).max(initial=0) <= 1, (kind, name)
    return len(sent)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule(name: str, semantics: Semantics) -> None:
    chance, sizes = random.Random(name), [(1, 2, 1), (2, 3, 1), (3, 6, 0), (4, 8, 1), (5, 4, 2)]
    assert sum(
        compare(make_schedule(name, p, m), chance, ahead, semantics) for p, m, ahead in sizes
    )


def test_rehearsals_post_in_one_order_where_messages_go_one_after_the_other() -> None:
    worker = partial(rehearse, make_schedule("1f1b", 2, 4), Costs(1e-3, 1e-3, 1e-3), size_bytes=8)
    trace = simulate(worker, world_size=2, link=Link(0, 0), semantics="grouped")
    assert (len(trace.messages), trace.unmatched) == (8, [])
