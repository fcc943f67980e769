"""Measures the cost of checking the arguments of a message before sending it.

Gloo ranks play ping-pong, with and without the checks. Run ``python benchmarks/precheck_cost.py``
(which takes about a minute), or add ``--quick``. Each way has its own two ranks, and the ways
alternate, so a busy machine slows down all of them. The script prints the CPU time of one rank's
thread, and half a round trip.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from paired import against_itself, ratio_interval, where
from turns import difference

GOAL_US = 3.0
PING_BYTES = 8
WAYS = ("bare", "bare again", "recorded, unchecked", "recorded, checked")
ROUND_TRIPS = 300  # per turn


def play(way: str, rank: int, directory: str, channel: Connection) -> None:
    """Runs one of the two ranks.

    At every word from the channel, the rank plays a turn. It answers with the CPU time of an
    operation, and the time of half a round trip, in us.
    """
    import torch
    import torch.distributed as dist

    from ringsim.comm.torch_hooks import install, uninstall
    from ringsim.traces.recorder import Recorder

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2
    )
    recorder = Recorder(directory, rank, 2)
    if way.startswith("recorded"):
        install(recorder, check="off" if way.endswith("unchecked") else "basic")
    tensor, other = torch.zeros(PING_BYTES, dtype=torch.uint8), 1 - rank
    while channel.recv():
        start, start_cpu = time.perf_counter(), time.thread_time()
        for _ in range(ROUND_TRIPS):
            for sender in (0, 1):
                if sender == rank:
                    dist.send(tensor, other)
                else:
                    dist.recv(tensor, other)
        wall, cpu = time.perf_counter() - start, time.thread_time() - start_cpu
        channel.send((cpu / ROUND_TRIPS / 2 * 1e6, wall / ROUND_TRIPS / 2 * 1e6))
    if way.startswith("recorded"):
        uninstall(recorder)
    dist.destroy_process_group()


def measure(turns: int) -> dict[str, list[tuple[float, float]]]:
    """Starts the ranks of all ways, and has them take turns.

    Returns the measurements of rank 0 for each way.
    """
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        channels: dict[str, list[Any]] = {way: [] for way in WAYS}
        ranks = []
        for number, way in enumerate(WAYS):
            os.mkdir(f"{directory}/{number}")
            for rank in range(2):
                mine, theirs = context.Pipe()
                channels[way].append(mine)
                ranks.append(
                    context.Process(target=play, args=(way, rank, f"{directory}/{number}", theirs))
                )
        for process in ranks:
            process.start()
        for turn in range(turns + 1):
            for way in random.sample(WAYS, len(WAYS)):
                for channel in channels[way]:
                    channel.send(True)
                answers = [channel.recv() for channel in channels[way]]
                if turn:  # the first one warms up
                    times[way].append(answers[0])
        for way in WAYS:
            for channel in channels[way]:
                channel.send(False)
        for process in ranks:
            process.join()
    return times


def main() -> None:
    """Prints a table, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run only few turns")
    times = measure(8 if parser.parse_args().quick else 100)
    print(where())
    for index, what in enumerate(("CPU of an operation", "half a round trip")):
        columns = {way: [pair[index] for pair in pairs] for way, pairs in times.items()}
        for way, values in columns.items():
            ratio, low, high = ratio_interval(values, columns["bare"])
            print(
                f"{what:20} {way:20} {statistics.median(values):8.2f} us, {ratio:.3f} ({low:.3f} "
                f".. {high:.3f}) times bare"
            )
        beyond, low, high = difference(columns["recorded, checked"], columns["recorded, unchecked"])
        verdict = "met" if beyond <= GOAL_US else "missed"
        print(
            f"{what:20} the checks add {beyond:.2f} us ({low:.2f} .. {high:.2f}); the goal of "
            f"{GOAL_US:g} us was {verdict}"
        )
        print(against_itself(columns["bare"]))


if __name__ == "__main__":
    main()
