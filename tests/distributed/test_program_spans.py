"""Spans that a program already has.

They are record_function blocks and the computations of torch's pipelines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

import ringsim
from ringsim import Trace


def train() -> None:
    """Runs a torch pipeline, as in torch's tutorial."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    part, batch = torch.nn.Linear(8, 8), torch.randn(16, 8)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    schedule = Schedule1F1B(
        PipelineStage(part, rank, size, device),
        n_microbatches=4,
        loss_fn=torch.nn.functional.mse_loss,
    )
    for _ in range(2):
        optimizer.zero_grad()
        with torch.profiler.record_function("the whole step"):
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch) if rank == size - 1 else schedule.step()
        optimizer.step()
    with pytest.raises(KeyError), torch.profiler.record_function("failing"):
        raise KeyError


RANKS = 2


@pytest.fixture(scope="module")
def trace() -> Trace:
    return ringsim.trace(train, world_size=RANKS)


def test_the_step_of_a_pipeline_of_torch_is_read_like_ours(trace: Trace) -> None:
    bubble = trace.bubble()
    assert bubble.schedule == "1f1b"
    assert bubble.closed_form is not None, "the actions must be those of the named schedule"
    assert all(0 < busy < bubble.makespan for busy in bubble.busy)


def test_blocks_of_record_function_are_spans(trace: Trace) -> None:
    frame = trace.to_pandas()
    for rank in range(RANKS):
        spans = frame[(frame["op"] == "span") & (frame["rank"] == rank)]
        count = spans["label"].value_counts()
        assert (count["the whole step"], count["Optimizer.step#SGD.step"]) == (2, 2)
        assert spans.set_index("label")["status"]["failing"] == "error"
        (first, second) = spans[spans["label"] == "the whole step"].itertuples()
        computing = spans[spans["label"].isin(["forward", "backward"])]
        assert len(computing) == 2 * 2 * 4
        assert computing["post_ns"].between(first.post_ns, second.done_ns).all()


def test_torchs_own_functions_are_replaced_only_while_something_is_recorded(
    tmp_path: Path,
) -> None:
    places = [
        (torch.profiler.record_function, "__enter__"),
        (_PipelineStageBase, "forward_one_chunk"),
        (torch.cuda.nvtx, "range_push"),
    ]

    def ours() -> list[bool]:
        return [vars(owner)[name].__module__.startswith("ringsim") for owner, name in places]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ringsim.trace(tmp_path / "run.ringtrace"):
        dist.barrier()  # imports are looked for at each new group
        during = ours()
    dist.destroy_process_group()
    assert (during, ours()) == ([True] * 3, [False] * 3)
