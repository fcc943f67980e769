"""Measures the cost of recording an operation (post, wait, done, source line).

The script also measures the cost of the checks, and the cost of other recorders. Run ``python
benchmarks/recording_cost.py`` (which takes about a minute), or add ``--quick``. With
``--deepspeed``, the script also measures DeepSpeed's logger. The cost is the CPU time of the
calling thread on torch's fake backend, which sends nothing. Each method runs in its own process,
and the methods alternate, so a busy machine slows down all of them. Then two Gloo ranks play
ping-pong, with recording alternately on and off.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from turns import difference, install_deepspeed, measure, serve

GOAL_NS = 1500.0
PING_BYTES = 8
# Operations per turn. DeepSpeed's logger becomes slower with every event, so its turns are short.
OPERATIONS = {"torch.profiler": 300, "DeepSpeed, logger on": 100, "DeepSpeed, logger off": 1000}
DEEPSPEED = ("DeepSpeed, logger off", "DeepSpeed, logger on")
CHECK_GOAL_NS = 3000.0  # the additional cost of the checks
METHODS = (
    *("bare", "bare again", "bare, send", "ringsim off", "ringsim on", "ringsim on, send"),
    *("ringsim checking", "ringsim checking, send", "torch.profiler"),
)


@contextmanager
def prepare(method: str) -> Iterator[Callable[[int], float]]:
    """Prepares one method in this process.

    Returns a function that runs n operations and returns the CPU time per operation in ns.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.zeros(2)
    isend, send = dist.isend, dist.send

    def run(count: int) -> float:
        start_ns = time.thread_time_ns()
        for _ in range(count):
            isend(tensor, 1).wait()
        return (time.thread_time_ns() - start_ns) / count

    def run_send(count: int) -> float:
        start_ns = time.thread_time_ns()
        for _ in range(count):
            send(tensor, 1)
        return (time.thread_time_ns() - start_ns) / count

    def run_profiled(count: int) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return run(count)

    with ExitStack() as stack:
        if method.startswith("ringsim"):
            from ringsim.comm.torch_hooks import install, uninstall
            from ringsim.traces.recorder import Recorder

            recorder = Recorder(
                stack.enter_context(tempfile.TemporaryDirectory()), rank=0, world_size=2
            )
            install(recorder, check="basic" if method.startswith("ringsim checking") else "off")
            stack.callback(recorder.close)
            if method == "ringsim off":
                run(100)
                uninstall(recorder)
            else:
                stack.callback(uninstall, recorder)
        elif method in DEEPSPEED:
            import deepspeed.comm

            deepspeed.comm.init_distributed(
                dist_backend="fake", verbose=False, dist_init_required=False
            )
            deepspeed.comm.configure(enabled=method.endswith("on"), prof_all=True, verbose=False)
            isend = deepspeed.comm.isend
        yield (
            run_profiled
            if method == "torch.profiler"
            else run_send
            if method.endswith("send")
            else run
        )


def ping_pong(rank: int, directory: str, rounds: int, results: Any) -> None:
    """Runs one of two Gloo ranks, alternately with and without recording.

    Rank 0 returns half a round trip and the CPU time of one operation, both in us.
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
    tensor = torch.zeros(PING_BYTES, dtype=torch.uint8)
    other, count = 1 - rank, 300
    times: dict[str, list[tuple[float, float]]] = {
        "off": [],
        "ringsim on": [],
        "torch.profiler": [],
    }
    order = random.Random(0)  # the same on both ranks
    for number in range(rounds + 1):
        for mode in order.sample(list(times), len(times)):
            with ExitStack() as stack:
                if mode == "ringsim on":
                    install(recorder)
                    stack.callback(uninstall, recorder)
                elif mode == "torch.profiler":
                    stack.enter_context(
                        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                    )
                start, start_cpu = time.perf_counter(), time.thread_time()
                for _ in range(count):
                    for sender in (0, 1):
                        if sender == rank:
                            dist.send(tensor, other)
                        else:
                            dist.recv(tensor, other)
                wall, cpu = time.perf_counter() - start, time.thread_time() - start_cpu
            if number:  # the first one warms up
                times[mode].append((wall / count / 2 * 1e6, cpu / count / 2 * 1e6))
    dist.destroy_process_group()
    recorder.close()
    if rank == 0:
        results.put(times)


def play_ping_pong(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Starts both ranks, and returns the times that rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    os.environ["KINETO_LOG_LEVEL"] = "99"  # otherwise the profiler announces every start and stop
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=ping_pong, args=(rank, directory, rounds, results))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        times: dict[str, list[tuple[float, float]]] = results.get()
        for process in ranks:
            process.join()
    return times


def main() -> None:
    """Prints a table, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run only few rounds")
    parser.add_argument(
        "--deepspeed",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="also measure DeepSpeed, in PYTHON or in a new environment",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(prepare(options.serve))
        return
    from paired import against_itself, ratio_interval, where

    rounds = 8 if options.quick else 60
    interpreters = dict.fromkeys(METHODS, sys.executable)
    with tempfile.TemporaryDirectory() as directory:
        if options.deepspeed is not None:
            interpreters |= dict.fromkeys(
                DEEPSPEED, options.deepspeed or install_deepspeed(directory)
            )
        times = measure(__file__, interpreters, rounds, OPERATIONS)
    print(where())
    print(f"{'':24}{'CPU/operation':>16}{'beyond bare, us (95 %)':>30}{'times bare (95 %)':>26}")
    for method, measured in times.items():
        baseline = times[
            "bare, send"
            if method.endswith("send")
            else DEEPSPEED[0]
            if method == DEEPSPEED[1]
            else "bare"
        ]
        beyond, low, high = (value / 1e3 for value in difference(measured, baseline))
        ratio, ratio_low, ratio_high = ratio_interval(measured, baseline)
        print(
            f"{method:24}{statistics.median(measured) / 1e3:13.2f} us{beyond:12.2f} ({low:.2f} "
            f".. {high:.2f})"
            f"{ratio:14.2f} ({ratio_low:.2f} .. {ratio_high:.2f})"
        )
    print(against_itself(times["bare"]))
    cost = difference(times["ringsim on"], times["bare"])[0]
    print(
        f"recording takes {cost / 1e3:.2f} us per operation; the goal of {GOAL_NS / 1e3:.1f} us "
        f"was {'met' if cost <= GOAL_NS else 'missed'}"
    )
    checks = difference(times["ringsim checking"], times["ringsim on"])[0]
    print(
        f"the checks, which are on by default, take another {checks / 1e3:.2f} us; the goal of "
        f"{CHECK_GOAL_NS / 1e3:.1f} us was "
        f"{'met' if checks <= CHECK_GOAL_NS else 'missed'}"
    )
    if options.deepspeed is not None:
        first, last = times[DEEPSPEED[1]][0], times[DEEPSPEED[1]][-1]
        print(
            f"DeepSpeed's logger takes {first / 1e3:.0f} us at first, and {last / 1e3:.0f} us "
            f"after {rounds * OPERATIONS[DEEPSPEED[1]]} operations"
        )

    pings = play_ping_pong(rounds)
    print(f"ping-pong of {PING_BYTES} bytes on Gloo, in turns:")
    for mode, pairs in pings.items():
        for what, index in (("half a round trip", 0), ("CPU of an operation", 1)):
            values, baseline = (
                [pair[index] for pair in pairs],
                [pair[index] for pair in pings["off"]],
            )
            ratio, low, high = ratio_interval(values, baseline)
            print(
                f"  {mode:16}{what:22}{statistics.median(values):7.1f} us, {ratio:.3f} "
                f"({low:.3f} .. {high:.3f}) times off"
            )
    print(against_itself([wall for wall, _ in pings["off"]]))


if __name__ == "__main__":
    main()
