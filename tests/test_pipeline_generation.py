"""Generation.

The plan of the ring against closed forms, and on simulated ranks the tokens of one process in the
time of the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import PROMPTS, TOKENS, generate_all, one_by_one, settings_for, small_model
from small_models import KINDS, MORE, build
from small_models import tokens as make_tokens
from torch import nn

import ringsim
from ringsim import Trace
from ringsim.errors import ArgumentError, Deadlock, MessageMismatch
from ringsim.pipeline import (
    SmallTransformer,
    build_stages,
    can_finish,
    check_single_rank,
    generate,
    steady_use,
)
from ringsim.plot.charts import MeasuredUse, plot_inner_iterations
from ringsim.schedules import ScheduleError
from ringsim.schedules.costs import Time
from ringsim.schedules.engine import Run
from ringsim.schedules.generation import (
    Job,
    check_can_finish,
    count_messages,
    plan_batches,
    plan_jobs,
    time_generation,
)
from ringsim.traces.events import (
    COLLECTIVE,
    NONE,
    OK,
    OP_CODES,
    RECV,
    SEND,
    SPAN,
    Tables,
    make_events,
)
from ringsim.traces.steps import measure_stage_use

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
    assert len({tuple(row) for row in due}) == len(PROMPTS), (
        "the tokens must tell the prompts apart"
    )
    trace = simulate(generate_all, size, settings, 6, semantics=semantics)
    for rows in trace.results:
        assert rows == [due] * len(settings)
    assert not trace.unmatched


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "small"])
def test_models_of_transformers(kind: str) -> None:
    # weights large enough to make tokens differ
    wide = {"init_std" if kind == "opt" else "initializer_range": 0.3}
    settings: list[dict[str, Any]] = [
        {"partition": [0, 3, 0]},
        {"async_comm": True, "num_inner_iterations": 2, "batch_size": 2},
    ]
    due = one_by_one(build(kind, **wide), PROMPTS, 5)
    assert len({tuple(row) for row in due}) == len(PROMPTS)
    trace = simulate(
        lambda: [generate(build(kind, **wide), PROMPTS, 5, **each) for each in settings], 3
    )
    assert trace.results == [[due] * len(settings)] * 3


@pytest.mark.parametrize("kind", MORE)
def test_more_models_of_transformers(kind: str) -> None:
    ids, masks = make_tokens(2, 9), [None, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])]
    model = build(kind, initializer_range=0.3)
    # experts that padding alone goes to have gradients of 0, or none
    for mask in masks[:1] if "moe" in kind else masks:
        target = ids if mask is None else ids.masked_fill(mask == 0, -100)
        assert check_single_rank(
            model,
            [range(1), range(1, 3)],
            [ids],
            [target],
            attention_masks=None if mask is None else [mask],
        )
    assert build_stages(model, [range(3)])[0].attention_widths() == [16] * 3
    if kind != "bert":
        due = one_by_one(model, PROMPTS[:3], 5)
        assert len({tuple(row) for row in due}) == 3
        assert (
            simulate(
                lambda: generate(build(kind, initializer_range=0.3), PROMPTS[:3], 5), 2
            ).results
            == [due] * 2
        )


def test_drawn_tokens_do_not_depend_on_stages_or_batches() -> None:
    def draw(seed: int, batch_sizes: list[int | None]) -> list[list[list[int]]]:
        return [
            generate(small_model(), PROMPTS, 8, batch_size=size, temperature=1.5, seed=seed)
            for size in batch_sizes
        ]

    alone = {seed: draw(seed, [None])[0] for seed in (1, 2)}
    assert alone[1] != alone[2]
    assert alone[1] != one_by_one(small_model(), PROMPTS, 8)
    assert simulate(draw, 3, 1, [None, 1, 2]).results == [[alone[1]] * 3] * 3


def test_drawn_tokens_are_as_likely_as_the_model_says() -> None:
    """One prompt many times: each place draws for itself.

    With a mean of c, 5 standard deviations are 5 sqrt(c).
    """
    model, copies = small_model(), 2000
    tokens = generate(model, [[3, 1]] * copies, 1, temperature=2.0, seed=4)
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([[3, 1]]))[0, -1] / 2.0, dim=-1)
    counts = torch.bincount(torch.tensor(tokens).flatten(), minlength=TOKENS)
    assert ((counts - copies * chances).abs() <= 5 * (copies * chances).sqrt() + 5).all()


def test_a_prompt_ends_with_its_first_stop_token() -> None:
    full = one_by_one(small_model(), PROMPTS, 10)
    stops = [full[0][3], full[2][0], full[4][9]]
    due = [
        row[: min((row.index(stop) + 1 for stop in stops if stop in row), default=10)]
        for row in full
    ]
    assert {len(row) for row in due} >= {1, 10} or len({len(row) for row in due}) > 2
    assert simulate(generate_all, 2, [{"stop_tokens": stops}], 10).results == [[due]] * 2


def test_more_stages_than_layers_and_fewer_prompts_than_stages() -> None:
    def few() -> list[list[list[int]]]:
        settings: list[dict[str, Any]] = [{}, {"async_comm": True, "num_inner_iterations": 7}]
        tokens = [
            generate(small_model(layers), PROMPTS, 4, **each)
            for layers in (0, 2)
            for each in settings
        ]
        return tokens + [generate(small_model(), PROMPTS[:number], 4) for number in (1, 2, 4)]

    due = [one_by_one(small_model(layers), PROMPTS, 4) for layers in (0, 0, 2, 2)]
    due += [one_by_one(small_model(), PROMPTS[:number], 4) for number in (1, 2, 4)]
    assert simulate(few, 4).results == [due] * 4


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


def generate_unchecked(turns: int, async_comm: bool) -> None:
    """Does what ``generate`` would refuse; the ranks are in a process of their own."""
    generation: Any = sys.modules[generate.__module__]
    generation.check_can_finish = lambda *_: None
    generate(small_model(), PROMPTS, 3, turns, async_comm)


@pytest.mark.parametrize(
    ("size", "turns", "async_comm"), [(2, 4, True), (2, 1, False), (3, 4, False)]
)
def test_what_is_refused_would_really_jam(size: int, turns: int, async_comm: bool) -> None:
    """Without the refusal the ranks wait for each other.

    Each for the one that the plan, played on a clock, says.
    """
    with pytest.raises(Deadlock) as failed:
        simulate(generate_unchecked, size, turns, async_comm)
    events = failed.value.trace.events
    stuck = np.flatnonzero(
        (events.status != OK) & (events.wait_ns != NONE) & np.isin(events.kind, (SEND, RECV))
    )
    due = time_generation(size, turns, 1, 3, 1, 1, async_comm=async_comm).blocked
    assert {(int(events.rank[index]), int(events.peer[index])) for index in stuck} == {
        (each.rank, each.peer) for each in due
    }
    assert len(due) == size


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
            with pytest.raises(
                MessageMismatch, match=f"got others on rank {1 - rank} than on rank {rank}"
            ):
                generate(
                    small_model(), **{"prompts": PROMPTS, "max_new_tokens": 4, **settings[rank]}
                )

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
        ({"num_inner_iterations": 0}, "num_inner_iterations must be an integer from 1, got 0"),
        (
            {"model": nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))},
            "must have a cache, got Sequential",
        ),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        generate(**{"model": small_model(), "prompts": [[1]], "max_new_tokens": 2, **arguments})


# -- what is recorded


def makespan(run: Run) -> Time:
    assert run.blocked == ()
    return max(times[-1][1] for times in run.times)


class ByToken:
    """A table of costs.

    The whole prompt takes ``prefill_s``, and each token after it ``decode_s``.
    """

    def __init__(self, prefill_s: float, decode_s: float) -> None:
        self.prefill_s, self.decode_s = prefill_s, decode_s
        self.seen: set[tuple[int, int]] = set()

    def time_s(self, work: Any) -> float:
        """The first work of a stage on a batch is its prefill."""
        is_prefill = (work.stage, work.microbatch) not in self.seen
        self.seen.add((work.stage, work.microbatch))
        return self.prefill_s if is_prefill else self.decode_s


@pytest.mark.parametrize(("size", "batch_size", "rounds"), [(2, None, 1), (3, 1, 3), (4, 1, 2)])
def test_the_ring_takes_as_long_as_its_plan_and_sends_as_much(
    size: int, batch_size: int | None, rounds: int
) -> None:
    num_tokens = 5
    for turns, async_comm in ((size, False), (size, True), (1, True)):
        settings = {
            "num_inner_iterations": turns,
            "async_comm": async_comm,
            "batch_size": batch_size if turns > 1 else None,
        }
        rounds_now = rounds if turns == size else 1
        trace = simulate(generate_all, size, [settings], num_tokens, compute=ByToken(7e-3, 3e-3))
        due = time_generation(size, turns, rounds_now, num_tokens, 7, 3, async_comm=async_comm)
        spans = trace.events.select(trace.events.kind == SPAN)
        assert spans.done_ns.max() - spans.post_ns.min() == 1e6 * makespan(due)
        table = trace.to_pandas()
        jobs = (
            table[table["kind"] == "span"]
            .groupby(["rank", "microbatch", "label"], observed=True)
            .size()
            .to_dict()
        )
        planned = plan_jobs(rounds_now * turns, turns, num_tokens)
        assert jobs == {
            (rank, job.batch, job.name): sum(
                (other.batch, other.name) == (job.batch, job.name) for other in planned
            )
            for rank in range(size)
            for job in planned
        }
        messages = trace.to_pandas("messages")
        assert not (trace.events.kind == COLLECTIVE).any(), "nobody waits for all"
        announced = messages["tag"] == 1
        assert announced.sum() == 2 * (size - 1)
        # and the results
        assert len(messages) == count_messages(size, rounds_now * turns, num_tokens) + 2 * (
            size - 1
        ) + (size - 1)
        assert (
            messages["group"][~announced]
            == [f"ring:{src}>{(src + 1) % size}" for src in messages["src"][~announced]]
        ).all()
        # idle while it fills and drains, and in each later round for as long as a prompt takes
        # longer than a token
        if turns == size:
            idle_s = (size - 1) * (7e-3 + (rounds - 1) * 4e-3)
            for stage in measure_stage_use(trace):
                assert (stage.idle_s, stage.prefill_s, stage.decode_s) == pytest.approx(
                    (idle_s, 7e-3, 3e-3)
                )


SETTINGS = [
    (stages, turns, async_comm)
    for stages, async_comm in product(range(1, 7), (False, True))
    for turns in range(1, 2 * stages + 3)
]


def test_the_deadlock_map_is_what_the_plan_does() -> None:
    for (stages, turns, async_comm), rounds, tokens in product(SETTINGS, (1, 2), (1, 2, 4)):
        run = time_generation(
            stages, turns, rounds, tokens, prefill=3, decode=2, async_comm=async_comm
        )
        assert (run.blocked == ()) is (tokens == 1 or can_finish(stages, turns, async_comm)), (
            stages,
            turns,
            async_comm,
            rounds,
            tokens,
        )


def test_steady_use_is_the_share_in_which_a_full_ring_works() -> None:
    for stages, turns, async_comm in (each for each in SETTINGS if can_finish(*each)):
        use = steady_use(stages, turns, async_comm)
        # Between two numbers of tokens that are a whole number of repetitions apart, once filling
        # is over.
        period = use.numerator * stages
        first, second = (
            makespan(time_generation(stages, turns, 1, count * period, 1, 1, async_comm=async_comm))
            for count in (2, 4)
        )
        assert Fraction(2 * period * turns, second - first) == use, (stages, turns, async_comm)


@pytest.mark.parametrize(
    ("stages", "turns", "async_comm", "words"),
    [
        (
            4,
            5,
            False,
            (
                "must be 2 to 4 with 4 stages and synchronous messages, got 5",
                "Use 4, or async_comm=True.",
            ),
        ),
        (
            4,
            1,
            False,
            (
                "must be 2 to 4 ",
                "got 1: stage 0 receives before it sends",
                "Use 2, or async_comm=True.",
            ),
        ),
        (2, 1, False, ("must be 2 with 2 stages", "Use 2, or async_comm=True.")),
        (4, 8, False, ("got 8", "Use 4.")),
        (4, 8, True, ("must be 1 to 7 with 4 stages and asynchronous messages, got 8", "Use 7.")),
    ],
)
def test_a_ring_that_never_ends_is_refused_with_the_nearest_that_does(
    stages: int, turns: int, async_comm: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(ScheduleError) as refused:
        check_can_finish(stages, turns, num_tokens=2, async_comm=async_comm)
    assert [word for word in words if word not in str(refused.value)] == []
    # a single token never goes round
    check_can_finish(stages, turns, num_tokens=1, async_comm=async_comm)


def test_numbers_must_be_numbers() -> None:
    for wrong in (0, 1.5, True, None, "4"):
        with pytest.raises(
            ArgumentError, match=r"num_inner_iterations must be an integer from 1, got "
        ):
            steady_use(4, wrong)
        with pytest.raises(ArgumentError, match="num_tokens must be"):
            check_can_finish(4, 4, wrong)


@given(st.integers(1, 40), st.integers(1, 6), st.none() | st.integers(1, 8))
def test_batches_hold_every_prompt_in_full_rounds(
    prompts: int, turns: int, size: int | None
) -> None:
    batches = plan_batches(prompts, turns, size)
    assert len(batches) % turns == 0
    assert all(batches)
    assert size is None or max(map(len, batches)) <= size
    own = [number for batch in batches for number in batch]
    assert own[:prompts] == list(range(prompts))
    assert set(own[prompts:]) <= {0}
    if prompts >= len(batches):
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert len(own) == prompts


def trace_of(starts: list[tuple[Job, int]]) -> Trace:
    """A trace of one stage with a span of 10 ns for each job, from when it started."""
    columns = {
        "rank": [0] * len(starts),
        "op": [OP_CODES["span"]] * len(starts),
        "stage": [0] * len(starts),
        "microbatch": [job.batch for job, _ in starts],
        "label": [int(job.token > 0) for job, _ in starts],
        "post_ns": [start for _, start in starts],
        "done_ns": [start + 10 for _, start in starts],
    }
    return Trace(make_events(columns, Tables(labels=("prefill", "decode"))), {"world_size": 1})


def test_use_is_that_of_the_time_between_turns() -> None:
    """Two batches on one stage, drawn: a0 b0 | a1 . b1 . . a2 b2, 10 ns a job."""
    jobs = [Job(0, 0), Job(1, 0), Job(0, 1), Job(1, 1), Job(0, 2), Job(1, 2)]
    (stage,) = measure_stage_use(trace_of(list(zip(jobs, (0, 10, 20, 40, 70, 80), strict=True))))
    assert stage.decode_use == pytest.approx(20 / 50)
    assert stage.idle_s == pytest.approx(30e-9)


@pytest.mark.parametrize(
    "jobs", [[], [Job(0, 0)], [Job(0, 0), Job(0, 1)], [Job(0, 0), Job(0, 1), Job(0, 2)] * 2]
)
def test_other_traces_are_refused(jobs: list[Job]) -> None:
    with pytest.raises(ArgumentError, match=r"trace must be of (a|one) call of generate"):
        measure_stage_use(trace_of([(job, 10 * place) for place, job in enumerate(jobs)]))


def test_the_picture_shows_the_forms_and_the_points() -> None:
    mpl.use("Agg")
    measured = [MeasuredUse(4, False, 0.9), MeasuredUse(2, True, 0.45)]
    ax = plot_inner_iterations(4, measured)
    lines = {line.get_linestyle(): line.get_ydata() for line in ax.get_lines()}
    for style, async_comm in (("-", False), ("--", True)):
        assert lines[style].tolist() == [
            float(steady_use(4, turns, async_comm)) for turns in range(1, 9)
        ]
    drawn = [tuple(point) for points in ax.collections for point in points.get_offsets().tolist()]
    stuck = [(turns, 0) for turns in range(1, 9) if not can_finish(4, turns)] + [(8, 0)]
    assert sorted(drawn) == sorted([*stuck, (4, 0.9), (2, 0.45)])
    assert "synchronous from 5, asynchronous from 8 on" in " ".join(
        text.get_text() for text in ax.texts
    )
    own = mpl.figure.Figure().add_subplot()
    assert plot_inner_iterations(3, ax=own) is own
