"""Correct programs with torch's modules."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from right_messages import SIZE, right
from torch import nn

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def step(module: nn.Module, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.zero_grad()
    module(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


# -- DistributedDataParallel: its constructor gathers the number of parameters, and broadcasts their
# shapes and values. After the first step it broadcasts the buckets and their sizes.


@right(all_gather=4, broadcast=16, all_reduce=12)
def data_parallel() -> None:
    module = nn.parallel.DistributedDataParallel(model())
    for _ in range(3):
        step(module)


@right(all_gather=4, broadcast=16, all_reduce=8)
def compressed_gradients() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = nn.parallel.DistributedDataParallel(model())
    module.register_comm_hook(None, fp16_compress_hook)
    for _ in range(2):
        step(module)


@right(all_gather=4, broadcast=8, all_reduce=8)
def a_layer_that_is_not_used() -> None:
    module = nn.parallel.DistributedDataParallel(
        nn.ModuleDict({"used": model(), "unused": nn.Linear(2, 2)}), find_unused_parameters=True
    )
    module.module.forward = lambda batch: module.module["used"](batch)
    module(torch.randn(4, 8)).sum().backward()


@right(all_reduce=16)
def gradients_averaged_by_hooks() -> None:
    works: list[Any] = []
    module = model()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda tensor: works.append(dist.all_reduce(tensor.grad, async_op=True))
        )
    module(torch.randn(4, 8)).sum().backward()
    for work in works:
        work.wait()


@right(all_reduce=8)
def futures() -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    both = torch.futures.collect_all([work.get_future() for work in works])
    assert (
        both.then(lambda done: sum(one.value()[0] for one in done.value())).wait().tolist()
        == [8.0] * 4
    )


@right(broadcast=16)
def a_sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = model()
    step(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1))


# -- FSDP2, DTensor, tensor parallelism, functional collectives


@right(all_gather_single=12, reduce_scatter_single=8)
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module[0])
    step(fully_shard(module))


@right(all_gather_coalesced=16)
def the_whole_state_of_what_is_sharded() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(model())
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert dist.get_rank() != 0 or state["0.weight"].shape == (16, 8)


@right(new_group=16, all_gather_single=4, reduce_scatter_single=4, all_reduce=4)
def sharded_in_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    step(
        fully_shard(
            model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
    )


@right(scatter=4, all_gather_coalesced=8, all_reduce=4)
def redistributed() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    tensor = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert float(tensor.redistribute(mesh, [Replicate()]).to_local().sum()) == 32
    assert tensor.redistribute(mesh, [Shard(1)]).to_local().shape == (8, 1)
    assert float(tensor.sum().full_tensor()) == 32


@right(scatter=12, broadcast=4, all_reduce=4)
def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    module = parallelize_module(
        model(), init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    module(torch.ones(2, 8)).sum().backward()


@right(all_reduce=4)
def functional() -> None:
    import torch.distributed._functional_collectives as functional_collectives

    assert (
        float(functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()) == 8
    )


@right(all_reduce=8)
def collectives_with_gradients() -> None:
    from torch.distributed.nn.functional import all_reduce

    value = torch.ones(2, requires_grad=True)
    all_reduce(value * 2).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [8.0, 8.0]


# -- pipelines, data, checkpoints


# Before the first step, the stages agree on the way to find shapes, with a message in each
# direction. Then they exchange shapes, in two messages each.
def pipeline(name: str, stages: int = 1, **options: Any) -> None:
    from torch.distributed import pipelining

    rank = dist.get_rank()
    parts = [
        pipelining.PipelineStage(nn.Linear(8, 8), rank + SIZE * index, SIZE * stages, CPU)
        for index in range(stages)
    ]
    schedule = getattr(pipelining, name)(
        parts if stages > 1 else parts[0], 4, loss_fn=nn.functional.mse_loss, **options
    )
    batch = torch.randn(8, 8)
    schedule.step(
        *([batch] if rank == 0 else []), **({"target": batch} if rank == SIZE - 1 else {})
    )


@right(
    send=6,
    recv=6,
    send_object_list=12,
    recv_object_list=12,
    isend=12,
    batch_isend=12,
    batch_irecv=12,
    irecv=12,
)
def pipeline_of_1f1b() -> None:
    pipeline("Schedule1F1B")


@right(send=14, recv=14, send_object_list=28, recv_object_list=28, isend=56, irecv=56)
def pipeline_with_two_stages_each() -> None:
    pipeline("ScheduleInterleaved1F1B", 2)


@right(all_reduce=4)
def a_loader_with_a_process() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    total = sum(
        batch.sum() for (batch,) in DataLoader(TensorDataset(torch.ones(8)), 4, num_workers=1)
    )
    dist.all_reduce(total)
    assert float(total) == 32


@right(all_gather=20, broadcast=24, gather=12, scatter=16)
def a_checkpoint() -> None:
    import torch.distributed.checkpoint as checkpoint

    words: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(words, src=0)
    state = {"weight": torch.full((4,), 3.0)}
    checkpoint.save(state, checkpoint_id=words[0])
    loaded = {"weight": torch.zeros(4)}
    checkpoint.load(loaded, checkpoint_id=words[0])
    assert loaded["weight"].tolist() == [3.0] * 4
