"""Looks for false alarms on two hosts, and measures the time until a verdict.

    python benchmarks/quiet_hosts.py [--runs 100] [--hangs 10] [--busy PROCESSES]

The hosts are network namespaces with two ranks each. A correct run is a recorded block in which
messages travel around all ranks, followed by an all_reduce. One rank makes the others wait for a
second, and enters every other block a second late. In a run that hangs, two ranks on different
hosts receive from each other while both hosts are watched. A thread of one rank ends this run as
soon as rank 0 has reported the reason. The script prints all reports about correct runs, and exits
with 1 if there are any. Creating the hosts requires root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from clocks import ADDRESSES, hosts
from paired import where
from quiet_runs import busy

RANKS = 4
LATE_S = 1.0
WATCHED_S = 1.5  # after this time in a block, a rank on each host watches


def run_right(number: int) -> None:
    """Sends messages around all ranks, one of which is late."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    for lap in range(20):
        if lap == 10 and rank == number % RANKS:
            time.sleep(LATE_S)
        sent = dist.isend(torch.zeros(1 << 14), (rank + 1) % RANKS)
        dist.recv(torch.zeros(1 << 14), (rank - 1) % RANKS)
        sent.wait()  # type: ignore[union-attr]
    dist.all_reduce(torch.zeros(1 << 14))


def run_wrong(said: list[str]) -> float:
    """Has ranks 0 and 3 receive from each other.

    Returns the time until rank 0 reported the reason.
    """
    import torch
    import torch.distributed as dist

    time.sleep(WATCHED_S)
    dist.barrier()
    rank, began_s, took_s = dist.get_rank(), time.monotonic(), 0.0

    def help_out() -> None:
        nonlocal took_s
        while not said:
            time.sleep(0.005)
        took_s = time.monotonic() - began_s
        dist.send(torch.zeros(1), 3)

    helper = threading.Thread(target=help_out)
    if rank == 0:
        helper.start()
    if rank in (0, 3):
        dist.recv(torch.zeros(1), 3 - rank)
        if rank == 3:
            dist.send(torch.zeros(1), 0)
        else:
            helper.join()
    else:
        dist.recv(torch.zeros(1), 0 if rank == 1 else 3)
    for other in (1,) if rank == 0 else (2,) if rank == 3 else ():
        dist.send(torch.zeros(1), other)
    return took_s


def run_rank(rank: int, runs: int, hangs: int, directory: str) -> None:
    """Records all runs; rank 0 prints the reports about each run, and the time until a report."""
    import torch.distributed as dist

    import ringsim

    dist.init_process_group(
        "gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=RANKS
    )
    for number in range(runs + hangs):
        took_s = 0.0
        if rank == number % RANKS and number % 2 and number < runs:
            time.sleep(LATE_S)
        with ringsim.trace(f"{directory}/run.ringtrace") as recording:
            watch = recording._hosts
            assert watch is not None
            dist.barrier()
            if number < runs:
                run_right(number)
            else:
                took_s = run_wrong(watch.said)
        dist.barrier()
        if rank == 0:
            print(json.dumps([number < runs, watch.said, took_s]), flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Runs both programs, and returns whether a correct run caused a report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=100, help="the number of correct runs (default: 100)"
    )
    parser.add_argument(
        "--hangs", type=int, default=10, help="the number of runs that hang (default: 10)"
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        help="the number of processes that compute in the background (default: 0)",
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.runs, options.hangs, options.directory)
        return 0
    print(where())
    with tempfile.TemporaryDirectory() as directory, hosts(5) as prefixes, busy(options.busy):
        again = [
            sys.executable,
            __file__,
            "--runs",
            str(options.runs),
            "--hangs",
            str(options.hangs),
            "--directory",
            directory,
        ]
        ranks = []
        for rank in range(RANKS):
            host = rank // 2
            os.makedirs(f"{directory}/{host}", exist_ok=True)
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": "cable",
                "OMP_NUM_THREADS": "1",
                "RINGSIM_PARTS": f"{directory}/{host}",
            }
            words = [*prefixes[host], *again, "--rank", str(rank)]
            ranks.append(
                subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            )
        said = [rank.communicate()[0] for rank in ranks]
    rows = [json.loads(line) for line in said[0].splitlines()]
    alarms = [row[1] for row in rows if row[0] and row[1]]
    took_s = [row[2] for row in rows if not row[0]]
    print(
        f"correct runs: {sum(row[0] for row in rows)}, with reports about {len(alarms)}: "
        f"{alarms[:3]}"
    )
    print(
        f"runs that hang: {len(took_s)}, reported after {statistics.median(took_s):.2f} s "
        f"(median), {max(took_s):.2f} s (maximum)"
    )
    return 1 if alarms or len(rows) < options.runs + options.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
