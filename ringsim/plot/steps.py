"""The computations of a pipeline as papers draw them: boxes with the microbatch's number, gaps shaded, and the phases of a rank above.

A row, with its lanes from top to bottom::

    |-- warm-up --|------- steady -------|-- cool-down --|
    [F0 ][F1 ]xxxx[B0     ][F2 ][B1     ]xxxx[B2     ]      xxx: nothing was computed, the bubble
     ..====   ..====                                         sends, then recvs

The activations that each rank holds while a step goes on, as a curve, with the bound of the closed form dashed.

The picture of one step of a pipeline, wherever its times are from: rows of boxes, and under them the activations that were alive.

A recorded step of a pipeline, as a picture: what each stage computed, and under it when the messages went.

A schedule as a picture, without ranks: what would happen when, if each computation took its unit of time.

A step with more computations than a picture has pixels: for each rank and stretch of time, how much of it was spent on what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from ringsim.plot import style
from ringsim.plot.layout import OPERATION_LOOKS, TRANSFER, Rows, TimeAxis, draw_long, make_bars
from ringsim.plot.style import Look
from ringsim.schedules.engine import Evaluation, evaluate
from ringsim.schedules.schedule import COMPUTE_KINDS, Schedule
from ringsim.traces.events import COLLECTIVE, ERROR, MARK, NONE, SPAN, Ints
from ringsim.traces.steps import Bubble, StageActions, count_steps, find_step, in_step, list_live, measure_bubble, measure_peaks
from ringsim.traces.units import time_text, time_unit
from ringsim.traces.value import Trace, count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.simulator.schedules import ScheduleRun

__all__ = [
    "ACTION_LOOKS",
    "BUBBLE_LOOK",
    "HEIGHT_INCHES",
    "StepPicture",
    "action_rows",
    "draw_actions",
    "draw_busy_map",
    "draw_live_curve",
    "draw_step",
    "measure_shares",
    "microbatch_entry",
    "percent",
    "picture_step",
    "plot_schedule",
    "plot_step",
    "prepare_rows",
    "shows_step",
    "step_height",
]

ACTION_LOOKS: Final = {
    "F": Look("forward", "#8CCBF2", "", "white"),
    "B": Look("backward", "#F3E77A", "////", "#D2C12E"),
    "I": Look("backward: input's gradient", "#7FCBB4", "\\\\\\\\", "white"),
    "W": Look("backward: weights' gradients", "#DFA6C6", "....", "white"),
}
BUBBLE_LOOK: Final = Look("bubble", "#F8F8F8", "xxx", "#D2D2D2")
PALEST: Final = 0.62  # how far the last stage of a rank is on the way to white
COMPUTE_LANE: Final = 0
SEND_LANE, RECV_LANE = 1, 2
MOST_NUMBERS: Final = 1000  # microbatch numbers in boxes
NUMBER_SIZE: Final = 8.5  # points
LEAST_SIZE: Final = 5.5  # points
LETTER: Final = 0.62  # width of a digit, as a share of the font's size
LEAST_GAP: Final = 1 / 1600  # of the step: a shorter one cannot be seen
LEAST_TEXTURED: Final = 6 / 1600  # likewise: in a narrower box neither texture nor outline can be seen
PHASE_NAME_POINTS: Final = 10.0  # above the first row
PHASES_FROM: Final = 18.0  # points: in a lower row there is no room for brackets


def action_rows(*, has_messages: bool) -> Rows:
    """Shares a row out among phases, computations, sends and recvs."""
    compute = 0.19 if has_messages else 0.42
    return Rows(
        top=np.array([-0.33, 0.23, 0.34, 0.23]), bottom=np.array([compute, 0.32, 0.43, 0.43]), marks=(-0.44, -0.37)
    )  # the last lane is for collectives


def prepare_rows(ax: Axes, actions: StageActions, length: float) -> None:
    """Sets limits, and names the rows: one a rank, the lowest rank on top."""
    names = []
    for rank in actions.ranks:
        stages = actions.stages_of(rank)
        several = f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else f"stage {stages[0]}"
        names.append(f"rank {rank}\n{several}" if len(actions.ranks) <= 16 else f"rank {rank}")
    ax.set_xlim(-0.004 * length, 1.004 * length)
    ax.set_ylim(len(names) - 0.5, -0.5 - PHASE_NAME_POINTS / _row_points(ax, len(names)))
    every = -(-len(names) // 32)
    ax.yaxis.set_major_locator(FixedLocator(range(0, len(names), every)))
    ax.yaxis.set_major_formatter(FixedFormatter(names[::every]))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="#E9E9E9", linewidth=0.8)
    ax.set_axisbelow(True)


def microbatch_entry() -> Artist:
    """Returns the legend's entry for the numbers in boxes."""
    with mpl.rc_context({"text.parse_math": True}):  # how a marker says that it is a letter
        return Line2D([], [], color=style.INK, linestyle="none", marker="$0$", markersize=6, label="number: microbatch")


def draw_actions(ax: Axes, actions: StageActions, rows: Rows) -> list[Artist]:
    """Draws the boxes of a step, the gaps between them and the phases, on axes that `prepare_rows` has prepared.

    Args:
        ax: the axes.
        actions: the computations, in the unit of the axis, the step from 0.
        rows: from `action_rows`.

    Returns:
        The legend's entries for what was drawn.
    """
    place = np.searchsorted(actions.ranks, actions.rank)
    chunk, chunks = _find_chunks(actions)
    for kind, look in ACTION_LOOKS.items():
        for number in range(chunks):
            some = np.flatnonzero((actions.kind == kind) & (chunk == number))
            shade = _shade(look, number, chunks)
            _draw_boxes(ax, rows, place[some], actions.start[some], actions.end[some], shade, zorder=3, gid=f"actions-{kind}-{number}")
    gaps = _draw_gaps(ax, actions, rows)
    if _row_points(ax, len(actions.ranks)) >= PHASES_FROM:
        _draw_phases(ax, actions, rows)
    numbers = _draw_numbers(ax, actions, rows, place, chunk, chunks)

    handles: list[Artist] = [_patch(look) for kind, look in ACTION_LOOKS.items() if (actions.kind == kind).any()]
    if numbers:
        handles.append(microbatch_entry())
    if chunks > 1:
        pale = _shade(ACTION_LOOKS["F"], 1, 2)
        handles.append(Patch(facecolor=pale.colour, edgecolor="white", linewidth=0.5, label="paler: later stage of the rank"))
    if gaps:
        handles.append(_patch(BUBBLE_LOOK))
    return handles


def _patch(look: Look) -> Patch:
    return Patch(facecolor=look.colour, edgecolor=look.ink, hatch=look.hatch or None, linewidth=0.5, label=look.name)


def _find_chunks(actions: StageActions) -> tuple[Ints, int]:
    """Numbers the stages of each rank, in the model's order, for each action; and says how many a rank has at most."""
    chunk = np.zeros(len(actions), dtype=np.int64)
    for rank in actions.ranks:
        own = actions.rank == rank
        chunk[own] = np.searchsorted(actions.stages_of(rank), actions.stage[own])
    return chunk, int(chunk.max(initial=0)) + 1


def _shade(look: Look, chunk: int, chunks: int) -> Look:
    """The look of one of a rank's stages: the later, the paler."""
    share = PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (channel + (1 - channel) * share for channel in to_rgb(look.colour))
    return Look(look.name, to_hex((red, green, blue)), look.hatch, look.ink)


def _row_points(ax: Axes, rows: int) -> float:
    """Height of a row in points."""
    return float(ax.get_window_extent().height * 72 / ax.figure.dpi / rows)


def _draw_boxes(ax: Axes, rows: Rows, place: Ints, start: Ints, end: Ints, look: Look, *, zorder: float, gid: str) -> None:
    left, right = ax.get_xlim()
    wide = end - start >= LEAST_TEXTURED * (right - left)
    for textured in (True, False):
        some = wide == textured
        if not some.any():
            continue
        corners: Any = rows.boxes(place[some], np.full(some.sum(), COMPUTE_LANE), start[some], end[some])
        boxes = PolyCollection(
            corners, facecolors=look.colour, edgecolors=look.ink, hatch=look.hatch if textured and look.hatch else None, linewidths=0.0,
            zorder=zorder, gid=gid,
        )  # fmt: skip
        ax.add_collection(boxes, autolim=False)
        if textured:  # of its own: a pattern takes the colour of the outline, and this is to be white
            ax.add_collection(
                PolyCollection(corners, facecolors="none", edgecolors="white", linewidths=0.6, zorder=zorder + 0.1), autolim=False
            )


def _draw_gaps(ax: Axes, actions: StageActions, rows: Rows) -> int:
    """Shades the time in which a rank did not compute, from the start of the step to its end; returns how many gaps there are."""
    first, last = float(actions.start.min()), float(actions.end.max())
    places, starts, ends = [], [], []
    for place, rank in enumerate(actions.ranks):
        own = actions.of(rank)
        begin, end = np.append(own.start, last), np.append(first, own.end)
        some = begin - end >= LEAST_GAP * (last - first)
        places.append(np.full(some.sum(), place))
        starts.append(end[some])
        ends.append(begin[some])
    gaps = [np.concatenate(parts) for parts in (places, starts, ends)]
    _draw_boxes(ax, rows, gaps[0], gaps[1], gaps[2], BUBBLE_LOOK, zorder=2, gid="bubbles")
    return len(gaps[0])


def _draw_phases(ax: Axes, actions: StageActions, rows: Rows) -> None:
    """Draws a bracket over each phase, with its name in the top row."""
    top, bottom = rows.marks
    left, right = ax.get_xlim()
    per_point = (right - left) / (ax.get_window_extent().width * 72 / ax.figure.dpi)
    for place, rank in enumerate(actions.ranks):
        phases = actions.phases(rank)
        before, after = sorted((phases.warm_up_until, phases.cool_down_from))
        parts = [("warm-up", phases.start, before, 1.0), ("cool-down", after, phases.end, 1.0)]
        if phases.has_steady:
            parts.append(("steady", before, after, 2.4))
        for name, start, end, width in parts:
            inset = min(1.2 * per_point, (end - start) / 3)
            y = place + (top + bottom) / 2
            colour = style.INK if name == "steady" else style.MUTED
            ax.hlines(y, start + inset, end - inset, colors=colour, linewidths=width, zorder=4, gid=f"phase-{name}")
            ax.vlines([start + inset, end - inset], y, place + bottom + 0.02, colors=colour, linewidths=1.0, zorder=4)
            if place == 0 and len(name) * LETTER * NUMBER_SIZE * per_point <= end - start:
                ax.annotate(
                    name, ((start + end) / 2, y), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
                    fontsize=NUMBER_SIZE, color=colour, annotation_clip=False,
                )  # fmt: skip


def _draw_numbers(ax: Axes, actions: StageActions, rows: Rows, place: Ints, chunk: Ints, chunks: int) -> int:
    """Writes the number of the microbatch into the boxes that have room for the highest one, widest first; returns how many."""
    left, right = ax.get_xlim()
    bottom, top = ax.get_ylim()
    extent = ax.get_window_extent()
    lane = float(rows.bottom[COMPUTE_LANE] - rows.top[COMPUTE_LANE]) / (bottom - top) * extent.height * 72 / ax.figure.dpi
    room = (actions.end - actions.start) / (right - left) * extent.width * 72 / ax.figure.dpi - 1.5
    size = np.minimum(min(NUMBER_SIZE, lane * 0.85), room / (LETTER * len(str(actions.num_microbatches - 1))))
    widest = np.argsort(-room, kind="stable")[:MOST_NUMBERS]
    chosen = widest[size[widest] >= LEAST_SIZE].tolist()
    for index in chosen:
        look = _shade(ACTION_LOOKS[str(actions.kind[index])], int(chunk[index]), chunks)
        plain = {"boxstyle": "square,pad=0.06", "facecolor": look.colour, "edgecolor": "none"} if look.hatch else None
        ax.text(
            float(actions.start[index] + actions.end[index]) / 2, float(rows.middle(place[index], COMPUTE_LANE)),
            str(int(actions.microbatch[index])), ha="center", va="center_baseline", fontsize=size[index], color=style.BLACK, zorder=7,
            clip_on=True, bbox=plain,
        )  # fmt: skip
    return len(chosen)


HEIGHT_INCHES: Final = 1.25
MOST_RANKS: Final = 4  # curves: more could not be told apart
NAME_POINTS: Final = 10.5  # height of a name beside the curves
PALEST_CURVE: Final = 0.6  # how far the last curve's colour is on the way to white


def draw_live_curve(ax: Axes, actions: StageActions) -> None:
    """Draws the curves of up to four ranks, evenly chosen, named at the right with their peaks.

    Args:
        ax: the axes; the time axis is set by who calls.
        actions: the computations, in the unit of the axis.
    """
    peaks = measure_peaks(actions)
    chosen = np.unique(np.linspace(0, len(peaks.ranks) - 1, min(MOST_RANKS, len(peaks.ranks))).round().astype(int)).tolist()
    highest = max(*peaks.peaks, *(peaks.bounds or (0,)), 1)
    end = float(actions.end.max())
    colours = [_paler(style.BLUE, number / max(len(chosen) - 1, 1)) for number in range(len(chosen))]
    for number, place in enumerate(chosen):
        times, live = list_live(actions, peaks.ranks[place])
        x, y = np.concatenate([[0.0], times, [end]]), np.concatenate([[0], live, live[-1:]])
        ax.step(x, y, where="post", color=colours[number], linewidth=1.6, zorder=4 - number / 10, gid=f"live-{peaks.ranks[place]}")
    for bound in sorted({peaks.bounds[place] for place in chosen} if peaks.bounds is not None else ()):
        ax.axhline(bound, color=style.VERMILLION, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2, gid="bound")
    ax.set_ylim(0, highest * 1.12)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("live activations", fontsize=9)
    ax.grid(axis="x", color="#E9E9E9", linewidth=0.8)
    ax.set_axisbelow(True)
    for number, place in enumerate(chosen):
        bound = "" if peaks.bounds is None else f" of {peaks.bounds[place]}"
        ax.annotate(
            f"rank {peaks.ranks[place]}: {peaks.peaks[place]}{bound}", (1, 1), xycoords="axes fraction",
            xytext=(5, -NAME_POINTS * (number + 1)), textcoords="offset points", fontsize=8.5, color=style.INK, annotation_clip=False,
        )  # fmt: skip


def _paler(colour: str, share: float) -> str:
    red, green, blue = (channel + (1 - channel) * share * PALEST_CURVE for channel in to_rgb(colour))
    return to_hex((red, green, blue))


NAMES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "looped_bfs": "Looped BFS",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "dualpipe_v": "DualPipeV",
}
WIDTH_INCHES: Final = 9.6
GAP_INCHES: Final = 0.16  # between the rows and the curve under them
LEFT_POINTS: Final = 64.0
RIGHT_POINTS: Final = 84.0
BELOW_POINTS: Final = 40.0  # for the time axis


@dataclass(frozen=True)
class StepPicture:
    """What a picture of a step shows.

    Attributes:
        actions: the computations, in the unit of the time axis, the step from 0.
        time: what stands under the time axis.
        metadata: where the times are from, for the last line.
        about: what the line under the title says of the step itself.
        draw_messages: draws the sends and recvs on the axes into their lanes, and returns their entries for the legend; None for none.
        notes: what else one must know to read it, a sentence each.
        draw_over: draws over the rows, and returns its entries for the legend; None for nothing.
    """

    actions: StageActions
    time: str
    metadata: dict[str, Any]
    about: str
    draw_messages: Callable[[Axes, Rows], list[Artist]] | None
    notes: tuple[str, ...] = ()
    draw_over: Callable[[Axes, Rows], list[Artist]] | None = None


def plot_step(picture: StepPicture) -> Axes:
    """Draws the picture on a figure of its own, with the live activations under the rows; returns the axes of the rows."""
    height = step_height(picture.actions)
    figure = plt.figure(figsize=(WIDTH_INCHES, height))
    ax = figure.add_axes((0, 0, 1, 1))
    margins = draw_step(picture, ax, room_inches=GAP_INCHES + HEIGHT_INCHES)
    style.fit(figure, [(ax, WIDTH_INCHES, height, margins)])
    ax.set_xlabel("")
    ax.tick_params(axis="x", length=0, labelbottom=False)
    place, (_, whole) = ax.get_position(), figure.get_size_inches()
    bottom = place.y0 - (GAP_INCHES + HEIGHT_INCHES) / whole
    under = figure.add_axes((place.x0, bottom, place.width, HEIGHT_INCHES / whole), label="live activations")
    draw_live_curve(under, picture.actions)
    under.set_xlim(ax.get_xlim())
    _dress_time(under, picture)
    return ax


def step_height(actions: StageActions) -> float:
    """Height in inches that suits the number of ranks."""
    return float(np.clip(0.62 * len(actions.ranks) + 0.15, 1.0, 8.5))


def draw_step(picture: StepPicture, ax: Axes, *, room_inches: float = 0.0) -> style.Margins:
    """Draws the rows on axes that have their size already.

    Args:
        picture: what to draw.
        ax: the axes.
        room_inches: to leave free under the rows.

    Returns:
        The room that the words around it take.
    """
    actions = picture.actions
    rows = action_rows(has_messages=picture.draw_messages is not None)
    prepare_rows(ax, actions, float(actions.end.max()))
    _dress_time(ax, picture)
    handles = draw_actions(ax, actions, rows)
    if picture.draw_messages is not None:
        handles += picture.draw_messages(ax, rows)
    if picture.draw_over is not None:
        handles += picture.draw_over(ax, rows)
    bubble = measure_bubble(actions)
    for place, share in enumerate(bubble.of_total_by_rank):
        if len(bubble.ranks) <= 32:
            ax.annotate(
                f"idle {percent(share)}", (1, place), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                va="center_baseline", fontsize=9, color=style.MUTED, annotation_clip=False,
            )  # fmt: skip
    title, subtitle, notes = _words(picture, bubble)
    return style.dress(
        ax, title, subtitle=subtitle, notes=[*notes, *picture.notes], handles=handles, metadata=picture.metadata, left=LEFT_POINTS,
        right=RIGHT_POINTS, below=BELOW_POINTS + room_inches * 72,
    )  # fmt: skip


def percent(share: float) -> str:
    """Writes a share in percent: whole ones, but for small shares.

    Example:
        >>> percent(3 / 11), percent(0.042), percent(0)
        ('27 %', '4.2 %', '0 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 or share < 0.0005 else f"{100 * share:.1f} %"


def _words(picture: StepPicture, bubble: Bubble) -> tuple[str, str, list[str]]:
    """The title, the line under it, and what the closed form means."""
    known, actions = bubble.closed_form, picture.actions
    microbatches = f"{actions.num_microbatches} microbatch{'' if actions.num_microbatches == 1 else 'es'}"
    title = f"{NAMES.get(actions.schedule, actions.schedule)}, {count(len(bubble.ranks), 'rank')}, {microbatches}"
    title += f": bubble {percent(bubble.of_total)}"
    notes = ["Bubble: the part of the step in which ranks do not compute."]
    if known is None:
        notes.append("No closed form: the step is not one that a formula is known for.")
        said = [f"by span {percent(bubble.of_span)}, to the work {percent(bubble.of_ideal)}"]
    else:
        title += f", closed form {percent(known.of_total)}"
        notes.append("Closed form: all stages alike, backward twice as long as forward, messages that take no time.")
        by_span = f"by span {percent(bubble.of_span)} (closed form {percent(known.of_span)})"
        said = [f"{by_span}, to the work {percent(bubble.of_ideal)} ({percent(known.of_ideal)})"]
    return title, "; ".join([*said, picture.about]), notes


def _dress_time(ax: Axes, picture: StepPicture) -> None:
    ax.set_xlabel(picture.time, loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def shows_step(trace: Trace) -> bool:
    """Tells whether a trace is best drawn as a step of a pipeline: it has one, and nothing in it is stuck or has failed.

    Args:
        trace: any trace.
    """
    events = trace.events
    operations = (events.kind != SPAN) & (events.kind != MARK)
    stuck = operations & (((events.wait_ns != NONE) & (events.done_ns == NONE)) | (events.status == ERROR))
    return not stuck.any() and count_steps(events) > 0


def picture_step(trace: Trace, step: int | None = None) -> StepPicture:
    """Makes the picture of a recorded step.

    Args:
        trace: of ranks that ran ``train_step_pipeline``.
        step: which step, from 0; None for the last one.

    Raises:
        ArgumentError: the trace has no such step.
    """
    measured = find_step(trace, step)
    steps = count_steps(trace.events)
    number = steps - 1 if step is None else step
    first, last = int(measured.start.min()), int(measured.end.max())
    unit_ns, unit = time_unit(last - first)
    axis = TimeAxis(first, last, unit_ns, unit)
    actions = replace(measured, start=axis.at(measured.start), end=axis.at(measured.end))
    length = time_text(last - first)

    def draw_messages(ax: Axes, rows: Rows) -> list[Artist]:
        return _draw_messages(ax, rows, trace, number, measured, axis)

    return StepPicture(
        actions=actions,
        time=f"time since the step began ({unit})",
        metadata=trace.metadata,
        about=f"step {number + 1} of {steps}, {length}" if steps > 1 else length,
        draw_messages=draw_messages if len(measured.ranks) > 1 else None,
        notes=_list_notes(trace),
    )


def _list_notes(trace: Trace) -> tuple[str, ...]:
    """What makes the ranks wait besides the schedule."""
    about = trace.metadata
    cores = (about.get("machine") or {}).get("cores")
    one_host = len({rank.get("host") for rank in about.get("ranks", ())}) <= 1
    if about.get("comm_device") != "cpu" or not cores or not one_host or trace.world_size <= cores:
        return ()
    return (
        f"{trace.world_size} ranks shared {count(cores, 'core')}: what had to wait for a core is drawn as computing, or makes others wait.",
    )


def _draw_messages(ax: Axes, rows: Rows, trace: Trace, step: int, actions: StageActions, axis: TimeAxis) -> list[Artist]:
    """Draws the sends and recvs of a step, each stretch by what it was spent on; returns what the legend says of them."""
    events = trace.events
    operations = (events.kind != SPAN) & (events.kind != MARK) & (events.kind != COLLECTIVE)
    own = Trace(events.select(operations & in_step(events, step)), trace.metadata)
    bars = make_bars(own)
    bars = replace(bars, rank=np.searchsorted(actions.ranks, bars.rank), lane=bars.lane + SEND_LANE)
    draw_long(ax, bars, np.flatnonzero(bars.end_ns > bars.start_ns), rows, axis)
    return [
        Patch(facecolor=look.colour, edgecolor=look.ink, hatch=look.hatch or None, linewidth=0.5, label=look.name)
        for look in (OPERATION_LOOKS[number] for number in np.unique(bars.look).tolist())
    ]


def plot_schedule(schedule: Schedule | Evaluation, *, ax: Axes | None = None) -> Axes:
    """Draws a schedule as `plot_timeline` draws a recorded step, in units of time.

    Args:
        schedule: what to draw. A ``Schedule`` is timed first: forward 1, backward 2 or 1 for each of its halves, messages take no time.
            For other costs pass what ``evaluate(schedule, costs)`` returns.
        ax: where to draw; a new figure by default, which also has the live activations.

    Returns:
        The axes of the rows. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ScheduleError: the schedule cannot be timed.
        Deadlock: its ranks would wait for each other.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.pipeline import make_schedule
        >>> plot_schedule(make_schedule("1f1b", 4, 8)).get_title(loc="left")
        '1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %'
    """
    if isinstance(schedule, Evaluation):
        evaluation, source = schedule, "simulated, with costs of one's own"
        has_messages = any(each.arrived > each.posted for each in schedule.messages)
    else:
        evaluation, source = evaluate(schedule), "simulated: forward 1, backward 2 or 1 for each half, messages take no time"
        has_messages = False
    timed = [(rank, *each) for rank in range(evaluation.schedule.num_ranks) for each in evaluation.get_computations(rank)]
    actions = StageActions(
        schedule=evaluation.schedule.name,
        rank=np.array([rank for rank, *_ in timed]),
        stage=np.array([action.stage for _, action, _, _ in timed]),
        kind=np.array([action.kind for _, action, _, _ in timed]),
        microbatch=np.array([action.microbatch for _, action, _, _ in timed]),
        start=np.array([float(start) for _, _, start, _ in timed]),
        end=np.array([float(end) for _, _, _, end in timed]),
    )

    def draw_messages(ax: Axes, rows: Rows) -> list[Artist]:
        return _draw_evaluated_messages(ax, rows, evaluation)

    picture = StepPicture(
        actions=actions,
        time="time (units)",
        metadata={"source": source},
        about=f"{float(evaluation.makespan):,.6g} units",
        draw_messages=draw_messages if has_messages else None,
    )
    with style.drawing():
        if ax is None:
            return plot_step(picture)
        draw_step(picture, ax)
    return ax


def _draw_evaluated_messages(ax: Axes, rows: Rows, evaluation: Evaluation) -> list[Artist]:
    """Draws each message twice, with its sender and with its receiver, from its post to its arrival."""
    look = OPERATION_LOOKS[TRANSFER]
    messages = evaluation.messages
    posted, arrived = (np.array([float(time) for time in times]) for times in zip(*((m.posted, m.arrived) for m in messages), strict=True))
    for lane, places in ((SEND_LANE, [m.source for m in messages]), (RECV_LANE, [m.rank for m in messages])):
        corners: Any = rows.boxes(np.array(places), np.full(len(places), lane), posted, arrived)
        ax.add_collection(PolyCollection(corners, facecolors=look.colour, linewidths=0, zorder=3, gid=f"messages-{lane}"), autolim=False)
    return [Patch(facecolor=look.colour, label="message on its way")]


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
        Shares from 0 to 1, shape (rows, columns, 4): by the kind's place in ``COMPUTE_KINDS``.

    Example:
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> shares = measure_shares(simulate_schedule("1f1b", num_ranks=2, num_microbatches=1), rows=2, columns=6)
        >>> shares[1].argmax(axis=-1).tolist(), shares[1].sum(axis=-1).tolist()  # rank 1 waits, goes forward, back, and is done
        ([0, 0, 1, 1, 0, 0], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    """
    operations, ends = run.operations, run.ends.astype(np.float64)
    duration = run.setting.prices.duration.astype(np.float64)
    edges = np.linspace(0.0, float(run.makespan), columns + 1)
    shares = np.zeros((rows, columns, len(COMPUTE_KINDS)))
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
    colours = np.array([to_rgb(ACTION_LOOKS[letter].colour) for letter in COMPUTE_KINDS])
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
    drawn = [letter for code, letter in enumerate(COMPUTE_KINDS) if shares[..., code].any()]
    handles: list[Artist] = [Patch(facecolor=ACTION_LOOKS[letter].colour, label=ACTION_LOOKS[letter].name) for letter in drawn]
    return [*handles, Patch(facecolor=IDLE, edgecolor="#B0B0B0", linewidth=0.5, label="bubble")]
