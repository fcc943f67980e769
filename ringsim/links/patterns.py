"""One step of each pattern, as one rank does it: the sends and recvs, posted in an order that cannot deadlock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringsim import comm as dist
from ringsim.errors import RingError
from ringsim.links.plan import STREAM, Block
from ringsim.ring import Ring

__all__ = ["group_of", "make_step"]

Step = Callable[[], None]


def group_of(block: Block, ring: Ring) -> dist.ProcessGroup:
    """Returns the pair group of a block's edge.

    Args:
        block: a block with an edge that this rank is at an end of.
        ring: this rank's ring.

    Raises:
        RingError: this rank is not at an end of it.
    """
    group = ring.succ_group if ring.rank == block.src else ring.pred_group if ring.rank == block.dst else None
    if group is None:
        raise RingError(f"a rank must be at an end of the edge that it measures, got {block.src}->{block.dst} (rank {ring.rank}).")
    return group


def make_step(block: Block, ring: Ring, outgoing: torch.Tensor, incoming: torch.Tensor) -> Step | None:
    """Returns the function that does this rank's part of one step; None where it has none.

    All ranks that have one call it equally often; it blocks until the step is done.

    Args:
        block: what is measured.
        ring: this rank's ring.
        outgoing: what is sent, uint8, shape (size_bytes,); for all_reduce float32, shape (size_bytes / 4,).
        incoming: where what is received goes, of the same shape.
    """
    if block.pattern == "all_reduce":
        return lambda: dist.all_reduce(outgoing)
    if block.pattern == "shift":
        return lambda: _shift(ring, outgoing, incoming)
    if ring.rank not in (block.src, block.dst):
        return None
    group, first = group_of(block, ring), ring.rank == block.src
    peer = block.dst if first else block.src

    def pingpong() -> None:
        if first:
            dist.send(outgoing, peer, group=group)
            dist.recv(incoming, peer, group=group)
        else:
            dist.recv(incoming, peer, group=group)
            dist.send(outgoing, peer, group=group)

    def oneway() -> None:
        if first:
            works = [dist.isend(outgoing, peer, group=group) for _ in range(STREAM)]
        else:
            works = [dist.irecv(incoming, peer, group=group) for _ in range(STREAM)]
        for work in works:
            _wait(work)

    def exchange() -> None:  # as one batch: on NCCL two by themselves would queue up, each behind a recv that nobody answers
        recv = dist.P2POp(dist.irecv, incoming, peer, group)
        send = dist.P2POp(dist.isend, outgoing, peer, group)
        for work in dist.batch_isend_irecv([recv, send]):
            work.wait()

    return {"pingpong": pingpong, "oneway": oneway, "exchange": exchange}[block.pattern]


def _shift(ring: Ring, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    send = None
    if ring.comm_device == "gpu" and ring.ranks.index(ring.rank) % 2 == 0:
        send = dist.isend(outgoing, ring.succ, group=ring.succ_group)  # NCCL's first recv of a pair blocks until the other side sends
    recv = dist.irecv(incoming, ring.pred, group=ring.pred_group)
    send = send or dist.isend(outgoing, ring.succ, group=ring.succ_group)
    _wait(recv)
    _wait(send)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
