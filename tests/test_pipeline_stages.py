"""Tests of models cut into stages.

They compare logits and gradients with the whole model, count the arithmetic of stages, and check
the reports about gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline_cases import gradients as gradients_in
from small_models import KINDS, build, large_layers, logits, tokens
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ringsim
from ringsim import FlopCosts
from ringsim.errors import ArgumentError
from ringsim.pipeline import (
    SmallTransformer,
    Stage,
    adapter_of,
    backward_stage,
    boundary_shapes,
    build_stages,
    by_count,
    by_weight,
    check_gradient_flow,
    check_single_rank,
    compare_gradients,
    compare_losses,
    cross_entropy,
    flop_costs,
    forward_stage,
    generate,
    get_stage_layers,
    gradient_report,
    partition_model,
    single_process_step,
    tied_parameters,
    train_step_pipeline,
)

# Even, uneven, and with empty stages: first, middle, last.
CUTS = [[3], [2, 1], [0, 3], [1, 0, 2], [1, 1, 1, 0], [0, 2, 0, 1, 0]]
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
MASKS_OF_ONE = [None, LEFT, LEFT.flip(1)]
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


def run(stages: list[Stage], x: Tensor, **known: Any) -> Tensor:
    for stage in stages:
        x = stage(x, **known)
    return x


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output.square().mean().backward()
    return gradients_in(model)


def are_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and bool(compare_gradients(found, expected, tolerance=1e-10))


@pytest.mark.parametrize("mask", MASKS_OF_ONE, ids=["no mask", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_the_other_are_the_model(kind: str, mask: Tensor | None) -> None:
    model = build(kind)
    # results at padding positions are meaningless
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits(model, tokens(), attention_mask=mask)[real]
    expected_gradients = gradients(model, expected)
    for sizes in CUTS:
        partition = partition_model(model, len(sizes), by=sizes)
        stages = build_stages(model, partition)
        found = run(stages, tokens(), attention_mask=mask)[real]
        close(found, expected)
        assert are_same(gradients(model, found), expected_gradients)
        owned = [{*map(id, stage.parameters())} for stage in stages]
        holders = {
            name: [index for index, own in enumerate(owned) if id(each) in own]
            for name, each in model.named_parameters()
        }
        assert all(holders.values())
        shared = {name: held for name, held in holders.items() if len(held) > 1}
        assert tied_parameters(model, partition) == shared
    if mask is None:  # boundaries have the dtype of the model
        half = build(kind, dtype=torch.bfloat16)
        first, last = build_stages(half, partition_model(half, 2))
        assert first(tokens()).dtype == torch.bfloat16
        assert torch.equal(last(first(tokens())), logits(half, tokens()))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attn_implementation": "eager", "attention_dropout": 0.3}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
        ("opt", {"dropout": 0.3, "layerdrop": 0.5}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
        ("small", {"dropout": 0.3}),
    ],
)
def test_the_same_seed_drops_the_same_values(kind: str, changes: dict[str, Any]) -> None:
    model = build(kind, **changes)
    stages = build_stages(model, partition_model(model, 2))
    torch.manual_seed(7)
    expected = logits(model, tokens())
    torch.manual_seed(7)
    close(run(stages, tokens()), expected)
    model.eval()
    close(run(stages, tokens()), logits(model, tokens()))


def test_hooks_and_checkpointing_of_the_user_are_done() -> None:
    model = build("llama")
    expected = gradients(model, logits(model, tokens()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: seen.append(number))
    output = run(build_stages(model, partition_model(model, 2)), tokens())
    assert seen == [0, 1, 2]
    assert are_same(gradients(model, output), expected)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]  # again in the backward pass


def test_a_module_that_stands_in_two_places_is_run_twice() -> None:
    torch.manual_seed(0)
    shared, x = nn.Linear(3, 3), torch.ones(2, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    partition = partition_model(model, 3)
    assert torch.equal(run(build_stages(model, partition), x), model(x))
    assert tied_parameters(model, partition) == {"0.weight": [0, 2], "0.bias": [0, 2]}


def test_a_stage_does_not_copy_the_model() -> None:
    model = build("small")
    stages = build_stages(model, partition_model(model, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run(stages, tokens()), logits(model, tokens()))
    assert not any(module is model for stage in stages for module in stage.modules())
    assert [*map(id, get_stage_layers(model, range(1, 3)))] == [*map(id, model.blocks[1:])]
    assert get_stage_layers(model, range(3, 3)) == []


def test_small_transformer_agrees_with_attention_written_out() -> None:
    block = build("small").blocks[0]
    attention, hidden = block.attention, torch.randn(2, 5, 16, dtype=torch.float64)
    query, keys, values = attention.query_key_value(hidden).view(2, 5, 3, 4, 4).unbind(2)
    scores = torch.einsum("bthd,bshd->bhts", query, keys) / 2  # the root of the head size, 4
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values).reshape(2, 5, 16)
    close(attention(hidden), attention.out(mixed))
    dropping = build("small", dropout=0.5).blocks[0].attention
    assert not torch.equal(dropping(hidden), dropping(hidden))
    assert torch.equal(dropping.eval()(hidden), dropping(hidden))


# -- cuts


def covers_in_order(partition: Sequence[range], num_layers: int) -> bool:
    return [layer for layers in partition for layer in layers] == list(range(num_layers))


@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from([1, 3, 0.25]))
def test_by_count_covers_every_layer_in_order_and_differs_by_one_at_most(
    num_layers: int, num_stages: int, weight: float
) -> None:
    partition = by_count(num_layers, num_stages)
    sizes = [len(layers) for layers in partition]
    assert len(partition) == num_stages
    assert covers_in_order(partition, num_layers)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    if num_layers * num_stages < 100:
        assert by_weight([weight] * num_layers, num_stages) == partition


@given(
    st.lists(st.integers(0, 20), max_size=7),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 20),
)
# not 3 | 2 | 5 1, whose sum of squares is smaller (49 against 51), but whose heaviest stage weighs
# 6 instead of 5
@example([3, 2, 5, 1], 3, 0, 0)
def test_by_weight_is_the_best_of_all_cuts(
    weights: list[int], num_stages: int, first: int, last: int
) -> None:
    def key(cuts: Sequence[int]) -> tuple[int, int]:
        ends = pairwise([0, *cuts, len(weights)])
        loads = [sum(weights[start:stop]) for start, stop in ends]
        loads[0] += first
        loads[-1] += last
        return max(loads), sum(load * load for load in loads)

    partition = by_weight(weights, num_stages, first=first, last=last)
    assert covers_in_order(partition, len(weights))
    cuts = combinations_with_replacement(range(len(weights) + 1), num_stages - 1)
    assert key([layers.stop for layers in partition[:-1]]) == min(map(key, cuts))


def test_partition_by_parameters_counts_embedding_and_head() -> None:
    model = SmallTransformer(1000, hidden_size=8, num_layers=4, num_heads=2, max_length=4)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert 4 * block < 1000 * 8  # the embedding and the head are each heavier than all blocks
    assert [len(layers) for layers in partition_model(model, 4, by="parameters")] == [0, 2, 2, 0]


class Slow(nn.Module):
    """A layer that advances a fake clock by its costs, and from then on by the last of them."""

    now_s = 0.0

    def __init__(self, *costs_s: float) -> None:
        super().__init__()
        self.costs_s = [*costs_s]

    def forward(self, x: Tensor) -> Tensor:
        Slow.now_s += self.costs_s.pop(0) if self.costs_s[1:] else self.costs_s[0]
        return x + 1


def test_partition_by_time_balances_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first run loads and warms up
    model = nn.Sequential(Slow(4.0), Slow(1.0), Slow(1.0), Slow(99.0, 2.0))
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: Slow.now_s)
        found = partition_model(model, 2, by="time", sample=torch.ones(2, 3))
    assert found == [range(1), range(1, 4)]


def test_measuring_and_references_leave_gradients_and_random_numbers_alone() -> None:
    model = build("small", dropout=0.5)
    before = torch.get_rng_state()
    partition_model(model, 2, by="time", sample=tokens())
    single_process_step(model, INPUTS, TARGETS)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# -- arithmetic, and models that are too large for any machine

LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1 / 50e9)
SPEED = FlopCosts(flops_per_s=4e14)
LENGTH = 4096


def count(stages: list[Stage], sequences: int, length: int) -> list[tuple[float, ...]]:
    """Returns the operations of each stage: forward, and both halves of the backward pass."""
    costs: Any = flop_costs(stages, FlopCosts(1.0), sequences=sequences, tokens=length)
    return [*zip(costs.forward, costs.input, costs.weight, strict=True)]


def count_by_torch(stage: Stage, x: Tensor) -> tuple[int, int, int]:
    """Counts the passes of a stage by running them.

    Attention uses plain matrix products, which the counter sees on any device.
    """

    def counted(work: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        return int(counter.get_total_flops())

    with sdpa_kernel(SDPBackend.MATH):
        y = stage(x)
        grad = torch.ones_like(y)
        backward = partial(torch.autograd.backward, y, grad, retain_graph=True)
        forward, both = counted(lambda: stage(x)), counted(backward)
        # token ids have no gradient, so the input half ends at the embedding
        if not x.is_floating_point():
            return forward, both, 0
        half = counted(lambda: torch.autograd.grad(y, [x], grad, retain_graph=True))
    return forward, half, both - half


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_counted_as_torch_counts_them(kind: str, device: str) -> None:
    stages = build_stages(build(kind).to(device), [range(1), range(1, 1), range(1, 3)])
    ids = tokens(batch=2, length=9).to(device)
    hidden = stages[0](ids).detach().requires_grad_()
    # rotary tables are a product of position and frequency, which is not counted; "meta" has none
    tables = 2 * 9 * 2 if kind in ("llama", "qwen2", "qwen3") and device == "cpu" else 0
    first, middle, last = count(stages, 2, 9)
    forward, backward, _ = count_by_torch(stages[0], ids)
    assert (first[0] + tables, first[1] + first[2]) == (forward, backward)
    assert middle == (0, 0, 0)
    assert (last[0] + tables, *last[1:]) == count_by_torch(stages[2], hidden)


def test_frozen_weights_get_no_gradient() -> None:
    model = build("small")
    stages = build_stages(model, [range(3)])
    (once,) = count(stages, 2, 9)
    model.blocks[0].requires_grad_(False)
    (frozen,) = count(stages, 2, 9)
    # (3 + 1 + 4 + 4) squares of the width
    assert frozen == (*once[:2], once[2] - 12 * 2 * 18 * 16 * 16)


def test_a_large_model_costs_what_its_shapes_say() -> None:
    # H. Touvron et al., "Llama 2" (2023), table 1 and its published configuration: width 8192, 64
    # heads, 8 key-value heads of size 128, inner width 28672; 4096 tokens. No weights are
    # allocated.
    pytest.importorskip("transformers")
    wide, narrow, inside = 8192, 8 * 128, 28672
    parameters = 2 * wide * wide + 2 * wide * narrow + 3 * wide * inside
    # of 70 billion; the others are in the embedding and the head
    assert 80 * parameters == pytest.approx(68.5e9, rel=0.01)
    linear, attention = 2 * LENGTH * parameters, 4 * LENGTH * LENGTH * wide
    head = 2 * LENGTH * wide * 32000
    found = count(build_stages(large_layers(6), [range(3), range(3, 6)]), 1, LENGTH)
    for stage, more in zip(found, (0, head), strict=True):
        forward = 3 * (linear + attention) + more
        assert stage == (forward, forward + 3 * attention, forward - 3 * attention)


def test_layers_are_run_once_for_each_shape_and_replayed() -> None:
    """A layer with a hook runs every time.

    The trace is the same, and every parameter has its gradient.
    """
    pytest.importorskip("transformers")

    def worker(hooked: bool) -> tuple[int, bool]:
        calls: list[int] = []
        layers = (model := large_layers(6)).model.layers
        for layer in layers if hooked else ():
            layer.register_forward_hook(lambda *_: calls.append(1))
        ids = [torch.zeros(1, length, dtype=torch.int64, device="meta") for length in (64, 64, 96)]
        train_step_pipeline(model, ids, ids, schedule="zb_h1", checkpoint=True)
        own = layers[:3] if ringsim.current_ring().rank == 0 else layers[3:]
        grads = [parameter.grad for layer in own for parameter in layer.parameters()]
        return len(calls), all(grad is not None and grad.is_meta for grad in grads)

    replayed, run = (
        ringsim.simulate(worker, world_size=2, args=(hooked,), link=LINK, compute=SPEED)
        for hooked in (False, True)
    )
    assert replayed.to_pandas().equals(run.to_pandas())
    assert [calls for calls, _ in replayed.results] == [0, 0]
    # each layer of the stage with each microbatch, and again for the backward pass
    assert min(calls for calls, _ in run.results) > 3 * 3
    assert all(complete for _, complete in replayed.results + run.results)


# -- charged


class ByStage:
    """A custom cost table."""

    def time_s(self, work: Any) -> float:
        return {"F": 1.0, "B": 2.0}[work.kind] + 10 * work.stage + 100 * work.microbatch


def charged_s(worker: Callable[[], object], compute: Any, *also: Any) -> list[float]:
    """Returns the times of a rank's computations on the virtual clock, at half the speed."""
    inject = [ringsim.Slow(0, 2), *also]
    trace = ringsim.simulate(
        worker, world_size=1, link=ringsim.Link(0, 0), compute=compute, inject=inject
    )
    spans = trace.to_pandas().query("kind == 'span' and microbatch >= 0")
    return [1e-9 * took_ns for took_ns in (spans["done_ns"] - spans["post_ns"]).tolist()]


def test_a_step_is_charged_for_each_of_its_computations() -> None:
    model, ids = build("small"), [tokens(1, 4), tokens(1, 6)]
    first, second = (count(build_stages(model, [range(3)]), 1, length)[0] for length in (4, 6))
    due = [first[0], second[0], sum(first[1:]), sum(second[1:])]
    again = [*due[:2], due[2] + due[0], due[3] + due[1]]  # forward again before the backward pass
    for options, flops in (
        ({"schedule": "zb_h1"}, [*first, *second]),
        ({"schedule": "gpipe"}, due),
        ({"schedule": "gpipe", "checkpoint": True}, again),
    ):
        step = partial(train_step_pipeline, model, ids, ids, **options)
        slow = pytest.approx(
            [2 * number / 1e3 for number in flops]
        )  # a slow rank takes twice as long
        assert charged_s(step, FlopCosts(flops_per_s=1e3)) == slow
    step = partial(train_step_pipeline, model, ids, ids, schedule="gpipe")
    assert charged_s(step, ByStage()) == pytest.approx([2.0, 202.0, 4.0, 204.0])
    jitter, other = (charged_s(step, ByStage(), ringsim.Jitter(0.2, 5)) for _ in range(2))
    assert jitter == other != charged_s(step, ByStage())


def test_generation_is_charged_for_prompts_and_then_for_a_token_at_a_time() -> None:
    model = build("small", dtype=torch.float32)
    (whole,) = count(build_stages(model, [range(3)]), 1, 4)
    # three layers of width 16, for each token: linear layers, and attention to the tokens so far
    linear = (whole[0] - 3 * 4 * 4 * 4 * 16) / 4
    due = [whole[0], *(linear + 3 * 4 * so_far * 16 for so_far in (5, 6))]
    step = partial(generate, model, [[1, 2, 3, 4]], max_new_tokens=3)
    found = charged_s(step, FlopCosts(flops_per_s=1e3))
    assert found == pytest.approx([2 * number / 1e3 for number in due])


# -- reports about right gradients, and about each known mistake

INPUTS = [tokens(2, 5, seed=1), tokens(1, 7, seed=2), tokens(3, 4, seed=3)]
TARGETS = [tokens(2, 5, seed=4), tokens(1, 7, seed=5), tokens(3, 4, seed=6)]
TARGETS[0][0, :3] = -100
MASKS = [torch.ones_like(ids) for ids in INPUTS]
MASKS[2][1, 2:] = 0


def backward(model: nn.Module, share: float, inputs: list[Tensor] = INPUTS) -> float:
    losses = [
        share * cross_entropy(logits(model, ids), target)
        for ids, target in zip(inputs, TARGETS, strict=True)
    ]
    sum(losses).backward()
    return sum(losses).item()


def verdicts(model: nn.Module) -> list[tuple[str, str]]:
    return [(row.parameter, row.verdict) for row in gradient_report(model, INPUTS, TARGETS).wrong]


def test_each_known_mistake_has_its_verdict() -> None:
    right, undivided, mixed = build("small"), build("small"), build("small")
    backward(right, 1 / 3)
    report = gradient_report(right, INPUTS, TARGETS)
    assert report
    assert report.worst < 1e-14
    head = f"{len(list(right.parameters()))} gradients equal those of a single process"
    assert str(report).startswith(head)
    backward(undivided, 1.0)  # by the number of microbatches
    report = gradient_report(undivided, INPUTS, TARGETS)
    assert not report
    found = {(row.verdict, round(row.scale, 9), round(row.difference, 9)) for row in report.rows}
    assert found == {("scaled", 3.0, 2.0)}
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
def test_zeros_and_nan_are_compared_too(
    found: list[float], expected: list[float], verdict: tuple[str, float]
) -> None:
    both = {"w": torch.tensor(found)}, {"w": torch.tensor(expected)}
    (row,) = compare_gradients(*both, tolerance=1e-5).rows
    assert (row.verdict, row.difference) == verdict


def test_a_wrong_cut_is_seen_in_one_process() -> None:
    model = build("small")
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    for sizes, masks in product(([3], [0, 2, 0, 1, 0]), (MASKS, None)):
        partition = partition_model(model, len(sizes), by=sizes)
        report = check_single_rank(model, partition, INPUTS, TARGETS, attention_masks=masks)
        assert report, str(report)
    report = check_single_rank(model, [range(1), range(2, 3)], INPUTS, TARGETS)  # layer 1 is lost
    verdicts = {row.parameter: row.verdict for row in report.rows}
    assert verdicts["blocks.1.attention.out.weight"] == "missing"
    assert verdicts["blocks.2.attention.out.weight"] == "different"
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient  # put back
        assert bool((gradient == 1).all())  # and not added to


@pytest.mark.parametrize("keep", [torch.Tensor.detach, torch.Tensor.clone], ids=["detach", "clone"])
def test_what_is_kept_must_be_what_went_forward(keep: Callable[[Tensor], Tensor]) -> None:
    """At a stage boundary there is no graph to cut, because a received tensor has none."""
    stage, received = nn.Linear(3, 2), torch.ones(2, 3)
    kept, other = (keep(received).requires_grad_() for _ in range(2))
    grad = torch.ones(2, 2)
    close(backward_stage(kept, forward_stage(stage, kept), grad), grad @ stage.weight)
    assert backward_stage(other, forward_stage(stage, kept), grad) is None


def test_gradient_flow_names_what_was_not_reached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert check_gradient_flow(model) == {}
    model[1].weight.grad = None
    model[1].bias.grad = torch.zeros(2)
    model[2].weight.grad[0, 0] = math.nan
    due = {"1.weight": "no gradient", "1.bias": "only zeros", "2.weight": "not finite"}
    assert check_gradient_flow(model) == due
    small = build("small")
    first, last = build_stages(small, partition_model(small, 2))
    first(INPUTS[0]).sum().backward()
    assert check_gradient_flow(first) == {}
    assert set(check_gradient_flow(last).values()) == {"no gradient"}


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_hidden_states(kind: str) -> None:
    model = build(kind, dtype=torch.float32)
    found = boundary_shapes(model, partition_model(model, 5), INPUTS[1])
    due = [(stage, (1, 7, 16), torch.float32, 7 * 16 * 4) for stage in range(4)]
    assert found == due


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
def test_losses_are_compared_step_by_step(
    found: list[float], expected: list[float], step: int | None, difference: float
) -> None:
    comparison = compare_losses(found, expected)
    assert (comparison.first_step, bool(comparison)) == (step, step is None)
    assert comparison.difference == pytest.approx(difference, rel=1e-6)


# -- refused

TWO = nn.Sequential(nn.ReLU(), nn.ReLU())
SMALL = SmallTransformer(vocab_size=5, hidden_size=4, num_layers=1, num_heads=1)
ONE = build_stages(SMALL, [range(1)])[0]
OFF = torch.ones(2, requires_grad=True).clone()


class Mine(SmallTransformer):
    """A model that inherits from a known model has its adapter."""


class Doubled(nn.Sequential):
    """0.2.0 cut it as if it had the forward of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


PATCHED = nn.Sequential(nn.ReLU())
PATCHED.forward = lambda x: -x  # type: ignore[method-assign]
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: by_count(3, 0), "num_stages must be a positive integer, got 0"),
    (lambda: by_count(-1, 2), "num_layers must be a non-negative integer, got -1"),
    (lambda: by_weight([1, -1], 2), r"got -1 \(layer 1\)"),
    (lambda: by_weight([1, math.nan], 2), r"got nan \(layer 1\)"),
    (lambda: by_weight([1], 2, last=math.inf), r"got inf \(last\)"),
    (
        lambda: partition_model(TWO, 2, by=[2, 2]),
        r"the number of layers, 2, got \[2, 2\] \(total 4\)",
    ),
    (lambda: partition_model(TWO, 2, by=[3, -1]), "sizes must be non-negative"),
    (lambda: partition_model(TWO, 3, by="size"), '"count", "parameters", "time" or a list'),
    (lambda: partition_model(TWO, 3, by=[1, 1]), r"one number per stage \(3\), got \[1, 1\]"),
    (lambda: partition_model(TWO, 3, by="time"), "sample is required"),
    (lambda: partition_model(nn.Linear(2, 2), 2), r"type Linear \(known .*\)\. Write a"),
    (lambda: adapter_of(Doubled(nn.ReLU())), "Doubled overrides the forward .*Adapter"),
    (lambda: adapter_of(PATCHED), "Sequential overrides the forward method of Sequential"),
    (lambda: ONE(tokens(), cache=ONE.adapter.cache(SMALL)), "is required with a cache"),
    (lambda: adapter_of(TWO).cache(TWO), "the adapter of Sequential has no cache"),
    (lambda: single_process_step(SMALL, [], []), "one tensor"),
    (lambda: single_process_step(SMALL, INPUTS[:2], TARGETS), "one tensor"),
    (lambda: train_step_pipeline(SMALL, INPUTS[:2], TARGETS), "one tensor"),
    (lambda: build("small", num_heads=3), "num_heads must divide hidden_size, got 3 for 16"),
    (lambda: forward_stage(TWO, OFF), r"a leaf of .*, got the result of Clone.*\. .*x\.detach"),
    *(
        (partial(FlopCosts, value), "flops_per_s must be a positive number")
        for value in (0, -1.0, math.inf, math.nan, True, "fast")
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    assert adapter_of(Mine(5, hidden_size=4, num_layers=1, num_heads=1)) is adapter_of(SMALL)
    with pytest.raises(ArgumentError, match=message):
        call()
