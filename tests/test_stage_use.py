"""Tests of the phases of a step, and of the use of stages in a generation ring."""

from __future__ import annotations

import pytest
from synthetic import MS, UNIT_MS, Story, known, trace_of

from ringsim.traces.steps import find_step, measure_stage_use


def test_phases_by_hand() -> None:
    """Tests the phases of 1F1B with 2 ranks, 4 microbatches and backward 2.

    rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3  warm-up until 4, cool-down from 10
    rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .   warm-up until 2, cool-down from 11
    """
    actions = find_step(trace_of(known("1f1b", 2, 4)))
    begin = actions.start.min()
    limits = [
        [float(time - begin) / (UNIT_MS * MS) for time in vars(actions.phases(rank)).values()]
        for rank in (0, 1)
    ]
    assert limits == [[0, 4, 10, 15], [1, 2, 11, 13]]
    assert actions.phases(0).has_steady
    assert not find_step(trace_of(known("gpipe", 2, 4))).phases(0).has_steady
    # F F F F B B B B without gaps
    assert not find_step(trace_of(known("gpipe", 1, 4))).phases(0).has_steady


def test_the_use_of_a_stage_by_hand() -> None:
    """Prefill is at 100 ms, decodes at 200, 300 and 400, each 30 long; then comes a second round.

    Until the last token 60 of 200 ms are used. 0.2.0 also counted spans in a job: two of 10 ms in
    a job of 30 ms gave a mean of 16.7 ms.
    """
    story = Story(1)
    for batch, moments in enumerate([(100, 200, 300, 400), (500, 600, 1000, 1400)]):
        for moment in moments:
            name = "prefill" if moment == moments[0] else "decode"
            story.span(0, name, moment, moment + 30, stage=0, microbatch=batch)
    (use,) = measure_stage_use(story.trace())
    assert use == pytest.approx((0.03, 0.03, 60 / 200, (1430 - 100 - 8 * 30) / 1000))
    for begin in (105, 116, 205, 216):
        story.span(0, "decode", begin, begin + 10, stage=0, microbatch=0)
    assert measure_stage_use(story.trace()) == [use]
