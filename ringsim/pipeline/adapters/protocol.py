"""How a pipeline sees any model: embed -> layers -> head.

::

    first stage            every stage                      last stage
    token ids --embed--> hidden --layer, layer, ...--> hidden --head--> logits
                                      ^
                                   context: rotary tables, masks: computed on each rank from what it knows, never sent

An adapter says where these parts are in one kind of model, and how they are called. It holds nothing: the model is passed in each time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError

__all__ = ["Adapter", "Announced"]


@dataclass(frozen=True)
class Announced:
    """What every rank knows of a microbatch without being sent it.

    Attributes:
        attention_mask: 1 for a token, 0 for padding, shape (batch, tokens so far); None: no padding, and nothing came before.
        position_ids: place of each new token in its sequence, shape (batch or 1, new tokens); None: as the model counts by itself.
        cache: keys and values of the tokens before, from `Adapter.cache`; None: there are none.

    Example:
        >>> Announced(attention_mask=torch.ones(2, 7), cache={}).num_seen(new_tokens=1)
        6
    """

    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cache: Any = None

    def num_seen(self, new_tokens: int) -> int:
        """Returns how many tokens of each sequence came before the new ones.

        The mask says it, not the cache: a stage without layers has no cache to ask.

        Args:
            new_tokens: how many are new.

        Raises:
            ArgumentError: there is a cache but no mask.
        """
        if self.attention_mask is not None:
            return self.attention_mask.shape[1] - new_tokens
        if self.cache is not None:
            raise ArgumentError(
                "attention_mask must be given with a cache, got None. Pass ones of shape (batch, tokens so far, the new ones included)."
            )
        return 0

    def places(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns the places that the new tokens take in the cache, shape (new tokens,)."""
        seen = self.num_seen(new_tokens)
        return torch.arange(seen, seen + new_tokens, device=device)

    def positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns ``position_ids``, or where there are none, the places; shape (batch or 1, new tokens)."""
        return self.places(new_tokens, device)[None] if self.position_ids is None else self.position_ids


class Adapter(ABC):
    """How to see one kind of model as embed -> layers -> head; subclass it for a model of your own.

    Example:
        >>> class MyModelAdapter(Adapter):
        ...     def layers(self, model):
        ...         return model.blocks
        ...     def first_modules(self, model):
        ...         return [model.embedding]
        ...     def last_modules(self, model):
        ...         return [model.head]
        ...     def embed(self, model, token_ids, announced):
        ...         return model.embedding(token_ids)
        ...     def head(self, model, hidden):
        ...         return model.head(hidden)
    """

    @abstractmethod
    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the layers that stages are made of, in order; they are called as modules, so that users' hooks fire."""

    def first_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules that only the first stage runs, those of `embed`."""
        return []

    def last_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules that only the last stage runs, those of `head`."""
        return []

    @abstractmethod
    def embed(self, model: nn.Module, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns what enters the first layer; the first stage calls it.

        Args:
            model: the whole model.
            token_ids: shape (batch, tokens), int64.
            announced: what is known of the microbatch; learned positions need it.
        """

    def context(self, model: nn.Module, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the keyword arguments of every layer (masks, rotary tables, the cache); each stage with layers calls it.

        Args:
            model: the whole model.
            hidden: what enters this stage's first layer, shape (batch, tokens, hidden): its shape, dtype and device count.
            announced: what is known of the microbatch.
        """
        return {}

    def run_layer(self, model: nn.Module, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states after one layer.

        Args:
            model: the whole model.
            layer: one of `layers`.
            hidden: shape (batch, tokens, hidden).
            context: from `context`.
        """
        return layer(hidden, **context)  # type: ignore[no-any-return]

    def attention_width(self, model: nn.Module, layer: nn.Module) -> int:
        """Returns how wide the attention of a layer is, heads of queries times the size of a head; 0 for a layer without.

        Args:
            model: the whole model.
            layer: one of `layers`.
        """
        return 0

    @abstractmethod
    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the logits; the last stage calls it.

        Args:
            model: the whole model.
            hidden: what left the last layer, shape (batch, tokens, hidden).
        """

    def cache(self, model: nn.Module) -> Any:
        """Returns an empty cache of keys and values for one rank's layers, for generation.

        Raises:
            ArgumentError: models of this kind do not generate.
        """
        raise ArgumentError(
            f"a model that generates must have a cache, got {type(model).__name__}, whose adapter has none. "
            "Write the method `cache` of its adapter."
        )
