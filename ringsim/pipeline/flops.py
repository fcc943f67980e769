"""Counts the arithmetic of a layer.

The functions compute the number of floating-point operations from shapes, for the forward pass and
for both halves of the backward pass. They count only matrix products, with two operations per
multiply-add. In a transformer, matrix products are nearly all of the work. For each sequence, with
T new tokens out of S tokens so far (S = T without a cache)::

    part                            forward          gradient of input    gradient of weight
    linear, a -> b                  2 T a b          2 T a b              2 T a b
    attention, all heads together   4 T S width      8 T S width          0

So each of a linear layer's two gradients costs as much as its forward pass. Grouped queries (GQA)
make the layers for keys and values narrower, but not the attention itself. Like torch's own
counter, these functions also count the products that a causal mask hides.

Source:
    ``torch.utils.flop_counter`` returns the same counts; ringsim's tests compare the two.
"""

from __future__ import annotations

from ringsim.compute_costs import Flops

__all__ = ["Flops", "attention_flops", "linear_flops"]


def linear_flops(
    tokens: int, in_features: int, out_features: int, *, trained: bool = True
) -> Flops:
    """Counts the operations of a linear layer.

    Args:
        tokens: the number of vectors that go through the layer, which is the number of tokens in
            all sequences.
        in_features: the length of an input vector.
        out_features: the length of an output vector.
        trained: whether the weight gets a gradient.

    Example:
        >>> linear_flops(tokens=10, in_features=4, out_features=8)
        Flops(forward=640, input_grad=640, weight_grad=640)
    """
    forward = 2 * tokens * in_features * out_features
    return Flops(forward, forward, forward if trained else 0)


def attention_flops(sequences: int, new_tokens: int, tokens_so_far: int, width: int) -> Flops:
    """Counts the operations of attention between its linear layers.

    The counted products are queries times keys, and weights times values.

    Args:
        sequences: the number of sequences.
        new_tokens: the number of tokens in each sequence that attend.
        tokens_so_far: the number of tokens that the new tokens attend to, including themselves.
        width: the number of query heads times the head size.

    Example:
        >>> attention_flops(sequences=1, new_tokens=10, tokens_so_far=10, width=4)
        Flops(forward=1600, input_grad=3200, weight_grad=0)
    """
    forward = 4 * sequences * new_tokens * tokens_so_far * width
    return Flops(forward, 2 * forward, 0)
