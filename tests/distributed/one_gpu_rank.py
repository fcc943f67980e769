"""One of several ranks that share one GPU; ``test_gpu.py`` starts them directly.

NCCL treats them as ranks on different machines, because each has its own ``NCCL_HOSTID``, and
connects them by sockets. So tests with several ranks can run, but their times are not those of a
link.

    one_gpu_rank.py JOB DIRECTORY
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringsim
from ringsim.pipeline import (
    SmallTransformer,
    average_gradients,
    new_replica_group,
    train_step_pipeline,
)
from ringsim.schedules import SCHEDULE_NAMES

VOCABULARY = 16
TIMEOUT_S = 15


def receive_first() -> Any:
    """Posts all receives before the sends, which requires connected pairs."""
    ring = ringsim.current_ring()
    arriving = torch.empty(4, device=ring.device)
    mine = torch.full((4,), float(ring.rank), device=ring.device)
    recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
    send = dist.isend(mine, ring.succ, group=ring.succ_group)
    for work in (recv, send):
        assert work is not None
        work.wait()
    return arriving.tolist()


def first_contact() -> Any:
    """Passes a token along the ring five times; returns the seconds that each pass took."""
    ring = ringsim.current_ring()
    token = torch.zeros(1, device=ring.device)
    torch.cuda.synchronize()
    passes_s = []
    for _ in range(5):
        begin_s = time.perf_counter()
        if ring.rank == 0:
            dist.send(token, ring.succ, group=ring.succ_group)
            dist.recv(token, ring.pred, group=ring.pred_group)
        else:
            dist.recv(token, ring.pred, group=ring.pred_group)
            dist.send(token, ring.succ, group=ring.succ_group)
        torch.cuda.synchronize()
        passes_s.append(time.perf_counter() - begin_s)
    return passes_s


def batch() -> Any:
    """Sends and receives in one batch on all ranks, three times."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank), device=ring.device)
    for _ in range(3):
        arriving = torch.empty_like(token)
        send = dist.P2POp(dist.isend, token, ring.succ)
        recv = dist.P2POp(dist.irecv, arriving, ring.pred)
        for work in dist.batch_isend_irecv([send, recv]):
            work.wait()
        token = arriving + 10
    dist.all_reduce(token)
    return token[:2].tolist()


def pipeline() -> Any:
    """Runs a step with each schedule; returns the loss and this rank's gradients for each."""
    ring = ringsim.current_ring()
    found = {}
    for schedule in SCHEDULE_NAMES:
        model, inputs, targets = make_step(ring.device)
        with ringsim.span(schedule):
            loss = train_step_pipeline(model, inputs, targets, schedule=schedule)
        gradients = {
            name: parameter.grad.cpu().tolist()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        found[schedule] = [loss, gradients]
    return found


def replicas() -> Any:
    """Averages gradients over two rings of one rank; rank 1 has none for the second parameter."""
    ring = ringsim.current_ring()
    group = new_replica_group([[0], [1]])
    model = nn.Linear(1 << 20, 2).to(ring.device)
    model.weight.grad = torch.full_like(model.weight, float(ring.rank))
    if ring.rank == 0:
        model.bias.grad = torch.full_like(model.bias, 8.0)
    average_gradients(model, group)
    assert model.bias.grad is not None
    return [model.weight.grad.unique().tolist(), model.bias.grad.tolist()]


def make_step(device: torch.device) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """Returns a small transformer and eight microbatches, the same on every rank."""
    torch.manual_seed(0)
    model = SmallTransformer(VOCABULARY, hidden_size=32, num_layers=8, num_heads=2, max_length=16)
    tokens = torch.randint(VOCABULARY, (8, 2, 9))
    inputs = [each[:, :-1].to(device) for each in tokens]
    targets = [each[:, 1:].to(device) for each in tokens]
    return model.to(device), inputs, targets


def data_parallel() -> Any:
    """Runs a backward pass under DDP; returns the gradients, averaged over both ranks."""
    ring = ringsim.current_ring()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(ring.device)
    wrapped = DistributedDataParallel(model, device_ids=[ring.device.index])
    wrapped(torch.full((4, 8), float(ring.rank + 1), device=ring.device)).sum().backward()
    return [parameter.grad.cpu().tolist() for parameter in model.parameters()]


def hang() -> Any:
    """Skips an all_reduce on rank 1; torch's watchdog ends rank 0."""
    ring = ringsim.current_ring()
    tensor = torch.ones(4, device=ring.device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if ring.rank == 0:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    else:
        time.sleep(2 * TIMEOUT_S)


JOBS: dict[str, Callable[[], Any]] = {
    job.__name__: job
    for job in (receive_first, first_contact, batch, pipeline, replicas, data_parallel, hang)
}


def main() -> None:
    """Joins the ring, records the job, and writes the trace and this rank's result."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    ringsim.initialize_distributed(comm_device="gpu", timeout_s=TIMEOUT_S)
    with ringsim.trace(directory / f"{name}.ringtrace"):
        result = JOBS[name]()
        torch.cuda.synchronize()
    (directory / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
