"""Training on real ranks: with every schedule the gradients are those of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pipeline_cases import Case, compare_all, complaints

import ringsim
from ringsim.schedules import SCHEDULE_NAMES, interleaved_1f1b, looped_bfs
from ringsim.schedules.schedule import Schedule, parse_action

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


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients_equal_those_of_a_single_process(world_size: int) -> None:
    settings = [(name, count, dtype) for name in SCHEDULE_NAMES for count in (1, 2, 8) for dtype in TOLERANCES]
    check(
        [
            Case(num_microbatches=count, seed=seed, dtype=dtype, options={"schedule": name})
            for seed, (name, count, dtype) in enumerate(settings)
        ],
        world_size,
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_may_be_uneven_or_empty(world_size: int) -> None:
    """More ranks than layers, and layers shared out by hand; the widths of the sequential model differ at every boundary."""
    by_hand = {2: [[0, 3], [3, 0], [1, 2]], 4: [[0, 3, 0, 0], [0, 0, 0, 3], [3, 0, 0, 0], [1, 0, 2, 0]]}[world_size]
    check(
        [
            *(Case(num_layers=3, options={"partition": part, "schedule": name}) for part in by_hand for name in ("gpipe", "1f1b", "zb_h1")),
            *(Case(num_layers=layers, options={"schedule": name}) for layers in (0, 1) for name in SCHEDULE_NAMES),
            *(Case(num_layers=5, make="sequential", options={"schedule": name}) for name in SCHEDULE_NAMES),
            Case(num_layers=2, make="sequential", options={"partition": [0] * (world_size - 1) + [4]}),  # token ids pass through
            Case(num_layers=6, options={"partition": "parameters"}),
            Case(num_layers=3, options={"partition": [range(3)] + [range(3, 3)] * (world_size - 1)}),
        ],
        world_size,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_microbatches_may_differ_in_shape(world_size: int) -> None:
    check(
        [
            Case(num_microbatches=count, same_shapes=False, make=make, options={"schedule": name})
            for name in SCHEDULE_NAMES
            for count in (2, 7)
            for make in ("transformer", "sequential")
        ],
        world_size,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_parameters_get_the_sum_of_both_ends(world_size: int) -> None:
    check([Case(tied=True, seed=seed, options={"schedule": name}) for seed, name in enumerate(SCHEDULE_NAMES)], world_size)


def test_more_chunks_than_two() -> None:
    schedules = [make(2, 4, chunks) for make in (interleaved_1f1b, looped_bfs) for chunks in (1, 3, 4)]
    check([Case(num_layers=6, options={"schedule": schedule}) for schedule in schedules], world_size=2)


def read(name: str, stage_ranks: Sequence[int], *rows: str) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule(name, 2, tuple(stage_ranks), actions)


def test_a_schedule_of_ones_own() -> None:
    """Stages in an order that no generator makes: backwards over the ring, between ranks that are no neighbours, microbatches exchanged."""
    check(
        [
            Case(num_microbatches=2, options={"schedule": schedule})
            for schedule in (
                read("backwards", (2, 1, 0), "2F0 2B0 2F1 2B1", "1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"),
                read("last first", (0, 1, 2), "0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0", "2F1 2F0 2B0 2B1"),
                read("two and one", (0, 2, 0, 1), "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "3F0 3I0 3F1 3I1 3W1 3W0", "1F0 1F1 1B0 1B1"),
            )
        ],
        world_size=3,
    )


def test_neighbours_that_are_none() -> None:
    """In a ring of four, stages on ranks 0 and 2 are no neighbours: their messages go over the default group."""
    schedule = read("across", (0, 2, 1, 3), "0F0 0F1 0B0 0B1", "2F0 2F1 2B0 2B1", "1F0 1F1 1B0 1B1", "3F0 3B0 3F1 3B1")
    check([Case(num_microbatches=2, tied=tied, options={"schedule": schedule}) for tied in (False, True)], world_size=4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_recomputed_activations_give_the_same_gradients(world_size: int) -> None:
    check([Case(options={"checkpoint": True, "schedule": name}) for name in SCHEDULE_NAMES], world_size)
