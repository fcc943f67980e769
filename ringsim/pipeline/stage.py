"""The part of a model that one stage runs.

::

    stage 0                       stage 1                     stage 2
    ids -> embed -> layer 0, 1 -> hidden -> layer 2, 3 -----> hidden -> layer 4 -> head -> logits

Every rank has the whole model, and a stage refers to its modules: gradients land in the user's own parameters, and what belongs to other
stages is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ringsim.pipeline.adapters.lookup import adapter_of
from ringsim.pipeline.adapters.protocol import Adapter, Announced

__all__ = ["Stage", "build_stages", "tied_parameters"]


class Stage(nn.Module):
    """The part of a model that one stage runs; `parameters` are those of this part.

    Args:
        model: the whole model.
        layers: which of its layers; an empty range is allowed.
        is_first: whether this stage runs the embedding.
        is_last: whether this stage runs the head.
        adapter: how to see the model, for one that ringsim does not know.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> stage = Stage(model, range(0, 2), is_first=True, is_last=False)
        >>> stage(torch.zeros(4, 2)).shape, len(list(stage.parameters()))
        (torch.Size([4, 3]), 2)
    """

    def __init__(self, model: nn.Module, layers: range, *, is_first: bool, is_last: bool, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.adapter = adapter or adapter_of(model)
        self.is_first = is_first
        self.is_last = is_last
        self._model = (model,)  # in a tuple, so that the whole model does not become a part of the stage
        self.layers = nn.ModuleList(self.adapter.layers(model)[layers.start : layers.stop])
        self.first_modules = nn.ModuleList(self.adapter.first_modules(model) if is_first else [])
        self.last_modules = nn.ModuleList(self.adapter.last_modules(model) if is_last else [])

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, cache: Any = None) -> Tensor:
        """Runs this part of the model; makes no message.

        Args:
            x: token ids, shape (batch, tokens), on the first stage; hidden states, shape (batch, tokens, hidden), on the others.
            attention_mask: 1 for a token, 0 for padding, shape (batch, tokens so far); None: no padding, and nothing came before.
            position_ids: place of each token in its sequence, shape (batch or 1, tokens); None: as the model counts by itself.
            cache: this stage's cache of keys and values, from ``stage.adapter.cache(model)``; needs ``attention_mask``.

        Returns:
            Hidden states; on the last stage logits, shape (batch, tokens, vocabulary).
        """
        (model,) = self._model
        announced = Announced(attention_mask, position_ids, cache)
        hidden = self.adapter.embed(model, x, announced) if self.is_first else x
        if self.layers:
            context = self.adapter.context(model, hidden, announced)
            for layer in self.layers:
                hidden = self.adapter.run_layer(model, layer, hidden, context)
        return self.adapter.head(model, hidden) if self.is_last else hidden

    def attention_widths(self) -> list[int]:
        """Returns how wide the attention of each layer is, 0 for a layer without; see `Adapter.attention_width`."""
        (model,) = self._model
        return [self.adapter.attention_width(model, layer) for layer in self.layers]


def build_stages(model: nn.Module, partition: Sequence[range], *, adapter: Adapter | None = None) -> list[Stage]:
    """Returns all stages of a model.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        The stages: calling them one after the other is calling the model.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> x = torch.ones(4, 2)
        >>> first, last = build_stages(model, [range(0, 2), range(2, 3)])
        >>> bool((last(first(x)) == model(x)).all())
        True
    """
    last = len(partition) - 1
    return [Stage(model, layers, is_first=index == 0, is_last=index == last, adapter=adapter) for index, layers in enumerate(partition)]


def tied_parameters(model: nn.Module, partition: Sequence[range], *, adapter: Adapter | None = None) -> dict[str, list[int]]:
    """Finds the parameters that more than one stage uses, such as a weight shared by embedding and head.

    The gradient of such a parameter is the sum of what these stages find: ranks that hold one of them must add theirs up.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        Name of the parameter (as ``model.named_parameters()`` says it) -> the stages that use it.

    Example:
        >>> shared = nn.Linear(2, 2, bias=False)
        >>> tied_parameters(nn.Sequential(shared, nn.ReLU(), shared), [range(0, 1), range(1, 3)])
        {'0.weight': [0, 1]}
    """
    stages = build_stages(model, partition, adapter=adapter)
    holders = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    found = {name: [index for index, held in enumerate(holders) if id(parameter) in held] for name, parameter in model.named_parameters()}
    return {name: stages for name, stages in found.items() if len(stages) > 1}
