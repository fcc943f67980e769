"""Pipelines where a rank's messages on a group go one after the other, as on NCCL: steps post them in one order on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_cases import PROMPTS, Case, gradients, make_microbatches, make_model, settings_for, small_model

import ringsim
from ringsim.pipeline import generate
from ringsim.pipeline.training import train_step_pipeline
from ringsim.schedules import SCHEDULE_NAMES
from ringsim.simulator.api import simulate

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-9)


def train(schedule: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    torch.set_num_threads(1)  # two threads for tensors this small wait for each other most of the time
    layers, found = 2 * ringsim.current_ring().world_size, []
    cases = [
        Case(5, layers),
        Case(1, layers),
        Case(4, layers, same_shapes=False),  # each activation has a header, which says how large it is
        Case(2, layers, tied=True),
    ]
    for case in cases:
        model = make_model(case)
        found.append((train_step_pipeline(model, *make_microbatches(case), schedule=schedule), gradients(model)))
    return found


def run(worker: Any, world_size: int, *args: Any, **kwargs: Any) -> list[ringsim.Trace]:
    return [
        simulate(worker, world_size=world_size, args=args, kwargs=kwargs, link=LINK, semantics=semantics)
        for semantics in ("grouped", "rendezvous")
    ]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_training_gives_what_it_gives_elsewhere(schedule: str, world_size: int) -> None:
    in_step, elsewhere = (trace.results for trace in run(train, world_size, schedule))
    for mine, theirs in zip(in_step, elsewhere, strict=True):
        for (loss, grads), (expected_loss, expected) in zip(mine, theirs, strict=True):
            assert loss == expected_loss
            assert grads.keys() == expected.keys()
            assert all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.parametrize("world_size", [3])
def test_tokens_are_those_of_elsewhere(world_size: int) -> None:
    def tokens(settings: list[dict[str, Any]]) -> list[list[list[int]]]:
        return [generate(small_model(), PROMPTS, 3, **each) for each in settings]

    in_step, elsewhere = run(tokens, world_size, settings_for(world_size)[::3])
    assert in_step.results == elsewhere.results
