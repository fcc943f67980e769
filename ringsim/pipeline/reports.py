"""Is a pipeline the model?

Its gradients beside those of one process, and four checks that need no messages.
``single_process_step`` computes the reference without a pipeline; ``gradient_report`` compares
every parameter with it::

    verdict      what was found                              a usual reason
    equal        the difference is rounding
    scaled       the right direction, the wrong length       the loss was not divided by the number
                                                             of microbatches
    different    another direction                           microbatches mixed up, a tied weight's
                                                             two parts not added
    missing      no rank has a gradient                      the head left out, a boundary cut the
                                                             graph
    unexpected   a gradient where there should be none       a frozen parameter, a stage that ran a
                                                             layer of another

Four questions to ask before blaming the messages::

    check_gradient_flow  has every parameter a gradient?                   after a backward pass
    boundary_shapes      what crosses each boundary, and how large is it?  before the first step
    check_single_rank    are the stages, one after the other in one        before the first run with
                         process, the model?                               ranks
    compare_losses       is each step's loss that of one process?          after training

If `check_single_rank` holds and a run on ranks does not, look at the messages. If it does not hold,
look at the cut or the adapter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

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

__all__ = [
    "Boundary",
    "GradientReport",
    "GradientRow",
    "LossComparison",
    "Reference",
    "boundary_shapes",
    "check_gradient_flow",
    "check_single_rank",
    "compare_gradients",
    "compare_losses",
    "gradient_report",
    "single_process_step",
    "tolerance_of",
]


class Reference(NamedTuple):
    """Loss and gradients of one step in one process.

    Attributes:
        loss: mean of the microbatches' losses.
        gradients: by the parameter's name; None for a parameter that is frozen, or that the loss
            does not reach.
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
    """Computes loss and gradients of a step by calling the model itself.

    One microbatch after the other; makes no message. The gradients that the parameters hold are
    neither read nor changed, and random numbers are left as they were. A model with dropout drops
    other values here than in a pipeline: compare in ``model.eval()``, or without dropout.

    Args:
        model: the whole model, a tensor in, logits out (or an object with ``logits``, as in
            ``transformers``).
        inputs: one tensor for each microbatch: token ids, shape (batch, tokens), or whatever the
            model takes.
        targets: one tensor for each microbatch, already aligned.
        loss_fn: loss of a microbatch, from logits and targets.
        attention_masks: 1 for a token, 0 for padding, one tensor for each microbatch; None: no
            padding.

    Returns:
        The loss of the step, and the gradients by the names of the parameters.

    Raises:
        ArgumentError: the lists have different lengths, or are empty.

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
            )  # unlike backward(), leaves .grad alone
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
    """What was found for one parameter.

    Attributes:
        parameter: its name.
        verdict: "equal", "scaled", "different", "missing" or "unexpected".
        difference: largest absolute difference, relative to the largest value of the expected
            gradient; infinite if one is missing.
        scale: the factor between the expected gradient and the one found; None unless the verdict
            is "scaled".
        ranks: the ranks that have a gradient of it.
    """

    parameter: str
    verdict: str
    difference: float
    scale: float | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GradientReport:
    """One row for each parameter, those that differ first; true if all are equal.

    Attributes:
        rows: what was found.
        tolerance: the relative difference that counts as rounding.

    Example:
        >>> found = {"weight": torch.tensor([2.0, 4.0]), "bias": None}
        >>> expected = {"weight": torch.tensor([1.0, 2.0]), "bias": torch.tensor([1.0])}
        >>> report = compare_gradients(found, expected, tolerance=1e-5)
        >>> report
        2 of 2 gradients differ from those of one process (tolerance 1e-05)
          parameter  verdict  difference  scale  ranks
          bias       missing         inf
          weight     scaled            1      2  0
        >>> bool(report)
        False
    """

    rows: tuple[GradientRow, ...]
    tolerance: float

    def __bool__(self) -> bool:
        """Tells whether all gradients are equal."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[GradientRow, ...]:
        """The rows whose verdict is not "equal"."""
        return tuple(row for row in self.rows if row.verdict != "equal")

    @property
    def worst(self) -> float:
        """The largest difference; 0 where there are no parameters."""
        return max((row.difference for row in self.rows), default=0.0)

    def __repr__(self) -> str:
        """Returns the table, or where all are equal, one line."""
        if not self.wrong:
            return (
                f"{len(self.rows)} gradients equal those of one process (largest difference "
                f"{self.worst:.2g}, tolerance {self.tolerance:g})"
            )
        head = (
            f"{len(self.wrong)} of {len(self.rows)} gradients differ from those of one process "
            f"(tolerance {self.tolerance:g})"
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
    """Compares gradients, parameter by parameter; makes no message.

    Args:
        found: gradients by the parameter's name; None for a missing one.
        expected: the right ones, for the same names.
        tolerance: the relative difference that counts as rounding.
        rank: whose gradients were found.

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
    """Compares the ranks' gradients after a step with those of one process.

    Each rank computes these for itself. Call it after the step and before the optimizer's: it needs
    the weights that the step was run with. Compare in ``model.eval()``, or without dropout. If
    gradients of several steps were added up, pass the microbatches of all of them and expect their
    scale.

    Collective over the default group, if there is one: every rank calls it with the same arguments,
    and it blocks until all have.

    Args:
        model: the whole model; each rank holds the gradients of its stages in its own.
        inputs: one tensor for each microbatch, as given to the step.
        targets: one tensor for each microbatch, as given to the step.
        loss_fn: loss of a microbatch, from logits and targets.
        attention_masks: one tensor for each microbatch; None: no padding.
        tolerance: the relative difference that counts as rounding; None: 1e-10 for float64, 1e-5
            for float32, 0.05 for less.

    Returns:
        The report, the same on every rank: a parameter that several ranks hold is as wrong as the
        worst of them.

    Raises:
        ArgumentError: the lists have different lengths, or are empty.

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
    """Returns the relative difference that counts as rounding, by the least exact dtype of a model.

    1e-10 (float64), 1e-5 (float32), 0.05.

    Example:
        >>> tolerance_of(nn.Linear(1, 1))
        1e-05
    """
    return max(
        (_TOLERANCES.get(parameter.dtype, 0.05) for parameter in model.parameters()), default=0.0
    )


_TOLERANCES: Final = {torch.float64: 1e-10, torch.float32: 1e-5}
_WORST_FIRST: Final = ("missing", "unexpected", "different", "scaled", "equal")


def _badness(row: GradientRow) -> tuple[int, float]:
    return _WORST_FIRST.index(row.verdict), -row.difference


def _report(rows: Iterable[GradientRow], tolerance: float) -> GradientReport:
    return GradientReport(tuple(sorted(rows, key=_badness)), tolerance)


def _merged(rows: Sequence[GradientRow]) -> GradientRow:
    """Returns one row for what several ranks found for a parameter.

    Ranks without a gradient do not count, unless all have none.
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
    """Returns the largest difference relative to the largest expected value.

    Infinite if that is zero or not finite.
    """
    return _ratio(float((found - expected).abs().max()), float(expected.abs().max()))


def _ratio(difference: float, expected: float) -> float:
    if difference == 0:
        return 0.0
    relative = difference / expected if expected else math.inf
    return math.inf if math.isnan(relative) else relative


def check_gradient_flow(model: nn.Module) -> dict[str, str]:
    """Finds parameters that a backward pass did not reach as it should. Frozen ones are left out.

    On a rank of a pipeline, pass this rank's stage: the other layers of the model should have no
    gradient here.

    Args:
        model: a model, or a `Stage`, after a backward pass.

    Returns:
        Name of the parameter -> "no gradient", "only zeros" or "not finite"; empty if all is well.

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
    """What one microbatch sends from a stage to the next.

    Its gradient comes back in the same shape.

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
    """Runs the stages one after the other, and returns what passes between them.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        sample: the input of one microbatch: token ids, shape (batch, tokens), or whatever the model
            takes.
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
    """Trains the stages for one step, one after the other in this process.

    Compares their gradients with the model's. The boundaries are those of a pipeline: each stage
    has a graph of its own, and gradients are handed back by hand. The gradients that the parameters
    had before are restored afterwards. Check in ``model.eval()``, or without dropout.

    Args:
        model: the whole model.
        partition: the layers of each stage, from `partition_model`.
        inputs: one tensor for each microbatch: token ids, shape (batch, tokens), or whatever the
            model takes.
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
    """Returns what entered each stage, and what left it."""
    ends = []
    for stage in stages:
        entered = x.detach()
        x = forward_stage(partial(stage, attention_mask=mask), entered)
        ends.append((entered, x))
    return ends


class LossComparison(NamedTuple):
    """How the losses of two trainings compare; true if they agree.

    Attributes:
        first_step: the first step whose losses differ by more than the tolerance; None if none
            does.
        difference: the largest relative difference of all steps.
    """

    first_step: int | None
    difference: float

    def __bool__(self) -> bool:
        """Tells whether no step differs."""
        return self.first_step is None


def compare_losses(
    found: Sequence[float], expected: Sequence[float], *, tolerance: float = 1e-5
) -> LossComparison:
    """Compares the losses of a pipeline with those of one process, step by step.

    The first step that differs tells where to look: step 0 means the forward pass, step 1 the
    gradients or the optimizer, and a later step growing rounding errors, or state that is not
    reset.

    Args:
        found: loss of each step.
        expected: loss of each step in one process.
        tolerance: the relative difference that counts as rounding.

    Returns:
        The first step that differs, and the largest difference.

    Raises:
        ValueError: the two have different lengths.

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
