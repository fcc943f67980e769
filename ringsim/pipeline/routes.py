"""The way from this rank to another of its ring: which group carries a message.

Boundary between two stages, on ranks 1 and 2 (the ring's edge 1 -> 2)::

    rank 1  -- activations, forward ------>  rank 2
            <------- gradients, backward --             both on the group "ring:1>2"

A V-shaped placement also has activations from rank 2 to rank 1. They go over the same edge, in the group's other direction. Two ranks that
are no neighbours use the default group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from ringsim import comm as dist
from ringsim.pipeline.headers import HEADER_SIZE, Payload
from ringsim.ring import Ring

__all__ = ["ANSWER_TAG", "HEADER_TAG", "PAYLOAD_TAG", "SHARED_TAG", "Posted", "Route", "find_routes"]

# Which of the messages between two ranks it is; those of one tag arrive in the order in which they were sent.
PAYLOAD_TAG: Final = 0
HEADER_TAG: Final = 1
ANSWER_TAG: Final = 2
SHARED_TAG: Final = 3


@dataclass
class Posted:
    """A send or a receive that has begun: the buffer must stay as it is until `wait` is over.

    Attributes:
        work: the handle, None where there was nothing to send.
        tensor: the buffer.
    """

    work: Any
    tensor: Tensor

    def wait(self) -> Tensor:
        """Blocks until the message is there, or gone; returns the buffer. A handle of Gloo bears one wait only."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        return self.tensor


@dataclass(frozen=True)
class Route:
    """The way to one other rank.

    Attributes:
        peer: its global rank.
        group: the group of the ring's edge, None for the default group.
        device: where buffers must be: the CPU for Gloo, this rank's GPU for NCCL.
    """

    peer: int
    group: Any
    device: torch.device

    @classmethod
    def over_edge(cls, ring: Ring, source: int, target: int) -> Route:
        """Returns the way to the other of two ranks, over the edge of the ring that activations from one to the other take.

        Args:
            ring: this rank's ring.
            source: place in the ring of the rank that sends activations, from 0.
            target: place of the rank that receives them; this rank is one of the two.

        Example:
            >>> ring = Ring(rank=1, world_size=4, pred=0, succ=2, ranks=(0, 1, 2, 3))
            >>> Route.over_edge(ring, 0, 1).peer, Route.over_edge(ring, 1, 2).peer, Route.over_edge(ring, 2, 1).peer
            (0, 2, 2)
        """
        size, here = len(ring.ranks), ring.ranks.index(ring.rank)
        other = target if here == source else source
        if target == (source + 1) % size:
            group = ring.succ_group if here == source else ring.pred_group
        elif source == (target + 1) % size:
            group = ring.pred_group if here == source else ring.succ_group
        else:
            group = None
        device = torch.device("cuda", ring.local_rank) if ring.comm_device == "gpu" else torch.device("cpu")
        return cls(ring.ranks[other], group, device)

    def isend(self, tensor: Tensor, tag: int = PAYLOAD_TAG) -> Posted:
        """Begins to send a tensor; does not block. Nothing is sent of a tensor without elements."""
        buffer = tensor.detach() if tensor.is_meta else tensor.detach().to(self.device)
        buffer = buffer.contiguous()
        work = dist.isend(buffer, self.peer, group=self.group, tag=tag) if buffer.numel() else None
        return Posted(work, buffer)

    def irecv(self, payload: Payload, tag: int = PAYLOAD_TAG) -> Posted:
        """Begins to receive into a buffer of its own; does not block."""
        buffer = torch.empty(payload.shape, dtype=payload.dtype, device=self.device if payload.has_data else "meta")
        work = dist.irecv(buffer, self.peer, group=self.group, tag=tag) if buffer.numel() else None
        return Posted(work, buffer)

    def irecv_header(self) -> Posted:
        """Begins to receive a header; does not block."""
        return self.irecv(Payload((HEADER_SIZE,), torch.int64), HEADER_TAG)

    def iswap(self, tensor: Tensor, tag: int) -> tuple[Posted, Posted]:
        """Begins to send a tensor and to receive one like it, in one batch; the other side does the same. Does not block.

        Returns:
            What is sent and what is received.
        """
        sent, received = tensor.detach().to(self.device).contiguous(), torch.empty_like(tensor, device=self.device)
        both: list[Any] = [dist.P2POp(op, each, self.peer, self.group, tag) for op, each in ((dist.isend, sent), (dist.irecv, received))]
        works = dist.batch_isend_irecv(both)
        # Gloo gives one handle for each operation, NCCL one for the batch.
        return Posted(works[0], sent), Posted(works[1] if len(works) > 1 else None, received)


def find_routes(ring: Ring, stage_ranks: Sequence[int]) -> Mapping[int, Route]:
    """Returns the way over each boundary between two stages that this rank has a part in.

    Args:
        ring: this rank's ring.
        stage_ranks: for each stage, the place in the ring of the rank that has it.

    Returns:
        The ways by boundary; a boundary has the number of the stage before it.

    Example:
        >>> ring = Ring(rank=1, world_size=3, pred=0, succ=2, ranks=(0, 1, 2))
        >>> {boundary: route.peer for boundary, route in find_routes(ring, (0, 1, 2, 2, 1)).items()}
        {0: 0, 1: 2, 3: 2}
    """
    here = ring.ranks.index(ring.rank)
    return {
        boundary: Route.over_edge(ring, source, target)
        for boundary, (source, target) in enumerate(pairwise(stage_ranks))
        if here in (source, target) and source != target
    }
