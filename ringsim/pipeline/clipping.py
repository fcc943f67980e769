"""Gradient clipping over all stages: the norm is that of the whole model's gradients, though no rank has them all."""

from __future__ import annotations

import torch
from torch import nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.ring_at_hand import find_ring
from ringsim.pipeline.sharing import gather_over_ring

__all__ = ["clip_grad_norm_pipeline"]


def clip_grad_norm_pipeline(model: nn.Module, max_norm: float) -> float:
    """Scales the gradients of all ranks so that their joint norm is at most ``max_norm``.

    Every rank of the ring calls it after a step and before its optimizer; it blocks until all have. Where pipelines are averaged over
    several rings, average first.

    Args:
        model: the whole model; parameters of other ranks have no gradient here.
        max_norm: the largest norm that is left as it is, more than 0.

    Returns:
        The norm before, the same number on every rank: that of a single process. A parameter that several ranks hold counts once.

    Raises:
        ArgumentError: ``max_norm`` is not more than 0.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> clip_grad_norm_pipeline(model, max_norm=1.0), [round(each, 3) for each in model.weight.grad.flatten().tolist()]
        (5.0, [0.6, 0.8])

    Source:
        ``torch.nn.utils.clip_grad_norm_``: the rule, and the 1e-6 that keeps a norm of 0 from being divided by.
    """
    if not max_norm > 0:
        raise ArgumentError(f"max_norm must be more than 0, got {max_norm}. Leave the call out to clip nothing.")
    squares = torch.zeros(len(list(model.parameters())), dtype=torch.float64)
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            squares[index] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
    # Who holds a tied parameter has the same gradient of it, the sum of all holders': the largest is the one.
    squares = torch.stack(gather_over_ring(find_ring(), squares)).amax(dim=0)
    norm = float(squares.sum().sqrt())
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm
