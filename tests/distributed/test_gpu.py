"""Ranks on GPUs: one rank a GPU, on NCCL. These tests need a machine that has some."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError

GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.skipif(
        GPUS == 0, reason="needs a GPU and a CUDA build of torch: this machine has none"
    ),
]


def pass_once() -> float:
    """Every rank passes its number to its successor, on its GPU."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank), device="cuda")
    arriving = torch.empty_like(token)
    if ring.world_size > 1:
        send = dist.P2POp(dist.isend, token, ring.succ, ring.succ_group)
        recv = dist.P2POp(dist.irecv, arriving, ring.pred, ring.pred_group)
        for operation in (send, recv) if ring.rank % 2 == 0 else (recv, send):
            for work in dist.batch_isend_irecv([operation]):
                work.wait()
    dist.all_reduce(token)
    torch.cuda.synchronize()
    return float(arriving[0]) if ring.world_size > 1 else float(token[0])


def test_every_rank_has_a_gpu_of_its_own() -> None:
    trace = ringsim.trace(pass_once, world_size=GPUS, comm_device="gpu")
    assert trace.results == [float((rank - 1) % GPUS) for rank in range(GPUS)]
    assert trace.metadata["backend"] == "nccl"
    said = [
        sentence
        for sentence in trace.metadata["not_recorded"]
        if "got the times of CUDA events" in sentence
    ]
    assert len(said) == GPUS
    assert len(trace.messages) == (GPUS if GPUS > 1 else 0)


def receive_first() -> float:
    """Every rank posts its receive before it sends.

    On pairs that are connected, no call waits for a neighbour.
    """
    ring = ringsim.current_ring()
    arriving = torch.empty(4, device=ring.device)
    recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
    send = dist.isend(
        torch.full((4,), float(ring.rank), device=ring.device), ring.succ, group=ring.succ_group
    )
    for work in (recv, send):
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    return float(arriving[0])


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_ring_may_receive_first() -> None:
    trace = ringsim.trace(receive_first, world_size=GPUS, comm_device="gpu", limit_s=60)
    assert trace.results == [float((rank - 1) % GPUS) for rank in range(GPUS)]


def reduce_after_work() -> None:
    """Reduces behind work that takes the GPU a tenth of a second or so.

    The program goes on meanwhile.
    """
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)  # connects
    torch.cuda.synchronize()
    ringsim.mark("before")
    torch.cuda._sleep(200_000_000)  # cycles
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    torch.cuda._sleep(200_000_000)
    dist.all_reduce(tensor)
    ringsim.mark("queued")
    torch.cuda.synchronize()
    ringsim.mark("done")


def test_an_operation_is_done_when_the_gpu_is() -> None:
    trace = ringsim.trace(reduce_after_work, world_size=GPUS, comm_device="gpu")
    events = trace.to_pandas()
    for rank, said in enumerate(
        sentence for sentence in trace.metadata["not_recorded"] if sentence.startswith("On rank")
    ):
        within = re.search(r"3 operations got the times of CUDA events, within ([\d,]+) ns", said)
        assert within, said
        within_ns = int(within[1].replace(",", ""))
        mine = events[events["rank"] == rank]
        at = mine[mine["op"] == "mark"].set_index("label")["post_ns"]
        first, second = mine[mine["op"] == "all_reduce"].iloc[1:].itertuples()
        assert first.post_ns < at["queued"] < first.wait_ns <= first.done_ns, (
            "the program was past it before the GPU was"
        )
        assert first.done_ns < second.wait_ns <= second.done_ns <= at["done"] + within_ns
        # The stream was blocked by the operation, not by what was queued before it.
        assert first.done_ns - first.wait_ns < (first.wait_ns - at["before"]) / 2


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=rf"below the number of GPUs of this machine, {GPUS}, got {GPUS}"
    ):
        ringsim.trace(pass_once, world_size=GPUS + 1, comm_device="gpu")
