"""Tests of pipelines on real ranks."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import (
    PROMPTS,
    Case,
    catch,
    complaints,
    difference,
    generate_all,
    gradients,
    make_microbatches,
    make_model,
    one_by_one,
    single_process,
    small_model,
    train_all,
)
from torch import Tensor, nn

import ringsim
from ringsim.pipeline import (
    Action,
    average_gradients,
    clip_grad_norm_pipeline,
    evaluate,
    generate,
    new_replica_group,
    pipeline_state_dict,
    recv_activation,
    send_activation,
    train_step_pipeline,
    train_step_pipeline_afab,
)
from ringsim.schedules import lower_in_step, make_schedule

SIZE = 3
# whole and split backward passes, with one stage per rank and several
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_v")
CHECKPOINTED = {"schedule": "interleaved_1f1b", "checkpoint": True}
LOWERED = lower_in_step(make_schedule("zb_h1", SIZE, 4))
CASES = [
    *(Case(seed=seed, options={"schedule": name}) for seed, name in enumerate(NAMES)),
    Case(tied=True, options={"schedule": "zb_v"}),
    Case(num_microbatches=7, same_shapes=False, make="sequential", options=CHECKPOINTED),
    Case(num_layers=1, dtype=torch.float32, options={"schedule": LOWERED}),
    # 0.2.0 received into a tensor that is not contiguous
    Case(make="transposed", options={"partition": [2, 2, 2]}),
]
SETTINGS = [{}, {"async_comm": True, "num_inner_iterations": 5}]
SPANS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}


def do_everything() -> tuple[
    list[tuple[float, dict[str, Tensor]]], list[list[list[int]]], list[str]
]:
    """Runs steps, then generation. Afterwards come messages and steps that differ between ranks."""
    steps = train_all(CASES)
    tokens, errors = generate_all(SETTINGS, 4), list[str]()
    rank = ringsim.current_ring().rank
    if rank < 2:
        call = partial(send_activation, torch.ones(1000)) if rank == 0 else recv_activation
        errors.append(catch(call, 1 - rank))
    schedule = "gpipe" if rank == 1 else "1f1b"
    case = Case(options={"schedule": schedule})
    errors.append(catch(train_all, [case]))
    return steps, tokens, errors


@pytest.fixture(scope="module")
def trace() -> ringsim.Trace:
    return ringsim.trace(do_everything, world_size=SIZE, limit_s=90)


def test_gradients_and_tokens_are_those_of_a_single_process(trace: ringsim.Trace) -> None:
    assert complaints(CASES, [steps for steps, _, _ in trace.results]) == []
    due = one_by_one(small_model(), PROMPTS, 4)
    assert [tokens for _, tokens, _ in trace.results] == [[due] * len(SETTINGS)] * SIZE


def test_ranks_that_do_not_agree_all_hear_of_it(trace: ringsim.Trace) -> None:
    of_sender, of_receiver, of_other = (errors for _, _, errors in trace.results)
    assert of_sender[0] == of_receiver[0]
    assert (
        "the activation of microbatch 0, got the activation of microbatch 1 (rank 0 to rank 1)"
        in of_sender[0]
    )
    every = (of_sender, of_receiver, of_other)
    assert all(
        re.search(r"the schedules on ranks \d and \d differ", errors[-1]) for errors in every
    )


def test_ranks_do_what_the_evaluator_times(trace: ringsim.Trace) -> None:
    """Compares computations and payloads with the evaluation, rank by rank."""
    events = trace.to_pandas()
    steps = [evaluate(make_schedule(name, SIZE, 4)) for name in NAMES]
    for rank in range(SIZE):
        own = events[events["rank"] == rank].sort_values("seq")
        computed = [
            Action(row.stage, SPANS[row.label], row.microbatch)
            for row in own[own.label.isin(SPANS)].itertuples()
        ]
        due = [timed.action for step in steps for timed in step.get_computations(rank)]
        assert computed[: len(due)] == due
        payloads = own[(own.kind == "send") & (own.tag == 0) & (own.stage >= 0)]
        sent = [(row.peer, row.stage, row.microbatch) for row in payloads.itertuples()]
        due_sends = [
            (step.schedule.stage_ranks[action.other_side.stage], action.stage, action.microbatch)
            for step in steps
            for action, _, _ in step.actions[rank]
            if action.kind.startswith("SEND")
        ]
        assert sent[: len(due_sends)] == due_sends
    assert not trace.unmatched
    # the spans of refused steps have the status error
    assert (events["status"][events["kind"] != "span"] == "ok").all()


# -- checkpoints


def train_on(directory: Path, first: int, source: str) -> dict[str, Tensor]:
    """Runs two steps of AdamW on a tied model, from a checkpoint after the first two."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    model = make_model(Case(tied=True, seed=first))  # other weights from the second launch on
    optimizer = torch.optim.AdamW(scope["own_parameters"](model), lr=0.01)
    if first:
        scope["load"](directory / "0", model, optimizer)
    for step in range(first, first + 2):
        optimizer.zero_grad()
        train_step_pipeline(model, *make_microbatches(Case(seed=step)))
        optimizer.step()
    scope["save"](directory / str(first), model, optimizer)
    return {key: tensor.clone() for key, tensor in pipeline_state_dict(model).items()}


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to .* in a single process")
def test_training_goes_on_from_a_checkpoint_with_another_number_of_stages(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "pipelines.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (source,) = [program for program in programs if "def own_parameters" in program]
    ringsim.trace(train_on, world_size=2, args=(tmp_path, 0, source))
    whole = train_on(tmp_path, 2, source)  # only in this process, with one stage
    reference = make_model(Case(tied=True))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        single_process(reference, *make_microbatches(Case(seed=step)))
        optimizer.step()
    assert list(whole) == list(reference.state_dict())
    assert difference(whole, reference.state_dict()) < 1e-9


# -- manually created worlds


def in_two_rings() -> tuple[float, float, list[list[int]], tuple[float, list[str]]]:
    """Runs two rings of two ranks, each with half of the microbatches and different prompts."""
    rank, rings = int(os.environ["RANK"]), [[0, 1], [2, 3]]
    ringsim.initialize_distributed(ring_ranks=rings[rank // 2])
    group = new_replica_group(rings)
    case = Case(num_microbatches=6, tied=True)
    reference, model = make_model(case), make_model(case)
    inputs, targets = make_microbatches(case)
    single_process(reference, inputs, targets)
    half = slice(0, 3) if rank < 2 else slice(3, 6)
    train_step_pipeline(model, inputs[half], targets[half])
    average_gradients(model, group)
    worst = difference(gradients(model), gradients(reference))
    norm = clip_grad_norm_pipeline(model, 1e9) / float(
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    )
    tokens = generate(small_model(), PROMPTS if rank < 2 else PROMPTS[:3], 4)
    routed = average_routed(half, group)
    ringsim.destroy_distributed()
    return worst, norm, tokens, routed


class Routed(nn.Module):
    """A layer that chooses one of its parts by the first number of a microbatch."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        part = self.parts[-1 if x[0, 0] == 1 else -2]
        return torch.cat([x[:, :1], part(x)[:, 1:]], dim=1)


def make_routed() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Makes a model with experts and layers that only one ring uses, as many for each ring."""
    torch.manual_seed(0)
    one, two, three, four, unused = (nn.Linear(4, 4) for _ in range(5))
    model = nn.Sequential(
        Routed(unused, one, two),
        Routed(three, nn.Identity()),
        Routed(nn.Identity(), four),
        nn.Linear(4, 3),
    ).double()
    inputs = [torch.randn(2, 4, dtype=torch.float64) for _ in range(6)]
    for index, x in enumerate(inputs):
        x[:, 0] = 1 if index < 3 else -1
    return model, inputs, [torch.tensor([0, 2])] * 6


def average_routed(half: slice, group: Any) -> tuple[float, list[str]]:
    """Returns the worst difference from one process, and the names of parameters with gradients.

    0.2.0 averaged different experts.
    """
    reference, inputs, targets = make_routed()
    model, *_ = make_routed()
    single_process(reference, inputs, targets)
    train_step_pipeline(model, inputs[half], targets[half], partition=[3, 1])
    average_gradients(model, group)
    return difference(gradients(model), gradients(reference)), sorted(gradients(model))


def train_watched() -> tuple[float, dict[str, Tensor], list[int]]:
    """Runs one step of a model with hooks on its layers."""
    model, seen = make_model(Case()), list[int]()
    for index, layer in enumerate(model.blocks):
        layer.register_forward_hook(lambda *_, index=index: seen.append(index))
        layer.register_full_backward_hook(lambda *_, index=index: seen.append(100 + index))
    loss = train_step_pipeline_afab(
        model, *make_microbatches(Case(same_shapes=False)), torch.device("cpu"), torch.float64
    )
    return loss, gradients(model), seen


def make_worlds(directory: str) -> tuple[Any, list[tuple[float, dict[str, Tensor], list[int]]]]:
    """Runs two rings, then twice a script that only creates a default group."""
    rank, world_size, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    in_rings = in_two_rings()
    # the second time, the first ring still exists, but its groups do not
    for start in range(2):
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/{start}", rank=rank, world_size=world_size
        )
        if start:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]
            if rank == 0:  # the first call creates the ring
                send_activation(torch.ones(1), 0)
            elif rank == 1:
                recv_activation(0)
        found.append(train_watched())
        dist.destroy_process_group()
    return in_rings, found


def test_two_rings_share_out_a_batch_and_a_default_group_is_all_that_afab_needs(
    tmp_path: Path,
) -> None:
    results = ringsim.trace(make_worlds, world_size=4, ring=False, args=(str(tmp_path),)).results
    due = one_by_one(small_model(), PROMPTS, 4)
    used = [
        f"{layer}.{name}"
        for layer in ("0.parts.1", "0.parts.2", "1.parts.0", "2.parts.1")
        for name in ("bias", "weight")
    ]
    for rank, ((worst, norm, tokens, (worst_routed, averaged)), _) in enumerate(results):
        assert worst < 1e-10
        assert norm == pytest.approx(1, abs=1e-10)
        assert tokens == (due if rank < 2 else due[:3])
        assert worst_routed < 1e-10
        assert averaged == (["3.bias", "3.weight"] if rank % 2 else used)
    reference = make_model(Case())
    expected = single_process(reference, *make_microbatches(Case(same_shapes=False)))
    for by_rank in zip(*(found for _, found in results), strict=True):
        # each parameter on one rank
        assert sorted(name for _, held, _ in by_rank for name in held) == sorted(
            gradients(reference)
        )
        for loss, held, _ in by_rank:
            assert loss == pytest.approx(expected, rel=1e-10)
            assert difference(held, gradients(reference)) < 1e-10
        calls = sorted(call for _, _, seen in by_rank for call in seen)
        # each hook once for each of four microbatches
        assert calls == sorted([*range(4), *range(100, 104)] * 4)
