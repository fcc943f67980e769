"""Measures how long an explorer takes to respond to a moved slider.

The script simulates random choices, and passes the results to the view. Run ``python
benchmarks/explorers.py [--choices 25]``. The goal is 100 ms. ``view_page.py`` measures the time in
the browser.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from paired import where

from ringsim import explore
from ringsim.view.explorer import Explorer
from ringsim.view.notebook import View

EXPLORERS = (
    explore.schedule,
    explore.ring,
    explore.bandwidth,
    explore.generation,
    explore.deadlock,
)


def answer_ms(explorer: Explorer, count: int) -> list[float]:
    """Returns the response times, without the first two, which include loading modules."""
    draw, view, took = random.Random(0), View(explorer.frame().traces, explorer.tab), []
    while len(took) < count + 2:
        values = {choice.name: draw.choice(choice.options) for choice in explorer.choices}
        start = time.perf_counter()
        view.show(explorer.frame(**values).traces)
        took.append((time.perf_counter() - start) * 1e3)
    return took[2:]


def main() -> None:
    """Prints a line for each explorer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choices", type=int, default=25)
    options = parser.parse_args()
    print(where())
    for make in EXPLORERS:
        took = answer_ms(make(), options.choices)
        print(
            f"{make.__name__:<10} {statistics.median(took):5.0f} ms (median), "
            f"{max(took):.0f} ms (maximum)"
        )


if __name__ == "__main__":
    main()
