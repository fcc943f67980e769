"""Training on real ranks: with every schedule the gradients are those of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pipeline_cases import Case, compare_all, complaints

import ringsim
from ringsim.pipeline.schedules import SCHEDULE_NAMES

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(cases: Sequence[Case], world_size: int) -> None:
    """Runs all cases in one run, and fails with a list of all that is wrong."""
    by_rank = ringsim.trace(compare_all, world_size=world_size, args=(list(cases),)).results
    wrong = [
        complaint
        for index, case in enumerate(cases)
        for complaint in complaints(case, [results[index] for results in by_rank], TOLERANCES[case.dtype])
    ]
    assert wrong == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_equal_those_of_a_single_process(world_size: int) -> None:
    counts = {name: (8,) if name in ("zb_h2", "zb_v", "dualpipe_v", "interleaved_1f1b", "zb_h1") else (1, 2, 8) for name in SCHEDULE_NAMES}
    check(
        [
            Case(num_microbatches=count, seed=seed, dtype=dtype, options={"schedule": name})
            for seed, (name, dtype) in enumerate((name, dtype) for name in SCHEDULE_NAMES for dtype in TOLERANCES)
            for count in counts[name]
        ],
        world_size,
    )
