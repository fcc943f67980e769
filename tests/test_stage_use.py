"""Tests of the phases of a step, and of the use of stages in a generation ring."""

from __future__ import annotations

import pytest
from synthetic import MS, UNIT_MS, Story, known, trace_of

from ringsim import Trace
from ringsim.errors import ArgumentError
from ringsim.traces.steps import find_step, measure_stage_use


def test_phases_by_hand() -> None:
    """Tests the phases of 1F1B with 2 ranks, 4 microbatches and backward 2.

    rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3  warm-up until 4, cool-down from 10
    rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .   warm-up until 2, cool-down from 11
    """
    actions = find_step(trace_of(known("1f1b", 2, 4)))
    begin = actions.start.min()
    limits = [
        [
            (name, *(float(time - begin) / (UNIT_MS * MS) for time in between))
            for name, *between in actions.phases(rank)
        ]
        for rank in (0, 1)
    ]
    assert limits == [
        [("warm-up", 0, 4), ("steady", 4, 10), ("cool-down", 10, 15)],
        [("warm-up", 1, 2), ("steady", 2, 11), ("cool-down", 11, 13)],
    ]
    # the second: F F F F B B B B without gaps
    for gpipe in (known("gpipe", 2, 4), known("gpipe", 1, 4)):
        phases = find_step(trace_of(gpipe)).phases(0)
        assert [name for name, *_ in phases] == ["warm-up", "cool-down"]


def generation(jobs: str) -> Trace:
    """Makes the trace of a stage with jobs in slots of 10 ms: batch and token, or a pause.

    A prefill takes 10 ms and a decode 6. 0.2.0 also counted spans in a job.
    """
    story = Story(1)
    for slot, job in enumerate(jobs.split()):
        if job != ".":
            name, took = ("decode", 6) if int(job[1]) else ("prefill", 10)
            where = {"stage": 0, "microbatch": "ab".index(job[0])}
            story.span(0, name, 10 * slot, 10 * slot + took, **where)
            story.span(0, "decode", 10 * slot + 2, 10 * slot + 4, **where)
    return story.trace()


@pytest.mark.parametrize(
    ("jobs", "use", "idle_s"),
    [
        ("a0 b0 a1 . b1 . . a2 b2", 12 / 50, 0.086 - 0.044),
        ("a0 a1 . a2 . . . a3 b0 b1 b2 b3", 12 / 60, 0.116 - 0.056),  # two rounds
    ],
)
def test_the_use_of_a_stage_is_that_of_the_time_until_the_last_token(
    jobs: str, use: float, idle_s: float
) -> None:
    assert measure_stage_use(generation(jobs)) == [pytest.approx((0.01, 0.006, use, idle_s))]


NO_ONE_CALL = "the trace does not contain exactly one call to generate with max_new_tokens of 3 or"


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ("", "the trace contains no jobs from generate"),
        ("a0", NO_ONE_CALL),
        ("a0 a1", NO_ONE_CALL),
        ("a0 a1 a2 " * 2, NO_ONE_CALL),
    ],
)
def test_the_use_of_stages_is_asked_of_one_call_of_generate(jobs: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        measure_stage_use(generation(jobs))
