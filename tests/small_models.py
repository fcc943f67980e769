"""Tiny language models of each kind, built from a configuration; nothing is fetched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringsim.pipeline import SmallTransformer

VOCABULARY = 31
LENGTH = 48


_USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "attn_implementation": "sdpa",
}
_GROUPED = {"intermediate_size": 32, "num_key_value_heads": 2}
_EXPERTS = _GROUPED | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = _GROUPED | {
    "head_dim": 4,
    "sliding_window": 4,
    "query_pre_attn_scalar": 4,
    "pad_token_id": 0,
    "final_logit_softcapping": 5.0,
}
_GEMMA["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
}
# The names of a configuration and its model in transformers, and their additional arguments.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED | _WINDOWS),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED | {"sliding_window": 4}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED | {"pad_token_id": 0}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _EXPERTS | {"shared_expert_intermediate_size": 8},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS | {"head_dim": 4}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"intermediate_size": 32, "rotary_pct": 0.5, "hidden_dropout": 0.0},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 8},
    ),
}
# models that share most of their adapters with the others
MORE = ("mistral", "phi3", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "gpt_neox", "bert")
KINDS = (*(kind for kind in _KINDS if kind not in MORE), "small")


def build(
    kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """Returns a model in training mode, without dropout unless asked for.

    The test is skipped if transformers is missing.
    """
    torch.manual_seed(seed)
    if kind == "small":
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 3,
            "max_length": LENGTH,
        }
        return SmallTransformer(**sizes | changes).to(dtype).train()
    transformers = pytest.importorskip("transformers")
    config, model, more = _KINDS[kind]
    made: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**_USUAL | more | changes)
    )
    return made.to(dtype).train()


def logits(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    output = model(*args, **kwargs)
    return output if isinstance(output, Tensor) else output.logits


def tokens(batch: int = 2, length: int = 9, *, seed: int = 0) -> Tensor:
    """Returns token ids, without any that some models use for padding."""
    return torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def large_layers(count: int) -> nn.Module:
    """Returns a Llama with layers of the size of Llama 2 70B, on the device "meta".

    The sizes are those of its published configuration.
    """
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=count,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model
