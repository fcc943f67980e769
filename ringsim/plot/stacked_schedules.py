"""Draws several schedules below each other on one time axis, as papers do.

::

    GPipe: 36 units, bubble 33 %, at most 8 live activations
    rank 0  [F0][F1][F2]xxxxxxxxxx[B0    ][B1    ][B2    ] |
    rank 1      [F0][F1][F2]xx[B0    ][B1    ][B2    ]xxxx |
                                                           :
    1F1B: 41 units, bubble 41 %, ...; 5 units (14 %) longer
    rank 0  [F0][F1]xxxxxx[B0    ][F2]xxxx[B1    ]xx[B2    :   ]|
    rank 1      [F0]xx[B0    ]xx[F1][B1    ]xx[F2][B2    ]x:xxxx|
                                                           <--->
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from matplotlib.axes import Axes

from ringsim.errors import ArgumentError
from ringsim.plot import sheet, style
from ringsim.plot.pipeline_step import (
    PHASE_NAME_POINTS,
    divide_step,
    draw_actions,
    name_schedule,
    size_step,
)
from ringsim.plot.rows import WIDTH_INCHES, lay_rows, strip_inches
from ringsim.plot.schedule_run import describe_constants, describe_length, find_unit, list_actions
from ringsim.plot.sheet import Picture
from ringsim.plot.style import percent
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.programs import Semantics
from ringsim.schedules.schedule import Schedule
from ringsim.simulator.schedules import ScheduleRun, simulate_schedule
from ringsim.traces.display import Style
from ringsim.traces.steps import StageActions, measure_peaks
from ringsim.traces.units import count

ROW_INCHES = 0.38
HEADING_INCHES = 0.45
MOST_INCHES = 9.0
HEADING_POINTS = 20.0  # the height of a schedule's heading, without the names of its phases
COMPACT_HEADING_POINTS = 9.0
MOST_NAME_LETTERS = 24
MOST_GAP = 40  # the most rows between two schedules


def plot_schedules(
    schedule: str | Schedule | ScheduleRun,
    *others: str | Schedule | ScheduleRun,
    costs: Costs | None = None,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    semantics: Semantics = "rendezvous",
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws schedules below each other on one time axis, so that their lengths can be compared.

    Each schedule has a heading with its length, its bubble and its live activations. A dashed line
    shows where the first schedule ends, and arrows show how much earlier or later the others end.

    Args:
        schedule: the first schedule, as a name, a ``Schedule``, or the result of
            ``ringsim.simulate_schedule``, which keeps its own costs.
        others: the schedules that are compared with the first.
        costs: the costs of all stages of a rank together, or None for a cost of 1 per forward,
            input and weight. A rank with several stages spends an equal part on each, so that all
            schedules do the same work.
        num_ranks: the number of ranks of the schedules that are given as names.
        num_microbatches: their number of microbatches.
        semantics: the condition under which a message starts, as in
            ``ringsim.simulate_schedule``.
        ax: the axes to draw on, or None to create a new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes. Call ``ax.figure.savefig(...)`` to save the figure.

    Raises:
        ArgumentError: the times of the schedules have different units.
        ScheduleError: no schedule has that name, or the schedule breaks a rule.
        Deadlock: the ranks would wait for each other forever.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> plot_schedules("1f1b", "zb_h1", num_ranks=4, num_microbatches=8).get_title(loc="left")
        '1F1B 33 units, ZB-H1 27 units: 6 units (18 %) shorter'
    """
    runs = []
    for each in (schedule, *others):
        if isinstance(each, str):
            each = make_schedule(each, num_ranks, num_microbatches)  # type: ignore[arg-type]
        if isinstance(each, Schedule):
            shared = _share(costs or Costs(), each.num_ranks / each.num_stages)
            each = simulate_schedule(each, shared, semantics=semantics)
        runs.append(each)
    if len({run.setting.sizes is None for run in runs}) != 1:
        raise ArgumentError(
            "cannot draw schedules on one axis unless all of them have links or none has. Simulate "
            "all of them with the same kind of costs."
        )
    ranks, gaps = sum(run.num_ranks for run in runs), len(runs) - 1
    inches = min(ROW_INCHES * ranks + HEADING_INCHES * gaps, MOST_INCHES)
    heading = COMPACT_HEADING_POINTS + PHASE_NAME_POINTS
    strip = strip_inches(ranks) + heading * (gaps + 1) / 72
    picture = Picture(lambda ax: _draw(runs, ax), WIDTH_INCHES, inches, strip)
    return sheet.show([picture], ax, **look)


def _share(costs: Costs, part: float) -> Costs:
    """Returns the costs of one of a rank's stages; a list has a cost for each stage already."""
    whole = {name: getattr(costs, name) for name in ("forward", "input", "weight", "backward")}
    numbers = {name: cost * part for name, cost in whole.items() if isinstance(cost, int | float)}
    return replace(costs, **numbers) if part != 1 else costs


def _draw(runs: Sequence[ScheduleRun], ax: Axes) -> None:
    compact = style.is_compact()
    longest = max(runs, key=lambda run: float(run.makespan))
    unit, name = find_unit(longest)
    heading = COMPACT_HEADING_POINTS if compact else HEADING_POINTS
    above = heading + PHASE_NAME_POINTS
    ranks, height = sum(run.num_ranks for run in runs), style.points(ax)[1]
    # the rows that a heading takes up; all rows share the height that the first heading leaves
    gap = math.ceil(min(above * ranks / max(height - above * len(runs), 1), MOST_GAP))
    names: list[str] = []
    for run in runs:
        names += [*(f"rank {rank}" for rank in range(run.num_ranks)), *[""] * gap]
    length = float(longest.makespan) / unit
    lanes = divide_step(height / len(names))
    rows = lay_rows(ax, names[:-gap], length, "time", name, lanes, above=above)
    end = float(runs[0].makespan) / unit
    for run in runs:
        actions = list_actions(run, unit)
        draw_actions(actions, rows)
        top, bottom = rows.first - 0.5, rows.first + run.num_ranks - 0.5
        style.write_beside(
            ax,
            _describe(run, actions, runs[0]),
            (0, top),
            (0, PHASE_NAME_POINTS + 2),
            where="data",
            va="bottom",
            weight="bold",
            fontsize=style.letters(10),
        )
        own = float(run.makespan) / unit
        ax.vlines(own, top, bottom, colors=style.INK, linewidths=1.2, zorder=8, gid="end")
        if own != end:
            ends = {"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0, "color": style.INK}
            y = bottom - 0.08
            ax.annotate("", (own, y), (end, y), arrowprops=ends, zorder=9, gid="difference")
        rows = replace(rows, first=rows.first + run.num_ranks + gap)
    label = f"end of {name_schedule(runs[0].name)}"
    ax.axvline(end, color=style.MUTED, zorder=7, linewidth=1.0, linestyle=(0, (3, 2)), label=label)
    style.dress(ax, *_words(runs), metadata=runs[0].setting.metadata)


def _describe(run: ScheduleRun, actions: StageActions, first: ScheduleRun) -> str:
    """Returns the heading of a schedule."""
    name = style.shorten(name_schedule(run.name), MOST_NAME_LETTERS)
    words = f"{name}: {describe_length(run)}, bubble {percent(run.bubble)}"
    if not style.is_compact():
        peak = max(measure_peaks(actions).peaks)
        words += f", at most {count(peak, 'live activation')}"
    return words if run is first else f"{words}; {_compare(run, first)}"


def _compare(run: ScheduleRun, first: ScheduleRun) -> str:
    more = float(run.makespan) - float(first.makespan)
    if not more:
        return "equally long"
    share = f" ({percent(abs(more) / float(first.makespan))})" if first.makespan else ""
    return f"{describe_length(run, abs(more))}{share} {'longer' if more > 0 else 'shorter'}"


def _words(runs: Sequence[ScheduleRun]) -> tuple[str, str, list[str]]:
    """Returns the title, the subtitle and the notes."""
    title = ", ".join(f"{name_schedule(run.name)} {describe_length(run)}" for run in runs)
    if len(runs) == 2:
        title += f": {_compare(runs[1], runs[0])}"
    sizes = [size_step(run.num_ranks, run.num_microbatches) for run in runs]
    constants = [describe_constants(run) for run in runs]
    if len(set(constants)) > 1:
        constants = [
            f"{name_schedule(run.name)}: {said[:1].lower()}{said[1:]}"
            for run, said in zip(runs, constants, strict=True)
        ]
    notes = ["The bubble is the part of the step in which ranks do not compute."]
    return title, "; ".join(dict.fromkeys(sizes)), [*notes, *dict.fromkeys(constants)]
