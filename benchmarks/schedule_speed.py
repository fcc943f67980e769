"""Measures the time to simulate a schedule.

The script simulates schedules at full scale, with both evaluators, with SimPy, and for many costs.

    python benchmarks/schedule_speed.py [repeats]

Each time includes all work of the call. The script prints the median and the minimum of the wall
time, the median of the CPU time, which depends less on other load, and the number of computations
per second. A step with p ranks and m microbatches has 2 p m computations. If SimPy is not
installed, the script omits its line.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringsim import Link, simulate_schedule
from ringsim.provenance import machine, versions
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.simulator.columns import columns_of, make_prices
from ringsim.simulator.levels import find_levels, find_wave

RANKS, MICROBATCHES = 1024, 8192
SIMPY_RANKS = 64  # SimPy takes minutes for more ranks
COSTS = Costs(latency=0.1)
BUSY = {"costs": Costs(), "link": Link(alpha_s=0.05, beta_s_per_byte=1e-3), "size_bytes": 50}


def report(name: str, call: Callable[[], Any], computations: int, repeats: int) -> None:
    """Measures a call, and prints a line with the results."""
    walls, times = [], []
    for _ in range(repeats):
        wall, start = time.perf_counter(), time.process_time()
        call()
        walls.append((time.perf_counter() - wall) * 1e3)
        times.append((time.process_time() - start) * 1e3)
    used = statistics.median(times)
    rate = computations / used / 1e3
    print(
        f"  {name:<48} {statistics.median(walls):>9.1f} ms (min {min(walls):>8.1f}, processor "
        f"{used:>8.1f}) {rate:>8.2f} M/s"
    )


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported."""
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def simpy_step(ranks: int, microbatches: int) -> float:
    """Runs 1F1B in SimPy, with a process per rank and an event per message.

    Returns the makespan with buffered sends.
    """
    import simpy

    env = simpy.Environment()
    schedule = make_schedule("1f1b", ranks, microbatches)
    arrived = {
        (stage, kind, k): env.event()
        for stage in range(ranks)
        for kind in "FB"
        for k in range(microbatches)
    }

    def rank_process(rank: int) -> Iterator[Any]:
        for stage, kind, microbatch in schedule.actions[rank]:
            if (rank > 0) if kind == "F" else (rank < ranks - 1):
                yield arrived[stage, kind, microbatch]
            yield env.timeout(1 if kind == "F" else 2)
            target = stage + (1 if kind == "F" else -1)
            if 0 <= target < ranks:
                event = arrived[target, kind, microbatch]
                env.timeout(0.1).callbacks.append(lambda _, event=event: event.succeed())

    for rank in range(ranks):
        env.process(rank_process(rank))
    env.run()
    return float(env.now)


def full_scale(repeats: int) -> None:
    """Measures 1,024 ranks with 8,192 microbatches."""
    print(f"{RANKS:,} ranks, {MICROBATCHES:,} microbatches: simulate_schedule(name)")
    computations = 2 * RANKS * MICROBATCHES
    given: dict[str, Any] = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    for name in ("1f1b", "gpipe"):
        for semantics in ("buffered", "rendezvous"):
            settings = {**given, "semantics": semantics}
            report(
                f"{name}, {semantics}",
                lambda s=settings, n=name: simulate_schedule(n, COSTS, **s),
                computations,
                repeats,
            )
            label = f"{name}, {semantics}, with busy links"
            report(
                label,
                lambda s=settings, n=name: simulate_schedule(n, **BUSY, **s),
                computations,
                repeats,
            )
    run = simulate_schedule("1f1b", **BUSY, **given)
    for name, part in (
        ("operations", "the columns of all computations"),
        ("ends", "the end of each computation"),
        ("critical_path", "the critical path"),
    ):
        report(f"... then {part}, once", lambda name=name: getattr(run, name), computations, 1)
    report("... then the sensitivity to 8 changes, once", run.sensitivity, 9 * computations, 1)
    report("... then the slack of each computation, once", lambda: run.slack, computations, 1)


def ways(repeats: int) -> None:
    """Measures both evaluators for 1F1B, and SimPy."""
    print("1F1B, buffered, without the time to read the schedule (except for SimPy)")
    for ranks, microbatches in ((8, 32), (64, 256), (256, 1024)):
        computations = 2 * ranks * microbatches
        print(f" {ranks} ranks, {microbatches} microbatches")
        schedule, prices = (
            make_schedule("1f1b", ranks, microbatches),
            make_prices(range(ranks), COSTS, None, [0] * (ranks - 1)),
        )
        levels, wave = find_levels(columns_of(schedule)), find_wave(schedule)
        assert levels is not None
        assert wave is not None
        report(
            "numpy, level by level, for any schedule",
            lambda s=levels, p=prices: s.time(p, rendezvous=False),
            computations,
            repeats,
        )
        report(
            "numpy, with the rule of 1F1B",
            lambda w=wave, p=prices: w.last_ends(p, rendezvous=False),
            computations,
            repeats,
        )
        if ranks <= SIMPY_RANKS and is_installed("simpy"):
            expected = wave.last_ends(prices, rendezvous=False).max()
            assert np.isclose(simpy_step(ranks, microbatches), expected)
            report(
                "SimPy",
                lambda p=ranks, m=microbatches: simpy_step(p, m),
                computations,
                max(1, repeats // 4),
            )


def other(repeats: int) -> None:
    """Measures schedules that are lists of actions, and many costs in one call."""
    print("lists of actions: simulate_schedule(schedule)")
    for name in ("interleaved_1f1b", "zb_v"):
        schedule = make_schedule(name, 64, 256)
        computations = sum(map(len, schedule.actions))
        report(
            f"{name}, 64 ranks, 256 microbatches",
            lambda s=schedule: simulate_schedule(s, COSTS),
            computations,
            repeats,
        )
        report("... of which reading it", lambda s=schedule: columns_of(s), computations, repeats)
    print('many costs in one call: simulate_schedule("1f1b", costs)')
    for ranks, microbatches, variants in ((8, 32, 1000), (64, 256, 64)):
        chance = np.random.default_rng(0)
        costs = [
            Costs(*chance.uniform(1, 2, 3), latency=float(chance.uniform(0, 1)))
            for _ in range(variants)
        ]
        label = f"{ranks} ranks, {microbatches} microbatches, {variants} costs"
        given = {"num_ranks": ranks, "num_microbatches": microbatches}
        report(
            label,
            lambda c=costs, g=given: simulate_schedule("1f1b", c, **g),
            2 * ranks * microbatches * variants,
            repeats,
        )


def main(repeats: int) -> None:
    """Measures and prints all tables."""
    about = machine()
    print(
        f"{about['cpu']}, {about['cores']} cores, numpy {versions()['numpy']}, python "
        f"{versions()['python']}, {repeats} repeats"
    )
    full_scale(repeats)
    ways(repeats)
    other(repeats)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
