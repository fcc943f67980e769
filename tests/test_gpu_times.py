"""Times of CUDA events on the host's clock, on a stand-in for the GPU; ``tests/distributed/test_gpu.py`` has the real one."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_in_gpu import GPU, LOOK_NS, StandInGpu
from torch._subclasses.fake_tensor import FakeTensorMode

from ringsim.comm import gpu_times
from ringsim.comm.gpu_times import GpuTimes, find_gpu
from ringsim.traces.events import OP_CODES
from ringsim.traces.recorder import Recorder

MS = 10**6
Written = dict[int, tuple[int, int]]  # slot: wait, done


def make_times(gpu: StandInGpu, written: Written) -> GpuTimes:
    return GpuTimes(lambda slot, wait_ns, done_ns: written.__setitem__(slot, (wait_ns, done_ns)), 3, gpu.now)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    gpu = StandInGpu(drift=1e-4)
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def written() -> Written:
    return {}


@pytest.fixture
def times(gpu: StandInGpu, written: Written) -> GpuTimes:
    return make_times(gpu, written)


def run(gpu: StandInGpu, times: GpuTimes, slot: int, *, before_ns: int = 0, work_ns: int = MS) -> tuple[int, int]:
    """One operation of ``work_ns`` after other work of ``before_ns``. Returns when the stream came to it, and got past."""
    gpu.queue(before_ns)
    begun = times.begin(GPU)
    gpu.queue(work_ns)
    times.end(begun, [slot])
    begin, end = gpu.recorded[-2:]
    return begin.passed_ns, end.passed_ns


def within_ns(said: list[str]) -> int:
    found = re.search(r"within ([\d,]+) ns", said[0])
    assert found
    return int(found[1].replace(",", ""))


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-3, 1e-3),
    program=st.lists(st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS), st.integers(0, 100_000 * MS)), min_size=1, max_size=20),
)
def test_times_are_within_what_is_stated_and_in_order(offset_ns: int, drift: float, program: list[tuple[int, int, int]]) -> None:
    gpu = StandInGpu(offset_ns, drift)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.install(monkeypatch)
        written: Written = {}
        times, truth = make_times(gpu, written), {}
        for slot, (before_ns, work_ns, pause_ns) in enumerate(program):
            truth[slot] = run(gpu, times, slot, before_ns=before_ns, work_ns=work_ns)
            gpu.now_ns += pause_ns
        gpu.now_ns = max(gpu.now_ns, gpu.busy_until_ns)
        said = times.read()
    assert set(written) == set(truth)
    for slot, (wait_ns, done_ns) in truth.items():
        assert abs(written[slot][0] - wait_ns) <= within_ns(said) + 2  # whole ns on both clocks
        assert abs(written[slot][1] - done_ns) <= within_ns(said) + 2
    flat = [time_ns for slot in sorted(written) for time_ns in written[slot]]
    assert flat == sorted(flat)
    rounding_ns = 3 * sum(pause_ns for _, _, pause_ns in program) / 2**24
    assert within_ns(said) <= 2 * LOOK_NS + rounding_ns + 100  # an anchor is one call and one look; and the bound is no excuse


def test_a_stream_that_works_through_a_queue_does_not_count_as_blocked(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    run(gpu, times, 7, before_ns=100 * MS, work_ns=2 * MS)
    assert gpu.now_ns < gpu.busy_until_ns - 90 * MS, "nothing waited for the GPU"
    gpu.now_ns += 200 * MS
    said = times.read()
    wait_ns, done_ns = written[7]
    assert done_ns - wait_ns == pytest.approx(2 * MS, abs=2 * within_ns(said))


def test_what_has_not_passed_is_counted_and_read_later(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    run(gpu, times, 0)
    gpu.now_ns += 5 * MS
    truth = run(gpu, times, 1, work_ns=900 * MS)
    first = times.read()
    assert list(written) == [0]
    assert "rank 3, cuda:0: 1 operation got the times of CUDA events" in first[0]
    assert "1 operation kept the host's times" in first[1]
    assert "had not passed" in first[1]
    gpu.now_ns += 1000 * MS
    (said,) = times.read()
    assert "2 operations" in said
    assert written[1] == pytest.approx(truth, abs=within_ns([said]) + 2)
    assert times.read() == [said]


def test_clocks_may_drift_otherwise_after_a_reading(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    run(gpu, times, 0)
    gpu.now_ns += 1_000_000 * MS
    times.read()
    gpu.offset_ns, gpu.drift = gpu.offset_ns + round(gpu.now_ns * (gpu.drift - 1e-5)), 1e-5
    truth = run(gpu, times, 1)
    gpu.now_ns += 1_000_000 * MS
    said = times.read()
    assert written[1] == pytest.approx(truth, abs=within_ns(said) + 2)


def test_no_event_is_asked_until_the_record_is_read(gpu: StandInGpu, times: GpuTimes) -> None:
    run(gpu, times, 0)
    asked = gpu.asked  # for the first anchor
    for slot in range(1, 100):
        run(gpu, times, slot)
    assert gpu.asked == asked


def test_the_capture_of_a_graph_is_left_alone(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    gpu.capturing = True  # an event that is recorded fails the test
    times.end(times.begin(GPU), [0, 1])
    assert "2 operations kept the host's times, done is when wait() returned: they were captured" in times.read()[1]
    gpu.capturing = False
    run(gpu, times, 2)
    gpu.now_ns += 5 * MS
    gpu.capturing, asked = True, gpu.asked
    assert "0 operations got the times of CUDA events" in times.read()[0]
    assert gpu.asked == asked
    gpu.capturing = False
    times.read()
    assert list(written) == [2]


def test_a_maximum_of_events_is_kept(gpu: StandInGpu, times: GpuTimes, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_times, "MAX_KEPT", 2)
    for slot in range(2):
        run(gpu, times, slot)
    times.end(times.begin(GPU), [2])
    gpu.now_ns += 50 * MS
    said = times.read()
    assert list(written) == [0, 1]
    assert "1 operation kept the host's times" in said[1]
    run(gpu, times, 3)  # there is room again
    gpu.now_ns += 50 * MS
    times.read()
    assert list(written) == [0, 1, 3]


def test_a_clock_that_cannot_be_tied_is_not(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    gpu.pool_busy_until_ns = 10**15
    for slot in range(3):
        times.end(times.begin(GPU), [slot])
    assert "3 operations kept the host's times, done is when wait() returned: they could not be tied" in times.read()[1]
    assert not written


def test_a_gpu_that_is_busy_at_the_end_is_read_later(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    run(gpu, times, 0)
    gpu.now_ns += 5 * MS
    gpu.pool_busy_until_ns = gpu.now_ns + 50 * MS
    assert "could not be asked" in times.read()[1]
    assert not written
    gpu.now_ns += 60 * MS
    times.read()
    assert list(written) == [0]


def test_trouble_with_the_gpu_is_left_to_the_program(gpu: StandInGpu, times: GpuTimes, written: Written) -> None:
    run(gpu, times, 0)
    gpu.now_ns += 5 * MS
    gpu.broken = True
    times.end(times.begin(GPU), [1])
    said = times.read()
    assert not written
    assert any("1 operation " in words and "could not be asked" in words for words in said)
    assert any("1 operation " in words and "got no event" in words for words in said)


def test_no_time_is_before_the_call_that_caused_it() -> None:
    recorder = Recorder(None, 0, 1, now=iter([100, 200, 300]).__next__, who=lambda: 0)
    slot = recorder.make_post(OP_CODES["isend"])(0, 0, 0, 0)
    assert slot is not None
    recorder.wait(slot)
    recorder.complete(slot)

    def times() -> tuple[int, int]:
        events = recorder.read()
        return int(events.wait_ns[0]), int(events.done_ns[0])

    recorder.amend(slot, wait_ns=50, done_ns=90)
    assert times() == (200, 300)
    recorder.amend(slot, wait_ns=2300, done_ns=1300)
    assert times() == (2300, 2300)


def test_a_tensor_on_a_gpu_is_found_at_any_depth() -> None:
    with FakeTensorMode():
        tensor = torch.empty(1, device="cuda:1")
    assert find_gpu(([[torch.zeros(1)], [[tensor]]], None)) == torch.device("cuda", 1)
    assert find_gpu([[torch.zeros(1)], torch.zeros(2), "text", None]) is None
    assert find_gpu(3) is None
