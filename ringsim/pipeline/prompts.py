"""Prompts of different length in one batch: padded on the left, with the masks and positions that hide the padding.

Three prompts, and two tokens that were generated since (``seen`` = 2)::

    token ids           attention mask      position ids
    . . 7 9   4 1       0 0 1 1  1 1        0 0 0 1  2 3
    3 5 2 8   6 6       1 1 1 1  1 1        0 1 2 3  4 5
    . 5 5 1   2 0       0 1 1 1  1 1        0 0 1 2  3 4

On the left, because all rows then end, and go on, at the same place. Every stage knows the prompts' lengths, and works the masks and
positions out for itself: they never travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["PromptBatch"]

_PADDING = 0  # any token would do: nobody looks at it


class PromptBatch:
    """A batch of prompts.

    Args:
        prompts: token ids of each prompt, one or more, each of one token or more.
        device: where its tensors are made.

    Attributes:
        token_ids: the prompts, shape (batch, length), int64.

    Example:
        >>> batch = PromptBatch([[7, 9], [3, 5, 2]])
        >>> batch.token_ids.tolist()
        [[0, 7, 9], [3, 5, 2]]
        >>> batch.attention_mask(seen=0).tolist()
        [[0, 1, 1], [1, 1, 1]]
        >>> batch.position_ids(seen=0).tolist(), batch.position_ids(seen=1).tolist()
        ([[0, 0, 1], [0, 1, 2]], [[2], [3]])
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        length = max(len(prompt) for prompt in prompts)
        rows = [[_PADDING] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        self.token_ids = torch.tensor(rows, device=device)
        self._padded = torch.tensor([length - len(prompt) for prompt in prompts], device=device)

    def attention_mask(self, seen: int) -> torch.Tensor:
        """Returns which places may be looked at, 1 or 0, shape (batch, length + seen), int64.

        Args:
            seen: tokens that were generated and read since the prompts.
        """
        places = torch.arange(self.token_ids.shape[1] + seen, device=self.token_ids.device)
        return (places >= self._padded[:, None]).long()

    def position_ids(self, seen: int) -> torch.Tensor:
        """Returns the position of each token of the next input, int64: shape (batch, length) for the prompts, then (batch, 1).

        Args:
            seen: tokens that were generated since the prompts, the one that is read next included; 0 for the prompts.
        """
        first = 0 if seen == 0 else self.token_ids.shape[1] + seen - 1
        places = torch.arange(first, self.token_ids.shape[1] + seen, device=self.token_ids.device)
        return (places - self._padded[:, None]).clamp(min=0)
