"""Which layers each stage gets: every layer once, in order, as even as can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ringsim.pipeline.partition as layer_times
from ringsim.errors import ArgumentError
from ringsim.pipeline import SmallTransformer, build_stages, by_count, by_weight, get_stage_layers, partition_model
from ringsim.schedules.partition import by_sizes

WEIGHTS = st.lists(st.integers(0, 20), max_size=7)


def covers_in_order(partition: Sequence[range], num_layers: int) -> bool:
    return [layer for layers in partition for layer in layers] == list(range(num_layers))


def all_cuts(num_layers: int, num_stages: int) -> list[list[int]]:
    inner = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    return [[0, *cuts, num_layers] for cuts in inner]


@given(st.integers(0, 40), st.integers(1, 12))
def test_by_count_covers_every_layer_in_order_and_differs_by_one_at_most(num_layers: int, num_stages: int) -> None:
    partition = by_count(num_layers, num_stages)
    sizes = [len(layers) for layers in partition]
    assert len(partition) == num_stages
    assert covers_in_order(partition, num_layers)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"), [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (3, 1, [3])]
)
def test_by_count_typed_out(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    assert [len(layers) for layers in by_count(num_layers, num_stages)] == sizes


@given(WEIGHTS, st.integers(1, 5), st.integers(0, 20), st.integers(0, 20))
def test_by_weight_is_the_best_of_all_cuts(weights: list[int], num_stages: int, first: int, last: int) -> None:
    def key(cuts: list[int]) -> tuple[int, int]:
        loads = [sum(weights[start:stop]) for start, stop in itertools.pairwise(cuts)]
        loads[0] += first
        loads[-1] += last
        return max(loads), sum(load * load for load in loads)

    partition = by_weight(weights, num_stages, first=first, last=last)
    assert covers_in_order(partition, len(weights))
    found = [0, *(layers.stop for layers in partition)]
    assert key(found) == min(key(cuts) for cuts in all_cuts(len(weights), num_stages))


def test_by_weight_puts_the_heaviest_stage_before_evenness() -> None:
    # not 3 | 2 | 5 1: its squares add up to less (49 against 51), but its heaviest stage weighs 6 instead of 5
    assert [len(layers) for layers in by_weight([3, 2, 5, 1], 3)] == [2, 1, 1]


@given(st.integers(0, 30), st.integers(1, 8), st.sampled_from([1, 3, 0.25]))
def test_equal_weights_are_cut_by_count(num_layers: int, num_stages: int, weight: float) -> None:
    assert by_weight([weight] * num_layers, num_stages) == by_count(num_layers, num_stages)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_by_sizes_gives_the_sizes(sizes: list[int]) -> None:
    partition = by_sizes(sizes, sum(sizes))
    assert covers_in_order(partition, sum(sizes))
    assert [len(layers) for layers in partition] == sizes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_count(3, 0), "num_stages must be 1 or more, got 0"),
        (lambda: by_count(-1, 2), "num_layers must be 0 or more, got -1"),
        (lambda: by_weight([1, -1], 2), r"got -1 \(layer 1\)"),
        (lambda: by_weight([1, math.nan], 2), r"got nan \(layer 1\)"),
        (lambda: by_weight([1], 2, last=math.inf), r"got inf \(last\)"),
        (lambda: by_sizes([2, 2], 5), r"must add up to 5 layers, got \[2, 2\] = 4"),
        (lambda: by_sizes([6, -1], 5), "must be 0 or more each"),
        (lambda: by_sizes([], 0), "num_stages must be 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(call: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()  # type: ignore[operator]


def test_partition_by_parameters_counts_embedding_and_head() -> None:
    model = SmallTransformer(vocab_size=1000, hidden_size=8, num_layers=4, num_heads=2, max_length=4)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert 4 * block < 1000 * 8  # the embedding, and the head, outweigh all blocks
    assert [len(layers) for layers in partition_model(model, 4, by="parameters")] == [0, 2, 2, 0]


class Slow(nn.Module):
    """Costs what it says on a clock that it moves itself."""

    now_s = 0.0

    def __init__(self, usual_s: float, first_s: float = 0.0) -> None:
        super().__init__()
        self.usual_s = usual_s
        self.cost_s = first_s or usual_s

    def forward(self, x: Tensor) -> Tensor:
        Slow.now_s += self.cost_s
        self.cost_s = min(self.cost_s, self.usual_s)
        return x + torch.rand_like(x)


def test_partition_by_time_balances_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "perf_counter", lambda: Slow.now_s)
    model = nn.Sequential(Slow(4.0), Slow(1.0), Slow(1.0), Slow(2.0, first_s=99.0))  # a first run loads and warms up
    assert partition_model(model, 2, by="time", sample=torch.ones(2, 3)) == [range(1), range(1, 4)]


def test_measuring_leaves_gradients_and_random_numbers_alone() -> None:
    model = SmallTransformer(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, dropout=0.5)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    partition_model(model, 2, by="time", sample=torch.tensor([[1, 2, 3]]))
    assert torch.equal(torch.rand(2), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_times_are_measured_for_every_part() -> None:
    parts = build_stages(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), [range(1), range(1, 2), range(2, 2)])
    times_s = layer_times.measure_times(parts, torch.ones(4, 2))
    assert len(times_s) == 3
    assert all(0 < time_s < math.inf for time_s in times_s[:2])


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("size", '"count", "parameters", "time" or a list'),
        ([1, 1], r"a number for each of 3 stages, got \[1, 1\]"),
        ([1, 1, 1], "must add up to 2 layers"),
        ("time", "sample must be given"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(by: str | list[int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        partition_model(nn.Sequential(nn.ReLU(), nn.ReLU()), 3, by=by)


def test_stage_layers_are_the_models_own() -> None:
    model = SmallTransformer(vocab_size=11, hidden_size=8, num_layers=3, num_heads=2)
    assert [layer is block for layer, block in zip(get_stage_layers(model, range(1, 3)), model.blocks[1:], strict=True)] == [True, True]
    assert get_stage_layers(model, range(3, 3)) == []
