"""What the ranks of a ring tell each other at the end of a step: the loss, the gradients of tied parameters, the size of all gradients.

Everything goes over the pair groups, so that a ring needs no group of all its ranks, and several rings in one world do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringsim.pipeline.headers import Payload
from ringsim.pipeline.routes import SHARED_TAG, Route
from ringsim.ring import Ring

__all__ = ["gather_over_ring", "pass_back", "sum_over"]


def pass_back(ring: Ring, value: Tensor, owner: int) -> Tensor:
    """Tells every rank what one of them knows; every rank of the ring calls it, and it blocks until the neighbours have.

    It goes from rank to rank against the ring, like the gradients: the last stage, which knows the loss, is also the first to finish::

        rank 0 <--- rank 1 <--- rank 2 <--- rank 3, the owner

    Args:
        ring: this rank's ring.
        value: the owner's value; the others pass a tensor of the same shape and dtype.
        owner: place in the ring of the rank that knows.

    Returns:
        The owner's value.

    Example:
        >>> import torch
        >>> pass_back(Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), torch.tensor(2.5), owner=0)
        tensor(2.5000)
    """
    here, size = ring.ranks.index(ring.rank), len(ring.ranks)
    pred, succ = (here - 1) % size, (here + 1) % size
    if here != owner:
        value = Route.over_edge(ring, here, succ).irecv(Payload.of(value), SHARED_TAG).wait()
    if pred != owner:
        Route.over_edge(ring, pred, here).isend(value, SHARED_TAG).wait()
    return value


def gather_over_ring(ring: Ring, value: Tensor) -> list[Tensor]:
    """Tells every rank what each of them knows; every rank of the ring calls it, and it blocks until all have.

    In N - 1 rounds, each rank passes on to its successor what it got in the round before.

    Args:
        ring: this rank's ring.
        value: this rank's value, of the same shape and dtype everywhere.

    Returns:
        The values by place in the ring.

    Example:
        >>> import torch
        >>> gather_over_ring(Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), torch.tensor(2.5))
        [tensor(2.5000)]
    """
    here, size = ring.ranks.index(ring.rank), len(ring.ranks)
    values = {here: value}
    for distance in range(1, size):
        sent = Route.over_edge(ring, here, (here + 1) % size).isend(values[(here - distance + 1) % size], SHARED_TAG)
        received = Route.over_edge(ring, (here - 1) % size, here).irecv(Payload.of(value), SHARED_TAG)
        values[(here - distance) % size] = received.wait()
        sent.wait()
    return [values[place].to(value.device) for place in range(size)]


def sum_over(ring: Ring, places: Sequence[int], value: Tensor) -> Tensor:
    """Adds up what some ranks of the ring have; each of them calls it, and it blocks until they have.

    Args:
        ring: this rank's ring.
        places: places in the ring of these ranks, in increasing order; this rank's is among them.
        value: this rank's share.

    Returns:
        The sum, the same to the last bit on each of them: all add in the order of the places.

    Example:
        >>> import torch
        >>> sum_over(Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), [0], torch.tensor(2.5))
        tensor(2.5000)
    """
    here = ring.ranks.index(ring.rank)
    others = [place for place in places if place != here]
    swaps = {place: Route.over_edge(ring, min(here, place), max(here, place)).iswap(value, SHARED_TAG) for place in others}
    shares = {here: value}
    for place, (sent, received) in swaps.items():
        sent.wait()
        shares[place] = received.wait().to(value.device)
    total = shares[places[0]].clone()
    for place in places[1:]:
        total += shares[place]
    return total
