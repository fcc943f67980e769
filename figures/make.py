"""Draws the figures of README.md and docs/ from the traces and tables in ``figures/data``.

    python figures/make.py          draws all figures
    python figures/make.py --check  compares all figures with new drawings; exits with 1 if any
                                    of them differs

Each figure has one small function, and ``FIGURES`` lists its data and its formats. With the
versions in ``requirements/lock.txt``, the same data always produce the same bytes. A different
version of matplotlib may shift a line by a pixel.
"""

from __future__ import annotations

import argparse
import json
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
    """Draws activations that travel clockwise, gradients that come back, and an unused group."""
    return trace.plot_ring()


def timeline(trace: ringsim.Trace) -> Axes:
    """Draws the timeline: forward passes, backward passes, and the waits between them."""
    return trace.plot_timeline()


def bandwidth(table: bandwidths.Bandwidths) -> Axes:
    """Draws the cost of a message on loopback, and the ceilings of the machine."""
    return table.plot()


def bandwidth_on_one_gpu(table: bandwidths.Bandwidths) -> Axes:
    """Draws the bandwidths of Gloo and NCCL between two ranks that share a machine's only GPU."""
    return table.plot()


def schedule(trace: ringsim.Trace) -> Axes:
    """Draws a 1F1B training step, with alternating forwards and backwards, and the bubble."""
    return trace.plot_timeline()


def deadlock(trace: ringsim.Trace) -> Axes:
    """Draws the waits and the last moments of a ring in which all ranks receive first."""
    return trace.explain().plot()


def straggler(trace: ringsim.Trace) -> Axes:
    """Draws the waits in a pipeline with one slow stage."""
    return trace.explain().plot()


class PredictionErrors:
    """The table that ``benchmarks/prediction_error.py predict --save`` writes."""

    def __init__(self, file: Path) -> None:
        table = json.loads(file.read_text())
        self.rows, self.measured = (
            table["rows"],
            f"measured on {table['where'].split(', load')[0]}; medians of {table['turns']} runs",
        )

    def describe(self) -> str:
        """Returns a description of the picture."""
        return (
            f"Mean absolute errors of {len(self.rows)} predictions by kind of program, "
            f"{self.measured}."
        )


def prediction(table: PredictionErrors) -> Axes:
    """Draws the errors of predictions by kind of program.

    The predictions are drawn with and without Gloo's costs on shared cores, next to the spread of
    the real runs.
    """
    rows = table.rows
    names = {
        row["kind"]: ("collectives" if row["kind"].startswith("collective") else row["kind"])
        for row in rows
    }
    series = {
        "spread": "real runs, against their median",
        "predicted": "predicted",
        "as_before": "predicted from links, posting and cores only",
    }
    means = {
        name: {
            field: _mean([abs(row[field]) for row in rows if names[row["kind"]] == name])
            for field in series
        }
        for name in names.values()
    }
    order = sorted(means, key=lambda name: means[name]["predicted"], reverse=True)
    _, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for place, ((field, label), hatch, color) in enumerate(
        zip(series.items(), ("...", "", "//"), ("0.75", "C0", "C1"), strict=True)
    ):
        at = [number + (1 - place) * 0.27 for number in range(len(order))]
        bars = axes.barh(
            at,
            [means[name][field] * 100 for name in order],
            height=0.25,
            label=label,
            color=color,
            hatch=hatch,
            edgecolor="white",
        )
        axes.bar_label(bars, fmt="%.0f %%", padding=2, fontsize=8)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("mean absolute error, %")
    axes.set_xlim(0, 100)
    axes.set_title(
        f"Errors of predictions for {len(rows)} programs, on 2, 4 and 8 ranks",
        loc="left",
        fontsize=11,
    )
    axes.get_figure(root=True).legend(loc="outside lower center", ncols=3, fontsize=8)
    axes.annotate(table.measured, (1, -0.16), xycoords="axes fraction", ha="right", fontsize=7)
    return axes


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class Wanted(NamedTuple):
    """A figure with its data, its function and the extensions of its files."""

    name: str
    data: str
    draw: Callable[[Any], Axes]
    endings: tuple[str, ...] = (".png", ".svg")
    load: Callable[[Path], Any] = ringsim.load


FIGURES = (
    Wanted("ring", "pipeline.ringtrace", ring),
    Wanted("timeline", "pipeline.ringtrace", timeline),
    Wanted("deadlock", "deadlock.ringtrace", deadlock, (".png",)),
    Wanted("straggler", "straggler.ringtrace", straggler, (".png",)),
    Wanted("bandwidth", "bandwidth-gloo.json", bandwidth, load=bandwidths.load),
    Wanted(
        "bandwidth_on_one_gpu",
        "bandwidth-one-gpu.json",
        bandwidth_on_one_gpu,
        (".png",),
        bandwidths.load,
    ),
    Wanted("prediction", "prediction-error.json", prediction, (".png",), PredictionErrors),
    Wanted("schedule", "schedule.ringtrace", schedule),
)


def draw_all(directory: Path) -> list[str]:
    """Draws every figure into a directory, and returns the names of the files."""
    names = []
    for figure in FIGURES:
        data = figure.load(HERE / "data" / figure.data)
        ax = figure.draw(data)
        for ending in figure.endings:
            names.append(figure.name + ending)
            save_figure(
                ax.figure,
                directory / names[-1],
                title=ax.get_title(loc="left"),
                description=data.describe(),
            )
        plt.close(ax.figure)
    return names


def differing() -> list[str]:
    """Returns the names of the figures that are missing or differ from a new drawing."""
    with tempfile.TemporaryDirectory() as elsewhere:
        names = draw_all(Path(elsewhere))
        return [
            name
            for name in names
            if not (HERE / name).is_file()
            or (HERE / name).read_bytes() != Path(elsewhere, name).read_bytes()
        ]


def main(arguments: list[str]) -> int:
    """Draws or checks the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw the figures from the data in figures/data.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare new drawings with the committed figures, and write nothing",
    )
    if not parser.parse_args(arguments).check:
        print("\n".join(f"figures/{name}" for name in draw_all(HERE)))
        return 0
    names = differing()
    for name in names:
        print(
            f"figures/{name} differs from the figure that `python figures/make.py` draws. Draw it "
            "again with `make figures`, and look at it."
        )
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
