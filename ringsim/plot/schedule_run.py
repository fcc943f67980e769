"""The critical path over the rows of a step: along a rank while it computes, from rank to rank while a message travels.

A simulated schedule as a picture: its computations, its messages, and the critical path over them.

A prediction over what was measured: in each rank's row the measured computations above, the predicted ones below.

::

    rank 0   [F0 ][F1 ]xxxx[B0     ][B1     ]      measured, by kind
             [   ][   ]    [       ][       ]      predicted, coloured by how much too early or too late each one ends
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from ringsim.errors import ArgumentError
from ringsim.plot import style
from ringsim.plot.layout import OPERATION_LOOKS, TRANSFER, Rows
from ringsim.plot.steps import (
    ACTION_LOOKS,
    PHASE_NAME_POINTS,
    RECV_LANE,
    SEND_LANE,
    StepPicture,
    draw_actions,
    draw_busy_map,
    draw_step,
    percent,
    plot_step,
    step_height,
)
from ringsim.plot.style import Look
from ringsim.provenance import footer
from ringsim.schedules.schedule import COMPUTE_KINDS
from ringsim.simulator.critical_path import DATA, LINK_BUSY, PROGRAM, RECEIVER_LATE, START, CriticalPath
from ringsim.traces.events import NONE, SPAN, Ints
from ringsim.traces.lazy import NAMES
from ringsim.traces.steps import KINDS, StageActions, count_steps, find_step
from ringsim.traces.units import bytes_text, time_text, time_unit
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.predict.comparison import Comparison
    from ringsim.simulator.schedules import ScheduleRun

__all__ = ["REASON_COLOURS", "draw_path", "overlay_png", "plot_overlay", "plot_schedule_run", "schedule_run_png"]

REASON_COLOURS: Final = {PROGRAM: style.INK, DATA: style.BLUE, LINK_BUSY: style.VERMILLION, RECEIVER_LATE: style.PURPLE}
DASHES: Final[dict[str, Any]] = {PROGRAM: "solid", DATA: "solid", LINK_BUSY: (0, (1, 0.7)), RECEIVER_LATE: (0, (3, 1))}
WIDTH: Final = 2.2  # points
HALO: Final = 0.7  # white on either side, in widths of the line, so that it stands out from any box


def draw_path(ax: Axes, path: CriticalPath, *, unit: float, at: float = 0.0, width: float = WIDTH) -> list[Artist]:
    """Draws the path; each stretch has the colour of the reason why it did not begin earlier.

    Args:
        ax: axes with one row a rank, rank 0 at 0.
        path: the path.
        unit: how much of the path's time is one on the axis.
        at: where in its row the line runs while a rank computes, from the middle.
        width: of the line, in points.

    Returns:
        The legend's entries: one for each reason that occurs, with how often.
    """
    if not path.hops:
        return []
    start, end = (
        np.array([float(time) for time in times]) / unit for times in ([hop.start for hop in path.hops], [hop.end for hop in path.hops])
    )
    rank = np.array([hop.rank for hop in path.hops])
    source = np.array([hop.source if hop.source >= 0 else hop.rank for hop in path.hops])
    # A message that another one waits for leaves the link where it is: the line goes on from the sender's row.
    stays = np.array([after.source >= 0 and hop.source >= 0 for hop, after in zip(path.hops, path.hops[1:], strict=False)] + [False])
    below = np.where(stays, source, rank)
    lines = np.stack([np.stack([start, source + at], axis=-1), np.stack([end, below + at], axis=-1)], axis=1)
    reasons = np.array([PROGRAM if hop.reason == START else hop.reason for hop in path.hops])
    halo = LineCollection(
        list(lines), colors="white", linewidths=width * (1 + 2 * HALO), zorder=7.9, capstyle="round", gid="critical-path-halo"
    )
    ax.add_collection(halo, autolim=False)
    handles: list[Artist] = []
    for reason, colour in REASON_COLOURS.items():
        some = np.flatnonzero(reasons == reason)
        if len(some):
            drawn = LineCollection(
                list(lines[some]), colors=colour, linewidths=width, linestyles=[DASHES[reason]], zorder=8, capstyle="butt",
                gid=f"critical-path-{reason.replace(' ', '-')}",
            )  # fmt: skip
            ax.add_collection(drawn, autolim=False)
            label = f"critical path: {reason}, {len(some):,} times"
            handles.append(Line2D([], [], color=colour, linewidth=width, linestyle=DASHES[reason], label=label))
    return handles


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
        >>> from ringsim.simulator.schedules import simulate_schedule
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


def schedule_run_png(run: ScheduleRun) -> bytes:
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
        parts.append(f"{ACTION_LOOKS[COMPUTE_KINDS[code]].name} {span(times, length)}")
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
        kind=np.array(COMPUTE_KINDS)[operations.kind],
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
        >>> from ringsim.predict.comparison import compare
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


def overlay_png(comparison: Comparison) -> bytes:
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
