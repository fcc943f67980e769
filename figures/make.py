"""Draws the figures of README.md and docs/ from the traces and tables in ``figures/data``: the same bytes from the same data.

    python figures/make.py            draws them all
    python figures/make.py --check    draws them elsewhere and compares; exit code 1 where one differs

Each figure is one small function; ``FIGURES`` says which file it is drawn from and in which formats it is wanted. The bytes are the same
with the versions in ``requirements/lock.txt``; another matplotlib may draw a line a pixel elsewhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # files, no window

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import ringsim
from ringsim.plot.style import save_figure
from ringsim.traces import bandwidths

HERE = Path(__file__).resolve().parent


def ring(trace: ringsim.Trace) -> Axes:
    """Who sent to whom: activations clockwise, gradients back, and one pair group that was built for nothing."""
    return trace.plot_ring()


def timeline(trace: ringsim.Trace) -> Axes:
    """Who did what when: forward passes, backward passes, and the waiting between them."""
    return trace.plot_timeline()


def bandwidth(table: bandwidths.Bandwidths) -> Axes:
    """What a message costs on loopback: latency at the left, bandwidth at the right, and what the machine could do."""
    return table.plot()


def schedule(trace: ringsim.Trace) -> Axes:
    """A training step with 1F1B: forwards and backwards take turns, and the gaps are the bubble."""
    return trace.plot_timeline()


def deadlock(trace: ringsim.Trace) -> Axes:
    """Who waits for whom in a ring in which everybody receives first, and the last moments before it stood still."""
    return trace.explain().plot()


def straggler(trace: ringsim.Trace) -> Axes:
    """Who waited for whom in a pipeline with one slow stage."""
    return trace.explain().plot()


class Wanted(NamedTuple):
    """One figure: its files are called ``name`` with each ending."""

    name: str
    data: str
    draw: Callable[[Any], Axes]
    endings: tuple[str, ...] = (".png", ".svg")


FIGURES = (
    Wanted("ring", "pipeline.ringtrace", ring),
    Wanted("timeline", "pipeline.ringtrace", timeline),
    Wanted("deadlock", "deadlock.ringtrace", deadlock, (".png",)),
    Wanted("straggler", "straggler.ringtrace", straggler, (".png",)),
    Wanted("bandwidth", "bandwidth-gloo.json", bandwidth),
    Wanted("schedule", "schedule.ringtrace", schedule),
)


def draw_all(directory: Path) -> list[str]:
    """Draws every figure into a directory; returns the names of the files."""
    names = []
    for figure in FIGURES:
        file = HERE / "data" / figure.data
        data = bandwidths.load(file) if file.suffix == ".json" else ringsim.load(file)
        ax = figure.draw(data)
        for ending in figure.endings:
            names.append(figure.name + ending)
            save_figure(ax.figure, directory / names[-1], title=ax.get_title(loc="left"), description=data.describe())
        plt.close(ax.figure)
    return names


def differing() -> list[str]:
    """Names of the figures that are missing here, or differ from what would be drawn now."""
    with tempfile.TemporaryDirectory() as elsewhere:
        names = draw_all(Path(elsewhere))
        return [name for name in names if not (HERE / name).is_file() or (HERE / name).read_bytes() != Path(elsewhere, name).read_bytes()]


def main(arguments: list[str]) -> int:
    """Draws or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description="Draws the figures from what was recorded in figures/data.")
    parser.add_argument("--check", action="store_true", help="compare with the figures that are here, and write nothing")
    if not parser.parse_args(arguments).check:
        print("\n".join(f"figures/{name}" for name in draw_all(HERE)))
        return 0
    names = differing()
    for name in names:
        print(f"figures/{name} must be what `python figures/make.py` draws, and is not. Draw it again (`make figures`) and look at it.")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
