"""The timeline: what each rank did when, and who waited for whom.

The picture of a trace in a notebook: ring and timeline in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from ringsim.plot import style
from ringsim.plot.layout import (
    OPERATION_LOOKS,
    UNFINISHED,
    Bars,
    Rows,
    TimeAxis,
    draw_arrows,
    draw_density,
    draw_long,
    draw_open_ends,
    draw_span_names,
    look_of,
    make_bars,
    merge_short,
)
from ringsim.plot.ring import SIZE_INCHES, draw_ring
from ringsim.plot.steps import draw_step, microbatch_entry, picture_step, plot_step, shows_step, step_height
from ringsim.traces.events import COLLECTIVE, MARK, NONE, OP_NAMES, SEND, SPAN, read_notice
from ringsim.traces.steps import find_step
from ringsim.traces.units import time_text
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["plot_timeline", "trace_png"]

WIDTH_INCHES: Final = 9.6
MOST_SPAN_NAMES: Final = 8  # in the legend: as many as have a look of their own
MOST_MARK_NAMES: Final = 100
MARK_NAME_SIZE: Final = 7.5  # points


def plot_timeline(trace: Trace, *, step: int | None = None, ax: Axes | None = None) -> Axes:
    """Draws what each rank did when: spans, and under them sends and recvs, with arrows from send to recv.

    Ranks are rows, rank 0 on top; time runs to the right, to scale, from the start of the run. The time for which an operation was
    blocked is split into waiting for a late partner and transfer. What is shorter than a pixel is merged, and the picture says so.

    A trace of ``train_step_pipeline`` is drawn as papers draw it, one step: forwards and backwards with the number of their microbatch,
    the bubbles shaded, warm-up, steady and cool-down marked; and, on a new figure, the activations that were alive. Where something is
    stuck or has failed, it is drawn like any other trace.

    Args:
        trace: any trace, with any number of events.
        step: of a pipeline's trace, which step, from 0; None for the last one.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> plot_timeline(Trace(make_events({"rank": [], "op": []}), {"world_size": 4})).get_title(loc="left")
        'Nothing was recorded on 4 ranks'
    """
    with style.drawing():
        if ax is not None:
            draw_timeline(trace, ax, step)
            return ax
        if step is not None or shows_step(trace):
            return plot_step(picture_step(trace, step))
        size_inches = (WIDTH_INCHES, timeline_height(trace))
        figure = plt.figure(figsize=size_inches)
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *size_inches, draw_timeline(trace, ax))])
    return ax


def timeline_height(trace: Trace) -> float:
    """Height in inches that suits the number of ranks and what their rows hold."""
    if shows_step(trace):
        return step_height(find_step(trace))
    events = trace.events
    row = 0.62 + (0.22 if (events.kind == SPAN).any() else 0) + (0.14 if (events.kind == MARK).any() else 0)
    return float(np.clip(row * trace.world_size, 1.2, 8.5))


def draw_timeline(trace: Trace, ax: Axes, step: int | None = None) -> style.Margins:
    """Draws the timeline on axes that have their size already; returns the room that the words around it take."""
    if step is not None or shows_step(trace):
        return draw_step(picture_step(trace, step), ax)
    axis = TimeAxis.of(trace.events)
    bars = make_bars(trace)
    rows = Rows.of(trace, bars)
    _prepare(ax, trace.world_size, axis)

    long, density = merge_short(bars, axis.first_ns, axis.slot_ns)
    draw_density(ax, density, rows, axis)
    draw_long(ax, bars, np.flatnonzero(long), rows, axis)
    draw_open_ends(ax, bars, rows, axis)
    draw_span_names(ax, trace, bars, rows, axis)
    _draw_marks(ax, trace, rows, axis)
    arrows = draw_arrows(ax, trace, rows, bars.depths, axis)

    notes = []
    if len(density):
        pixel = f"a pixel ({time_text(axis.slot_ns)})" if axis.slot_ns >= 1 else "a pixel"
        merged = f"{int((~long).sum()):,} of {count(len(bars), 'bar')}"
        notes.append(f"Shorter than {pixel} and merged: {merged}; the height is the share of the time.")
    arrived = int((trace.events.done_ns[trace.messages.recv] != NONE).sum())
    if arrived < len(trace.messages):
        notes.append(f"{count(len(trace.messages) - arrived, 'message')} never arrived: no arrow.")
    if arrows < arrived:
        notes.append(f"Arrows: {arrows:,} of {count(arrived, 'message')}, evenly in time.")
    title, subtitle = _message(trace, bars)
    handles = _legend(trace, bars, arrows)
    return style.dress(ax, title, subtitle=subtitle, notes=notes, handles=handles, metadata=trace.metadata, left=58, right=14, below=40)


def _message(trace: Trace, bars: Bars) -> tuple[str, str]:
    """The picture's message in one line, and what follows from it in another."""
    events = trace.events
    ranks = count(trace.world_size, "rank")
    if len(events) == 0:
        return f"Nothing was recorded on {ranks}", ""
    stuck = bars.event[bars.look == UNFINISHED]
    if len(stuck):
        index = stuck[np.argmin(events.wait_ns[stuck])]  # who was blocked first
        kind, peer = events.kind[index], events.peer[index]
        partner = f" {'to' if kind == SEND else 'from'} rank {peer}" if peer >= 0 else ""
        return (
            f"Stuck: {count(len(stuck), 'operation')} never finished",
            f"first: rank {events.rank[index]} in {OP_NAMES[events.op[index]]}{partner}",
        )
    length = time_text(trace.makespan_s * 1e9)
    operations = (events.kind != SPAN) & (events.kind != MARK)
    if not operations.any():
        return f"{ranks} ran for {length} without a message", ""
    if trace.makespan_s == 0:
        return f"{ranks}, {count(len(trace.messages), 'message')}, and no time went by", ""
    time = trace.makespan_s * 1e9 * trace.world_size
    blocked = np.maximum(trace.waits.blocked_ns, 0)
    late_sender, late_receiver = trace.waits.late_sender_ns, trace.waits.late_receiver_ns
    title = f"{ranks}, {length}: {_percent(blocked.sum() / time)} of it blocked in communication"
    parts = {
        "late senders": late_sender.sum(),
        "late receivers": late_receiver.sum(),
        "transfers": trace.waits.transfer_ns.sum(),
        "collectives": blocked[events.kind == COLLECTIVE].sum(),
    }
    said = [f"{name} {_percent(part / time)}" for name, part in sorted(parts.items(), key=lambda item: -item[1]) if part > 0][:3]
    by_rank = np.bincount(events.rank, weights=late_sender + late_receiver, minlength=trace.world_size)
    if by_rank.max() > 0:
        worst = int(by_rank.argmax())
        said.append(f"rank {worst} waited longest, {time_text(by_rank[worst])}")
        return title, "; ".join((", ".join(said[:-1]), said[-1]))
    return title, ", ".join(said)


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "under 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def _prepare(ax: Axes, world_size: int, axis: TimeAxis) -> None:
    """Sets limits, ticks and the background of the rows."""
    axis.limit(ax)
    ax.set_ylim(world_size - 0.5, -0.5)
    ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ax.yaxis.set_major_locator(MultipleLocator(1) if world_size <= 32 else MaxNLocator(32, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"rank {value:.0f}" if 0 <= value < world_size else ""))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color="#E9E9E9", linewidth=0.8)
    ax.set_axisbelow(True)
    for rank in range(0, world_size, 2):
        if world_size <= 64:
            ax.axhspan(rank - 0.5, rank + 0.5, color="#F7F7F7", linewidth=0, zorder=0)


def _draw_marks(ax: Axes, trace: Trace, rows: Rows, axis: TimeAxis) -> None:
    """Draws a tick for each mark, with its name where there is room before the next."""
    events = trace.events
    marks = np.flatnonzero(events.kind == MARK)
    if len(marks) == 0:
        return
    marks = marks[np.lexsort((events.post_ns[marks], events.rank[marks]))]
    x, rank = axis.at(events.post_ns[marks]), events.rank[marks]
    top, bottom = rows.marks
    ax.vlines(x, rank + top, rank + bottom, colors=style.INK, linewidths=1.2, zorder=5, gid="marks")
    ax.scatter(x, rank + bottom, s=12, marker="v", c=style.INK, linewidths=0, zorder=5)
    left, right = ax.get_xlim()
    per_point = (right - left) / (ax.get_window_extent().width * 72 / ax.figure.dpi)
    until = np.append(np.where(rank[1:] == rank[:-1], x[1:], right), right)
    size = min(MARK_NAME_SIZE, (bottom - top) * ax.get_window_extent().height * 72 / ax.figure.dpi / trace.world_size * 0.95)
    named = 0
    for index, at, end in zip(marks.tolist(), x.tolist(), until.tolist(), strict=True):
        label = int(events.label[index])
        name = events.tables.labels[label] if label != NONE else ""
        notice = read_notice(name)
        name = notice[0] if notice is not None else name  # what was found; the sentence would run across the picture
        if not name or size < 5 or named == MOST_MARK_NAMES:
            continue
        width = (len(name) * 0.6 * size + 5) * per_point
        row = int(events.rank[index]) + (top + bottom) / 2
        if at + width <= end:
            ax.text(at + 4 * per_point, row, name, fontsize=size, va="center_baseline", zorder=7)
            named += 1
        elif end == right:  # the last of its row, at the right edge: to the left of its tick
            ax.text(at - 4 * per_point, row, name, fontsize=size, va="center_baseline", ha="right", zorder=7)
            named += 1


def _legend(trace: Trace, bars: Bars, arrows: int) -> list[Artist]:
    """Entries for what occurs in the picture."""
    handles: list[Artist] = []
    looks = np.unique(bars.look).tolist()
    for number, label in enumerate(bars.labels[:MOST_SPAN_NAMES], len(OPERATION_LOOKS)):
        handles.append(_patch(look_of(number), trace.events.tables.labels[label] if label != NONE else "span"))
    if len(bars.labels) > MOST_SPAN_NAMES:
        handles.append(Line2D([], [], linestyle="none", label=f"and {len(bars.labels) - MOST_SPAN_NAMES} more names of spans"))
    if (trace.events.microbatch[bars.event[bars.look >= len(OPERATION_LOOKS)]] != NONE).any():
        handles.append(microbatch_entry())
    handles += [_patch(look_of(number), look_of(number).name) for number in looks if number < len(OPERATION_LOOKS)]
    if arrows:
        handles.append(
            Line2D([], [], color=style.INK, linewidth=1, marker=">", markersize=5, markevery=[1], label="send posted → recv done")
        )
    if (trace.events.kind == MARK).any():
        handles.append(Line2D([], [], color=style.INK, linestyle="none", marker="v", markersize=4, label="mark"))
    return handles


def _patch(look: style.Look, label: str) -> Any:
    return Patch(facecolor=look.colour, edgecolor=look.ink, hatch=look.hatch or None, linewidth=0.5, label=label)


GAP_POINTS: Final = 16.0
SHARE: Final = 0.68  # of the pictures' own sizes: the words stay as large, and can be read when a notebook shrinks the picture


def trace_png(trace: Trace) -> bytes:
    """Draws both pictures side by side, for a notebook; the ring alone where nothing happened.

    Args:
        trace: any trace.

    Returns:
        A PNG, 100 pixels an inch; the same bytes for the same trace. The trace's description is in the file.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> trace_png(Trace(make_events({"rank": [], "op": []}), {"world_size": 2}))[1:4]
        b'PNG'
    """
    ring_inches = (SIZE_INCHES[0] * SHARE, SIZE_INCHES[1] * SHARE)
    timeline_inches = (WIDTH_INCHES * SHARE, max(timeline_height(trace), 2.6))
    with style.drawing():
        figure = Figure()
        if not len(trace.events):
            ring = figure.add_axes((0, 0, 1, 1))
            style.fit(figure, [(ring, *ring_inches, style.Margins(0, 0, 0, 0))])
            style.fit(figure, [(ring, *ring_inches, draw_ring(trace, ring))])
            return style.figure_png(figure, description=trace.describe())
        ring, timeline = figure.add_axes((0, 0, 1, 1)), figure.add_axes((0, 0, 1, 1), label="timeline")
        # Sizes first: what is written into a picture depends on the room there is.
        nothing = style.Margins(0, 0, 0, 0)
        style.fit(figure, [(ring, *ring_inches, nothing), (timeline, *timeline_inches, nothing)])
        ring_margins, timeline_margins = draw_ring(trace, ring), draw_timeline(trace, timeline)
        spaced = ring_margins._replace(right=ring_margins.right + GAP_POINTS)
        style.fit(figure, [(ring, *ring_inches, spaced), (timeline, *timeline_inches, timeline_margins)])
    return style.figure_png(figure, description=trace.describe())
