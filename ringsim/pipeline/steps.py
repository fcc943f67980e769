"""One stage, one microbatch: its forward and its backward pass.

What happens at a boundary between two stages::

    stage 0            y  -- sent -->  x            stage 1       x is a leaf: autograd's graph of stage 1 begins there
    (graph of stage 0) ^               |  (graph of stage 1)
                       grad <- sent -- x.grad                     its gradient is that of y, where the graph of stage 0 ends

The tensor that is kept for the backward pass must be *the very tensor that was fed forward, and a leaf*. A copy of it gets no gradient.
A tensor that has just been received has no graph behind it, so that making it a leaf cuts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError

__all__ = ["backward_input", "backward_stage", "backward_weight", "forward_stage"]


def forward_stage(stage: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a stage on what came from the stage before, and makes ``x`` ready to receive a gradient.

    Keep ``x`` and the result for `backward_stage`. It sends nothing.

    Args:
        stage: the stage: a module, or any function of one tensor.
        x: its input: hidden states, shape (batch, seq, hidden), or token ids, shape (batch, seq), which have no gradient. It must be a
            leaf, and ``requires_grad`` is set on it where it holds floating-point numbers.

    Returns:
        The output ``y``, hidden states or logits.

    Raises:
        ArgumentError: ``x`` is the result of a computation that autograd recorded.

    Example:
        >>> x = torch.ones(1, 2)
        >>> y = forward_stage(lambda x: 3 * x, x)
        >>> backward_stage(x, y, torch.ones(1, 2))
        tensor([[3., 3.]])
    """
    if not x.is_leaf:
        raise ArgumentError(
            f"x must be a leaf of autograd's graph, got the result of {type(x.grad_fn).__name__}. "
            "Pass what was received, or x.detach() of what another stage of this rank computed."
        )
    if x.is_floating_point() and torch.is_grad_enabled():
        x.requires_grad_()
    return stage(x)


def backward_stage(x: Tensor, y: Tensor, grad: Tensor | None) -> Tensor | None:
    """Runs the backward pass of a stage: gradients are added to its parameters, that of ``x`` is returned.

    It sends nothing. Calling it frees the graph behind ``y``.

    Args:
        x: what was given to `forward_stage`.
        y: what that returned.
        grad: gradient of ``y``, same shape, from the stage after; None on the last stage, where ``y`` is the loss.

    Returns:
        Gradient of ``x``, for the stage before; None where ``x`` has none (token ids), or nothing of the stage needs one.

    Example:
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> x = torch.tensor(5.0)
        >>> y = forward_stage(lambda x: weight * x, x)
        >>> backward_stage(x, y, grad=None), weight.grad
        (tensor(2.), tensor(5.))
    """
    if y.requires_grad:
        torch.autograd.backward(y, grad)
    return x.grad


def backward_input(x: Tensor, y: Tensor, grad: Tensor | None) -> Tensor | None:
    """Runs the first half of a backward pass: the gradient of ``x``, which the stage before waits for. Parameters get nothing.

    `backward_weight` must follow, any time later: until then the graph is kept, and so are the activations in it. On the first stage,
    where ``x`` needs no gradient, this half is nothing.

    The two halves together cost more than `backward_stage`: the second walks back through the layers once more to reach their weights,
    since autograd keeps no gradients between the layers. What the schedules with split backward passes save is waiting, not work.

    Args:
        x: what was given to `forward_stage`.
        y: what that returned.
        grad: gradient of ``y`` from the stage after; None on the last stage.

    Returns:
        Gradient of ``x``; None where it has none.

    Example:
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> x = torch.tensor(5.0)
        >>> y = forward_stage(lambda x: weight * x, x)
        >>> backward_input(x, y, grad=None), weight.grad
        (tensor(2.), None)
        >>> backward_weight(y, grad=None, parameters=[weight])
        >>> weight.grad
        tensor(5.)
    """
    if x.requires_grad and y.requires_grad:
        torch.autograd.backward(y, grad, inputs=[x], retain_graph=True)
    return x.grad


def backward_weight(y: Tensor, grad: Tensor | None, parameters: Iterable[nn.Parameter | Tensor]) -> None:
    """Runs the second half of a backward pass: adds to the gradients of the stage's parameters, and frees the graph.

    Args:
        y: what `forward_stage` returned.
        grad: the same gradient of ``y`` that `backward_input` got.
        parameters: those of the stage; frozen ones get nothing.

    Example:
        See `backward_input`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained and y.requires_grad:
        torch.autograd.backward(y, grad, inputs=trained)
