"""The demonstration of the generation ring: a small transformer whose layers take their time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from ringsim.pipeline.generation import generate
from ringsim.pipeline.transformer import SmallTransformer

__all__ = ["make_model", "make_prompts", "worker"]

VOCABULARY = 128
PROMPTS_PER_BATCH = 2


def make_model(num_layers: int) -> SmallTransformer:
    """Returns the model, the same wherever it is made; its weights are random, and so is what it says."""
    torch.manual_seed(0)
    return SmallTransformer(VOCABULARY, hidden_size=32, num_layers=num_layers, num_heads=4)


def make_prompts(num_inner_iterations: int) -> list[list[int]]:
    """Returns prompts of 5 to 8 tokens for one round."""
    return [list(range(2 + number, 7 + number + number % 4)) for number in range(PROMPTS_PER_BATCH * num_inner_iterations)]


def worker(
    num_layers: int, num_tokens: int, num_inner_iterations: int, async_comm: bool, prefill_s: float, decode_s: float
) -> list[list[int]]:
    """Generates; every rank of a ring calls it.

    Each layer rests after its work, as long as a larger one would compute. A rank that rests needs no core, so that many stages can be
    watched on few.

    Args:
        num_layers: layers of the model; as many as there are stages for one a stage.
        num_tokens: tokens for each prompt.
        num_inner_iterations: batches on their way at a time.
        async_comm: whether a step's send and receive are posted together.
        prefill_s: how long a layer rests when it has read prompts, in seconds.
        decode_s: the same for one token.
    """
    model = make_model(num_layers)
    for block in model.blocks:
        block.register_forward_hook(partial(_rest, prefill_s, decode_s))
    return generate(model, make_prompts(num_inner_iterations), num_tokens, num_inner_iterations, async_comm)


def _rest(prefill_s: float, decode_s: float, _layer: nn.Module, _inputs: Any, hidden: torch.Tensor) -> None:
    time.sleep(prefill_s if hidden.shape[1] > 1 else decode_s)
