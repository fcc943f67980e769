"""Models cut into stages.

The same logits and gradients, the passes of a stage and its arithmetic; what reports say about
gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import KINDS, build, large_layers, logits, tokens
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ringsim
import ringsim.pipeline.partition
from ringsim import FlopCosts
from ringsim.compute_costs import Work, charge
from ringsim.errors import ArgumentError, MessageMismatch
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
    make_schedule,
    partition_model,
    single_process_step,
    tied_parameters,
    train_step_pipeline,
)
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.pipeline.messages import HEADER_SIZE, Header, Payload
from ringsim.pipeline.stage import count_stage_flops
from ringsim.schedules.partition import by_sizes
from ringsim.state import get_state

# Even, uneven, and with empty stages: first, middle, last.
CUTS = [[3], [2, 1], [0, 3], [1, 0, 2], [1, 1, 1, 0], [0, 2, 0, 1, 0]]
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
RIGHT = LEFT.flip(1)


def run(stages: list[Stage], x: Tensor, **known: Any) -> Tensor:
    for stage in stages:
        x = stage(x, **known)
    return x


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output.square().mean().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def are_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and bool(compare_gradients(found, expected, tolerance=1e-10))


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["no mask", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_the_other_are_the_model(kind: str, mask: Tensor | None) -> None:
    model = build(kind)
    # what a place of padding gives means nothing
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits(model, tokens(), attention_mask=mask)[real]
    expected_gradients = gradients(model, expected)
    for sizes in CUTS:
        partition = partition_model(model, len(sizes), by=sizes)
        stages = build_stages(model, partition)
        found = run(stages, tokens(), attention_mask=mask)[real]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert are_same(gradients(model, found), expected_gradients)
        holders = {
            name: [
                index
                for index, stage in enumerate(stages)
                if any(held is parameter for held in stage.parameters())
            ]
            for name, parameter in model.named_parameters()
        }
        assert all(holders.values())
        assert tied_parameters(model, partition) == {
            name: held for name, held in holders.items() if len(held) > 1
        }
    if mask is None:  # boundaries keep the dtype of the model
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
    torch.testing.assert_close(run(stages, tokens()), expected, rtol=1e-12, atol=1e-14)
    model.eval()
    torch.testing.assert_close(
        run(stages, tokens()), logits(model, tokens()), rtol=1e-12, atol=1e-14
    )


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
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    stages = build_stages(model, partition_model(model, 3))
    x = torch.ones(2, 3)
    assert torch.equal(run(stages, x), model(x))
    assert tied_parameters(model, partition_model(model, 3)) == {
        "0.weight": [0, 2],
        "0.bias": [0, 2],
    }


def test_a_stage_does_not_copy_the_model() -> None:
    model = build("small")
    stages = build_stages(model, partition_model(model, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run(stages, tokens()), logits(model, tokens()))
    assert not any(module is model for stage in stages for module in stage.modules())
    assert [
        layer is block
        for layer, block in zip(get_stage_layers(model, range(1, 3)), model.blocks[1:], strict=True)
    ] == [True, True]
    assert get_stage_layers(model, range(3, 3)) == []


def test_a_model_that_is_made_from_a_known_one_is_known() -> None:
    class Mine(SmallTransformer):
        pass

    assert adapter_of(Mine(vocab_size=5, hidden_size=4, num_layers=1, num_heads=1)) is adapter_of(
        build("small")
    )


def test_small_transformer_agrees_with_attention_written_out() -> None:
    block = build("small").blocks[0]
    attention, hidden = block.attention, torch.randn(2, 5, 16, dtype=torch.float64)
    query, keys, values = attention.query_key_value(hidden).view(2, 5, 3, 4, 4).unbind(2)
    scores = torch.einsum("bthd,bshd->bhts", query, keys) / 2  # the root of the head size, 4
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values).reshape(2, 5, 16)
    torch.testing.assert_close(attention(hidden), attention.out(mixed), rtol=1e-12, atol=1e-14)

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
    assert by_sizes(sizes, num_layers) == partition
    if num_layers * num_stages < 100:
        assert by_weight([weight] * num_layers, num_stages) == partition


@given(
    st.lists(st.integers(0, 20), max_size=7),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 20),
)
# not 3 | 2 | 5 1: its squares add up to less (49 against 51), but its heaviest stage weighs 6
# instead of 5
@example([3, 2, 5, 1], 3, 0, 0)
def test_by_weight_is_the_best_of_all_cuts(
    weights: list[int], num_stages: int, first: int, last: int
) -> None:
    def key(cuts: Sequence[int]) -> tuple[int, int]:
        loads = [
            sum(weights[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(weights)])
        ]
        loads[0] += first
        loads[-1] += last
        return max(loads), sum(load * load for load in loads)

    partition = by_weight(weights, num_stages, first=first, last=last)
    assert covers_in_order(partition, len(weights))
    cuts = itertools.combinations_with_replacement(range(len(weights) + 1), num_stages - 1)
    assert key([layers.stop for layers in partition[:-1]]) == min(map(key, cuts))


def test_partition_by_parameters_counts_embedding_and_head() -> None:
    model = SmallTransformer(
        vocab_size=1000, hidden_size=8, num_layers=4, num_heads=2, max_length=4
    )
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
    monkeypatch.setattr(ringsim.pipeline.partition, "perf_counter", lambda: Slow.now_s)
    # a first run loads and warms up
    model = nn.Sequential(Slow(4.0), Slow(1.0), Slow(1.0), Slow(2.0, first_s=99.0))
    assert partition_model(model, 2, by="time", sample=torch.ones(2, 3)) == [range(1), range(1, 4)]


def test_measuring_and_references_leave_gradients_and_random_numbers_alone() -> None:
    model = build("small", dropout=0.5)
    before = torch.get_rng_state()
    partition_model(model, 2, by="time", sample=tokens())
    single_process_step(model, INPUTS, TARGETS)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# -- the passes of a stage


# -- headers


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_what_is_no_header_is_refused(numbers: list[int]) -> None:
    with pytest.raises(MessageMismatch, match="a message must begin with a header"):
        Header.unpack(torch.tensor(numbers))


# -- arithmetic, and models that fit on no machine

LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1 / 50e9)
SPEED = FlopCosts(flops_per_s=4e14)
LENGTH = 4096


def counted(run: Callable[[], object]) -> int:
    """Counts what torch computes.

    In the way of attention that is made of matrix products, which the counter sees on any device.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def halves(stage: Stage, x: Tensor) -> Flops:
    """Counts the passes of a stage by running them."""
    with sdpa_kernel(SDPBackend.MATH):
        y = stage(x)
    grad = torch.ones_like(y)
    forward = counted(lambda: stage(x))
    backward = counted(lambda: torch.autograd.backward(y, grad, retain_graph=True))
    # token ids have no gradient: the half of the input ends at the embedding
    if not x.is_floating_point():
        return Flops(forward, backward, 0)
    input_grad = counted(lambda: torch.autograd.grad(y, [x], grad, retain_graph=True))
    return Flops(forward, input_grad, backward - input_grad)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_counted_as_torch_counts_them(kind: str, device: str) -> None:
    model = build(kind).to(device)
    first, middle, last = build_stages(model, [range(1), range(1, 1), range(1, 3)])
    ids = tokens(batch=2, length=9).to(device)
    hidden = first(ids).detach().requires_grad_()
    # Stages make their rotary tables by a product, place times frequency, which costs nothing here;
    # on "meta" nobody makes any.
    tables = 2 * 9 * 2 if kind in ("llama", "qwen2", "qwen3") and device == "cpu" else 0
    by_torch, by_table = halves(first, ids), count_stage_flops(first, ids).plus(Flops(tables, 0, 0))
    assert (by_table.of("F"), by_table.of("B")) == (by_torch.of("F"), by_torch.of("B"))
    assert count_stage_flops(middle, hidden) == Flops(0, 0, 0)
    assert count_stage_flops(last, hidden).plus(Flops(tables, 0, 0)) == halves(last, hidden)


def test_what_else_is_counted() -> None:
    model = build("small")
    (stage,) = build_stages(model, [range(3)])
    once, again = (
        count_stage_flops(stage, tokens()),
        count_stage_flops(stage, tokens(), recomputed=True),
    )
    assert (again.of("F"), again.of("B"), again.of("W")) == (
        once.of("F"),
        once.of("B") + once.of("F"),
        once.of("W"),
    )
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad = False  # frozen weights get no gradient
    frozen = count_stage_flops(stage, tokens())
    assert frozen[:2] == once[:2]
    # (3 + 1 + 4 + 4) squares of the width
    assert once.weight_grad - frozen.weight_grad == 12 * 2 * 18 * 16 * 16
    (stage,) = build_stages(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), [range(2)])
    # any rank counts its vectors
    assert count_stage_flops(stage, torch.zeros(3, 4)) == Flops(*[2 * 3 * (4 * 8 + 8 * 2)] * 3)
    assert count_stage_flops(stage, torch.zeros(3, 5, 4)) == Flops(*[2 * 15 * (4 * 8 + 8 * 2)] * 3)


def test_a_large_model_costs_what_its_shapes_say() -> None:
    # H. Touvron et al., "Llama 2" (2023), table 1 and its published configuration: width 8192, 64
    # heads and 8 of keys and values of 128, 28672 inside; 4096 tokens. No weight is ever made.
    pytest.importorskip("transformers")
    wide, narrow, inside = 8192, 8 * 128, 28672
    layer = attention_flops(1, LENGTH, LENGTH, wide)
    for shape in (
        (wide, wide),
        (wide, narrow),
        (wide, narrow),
        (wide, wide),
        (wide, inside),
        (wide, inside),
        (inside, wide),
    ):
        layer = layer.plus(linear_flops(LENGTH, *shape))
    parameters = 2 * wide * wide + 2 * wide * narrow + 3 * wide * inside
    assert layer.forward == 2 * LENGTH * parameters + 4 * LENGTH * LENGTH * wide
    assert layer.of("B") == 2 * layer.forward
    # of 70 billion; the rest is in the embedding and the head
    assert 80 * parameters == pytest.approx(68.5e9, rel=0.01)
    costs = flop_costs(
        build_stages(large_layers(6), [range(3), range(3, 6)]), SPEED, sequences=1, tokens=LENGTH
    )
    expected = [3 * layer.forward / 4e14, (3 * layer.forward + 2 * LENGTH * wide * 32000) / 4e14]
    assert costs.forward == pytest.approx(expected, rel=1e-12)
    assert costs.backward == pytest.approx([2 * each for each in expected], rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ranks_with_a_large_model_take_what_their_schedule_says(schedule: str) -> None:
    pytest.importorskip("transformers")
    ranks, microbatches = 4, 6

    def step() -> float:
        ids = [
            torch.zeros(1, LENGTH, dtype=torch.int64, device="meta") for _ in range(microbatches)
        ]
        return train_step_pipeline(large_layers(ranks), ids, ids, schedule=schedule)

    trace = ringsim.simulate(step, world_size=ranks, link=LINK, compute=SPEED)
    assert all(loss != loss for loss in trace.results)  # NaN: nobody knows it
    stages = build_stages(large_layers(ranks), [range(stage, stage + 1) for stage in range(ranks)])
    # bytes of an activation in bfloat16
    costs, size = flop_costs(stages, SPEED, sequences=1, tokens=LENGTH), 2 * LENGTH * 8192
    alone = ringsim.simulate_schedule(
        schedule, costs, num_ranks=ranks, num_microbatches=microbatches, link=LINK, size_bytes=size
    )
    # What the schedule does not know: a greeting before the first message, and the loss, which goes
    # back from the last rank to the first.
    assert trace.makespan_s - alone.makespan == pytest.approx(ranks * LINK.alpha_s, rel=1e-3)


def test_layers_are_run_once_for_each_shape_and_replayed() -> None:
    """A layer with a hook is run every time.

    The trace is the same, and every parameter has its gradient.
    """
    pytest.importorskip("transformers")

    def worker(hooked: bool) -> tuple[int, bool]:
        calls: list[int] = []
        model = large_layers(6)
        for layer in model.model.layers if hooked else ():
            layer.register_forward_hook(lambda *_: calls.append(1))
        ids = [torch.zeros(1, length, dtype=torch.int64, device="meta") for length in (64, 64, 96)]
        train_step_pipeline(model, ids, ids, schedule="zb_h1", checkpoint=True)
        own = model.model.layers[:3] if ringsim.current_ring().rank == 0 else model.model.layers[3:]
        return len(calls), all(
            parameter.grad is not None and parameter.grad.is_meta
            for layer in own
            for parameter in layer.parameters()
        )

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
    """A table of one's own."""

    def time_s(self, work: Work) -> float:
        return {"F": 1.0, "B": 2.0}[work.kind] + 10 * work.stage + 100 * work.microbatch


def charged_s(worker: Callable[[], object], compute: Any, *also: Any) -> list[float]:
    """Returns how long each computation of a rank takes on the virtual clock.

    It runs alone, half as fast.
    """
    trace = ringsim.simulate(
        worker,
        world_size=1,
        link=ringsim.Link(0, 0),
        compute=compute,
        inject=[ringsim.Slow(0, 2), *also],
    )
    table = trace.to_pandas()
    spans = table[(table["kind"] == "span") & (table["microbatch"] >= 0)]
    return [1e-9 * took_ns for took_ns in (spans["done_ns"] - spans["post_ns"]).tolist()]


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_a_step_is_charged_for_each_of_its_computations(name: str) -> None:
    model, ids, schedule = build("small"), [tokens(1, 4), tokens(1, 6)], make_schedule(name, 1, 2)
    (stage,) = build_stages(model, [range(3)])
    due = [
        count_stage_flops(stage, ids[action.microbatch]).of(action.kind)
        for action in schedule.actions[0]
    ]
    step = partial(train_step_pipeline, model, ids, ids, schedule=schedule)
    assert charged_s(step, FlopCosts(flops_per_s=1e3)) == pytest.approx(
        [2 * count / 1e3 for count in due]
    )  # a slow rank takes twice as long
    if name == "gpipe":
        assert charged_s(step, ByStage()) == pytest.approx([2.0, 202.0, 4.0, 204.0])
        jitter, again = (charged_s(step, ByStage(), ringsim.Jitter(0.2, 5)) for _ in range(2))
        assert jitter == again != charged_s(step, ByStage())


def test_generation_is_charged_for_prompts_and_then_for_a_token_at_a_time() -> None:
    model = build("small", dtype=torch.float32)
    (stage,) = build_stages(model, [range(3)])
    shapes = [(4, 4), (1, 5), (1, 6)]  # new tokens, tokens so far
    due = [count_stage_flops(stage, tokens(1, new), so_far).of("F") for new, so_far in shapes]
    found = charged_s(
        partial(generate, model, [[1, 2, 3, 4]], max_new_tokens=3), FlopCosts(flops_per_s=1e3)
    )
    assert found == pytest.approx([2 * count / 1e3 for count in due])


def test_a_real_rank_is_charged_nothing_and_counts_nothing() -> None:
    assert get_state().clock is None
    charge("F", 0, 0, count=lambda: pytest.fail("nobody asked"))


# -- what reports say about gradients that are right, and about each known way to get them wrong

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
        torch.testing.assert_close(
            reference.gradients[name], parameter.grad, rtol=1e-12, atol=1e-14
        )
    losses = [
        cross_entropy(logits(model, ids), target).item()
        for ids, target in zip(INPUTS, TARGETS, strict=True)
    ]
    assert reference.loss == pytest.approx(sum(losses) / 3, rel=1e-12)


def verdicts(model: nn.Module) -> list[tuple[str, str]]:
    return [(row.parameter, row.verdict) for row in gradient_report(model, INPUTS, TARGETS).wrong]


def test_each_known_mistake_has_its_verdict() -> None:
    right, undivided, mixed = build("small"), build("small"), build("small")
    backward(right, 1 / 3)
    report = gradient_report(right, INPUTS, TARGETS)
    assert report
    assert report.worst < 1e-14
    assert str(report).startswith(
        f"{len(list(right.parameters()))} gradients equal those of one process"
    )
    backward(undivided, 1.0)  # by the number of microbatches
    report = gradient_report(undivided, INPUTS, TARGETS)
    assert not report
    assert {
        (row.verdict, round(row.scale or 0, 9), round(row.difference, 9)) for row in report.rows
    } == {("scaled", 3.0, 2.0)}
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
    (row,) = compare_gradients(
        {"w": torch.tensor(found)}, {"w": torch.tensor(expected)}, tolerance=1e-5
    ).rows
    assert (row.verdict, row.difference) == verdict


@pytest.mark.parametrize(("kind", "masks"), [("small", MASKS), ("small", None), ("llama", MASKS)])
def test_stages_one_after_the_other_train_as_the_model(
    kind: str, masks: list[Tensor] | None
) -> None:
    model = build(kind)
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    for sizes in ([3], [0, 2, 0, 1, 0]):
        report = check_single_rank(
            model,
            partition_model(model, len(sizes), by=sizes),
            INPUTS,
            TARGETS,
            attention_masks=masks,
        )
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


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "keep",
    [lambda x: x.detach().requires_grad_(True), lambda x: x.clone().requires_grad_(True)],
    ids=["detach", "clone"],
)
def test_what_is_kept_must_be_what_went_forward(
    keep: Callable[[Tensor], Tensor], requires_grad: bool
) -> None:
    """At the edge of a stage there is no graph to be severed: what was received has none."""
    stage, received = nn.Linear(3, 2), torch.ones(2, 3, requires_grad=requires_grad)
    kept = keep(received)
    if not kept.is_leaf:  # the clone of a tensor that requires a gradient already
        with pytest.raises(ArgumentError, match="a leaf of"):
            forward_stage(stage, kept)
        return
    y = forward_stage(stage, kept)
    expected = torch.ones(2, 2) @ stage.weight
    torch.testing.assert_close(backward_stage(kept, y, torch.ones(2, 2)), expected)
    other = keep(received)
    other_y = forward_stage(stage, keep(received))  # another tensor than the one that was kept
    assert backward_stage(other, other_y, torch.ones(2, 2)) is None


def test_gradient_flow_names_what_was_not_reached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert check_gradient_flow(model) == {}
    model[1].weight.grad = None
    model[1].bias.grad = torch.zeros(2)
    model[2].weight.grad[0, 0] = math.nan
    assert check_gradient_flow(model) == {
        "1.weight": "no gradient",
        "1.bias": "only zeros",
        "2.weight": "not finite",
    }
    small = build("small")
    first, last = build_stages(small, partition_model(small, 2))
    first(INPUTS[0]).sum().backward()
    assert check_gradient_flow(first) == {}
    assert set(check_gradient_flow(last).values()) == {"no gradient"}


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_hidden_states(kind: str) -> None:
    model = build(kind, dtype=torch.float32)
    found = boundary_shapes(model, partition_model(model, 5), INPUTS[1])
    assert [(each.stage, each.shape, each.size_bytes) for each in found] == [
        (stage, (1, 7, 16), 7 * 16 * 4) for stage in range(4)
    ]


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
    assert comparison.first_step == step
    assert bool(comparison) is (step is None)
    assert comparison.difference == pytest.approx(difference, rel=1e-6)


# -- refused

TWO = nn.Sequential(nn.ReLU(), nn.ReLU())
SMALL = SmallTransformer(vocab_size=5, hidden_size=4, num_layers=1, num_heads=1)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(SmallTransformer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) / 2


PATCHED = nn.Sequential(nn.ReLU())
PATCHED.forward = lambda x: -x  # type: ignore[method-assign]


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
        (lambda: partition_model(TWO, 3, by="size"), '"count", "parameters", "time" or a list'),
        (
            lambda: partition_model(TWO, 3, by=[1, 1]),
            r"a number for each of 3 stages, got \[1, 1\]",
        ),
        (lambda: partition_model(TWO, 3, by=[1, 1, 1]), "must add up to 2 layers"),
        (lambda: partition_model(TWO, 3, by="time"), "sample must be given"),
        (lambda: partition_model(nn.Linear(2, 2), 2), r"got Linear\. Write a small"),
        # 0.2.0 cut these as if they had the forward of their kind
        (
            lambda: adapter_of(Doubled(nn.ReLU())),
            r"cut as a Sequential must have its forward, got Doubled .* Write a .*\.Adapter",
        ),
        (
            lambda: adapter_of(Halved(5, hidden_size=4, num_layers=1, num_heads=1)),
            "cut as a SmallTransformer must .* got Halved",
        ),
        (
            lambda: adapter_of(PATCHED),
            "cut as a Sequential must have its forward, got Sequential with another",
        ),
        (
            lambda: build_stages(SMALL, [range(1)])[0](
                tokens(), cache=adapter_of(SMALL).cache(SMALL)
            ),
            "must be given with a cache",
        ),
        (lambda: adapter_of(TWO).cache(TWO), "got Sequential, whose adapter has none"),
        (lambda: single_process_step(SMALL, [], []), "one tensor for each microbatch"),
        (lambda: single_process_step(SMALL, INPUTS[:2], TARGETS), "one tensor for each microbatch"),
        (lambda: compare_losses([1.0], []), "got 1 and 0"),
        (
            lambda: build("small", num_heads=3),
            "num_heads must divide hidden_size, got 3 heads for 16",
        ),
        (
            lambda: forward_stage(TWO, torch.ones(2, requires_grad=True) * 2),
            r"a leaf of .*, got the result of MulBackward0\. .*x\.detach",
        ),
        (
            lambda: Header("activation", 0, Payload((1,) * 9, torch.float32)).pack(),
            "at most 8 dimensions and one of float32",
        ),
        (
            lambda: Header("activation", 0, Payload((1,), torch.quint8)).pack(),
            "at most 8 dimensions and one of float32",
        ),
        *(
            (partial(FlopCosts, value), "flops_per_s must be a number above 0")
            for value in (0, -1.0, math.inf, math.nan, True, "fast")
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
