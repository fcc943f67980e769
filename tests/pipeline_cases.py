"""Models, steps and prompts for pipeline tests, and a single process to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.errors import RingError
from ringsim.pipeline import (
    SmallTransformer,
    can_finish,
    cross_entropy,
    generate,
    train_step_pipeline,
)

torch.set_num_threads(1)  # two threads for tensors this small wait for each other most of the time
VOCABULARY = 13
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Case:
    """A pipeline step: its model, microbatches and options."""

    num_microbatches: int = 4
    num_layers: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float64
    same_shapes: bool = True
    tied: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    make: str = "transformer"


def make_model(case: Case) -> nn.Module:
    """Returns a transformer, or a sequential model with another width at every boundary.

    In a transposed model, the first and the last layer share a weight.
    """
    torch.manual_seed(case.seed)
    if case.make == "transformer":
        sizes: Any = {"hidden_size": 8, "num_heads": 2, "max_length": 16, "tied": case.tied}
        return SmallTransformer(VOCABULARY, num_layers=case.num_layers, **sizes).to(case.dtype)
    if case.make == "transposed":
        # its strides differ from those of a new tensor
        weight = nn.Parameter(torch.randn(6, 4, dtype=case.dtype).t())
        layers: list[nn.Module] = [
            nn.Embedding(VOCABULARY, 4),
            _Product(weight),
            nn.Tanh(),
            nn.Linear(6, 6),
        ]
        layers += [_Product(weight, turned=True), nn.Linear(4, VOCABULARY)]
        return nn.Sequential(*layers).to(case.dtype)
    widths = [4, 6, 3, 7, 5, 2][: case.num_layers]
    layers = [nn.Embedding(VOCABULARY, widths[0])]
    for before, after in zip(widths, [*widths[1:], VOCABULARY], strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(case.dtype)


class _Product(nn.Module):
    """Multiplies by a weight, or by the transposed weight."""

    def __init__(self, weight: nn.Parameter, *, turned: bool = False) -> None:
        super().__init__()
        self.weight, self.turned = weight, turned

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.t() if self.turned else self.weight)


def make_microbatches(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Returns token ids and targets, some ignored, of one size or of several."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    inputs, targets = [], []
    for index in range(case.num_microbatches):
        shape = (2, 5) if case.same_shapes else (1 + index % 3, 3 + index % 4)
        tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
        target = tokens[:, 1:].clone()
        target[0, index % shape[1]] = -100
        inputs.append(tokens[:, :-1])
        targets.append(target)
    return inputs, targets


def single_process(model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Runs the whole model on one microbatch after the other, and leaves gradients in it."""
    total = 0.0
    for tokens, target in zip(inputs, targets, strict=True):
        loss = cross_entropy(model(tokens), target) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def difference(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Returns the largest difference of any gradient, relative to the largest reference value."""
    return max(
        (
            float((grad - reference[n]).abs().max() / reference[n].abs().max().clamp(min=1e-30))
            for n, grad in mine.items()
        ),
        default=0.0,
    )


def train_all(cases: Sequence[Case]) -> list[tuple[float, dict[str, Tensor]]]:
    """Returns the loss and the gradients of each case; runs on each rank."""
    found = []
    for case in cases:
        model = make_model(case)
        loss = train_step_pipeline(model, *make_microbatches(case), **case.options)
        found.append((loss, gradients(model)))
    return found


def catch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except RingError as error:
        return str(error)
    return "nothing"


def complaints(
    cases: Sequence[Case], results: Sequence[list[tuple[float, dict[str, Tensor]]]]
) -> list[str]:
    """Lists the differences between the ranks' results and the reference."""
    said = []
    for case, *by_rank in zip(cases, *results, strict=True):
        reference, tolerance = make_model(case), TOLERANCES[case.dtype]
        expected = single_process(reference, *make_microbatches(case))
        for rank, (loss, held) in enumerate(by_rank):
            if (
                loss != by_rank[0][0]
                or not abs(loss - expected) <= tolerance
                or not difference(held, gradients(reference)) <= tolerance
            ):
                said.append(
                    f"{case}: rank {rank} has a loss of {loss}, expected {expected}; gradients "
                    f"{difference(held, gradients(reference))}"
                )
        if missing := set(gradients(reference)) - {name for _, held in by_rank for name in held}:
            said.append(f"{case}: no rank has gradients of {sorted(missing)}")
    return said


# -- generation

TOKENS = 61
PROMPTS: list[list[int]] = [
    [1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12, 13, 14], [15, 16], [17, 18, 19],
    [20, 21, 22, 23, 24],
]  # fmt: skip


def small_model(layers: int = 5, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return SmallTransformer(
        TOKENS, hidden_size=32, num_layers=layers, num_heads=4, max_length=64
    ).double()


def one_by_one(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Continues each prompt alone, and reads everything again for each token, without a cache."""
    model.eval()
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_tokens):
                logits = model(torch.tensor([tokens]))
                tokens.append(int(getattr(logits, "logits", logits)[0, -1].argmax()))
            rows.append(tokens[len(prompt) :])
    return rows


def settings_for(world_size: int) -> list[dict[str, Any]]:
    """Returns all settings that finish, some in one round and some in several."""
    return [
        {
            "num_inner_iterations": turns,
            "async_comm": async_comm,
            "batch_size": 1 if (turns + async_comm) % 2 else None,
        }
        for async_comm in (False, True)
        for turns in range(1, 2 * world_size)
        if can_finish(world_size, turns, async_comm)
    ]


def generate_all(settings: list[dict[str, Any]], num_tokens: int) -> list[list[list[int]]]:
    """Returns the tokens with each of the settings; runs on each rank."""
    return [generate(small_model(), PROMPTS, num_tokens, **each) for each in settings]
