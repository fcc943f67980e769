"""Measures the time until the watcher reports that ranks are stuck, or disagree.

The time begins with the last event of the ranks, and ends with the verdict.

    python benchmarks/verdict_time.py [--runs 10] [--ranks 2 4 8 16] [--busy PROCESSES]

In the ring *stuck*, each rank waits for a message from the previous rank. In the ring *disagrees*,
each rank sends float32 to the next rank, which receives int32. Gloo does not notice this, and the
ranks continue. The first run warms up and does not count. The script exits with 1 if a verdict took
longer than the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from paired import where
from quiet_runs import busy

import ringsim
from ringsim.errors import Deadlock, MessageMismatch
from ringsim.launch.ranks import get_launcher

GOAL_S = 1.0


def stuck() -> None:
    """Has each rank receive first."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(4), (dist.get_rank() - 1) % dist.get_world_size())


def disagrees() -> None:
    """Has each rank receive float32 as int32, and continue."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    work: Any = dist.isend(torch.zeros(4), (rank + 1) % size)
    dist.recv(torch.zeros(4, dtype=torch.int32), (rank - 1) % size)
    work.wait()
    time.sleep(10 * GOAL_S)


def find_verdict_s(program: Callable[[], None], world_size: int) -> float:
    """Runs a ring once, and returns the time from the last event to the verdict.

    Raises:
        RuntimeError: there was no verdict.
    """
    try:
        ringsim.trace(program, world_size=world_size)
    except (Deadlock, MessageMismatch) as error:
        trace = error.trace
        assert trace is not None
        last_ns = max(int(trace.events.wait_ns.max()), int(trace.events.post_ns.max()))
        return float(trace.metadata["given_up_ns"] - last_ns) / 1e9
    raise RuntimeError(f"the watcher found nothing wrong with a ring of {world_size} ranks")


def main() -> int:
    """Prints a table, and returns whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=10, help="the number of runs per ring (default: 10)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16],
        help="the sizes of the ring (default: 2 4 8 16)",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=os.cpu_count() or 1,
        help="the number of processes that compute in the background (default: one per core)",
    )
    options = parser.parse_args()
    print(where())
    print(
        f"{options.runs} runs of each ring, {options.busy} busy processes; times from the last "
        "event to the verdict"
    )
    print(f"  {'ring':10}{'ranks':>5}{'median ms':>12}{'longest ms':>12}", flush=True)
    worst_s = 0.0
    with busy(options.busy):
        find_verdict_s(stuck, 2)
        for program in (stuck, disagrees):
            for size in options.ranks:
                took = [find_verdict_s(program, size) for _ in range(options.runs)]
                worst_s = max(worst_s, *took)
                print(
                    (
                        f"  {program.__name__:10}{size:5}{statistics.median(took) * 1e3:12.0f}"
                        f"{max(took) * 1e3:12.0f}"
                    ),
                    flush=True,
                )
    get_launcher().close()
    print(f"the goal of {GOAL_S:g} s was {'met' if worst_s <= GOAL_S else 'missed'}")
    return 0 if worst_s <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
