"""A simulated schedule as a picture: its computations, its messages, and the critical path over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ringsim.plot import style
from ringsim.plot.actions import ACTION_LOOKS, RECV_LANE, SEND_LANE
from ringsim.plot.bars import OPERATION_LOOKS, TRANSFER
from ringsim.plot.busy_map import draw_busy_map
from ringsim.plot.path_line import draw_path
from ringsim.plot.rows import Rows
from ringsim.plot.step_picture import NAMES, StepPicture, draw_step, percent, plot_step, step_height
from ringsim.simulator.operations import KIND_LETTERS
from ringsim.traces.steps import StageActions
from ringsim.traces.units import bytes_text, time_text, time_unit
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.simulator.schedule_run import ScheduleRun

__all__ = ["plot_schedule_run", "png"]

MOST_BOXES: Final = 20_000  # computations; more are drawn as a map
MOST_ROWS: Final = 64  # ranks, likewise
MAP_INCHES: Final = (9.6, 4.6)
THIN: Final = 1.2  # points: the critical path over a map


def plot_schedule_run(run: ScheduleRun, *, ax: Axes | None = None) -> Axes:
    """Draws a simulated schedule with its critical path.

    A small one is drawn as `plot_timeline` draws a recorded step. A large one, which has more computations than pixels, as a map: ranks
    from top to bottom, time to the right, and each point in the colour of what was computed there, the paler the less.

    Args:
        run: from ``ringsim.simulate_schedule``.
        ax: where to draw; a new figure by default, which also has the live activations of a small one.

    Returns:
        The axes of the rows. ``ax.figure.savefig(...)`` writes them.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.simulator.schedule_api import simulate_schedule
        >>> plot_schedule_run(simulate_schedule("1f1b", num_ranks=4, num_microbatches=8)).get_title(loc="left")
        '1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %'
    """
    with style.drawing():
        if _is_small(run):
            picture = _picture(run)
            if ax is None:
                return plot_step(picture)
            draw_step(picture, ax)
            return ax
        if ax is not None:
            _draw_map(run, ax)
            return ax
        figure = plt.figure(figsize=MAP_INCHES)
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *MAP_INCHES, _draw_map(run, ax))])
    return ax


def png(run: ScheduleRun) -> bytes:
    """Draws a simulated schedule for a notebook: a PNG, the same bytes for the same schedule and costs."""
    with style.drawing():
        figure = Figure()
        ax = figure.add_axes((0, 0, 1, 1))
        small = _is_small(run)
        picture = _picture(run) if small else None
        size = (MAP_INCHES[0], step_height(picture.actions)) if picture is not None else MAP_INCHES
        style.fit(figure, [(ax, *size, style.Margins(0, 0, 0, 0))])
        margins = draw_step(picture, ax) if picture is not None else _draw_map(run, ax)
        style.fit(figure, [(ax, *size, margins)])
    return style.figure_png(figure, description=repr(run))


def _is_small(run: ScheduleRun) -> bool:
    return run.num_ranks <= MOST_ROWS and len(run.operations) <= MOST_BOXES and float(run.makespan) > 0


def _unit(run: ScheduleRun) -> tuple[float, str]:
    """Returns how much of the run's time is one on the axis, and what it is called."""
    if run.setting.sizes is None:
        return 1.0, "units"
    unit_ns, name = time_unit(float(run.makespan) * 1e9)
    return unit_ns * 1e-9, name


def _length(run: ScheduleRun) -> str:
    makespan = float(run.makespan)
    return time_text(makespan * 1e9) if run.setting.sizes is not None else f"{makespan:,.6g} units"


def _about(run: ScheduleRun) -> str:
    path, makespan = run.critical_path, float(run.makespan)
    on_links = float(path.travelling) / makespan if makespan else 0.0
    return f"{_length(run)}; the critical path is on links for {percent(on_links)} of it"


def _constants(run: ScheduleRun) -> str:
    """Says what was put in: times by kind, sizes, links."""
    operations, setting = run.operations, run.setting

    def span(values: Any, text: Callable[[float], str]) -> str:
        low, high = text(float(values.min())), text(float(values.max()))
        return low if low == high else f"{low} to {high}"

    def length(time: float) -> str:
        return time_text(time * 1e9) if setting.sizes is not None else f"{time:,.6g}"

    parts = []
    for code in np.unique(operations.kind).tolist():
        times = setting.prices.duration[code][np.unique(operations.stage[operations.kind == code])]
        parts.append(f"{ACTION_LOOKS[KIND_LETTERS[code]].name} {span(times, length)}")
    way = operations.direction, operations.stage
    met = operations.sent_after >= 0
    if met.any():
        latency, occupancy = setting.prices.latency[way][met], setting.prices.occupancy[way][met]
        if setting.sizes is None:
            parts.append(f"messages {span(latency, length)}")
        else:
            sizes = span(np.array(setting.sizes), bytes_text)
            parts.append(f"messages of {sizes}: on the link {span(occupancy, length)}, latency {span(latency, length)}")
    return f"Put in: {'; '.join(parts)}."


def _picture(run: ScheduleRun) -> StepPicture:
    operations = run.operations
    unit, name = _unit(run)
    actions = StageActions(
        schedule=run.name,
        rank=operations.rank,
        stage=operations.stage,
        kind=np.array(KIND_LETTERS)[operations.kind],
        microbatch=operations.microbatch,
        start=run.starts.astype(np.float64) / unit,
        end=run.ends.astype(np.float64) / unit,
    )

    def draw_messages(ax: Axes, rows: Rows) -> list[Artist]:
        return _draw_messages(ax, rows, run, unit)

    def draw_over(ax: Axes, rows: Rows) -> list[Artist]:
        return draw_path(ax, run.critical_path, unit=unit, at=float(rows.bottom[0]) - 0.07)

    messages = np.flatnonzero(operations.sent_after >= 0)
    travel = _travel_times(run, messages)
    return StepPicture(
        actions=actions,
        time=f"time ({name})",
        metadata=run.setting.metadata,
        about=_about(run),
        draw_messages=draw_messages if travel.any() else None,
        draw_over=draw_over,
        notes=(_constants(run),),
    )


def _travel_times(run: ScheduleRun, messages: Any) -> Any:
    """Returns how long messages are on their way, from their start on the link to their arrival."""
    operations, prices = run.operations, run.setting.prices
    which = operations.direction[messages], operations.stage[messages]
    return (prices.occupancy[which] + prices.latency[which]).astype(np.float64)


def _draw_messages(ax: Axes, rows: Rows, run: ScheduleRun, unit: float) -> list[Artist]:
    """Draws each message twice, with its sender and with its receiver, from its start on the link to its arrival."""
    operations = run.operations
    messages = np.flatnonzero(operations.sent_after >= 0)
    start = run.message_starts[messages].astype(np.float64) / unit
    end = start + _travel_times(run, messages) / unit
    look = OPERATION_LOOKS[TRANSFER]
    sender = operations.rank[operations.sent_after[messages]]
    for lane, places in ((SEND_LANE, sender), (RECV_LANE, operations.rank[messages])):
        corners: Any = rows.boxes(places, np.full(len(places), lane), start, end)
        ax.add_collection(PolyCollection(corners, facecolors=look.colour, linewidths=0, zorder=3, gid=f"messages-{lane}"), autolim=False)
    return [Patch(facecolor=look.colour, label="message on its way")]


def _draw_map(run: ScheduleRun, ax: Axes) -> style.Margins:
    """Draws a large schedule; returns the room that the words around it take."""
    unit, name = _unit(run)
    title = f"{NAMES.get(run.name, run.name)}, {count(run.num_ranks, 'rank')}, {count(run.num_microbatches, 'microbatch')}"
    title = title.replace("microbatchs", "microbatches") + f": bubble {percent(run.bubble)}"
    handles: list[Artist] = []
    if float(run.makespan) > 0:
        handles = draw_busy_map(ax, run, length=float(run.makespan) / unit)
        handles += draw_path(ax, run.critical_path, unit=unit, width=THIN)
    ax.set_xlabel(f"time ({name})", loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    known = "" if run.closed_form is None else f"; closed form {float(run.closed_form):,.6g}"
    return style.dress(
        ax, title, subtitle=_about(run) + known, handles=handles, metadata=run.setting.metadata, left=58, right=14, below=40,
        notes=["Each point: the share of the time in which its ranks compute, coloured by what; the paler, the less.", _constants(run)],
    )  # fmt: skip
