"""Measures the cost of starting ranks.

The script compares ringsim with torchrun, with ``torch.multiprocessing.spawn`` and with a warm fork
server. Run ``python benchmarks/launch.py`` (which takes a few minutes), or add ``--quick``. Every
method starts N fresh ranks, connects them in one Gloo group, passes a barrier, and ends the ranks.
The methods alternate, so a busy machine slows down all of them. ringsim also builds the ring and
records. The "parked" call starts half a second after the previous one, so fresh ranks are ready;
the "back to back" call starts immediately.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paired import against_itself, ratio_interval, where

import ringsim

GOALS_MS = {4: 20.0, 8: 40.0}
PAUSE_S = 0.5


def worker() -> None:
    """Passes a barrier; the worker of every rank under ringsim."""
    import torch.distributed as dist

    dist.barrier()


def free_port() -> int:
    """Returns a port that is currently free on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def bare_rank(rank: int, world_size: int, port: int) -> None:
    """Joins a group, passes a barrier and ends, like every rank of the other launchers."""
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()


def with_ringsim(world_size: int) -> None:
    """Starts the ranks with a call of ``ringsim.trace``."""
    ringsim.trace(worker, world_size=world_size)


def with_forkserver(world_size: int) -> None:
    """Starts the ranks with Python's own fork server, which has preloaded torch."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    ranks = [
        context.Process(target=bare_rank, args=(rank, world_size, port))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode != 0:
            raise RuntimeError("a rank failed")


def with_spawn(world_size: int) -> None:
    """Starts the ranks with ``torch.multiprocessing.spawn``, as torch's tutorials do."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(bare_rank, args=(world_size, free_port()), nprocs=world_size)


def with_torchrun(world_size: int) -> None:
    """Starts the ranks with torchrun and a script that does the same."""
    script = Path(tempfile.gettempdir(), f"ringsim-benchmark-{os.getpid()}.py")
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={world_size}",
        f"--master-port={free_port()}",
        str(script),
    ]
    try:
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        )
    finally:
        script.unlink()


def timed_ms(call: Callable[[int], None], world_size: int) -> float:
    """Runs a method once, and returns the time that it took."""
    start = time.perf_counter()
    call(world_size)
    return (time.perf_counter() - start) * 1e3


def compare(world_size: int, repeats: int, slow_repeats: int) -> None:
    """Prints the table of all methods for one number of ranks."""
    with_ringsim(world_size)
    with_forkserver(world_size)
    times: dict[str, list[float]] = {
        name: []
        for name in (
            "ringsim, parked",
            "ringsim, back to back",
            "warm fork server",
            "spawn",
            "torchrun",
        )
    }
    for index in range(repeats):
        time.sleep(PAUSE_S)
        times["ringsim, parked"].append(timed_ms(with_ringsim, world_size))
        times["ringsim, back to back"].append(timed_ms(with_ringsim, world_size))
        time.sleep(PAUSE_S)  # so that ranks that are being parked do not slow down the next method
        times["warm fork server"].append(timed_ms(with_forkserver, world_size))
        if index < slow_repeats:
            times["spawn"].append(timed_ms(with_spawn, world_size))
            times["torchrun"].append(timed_ms(with_torchrun, world_size))
    print(
        f"\n{world_size} ranks (goal for parked ranks: "
        f"{GOALS_MS.get(world_size, float('nan')):.0f} ms)"
    )
    baseline = times["warm fork server"]
    for name, measured in times.items():
        ratio, low, high = ratio_interval(measured, baseline)
        print(
            f"  {name:22} median {statistics.median(measured):8.1f} ms  min "
            f"{min(measured):8.1f}  n {len(measured):3}"
            f"  {ratio:.2f} times a warm fork server ({low:.2f} .. {high:.2f})"
        )
    print(f"  {against_itself(baseline)}")


FIRST = """
import time
import ringsim
def worker():
    import torch.distributed as dist
    dist.barrier()
start = time.perf_counter()
ringsim.trace(worker, world_size=4)
print((time.perf_counter() - start) * 1e3)
"""


def first_call(repeats: int) -> None:
    """Prints the time of the first call in a fresh interpreter, which has not loaded torch."""
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", FIRST], check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(repeats)
    ]
    print(
        f"\nfirst call with 4 ranks: median {statistics.median(times):.0f} ms, min "
        f"{min(times):.0f} ms, n {repeats} (goal: 1500 ms)"
    )


def share_bytes() -> int:
    """Returns this rank's proportional share of memory (PSS) once all ranks have started."""
    import torch.distributed as dist

    dist.barrier()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            share = int(line.split()[1]) * 1024
    dist.barrier()
    return share


def many_ranks(world_size: int, repeats: int) -> None:
    """Prints the time and the memory that a run of many ranks takes."""
    times, shares = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        trace = ringsim.trace(share_bytes, world_size=world_size)
        times.append(time.perf_counter() - start)
        shares.append(sum(trace.results) / 1e6)
    print(
        f"\nstarting {world_size} ranks, building the ring, tracing and joining (goals: 2 s, "
        f"700 MB), n {repeats}"
    )
    print(f"  median {statistics.median(times):.2f} s, min {min(times):.2f} s")
    print(f"  sum of PSS: median {statistics.median(shares):.0f} MB")


def main() -> None:
    """Measures and prints all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run only few repeats")
    quick = parser.parse_args().quick
    print(where())
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
    first_call(2 if quick else 7)
    for world_size in GOALS_MS:
        compare(world_size, 4 if quick else 30, 1 if quick else 5)
    many_ranks(64, 1 if quick else 5)
    print(where())


if __name__ == "__main__":
    main()
