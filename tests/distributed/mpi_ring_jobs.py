"""What the ranks of the tests of rings on MPI do: ``mpirun -n 3 python mpi_ring_jobs.py NAME [ARGUMENTS]``."""

from __future__ import annotations

import builtins
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, RendezvousFailed
from ringsim.ring import initialize_distributed
from ringsim.state import get_state

PRINT = builtins.print


def worker(rounds: int) -> float:
    """The first worker of README.md, with its other import."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank))
    for _ in range(rounds):
        arriving = torch.empty_like(token)
        if ring.world_size > 1:
            recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
            dist.isend(token, ring.succ, group=ring.succ_group).wait()
            recv.wait()
        with ringsim.span("compute"):
            token = (arriving if ring.world_size > 1 else token) + 1
    return token[0].item()


def look(group: Any) -> list[Any] | None:
    return group and [group.group_name, dist.get_process_group_ranks(group), group.rank(), group.size()]


def go_round(directory: str) -> None:
    """Joins, passes a token round three times while that is recorded, joins in vain, leaves, and does it all again."""
    for turn in range(2):
        dist.set_backend("mpi")
        ringsim.initialize_distributed(timeout_s=20)
        ring = ringsim.current_ring()
        with ringsim.trace(f"{directory}/{turn}.ringtrace"):
            result = worker(3)
        ringsim.initialize_distributed()
        assert ringsim.current_ring() is ring
        with pytest.raises(ArgumentError, match="comm_device must be 'cpu' as in the ring that exists"):
            initialize_distributed(comm_device="gpu")
        print("from rank", ring.rank)
        report = {
            "place": [ring.rank, ring.world_size, ring.pred, ring.succ, list(ring.ranks), ringsim.get_comm_device()],
            "groups": [look(ringsim.get_pipeline_parallel_pred_group()), look(ringsim.get_pipeline_parallel_succ_group())],
            "distinct": ring.pred_group is not ring.succ_group,
            "result": result,
        }
        Path(directory, f"{ring.rank}.json").write_text(json.dumps(report))
        dist.barrier()
        ringsim.destroy_distributed()
        assert not dist.is_initialized()
        assert builtins.print is PRINT
        assert get_state().ring is None


def two_rings(directory: str) -> None:
    """Two rings in a world that the script has made, which outlives them."""
    dist.set_backend("mpi")
    dist.init_process_group("mpi")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    members = list(range(half)) if rank < half else list(range(half, 2 * half))[::-1]
    with pytest.raises(ArgumentError, match="world_size must be 4 as in the default process group that exists, got 5"):
        initialize_distributed(world_size=5)
    initialize_distributed(ring_ranks=members)
    ring = ringsim.current_ring()
    came = torch.empty(1)
    recv = dist.irecv(came, ring.pred, group=ring.pred_group)
    dist.send(torch.tensor([float(rank)]), ring.succ, group=ring.succ_group)
    recv.wait()
    report = {"members": list(ring.ranks), "came": came.item(), "groups": [look(ring.pred_group), look(ring.succ_group)]}
    Path(directory, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group(ring.succ_group)  # the script may
    ringsim.destroy_distributed()
    dist.barrier()
    initialize_distributed(ring_ranks=[rank])
    assert ringsim.current_ring().succ_group is None
    dist.destroy_process_group()  # and the ring with it
    initialize_distributed(timeout_s=20)
    assert ringsim.current_ring().ranks == (0, 1, 2, 3)
    dist.set_backend("torch")
    with pytest.raises(ArgumentError, match="the backend must be 'mpi' as in the ring that exists, got 'torch'"):
        initialize_distributed()
    ringsim.destroy_distributed()


def refuse() -> None:
    """What is wrong is said on every rank, and leaves nothing behind."""
    dist.set_backend("mpi")
    with pytest.raises(ArgumentError, match="comm_device must be 'cpu' on the backend 'mpi', got 'gpu'"):
        initialize_distributed(comm_device="gpu")
    with pytest.raises(ArgumentError, match="world_size must be 3 as MPI has it"):
        initialize_distributed("127.0.0.1", 29500, 4, 0, 0)
    rank = ringsim.environment.discover().rank
    with pytest.raises(RendezvousFailed, match=r"ring_ranks must be the same on every rank of a ring, got \[0, 1, 2\] on rank 0 and \[1\]"):
        initialize_distributed(ring_ranks=[1] if rank == 1 else None)
    assert not dist.is_initialized()
    assert get_state().ring is None
    PRINT("refused")


if __name__ == "__main__":
    warnings.simplefilter("error")
    globals()[sys.argv[1]](*sys.argv[2:])
