"""Draws simulated schedules with their critical paths.

A small schedule is drawn like a recorded step. A schedule with more computations than pixels is
drawn as a map, which shows the share of each kind of computation by rank and time. The critical
path runs along a rank while the rank computes, and from rank to rank while a message travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from ringsim.plot import sheet, style
from ringsim.plot.pipeline_step import (
    ACTION_LOOKS,
    StepPicture,
    draw_flights,
    step_picture,
    title_step,
)
from ringsim.plot.rows import divide, lay_rows, strip_inches
from ringsim.plot.sheet import Picture
from ringsim.plot.style import percent
from ringsim.schedules.schedule import COMPUTE_KINDS
from ringsim.simulator.critical_path import (
    DATA,
    LINK_BUSY,
    PROGRAM,
    RECEIVER_LATE,
    START,
    CriticalPath,
)
from ringsim.traces.display import Images, Style
from ringsim.traces.events import Ints
from ringsim.traces.looks import LOOKS
from ringsim.traces.steps import StageActions
from ringsim.traces.units import bytes_text, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.simulator.schedules import ScheduleRun

MOST_BOXES = 20_000  # schedules with more computations are drawn as a map
MOST_ROWS = 64  # schedules with more ranks are drawn as a map
MAP_INCHES = (9.6, 4.6)
MAP_COLUMNS = 960
MAP_ROWS = 512
IDLE = style.GROUND
PATH_COLOUR = LOOKS["critical_path"].light
PATH_DASHES: dict[str, Any] = {
    PROGRAM: "solid",
    DATA: (0, (6, 1)),
    LINK_BUSY: (0, (1, 0.7)),
    RECEIVER_LATE: (0, (3, 1)),
}
PATH_WIDTH = 2.2  # points
THIN = 1.2  # the width of the path over a map, in points
# the width of the white margin on both sides of the path, relative to the path's width; it gives
# contrast with any box
HALO = 0.7


def plot_schedule_run(run: ScheduleRun, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws a simulated schedule with its critical path.

    A small schedule is drawn as ``plot_timeline`` draws a recorded step. A schedule with more
    computations than pixels is drawn as a map, with ranks from top to bottom and time to the right.
    Each point has the colour of the computation there, and is paler if the ranks compute less.

    Args:
        run: the simulated schedule, from ``ringsim.simulate_schedule``.
        ax: the axes to draw on, or None to create a new figure, which for a small schedule also
            shows the live activations.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes of the rows. Call ``ax.figure.savefig(...)`` to save the figure.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> plot_schedule_run(simulate_schedule("1f1b", num_ranks=4, num_microbatches=8)).get_title(
        ...     loc="left"
        ... )
        '1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %'
    """
    return sheet.show([_picture(run, with_curve=ax is None)], ax, **look)


def schedule_run_images(run: ScheduleRun) -> Images:
    """Draws a simulated schedule for a notebook."""
    return sheet.draw_images([_picture(run)], repr(run))


def _picture(run: ScheduleRun, *, with_curve: bool = False) -> Picture:
    is_small = run.num_ranks <= MOST_ROWS and len(run.operations) <= MOST_BOXES
    if is_small and float(run.makespan) > 0:
        return step_picture(_describe_step(run), with_curve=with_curve)
    return Picture(lambda ax: _draw_map(run, ax), *MAP_INCHES, strip_inches(run.num_ranks))


def find_unit(run: ScheduleRun) -> tuple[float, str]:
    """Returns the unit of a picture's time axis, in the unit of the costs, and its name."""
    if run.setting.sizes is None:
        return 1.0, "units"
    unit_ns, name = time_unit(float(run.makespan) * 1e9)
    return unit_ns * 1e-9, name


def _length(run: ScheduleRun, time: float) -> str:
    return time_text(time * 1e9) if run.setting.sizes is not None else f"{time:,.6g}"


def describe_length(run: ScheduleRun, time: float | None = None) -> str:
    """Returns a time with its unit, by default the length of the step."""
    text = _length(run, float(run.makespan) if time is None else time)
    return text if run.setting.sizes is not None else f"{text} units"


def _about(run: ScheduleRun) -> str:
    path, makespan = run.critical_path, float(run.makespan)
    on_links = percent(float(path.travelling) / makespan if makespan else 0.0)
    return f"{describe_length(run)}; the critical path is on links for {on_links} of this time"


def describe_constants(run: ScheduleRun) -> str:
    """Returns a note about the simulated times of each kind, the message sizes and the links."""
    operations, setting = run.operations, run.setting

    def span(values: Any, text: Callable[[float], str] = lambda time: _length(run, time)) -> str:
        low, high = text(float(values.min())), text(float(values.max()))
        return low if low == high else f"{low} to {high}"

    parts = []
    for code in np.unique(operations.kind).tolist():
        times = setting.prices.duration[code][np.unique(operations.stage[operations.kind == code])]
        parts.append(f"{ACTION_LOOKS[COMPUTE_KINDS[code]].name} {span(times)}")
    way = operations.direction, operations.stage
    met = operations.sent_after >= 0
    if met.any():
        latency, occupancy = setting.prices.latency[way][met], setting.prices.occupancy[way][met]
        if setting.sizes is None:
            parts.append(f"messages {span(latency)}")
        else:
            sizes = span(np.array(setting.sizes), bytes_text)
            parts.append(
                f"messages of {sizes}: on the link {span(occupancy)}, latency {span(latency)}"
            )
    return f"Simulated with {'; '.join(parts)}."


def list_actions(run: ScheduleRun, unit: float) -> StageActions:
    """Returns a run's computations, with times in ``unit``."""
    operations = run.operations
    return StageActions(
        schedule=run.name,
        rank=operations.rank,
        stage=operations.stage,
        kind=np.array(COMPUTE_KINDS)[operations.kind],
        microbatch=operations.microbatch,
        start=run.starts.astype(np.float64) / unit,
        end=run.ends.astype(np.float64) / unit,
    )


def _describe_step(run: ScheduleRun) -> StepPicture:
    operations, prices = run.operations, run.setting.prices
    unit, name = find_unit(run)
    messages = np.flatnonzero(operations.sent_after >= 0)
    way = operations.direction[messages], operations.stage[messages]
    travel = (prices.occupancy[way] + prices.latency[way]).astype(np.float64)
    start = run.message_starts[messages].astype(np.float64) / unit
    sources, targets = operations.rank[operations.sent_after[messages]], operations.rank[messages]
    return StepPicture(
        actions=list_actions(run, unit),
        time="time",
        unit=name,
        metadata=run.setting.metadata,
        about=_about(run),
        draw_messages=(
            lambda rows: draw_flights(rows, sources, targets, start, start + travel / unit)
        )
        if travel.any()
        else None,
        draw_over=lambda rows: draw_path(
            rows.ax, run.critical_path, unit=unit, at=float(rows.lanes.bottom[0]) - 0.07
        ),
        notes=(describe_constants(run),),
    )


# -- the critical path


def draw_path(
    ax: Axes, path: CriticalPath, *, unit: float, at: float = 0.0, width: float = PATH_WIDTH
) -> None:
    """Draws the critical path in colours that show why each part did not begin earlier.

    ``unit`` is the length of 1 on the axis, in the path's unit of time. While a rank computes, the
    line runs ``at`` below the middle of the rank's row. The line is ``width`` points wide. The
    legend shows how many times each reason occurs.
    """
    hops = path.hops
    if not hops:
        return
    start, end = np.array([(hop.start, hop.end) for hop in hops], dtype=float).T / unit
    rank, sender = np.array([(hop.rank, hop.source) for hop in hops]).T
    sends = sender >= 0
    source = np.where(sends, sender, rank)
    # If the next message waits for this one on the link, the line continues in the sender's row.
    stays = sends & np.append(sends[1:], False)
    lines = np.stack([start, source + at, end, np.where(stays, source, rank) + at], axis=-1)
    lines = lines.reshape(-1, 2, 2)
    reasons = np.array([PROGRAM if hop.reason == START else hop.reason for hop in hops])
    halo = LineCollection(
        list(lines), colors=style.GROUND, linewidths=width * (1 + 2 * HALO), zorder=7.9,
        capstyle="round", gid="critical-path-halo",
    )  # fmt: skip
    ax.add_collection(halo, autolim=False)
    for reason, dashes in PATH_DASHES.items():
        some = reasons == reason
        if some.any():
            times = "" if style.is_compact() else f", {np.count_nonzero(some):,} times"
            drawn = LineCollection(
                list(lines[some]), linewidths=width, color=PATH_COLOUR, linestyle=dashes, zorder=8,
                gid=f"critical-path-{reason.replace(' ', '-')}",
                label=f"critical path: {reason}{times}",
            )  # fmt: skip
            ax.add_collection(drawn, autolim=False)


# -- a map of a large schedule


def _draw_map(run: ScheduleRun, ax: Axes) -> None:
    unit, name = find_unit(run)
    length = float(run.makespan) / unit
    names = [f"rank {rank}" for rank in range(run.num_ranks)]
    lay_rows(ax, names, length or 1.0, "time", name, divide())
    ax.grid(visible=False)
    if length:
        shares = measure_shares(run, min(run.num_ranks, MAP_ROWS), MAP_COLUMNS)
        _draw_shares(ax, shares, length, run.num_ranks)
        draw_path(ax, run.critical_path, unit=unit, width=THIN)
    title = title_step(run.name, run.num_ranks, run.num_microbatches, run.bubble)
    known = "" if run.closed_form is None else f"; closed form {float(run.closed_form):,.6g}"
    notes = [
        "Each point shows how much of the time its ranks compute, in the colour of the kind of "
        "computation. Paler means less.",
        describe_constants(run),
    ]
    style.dress(ax, title, _about(run) + known, notes, metadata=run.setting.metadata)


def measure_shares(run: ScheduleRun, rows: int, columns: int) -> Ints:
    """Measures what share of each time period each kind of computation takes up.

    Neighbouring ranks are combined into ``rows`` groups, at most one per rank, and the step is cut
    into ``columns`` equal periods.

    Returns:
        The shares, from 0 to 1, as an array of shape (rows, columns, 4). The kinds are in the order
        of ``COMPUTE_KINDS``.
    """
    operations, ends = run.operations, run.ends.astype(np.float64)
    lasts = run.setting.prices.duration[operations.kind, operations.stage].astype(np.float64)
    edges = np.linspace(0.0, float(run.makespan), columns + 1)
    shares = np.zeros((rows, columns, len(COMPUTE_KINDS)))
    row_of = np.arange(run.num_ranks) * rows // run.num_ranks
    for rank in range(run.num_ranks):
        own = slice(int(operations.first[rank]), int(operations.first[rank + 1]))
        for code in np.unique(operations.kind[own]).tolist():
            some = operations.kind[own] == code
            until, long = ends[own][some], lasts[own][some]
            done = np.cumsum(long)
            # the work done so far at the begin and end of each computation; linear in between
            times = np.stack([until - long, until], axis=1).ravel()
            spent = np.stack([done - long, done], axis=1).ravel()
            shares[row_of[rank], :, code] += np.diff(np.interp(edges, times, spent))
    members = np.bincount(row_of, minlength=rows)
    return shares / (members[:, None, None] * (float(run.makespan) / columns))


def _draw_shares(ax: Axes, shares: Ints, length: float, ranks: int) -> None:
    """Draws shares as an image over the rows."""
    colours = np.array([to_rgb(ACTION_LOOKS[letter].colour) for letter in COMPUTE_KINDS])
    busy = shares.sum(axis=-1, keepdims=True)
    # idle time is transparent, so that it has the colour of any ground
    mixed = np.divide(shares @ colours, busy, out=np.ones((*busy.shape[:2], 3)), where=busy > 0)
    image = np.clip(np.concatenate([mixed, busy], axis=-1), 0.0, 1.0)
    ax.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, length, ranks - 0.5, -0.5),
        zorder=1,
        gid="busy-map",
    )
    for code, look in enumerate(map(ACTION_LOOKS.__getitem__, COMPUTE_KINDS)):
        if shares[..., code].any():
            style.swatch(ax, look.name, look.colour)
    style.swatch(ax, "bubble", IDLE)
