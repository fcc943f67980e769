"""Our own `SmallTransformer`: the example of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ringsim.pipeline.adapters.protocol import Adapter, Announced
from ringsim.pipeline.transformer import Block, KeyValueCache, SmallTransformer, causal_mask

__all__ = ["SmallTransformerAdapter"]


class SmallTransformerAdapter(Adapter):
    """A `SmallTransformer`.

    Example:
        >>> model = SmallTransformer(vocab_size=11, hidden_size=8, num_layers=3, num_heads=2)
        >>> len(SmallTransformerAdapter().layers(model))
        3
    """

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the blocks."""
        return list(_small(model).blocks)

    def first_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the two embeddings and their dropout."""
        small = _small(model)
        return [small.embedding, small.positions, small.dropout]

    def last_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the last norm and the head."""
        small = _small(model)
        return [small.norm, small.head]

    def embed(self, model: nn.Module, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns embedding plus position embedding."""
        return _small(model).embed(token_ids, announced.positions(token_ids.shape[1], token_ids.device))

    def context(self, model: nn.Module, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask, where there is padding or a past, and the cache."""
        mask = announced.attention_mask
        announced.num_seen(hidden.shape[1])
        return {"mask": None if mask is None else causal_mask(mask, hidden.shape[1]), "cache": announced.cache}

    def attention_width(self, model: nn.Module, layer: nn.Module) -> int:
        """Returns how wide the attention is."""
        return cast(Block, layer).attention.out.in_features

    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        return _small(model).finish(hidden)

    def cache(self, model: nn.Module) -> KeyValueCache:
        """Returns an empty cache."""
        return KeyValueCache()


def _small(model: nn.Module) -> SmallTransformer:
    return cast(SmallTransformer, model)
