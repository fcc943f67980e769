"""Cutting a model: which layers each stage gets.

::

    partition_model(model, 2)                     the same number of layers for each stage, give or take one
    partition_model(model, 2, by="parameters")    the fewest parameters in the largest stage; embedding and head counted
    partition_model(model, 2, by=[3, 1])          by hand
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters.lookup import adapter_of
from ringsim.pipeline.adapters.protocol import Adapter
from ringsim.pipeline.partition_plan import by_count, by_sizes

__all__ = ["get_stage_layers", "partition_model"]


def partition_model(model: nn.Module, num_stages: int, by: str | Sequence[int] = "count", *, adapter: Adapter | None = None) -> list[range]:
    """Cuts a model's layers into contiguous ranges, one for each stage.

    Args:
        model: the whole model.
        num_stages: how many stages, 1 or more. With more stages than layers some are empty: they pass on what they get.
        by: "count", or the number of layers of each stage.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        A range of layer numbers for each stage, in order; together they hold every layer once.

    Raises:
        ArgumentError: ``by`` is none of these, or its numbers do not fit.

    Example:
        >>> partition_model(nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]), 2)
        [range(0, 3), range(3, 5)]
    """
    adapter = adapter or adapter_of(model)
    num_layers = len(adapter.layers(model))
    if by == "count":
        return by_count(num_layers, num_stages)
    if isinstance(by, str):
        raise ArgumentError(f'by must be "count" or a list of layer counts, got {by!r}. Choose one.')
    if len(by) != num_stages:
        raise ArgumentError(f"by must have one number for each of {num_stages} stages, got {list(by)}. Say how many layers each holds.")
    return by_sizes(by, num_layers)


def get_stage_layers(model: nn.Module, layers: range, *, adapter: Adapter | None = None) -> list[nn.Module]:
    """Returns the layers of one stage: the model's own modules, not copies.

    Args:
        model: the whole model.
        layers: which layers, one of the ranges of `partition_model`.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        The modules, in order.

    Example:
        >>> get_stage_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), range(1, 2))
        [ReLU()]
    """
    return list((adapter or adapter_of(model)).layers(model)[layers.start : layers.stop])
