"""Programs for ``torch.distributed`` that run unchanged on both clocks and return their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SIZE = 4
Program = Callable[[], Any]
EXACT: dict[str, Program] = {}  # programs with bitwise equal results
CLOSE: dict[str, Program] = {}  # programs that add floats from several ranks


def exact(program: Program) -> Program:
    EXACT[program.__name__] = program
    return program


def close(program: Program) -> Program:
    CLOSE[program.__name__] = program
    return program


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def batch(width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, width, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- messages


@exact
def ring_attention() -> torch.Tensor:
    """Keys and values travel around the ring; each rank adds up the softmax block by block."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    query, key, value = torch.randn(3, 5, 8, generator=generator).unbind()
    top = torch.full((5, 1), float("-inf"))
    weight, total = torch.zeros(5, 1), torch.zeros(5, 8)
    for turn in range(size):
        if turn < size - 1:
            arriving = torch.empty(2, 5, 8)
            sending = dist.isend(torch.stack([key, value]), (rank + 1) % size)
            receiving = dist.irecv(arriving, (rank - 1) % size)
        scores = query @ key.T
        higher = torch.maximum(top, scores.amax(1, keepdim=True))
        scale, share = torch.exp(top - higher), torch.exp(scores - higher)
        weight, total, top = weight * scale + share.sum(1, keepdim=True), total * scale, higher
        total = total + share @ value
        if turn < size - 1:
            sending.wait()
            receiving.wait()
            key, value = arriving.unbind()
    return total / weight


@exact
def odd_even_sort() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.randn(6, generator=torch.Generator().manual_seed(rank)).sort().values
    for turn in range(size):
        peer = rank + 1 if (rank + turn) % 2 == 0 else rank - 1
        if not 0 <= peer < size:
            continue
        theirs = torch.empty_like(mine)
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        both = torch.cat([mine, theirs]).sort().values
        mine = (both[:6] if rank < peer else both[6:]).clone()
    return mine.tolist()


@exact
def halo_exchange_in_a_mesh() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    field = torch.full((3, 3), float(dist.get_rank()))
    for name in ("row", "column"):
        group = mesh[name].get_group()
        other = 1 - dist.get_rank(group)
        border = torch.empty(3)
        sending = dist.isend(field[0].contiguous(), group=group, group_dst=other)
        dist.recv(border, group=group, group_src=other)
        sending.wait()
        field = field + border
    return field


# -- collectives


@exact
def top_k_by_gathered_pairs() -> list[tuple[float, int]]:
    rank = dist.get_rank()
    scores = torch.randn(5, generator=torch.Generator().manual_seed(rank))
    best: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(best, [(score.item(), rank) for score in scores.topk(2).values])
    return sorted(pair for pairs in best for pair in pairs)[-3:]


@exact
def tokens_to_their_experts() -> torch.Tensor:
    """Tokens of a mixture of experts travel by all_to_all with uneven splits, and return."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [(rank + expert) % 3 for expert in range(size)]
    incoming = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(incoming, torch.tensor(counts))
    tokens = torch.arange(float(sum(counts) * 2)).view(-1, 2) + 100 * rank
    here = torch.empty(int(incoming.sum()), 2)
    dist.all_to_all_single(here, tokens, incoming.tolist(), counts)
    back = torch.empty_like(tokens)
    dist.all_to_all_single(back, here * (rank + 1), counts, incoming.tolist())
    return back


@exact
def a_group_destroyed_and_made_again() -> list[float]:
    found = []
    for _ in range(2):
        group = dist.new_group([0, 2])
        if dist.get_rank() in (0, 2):
            value = torch.tensor([float(dist.get_rank())])
            dist.broadcast(value, 2, group=group)
            found.append(value.item())
            dist.destroy_process_group(group)
    return found


@close
def batch_norm_over_ranks() -> torch.Tensor:
    layer = nn.SyncBatchNorm(3) if torch.cuda.is_available() else nn.BatchNorm1d(3)
    values = batch(3)
    mean = values.mean(0)
    dist.all_reduce(mean, dist.ReduceOp.SUM)
    return layer(values - mean / dist.get_world_size()).detach()


# -- modules


@close
def zero_redundancy() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(model, optimizer)


@close
def ddp_without_sync() -> list[float]:
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.no_sync():
        model(batch()).sum().backward()
    return train(model, optimizer)


@close
def ddp_with_unused_layers() -> list[float]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), mlp()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.used(values)

    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


@close
def fsdp_in_low_precision() -> list[float]:
    model = mlp()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return train(model, torch.optim.Adam(model.parameters(), 0.01))


@close
def fsdp_and_the_whole_state() -> dict[str, torch.Tensor]:
    model = mlp()
    fully_shard(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    state = get_model_state_dict(model)
    return {name: value.full_tensor() for name, value in state.items()}


@close
def hybrid_sharding() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


@close
def sequence_parallel() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    values = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    result = model(values)
    result.sum().backward()
    return result.detach()


@close
def a_matrix_product_in_blocks() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(5)
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    rows = distribute_tensor(left, mesh, [Shard(0), Replicate()])
    columns = distribute_tensor(right, mesh, [Replicate(), Shard(1)])
    return (rows @ columns).full_tensor()


@close
def checkpoints_under_ddp() -> list[float]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([mlp(), mlp()])

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                values = checkpoint(layer, values, use_reentrant=False)
            return values

    model = DistributedDataParallel(Model())
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


@close
def a_transformer_layer_under_ddp() -> list[float]:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.layer(values.unsqueeze(1)).squeeze(1)

    model = DistributedDataParallel(Model())
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


@close
def dropout_draws_on_each_rank() -> torch.Tensor:
    """Each rank draws its own mask, with the same generator as on real ranks."""
    values = functional.dropout(torch.ones(64), 0.5)
    total = values.clone()
    dist.all_reduce(total)
    return torch.stack([values, total])


# -- wrong programs


def uneven_batches() -> None:
    model = DistributedDataParallel(mlp())
    for _ in range(3 if dist.get_rank() else 2):
        model(batch()).sum().backward()


def a_rank_skips_a_collective() -> None:
    value = torch.ones(4)
    if dist.get_rank() != 2:
        dist.all_reduce(value)
    dist.barrier()


def shapes_that_differ() -> None:
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 1)))


def both_receive_first() -> None:
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(torch.empty(2), 1 - rank)
        dist.send(torch.ones(2), 1 - rank)


def a_sharded_model_that_one_rank_leaves() -> None:
    model = mlp()
    fully_shard(model)
    if dist.get_rank() != 3:
        model(batch()).sum().backward()


WRONG: dict[str, Program] = {
    program.__name__: program
    for program in (
        uneven_batches,
        a_rank_skips_a_collective,
        shapes_that_differ,
        both_receive_first,
        a_sharded_model_that_one_rank_leaves,
    )
}
