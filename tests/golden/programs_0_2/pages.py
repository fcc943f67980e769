"""Workers of README.md and docs, through torch.distributed.

Copied from version 0.2.0, to run unchanged: do not edit."""

import torch
import torch.distributed as dist

import ringsim
from ringsim.pipeline import Costs, make_schedule, rehearse

# -- README.md


def worker(rounds):
    ring = ringsim.current_ring()          # rank, world_size, pred, succ, pred_group, succ_group, device
    token = torch.full((1024,), float(ring.rank), device=ring.device)  # the CPU, or this rank's GPU
    for _ in range(rounds):
        arriving = torch.empty_like(token)
        recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
        dist.isend(token, ring.succ, group=ring.succ_group).wait()
        recv.wait()
        with ringsim.span("compute"):
            token = arriving + 1
    return token[0].item()


# -- docs/simulation.md


def two_sizes():
    for size_bytes in (1024, 262144):
        rehearse(make_schedule("gpipe", 2, 8), Costs(forward=0.002, backward=0.004), size_bytes=size_bytes, ahead=0)
