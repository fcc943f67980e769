"""Simulated schedules as pictures, with their critical path.

Also one run over another, such as a prediction over what was measured. A small schedule is drawn as
a recorded step is. One with more computations than pixels is drawn as a map: for each rank and
stretch of time, how much of it was spent on what. The critical path runs along a rank while it
computes, and from rank to rank while a message travels. A prediction stands in each rank's row
under what was measured::

    rank 0  [F0 ][F1 ]xxxx[B0  ][B1  ]  measured, by kind
            [   ][   ]    [    ][    ]  predicted, coloured by how much too early or too late each
                                        one ends
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from ringsim.errors import ArgumentError
from ringsim.plot import sheet, style
from ringsim.plot.rows import Lanes, Rows, lay_rows
from ringsim.plot.sheet import Picture
from ringsim.plot.steps import (
    ACTION_LOOKS,
    PHASE_NAME_POINTS,
    StepPicture,
    draw_actions,
    draw_flights,
    name_schedule,
    step_picture,
)
from ringsim.plot.style import Look, percent
from ringsim.provenance import footer
from ringsim.schedules.schedule import COMPUTE_KINDS
from ringsim.simulator.critical_path import (
    DATA,
    LINK_BUSY,
    PROGRAM,
    RECEIVER_LATE,
    START,
    CriticalPath,
)
from ringsim.traces.events import NONE, SPAN, Events, Ints
from ringsim.traces.lazy import Style
from ringsim.traces.steps import StageActions, count_steps, find_step, is_action
from ringsim.traces.units import bytes_text, time_text, time_unit
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.prediction.comparison import Comparison
    from ringsim.simulator.schedules import ScheduleRun

__all__ = [
    "draw_path",
    "measure_shares",
    "overlay_png",
    "plot_overlay",
    "plot_schedule_run",
    "schedule_run_png",
]

MOST_BOXES: Final = 20_000  # computations; more are drawn as a map
MOST_ROWS: Final = 64  # ranks, likewise
MAP_INCHES: Final = (9.6, 4.6)
MAP_COLUMNS: Final = 960
MAP_ROWS: Final = 512
IDLE: Final = "#FFFFFF"
PATH_COLOURS: Final = {
    PROGRAM: style.INK,
    DATA: style.BLUE,
    LINK_BUSY: style.VERMILLION,
    RECEIVER_LATE: style.PURPLE,
}
PATH_DASHES: Final[dict[str, Any]] = {
    PROGRAM: "solid",
    DATA: "solid",
    LINK_BUSY: (0, (1, 0.7)),
    RECEIVER_LATE: (0, (3, 1)),
}
PATH_WIDTH: Final = 2.2  # points
THIN: Final = 1.2  # points: the path over a map
# white on either side of the path, in widths of the line, so that it stands out from any box
HALO: Final = 0.7


def plot_schedule_run(run: ScheduleRun, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws a simulated schedule with its critical path.

    A small one is drawn as ``plot_timeline`` draws a recorded step. A large one, which has more
    computations than pixels, is drawn as a map: ranks from top to bottom, time to the right, each
    point in the colour of what was computed there, and the paler the less.

    Args:
        run: from ``ringsim.simulate_schedule``.
        ax: where to draw; a new figure by default, which also has the live activations of a small
            one.
        **look: size, theme and so on of the new figure, see `ringsim.traces.lazy.Style`.

    Returns:
        The axes of the rows. ``ax.figure.savefig(...)`` writes them.

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


def schedule_run_png(run: ScheduleRun) -> bytes:
    """Draws a simulated schedule for a notebook.

    A PNG, the same bytes for the same schedule and costs.
    """
    return sheet.picture_png([_picture(run)], repr(run))


def _picture(run: ScheduleRun, *, with_curve: bool = False) -> Picture:
    is_small = run.num_ranks <= MOST_ROWS and len(run.operations) <= MOST_BOXES
    if is_small and float(run.makespan) > 0:
        return step_picture(_describe_step(run), with_curve=with_curve)
    return Picture(lambda ax: _draw_map(run, ax), *MAP_INCHES)


def _unit(run: ScheduleRun) -> tuple[float, str]:
    if run.setting.sizes is None:
        return 1.0, "units"
    unit_ns, name = time_unit(float(run.makespan) * 1e9)
    return unit_ns * 1e-9, name


def _length(run: ScheduleRun, time: float) -> str:
    return time_text(time * 1e9) if run.setting.sizes is not None else f"{time:,.6g}"


def _about(run: ScheduleRun) -> str:
    path, makespan = run.critical_path, float(run.makespan)
    on_links = float(path.travelling) / makespan if makespan else 0.0
    units = " units" if run.setting.sizes is None else ""
    return (
        f"{_length(run, makespan)}{units}; "
        f"the critical path is on links for {percent(on_links)} of it"
    )


def _constants(run: ScheduleRun) -> str:
    """Says what the schedule was simulated with: times by kind, sizes, links."""
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
    return f"Simulated with: {'; '.join(parts)}."


def _describe_step(run: ScheduleRun) -> StepPicture:
    operations, prices = run.operations, run.setting.prices
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
    messages = np.flatnonzero(operations.sent_after >= 0)
    way = operations.direction[messages], operations.stage[messages]
    travel = (prices.occupancy[way] + prices.latency[way]).astype(np.float64)
    start = run.message_starts[messages].astype(np.float64) / unit
    sources, targets = operations.rank[operations.sent_after[messages]], operations.rank[messages]
    return StepPicture(
        actions=actions,
        time=f"time ({name})",
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
        notes=(_constants(run),),
    )


# -- the critical path


def draw_path(
    ax: Axes, path: CriticalPath, *, unit: float, at: float = 0.0, width: float = PATH_WIDTH
) -> list[Artist]:
    """Draws the critical path; the colour of each stretch says why it did not begin earlier.

    A ``unit`` of the path's time is one on the axis. The line, ``width`` points wide, runs ``at``
    below the middle of its rank's row while the rank computes. Returns the legend's entries: one
    for each reason that occurs, with how often.
    """
    hops = path.hops
    if not hops:
        return []
    start = np.array([hop.start for hop in hops], dtype=float) / unit
    end = np.array([hop.end for hop in hops], dtype=float) / unit
    rank, sender = np.array([hop.rank for hop in hops]), np.array([hop.source for hop in hops])
    sends = sender >= 0
    source = np.where(sends, sender, rank)
    # A message that another one waits for leaves the link where it is: the line goes on from the
    # sender's row.
    stays = sends & np.append(sends[1:], False)
    lines = np.stack([start, source + at, end, np.where(stays, source, rank) + at], axis=-1)
    lines = lines.reshape(-1, 2, 2)
    reasons = np.array([PROGRAM if hop.reason == START else hop.reason for hop in hops])
    halo = LineCollection(
        list(lines),
        colors="white",
        linewidths=width * (1 + 2 * HALO),
        zorder=7.9,
        capstyle="round",
        gid="critical-path-halo",
    )
    ax.add_collection(halo, autolim=False)
    handles: list[Artist] = []
    for reason, colour in PATH_COLOURS.items():
        some = reasons == reason
        if some.any():
            look: dict[str, Any] = {"color": colour, "linestyle": PATH_DASHES[reason]}
            drawn = LineCollection(
                list(lines[some]), linewidths=width, zorder=8, capstyle="butt",
                gid=f"critical-path-{reason.replace(' ', '-')}", **look,
            )  # fmt: skip
            ax.add_collection(drawn, autolim=False)
            label = f"critical path: {reason}, {np.count_nonzero(some):,} times"
            handles.append(style.entry(label, linewidth=width, **look))
    return handles


# -- a map of a large schedule


def _draw_map(run: ScheduleRun, ax: Axes) -> None:
    unit, name = _unit(run)
    length = float(run.makespan) / unit
    names = [f"rank {rank}" for rank in range(run.num_ranks)]
    lay_rows(ax, names, length or 1.0, f"time ({name})", LANES)
    ax.grid(visible=False)
    handles: list[Artist] = []
    if length:
        shares = measure_shares(run, min(run.num_ranks, MAP_ROWS), MAP_COLUMNS)
        handles = _draw_shares(ax, shares, length, run.num_ranks)
        handles += draw_path(ax, run.critical_path, unit=unit, width=THIN)
    title = (
        f"{name_schedule(run.name)}, {count(run.num_ranks, 'rank')}, "
        f"{count(run.num_microbatches, 'microbatch')}"
    )
    known = "" if run.closed_form is None else f"; closed form {float(run.closed_form):,.6g}"
    notes = [
        (
            "Each point: the share of the time in which its ranks compute, coloured by what; the "
            "paler, the less."
        ),
        _constants(run),
    ]
    title += f": bubble {percent(run.bubble)}"
    style.dress(ax, title, _about(run) + known, notes, handles, metadata=run.setting.metadata)


def measure_shares(run: ScheduleRun, rows: int, columns: int) -> Ints:
    """Measures which part of each stretch of time ranks spend on each kind of computation.

    Neighbours are put into ``rows`` groups, at most as many as ranks, and the step is cut into
    ``columns`` equal stretches.

    Returns:
        Shares from 0 to 1, shape (rows, columns, 4): by the kind's place in ``COMPUTE_KINDS``.
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
            # how much is done when a computation begins, and when it ends; between them, a line
            times = np.stack([until - long, until], axis=1).ravel()
            spent = np.stack([done - long, done], axis=1).ravel()
            shares[row_of[rank], :, code] += np.diff(np.interp(edges, times, spent))
    members = np.bincount(row_of, minlength=rows)
    return shares / (members[:, None, None] * (float(run.makespan) / columns))


def _draw_shares(ax: Axes, shares: Ints, length: float, ranks: int) -> list[Artist]:
    """Draws shares as an image over the rows, the paler the less; returns the legend's entries."""
    colours = np.array([to_rgb(ACTION_LOOKS[letter].colour) for letter in COMPUTE_KINDS])
    busy = shares.sum(axis=-1, keepdims=True)
    image = np.clip(shares @ colours + (1 - busy) * np.array(to_rgb(IDLE)), 0.0, 1.0)
    xlim, ylim = ax.get_xlim(), ax.get_ylim()
    ax.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, length, ranks - 0.5, -0.5),
        zorder=1,
        gid="busy-map",
    )
    ax.set(xlim=xlim, ylim=ylim)
    handles: list[Artist] = [
        Patch(facecolor=ACTION_LOOKS[letter].colour, label=ACTION_LOOKS[letter].name)
        for code, letter in enumerate(COMPUTE_KINDS)
        if shares[..., code].any()
    ]
    return [*handles, Patch(facecolor=IDLE, edgecolor="#B0B0B0", linewidth=0.5, label="bubble")]


# -- a prediction over what was measured


WIDTH_INCHES: Final = 9.6
ROW_INCHES: Final = 0.66
LANES: Final = Lanes(np.array([-0.33, 0.06]), np.array([0.02, 0.42]), (-0.44, -0.37))
MEASURED_LANE, PREDICTED_LANE = 0, 1
MEASURED_LOOK: Final = Look("measured", "#C9C9C9", edge=0.6)
# Bounds between the looks, as parts of the step: an end that is off by 1 % is on time.
BOUNDS: Final = (-0.05, -0.01, 0.01, 0.05)
INDIGO: Final = "#4B4A9E"  # the blues are those of forward
LOOKS: Final = (
    Look("> 5 % of the step earlier", INDIGO, "\\\\\\\\", edge=0.6),
    Look("1 to 5 % earlier", "#C3C1E8", "\\\\\\\\", edge=0.6),
    Look("within 1 %", "#EDEDED", "", "#9A9A9A", edge=0.6),
    Look("1 to 5 % later", "#F1BE99", "////", edge=0.6),
    Look("> 5 % later", style.VERMILLION, "////", edge=0.6),
)


def plot_overlay(
    comparison: Comparison,
    *,
    step: int | None = None,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws a step of the second run (the prediction) under that of the first.

    Also how much earlier or later each computation ends.

    Args:
        comparison: of ``ringsim.compare``.
        step: which step, from 0; None for the one of median length.
        ax: where to draw; a new figure by default.
        **look: size, theme and so on of the new figure, see `ringsim.traces.lazy.Style`.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ArgumentError: there is no such step, or nothing was compared but messages.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.prediction.comparison import compare
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> def run(end_ns):
        ...     events = make_events(
        ...         {
        ...             "rank": [0],
        ...             "op": [OP_CODES["span"]],
        ...             "label": [0],
        ...             "post_ns": [0],
        ...             "done_ns": [end_ns],
        ...         },
        ...         Tables(labels=("work",)),
        ...     )
        ...     return Trace(events, {"world_size": 1})
        >>> plot_overlay(compare(run(2_000_000), run(1_900_000))).get_title(loc="left")
        'Second 1.9 ms, first 2 ms: 5.0 % shorter'
    """
    return sheet.show([_overlay(comparison, step)], ax, **look)


def overlay_png(comparison: Comparison) -> bytes:
    """Draws the step of median length, for a notebook.

    A PNG, the same bytes for the same comparison.
    """
    return sheet.picture_png([_overlay(comparison, None)], comparison.describe())


def _overlay(comparison: Comparison, step: int | None) -> Picture:
    lengths = comparison.real_steps_s
    if step is None:
        step = int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])
    if not 0 <= step < len(lengths):
        raise ArgumentError(
            f"step must be from 0 to {len(lengths) - 1}, got {step}. Leave it out for the one of "
            "median length."
        )
    height = float(np.clip(ROW_INCHES * comparison.real.world_size + 0.15, 1.2, 8.5))
    return Picture(lambda ax: _draw_overlay(comparison, step, ax), WIDTH_INCHES, height)


def _draw_overlay(comparison: Comparison, step: int, ax: Axes) -> None:
    real_s, virtual_s = comparison.real_steps_s[step], comparison.virtual_steps_s[step]
    unit_ns, unit = time_unit(round(max(real_s, virtual_s) * 1e9))
    steps = count_steps(comparison.real.events)
    names = [f"rank {rank}" for rank in range(comparison.real.world_size)]
    what = f"time since the {'step' if steps else 'run'} began ({unit})"
    length = max(real_s, virtual_s) * 1e9 / unit_ns
    rows = lay_rows(ax, names, length, what, LANES, above=PHASE_NAME_POINTS)
    chosen = _choose(comparison, step)
    if steps:
        measured, begin = find_step(comparison.real, step), comparison.real_begin_ns[step]
        start, end = (measured.start - begin) / unit_ns, (measured.end - begin) / unit_ns
        handles = draw_actions(replace(measured, start=start, end=end), rows)
    else:
        handles = _draw_measured(rows, comparison, step, chosen, unit_ns)
    handles += _draw_predicted(rows, comparison, step, chosen, unit_ns)
    first, second = comparison.names
    for length_s, dash, name in ((real_s, (0, ()), first), (virtual_s, (0, (4, 2)), second)):
        line: dict[str, Any] = {"color": style.INK, "linewidth": 1.2, "linestyle": dash}
        ax.axvline(length_s * 1e9 / unit_ns, zorder=8, **line)
        handles.append(style.entry(f"end, {name}", **line))
    above, below, source = "the first run", "the second", "The second"
    if comparison.predicts:
        above, below, source = "what was measured", "what was predicted", "Prediction"
    if comparison.called is not None:
        above, below = comparison.called
        source = source if comparison.predicts else below
    notes = [
        f"In each row: above {above}, below {below}. Colours: how much earlier or later it "
        "ends, as a part of the step.",
        f"{source}: {footer(comparison.virtual.metadata)}.",
    ]
    words = _words(comparison, step, steps)
    style.dress(ax, *words, notes, handles, metadata=comparison.real.metadata)


def _choose(comparison: Comparison, step: int) -> Ints:
    """Returns the computations of a step, by their place in the comparison.

    Of a run without steps all spans, else what it waited in.
    """
    events, index = comparison.real.events, comparison.real_index
    drawn = is_action(events) if count_steps(events) else events.kind == SPAN
    spans = (events.kind[index] == SPAN) & (events.label[index] != NONE)
    waited = events.wait_ns[index] != NONE
    waited &= comparison.virtual.events.wait_ns[comparison.virtual_index] != NONE
    which = spans & drawn[index] if spans.any() else waited
    chosen: Ints = np.flatnonzero((comparison.step == step) & which)
    if len(chosen) == 0:
        raise ArgumentError(
            "a comparison must have spans or waits to be drawn, got none. Put the work of the "
            "ranks into ringsim.span."
        )
    return chosen


def _draw_measured(
    rows: Rows, comparison: Comparison, step: int, chosen: Ints, unit_ns: float
) -> list[Artist]:
    events, index = comparison.real.events, comparison.real_index[chosen]
    times = _times(events, index, comparison.real_begin_ns[step], unit_ns)
    look = replace(MEASURED_LOOK, name=comparison.names[0])
    rows.draw(look, "measured", events.rank[index], MEASURED_LANE, *times)
    return [style.swatch(look)]


def _times(events: Events, index: Ints, begin_ns: int, unit_ns: float) -> tuple[Ints, Ints]:
    """Returns when spans and waits begin and end, on the time axis."""
    begins = np.where(events.kind[index] == SPAN, events.post_ns[index], events.wait_ns[index])
    return (begins - begin_ns) / unit_ns, (events.done_ns[index] - begin_ns) / unit_ns


def _draw_predicted(
    rows: Rows, comparison: Comparison, step: int, chosen: Ints, unit_ns: float
) -> list[Artist]:
    """Draws the predicted computations, each in the look for how far off its end is."""
    events, index = comparison.virtual.events, comparison.virtual_index[chosen]
    times = _times(events, index, comparison.virtual_begin_ns[step], unit_ns)
    off = np.searchsorted(BOUNDS, comparison.lag_s[chosen] / comparison.real_steps_s[step])
    looks = dict(enumerate(LOOKS))
    rows.draw_each(looks, "predicted", off, events.rank[index], PREDICTED_LANE, *times)
    early, *others = LOOKS
    first = style.swatch(early, f"{comparison.names[1]}, {early.name}")
    return [first, *map(style.swatch, others)]


def _words(comparison: Comparison, step: int, steps: int) -> tuple[str, str]:
    real_s, virtual_s = comparison.real_steps_s[step], comparison.virtual_steps_s[step]
    off = virtual_s / real_s - 1
    short, long = ("too short", "too long") if comparison.predicts else ("shorter", "longer")
    how = (
        f"{abs(off):.1%} {short if off < 0 else long}"
        if abs(off) >= 0.0005
        else "off by less than 0.1 %"
    )
    first, second = comparison.names
    named = second if comparison.called else second.capitalize()
    title = (
        f"{named} {time_text(virtual_s * 1e9)}, {first} {time_text(real_s * 1e9)}: {how}".replace(
            "%", " %"
        ).replace("  %", " %")
    )
    said = [count(comparison.real.world_size, "rank")]
    if steps:
        schedule = find_step(comparison.real, step).schedule
        said = [f"{name_schedule(schedule)}, {said[0]}"]
    if steps > 1:
        errors = comparison.steps
        said.append(
            f"step {step + 1} of {steps}: all of them off by {errors.mean:.1%} on average, "
            f"{errors.worst:.1%} at most"
        )
    if comparison.predicts and comparison.no_communication_s is not None:
        said.append(
            f"without communication it would be {comparison.no_communication_s / real_s - 1:+.1%}"
        )
    return title, "; ".join(said).replace("%", " %")
