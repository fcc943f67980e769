"""The demonstration: microbatches flow through the stages of a ring, and the result comes back to the rank that sent them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ringsim

NUM_MICROBATCHES = 4
BATCH, HIDDEN = 64, 512


def stage_weight(stage: int) -> torch.Tensor:
    """Returns the weight of a stage, shape (hidden, hidden): the same wherever it is computed."""
    generator = torch.Generator().manual_seed(stage)
    return torch.randn(HIDDEN, HIDDEN, generator=generator).div(HIDDEN**0.5)


def microbatch_input(index: int) -> torch.Tensor:
    """Returns the input of a microbatch, shape (batch, hidden)."""
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1000 + index))


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes one stage; x and the result have shape (batch, hidden)."""
    for _ in range(4):
        x = torch.tanh(x @ weight)
    return x


def worker() -> float:
    """Runs one stage on every microbatch; every rank of a ring calls it.

    Rank 0 posts all its sends before it waits for a result: a send on Gloo ends only when the other side receives, and a ring in which
    everybody sends first never moves.

    Returns:
        On rank 0 the sum of all results, which came back over the edge that closes the ring; 0.0 elsewhere.
    """
    ring = ringsim.current_ring()
    weight = stage_weight(ring.rank)
    sends: list[Any] = []
    total = 0.0
    for index in range(NUM_MICROBATCHES):
        if ring.rank == 0:
            x = microbatch_input(index)
        else:
            x = torch.empty(BATCH, HIDDEN)
            dist.recv(x, src=ring.pred, group=ring.pred_group, tag=index)
        with ringsim.span("forward", stage=ring.rank, microbatch=index):
            x = forward(x, weight)
        if ring.world_size == 1:
            total += float(x.sum())
        else:
            sends.append(dist.isend(x, dst=ring.succ, group=ring.succ_group, tag=index))
    for index in range(NUM_MICROBATCHES if ring.rank == 0 and ring.world_size > 1 else 0):
        result = torch.empty(BATCH, HIDDEN)
        dist.recv(result, src=ring.pred, group=ring.pred_group, tag=index)
        total += float(result.sum())
    for send in sends:
        send.wait()
    return total


def expected(world_size: int) -> float:
    """Computes what rank 0 must return, in one process."""
    total = 0.0
    for index in range(NUM_MICROBATCHES):
        x = microbatch_input(index)
        for stage in range(world_size):
            x = forward(x, stage_weight(stage))
        total += float(x.sum())
    return total
