"""Tests of generation.

The plan of the ring is compared with closed forms. Simulated ranks must give the tokens of one
process, in the time of the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import (
    PROMPTS,
    TOKENS,
    catch,
    generate_all,
    one_by_one,
    settings_for,
    small_model,
)
from small_models import KINDS, MORE, build
from small_models import tokens as make_tokens
from torch import nn

import ringsim
from ringsim.errors import ArgumentError, Deadlock, MessageMismatch
from ringsim.pipeline import (
    SmallTransformer,
    build_stages,
    can_finish,
    check_single_rank,
    generate,
    steady_use,
)
from ringsim.schedules import generation as plan

LINK = ringsim.Link(alpha_s=0.0, beta_s_per_byte=0.0)


def simulate(
    worker: Callable[..., Any], world_size: int, *args: Any, **options: Any
) -> ringsim.Trace:
    return ringsim.simulate(worker, world_size=world_size, args=args, link=LINK, **options)


@pytest.mark.parametrize(
    ("size", "semantics"), [(1, "rendezvous"), (2, "rendezvous"), (3, "grouped"), (4, "rendezvous")]
)
def test_tokens_are_those_of_one_process_with_every_setting_that_finishes(
    size: int, semantics: str
) -> None:
    settings = [{}, *settings_for(size)]
    due = one_by_one(small_model(), PROMPTS, 6)
    assert len({*map(tuple, due)}) == len(PROMPTS), "the tokens must differ between prompts"
    trace = simulate(generate_all, size, settings, 6, semantics=semantics)
    assert trace.results == [[due] * len(settings)] * size
    assert not trace.unmatched


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *MORE) if kind != "small"])
def test_models_of_transformers(kind: str) -> None:
    # weights large enough to make tokens differ
    wide = {"init_std" if kind == "opt" else "initializer_range": 0.3}
    model, ids, cut = build(kind, **wide), make_tokens(2, 9), [range(1), range(1, 3)]
    assert check_single_rank(model, cut, [ids], [ids])
    if "moe" not in kind:  # experts that get only padding have gradients of 0, or none
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
        targets = [ids.masked_fill(mask == 0, -100)]
        assert check_single_rank(model, cut, [ids], targets, attention_masks=[mask])
    assert build_stages(model, cut)[1].attention_widths() == [16] * 2
    if kind == "bert":  # it sees all tokens at once
        return
    settings: list[dict[str, Any]] = [
        {"partition": [0, 3, 0]},
        {"async_comm": True, "num_inner_iterations": 2, "batch_size": 2},
    ]
    prompts = PROMPTS if kind in KINDS else PROMPTS[:3]
    due = one_by_one(model, prompts, 5)
    assert len({*map(tuple, due)}) == len(prompts)
    trace = simulate(
        lambda: [generate(build(kind, **wide), prompts, 5, **each) for each in settings], 3
    )
    assert trace.results == [[due] * len(settings)] * 3


def test_drawn_tokens_do_not_depend_on_stages_or_batches() -> None:
    def draw(seed: int, size: int | None = None) -> list[list[int]]:
        return generate(small_model(), PROMPTS, 8, batch_size=size, temperature=1.5, seed=seed)

    alone = draw(1)
    assert alone not in (draw(2), one_by_one(small_model(), PROMPTS, 8))
    on_ring = simulate(lambda: [draw(1, size) for size in (None, 1, 2)], 3)
    assert on_ring.results == [[alone] * 3] * 3


def test_drawn_tokens_are_as_likely_as_the_model_says() -> None:
    """Draws for one prompt many times, with independent draws.

    With a mean of c, 5 standard deviations are 5 sqrt(c).
    """
    model, copies = small_model(), 2000
    tokens = generate(model, [[3, 1]] * copies, 1, temperature=2.0, seed=4)
    with torch.no_grad():
        due = copies * torch.softmax(model(torch.tensor([[3, 1]]))[0, -1] / 2.0, dim=-1)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=TOKENS)
    assert ((counts - due).abs() <= 5 * due.sqrt() + 5).all()


def test_a_prompt_ends_with_its_first_stop_token() -> None:
    full = one_by_one(small_model(), PROMPTS, 10)
    stops = [full[0][3], full[2][0], full[4][9]]
    ends = [[row.index(stop) + 1 for stop in stops if stop in row] for row in full]
    due = [row[: min(end, default=10)] for row, end in zip(full, ends, strict=True)]
    assert len({len(row) for row in due}) > 2
    assert simulate(generate_all, 2, [{"stop_tokens": stops}], 10).results == [[due]] * 2


def test_more_stages_than_layers_and_fewer_prompts_than_stages() -> None:
    few = [(0, 7), (2, 7), (5, 1), (5, 2), (5, 4)]  # layers, prompts

    def work() -> list[list[list[int]]]:
        tokens = [generate(small_model(layers), PROMPTS[:count], 4) for layers, count in few]
        own: Any = {"async_comm": True, "num_inner_iterations": 7}
        return tokens + [generate(small_model(layers), PROMPTS, 4, **own) for layers in (0, 2)]

    due = [one_by_one(small_model(layers), PROMPTS[:count], 4) for layers, count in few]
    assert simulate(work, 4).results == [due + due[:2]] * 4


def test_the_model_stays_in_the_mode_it_was_in_and_dropout_is_off() -> None:
    def worker() -> tuple[bool, bool]:
        model = SmallTransformer(TOKENS, hidden_size=32, num_layers=3, dropout=0.5)
        model.blocks[1].eval()
        before = [module.training for module in model.modules()]
        first, second = (generate(model, PROMPTS, 4) for _ in range(2))
        return first == second, [module.training for module in model.modules()] == before

    assert simulate(worker, 2).results == [(True, True)] * 2


# -- refused


def generate_unchecked(turns: int, async_comm: bool) -> None:
    """Runs a setting that ``generate`` would refuse, on ranks in a separate process."""
    module: Any = sys.modules[generate.__module__]
    module.check_can_finish = lambda *_: None
    generate(small_model(), PROMPTS, 3, turns, async_comm)


@pytest.mark.parametrize(
    ("size", "turns", "async_comm"), [(2, 4, True), (2, 1, False), (3, 4, False)]
)
def test_what_is_refused_would_really_jam(size: int, turns: int, async_comm: bool) -> None:
    """Without the refusal, ranks wait for each other as the plan predicts."""
    with pytest.raises(Deadlock) as failed:
        simulate(generate_unchecked, size, turns, async_comm)
    table = failed.value.trace.to_pandas().query("kind in ('send', 'recv') and status != 'ok'")
    waiting = table[table["wait_ns"].notna()]
    due = plan.time_generation(size, turns, 1, 3, 1, 1, async_comm=async_comm).blocked
    assert {*zip(waiting["rank"], waiting["peer"], strict=True)} == {(b.rank, b.peer) for b in due}
    assert len(due) == size


DIFFERENT = "ranks {} and {} called generate with different arguments"


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
            arguments: Any = {"prompts": PROMPTS, "max_new_tokens": 4, **settings[rank]}
            with pytest.raises(MessageMismatch, match=DIFFERENT.format(1 - rank, rank)):
                generate(small_model(), **arguments)

    simulate(worker, 2)


NO_GENERATOR = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
ARGUMENTS = [
    ({"prompts": []}, r"prompts must contain at least one prompt, .* one token, got \[\]"),
    ({"prompts": [[1], []]}, r"at least one token, got \[\[1\], \[\]\]"),
    ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
    ({"temperature": -1.0}, "temperature must be non-negative, got -1.0"),
    ({"temperature": float("nan")}, "temperature must be non-negative, got nan"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
    ({"num_inner_iterations": 0}, "num_inner_iterations must be a positive integer, got 0"),
    ({"model": NO_GENERATOR}, "the adapter of Sequential has no cache"),
]


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        generate(**{"model": small_model(), "prompts": [[1]], "max_new_tokens": 2, **arguments})


NEAREST = [
    (
        4,
        5,
        False,
        "must be from 2 to 4 with 4 stages and synchronous messages, got 5",
        "4, or async_comm=True.",
    ),
    (4, 1, False, "got 1: stage 0 receives before it sends", "Use 2, or async_comm=True."),
    (2, 1, False, "must be 2 with 2 stages", "Use 2, or async_comm=True."),
    (4, 8, False, "got 8", "Use 4."),
    (4, 8, True, "must be from 1 to 7 with 4 stages and asynchronous messages, got 8", "Use 7."),
]


@pytest.mark.parametrize(("size", "turns", "async_comm", "rule", "remedy"), NEAREST)
def test_a_ring_that_never_ends_is_refused_with_the_nearest_that_does(
    size: int, turns: int, async_comm: bool, rule: str, remedy: str
) -> None:
    def worker() -> str:
        return catch(generate, small_model(), PROMPTS, 2, turns, async_comm)

    trace = simulate(worker, size)
    assert len(trace.events) == 0, "it is refused before any message"
    for said in trace.results:
        assert rule in said
        assert said.endswith(remedy)
    # with a single token, no token goes round
    plan.check_can_finish(size, turns, num_tokens=1, async_comm=async_comm)


# -- the plan, and the record


def makespan(run: Any) -> Any:
    assert run.blocked == ()
    return max(times[-1][1] for times in run.times)


class ByToken:
    """A cost table: 7 ms for the first work of a stage on a batch, the prompt, and then 3 ms."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def time_s(self, work: Any) -> float:
        is_token = (work.stage, work.microbatch) in self.seen
        self.seen.add((work.stage, work.microbatch))
        return 3e-3 if is_token else 7e-3


@pytest.mark.parametrize(("size", "batch_size", "rounds"), [(2, None, 1), (3, 1, 3), (4, 1, 2)])
@pytest.mark.parametrize(("is_full", "async_comm"), [(True, False), (True, True), (False, True)])
def test_the_ring_takes_as_long_as_its_plan_and_sends_as_much(
    size: int, batch_size: int | None, rounds: int, is_full: bool, async_comm: bool
) -> None:
    num_tokens, turns = 5, size
    if not is_full:
        turns, rounds, batch_size = 1, 1, None
    settings = {"num_inner_iterations": turns, "async_comm": async_comm, "batch_size": batch_size}
    trace = simulate(generate_all, size, [settings], num_tokens, compute=ByToken())
    due = plan.time_generation(size, turns, rounds, num_tokens, 7, 3, async_comm=async_comm)
    table = trace.to_pandas()
    assert not (table["kind"] == "collective").any(), "no rank waits for all others"
    spans = table[table["kind"] == "span"]
    took_ns = spans["done_ns"].max() - spans["post_ns"].min()
    assert took_ns == 1e6 * makespan(due)
    jobs = [(job.batch, job.name) for job in plan.plan_jobs(rounds * turns, turns, num_tokens)]
    for _, own in spans.sort_values("post_ns").groupby("rank"):
        assert [*zip(own["microbatch"], own["label"], strict=True)] == jobs
        # idle while the ring fills and drains, and in each later round for the difference between a
        # prompt and a token
        busy_ns = (own["done_ns"] - own["post_ns"]).sum()
        idle_ns = (size - 1) * (7e6 + (rounds - 1) * 4e6)
        assert not is_full or took_ns - busy_ns == pytest.approx(idle_ns)
    messages = trace.to_pandas("messages")
    announced = messages["tag"] == 1
    assert announced.sum() == 2 * (size - 1)
    others = 2 * (size - 1) + (size - 1)  # and one round for the results
    assert len(messages) == plan.count_messages(size, rounds * turns, num_tokens) + others
    edges = [f"ring:{source}>{(source + 1) % size}" for source in messages["src"][~announced]]
    assert (messages["group"][~announced] == edges).all()


SETTINGS = [
    (stages, turns, async_comm)
    for stages, async_comm in product(range(1, 7), (False, True))
    for turns in range(1, 2 * stages + 3)
]


def test_the_deadlock_map_is_what_the_plan_does() -> None:
    for setting, rounds, tokens in product(SETTINGS, (1, 2), (1, 2, 4)):
        stages, turns, async_comm = setting
        run = plan.time_generation(stages, turns, rounds, tokens, 3, 2, async_comm=async_comm)
        ends = tokens == 1 or can_finish(*setting)
        assert (run.blocked == ()) is ends, (setting, rounds, tokens)


def test_steady_use_is_the_share_in_which_a_full_ring_works() -> None:
    for setting in filter(lambda setting: can_finish(*setting), SETTINGS):
        use, (stages, turns, async_comm) = steady_use(*setting), setting
        # The two numbers of tokens are whole repetitions apart, after the ring has filled.
        period = use.numerator * stages
        first, second = (
            plan.time_generation(stages, turns, 1, count * period, 1, 1, async_comm=async_comm)
            for count in (2, 4)
        )
        took = makespan(second) - makespan(first)
        assert Fraction(2 * period * turns, took) == use, setting


@given(st.integers(1, 40), st.integers(1, 6), st.none() | st.integers(1, 8))
def test_batches_hold_every_prompt_in_full_rounds(
    prompts: int, turns: int, size: int | None
) -> None:
    batches = plan.plan_batches(prompts, turns, size)
    assert len(batches) % turns == 0
    assert all(batches)
    assert size is None or max(map(len, batches)) <= size
    own = [number for batch in batches for number in batch]
    assert own[:prompts] == list(range(prompts))
    assert set(own[prompts:]) <= {0}
    if prompts >= len(batches):
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert len(own) == prompts
