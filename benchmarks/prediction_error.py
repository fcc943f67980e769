"""How far off the predicted step is: constants from 2 ranks and two sizes, frozen; then more ranks, other sizes, schedules and stage times.

Each configuration is measured for some steps on real ranks that sleep (`ringsim.pipeline.rehearse`), and predicted with `ringsim.simulate`.
The statistic is the median step after a warm-up: the first steps of fresh processes load libraries and connect, 1.4 times as long as the
others at worst. Every configuration that was run counts. Replay has all constants from the run itself, and the time that each computation
took in the step itself: what is left is what the model cannot say. A run on a machine that was busy before it began is inconclusive.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from paired import where

import ringsim
from ringsim.pipeline import Action, Costs, make_schedule, rehearse
from ringsim.prediction.calibration import Calibration
from ringsim.prediction.comparison import Errors
from ringsim.traces.events import SPAN
from ringsim.traces.steps import count_steps, find_step, in_step
from ringsim.traces.value import Trace

KIB = 1024
CALIBRATED = (KIB, 2048 * KIB)
SIZES = (KIB, 256 * KIB, 1024 * KIB, 2048 * KIB)
SCHEDULES = ("gpipe", "1f1b", "zb_h1")  # the first two calibrate
# Forward and backward; the first two calibrate, and the second is heavy on communication.
TIMES_S = {"5 and 10 ms": (0.005, 0.010), "1 and 2 ms": (0.001, 0.002), "3 and 6 ms": (0.003, 0.006)}
AHEAD = {0: "blocking", 1: "posted ahead"}  # receives
SMALL_BYTES, SMALL_GOAL, GOAL, REPLAY_GOAL = 256 * KIB, 0.05, 0.10, 0.02
LEAST_IDLE = 0.80


class Configuration(NamedTuple):
    """What is run."""

    ranks: int
    schedule: str
    times: str
    ahead: int
    size_bytes: int


class Found(NamedTuple):
    """Signed errors of the median step, of a prediction and of others."""

    predicted: float
    links_alone: float  # the same where ranks do not share cores
    of_least: float  # the prediction, against the shortest step
    replayed: float
    nominal: float
    no_communication: float


class Measured(Costs):
    """What each computation of one step took."""

    took_s: dict[Action, float]

    def __init__(self, took_s: dict[Action, float]) -> None:
        super().__init__()
        object.__setattr__(self, "took_s", took_s)  # the class is frozen

    def get_duration(self, action: Action) -> float:
        """Returns how long it took."""
        return self.took_s[action]


def do_all(configurations: Sequence[Configuration], microbatches: int, steps: int) -> None:
    """What each rank does: rehearses the configurations one after the other."""
    for configuration in configurations:
        forward, backward = TIMES_S[configuration.times]
        do_steps(configuration, microbatches, steps, Costs(forward, input=backward / 2, weight=backward / 2))


def do_steps(configuration: Configuration, microbatches: int, steps: int, costs: Costs) -> None:
    """Rehearses one configuration."""
    schedule = make_schedule(configuration.schedule, configuration.ranks, microbatches)
    rehearse(schedule, costs, size_bytes=configuration.size_bytes, steps=steps, ahead=configuration.ahead)


def median_step_s(trace: Trace) -> float:
    """Returns how long the median step took."""
    return float(np.median([find_step(trace, step).makespan for step in range(count_steps(trace.events))])) * 1e-9


def find_times(trace: Trace, step: int) -> Measured:
    """Returns what each computation of a step took, from when it began to sleep until it went on."""
    events, actions = trace.events, find_step(trace, step)
    sleeps = np.array([label.startswith("compute ") for label in events.tables.labels])
    asleep = in_step(events, step) & (events.kind == SPAN) & sleeps[events.label]
    took_s: dict[Action, float] = {}
    for rank in actions.ranks:
        mine = np.flatnonzero(asleep & (events.rank == rank))
        own = actions.list_actions(rank)
        took_s.update(zip(own, ((events.done_ns - events.post_ns)[mine] * 1e-9).tolist(), strict=True))
    return Measured(took_s)


def replay_s(trace: Trace, configuration: Configuration, microbatches: int, warmup: int) -> float:
    """Returns how long the median step takes on the virtual clock, with the computations and the constants of the trace itself.

    The cores are not shared here: what waiting for them took is in the constants already.
    """
    own = replace(ringsim.calibrate(trace), sleep_s=0.0)  # the times have it
    found = []
    for step in range(warmup, count_steps(trace.events)):
        args = (configuration, microbatches, 1, find_times(trace, step))
        found.append(median_step_s(ringsim.simulate(do_steps, world_size=configuration.ranks, args=args, link=own.link, compute=own)))
    return float(np.median(found))


def examine(configuration: Configuration, microbatches: int, steps: int, warmup: int, calibration: Calibration, save: Path | None) -> Found:
    """Measures one configuration and predicts it."""
    args = ([configuration], microbatches, warmup + steps)
    real = ringsim.trace(do_all, world_size=configuration.ranks, args=args, limit_s=600)
    if save is not None:
        real.save(save / f"{'-'.join(map(str, configuration)).replace(' ', '')}.ringtrace")
    how: dict[str, Any] = {"world_size": configuration.ranks, "args": args}
    virtual = ringsim.simulate(do_all, topology=calibration.topology, compute=calibration, **how)
    comparison = ringsim.compare(real, virtual)
    alone_s = median_step_s(ringsim.simulate(do_all, link=calibration.link, compute=calibration, **how))
    replayed_s = replay_s(real, configuration, microbatches, warmup)
    steps_s, predicted_s = comparison.real_steps_s[warmup:], float(np.median(comparison.virtual_steps_s))
    median_s = float(np.median(steps_s))
    assert comparison.nominal_s is not None
    assert comparison.no_communication_s is not None
    return Found(
        predicted_s / median_s - 1,
        alone_s / median_s - 1,
        predicted_s / float(steps_s.min()) - 1,
        replayed_s / median_s - 1,
        comparison.nominal_s / median_s - 1,
        comparison.no_communication_s / median_s - 1,
    )


def measure_idle(seconds: float = 1.0) -> float:
    """Returns the part of the processors' time that nobody used for a while."""

    def read() -> tuple[int, int]:
        ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return ticks[3] + ticks[4], sum(ticks)

    before = read()
    time.sleep(seconds)
    idle, total = (after - begin for after, begin in zip(read(), before, strict=True))
    return idle / max(total, 1)


def words(errors: Sequence[float]) -> str:
    """Says what errors come to."""
    found = Errors.of(list(errors))
    return f"{found.mean:7.1%} {found.worst:7.1%} {found.bias:+7.1%}"


def report(found: dict[Configuration, Found]) -> None:
    """Prints the errors by groups of configurations, and whether the goals are met."""
    groups: dict[str, Callable[[Configuration], Any]] = {
        "size": lambda each: f"{each.size_bytes // KIB} KiB",
        "ranks": lambda each: each.ranks,
        "schedule": lambda each: each.schedule,
        "receives": lambda each: AHEAD[each.ahead],
        "stage times": lambda each: each.times,
    }
    print(f"\n{'':24} n  prediction: mean, max, bias    replay    links alone  shortest  nominal  no communication (means)")
    groups["all"] = lambda _: ""
    for name, key in groups.items():
        for value in dict.fromkeys(map(key, found)):
            some = [errors for configuration, errors in found.items() if key(configuration) == value]
            means = [Errors.of([getattr(errors, field) for errors in some]).mean for field in Found._fields]
            label = f"{name} {value}".strip()
            rest = "".join(f"{means[at]:11.1%}" for at in (3, 1, 2, 4, 5))
            print(f"  {label:21} {len(some):3}  {words([errors.predicted for errors in some])}    {rest}")
    small = [errors.predicted for configuration, errors in found.items() if configuration.size_bytes <= SMALL_BYTES]
    goals = [
        (f"up to {SMALL_BYTES // KIB} KiB", small, SMALL_GOAL),
        ("all", [errors.predicted for errors in found.values()], GOAL),
        ("replay", [errors.replayed for errors in found.values()], REPLAY_GOAL),
    ]
    print()
    for name, errors, goal in goals:
        mean = Errors.of(errors).mean
        print(f"  {name:14} {mean:6.1%}, n {len(errors)}, goal {goal:.0%}: {'met' if mean <= goal else 'missed'}")
    baseline = Errors.of([errors.no_communication for errors in found.values()]).mean
    print(f"  skill beside no communication: {1 - Errors.of([errors.predicted for errors in found.values()]).mean / baseline:.2f}")


def main() -> None:
    """Calibrates, freezes the constants, predicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[size // KIB for size in SIZES])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--times", nargs="+", default=list(TIMES_S), choices=list(TIMES_S))
    parser.add_argument("--seed", type=int, default=0, help="of the order of the configurations")
    parser.add_argument("--save", type=Path, help="a directory for the traces")
    parser.add_argument("--verbose", action="store_true", help="a line for each configuration")
    options = parser.parse_args()
    print(f"{where()}, affinity {sorted(os.sched_getaffinity(0))}, nice {os.nice(0)}")
    idle = measure_idle()
    print(f"idle before: {idle:.0%}{'' if idle >= LEAST_IDLE else ' (below 80 %: INCONCLUSIVE, the machine is busy)'}")
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    known = itertools.product((2,), SCHEDULES[:2], list(TIMES_S)[:2], AHEAD, CALIBRATED)
    base = [Configuration(*each) for each in known]
    measured = ringsim.trace(do_all, world_size=2, args=(base, options.microbatches, options.steps), limit_s=600)
    if options.save is not None:
        measured.save(options.save / "calibrated.ringtrace")
    calibration = ringsim.calibrate(measured)
    print(f"\ncalibrated on 2 ranks, {' and '.join(f'{size // KIB} KiB' for size in CALIBRATED)}, n {len(base)}:\n{calibration}")
    sizes = [size * KIB for size in options.sizes_kib]
    wanted = [Configuration(*each) for each in itertools.product(options.ranks, options.schedules, options.times, AHEAD, sizes)]
    found = {}
    for configuration in random.Random(options.seed).sample(wanted, len(wanted)):
        found[configuration] = examine(configuration, options.microbatches, options.steps, options.warmup, calibration, options.save)
        if options.verbose:
            print(f"  {configuration}: " + ", ".join(f"{name} {value:+.1%}" for name, value in found[configuration]._asdict().items()))
    report({configuration: found[configuration] for configuration in wanted})
    print(f"\nafterwards: load average {os.getloadavg()[0]:.1f}, idle {measure_idle():.0%}")


if __name__ == "__main__":
    main()
