"""Causal language models of ``transformers``: Llama and its relatives, GPT-2, OPT.

The layers of a model are called as the model calls them, one by one, so that its own loop is not needed. What they need besides the hidden
states, rotary tables and masks, depends on shapes and announced masks only, and each rank computes it for itself.

``transformers`` is imported when a model of it is here already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.pipeline.adapters.protocol import Adapter, Announced

__all__ = ["GPT2Adapter", "LlamaAdapter", "OPTAdapter"]


class LlamaAdapter(Adapter):
    """``LlamaForCausalLM`` and models built like it: ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM``.

    Rotary positions: every layer gets the tables of cosines and sines.
    """

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the decoder layers."""
        return list(model.model.layers)

    def first_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the embedding."""
        return [model.model.embed_tokens]

    def last_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the last norm and the head."""
        return [model.model.norm, model.lm_head]

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns the embedding of the tokens."""
        return model.model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns rotary tables, masks by kind of layer, and the cache."""
        positions = announced.positions(hidden.shape[1], hidden.device)
        return {
            **_context(hidden, announced),
            "attention_mask": _causal_masks(model, hidden, announced),
            "position_ids": positions,
            "position_embeddings": _rotary_tables(model, hidden, positions),
        }

    def run_layer(self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states after one layer, with the mask of its kind."""
        mask = context["attention_mask"][getattr(layer, "attention_type", "full_attention")]
        return layer(hidden, **{**context, "attention_mask": mask})  # type: ignore[no-any-return]

    def attention_width(self, model: Any, layer: Any) -> int:
        """Returns how wide the attention is."""
        return int(layer.self_attn.o_proj.in_features)

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        return model.lm_head(model.model.norm(hidden))  # type: ignore[no-any-return]

    def cache(self, model: Any) -> Any:
        """Returns an empty ``DynamicCache``."""
        return _empty_cache()


class GPT2Adapter(Adapter):
    """``GPT2LMHeadModel``. Learned positions: the first stage adds them."""

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the blocks."""
        return list(model.transformer.h)

    def first_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the two embeddings and their dropout."""
        return [model.transformer.wte, model.transformer.wpe, model.transformer.drop]

    def last_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the last norm and the head."""
        return [model.transformer.ln_f, model.lm_head]

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        """Returns embedding plus position embedding."""
        body = model.transformer
        positions = announced.positions(token_ids.shape[1], token_ids.device)
        return body.drop(body.wte(token_ids) + body.wpe(positions))  # type: ignore[no-any-return]

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask and the cache."""
        return {**_context(hidden, announced), "attention_mask": _causal_masks(model, hidden, announced)["full_attention"]}

    def run_layer(self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states after one block."""
        return layer(hidden, **context)[0]  # type: ignore[no-any-return]

    def attention_width(self, model: Any, layer: Any) -> int:
        """Returns how wide the attention is."""
        return int(layer.attn.embed_dim)

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        return model.lm_head(model.transformer.ln_f(hidden))  # type: ignore[no-any-return]

    def cache(self, model: Any) -> Any:
        """Returns an empty ``DynamicCache``."""
        return _empty_cache()


class OPTAdapter(Adapter):
    """``OPTForCausalLM``. Learned positions that skip padding; an embedding that may be narrower than the layers."""

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Returns the decoder layers."""
        return list(model.model.decoder.layers)

    def first_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the two embeddings, and the projection to the layers' width."""
        body = model.model.decoder
        return _there(body.embed_tokens, body.embed_positions, body.project_in)

    def last_modules(self, model: Any) -> Sequence[nn.Module]:
        """Returns the last norm, the projection back, and the head."""
        body = model.model.decoder
        return _there(body.final_layer_norm, body.project_out, model.lm_head)

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
        return hidden + body.embed_positions(mask, seen, position_ids=announced.position_ids)  # type: ignore[no-any-return]

    def context(self, model: Any, hidden: Tensor, announced: Announced) -> Mapping[str, Any]:
        """Returns the mask and the cache."""
        return {**_context(hidden, announced), "attention_mask": _causal_masks(model, hidden, announced)["full_attention"]}

    def run_layer(self, model: Any, layer: Any, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        """Returns the hidden states after one layer, or as they came where training skips the layer (``layerdrop``)."""
        body = model.model.decoder
        if body.training and torch.rand([]) < body.layerdrop:  # drawn for each layer, as the model does: the same seed, the same dropout
            return hidden
        return layer(hidden, **context)[0]  # type: ignore[no-any-return]

    def attention_width(self, model: Any, layer: Any) -> int:
        """Returns how wide the attention is."""
        return int(layer.self_attn.embed_dim)

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        for module in self.last_modules(model):
            hidden = module(hidden)
        return hidden

    def cache(self, model: Any) -> Any:
        """Returns an empty ``DynamicCache``."""
        return _empty_cache()


class _Seen:
    """Tells ``transformers`` how long the past is, in the place of a cache: a later stage has none for layer 0."""

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen

    def get_mask_sizes(self, cache_position: Tensor, layer_idx: int) -> tuple[int, int]:
        return self._num_seen + cache_position.shape[0], 0


def _rotary_tables(model: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the tokens' places, each of shape (batch or 1, tokens, rotated part of a head)."""
    rotary = model.model.rotary_emb
    if hidden.is_meta:  # transformers asks for autocast there, which torch has not for tensors without data
        table = hidden.new_empty(*positions.shape, 2 * len(rotary.inv_freq))
        return table, table
    tables: tuple[Tensor, Tensor] = rotary(hidden, positions)
    return tables


def _context(hidden: Tensor, announced: Announced) -> dict[str, Any]:
    return {
        "past_key_values": announced.cache,
        "use_cache": announced.cache is not None,
        "cache_position": announced.places(hidden.shape[1], hidden.device),
    }


def _causal_masks(model: Any, hidden: Tensor, announced: Announced) -> dict[str, Any]:
    """Returns the mask of each kind of layer, in the form that the model's attention takes; None where "causal" says it all."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    wanted = {
        "config": model.config,
        "input_embeds": hidden,
        "attention_mask": announced.attention_mask,
        "cache_position": announced.places(hidden.shape[1], hidden.device),
        "past_key_values": _Seen(announced.num_seen(hidden.shape[1])),
    }
    masks = {"full_attention": create_causal_mask(**wanted)}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**wanted)
    return masks


def _empty_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()  # without the configuration: layers with a window keep all keys too, so that all masks have the same length


def _there(*modules: nn.Module | None) -> list[nn.Module]:
    return [module for module in modules if module is not None]
