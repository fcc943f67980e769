"""Are the gradients of a pipeline those of the model? A report for every parameter.

What goes wrong, and how it looks here::

    verdict      what was found                              a usual reason
    equal        the difference is rounding
    scaled       the right direction, the wrong length       the loss was not divided by the number of microbatches
    different    another direction                           microbatches mixed up, a tied weight's two parts not added
    missing      no rank has a gradient                      the head left out, a boundary cut the graph
    unexpected   a gradient where there should be none       a frozen parameter, a stage that ran what is not its own
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ringsim import comm
from ringsim.pipeline.single_process import single_process_step
from ringsim.pipeline.training import Loss, cross_entropy

__all__ = ["GradientReport", "GradientRow", "compare_gradients", "gradient_report", "tolerance_of"]


class GradientRow(NamedTuple):
    """What was found for one parameter.

    Attributes:
        parameter: its name.
        verdict: "equal", "scaled", "different", "missing" or "unexpected".
        difference: largest absolute difference, relative to the largest value of the expected gradient; infinite where one is not there.
        scale: what the expected gradient would have to be multiplied by; None unless the verdict is "scaled".
        ranks: the ranks that have a gradient of it.
    """

    parameter: str
    verdict: str
    difference: float
    scale: float | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GradientReport:
    """One row for each parameter, those that differ first; true where all are equal.

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
                f"{len(self.rows)} gradients equal those of one process (largest difference {self.worst:.2g}, tolerance {self.tolerance:g})"
            )
        head = f"{len(self.wrong)} of {len(self.rows)} gradients differ from those of one process (tolerance {self.tolerance:g})"
        cells = [("parameter", "verdict", "difference", "scale", "ranks")]
        for row in self.wrong:
            scale = "" if row.scale is None else f"{row.scale:.4g}"
            cells.append((row.parameter, row.verdict, f"{row.difference:.2g}", scale, " ".join(map(str, row.ranks))))
        widths = [max(len(line[column]) for line in cells) for column in range(5)]
        lines = [
            f"  {name:<{widths[0]}}  {verdict:<{widths[1]}}  {difference:>{widths[2]}}  {scale:>{widths[3]}}  {ranks}".rstrip()
            for name, verdict, difference, scale, ranks in cells
        ]
        return "\n".join([head, *lines])


def compare_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], *, tolerance: float, rank: int = 0
) -> GradientReport:
    """Compares gradients, parameter by parameter; makes no message.

    Args:
        found: gradients by the parameter's name; None where there is none.
        expected: the right ones, for the same names.
        tolerance: the relative difference that counts as rounding.
        rank: whose gradients were found.

    Returns:
        The report.

    Example:
        See `GradientReport`.
    """
    return _report([_row(name, found.get(name), expected[name], tolerance, rank) for name in expected], tolerance)


def gradient_report(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss_fn: Loss = cross_entropy,
    attention_masks: Sequence[Tensor] | None = None,
    tolerance: float | None = None,
) -> GradientReport:
    """Compares the gradients that the ranks hold after a step with those of one process, which each rank computes for itself.

    Call it after the step and before the optimizer's: it needs the weights that the step was run with. Compare in ``model.eval()``, or
    without dropout. With several steps' gradients added up, pass the microbatches of all of them and expect their scale.

    Collective over the default group, where there is one: every rank calls it, with the same arguments; it blocks until all have.

    Args:
        model: the whole model; each rank holds the gradients of its stages in its own.
        inputs: one tensor for each microbatch, as given to the step.
        targets: one tensor for each microbatch, as given to the step.
        loss_fn: loss of a microbatch, from logits and targets.
        attention_masks: one tensor for each microbatch; None: no padding.
        tolerance: the relative difference that counts as rounding; None: 1e-10 for float64, 1e-5 for float32, 0.05 for less.

    Returns:
        The report, the same on every rank: a parameter that several ranks hold is as wrong as the worst of them.

    Raises:
        ArgumentError: the lists have different lengths, or are empty.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> inputs, targets = [torch.ones(1, 4, 2)] * 2, [torch.zeros(1, 4, dtype=torch.long)] * 2
        >>> for x, target in zip(inputs, targets):
        ...     cross_entropy(model(x), target).backward()  # not divided by the number of microbatches
        >>> [(row.verdict, round(row.scale, 3)) for row in gradient_report(model, inputs, targets).rows]
        [('scaled', 2.0), ('scaled', 2.0)]
    """
    if tolerance is None:
        tolerance = tolerance_of(model)
    expected = single_process_step(model, inputs, targets, loss_fn=loss_fn, attention_masks=attention_masks).gradients
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    if not comm.is_initialized():
        return compare_gradients(found, expected, tolerance=tolerance)
    rows = compare_gradients(found, expected, tolerance=tolerance, rank=comm.get_rank()).rows
    of_all: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(of_all, rows)
    by_parameter: dict[str, list[GradientRow]] = {}
    for row in itertools.chain.from_iterable(of_all):
        by_parameter.setdefault(row.parameter, []).append(row)
    return _report([_merged(same) for same in by_parameter.values()], tolerance)


def tolerance_of(model: nn.Module) -> float:
    """Returns the relative difference that counts as rounding for a model's gradients, by the least exact dtype of its parameters.

    Args:
        model: the model.

    Returns:
        1e-10 for float64, 1e-5 for float32, 0.05 for anything less.

    Example:
        >>> tolerance_of(nn.Linear(1, 1))
        1e-05
    """
    return max((_TOLERANCES.get(parameter.dtype, 0.05) for parameter in model.parameters()), default=0.0)


_TOLERANCES: Final = {torch.float64: 1e-10, torch.float32: 1e-5}
_WORST_FIRST: Final = ("missing", "unexpected", "different", "scaled", "equal")


def _badness(row: GradientRow) -> tuple[int, float]:
    return _WORST_FIRST.index(row.verdict), -row.difference


def _report(rows: Iterable[GradientRow], tolerance: float) -> GradientReport:
    return GradientReport(tuple(sorted(rows, key=_badness)), tolerance)


def _merged(rows: Sequence[GradientRow]) -> GradientRow:
    """Returns one row for what several ranks found for a parameter; those that hold no gradient of it do not count, unless nobody does."""
    holders = [row for row in rows if row.ranks] or rows
    return min(holders, key=_badness)._replace(ranks=tuple(rank for row in rows for rank in row.ranks))


def _row(name: str, found: Tensor | None, expected: Tensor | None, tolerance: float, rank: int) -> GradientRow:
    ranks = () if found is None else (rank,)
    if found is None or expected is None:
        if found is None and expected is None:
            return GradientRow(name, "equal", 0.0, None, ranks)
        return GradientRow(name, "missing" if found is None else "unexpected", math.inf, None, ranks)
    found, expected = found.double(), expected.double()
    difference = _relative(found, expected)
    if difference <= tolerance:
        return GradientRow(name, "equal", difference, None, ranks)
    scale = float((found * expected).sum() / expected.square().sum())
    if scale > 0 and _relative(found, scale * expected) <= tolerance:
        return GradientRow(name, "scaled", difference, scale, ranks)
    return GradientRow(name, "different", difference, None, ranks)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest expected value; infinite where zeros, or something infinite, tell nothing."""
    largest, difference = float(expected.abs().max()), float((found - expected).abs().max())
    if difference == 0:
        return 0.0
    relative = difference / largest if largest else math.inf
    return math.inf if math.isnan(relative) else relative
