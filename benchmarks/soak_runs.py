"""Looks for growth in thousands of launches, and in one run of millions of messages.

    python benchmarks/soak_runs.py [--launches 10000] [--messages 10000000]

After each tenth, the script prints the resources of the process (memory, file descriptors, threads
and temporary files), and the time per launch or per message. It exits with 1 if the last values are
clearly larger than the first ones. The first tenth does not count, because it fills caches.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paired import where

import ringsim
from ringsim.launch.ranks import get_launcher

# allowed from the second tenth to the last: more than the noise of an allocator, and far less than
# a leak of a few kB per launch
MORE_MEMORY_MB = 32.0
SLOWER = 1.5  # allowed for the median time between the same tenths, because other programs also run
RANKS = 2


def held(pid: int | str = "self") -> dict[str, float]:
    """Returns the resident memory of a process in MB, and its file descriptors and threads."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "memory_mb": float(status["VmRSS"].split()[0]) / 1024,
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(status["Threads"]),
    }


def progress(what: str, tenth: int, row: dict[str, float]) -> str:
    """Returns a line about the progress.

    For example, "10,000 launches, tenth 3 of 10: 31250.0 us each, 140 MB".
    """
    return f"{what}, tenth {tenth} of 10: {row['time_us']:.1f} us each, {row['memory_mb']:.0f} MB"


def pass_token() -> None:
    """Sends one message each way; the worker of each launch."""
    import torch
    import torch.distributed as dist

    rank, token = dist.get_rank(), torch.zeros(1)
    for sender in (0, 1):
        if sender == rank:
            dist.send(token, 1 - rank)
        else:
            dist.recv(token, 1 - rank)


def send_many(count: int) -> list[dict[str, float]]:
    """Sends ``count`` messages from rank 0 to rank 1.

    Returns the time per message and the resources of the rank after each tenth. Both ranks print
    the progress.
    """
    import torch
    import torch.distributed as dist

    rank, token, found = dist.get_rank(), torch.zeros(1), []
    for tenth in range(1, 11):
        start = time.perf_counter()
        for _ in range(count // 10):
            if rank == 0:
                dist.send(token, 1)
            else:
                dist.recv(token, 0)
        found.append({"time_us": (time.perf_counter() - start) / (count // 10) * 1e6, **held()})
        print(progress(f"{count:,} messages", tenth, found[-1]), flush=True)
    return found


def soak_launches(count: int) -> list[dict[str, float]]:
    """Starts ranks ``count`` times.

    Returns the resources of this process and its fork server after each tenth.
    """
    found = []
    with tempfile.TemporaryDirectory() as directory:
        tempfile.tempdir = directory
        try:
            for tenth in range(1, 11):
                times = []
                for _ in range(max(count // 10, 1)):
                    start = time.perf_counter()
                    ringsim.trace(pass_token, world_size=RANKS)
                    times.append(time.perf_counter() - start)
                gc.collect()
                server = get_launcher()._server
                child = held(server._process.pid) if server is not None else {}
                found.append(
                    {
                        "time_us": statistics.median(times) * 1e6,
                        **held(),
                        **{f"server_{name}": value for name, value in child.items()},
                    }
                    | {"files": float(len(os.listdir(directory)))}
                )
                print(progress(f"{count:,} launches", tenth, found[-1]), flush=True)
        finally:
            get_launcher().close()
            tempfile.tempdir = None
    return found


def show(what: str, found: Sequence[dict[str, float]]) -> list[str]:
    """Prints a table with a line per tenth, and returns what grew after the second tenth."""
    print(f"\n{what}")
    print("  tenth " + " ".join(f"{name:>18}" for name in found[0]))
    for number, row in enumerate(found, 1):
        print(f"  {number:5} " + " ".join(f"{value:18.1f}" for value in row.values()))
    first, last, grown = found[1], found[-1], []
    for name in first:
        limit = (
            first[name] * SLOWER
            if name == "time_us"
            else first[name] + (MORE_MEMORY_MB if name.endswith("memory_mb") else 2)
        )
        if last[name] > limit:
            grown.append(f"{what}: {name} grew from {first[name]:.1f} to {last[name]:.1f}")
    return grown


def main() -> int:
    """Runs both searches, prints the tables, and returns whether anything grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--launches", type=int, default=10_000, help="the number of launches (default: 10,000)"
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=10_000_000,
        help="the number of messages in one run (default: ten million)",
    )
    options = parser.parse_args()
    print(where())
    grown = show(f"{options.launches:,} launches of {RANKS} ranks", soak_launches(options.launches))
    trace = ringsim.trace(send_many, world_size=RANKS, args=(options.messages,))
    for rank, rows in enumerate(trace.results):
        grown += show(f"{options.messages:,} messages, rank {rank}", rows)
    print(f"\n{len(trace.events):,} events recorded, complete: {trace.metadata['complete']}")
    print(*(f"  note: {note}" for note in trace.metadata["notes"]), sep="\n")
    get_launcher().close()
    print(*(grown or ["\nnothing grew"]), sep="\n")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
