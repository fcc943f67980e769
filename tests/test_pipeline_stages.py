"""A model cut into stages is the model: same logits, same gradients, in its own parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import KINDS, build, logits, tokens
from torch import Tensor, nn

from ringsim.errors import ArgumentError
from ringsim.pipeline import Adapter, Announced, SmallTransformer, Stage, adapter_of, build_stages, partition_model, tied_parameters

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
