"""A prediction over what was measured: in each rank's row the measured computations above, the predicted ones below.

::

    rank 0   [F0 ][F1 ]xxxx[B0     ][B1     ]      measured, by kind
             [   ][   ]    [       ][       ]      predicted, coloured by how much too early or too late each one ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from ringsim.errors import ArgumentError
from ringsim.plot import style
from ringsim.plot.actions import PHASE_NAME_POINTS, draw_actions
from ringsim.plot.rows import Rows
from ringsim.plot.step_picture import NAMES
from ringsim.plot.style import Look
from ringsim.provenance import footer
from ringsim.traces.events import NONE, SPAN, Ints
from ringsim.traces.steps import KINDS, StageActions, count_steps, find_step
from ringsim.traces.units import time_text, time_unit
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.comparison import Comparison

__all__ = ["plot_overlay", "png"]

WIDTH_INCHES: Final = 9.6
ROW_INCHES: Final = 0.66
ROWS: Final = Rows(top=np.array([-0.33, 0.06]), bottom=np.array([0.02, 0.42]), marks=(-0.44, -0.37))
MEASURED_LANE, PREDICTED_LANE = 0, 1
# Bounds between the looks, as parts of the step: an end that is off by 1 % is on time.
BOUNDS: Final = (-0.05, -0.01, 0.01, 0.05)
INDIGO: Final = "#4B4A9E"  # the blues are those of forward
LOOKS: Final = (
    Look("predicted, > 5 % of the step too early", INDIGO, "\\\\\\\\"),
    Look("1 to 5 % too early", "#C3C1E8", "\\\\\\\\"),
    Look("within 1 %", "#EDEDED", "", "#9A9A9A"),
    Look("1 to 5 % too late", "#F1BE99", "////"),
    Look("> 5 % too late", style.VERMILLION, "////"),
)


def plot_overlay(comparison: Comparison, *, step: int | None = None, ax: Axes | None = None) -> Axes:
    """Draws a predicted step under the measured one, and how far off the end of each computation is.

    Args:
        comparison: of ``ringsim.compare``.
        step: which step, from 0; None for the one of median length.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ArgumentError: there is no such step, or nothing was compared but messages.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.comparison import compare
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> def run(end_ns):
        ...     events = make_events({"rank": [0], "op": [OP_CODES["span"]], "label": [0], "post_ns": [0], "done_ns": [end_ns]},
        ...                          Tables(labels=("work",)))
        ...     return Trace(events, {"world_size": 1})
        >>> plot_overlay(compare(run(2_000_000), run(1_900_000))).get_title(loc="left")
        'Predicted 1.9 ms, measured 2 ms: 5.0 % too short'
    """
    with style.drawing():
        if ax is not None:
            _draw(comparison, step, ax)
            return ax
        return _fill(plt.figure(), comparison, step, WIDTH_INCHES)


def png(comparison: Comparison) -> bytes:
    """Draws the step of median length, for a notebook.

    Args:
        comparison: of ``ringsim.compare``.

    Returns:
        A PNG, 100 pixels an inch; the same bytes for the same comparison.
    """
    with style.drawing():
        figure = Figure()
        _fill(figure, comparison, None, WIDTH_INCHES)
    return style.figure_png(figure, description=comparison.describe())


def _fill(figure: Figure, comparison: Comparison, step: int | None, width: float) -> Axes:
    """Gives a figure the picture, and the size that it needs."""
    height = float(np.clip(ROW_INCHES * comparison.real.world_size + 0.15, 1.2, 8.5))
    figure.set_size_inches(width, height)
    ax = figure.add_axes((0, 0, 1, 1))
    style.fit(figure, [(ax, width, height, _draw(comparison, step, ax))])
    return ax


def _draw(comparison: Comparison, step: int | None, ax: Axes) -> style.Margins:
    """Draws on axes that have their size already; returns the room that the words around it take."""
    lengths = comparison.real_steps_s
    if step is None:
        step = int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])
    if not 0 <= step < len(lengths):
        raise ArgumentError(f"step must be from 0 to {len(lengths) - 1}, got {step}. Leave it out for the one of median length.")
    real_s, virtual_s = float(lengths[step]), float(comparison.virtual_steps_s[step])
    unit_ns, unit = time_unit(round(max(real_s, virtual_s) * 1e9))
    steps = count_steps(comparison.real.events)
    _prepare(ax, comparison.real.world_size, max(real_s, virtual_s) * 1e9 / unit_ns, unit, "step" if steps else "run")
    handles: list[Artist] = []
    if steps:
        measured = find_step(comparison.real, step)
        begin = comparison.real_begin_ns[step]
        columns = (measured.rank, measured.stage, measured.kind, measured.microbatch)
        handles += draw_actions(
            ax, StageActions(measured.schedule, *columns, (measured.start - begin) / unit_ns, (measured.end - begin) / unit_ns), ROWS
        )
    chosen = _choose(comparison, step)
    if not steps:
        handles += _draw_measured(ax, comparison, step, chosen, unit_ns)
    handles += _draw_predicted(ax, comparison, step, chosen, unit_ns)
    for length_s, dash, name in ((real_s, (0, ()), "end, measured"), (virtual_s, (0, (4, 2)), "end, predicted")):
        ax.axvline(length_s * 1e9 / unit_ns, color=style.INK, linewidth=1.2, linestyle=dash, zorder=8)
        handles.append(Line2D([], [], color=style.INK, linewidth=1.2, linestyle=dash, label=name))
    title, subtitle = _words(comparison, step, steps)
    notes = ["In each row: above what was measured, below what was predicted. Colours: how far off the end is, as a part of the step."]
    notes.append(f"Prediction: {footer(comparison.virtual.metadata)}.")
    return style.dress(
        ax, title, subtitle=subtitle, notes=notes, handles=handles, metadata=comparison.real.metadata, left=52.0, right=12.0, below=40.0
    )


def _prepare(ax: Axes, world_size: int, length: float, unit: str, what: str) -> None:
    """Sets limits, and names the rows."""
    ax.set_xlim(-0.004 * length, 1.012 * length)
    row_points = ax.get_window_extent().height * 72 / ax.figure.dpi / world_size
    ax.set_ylim(world_size - 0.5, -0.5 - PHASE_NAME_POINTS / row_points)
    every = -(-world_size // 32)
    ax.yaxis.set_major_locator(FixedLocator(range(0, world_size, every)))
    ax.yaxis.set_major_formatter(FixedFormatter([f"rank {rank}" for rank in range(0, world_size, every)]))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="#E9E9E9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_xlabel(f"time since the {what} began ({unit})", loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _choose(comparison: Comparison, step: int) -> Ints:
    """The computations of a step, by their place in the comparison; all spans where the run has no steps."""
    events = comparison.real.events
    kinds = np.array([not count_steps(events) or label in KINDS for label in events.tables.labels] or [False])
    spans = (events.kind[comparison.real_index] == SPAN) & (events.label[comparison.real_index] != NONE)
    chosen: Ints = np.flatnonzero((comparison.step == step) & spans & kinds[events.label[comparison.real_index]])
    if len(chosen) == 0:
        raise ArgumentError("a comparison must have spans to be drawn, got none. Put the work of the ranks into ringsim.span.")
    return chosen


def _draw_measured(ax: Axes, comparison: Comparison, step: int, chosen: Ints, unit_ns: float) -> list[Artist]:
    """Draws the measured spans of a run without steps."""
    events, index, begin = comparison.real.events, comparison.real_index[chosen], comparison.real_begin_ns[step]
    lanes = np.full(len(index), MEASURED_LANE)
    corners: Any = ROWS.boxes(
        events.rank[index], lanes, (events.post_ns[index] - begin) / unit_ns, (events.done_ns[index] - begin) / unit_ns
    )
    ax.add_collection(PolyCollection(corners, facecolors="#C9C9C9", edgecolors="white", linewidths=0.6, zorder=3), autolim=False)
    return [Patch(facecolor="#C9C9C9", label="measured")]


def _draw_predicted(ax: Axes, comparison: Comparison, step: int, chosen: Ints, unit_ns: float) -> list[Artist]:
    """Draws the predicted computations, each in the look that says how far off its end is."""
    events, index, begin = comparison.virtual.events, comparison.virtual_index[chosen], comparison.virtual_begin_ns[step]
    start, end = (events.post_ns[index] - begin) / unit_ns, (events.done_ns[index] - begin) / unit_ns
    off = np.searchsorted(BOUNDS, comparison.lag_s[chosen] / comparison.real_steps_s[step])
    handles: list[Artist] = []
    for number, look in enumerate(LOOKS):
        some = off == number
        handles.append(Patch(facecolor=look.colour, edgecolor=look.ink, hatch=look.hatch or None, linewidth=0.5, label=look.name))
        if some.any():
            lanes = np.full(int(some.sum()), PREDICTED_LANE)
            corners: Any = ROWS.boxes(events.rank[index][some], lanes, start[some], end[some])
            ax.add_collection(
                PolyCollection(
                    corners, facecolors=look.colour, edgecolors=look.ink, hatch=look.hatch or None, linewidths=0.6, zorder=3,
                    gid=f"predicted-{number}",
                ),
                autolim=False,
            )  # fmt: skip
    return handles


def _words(comparison: Comparison, step: int, steps: int) -> tuple[str, str]:
    """The title, and the line under it."""
    real_s, virtual_s = float(comparison.real_steps_s[step]), float(comparison.virtual_steps_s[step])
    off = virtual_s / real_s - 1
    how = f"{abs(off):.1%} too {'short' if off < 0 else 'long'}" if abs(off) >= 0.0005 else "off by less than 0.1 %"
    title = f"Predicted {time_text(virtual_s * 1e9)}, measured {time_text(real_s * 1e9)}: {how.replace('%', ' %').replace('  %', ' %')}"
    said = [count(comparison.real.world_size, "rank")]
    if steps:
        schedule = find_step(comparison.real, step).schedule
        said = [f"{NAMES.get(schedule, schedule)}, {said[0]}"]
    if steps > 1:
        errors = comparison.steps
        said.append(f"step {step + 1} of {steps}: all of them off by {errors.mean:.1%} on average, {errors.worst:.1%} at most")
    if comparison.no_communication_s is not None:
        said.append(f"without communication it would be {comparison.no_communication_s / real_s - 1:+.1%}")
    return title, "; ".join(said).replace("%", " %")
