"""Times of CUDA events and hooks on NCCL's groups, on a stand-in for the GPU.

``tests/distributed/test_gpu.py`` has the real one.
"""

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
from fake_rank import Stop, fake_world, recording
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup, Work

from ringsim import comm
from ringsim.comm import configure, gpu_times, log, reset_log, torch_hooks
from ringsim.comm.gpu_times import NOT_READ, GpuTimes, find_gpu, is_nccl
from ringsim.traces.events import OP_CODES, OP_NAMES, Events
from ringsim.traces.recorder import Recorder
from ringsim.traces.runs import read_parts

LOOK_NS = 900  # how long a call of the driver takes
GPU = torch.device("cuda", 0)
MS = 10**6
LATER = 10**15  # ns, on the host's clock


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("recording never synchronises")


class StandInGpu:
    """A GPU whose clock has an offset to the host's, and drifts.

    Time passes when ``now_ns`` is changed, and with every call.
    """

    def __init__(self, offset_ns: int = 0, drift: float = 0.0) -> None:
        self.offset_ns, self.drift = offset_ns, drift
        self.now_ns = 10**12
        self.busy_until_ns = 0  # the program's stream
        self.pool_busy_until_ns = 0  # the streams of torch's pool
        self.capturing = self.broken = False
        self.recorded: list[StandInEvent] = []
        self.asked = 0

    def now(self) -> int:
        self.now_ns += 40
        return self.now_ns

    def queue(self, work_ns: int) -> None:
        """Gives the program's stream so much to do."""
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + work_ns

    def call(self) -> None:
        assert not self.capturing, "the capture of a graph is left alone"
        self.now_ns += LOOK_NS
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in the place of torch's."""
        for name, stand_in in {
            "Event": lambda enable_timing=False: StandInEvent(self, enable_timing),
            "Stream": object,
            "current_stream": lambda _: None,
            "device": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": refuse,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


class StandInEvent:
    """An event.

    ``passed_ns`` is when the stream gets past it, in the host's time, which only the tests know.
    """

    synchronize = refuse

    def __init__(self, gpu: StandInGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu
        self.passed_ns = self.gpu_ns = -1

    def record(self, stream: Any = None) -> None:
        self.gpu.call()
        self.passed_ns = max(
            self.gpu.now_ns,
            self.gpu.busy_until_ns if stream is None else self.gpu.pool_busy_until_ns,
        )
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


class Timed:
    """Operations whose times are read from events of a stand-in.

    Attributes:
        written: by slot, wait and done as they were written.
        truth: by slot, when the stream came to the operation and got past.
    """

    def __init__(self, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu.install(monkeypatch)
        self.gpu = gpu
        self.written: dict[int, tuple[int, int]] = {}
        self.truth: dict[int, tuple[int, int]] = {}
        self.times = GpuTimes(
            lambda slot, wait_ns, done_ns: self.written.__setitem__(slot, (wait_ns, done_ns)),
            3,
            gpu.now,
        )

    def run(
        self, slot: int, *, before_ns: int = 0, work_ns: int = MS, pause_ns: int = 5 * MS
    ) -> None:
        """One operation of ``work_ns`` behind other work."""
        self.gpu.queue(before_ns)
        begun = self.times.begin(GPU)
        self.gpu.queue(work_ns)
        self.times.end(begun, [slot])
        self.truth[slot] = tuple(event.passed_ns for event in self.gpu.recorded[-2:])  # type: ignore[assignment]
        self.gpu.now_ns += pause_ns

    def check(self, slots: list[int]) -> int:
        """Reads the times of these operations, and compares them with the truth.

        Returns how exact they are said to be, ns.
        """
        found = re.search(r"within ([\d,]+) ns", self.times.read()[0])
        if not slots:
            assert found is None
            assert not self.written
            return 0
        assert found
        within_ns = int(found[1].replace(",", ""))
        assert sorted(self.written) == slots
        for slot, times in self.written.items():
            # whole ns on both clocks
            assert times == pytest.approx(self.truth[slot], rel=0, abs=within_ns + 2)
        return within_ns


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-3, 1e-3),
    program=st.lists(
        st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS), st.integers(0, 100_000 * MS)),
        min_size=1,
        max_size=20,
    ),
)
def test_times_are_within_what_is_stated_and_in_order(
    offset_ns: int, drift: float, program: list[tuple[int, int, int]]
) -> None:
    gpu = StandInGpu(offset_ns, drift)
    with pytest.MonkeyPatch.context() as monkeypatch:
        timed = Timed(gpu, monkeypatch)
        asked = set()
        for slot, (before_ns, work_ns, pause_ns) in enumerate(program):
            timed.run(slot, before_ns=before_ns, work_ns=work_ns, pause_ns=pause_ns)
            asked.add(gpu.asked)
        assert len(asked) == 1, "after the first anchor no event is asked until the record is read"
        gpu.now_ns = max(gpu.now_ns, gpu.busy_until_ns)
        within_ns = timed.check(list(range(len(program))))
    flat = [time_ns for slot in sorted(timed.written) for time_ns in timed.written[slot]]
    assert flat == sorted(flat)
    rounding_ns = 3 * sum(pause_ns for _, _, pause_ns in program) / 2**24
    # an anchor is one call and one look; and the bound is no excuse
    assert within_ns <= 2 * LOOK_NS + rounding_ns + 100


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(StandInGpu(drift=1e-4), monkeypatch)


def test_clocks_may_drift_otherwise_after_a_reading(timed: Timed) -> None:
    timed.run(0, pause_ns=1_000_000 * MS)
    timed.check([0])
    gpu = timed.gpu
    gpu.offset_ns, gpu.drift = gpu.offset_ns + round(gpu.now_ns * (gpu.drift - 1e-5)), 1e-5
    timed.run(1, pause_ns=1_000_000 * MS)
    timed.check([0, 1])
    assert timed.times.read() == timed.times.read()


# What goes wrong before operation 0 or 1, and is over before operation 2: which ones have times
# when the record is read meanwhile, of how many and why it says that they have none; and which ones
# have some in the end.
TROUBLES: dict[str, tuple[int, dict[str, Any], list[int], int, str, list[int]]] = {
    "the work has not passed": (1, {"busy_until_ns": LATER}, [0], 1, "had not passed", [0, 1, 2]),
    "a graph is captured": (1, {"capturing": True}, [], 1, "were captured", [0, 2]),
    "the GPU is broken": (1, {"broken": True}, [], 1, "got no event", [0, 2]),
    "no stream is free at the reading": (
        1,
        {"pool_busy_until_ns": LATER},
        [],
        2,
        "could not be asked",
        [0, 1, 2],
    ),
    "no stream is free at the start": (
        0,
        {"pool_busy_until_ns": LATER},
        [],
        2,
        "could not be tied",
        [],
    ),
    "too many are kept": (1, {}, [0], 1, "", [0, 2]),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_cannot_be_timed_is_counted_and_left_to_the_program(
    trouble: str, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, values, meanwhile, count, why, in_the_end = TROUBLES[trouble]
    well = dict(vars(timed.gpu))
    monkeypatch.setattr(gpu_times, "MAX_KEPT", 9 if values else 1)
    for slot in range(2):
        if slot == begins:
            vars(timed.gpu).update(values)
        timed.run(slot)
    words = timed.times.read()
    got = [each for each in words if "got the times of CUDA events" in each]
    assert [each.split(" got")[0] for each in got] == (
        ["On rank 3, cuda:0: 1 operation"] if meanwhile else []
    )
    assert any(
        re.search(
            (
                rf": {count} operations? kept the host's times, done is when wait\(\) returned: "
                rf"they .*{why}"
            ),
            each,
        )
        for each in words
    )
    assert list(timed.written) == meanwhile
    vars(timed.gpu).update({name: well[name] for name in values})
    timed.gpu.now_ns += LATER
    timed.run(2)
    timed.check(in_the_end)


def test_no_time_is_before_the_call_that_caused_it() -> None:
    recorder = Recorder(None, 0, 1, now=iter([100, 200, 300]).__next__, who=lambda: 0)
    slot = recorder.make_post(OP_CODES["isend"])(0, 0, 0, 0)
    assert slot is not None
    recorder.wait(slot)
    recorder.complete(slot)
    for asked, times in (((50, 90), (200, 300)), ((2300, 1300), (2300, 2300))):
        recorder.amend(slot, wait_ns=asked[0], done_ns=asked[1])
        events = recorder.read()
        assert (events.wait_ns[0], events.done_ns[0]) == times


def test_a_tensor_on_a_gpu_is_found_at_any_depth() -> None:
    with FakeTensorMode():
        tensor = torch.empty(1, device=GPU)
    assert find_gpu(([[torch.zeros(1)], [[tensor]]], None)) == GPU
    assert find_gpu([[torch.zeros(1)], torch.zeros(2), "text", None]) is None
    assert find_gpu(3) is None


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
    with fake_world() as world:
        yield world


@pytest.fixture
def start(
    nccl_gpu: StandInGpu, world: ProcessGroup, tmp_path: Path
) -> Iterator[Callable[[], Stop]]:
    """Begins to record.

    What it returns ends that, a second after the last operation, and gives the events and what the
    rank says.
    """
    with contextlib.ExitStack() as stack:

        def begin() -> Stop:
            stop = stack.enter_context(
                recording(Recorder(tmp_path, rank=0, world_size=4, now=nccl_gpu.now))
            )

            def stop_later() -> tuple[Events, dict[str, Any]]:
                nccl_gpu.now_ns += 1000 * MS
                return stop()

            return stop_later

        yield begin


@pytest.fixture
def read(start: Callable[[], Stop]) -> Stop:
    return start()


@pytest.fixture
def tensor() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(1024, device="cuda")


def blocked_ns(events: Events) -> list[int]:
    return (events.done_ns - events.wait_ns).tolist()


def test_a_handle_is_done_when_the_stream_is(
    nccl_gpu: StandInGpu, read: Stop, tensor: torch.Tensor, tmp_path: Path
) -> None:
    work = dist.isend(tensor, 1)
    nccl_gpu.queue(40 * MS)
    work.wait()
    dist.recv(tensor, 3)
    dist.all_reduce(tensor, async_op=True).wait()
    truth = [event.passed_ns for event in nccl_gpu.recorded]
    assert read_parts(tmp_path)[1]["not_recorded"] == [NOT_READ]  # as where the rank is killed now
    events, facts = read()
    assert [OP_NAMES[op] for op in events.op] == ["isend", "recv", "all_reduce"]
    assert blocked_ns(events) == pytest.approx([3 * MS] * 3, abs=3000)
    assert events.wait_ns.tolist() == pytest.approx(truth[::2], abs=1500)
    assert events.done_ns.tolist() == pytest.approx(truth[1::2], abs=1500)
    assert (events.post_ns < nccl_gpu.recorded[0].passed_ns - 39 * MS)[0], "the post is the host's"
    *said, times = facts["not_recorded"]
    assert said == []
    assert times.startswith("On rank 0, cuda:0: 3 operations got the times of CUDA events")


def test_a_handle_that_is_completed_has_the_times_of_its_wait(
    nccl_gpu: StandInGpu,
    tensor: torch.Tensor,
    start: Callable[[], Stop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Work, "is_completed", lambda self: True)
    read = start()
    work = dist.isend(tensor, 1)
    assert work.is_completed()
    nccl_gpu.queue(40 * MS)
    work.wait()
    events, facts = read()
    assert blocked_ns(events) == pytest.approx([3 * MS], abs=3000)
    assert "1 operation got the times of CUDA events" in facts["not_recorded"][-1]


def test_a_collective_on_the_programs_own_stream_has_no_handle(
    nccl_gpu: StandInGpu,
    world: ProcessGroup,
    tensor: torch.Tensor,
    start: Callable[[], Stop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch 2.8 and later run one that is not asynchronous on the current stream, and return no Work
    # (pytorch 150398).
    monkeypatch.setattr(
        ProcessGroup, "allreduce", lambda self, tensors, opts: nccl_gpu.queue(7 * MS)
    )
    read = start()
    nccl_gpu.queue(40 * MS)
    dist.all_reduce(tensor)
    # without options nothing says beforehand that there is to be no handle
    world.allreduce([tensor], None)
    events, facts = read()
    assert blocked_ns(events) == pytest.approx([7 * MS, 0], abs=3000)
    assert "1 operation kept the host's times" in facts["not_recorded"][-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_operations_of_a_batch_are_done_together(
    asynchronous: bool,
    nccl_gpu: StandInGpu,
    world: ProcessGroup,
    tensor: torch.Tensor,
    start: Callable[[], Stop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    monkeypatch.setattr(ProcessGroup, "_start_coalescing", lambda self, device: None)
    monkeypatch.setattr(
        ProcessGroup,
        "_end_coalescing",
        lambda self, device: work if asynchronous else nccl_gpu.queue(3 * MS),
    )
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


def test_tensors_of_the_host_have_the_times_of_the_host(
    nccl_gpu: StandInGpu, read: Stop, tensor: torch.Tensor
) -> None:
    # A group of two backends: torch's default on a machine with GPUs.
    dist.isend(torch.zeros(2), 1).wait()
    dist.all_reduce(torch.zeros(2))
    dist.barrier()  # on NCCL it blocks the host itself
    assert not nccl_gpu.recorded
    events, facts = read()
    assert (events.done_ns >= 0).all()
    assert facts["not_recorded"] == [NOT_READ]


def test_the_log_has_the_times_of_the_gpu(
    nccl_gpu: StandInGpu, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "Recorder", functools.partial(Recorder, now=nccl_gpu.now))
    with fake_world(1):
        configure(enabled=True, prof_all=False)
        try:
            for _ in range(3):
                comm.all_reduce(tensor, async_op=True, prof=True).wait()
                nccl_gpu.now_ns += 500 * MS
            (row,) = comm.log_summary().rows
        finally:
            configure(enabled=False, prof_all=True)
            reset_log()
    assert (row.count, row.blocked_mean_us) == (3, pytest.approx(3000, abs=3))


def test_without_nccl_nothing_is_recorded_on_a_gpu(
    world: ProcessGroup, tensor: torch.Tensor, tmp_path: Path
) -> None:
    assert not is_nccl(world)
    recorder = Recorder(tmp_path, rank=0, world_size=4)
    with recording(recorder) as read:
        hooks = recorder.hooks.on_reading.__self__  # type: ignore[attr-defined]
        dist.isend(tensor, 1).wait()  # torch has no CUDA here: an event would raise
        dist.all_reduce(tensor)
        assert not hooks.open_batches, "every operation takes the short way"
        assert read()[1]["not_recorded"] == []
