"""Which adapter sees a model."""

from __future__ import annotations

from typing import Final

from torch import nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters.causal_lm import GPT2Adapter, LlamaAdapter, OPTAdapter
from ringsim.pipeline.adapters.protocol import Adapter
from ringsim.pipeline.adapters.sequential import SequentialAdapter
from ringsim.pipeline.adapters.small import SmallTransformerAdapter

__all__ = ["adapter_of"]

# By the name of the class: asking for the class itself would need transformers.
_ADAPTERS: Final[dict[str, Adapter]] = {
    "GPT2LMHeadModel": GPT2Adapter(),
    "LlamaForCausalLM": LlamaAdapter(),
    "OPTForCausalLM": OPTAdapter(),
    "Qwen2ForCausalLM": LlamaAdapter(),
    "Qwen3ForCausalLM": LlamaAdapter(),
    "Sequential": SequentialAdapter(),
    "SmallTransformer": SmallTransformerAdapter(),
}


def adapter_of(model: nn.Module) -> Adapter:
    """Returns the adapter of a model, by its class or a class it is made from.

    Args:
        model: an ``nn.Sequential``, a `SmallTransformer`, or a causal language model of ``transformers``.

    Returns:
        Its adapter.

    Raises:
        ArgumentError: nobody has written one.

    Example:
        >>> type(adapter_of(nn.Sequential(nn.Linear(2, 2)))).__name__
        'SequentialAdapter'
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _ADAPTERS:
            return _ADAPTERS[kind.__name__]
    raise ArgumentError(
        f"model must be of a kind that has an adapter ({', '.join(_ADAPTERS)}), got {type(model).__name__}. "
        "Write a small ringsim.pipeline.Adapter for it and pass it as adapter=."
    )
