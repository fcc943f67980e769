"""Measures the cost of building the ring.

Either each rank builds only its own two pair groups, or every rank calls ``new_group`` for all N
pairs. Run ``python benchmarks/ring_build.py`` (with ``--ranks 64`` or ``--repeats 30``). The script
forks the ranks once, and connects them in one Gloo group on loopback. In every repeat, the ranks
build the ring in each way, in random order, and destroy it. All ranks start at a time that rank 0
announces, because 64 ranks on two cores would leave a barrier one by one. A build ends when the
last rank is done. The script measures the public API twice, to show the noise of the run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from paired import NOISE_LIMIT, ratio_interval, where
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim import ring
from ringsim.comm.bootstrap import listen
from ringsim.ring.groups import (
    PairGroups,
    build_pair_groups,
    default_store,
    destroy_group,
    pairs_of,
)

GOAL = 0.4
HEAD_START_S = 0.002  # per rank, so that all ranks know when to begin
TIMEOUT = timedelta(seconds=120)
OURS, ALL_PAIRS, AGAIN = (
    "own two groups (ringsim)",
    "all N pairs on every rank",
    "all N pairs, again",
)
Build = Callable[[int, int, Store], PairGroups]


def own_groups(rank: int, count: int, store: Store) -> PairGroups:
    """Builds this rank's groups as ``initialize_distributed`` does."""
    return build_pair_groups(rank, range(count), [range(count)], store, "gloo", TIMEOUT)


def all_pairs(rank: int, count: int, _: Store) -> PairGroups:
    """Calls ``new_group`` for every pair, as FlexLLMGen does, and keeps this rank's two groups."""
    pred, succ = pairs_of(rank, range(count)) or ((0, 0), (0, 0))
    groups = {}
    for first in range(count):
        pair = (first, (first + 1) % count)
        groups[pair] = dist.new_group(list(pair), timeout=TIMEOUT)
    return groups[pred], groups[succ]


BUILDS: dict[str, Build] = {OURS: own_groups, ALL_PAIRS: all_pairs, AGAIN: all_pairs}


def held() -> tuple[int, int]:
    """Returns the numbers of file descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def first_message_s(rank: int, count: int, groups: PairGroups) -> float:
    """Sends a number around the ring, and returns the time that this rank measured."""
    start = time.perf_counter()
    came = torch.empty(1)
    sent = dist.isend(torch.ones(1), (rank + 1) % count, group=groups[1])
    dist.recv(came, (rank - 1) % count, group=groups[0])
    sent.wait()
    return time.perf_counter() - start


def wait_for_start(rank: int, count: int) -> float:
    """Sleeps until all ranks begin, and returns this moment on the clock that they share."""
    start = torch.tensor(
        [time.monotonic() + HEAD_START_S * count if rank == 0 else 0.0], dtype=torch.float64
    )
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    return start.item()


def measure(rank: int, count: int, repeats: int, store: Store) -> list[dict[str, float | str]]:
    """Builds the ring in every way, ``repeats`` times, and returns this rank's measurements."""
    order = random.Random(0)  # the same on every rank
    seen: list[dict[str, float | str]] = []
    for repeat in range(-2, repeats):  # the first two warm up
        for name in order.sample(list(BUILDS), len(BUILDS)):
            before = held()
            begin = wait_for_start(rank, count)
            groups = BUILDS[name](rank, count, PrefixStore(f"{repeat}/{name}", store))
            end = time.monotonic()
            dist.barrier()
            after = held()
            message_s = first_message_s(rank, count, groups)
            dist.barrier()
            for group in groups:
                destroy_group(group)
            del groups, group
            if repeat >= 0:
                fds, threads = (now - then for now, then in zip(after, before, strict=True))
                seen.append(
                    {
                        "name": name,
                        "begin": begin,
                        "end": end,
                        "fds": fds,
                        "threads": threads,
                        "message_s": message_s,
                    }
                )
    return seen


def run_rank(
    rank: int, count: int, repeats: int, listener: socket.socket, port: int, path: Path
) -> None:
    """Joins the group of all ranks, and saves this rank's measurements."""
    torch.set_num_threads(1)
    limit_s = TIMEOUT.total_seconds()
    alone = [rank]  # a ring of one rank has no groups; the groups to measure are built below
    own_listener = listener if rank == 0 else None
    ring.initialize(
        "127.0.0.1",
        port,
        count,
        rank,
        rank,
        "cpu",
        timeout_s=limit_s,
        ring_ranks=alone,
        listen_socket=own_listener,
    )
    store = default_store()
    if store is None:
        raise RuntimeError("this torch hides the store of its default group")
    path.write_text(json.dumps(measure(rank, count, repeats, store)))
    ring.destroy_distributed()


def measure_ranks(count: int, repeats: int, directory: Path) -> dict[str, dict[str, list[float]]]:
    """Forks the ranks, and returns their measurements for each way to build.

    They are the times of the slowest rank, and the file descriptors and threads of all ranks.
    """
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    paths = [directory / f"{rank}.json" for rank in range(count)]
    children = []
    # garbage collection in the memory that 64 ranks share with this process would take longer than
    # any build
    gc.freeze()
    for rank in range(count):
        pid = os.fork()  # this process has imported torch and computed nothing
        if pid == 0:
            try:
                run_rank(rank, count, repeats, listener, port, paths[rank])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    listener.close()
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    if any(statuses):
        raise RuntimeError("a rank failed")
    seen = [json.loads(path.read_text()) for path in paths]
    builds: dict[str, dict[str, list[float]]] = {
        name: {"ms": [], "fds": [], "threads": [], "message_ms": []} for name in BUILDS
    }
    for of_all_ranks in zip(*seen, strict=True):
        build = builds[of_all_ranks[0]["name"]]
        build["ms"].append(
            1e3 * (max(each["end"] for each in of_all_ranks) - of_all_ranks[0]["begin"])
        )
        build["fds"] += [each["fds"] for each in of_all_ranks]
        build["threads"] += [each["threads"] for each in of_all_ranks]
        build["message_ms"].append(1e3 * max(each["message_s"] for each in of_all_ranks))
    return builds


def report(count: int, builds: dict[str, dict[str, list[float]]]) -> None:
    """Prints the table for one number of ranks."""
    print(f"\n{count} ranks, times of the slowest rank, {len(builds[OURS]['ms'])} repeats")
    for name, build in builds.items():
        ratio, low, high = ratio_interval(build["ms"], builds[ALL_PAIRS]["ms"])
        print(
            f"  {name:27} median {statistics.median(build['ms']):7.1f} ms  min "
            f"{min(build['ms']):7.1f}"
            f"  ratio {ratio:.2f} ({low:.2f} .. {high:.2f})"
            f"  per rank: {statistics.median(build['fds']):+.0f} descriptors, "
            f"{statistics.median(build['threads']):+.0f} threads"
            f"  first message {statistics.median(build['message_ms']):.1f} ms"
        )
    itself = statistics.median(builds[AGAIN]["ms"]) / statistics.median(builds[ALL_PAIRS]["ms"])
    noise = (
        "fine"
        if abs(itself - 1) <= NOISE_LIMIT
        else f"above {NOISE_LIMIT:.0%}: INCONCLUSIVE, the machine is too noisy"
    )
    print(f"  baseline compared with itself: {itself:.3f} ({noise})")


def main() -> None:
    """Measures and prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    print(where())
    for count in arguments.ranks:
        with tempfile.TemporaryDirectory() as directory:
            report(count, measure_ranks(count, arguments.repeats, Path(directory)))
    print(f"\nThe goal is a ratio of {GOAL} with 64 ranks.\n{where()}")


if __name__ == "__main__":
    main()
