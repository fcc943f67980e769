"""Measures a training step of a pipeline.

The script compares ringsim with ``torch.distributed.pipelining``, and recorded steps with
unrecorded ones. Run ``python benchmarks/pipeline_step.py`` (which takes about fifteen minutes), or
add ``--repeats 5 --ranks 2``. Both engines get the same model, stages and data, and alternate in
the same processes, with one thread each. A single process without a pipeline takes turns with them.
Every step starts at a barrier. The time of a step is the time of the slowest rank, and its CPU time
is the sum over all ranks. First, the script compares the loss and the gradients of both engines
with the results of one process.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paired import against_itself, ratio_interval, where
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import ringsim
from ringsim.pipeline import (
    SmallTransformer,
    build_stages,
    cross_entropy,
    partition_model,
    single_process_step,
    train_step_pipeline,
)

VOCABULARY, HIDDEN, LAYERS, SEQ, MICROBATCHES = 1024, 256, 8, 128, 8
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PEER_GOAL, TRACED_GOAL = 1.0, 1.02

Step = Callable[[], float]  # returns the loss, or NaN if the rank does not know it
# the time and the CPU time of each step in ms, by method
Times = dict[str, list[tuple[float, float]]]


def make_steps(
    rank: int, world_size: int, schedule: str
) -> tuple[torch.nn.Module, dict[str, Step]]:
    """Returns the model of this rank, and functions that run a step in different ways."""
    torch.manual_seed(0)
    model = SmallTransformer(VOCABULARY, HIDDEN, LAYERS, num_heads=4, max_length=SEQ)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, SEQ + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    stage = build_stages(model, partition_model(model, world_size))[rank]
    peer = THEIRS[schedule](
        PipelineStage(stage, rank, world_size, torch.device("cpu")),
        n_microbatches=MICROBATCHES,
        loss_fn=cross_entropy,
        scale_grads=True,
    )

    def run_peer() -> float:
        losses: list[torch.Tensor] = []
        if rank == world_size - 1:
            peer.step(target=targets, losses=losses)
        else:
            peer.step(*((inputs,) if rank == 0 else ()))
        return torch.stack(losses).mean().item() if losses else float("nan")

    def run_alone(size: int) -> float:
        """Runs a step in one process, in microbatches of a size, while the other ranks wait."""
        if rank != 0:
            return float("nan")
        loss, gradients = single_process_step(model, inputs.split(size), targets.split(size))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        return loss

    ours, theirs = list(inputs.split(1)), list(targets.split(1))
    return model, {
        "ringsim": lambda: train_step_pipeline(model, ours, theirs, schedule=schedule),
        "torch": run_peer,
        "one process": lambda: run_alone(1),
        "one process, one batch": lambda: run_alone(MICROBATCHES),
    }


def check_agreement(model: torch.nn.Module, steps: dict[str, Step]) -> tuple[float, float]:
    """Checks that all ways to run a step agree on the loss and the gradients.

    Returns the loss and the norm of the gradients.

    Raises:
        AssertionError: the losses or the gradients differ.
    """
    facts = {}
    for name, step in steps.items():
        model.zero_grad()
        loss = step()
        squares = torch.tensor(
            [
                float(p.grad.double().square().sum())
                for p in model.parameters()
                if p.grad is not None
            ]
        ).sum()
        dist.all_reduce(squares)
        facts[name] = torch.tensor([loss, float(squares) ** 0.5], dtype=torch.float64)
        # In torch, only the last rank knows the loss; without a pipeline, only rank 0 knows it.
        told = facts[name][:1].nan_to_num(0.0)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        facts[name][0] = told
        torch.testing.assert_close(facts[name], facts["ringsim"], rtol=1e-5, atol=0)
    return facts["ringsim"][0].item(), facts["ringsim"][1].item()


def time_step(model: torch.nn.Module, step: Step) -> tuple[float, float]:
    """Returns the time of one step on the slowest rank, and the CPU time on all ranks, in ms."""
    model.zero_grad()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    took, cpu = (
        torch.tensor(
            [time.perf_counter() - start, time.process_time() - cpu_start], dtype=torch.float64
        )
        .mul_(1e3)
        .split(1)
    )
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return took.item(), cpu.item()


def run_rank(
    rank: int, world_size: int, port: int, schedule: str, repeats: int, directory: str
) -> None:
    """Measures the steps on one rank; rank 0 saves the results."""
    torch.set_num_threads(1)
    ringsim.initialize_distributed("127.0.0.1", port, world_size, rank, rank, "cpu", timeout_s=120)
    model, steps = make_steps(rank, world_size, schedule)
    loss, norm = check_agreement(model, steps)
    steps |= {
        "torch again": steps["torch"],
        "ringsim again": steps["ringsim"],
        "ringsim traced": steps["ringsim"],
    }
    times: Times = {name: [] for name in steps}
    shuffled = random.Random(0)  # the same order on every rank
    file = Path(directory) / "step.ringtrace"
    for _ in range(repeats):
        for name in shuffled.sample(list(steps), len(steps)):
            with ringsim.trace(file) if name == "ringsim traced" else nullcontext():
                times[name].append(time_step(model, steps[name]))
    if rank == 0:
        peaks = ringsim.load(file).peak_activations()
        torch.save((times, loss, norm, peaks.peaks, peaks.bounds), Path(directory) / "found.pt")
    ringsim.destroy_distributed()


def measure(world_size: int, schedule: str, repeats: int) -> Any:
    """Starts the ranks.

    Returns the times, the loss, the norm of the gradients, and the peaks of live activations, both
    measured and computed by formula.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory() as directory:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(
            run_rank, (world_size, port, schedule, repeats, directory), nprocs=world_size
        )
        return torch.load(Path(directory) / "found.pt")


def report(times: Times) -> None:
    """Prints the times, and whether the goals were met."""
    wall, cpu = (
        {name: [each[column] for each in pairs] for name, pairs in times.items()}
        for column in range(2)
    )
    print("                          median     least   CPU of all ranks, ms")
    for name in times:
        print(
            f"  {name:23}{statistics.median(wall[name]):8.1f}  {min(wall[name]):8.1f}  "
            f"{statistics.median(cpu[name]):8.1f}"
        )
    for kind, measured in (("time", wall), ("CPU", cpu)):
        ours, peers = (
            measured["ringsim"] + measured["ringsim again"],
            measured["torch"] + measured["torch again"],
        )
        comparisons = [
            ("ringsim / torch", ours, peers, PEER_GOAL),
            ("traced / not traced", measured["ringsim traced"], ours, TRACED_GOAL),
        ]
        for what, above, below, goal in comparisons:
            ratio, low, high = ratio_interval(above, below)
            verdict = "met" if ratio <= goal else "missed"
            print(
                f"  {kind:4} {what:20} {ratio:.3f} ({low:.3f} .. {high:.3f}), goal {goal:.2f}: "
                f"{verdict}"
            )
        halves = [
            each
            for pair in zip(measured["torch"], measured["torch again"], strict=True)
            for each in pair
        ]
        print(f"  {kind:4} {against_itself(halves)}")


def main() -> None:
    """Prints a table for each schedule and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(THEIRS), choices=list(THEIRS))
    arguments = parser.parse_args()
    print(where())
    for world_size in arguments.ranks:
        for schedule in arguments.schedules:
            times, loss, norm, peaks, bounds = measure(world_size, schedule, arguments.repeats)
            print(
                f"\n{schedule}, {world_size} ranks, n {arguments.repeats}: all ways agree on loss "
                f"{loss:.5f} and gradient norm {norm:.5f}"
            )
            print(
                f"  peak live activations by rank {peaks}, closed form {bounds}: "
                f"{'met' if peaks == bounds else 'missed'}"
            )
            report(times)


if __name__ == "__main__":
    main()
