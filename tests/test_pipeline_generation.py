"""Generation on simulated ranks: the tokens of the model in one process, over the messages of the plan, in the time of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_cases import PROMPTS, TOKENS, generate_all, one_by_one, settings_for, small_model
from torch import nn

import ringsim
from ringsim.errors import ArgumentError, MessageMismatch, ScheduleError
from ringsim.pipeline import SmallTransformer, generate
from ringsim.schedules.generation import count_messages, plan_jobs, time_generation
from ringsim.traces.events import SPAN

LINK = ringsim.Link(alpha_s=0.0, beta_s_per_byte=0.0)


def simulate(worker: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> ringsim.Trace:
    return ringsim.simulate(worker, world_size=world_size, args=args, link=LINK, **options)


def hf_model(name: str) -> nn.Module:
    """A model of transformers from a small configuration, with weights large enough to make tokens differ."""
    import transformers

    usual = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
    sizes = {
        "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "OPT": {**others, "word_embed_proj_dim": 16, "init_std": 0.3},
    }.get(name, usual)
    tokens = {"vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
    torch.manual_seed(3)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes, **tokens)).double()
    return model


@pytest.mark.parametrize(("size", "semantics"), [(1, "rendezvous"), (2, "rendezvous"), (3, "grouped"), (4, "rendezvous")])
def test_tokens_are_those_of_one_process_with_every_setting_that_finishes(size: int, semantics: str) -> None:
    settings = [{}, *settings_for(size)]
    due = one_by_one(small_model(), PROMPTS, 6)
    assert len({tuple(row) for row in due}) == len(PROMPTS), "the tokens must tell the prompts apart"
    trace = simulate(generate_all, size, settings, 6, semantics=semantics)
    for rows in trace.results:
        assert rows == [due] * len(settings)
    assert not trace.unmatched


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT", "Qwen2", "Qwen3"])
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    settings: list[dict[str, Any]] = [
        {"partition": [0, 3, 0]},
        {"partition": [range(1), range(1, 1), range(1, 3)]},
        {"async_comm": True, "num_inner_iterations": 2, "batch_size": 2},
    ]
    due = one_by_one(hf_model(name), PROMPTS, 5)
    assert len({tuple(row) for row in due}) == len(PROMPTS)
    trace = simulate(lambda: [generate(hf_model(name), PROMPTS, 5, **each) for each in settings], 3)
    assert trace.results == [[due] * len(settings)] * 3


def test_drawn_tokens_do_not_depend_on_stages_or_batches() -> None:
    def draw(seed: int, batch_sizes: list[int | None]) -> list[list[list[int]]]:
        return [generate(small_model(), PROMPTS, 8, batch_size=size, temperature=1.5, seed=seed) for size in batch_sizes]

    alone = {seed: draw(seed, [None])[0] for seed in (1, 2)}
    assert alone[1] != alone[2]
    assert alone[1] != one_by_one(small_model(), PROMPTS, 8)
    for seed, due in alone.items():
        assert simulate(draw, 3, seed, [None, 1, 2]).results == [[due] * 3] * 3


def test_drawn_tokens_are_as_likely_as_the_model_says() -> None:
    """One prompt many times: each place draws for itself. With a mean of c, 5 standard deviations are 5 sqrt(c)."""
    model, copies = small_model(), 2000
    tokens = generate(model, [[3, 1]] * copies, 1, temperature=2.0, seed=4)
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([[3, 1]]))[0, -1] / 2.0, dim=-1)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=TOKENS)
    assert ((counts - copies * chances).abs() <= 5 * (copies * chances).sqrt() + 5).all()


def test_a_prompt_ends_with_its_first_stop_token() -> None:
    full = one_by_one(small_model(), PROMPTS, 10)
    stops = [full[0][3], full[2][0], full[4][9]]
    due = [row[: min((row.index(stop) + 1 for stop in stops if stop in row), default=10)] for row in full]
    assert {len(row) for row in due} >= {1, 10} or len({len(row) for row in due}) > 2
    assert simulate(generate_all, 2, [{"stop_tokens": stops}], 10).results == [[due]] * 2


def test_more_stages_than_layers_and_fewer_prompts_than_stages() -> None:
    def few() -> list[list[list[int]]]:
        settings: list[dict[str, Any]] = [{}, {"async_comm": True, "num_inner_iterations": 7}]
        tokens = [generate(small_model(layers), PROMPTS, 4, **each) for layers in (0, 1, 2) for each in settings]
        return tokens + [generate(small_model(), PROMPTS[:number], 4) for number in (1, 2, 4)]

    due = [one_by_one(small_model(layers), PROMPTS, 4) for layers in (0, 0, 1, 1, 2, 2)]
    due += [one_by_one(small_model(), PROMPTS[:number], 4) for number in (1, 2, 4)]
    assert simulate(few, 4).results == [due] * 4


def test_half_precision_travels_as_it_is() -> None:
    def worker() -> list[list[int]]:
        return generate(small_model().bfloat16(), PROMPTS, 5, batch_size=1)  # batches of one: rounding depends on the batch

    trace = simulate(worker, 2)
    assert trace.results == [worker()] * 2
    assert {payload.dtype for payload in trace.events.tables.payloads} == {"bfloat16", "int64"}


def test_the_model_stays_in_the_mode_it_was_in_and_dropout_is_off() -> None:
    def worker() -> tuple[bool, bool]:
        torch.manual_seed(3)
        model = SmallTransformer(TOKENS, hidden_size=32, num_layers=3, dropout=0.5)
        model.blocks[1].eval()
        before = [module.training for module in model.modules()]
        first, second = (generate(model, PROMPTS, 4) for _ in range(2))
        return first == second, [module.training for module in model.modules()] == before

    assert simulate(worker, 2).results == [(True, True)] * 2


# -- what is refused


def test_settings_that_cannot_finish_are_refused_before_any_message() -> None:
    def worker() -> list[str]:
        said = []
        for turns, async_comm in ((1, False), (4, False), (6, True)):
            with pytest.raises(ScheduleError) as refused:
                generate(small_model(), PROMPTS, 4, turns, async_comm)
            said.append(str(refused.value).split("got ")[1][0])
        return said

    trace = simulate(worker, 3)
    assert trace.results == [["1", "4", "6"]] * 3
    assert len(trace.events) == 0


def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    differing: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"max_new_tokens": 5}),
        ({}, {"prompts": [[1]]}),
        ({}, {"partition": [1, 4]}),
        ({"batch_size": 1}, {"batch_size": 2}),
    ]

    def worker() -> None:
        rank = ringsim.current_ring().rank
        for settings in differing:
            with pytest.raises(MessageMismatch, match=f"got others on rank {1 - rank} than on rank {rank}"):
                generate(small_model(), **{"prompts": PROMPTS, "max_new_tokens": 4, **settings[rank]})

    simulate(worker, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts must be one or more, got none"),
        ({"prompts": [[1], []]}, r"a prompt must have one token or more, got none \(prompt 1\)"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"num_inner_iterations": 0}, "num_inner_iterations must be an integer of 1 or more, got 0"),
        ({"model": nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))}, "must have a cache, got Sequential"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        generate(**{"model": small_model(), "prompts": [[1]], "max_new_tokens": 2, **arguments})


# -- what is recorded


class EqualJobs:
    """A table of costs: every job takes a second."""

    def time_s(self, work: Any) -> float:
        return 1.0


@pytest.mark.parametrize(("size", "batch_size", "rounds"), [(2, None, 1), (3, 1, 3), (4, 1, 2)])
def test_the_ring_takes_as_long_as_its_plan_and_sends_as_much(size: int, batch_size: int | None, rounds: int) -> None:
    num_tokens = 5
    for turns, async_comm in ((size, False), (size, True), (1, True)):
        settings = {"num_inner_iterations": turns, "async_comm": async_comm, "batch_size": batch_size if turns > 1 else None}
        rounds_now = rounds if turns == size else 1
        trace = simulate(generate_all, size, [settings], num_tokens, compute=EqualJobs())
        due = time_generation(size, turns, rounds_now, num_tokens, 1, 1, async_comm=async_comm)
        spans = trace.events.select(trace.events.kind == SPAN)
        assert spans.done_ns.max() - spans.post_ns.min() == 1e9 * max(times[-1][1] for times in due.times)
        table = trace.to_pandas()
        jobs = table[table["kind"] == "span"].groupby(["rank", "microbatch", "label"], observed=True).size().to_dict()
        planned = plan_jobs(rounds_now * turns, turns, num_tokens)
        assert jobs == {
            (rank, job.batch, job.name): sum((other.batch, other.name) == (job.batch, job.name) for other in planned)
            for rank in range(size)
            for job in planned
        }
        messages = trace.to_pandas("messages")
        announced = messages["tag"] == 1
        assert announced.sum() == 2 * (size - 1)
        assert len(messages) == count_messages(size, rounds_now * turns, num_tokens) + 2 * (size - 1) + (size - 1)  # and the results
        assert (messages["group"][~announced] == [f"ring:{src}>{(src + 1) % size}" for src in messages["src"][~announced]]).all()
