"""Constants found again in traces that were written with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story

from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.predict.calibration import calibrate
from ringsim.topologies import OneMachine
from ringsim.traces.value import Trace

LINK = Link(alpha_s=40e-6, beta_s_per_byte=0.5e-9)
SENDING = Link(alpha_s=15e-6, beta_s_per_byte=0.1e-9)
RECEIVING_MS, SLEEP_MS, AROUND_MS, ASKED_MS = 0.009, 0.08, 0.012, 5.0


def talk(
    sizes_bytes: tuple[int, ...] = (1024, 262144),
    *,
    link: Link = LINK,
    sending: Link = SENDING,
    receiving_ms: float = RECEIVING_MS,
    sleep_ms: float = SLEEP_MS,
    around_ms: float = AROUND_MS,
    rounds: int = 4,
    disturbed: dict[int, float] | None = None,
) -> Story:
    """Rank 0 computes and sends, rank 1 waits; ``disturbed`` makes the sleep of a round longer by some milliseconds.

    ::

        rank 0   compute | around | posting | compute ...                      wait for all sends at the end
        rank 1   posting | blocked ........ done | around | posting | ...
    """
    story = Story(2)
    sends = []
    clock, other = 1.0, 1.0
    for number, size_bytes in enumerate(sizes_bytes * rounds):
        begin, end = clock, clock + ASKED_MS + sleep_ms + (disturbed or {}).get(number, 0.0)
        story.span(0, f"compute {ASKED_MS / 1e3!r} s", begin, end)
        send = end + around_ms
        arrived = max(send, other) + link.time_s(size_bytes) * 1e3
        story.op(1, "irecv", (other, other + receiving_ms, arrived), peer=0, group="ring:0>1", tag=0, size_bytes=size_bytes)
        sends.append((send, arrived, size_bytes))
        other = arrived + around_ms
        clock = send + sending.time_s(size_bytes) * 1e3
    for place, (send, arrived, size_bytes) in enumerate(sends):  # the waits follow each other
        wait = clock + 0.001 * place
        story.op(0, "isend", (send, wait, max(wait, arrived)), peer=1, group="ring:0>1", tag=0, size_bytes=size_bytes)
    return story


def test_constants_are_those_that_the_trace_was_made_with() -> None:
    found = calibrate(talk().trace())
    assert found.link.alpha_s == pytest.approx(LINK.alpha_s, rel=1e-3)
    assert found.link.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte, rel=1e-3)
    assert found.sending.alpha_s == pytest.approx(SENDING.alpha_s, rel=1e-3)
    assert found.sending.beta_s_per_byte == pytest.approx(SENDING.beta_s_per_byte, rel=1e-3)
    assert found.receiving_s == pytest.approx(RECEIVING_MS * 1e-3, rel=1e-3)
    assert found.sleep_s == pytest.approx(SLEEP_MS * 1e-3, rel=1e-3)
    assert found.topology == OneMachine(found.link, cores=2)
    assert (found.num_messages, found.sizes_bytes, found.notes) == (8, (1024, 262144), ())
    assert found.post_s(True, 2048) == found.sending.time_s(2048)
    assert found.post_s(False, 2048) == found.receiving_s


@given(
    alpha_us=st.floats(5, 500), beta_ns=st.floats(0.05, 5), sleep_us=st.floats(1, 900), receiving_us=st.floats(1, 50)
)  # rounded to ns in the trace
def test_any_constants_are_found(alpha_us: float, beta_ns: float, sleep_us: float, receiving_us: float) -> None:
    link = Link(alpha_us * 1e-6, beta_ns * 1e-9)
    found = calibrate(talk(link=link, sleep_ms=sleep_us * 1e-3, receiving_ms=receiving_us * 1e-3).trace())
    for size_bytes in (1024, 65536, 1 << 20):
        assert found.link.time_s(size_bytes) == pytest.approx(link.time_s(size_bytes), rel=1e-3)
    assert found.sleep_s == pytest.approx(sleep_us * 1e-6, abs=2e-9)
    assert found.receiving_s == pytest.approx(receiving_us * 1e-6, abs=2e-9)


def test_several_traces_count_together() -> None:
    found = calibrate(talk((1024,)).trace(), talk((262144,)).trace())
    assert found.sizes_bytes == (1024, 262144)
    assert found.link.time_s(65536) == pytest.approx(LINK.time_s(65536), rel=1e-3)


def test_one_size_is_all_latency_and_doubtful() -> None:
    found = calibrate(talk((65536,)).trace())
    assert found.link.alpha_s == pytest.approx(LINK.time_s(65536), rel=1e-3)
    assert found.link.beta_s_per_byte == 0
    assert "messages had one size only" in found.notes[0]
    assert "doubtful: messages had one size only" in str(found)


def test_busy_machine_is_doubtful_and_a_single_disturbance_does_not_count() -> None:
    assert calibrate(talk(disturbed={3: 40.0}).trace()).sleep_s == pytest.approx(SLEEP_MS * 1e-3, rel=1e-3)
    busy = calibrate(talk(rounds=8, disturbed=dict.fromkeys(range(0, 16, 3), 4.0)).trace())
    assert busy.notes == ("the machine was busy with other things: sleeps ended up to 4.0 ms apart, less than 1 ms is usual",)
    slow = calibrate(talk(receiving_ms=0.8).trace())
    assert slow.notes == ("the machine was busy with other things: posting a receive took up to 0.8 ms, less than 0.5 ms is usual",)


def test_messages_that_came_before_anybody_waited_do_not_count() -> None:
    story = talk()
    for number in range(9):  # there long before, so that "done" says nothing of the message
        at = 200.0 + 10 * number
        story.message(1, 0, (at, at, at + 5), (at - 1, at + 8, at + 8.001), size_bytes=1024)
        story.span(0, "work", at + 1, at + 7)
    found = calibrate(story.trace())
    assert found.num_messages == 8
    assert found.link.alpha_s == pytest.approx(LINK.alpha_s, rel=1e-3)


def test_times_of_the_stages_are_medians() -> None:
    story = talk()
    for step, scale in enumerate((1.0, 1.0, 9.0)):
        for rank in range(2):
            at = 300.0 + 100 * step
            story.span(rank, "step 1f1b", at, at + 60)
            story.span(rank, "forward", at + 1, at + 1 + (rank + 1) * scale, stage=rank, microbatch=0)
            story.span(rank, "backward", at + 20, at + 20 + 3 * scale, stage=rank, microbatch=0)
    costs = calibrate(story.trace()).costs
    assert costs is not None
    assert costs.forward == pytest.approx((0.001, 0.002))
    assert costs.backward == pytest.approx((0.003, 0.003))


def test_what_cannot_be_calibrated_from() -> None:
    with pytest.raises(ArgumentError, match="calibrate must be given a trace, got none"):
        calibrate()
    with pytest.raises(ArgumentError, match="must be measured, got a simulated one"):
        calibrate(talk().trace(source="simulated"))
    with pytest.raises(ArgumentError, match="must have 3 messages of a size whose receiver waited for them, got 2 of any size"):
        calibrate(talk(rounds=1).trace())
    empty: Trace = Story(1).trace()
    with pytest.raises(ArgumentError, match="must have 3 messages"):
        calibrate(empty)


def test_machine_of_unknown_cores_has_no_topology() -> None:
    with pytest.raises(ArgumentError, match="a calibration must know how many cores there are"):
        _ = calibrate(talk().trace(machine={})).topology


def test_early_sends_are_told_apart() -> None:
    story = talk()
    for number in range(6):  # posted before its receive: cheap, whatever the size
        at = 500.0 + 20 * number
        story.op(0, "isend", (at, at + 0.030, at + 10), peer=1, group="ring:0>1", tag=0, size_bytes=262144)
        story.op(1, "irecv", (at + 5, at + 5.009, at + 10), peer=0, group="ring:0>1", tag=0, size_bytes=262144)
    found = calibrate(story.trace())
    assert found.sending_early_s == pytest.approx(30e-6, rel=1e-3)
    assert found.sending.alpha_s == pytest.approx(SENDING.alpha_s, rel=1e-3)
    assert found.post_s(True, 262144, met=False) == found.sending_early_s
