"""The hooks on groups that are told to be NCCL's: torch's fake backend, tensors without data on "cuda", a stand-in for the GPU's clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stand_in_gpu import StandInGpu
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup, Work
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringsim import comm
from ringsim.comm import log, torch_hooks
from ringsim.comm.gpu_times import NOT_READ, GpuTimes, is_nccl
from ringsim.comm.log import configure, reset_log
from ringsim.comm.torch_hooks import NOT_RECORDED, install, uninstall
from ringsim.traces.events import OP_NAMES, Events
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import Recorder

MS = 10**6
Read = Callable[[], tuple[Events, dict[str, Any]]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    """A GPU, and NCCL; the host's clock is the stand-in's too."""
    gpu = StandInGpu(offset_ns=-(10**9), drift=5e-5)
    gpu.install(monkeypatch)
    monkeypatch.setattr(torch_hooks, "GpuTimes", functools.partial(GpuTimes, now=gpu.now))
    monkeypatch.setattr(torch_hooks, "is_nccl", lambda group: True)

    def wait_on_stream(self: Work, *timeout: Any) -> bool:
        gpu.queue(3 * MS)
        return True

    monkeypatch.setattr(FakeWork, "wait", wait_on_stream)
    return gpu


@pytest.fixture
def world() -> Iterator[ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def start(gpu: StandInGpu, world: ProcessGroup, tmp_path: Path) -> Iterator[Callable[[], Read]]:
    """Begins to record; what it returns ends that, a second after the last operation, and gives the events and what the rank says."""
    recorder = Recorder(tmp_path, rank=0, world_size=4, now=gpu.now)

    def stop() -> tuple[Events, dict[str, Any]]:
        uninstall(recorder)
        gpu.now_ns += 1000 * MS
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


def test_a_handle_is_done_when_the_stream_is(gpu: StandInGpu, read: Read, tensor: torch.Tensor) -> None:
    work = dist.isend(tensor, 1)
    gpu.queue(40 * MS)
    work.wait()
    dist.recv(tensor, 3)
    dist.all_reduce(tensor, async_op=True).wait()
    truth = [event.passed_ns for event in gpu.recorded]
    events, facts = read()
    assert [OP_NAMES[op] for op in events.op] == ["isend", "recv", "all_reduce"]
    assert blocked_ns(events) == pytest.approx([3 * MS] * 3, abs=3000)
    assert events.wait_ns.tolist() == pytest.approx(truth[::2], abs=1500)
    assert events.done_ns.tolist() == pytest.approx(truth[1::2], abs=1500)
    assert (events.post_ns < gpu.recorded[0].passed_ns - 39 * MS)[0], "the post is the host's"
    *said, times = facts["not_recorded"]
    assert tuple(said) == NOT_RECORDED
    assert times.startswith("On rank 0, cuda:0: 3 operations got the times of CUDA events")


def test_a_collective_on_the_programs_own_stream_has_no_handle(
    gpu: StandInGpu, world: ProcessGroup, tensor: torch.Tensor, start: Callable[[], Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch 2.8 and later run one that is not asynchronous on the current stream, and return no Work (pytorch 150398).
    monkeypatch.setattr(ProcessGroup, "allreduce", lambda self, tensors, opts: gpu.queue(7 * MS))
    read = start()
    gpu.queue(40 * MS)
    dist.all_reduce(tensor)
    world.allreduce([tensor], None)  # without options nothing says beforehand that there is to be no handle
    events, facts = read()
    assert blocked_ns(events) == pytest.approx([7 * MS, 0], abs=3000)
    assert "1 operation kept the host's times" in facts["not_recorded"][-1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_operations_of_a_batch_are_done_together(
    asynchronous: bool,
    gpu: StandInGpu,
    world: ProcessGroup,
    tensor: torch.Tensor,
    start: Callable[[], Read],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    monkeypatch.setattr(ProcessGroup, "_start_coalescing", lambda self, device: None)
    monkeypatch.setattr(ProcessGroup, "_end_coalescing", lambda self, device: work if asynchronous else gpu.queue(3 * MS))
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


def test_tensors_of_the_host_have_the_times_of_the_host(gpu: StandInGpu, read: Read, tensor: torch.Tensor) -> None:
    # A group of two backends: torch's default on a machine with GPUs.
    dist.isend(torch.zeros(2), 1).wait()
    dist.all_reduce(torch.zeros(2))
    dist.barrier()  # on NCCL it blocks the host itself
    assert not gpu.recorded
    events, facts = read()
    assert (events.done_ns >= 0).all()
    assert facts["not_recorded"] == [*NOT_RECORDED, NOT_READ]


def test_an_operation_in_a_captured_graph_has_the_times_of_the_host(
    gpu: StandInGpu, read: Read, tensor: torch.Tensor, tmp_path: Path
) -> None:
    gpu.capturing = True
    dist.all_reduce(tensor)
    gpu.capturing = False
    assert read_parts(tmp_path)[1]["not_recorded"] == [*NOT_RECORDED, NOT_READ]  # as where the rank is killed now
    events, facts = read()
    assert blocked_ns(events)[0] < MS
    assert any("1 operation kept the host's times" in sentence for sentence in facts["not_recorded"])


def test_the_log_has_the_times_of_the_gpu(gpu: StandInGpu, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "Recorder", functools.partial(Recorder, now=gpu.now))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    configure(enabled=True, prof_all=False)
    try:
        for _ in range(3):
            comm.all_reduce(tensor, async_op=True, prof=True).wait()
            gpu.now_ns += 500 * MS
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
