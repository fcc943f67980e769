"""Measures the errors of predicted times, for programs that were not used to build the model.

The programs are in `prediction_programs.py`. `measure DIR` runs each program several times on real
ranks, in random order, and runs `ringsim.calibration_worker` on 2 ranks before each turn. `predict
DIR` predicts the time of each program, from its first operation to its last, from these 2 ranks
only, and compares the prediction with the median of the runs. For comparison, it also prints the
errors of simpler predictions (with links, posting and cores only, with a nominal latency and
bandwidth, and without any communication), the error with the constants of the run itself (replay),
and the differences of single runs from their median, which no model can beat. If the machine was
busy before a run, the result is inconclusive.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from paired import where
from prediction_programs import KINDS

import ringsim
from ringsim.errors import RingError
from ringsim.prediction.calibration import Calibration
from ringsim.prediction.comparison import Errors
from ringsim.traces.value import Trace

KIB = 1024
SMALL_BYTES, SMALL_GOAL, GOAL, KIND_GOAL, BIAS_GOAL, REPLAY_GOAL = (
    256 * KIB,
    0.06,
    0.10,
    0.15,
    0.03,
    0.03,
)
LEAST_IDLE = 0.80
SEEDS = 5  # a seed determines the messages that stall; the median counts, as for real runs
# the numbers that a data sheet would list for loopback
NOMINAL = ringsim.Link(alpha_s=50e-6, beta_s_per_byte=1 / 10e9)


class Configuration(NamedTuple):
    """A program and its settings."""

    kind: str
    ranks: int
    size_bytes: int
    rounds: int

    def file(self, turn: int) -> str:
        """Returns the file name of a turn's trace."""
        return (
            f"{self.kind.replace(' ', '_')}-{self.ranks}-{self.size_bytes}-{self.rounds}.{turn}"
            ".ringtrace"
        )


class Found(NamedTuple):
    """Signed errors relative to the median of the runs.

    ``spread`` is the difference of single runs from this median; ``within`` is whether the median
    is within the predicted range.
    """

    predicted: float
    as_before: float  # with links, posting and cores only
    nominal: float
    no_communication: float
    replayed: float
    spread: float
    within: bool


def measure_idle(seconds: float = 1.0) -> float:
    """Returns the idle share of the CPU time over a short period."""

    def read() -> tuple[int, int]:
        ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return ticks[3] + ticks[4], sum(ticks)

    before = read()
    time.sleep(seconds)
    idle, total = (after - begin for after, begin in zip(read(), before, strict=True))
    return idle / max(total, 1)


def measure(options: argparse.Namespace) -> None:
    """Runs all configurations on real ranks, once per turn."""
    grid = itertools.product(
        options.kinds,
        options.ranks,
        [int(size * KIB) for size in options.sizes_kib],
        options.rounds,
    )
    wanted = [
        Configuration(*each)
        for each in grid
        if not (each[0].endswith("barrier") and each[2] != int(options.sizes_kib[0] * KIB))
    ]
    chosen = random.Random(options.seed).sample(
        wanted, min(options.draw or len(wanted), len(wanted))
    )
    options.directory.mkdir(parents=True, exist_ok=True)
    idle = measure_idle()
    for turn in range(options.turns):
        calibrating = ringsim.trace(ringsim.calibration_worker, world_size=2, limit_s=120)
        calibrating.save(options.directory / f"calibration.{turn}.ringtrace")
        for configuration in random.Random(turn).sample(chosen, len(chosen)):
            args = (configuration.rounds, configuration.size_bytes)
            trace = ringsim.trace(
                KINDS[configuration.kind], world_size=configuration.ranks, args=args, limit_s=120
            )
            trace.save(options.directory / configuration.file(turn))
        print(
            f"turn {turn + 1} of {options.turns}, load average {os.getloadavg()[0]:.1f}", flush=True
        )
    facts = {
        "where": where(),
        "idle": idle,
        "turns": options.turns,
        "configurations": [list(each) for each in chosen],
    }
    (options.directory / "measured.json").write_text(json.dumps(facts))


def run_virtually(
    configuration: Configuration, compute: Any, seeds: int = 1, **network: Any
) -> float:
    """Returns the median time of a configuration on the virtual clock, in seconds."""
    args = (configuration.rounds, configuration.size_bytes)
    work = {"world_size": configuration.ranks, "args": args, "compute": compute, **network}
    return float(
        np.median(
            [
                ringsim.simulate(KINDS[configuration.kind], seed=seed, **work).makespan_s
                for seed in range(seeds)
            ]
        )
    )


def replay(configuration: Configuration, real: Trace) -> float:
    """Returns the time with the constants of the run itself, or NaN if it does not show them."""
    try:
        own = ringsim.calibrate(real)
    except RingError:
        return float("nan")
    return run_virtually(configuration, own, topology=own.topology)


def examine(
    configuration: Configuration, directory: Path, turns: int, calibration: Calibration
) -> Found:
    """Predicts the time of a configuration, and compares it with the runs."""
    runs = [ringsim.load(directory / configuration.file(turn)) for turn in range(turns)]
    times_s = np.array([run.makespan_s for run in runs])
    real_s = float(np.median(times_s))
    typical = runs[int(np.argmin(np.abs(times_s - real_s)))]
    machine = calibration.topology
    predicted_s = run_virtually(configuration, calibration, SEEDS, topology=machine)
    args = (configuration.rounds, configuration.size_bytes)
    low_s, high_s = ringsim.predict(
        KINDS[configuration.kind], world_size=configuration.ranks, from_trace=calibration, args=args
    ).metadata["range_s"]
    before_s = run_virtually(configuration, calibration, topology=replace(machine, gloo=None))
    others_s = [
        run_virtually(configuration, None, link=link) for link in (NOMINAL, ringsim.Link(0.0, 0.0))
    ]
    errors = [
        each_s / real_s - 1
        for each_s in (predicted_s, before_s, *others_s, replay(configuration, typical))
    ]
    return Found(
        *errors, spread=float(np.abs(times_s / real_s - 1).mean()), within=low_s <= real_s <= high_s
    )


def report(found: dict[Configuration, Found]) -> None:
    """Prints the errors by group of configurations, and whether the goals were met."""
    groups: dict[str, Callable[[Configuration], Any]] = {
        "": lambda each: each.kind,
        "ranks": lambda each: each.ranks,
        "KiB": lambda each: each.size_bytes / KIB,
        "rounds": lambda each: each.rounds,
        "all": lambda _: "",
    }
    print(
        f"\n{'':34} n  prediction: mean, max, bias   replay  spread of runs  as before  nominal  "
        "no communication   within range"
    )
    for name, key in groups.items():
        for value in dict.fromkeys(map(key, found)):
            some = [
                errors for configuration, errors in found.items() if key(configuration) == value
            ]
            mean = {
                field: float(np.nanmean(np.abs([getattr(each, field) for each in some])))
                for field in Found._fields
            }
            errors = Errors.of([each.predicted for each in some])
            print(
                f"  {f'{value} {name}'.strip():32} {len(some):3}  {errors.mean:7.1%} "
                f"{errors.worst:7.1%} {errors.bias:+7.1%}   "
                f"{mean['replayed']:7.1%}  {mean['spread']:10.1%}     {mean['as_before']:8.1%} "
                f"{mean['nominal']:8.1%} "
                f"{mean['no_communication']:12.1%} {mean['within']:18.0%}"
            )
    kinds = [
        [each.predicted for configuration, each in found.items() if configuration.kind == kind]
        for kind in {each.kind for each in found}
    ]
    small = [
        each.predicted
        for configuration, each in found.items()
        if configuration.size_bytes <= SMALL_BYTES
    ]
    whole = Errors.of([each.predicted for each in found.values()])
    replayed = float(np.nanmean(np.abs([each.replayed for each in found.values()])))
    goals: Sequence[tuple[str, float, float]] = (
        (f"up to {SMALL_BYTES // KIB} KiB", Errors.of(small).mean, SMALL_GOAL),
        ("all", whole.mean, GOAL),
        ("worst kind", max(Errors.of(errors).mean for errors in kinds), KIND_GOAL),
        ("bias", abs(whole.bias), BIAS_GOAL),
        ("replay", replayed, REPLAY_GOAL),
    )
    print()
    for name, value, goal in goals:
        print(f"  {name:14} {value:6.1%}, goal {goal:.0%}: {'met' if value <= goal else 'missed'}")


def predict(options: argparse.Namespace) -> None:
    """Predicts the times of the programs that were measured."""
    facts = json.loads((options.directory / "measured.json").read_text())
    verdict = (
        "" if facts["idle"] >= LEAST_IDLE else " (below 80 %: INCONCLUSIVE, the machine was busy)"
    )
    print(
        f"{facts['where']}; idle before: {facts['idle']:.0%}{verdict}; {facts['turns']} runs each"
    )
    calibrating = [
        ringsim.load(options.directory / f"calibration.{turn}.ringtrace")
        for turn in range(facts["turns"])
    ]
    calibration = ringsim.calibrate(*calibrating)
    print(f"constants from {len(calibrating)} runs on 2 ranks:\n{calibration}")
    configurations = sorted(Configuration(*each) for each in facts["configurations"])
    found = {}
    for configuration in configurations:
        found[configuration] = examine(
            configuration, options.directory, facts["turns"], calibration
        )
        if options.verbose:
            print(
                f"  {configuration}: "
                + ", ".join(
                    f"{name} {value:+.1%}" for name, value in found[configuration]._asdict().items()
                )
            )
    report(found)
    if options.save is not None:
        lines = []
        for configuration, errors in found.items():
            row = {**configuration._asdict(), **errors._asdict(), "within": bool(errors.within)}
            lines.append(
                json.dumps(
                    {
                        key: round(value, 4) if isinstance(value, float) else value
                        for key, value in row.items()
                    }
                )
            )
        rows = ",\n  ".join(lines).replace("NaN", "null")
        options.save.write_text(
            f'{{"where": {json.dumps(facts["where"])}, "turns": {facts["turns"]}, "rows": [\n  '
            f"{rows}\n]}}\n"
        )


def main() -> None:
    """Runs the command ``measure`` or ``predict``."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="run the programs on real ranks")
    measuring.add_argument("directory", type=Path)
    measuring.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND"
    )
    measuring.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    measuring.add_argument("--sizes-kib", type=float, nargs="+", default=[1, 64, 512])
    measuring.add_argument("--rounds", type=int, nargs="+", default=[5, 50])
    measuring.add_argument(
        "--draw", type=int, help="the number of configurations, drawn by the seed (default: all)"
    )
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--turns", type=int, default=5)
    measuring.set_defaults(do=measure)
    predicting = commands.add_parser(
        "predict", help="predict the times, and compare them with the runs"
    )
    predicting.add_argument("directory", type=Path)
    predicting.add_argument(
        "--verbose", action="store_true", help="print a line for each configuration"
    )
    predicting.add_argument(
        "--save", type=Path, help="a JSON file for the table, which figures/make.py draws"
    )
    predicting.set_defaults(do=predict)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
