"""What the exercises on training are tried on: a small model with data, and each rank's gradients against those of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ringsim.pipeline.reports import GradientRow

__all__ = ["Task", "count_microbatches", "find_wrong", "make_task"]

VOCABULARY: Final = 11
WIDTH: Final = 6


class Task(NamedTuple):
    """A model of six layers and its data, in float64: token ids in, logits out. The same on every rank."""

    model: nn.Sequential
    inputs: list[Tensor]
    targets: list[Tensor]


def make_task(secret: int, num_microbatches: int) -> Task:
    """Makes model and data; called on each rank.

    Args:
        secret: what weights and tokens are drawn from.
        num_microbatches: how many microbatches, each of shape (2, 5).

    Returns:
        The task; every layer but the first takes and gives hidden states.
    """
    import torch  # here: who only starts ranks does not load it
    from torch import nn

    torch.manual_seed(secret)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)).double()
    tokens = [torch.randint(VOCABULARY, (2, 6)) for _ in range(num_microbatches)]
    return Task(model, [each[:, :-1] for each in tokens], [each[:, 1:] for each in tokens])


def find_wrong(task: Task, mine: Iterable[nn.Parameter]) -> GradientRow | None:
    """Compares what this rank's parameters hold with the gradients of one process; makes no message.

    Args:
        task: after a step.
        mine: the parameters of this rank's stage; all others must have no gradient.

    Returns:
        The worst row of the report, None where all are equal. Its verdict is one of the report's, or "zeros" for a gradient of zeros alone.
    """
    from ringsim.pipeline.reports import compare_gradients, single_process_step, tolerance_of

    expected = single_process_step(*task).gradients
    held = {id(parameter) for parameter in mine}
    named = dict(task.model.named_parameters())
    due = {name: expected[name] if id(parameter) in held else None for name, parameter in named.items()}
    found = {name: parameter.grad for name, parameter in named.items()}
    report = compare_gradients(found, due, tolerance=tolerance_of(task.model))
    if not report.wrong:
        return None
    row = report.wrong[0]
    gradient = found[row.parameter]
    return row if gradient is None or gradient.any() else row._replace(verdict="zeros")


def count_microbatches(number: int) -> str:
    """Returns a number of microbatches for a sentence.

    Example:
        >>> count_microbatches(1), count_microbatches(3)
        ('1 microbatch', '3 microbatches')
    """
    return f"{number} microbatch{'' if number == 1 else 'es'}"
