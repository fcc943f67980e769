"""Pipelines on simulated ranks: the gradients and tokens of a single process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim
from ringsim.pipeline import generate
from ringsim.schedules import SCHEDULE_NAMES
from ringsim.simulator.api import simulate

sys.path.append(str(Path(__file__).parent / "distributed"))
from pipeline_cases import Case, compare_all, complaints
from test_pipeline_generation import PROMPTS, one_by_one, settings_for, small_model

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_equal_those_of_a_single_process(world_size: int) -> None:
    cases = [
        Case(num_microbatches=count, seed=seed, options={"schedule": name})
        for seed, (name, count) in enumerate((name, count) for name in SCHEDULE_NAMES for count in (1, 5))
    ]
    cases += [Case(tied=True, options={"schedule": "1f1b"}), Case(same_shapes=False, options={"schedule": "zb_h1"})]
    by_rank = simulate(compare_all, world_size=world_size, args=(cases,), link=LINK).results
    wrong = [complaints(case, [results[index] for results in by_rank], 1e-10) for index, case in enumerate(cases)]
    assert wrong == [[]] * len(cases)


def generate_all(settings: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [generate(small_model(), PROMPTS, 3, **each) for each in settings]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_equal_those_of_a_single_process(world_size: int) -> None:
    settings = settings_for(world_size)[::3]
    trace = simulate(generate_all, world_size=world_size, args=(settings,), link=LINK)
    expected = one_by_one(small_model(), PROMPTS, 3)
    for results in trace.results:
        assert results == [expected] * len(settings)


def step(schedule: str) -> None:
    from pipeline_cases import make_microbatches, make_model

    from ringsim.pipeline.training import train_step_pipeline

    case = Case()
    train_step_pipeline(make_model(case), *make_microbatches(case), schedule=schedule)


def test_the_same_step_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        simulate(step, world_size=4, args=("1f1b",), link=LINK, seed=3).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    torch.manual_seed(5)
    simulate(step, world_size=4, args=("1f1b",), link=LINK, seed=3).save(tmp_path / "third")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "third").read_bytes()
