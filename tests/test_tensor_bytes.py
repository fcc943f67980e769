"""Bytes of tensors: counted on ranks, against torch's own accounting and counts by hand."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import ringsim
from ringsim.errors import ArgumentError
from ringsim.pipeline import (
    SmallTransformer,
    build_stages,
    partition_model,
    train_step_pipeline,
)

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
KINDS = ["parameters", "gradients", "optimizer", "activations"]
WIDTH, ROWS, LAYERS = 256, 1024, 4
CLOSE = 0.05


def make_model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def run_layers(model: nn.Sequential, x: torch.Tensor, recompute: bool) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    return x


def train(device: str = "cpu", recompute: bool = False) -> None:
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters())
    with ringsim.memory(model, optimizer):
        x = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)
        loss = run_layers(model, x, recompute).square().mean()
        ringsim.mark("forward over")
        loss.backward()
        optimizer.step()


def simulated(device: str = "meta", recompute: bool = False) -> ringsim.Trace:
    return ringsim.simulate(train, world_size=1, args=(device, recompute), link=LINK)


def at_peak(trace: ringsim.Trace) -> Any:
    counts = trace.memory()
    return counts.loc[counts["total"].idxmax()]


def test_each_kind_is_counted_as_by_hand() -> None:
    trace = simulated()
    parameters = LAYERS * (WIDTH + 1) * WIDTH * 4
    last = trace.memory().iloc[-1]
    assert last[KINDS[:2]].tolist() == [parameters, parameters]
    steps = LAYERS * 2 * 4  # Adam counts its steps in a number for each parameter
    assert last["optimizer"] == 2 * parameters + steps
    assert last["total"] == last[KINDS].sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_activations_after_a_forward_pass_are_those_counted_by_hand(recompute: bool) -> None:
    def run_forward() -> None:
        model = make_model("meta")
        with ringsim.memory(model):
            loss = run_layers(model, torch.zeros(ROWS, WIDTH, device="meta"), recompute).sum()
        assert loss.requires_grad

    trace = ringsim.simulate(run_forward, world_size=1, link=LINK)
    # each layer's input, and unless it is recomputed the result of its linear part
    kept = LAYERS * (1 if recompute else 2) * ROWS * WIDTH * 4
    assert trace.memory()["activations"].iloc[-1] == pytest.approx(kept, rel=CLOSE)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_is_that_of_torchs_tracker(device: str, recompute: bool) -> None:
    model = make_model(device)
    optimizer = torch.optim.Adam(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        x = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)
        run_layers(model, x, recompute).square().mean().backward()
        optimizer.step()
    torchs = tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"]
    assert at_peak(simulated(device, recompute))["total"] == pytest.approx(torchs, rel=CLOSE)


def test_the_peak_is_that_of_torchs_allocator(tmp_path: Path) -> None:
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        x = torch.zeros(ROWS, WIDTH, requires_grad=True)
        run_layers(model, x, False).square().mean().backward()
        optimizer.step()

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    with profile(profile_memory=True) as recorded:
        step(model, optimizer)
    recorded.export_chrome_trace(str(tmp_path / "memory.json"))
    events = json.loads((tmp_path / "memory.json").read_text())["traceEvents"]
    total = changed = 0
    for event in events:
        if event["name"] == "[memory]":
            total += event["args"]["Bytes"]
            changed = max(changed, total)
    before = sum(each.nbytes for each in model.parameters())
    assert at_peak(simulated("cpu"))["total"] == pytest.approx(before + changed, rel=CLOSE)


def test_recomputation_keeps_less_and_counts_what_it_recomputes() -> None:
    kept, recomputed = (at_peak(simulated(recompute=each))["activations"] for each in (False, True))
    one = ROWS * WIDTH * 4
    assert recomputed < kept
    assert recomputed >= (LAYERS + 1 + 2) * one, "each layer's input, and one layer recomputed"


def train_stage(schedule: str, recompute: bool) -> None:
    ring = ringsim.current_ring()
    with torch.device("meta"):
        model = SmallTransformer(vocab_size=100, hidden_size=64, num_layers=8, num_heads=4)
        tokens = [torch.zeros(4, 65, dtype=torch.int64) for _ in range(8)]
    stage = build_stages(model, partition_model(model, ring.world_size))[ring.rank]
    inputs, targets = [each[:, :-1] for each in tokens], [each[:, 1:] for each in tokens]
    with ringsim.memory(stage):
        train_step_pipeline(model, inputs, targets, schedule=schedule, checkpoint=recompute)


def peaks_of_stages(schedule: str, recompute: bool = False) -> list[int]:
    trace = ringsim.simulate(train_stage, world_size=4, args=(schedule, recompute), link=LINK)
    most: list[int] = trace.memory().groupby("rank")["activations"].max().tolist()
    return most


def test_a_stage_keeps_as_many_activations_as_its_schedule_allows() -> None:
    gpipe, one_f_one_b = peaks_of_stages("gpipe"), peaks_of_stages("1f1b")
    # 8 microbatches against 4, 3, 2 and 1 on the ranks in the middle
    assert gpipe[1] / one_f_one_b[1] == pytest.approx(8 / 3, rel=0.2)
    assert gpipe[2] / one_f_one_b[2] == pytest.approx(8 / 2, rel=0.2)
    assert max(peaks_of_stages("1f1b", recompute=True)) < max(one_f_one_b) / 2


def test_counts_outlive_a_file_and_are_drawn_below_the_timeline(tmp_path: Path) -> None:
    trace = ringsim.trace(train, world_size=2)
    trace.save(tmp_path / "run.ringtrace")
    loaded = ringsim.load(tmp_path / "run.ringtrace")
    assert loaded.memory().equals(trace.memory())
    assert set(trace.memory()["rank"]) == {0, 1}
    ax = loaded.plot_memory()
    assert [panel.texts[0].get_text().split(":")[0] for panel in ax.child_axes] == [
        "rank 0",
        "rank 1",
    ]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert set(KINDS) <= set(names)
    assert "bytes of tensors" not in {text.get_text() for text in ax.texts}, "no names of marks"
    assert [text for text in trace.plot_timeline().texts if "bytes" in text.get_text()] == []


def test_a_part_of_a_trace_is_drawn_with_its_counts() -> None:
    """Operations whose other side is left out are known by their places, which counts change."""

    def step() -> None:
        ringsim.current_ring()
        train()
        torch.distributed.barrier()

    trace = ringsim.simulate(step, world_size=3, link=LINK)
    part = trace.filter(ranks=[1])
    assert set(part.memory()["rank"]) == {1}
    (panel,) = part.plot_memory().child_axes
    assert panel.texts[0].get_text().startswith("rank 1: ")


def test_between_two_blocks_the_picture_has_a_gap() -> None:
    def two_blocks() -> None:
        for _ in range(2):
            with ringsim.memory(make_model("meta")):
                ringsim.compute(1.0)
            ringsim.compute(2.0)

    trace = ringsim.simulate(two_blocks, world_size=1, link=LINK)
    assert trace.memory()["time_ns"].tolist() == [0, 1e9, 3e9, 4e9]
    (panel,) = trace.plot_memory().child_axes
    paths = [path for drawn in panel.collections for path in drawn.get_paths()]
    times = {(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths}
    assert times == {(0, 1), (3, 4)}, "seconds"


def test_without_counts_there_is_nothing_to_draw() -> None:
    with pytest.raises(ArgumentError, match="contains no counts of bytes"):
        ringsim.simulate(lambda: None, world_size=1, link=LINK).plot_memory()


def test_without_a_recording_the_block_does_nothing() -> None:
    model = nn.Linear(2, 2)
    with ringsim.memory(model):
        assert torch.ones(3).sum().item() == 3
    assert len(ringsim.simulate(lambda: None, world_size=1, link=LINK).memory()) == 0


def test_tensors_may_vanish_while_they_are_counted() -> None:
    """As they do when a thread of Gloo frees those of a collective."""

    def allocate() -> None:
        kept: list[torch.Tensor] = []
        known = weakref.WeakValueDictionary
        readers = {known.__getitem__.__code__, known.items.__code__}

        def free(frame: Any, *_: Any) -> None:
            if frame.f_code in readers:
                del kept[1:]

        with ringsim.memory(nn.Linear(1, 1)):
            sys.setprofile(free)
            try:
                kept.extend(torch.empty(10) for _ in range(10))
            finally:
                sys.setprofile(None)

    trace = ringsim.simulate(allocate, world_size=1, link=LINK)
    assert trace.memory()["activations"].max() >= 40
