"""Models and steps for the tests of training, and the single process that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.pipeline.training import cross_entropy, train_step_pipeline
from ringsim.pipeline.transformer import SmallTransformer

VOCABULARY = 13


@dataclass(frozen=True)
class Case:
    """One step: which model, which microbatches, how it is run."""

    num_microbatches: int = 4
    num_layers: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float64
    same_shapes: bool = True
    tied: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    make: str = "transformer"


def make_transformer(case: Case) -> nn.Module:
    return SmallTransformer(VOCABULARY, hidden_size=8, num_layers=case.num_layers, num_heads=2, max_length=16, tied=case.tied)


def make_sequential(case: Case) -> nn.Module:
    widths = [4, 6, 3, 7, 5, 2][: case.num_layers]
    layers = [nn.Embedding(VOCABULARY, widths[0])]
    for before, after in zip(widths, [*widths[1:], VOCABULARY], strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, Callable[[Case], nn.Module]] = {"transformer": make_transformer, "sequential": make_sequential}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    return MODELS[case.make](case).to(case.dtype)


def make_microbatches(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Returns token ids and aligned targets, some of them ignored; with ``same_shapes=False`` of several batch sizes and lengths."""
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


def single_process(model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], masks: Sequence[Tensor] | None = None) -> float:
    """The oracle: the whole model, one microbatch after the other; gradients land in the model."""
    total = 0.0
    for index, (tokens, target) in enumerate(zip(inputs, targets, strict=True)):
        logits = model(tokens) if masks is None else model(tokens, masks[index])
        loss = cross_entropy(logits, target) / len(inputs)
        loss.backward()
        total += loss.item()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(mine: Tensor, reference: Tensor) -> float:
    """Returns the largest difference, relative to the largest number of the reference."""
    return float((mine - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def compare(case: Case) -> tuple[float, float, list[str]]:
    """Runs a step on the ring and in this process: difference of the loss, of the worst gradient, and the parameters of this rank."""
    inputs, targets = make_microbatches(case)
    reference, model = make_model(case), make_model(case)
    expected = single_process(reference, inputs, targets)
    loss = train_step_pipeline(model, inputs, targets, **case.options)
    oracle, mine = gradients(reference), gradients(model)
    worst = max((difference(grad, oracle[name]) for name, grad in mine.items()), default=0.0)
    return abs(loss - expected), worst, sorted(mine)


def compare_all(cases: Sequence[Case]) -> list[tuple[float, float, list[str]]]:
    torch.set_num_threads(1)  # two threads for tensors this small wait for each other most of the time
    return [compare(case) for case in cases]


def complaints(case: Case, by_rank: Sequence[tuple[float, float, list[str]]], tolerance: float) -> list[str]:
    """Says what of a case is wrong, given what each rank found."""
    found = []
    if len({loss for loss, _, _ in by_rank}) > 1:
        found.append(f"{case}: the loss differs between ranks")
    for rank, (loss, worst, _) in enumerate(by_rank):
        if not (loss <= tolerance and worst <= tolerance):
            found.append(f"{case}: rank {rank} is off by {loss:.1e} in the loss, {worst:.1e} in the gradients")
    everything = {name for name, _ in make_model(case).named_parameters()}
    if missing := everything - {name for _, _, names in by_rank for name in names}:
        found.append(f"{case}: nobody has gradients of {sorted(missing)}")
    return found
