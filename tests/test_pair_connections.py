"""The connection of a ring's pairs if the first message blocks, as on NCCL."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim import current_ring
from ringsim.errors import Deadlock
from ringsim.ring import groups

LINK = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.0)


class Lazy:
    """Messages that connect like NCCL's.

    A group's first message in each direction blocks its caller, even an irecv, until the other side
    arrives.
    """

    all_reduce = staticmethod(dist.all_reduce)

    def __init__(self) -> None:
        self._met: set[object] = set()

    def post(self, what: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        if (what, group) not in self._met:
            self._met.add((what, group))
            (dist.send if what is dist.isend else dist.recv)(torch.zeros(1), peer, group=group)
        return what(tensor, peer, group=group)

    def send(self, tensor: torch.Tensor, peer: int, group: Any) -> None:
        self.post(dist.isend, tensor, peer, group).wait()

    def recv(self, tensor: torch.Tensor, peer: int, group: Any) -> None:
        self.post(dist.irecv, tensor, peer, group).wait()


def connect(messages: Any) -> None:
    ring = current_ring()
    pair = ring.pred_group, ring.succ_group
    groups.connect(ring.rank, ring.ranks, pair, torch.zeros(1), messages)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("step", [-1, 1])
def test_once_pairs_have_connected_every_rank_may_receive_first(size: int, step: int) -> None:
    def receive_first(*, connected: bool) -> float:
        ring, lazy, arriving = current_ring(), Lazy(), torch.zeros(1)
        if connected:
            connect(lazy)
        ends = [(ring.pred, ring.pred_group), (ring.succ, ring.succ_group)]
        source, target = ends[::-step]
        works = [
            lazy.post(dist.irecv, arriving, *source),
            lazy.post(dist.isend, torch.tensor([float(ring.rank)]), *target),
        ]
        for work in works:
            work.wait()
        return float(arriving)

    run = functools.partial(ringsim.simulate, receive_first, world_size=size, link=LINK)
    assert run(kwargs={"connected": True}).results == [(rank + step) % size for rank in range(size)]
    with pytest.raises(Deadlock):
        run(kwargs={"connected": False})


@pytest.mark.parametrize(("size", "exchanges"), [(1, 0), (2, 2), (3, 3), (64, 2), (65, 3)])
def test_pairs_connect_edge_by_edge(size: int, exchanges: int) -> None:
    """An exchange is a message each way and an all_reduce of two ranks: four latencies in total."""
    trace = ringsim.simulate(connect, world_size=size, args=(dist,), link=LINK)
    assert trace.makespan_s == 4 * exchanges
