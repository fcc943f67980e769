"""Defines a transformer that is small enough to read and to split into stages.

::

    token ids [batch, seq]
        | embedding + position embedding
    hidden [batch, seq, hidden]
        | block 0: x + attention(norm(x)), then x + feed_forward(norm(x))
        | block 1 ...
        | norm, head
    logits [batch, seq, vocabulary]

The comments write shapes with these letters: B is the batch size, T the number of tokens in this
call, S the number of tokens so far (S = T without a cache), C the hidden size, H the number of
heads, and D = C / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringsim.errors import ArgumentError


class KeyValueCache:
    """The keys and values of earlier tokens, for each layer that a rank runs.

    Example:
        >>> cache = KeyValueCache()
        >>> keys, values = cache.update(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> keys, values = cache.update(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
        >>> keys.shape
        torch.Size([1, 2, 4, 4])
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values, both of shape (batch, heads, tokens, head size).

        Returns the keys and values of all tokens so far.
        """
        if layer in self._seen:
            old_keys, old_values = self._seen[layer]
            keys = torch.cat((old_keys, keys), dim=2)
            values = torch.cat((old_values, values), dim=2)
        self._seen[layer] = keys, values
        return keys, values


class CausalAttention(nn.Module):
    """Attention from each token to itself and to earlier tokens.

    Args:
        hidden_size: the width of the hidden states.
        num_heads: the number of heads, a divisor of ``hidden_size``.
        dropout: the probability of dropping an attention weight.
        layer: the number of the layer, which is its key in the cache.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, layer: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.layer = layer
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Returns the attention's output for each token.

        The output has shape (batch, tokens, hidden).

        Args:
            hidden: the hidden states, shape (batch, tokens, hidden).
            mask: True if a token may attend to an earlier token, shape (batch, 1, tokens, tokens so
                far), or None to allow all earlier tokens.
            cache: the keys and values from earlier calls, to which this call adds the new ones.
        """
        # Shape (B, T, 3, H, D).
        split = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, keys, values = split.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)  # (B, H, S, D)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer that adds attention, and then a feed-forward network, to its input.

    Args:
        hidden_size: the width of the hidden states.
        num_heads: the number of heads, a divisor of ``hidden_size``.
        dropout: the probability of dropping a value.
        layer: the number of the layer, which is its key in the cache.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = CausalAttention(hidden_size, num_heads, dropout, layer)
        self.feed_forward_norm = nn.LayerNorm(hidden_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Returns the hidden states for the next layer, shape (batch, tokens, hidden).

        The arguments are the same as for `CausalAttention`.
        """
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), mask, cache))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class SmallTransformer(nn.Module):
    """A decoder-only language model with learned positional embeddings, used in the lessons.

    Args:
        vocab_size: the number of different tokens.
        hidden_size: the width of the hidden states.
        num_layers: the number of blocks; 0 is allowed.
        num_heads: the number of attention heads, a divisor of ``hidden_size``.
        max_length: the largest length of a sequence, in tokens.
        dropout: the probability of dropping a value in training.
        tied: whether the head uses the embedding's weight.

    Raises:
        ArgumentError: ``num_heads`` does not divide ``hidden_size``.

    Example:
        >>> model = SmallTransformer(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 11])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        max_length: int = 256,
        *,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ArgumentError(
                f"num_heads must divide hidden_size, got {num_heads} for {hidden_size}. "
                "Change one of the two."
            )
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_length, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, dropout, layer) for layer in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Returns the input of the first block, shape (batch, tokens, hidden).

        Args:
            token_ids: the token ids, shape (batch, tokens), int64.
            position_ids: the position of each token in its sequence, shape (batch or 1, tokens).
        """
        return self.dropout(self.embedding(token_ids) + self.positions(position_ids))

    def finish(self, hidden: Tensor) -> Tensor:
        """Returns the logits for the last block's output.

        The input has shape (batch, tokens, hidden), and the logits have shape (batch, tokens,
        vocabulary).
        """
        return self.head(self.norm(hidden))

    def forward(self, token_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns the logits for each next token, shape (batch, tokens, vocabulary).

        Args:
            token_ids: the token ids, shape (batch, tokens), int64.
            attention_mask: 1 for a token and 0 for padding, shape (batch, tokens), or None if there
                is no padding.
        """
        tokens = token_ids.shape[1]
        hidden = self.embed(token_ids, torch.arange(tokens, device=token_ids.device)[None])
        mask = None if attention_mask is None else causal_mask(attention_mask, tokens)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.finish(hidden)


def causal_mask(attention_mask: Tensor, tokens: int) -> Tensor:
    """Returns a mask of the tokens that each new token may attend to.

    A token may attend to itself and to earlier tokens, but not to padding.

    Args:
        attention_mask: 1 for a token and 0 for padding, shape (batch, tokens so far).
        tokens: the number of new tokens.

    Returns:
        A mask of shape (batch, 1, tokens, tokens so far), which is True if the new token may attend
        to the other token. Padding attends to itself, so that its softmax has at least one term.

    Example:
        >>> causal_mask(torch.tensor([[0, 1, 1]]), tokens=3).int().tolist()
        [[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]]
    """
    so_far = attention_mask.shape[1]
    place = torch.arange(so_far, device=attention_mask.device)
    new = place[so_far - tokens :, None]  # (T, 1)
    may = (place <= new) & attention_mask.bool()[:, None, :] | (place == new)  # (B, T, S)
    return may[:, None]
