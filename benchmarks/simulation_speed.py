"""Measures how fast ringsim simulates workers.

The results are messages per second on 256 ranks, with and without recording, the time that a token
takes around 10,000 ranks, and the memory per rank.

    python benchmarks/simulation_speed.py [--ranks 256] [--rounds 1000] [--repeats 5] [--steps 7]

Each process measures one case, in a simulation on one core. Threads and greenlets alternate. The
caller measures the time from the call of ``simulate`` to the trace, including the start and the end
of the ranks. The memory is that of the simulation's process, minus the memory of a simulation with
two ranks. Each message has 64 float32 values and a private link.

In "ring", each rank sends to its successor, receives from its predecessor, and waits for both, in
every round. In "both ways", each rank does this in both directions at the same time. "3D" has a
million operations on 1,024 ranks: 8 tensor-parallel ranks by 16 replicas by 8 stages. Each
microbatch has 16 all_reduces in a tensor-parallel group, and a message to each neighbouring stage.
Each step has one all_reduce over the replicas. Activations are on the meta device, as in most large
simulations.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import ringsim
from ringsim import comm as dist

LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)


def ring(rounds: int) -> None:
    """Sends a message to the successor in each round."""
    here = ringsim.current_ring()
    token, arriving = torch.zeros(64), torch.zeros(64)
    for _ in range(rounds):
        receiving = dist.irecv(arriving, here.pred, group=here.pred_group)
        sending = dist.isend(token, here.succ, group=here.succ_group)
        receiving.wait()
        sending.wait()


def both_ways(rounds: int) -> None:
    """Sends a message to both neighbours in each round."""
    here = ringsim.current_ring()
    down, up, token = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    for _ in range(rounds):
        handles = (
            dist.irecv(down, here.pred, group=here.pred_group, tag=1),
            dist.irecv(up, here.succ, group=here.succ_group, tag=2),
            dist.isend(token, here.succ, group=here.succ_group, tag=1),
            dist.isend(token, here.pred, group=here.pred_group, tag=2),
        )
        for handle in handles:
            handle.wait()


TENSOR, STAGES, REPLICAS, MICROBATCHES = 8, 8, 16, 8


def three_dimensions(steps: int) -> int:
    """Runs GPipe steps with tensor and data parallelism.

    Returns the number of operations.
    """
    rank, operations = ringsim.current_ring().rank, 0
    place = rank // TENSOR
    stage, before, after = place // REPLICAS, rank - TENSOR * REPLICAS, rank + TENSOR * REPLICAS
    tensor_groups = [
        dist.new_group(list(range(start, start + TENSOR)))
        for start in range(0, TENSOR * REPLICAS * STAGES, TENSOR)
    ]
    size = TENSOR * REPLICAS
    replica_groups = [
        dist.new_group(list(range(first, first + size, TENSOR)))
        for start in range(STAGES)
        for first in range(start * size, start * size + TENSOR)
    ]
    mine, copies = tensor_groups[place], replica_groups[stage * TENSOR + rank % TENSOR]
    activation = torch.zeros(2048, 1024, device="meta")
    for _ in range(steps):
        for source, target in ((before, after), (after, before)):  # forward, then backward
            for _ in range(MICROBATCHES):
                if 0 <= source < size * STAGES:
                    dist.recv(activation, source)
                    operations += 1
                for _ in range(8):
                    dist.all_reduce(activation, group=mine)
                operations += 8
                if 0 <= target < size * STAGES:
                    dist.send(activation, target)
                    operations += 1
        dist.all_reduce(activation, group=copies)
        operations += 1
    return operations


def token_round() -> float:
    """Passes a token around the ring."""
    here = ringsim.current_ring()
    token = torch.zeros(64)
    if here.rank == 0:
        dist.send(token, here.succ, group=here.succ_group)
        dist.recv(token, here.pred, group=here.pred_group)
    else:
        dist.recv(token, here.pred, group=here.pred_group)
        dist.send(token + 1, here.succ, group=here.succ_group)
    return token[0].item()


class Measured:
    """A worker that also returns the memory and the CPU time of its process.

    Only every hundredth rank queries them, because the query takes a millisecond if there are
    thousands of threads.
    """

    def __init__(self, worker: Callable[..., Any]) -> None:
        self.worker = worker

    def __call__(self, *args: Any) -> tuple[Any, int, float]:
        """Returns the worker's result, and the peak memory (KiB) and CPU time (s) so far."""
        result = self.worker(*args)
        if ringsim.current_ring().rank % 100:
            return result, 0, 0.0
        used = resource.getrusage(resource.RUSAGE_SELF)
        return result, used.ru_maxrss, used.ru_utime + used.ru_stime


def run(
    worker: Callable[..., Any], ranks: int, args: tuple[Any, ...], record: bool, stacks: str
) -> Any:
    """Returns the results of the ranks, and the memory and CPU time that their process used."""
    trace = ringsim.simulate(
        Measured(worker), world_size=ranks, args=args, link=LINK, record=record, stacks=stacks
    )
    results, memory_kib, cpu_s = zip(*trace.results, strict=True)
    return results, max(memory_kib), max(cpu_s)


def measure(what: str, ranks: int, rounds: int, record: bool, stacks: str) -> dict[str, float]:
    """Runs one case in this process."""
    worker = {"ring": ring, "both ways": both_ways, "token": token_round, "3D": three_dimensions}[
        what
    ]
    args = () if what == "token" else (rounds,)
    _, least_kib, _ = run(ring, 2, (2,), record, stacks)  # also starts the fork server
    begin = time.perf_counter()
    results, memory_kib, cpu_s = run(worker, ranks, args, record, stacks)
    seconds = time.perf_counter() - begin
    done = {
        "token": ranks,
        "3D": sum(results) if what == "3D" else 0,
        "ring": ranks * rounds,
        "both ways": 2 * ranks * rounds,
    }[what]
    if what == "token":
        assert results[0] == ranks - 1, results[0]
    return {
        "seconds": seconds,
        "per_s": done / seconds,
        "cpu_s": cpu_s,
        "kib_per_rank": (memory_kib - least_kib) / ranks,
    }


def main() -> None:
    """Measures all cases, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7, help="the number of 3D steps (default: 7)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return
    print(f"load {os.getloadavg()[0]:.2f}, {options.repeats} processes per case, median (best)")
    cases = [
        *(
            (what, options.ranks, record)
            for what in ("ring", "both ways")
            for record in (True, False)
        ),
        ("token", options.many, True),
        ("token", options.many, False),
        ("3D", TENSOR * STAGES * REPLICAS, True),
        ("3D", TENSOR * STAGES * REPLICAS, False),
    ]
    for what, ranks, record in cases:
        rounds = options.steps if what == "3D" else options.rounds
        case = {"what": what, "ranks": ranks, "rounds": rounds, "record": record}
        found: dict[str, list[Any]] = {"threads": [], "greenlets": []}
        for _ in range(options.repeats):
            for stacks, runs in found.items():
                runs.append(measure_apart({**case, "stacks": stacks}))
        for stacks, runs in found.items():
            print_case(what, ranks, record, stacks, runs)


def measure_apart(case: dict[str, Any]) -> Any:
    """Measures one case in a separate process."""
    command = ["taskset", "-c", "1", sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def print_case(
    what: str, ranks: int, record: bool, stacks: str, found: list[dict[str, float]]
) -> None:
    """Prints a line of the table."""
    seconds, per_s, cpu_s, kib = (
        [each[key] for each in found] for key in ("seconds", "per_s", "cpu_s", "kib_per_rank")
    )
    said = (
        f"{statistics.median(per_s):>10,.0f} {'operations' if what == '3D' else 'messages'}/s "
        f"({max(per_s):,.0f})"
    )
    print(
        f"{what:<10} {ranks:>6} ranks, {stacks}, {'recorded' if record else 'not recorded':<12} "
        f"{said}, {statistics.median(seconds):.2f} s "
        f"({statistics.median(cpu_s):.2f} s of CPU time), ",
        end="",
    )
    print(f"{statistics.median(kib):.1f} KiB per rank")


if __name__ == "__main__":
    main()
