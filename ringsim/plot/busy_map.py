"""A step with more computations than a picture has pixels: for each rank and stretch of time, how much of it was spent on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ringsim.plot.steps import ACTION_LOOKS
from ringsim.simulator.columns import KIND_LETTERS
from ringsim.traces.events import Ints

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.simulator.schedules import ScheduleRun

__all__ = ["draw_busy_map", "measure_shares"]

COLUMNS: Final = 960
MOST_ROWS: Final = 512
IDLE: Final = "#FFFFFF"


def measure_shares(run: ScheduleRun, rows: int, columns: int) -> Ints:
    """Measures which part of each stretch of time ranks spend on each kind of computation.

    Args:
        run: a simulated schedule.
        rows: into how many groups of neighbours the ranks are put, at most as many as ranks.
        columns: into how many equal stretches the step is cut.

    Returns:
        Shares from 0 to 1, shape (rows, columns, 4): by the kind's place in ``KIND_LETTERS``.

    Example:
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> shares = measure_shares(simulate_schedule("1f1b", num_ranks=2, num_microbatches=1), rows=2, columns=6)
        >>> shares[1].argmax(axis=-1).tolist(), shares[1].sum(axis=-1).tolist()  # rank 1 waits, goes forward, back, and is done
        ([0, 0, 1, 1, 0, 0], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    """
    operations, ends = run.operations, run.ends.astype(np.float64)
    duration = run.setting.prices.duration.astype(np.float64)
    edges = np.linspace(0.0, float(run.makespan), columns + 1)
    shares = np.zeros((rows, columns, len(KIND_LETTERS)))
    row_of = np.arange(run.num_ranks) * rows // run.num_ranks
    members = np.bincount(row_of, minlength=rows)
    for rank in range(run.num_ranks):
        own = slice(int(operations.first[rank]), int(operations.first[rank + 1]))
        kind = operations.kind[own]
        lasts = duration[kind, operations.stage[own]]
        for code in np.unique(kind).tolist():
            some = kind == code
            until, long = ends[own][some], lasts[some]
            begins = until - long
            done = np.concatenate([[0.0], np.cumsum(long)])
            before = np.searchsorted(begins, edges, side="right")  # how many have begun; all but the last of them have ended
            within = np.clip(edges - begins[before - 1], 0.0, long[before - 1])
            spent = np.where(before > 0, done[before - 1] + within, 0.0)
            shares[row_of[rank], :, code] += np.diff(spent)
    return shares / (members[:, None, None] * (float(run.makespan) / columns))


def draw_busy_map(ax: Axes, run: ScheduleRun, *, length: float) -> list[Artist]:
    """Draws the map; the paler, the less was computed.

    Args:
        ax: the axes.
        run: a simulated schedule that takes some time.
        length: of the step, in the unit of the axis.

    Returns:
        The legend's entries.
    """
    shares = measure_shares(run, min(run.num_ranks, MOST_ROWS), COLUMNS)
    colours = np.array([to_rgb(ACTION_LOOKS[letter].colour) for letter in KIND_LETTERS])
    busy = shares.sum(axis=-1, keepdims=True)
    image = np.clip(shares @ colours + (1 - busy) * np.array(to_rgb(IDLE)), 0.0, 1.0)
    ax.imshow(
        image, aspect="auto", interpolation="nearest", extent=(0.0, length, run.num_ranks - 0.5, -0.5), zorder=1, gid="busy-map"
    )  # fmt: skip
    ax.set_xlim(-0.004 * length, 1.004 * length)
    ax.set_ylim(run.num_ranks - 0.5, -0.5)
    ax.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"rank {value:.0f}" if 0 <= value < run.num_ranks else ""))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    drawn = [letter for code, letter in enumerate(KIND_LETTERS) if shares[..., code].any()]
    handles: list[Artist] = [Patch(facecolor=ACTION_LOOKS[letter].colour, label=ACTION_LOOKS[letter].name) for letter in drawn]
    return [*handles, Patch(facecolor=IDLE, edgecolor="#B0B0B0", linewidth=0.5, label="bubble")]
