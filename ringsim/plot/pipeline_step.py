"""Draws a pipeline step the way papers do, from a trace, an evaluation or a simulation.

Each box contains the number of its microbatch, gaps are shaded, and brackets above a row show the
rank's phases::

    |-- warm-up --|------- steady -------|-- cool-down --|
    [F0 ][F1 ]xxxx[B0     ][F2 ][B1     ]xxxx[B2     ]      xxx: the bubble, without computation
     ..====   ..====                                         sends, then recvs

Computations that run at the same time on one rank are half as high, one above the other.

Curves below the rows show the live activations of a few ranks, and dashed lines show the bound from
the closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ringsim.plot import sheet, style
from ringsim.plot.bars import make_bars
from ringsim.plot.ghosts import COMPUTING
from ringsim.plot.rows import (
    LEAST_ROW_POINTS,
    LETTER,
    TEXT_SIZE,
    WIDTH_INCHES,
    Lanes,
    RankRows,
    TimeAxis,
    divide,
    label_time,
    lay_rows,
    strip_inches,
)
from ringsim.plot.sheet import Picture
from ringsim.plot.style import Look, percent
from ringsim.schedules.engine import Evaluation, evaluate
from ringsim.schedules.schedule import Schedule
from ringsim.traces.display import Style
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import RECV, SEND, Ints
from ringsim.traces.filtering import take
from ringsim.traces.looks import LOOKS
from ringsim.traces.steps import (
    Bubble,
    StageActions,
    count_steps,
    find_step,
    in_step,
    list_live,
    measure_bubble,
    measure_peaks,
)
from ringsim.traces.units import count, time_text, time_unit
from ringsim.traces.value import Trace

ACTION_LOOKS = {
    LOOKS[name].short: Look.of(name, edge=0.0)
    for name in ("forward", "backward", "input_grad", "weight_grad")
}
BUBBLE_LOOK = replace(
    Look.of("bubble", edge=0.0, zorder=2), hatch="xxx", ink=style.fade(style.MUTED, 0.65)
)
CURVE_COLOUR = LOOKS["activations"].light
MESSAGE_LOOK = Look("message in flight", LOOKS["transfer"].light)
SCHEDULE_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "looped_bfs": "Looped BFS",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "dualpipe_v": "DualPipeV",
}
PALEST = 0.62  # how pale a rank's last stage is drawn, from 0 to 1 (white)
COMPUTE_LANE, SEND_LANE, RECV_LANE = 0, 1, 2
PHASES = 0.07  # the height of the strip for phases
MESSAGES = 0.2  # the height of the lanes for sends and recvs
COMPACT_PHASES = (-0.66, -0.5)  # above the first row
STAGE_NAMES_FROM = 26.0  # points; the names of lower rows do not list the stages
LEAST_GAP = 1 / 1600  # as a share of the step; shorter gaps would be invisible
PHASE_NAME_POINTS = 10.0  # the room for names above the first row
PHASE_COLOURS = {"warm-up": style.MUTED, "steady": style.INK, "cool-down": style.MUTED}
PHASES_FROM = 18.0  # points; lower rows have no room for brackets
IDLE_SHARES_FROM = 12.0  # points; lower rows do not show their share of idle time
GAP_INCHES = 0.16  # between the rows and the curve under them
CURVE_INCHES = 1.25
MOST_CURVES = 4  # more would be indistinguishable
CURVE_NAME_POINTS = 10.5  # the height of a name next to the curves
PALEST_CURVE = 0.6


class StepPicture(NamedTuple):
    """The content of a picture of one step.

    The computations are in ``unit`` and start at 0. ``time`` labels the time axis, ``about`` is
    part of the subtitle, and ``notes`` are written below. ``draw_messages`` draws sends and recvs
    into their lanes, and ``draw_over`` draws on top of the rows. ``recorded`` holds the same step
    of the run that a predicted trace came from.
    """

    actions: StageActions
    time: str
    unit: str
    metadata: JsonObject
    about: str
    draw_messages: Callable[[RankRows], None] | None
    notes: tuple[str, ...] = ()
    draw_over: Callable[[RankRows], None] | None = None
    recorded: StageActions | None = None


def step_picture(picture: StepPicture, *, with_curve: bool = False) -> Picture:
    """Returns a step as a picture, optionally with the live activations below the rows."""
    ranks = len(picture.actions.ranks)
    height = float(np.clip(0.62 * ranks + 0.15, 1.0, 8.5))
    return Picture(
        lambda ax: _draw_step(picture, ax, height if with_curve else None),
        WIDTH_INCHES,
        height,
        strip_inches(ranks) + PHASE_NAME_POINTS / 72,
    )


def _draw_step(picture: StepPicture, ax: Axes, inches: float | None) -> None:
    """Draws the rows, and optionally the live activations below them.

    ``inches`` is the height of the rows, or None to omit the live activations.
    """
    actions, recorded, compact = picture.actions, picture.recorded, style.is_compact()
    row = style.points(ax)[1] / len(actions.ranks)
    names, length = _name_rows(actions, with_stages=row >= STAGE_NAMES_FROM), actions.end.max()
    has_messages = picture.draw_messages is not None and not compact
    lanes = divide_step(row, has_messages=has_messages, has_ghosts=recorded is not None)
    if recorded is not None:
        length = max(length, recorded.end.max())
    rows = lay_rows(ax, names, length, picture.time, picture.unit, lanes, above=PHASE_NAME_POINTS)
    draw_actions(actions, rows)
    if recorded is not None:
        places = np.searchsorted(actions.ranks, recorded.rank)
        rows.draw(COMPUTING, "ghosts", places, -1, recorded.start, recorded.end)
    bubble = measure_bubble(actions)
    for draw in (picture.draw_messages, picture.draw_over):
        if draw is not None and not compact:
            draw(rows)
    if row >= IDLE_SHARES_FROM and not compact:
        for number, share in enumerate(bubble.of_total_by_rank):
            style.write_beside(
                ax,
                f"idle {percent(share)}",
                (1, number),
                (5, 0),
                where=("axes fraction", "data"),
                va="center_baseline",
                fontsize=9,
                color=style.MUTED,
            )
    if inches is not None and not compact:
        under = ax.inset_axes(
            (0, -(GAP_INCHES + CURVE_INCHES) / inches, 1, CURVE_INCHES / inches), sharex=ax
        )
        _draw_live_curve(under, actions)
        label_time(under, picture.time, picture.unit)
        ax.set_xlabel("")
        ax.tick_params(axis="x", length=0, labelbottom=False)
    style.dress(ax, *_words(picture, bubble), metadata=picture.metadata)


def divide_step(row: float, *, has_messages: bool = False, has_ghosts: bool = False) -> Lanes:
    """Divides a row of a step, which is ``row`` points high, into lanes."""
    if row < LEAST_ROW_POINTS:  # there is no room for messages, or for gaps between rows
        return divide(edge=0.5)
    if style.is_compact():
        return divide(has_ghosts=has_ghosts)._replace(marks=COMPACT_PHASES)
    return divide(strip=PHASES, operations=MESSAGES * has_messages, has_ghosts=has_ghosts)


def _name_rows(actions: StageActions, *, with_stages: bool) -> list[str]:
    names = []
    for rank in actions.ranks:
        name = f"rank {rank}"
        if with_stages:
            stages = actions.stages_of(rank)
            name += f"\nstage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        names.append(name)
    return names


def _words(picture: StepPicture, bubble: Bubble) -> tuple[str, str, list[str]]:
    known, actions = bubble.closed_form, picture.actions
    ranks, microbatches = len(bubble.ranks), actions.num_microbatches
    title = title_step(actions.schedule, ranks, microbatches, bubble.of_total)
    by_span, to_work = percent(bubble.of_span), percent(bubble.of_ideal)
    notes = ["The bubble is the part of the step in which ranks do not compute."]
    if known is None:
        notes.append("No closed form is known for this step.")
    else:
        title += f", closed form {percent(known.of_total)}"
        by_span += f" (closed form {percent(known.of_span)})"
        to_work += f" ({percent(known.of_ideal)})"
        notes.append(
            "The closed form assumes equal stages, backwards twice as long as forwards, and "
            "messages that take no time."
        )
    subtitle = f"by span {by_span}, relative to the work {to_work}; {picture.about}"
    return title, subtitle, [*notes, *picture.notes]


def title_step(schedule: str, ranks: int, microbatches: int, bubble: float) -> str:
    """Returns the title of a step."""
    size = size_step(ranks, microbatches)
    return f"{name_schedule(schedule)}, {size}: bubble {percent(bubble)}"


def size_step(ranks: int, microbatches: int) -> str:
    """Returns the number of ranks and microbatches in words."""
    return f"{count(ranks, 'rank')}, {count(microbatches, 'microbatch')}"


def name_schedule(name: str) -> str:
    """Returns a schedule's name in the spelling that papers use."""
    return SCHEDULE_NAMES.get(name, name)


# -- the computations


def draw_actions(actions: StageActions, rows: RankRows) -> None:
    """Draws a step's boxes, the gaps between the boxes, and the phases."""
    place = np.searchsorted(actions.ranks, actions.rank)
    # the index of each stage among its rank's stages, in the model's order
    chunk = np.zeros(len(place), dtype=np.int64)
    for rank in actions.ranks:
        own = actions.rank == rank
        chunk[own] = np.searchsorted(actions.stages_of(rank), actions.stage[own])
    chunks = int(chunk.max(initial=0)) + 1
    looks = {
        f"{kind}-{number}": replace(look, colour=style.fade(look.colour, share))
        for kind, look in ACTION_LOOKS.items()
        for number, share in enumerate(PALEST * np.linspace(0, 1, chunks))
    }
    names = np.char.add(np.char.add(actions.kind, "-"), chunk.astype(str))
    times = actions.start, actions.end
    heights = _divide_pairs(actions)
    rows.draw_each(looks, "actions", names, place, COMPUTE_LANE, *times, *heights, outlined=True)
    if style.is_compact():
        _draw_phases(actions, rows, 1)
    elif rows.points >= PHASES_FROM:
        _draw_phases(actions, rows, len(actions.ranks))
    # each number has the room of the highest one, so that either all are written or none
    digits = 1 if style.is_compact() else len(str(actions.num_microbatches - 1))
    numbers = rows.write_in(
        place,
        COMPUTE_LANE,
        *times,
        lambda box: [f"{actions.microbatch[box]:^{digits}}"],
        lambda box: looks[names[box]].colour,
        *heights,
    )

    if numbers and not style.is_compact():
        explain_numbers(rows.ax)
    if chunks > 1:
        pale = style.fade(ACTION_LOOKS["F"].colour, PALEST)
        style.swatch(rows.ax, "paler: later stage of the rank", pale)
    _draw_gaps(actions, rows)


def _divide_pairs(actions: StageActions) -> tuple[Ints, Ints]:
    """Returns the (low, high) of each box: half of the lane if it overlaps with a neighbour."""
    shared = actions.end[:-1] - actions.start[1:]
    met = (np.diff(actions.rank) == 0) & (shared > LEAST_GAP * actions.makespan)
    before, after = np.append(False, met), np.append(met, False)
    return 0.5 * (after & ~before), 1 - 0.5 * before


def explain_numbers(ax: Axes) -> None:
    """Adds the numbers in boxes to the legend."""
    with mpl.rc_context({"text.parse_math": True}):  # because this marker is a letter
        style.entry(ax, "number: microbatch", linestyle="none", marker="$0$", markersize=6)


def _draw_gaps(actions: StageActions, rows: RankRows) -> None:
    """Shades the idle times of ranks between the start and the end of the step."""
    first, last = actions.start.min(), actions.end.max()
    gaps = []
    for place, rank in enumerate(actions.ranks):
        own = actions.of(rank)
        begin, end = np.append(first, own.end), np.append(own.start, last)
        seen = end - begin >= LEAST_GAP * (last - first)
        gaps.append(np.stack([np.full(len(begin), place), begin, end])[:, seen])
    places, starts, ends = np.concatenate(gaps, axis=1)
    rows.draw(BUBBLE_LOOK, "bubbles", places, COMPUTE_LANE, starts, ends, outlined=True)


def _draw_phases(actions: StageActions, rows: RankRows, most: int) -> None:
    """Draws a bracket over each phase of up to ``most`` ranks, with names over the top row."""
    ax, (top, bottom), per_point = rows.ax, rows.lanes.marks, rows.per_point
    for place, rank in enumerate(actions.ranks[:most]):
        parts = actions.phases(rank)
        y = rows.first + place + (top + bottom) / 2
        for name, start, end in parts:
            inset = min(1.2 * per_point, (end - start) / 3)
            ends = start + inset, end - inset
            look: Any = {"colors": PHASE_COLOURS[name], "zorder": 4, "clip_on": False}
            width = 1.0 if name != "steady" else 1.4 if style.is_compact() else 2.4
            ax.hlines(y, *ends, linewidths=width, gid=f"phase-{name}", **look)
            ax.vlines(ends, y, rows.first + place + bottom + 0.02, linewidths=1.0, **look)
        if place:
            continue
        size = style.letters(TEXT_SIZE)
        half = np.array([len(name) + 1.5 for name, *_ in parts]) * LETTER * size * per_point / 2
        middles = [(start + end) / 2 for _, start, end in parts]
        places = style.spread(middles, half[1:] + half[:-1])
        look = {"where": "data", "ha": "center", "va": "bottom", "fontsize": size}
        for x, (name, *_) in zip(places, parts, strict=True):
            look["color"] = PHASE_COLOURS[name]
            style.write_beside(ax, name, (x, y), (0, 1 if most == 1 else 3), **look)


def draw_flights(rows: RankRows, sources: Ints, targets: Ints, start: Ints, end: Ints) -> None:
    """Draws each message in flight in both the sender's row and the receiver's row."""
    for lane, places in ((SEND_LANE, sources), (RECV_LANE, targets)):
        rows.draw(MESSAGE_LOOK, f"messages-{lane}", places, lane, start, end)


# -- live activations


def _draw_live_curve(ax: Axes, actions: StageActions) -> None:
    """Draws curves for up to four evenly spaced ranks, with their peaks on the right.

    The caller sets up the time axis.
    """
    peaks = measure_peaks(actions)
    last = len(peaks.ranks) - 1
    chosen = np.linspace(0, last, min(MOST_CURVES, last + 1)).round().astype(int).tolist()
    bounds = peaks.bounds or ()
    end = actions.end.max()
    for number, place in enumerate(chosen):
        rank, peak = peaks.ranks[place], peaks.peaks[place]
        times, live = list_live(actions.of(rank))
        ax.step(
            np.concatenate([[0.0], times, [end]]),
            np.concatenate([[0], live, live[-1:]]),
            where="post",
            color=style.fade(CURVE_COLOUR, PALEST_CURVE * number / max(len(chosen) - 1, 1)),
            linewidth=1.6,
            zorder=4 - number / 10,
            gid=f"live-{rank}",
        )
        name = f"rank {rank}: {peak}" + (f" of {bounds[place]}" if bounds else "")
        below = -CURVE_NAME_POINTS * (number + 1)
        style.write_beside(ax, name, (1, 1), (5, below), fontsize=8.5)
    for bound in sorted({bounds[place] for place in chosen if bounds}):
        ax.axhline(bound, color=style.INK, zorder=2, ls=(0, (4, 3)), linewidth=0.9, gid="bound")
    ax.set_ylim(0, max(*peaks.peaks, *bounds, 1) * 1.12)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("live activations", fontsize=9)
    ax.grid(axis="x", color=style.GRID)


# -- recorded steps, and schedules


def picture_step(trace: Trace, step: int | None) -> StepPicture:
    """Returns the picture of a recorded step; ``step`` counts from 0, and None is the last step."""
    measured = find_step(trace, step)
    steps = count_steps(trace.events)
    number = steps - 1 if step is None else step
    first, last = int(measured.start.min()), int(measured.end.max())
    axis = TimeAxis(first, last, *time_unit(last - first))
    length = time_text(last - first)
    recorded = None
    if trace.recorded is not None:
        recorded = find_step(trace.recorded, step)
        recorded = recorded.count_from(recorded.start.min(), axis.unit_ns)
    return StepPicture(
        actions=measured.count_from(first, axis.unit_ns),
        time="time since the step began",
        unit=axis.unit,
        metadata=trace.metadata,
        about=f"step {number + 1} of {steps}, {length}" if steps > 1 else length,
        draw_messages=(lambda rows: _draw_recorded(rows, trace, number, measured.ranks, axis))
        if len(measured.ranks) > 1
        else None,
        notes=_list_notes(trace),
        recorded=recorded,
    )


def _list_notes(trace: Trace) -> tuple[str, ...]:
    """Returns a tuple with a note if ranks had to share cores, or else an empty tuple."""
    about = trace.metadata
    cores = (about.get("machine") or {}).get("cores")
    one_host = len({rank.get("host") for rank in about.get("ranks", ())}) <= 1
    if about.get("comm_device") != "cpu" or not cores or not one_host or trace.world_size <= cores:
        return ()
    return (
        (
            f"{trace.world_size} ranks shared {count(cores, 'core')}. Waiting for a core is drawn "
            "as computing, or makes other ranks wait."
        ),
    )


def _draw_recorded(
    rows: RankRows, trace: Trace, step: int, ranks: list[int], axis: TimeAxis
) -> None:
    """Draws a step's sends and recvs, coloured by state."""
    events = trace.events
    messages = np.isin(events.kind, (SEND, RECV))
    bars = make_bars(take(trace, messages & in_step(events, step)))
    drawn = bars.lane >= bars.depths  # without the program's time, which is the gaps
    lane = np.maximum(bars.lane - bars.depths, 0) + SEND_LANE
    bars = replace(bars, rank=np.searchsorted(ranks, bars.rank), lane=lane)
    rows.draw_bars(bars, drawn & (bars.end_ns > bars.start_ns), axis)


def plot_schedule(
    schedule: Schedule | Evaluation, *, ax: Axes | None = None, **look: Unpack[Style]
) -> Axes:
    """Draws a schedule the way ``plot_timeline`` draws a recorded step.

    Args:
        schedule: the schedule. A ``Schedule`` is timed first, with forwards that take 1 unit,
            backwards that take 2 (or 1 for each half), and messages that take no time. For other
            costs, pass the result of ``evaluate(schedule, costs)``.
        ax: the axes to draw on, or None to create a new figure that also shows the live
            activations.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes of the rows. Call ``ax.figure.savefig(...)`` to save the figure.

    Raises:
        ScheduleError: the schedule cannot be timed.
        Deadlock: the ranks would wait for each other forever.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.pipeline import make_schedule
        >>> plot_schedule(make_schedule("1f1b", 4, 8)).get_title(loc="left")
        '1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %'
    """
    if isinstance(schedule, Evaluation):
        evaluation, source = schedule, "simulated, with custom costs"
    else:
        evaluation = evaluate(schedule)
        source = "simulated: forward 1, backward 2 or 1 for each half, messages take no time"
    timed = [
        (rank, action.stage, action.kind, action.microbatch, float(start), float(end))
        for rank in range(evaluation.schedule.num_ranks)
        for action, start, end in evaluation.get_computations(rank)
    ]
    actions = StageActions(evaluation.schedule.name, *map(np.array, zip(*timed, strict=True)))
    flights = [(one.source, one.rank, one.posted, one.arrived) for one in evaluation.messages]
    sources, targets, posted, arrived = np.array(flights, dtype=float).reshape(-1, 4).T
    picture = StepPicture(
        actions=actions,
        time="time",
        unit="units",
        metadata={"source": source},
        about=f"{float(evaluation.makespan):,.6g} units",
        draw_messages=(lambda rows: draw_flights(rows, sources, targets, posted, arrived))
        if isinstance(schedule, Evaluation) and (arrived > posted).any()
        else None,
    )
    return sheet.show([step_picture(picture, with_curve=ax is None)], ax, **look)
