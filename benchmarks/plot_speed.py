"""Measures the time to draw the pictures of a large trace, from the trace to the PNG bytes.

    python benchmarks/plot_speed.py [events]

Each drawing uses a new synthetic trace (with 8 ranks, and 100,000 events by default), so the time
includes matching and wait states. For each picture, the script prints the time of the first drawing
and the median of the others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from synthetic import many_events

from ringsim.plot.ring import plot_ring
from ringsim.plot.style import figure_png
from ringsim.plot.timeline import plot_timeline, trace_png
from ringsim.provenance import machine, versions
from ringsim.traces.value import Trace

REPEATS = 7


def to_png(plot: Callable[[Trace], plt.Axes]) -> Callable[[Trace], bytes]:
    """Returns a function that draws with ``plot`` and returns the PNG."""

    def draw(trace: Trace) -> bytes:
        ax = plot(trace)
        data = figure_png(ax.figure)
        plt.close(ax.figure)
        return data

    return draw


def main(events: int) -> None:
    """Times the three pictures."""
    about = machine()
    print(
        f"{about['cpu']}, {about['cores']} cores, matplotlib {mpl.__version__}, numpy "
        f"{versions()['numpy']}"
    )
    for name, draw in (
        ("plot_ring", to_png(plot_ring)),
        ("plot_timeline", to_png(plot_timeline)),
        ("png (both)", trace_png),
    ):
        times = []
        for _ in range(REPEATS):
            trace = many_events(events)
            start = time.perf_counter()
            draw(trace)
            times.append(time.perf_counter() - start)
        print(
            f"{name:14} {len(trace.events):,} events: first {times[0]:.2f} s, then median "
            f"{statistics.median(times[1:]):.2f} s"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
