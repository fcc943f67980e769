"""Measures the cost of the watcher.

The script runs small messages between two ranks, and a pipeline step on two and four ranks, with
and without the watcher.

    python benchmarks/watcher_cost.py [--rounds 30] [--parts message step-2 step-4]

The goals are at most 2 % of a pipeline step, and at most 3 us per message. The script also prints
the launcher's CPU time, almost all of which the watcher uses. On a machine with a free core, this
time costs the ranks nothing. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from paired import against_itself, ratio_interval, where

from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.launch.watcher import POLL_S

GOAL_RATIO = 1.02
GOAL_US = 3.0
MODES = {"off": None, "off again": None, "on": POLL_S}


def ping_pong(count: int) -> float:
    """Returns half a round trip of 4 bytes, in us."""
    import torch
    import torch.distributed as dist

    tensor, rank = torch.zeros(1), dist.get_rank()
    for turn in range(count + 100):
        if turn == 100:
            start = time.perf_counter()
        for sender in (0, 1):
            if sender == rank:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
    return (time.perf_counter() - start) / count / 2 * 1e6


def pipeline_step(steps: int) -> float:
    """Returns the time of a step with eight microbatches in the order of 1F1B, in us.

    Each stage computes a matrix product for about a millisecond, and each message has 256 KiB.
    """
    import torch
    import torch.distributed as dist

    rank, size, microbatches = dist.get_rank(), dist.get_world_size(), 8
    weight, activation = torch.rand(256, 256), torch.rand(256, 256)
    durations = []

    def move(source: int, target: int) -> None:
        if rank == source and 0 <= target < size:
            pending.append(dist.isend(activation, target))
        elif rank == target and 0 <= source < size:
            dist.recv(activation, source)

    def compute() -> None:
        for _ in range(2):
            torch.mm(activation, weight)

    for _ in range(steps + 2):
        pending: list[Any] = []
        dist.barrier()
        start = time.perf_counter()
        warm_up = min(size - rank, microbatches)
        for number in range(microbatches + warm_up):
            if number < microbatches:
                move(rank - 1, rank)
                compute()
                move(rank, rank + 1)
            if number >= warm_up:
                move(rank + 1, rank)
                compute()
                move(rank, rank - 1)
        for work in pending:
            work.wait()
        dist.barrier()
        durations.append((time.perf_counter() - start) * 1e6)
    return statistics.median(durations[2:])


# the worker, the number of ranks, the worker's argument and the title of each part
PARTS: dict[str, tuple[Callable[[int], float], int, int, str]] = {
    "message": (ping_pong, 2, 5000, "ping-pong of 4 bytes, half a round trip"),
    "step-2": (pipeline_step, 2, 40, "pipeline step, 2 ranks"),
    "step-4": (pipeline_step, 4, 40, "pipeline step, 4 ranks"),
}


def measure(part: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Runs the worker of a part in all modes alternately.

    Returns pairs by mode: rank 0's result, and the share of a core that the launcher used.
    """
    worker, size, count, _ = PARTS[part]
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    begin = time.monotonic()
    for turn in range(rounds + 1):
        modes = list(MODES)
        for mode in modes[turn % 3 :] + modes[: turn % 3]:
            start, start_cpu = time.monotonic(), time.process_time()
            trace = run(
                pack_call(worker, (count,), {}, seed=0),
                make_kind(size, "cpu", 60, ring=True),
                RunOptions(poll_s=MODES[mode]),
            )
            share = (time.process_time() - start_cpu) / (time.monotonic() - start)
            if turn:  # the first one warms up
                found[mode].append((trace.results[0], share))
        print(
            f"{part}: round {turn} of {rounds}, {time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def report(part: str, found: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    """Prints a table, and returns the ratio of on to off and the difference in us."""
    times = {mode: [pair[0] for pair in pairs] for mode, pairs in found.items()}
    ratio, low, high = ratio_interval(times["on"], times["off"])
    beyond = statistics.median(times["on"]) - statistics.median(times["off"])
    print(PARTS[part][3])
    for mode in MODES:
        share = statistics.median(pair[1] for pair in found[mode])
        print(
            f"  {mode:10}{statistics.median(times[mode]):12.1f} us   launcher: {share:.1%} of a "
            "core"
        )
    print(f"  on / off: {ratio:.3f} ({low:.3f} .. {high:.3f}), {beyond:+.2f} us")
    print(
        "  "
        f"{against_itself([value for pair in zip(times['off'], times['off again'], strict=True) for value in pair])}"  # noqa: E501
    )
    return ratio, beyond


def main() -> None:
    """Prints the tables, and whether the goals were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="the number of rounds per part (default: 30)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="the parts to measure (default: all)",
    )
    options = parser.parse_args()
    print(where(), flush=True)
    for part in options.parts:
        ratio, beyond = report(part, measure(part, options.rounds))
        if part == "message":
            print(
                (
                    f"the goal of {GOAL_US:g} us per message was "
                    f"{'met' if beyond <= GOAL_US else 'missed'}"
                ),
                flush=True,
            )
        else:
            print(
                f"the goal of a ratio of {GOAL_RATIO:g} was "
                f"{'met' if ratio <= GOAL_RATIO else 'missed'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
