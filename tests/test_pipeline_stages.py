"""Models cut into stages: the same logits and gradients, every layer once, the passes of a stage, and its arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import KINDS, build, logits, tokens
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ringsim
import ringsim.pipeline.partition
from ringsim.compute_costs import FlopCosts, Work, charge
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.pipeline import (
    Adapter,
    Announced,
    SmallTransformer,
    adapter_of,
    build_stages,
    by_count,
    by_weight,
    flop_costs,
    generate,
    get_stage_layers,
    make_schedule,
    partition_model,
    tied_parameters,
    train_step_pipeline,
)
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.pipeline.messages import HEADER_SIZE, Header, Payload
from ringsim.pipeline.stage import Stage, backward_input, backward_stage, backward_weight, count_stage_flops, forward_stage
from ringsim.schedules.partition import by_sizes
from ringsim.state import change_state, get_state

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
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["no mask", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_the_other_are_the_model(kind: str, mask: Tensor | None) -> None:
    model = build(kind)
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()  # what a place of padding gives means nothing
    expected = logits(model, tokens(), attention_mask=mask)[real]
    expected_gradients = gradients(model, expected)
    for sizes in CUTS:
        stages = build_stages(model, partition_model(model, len(sizes), by=sizes))
        found = run(stages, tokens(), attention_mask=mask)[real]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert_same_gradients(gradients(model, found), expected_gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_keep_the_models_dtype(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, dtype=dtype)
    stages = build_stages(model, partition_model(model, 2))
    assert stages[0](tokens()).dtype == dtype
    assert torch.equal(run(stages, tokens()), logits(model, tokens()))


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
    torch.testing.assert_close(run(stages, tokens()), logits(model, tokens()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_for_each_stage_is_one_long_forward(kind: str) -> None:
    model = build(kind).eval()
    prompt, mask = tokens(length=9), LEFT
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = logits(model, prompt, attention_mask=mask, **({} if kind == "small" else {"position_ids": positions}))
    if kind == "small":  # counts padding; told the positions, its stages do not
        whole = run(build_stages(model, [range(3)]), prompt, attention_mask=mask, position_ids=positions)
    for sizes in CUTS:
        stages = build_stages(model, partition_model(model, len(sizes), by=sizes))
        caches = [stage.adapter.cache(model) for stage in stages]
        for start, stop in [(0, 6), (6, 7), (7, 9)]:  # the prompt, one token, two tokens
            x = prompt[:, start:stop]
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, attention_mask=mask[:, :stop], position_ids=positions[:, start:stop], cache=cache)
            real = mask[:, start:stop].bool()
            torch.testing.assert_close(x[real], whole[:, start:stop][real], rtol=1e-10, atol=1e-13)


def test_a_cache_needs_a_mask() -> None:
    model = build("small")
    stage = build_stages(model, [range(3)])[0]
    with pytest.raises(ArgumentError, match="attention_mask must be given with a cache"):
        stage(tokens(), cache=stage.adapter.cache(model))


def test_a_model_that_does_not_generate_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="got Sequential, whose adapter has none"):
        adapter_of(model).cache(model)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_one_stage_unless_tied(kind: str) -> None:
    model = build(kind)
    for sizes in CUTS:
        partition = partition_model(model, len(sizes), by=sizes)
        stages = build_stages(model, partition)
        holders = {
            name: [index for index, stage in enumerate(stages) if any(held is parameter for held in stage.parameters())]
            for name, parameter in model.named_parameters()
        }
        assert all(holders.values())
        assert tied_parameters(model, partition) == {name: held for name, held in holders.items() if len(held) > 1}


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "opt"])
def test_tied_embedding_and_head_are_found(kind: str) -> None:
    model = build(kind)
    (name,) = tied_parameters(model, partition_model(model, 3))
    assert model.get_parameter(name) is model.lm_head.weight
    assert tied_parameters(model, partition_model(model, 1)) == {}


def test_hooks_of_the_user_fire_once_for_each_layer() -> None:
    model = build("llama")
    seen: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: seen.append(number))
    run(build_stages(model, partition_model(model, 2)), tokens())
    assert seen == [0, 1, 2]


def test_checkpointing_that_the_model_was_told_to_do_is_done() -> None:
    model = build("llama")
    expected = gradients(model, logits(model, tokens()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    found = gradients(model, run(build_stages(model, partition_model(model, 2)), tokens()))
    assert_same_gradients(found, expected)
    assert len(calls) == 2  # forward, and again in backward


def test_a_module_that_stands_in_two_places_is_run_twice() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    stages = build_stages(model, partition_model(model, 3))
    x = torch.ones(2, 3)
    assert torch.equal(run(stages, x), model(x))
    assert tied_parameters(model, partition_model(model, 3)) == {"0.weight": [0, 2], "0.bias": [0, 2]}


def test_a_stage_does_not_copy_the_model() -> None:
    model = build("small")
    stages = build_stages(model, partition_model(model, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run(stages, tokens()), logits(model, tokens()))
    assert not any(module is model for stage in stages for module in stage.modules())


class Residual(nn.Module):
    """A model that no adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 5)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.table(token_ids)
        for step in self.steps:
            hidden = hidden + step(hidden)
        return self.out(hidden)


class ResidualAdapter(Adapter):
    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.steps)

    def first_modules(self, model: Any) -> list[nn.Module]:
        return [model.table]

    def last_modules(self, model: Any) -> list[nn.Module]:
        return [model.out]

    def embed(self, model: Any, token_ids: Tensor, announced: Announced) -> Tensor:
        return model.table(token_ids)

    def run_layer(self, model: Any, layer: nn.Module, hidden: Tensor, context: Any) -> Tensor:
        return hidden + layer(hidden)

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        return model.out(hidden)


def test_another_model_needs_one_small_adapter() -> None:
    torch.manual_seed(0)
    model, adapter = Residual(), ResidualAdapter()
    with pytest.raises(ArgumentError, match=r"got Residual\. Write a small"):
        partition_model(model, 2)
    stages = build_stages(model, partition_model(model, 2, adapter=adapter), adapter=adapter)
    ids = torch.tensor([[0, 1, 4]])
    assert torch.equal(run(stages, ids), model(ids))


def test_a_model_made_from_one_that_is_known_has_its_adapter() -> None:
    class Mine(SmallTransformer):
        pass

    assert adapter_of(Mine(vocab_size=5, hidden_size=4, num_layers=1, num_heads=1)) is adapter_of(build("small"))


def test_small_transformer_does_not_look_ahead_nor_at_padding() -> None:
    model, ids = build("small").eval(), tokens()
    changed = ids.clone()
    changed[:, 5:] = 4
    assert torch.equal(model(ids)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(ids)[:, 5:], model(changed)[:, 5:])
    changed = ids.clone()
    changed[0, :3] = 4  # padding in LEFT
    assert torch.equal(model(ids, LEFT)[0, 3:], model(changed, LEFT)[0, 3:])


def test_small_transformer_agrees_with_attention_written_out() -> None:
    block = build("small").blocks[0]
    attention, hidden = block.attention, torch.randn(2, 5, 16, dtype=torch.float64)
    query, keys, values = attention.query_key_value(hidden).view(2, 5, 3, 4, 4).unbind(2)
    scores = torch.einsum("bthd,bshd->bhts", query, keys) / 2  # the root of the head size, 4
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values).reshape(2, 5, 16)
    torch.testing.assert_close(attention(hidden), attention.out(mixed), rtol=1e-12, atol=1e-14)


def test_small_transformer_drops_attention_weights_in_training_only() -> None:
    attention, hidden = build("small", dropout=0.5).blocks[0].attention, torch.randn(2, 5, 16, dtype=torch.float64)
    assert not torch.equal(attention(hidden), attention(hidden))
    attention.eval()
    assert torch.equal(attention(hidden), attention(hidden))


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(ArgumentError, match="num_heads must divide hidden_size, got 3 heads for 16"):
        build("small", num_heads=3)


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
    monkeypatch.setattr(ringsim.pipeline.partition, "perf_counter", lambda: Slow.now_s)
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
    times_s = ringsim.pipeline.partition.measure_times(parts, torch.ones(4, 2))
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


def make_stages() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(),
    )


def reference() -> list[torch.Tensor]:
    first, second = make_stages()
    second(first(torch.ones(5, 3).double())).square().mean().backward()
    return [parameter.grad for stage in (first, second) for parameter in stage.parameters()]


@pytest.mark.parametrize("split", [False, True])
def test_two_stages_by_hand_equal_one_model(split: bool) -> None:
    first, second = make_stages()
    y = first(torch.ones(5, 3).double())
    x = y.detach().clone()  # as if it had been received
    loss = forward_stage(lambda x: second(x).square().mean(), x)
    if split:
        grad = backward_input(x, loss, None)
        assert all(parameter.grad is None for parameter in second.parameters())
        backward_weight(loss, None, second.parameters())
    else:
        grad = backward_stage(x, loss, None)
    backward_stage(torch.ones(5, 3), y, grad)
    mine = [parameter.grad for stage in (first, second) for parameter in stage.parameters()]
    torch.testing.assert_close(mine, reference(), rtol=1e-12, atol=0)


def test_token_ids_have_no_gradient() -> None:
    embedding = nn.Embedding(4, 2)
    x = torch.tensor([1, 3])
    y = forward_stage(embedding, x)
    assert backward_stage(x, y, torch.ones(2, 2)) is None
    assert embedding.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_a_stage_without_layers_passes_the_gradient_on() -> None:
    x = torch.ones(2)
    y = forward_stage(lambda x: x, x)
    assert backward_stage(x, y, torch.tensor([5.0, 7.0])).tolist() == [5, 7]


def test_a_frozen_stage_still_gives_the_gradient_of_its_input() -> None:
    layer = nn.Linear(2, 1, bias=False).requires_grad_(False)
    x = torch.ones(1, 2)
    y = forward_stage(layer, x)
    assert backward_input(x, y, torch.ones(1, 1)).tolist() == layer.weight.tolist()
    backward_weight(y, torch.ones(1, 1), layer.parameters())
    assert layer.weight.grad is None


def test_what_autograd_has_recorded_is_no_input() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ArgumentError, match=r"x must be a leaf of autograd's graph, got the result of MulBackward0\. .*x\.detach\(\)"):
        forward_stage(nn.Identity(), x)


# -- headers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@given(
    st.sampled_from(["greeting", "activation", "gradient"]),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**40), max_size=8),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_header_survives_the_wire(
    kind: str, microbatch: int, shape: list[int], dtype: torch.dtype, has_data: bool, alike: bool, digest: int
) -> None:
    header = Header(kind, microbatch, Payload(tuple(shape), dtype, has_data), alike, digest)
    packed = header.pack()
    assert (packed.dtype, tuple(packed.shape)) == (torch.int64, (HEADER_SIZE,))
    assert Header.unpack(packed) == header


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_what_is_no_header_is_refused(numbers: list[int]) -> None:
    with pytest.raises(MessageMismatch, match="a message must begin with a header"):
        Header.unpack(torch.tensor(numbers))


@pytest.mark.parametrize("payload", [Payload((1,) * 9, torch.float32), Payload((1,), torch.quint8)])
def test_what_no_header_can_say_is_refused(payload: Payload) -> None:
    with pytest.raises(ArgumentError, match="a message must have at most 8 dimensions and one of float32"):
        Header("activation", 0, payload).pack()


def counted(run: Callable[[], object]) -> int:
    """Counts what torch computes; in the way of attention that is made of matrix products, which the counter sees on any device."""
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
    if not x.is_floating_point():  # token ids have no gradient: the half of the input ends at the embedding
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
    # Stages make their rotary tables by a product, place times frequency, which costs nothing here; on "meta" nobody makes any.
    tables = 2 * 9 * 2 if kind in ("llama", "qwen2", "qwen3") and device == "cpu" else 0
    by_torch, by_table = halves(first, ids), count_stage_flops(first, ids).plus(Flops(tables, 0, 0))
    assert (by_table.of("F"), by_table.of("B")) == (by_torch.of("F"), by_torch.of("B"))
    assert count_stage_flops(middle, hidden) == Flops(0, 0, 0)
    assert count_stage_flops(last, hidden).plus(Flops(tables, 0, 0)) == halves(last, hidden)


def test_frozen_weights_get_no_gradient() -> None:
    model = build("small")
    (stage,) = build_stages(model, [range(3)])
    free = count_stage_flops(stage, tokens())
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad = False
    frozen = count_stage_flops(stage, tokens())
    assert frozen[:2] == free[:2]
    assert free.weight_grad - frozen.weight_grad == 12 * 2 * 18 * 16 * 16  # (3 + 1 + 4 + 4) squares of the width


def test_what_is_computed_again_counts_again() -> None:
    (stage,) = build_stages(build("small"), [range(3)])
    once, again = count_stage_flops(stage, tokens()), count_stage_flops(stage, tokens(), recomputed=True)
    assert (again.of("F"), again.of("B"), again.of("W")) == (once.of("F"), once.of("B") + once.of("F"), once.of("W"))


def test_a_seventy_billion_layer_by_hand() -> None:
    # H. Touvron et al., "Llama 2" (2023), table 1 and its published configuration: width 8192, 64 heads and 8 of keys and values of 128,
    # 28672 inside; 4096 tokens.
    wide, narrow, inside, length = 8192, 8 * 128, 28672, 4096
    layer = attention_flops(1, length, length, wide)
    for shape in ((wide, wide), (wide, narrow), (wide, narrow), (wide, wide), (wide, inside), (wide, inside), (inside, wide)):
        layer = layer.plus(linear_flops(length, *shape))
    parameters = 2 * wide * wide + 2 * wide * narrow + 3 * wide * inside
    assert layer.forward == 2 * length * parameters + 4 * length * length * wide
    assert layer.of("B") == 2 * layer.forward
    assert 80 * parameters == pytest.approx(68.5e9, rel=0.01)  # of 70 billion; the rest is in the embedding and the head


def test_a_seventy_billion_pipeline_is_simulated_from_its_shapes() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):  # the published configuration again; no weight is ever made
        config = transformers.LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=32000,
            max_position_embeddings=4096,
        )
        model = transformers.LlamaForCausalLM(config)
    stages = build_stages(model, [range(10 * stage, 10 * stage + 10) for stage in range(8)])
    costs = flop_costs(stages, FlopCosts(4e14), sequences=1, tokens=4096)
    forward_s, backward_s = costs.forward, costs.backward
    layer = 2 * 4096 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 4 * 4096**2 * 8192
    head = 2 * 4096 * 8192 * 32000
    expected = [10 * layer / 4e14] * 7 + [(10 * layer + head) / 4e14]
    assert forward_s == pytest.approx(expected, rel=1e-12)
    assert backward_s == pytest.approx([2 * each for each in expected], rel=1e-12)
    link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1 / 50e9)
    run = ringsim.simulate_schedule("1f1b", costs, num_ranks=8, num_microbatches=32, link=link, size_bytes=2 * 4096 * 8192)
    slowest = 3 * max(expected)
    assert run.makespan > 32 * slowest + 7 * 3 * expected[0]  # the last stage works without a pause at best, after and before the others
    assert run.makespan < (32 + 7) * (slowest + 4 * link.time_s(2 * 4096 * 8192))


# -- charged


class StandInClock:
    """A clock that only adds up."""

    def __init__(self) -> None:
        self.passed_s: list[float] = []

    def now_s(self) -> float:
        return sum(self.passed_s)

    def advance(self, seconds: float) -> None:
        self.passed_s.append(seconds)


@pytest.fixture
def clock() -> Iterator[StandInClock]:
    stand_in = StandInClock()
    change_state(clock=stand_in, costs=FlopCosts(flops_per_s=1e9), slowdown=2.0)
    yield stand_in
    change_state(clock=None, costs=None, slowdown=1.0)


def test_a_step_is_charged_for_each_of_its_computations(clock: StandInClock) -> None:
    model, ids = build("small"), [tokens(1, 4), tokens(1, 6)]
    train_step_pipeline(model, ids, ids, schedule="gpipe")
    (stage,) = build_stages(model, [range(3)])
    counts = [count_stage_flops(stage, each) for each in ids]
    expected = [counts[0].of("F"), counts[1].of("F"), counts[0].of("B"), counts[1].of("B")]
    assert clock.passed_s == [2 * count / 1e9 for count in expected]


def test_split_backward_passes_are_charged_by_half(clock: StandInClock) -> None:
    model, ids = build("small"), [tokens(1, 4)]
    schedule = make_schedule("zb_h1", 1, 1)
    train_step_pipeline(model, ids, ids, schedule=schedule)
    (stage,) = build_stages(model, [range(3)])
    kinds = [action.kind for action in schedule.actions[0]]
    assert sorted(kinds) == ["F", "I", "W"]
    assert clock.passed_s == [2 * count_stage_flops(stage, ids[0]).of(kind) / 1e9 for kind in kinds]


def test_generation_is_charged_for_prompts_and_then_for_a_token_at_a_time(clock: StandInClock) -> None:
    model = build("small", dtype=torch.float32)
    generate(model, [[1, 2, 3, 4]], max_new_tokens=3)
    (stage,) = build_stages(model, [range(3)])
    shapes = [(4, 4), (1, 5), (1, 6)]  # new tokens, tokens so far
    expected = [count_stage_flops(stage, tokens(1, new), so_far).of("F") for new, so_far in shapes]
    assert clock.passed_s == [2 * count / 1e9 for count in expected]


def test_a_real_rank_is_charged_nothing_and_counts_nothing() -> None:
    assert get_state().clock is None
    charge("F", 0, 0, count=lambda: pytest.fail("nobody asked"))


def test_a_table_of_ones_own(clock: StandInClock) -> None:
    class ByStage:
        def time_s(self, work: Work) -> float:
            return {"F": 1.0, "B": 2.0}[work.kind] + 10 * work.stage + 100 * work.microbatch

    change_state(costs=ByStage())
    charge("F", 1, 2, count=lambda: Flops(0, 0, 0))
    charge("B", 0, 0, count=lambda: Flops(0, 0, 0))
    assert clock.passed_s == [422.0, 4.0]


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "fast"])
def test_a_speed_is_a_number_above_0(value: float) -> None:
    with pytest.raises(ArgumentError, match="flops_per_s must be a number above 0"):
        FlopCosts(value)


def test_a_model_without_data_makes_a_step_whose_loss_nobody_knows() -> None:
    model = build("llama").to("meta")
    ids = [tokens().to("meta")]
    loss = train_step_pipeline(model, ids, ids)
    assert loss != loss  # NaN
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in model.parameters())


def test_a_linear_layer_of_any_rank_counts_its_vectors() -> None:
    (stage,) = build_stages(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), [range(2)])
    assert count_stage_flops(stage, torch.zeros(3, 4)) == Flops(*[2 * 3 * (4 * 8 + 8 * 2)] * 3)
    assert count_stage_flops(stage, torch.zeros(3, 5, 4)) == Flops(*[2 * 15 * (4 * 8 + 8 * 2)] * 3)
