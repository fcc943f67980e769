"""What one process computes without a pipeline: the answer that every pipeline is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.training import Loss, cross_entropy

__all__ = ["Reference", "single_process_step"]


class Reference(NamedTuple):
    """Loss and gradients of one step in one process.

    Attributes:
        loss: mean of the microbatches' losses.
        gradients: by the parameter's name; None for a parameter that is frozen, or that the loss does not reach.
    """

    loss: float
    gradients: dict[str, Tensor | None]


def single_process_step(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss_fn: Loss = cross_entropy,
    attention_masks: Sequence[Tensor] | None = None,
) -> Reference:
    """Computes loss and gradients of a step by calling the model itself, one microbatch after the other; makes no message.

    The gradients that the parameters hold are neither read nor changed, and random numbers are left as they were. A model with dropout
    drops other values here than in a pipeline: compare in ``model.eval()``, or without dropout.

    Args:
        model: the whole model, a tensor in, logits out (or an object with ``logits``, as in ``transformers``).
        inputs: one tensor for each microbatch: token ids, shape (batch, tokens), or whatever the model takes.
        targets: one tensor for each microbatch, already aligned.
        loss_fn: loss of a microbatch, from logits and targets.
        attention_masks: 1 for a token, 0 for padding, one tensor for each microbatch; None: no padding.

    Returns:
        The loss of the step, and the gradients by the names of the parameters.

    Raises:
        ArgumentError: the lists have different lengths, or are empty.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> inputs, targets = [torch.ones(1, 2), 3 * torch.ones(1, 2)], [torch.zeros(1, 1), torch.zeros(1, 1)]
        >>> single_process_step(model, inputs, targets, loss_fn=lambda y, target: (y - target).sum()).gradients
        {'weight': tensor([[2., 2.]])}
    """
    masks: Sequence[Tensor | None] = [None] * len(inputs) if attention_masks is None else attention_masks
    if not len(inputs) == len(targets) == len(masks) > 0:
        raise ArgumentError(
            f"inputs, targets and attention_masks must have one tensor for each microbatch, got {len(inputs)}, {len(targets)} "
            f"and {len(masks)}. Cut all three into the same microbatches."
        )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    total = 0.0
    with torch.random.fork_rng([inputs[0].device] if inputs[0].is_cuda else []), torch.enable_grad():
        for x, target, mask in zip(inputs, targets, masks, strict=True):
            loss = loss_fn(_logits(model, x, mask), target) / len(inputs)
            total += loss.item()
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)  # unlike backward(), leaves .grad alone
            for name, gradient in zip(trained, found, strict=True):
                sums[name] = _sum(sums[name], gradient)
    return Reference(total, sums)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _logits(model: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    output: Any = model(x) if mask is None else model(x, attention_mask=mask)
    logits: Tensor = getattr(output, "logits", output)
    return logits
