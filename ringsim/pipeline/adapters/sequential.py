"""``nn.Sequential``: its children are the layers; there is nothing before and nothing after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from ringsim.pipeline.adapters.protocol import Adapter, Announced

__all__ = ["SequentialAdapter"]


class SequentialAdapter(Adapter):
    """An ``nn.Sequential``. Its first child takes the input, token ids or anything else; its last child makes the output.

    Example:
        >>> SequentialAdapter().layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))[1]
        ReLU()
    """

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the children; ``children()`` would leave out a module that stands there a second time."""
        return list(cast(nn.Sequential, model))

    def embed(self, model: nn.Module, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the input as it is."""
        return token_ids

    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the output of the last child as it is."""
        return hidden
