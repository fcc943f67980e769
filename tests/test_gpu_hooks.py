"""Times of CUDA events and hooks on NCCL's groups, on a stand-in for the GPU; ``tests/distributed/test_gpu.py`` has the real one."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup, Work
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringsim import comm
from ringsim.comm import gpu_times, log, torch_hooks
from ringsim.comm.gpu_times import NOT_READ, GpuTimes, find_gpu, is_nccl
from ringsim.comm.log import configure, reset_log
from ringsim.comm.torch_hooks import NOT_RECORDED, install, uninstall
from ringsim.traces.events import OP_CODES, OP_NAMES, Events
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import Recorder

LOOK_NS = 900  # how long a call of the driver takes
GPU = torch.device("cuda", 0)


class StandInGpu:
    """A GPU whose clock has an offset to the host's, and drifts. Time passes when ``now_ns`` is changed, and with every call.

    Args:
        offset_ns: what the GPU's clock shows when the host's shows 0.
        drift: how much faster it goes.
    """

    def __init__(self, offset_ns: int = 0, drift: float = 0.0) -> None:
        self.offset_ns = offset_ns
        self.drift = drift
        self.now_ns = 10**12
        self.busy_until_ns = 0  # the program's stream
        self.pool_busy_until_ns = 0  # the streams of torch's pool
        self.capturing = False
        self.broken = False
        self.recorded: list[StandInEvent] = []
        self.asked = 0

    def now(self) -> int:
        self.now_ns += 40
        return self.now_ns

    def queue(self, work_ns: int) -> None:
        """Gives the program's stream so much to do."""
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + work_ns

    def call(self) -> None:
        self.now_ns += LOOK_NS
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in the place of torch's."""

        def refuse(*_: Any) -> NoReturn:
            raise AssertionError("recording never synchronises")

        for name, stand_in in {
            "Event": lambda enable_timing=False: StandInEvent(self, enable_timing),
            "Stream": object,
            "device": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": refuse,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


class StandInEvent:
    """An event; ``passed_ns`` is when the stream gets past it, in the host's time, which only the tests know."""

    def __init__(self, gpu: StandInGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu
        self.passed_ns = self.gpu_ns = -1

    def record(self, stream: Any = None) -> None:
        assert not self.gpu.capturing
        self.gpu.call()
        self.passed_ns = max(self.gpu.now_ns, self.gpu.busy_until_ns if stream is None else self.gpu.pool_busy_until_ns)
        self.gpu_ns = round(self.gpu.offset_ns + self.passed_ns * (1 + self.gpu.drift))
        if stream is None:
            self.gpu.recorded.append(self)

    def query(self) -> bool:
        self.gpu.call()
        self.gpu.asked += 1
        assert self.passed_ns >= 0
        return self.passed_ns <= self.gpu.now_ns

    def elapsed_time(self, other: StandInEvent) -> float:
        if max(self.passed_ns, other.passed_ns) > self.gpu.now_ns:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32((other.gpu_ns - self.gpu_ns) * 1e-6))

    def synchronize(self) -> NoReturn:
        raise AssertionError("recording never synchronises")


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


Read = Callable[[], tuple[Events, dict[str, Any]]]


@pytest.fixture
def nccl_gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    """A GPU, and NCCL; the host's clock is the stand-in's too."""
    nccl_gpu = StandInGpu(offset_ns=-(10**9), drift=5e-5)
    nccl_gpu.install(monkeypatch)
    monkeypatch.setattr(torch_hooks, "GpuTimes", functools.partial(GpuTimes, now=nccl_gpu.now))
    monkeypatch.setattr(torch_hooks, "is_nccl", lambda group: True)

    def wait_on_stream(self: Work, *timeout: Any) -> bool:
        nccl_gpu.queue(3 * MS)
        return True

    monkeypatch.setattr(FakeWork, "wait", wait_on_stream)
    return nccl_gpu


@pytest.fixture
def world() -> Iterator[ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def start(nccl_gpu: StandInGpu, world: ProcessGroup, tmp_path: Path) -> Iterator[Callable[[], Read]]:
    """Begins to record; what it returns ends that, a second after the last operation, and gives the events and what the rank says."""
    recorder = Recorder(tmp_path, rank=0, world_size=4, now=nccl_gpu.now)

    def stop() -> tuple[Events, dict[str, Any]]:
        uninstall(recorder)
        nccl_gpu.now_ns += 1000 * MS
        recorder.close()
        return read_parts(tmp_path, start_ns=0)

    def begin() -> Read:
        install(recorder)
        return stop

    yield begin
    if recorder.users:
        uninstall(recorder)


@pytest.fixture
def read(start: Callable[[], Read]) -> Read:
    return start()


@pytest.fixture
def tensor() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(1024, device="cuda")


def blocked_ns(events: Events) -> list[int]:
    return (events.done_ns - events.wait_ns).tolist()


def test_a_handle_is_done_when_the_stream_is(nccl_gpu: StandInGpu, read: Read, tensor: torch.Tensor) -> None:
    work = dist.isend(tensor, 1)
    nccl_gpu.queue(40 * MS)
    work.wait()
    dist.recv(tensor, 3)
    dist.all_reduce(tensor, async_op=True).wait()
    truth = [event.passed_ns for event in nccl_gpu.recorded]
    events, facts = read()
    assert [OP_NAMES[op] for op in events.op] == ["isend", "recv", "all_reduce"]
    assert blocked_ns(events) == pytest.approx([3 * MS] * 3, abs=3000)
    assert events.wait_ns.tolist() == pytest.approx(truth[::2], abs=1500)
    assert events.done_ns.tolist() == pytest.approx(truth[1::2], abs=1500)
    assert (events.post_ns < nccl_gpu.recorded[0].passed_ns - 39 * MS)[0], "the post is the host's"
    *said, times = facts["not_recorded"]
    assert tuple(said) == NOT_RECORDED
    assert times.startswith("On rank 0, cuda:0: 3 operations got the times of CUDA events")


def test_a_collective_on_the_programs_own_stream_has_no_handle(
    nccl_gpu: StandInGpu, world: ProcessGroup, tensor: torch.Tensor, start: Callable[[], Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch 2.8 and later run one that is not asynchronous on the current stream, and return no Work (pytorch 150398).
    monkeypatch.setattr(ProcessGroup, "allreduce", lambda self, tensors, opts: nccl_gpu.queue(7 * MS))
    read = start()
    nccl_gpu.queue(40 * MS)
    dist.all_reduce(tensor)
    world.allreduce([tensor], None)  # without options nothing says beforehand that there is to be no handle
    events, facts = read()
    assert blocked_ns(events) == pytest.approx([7 * MS, 0], abs=3000)
    assert "1 operation kept the host's times" in facts["not_recorded"][-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_operations_of_a_batch_are_done_together(
    asynchronous: bool,
    nccl_gpu: StandInGpu,
    world: ProcessGroup,
    tensor: torch.Tensor,
    start: Callable[[], Read],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    monkeypatch.setattr(ProcessGroup, "_start_coalescing", lambda self, device: None)
    monkeypatch.setattr(ProcessGroup, "_end_coalescing", lambda self, device: work if asynchronous else nccl_gpu.queue(3 * MS))
    read = start()
    world._start_coalescing(tensor.device)
    for root in range(2):
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = root, asynchronous
        world.broadcast([tensor], options)
    handle = world._end_coalescing(tensor.device)
    if handle is not None:
        handle.wait()
    events, facts = read()
    assert blocked_ns(events) == pytest.approx([3 * MS] * 2, abs=3000)
    assert events.done_ns[0] == events.done_ns[1]
    assert "2 operations got the times of CUDA events" in facts["not_recorded"][-1]


def test_tensors_of_the_host_have_the_times_of_the_host(nccl_gpu: StandInGpu, read: Read, tensor: torch.Tensor) -> None:
    # A group of two backends: torch's default on a machine with GPUs.
    dist.isend(torch.zeros(2), 1).wait()
    dist.all_reduce(torch.zeros(2))
    dist.barrier()  # on NCCL it blocks the host itself
    assert not nccl_gpu.recorded
    events, facts = read()
    assert (events.done_ns >= 0).all()
    assert facts["not_recorded"] == [*NOT_RECORDED, NOT_READ]


def test_an_operation_in_a_captured_graph_has_the_times_of_the_host(
    nccl_gpu: StandInGpu, read: Read, tensor: torch.Tensor, tmp_path: Path
) -> None:
    nccl_gpu.capturing = True
    dist.all_reduce(tensor)
    nccl_gpu.capturing = False
    assert read_parts(tmp_path)[1]["not_recorded"] == [*NOT_RECORDED, NOT_READ]  # as where the rank is killed now
    events, facts = read()
    assert blocked_ns(events)[0] < MS
    assert any("1 operation kept the host's times" in sentence for sentence in facts["not_recorded"])


def test_the_log_has_the_times_of_the_gpu(nccl_gpu: StandInGpu, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "Recorder", functools.partial(Recorder, now=nccl_gpu.now))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    configure(enabled=True, prof_all=False)
    try:
        for _ in range(3):
            comm.all_reduce(tensor, async_op=True, prof=True).wait()
            nccl_gpu.now_ns += 500 * MS
        (row,) = comm.log_summary().rows
    finally:
        configure(enabled=False, prof_all=True)
        reset_log()
        dist.destroy_process_group()
    assert (row.count, row.blocked_mean_us) == (3, pytest.approx(3000, abs=3))


def test_without_nccl_nothing_is_recorded_on_a_gpu(world: ProcessGroup, tensor: torch.Tensor, tmp_path: Path) -> None:
    assert not is_nccl(world)
    recorder = Recorder(tmp_path, rank=0, world_size=4)
    install(recorder)
    hooks = recorder.on_reading.__self__  # type: ignore[attr-defined]
    dist.isend(tensor, 1).wait()  # torch has no CUDA here: an event would raise
    dist.all_reduce(tensor)
    assert not hooks.open_batches, "every operation takes the short way"
    uninstall(recorder)
    recorder.close()
    assert read_parts(tmp_path)[1]["not_recorded"] == list(NOT_RECORDED)
