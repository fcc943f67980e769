"""The watcher's verdicts and their times, with the test's own clock and parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_parts import TICK_S, Bench

from ringsim.diagnose.failure import Verdict
from ringsim.launch.system import ProcessState
from ringsim.launch.threads import Threads
from ringsim.launch.watcher import COLLECTIVE_S, POLL_MAX, POLL_S, STALL_S, THREADS_S, Watcher
from ringsim.traces.events import (
    ANY_SOURCE,
    ERROR,
    NONE,
    OK,
    THREAD_FAILED,
    word_notice,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, 2) as made:
        yield made


def kind_of(verdict: Verdict | None) -> str:
    return verdict.diagnosis.kind if verdict is not None else ""


FROM_ANY = (0, "irecv", ANY_SOURCE, 9)


@pytest.mark.parametrize(
    ("posted", "awaited", "kind", "after_s"),
    [
        ([], [(0, "recv", 1, 0), (1, "recv", 0, 0)], "deadlock", TICK_S),  # at the second look
        ([], [(0, "recv", 1, 0)], "", None),  # rank 1 may still help
        # some return early
        (
            [],
            [(0, "all_reduce", NONE, NONE), (1, "recv", 0, 0)],
            "collective_mismatch",
            COLLECTIVE_S,
        ),
        # both sides are posted, as far as is recorded
        ([], [(0, "send", 1, 0), (1, "recv", 0, 0)], "stalled", STALL_S),
        # A recv from any source takes messages before any wait for it: 0.1.0 counted it only
        # when it was done.
        ([FROM_ANY], [(0, "recv", 1, 0), (1, "send", 0, 9)], "deadlock", STALL_S),
        # Which of two recvs gets a message depends on the posts at its arrival: known only when
        # nothing moves.
        (
            [FROM_ANY, (1, "isend", 0, 9)],
            [(0, "recv", 1, 9), (1, "recv", 0, 0)],
            "deadlock",
            STALL_S,
        ),
    ],
)
def test_who_is_stuck_is_told_and_not_before_its_time(
    bench: Bench, posted: list[Any], awaited: list[Any], kind: str, after_s: float | None
) -> None:
    for rank, op, peer, tag in posted:
        bench.writers[rank].post(op, 0, peer, tag)
    for each in awaited:
        bench.waits(*each)
    verdict, after = bench.look_for(10.0)
    assert kind_of(verdict) == kind
    if verdict is not None:
        assert (verdict.ranks, after) == ((0, 1), pytest.approx(after_s, abs=2 * TICK_S))
        assert verdict.proved is (after_s != STALL_S)
        assert ("do not prove" in verdict.diagnosis.findings[0].hint) is (
            kind == "deadlock" and after_s == STALL_S
        )
        words = "nothing has moved for 3 s.\n  rank 0 waits in send to 1"
        assert (words in verdict.diagnosis.findings[0].message) is (kind == "stalled")
        assert set(bench.asked) == (set() if after_s == STALL_S else {0, 1})


def test_a_rank_that_has_posted_another_collective_and_computes_is_named(bench: Bench) -> None:
    """No later operation of its rank can help. 0.2.0 gave a verdict without a finding."""
    bench.writers[0].post("all_reduce", 0, NONE, NONE)
    bench.waits(1, "broadcast", NONE, NONE)
    verdict, after_s = bench.look_for(10.0)
    assert verdict is not None
    assert verdict.diagnosis.kind == "collective_mismatch"
    assert after_s == pytest.approx(COLLECTIVE_S, abs=2 * TICK_S)
    assert (verdict.ranks, verdict.diagnosis.findings[0].ranks) == ((1,), (0, 1))


@pytest.mark.parametrize("slow", ["threads", "ranks"])
def test_idle_threads_and_ranks_that_settle_slowly_get_their_time(bench: Bench, slow: str) -> None:
    if slow == "threads":
        bench.threads[0] = bench.threads[0]._replace(idle={7: None})
    else:
        bench.watcher = Watcher(bench.records, 2, tell=bench.answer, settle_s=0.5)
    bench.both_receive()
    verdict, after_s = bench.look_for(10.0)
    expected_s = pytest.approx(THREADS_S if slow == "threads" else 0.5, abs=2 * TICK_S)
    assert (kind_of(verdict), after_s) == ("deadlock", expected_s)


@pytest.mark.parametrize(
    ("leaves", "kind"), [(None, "peer_exited"), (OK, "stalled"), (ERROR, "peer_exited")]
)
def test_what_a_rank_left_behind_still_arrives_unless_it_was_refused(
    bench: Bench, leaves: int | None, kind: str
) -> None:
    if leaves is not None:
        slot = bench.writers[1].post("isend", 0, 0, 0)
    if leaves == ERROR:
        # before any rank waited for it: it was never sent
        bench.writers[1].recorder.complete(slot, ERROR)
    bench.states[1] = "exited"
    bench.waits(0, "recv", 1)
    assert kind_of(bench.look_for(10.0)[0]) == kind


def test_something_that_happens_between_two_looks_begins_the_proof_anew(bench: Bench) -> None:
    bench.both_receive()
    for _ in range(50):
        assert bench.look() is None
        bench.now_s += TICK_S
        bench.writers[1].recorder.mark("alive")
    assert kind_of(bench.look_for(1.0)[0]) == "deadlock"


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_that_does_not_answer_or_has_a_thread_at_work_is_not_judged(
    answers: bool, bench: Bench
) -> None:
    asleep = bench.threads[1]
    if answers:
        bench.threads[1] = Threads({*asleep.busy, 7}, {})
    else:
        bench.silent = {1}
    bench.both_receive()
    assert bench.look_for(20.0, 0.1)[0] is None
    bench.threads[1] = asleep
    bench.watcher.hear(1, asleep)
    assert kind_of(bench.look_for(1.0)[0]) == "deadlock"


def test_what_disagrees_is_looked_for_again_before_ranks_are_called_stuck(bench: Bench) -> None:
    """A verdict may come between two comparisons."""
    assert bench.look() is None
    bench.now_s += TICK_S
    larger = bench.writers[1]
    larger.payload = larger.recorder.payload("float32", [4], 16)
    for rank, op in enumerate(["isend", "irecv"]):
        writer = bench.writers[rank]
        writer.groups.append(writer.recorder.group("new", range(2), fresh=True))
        writer.post(op, 2, 1 - rank, 5)
    bench.both_receive()
    verdict, after_s = bench.look_for(1.0)
    assert (kind_of(verdict), after_s) == ("message_mismatch", pytest.approx(TICK_S))


def test_what_ended_a_thread_comes_before_what_follows_from_it(bench: Bench) -> None:
    bench.writers[0].recorder.mark("begins")
    for about in ("raised ValueError: no such layer", "raised KeyError: 7"):
        bench.writers[0].recorder.mark(word_notice(THREAD_FAILED, about))
    bench.both_receive()
    verdict, _ = bench.look_for(1.0)
    assert verdict is not None
    (finding,) = verdict.diagnosis.findings
    assert finding.kind == "rank_failed"
    assert "thread of rank 0 raised ValueError: no such layer" in finding.message
    assert [one.kind for one in finding.consequences] == ["deadlock"]


def test_a_thread_whose_message_is_on_its_way_may_help_when_it_has_come(bench: Bench) -> None:
    """Each rank has two threads that wait.

    A verdict came within two looks, however large the message was.
    """
    bench.both_receive()

    def post_in_a_thread(rank: int, op: str) -> None:
        bench.waits(rank, op, 1 - rank, tag=9)

    for rank, op in enumerate(["send", "recv"]):
        helper = threading.Thread(target=post_in_a_thread, args=(rank, op))
        helper.start()
        helper.join()
    assert bench.look_for(STALL_S / 2)[0] is None


def test_threads_that_wait_for_each_other_are_named_and_those_that_wake_now_and_then_are_not_judged(
    bench: Bench,
) -> None:
    bench.both_receive()
    waits = bench.threads[0]._replace(idle={8: (__file__, 3)})
    for _ in range(8):  # it wakes every second
        bench.threads[0] = waits._replace(busy={*waits.busy, 7})
        assert bench.look_for(0.5, 0.1)[0] is None
        bench.threads[0] = waits
        assert bench.look_for(0.5, 0.1)[0] is None
    verdict, after_s = bench.look_for(10.0)
    assert verdict is not None
    assert after_s == pytest.approx(THREADS_S - 0.5, abs=0.3)
    place = "test_watcher.py:3 (from __future__ import annotations)"
    words = f"\n  meanwhile, rank 0 waits at {place} for another of its threads"
    assert words in verdict.diagnosis.findings[0].message
    assert [end["about"][:8] for end in verdict.ends] == ["waits at", ""]


class TestSilentRank:
    """Rank 0 waits in no operation, but for its own threads; rank 1 waits for it."""

    @pytest.fixture(autouse=True)
    def silent(self, bench: Bench) -> None:
        bench.waits(1, "recv", 0)
        bench.threads[0] = Threads((), {7: (__file__, 3)})

    def test_is_judged_once_all_sleep_and_its_threads_have_been_asked_twice(
        self, bench: Bench
    ) -> None:
        bench.process = ProcessState("R", 5)
        assert bench.look_for(5.0, 0.1)[0] is None
        assert bench.asked == []  # a computing rank is not asked
        bench.process = ProcessState("S", 5)
        verdict, after_s = bench.look_for(10.0, 0.1)
        assert verdict is not None
        (finding,) = verdict.diagnosis.findings
        assert (finding.kind, finding.ranks, verdict.ranks) == ("deadlock", (0, 1), (1,))
        assert "\n  rank 0 waits at test_watcher.py:3 " in finding.message
        assert after_s == pytest.approx(STALL_S + 0.5, abs=0.3)
        assert bench.asked.count(0) >= 2
        assert [end["state"] for end in verdict.ends] == ["blocked", "blocked"]

    @pytest.mark.parametrize("how", ["busy", "timed", "unknown", "silent"])
    def test_is_not_judged_while_it_may_go_on(self, bench: Bench, how: str) -> None:
        if how == "busy":
            bench.threads[0] = Threads({7}, {})
        elif how == "timed":
            bench.threads[0] = bench.threads[0]._replace(timed={7})
        elif how == "silent":
            bench.silent = {0}
        else:
            bench.writers[0].recorder.close()
        assert bench.look_for(8.0, 0.1)[0] is None
        assert len(bench.asked) < 15


def test_a_message_in_doubt_is_hoped_for_while_a_rank_is_at_work(bench: Bench) -> None:
    bench.writers[0].post("irecv", 0, ANY_SOURCE, 9)
    bench.waits(0, "recv", 1, tag=9)
    bench.writers[1].post("isend", 0, 0, 9)
    assert bench.look_for(10.0, 0.1)[0] is None
    bench.states[1] = "exited"  # its message may still arrive from its process
    verdict, after_s = bench.look_for(10.0)
    assert (kind_of(verdict), after_s) == ("peer_exited", pytest.approx(STALL_S, abs=2 * TICK_S))


def test_it_looks_less_often_while_all_goes_well_and_closely_when_it_does_not(bench: Bench) -> None:
    pauses = []
    for _ in range(8):
        bench.look()
        pauses.append(bench.watcher.pause_s)
        bench.writers[0].recorder.mark("step")
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(POLL_S * POLL_MAX)
    bench.both_receive()
    assert bench.look() is None
    assert bench.watcher.pause_s == POLL_S


class TestStall:
    """Both sides are posted, as far as is recorded, and nothing moves."""

    @pytest.fixture(autouse=True)
    def matched(self, bench: Bench) -> None:
        bench.waits(0, "send", 1)
        bench.waits(1, "recv", 0)

    @pytest.mark.parametrize("why", ["T", "R", "is not blocked", "does not record"])
    def test_not_while_a_rank_may_go_on(self, bench: Bench, why: str) -> None:
        if why == "is not blocked":
            bench.writers[1].act("finish", -1)
        elif why == "does not record":
            bench.writers[1].recorder.close()
        else:
            bench.process = ProcessState(why, 5)
        assert bench.look_for(30.0, 0.5)[0] is None
        bench.process = ProcessState("S", 5)
        assert (kind_of(bench.look_for(30.0, 0.5)[0]) == "stalled") is (len(why) == 1)

    def test_not_while_a_rank_computes(self, bench: Bench) -> None:
        for tick in range(400):
            bench.process = ProcessState("S", tick // 20)
            assert bench.look() is None
            bench.now_s += TICK_S

    def test_large_messages_get_longer(self, bench: Bench) -> None:
        payload = bench.writers[0].recorder.payload("uint8", [10**9], 10**9)
        bench.writers[0].payload = payload
        bench.writers[0].post("isend", 0, 1, 5)
        after_s = bench.look_for(60.0, 0.5)[1]
        assert after_s == pytest.approx(STALL_S + 20, abs=2 * 0.5)
