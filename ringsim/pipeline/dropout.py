"""Dropout that can be repeated: the same masks on any number of ranks, in any schedule, and when an activation is computed again.

Random numbers are drawn in the order of the computation, which every schedule changes. Here each layer gets, for each microbatch, a seed of
its own::

    seed, microbatch 2, layer 5  -->  the masks of layer 5 for microbatch 2, wherever and whenever they are drawn
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.pipeline.adapters.protocol import Adapter, Announced

__all__ = ["SeededAdapter"]


class SeededAdapter(Adapter):
    """Sees a model as another adapter does, and seeds the random numbers of each of its parts.

    Those of the rank itself go on as if nothing had been drawn.

    Args:
        adapter: the model's own.
        model: the whole model.
        seed: the same on every rank; another one for each step, or all steps drop the same.

    Attributes:
        microbatch: the one that is computed now; to be set before each.

    Example:
        >>> from ringsim.pipeline.adapters.lookup import adapter_of
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout())
        >>> adapter = SeededAdapter(adapter_of(model), model, seed=7)
        >>> first, again = (adapter.run_layer(model, model[0], torch.ones(8), {}) for _ in range(2))
        >>> bool((first == again).all()), bool((first == adapter.run_layer(model, model[1], torch.ones(8), {})).all())
        (True, False)
    """

    def __init__(self, adapter: Adapter, model: nn.Module, seed: int) -> None:
        self._adapter = adapter
        self._seed = seed
        self._places = {layer: place for place, layer in enumerate(adapter.layers(model), start=1)}  # 0 is the embedding
        self.microbatch = 0

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the layers."""
        return self._adapter.layers(model)

    def first_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules of the first stage alone."""
        return self._adapter.first_modules(model)

    def last_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules of the last stage alone."""
        return self._adapter.last_modules(model)

    def embed(self, model: nn.Module, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns what enters the first layer."""
        with self._seeded(0, token_ids):
            return self._adapter.embed(model, token_ids, announced)

    def context(self, model: nn.Module, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the keyword arguments of the layers."""
        return self._adapter.context(model, hidden, announced)

    def run_layer(self, model: nn.Module, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states after one layer."""
        with self._seeded(self._places[layer], hidden):
            return self._adapter.run_layer(model, layer, hidden, context)

    def attention_width(self, model: nn.Module, layer: nn.Module) -> int:
        """Returns how wide the attention is."""
        return self._adapter.attention_width(model, layer)

    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        with self._seeded(len(self._places) + 1, hidden):
            return self._adapter.head(model, hidden)

    @contextmanager
    def _seeded(self, place: int, where: Tensor) -> Iterator[None]:
        with torch.random.fork_rng(devices=[where.device] if where.is_cuda else []):
            torch.manual_seed(zlib.crc32(f"{self._seed} {self.microbatch} {place}".encode()))
            yield
