"""Tests of training on simulated ranks.

With every schedule and model, the gradients must equal those of a single process, and the trace
must show the step.
"""

from __future__ import annotations

import doctest
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from pipeline_cases import (
    TOLERANCES,
    Case,
    catch,
    complaints,
    difference,
    gradients,
    make_microbatches,
    make_model,
    single_process,
    train_all,
)
from small_models import KINDS, build, tokens
from torch import Tensor, nn

import ringsim
from ringsim.errors import Deadlock, MessageMismatch, RingError
from ringsim.pipeline import (
    Adapter,
    SmallTransformer,
    backward_stage,
    build_stages,
    clip_grad_norm_pipeline,
    closed_forms,
    compare_gradients,
    cross_entropy,
    eval_step_pipeline,
    forward_stage,
    gradient_report,
    partition_model,
    pipeline_state_dict,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
    share_overflow,
    single_process_step,
    train_step_pipeline,
    weighted_loss,
)
from ringsim.schedules import (
    SCHEDULE_NAMES,
    Action,
    Schedule,
    interleaved_1f1b,
    looped_bfs,
    lower,
    lower_in_step,
    make_schedule,
    parse_action,
)

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "explanation" / "pipelines.md").read_text()
LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
NAMES = [name for name in SCHEDULE_NAMES if name != "afab"]  # another name of gpipe


def simulate(worker: Callable[..., Any], size: int, *args: Any, **options: Any) -> ringsim.Trace:
    return ringsim.simulate(worker, world_size=size, args=args, link=LINK, **options)


# -- gradients


def read(stage_ranks: Sequence[int], *rows: str) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("mine", 2, tuple(stage_ranks), actions)


# Stages in an order that no generator makes: backwards over the ring, with exchanged microbatches,
# and between ranks that are not neighbours.
OWN = {
    2: [make(2, 4, chunks) for make in (interleaved_1f1b, looped_bfs) for chunks in (1, 3)],
    3: [
        read((2, 1, 0), "2F0 2B0 2F1 2B1", "1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"),
        read((0, 1, 2), "0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0", "2F1 2F0 2B0 2B1"),
        read(
            (0, 2, 0, 1),
            *("0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "3F0 3I0 3F1 3I1 3W1 3W0", "1F0 1F1 1B0 1B1"),
        ),
    ],
    4: [read((0, 2, 1, 3), *(f"{s}F0 {s}F1 {s}B0 {s}B1" for s in (0, 2, 1)), "3F0 3B0 3F1 3B1")],
}
CUTS = {2: [[0, 3], [3, 0], [1, 2]], 4: [[0, 3, 0, 0], [0, 0, 0, 3], [3, 0, 0, 0], [1, 0, 2, 0]]}


def cases(size: int) -> Iterator[Case]:
    """Tests every schedule on four ranks and three on fewer, with each way to write a step."""
    for seed, name in enumerate(NAMES if size == 4 else ("1f1b", "interleaved_1f1b", "zb_v")):
        schedule, options = make_schedule(name, size, 5), {"schedule": name}
        yield Case(seed=seed, tied=True, options=options)
        yield Case(1, num_layers=1, options=options)
        yield Case(2, num_layers=0, seed=seed, dtype=torch.float32, options=options)
        again = {**options, "checkpoint": True}
        yield Case(7, same_shapes=False, make="sequential", options=again)
        yield Case(5, same_shapes=False, options={"schedule": lower(schedule, ahead=99)})
        other = lower(schedule, ahead=0) if seed % 2 else lower_in_step(schedule)
        yield Case(5, options={"schedule": other})
    for own in OWN.get(size, ()):
        yield Case(own.num_microbatches, 6, tied=size == 4, options={"schedule": own})
    for cut, name in zip(CUTS.get(size, ()), ("gpipe", "1f1b", "zb_h1", "zb_h2"), strict=False):
        yield Case(num_layers=3, options={"partition": cut, "schedule": name})
    # token ids pass through
    yield Case(num_layers=2, make="sequential", options={"partition": [0] * (size - 1) + [4]})
    yield Case(num_layers=6, options={"partition": "parameters"})
    yield Case(num_layers=3, options={"partition": [range(3)] + [range(3, 3)] * (size - 1)})


def cases_in_step(size: int) -> Iterator[Case]:
    """With NCCL, the messages of a rank run one after the other, so both sides use one order."""
    for name in SCHEDULE_NAMES:
        for count, more in ((1, {}), (4, {"same_shapes": False}), (2, {"tied": True})):
            yield Case(count, 2 * size, options={"schedule": name}, **more)


@pytest.mark.parametrize(
    ("size", "semantics"),
    [*((size, "rendezvous") for size in (1, 2, 3, 4)), (2, "grouped"), (3, "grouped")],
)
def test_gradients_are_those_of_a_single_process(size: int, semantics: str) -> None:
    wanted = list(cases(size) if semantics == "rendezvous" else cases_in_step(size))
    trace = simulate(train_all, size, wanted, semantics=semantics)
    assert complaints(wanted, trace.results) == []
    assert not trace.unmatched


def test_a_schedule_in_another_order_stands_still_there() -> None:
    for ahead in (0, 1):
        case = Case(2, options={"schedule": lower(make_schedule("1f1b", 2, 2), ahead=ahead)})
        with pytest.raises(Deadlock):
            simulate(train_all, 2, [case], semantics="grouped")


def test_autocast_is_that_of_a_single_process() -> None:
    def train(step: Callable[..., float]) -> tuple[float, dict[str, Tensor]]:
        model = make_model(Case(dtype=torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, *make_microbatches(Case())), gradients(model)

    expected, reference = train(single_process)
    for loss, held in simulate(train, 2, train_step_pipeline).results:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert difference(held, reference) < 1e-5


SHAPES = [(2, 6), (2, 6), (1, 9), (3, 4)]  # microbatches of several sizes
INPUTS = [tokens(*shape, seed=index) for index, shape in enumerate(SHAPES)]
MASKS = [torch.ones_like(ids) for ids in INPUTS]
MASKS[0][1, :2] = 0  # padding on the left
MASKS[3][2, 3:] = 0  # on the right
TARGETS = [
    tokens(*shape, seed=100 + index).masked_fill(mask == 0, -100)
    for index, (shape, mask) in enumerate(zip(SHAPES, MASKS, strict=True))
]
TARGETS[1][0, :4] = -100
PADDED = {"attention_masks": MASKS, "schedule": "afab", "partition": [1, 0, 2]}
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((kind, {}, PADDED) for kind in KINDS),
    ("small", {"tied": True}, {"partition": [0, 3, 0]}),
    ("llama", {"tie_word_embeddings": True, "attn_implementation": "eager"}, {}),
    ("gpt2", {"tie_word_embeddings": False}, {"checkpoint": True}),
]


def test_models_train_as_in_one_process() -> None:
    pytest.importorskip("transformers")

    def train() -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        for kind, changes, options in MODELS:
            model = build(kind, **changes)
            found.append((train_step_pipeline(model, INPUTS, TARGETS, **options), gradients(model)))
        return found

    for row, *by_rank in zip(MODELS, *simulate(train, 3).results, strict=True):
        kind, changes, options = row
        model, masks = build(kind, **changes), options.get("attention_masks")
        loss, due = single_process_step(model, INPUTS, TARGETS, attention_masks=masks)
        assert [found for found, _ in by_rank] == pytest.approx([loss] * 3), row
        for _, held in by_rank:
            assert compare_gradients(held, {name: due[name] for name in held}, tolerance=1e-10), row
        assert {name for _, held in by_rank for name in held} == set(due)


# -- steps in training loops


def compare_to(reference: nn.Module, model: nn.Module) -> float:
    return difference(gradients(model), gradients(reference))


def optimise(case: Case) -> float:
    """Runs AdamW with clipping, each step on the gradients of two calls with different data.

    The losses, gradients and norms are those of a single process; tied parameters are not added up
    twice.
    """
    reference, model = make_model(case), make_model(case)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (reference, model)]
    worst = 0.0
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for seed in (step, 10 + step):
            data = make_microbatches(Case(seed=seed, num_microbatches=3))
            expected, loss = single_process(reference, *data), train_step_pipeline(model, *data)
            worst = max(worst, abs(loss / expected - 1), compare_to(reference, model))
        expected_norm = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        worst = max(worst, abs(clip_grad_norm_pipeline(model, 0.1) / expected_norm - 1))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def freeze(case: Case) -> float:
    """Freezes the first stage, then the last, then all but one parameter in the middle."""
    data, worst = make_microbatches(case), 0.0
    names = [name for name, _ in make_model(case).named_parameters()]
    middle = [name for name in names if "blocks.1" not in name]
    for frozen in [] if case.tied else (names[:-2], names[-3:], middle, names[:3]):
        for schedule in ("1f1b", "zb_h1", "zb_v"):
            reference, model = make_model(case), make_model(case)
            for each in (reference, model):
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name not in frozen)
            single_process(reference, *data)
            train_step_pipeline(model, *data, schedule=schedule)
            assert not set(gradients(model)) & set(frozen)
            worst = max(worst, compare_to(reference, model))
    return worst


def evaluate_only(case: Case) -> float:
    data, reference, model = make_microbatches(case), make_model(case), make_model(case)
    expected = single_process(reference, *data)
    losses = [eval_step_pipeline(model, *data, schedule=name) for name in NAMES]
    assert gradients(model) == {}
    return max(abs(loss - expected) for loss in losses)


def weigh(case: Case) -> float:
    """Splits a batch unevenly, by samples and by tokens, with one ignored microbatch.

    The result is that of the whole batch: each sample counts by the mean over its microbatch's
    tokens.
    """
    (tokens,), (target,) = make_microbatches(Case(1))
    tokens, target = tokens.repeat(5, 1)[:7], target.repeat(5, 1)[:7]
    worst = 0.0
    split_backward = {"schedule": "zb_h1", "checkpoint": True}
    for weights, more in (("samples", {}), ("tokens", {}), ("tokens", split_backward)):
        target = target.clone()
        target[2:4] = -100 if weights == "tokens" else 1
        inputs, targets, model = tokens.split(2), target.split(2), make_model(case)
        logits = model(tokens).transpose(1, 2)
        each = nn.functional.cross_entropy(logits, target, reduction="none").split(2)
        counts = [int((part != -100).sum()) for part in targets]
        if weights == "tokens":
            expected = sum(part.sum() for part in each) / sum(counts)
        else:
            parts = zip(each, counts, strict=True)
            expected = sum(part.sum() / count * len(part) for part, count in parts) / len(target)
        expected.backward()
        reference = gradients(model)
        model.zero_grad()
        loss_fn = weighted_loss(targets, weights)
        loss = train_step_pipeline(model, inputs, targets, loss_fn=loss_fn, **more)
        alone = eval_step_pipeline(model, inputs, targets, loss_fn=loss_fn)
        assert alone == pytest.approx(loss, rel=1e-12)
        worst = max(worst, abs(loss - expected.item()), difference(gradients(model), reference))
    return worst


def scale_up(case: Case) -> float:
    """Compares one GradScaler per rank with one in a single process.

    Gradients overflow on one stage, and all stages skip the step, even an empty one.
    """
    reference, model = make_model(case).float(), make_model(case).float()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    cut = [0] * (len(ringsim.current_ring().ranks) - 1) + [case.num_layers]
    spoilt = "blocks.0.attention.out.weight"  # on only one rank
    for step, scale in enumerate((20, 19, 19, 20, 20)):
        data = make_microbatches(Case(seed=step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [cross_entropy(reference(x), y) for x, y in zip(*data, strict=True)]
        scalers[0].scale(torch.stack(losses).mean()).backward()

        def scaled(y: Tensor, target: Tensor) -> Tensor:
            return scalers[1].scale(cross_entropy(y, target))

        train_step_pipeline(model, *data, partition=cut, loss_fn=scaled)
        for each in (reference, model):
            grad = dict(each.named_parameters())[spoilt].grad
            if step == 1 and grad is not None:
                grad[0, 0] = float("inf")
        share_overflow(model, scalers[1])
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_pipeline(model, 0.1)
        expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        assert norm == pytest.approx(expected, rel=1e-5, nan_ok=True)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0**scale
    return 0.0


class Counting(nn.Linear):
    """A module with an extra state that is not a tensor."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def gather(case: Case) -> float:
    """Changes one part per rank; afterwards every rank has the whole model.

    The model has buffers, repeated layers and extra states.
    """
    worst, state = 0.0, "2._extra_state"
    for name in ("1f1b", "zb_v"):
        shared, norms = nn.Linear(3, 3), [nn.BatchNorm1d(3) for _ in range(2)]
        rest = (nn.Linear(3, 3), nn.ReLU())
        model = nn.Sequential(shared, norms[0], Counting(3, 3), norms[1], shared, *rest)
        part = pipeline_state_dict(model, gather=False, schedule=name)
        keys = [key for key in model.state_dict() if key != state]
        due = {key: torch.full_like(model.state_dict()[key], len(key)) for key in keys}
        due |= {f"4.{each}": due[f"0.{each}"] for each in ("weight", "bias")}
        if part.pop(state, None) is not None:
            model[2].seen = 7
        for key, value in part.items():
            value.copy_(due[key])
        whole = pipeline_state_dict(model, schedule=name)
        assert list(whole) == list(model.state_dict())
        assert (whole.pop(state), model[2].seen) == ({"seen": 7}, 7)
        worst = max(worst, difference({key: value.double() for key, value in whole.items()}, due))
    return worst


@pytest.mark.parametrize("do", [optimise, freeze, evaluate_only, weigh, scale_up, gather])
def test_what_a_training_loop_does_equals_a_single_process(do: Callable[[Case], float]) -> None:
    for size, tied in ((2, True), (3, False)):
        assert max(simulate(do, size, Case(tied=tied)).results) < TOLERANCES[torch.float64], size


class Lone(nn.Module):
    """A model with parameters outside of submodules: positions, and the scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 13)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(nn.Sequential(*self.steps)(self.table(ids) + self.positions)) * self.scale


class LoneAdapter(Adapter):
    def layers(self, model: Any) -> Sequence[nn.Module]:
        return list(model.steps)

    def first_modules(self, model: Any) -> Sequence[nn.Module | nn.Parameter]:
        return [model.table, model.positions]

    def last_modules(self, model: Any) -> Sequence[nn.Module | nn.Parameter]:
        return [model.out, model.scale]

    def embed(self, model: Any, token_ids: Tensor, announced: Any) -> Tensor:
        return model.table(token_ids) + model.positions

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        return model.out(hidden) * model.scale


def train_lone(schedule: str) -> tuple[float, float, list[str]]:
    """Returns the errors of gradients and norm, and the parameters of the trained model."""
    torch.manual_seed(0)
    reference, model = Lone().double(), Lone().double()
    model.load_state_dict(reference.state_dict())
    data = make_microbatches(Case())
    single_process(reference, *data)
    options: Any = {"schedule": schedule, "adapter": LoneAdapter()}
    train_step_pipeline(model, *data, **options)
    due = float(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    norm = clip_grad_norm_pipeline(model, 1e9) / due
    for each in (reference, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    trained = pipeline_state_dict(model, **options)
    worst = max(compare_to(reference, model), difference(trained, reference.state_dict()))
    return worst, norm, sorted(pipeline_state_dict(model, gather=False, **options))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_parameters_of_the_model_itself_are_trained(schedule: str) -> None:
    """0.2.0 lost their gradients in split backward passes, and returned them untrained."""
    held = list[str]()
    for worst, norm, part in simulate(train_lone, 2, schedule).results:
        assert worst < 1e-10
        assert norm == pytest.approx(1, abs=1e-10)
        held += part
    assert sorted(held) == sorted(Lone().state_dict())


def test_a_trained_parameter_that_no_stage_has_is_refused() -> None:
    class Forgetful(LoneAdapter):
        def first_modules(self, model: Any) -> Sequence[nn.Module | nn.Parameter]:
            return [model.table]

    model, data, options = Lone(), make_microbatches(Case()), {"adapter": Forgetful()}
    step = partial(train_step_pipeline, model, *data, **options)
    for call in (step, partial(pipeline_state_dict, model, **options)):
        assert "no stage has the trained parameter 'positions' of Lone. Return" in catch(call)
    model.positions.requires_grad_(False)
    assert min(step(), eval_step_pipeline(model, *data, **options)) > 0


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": True}, {"schedule": "zb_h1"}, {"schedule": "interleaved_1f1b"}]
)
def test_a_stage_may_begin_with_a_layer_that_works_in_place(options: dict[str, Any]) -> None:
    """0.2.0 fed a leaf forward, on which torch allows no such layer.

    ELU twice is not ELU, so a second forward must use the original input.
    """

    def train() -> tuple[float, float]:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.ELU(inplace=True), nn.Linear(8, 8))]
        model = nn.Sequential(nn.Embedding(13, 8), *layers[:-1], nn.Linear(8, 13)).double()
        data = make_microbatches(Case(2))
        expected, reference = single_process_step(model, *data)
        cut = [1, 2, 2, 4] if "interleaved" in options.get("schedule", "") else [1, 8]
        loss = train_step_pipeline(model, *data, partition=cut, **options)
        return loss - expected, difference(gradients(model), reference)

    assert all(abs(number) < 1e-10 for result in simulate(train, 2).results for number in result)


def test_gradients_that_are_not_finite_are_clipped_as_torch_does() -> None:
    """0.2.0 did not change the other gradients if one was NaN."""

    def clip(owner: int | None, spoilt: float, max_norm: float) -> tuple[float, list[list[float]]]:
        """Clips the gradients of one rank on the ring, or all gradients in one process."""
        model = nn.Sequential(*(nn.Linear(2, 1, bias=False) for _ in range(2))).double()
        for index, number in enumerate((spoilt, 2.0)):
            if owner in (None, index):
                model[index].weight.grad = torch.tensor([[1.0, number]], dtype=torch.float64)
        if owner is None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        else:
            norm = clip_grad_norm_pipeline(model, max_norm)
        return norm, [grad.flatten().tolist() for grad in gradients(model).values()]

    ways = [*product((math.nan, math.inf, -math.inf, 3.0), (0.1, 1e9, math.inf))]
    ranks = simulate(lambda: [clip(ringsim.current_ring().rank, *way) for way in ways], 2).results
    for way, *found in zip(ways, *ranks, strict=True):
        norm, due = clip(None, *way)
        for (of_rank, held), own in zip(found, due, strict=True):
            assert of_rank == pytest.approx(norm, nan_ok=True), way
            assert held == [pytest.approx(own, rel=1e-12, nan_ok=True)], way


def test_the_norm_of_half_precision_is_not_rounded() -> None:
    model = nn.Linear(999, 1, bias=False).half()
    model.weight.grad = torch.full_like(model.weight, 3.0)
    assert clip_grad_norm_pipeline(model, 1e9) == pytest.approx(3 * math.sqrt(999), rel=1e-12)


def test_tied_weights_frozen_without_data_and_in_a_step_that_fails() -> None:
    def fail(*_: Tensor) -> Tensor:
        raise ValueError("no loss today")

    def train(*, fails: bool) -> tuple[bool, float]:
        model, data = make_model(Case(tied=True)), make_microbatches(Case())
        model.embedding.weight.requires_grad_(fails)
        train_step_pipeline(model, *data, loss_fn=fail if fails else cross_entropy)
        with torch.device("meta"):  # 0.2.0 tried to copy its weight to the CPU
            empty = SmallTransformer(13, hidden_size=8, num_layers=2, num_heads=2, tied=True)
            ids = [torch.zeros(2, 5, dtype=torch.int64)] * 2
        return model.embedding.weight.grad is None, train_step_pipeline(empty, ids, ids)

    for has_none, loss in simulate(partial(train, fails=False), 2).results:
        assert has_none
        assert math.isnan(loss)
    with pytest.raises(RingError, match="rank 1 of 2 raised ValueError: no loss today") as caught:
        simulate(partial(train, fails=True), 2)
    assert "stuck in a wait" not in str(caught.value), "it shares nothing on its way out"


def drop(ways: list[tuple[str, bool, int | None]]) -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for schedule, again, seed in ways:
        torch.manual_seed(5)
        sizes: Any = {"hidden_size": 8, "num_heads": 2, "max_length": 16}
        model = SmallTransformer(13, **sizes, dropout=0.3).double()
        torch.manual_seed(100 + ringsim.current_ring().rank)
        before = torch.get_rng_state()
        options: Any = {"schedule": schedule, "checkpoint": again, "dropout_seed": seed}
        loss = train_step_pipeline(model, *make_microbatches(Case()), **options)
        assert seed is None or torch.equal(before, torch.get_rng_state())
        found.append((loss, gradients(model)))
    return found


def test_seeded_dropout_is_the_same_on_any_ring_and_in_any_schedule() -> None:
    ways = [("gpipe", False, 3), ("interleaved_1f1b", True, 3), ("zb_v", False, 3)]
    (alone,) = simulate(drop, 1, [*ways, ("gpipe", False, 4), ("gpipe", False, None)]).results
    expected_loss, expected = alone[0]
    assert len({round(loss, 9) for loss, _ in alone}) == 3  # other values without this seed
    for found in simulate(drop, 3, ways).results:
        for loss, held in found:
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert difference(held, expected) < 1e-10


def test_the_report_puts_together_what_the_ranks_hold() -> None:
    def spoil() -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
        """Breaks one gradient on one rank or on all; returns the wrong rows of each report."""
        rank, model, found = ringsim.current_ring().rank, build("small"), {}
        train_step_pipeline(model, INPUTS, TARGETS)
        head = model.head.weight
        right = head.grad
        broken = {
            "equal": right,
            "scaled": right if right is None or rank == 0 else 4 * right,
            "missing": None,
            "different": torch.ones_like(head) if rank == 0 else right,
        }
        for how, head.grad in broken.items():
            wrong = gradient_report(model, INPUTS, TARGETS).wrong
            found[how] = [(row.parameter, row.verdict, row.ranks) for row in wrong]
        return found

    where = {"missing": (), "scaled": (1,), "different": (0, 1)}
    due = {how: [("head.weight", how, ranks)] for how, ranks in where.items()} | {"equal": []}
    assert simulate(spoil, 2).results == [due] * 2


# -- the activations that a rank keeps


class Scale(nn.Module):
    """A layer whose only saved activation is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_kept_than_the_closed_form_says(name: str) -> None:
    size = 4

    def count_kept(num_microbatches: int) -> tuple[int, int]:
        live, peaks = set[int](), [0]

        def keep(tensor: Tensor) -> Any:
            """Returns the object that autograd saves, and drops when it frees the graph."""
            if not tensor.ndim:
                return tensor  # the weight, a scalar, is not an activation
            kept = tensor.detach()
            live.add(id(kept))
            weakref.finalize(kept, live.discard, id(kept))
            peaks.append(len(live))
            return kept

        schedule = make_schedule(name, size, num_microbatches)
        model = nn.Sequential(*(Scale() for _ in range(schedule.num_stages)))
        data = [torch.full((2,), float(1 + index)) for index in range(num_microbatches)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            train_step_pipeline(model, data, data, schedule=schedule, loss_fn=lambda y, _: y.sum())
        return max(peaks), len(live)

    for count in (2 * size, 4 * size):
        due = [(peak, 0) for peak in closed_forms.peak_live(closed_forms.Step(name, size, count))]
        assert simulate(count_kept, size, count).results == due


# -- the trace

NUM_MICROBATCHES = 8
KINDS_OF_SPANS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}


def steps() -> None:
    """Runs one training step with each schedule, then one without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    inputs = [torch.ones(2, 4)] * NUM_MICROBATCHES
    targets = [torch.zeros(2, dtype=torch.int64)] * NUM_MICROBATCHES
    for name in NAMES:
        train_step_pipeline(model, inputs, targets, schedule=name)
    eval_step_pipeline(model, inputs, targets)


@pytest.fixture(scope="module", params=[1, 2, 4])
def trace(request: pytest.FixtureRequest) -> ringsim.Trace:
    return simulate(steps, request.param, compute=ringsim.FlopCosts(1e6))


def test_steps_are_what_their_schedules_and_closed_forms_say(trace: ringsim.Trace) -> None:
    size = trace.world_size
    events = trace.to_pandas().query("kind == 'span' and microbatch >= 0")
    for rank, own in events.sort_values("seq").groupby("rank"):
        kinds = own["label"].map(KINDS_OF_SPANS)
        done = [*map(Action, own["stage"], kinds, own["microbatch"])]
        due = [
            a for name in NAMES for a in make_schedule(name, size, NUM_MICROBATCHES).actions[rank]
        ]
        # the last step has only forwards
        assert done == due + [Action(rank, "F", index) for index in range(NUM_MICROBATCHES)]
    for number, name in enumerate(NAMES):
        peaks, bubble = trace.peak_activations(number), trace.bubble(number)
        assert (bubble.schedule, peaks.peaks) == (name, peaks.bounds)
        assert bubble.closed_form is not None
    assert trace.bubble().closed_form is None


def test_every_message_knows_its_stage_and_microbatch(trace: ringsim.Trace) -> None:
    messages, events = trace.messages, trace.events
    # the others are the greeting before a step, and the loss after it
    in_a_stage = events.stage[messages.send] >= 0
    sent, received = messages.send[in_a_stage], messages.recv[in_a_stage]
    assert (len(sent) > 0) == (trace.world_size > 1)
    assert (events.microbatch[sent] == events.microbatch[received]).all()
    assert (abs(events.stage[sent] - events.stage[received]) == 1).all()
    tags = events.tag[sent].tolist()
    made = [make_schedule(name, trace.world_size, NUM_MICROBATCHES) for name in [*NAMES, "1f1b"]]
    forward = [str(lower(schedule).actions).count("SEND_F") for schedule in made]
    # microbatches have one shape, so there is one header per boundary, with tag 1
    assert tags.count(1) == sum(forward) / NUM_MICROBATCHES
    # the last step has only forwards
    assert tags.count(0) == 2 * sum(forward[:-1]) + forward[-1]


# -- messages, one at a time

PAYLOADS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6, dtype=torch.int64).reshape(2, 3).T,  # not contiguous
    torch.tensor(7.0, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.ones(1, 1, 1, 1, 1, 1, 1, 2, dtype=torch.float64),
    torch.tensor([True, False]),
]


def test_any_tensor_arrives_as_it_was() -> None:
    def pass_on() -> list[Tensor]:
        """Sends every payload from rank to rank as an activation, and back as a gradient."""
        ring, back = ringsim.current_ring(), []
        for index, payload in enumerate(PAYLOADS):
            tensor = payload if ring.rank == 0 else recv_activation(index)
            if ring.rank < ring.world_size - 1:
                send_activation(tensor, index)
                tensor = recv_gradient(index)
            if ring.rank > 0:
                send_gradient(tensor, index)
            back.append(tensor)
        return back

    for received in simulate(pass_on, 3).results:
        for tensor, payload in zip(received, PAYLOADS, strict=True):
            assert (tensor.dtype, tensor.shape) == (payload.dtype, payload.shape)
            assert torch.equal(tensor, payload)


def test_both_sides_learn_of_a_mismatch_and_can_go_on() -> None:
    def disagree() -> str:
        if ringsim.current_ring().rank == 0:
            found = catch(send_activation, torch.ones(1000), 1)
            send_activation(torch.ones(2), 5)
        else:
            found = catch(recv_activation, 0)
            assert recv_activation(5).tolist() == [1, 1]
        return found

    of_sender, of_receiver = simulate(disagree, 2).results
    assert of_sender == of_receiver
    assert of_sender == (
        "the receiver expected the activation of microbatch 0, got the "
        "activation of microbatch 1 (rank 0 to rank 1). Send and receive in the same order."
    )


def sequential_step(model: nn.Module, count: int = 4, **options: Any) -> float:
    inputs, targets = [torch.ones(2, 3)] * count, [torch.tensor([0, 1])] * count
    return train_step_pipeline(model, inputs, targets, **options)


def test_ranks_that_run_different_steps_all_hear_of_it() -> None:
    def differ() -> list[str]:
        """Runs steps whose arguments differ between ranks, and a valid one after them."""
        torch.manual_seed(0)
        step = partial(sequential_step, nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
        first = ringsim.current_ring().rank == 0
        found = [
            catch(step, count=4 if first else 3),
            catch(step, schedule="gpipe" if first else "1f1b"),
            catch(step, partition=[3, 1] if first else [2, 2]),
        ]
        step()
        return found

    for rank, found in enumerate(simulate(differ, 2).results):
        other, rule = 1 - rank, "the ranks do not perform the same step: the"
        numbers = f"is {4 - rank} on rank {rank} but {4 - other} on rank {other}"
        assert found[0].startswith(f"{rule} number of microbatches {numbers}. Call")
        for text, what in zip(found[1:], ("schedules", "partitions of the model"), strict=True):
            assert f"{rule} {what} on ranks {rank} and {other} differ. Call" in text


def test_an_activation_that_is_not_as_announced_is_an_error() -> None:
    def grow() -> None:
        sizes = iter((2, 1, 2))

        class Growing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x[: next(sizes)]

        layers = (nn.Linear(3, 3), Growing(), nn.Linear(3, 3), nn.Linear(3, 3))
        sequential_step(nn.Sequential(*layers), count=2)

    with pytest.raises(
        MessageMismatch, match="the same shape caused different activations at a stage boundary"
    ):
        simulate(grow, 2)


def test_a_ring_of_one_has_nobody_to_send_to_and_another_schedule() -> None:
    (found,) = simulate(lambda: catch(send_activation, torch.ones(1), 0), 1).results
    assert found.startswith("a ring with only one rank has no neighbours to send messages to. Pass")
    other = read((0, 1), "0F0 0B0", "1F0 1B0")
    with pytest.raises(RingError, match=r"1 rank and 1 microbatch, got mine with 2 ranks and 2 m"):
        sequential_step(nn.Linear(3, 3), count=1, schedule=other, partition=[1])


# -- the page


def blocks(text: str, word: str = "") -> list[str]:
    """Returns the programs of a page, or only those with a word."""
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if word in block]


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def by_hand(middle_stage_source: str) -> float:
    """Runs AFAB with the four functions, and returns the worst difference of a gradient.

    The stages are the first one, the document's stage, and the last one.
    """
    rank, reference, model = ringsim.current_ring().rank, make_model(Case()), make_model(Case())
    inputs, targets = make_microbatches(Case())
    single_process(reference, inputs, targets)
    stage = build_stages(model, partition_model(model, 3))[rank]
    if rank == 0:
        outputs = [stage(each) for each in inputs]
        for index, y in enumerate(outputs):
            send_activation(y, index)
        for index, y in enumerate(outputs):
            backward_stage(inputs[index], y, recv_gradient(index))
    elif rank == 1:
        scope: dict[str, Any] = {}
        exec(middle_stage_source, scope)
        scope["middle_stage"](stage, len(inputs))
    else:
        kept = []
        for index, target in enumerate(targets):
            x = recv_activation(index)
            kept.append((x, cross_entropy(forward_stage(stage, x), target) / len(inputs)))
        for index, (x, loss) in enumerate(kept):
            send_gradient(backward_stage(x, loss, None), index)
    return compare_to(reference, model)


def test_the_stage_of_the_document_works() -> None:
    (source,) = blocks(TEXT, "def middle_stage")
    assert max(simulate(by_hand, 3, source).results) < 1e-10


def test_the_first_example_runs_and_another_model_is_added_as_the_document_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    exec(blocks(TEXT)[0], names)  # as one rank
    loss, report = names["worker"]()
    assert 3 < loss < 6
    assert report.startswith("65 gradients equal those of a single process")
    added = (ROOT / "docs" / "how-to" / "add-a-model.md").read_text()
    for block in blocks(added)[:3]:  # the last one trains it on ranks
        exec(block, names)
    assert names["report"], str(names["report"])
    assert capsys.readouterr().out.startswith("13 gradients equal those of a single process")
    arguments = [names[name] for name in ("model", "partition", "tokens")]
    boundaries = names["boundary_shapes"](*arguments, adapter=names["adapter"])
    assert [boundary.shape for boundary in boundaries] == [(2, 9, 16)] * 2


@pytest.mark.parametrize("heading", ["Schedules", "A step as a picture", "Generation"])
def test_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch, heading: str) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(blocks(section(heading)))
    test = doctest.DocTestParser().get_doctest(code, {}, "seen", "docs/explanation/pipelines.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 3
    plt.close("all")
