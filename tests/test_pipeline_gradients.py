"""What a gradient report and the checks beside it say about gradients that are right, and about each known way to get them wrong."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import KINDS, build, logits, tokens
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline import (
    boundary_shapes,
    build_stages,
    check_gradient_flow,
    check_single_rank,
    compare_gradients,
    compare_losses,
    cross_entropy,
    gradient_report,
    partition_model,
    single_process_step,
)

INPUTS = [tokens(2, 5, seed=1), tokens(1, 7, seed=2), tokens(3, 4, seed=3)]
TARGETS = [tokens(2, 5, seed=4), tokens(1, 7, seed=5), tokens(3, 4, seed=6)]
TARGETS[0][0, :3] = -100
MASKS = [torch.ones_like(ids) for ids in INPUTS]
MASKS[2][1, 2:] = 0


def backward(model: nn.Module, share: float, inputs: list[Tensor] = INPUTS) -> None:
    for ids, target in zip(inputs, TARGETS, strict=True):
        (share * cross_entropy(logits(model, ids), target)).backward()


@pytest.mark.parametrize("kind", ["small", "llama"])
def test_the_reference_is_what_backward_gives(kind: str) -> None:
    model = build(kind)
    reference = single_process_step(model, INPUTS, TARGETS)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 1 / 3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(reference.gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
    losses = [cross_entropy(logits(model, ids), target).item() for ids, target in zip(INPUTS, TARGETS, strict=True)]
    assert reference.loss == pytest.approx(sum(losses) / 3, rel=1e-12)


def verdicts(model: nn.Module) -> list[tuple[str, str]]:
    return [(row.parameter, row.verdict) for row in gradient_report(model, INPUTS, TARGETS).wrong]


def test_each_known_mistake_has_its_verdict() -> None:
    right, undivided, mixed = build("small"), build("small"), build("small")
    backward(right, 1 / 3)
    report = gradient_report(right, INPUTS, TARGETS)
    assert report
    assert report.worst < 1e-14
    assert str(report).startswith(f"{len(list(right.parameters()))} gradients equal those of one process")
    backward(undivided, 1.0)  # by the number of microbatches
    report = gradient_report(undivided, INPUTS, TARGETS)
    assert not report
    assert {(row.verdict, round(row.scale or 0, 9), round(row.difference, 9)) for row in report.rows} == {("scaled", 3.0, 2.0)}
    undivided.head.weight.grad = None
    row, *others = gradient_report(undivided, INPUTS, TARGETS).wrong
    assert row == ("head.weight", "missing", math.inf, None, ())
    assert {other.verdict for other in others} == {"scaled"}
    backward(mixed, 1 / 3, [ids.flip(1) for ids in INPUTS])
    assert {verdict for _, verdict in verdicts(mixed)} == {"different"}


def test_tied_and_frozen_parameters() -> None:
    model, name = build("small", tied=True), "embedding.weight"
    backward(model, 1 / 3)
    weight = model.embedding.weight
    weight.grad = single_process_step(model, INPUTS, TARGETS).gradients[name] - weight.grad * 0.25
    assert verdicts(model) == [(name, "scaled")]
    weight.grad[3] += 1.0
    assert verdicts(model) == [(name, "different")]
    frozen = build("small")
    frozen.embedding.requires_grad_(False)
    backward(frozen, 1 / 3)
    assert verdicts(frozen) == []
    frozen.embedding.weight.grad = torch.zeros_like(frozen.embedding.weight)
    assert verdicts(frozen) == [(name, "unexpected")]


@pytest.mark.parametrize(
    ("found", "expected", "verdict"),
    [
        ([0.0, 0.0], [0.0, 0.0], ("equal", 0.0)),
        ([1.0, 1.0], [0.0, 0.0], ("different", math.inf)),
        ([0.0, 0.0], [1.0, 1.0], ("different", 1.0)),
        ([1.0, math.nan], [1.0, 1.0], ("different", math.inf)),
        ([1.0, 1.0], [1.0, math.nan], ("different", math.inf)),
    ],
)
def test_zeros_and_nan_are_compared_too(found: list[float], expected: list[float], verdict: tuple[str, float]) -> None:
    (row,) = compare_gradients({"w": torch.tensor(found)}, {"w": torch.tensor(expected)}, tolerance=1e-5).rows
    assert (row.verdict, row.difference) == verdict


def test_reference_leaves_random_numbers_alone() -> None:
    model = build("small", dropout=0.5)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    single_process_step(model, INPUTS, TARGETS)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("inputs", [[], INPUTS[:2]])
def test_reference_wants_as_many_inputs_as_targets(inputs: list[Tensor]) -> None:
    with pytest.raises(ArgumentError, match="one tensor for each microbatch"):
        single_process_step(build("small"), inputs, TARGETS if inputs else [])


@pytest.mark.parametrize(("kind", "masks"), [("small", MASKS), ("small", None), ("llama", MASKS)])
def test_stages_one_after_the_other_train_as_the_model(kind: str, masks: list[Tensor] | None) -> None:
    model = build(kind)
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    for sizes in ([3], [0, 2, 0, 1, 0]):
        report = check_single_rank(model, partition_model(model, len(sizes), by=sizes), INPUTS, TARGETS, attention_masks=masks)
        assert report, str(report)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient  # put back
        assert bool((gradient == 1).all())  # and not added to


def test_a_wrong_cut_is_seen_in_one_process() -> None:
    model = build("small")
    report = check_single_rank(model, [range(1), range(2, 3)], INPUTS, TARGETS)  # layer 1 is lost
    verdicts = {row.parameter: row.verdict for row in report.rows}
    assert verdicts["blocks.1.attention.out.weight"] == "missing"
    assert verdicts["blocks.2.attention.out.weight"] == "different"


def test_gradient_flow_names_what_was_not_reached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert check_gradient_flow(model) == {}
    model[1].weight.grad = None
    model[1].bias.grad = torch.zeros(2)
    model[2].weight.grad[0, 0] = math.nan
    assert check_gradient_flow(model) == {"1.weight": "no gradient", "1.bias": "only zeros", "2.weight": "not finite"}
    small = build("small")
    first, last = build_stages(small, partition_model(small, 2))
    first(INPUTS[0]).sum().backward()
    assert check_gradient_flow(first) == {}
    assert set(check_gradient_flow(last).values()) == {"no gradient"}


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_hidden_states(kind: str) -> None:
    model = build(kind, dtype=torch.float32)
    found = boundary_shapes(model, partition_model(model, 5), INPUTS[1])
    assert [(each.stage, each.shape, each.size_bytes) for each in found] == [(stage, (1, 7, 16), 7 * 16 * 4) for stage in range(4)]


@pytest.mark.parametrize(
    ("found", "expected", "step", "difference"),
    [
        ([], [], None, 0.0),
        ([1.0, 2.0], [1.0, 2.0], None, 0.0),
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], None, 5e-8),
        ([1.0, 2.5, 9.0], [1.0, 2.0, 3.0], 1, 2.0),
        ([math.nan], [1.0], 0, math.inf),
        ([1.0], [0.0], 0, math.inf),
    ],
)
def test_losses_are_compared_step_by_step(found: list[float], expected: list[float], step: int | None, difference: float) -> None:
    comparison = compare_losses(found, expected)
    assert comparison.first_step == step
    assert bool(comparison) is (step is None)
    assert comparison.difference == pytest.approx(difference, rel=1e-6)


def test_losses_of_other_steps_are_refused() -> None:
    with pytest.raises(ArgumentError, match="got 1 and 0"):
        compare_losses([1.0], [])
