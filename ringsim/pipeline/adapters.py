"""How a pipeline sees a model: embed -> layers -> head.

::

    first stage            every stage                      last stage
    token ids --embed--> hidden --layer, layer, ...--> hidden --head--> logits
                                      ^
                                   context: rotary tables, masks: computed on each rank from
                                   what it knows, never sent

An adapter says where these parts are in one kind of model and how to call them. It has no state:
the model is passed in each time. Subclass `Adapter` for a model of your own.

Layers are called one by one, as the model calls them. Whatever else they need (rotary tables,
masks) follows from shapes and from what is announced, so each rank computes it for itself.

``transformers`` is imported only where one of its models is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.transformer import KeyValueCache, SmallTransformer, causal_mask

__all__ = [
    "Adapter",
    "Announced",
    "BertAdapter",
    "GPT2Adapter",
    "GPTNeoXAdapter",
    "GemmaAdapter",
    "LlamaAdapter",
    "OPTAdapter",
    "SequentialAdapter",
    "SmallTransformerAdapter",
    "adapter_of",
]


@dataclass(frozen=True)
class Announced:
    """What every rank knows of a microbatch without a message.

    Attributes:
        attention_mask: 1 for a token, 0 for padding, shape (batch, tokens so far); None: no
            padding, and nothing came before.
        position_ids: place of each new token in its sequence, shape (batch or 1, new tokens); None:
            as the model counts.
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

        The mask tells, not the cache: a stage without layers has an empty cache.

        Args:
            new_tokens: how many are new.

        Raises:
            ArgumentError: there is a cache but no mask.
        """
        if self.attention_mask is not None:
            return self.attention_mask.shape[1] - new_tokens
        if self.cache is not None:
            raise ArgumentError(
                "attention_mask must be given with a cache, got None. Pass ones of shape (batch, "
                "tokens so far, the new ones included)."
            )
        return 0

    def places(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns the places that the new tokens take in the cache, shape (new tokens,)."""
        seen = self.num_seen(new_tokens)
        return torch.arange(seen, seen + new_tokens, device=device)

    def positions(self, new_tokens: int, device: torch.device) -> Tensor:
        """Returns ``position_ids``, or else the places; shape (batch or 1, new tokens)."""
        return (
            self.places(new_tokens, device)[None]
            if self.position_ids is None
            else self.position_ids
        )


class Adapter(ABC):
    """How to see one kind of model as embed -> layers -> head; subclass it for a model of your own.

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
        """Returns the layers that stages are made of, in order.

        They are called as modules, so that users' hooks run.
        """

    def first_modules(self, model: nn.Module) -> Sequence[nn.Module | nn.Parameter]:
        """Returns the modules that only the first stage runs, those of `embed`.

        Also parameters that are in no module of theirs.
        """
        return []

    def last_modules(self, model: nn.Module) -> Sequence[nn.Module | nn.Parameter]:
        """Returns the modules that only the last stage runs, those of `head`.

        Also parameters that are in no module of theirs.
        """
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
        """Returns the keyword arguments of every layer (masks, rotary tables, the cache).

        Each stage with layers calls it.

        Args:
            model: the whole model.
            hidden: what enters this stage's first layer, shape (batch, tokens, hidden): its shape,
                dtype and device count.
            announced: what is known of the microbatch.
        """
        return {}

    def run_layer(
        self, model: nn.Module, layer: nn.Module, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer.

        Args:
            model: the whole model.
            layer: one of `layers`.
            hidden: shape (batch, tokens, hidden).
            context: from `context`.
        """
        return layer(hidden, **context)

    def attention_width(self, model: nn.Module, layer: nn.Module) -> int:
        """Returns how wide the attention of a layer is, heads of queries times the size of a head.

        0 for a layer without attention.

        Args:
            model: the whole model.
            layer: one of `layers`.
        """
        return 0

    def head(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns the logits; the last stage calls it.

        As it is here, it runs `last_modules` one after the other.

        Args:
            model: the whole model.
            hidden: what left the last layer, shape (batch, tokens, hidden).
        """
        for module in self.last_modules(model):
            # a model with a parameter here needs its own head
            hidden = module(hidden)  # type: ignore[operator]
        return hidden

    def cache(self, model: nn.Module) -> Any:
        """Returns an empty cache of keys and values for one rank's layers, for generation.

        Raises:
            ArgumentError: models of this kind do not generate.
        """
        raise ArgumentError(
            f"a model that generates must have a cache, got {type(model).__name__}, whose "
            "adapter has none. "
            "Write the method `cache` of its adapter."
        )


class SequentialAdapter(Adapter):
    """An ``nn.Sequential``.

    Its first child takes the input, token ids or anything else; its last child makes the output.

    Example:
        >>> SequentialAdapter().layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))[1]
        ReLU()
    """

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the children; ``children()`` would leave out repeated ones."""
        return list(model)

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the input as it is."""
        return token_ids


class _PathAdapter(Adapter):
    """A model whose parts are found by their names in it."""

    _layers: str
    _first: tuple[str, ...]
    _last: tuple[str, ...]
    _width: str  # in a layer

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the layers."""
        return list(attrgetter(self._layers)(model))

    def first_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the embeddings, and what belongs to them."""
        return _find(model, self._first)

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the embedding of the tokens."""
        hidden = token_ids
        for module in _find(model, self._first):
            hidden = module(hidden)
        return hidden

    def last_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the last norm and the head."""
        return _find(model, self._last)

    def attention_width(self, model: Any, layer: Any) -> int:
        """Returns how wide the attention is."""
        return int(attrgetter(self._width)(layer))

    def run_layer(
        self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """Returns the hidden states after one layer, whatever else the layer returns."""
        found = layer(hidden, **context)
        return found[0] if isinstance(found, tuple) else found


def _find(model: Any, names: Sequence[str]) -> list[nn.Module]:
    """Returns the parts of these names, without those that a model leaves out."""
    return [part for part in (attrgetter(name)(model) for name in names) if part is not None]


class SmallTransformerAdapter(_PathAdapter):
    """A `SmallTransformer`.

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
        """Returns embedding plus position embedding."""
        return model.embed(token_ids, announced.positions(token_ids.shape[1], token_ids.device))

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask, if there is padding or a past, and the cache."""
        mask = announced.attention_mask
        announced.num_seen(hidden.shape[1])  # refuses a cache without a mask
        return {
            "mask": None if mask is None else causal_mask(mask, hidden.shape[1]),
            "cache": announced.cache,
        }

    def cache(self, model: Any) -> KeyValueCache:
        """Returns an empty cache."""
        return KeyValueCache()


class _TransformersAdapter(_PathAdapter):
    """What causal language models of ``transformers`` have in common."""

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

        # without the configuration: layers with a window keep all keys too, so that all masks have
        # the same length
        return DynamicCache()


class LlamaAdapter(_TransformersAdapter):
    """``LlamaForCausalLM`` and models built like it.

    Mistral, Phi-3, Qwen 2 and 3, with experts or without. Rotary positions: every layer gets the
    tables of cosines and sines.
    """

    _layers = "model.layers"
    _first = ("model.embed_tokens",)
    _last = ("model.norm", "lm_head")
    _width = "self_attn.o_proj.in_features"

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns rotary tables, masks by kind of layer, and the cache."""
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
        """Returns the hidden states after one layer, with the mask of its kind."""
        mask = context["attention_mask"][getattr(layer, "attention_type", "full_attention")]
        return super().run_layer(model, layer, hidden, {**context, "attention_mask": mask})


class GemmaAdapter(LlamaAdapter):
    """``Gemma2ForCausalLM`` and ``Gemma3ForCausalLM``.

    Capped logits; in Gemma 3, rotary tables of their own for layers with a window.
    """

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the embedding of the tokens, made larger."""
        hidden = super().embed(model, token_ids, announced)
        if hasattr(model.model, "rotary_emb_local"):  # Gemma 3, whose embedding does it itself
            return hidden
        # rounded, as the model does
        return hidden * torch.tensor(model.config.hidden_size**0.5, dtype=hidden.dtype)

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns what Llama's layers get, with Gemma 3's two rotary tables."""
        context = dict(super().context(model, hidden, announced))
        if hasattr(model.model, "rotary_emb_local"):
            context["position_embeddings_global"] = context.pop("position_embeddings")
            context["position_embeddings_local"] = _rotary_tables(
                model.model.rotary_emb_local, hidden, context["position_ids"]
            )
        return context

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Returns the logits, capped if the configuration says so."""
        logits, cap = super().head(model, hidden), model.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class BertAdapter(_PathAdapter):
    """``BertForMaskedLM``: an encoder, in which tokens attend to those ahead too.

    It does not generate.
    """

    _layers = "bert.encoder.layer"
    _first = ("bert.embeddings",)
    _last = ("cls",)
    _width = "attention.self.all_head_size"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns embedding plus those of position and of the first kind of token."""
        return model.bert.embeddings(token_ids, position_ids=announced.position_ids)

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask of padding."""
        mask = announced.attention_mask
        if mask is None and model.config.is_decoder:
            mask = hidden.new_ones(hidden.shape[:2])  # what makes it causal
        if mask is not None:
            mask = model.bert.get_extended_attention_mask(
                mask, hidden.shape[:2], dtype=hidden.dtype
            )
        return {"attention_mask": mask}


class GPTNeoXAdapter(_TransformersAdapter):
    """``GPTNeoXForCausalLM``. Rotary positions for a part of each head."""

    _layers = "gpt_neox.layers"
    _first = ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    _last = ("gpt_neox.final_layer_norm", "embed_out")
    _width = "attention.dense.in_features"

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns rotary tables, the mask, and the cache under its name here."""
        context = dict(super().context(model, hidden, announced))
        context["layer_past"] = context.pop("past_key_values")
        positions = announced.positions(hidden.shape[1], hidden.device)
        rotary = model.gpt_neox.rotary_emb
        context["position_embeddings"] = _rotary_tables(rotary, hidden, positions)
        return context


class GPT2Adapter(_TransformersAdapter):
    """``GPT2LMHeadModel``. Learned positions: the first stage adds them."""

    _layers = "transformer.h"
    _first = ("transformer.wte", "transformer.wpe", "transformer.drop")
    _last = ("transformer.ln_f", "lm_head")
    _width = "attn.embed_dim"

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns embedding plus position embedding."""
        body = model.transformer
        positions = announced.positions(token_ids.shape[1], token_ids.device)
        return body.drop(body.wte(token_ids) + body.wpe(positions))


class OPTAdapter(_TransformersAdapter):
    """``OPTForCausalLM``.

    Learned positions that skip padding; an embedding that may be narrower than the layers.
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
        """Returns embedding plus position embedding."""
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

        Or as they came if training skips the layer (``layerdrop``).
        """
        body = model.model.decoder
        # drawn for each layer, as the model does: the same seed, the same dropout
        if body.training and torch.rand([]) < body.layerdrop:
            return hidden
        return super().run_layer(model, layer, hidden, context)


class _Seen:
    """Tells ``transformers`` how long the past is, in place of a cache.

    A later stage has none for layer 0.
    """

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen

    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        return self._num_seen + cache_position.shape[0], 0


def _rotary_tables(rotary: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the tokens' places.

    Each of shape (batch or 1, tokens, rotated part of a head).
    """
    # transformers asks for autocast there, which torch lacks for tensors without data
    if hidden.is_meta:
        table = hidden.new_empty(*positions.shape, 2 * len(rotary.inv_freq))
        return table, table
    tables: tuple[Tensor, Tensor] = rotary(hidden, positions)
    return tables


def _causal_masks(model: Any, hidden: Tensor, announced: Announced) -> dict[str, Any]:
    """Returns the mask of each kind of layer, in the form that the model's attention takes.

    None if it is just causal.
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
    if not kinds and getattr(model.config, "sliding_window", None):  # all layers have a window
        return {"full_attention": create_sliding_window_causal_mask(**wanted)}
    masks = {"full_attention": create_causal_mask(**wanted)}
    if "sliding_attention" in (kinds or ()):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**wanted)
    return masks


# Models of transformers by the name of their class: the class itself would need transformers.
_ADAPTERS: Final[dict[type[nn.Module] | str, Adapter]] = {
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
    """Returns the adapter of a model, by its class or a class it is made from.

    Args:
        model: an ``nn.Sequential``, a `SmallTransformer`, or a causal language model of
            ``transformers``.

    Returns:
        Its adapter.

    Raises:
        ArgumentError: there is none for this kind of model, or the model has a ``forward`` of its
            own.

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
                    f"a model that is cut as a {kind.__name__} must have its forward, got {name} "
                    "with another, which no stage would call. "
                    "Write a ringsim.pipeline.Adapter whose embed, run_layer and head do what it "
                    "does, and pass it as adapter=."
                )
            return adapter
    known = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in _ADAPTERS)
    raise ArgumentError(
        f"model must be of a kind that has an adapter ({known}), got {name}. "
        "Write a small ringsim.pipeline.Adapter for it and pass it as adapter=."
    )
