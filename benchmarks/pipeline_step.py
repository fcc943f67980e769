"""A training step on a pipeline: ringsim beside ``torch.distributed.pipelining``, and recorded beside not recorded.

Run: ``python benchmarks/pipeline_step.py`` (about five minutes); ``--repeats 5 --ranks 2`` takes a look. Both engines have the same model,
the same stages and the same data, and take turns within one set of processes, one thread each. Every step starts at a barrier; its time is
that of the slowest rank, its CPU time that of all. The gradients of both are compared before anything is timed.
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
from ringsim.pipeline import SmallTransformer, build_stages, cross_entropy, partition_model, train_step_pipeline

VOCABULARY, HIDDEN, LAYERS, SEQ, MICROBATCHES = 1024, 256, 8, 128, 8
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PEER_GOAL, TRACED_GOAL = 1.0, 1.02

Step = Callable[[], Any]


def make_steps(rank: int, world_size: int, schedule: str) -> tuple[torch.nn.Module, Step, Step]:
    """Returns the model of this rank, and a step of ringsim and one of torch on it."""
    torch.manual_seed(0)
    model = SmallTransformer(VOCABULARY, HIDDEN, LAYERS, num_heads=4, max_length=SEQ)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, SEQ + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ours, theirs = list(inputs.split(1)), list(targets.split(1))
    stage = build_stages(model, partition_model(model, world_size))[rank]
    peer = THEIRS[schedule](
        PipelineStage(stage, rank, world_size, torch.device("cpu")), n_microbatches=MICROBATCHES, loss_fn=cross_entropy, scale_grads=True
    )
    arguments = (inputs,) if rank == 0 else ()
    keywords = {"target": targets} if rank == world_size - 1 else {}
    return (
        model,
        lambda: train_step_pipeline(model, ours, theirs, schedule=schedule),
        lambda: peer.step(*arguments, **keywords, losses=[]) if keywords else peer.step(*arguments),
    )


def take_gradients(model: torch.nn.Module, step: Step) -> list[torch.Tensor]:
    """Runs a step and returns the gradients that it leaves."""
    model.zero_grad()
    step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def time_step(model: torch.nn.Module, step: Step) -> tuple[float, float]:
    """Returns the time of one step on the slowest rank, and the CPU time on all ranks together, in ms."""
    model.zero_grad()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    took, cpu = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start], dtype=torch.float64).mul_(1e3).split(1)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return took.item(), cpu.item()


def run_rank(rank: int, world_size: int, port: int, schedule: str, repeats: int, directory: str) -> None:
    """Measures on one rank; rank 0 writes the times down."""
    torch.set_num_threads(1)
    ringsim.initialize_distributed("127.0.0.1", port, world_size, rank, rank, "cpu", timeout_s=120)
    model, ours, peers = make_steps(rank, world_size, schedule)
    for mine, theirs in zip(take_gradients(model, ours), take_gradients(model, peers), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    methods: dict[str, Step] = {"ringsim": ours, "torch": peers, "torch again": peers, "ringsim again": ours, "ringsim traced": ours}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    shuffled = random.Random(0)  # the same order on every rank
    for repeat in range(repeats):
        for name in shuffled.sample(list(methods), len(methods)):
            watch = ringsim.trace(Path(directory) / f"{schedule}-{repeat}.ringtrace") if name == "ringsim traced" else nullcontext()
            with watch:
                times[name].append(time_step(model, methods[name]))
    if rank == 0:
        torch.save(times, Path(directory) / "times.pt")
    ringsim.destroy_distributed()


def measure(world_size: int, schedule: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Starts the ranks and returns the times of each method, and the CPU times, in ms."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as directory:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(run_rank, (world_size, port, schedule, repeats, directory), nprocs=world_size)
        times: dict[str, list[tuple[float, float]]] = torch.load(Path(directory) / "times.pt")
    return times


def main() -> None:
    """Prints a table for each schedule and number of ranks, and whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(THEIRS), choices=list(THEIRS))
    arguments = parser.parse_args()
    print(where())
    for world_size in arguments.ranks:
        for schedule in arguments.schedules:
            both = measure(world_size, schedule, arguments.repeats)
            print(f"\n{schedule}, {world_size} ranks, n {arguments.repeats}")
            times, cpu = ({name: [each[column] for each in pairs] for name, pairs in both.items()} for column in range(2))
            for name, measured in times.items():
                median, least = statistics.median(measured), min(measured)
                print(
                    f"  {name:15} median {median:7.1f} ms, least {least:7.1f} ms, CPU of all ranks {statistics.median(cpu[name]):7.1f} ms"
                )
            ours, peers, cpu_ours, cpu_peers = (
                kind[name] + kind[f"{name} again"] for kind in (times, cpu) for name in ("ringsim", "torch")
            )
            print("  CPU of torch's: {:.3f} ({:.3f} .. {:.3f})".format(*ratio_interval(cpu_ours, cpu_peers)))
            for what, above, below, goal in (
                ("of torch's", ours, peers, PEER_GOAL),
                ("traced, of not traced", times["ringsim traced"], ours, TRACED_GOAL),
            ):
                ratio, low, high = ratio_interval(above, below)
                print(f"  {what}: {ratio:.3f} ({low:.3f} .. {high:.3f}), goal {goal:.2f}: {'met' if ratio <= goal else 'missed'}")
            halves = [each for pair in zip(times["torch"], times["torch again"], strict=True) for each in pair]
            print(f"  {against_itself(halves)}")


if __name__ == "__main__":
    main()
