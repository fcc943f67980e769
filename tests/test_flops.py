"""The table of arithmetic: against torch's own counter, for every kind of model, and charged to the clock of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from small_models import KINDS, build, tokens
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ringsim
from ringsim.compute_costs import FlopCosts, Work, charge
from ringsim.errors import ArgumentError
from ringsim.pipeline import build_stages, flop_costs, generate, make_schedule, train_step_pipeline
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.pipeline.stage import Stage, count_stage_flops
from ringsim.state import change_state, get_state


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
