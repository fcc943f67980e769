"""Splits a model into stages, each with its own layers.

::

    partition_model(model, 2)                            stages differ by at most one layer
    partition_model(model, 2, by="parameters")           the largest stage has as few parameters as
                                                         possible
    partition_model(model, 2, by="time", sample=ids)     the slowest stage is as fast as possible
    partition_model(model, 2, by=[3, 1])                 by hand

"parameters" and "time" count the embedding in the first stage and the head in the last stage. For
"time", each part of the model runs forward and backward on a sample::

    embed | layer 0 | layer 1 | ... | head
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters import Adapter, adapter_of
from ringsim.pipeline.stage import Stage, build_stages, keep_random_numbers
from ringsim.schedules.partition import by_count, by_sizes, by_weight

_REPEATS = 5  # the fastest run counts; the first run also loads kernels and fills caches


def measure_times(parts: Sequence[Stage], sample: Tensor) -> list[float]:
    """Measures how long each part of a model takes, forward and backward, in seconds.

    Each part gets the output of the previous part. The first part gets the sample, which should be
    as large as a microbatch in training. Gradients and the state of random numbers do not change.
    The fastest of a few runs counts, because noise only makes runs slower.

    Example:
        >>> from ringsim.pipeline import build_stages
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> len(measure_times(build_stages(model, [range(0, 1), range(1, 2)]), torch.ones(4, 2)))
        2
    """
    times_s = []
    with keep_random_numbers(sample):
        for part in parts:
            runs = [_run(part, sample) for _ in range(_REPEATS)]
            times_s.append(min(duration_s for duration_s, _ in runs))
            sample = runs[-1][1]
    return times_s


def _run(part: Stage, x: Tensor) -> tuple[float, Tensor]:
    x = x.detach().requires_grad_(x.is_floating_point())
    wanted = [tensor for tensor in (x, *part.parameters()) if tensor.requires_grad]
    start_s = time.perf_counter()
    with torch.enable_grad():
        y = part(x)
    if y.requires_grad:
        # unlike backward(), this does not change .grad
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    if y.is_cuda:
        # kernels continue after the call; waiting for them is safe here, because no recording runs
        torch.cuda.synchronize()
    return time.perf_counter() - start_s, y.detach()


def partition_model(
    model: nn.Module,
    num_stages: int,
    by: str | Sequence[int] | Sequence[range] = "count",
    *,
    sample: Tensor | None = None,
    adapter: Adapter | None = None,
) -> list[range]:
    """Splits a model's layers into contiguous ranges, one per stage.

    All ranks must use the same partition. With "time", each process measures different times, so
    measure in one process and pass the ranges to the others.

    Args:
        model: the whole model.
        num_stages: the number of stages, at least 1. If there are more stages than layers, some
            stages are empty and pass on their input.
        by: "count", "parameters", "time", the number of layers in each stage, or the ranges
            themselves.
        sample: the input of one microbatch, for "time": token ids of shape (batch, tokens), or any
            other input that the model accepts.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        A range of layer numbers for each stage, in order. Together, the ranges contain every layer
        once.

    Raises:
        ArgumentError: ``by`` is invalid, its numbers do not fit the model, or ``sample`` is
            missing.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Linear(2, 200),
        ...     nn.Linear(200, 2),
        ...     nn.Linear(2, 2),
        ...     nn.Linear(2, 2),
        ...     nn.Linear(2, 2),
        ... )
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
            raise ArgumentError(
                f"by must be a list with one number per stage ({num_stages}), got {list(by)}. "
                "Pass the number of layers in each stage."
            )
        sizes = [len(each) if isinstance(each, range) else each for each in by]
        return by_sizes(sizes, num_layers)
    if by == "count":
        return by_count(num_layers, num_stages)
    layers = [range(layer, layer + 1) for layer in range(num_layers)]
    # the embedding, each layer, and the head
    parts = build_stages(model, [range(0), *layers, range(num_layers, num_layers)], adapter=adapter)
    if by == "parameters":
        first, *weights, last = [
            float(sum(parameter.numel() for parameter in part.parameters())) for part in parts
        ]
    elif by == "time":
        if sample is None:
            raise ArgumentError(
                'sample is required with by="time", got None. Pass the input of one microbatch.'
            )
        first, *weights, last = measure_times(parts, sample)
    else:
        raise ArgumentError(
            'by must be "count", "parameters", "time" or a list of layer '
            f"counts, got {by!r}. Use one of these."
        )
    return by_weight(weights, num_stages, first=first, last=last)


def get_stage_layers(
    model: nn.Module, layers: range, *, adapter: Adapter | None = None
) -> list[nn.Module]:
    """Returns one stage's layers, which are the model's own modules, not copies.

    Args:
        model: the whole model.
        layers: the numbers of the layers, as one of the ranges from `partition_model`.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The modules of the layers, in order.

    Example:
        >>> get_stage_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), range(1, 2))
        [ReLU()]
    """
    return list((adapter or adapter_of(model)).layers(model)[layers.start : layers.stop])
