"""Which token comes next: the likeliest, or one drawn at random.

Each prompt has random numbers of its own, from the seed and its place in the list of prompts. So its tokens stay the same however the
prompts are shared out into batches, and however many stages there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

__all__ = ["TokenChoice"]


class TokenChoice:
    """Chooses the next token of each prompt of a batch.

    Args:
        prompt_numbers: the place of each prompt of the batch in the list of all prompts.
        temperature: 0 for the likeliest token; else the logits are divided by it and a token is drawn. 1 draws as the model says, less
            makes it surer.
        seed: what random numbers are drawn from.

    Example:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
        >>> TokenChoice([0, 1])(logits).tolist()
        [[1], [0]]
        >>> both, second = TokenChoice([0, 1], temperature=1.0, seed=5), TokenChoice([1], temperature=1.0, seed=5)
        >>> all(both(logits)[1:].equal(second(logits[1:])) for _ in range(20))
        True
    """

    def __init__(self, prompt_numbers: Sequence[int], temperature: float = 0.0, seed: int = 0) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(_seed_of(seed, number)) for number in prompt_numbers]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the chosen tokens, shape (batch, 1), int64, on the device of the logits.

        Args:
            logits: shape (batch, vocabulary).
        """
        if self._temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        chances = torch.softmax(logits.double().cpu() / self._temperature, dim=-1)
        rows = [torch.multinomial(row, 1, generator=own) for row, own in zip(chances, self._generators, strict=True)]
        return torch.stack(rows).to(logits.device)


def _seed_of(seed: int, number: int) -> int:
    """Makes one seed of two numbers, such that neighbours have nothing in common."""
    return random.Random(f"{seed}/{number}").getrandbits(63)
