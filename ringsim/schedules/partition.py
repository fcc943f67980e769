"""Divides layers among stages, in contiguous, ordered ranges that cover each layer once.

::

    by_count(10, 4)          0 1 2 | 3 4 5 | 6 7 | 8 9  the remainder goes to the first stages,
                                                        one layer each
    by_count(2, 4)           0 | 1 | - | -              more stages than layers: the last ones
                                                        are empty
    by_weight([5,1,1,1], 2)  0 | 1 2 3                  5 against 3; by count it would be
                                                        6 against 2
    by_sizes([1, 3], 4)      0 | 1 2 3                  by hand

An empty stage passes on its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import add

from ringsim.errors import ArgumentError, check_integer


def by_count(num_layers: int, num_stages: int) -> list[range]:
    """Divides layers so that the sizes of the stages differ by at most one layer.

    Args:
        num_layers: the number of layers, at least 0.
        num_stages: the number of stages, at least 1.

    Returns:
        A range of layer numbers for each stage. The first ``num_layers % num_stages`` stages have
        one more layer than the others.

    Raises:
        ArgumentError: a number is too small.

    Example:
        >>> by_count(10, 4)
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    _check_num_stages(num_stages)
    check_integer("num_layers", num_layers, 0, "Pass the model's number of layers.")
    share, remainder = divmod(num_layers, num_stages)
    return _ranges([share + (stage < remainder) for stage in range(num_stages)])


def by_sizes(sizes: Sequence[int], num_layers: int) -> list[range]:
    """Assigns each stage a given number of layers, ``num_layers`` in total.

    Raises:
        ArgumentError: a size is negative, or the sizes do not add up to ``num_layers``.

    Example:
        >>> by_sizes([1, 0, 3], num_layers=4)
        [range(0, 1), range(1, 1), range(1, 4)]
    """
    _check_num_stages(len(sizes))
    if min(sizes) < 0:
        raise ArgumentError(
            f"sizes must be non-negative, got {list(sizes)}. Pass the "
            "number of layers in each stage."
        )
    if sum(sizes) != num_layers:
        raise ArgumentError(
            f"sizes must add up to the number of layers, {num_layers}, got {list(sizes)} (total "
            f"{sum(sizes)}). Assign each layer to one stage."
        )
    return _ranges(sizes)


def by_weight(
    weights: Sequence[float], num_stages: int, *, first: float = 0, last: float = 0
) -> list[range]:
    """Divides layers so that the most expensive stage is as cheap as possible.

    The other stages are as even as this allows. A pipeline is only as fast as its slowest stage, so
    if layers take different times, use this function with the times as weights.

    Args:
        weights: the weight of each layer, such as its number of parameters, its size in bytes or
            its time in seconds; must be non-negative.
        num_stages: the number of stages, at least 1.
        first: the extra weight of the first stage, for example for the embedding.
        last: the extra weight of the last stage, for example for the head.

    Returns:
        A range of layer numbers for each stage.

    Raises:
        ArgumentError: a weight is negative or not a finite number, or ``num_stages`` is less
            than 1.

    Example:
        >>> by_weight([5, 1, 1, 1], 2)
        [range(0, 1), range(1, 4)]
        >>> by_weight([1, 1, 1, 1], 2, last=2)
        [range(0, 3), range(3, 4)]
    """
    _check_num_stages(num_stages)
    for what, weight in (
        *((f"layer {layer}", weight) for layer, weight in enumerate(weights)),
        ("first", first),
        ("last", last),
    ):
        if not 0 <= weight < math.inf:
            raise ArgumentError(
                f"a weight must be finite and non-negative, got {weight} ({what}). Pass "
                "a layer's time or size."
            )
    up_to = [0, *accumulate(weights)]

    def weight_of(stage: int, start: int, stop: int) -> float:
        return (
            up_to[stop]
            - up_to[start]
            + (first if stage == 0 else 0)
            + (last if stage == num_stages - 1 else 0)
        )

    heaviest, _ = _best_cuts(len(weights), num_stages, weight_of, max)

    def unevenness(stage: int, start: int, stop: int) -> float:
        weight = weight_of(stage, start, stop)
        return weight * weight if weight <= heaviest else math.inf

    _, cuts = _best_cuts(len(weights), num_stages, unevenness, add)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _best_cuts(
    num_layers: int,
    num_stages: int,
    cost_of: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Returns the lowest combined cost of all stages, and the cuts that achieve it.

    Stage s holds the layers from cut s to cut s + 1. The function uses dynamic programming:
    ``best[n]`` is the lowest cost of dividing the first n layers among the stages so far. One more
    stage takes the layers from k to n, in addition to the best division of the first k. If several
    k are equally good, the largest is chosen, so that early stages get more layers.
    """
    best: list[float] = [0.0] + [math.inf] * num_layers
    starts_of_stages = []
    for stage in range(num_stages):
        candidates = [
            [(join(best[k], cost_of(stage, k, n)), -k) for k in range(n + 1)]
            for n in range(num_layers + 1)
        ]
        starts_of_stages.append([-min(row)[1] for row in candidates])
        best = [min(row)[0] for row in candidates]
    cuts = [num_layers]
    for starts in reversed(starts_of_stages):
        cuts.append(starts[cuts[-1]])
    return best[num_layers], cuts[::-1]


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _check_num_stages(num_stages: int) -> None:
    check_integer("num_stages", num_stages, 1, "Pass the model's number of stages.")
