"""Spans that a program already has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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
    part(batch).sum().backward()
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
        assert count["torch.autograd.backward"] == 1, "stages have spans of their own"
        assert (count["the whole step"], count["Optimizer.step#SGD.step"]) == (2, 2)
        assert spans.set_index("label")["status"]["failing"] == "error"
        (first, second) = spans[spans["label"] == "the whole step"].itertuples()
        computing = spans[spans["label"].isin(["forward", "backward"])]
        assert len(computing) == 2 * 2 * 4
        assert computing["post_ns"].between(first.post_ns, second.done_ns).all()
