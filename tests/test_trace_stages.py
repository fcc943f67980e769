"""Pipeline steps, read back from traces, and compared with the evaluator that made them."""

from __future__ import annotations

import re
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import LABELS, MS, UNIT_MS, Story, add_step, known, pipeline, trace_of

from ringsim import Trace
from ringsim.errors import ArgumentError
from ringsim.pipeline import Costs, Evaluation, evaluate, from_text
from ringsim.schedules import SCHEDULE_NAMES, ScheduleError, closed_forms, make_schedule

UNIT_NS = UNIT_MS * MS
KIND_OF = {label: kind for kind, label in LABELS.items()}


def count_steps(trace: Trace) -> int:
    said = re.search(r"pipeline +(\d+) steps?,", trace.summary())
    return int(said[1]) if said else 0


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_is_read_is_what_was_evaluated_and_the_closed_form_says(name: str) -> None:
    for num_ranks, num_microbatches in product((1, 2, 4), (1, 3, 8)):
        if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
            continue
        evaluation = known(name, num_ranks, num_microbatches)
        trace = trace_of(evaluation)
        bubble, peaks = trace.bubble(), trace.peak_activations()
        assert bubble.makespan == pytest.approx(float(evaluation.makespan) * UNIT_NS)
        for read, evaluated in (
            (bubble.idle, evaluation.idle),
            (bubble.span_idle, evaluation.span_idle),
        ):
            assert read == pytest.approx([float(idle) * UNIT_NS for idle in evaluated])
        assert peaks.peaks == evaluation.peak_live
        chunks = evaluation.schedule.num_stages // num_ranks
        try:
            closed_forms.idle(closed_forms.Step(name, num_ranks, num_microbatches, chunks))
        except ScheduleError:
            assert bubble.closed_form is None
        else:
            assert [bubble.of_total, bubble.of_ideal, bubble.of_span] == pytest.approx(
                list(vars(bubble.closed_form).values())
            )
            assert peaks.bounds == peaks.peaks


def test_the_conventions_by_hand() -> None:
    """1F1B, 2 ranks, backward 2.

    2 microbatches    rank 0   F0 F1 .  .  B0 B0 .  B1 B1      step: 0-9, idle 3; span 0-9, idle 3
                      rank 1   .  F0 B0 B0 F1 B1 B1 .  .       step: 0-9, idle 3; span 1-7, idle 0
    """
    bubble = trace_of(known("1f1b", 2, 2)).bubble()
    assert bubble.of_total_by_rank == pytest.approx([3 / 9, 3 / 9])
    assert bubble.of_span_by_rank == pytest.approx([3 / 9, 0])
    assert (bubble.of_total, bubble.of_span) == pytest.approx((3 / 9, 3 / 9))
    assert bubble.of_ideal == pytest.approx(3 / 6)
    assert repr(bubble).splitlines()[-1].split() == ["closed", "form", "33.3%", "33.3%", "50.0%"]


@given(seed=st.integers(0, 10_000))
def test_live_activations_are_forwards_begun_and_not_yet_passed_back(seed: int) -> None:
    """They are counted again whenever a forward begins, for random costs."""
    random = np.random.default_rng(seed)
    name = SCHEDULE_NAMES[seed % len(SCHEDULE_NAMES)]
    num_ranks = int(random.integers(1, 5))
    schedule = make_schedule(name, num_ranks, int(random.integers(2 * num_ranks, 12)))
    costs = Costs(*(tuple(random.uniform(0.5, 3, schedule.num_stages).tolist()) for _ in range(3)))
    evaluation = evaluate(schedule, costs)
    for rank, peak in enumerate(trace_of(evaluation).peak_activations().peaks):
        own = evaluation.get_computations(rank)
        begins = [one.start for one in own if one.action.kind == "F"]
        ends = [one.end for one in own if one.action.kind in "BW"]
        live = [
            sum(begin <= now for begin in begins) - sum(end <= now for end in ends)
            for now in begins
        ]
        assert peak == max(live)


def test_steps_are_told_apart_and_the_last_is_taken() -> None:
    trace = trace_of(known("gpipe", 2, 2), known("1f1b", 2, 5), known("zb_h1", 2, 3))
    assert count_steps(trace) == 3
    assert [trace.bubble(step).schedule for step in range(3)] == ["gpipe", "1f1b", "zb_h1"]
    assert trace.bubble() == trace.bubble(2)
    assert trace.peak_activations(1).bounds == (2, 1)
    sizes = [len(trace.step(step).filter(ops="span")) for step in range(3)]
    assert sizes == [2 + 8, 2 + 20, 2 + 18]
    for step in (-1, 3):
        says = rf"step must be from 0 to 2, got {step}\. Omit step"
        with pytest.raises(ArgumentError, match=says):
            trace.bubble(step)
    # spans called "forward", but without a step around them
    for ask in (pipeline().bubble, pipeline().peak_activations):
        with pytest.raises(ArgumentError, match="the trace contains no pipeline step"):
            ask()


def test_a_step_that_a_rank_never_ended_does_not_count() -> None:
    story = Story(2)
    for begin in (1.0, 100.0):
        add_step(story, known("1f1b", 2, 2), begin, (0, 1), "1f1b")
    steps = [row for row in story.rows if row["rank"] == 1 and row.get("label") == "step 1f1b"]
    steps[-1] |= {"done_ns": -1, "status": 1}
    assert count_steps(story.trace()) == 1


def test_what_a_user_records_around_and_between_is_no_step_and_no_action() -> None:
    story = Story(2)
    for rank in (0, 1):
        story.span(rank, "step 7 of my loop", 0.2, 60)
        story.span(rank, "step without computing", 60, 61)
    add_step(story, known("1f1b", 2, 2), 1.0, (0, 1), "1f1b")
    story.span(0, "forward", 0.1, 0.15, stage=0, microbatch=7)  # before it
    story.span(0, "forward", 62, 63, stage=0, microbatch=7)  # after it
    story.span(0, "forward", 0.6, 0.7, stage=0)  # a user's span, without a microbatch
    story.span(0, "forward", 0.8, 0.9, microbatch=0)  # a user's span, without a stage
    story.span(0, "forward", 0.85, -1, stage=0, microbatch=7, thread=1)  # a span that has not ended
    story.span(0, "attention", 1.3, 1.4, stage=0, microbatch=0)
    trace, plain = story.trace(), trace_of(known("1f1b", 2, 2))
    assert count_steps(trace) == 1
    assert trace.bubble() == plain.bubble()
    assert trace.bubble().closed_form is not None


@pytest.mark.parametrize("name", ["forward", "backward", "step 3 of the solver"])
def test_spans_inside_a_computation_are_neither_steps_nor_computations(name: str) -> None:
    """0.2.0 counted a layer's span "forward" again, and ended the step at a layer's "step ..."."""
    story, plain = Story(2), trace_of(known("1f1b", 2, 5), known("1f1b", 2, 5))
    for begin in (1.0, 101.0):
        add_step(story, known("1f1b", 2, 5), begin, (0, 1), "1f1b")
    inside = [row for row in story.rows if row.get("label") in ("forward", "backward")]
    for row in inside:
        third = (row["done_ns"] - row["post_ns"]) / 3 / MS
        where = {key: row[key] for key in ("stage", "microbatch")}
        begin, end = row["post_ns"] / MS + third, row["done_ns"] / MS - third
        story.span(row["rank"], name, begin, end, **where)
    trace = story.trace()
    assert count_steps(trace) == 2
    for step in (0, 1):
        bubble = trace.bubble(step)
        assert (bubble.schedule, bubble.busy) == ("1f1b", plain.bubble(step).busy)
        assert bubble.closed_form is not None, "the actions must be those of the schedule"
        assert trace.peak_activations(step).peaks == (2, 1)
        assert len(trace.step(step)) == len(plain.step(step)) + len(inside) / 2


NESTED = (
    "step loop 0 100, step outer 1 40, 0F0 2 3, step warm-up 4 10, 0F1 5 6, step empty 11 12, "
    "0B0 20 21, 0B1 22 23, step last 40 60, 0F0 41 42"
)
# spans with their begin and end, some on thread 1; and the steps that they are
STEPS = {
    "on the virtual clock only the order tells apart what takes no time": (
        "step 0 0 5, 0F0 1 2, step 1 5 5, 0F1 5 5, step 2 5 5, 0F2 5 5",
        [("0", "0F0"), ("1", "0F1"), ("2", "0F2")],
    ),
    "computations of two threads may overlap, as in DualPipe": (
        "step mine 0 20, 0F0 1 8, 1B0 2 5 @1",
        [("mine", "0F0 1B0")],
    ),
    "computations that touch or overlap all count": (
        "step mine 0 20, 0F0 1 3, 0F1 3 3, 0F2 3 6, 0F3 5 8, 0F4 8 8, 0F5 8 9",
        [("mine", "0F0 0F1 0F2 0F3 0F4 0F5")],
    ),
    "a step directly contains computations, and may contain steps": (
        NESTED,
        [("outer", "0F0 0F1 0B0 0B1"), ("last", "0F0")],
    ),
    "a step that has not ended hides no other": (
        "step loop 0 -1, step mine 1 6, 0F0 2 3, step mine 11 16, 0F0 12 13, step mine 21 -1, "
        "0F0 22 23",
        [("mine", "0F0"), ("mine", "0F0")],
    ),
    "steps of two threads that overlap stay apart": (
        "step 0 0 10, 0F0 1 2, step 1 5 15 @1, 0F1 6 7 @1, 0F2 12 13 @1",
        [("0", "0F0"), ("1", "0F1 0F2")],
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_which_spans_are_steps(what: str) -> None:
    spans, expected = STEPS[what]
    story = Story(1)
    for span in spans.split(", "):
        words, _, thread = span.partition(" @")
        label, begin, end = words.rsplit(" ", 2)
        computes = re.fullmatch(r"(\d)([FB])(\d)", label)
        more = {"stage": int(computes[1]), "microbatch": int(computes[3])} if computes else {}
        label = LABELS[computes[2]] if computes else label
        story.span(0, label, int(begin), int(end), thread=int(thread or 0), **more)
    trace, found = story.trace(), []
    for number in range(count_steps(trace)):
        bubble = trace.bubble(number)
        actions = [event for event in trace.step(number) if event.label in KIND_OF]
        read = [f"{one.stage}{KIND_OF[one.label or '']}{one.microbatch}" for one in actions]
        times = [(one.post_ns // 10**6, (one.done_ns or 0) // 10**6) for one in actions]
        busy_ms = {moment for begin, end in times for moment in range(begin, end)}
        assert sum(bubble.busy) == 10**6 * len(busy_ms)
        found.append((bubble.schedule, " ".join(read)))
    assert found == expected


OTHER_ORDERS = (
    "rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0",
    "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1",
    "rank 0: 0F0",
)


@pytest.mark.parametrize(
    ("own", "name"),
    [
        *((evaluate(from_text(text)), "1f1b") for text in OTHER_ORDERS),
        (known("interleaved_1f1b", 2, 4), "zb_v"),
    ],
)
def test_a_name_alone_makes_no_closed_form(own: Evaluation, name: str) -> None:
    assert trace_of(own, name=name).bubble().closed_form is None


def test_replicas_of_a_pipeline_are_known_together_and_ranks_need_not_begin_at_zero() -> None:
    """Two rings of two ranks, data parallel: rings (0, 2) and (1, 3)."""
    story, evaluation = Story(4, ring=False), known("1f1b", 2, 4)
    for places in ((0, 2), (1, 3)):
        add_step(story, evaluation, 1.0, places, "1f1b")
    trace, shifted = story.trace(), trace_of(evaluation, ranks=(2, 3))
    assert trace.bubble().closed_form == trace_of(evaluation).bubble().closed_form is not None
    assert trace.bubble().of_total == pytest.approx(shifted.bubble().of_total)
    assert (trace.bubble().ranks, trace.peak_activations().bounds) == ((0, 1, 2, 3), (2, 2, 1, 1))
    assert (shifted.bubble().ranks, shifted.peak_activations().peaks) == ((2, 3), (2, 1))


def test_a_microbatch_of_a_huge_number_asks_for_no_memory() -> None:
    """A damaged file may have any number; a schedule of so many microbatches would not fit."""
    story = Story(1)
    story.span(0, "step 1f1b", 0, 5)
    story.span(0, "forward", 1, 2, stage=0, microbatch=2**31 - 2)
    story.span(0, "backward", 2, 3, stage=0, microbatch=2**31 - 2)
    trace = story.trace()
    tracemalloc.start()
    try:
        assert trace.bubble().closed_form is None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
