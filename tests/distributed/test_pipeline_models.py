"""Models of every kind trained on real ranks: each parameter's gradient is that of one process, and hooks fire where the layers are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import KINDS, build, tokens

import ringsim
from ringsim.pipeline import (
    build_stages,
    check_gradient_flow,
    gradient_report,
    partition_model,
    single_process_step,
    train_step_pipeline,
    train_step_pipeline_afab,
)

# Uneven, with empty stages in front, between and behind.
CUTS = [[1, 0, 2], [0, 3, 0]]
SHAPES = [(2, 6), (2, 6), (1, 9), (3, 4)]  # microbatches of several sizes
INPUTS = [tokens(*shape, seed=index) for index, shape in enumerate(SHAPES)]
TARGETS = [tokens(*shape, seed=100 + index) for index, shape in enumerate(SHAPES)]
TARGETS[1][0, :4] = -100
MASKS = [torch.ones_like(ids) for ids in INPUTS]
MASKS[0][1, :2] = 0  # padding on the left
MASKS[3][2, 3:] = 0  # on the right
TARGETS = [target.masked_fill(mask == 0, -100) for target, mask in zip(TARGETS, MASKS, strict=True)]  # what padding gives means nothing


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields (kind of model, changes of its configuration, arguments of the step)."""
    for kind in KINDS:
        yield kind, {}, {}
        yield kind, {}, {"attention_masks": MASKS, "schedule": "afab"}
        yield kind, {"dtype": torch.float32}, {"schedule": "afab"}
    yield "small", {"tied": True}, {}
    yield "llama", {"tie_word_embeddings": True}, {}
    yield "gpt2", {"tie_word_embeddings": False}, {"checkpoint": True}
    yield "llama", {"attn_implementation": "eager"}, {}


def train_all(cuts: list[list[int]], wanted: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Runs on each rank; returns what is wrong."""
    wrong = []
    for kind, changes, options in wanted:
        for cut in cuts:
            model = build(kind, **changes)
            loss = train_step_pipeline(model, INPUTS, TARGETS, partition=cut, **options)
            masks = options.get("attention_masks")
            report = gradient_report(model, INPUTS, TARGETS, attention_masks=masks)
            expected = single_process_step(model, INPUTS, TARGETS, attention_masks=masks).loss
            if not report or abs(loss - expected) > 1e-5 * expected:
                wrong.append(f"{kind} {changes} {list(options)} {cut}: loss {loss}, expected {expected}; {report}")
    return wrong


def test_models_train_as_in_one_process() -> None:
    pytest.importorskip("transformers")
    results = ringsim.trace(train_all, world_size=3, args=(CUTS, list(cases())), timeout_s=60).results
    assert results == [[]] * 3


def train_llama() -> tuple[list[int], list[str], float]:
    """The step of a full model on every rank; returns which layers' hooks fired, which parameters have gradients, and the loss."""
    ring = ringsim.current_ring()
    model = build("llama")
    fired: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: fired.append(number))
    loss = train_step_pipeline_afab(model, INPUTS, TARGETS, torch.device("cpu"), torch.float64)
    stages = build_stages(model, partition_model(model, ring.world_size))
    assert check_gradient_flow(stages[ring.rank]) == {}
    return fired, [name for name, parameter in model.named_parameters() if parameter.grad is not None], loss


def test_each_rank_runs_its_own_part_of_a_llama() -> None:
    pytest.importorskip("transformers")
    (fired_0, held_0, loss_0), (fired_1, held_1, loss_1) = ringsim.trace(train_llama, world_size=2, timeout_s=60).results
    assert (fired_0, fired_1) == ([0, 1] * 4, [2] * 4)
    assert set(held_0).isdisjoint(held_1)
    assert len(held_0) + len(held_1) == len(list(build("llama").parameters()))
    assert {"model.embed_tokens.weight"} <= set(held_0)
    assert {"model.norm.weight", "lm_head.weight"} <= set(held_1)
    assert loss_0 == loss_1


def spoil(how: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Trains, breaks one gradient on one rank, and returns what the report says is wrong: name, verdict, ranks."""
    ring = ringsim.current_ring()
    model = build("small")
    train_step_pipeline(model, INPUTS, TARGETS)
    head = model.head.weight
    if how == "missing":
        head.grad = None
    elif how == "scaled" and ring.rank == 1:
        head.grad *= 4
    elif how == "elsewhere" and ring.rank == 0:
        head.grad = torch.ones_like(head)
    return [(row.parameter, row.verdict, row.ranks) for row in gradient_report(model, INPUTS, TARGETS).wrong]


@pytest.mark.parametrize(
    ("how", "verdict", "ranks"), [("missing", "missing", ()), ("scaled", "scaled", (1,)), ("elsewhere", "different", (0, 1))]
)
def test_the_report_puts_together_what_the_ranks_hold(how: str, verdict: str, ranks: tuple[int, ...]) -> None:
    assert ringsim.trace(spoil, world_size=2, args=(how,)).results == [[("head.weight", verdict, ranks)]] * 2
