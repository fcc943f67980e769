"""Schedules in which a rank runs a forward and a backward at the same time (OVERLAP_F_B)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import pytest
from test_schedule_simulation import attempt, draw_costs, ends_of
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
)

from ringsim import Link, simulate, simulate_schedule
from ringsim.errors import ArgumentError, ScheduleError
from ringsim.pipeline import (
    Action,
    Costs,
    Schedule,
    evaluate,
    from_csv,
    from_text,
    lower,
    make_schedule,
    rehearse,
    to_csv,
    to_text,
    validate,
)
from ringsim.plot.pipeline_step import plot_schedule
from ringsim.schedules import lower_in_step
from ringsim.schedules.closed_forms import Step, dualpipe_v_overlapped_idle, makespan
from ringsim.schedules.schedule import OverlappingAction
from ringsim.traces.steps import find_step

mpl.use("Agg")

BOTH = Costs(overlap=1)
# two stages on one rank; the pair begins at 3, and the last backward when the pair ends
PAIR = "rank 0: 0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B 1B1 0B0 0B1\n"
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
BROKEN = [
    ("(0F1;0SEND_F0)OVERLAP_F_B", "an action must consist of"),
    ("(0F1)OVERLAP_F_B", "an action must consist of"),
    ("(0F1;0B0;0W0)OVERLAP_F_B", "an action must consist of"),
    ("(0F1;0B0)", "an action must consist of"),
]


def without_pairs(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(Action(*action) for action in row) for row in schedule.actions)
    return replace(schedule, actions=rows)


def cells(schedule: Schedule) -> list[list[str]]:
    return [line.split(",") for line in to_csv(schedule).splitlines()]


def torch_rows(num_ranks: int, num_microbatches: int) -> dict[int, list[Any]]:
    rows = get_schedule_ops("DualPipeV", num_ranks, num_microbatches, num_stages_per_rank=2)
    return {rank: [one for one in row if one is not None] for rank, row in enumerate(rows)}


def torch_lowers(num_ranks: int, num_microbatches: int) -> dict[int, list[Any]]:
    """Returns torch's rows with everything that it adds, in the order of its own steps."""
    rows = {
        rank: _add_reduce_grad(_add_unshard_reshard(row), num_microbatches)
        for rank, row in torch_rows(num_ranks, num_microbatches).items()
    }
    owner = {stage: min(stage, 2 * num_ranks - 1 - stage) for stage in range(2 * num_ranks)}
    return _add_send_recv(rows, owner.__getitem__, 2 * num_ranks)


# -- text, CSV and torch


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_dualpipe_v_is_torchs_with_its_pairs(num_ranks: int) -> None:
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 3, 4 * num_ranks):
        rows = torch_rows(num_ranks, num_microbatches)
        ours = make_schedule("dualpipe_v", num_ranks, num_microbatches)
        assert cells(ours) == [[str(one) for one in row] for row in rows.values()]
        # with torch's sends and receives, and its actions for sharded parameters
        lowered = torch_lowers(num_ranks, num_microbatches)
        csv = "\n".join(",".join(map(str, row)) for row in lowered.values())
        text = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in lowered.items())
        assert "UNSHARD" in csv
        assert "RESHARD" in csv
        assert "REDUCE_GRAD" in csv
        schedule = from_csv(csv, name="dualpipe_v")
        assert cells(schedule) == [
            [str(one) for one in row if one.computation_type.value not in SHARDING]
            for row in lowered.values()
        ]
        assert to_text(from_text(text)) == to_text(schedule)
        for semantics in ("rendezvous", "grouped", "paired"):
            validate(schedule, semantics)
        assert evaluate(schedule, BOTH).makespan == evaluate(ours, BOTH).makespan


def test_pairs_are_read_as_written() -> None:
    schedule = from_text(PAIR)
    assert (to_text(schedule), len(schedule.actions[0])) == (PAIR, 8)
    assert to_csv(from_csv(to_csv(schedule))) == PAIR.removeprefix("rank 0: ").replace(" ", ",")
    assert to_text(without_pairs(schedule)) == PAIR.replace("(1F1;1B0)OVERLAP_F_B", "1F1 1B0")
    lowered = lower(make_schedule("dualpipe_v", 3, 6), overlap=True)
    assert to_text(from_text(to_text(lowered))) == to_text(lowered)
    for cell, words in BROKEN:
        with pytest.raises(ScheduleError, match=words) as caught:
            from_csv(f"0F0,{cell}")
        assert "(row 1, column 2)" in str(caught.value)


def test_two_that_need_each_other_do_not_overlap() -> None:
    validate(from_text("rank 0: 0F0 0I0 (0W0;0F1)OVERLAP_F_B 0B1"))
    with pytest.raises(ScheduleError, match=r"0B0 needs 0F0, which comes later .* position 1"):
        evaluate(from_text("rank 0: (0F0;0B0)OVERLAP_F_B"))


def test_nothing_comes_between_two_that_overlap() -> None:
    pair, post = OverlappingAction(0, "F", 1), Action(0, "SEND_F", 1)
    for row in ((Action(0, "F", 0), pair, post, Action(0, "B", 0)), (Action(0, "F", 0), pair)):
        schedule = Schedule("mine", 2, (0, 1), (row, ()))
        assert to_text(schedule).startswith("rank 0: 0F0 ")
        with pytest.raises(
            ScheduleError, match=r"0F1 overlaps .* a computation \(rank 0, position"
        ):
            evaluate(schedule, BOTH)


@pytest.mark.parametrize("lowers", [lower, lower_in_step, partial(lower, ahead=0)])
def test_sends_follow_both_and_receives_precede_both(lowers: Any) -> None:
    lowered = lowers(make_schedule("dualpipe_v", 4, 9), overlap=True)
    pairs = [pair for row in lowered.actions for pair in pairwise(row) if pair[0].overlaps]
    assert len(pairs) > 9
    assert all(second.is_compute for _, second in pairs)
    validate(lowered)


# -- times


def reckon(schedule: Schedule, costs: Costs) -> dict[Action, Any]:
    """Returns the ends of computations if messages take no time, by going through the needs."""
    ends: dict[Action, Any] = {}
    last = schedule.num_stages - 1

    def list_needs(action: Action) -> Iterator[Action]:
        stage, kind, microbatch = action
        if kind == "F" and stage:
            yield Action(stage - 1, "F", microbatch)
        if kind == "W":
            yield Action(stage, "I", microbatch)
        if kind in "BI":
            yield Action(stage, "F", microbatch)
            if stage < last:
                every = [Action(stage + 1, made_by, microbatch) for made_by in "BI"]
                (needed,) = [one for row in schedule.actions for one in row if one in every]
                yield needed

    # if a rank runs both at the same time, the messages of both leave when both have ended
    rows = schedule.actions if costs.overlap else without_pairs(schedule).actions
    leaves = {
        one: then if one.overlaps else one
        for row in rows
        for one, then in pairwise((*row, row[-1]))
    }
    places = {one: rank for rank, row in enumerate(rows) for one in row}
    waiting = [list(row) for row in rows]
    free = [0] * len(rows)
    hidden = [0] * len(rows)
    while any(waiting):
        for rank, row in enumerate(waiting):
            while row:
                here = row[0]
                needs = [leaves[one] if places[one] != rank else one for one in list_needs(here)]
                if not all(one in ends for one in needs):
                    break
                start = max([free[rank] - hidden[rank], *(ends[one] for one in needs)])
                ends[row.pop(0)] = free[rank] = start + costs.get_duration(here)
                lengths = [costs.get_duration(one) for one in (here, *row[:1])]
                hidden[rank] = costs.overlap * min(lengths) if here.overlaps else 0
    return ends


def test_both_run_at_the_same_time() -> None:
    # F takes 1 and B takes 2:  0F0 1F0 0F1 | 1F1    1B1 0B0 0B1
    #                                       | 1B0---
    ends = {0: 12, Fraction(1, 2): Fraction(23, 2), 1: 11}
    for overlap, end in ends.items():
        costs = Costs(overlap=overlap)
        for time in (evaluate, simulate_schedule):
            found = attempt(time, from_text(PAIR), costs)
            assert found[1:] == (end, (end,), (0,))
            assert (found[0][Action(1, "F", 1)], found[0][Action(1, "B", 0)]) == (4, end - 6)
    late = Costs(forward=4, backward=2, overlap=1)  # the shorter one ends with the longer one
    timed = evaluate(from_text(PAIR), late).actions[0][3:5]
    assert [(one.start, one.end) for one in timed] == [(12, 16), (14, 16)]


def draw_pairs(chance: random.Random) -> Schedule:
    """Draws DualPipeV with some of its pairs."""
    ranks = chance.randint(1, 4)
    schedule = make_schedule("dualpipe_v", ranks, chance.randint(1, 9))
    rows = [
        tuple(action if chance.random() < 0.8 else Action(*action) for action in row)
        for row in schedule.actions
    ]
    return replace(schedule, actions=tuple(rows))


@pytest.mark.parametrize("seed", range(20))
def test_both_evaluators_and_another_calculation_agree(seed: int) -> None:
    chance = random.Random(seed)
    schedule = draw_pairs(chance)
    drawn = draw_costs(chance, schedule.num_stages)
    costs = replace(drawn, overlap=Fraction(chance.randint(0, 4), 4))
    free = replace(costs, latency=0)
    assert attempt(evaluate, schedule, free)[0] == reckon(schedule, free)
    for semantics in ("rendezvous", "buffered", "grouped", "paired"):
        found = attempt(evaluate, schedule, costs, semantics=semantics)
        run = simulate_schedule(schedule, costs, semantics=semantics)
        assert (ends_of(run), run.makespan, tuple(run.busy), tuple(run.idle)) == found
        hops = run.critical_path.hops
        assert sum(hop.end - hop.start for hop in hops) == run.makespan
        assert all(first.end == then.start for first, then in pairwise(hops))
        several = [Costs(overlap=0.25), BOTH]
        many = simulate_schedule(schedule, several, semantics=semantics)
        for number, one in enumerate(several):
            known = evaluate(schedule, one, semantics)
            assert (many.makespan[number], tuple(many.busy[number])) == (known.makespan, known.busy)
    for ahead in (0, 2):
        lowered = lower(schedule, ahead=ahead, overlap=bool(costs.overlap))
        found = attempt(evaluate, lowered, costs)
        assert attempt(simulate_schedule, lowered, costs) == found
        assert attempt(simulate_schedule, schedule, costs, ahead=ahead) == found


@pytest.mark.parametrize("overlap", [Fraction(1, 1000), Fraction(1, 2), 1])
def test_overlapped_dualpipe_v_has_its_closed_form(overlap: Any) -> None:
    for num_ranks in range(1, 7):
        for num_microbatches in (2 * num_ranks, 2 * num_ranks + 1, 4 * num_ranks):
            step = make_schedule("dualpipe_v", num_ranks, num_microbatches)
            evaluation = evaluate(step, Costs(overlap=overlap))
            expected = dualpipe_v_overlapped_idle(num_ranks, 3 - overlap, backward=2, weight=1)
            assert max(evaluation.idle) == expected, (num_ranks, num_microbatches)
            assert (
                evaluation.peak_live == (min(2 * num_ranks + 1, 2 * num_microbatches),) * num_ranks
            )
    run = simulate_schedule("dualpipe_v", BOTH, num_ranks=2, num_microbatches=4)
    assert run.closed_form is None
    with pytest.raises(ScheduleError, match="overlap must be 0 for the closed form"):
        makespan(Step("dualpipe_v", 2, 4), BOTH)


def test_an_overlap_is_a_share() -> None:
    for overlap in (-1, 2, "all", None, True):
        with pytest.raises(ArgumentError, match="overlap must be from 0 to 1"):
            evaluate(from_text(PAIR), Costs(overlap=overlap))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="overlap must be 0 in all of the costs or in none"):
        simulate_schedule(from_text(PAIR), [Costs(), BOTH])


# -- slack


class Delayed(Costs):
    """Costs with which one computation takes longer."""

    late: Action
    by: Any

    def get_duration(self, action: Action) -> Any:
        return super().get_duration(action) + (self.by if action == self.late else 0)


@pytest.mark.parametrize("semantics", ["grouped", "paired", "grouped(0)", "paired(0)"])
def test_slack_if_messages_are_carried_out_in_order(semantics: str) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        names = ("1f1b", "zb_v", "interleaved_1f1b", "gpipe", "zb_h2")
        schedule = make_schedule(chance.choice(names), chance.randint(1, 4), chance.randint(1, 6))
        costs = draw_costs(chance, schedule.num_stages)
        run = simulate_schedule(schedule, costs, semantics=semantics)
        assert min(run.slack) < 1e-9
        for number in chance.sample(range(len(run.operations)), 2):
            delayed = Delayed(**vars(costs))
            object.__setattr__(delayed, "late", run.operations.action(number))
            for more in (0, Fraction(1, 2)):
                by = Fraction(float(run.slack[number])).limit_denominator(10**6) + more
                object.__setattr__(delayed, "by", by)
                later = evaluate(schedule, delayed, semantics).makespan
                assert later == pytest.approx(float(run.makespan + more)), (seed, number)


def test_slack_of_pairs_is_how_much_later_they_may_start() -> None:
    run = simulate_schedule(from_text(PAIR), BOTH)
    assert not run.slack.any()  # everything is on the path


# -- pictures, traces and ranks


def heights(ax: Any) -> set[float]:
    boxes = [each for each in ax.collections if str(each.get_gid()).startswith("actions-")]
    extents = [path.get_extents() for each in boxes for path in each.get_paths()]
    return {round(box.height, 6) for box in extents}


def test_both_are_drawn_half_as_high() -> None:
    run = simulate_schedule(from_text(PAIR), BOTH)
    for ax in (plot_schedule(evaluate(from_text(PAIR), BOTH)), run.plot()):
        half, whole = sorted(heights(ax))
        assert half == pytest.approx(whole / 2, abs=1e-5)
    (whole,) = heights(plot_schedule(from_text(PAIR)))  # in sequence


def test_the_trace_of_a_simulated_step_has_both() -> None:
    run = simulate_schedule("dualpipe_v", BOTH, num_ranks=2, num_microbatches=6)
    trace = run.trace()
    actions = find_step(trace)
    for rank, row in enumerate(make_schedule("dualpipe_v", 2, 6).actions):
        assert actions.list_actions(rank) == row
    assert trace.bubble().of_total == pytest.approx(run.bubble)
    assert trace.bubble().closed_form is None  # the formula is that of one stream
    assert set(trace.events.thread.tolist()) == {0, 1}
    in_sequence = simulate_schedule("dualpipe_v", num_ranks=2, num_microbatches=6).trace()
    assert set(in_sequence.events.thread.tolist()) == {0}
    assert in_sequence.bubble().closed_form is not None


def test_ranks_with_one_stream_run_one_after_the_other() -> None:
    schedule = make_schedule("dualpipe_v", 2, 4)
    link = Link(alpha_s=0.0, beta_s_per_byte=0.0)
    settings = {"size_bytes": 8}
    trace = simulate(rehearse, world_size=2, args=(schedule, Costs()), kwargs=settings, link=link)
    assert trace.bubble().makespan == pytest.approx(1e9 * evaluate(schedule).makespan)
