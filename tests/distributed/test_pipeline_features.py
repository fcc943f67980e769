"""What training loops do with a step: accumulate, freeze, clip, drop, average over several rings; and what the trace shows of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import Case, difference, gradients, make_microbatches, make_model, single_process

import ringsim
from ringsim.pipeline import (
    SmallTransformer,
    average_gradients,
    clip_grad_norm_pipeline,
    cross_entropy,
    eval_step_pipeline,
    new_replica_group,
    train_step_pipeline,
    train_step_pipeline_afab,
)
from ringsim.pipeline.messages import HEADER_TAG, PAYLOAD_TAG
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.lowering import lower

Model = torch.nn.Module


def compare_to(reference: Model, model: Model) -> float:
    """Returns the worst difference of the gradients that this rank has."""
    oracle = gradients(reference)
    return max((difference(grad, oracle[name]) for name, grad in gradients(model).items()), default=0.0)


def accumulate(case: Case) -> float:
    """Three steps without zeroing the gradients, each with other data; tied parameters must not be added up twice."""
    reference, model = make_model(case), make_model(case)
    for seed in range(3):
        inputs, targets = make_microbatches(Case(seed=seed))
        single_process(reference, inputs, targets)
        train_step_pipeline(model, inputs, targets)
    return compare_to(reference, model)


def train(case: Case) -> float:
    """Five steps of AdamW with clipping: losses and norms as in a single process."""
    reference, model = make_model(case), make_model(case)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (reference, model)]
    worst = 0.0
    for step in range(5):
        inputs, targets = make_microbatches(Case(seed=step, num_microbatches=3))
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = single_process(reference, inputs, targets)
        loss = train_step_pipeline(model, inputs, targets)
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        norm = clip_grad_norm_pipeline(model, 0.1)
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, abs(loss / expected - 1), abs(norm / float(expected_norm) - 1))
    return worst


def freeze(case: Case) -> float:
    """The first stage frozen, then the last, then all but one parameter in the middle."""
    inputs, targets = make_microbatches(case)
    worst = 0.0
    names = [name for name, _ in make_model(case).named_parameters()]
    for frozen in (names[:-2], names[-3:], [name for name in names if "blocks.1" not in name], names[:3]):
        for schedule in ("1f1b", "zb_h1", "zb_v"):
            reference, model = make_model(case), make_model(case)
            for each in (reference, model):
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name not in frozen)
            single_process(reference, inputs, targets)
            train_step_pipeline(model, inputs, targets, schedule=schedule)
            assert not set(gradients(model)) & set(frozen)
            worst = max(worst, compare_to(reference, model))
    return worst


def mask_padding(case: Case) -> float:
    inputs, targets = make_microbatches(case)
    masks = [torch.ones_like(each) for each in inputs]
    for index, mask in enumerate(masks):
        mask[0, : index % 3] = 0
    reference, model = make_model(case), make_model(case)
    expected = single_process(reference, inputs, targets, masks)
    loss = train_step_pipeline(model, inputs, targets, attention_masks=masks)
    return max(compare_to(reference, model), abs(loss - expected))


def evaluate(case: Case) -> float:
    inputs, targets = make_microbatches(case)
    reference, model = make_model(case), make_model(case)
    expected = single_process(reference, inputs, targets)
    worst = max(abs(eval_step_pipeline(model, inputs, targets, schedule=name) - expected) for name in SCHEDULE_NAMES)
    assert gradients(model) == {}
    return worst


def run_all(functions: list[Callable[[Case], float]], case: Case) -> list[float]:
    torch.set_num_threads(1)
    return [function(case) for function in functions]


@pytest.mark.parametrize(("world_size", "tied"), [(1, False), (2, True), (3, False)])
def test_what_a_training_loop_does_equals_a_single_process(world_size: int, tied: bool) -> None:
    functions = [accumulate, train, mask_padding, evaluate, *([] if tied else [freeze])]
    results = ringsim.trace(run_all, world_size=world_size, args=(functions, Case(tied=tied))).results
    for rank, found in enumerate(results):
        for function, worst in zip(functions, found, strict=True):
            assert worst < 1e-10, (function.__name__, rank)


# -- dropout


def drop(schedule: str, checkpoint: bool, seed: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = SmallTransformer(13, hidden_size=8, num_layers=4, num_heads=2, max_length=16, dropout=0.3).double()
    torch.manual_seed(100 + ringsim.current_ring().rank)
    inputs, targets = make_microbatches(Case())
    before = torch.get_rng_state()
    loss = train_step_pipeline(model, inputs, targets, schedule=schedule, checkpoint=checkpoint, dropout_seed=seed)
    assert seed is None or torch.equal(before, torch.get_rng_state())
    return loss, gradients(model)


def drop_in_many_ways(seeds: list[int | None]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    torch.set_num_threads(1)
    return [
        drop(name, checkpoint, seed) for name in ("gpipe", "interleaved_1f1b", "zb_v") for checkpoint in (False, True) for seed in seeds
    ]


def test_seeded_dropout_is_the_same_on_any_ring_and_in_any_schedule() -> None:
    alone = ringsim.trace(drop_in_many_ways, world_size=1, args=([3, 4, None],)).results[0]
    expected_loss, expected = alone[0]
    for world_size in (2, 3):
        for found in ringsim.trace(drop_in_many_ways, world_size=world_size, args=([3],)).results:
            for loss, grads in found:
                assert loss == pytest.approx(expected_loss, rel=1e-12)
                assert max((difference(grad, expected[name]) for name, grad in grads.items()), default=0.0) < 1e-10
    assert {round(loss, 9) for loss, _ in alone[::3]} == {round(expected_loss, 9)}
    assert len({round(loss, 9) for loss, _ in alone}) > 2  # other seeds, and none, drop otherwise


# -- several rings, and none


def data_parallel() -> tuple[float, float]:
    """Two rings of two ranks, each with half of the microbatches."""
    torch.set_num_threads(1)
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
    worst = compare_to(reference, model)
    norm = clip_grad_norm_pipeline(model, 1e9)
    return worst, abs(norm / float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)) - 1)


def test_two_rings_share_out_a_batch() -> None:
    for worst, norm in ringsim.trace(data_parallel, world_size=4, ring=False).results:
        assert worst < 1e-10
        assert norm < 1e-10


def train_llama(dtype: torch.dtype) -> tuple[float, float, list[str], list[int]]:
    """A script that has made a default group and no more, and watches the layers with hooks of its own."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(config).to(dtype))
    reference, model = models
    inputs, targets = make_microbatches(Case(same_shapes=False))
    expected = 0.0
    for tokens, target in zip(inputs, targets, strict=True):
        loss = cross_entropy(reference(tokens).logits, target) / len(inputs)
        loss.backward()
        expected += loss.item()
    seen: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: seen.append(index))
        layer.register_full_backward_hook(lambda *_, index=index: seen.append(100 + index))
    loss = train_step_pipeline_afab(model, inputs, targets, torch.device("cpu"), dtype)
    return abs(loss / expected - 1), compare_to(reference, model), sorted(gradients(model)), seen


def train_llama_twice(directory: str) -> list[tuple[float, float, list[str], list[int]]]:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for start in range(2):  # the second time the ring of the first is still there, but its groups are gone
        store = dist.FileStore(f"{directory}/{start}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        found.append(train_llama(torch.float32))
        dist.destroy_process_group()
    print("shown", rank)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_default_group_is_all_that_afab_needs(world_size: int, tmp_path: Path) -> None:
    trace = ringsim.trace(train_llama_twice, world_size=world_size, ring=False, args=(str(tmp_path),))
    for time in range(2):
        by_rank = [found[time] for found in trace.results]
        for loss, worst, _, _ in by_rank:
            assert loss < 1e-5
            assert worst < 1e-5
        own = sorted(name for _, _, names, _ in by_rank for name in names)
        assert len(own) == len(set(own)) == 3 + 3 * 9  # each parameter on one rank: embedding, norm and head, and nine a layer
        calls = sorted(call for _, _, _, seen in by_rank for call in seen)
        assert calls == sorted([0, 1, 2, 100, 101, 102] * 4)  # each hook once for each of four microbatches
    assert [f"shown {rank}" in output for rank, output in enumerate(trace.output)] == [True] * world_size


def in_bfloat16() -> list[tuple[float, float]]:
    """The boundaries carry bfloat16; the oracle computes in it too, so only the order of adding up gradients may differ."""
    torch.set_num_threads(1)
    found = []
    for schedule in ("gpipe", "zb_v"):
        case = Case(dtype=torch.bfloat16, seed=2)
        reference, model = make_model(case), make_model(case)
        inputs, targets = make_microbatches(case)
        expected = single_process(reference, inputs, targets)
        loss = train_step_pipeline(model, inputs, targets, schedule=schedule)
        found.append((abs(loss / expected - 1), compare_to(reference, model)))
    return found


def test_bfloat16() -> None:
    for found in ringsim.trace(in_bfloat16, world_size=2).results:
        for loss, worst in found:
            assert loss < 1e-6
            assert worst < 0.02


# -- what the trace shows


def one_step(schedule: str) -> None:
    torch.set_num_threads(1)
    inputs, targets = make_microbatches(Case(num_microbatches=5))
    train_step_pipeline(make_model(Case()), inputs, targets, schedule=schedule)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_trace_shows_each_action_in_its_order(name: str) -> None:
    schedule = make_schedule(name, 2, 5)
    words = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    events = ringsim.trace(one_step, world_size=2, args=(name,)).to_pandas()
    for rank, row in enumerate(schedule.actions):
        spans = events[(events["rank"] == rank) & (events["kind"] == "span")].sort_values("post_ns")
        shown = list(zip(spans["label"], spans["stage"], spans["microbatch"], strict=True))
        assert spans["label"].iloc[0] == f"step {schedule.name}"
        assert shown[1:] == [(words[action.kind], action.stage, action.microbatch) for action in row]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_v"])
def test_the_trace_shows_stage_and_microbatch_of_each_message(name: str) -> None:
    schedule = lower(make_schedule(name, 2, 5))
    events = ringsim.trace(one_step, world_size=2, args=(name,)).to_pandas()
    for rank, row in enumerate(schedule.actions):
        for kind in ("send", "recv"):
            payloads = events[(events["rank"] == rank) & (events["kind"] == kind) & (events["size_bytes"] == 2 * 5 * 8 * 8)]
            shown = sorted(zip(payloads["stage"], payloads["microbatch"], strict=True))
            expected = sorted((action.stage, action.microbatch) for action in row if action.kind.lower().startswith(kind))
            assert shown == expected
    messages = events[events["kind"].isin(["send", "recv"])]
    assert (messages["status"] == "ok").all()
    assert set(messages["group"]) <= {"ring:0>1", "ring:1>0"}


def test_alike_microbatches_need_one_header_a_boundary() -> None:
    events = ringsim.trace(one_step, world_size=3, args=("1f1b",)).to_pandas()
    sends = events[events["kind"] == "send"]
    assert (sends["tag"] == HEADER_TAG).sum() == 2
    assert (sends["tag"] == PAYLOAD_TAG).sum() == 2 * 2 * 5
