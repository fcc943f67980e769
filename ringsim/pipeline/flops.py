"""How much arithmetic a layer does.

Floating-point operations by shape, of the forward pass and of both halves of the backward pass.
Only matrix products count, as two operations for each product that is added up; in a transformer
they are nearly all of the work. For each sequence, with T new tokens out of S so far (S = T without
a cache)::

    part                            forward          gradient of input    gradient of weight
    linear, a -> b                  2 T a b          2 T a b              2 T a b
    attention, all heads together   4 T S width      8 T S width          0

A linear layer thus costs as much again for each gradient. Grouped queries (GQA) make the layers for
keys and values narrower, not the attention itself. What a causal mask hides is counted too, as
torch's own counter does.

Source:
    The counts are those of ``torch.utils.flop_counter``; the tests compare the two.
"""

from __future__ import annotations

from ringsim.compute_costs import Flops

__all__ = ["Flops", "attention_flops", "linear_flops"]


def linear_flops(
    tokens: int, in_features: int, out_features: int, *, trained: bool = True
) -> Flops:
    """Counts a linear layer.

    Args:
        tokens: how many vectors go through it: the tokens of all sequences.
        in_features: the length of a vector.
        out_features: its length afterwards.
        trained: whether the weight gets a gradient.

    Example:
        >>> linear_flops(tokens=10, in_features=4, out_features=8)
        Flops(forward=640, input_grad=640, weight_grad=640)
    """
    forward = 2 * tokens * in_features * out_features
    return Flops(forward, forward, forward if trained else 0)


def attention_flops(sequences: int, new_tokens: int, tokens_so_far: int, width: int) -> Flops:
    """Counts what attention does between its linear layers.

    Queries times keys, and weights times values.

    Args:
        sequences: how many there are.
        new_tokens: how many tokens of each attend.
        tokens_so_far: how many they attend to, themselves included.
        width: heads of queries times the size of a head.

    Example:
        >>> attention_flops(sequences=1, new_tokens=10, tokens_so_far=10, width=4)
        Flops(forward=1600, input_grad=3200, weight_grad=0)
    """
    forward = 4 * sequences * new_tokens * tokens_so_far * width
    return Flops(forward, 2 * forward, 0)
