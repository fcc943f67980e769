"""Data parallel around pipelines: several rings in one world, each with the whole model and its own share of the batch.

::

    ring 0:  rank 0 -> rank 1        each ring runs a step on its microbatches, then
             |         |             the ranks of one column, which have the same stages, average their gradients
    ring 1:  rank 2 -> rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.ring import current_ring

__all__ = ["average_gradients", "new_replica_group"]


def new_replica_group(rings: Sequence[Sequence[int]]) -> Any:
    """Makes the group of this rank and those at its place in the other rings.

    Every rank of the world calls it, with the same rings, once; it blocks as ``new_group`` does.

    Args:
        rings: the global ranks of each ring in order, as ``ring_ranks`` of ``initialize_distributed`` says them; all of one length.

    Returns:
        The group, for `average_gradients`; None on a rank that is in no ring.

    Raises:
        ArgumentError: the rings differ in length.
        RingError: this rank has no ring yet.

    Example:
        See `average_gradients`.
    """
    if len({len(ring) for ring in rings}) != 1:
        raise ArgumentError(f"rings must have as many ranks each, got {[len(ring) for ring in rings]}. Their stages must be the same.")
    mine, limit = None, timedelta(seconds=current_ring().timeout_s)
    for column in zip(*rings, strict=True):
        group = dist.new_group(list(column), timeout=limit)
        if dist.get_rank() in column:
            mine = group
    return mine


def average_gradients(model: nn.Module, group: Any) -> None:
    """Averages this rank's gradients with those of the ranks that have the same stages.

    Every rank of every ring calls it after a step, before gradients are clipped; it blocks until those of its group have. The rings' losses
    are not averaged.

    Args:
        model: the whole model; parameters without a gradient are other ranks'.
        group: from `new_replica_group`.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     group = new_replica_group([[0], [1]])  # two pipelines of one rank each
        ...     model = nn.Linear(1, 1, bias=False)
        ...     model.weight.grad = torch.full((1, 1), float(ringsim.current_ring().rank))
        ...     average_gradients(model, group)
        ...     return model.weight.grad.item()
        >>> ringsim.trace(worker, world_size=2).results
        [0.5, 0.5]
    """
    size = dist.get_world_size(group)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in by_kind.values():  # one message for all of a kind
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= size
        for gradient, averaged in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))
