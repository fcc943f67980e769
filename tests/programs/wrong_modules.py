"""Wrong programs with DDP, FSDP2, DTensor and torch's pipelines: rows 85 to 87 of faults.md.

Functions import slow modules themselves, because every rank of every program loads this file.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from fault_programs import EASE, fault
from torch.nn.parallel import DistributedDataParallel

BATCH = torch.ones(2, 8)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 8)


# -- DistributedDataParallel


@fault("85a", **EASE)
def batches_that_do_not_divide() -> None:
    model = DistributedDataParallel(linear())
    for _ in range(2 + dist.get_rank()):
        model(BATCH).sum().backward()  # here
    dist.barrier()  # here


@fault("85b", **EASE)
def batches_that_do_not_divide_and_the_end() -> None:
    model = DistributedDataParallel(linear())
    for _ in range(2 + dist.get_rank()):
        model(BATCH).sum().backward()  # here


@fault("85c", **EASE)
def built_on_one_rank() -> None:
    if dist.get_rank() == 0:
        DistributedDataParallel(linear())  # here
    dist.barrier()  # here


@fault("85d", **EASE)
def models_of_different_sizes() -> None:
    DistributedDataParallel(torch.nn.Linear(8, 4 + 4 * dist.get_rank()))  # here


@fault("85e", **EASE)
def a_loss_of_nan_is_skipped() -> None:
    model = DistributedDataParallel(linear())
    for batch in range(3):
        loss = model(BATCH).sum()
        if batch == 1 and dist.get_rank() == 1:
            continue
        loss.backward()  # here
    dist.barrier()  # here


class Unused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@fault("85f", **EASE)
def parameters_without_use() -> None:
    model = DistributedDataParallel(Unused())
    for _ in range(2):
        model(BATCH).sum().backward()  # here


def fails(_: torch.Tensor) -> None:
    raise ValueError("bad gradient")


@fault("85g", **EASE)
def raises_in_the_backward_pass() -> None:
    model = DistributedDataParallel(linear())
    if dist.get_rank() == 1:
        next(model.parameters()).register_hook(fails)
    model(BATCH).sum().backward()  # here


@fault("85h", **EASE)
def accumulates_on_one_rank() -> None:
    model = DistributedDataParallel(linear())
    if dist.get_rank() == 0:
        with model.no_sync():
            model(BATCH).sum().backward()
    else:
        model(BATCH).sum().backward()  # here
    dist.barrier()  # here


# -- sharded models, tensors, pipelines


@fault("86a", **EASE)
def evaluates_on_the_first_rank() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(linear())
    if dist.get_rank() == 0:
        model(BATCH)  # here
    dist.barrier()  # here


@fault("86b", **EASE)
def prints_the_whole_on_the_first_rank() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    parts = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    if dist.get_rank() == 0:
        parts.full_tensor()  # here
    dist.barrier()  # here


@fault("86c", **EASE)
def redistributed_by_one() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    parts = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    if dist.get_rank() == 1:
        parts = parts.redistribute(placements=[Replicate()])  # here
    parts.sum().full_tensor()  # here


@fault("86d", **EASE)
def a_functional_collective_on_one_rank() -> None:
    import torch.distributed._functional_collectives as functional

    if dist.get_rank() == 0:
        functional.all_reduce(BATCH, "sum", dist.group.WORLD) + 1  # here
    dist.barrier()  # here


@fault("86e", **EASE)
def saves_a_checkpoint_on_the_first_rank() -> None:
    import torch.distributed.checkpoint as checkpoint

    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save({"weight": BATCH}, checkpoint_id=folder)  # here
    dist.barrier()  # here


@fault("86f", **EASE)
def meshes_of_different_shapes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        "cpu", (2, 1) if dist.get_rank() == 0 else (1, 2), mesh_dim_names=("data", "model")
    )
    dist.all_reduce(BATCH, group=mesh.get_group("data"))  # here


@fault("87a", **EASE)
def microbatches_of_different_numbers() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    schedule = ScheduleGPipe(
        PipelineStage(linear(), rank, 2, torch.device("cpu")), n_microbatches=2 + 2 * rank
    )
    schedule.step(*[torch.ones(8, 8)] * (rank == 0))  # here


@fault("87b", **EASE)
def the_last_stage_stops_early() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    schedule = ScheduleGPipe(
        PipelineStage(linear(), rank, 2, torch.device("cpu")), n_microbatches=2
    )
    for _ in range(2 - rank):
        schedule.step(*[torch.ones(8, 8)] * (rank == 0))  # here
