"""Late ranks in runs that finished: the blamed ranks, and the thresholds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_runs import LINK
from synthetic import Story

import ringsim
from ringsim import comm as dist


def findings(story: Story) -> Any:
    return story.trace().explain().findings


def late_sender(wait_ms: float, length_ms: float = 1000.0) -> Story:
    """Rank 1 computes until ``wait_ms``, then sends to rank 2, which has waited since 0."""
    story = Story(3)
    story.span(1, "compute", 0, wait_ms, stage=1, microbatch=3)
    story.message(1, 2, (wait_ms, wait_ms, wait_ms), (0, 0, wait_ms), line=41, file=0)
    story.span(0, "load", 0, length_ms)
    return story


def test_the_sentence_of_a_late_sender() -> None:
    (finding,) = findings(late_sender(312))
    assert (finding.kind, finding.ranks) == ("late_sender", (1, 2))
    assert finding.message == (
        "rank 2 waited 312 ms for rank 1.\n"
        "  rank 2 waited in irecv from 1 (ring:1>2, tag 0, float32[1024], 4,096 bytes) at "
        "ring.py:41\n"
        "  rank 1 was still computing stage 1, microbatch 3"
    )
    assert [(one.rank, one.op) for one in finding.operations] == [(2, "irecv"), (1, "isend")]


@pytest.mark.parametrize(
    ("wait_ms", "length_ms", "reported"),
    [(0.9, 2, False), (1.1, 2, True), (40, 1000, False), (60, 1000, True)],
    ids=["under 1 ms", "over 1 ms", "under 5 % of the run", "over 5 %"],
)
def test_thresholds(wait_ms: float, length_ms: float, reported: bool) -> None:
    assert bool(findings(late_sender(wait_ms, length_ms))) == reported


def test_the_sentence_of_a_late_receiver() -> None:
    story = Story(2)
    story.message(0, 1, (0, 0, 80), (80, 80, 81))
    story.span(1, "compute 0.0791 s", 0, 79.1)
    (finding,) = findings(story)
    assert (finding.kind, finding.ranks) == ("late_receiver", (1, 0))
    assert 'rank 1 was still in "compute 79.1 ms"' in finding.message


def test_who_waits_for_one_who_waits_is_folded() -> None:
    story = Story(4)
    story.span(0, "compute", 0, 100, stage=0, microbatch=0)
    for rank in (1, 2, 3):
        begin = 99 + rank
        sent, received = (begin, begin, begin + 1), (0, 0, begin + 1)
        story.message(rank - 1, rank, sent, received, line=rank, file=0)
    (finding,) = findings(story)
    assert (finding.kind, finding.ranks) == ("late_sender", (0, 1))
    assert {one.ranks for one in finding.consequences} == {(0, 1, 2), (0, 1, 2, 3)}
    last = next(one for one in finding.consequences if one.ranks[-1] == 3)
    assert (
        "\n  rank 2 waited for rank 1\n  rank 1 waited for rank 0\n"
        "  rank 0 was still computing stage 0"
    ) in last.message


def test_waits_at_one_line_are_one_finding() -> None:
    story = Story(2)
    for begin in range(0, 500, 100):
        late = begin + 50
        story.message(0, 1, (late, late, late), (begin, begin, late), line=7, file=0)
    (finding,) = findings(story)
    assert "rank 1 waited there 5 times, for 250 ms in total" in finding.message


def test_a_rank_that_works_while_its_message_travels_waits_for_nobody() -> None:
    story = Story(2)
    story.message(0, 1, (90, 90, 91), (0, 95, 96))
    assert findings(story) == ()


def slow_stage(slow: int, microbatches: int = 6) -> Story:
    """A pipeline of four stages, all of 10 ms but one of 60 ms; sends do not block."""
    story = Story(4)
    free = [0.0] * 4
    for microbatch in range(microbatches):
        arrived = 0.0
        for rank in range(4):
            begin = max(free[rank], arrived)
            if rank:
                received = (free[rank], free[rank], begin)
                story.message(rank - 1, rank, (arrived,) * 3, received, line=3, file=0)
            free[rank] = arrived = begin + (60 if rank == slow else 10)
            story.span(rank, "compute", begin, free[rank], stage=rank, microbatch=microbatch)
    return story


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_stage_is_a_straggler(slow: int) -> None:
    first, *rest = findings(slow_stage(slow))
    assert (first.kind, first.ranks) == ("straggler", (slow,))
    assert f"still computing stage {slow}" in first.message
    assert {one.ranks[-1] for one in first.consequences} == set(range(slow + 1, 4))
    assert all(slow not in finding.ranks[:-1] for finding in rest)
    if slow == 1:
        # Rank 2 waits 70 ms at first, of which rank 1 itself waited 10, and then 50 ms five times.
        # The waits of rank 3 are not caused by rank 1.
        assert f"times, for {70 - 10 + 5 * 50} ms in total." in first.message


def test_waits_of_several_threads_count_once() -> None:
    """The others wait 80 ms for rank 1, two threads of which are blocked from 10 to 50."""
    story = Story(4)
    for turn in range(3):
        at = 200 * turn
        for rank in (0, 2, 3):
            story.op(rank, "barrier", (at, at, at + 81), group="world", thread=0)
        story.op(1, "barrier", (at + 80, at + 80, at + 81), group="world", thread=0)
        for thread, (begin, end) in enumerate([(at + 10, at + 40), (at + 20, at + 50)]):
            about = {"peer": 2, "tag": thread, "group": "world", "thread": thread}
            story.op(1, "recv", (begin, begin, end), **about)
    (finding,) = (one for one in findings(story) if one.kind == "straggler")
    assert f"times, for {3 * 3 * (80 - 40)} ms in total." in finding.message


@pytest.mark.parametrize(("late", "straggler"), [("always rank 2", True), ("in turn", False)])
def test_who_is_last_at_every_barrier_is_a_straggler(late: str, straggler: bool) -> None:
    story = Story(4)
    for turn in range(8):
        begin = turn * 100
        for rank in range(4):
            came = begin + (80 if rank == (2 if straggler else turn % 4) else 5)
            story.op(rank, "barrier", (came, came, begin + 81), group="world")
            story.span(rank, "compute", begin, came)
    found = findings(story)
    assert [(one.kind, one.ranks) for one in found] == [("straggler", (2,))] * straggler
    if straggler:
        words = f"times, for {8 * 3 * 75 / 1000:g} s in total.\n  that is 100 % of all waiting"
        assert words in found[0].message


def works_and_meets(seconds: list[list[float]]) -> None:
    for its in seconds[dist.get_rank()]:
        ringsim.compute(its)
        dist.all_reduce(torch.zeros(1))


def explain_run(seconds: list[list[float]]) -> Any:
    """Explains a run in which each rank computes for the given times between all_reduces."""
    size = len(seconds)
    return ringsim.simulate(works_and_meets, world_size=size, args=(seconds,), link=LINK).explain()


@given(st.integers(2, 5), st.floats(0, 0.02), st.integers(0, 2**32))
@settings(max_examples=15)
def test_the_rank_that_causes_most_of_the_waiting_is_named(
    size: int, sleep_s: float, seed: int
) -> None:
    """By a finding or by the note; one rank sleeps in each step, and all are disturbed."""
    rng = np.random.default_rng(seed)
    seconds = rng.exponential(0.005, (size, 12))
    seconds[0] += sleep_s
    caused = np.zeros(size)
    np.add.at(caused, seconds.argmax(axis=0), (seconds.max(axis=0) - seconds).sum(axis=0))
    second, first = np.sort(caused)[-2:]
    assume(first - second > 0.05 * caused.sum())  # otherwise, the link's own time may decide
    diagnosis = explain_run(seconds.tolist())
    if diagnosis.findings:
        named = diagnosis.findings[0].ranks[0]
    else:
        (note,) = diagnosis.notes
        named = int(re.findall(r"Rank (\d+) caused", note)[0])
    assert named == caused.argmax()


def test_a_run_with_little_waiting_is_told_how_much_and_for_whom() -> None:
    diagnosis = explain_run(
        [[0.002 + 0.00005 * (rank == step % 2) for step in range(10)] for rank in range(2)]
    )
    assert diagnosis.findings == ()
    assert re.search(
        r"^Nothing wrong was found in this run of 2 ranks\.\n"
        r"Ranks waited \d+ µs in total for late ranks, \d % of all ranks' time\. "
        r"Rank [01] caused \d+ µs \(5\d %\) of this waiting, in 5 of 1\d waits, "
        r"and caused the most waiting in [234] of 4 quarters of the run\.$",
        str(diagnosis),
    )
