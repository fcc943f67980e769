"""Parameters that stages on several ranks use, such as a weight shared by embedding and head.

Each of these ranks finds the gradient of its own use. That of the parameter is the sum::

    rank 0, embedding:  g0 --.
                              +--> g0 + g1 on both; their optimizers then do the same
    rank 1, head:       g1 --'
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ringsim.pipeline.sharing import sum_over
from ringsim.pipeline.stage import Stage
from ringsim.ring import Ring

__all__ = ["TiedGradients"]


class TiedGradients:
    """Adds up the gradients of tied parameters; a block around the passes of a step.

    Every rank that holds such a parameter enters it, and leaving it blocks until they all do. What was accumulated before the block is put
    aside: it has been added up already.

    Args:
        ring: this rank's ring; in a ring of one there is nothing to do.
        stages: all stages of the model.
        stage_ranks: for each stage, the place of its rank in the ring.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> with TiedGradients(Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), stages=[], stage_ranks=[]):
        ...     layer(torch.ones(1)).backward()
        >>> layer.weight.grad
        tensor([[1.]])
    """

    def __init__(self, ring: Ring, stages: Sequence[Stage], stage_ranks: Sequence[int]) -> None:
        self._ring = ring
        self._shared = _find_shared(stages, stage_ranks, ring.ranks.index(ring.rank))
        self._before: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._before = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for (parameter, places), before in zip(self._shared, self._before, strict=True):
            if kind is None:
                share = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = sum_over(self._ring, places, share)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad


def _find_shared(stages: Sequence[Stage], stage_ranks: Sequence[int], here: int) -> list[tuple[nn.Parameter, list[int]]]:
    """Returns the parameters that the rank at ``here`` shares, in one order everywhere, with the places of all their holders."""
    places: dict[nn.Parameter, set[int]] = {}
    for stage, place in zip(stages, stage_ranks, strict=True):
        for parameter in stage.parameters():
            places.setdefault(parameter, set()).add(place)
    return [(parameter, sorted(held)) for parameter, held in places.items() if len(held) > 1 and here in held and parameter.requires_grad]
