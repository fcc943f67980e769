"""A trained pipeline as one model again: whole on every rank, or each rank's part, for a checkpoint in shards.

::

    rank 0: layers 0, 1 new, the rest as it began --.
                                                     +--> tensor by tensor, from the rank that trains it, into every rank's own model
    rank 1: layers 2, 3 new, the rest as it began --'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.pipeline.adapters import Adapter
from ringsim.pipeline.messages import find_ring
from ringsim.pipeline.partition import partition_model, read_partition
from ringsim.pipeline.sharing import pass_back
from ringsim.pipeline.stage import build_stages
from ringsim.schedules import make_schedule
from ringsim.schedules.schedule import Schedule

__all__ = ["pipeline_state_dict"]


def pipeline_state_dict(
    model: nn.Module,
    *,
    gather: bool = True,
    schedule: str | Schedule = "1f1b",
    partition: str | Sequence[int] | Sequence[range] = "count",
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """Returns the trained model's ``state_dict``, with the keys of the model itself, although each rank has trained only its stages.

    Every rank of the ring calls it with the same arguments, those of its steps, and it blocks until all have. What other ranks have trained
    is copied into this rank's model, one tensor at a time, so nothing is held twice: afterwards the model is whole everywhere.

    Args:
        model: the whole model; each rank has trained the stages that are its own.
        gather: False makes no message and leaves the model as it is; the result has what this rank trains alone, for
            ``torch.distributed.checkpoint``. Loading into it changes the model.
        schedule: that of the steps; says which rank has which stage.
        partition: that of the steps.
        adapter: that of the steps.

    Returns:
        What ``model.state_dict()`` returns, or with ``gather=False`` this rank's part of it, with every tied parameter
        that it uses.

    Raises:
        ArgumentError: the partition does not fit the model.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     rank = ringsim.current_ring().rank
        ...     model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        ...     nn.init.constant_(model[rank].weight, 10 + rank)  # as if it had been trained
        ...     return list(pipeline_state_dict(model, gather=False)), [each.item() for each in pipeline_state_dict(model).values()]
        >>> ringsim.trace(worker, world_size=2).results
        [(['0.weight'], [10.0, 11.0]), (['1.weight'], [10.0, 11.0])]
    """
    ring = find_ring()
    here = ring.ranks.index(ring.rank)
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, len(ring.ranks), 1)
    ranges = partition_model(model, schedule.num_stages, by=read_partition(partition), adapter=adapter)
    places: dict[Tensor, set[int]] = {}
    for stage, place in zip(build_stages(model, ranges, adapter=adapter), schedule.stage_ranks, strict=True):
        for tensor in (*stage.parameters(), *stage.buffers()):
            places.setdefault(tensor, set()).add(place)
    tensors = model.state_dict(keep_vars=True)  # the model's own
    if not gather:
        return {key: value for key, value in model.state_dict().items() if here in places.get(tensors[key], {here})}
    with torch.no_grad():
        for tensor in dict.fromkeys(each for each in tensors.values() if each in places):
            trained = pass_back(ring, tensor.detach(), owner=min(places[tensor]))
            if here not in places[tensor]:
                tensor.copy_(trained)
    return model.state_dict()
