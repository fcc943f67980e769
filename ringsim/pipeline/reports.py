"""Compares a pipeline with the same model in a single process.

``single_process_step`` computes reference gradients without a pipeline. ``gradient_report``
compares every parameter's gradient with its reference::

    verdict      meaning                                     usual reason
    equal        the difference is rounding
    scaled       the right direction, the wrong length       the loss was not divided by the number
                                                             of microbatches
    different    a different direction                       microbatches mixed up, a tied weight's
                                                             two parts not added
    missing      no rank has a gradient                      the head left out, a boundary that cuts
                                                             the graph
    unexpected   a gradient that should not exist            a frozen parameter, a stage that ran a
                                                             layer of another stage

Four more checks need no messages::

    check_gradient_flow  does every parameter have a gradient?             after a backward pass
    boundary_shapes      which tensors cross each boundary?                before the first step
    check_single_rank    do the stages, in one process, equal the model?   before the first run with
                                                                           ranks
    compare_losses       do the losses equal those of one process?     after training

If `check_single_rank` passes but a run on several ranks is wrong, look at the messages. If
`check_single_rank` fails, look at the partition or the adapter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringsim import comm
from ringsim.pipeline.adapters import Adapter
from ringsim.pipeline.stage import (
    Stage,
    backward_stage,
    build_stages,
    forward_stage,
    keep_random_numbers,
)
from ringsim.pipeline.training import Loss, check_microbatches, cross_entropy


class Reference(NamedTuple):
    """The loss and the gradients of a step in a single process.

    Attributes:
        loss: the mean of the microbatches' losses.
        gradients: the gradients by parameter name. A gradient is None if the parameter is frozen,
            or if the loss does not depend on the parameter.
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
    """Computes the loss and the gradients of a step by calling the whole model.

    This function runs one microbatch after another and sends no messages. It neither reads nor
    changes the gradients that the parameters already have, and it restores the state of the random
    number generators. A model with dropout drops different values here than in a pipeline, so
    compare in ``model.eval()``, or without dropout.

    Args:
        model: the whole model, which takes a tensor and returns logits (or an object with
            ``logits``, as in ``transformers``).
        inputs: one tensor per microbatch: token ids, shape (batch, tokens), or any other input of
            the model.
        targets: one tensor per microbatch, already aligned.
        loss_fn: a function that returns the loss of a microbatch from logits and targets.
        attention_masks: one tensor per microbatch, with 1 for a token and 0 for padding, or None if
            there is no padding.

    Returns:
        The loss of the step and the gradients by parameter name.

    Raises:
        ArgumentError: the lists differ in length, or are empty.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> inputs, targets = (
        ...     [torch.ones(1, 2), 3 * torch.ones(1, 2)],
        ...     [torch.zeros(1, 1), torch.zeros(1, 1)],
        ... )
        >>> single_process_step(
        ...     model, inputs, targets, loss_fn=lambda y, target: (y - target).sum()
        ... ).gradients
        {'weight': tensor([[2., 2.]])}
    """
    check_microbatches(inputs=inputs, targets=targets, attention_masks=attention_masks)
    masks: Sequence[Tensor | None] = attention_masks or [None] * len(inputs)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    total = 0.0
    with keep_random_numbers(inputs[0]), torch.enable_grad():
        for x, target, mask in zip(inputs, targets, masks, strict=True):
            loss = loss_fn(_logits(model, x, mask), target) / len(inputs)
            total += loss.item()
            found: Sequence[Tensor | None] = torch.autograd.grad(
                loss, list(trained.values()), allow_unused=True
            )  # unlike backward(), does not change .grad
            for name, gradient in zip(trained, found, strict=True):
                before = sums[name]
                if gradient is not None:
                    sums[name] = gradient if before is None else before + gradient
    return Reference(total, sums)


def _logits(model: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    output: Any = model(x) if mask is None else model(x, attention_mask=mask)
    logits: Tensor = getattr(output, "logits", output)
    return logits


class GradientRow(NamedTuple):
    """The result for one parameter.

    Attributes:
        parameter: the name of the parameter.
        verdict: "equal", "scaled", "different", "missing" or "unexpected".
        difference: the largest absolute difference, relative to the largest value of the expected
            gradient; infinite if a gradient is missing.
        scale: the factor from the expected gradient to the found gradient, or None unless the
            verdict is "scaled".
        ranks: the ranks that hold a gradient for this parameter.
    """

    parameter: str
    verdict: str
    difference: float
    scale: float | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GradientReport:
    """The results for all parameters, with mismatches first. True if all gradients match.

    Attributes:
        rows: one row per parameter.
        tolerance: the largest relative difference that counts as rounding.

    Example:
        >>> found = {"weight": torch.tensor([2.0, 4.0]), "bias": None}
        >>> expected = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([1.0])}
        >>> report = compare_gradients(found, expected, tolerance=1e-5)
        >>> report
        2 of 2 gradients differ from those of a single process (tolerance 1e-05)
          parameter  verdict  difference  scale  ranks
          bias       missing         inf
          weight     scaled            1      2  0
        >>> bool(report)
        False
    """

    rows: tuple[GradientRow, ...]
    tolerance: float

    def __bool__(self) -> bool:
        """Returns whether all gradients are equal."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[GradientRow, ...]:
        """The rows whose verdict is not "equal"."""
        return tuple(row for row in self.rows if row.verdict != "equal")

    @property
    def worst(self) -> float:
        """The largest difference, or 0 if there are no parameters."""
        return max((row.difference for row in self.rows), default=0.0)

    def __repr__(self) -> str:
        """Returns a table of the mismatches, or one line if all gradients are equal."""
        if not self.wrong:
            return (
                f"{len(self.rows)} gradients equal those of a single process (largest difference "
                f"{self.worst:.2g}, tolerance {self.tolerance:g})"
            )
        head = (
            f"{len(self.wrong)} of {len(self.rows)} gradients differ from those of a single "
            f"process (tolerance {self.tolerance:g})"
        )
        cells = [GradientRow._fields]
        for name, verdict, difference, scale, ranks in self.wrong:
            scale_text = "" if scale is None else f"{scale:.4g}"
            ranks_text = " ".join(map(str, ranks))
            cells.append((name, verdict, f"{difference:.2g}", scale_text, ranks_text))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            (
                f"  {name:<{widths[0]}}  {verdict:<{widths[1]}}  {difference:>{widths[2]}}  "
                f"{scale:>{widths[3]}}  {ranks}"
            ).rstrip()
            for name, verdict, difference, scale, ranks in cells
        ]
        return "\n".join([head, *lines])


def compare_gradients(
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: float,
    rank: int = 0,
) -> GradientReport:
    """Compares two sets of gradients, parameter by parameter, without messages.

    Args:
        found: the gradients by parameter name, with None for a missing gradient.
        expected: the expected gradients, keyed by the same names.
        tolerance: the largest relative difference that counts as rounding.
        rank: the rank that holds the found gradients.

    Returns:
        The report.

    Example:
        See `GradientReport`.
    """
    return _report(
        [_row(name, found.get(name), expected[name], tolerance, rank) for name in expected],
        tolerance,
    )


def gradient_report(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss_fn: Loss = cross_entropy,
    attention_masks: Sequence[Tensor] | None = None,
    tolerance: float | None = None,
) -> GradientReport:
    """Compares all ranks' gradients after a step with those of a single process.

    Each rank computes the reference itself. Call this function after the step and before the
    optimizer, because it needs the step's weights. Compare in ``model.eval()``, or without dropout.
    If you accumulate the gradients of several steps, pass the microbatches of all steps, and expect
    the verdict "scaled".

    If a default group exists, this function is a collective over the group: every rank must call it
    with the same arguments, and it blocks until all ranks have called it.

    Args:
        model: the whole model; each rank's copy holds the gradients of the rank's stages.
        inputs: one tensor per microbatch, as passed to the step.
        targets: one tensor per microbatch, as passed to the step.
        loss_fn: a function that returns the loss of a microbatch from logits and targets.
        attention_masks: one tensor per microbatch, or None if there is no padding.
        tolerance: the largest relative difference that counts as rounding. None means 1e-10 for
            float64, 1e-5 for float32, and 0.05 for lower-precision types.

    Returns:
        The report, which is the same on every rank. If several ranks hold a parameter, its row
        shows the worst of their results.

    Raises:
        ArgumentError: the lists differ in length, or are empty.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> inputs, targets = [torch.ones(1, 4, 2)] * 2, [torch.zeros(1, 4, dtype=torch.long)] * 2
        >>> for x, target in zip(inputs, targets):
        ...     cross_entropy(
        ...         model(x), target
        ...     ).backward()  # not divided by the number of microbatches
        >>> [
        ...     (row.verdict, round(row.scale, 3))
        ...     for row in gradient_report(model, inputs, targets).rows
        ... ]
        [('scaled', 2.0), ('scaled', 2.0)]
    """
    if tolerance is None:
        tolerance = tolerance_of(model)
    expected = single_process_step(
        model, inputs, targets, loss_fn=loss_fn, attention_masks=attention_masks
    ).gradients
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    rank = comm.get_rank() if comm.is_initialized() else 0
    report = compare_gradients(found, expected, tolerance=tolerance, rank=rank)
    if not comm.is_initialized():
        return report
    of_all: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(of_all, report.rows)
    by_parameter: dict[str, list[GradientRow]] = {}
    for row in itertools.chain.from_iterable(of_all):
        by_parameter.setdefault(row.parameter, []).append(row)
    return _report([_merged(same) for same in by_parameter.values()], tolerance)


def tolerance_of(model: nn.Module) -> float:
    """Returns the tolerance for a model's lowest-precision dtype.

    It is 1e-10 for float64, 1e-5 for float32, and 0.05 for other types.

    Example:
        >>> tolerance_of(nn.Linear(1, 1))
        1e-05
    """
    return max(
        (_TOLERANCES.get(parameter.dtype, 0.05) for parameter in model.parameters()), default=0.0
    )


_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_WORST_FIRST = ("missing", "unexpected", "different", "scaled", "equal")


def _badness(row: GradientRow) -> tuple[int, float]:
    return _WORST_FIRST.index(row.verdict), -row.difference


def _report(rows: Iterable[GradientRow], tolerance: float) -> GradientReport:
    return GradientReport(tuple(sorted(rows, key=_badness)), tolerance)


def _merged(rows: Sequence[GradientRow]) -> GradientRow:
    """Merges several ranks' rows for one parameter.

    Ranks without a gradient do not count, unless no rank has a gradient.
    """
    holders = [row for row in rows if row.ranks] or rows
    return min(holders, key=_badness)._replace(
        ranks=tuple(rank for row in rows for rank in row.ranks)
    )


def _row(
    name: str, found: Tensor | None, expected: Tensor | None, tolerance: float, rank: int
) -> GradientRow:
    ranks = () if found is None else (rank,)
    if found is None and expected is None:
        return GradientRow(name, "equal", 0.0, None, ranks)
    if found is None or expected is None:
        return GradientRow(
            name, "missing" if found is None else "unexpected", math.inf, None, ranks
        )
    found, expected = found.double(), expected.double()
    difference = _relative(found, expected)
    scale = float((found * expected).sum() / expected.square().sum())
    if difference <= tolerance:
        return GradientRow(name, "equal", difference, None, ranks)
    if scale > 0 and _relative(found, scale * expected) <= tolerance:
        return GradientRow(name, "scaled", difference, scale, ranks)
    return GradientRow(name, "different", difference, None, ranks)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value.

    The result is infinite if the largest expected value is zero or not finite.
    """
    return _ratio(float((found - expected).abs().max()), float(expected.abs().max()))


def _ratio(difference: float, expected: float) -> float:
    if difference == 0:
        return 0.0
    relative = difference / expected if expected else math.inf
    return math.inf if math.isnan(relative) else relative


def check_gradient_flow(model: nn.Module) -> dict[str, str]:
    """Finds trained parameters whose gradients are missing, zero or not finite.

    On a rank of a pipeline, pass the rank's stage, because the model's other layers have no
    gradients there.

    Args:
        model: a model, or a `Stage`, after a backward pass.

    Returns:
        A dict that maps parameter names to "no gradient", "only zeros" or "not finite". It is empty
        if there is no problem.

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
    """The tensor that a stage sends to the next stage for each microbatch.

    The gradient that comes back has the same shape.

    Attributes:
        stage: the sending stage.
        shape: the shape, which is (batch, tokens, hidden) for a language model.
        dtype: the dtype of the elements.
        size_bytes: the size of the tensor in bytes.
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
    """Runs the stages one after another and describes the tensors passed between them.

    Args:
        model: the whole model.
        partition: the layers of each stage, as returned by `partition_model`.
        sample: the input of one microbatch: token ids, shape (batch, tokens), or any other input
            that the model accepts.
        attention_mask: 1 for a token and 0 for padding, shape (batch, tokens), or None if there is
            no padding.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        One `Boundary` for each stage except the last.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> boundary_shapes(model, [range(0, 2), range(2, 3)], torch.ones(4, 2))
        [Boundary(stage=0, shape=(4, 8), dtype=torch.float32, size_bytes=128)]
    """
    x, found = sample, []
    with torch.no_grad(), keep_random_numbers(x):
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
    """Runs one training step of the stages in this process and checks the gradients.

    The gradients are compared with those of the whole model. The boundaries are the same as in a
    pipeline: each stage has its own graph, and gradients are passed back explicitly. Afterwards,
    the parameters' earlier gradients are restored. Check in ``model.eval()``, or without dropout.

    Args:
        model: the whole model.
        partition: the layers of each stage, as returned by `partition_model`.
        inputs: one tensor per microbatch: token ids, shape (batch, tokens), or any other input of
            the model.
        targets: one tensor per microbatch, already aligned.
        loss_fn: a function that returns the loss of a microbatch from logits and targets.
        attention_masks: one tensor per microbatch, or None if there is no padding.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The report, with one row per parameter.

    Raises:
        ArgumentError: the lists differ in length, or are empty.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5))
        >>> ids = torch.tensor([[0, 1, 2]])
        >>> print(
        ...     bool(check_single_rank(model, [range(0, 1), range(1, 3)], [ids, ids], [ids, ids]))
        ... )
        True
    """
    expected = single_process_step(
        model, inputs, targets, loss_fn=loss_fn, attention_masks=attention_masks
    ).gradients
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    try:
        stages = build_stages(model, partition, adapter=adapter)
        with keep_random_numbers(inputs[0]), torch.enable_grad():
            for index, (x, target) in enumerate(zip(inputs, targets, strict=True)):
                mask = None if attention_masks is None else attention_masks[index]
                *earlier, (entered, logits) = _run_stages(stages, x, mask)
                grad = backward_stage(entered, loss_fn(logits, target) / len(inputs), None)
                for entered, left in reversed(earlier):
                    grad = backward_stage(entered, left, grad)
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = held[name]
    return compare_gradients(found, expected, tolerance=tolerance_of(model))


def _run_stages(
    stages: Sequence[Stage], x: Tensor, mask: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Returns each stage's input and output."""
    ends = []
    for stage in stages:
        entered = x.detach()
        x = forward_stage(partial(stage, attention_mask=mask), entered)
        ends.append((entered, x))
    return ends


class LossComparison(NamedTuple):
    """A comparison of the losses of two training runs. True if they agree.

    Attributes:
        first_step: the first step at which the losses differ by more than the tolerance, or None if
            there is no such step.
        difference: the largest relative difference over all steps.
    """

    first_step: int | None
    difference: float

    def __bool__(self) -> bool:
        """Returns whether all steps agree."""
        return self.first_step is None


def compare_losses(
    found: Sequence[float], expected: Sequence[float], *, tolerance: float = 1e-5
) -> LossComparison:
    """Compares a pipeline's losses with those of a single process, step by step.

    The first step that differs shows where to look. Step 0 points to the forward pass, and step 1
    to the gradients or the optimizer. A later step points to growing rounding errors, or to state
    that is not reset.

    Args:
        found: the loss of each step.
        expected: the loss of each step in a single process.
        tolerance: the largest relative difference that counts as rounding.

    Returns:
        The first step that differs and the largest difference.

    Raises:
        ValueError: the lengths of the lists differ.

    Example:
        >>> compare_losses([2.0, 1.5, 1.3], [2.0, 1.5, 1.0])
        LossComparison(first_step=2, difference=0.30000000000000004)
    """
    differences = [
        0.0 if one == other else _ratio(abs(one - other), abs(other))
        for one, other in zip(found, expected, strict=True)
    ]
    first_step = next(
        (step for step, difference in enumerate(differences) if difference > tolerance), None
    )
    return LossComparison(first_step, max(differences, default=0.0))
