"""How much arithmetic a layer is: floating-point operations by shape, of the forward pass and of both halves of the backward pass.

Matrix products alone count, a multiplication and an addition for each of their steps, as is usual: for transformers nearly all of the
work. With T tokens in this call, in sequences of S tokens so far (S = T without a cache), for each sequence::

    part                            forward          gradient of input    gradient of weight
    linear, a -> b                  2 T a b          2 T a b              2 T a b
    attention, heads together       4 T S width      8 T S width          0
      as wide as width

So a linear layer costs as much again for each gradient. With grouped queries (GQA) the layers that make keys and values are narrower; the
attention itself is as wide as without. The part of the square that a causal mask hides counts too, as torch's own counter does it.

Source:
    The counts are those of ``torch.utils.flop_counter``, which the tests compare.
"""

from __future__ import annotations

from ringsim.compute_costs import Flops

__all__ = ["Flops", "attention_flops", "linear_flops"]


def linear_flops(tokens: int, in_features: int, out_features: int, *, trained: bool = True) -> Flops:
    """Counts a linear layer.

    Args:
        tokens: how many vectors go through it: tokens of all sequences together.
        in_features: their length.
        out_features: their length afterwards.
        trained: whether its weight gets a gradient.

    Returns:
        The counts.

    Example:
        >>> linear_flops(tokens=10, in_features=4, out_features=8)
        Flops(forward=640, input_grad=640, weight_grad=640)
    """
    forward = 2 * tokens * in_features * out_features
    return Flops(forward, forward, forward if trained else 0)


def attention_flops(sequences: int, new_tokens: int, tokens_so_far: int, width: int) -> Flops:
    """Counts what attention does between its linear layers: the products of queries and keys, and of the weights and values.

    Args:
        sequences: how many there are.
        new_tokens: tokens of each that look.
        tokens_so_far: tokens of each that they look at, the new ones included.
        width: heads of queries times the size of a head.

    Returns:
        The counts.

    Example:
        >>> attention_flops(sequences=1, new_tokens=10, tokens_so_far=10, width=4)
        Flops(forward=1600, input_grad=3200, weight_grad=0)
    """
    forward = 4 * sequences * new_tokens * tokens_so_far * width
    return Flops(forward, 2 * forward, 0)
