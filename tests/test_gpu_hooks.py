"""The records of operations on NCCL groups, with a stand-in for the GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_rank import fake_world, recorded
from stand_in_gpu import LATER, MS, StandInGpu
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup, Work

import ringsim
from ringsim import Trace, comm
from ringsim.comm import gpu_times, log, torch_hooks

Stop = Callable[[], Trace]


@pytest.fixture
def nccl_gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    """A stand-in for a GPU with NCCL, which also provides the host's clock."""
    nccl_gpu = StandInGpu(offset_ns=-(10**9), drift=5e-5)
    nccl_gpu.install(monkeypatch)
    monkeypatch.setattr(
        torch_hooks, "GpuTimes", functools.partial(gpu_times.GpuTimes, now=nccl_gpu.now)
    )
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
    """Starts recording.

    The returned function ends it, a second after the last operation, and returns the trace.
    """
    with contextlib.ExitStack() as stack:

        def begin() -> Stop:
            stop = stack.enter_context(recorded(tmp_path, now=nccl_gpu.now))

            def stop_later() -> Trace:
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


def blocked_ns(trace: Trace) -> list[int]:
    frame = trace.to_pandas()
    return (frame["done_ns"] - frame["wait_ns"]).tolist()


def times_of(trace: Trace) -> str:
    """Returns the trace's sentences about the times of GPU operations."""
    return str(trace.metadata["not_recorded"][-1])


def test_a_handle_is_done_when_the_stream_is(
    nccl_gpu: StandInGpu, read: Stop, tensor: torch.Tensor
) -> None:
    ringsim.mark("now")
    begin_ns = nccl_gpu.now_ns
    work = dist.isend(tensor, 1)
    nccl_gpu.queue(40 * MS)
    work.wait()
    dist.recv(tensor, 3)
    dist.all_reduce(tensor, async_op=True).wait()
    truth = [event.passed_ns - begin_ns for event in nccl_gpu.recorded]
    trace = read()
    mark, *rows = trace.to_pandas().itertuples()
    assert [row.op for row in rows] == ["isend", "recv", "all_reduce"]
    found = [each - mark.post_ns for row in rows for each in (row.wait_ns, row.done_ns)]
    assert found == pytest.approx(truth, abs=1500)
    assert [row.done_ns - row.wait_ns for row in rows] == pytest.approx([3 * MS] * 3, abs=3000)
    assert rows[0].post_ns - mark.post_ns < truth[0] - 39 * MS  # a time of the host
    (times,) = trace.metadata["not_recorded"]
    assert times.startswith("On rank 0, cuda:0: the times of 3 operations come from CUDA events")


def test_what_has_not_ended_when_the_record_is_read_is_in_flight(
    nccl_gpu: StandInGpu, read: Stop, tensor: torch.Tensor
) -> None:
    dist.send(tensor, 1)
    nccl_gpu.queue(LATER)
    dist.recv(tensor, 1)
    dist.all_reduce(tensor, async_op=True).wait()
    trace = read()
    rows = trace.to_pandas()
    assert rows["status"].tolist() == ["ok", "in_flight", "in_flight"]
    assert rows["done_ns"].notna().tolist() == [True, False, False]
    assert rows["wait_ns"].notna().all()
    assert "2 operations had not ended when the record was read" in times_of(trace)


def test_a_handle_that_is_completed_has_the_times_of_its_wait(
    nccl_gpu: StandInGpu, tensor: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, "is_completed", lambda self: True)
    read = start()
    work = dist.isend(tensor, 1)
    assert work.is_completed()
    nccl_gpu.queue(40 * MS)
    work.wait()
    trace = read()
    assert blocked_ns(trace) == pytest.approx([3 * MS], abs=3000)
    assert "the times of 1 operation come from CUDA events" in times_of(trace)


def test_a_collective_on_the_programs_own_stream_has_no_handle(
    nccl_gpu: StandInGpu, world: ProcessGroup, tensor: Any, start: Any, monkeypatch: Any
) -> None:
    # torch 2.8 and later run a synchronous collective on the current stream, and return no Work
    # (pytorch 150398).
    monkeypatch.setattr(
        ProcessGroup, "allreduce", lambda self, tensors, opts: nccl_gpu.queue(7 * MS)
    )
    read = start()
    nccl_gpu.queue(40 * MS)
    dist.all_reduce(tensor)
    # without options it is not known beforehand that there will be no handle
    world.allreduce([tensor], None)
    trace = read()
    assert blocked_ns(trace) == pytest.approx([7 * MS, 0], abs=3000)
    assert "1 operation blocked the stream before an event" in times_of(trace)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_operations_of_a_batch_are_done_together(
    asynchronous: bool, nccl_gpu: StandInGpu, world: Any, tensor: Any, start: Any, monkeypatch: Any
) -> None:
    work = dist.all_reduce(tensor, async_op=True)

    def end(group: ProcessGroup, device: torch.device) -> Work | None:
        return work if asynchronous else nccl_gpu.queue(3 * MS)

    monkeypatch.setattr(ProcessGroup, "_start_coalescing", lambda self, device: None)
    monkeypatch.setattr(ProcessGroup, "_end_coalescing", end)
    read = start()
    world._start_coalescing(tensor.device)
    for root in range(2):
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = root, asynchronous
        world.broadcast([tensor], options)
    handle = world._end_coalescing(tensor.device)
    if handle is not None:
        handle.wait()
    trace = read()
    assert blocked_ns(trace) == pytest.approx([3 * MS] * 2, abs=3000)
    assert trace.to_pandas()["done_ns"].nunique() == 1
    assert "the times of 2 operations come from CUDA events" in times_of(trace)


def test_tensors_of_the_host_have_the_times_of_the_host(
    nccl_gpu: StandInGpu, read: Stop, tensor: torch.Tensor
) -> None:
    # A group with two backends: torch's default on a machine with GPUs.
    dist.isend(torch.zeros(2), 1).wait()
    dist.all_reduce(torch.zeros(2))
    dist.barrier()  # on NCCL it blocks the host itself
    assert not nccl_gpu.recorded
    trace = read()
    assert trace.to_pandas()["done_ns"].notna().all()
    # also the sentence in the trace if the rank is killed before its record is read
    assert times_of(trace).startswith("With NCCL, wait() returns once the work is queued")


def test_the_log_has_the_times_of_the_gpu(
    nccl_gpu: StandInGpu, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "Recorder", functools.partial(log.Recorder, now=nccl_gpu.now))
    with fake_world(1):
        comm.configure(enabled=True, prof_all=False)
        try:
            for _ in range(3):
                comm.all_reduce(tensor, async_op=True, prof=True).wait()
                nccl_gpu.now_ns += 500 * MS
            (row,) = comm.log_summary().rows
        finally:
            comm.configure(enabled=False, prof_all=True)
            comm.reset_log()
    assert (row.count, row.blocked_mean_us) == (3, pytest.approx(3000, abs=3))


def test_without_nccl_nothing_is_recorded_on_a_gpu(
    world: ProcessGroup, tensor: torch.Tensor, tmp_path: Path
) -> None:
    with recorded(tmp_path) as stop:
        dist.isend(tensor, 1).wait()  # torch has no CUDA here: an event would raise
        dist.all_reduce(tensor)
    trace = stop()
    assert trace.to_pandas()["status"].tolist() == ["ok", "ok"]
    assert trace.metadata["not_recorded"] == []
