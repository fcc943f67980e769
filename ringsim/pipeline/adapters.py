"""Presents models as a chain of an embedding, layers and a head.

::

    first stage            every stage                      last stage
    token ids --embed--> hidden --layer, layer, ...--> hidden --head--> logits
                                      ^
                                   context (rotary tables, masks): computed on each rank, never
                                   sent

An adapter finds these parts in one kind of model and calls them. It has no state, so every call
passes the model. For your own model, subclass `Adapter`.

Adapters call layers one by one, in the same way as the model. Each rank computes the layers' other
arguments (rotary tables, masks) from shapes and from `Announced`.

Adapters import ``transformers`` only if you use one of its models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.transformer import KeyValueCache, SmallTransformer, causal_mask


@dataclass(frozen=True)
class Announced:
    """The properties of a microbatch that every rank knows without a message.

    Attributes:
        attention_mask: 1 for a token and 0 for padding, shape (batch, tokens so far), or None if
            there is no padding and there are no earlier tokens.
        position_ids: the position of each new token in its sequence, shape (batch or 1, new
            tokens), or None for the model's own positions.
        cache: the keys and values of earlier tokens, from `Adapter.cache`, or None if there are
            none.

    Example:
        >>> Announced(attention_mask=torch.ones(2, 7), cache={}).num_seen(new_tokens=1)
        6
    """

    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cache: Any = None

    def num_seen(self, new_tokens: int) -> int:
        """Returns the number of earlier tokens in each sequence.

        This method reads the number from the mask, because the cache of a stage without layers is
        empty.

        Args:
            new_tokens: the number of new tokens.

        Raises:
            ArgumentError: a cache is given without a mask.
        """
        if self.attention_mask is not None:
            return self.attention_mask.shape[1] - new_tokens
        if self.cache is not None:
            raise ArgumentError(
                "attention_mask is required with a cache, got None. Pass a tensor of ones with "
                "shape (batch, tokens so far), which counts the new tokens."
            )
        return 0

    def places(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns the positions of the new tokens in the cache, shape (new tokens,)."""
        seen = self.num_seen(new_tokens)
        return torch.arange(seen, seen + new_tokens, device=device)

    def positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns ``position_ids``, or `places` if None; shape (batch or 1, new tokens)."""
        return (
            self.places(new_tokens, device)[None]
            if self.position_ids is None
            else self.position_ids
        )


class Adapter(ABC):
    """The base class for adapters, each of which finds the parts of one kind of model.

    Example:
        >>> class MyModelAdapter(Adapter):
        ...     def layers(self, model):
        ...         return model.blocks
        ...
        ...     def first_modules(self, model):
        ...         return [model.embedding]
        ...
        ...     def last_modules(self, model):
        ...         return [model.head]
        ...
        ...     def embed(self, model, token_ids, announced):
        ...         return model.embedding(token_ids)
    """

    @abstractmethod
    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the layers that are divided among the stages, in order.

        Stages call the layers as modules, so their hooks run.
        """

    def first_modules(self, model: nn.Module) -> Sequence[nn.Module | nn.Parameter]:
        """Returns the modules that `embed` uses, which only the first stage runs.

        The list also contains parameters that belong to none of these modules.
        """
        return []

    def last_modules(self, model: nn.Module) -> Sequence[nn.Module | nn.Parameter]:
        """Returns the modules that `head` uses, which only the last stage runs.

        The list also contains parameters that belong to none of these modules.
        """
        return []

    @abstractmethod
    def embed(self, model: nn.Module, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the input of the first layer. Only the first stage calls this method.

        Args:
            model: the whole model.
            token_ids: the token ids, shape (batch, tokens), int64.
            announced: the known properties of the microbatch, which learned positions need.
        """

    def context(self, model: nn.Module, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the keyword arguments of every layer (masks, rotary tables, cache).

        Every stage that has layers calls this method.

        Args:
            model: the whole model.
            hidden: the input of this stage's first layer, shape (batch, tokens, hidden). Only its
                shape, dtype and device matter.
            announced: the known properties of the microbatch.
        """
        return {}

    def run_layer(
        self, model: nn.Module, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer.

        Args:
            model: the whole model.
            layer: one of `layers`.
            hidden: the hidden states, shape (batch, tokens, hidden).
            context: the keyword arguments from `context`.
        """
        return layer(hidden, **context)

    def attention_width(self, model: nn.Module, layer: nn.Module) -> int:
        """Returns the width of a layer's attention: the number of query heads times the head size.

        The width is 0 for a layer without attention.

        Args:
            model: the whole model.
            layer: one of `layers`.
        """
        return 0

    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the logits. Only the last stage calls this method.

        By default, this method runs `last_modules` one after another.

        Args:
            model: the whole model.
            hidden: the output of the last layer, shape (batch, tokens, hidden).
        """
        for module in self.last_modules(model):
            # a model with a bare parameter in last_modules must define its own head
            hidden = module(hidden)  # type: ignore[operator]
        return hidden

    def cache(self, model: nn.Module) -> Any:
        """Returns an empty cache for the keys and values of a rank's layers during generation.

        Raises:
            ArgumentError: the adapter has no cache.
        """
        raise ArgumentError(
            f"the adapter of {type(model).__name__} has no cache, which generation needs. "
            "Define the method `cache` in the adapter."
        )


class SequentialAdapter(Adapter):
    """The adapter for ``nn.Sequential``.

    The first child gets the input, which is a tensor of token ids or any other tensor. The last
    child returns the output.

    Example:
        >>> SequentialAdapter().layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))[1]
        ReLU()
    """

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns all children, including the repeated ones that ``children()`` omits."""
        return list(model)

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the input unchanged."""
        return token_ids


class _PathAdapter(Adapter):
    """The common base for adapters that look up a model's parts by name."""

    _layers: str
    _first: tuple[str, ...]
    _last: tuple[str, ...]
    _width: str  # in a layer

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the layers."""
        return list(attrgetter(self._layers)(model))

    def first_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the embeddings, with their projections or dropout."""
        return _find(model, self._first)

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the embeddings of the tokens."""
        hidden = token_ids
        for module in _find(model, self._first):
            hidden = module(hidden)
        return hidden

    def last_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the last norm and the head."""
        return _find(model, self._last)

    def attention_width(self, model: Any, layer: Any) -> int:
        """Returns the width of the attention."""
        return int(attrgetter(self._width)(layer))

    def run_layer(
        self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer, without the layer's other results."""
        found = layer(hidden, **context)
        return found[0] if isinstance(found, tuple) else found


def _find(model: Any, names: Sequence[str]) -> list[nn.Module]:
    """Returns the named parts that exist in the model."""
    return [part for part in (attrgetter(name)(model) for name in names) if part is not None]


class SmallTransformerAdapter(_PathAdapter):
    """The adapter for `SmallTransformer`.

    Example:
        >>> from ringsim.pipeline import SmallTransformer
        >>> model = SmallTransformer(vocab_size=11, hidden_size=8, num_layers=3, num_heads=2)
        >>> len(SmallTransformerAdapter().layers(model))
        3
    """

    _layers = "blocks"
    _first = ("embedding", "positions", "dropout")
    _last = ("norm", "head")
    _width = "attention.out.in_features"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the sum of the token and position embeddings."""
        return model.embed(token_ids, announced.positions(token_ids.shape[1], token_ids.device))

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the cache, and the mask if there is padding or there are earlier tokens."""
        mask = announced.attention_mask
        announced.num_seen(hidden.shape[1])  # raises an error for a cache without a mask
        return {
            "mask": None if mask is None else causal_mask(mask, hidden.shape[1]),
            "cache": announced.cache,
        }

    def cache(self, model: Any) -> KeyValueCache:
        """Returns an empty cache."""
        return KeyValueCache()


class _TransformersAdapter(_PathAdapter):
    """The common base for causal language models from ``transformers``."""

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask and the cache."""
        return {
            "past_key_values": announced.cache,
            "use_cache": announced.cache is not None,
            "cache_position": announced.places(hidden.shape[1], hidden.device),
            "attention_mask": _causal_masks(model, hidden, announced)["full_attention"],
        }

    def cache(self, model: Any) -> Any:
        """Returns an empty ``DynamicCache``."""
        from transformers import DynamicCache

        # without the configuration, so that layers with a window also keep all keys, and all masks
        # have the same length
        return DynamicCache()


class LlamaAdapter(_TransformersAdapter):
    """The adapter for ``LlamaForCausalLM`` and similar models.

    The similar models are Mistral, Phi-3, and Qwen 2 and 3, with or without experts. Positions are
    rotary: every layer gets tables of cosines and sines.
    """

    _layers = "model.layers"
    _first = ("model.embed_tokens",)
    _last = ("model.norm", "lm_head")
    _width = "self_attn.o_proj.in_features"

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the rotary tables, the mask for each kind of layer, and the cache."""
        positions = announced.positions(hidden.shape[1], hidden.device)
        return {
            **super().context(model, hidden, announced),
            "attention_mask": _causal_masks(model, hidden, announced),
            "position_ids": positions,
            "position_embeddings": _rotary_tables(model.model.rotary_emb, hidden, positions),
        }

    def run_layer(
        self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer, using the mask for the layer's kind."""
        mask = context["attention_mask"][getattr(layer, "attention_type", "full_attention")]
        return super().run_layer(model, layer, hidden, {**context, "attention_mask": mask})


class GemmaAdapter(LlamaAdapter):
    """The adapter for ``Gemma2ForCausalLM`` and ``Gemma3ForCausalLM``.

    The logits are capped. In Gemma 3, layers with a window have their own rotary tables.
    """

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the scaled embedding of the tokens."""
        hidden = super().embed(model, token_ids, announced)
        if hasattr(model.model, "rotary_emb_local"):  # Gemma 3, whose embedding scales itself
            return hidden
        # rounded, as in the model
        return hidden * torch.tensor(model.config.hidden_size**0.5, dtype=hidden.dtype)

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the arguments of Llama's layers, with Gemma 3's two rotary tables."""
        context = dict(super().context(model, hidden, announced))
        if hasattr(model.model, "rotary_emb_local"):
            context["position_embeddings_global"] = context.pop("position_embeddings")
            context["position_embeddings_local"] = _rotary_tables(
                model.model.rotary_emb_local, hidden, context["position_ids"]
            )
        return context

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Returns the logits, capped if the configuration sets a cap."""
        logits, cap = super().head(model, hidden), model.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class BertAdapter(_PathAdapter):
    """The adapter for ``BertForMaskedLM``, an encoder whose tokens also attend to later tokens.

    This model does not generate text.
    """

    _layers = "bert.encoder.layer"
    _first = ("bert.embeddings",)
    _last = ("cls",)
    _width = "attention.self.all_head_size"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the token embedding plus the position and first token-type embeddings."""
        return model.bert.embeddings(token_ids, position_ids=announced.position_ids)

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the padding mask."""
        mask = announced.attention_mask
        if mask is None and model.config.is_decoder:
            mask = hidden.new_ones(hidden.shape[:2])  # makes the mask causal
        if mask is not None:
            mask = model.bert.get_extended_attention_mask(
                mask, hidden.shape[:2], dtype=hidden.dtype
            )
        return {"attention_mask": mask}


class GPTNeoXAdapter(_TransformersAdapter):
    """The adapter for ``GPTNeoXForCausalLM``, which rotates only part of each head."""

    _layers = "gpt_neox.layers"
    _first = ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    _last = ("gpt_neox.final_layer_norm", "embed_out")
    _width = "attention.dense.in_features"

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the rotary tables, the mask, and the cache under this model's name for it."""
        context = dict(super().context(model, hidden, announced))
        context["layer_past"] = context.pop("past_key_values")
        positions = announced.positions(hidden.shape[1], hidden.device)
        rotary = model.gpt_neox.rotary_emb
        context["position_embeddings"] = _rotary_tables(rotary, hidden, positions)
        return context


class GPT2Adapter(_TransformersAdapter):
    """The adapter for ``GPT2LMHeadModel``, whose positional embeddings the first stage adds."""

    _layers = "transformer.h"
    _first = ("transformer.wte", "transformer.wpe", "transformer.drop")
    _last = ("transformer.ln_f", "lm_head")
    _width = "attn.embed_dim"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the sum of the token and position embeddings."""
        body = model.transformer
        positions = announced.positions(token_ids.shape[1], token_ids.device)
        return body.drop(body.wte(token_ids) + body.wpe(positions))


class OPTAdapter(_TransformersAdapter):
    """The adapter for ``OPTForCausalLM``.

    The model's learned positions skip padding, and its embedding may be narrower than its layers.
    """

    _layers = "model.decoder.layers"
    _first = (
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.project_in",
    )
    _last = ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head")
    _width = "self_attn.embed_dim"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the sum of the token and position embeddings."""
        body = model.model.decoder
        mask = announced.attention_mask
        if mask is None:
            mask = torch.ones_like(token_ids)
        seen = announced.num_seen(token_ids.shape[1])
        hidden = body.embed_tokens(token_ids)
        if body.project_in is not None:
            hidden = body.project_in(hidden)
        return hidden + body.embed_positions(mask, seen, position_ids=announced.position_ids)

    def run_layer(
        self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer.

        If training skips the layer (``layerdrop``), the hidden states stay unchanged.
        """
        body = model.model.decoder
        # drawn for each layer, as in the model, so that the same seed causes the same dropout
        if body.training and torch.rand([]) < body.layerdrop:
            return hidden
        return super().run_layer(model, layer, hidden, context)


class _Seen:
    """A stand-in for a cache that reports only the number of earlier tokens.

    ``transformers`` reads this number from layer 0, which later stages do not hold.
    """

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen

    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        return self._num_seen + cache_position.shape[0], 0


def _rotary_tables(rotary: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and the sines of the token positions.

    Both have shape (batch or 1, tokens, rotated part of a head).
    """
    # transformers uses autocast here, which torch does not support for tensors without data
    if hidden.is_meta:
        table = hidden.new_empty(*positions.shape, 2 * len(rotary.inv_freq))
        return table, table
    tables: tuple[Tensor, Tensor] = rotary(hidden, positions)
    return tables


def _causal_masks(model: Any, hidden: Tensor, announced: Announced) -> dict[str, Any]:
    """Returns the mask for each kind of layer, in the form that the model's attention expects.

    A mask is None if the attention is only causal.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    wanted = {
        "config": model.config,
        "input_embeds": hidden,
        "attention_mask": announced.attention_mask,
        "cache_position": announced.places(hidden.shape[1], hidden.device),
        "past_key_values": _Seen(announced.num_seen(hidden.shape[1])),
    }
    kinds = getattr(model.config, "layer_types", None)
    if not kinds and getattr(model.config, "sliding_window", None):  # every layer has a window
        return {"full_attention": create_sliding_window_causal_mask(**wanted)}
    masks = {"full_attention": create_causal_mask(**wanted)}
    if "sliding_attention" in (kinds or ()):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**wanted)
    return masks


# Models from transformers are listed by class name, because using the classes would need an import.
_ADAPTERS: dict[type[nn.Module] | str, Adapter] = {
    nn.Sequential: SequentialAdapter(),
    SmallTransformer: SmallTransformerAdapter(),
    "BertForMaskedLM": BertAdapter(),
    "GPT2LMHeadModel": GPT2Adapter(),
    "GPTNeoXForCausalLM": GPTNeoXAdapter(),
    "Gemma2ForCausalLM": GemmaAdapter(),
    "Gemma3ForCausalLM": GemmaAdapter(),
    "LlamaForCausalLM": LlamaAdapter(),
    "MistralForCausalLM": LlamaAdapter(),
    "OPTForCausalLM": OPTAdapter(),
    "Phi3ForCausalLM": LlamaAdapter(),
    "Qwen2ForCausalLM": LlamaAdapter(),
    "Qwen2MoeForCausalLM": LlamaAdapter(),
    "Qwen3ForCausalLM": LlamaAdapter(),
    "Qwen3MoeForCausalLM": LlamaAdapter(),
}


def adapter_of(model: nn.Module) -> Adapter:
    """Returns the adapter for a model, found by the model's class or a base class.

    Args:
        model: an ``nn.Sequential``, a `SmallTransformer`, or a causal language model from
            ``transformers``.

    Returns:
        The adapter.

    Raises:
        ArgumentError: there is no adapter for this kind of model, or the model overrides
            ``forward``.

    Example:
        >>> type(adapter_of(nn.Sequential(nn.Linear(2, 2)))).__name__
        'SequentialAdapter'
    """
    name = type(model).__name__
    for kind in type(model).__mro__:
        adapter = _ADAPTERS.get(kind) or _ADAPTERS.get(kind.__name__)
        if adapter is not None:
            if getattr(model.forward, "__func__", None) is not getattr(kind, "forward", None):
                raise ArgumentError(
                    f"{name} overrides the forward method of {kind.__name__}, but stages would "
                    "not call it. Write a ringsim.pipeline.Adapter whose embed, run_layer and "
                    "head do the same as this forward, and pass it as adapter=."
                )
            return adapter
    known = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in _ADAPTERS)
    raise ArgumentError(
        f"no adapter for models of type {name} (known types: {known}). "
        "Write a ringsim.pipeline.Adapter for this type and pass it as adapter=."
    )
