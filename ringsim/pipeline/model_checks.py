"""Four questions to ask before blaming the messages; none of them sends one.

::

    check_gradient_flow   has every parameter a gradient?                                  after a backward pass
    boundary_shapes       what crosses each boundary, and how large is it?                 before the first step
    check_single_rank     are the stages, one after the other in one process, the model?   before the first run with ranks
    compare_losses        is each step's loss that of one process?                         after training

If `check_single_rank` holds and a run on ranks does not, look at the messages; if it does not hold, at the cut or the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline.adapters.protocol import Adapter
from ringsim.pipeline.gradients import GradientReport, compare_gradients, tolerance_of
from ringsim.pipeline.single_process import single_process_step
from ringsim.pipeline.stage import Stage, build_stages
from ringsim.pipeline.steps import backward_stage, forward_stage
from ringsim.pipeline.training import Loss, cross_entropy

__all__ = ["Boundary", "LossComparison", "boundary_shapes", "check_gradient_flow", "check_single_rank", "compare_losses"]


def check_gradient_flow(model: nn.Module) -> dict[str, str]:
    """Finds parameters that a backward pass did not reach as it should. Frozen ones are left out.

    On a rank of a pipeline ask about this rank's stage: the model's other layers have no gradient here, and should have none.

    Args:
        model: a model, or a `Stage`, after a backward pass.

    Returns:
        Name of the parameter -> "no gradient", "only zeros" or "not finite"; empty where all is well.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()  # a graph that was cut
        >>> check_gradient_flow(model)
        {'0.weight': 'no gradient', '0.bias': 'no gradient'}
    """
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            found[name] = "no gradient"
        elif not parameter.grad.isfinite().all():
            found[name] = "not finite"
        elif not parameter.grad.any():
            found[name] = "only zeros"
    return found


class Boundary(NamedTuple):
    """What one microbatch sends from a stage to the next; its gradient comes back in the same shape.

    Attributes:
        stage: the stage that sends it.
        shape: its shape, (batch, tokens, hidden) for a language model.
        dtype: its dtype.
        size_bytes: how large it is.
    """

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int


def boundary_shapes(
    model: nn.Module,
    partition: Sequence[range],
    sample: Tensor,
    *,
    attention_mask: Tensor | None = None,
    adapter: Adapter | None = None,
) -> list[Boundary]:
    """Runs the stages one after the other, and says what passes between them.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        sample: the input of one microbatch: token ids, shape (batch, tokens), or whatever the model takes.
        attention_mask: 1 for a token, 0 for padding, shape (batch, tokens); None: no padding.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        One boundary for each stage but the last.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> boundary_shapes(model, [range(0, 2), range(2, 3)], torch.ones(4, 2))
        [Boundary(stage=0, shape=(4, 8), dtype=torch.float32, size_bytes=128)]
    """
    x, found = sample, []
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        for number, stage in enumerate(build_stages(model, partition, adapter=adapter)[:-1]):
            x = stage(x, attention_mask)
            found.append(Boundary(number, tuple(x.shape), x.dtype, x.nbytes))
    return found


def check_single_rank(
    model: nn.Module,
    partition: Sequence[range],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss_fn: Loss = cross_entropy,
    attention_masks: Sequence[Tensor] | None = None,
    adapter: Adapter | None = None,
) -> GradientReport:
    """Trains the stages for one step, one after the other in this process, and compares their gradients with the model's.

    The boundaries are those of a pipeline: each stage has a graph of its own, and its gradient is handed back by hand. The gradients that
    the parameters hold are put back afterwards. Check in ``model.eval()``, or without dropout.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        inputs: one tensor for each microbatch: token ids, shape (batch, tokens), or whatever the model takes.
        targets: one tensor for each microbatch, already aligned.
        loss_fn: loss of a microbatch, from logits and targets.
        attention_masks: one tensor for each microbatch; None: no padding.
        adapter: how to see the model, for one that ringsim does not know.

    Returns:
        The report, a row for each parameter.

    Raises:
        ArgumentError: the lists have different lengths, or are empty.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5))
        >>> ids = torch.tensor([[0, 1, 2]])
        >>> print(bool(check_single_rank(model, [range(0, 1), range(1, 3)], [ids, ids], [ids, ids])))
        True
    """
    expected = single_process_step(model, inputs, targets, loss_fn=loss_fn, attention_masks=attention_masks).gradients
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    try:
        stages = build_stages(model, partition, adapter=adapter)
        with torch.random.fork_rng([inputs[0].device] if inputs[0].is_cuda else []), torch.enable_grad():
            for index, (x, target) in enumerate(zip(inputs, targets, strict=True)):
                mask = None if attention_masks is None else attention_masks[index]
                _step(stages, x, mask, partial(_share, loss_fn, target, len(inputs)))
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = held[name]
    return compare_gradients(found, expected, tolerance=tolerance_of(model))


def _share(loss_fn: Loss, target: Tensor, num_microbatches: int, logits: Tensor) -> Tensor:
    return loss_fn(logits, target) / num_microbatches


def _step(stages: Sequence[Stage], x: Tensor, mask: Tensor | None, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Runs one microbatch forward through all stages, and back."""
    entered = []
    left = []
    for stage in stages:
        entered.append(x.detach())
        x = forward_stage(partial(stage, attention_mask=mask), entered[-1])
        left.append(x)
    left[-1] = loss_of(x)
    grad = None
    for x, y in zip(reversed(entered), reversed(left), strict=True):
        grad = backward_stage(x, y, grad)


class LossComparison(NamedTuple):
    """How the losses of two trainings compare; true where they agree.

    Attributes:
        first_step: the first step whose losses differ by more than the tolerance; None where none does.
        difference: the largest relative difference of all steps.
    """

    first_step: int | None
    difference: float

    def __bool__(self) -> bool:
        """Tells whether no step differs."""
        return self.first_step is None


def compare_losses(found: Sequence[float], expected: Sequence[float], *, tolerance: float = 1e-5) -> LossComparison:
    """Compares the losses of a pipeline with those of one process, step by step.

    The first step that differs tells where to look: step 0 means the forward pass, step 1 the gradients or the optimizer, a later one
    rounding that grew, or a state that is not reset.

    Args:
        found: loss of each step.
        expected: loss of each step in one process.
        tolerance: the relative difference that counts as rounding.

    Returns:
        The first step that differs, and the largest difference.

    Raises:
        ArgumentError: the two have different lengths.

    Example:
        >>> compare_losses([2.0, 1.5, 1.3], [2.0, 1.5, 1.0])
        LossComparison(first_step=2, difference=0.30000000000000004)
    """
    if len(found) != len(expected):
        raise ArgumentError(
            f"found and expected must have one loss for each step, got {len(found)} and {len(expected)}. Compare the same steps."
        )
    differences = [_relative(one, other) for one, other in zip(found, expected, strict=True)]
    first_step = next((step for step, difference in enumerate(differences) if difference > tolerance), None)
    return LossComparison(first_step, max(differences, default=0.0))


def _relative(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    relative = abs(found - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(relative) else relative
