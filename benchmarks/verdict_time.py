"""How soon the watcher tells that ranks are stuck of which a recv from anybody got the message: from the last event to the verdict.

    python benchmarks/verdict_time.py [--runs 10] [--ranks 2 4 8 16] [--busy PROCESSES]

Each rank of a ring has a recv from anybody open, which gets the first message of the rank before it, and then waits for a message from that
rank under the same tag. Which of the two recvs got the message is not in the records, so the verdict takes that all ranks are at rest: of
what the watcher proves about messages, this takes longest. The first run warms up and does not count. Exits with 1 where a verdict took
longer than the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from paired import where
from quiet_runs import busy

import ringsim
from ringsim.errors import Deadlock
from ringsim.launch.ranks import get_launcher

GOAL_S = 1.0


def anybody_got_it() -> None:
    """The recv from anybody was there first, and has the only message."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    works: list[Any] = [dist.irecv(torch.zeros(4), tag=3)]
    works += [dist.isend(torch.zeros(4), after, tag=tag) for tag in (3, 4)]
    dist.recv(torch.zeros(4), before, tag=4)
    dist.recv(torch.zeros(4), before, tag=3)
    for work in works:
        work.wait()


def find_verdict_s(world_size: int) -> float:
    """Runs the ring once; returns how long it took from the last event to the verdict.

    Raises:
        RuntimeError: the ranks were not found stuck, or not for this reason.
    """
    try:
        ringsim.trace(anybody_got_it, world_size=world_size)
    except Deadlock as error:
        finding = error.diagnosis.findings[0]
        if len(finding.ranks) == world_size:
            return float(min(operation.waited_s for operation in finding.operations))
    raise RuntimeError(f"a ring of {world_size} ranks must be found stuck as a whole")


def main() -> int:
    """Prints a table, and tells whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each size (default: 10)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="sizes of the ring (default: 2 4 8 16)")
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that compute meanwhile (default: one a processor)")
    options = parser.parse_args()
    print(where())
    print(f"{options.runs} runs of each, {options.busy} busy processes beside them; from the last event to the verdict")
    print(f"  {'ranks':>5}{'median ms':>12}{'longest ms':>12}", flush=True)
    worst_s = 0.0
    with busy(options.busy):
        find_verdict_s(2)
        for size in options.ranks:
            took = [find_verdict_s(size) for _ in range(options.runs)]
            worst_s = max(worst_s, *took)
            print(f"  {size:5}{statistics.median(took) * 1e3:12.0f}{max(took) * 1e3:12.0f}", flush=True)
    get_launcher().close()
    print(f"the goal of {GOAL_S:g} s is {'met' if worst_s <= GOAL_S else 'missed'}")
    return 0 if worst_s <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
