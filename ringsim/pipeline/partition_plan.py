"""How layers are shared out to stages: contiguous ranges, in order, each layer in exactly one of them.

::

    by_count(10, 4)          0 1 2 | 3 4 5 | 6 7 | 8 9         the remainder goes to the first stages, one layer each
    by_count(2, 4)           0 | 1 | - | -                     more stages than layers: the last ones are empty
    by_weight([5,1,1,1], 2)  0 | 1 2 3                         5 against 3; by count it would be 6 against 2

An empty stage is a stage all the same: it passes on what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ringsim.errors import ArgumentError

__all__ = ["by_count", "by_sizes", "by_weight"]


def by_count(num_layers: int, num_stages: int) -> list[range]:
    """Shares out layers so that no two stages differ by more than one layer.

    Args:
        num_layers: how many layers there are, 0 or more.
        num_stages: how many stages there are, 1 or more.

    Returns:
        A range of layer numbers for each stage. The first ``num_layers % num_stages`` stages hold one layer more than the others.

    Raises:
        ArgumentError: a number is too small.

    Example:
        >>> by_count(10, 4)
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    _check_num_stages(num_stages)
    if num_layers < 0:
        raise ArgumentError(f"num_layers must be 0 or more, got {num_layers}. Pass the number of the model's layers.")
    share, remainder = divmod(num_layers, num_stages)
    return _ranges([share + (stage < remainder) for stage in range(num_stages)])


def by_sizes(sizes: Sequence[int], num_layers: int) -> list[range]:
    """Gives each stage as many layers as somebody has decided.

    Args:
        sizes: number of layers of each stage, 0 or more each.
        num_layers: how many layers there are; ``sizes`` must add up to it, so that no layer is lost.

    Returns:
        A range of layer numbers for each stage.

    Raises:
        ArgumentError: a size is negative, or they do not add up.

    Example:
        >>> by_sizes([1, 0, 3], num_layers=4)
        [range(0, 1), range(1, 1), range(1, 4)]
    """
    _check_num_stages(len(sizes))
    if min(sizes) < 0:
        raise ArgumentError(f"sizes must be 0 or more each, got {list(sizes)}. Say how many layers each stage holds.")
    if sum(sizes) != num_layers:
        raise ArgumentError(f"sizes must add up to {num_layers} layers, got {list(sizes)} = {sum(sizes)}. Give each layer to one stage.")
    return _ranges(sizes)


def by_weight(weights: Sequence[float], num_stages: int) -> list[range]:
    """Shares out layers so that the heaviest stage is as light as can be.

    A pipeline is as fast as its slowest stage, so this is the cut to take where layers differ, with their times as weights.

    Args:
        weights: what each layer weighs (parameters, bytes, seconds), 0 or more each.
        num_stages: how many stages there are, 1 or more.

    Returns:
        A range of layer numbers for each stage.

    Raises:
        ArgumentError: a weight is negative or not a finite number, or ``num_stages`` is less than 1.

    Example:
        >>> by_weight([5, 1, 1, 1], 2)
        [range(0, 1), range(1, 4)]
    """
    _check_num_stages(num_stages)
    for layer, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise ArgumentError(f"a weight must be a finite number, 0 or more, got {weight} (layer {layer}). Pass what each layer weighs.")
    cuts = _lightest_cuts(weights, num_stages)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _lightest_cuts(weights: Sequence[float], num_stages: int) -> list[int]:
    """Returns ``num_stages + 1`` cut positions, by dynamic programming over the layers that are already shared out.

    ``heaviest[n]`` is the heaviest stage when the first n layers are shared out over the stages seen so far. One more stage takes layers
    [k, n) on top of the best sharing of the first k. Among equal cuts the one with more even counts wins.
    """
    total = [0.0, *accumulate(weights)]
    num_layers = len(weights)
    even = [piece.stop for piece in by_count(num_layers, num_stages)]
    heaviest = [0.0] + [math.inf] * num_layers
    last_cuts: list[list[int]] = []
    for stage in range(num_stages):
        cuts = []
        for n in range(num_layers + 1):
            wanted = even[stage - 1] if stage else 0
            cuts.append(min(range(n + 1), key=lambda k: (max(heaviest[k], total[n] - total[k]), abs(k - wanted))))
        heaviest = [max(heaviest[k], total[n] - total[k]) for n, k in enumerate(cuts)]
        last_cuts.append(cuts)
    found = [num_layers]
    for cuts in reversed(last_cuts):
        found.append(cuts[found[-1]])
    return found[::-1]


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def _check_num_stages(num_stages: int) -> None:
    if num_stages < 1:
        raise ArgumentError(f"num_stages must be 1 or more, got {num_stages}. Say how many stages the model is cut into.")
