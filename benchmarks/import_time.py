"""Measures the time that ``import ringsim`` adds to starting Python. The goal is 50 ms.

Run ``python benchmarks/import_time.py``. The two commands alternate, each in a fresh interpreter,
so a busy machine slows down both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time

GOAL_MS = 50.0
COMMANDS = {"python": "pass", "python again": "pass", "import ringsim": "import ringsim"}


def measure(repeats: int) -> dict[str, list[float]]:
    """Runs the commands alternately, ``repeats`` times, and returns their times in ms."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, code in random.sample(list(COMMANDS.items()), len(COMMANDS)):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def interval(times: list[float], baseline: list[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the difference between two medians, in ms."""

    def draw() -> float:
        return statistics.median(random.choices(times, k=len(times))) - statistics.median(
            random.choices(baseline, k=len(baseline))
        )

    differences = sorted(draw() for _ in range(draws))
    return differences[int(0.025 * draws)], differences[int(0.975 * draws)]


def main() -> None:
    """Prints a table, and whether the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    times = measure(parser.parse_args().repeats)
    baseline = times["python"]
    for name, measured in times.items():
        low, high = interval(measured, baseline)
        print(
            f"{name:16} median {statistics.median(measured):6.1f} ms, more than python by "
            f"{low:5.1f} .. {high:5.1f} ms (95 %)"
        )
    cost = statistics.median(times["import ringsim"]) - statistics.median(baseline)
    print(
        f"import ringsim takes {cost:.1f} ms; the goal of {GOAL_MS:.0f} ms was "
        f"{'met' if cost <= GOAL_MS else 'missed'}"
    )


if __name__ == "__main__":
    main()
