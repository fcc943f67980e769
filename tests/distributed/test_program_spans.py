"""Spans that a program has already.

Blocks of record_function, and what torch's pipelines compute.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ringsim
from ringsim import Trace
from ringsim.comm.torch_hooks import install, uninstall
from ringsim.schedules import make_schedule
from ringsim.state import get_state
from ringsim.traces.steps import find_step


def train() -> None:
    """A pipeline of torch's, as its tutorial has it."""
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
    with pytest.raises(KeyError), torch.profiler.record_function("in vain"):
        raise KeyError


RANKS = 2


@pytest.fixture(scope="module")
def trace() -> Trace:
    return ringsim.trace(train, world_size=RANKS)


def test_the_step_of_a_pipeline_of_torch_is_read_like_ours(trace: Trace) -> None:
    step = find_step(trace)
    assert step.schedule == "1f1b"
    expected = make_schedule("1f1b", RANKS, 4)
    assert [step.list_actions(rank) for rank in range(RANKS)] == [
        tuple(row) for row in expected.actions
    ]
    bubble = trace.bubble()
    assert bubble.closed_form is not None, "the actions are those of the schedule of that name"
    assert all(0 < busy < bubble.makespan for busy in bubble.busy)


def test_blocks_of_record_function_are_spans(trace: Trace) -> None:
    frame = trace.to_pandas()
    for rank in range(RANKS):
        spans = frame[(frame["op"] == "span") & (frame["rank"] == rank)]
        count = spans["label"].value_counts()
        assert (count["the whole step"], count["Optimizer.step#SGD.step"]) == (2, 2)
        assert spans.set_index("label")["status"]["in vain"] == "error"
        (first, second) = spans[spans["label"] == "the whole step"].itertuples()
        computing = spans[spans["label"].isin(["forward", "backward"])]
        assert len(computing) == 2 * 2 * 4
        assert computing["post_ns"].between(first.post_ns, second.done_ns).all()


def test_torchs_own_functions_are_back_when_recording_ends() -> None:
    assert ringsim.trace(look, world_size=1).results[0] == [True, True, True, False, False, False]


def look() -> list[bool]:
    """Tells of three functions whether they are ringsim's, while it records and then."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    places = [
        (torch.profiler.record_function, "__enter__"),
        (_PipelineStageBase, "forward_one_chunk"),
        (torch.cuda.nvtx, "range_push"),
    ]
    recorder = get_state().recorder
    assert recorder is not None
    dist.barrier()  # what the program has imported by now is looked for at the next new group
    during = [vars(owner)[name].__module__.startswith("ringsim") for owner, name in places]
    uninstall(recorder)
    after = [vars(owner)[name].__module__.startswith("ringsim") for owner, name in places]
    install(recorder)
    return during + after
