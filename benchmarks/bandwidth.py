"""Compares ``ringsim.bandwidth`` with a plain ``torch.distributed`` loop.

Both measure half a round trip, at sizes from 4 KiB. Run ``python benchmarks/bandwidth.py`` (which
takes a few minutes), or add ``--quick``. Two Gloo ranks in a ring measure the same edge in three
ways: with a plain, unrecorded loop around ``send`` and ``recv``, with this loop again, and with
``ringsim.bandwidth``, which takes its times from a recording. Each round runs them in a random
order. The result is the median of the ratios in all rounds. It may differ from 1 by 5 %, or by the
difference between the two plain loops if that is larger.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import statistics
import time
from typing import Any

from paired import NOISE_LIMIT, where

GOAL = 0.05
SIZES = tuple(2**power for power in range(12, 29, 2))
METHODS = ("plain", "plain again", "ringsim")


def plain(rank: int, size_bytes: int, count: int) -> float:
    """Returns half a round trip in us, the median of ``count``, as a plain program measures it."""
    import torch
    import torch.distributed as dist

    from ringsim import current_ring

    group = current_ring().succ_group if rank == 0 else current_ring().pred_group
    outgoing, incoming = (torch.empty(size_bytes, dtype=torch.uint8).fill_(0) for _ in range(2))
    times = []
    for number in range(count + 3):
        start = time.perf_counter()
        if rank == 0:
            dist.send(outgoing, 1, group=group)
            dist.recv(incoming, 1, group=group)
        else:
            dist.recv(incoming, 0, group=group)
            dist.send(outgoing, 0, group=group)
        if number >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times) / 2 * 1e6


def play(rank: int, port: int, rounds: int, sizes: list[int], results: Any) -> None:
    """Runs one of the two ranks."""
    import torch
    import torch.distributed as dist

    import ringsim

    torch.set_num_threads(1)
    ringsim.initialize_distributed("127.0.0.1", port, 2, rank, rank, "cpu")
    times: dict[int, dict[str, list[float]]] = {
        size: {method: [] for method in METHODS} for size in sizes
    }
    order = random.Random(0)  # the same on both ranks
    for number in range(rounds + 1):
        for size in sizes:
            count = max(5, min(200, 2**26 // size))
            for method in order.sample(METHODS, len(METHODS)):
                dist.barrier()
                if method == "ringsim":
                    table = ringsim.bandwidth(
                        sizes=[size],
                        edge=(0, 1),
                        ceilings=False,
                        limit_s=max(0.1, count * size / 1e9),
                    )
                    found = float(table.columns["latency_us"][0])
                else:
                    found = plain(rank, size, count)
                if number:  # the first one warms up
                    times[size][method].append(found)
    ringsim.destroy_distributed()
    if rank == 0:
        results.put(times)


def main() -> None:
    """Prints a table, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run few rounds, with at most 4 MiB")
    options = parser.parse_args()
    rounds, sizes = (
        (6, [size for size in SIZES if size <= 2**22]) if options.quick else (30, list(SIZES))
    )
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=play, args=(rank, port, rounds, sizes, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    times: dict[int, dict[str, list[float]]] = results.get()
    for process in ranks:
        process.join()

    print(where())
    print(
        f"{'size':>12}{'plain':>12}{'ringsim':>12}{'ringsim/plain (95 %)':>28}"
        f"{'plain again/plain':>20}{'spread':>9}  verdict, n={rounds}"
    )
    agrees, worst = True, 0.0
    for size, by_method in times.items():
        ratios = [
            ours / peer for ours, peer in zip(by_method["ringsim"], by_method["plain"], strict=True)
        ]
        selves = [
            again / peer
            for again, peer in zip(by_method["plain again"], by_method["plain"], strict=True)
        ]
        draws = sorted(statistics.median(random.choices(ratios, k=rounds)) for _ in range(2000))
        ratio, spread = statistics.median(ratios), statistics.median(abs(one - 1) for one in selves)
        fine = abs(ratio - 1) <= max(GOAL, spread)
        agrees, worst = agrees and fine, max(worst, abs(statistics.median(selves) - 1))
        print(
            f"{size:12,}{statistics.median(by_method['plain']):9.1f} "
            f"us{statistics.median(by_method['ringsim']):9.1f} us"
            f"{ratio:12.3f} ({draws[50]:.3f} .. "
            f"{draws[1949]:.3f}){statistics.median(selves):20.3f}{spread:9.1%}"
            f"  {'agrees' if fine else 'DISAGREES'}"
        )
    verdict = (
        "fine"
        if worst <= NOISE_LIMIT
        else f"above {NOISE_LIMIT:.0%}: INCONCLUSIVE, the machine is too noisy"
    )
    print(f"plain loop compared with itself: off by {worst:.1%} at most ({verdict})")
    print(
        f"the goal, within {GOAL:.0%} or the spread of the plain loop at every size, was "
        f"{'met' if agrees else 'missed'}"
    )


if __name__ == "__main__":
    main()
