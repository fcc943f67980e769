"""Tiny language models of each kind, built from a configuration; nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringsim.pipeline import SmallTransformer

VOCABULARY = 31
LENGTH = 48


def _sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
        "attn_implementation": "sdpa",
        **changes,
    }


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(intermediate_size=32, num_key_value_heads=2, **changes)))


def _qwen2(**changes: Any) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(
        Qwen2Config(**_sizes(intermediate_size=32, num_key_value_heads=2, tie_word_embeddings=True, **windows, **changes))
    )


def _qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_sizes(intermediate_size=32, num_key_value_heads=2, head_dim=4, **changes)))


def _gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**_sizes(**{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes})))


def _opt(**changes: Any) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**_sizes(**{"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 8, **changes})))


def _small(**changes: Any) -> nn.Module:
    return SmallTransformer(**{"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 3, "max_length": LENGTH, **changes})


_KINDS: dict[str, Callable[..., nn.Module]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "opt": _opt,
    "small": _small,
}
KINDS = tuple(_KINDS)


def build(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Returns a model in training mode, without dropout unless asked for; the test is skipped where transformers is missing."""
    if kind != "small":
        pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return _KINDS[kind](**changes).to(dtype).train()


def logits(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    output = model(*args, **kwargs)
    return output if isinstance(output, Tensor) else output.logits


def tokens(batch: int = 2, length: int = 9, *, seed: int = 0) -> Tensor:
    """Returns token ids, without those that stand for padding in some models."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def large_layers(count: int) -> nn.Module:
    """Returns a Llama with the layers of Llama 2 70B (its published configuration), on the device "meta"."""
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
