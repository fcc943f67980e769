"""Cutting a model: which layers each stage gets.

::

    partition_model(model, 2)                            as many layers for each stage, give or take one
    partition_model(model, 2, by="parameters")           the largest stage has as few parameters as can be
    partition_model(model, 2, by="time", sample=ids)     the slowest stage is as fast as can be
    partition_model(model, 2, by=[3, 1])                 by hand

The last three count that the first stage holds the embedding too, and the last one the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters.lookup import adapter_of
from ringsim.pipeline.adapters.protocol import Adapter
from ringsim.pipeline.layer_times import measure_times
from ringsim.pipeline.stage import Stage, build_stages
from ringsim.schedules.partition import by_count, by_sizes, by_weight

__all__ = ["get_stage_layers", "partition_model"]


def partition_model(
    model: nn.Module,
    num_stages: int,
    by: str | Sequence[int] = "count",
    *,
    sample: Tensor | None = None,
    adapter: Adapter | None = None,
) -> list[range]:
    """Cuts a model's layers into contiguous ranges, one for each stage.

    All ranks must cut the same way. With "time" two processes measure two different things: measure in one, and pass the ranges on.

    Args:
        model: the whole model.
        num_stages: how many stages, 1 or more. With more stages than layers some are empty: they pass on what they get.
        by: "count", "parameters", "time", or the number of layers of each stage.
        sample: a microbatch's input, for "time": token ids of shape (batch, tokens), or whatever the model takes.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        A range of layer numbers for each stage, in order; together they hold every layer once.

    Raises:
        ArgumentError: ``by`` is none of these, its numbers do not fit, or ``sample`` is missing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 200), nn.Linear(200, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> partition_model(model, 2)
        [range(0, 3), range(3, 5)]
        >>> partition_model(model, 2, by="parameters")
        [range(0, 1), range(1, 5)]
        >>> partition_model(model, 2, by=[4, 1])
        [range(0, 4), range(4, 5)]
    """
    adapter = adapter or adapter_of(model)
    num_layers = len(adapter.layers(model))
    if not isinstance(by, str):
        if len(by) != num_stages:
            raise ArgumentError(f"by must have a number for each of {num_stages} stages, got {list(by)}. Say how many layers each holds.")
        return by_sizes(by, num_layers)
    if by == "count":
        return by_count(num_layers, num_stages)
    parts = _parts(model, num_layers, adapter)
    if by == "parameters":
        first, *weights, last = [float(sum(parameter.numel() for parameter in part.parameters())) for part in parts]
    elif by == "time":
        if sample is None:
            raise ArgumentError('sample must be given with by="time", got None. Pass the input of one microbatch.')
        first, *weights, last = measure_times(parts, sample)
    else:
        raise ArgumentError(f'by must be "count", "parameters", "time" or a list of layer counts, got {by!r}. Choose one.')
    return by_weight(weights, num_stages, first=first, last=last)


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


def _parts(model: nn.Module, num_layers: int, adapter: Adapter) -> list[Stage]:
    """Returns what a cut can part, each as a stage: the embedding, each layer, the head."""
    layers = [range(layer, layer + 1) for layer in range(num_layers)]
    return build_stages(model, [range(0), *layers, range(num_layers, num_layers)], adapter=adapter)
