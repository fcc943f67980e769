"""Generation on the ring: the tokens of the model in one process, over the messages of the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import ringsim
from ringsim.errors import Deadlock, ScheduleError
from ringsim.pipeline import SmallTransformer, generate
from ringsim.schedules.engine import Compute, Operation, Receive, Run, Send, Wait, run_programs
from ringsim.schedules.generation import can_finish, count_messages, makespan_of_async_ring, makespan_of_full_ring, time_generation
from ringsim.traces.events import NONE, OK, RECV, SEND, SPAN
from ringsim.traces.value import Trace

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

VOCABULARY = 61
PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12, 13, 14], [15, 16], [17, 18, 19], [20, 21, 22, 23, 24]]


def small_model(layers: int = 5, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return SmallTransformer(VOCABULARY, hidden_size=32, num_layers=layers, num_heads=4, max_length=64).double()


def hf_model(name: str) -> nn.Module:
    """A model of transformers from a small configuration, with weights large enough to make tokens differ."""
    import transformers

    sizes = {
        "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "Llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        "OPT": {
            "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        },
        "Qwen2": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    }  # fmt: skip
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**sizes[name], **({"init_std": 0.3} if name == "OPT" else {}), **tokens)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model: nn.Module = getattr(transformers, kind)(config).double()
    return model


def one_by_one(model: nn.Module, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The oracle: each prompt alone, the whole sequence read again for each token; no cache, no padding, no stages."""
    model.eval()
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_tokens):
                logits = model(torch.tensor([tokens]))
                logits = logits if isinstance(logits, torch.Tensor) else logits.logits
                tokens.append(int(logits[0, -1].argmax()))
            rows.append(tokens[len(prompt) :])
    return rows


def on_rank(make: Callable[[], nn.Module], settings: list[dict[str, Any]], num_tokens: int) -> list[list[list[int]]]:
    return [generate(make(), PROMPTS, num_tokens, **each) for each in settings]


def settings_for(world_size: int) -> list[dict[str, Any]]:
    """All settings that finish, one round and several."""
    return [
        {"num_inner_iterations": turns, "async_comm": async_comm, "batch_size": batch_size}
        for async_comm in (False, True)
        for turns in range(1, 2 * world_size)
        if can_finish(world_size, turns, async_comm)
        for batch_size in (None, 1)
    ]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_tokens_are_those_of_one_process_with_every_setting_that_finishes(world_size: int) -> None:
    settings = [{}, *settings_for(world_size)]
    due = one_by_one(small_model(), PROMPTS, 6)
    assert len({tuple(row) for row in due}) == len(PROMPTS), "the tokens must tell the prompts apart"
    trace = ringsim.trace(on_rank, world_size=world_size, args=(small_model, settings, 6), limit_s=60)
    for rank, rows in enumerate(trace.results):
        for each, row in zip(settings, rows, strict=True):
            assert row == due, (rank, each)
    assert not trace.unmatched


def test_models_of_transformers() -> None:
    names = ["Llama", "GPT2", "OPT", "Qwen2"]
    settings = [
        {},
        {"partition": [0, 3, 0]},
        {"partition": [range(1), range(1, 1), range(1, 3)]},
        {"async_comm": True, "num_inner_iterations": 2, "batch_size": 2},
    ]

    def all_models() -> dict[str, list[list[list[int]]]]:
        return {name: on_rank(partial(hf_model, name), settings, 5) for name in names}

    due = {name: one_by_one(hf_model(name), PROMPTS, 5) for name in names}
    assert all(len({tuple(row) for row in rows}) == len(PROMPTS) for rows in due.values())
    trace = ringsim.trace(all_models, world_size=3, limit_s=90)
    for found in trace.results:
        assert found == {name: [rows] * len(settings) for name, rows in due.items()}


def test_drawn_tokens_do_not_depend_on_stages_or_batches() -> None:
    def draw(seed: int, batch_sizes: list[int | None]) -> list[list[list[int]]]:
        return [generate(small_model(), PROMPTS, 8, batch_size=size, temperature=1.5, seed=seed) for size in batch_sizes]

    alone = {seed: draw(seed, [None])[0] for seed in (1, 2)}
    assert alone[1] != alone[2]
    assert alone[1] != one_by_one(small_model(), PROMPTS, 8)
    for seed, due in alone.items():
        trace = ringsim.trace(draw, world_size=3, args=(seed, [None, 1, 2]), limit_s=60)
        assert trace.results == [[due] * 3] * 3


def test_drawn_tokens_are_as_likely_as_the_model_says() -> None:
    """One prompt many times: each place draws for itself. With a mean of c, 5 standard deviations are 5 sqrt(c)."""
    model, copies = small_model(), 2000
    tokens = generate(model, [[3, 1]] * copies, 1, temperature=2.0, seed=4)
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([[3, 1]]))[0, -1] / 2.0, dim=-1)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=VOCABULARY)
    assert ((counts - copies * chances).abs() <= 5 * (copies * chances).sqrt() + 5).all()


def test_a_prompt_ends_with_its_first_stop_token() -> None:
    full = one_by_one(small_model(), PROMPTS, 10)
    stops = [full[0][3], full[2][0], full[4][9]]
    due = [row[: min((row.index(stop) + 1 for stop in stops if stop in row), default=10)] for row in full]
    assert {len(row) for row in due} >= {1, 10} or len({len(row) for row in due}) > 2
    trace = ringsim.trace(on_rank, world_size=2, args=(small_model, [{"stop_tokens": stops}], 10), limit_s=60)
    assert trace.results == [[due]] * 2


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_more_stages_than_layers(layers: int) -> None:
    def make() -> nn.Module:
        return small_model(layers)

    due = one_by_one(make(), PROMPTS, 4)
    trace = ringsim.trace(on_rank, world_size=4, args=(make, [{}, {"async_comm": True, "num_inner_iterations": 7}], 4), limit_s=60)
    assert trace.results == [[due] * 2] * 4


def test_half_precision_travels_as_it_is() -> None:
    def make() -> nn.Module:
        return small_model().bfloat16()

    alone = generate(make(), PROMPTS, 5, batch_size=1)  # batches of one, on both sides: rounding depends on the batch
    trace = ringsim.trace(on_rank, world_size=2, args=(make, [{"batch_size": 1}], 5), limit_s=60)
    assert trace.results == [[alone]] * 2
    payloads = {payload.dtype for payload in trace.events.tables.payloads}
    assert payloads == {"bfloat16", "int64"}


def test_fewer_prompts_than_stages() -> None:
    def few(numbers: list[int], num_tokens: int) -> list[list[list[int]]]:
        return [generate(small_model(), PROMPTS[:number], num_tokens) for number in numbers]

    trace = ringsim.trace(few, world_size=3, args=([1, 2, 4], 5), limit_s=60)
    assert trace.results == [[one_by_one(small_model(), PROMPTS[:number], 5) for number in (1, 2, 4)]] * 3


def test_the_model_stays_in_the_mode_it_was_in_and_dropout_is_off() -> None:
    def worker() -> tuple[bool, list[bool], bool]:
        torch.manual_seed(3)
        model = SmallTransformer(VOCABULARY, hidden_size=32, num_layers=3, dropout=0.5)
        model.blocks[1].eval()
        before = [module.training for module in model.modules()]
        first, second = (generate(model, PROMPTS, 4) for _ in range(2))
        return first == second, [module.training for module in model.modules()] == before, any(before)

    assert ringsim.trace(worker, world_size=2).results == [(True, True, True)] * 2


def test_two_rings_in_one_world() -> None:
    def worker() -> list[list[int]]:
        import torch.distributed as dist

        rank = dist.get_rank()
        ranks = [0, 1] if rank < 2 else [2, 3]
        ringsim.initialize_distributed(ring_ranks=ranks)
        return generate(small_model(), PROMPTS if rank < 2 else PROMPTS[:3], 4)

    def in_a_world() -> list[list[int]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return worker()

    due = one_by_one(small_model(), PROMPTS, 4)
    assert ringsim.trace(in_a_world, world_size=4, ring=False, limit_s=60).results == [due, due, due[:3], due[:3]]


def test_a_ring_is_built_over_the_default_group() -> None:
    def worker() -> list[list[int]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return generate(small_model(), PROMPTS, 4)

    due = one_by_one(small_model(), PROMPTS, 4)
    assert ringsim.trace(worker, world_size=2, ring=False, limit_s=60).results == [due] * 2


# -- what is refused


def test_settings_that_cannot_finish_are_refused_before_any_message() -> None:
    def worker() -> list[str]:
        said = []
        for turns, async_comm in ((1, False), (4, False), (6, True)):
            try:
                generate(small_model(), PROMPTS, 4, turns, async_comm)
            except ScheduleError as error:
                said.append(str(error))
        return said

    trace = ringsim.trace(worker, world_size=3)
    assert [[text.split("got ")[1][0] for text in said] for said in trace.results] == [["1", "4", "6"]] * 3
    assert not np.isin(trace.events.kind, (SEND, RECV)).any()


@pytest.mark.parametrize(("world_size", "turns", "async_comm"), [(2, 1, False), (2, 3, False), (2, 4, True), (3, 4, False)])
def test_what_is_refused_would_really_jam(world_size: int, turns: int, async_comm: bool) -> None:
    """Without the refusal the ranks wait for each other: each for the one that the plan, played on a clock, says."""

    def worker() -> None:
        from ringsim.pipeline import generation

        generation.check_can_finish = lambda *_: None
        generate(small_model(), PROMPTS, 3, turns, async_comm)

    with pytest.raises(Deadlock) as failed:
        ringsim.trace(worker, world_size=world_size, limit_s=30)
    assert failed.value.diagnosis.kind == "deadlock"
    events = failed.value.trace.events
    stuck = np.flatnonzero((events.status != OK) & (events.wait_ns != NONE) & np.isin(events.kind, (SEND, RECV)))
    due = time_generation(world_size, turns, 1, 3, 1, 1, async_comm=async_comm).blocked
    assert {(int(events.rank[index]), int(events.peer[index])) for index in stuck} == {(each.rank, each.peer) for each in due}
    assert len(due) == world_size


def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    def worker(differing: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
        said = []
        for settings in differing:
            arguments = {"prompts": PROMPTS, "max_new_tokens": 4, **settings[ringsim.current_ring().rank]}
            try:
                generate(small_model(), **arguments)
            except ringsim.errors.MessageMismatch as error:
                said.append(str(error))
        return said

    differing = [
        ({}, {"max_new_tokens": 5}),
        ({}, {"prompts": [[1]]}),
        ({}, {"partition": [1, 4]}),
        ({"batch_size": 1}, {"batch_size": 2}),
    ]
    for rank, said in enumerate(ringsim.trace(worker, world_size=2, args=(differing,)).results):
        assert len(said) == len(differing)
        assert all(f"got others on rank {1 - rank} than on rank {rank}" in text for text in said)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ringsim.errors.ArgumentError, match="must have a cache, got Sequential"):
        generate(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), [[1]], 2)


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
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ringsim.errors.ArgumentError, match=words):
        generate(small_model(), **{"prompts": [[1]], "max_new_tokens": 2, **arguments})


# -- what is recorded


def played_again(trace: Trace, prefill: int, decode: int) -> Run:
    """Plays what the ranks really did, in their order, with other times for the jobs."""
    events = trace.events
    programs = []
    for rank in range(trace.world_size):
        moments = []  # (when, event, whether it is a wait)
        for index in np.flatnonzero(events.rank == rank).tolist():
            moments.append((events.post_ns[index], index, False))
            if events.kind[index] != SPAN:
                assert events.wait_ns[index] != NONE
                moments.append((events.wait_ns[index], index, True))
        operations: list[Operation] = []
        place: dict[int, int] = {}
        for _, index, is_wait in sorted(moments):
            edge = (int(events.group[index]), int(events.tag[index]))
            if is_wait:
                operations.append(Wait(place[index]))
                continue
            place[index] = len(operations)
            if events.kind[index] == SPAN:
                operations.append(Compute(prefill if events.tables.labels[events.label[index]] == "prefill" else decode))
            else:
                operations.append((Send if events.kind[index] == SEND else Receive)(int(events.peer[index]), edge))
        programs.append(operations)
    return run_programs(programs)


@pytest.mark.parametrize(("world_size", "batch_size", "rounds"), [(2, None, 1), (3, 1, 3), (4, 1, 2)])
def test_what_ran_takes_as_long_as_the_closed_forms_say(world_size: int, batch_size: int | None, rounds: int) -> None:
    """The trace of real ranks, played again with exact times for its jobs; so it does not matter how busy the machine was."""
    num_tokens = 5
    for turns, async_comm in ((world_size, False), (world_size, True), (1, True)):
        num_rounds = rounds if turns == world_size else 1
        settings = {"num_inner_iterations": turns, "async_comm": async_comm, "batch_size": batch_size if turns > 1 else None}
        trace = ringsim.trace(on_rank, world_size=world_size, args=(small_model, [settings], num_tokens), limit_s=60)
        run = played_again(trace, 1, 1)
        assert not run.blocked
        last = max(times[-1][1] for times in run.times)
        assert last == makespan_of_async_ring(world_size, turns, num_rounds, num_tokens)
        if turns == world_size:
            last = max(times[-1][1] for times in played_again(trace, 7, 3).times)
            assert last == makespan_of_full_ring(world_size, num_rounds, num_tokens, 7, 3)
            _check_record(trace, num_rounds * world_size, num_tokens)
            _check_lower_bound(trace, num_rounds, num_tokens)


def _check_record(trace: Trace, num_batches: int, num_tokens: int) -> None:
    """A span for each job, with stage, batch and kind; and the messages of the closed form, on the ring's pair groups."""
    size = trace.world_size
    table = trace.to_pandas()
    spans = table[table["kind"] == "span"]
    assert (spans["stage"] == spans["rank"]).all()
    assert spans.groupby(["rank", "microbatch", "label"], observed=True).size().to_dict() == {
        (rank, batch, label): number
        for rank in range(size)
        for batch in range(num_batches)
        for label, number in (("prefill", 1), ("decode", num_tokens - 1))
    }
    messages = trace.to_pandas("messages")
    assert not trace.unmatched
    announcements = messages["tag"] == 1
    assert announcements.sum() == 2 * (size - 1)
    assert len(messages) == count_messages(size, num_batches, num_tokens) + 2 * (size - 1) + (size - 1)
    assert (messages["group"][~announcements] == [f"ring:{src}>{(src + 1) % size}" for src in messages["src"][~announcements]]).all()


def _check_lower_bound(trace: Trace, num_rounds: int, num_tokens: int) -> None:
    """No run is faster than the closed form with its own shortest jobs."""
    events = trace.events
    spans = events.select(events.kind == SPAN)
    took = spans.done_ns - spans.post_ns
    is_prefill = np.array([spans.tables.labels[label] == "prefill" for label in spans.label])
    prefill, decode = int(took[is_prefill].min()), int(took[~is_prefill].min())
    due = makespan_of_full_ring(trace.world_size, num_rounds, num_tokens, prefill, min(prefill, decode))
    assert spans.done_ns.max() - spans.post_ns.min() >= due
