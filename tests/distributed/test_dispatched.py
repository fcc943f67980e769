"""Collectives that C++ issues: what DistributedDataParallel, functional collectives and DTensor do is recorded, and stays as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringsim
from ringsim.comm.torch_hooks import install, uninstall
from ringsim.errors import MessageMismatch
from ringsim.state import get_state
from ringsim.traces.value import Trace

SIZES = [(64, 512), (512, 512), (512, 512), (512, 8)]  # more than torch puts into its first bucket, 1 MiB
BYTES = 4 * sum(rows * columns + columns for rows, columns in SIZES)


def train(steps: int) -> list[torch.Tensor]:
    """Trains a model in several buckets, and returns the gradients of the last step."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(*size) for size in SIZES]), bucket_cap_mb=1)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        with ringsim.span("backward"):
            model(torch.randn(4, SIZES[0][0])).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@contextlib.contextmanager
def unrecorded() -> Any:
    recorder = get_state().recorder
    assert recorder is not None
    uninstall(recorder)
    yield
    install(recorder)


def data_parallel() -> bool:
    """Tells whether gradients are the same, bit by bit, with recording and without."""
    recorded = train(3)
    with unrecorded():
        return all(map(torch.equal, recorded, train(3)))


def functional() -> None:
    import torch.distributed._functional_collectives as functional_collectives

    assert float(functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum()) == 3 * dist.get_world_size()


class Slow(torch.autograd.Function):
    """Passes on what it gets, and takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ringsim.compute(ctx.seconds)
        return gradient, None


def overlapping() -> None:
    """While one bucket is reduced, the next is computed; rank 1 is late with the last one."""
    layers = [nn.Linear(512, 512) for _ in range(3)]
    seconds = [0.3 if dist.get_rank() == 1 else 0.05, 0.05, 0.05]
    model = nn.ModuleList(layers)
    model.forward = lambda x: functools.reduce(lambda hidden, number: Slow.apply(layers[number](hidden), seconds[number]), range(3), x)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(3):
        with ringsim.span("step"):
            model(torch.randn(4, 512)).sum().backward()


WORKERS: dict[str, Callable[[], Any]] = {
    "data_parallel": data_parallel,
    "functional": functional,
    "overlapping": overlapping,
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    return {name: ringsim.trace(worker, world_size=3) for name, worker in WORKERS.items()}


def test_buckets_are_recorded_once_with_their_bytes(runs: dict[str, Trace]) -> None:
    frame = runs["data_parallel"].to_pandas()
    reductions = frame[frame["op"] == "all_reduce"]
    for rank in range(runs["data_parallel"].world_size):
        mine, spans = (each[each["rank"] == rank] for each in (reductions, frame[frame["label"] == "backward"]))
        steps = [
            mine[mine["post_ns"].between(*times)]["size_bytes"].tolist() for times in zip(spans["post_ns"], spans["done_ns"], strict=True)
        ]
        assert [sum(sizes) for sizes in steps] == [BYTES] * 3
        assert len(steps[0]) == 1  # torch makes its buckets in the first step
        assert len(steps[1]) == len(steps[2]) > 1
    assert set(frame["status"]) == {"ok"}
    assert set(reductions["group"]) == {"world"}
    assert set(reductions["file"]) == {__file__}
    assert (reductions["done_ns"] >= reductions["post_ns"]).all()


def test_recording_changes_no_bit_of_a_gradient(runs: dict[str, Trace]) -> None:
    assert all(runs["data_parallel"].results)


def test_a_program_waits_where_its_functional_collective_does(runs: dict[str, Trace]) -> None:
    frame = runs["functional"].to_pandas()
    waited = frame[frame["op"] == "all_reduce"]
    assert (waited["wait_ns"] >= waited["post_ns"]).all()


def test_only_the_last_bucket_of_a_step_blocks(runs: dict[str, Trace]) -> None:
    frame = runs["overlapping"].to_pandas()
    for rank in {*range(runs["overlapping"].world_size)} - {1}:
        mine, spans = (each[each["rank"] == rank] for each in (frame[frame["op"] == "all_reduce"], frame[frame["label"] == "step"]))
        steps = [mine[mine["post_ns"].between(*times)] for times in zip(spans["post_ns"], spans["done_ns"], strict=True)]
        assert [step["wait_ns"].notna().tolist() for step in steps] == [[True], [False, False, True], [False, False, True]]


def test_nothing_is_said_to_be_missing_where_nothing_is(runs: dict[str, Trace]) -> None:
    for trace in runs.values():
        assert trace.metadata["not_recorded"] == []
        assert {finding.kind for finding in trace.explain().findings} <= {"straggler"}  # which a busy machine makes


def unequal() -> None:
    """Rank 1 has one batch more."""
    train(2 + dist.get_rank())
    dist.barrier()


def test_a_rank_that_waits_in_cpp_is_seen_to_wait() -> None:
    with pytest.raises(MessageMismatch) as caught:
        ringsim.trace(unequal, world_size=2, limit_s=60)
    (finding,) = caught.value.diagnosis.findings
    assert caught.value.trace.explain().findings == (finding,), "live as afterwards"
    assert (finding.kind, finding.ranks) == ("collective_mismatch", (0, 1))
    assert {operation.op for operation in finding.operations} == {"all_reduce", "barrier"}
    assert {operation.file for operation in finding.operations} == {__file__}


def test_the_rank_that_comes_late_is_named(runs: dict[str, Trace]) -> None:
    diagnosis = runs["overlapping"].explain()
    assert (diagnosis.findings[0].kind, diagnosis.findings[0].ranks) == ("straggler", (1,))
    assert 'still in "compute 0.3 s"' in str(diagnosis)
