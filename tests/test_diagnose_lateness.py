"""Who kept whom waiting in runs that finished: whom the findings blame, and from how much on."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated_runs import LINK
from synthetic import Story

import ringsim
from ringsim import comm as dist
from ringsim.diagnose.lateness import LATE_NS, LATE_SHARE, Activity, find_lateness
from ringsim.traces.events import OP_CODES, make_events
from ringsim.traces.findings import Diagnosis


def late_sender(wait_ms: float, length_ms: float = 1000.0) -> Story:
    """Rank 1 computes until ``wait_ms`` and then sends what rank 2 has waited for since 0.

    The run takes ``length_ms``.
    """
    story = Story(3)
    story.span(1, "compute", 0, wait_ms, stage=1, microbatch=3)
    story.message(1, 2, (wait_ms, wait_ms, wait_ms), (0, 0, wait_ms), line=41, file=0)
    story.span(0, "load", 0, length_ms)
    return story


def test_sentence_of_a_late_sender() -> None:
    (finding,) = find_lateness(late_sender(312).trace())
    assert (finding.kind, finding.ranks) == ("late_sender", (1, 2))
    assert finding.message == (
        "rank 2 waited 312 ms in irecv from 1 (ring:1>2, tag 0, float32[1024], "
        "4,096 bytes) at ring.py:41 "
        "because rank 1 was still computing stage 1, microbatch 3."
    )
    assert [(one.rank, one.op) for one in finding.operations] == [(2, "irecv"), (1, "isend")]


@pytest.mark.parametrize(
    ("wait_ms", "length_ms", "reported"),
    [(0.9, 2, False), (1.1, 2, True), (40, 1000, False), (60, 1000, True)],
    ids=["under 1 ms", "over 1 ms", "under 5 % of the run", "over 5 %"],
)
def test_thresholds(wait_ms: float, length_ms: float, reported: bool) -> None:
    assert (LATE_NS, LATE_SHARE) == (1_000_000, 0.05)
    assert bool(find_lateness(late_sender(wait_ms, length_ms).trace())) == reported


def test_late_receiver() -> None:
    story = Story(2)
    story.message(0, 1, (0, 0, 80), (80, 80, 81))
    story.span(1, "evaluate", 0, 79)
    (finding,) = find_lateness(story.trace())
    assert (finding.kind, finding.ranks) == ("late_receiver", (1, 0))
    assert 'because rank 1 was still in "evaluate".' in finding.message


def test_a_short_computation_is_told_in_a_unit_that_fits() -> None:
    story = Story(2)
    story.span(0, "compute 0.00102 s", 0, 1.02)
    story.message(0, 1, (1.02, 1.02, 1.02), (0, 0, 1.02), line=7, file=0)
    (finding,) = find_lateness(story.trace())
    assert 'because rank 0 was still in "compute 1.02 ms".' in finding.message


def test_who_waits_for_one_who_waits_is_folded() -> None:
    story = Story(4)
    story.span(0, "compute", 0, 100, stage=0, microbatch=0)
    for rank in (1, 2, 3):
        begin = 99 + rank
        story.message(
            rank - 1, rank, (begin, begin, begin + 1), (0, 0, begin + 1), line=rank, file=0
        )
    (finding,) = find_lateness(story.trace())
    assert (finding.kind, finding.ranks) == ("late_sender", (0, 1))
    assert {one.ranks for one in finding.consequences} == {(0, 1, 2), (0, 1, 2, 3)}
    last = next(one for one in finding.consequences if one.ranks[-1] == 3)
    assert (
        "rank 2 was waiting for rank 1 itself, which was waiting for rank 0 itself, which was "
        "still computing stage 0"
    ) in last.message


def test_waits_at_one_line_are_one_finding() -> None:
    story = Story(2)
    for turn in range(5):
        begin = 100 * turn
        story.message(
            0, 1, (begin + 50, begin + 50, begin + 50), (begin, begin, begin + 50), line=7, file=0
        )
    (finding,) = find_lateness(story.trace())
    assert "it waited there 5 times, 250 ms in all" in finding.message


def test_rank_that_works_while_its_message_travels_waits_for_nobody() -> None:
    """A recv that is posted early and waited for late: the time in between is no wait."""
    story = Story(2)
    story.message(0, 1, (90, 90, 91), (0, 95, 96))
    assert find_lateness(story.trace()) == ()


def slow_stage(slow: int, microbatches: int = 6) -> Story:
    """A pipeline of four stages, all of 10 ms but one of 60 ms; sends do not block."""
    story = Story(4)
    free = [0.0] * 4
    for microbatch in range(microbatches):
        arrived = 0.0
        for rank in range(4):
            begin = max(free[rank], arrived)
            if rank:
                story.message(
                    rank - 1,
                    rank,
                    (arrived, arrived, arrived),
                    (free[rank], free[rank], begin),
                    line=3,
                    file=0,
                )
            free[rank] = arrived = begin + (60 if rank == slow else 10)
            story.span(rank, "compute", begin, free[rank], stage=rank, microbatch=microbatch)
    return story


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_straggler(slow: int) -> None:
    first, *rest = find_lateness(slow_stage(slow).trace())
    assert (first.kind, first.ranks) == ("straggler", (slow,))
    assert f"still computing stage {slow}" in first.message
    assert {one.ranks[-1] for one in first.consequences} == set(range(slow + 1, 4))
    assert all(slow not in finding.ranks[:-1] for finding in rest)


def test_blame_of_a_straggler_by_hand() -> None:
    """Rank 2 waits 70 ms at first, of which rank 1 waited 10 itself, and then 50 ms five times.

    What rank 3 waits for is not rank 1's.
    """
    first, *_ = find_lateness(slow_stage(1).trace())
    assert f"rank 1 made others wait for {70 - 10 + 5 * 50} ms in all" in first.message


def test_rank_that_is_last_at_every_barrier_is_a_straggler() -> None:
    story = Story(4)
    for turn in range(4):
        begin = turn * 100
        for rank in range(4):
            came = begin + (80 if rank == 2 else 5)
            story.op(rank, "barrier", (came, came, begin + 81), group="world")
            story.span(rank, "compute", begin, came)
    first, *rest = find_lateness(story.trace())
    assert (first.kind, first.ranks, rest) == ("straggler", (2,), [])
    assert "rank 2 made others wait for 900 ms in all, 100 % of all waiting" in first.message


def test_even_ranks_have_no_straggler() -> None:
    story = Story(4)
    for turn in range(8):
        for rank in range(4):
            begin = turn * 100
            came = begin + (80 if rank == turn % 4 else 5)  # each is late as often as the others
            story.op(rank, "barrier", (came, came, begin + 81), group="world")
    assert find_lateness(story.trace()) == ()


def named_in(diagnosis: Diagnosis) -> int:
    """The rank that is said to be waited for most, by a finding or by the note."""
    if diagnosis.findings:
        return diagnosis.findings[0].ranks[0]
    (note,) = diagnosis.notes
    return int(re.findall(r"was for rank (\d+)", note)[0])


def works_and_meets(seconds: list[list[float]]) -> None:
    for its in seconds[dist.get_rank()]:
        ringsim.compute(its)
        dist.all_reduce(torch.zeros(1))


@given(st.integers(2, 5), st.floats(0, 0.02), st.integers(0, 2**32))
@settings(max_examples=15)
def test_the_rank_that_causes_most_of_the_waiting_is_named(
    size: int, sleep_s: float, seed: int
) -> None:
    """One rank sleeps in each step, and all are disturbed.

    0.2.0 found nothing wrong on two ranks, and with a little waiting on more.
    """
    rng = np.random.default_rng(seed)
    seconds = rng.exponential(0.005, (size, 12))
    seconds[0] += sleep_s
    last = seconds.argmax(axis=0)
    caused = np.zeros(size)
    np.add.at(caused, last, (seconds.max(axis=0) - seconds).sum(axis=0))
    second, first = np.sort(caused)[-2:]
    assume(first - second > 0.05 * caused.sum())  # else the link's own time may decide
    diagnosis = ringsim.simulate(
        works_and_meets, world_size=size, args=(seconds.tolist(),), link=LINK
    ).explain()
    assert named_in(diagnosis) == caused.argmax()


def test_a_run_with_little_waiting_is_told_how_much_and_for_whom() -> None:
    seconds = [[0.002 + 0.00005 * (rank == step % 2) for step in range(10)] for rank in range(2)]
    diagnosis = ringsim.simulate(
        works_and_meets, world_size=2, args=(seconds,), link=LINK
    ).explain()
    assert diagnosis.findings == ()
    assert re.search(
        r"^Nothing wrong was found in this run of 2 ranks\.\n"
        r"Ranks waited \d+ µs in all for late ones, \d % of the time of all ranks\. "
        r"Of that, \d+ µs \(5\d %\) was for rank [01], in 5 of 1\d waits; "
        r"it was waited for most in [234] of 4 quarters of the run\.$",
        str(diagnosis),
    )


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12),
    st.integers(0, 90),
    st.integers(0, 90),
)
def test_blocked_time_is_that_of_the_union(
    waits: list[tuple[int, int]], first: int, second: int
) -> None:
    """Against counting moments one by one; waits may overlap, as those of several threads do."""
    start, end = min(first, second), max(first, second)
    events = make_events(
        {
            "rank": [0] * len(waits),
            "op": [OP_CODES["recv"]] * len(waits),
            "wait_ns": [begin for begin, _ in waits],
            "done_ns": [begin + length for begin, length in waits],
            "post_ns": [begin for begin, _ in waits],
        }
    )
    moments = {moment for begin, length in waits for moment in range(begin, begin + length)}
    blocked = Activity(events, 1).blocked_between(0, np.array([start]), np.array([end]))
    assert blocked.tolist() == [len(moments & set(range(start, end)))]
