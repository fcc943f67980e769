"""Measures the time that many ranks take to enter and leave a recorded block.

    python benchmarks/recorded_block.py [--ranks 64] [--runs 10]

The ranks are forked on one machine, and connect over loopback. The result is the time from a
barrier before an empty block to a barrier after it, minus the time between two barriers without a
block. It includes writing the file on rank 0.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from paired import where

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))
from rank_server import RankServer, free_port, results


def be_rank(rank: int, size: int, runs: int, port: int, directory: str) -> list[list[float]]:
    """Returns the times of each run without a block and with a block."""
    import torch.distributed as dist

    import ringsim

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    took_s: list[list[float]] = []
    for _ in range(runs + 1):
        dist.barrier()
        times = [time.perf_counter()]
        dist.barrier()
        times.append(time.perf_counter())
        with ringsim.trace(f"{directory}/run.ringtrace"):
            pass
        dist.barrier()
        times.append(time.perf_counter())
        took_s.append([after - before for before, after in itertools.pairwise(times)])
    return took_s[1:]


def main() -> int:
    """Prints the medians that rank 0 measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    sys.modules["recorded_block"] = sys.modules["__main__"]  # for the ranks to find the function
    be_rank.__module__ = "recorded_block"
    print(where())
    with RankServer() as server, tempfile.TemporaryDirectory() as directory:
        port = free_port()
        asked = [
            (rank, options.ranks, options.runs, port, directory) for rank in range(options.ranks)
        ]
        took_s = results(server.run(be_rank, asked, limit_s=280))[0]
    without, with_block = (statistics.median(column) for column in zip(*took_s, strict=True))
    most = max(row[1] for row in took_s)
    print(
        f"{options.ranks} ranks: {with_block - without:.2f} s to enter and leave a block (median "
        f"of {options.runs} runs; {most:.2f} s at most)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
