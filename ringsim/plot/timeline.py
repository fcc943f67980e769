"""The timeline: what each rank did when, and who waited for whom.

Also what a notebook shows of a trace, ring and timeline in one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np

from ringsim.plot import sheet, style
from ringsim.plot.layout import (
    MERGED_SLOTS,
    OPERATION_LOOKS,
    SLOTS,
    UNFINISHED,
    Bars,
    Rows,
    TimeAxis,
    draw_arrows,
    draw_bars,
    draw_density,
    draw_open_ends,
    draw_span_names,
    look_of,
    make_bars,
    merge_ranks,
    merge_short,
    prepare_rows,
    row_points,
)
from ringsim.plot.ring import ring_picture
from ringsim.plot.sheet import Picture
from ringsim.plot.steps import microbatch_entry, picture_step, shows_step, step_picture
from ringsim.traces.clocks import unalign
from ringsim.traces.display import Style
from ringsim.traces.events import COLLECTIVE, MARK, NONE, OP_NAMES, SEND, SPAN, read_notice
from ringsim.traces.units import count, span_text, time_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["plot_timeline", "timeline_picture", "trace_png"]

WIDTH_INCHES: Final = 9.6
MOST_STRIPES: Final = 64  # ranks up to which every other row has a background
MOST_SPAN_NAMES: Final = 8  # in the legend: as many as have a look of their own
MOST_MARK_NAMES: Final = 100
MARK_NAME_SIZE: Final = 7.5  # points
# of the pictures' own sizes, in a notebook: the words stay as large, and can be read when the
# picture is shrunk
SMALLER: Final = 0.68


def plot_timeline(
    trace: Trace,
    *,
    step: int | None = None,
    align: bool = True,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws what each rank did when.

    Spans, and under them sends and recvs, with arrows from send to recv. Ranks are rows, rank 0 on
    top; time runs to the right, to scale, from the start of the run. The time for which an
    operation was blocked is split into waiting for a late partner and transfer. What is shorter
    than a pixel is merged, and the picture says so.

    A trace of ``train_step_pipeline`` is drawn as papers draw it, one step at a time: forwards and
    backwards with the number of their microbatch, the bubbles shaded, and warm-up, steady phase and
    cool-down marked; on a new figure, the live activations stand below. A trace in which something
    is stuck or has failed is drawn like any other. Of several hosts, the first row of each has its
    name, and arrows from one to another have a colour of their own.

    Args:
        trace: any trace, with any number of events.
        step: of a pipeline's trace, which step, from 0; None for the last one.
        align: whether times of several hosts are aligned; False draws what each host's own clock
            showed.
        ax: where to draw; a new figure by default.
        **look: size, theme and so on of the new figure, see `ringsim.traces.display.Style`.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> plot_timeline(Trace(make_events({"rank": [], "op": []}), {"world_size": 4})).get_title(
        ...     loc="left"
        ... )
        'Nothing was recorded on 4 ranks'
    """
    if not align:
        trace = replace(
            trace,
            events=unalign(trace.events, trace.metadata.get("clocks", [])),
            metadata={key: value for key, value in trace.metadata.items() if key != "clocks"},
        )
    return sheet.show([timeline_picture(trace, step, with_curve=ax is None)], ax, **look)


def trace_png(trace: Trace) -> bytes:
    """Draws ring and timeline side by side, for a notebook; the ring alone where nothing happened.

    The same bytes for the same trace.
    """
    ring = ring_picture(trace)
    pictures = [ring._replace(width=ring.width * SMALLER, height=ring.height * SMALLER)]
    if len(trace.events):
        times = timeline_picture(trace)
        pictures.append(times._replace(width=times.width * SMALLER, height=max(times.height, 2.6)))
    return sheet.picture_png(pictures, trace.describe())


def timeline_picture(trace: Trace, step: int | None = None, *, with_curve: bool = False) -> Picture:
    """Returns the timeline as a picture; of a pipeline a step, by default its last one.

    Under a step's rows stand the live activations if wanted.
    """
    if step is not None or shows_step(trace):
        return step_picture(picture_step(trace, step), with_curve=with_curve)
    events = trace.events
    row = (
        0.62
        + (0.22 if (events.kind == SPAN).any() else 0)
        + (0.14 if (events.kind == MARK).any() else 0)
    )
    return Picture(
        lambda ax: _draw(trace, ax), WIDTH_INCHES, float(np.clip(row * trace.world_size, 1.2, 8.5))
    )


def _draw(trace: Trace, ax: Axes) -> None:
    axis = TimeAxis.of(trace.events)
    bars = make_bars(trace)
    rows = Rows.of(trace, bars, ax)
    length = max(axis.last_ns - axis.first_ns, 1) / axis.unit_ns
    several = len({*trace.hosts} - {""}) > 1
    names, borders = [], []
    for row, first in enumerate(range(0, trace.world_size, rows.ranks)):
        last = min(first + rows.ranks, trace.world_size) - 1
        name = f"rank {first}" if first == last else f"ranks {first}–{last}"
        if several and (first == 0 or trace.hosts[first] != trace.hosts[first - 1]):
            name = f"{trace.hosts[first]}  {name}"
        names.append(name)
        if first and trace.crosses(first - 1, first):
            borders.append(row - 0.5)
    prepare_rows(ax, names, length, axis.label)
    if borders:
        ax.hlines(borders, *ax.get_xlim(), color=style.MUTED, linewidth=0.8, zorder=1, gid="hosts")
    for row in range(0, len(names) if len(names) <= MOST_STRIPES else 0, 2):
        ax.axhspan(row - 0.5, row + 0.5, color="#F7F7F7", linewidth=0, zorder=0)

    if rows.ranks > 1:
        slot_ns = axis.slot_ns * SLOTS / MERGED_SLOTS
        density = merge_ranks(bars, axis.first_ns, slot_ns, rows.ranks, trace.world_size)
    else:
        slot_ns = axis.slot_ns
        long, density = merge_short(bars, axis.first_ns, slot_ns)
        draw_bars(rows, bars, long, axis)
    draw_density(rows, density, slot_ns / axis.unit_ns)
    draw_open_ends(rows, bars, axis)
    if rows.ranks == 1:
        draw_span_names(rows, trace, bars, axis)
    _draw_marks(rows, trace, axis)
    arrows = draw_arrows(rows, trace, bars.depths, axis)

    notes = []
    if rows.ranks > 1:
        notes.append(f"A row is {rows.ranks} ranks: the height is the share of their time.")
    elif len(density.rank):
        pixel = f"a pixel ({time_text(axis.slot_ns)})" if axis.slot_ns >= 1 else "a pixel"
        merged = f"{int((~long).sum()):,} of {count(len(bars), 'bar')}"
        notes.append(
            f"Shorter than {pixel} and merged: {merged}; the height is the share of the time."
        )
    arrived = (trace.events.done_ns[trace.messages.recv] != NONE).sum()
    if arrived < len(trace.messages):
        notes.append(f"{count(len(trace.messages) - arrived, 'message')} never arrived: no arrow.")
    if arrows < arrived:
        notes.append(f"Arrows: {arrows:,} of {count(arrived, 'message')}, evenly in time.")
    words, handles = _message(trace, bars), _legend(trace, bars, arrows)
    style.dress(ax, *words, notes, handles, metadata=trace.metadata)


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
    title = (
        f"{ranks}, {length}: {style.percent(blocked.sum() / time)} of it blocked in communication"
    )
    parts = {
        "late senders": late_sender.sum(),
        "late receivers": late_receiver.sum(),
        "transfers": trace.waits.transfer_ns.sum(),
        "collectives": blocked[events.kind == COLLECTIVE].sum(),
    }
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{name} {style.percent(part / time)}" for name, part in largest if part > 0)
    by_rank = np.bincount(
        events.rank, weights=late_sender + late_receiver, minlength=trace.world_size
    )
    worst = by_rank.argmax()
    if by_rank[worst] > 0:
        said += f"; rank {worst} waited longest, {time_text(by_rank[worst])}"
    return title, said


def _draw_marks(rows: Rows, trace: Trace, axis: TimeAxis) -> None:
    """Draws a tick for each mark, with its name where there is room before the next."""
    ax, events = rows.ax, trace.events
    marks = np.flatnonzero(events.kind == MARK)
    if len(marks) == 0:
        return
    marks = marks[np.lexsort((events.post_ns[marks], events.rank[marks]))]
    x, rank = axis.at(events.post_ns[marks]), events.rank[marks] // rows.ranks
    top, bottom = rows.marks
    ax.vlines(x, rank + top, rank + bottom, colors=style.INK, linewidths=1.2, zorder=5, gid="marks")
    ax.scatter(x, rank + bottom, s=12, marker="v", c=style.INK, linewidths=0, zorder=5)
    size = min(
        style.letters(MARK_NAME_SIZE),
        (bottom - top) * row_points(ax, -(-trace.world_size // rows.ranks)) * 0.95,
    )
    if size < style.least(5, MARK_NAME_SIZE):
        return
    right, per_point = ax.get_xlim()[1], style.per_point(ax)
    until = np.append(np.where(rank[1:] == rank[:-1], x[1:], right), right)
    named = 0
    for index, row, at, end in zip(
        marks.tolist(), rank.tolist(), x.tolist(), until.tolist(), strict=True
    ):
        label = events.label[index]
        name = events.tables.labels[label] if label != NONE else ""
        notice = read_notice(name)
        # the kind; the sentence would run across the picture
        name = notice[0] if notice is not None else name
        if not name or named == MOST_MARK_NAMES:
            continue
        if at + (len(name) * 0.6 * size + 5) * per_point <= end:
            side, offset = "left", 4
        elif end == right:  # the last of its row, at the right edge: to the left of its tick
            side, offset = "right", -4
        else:
            continue
        place = at + offset * per_point, row + (top + bottom) / 2
        ax.text(*place, name, fontsize=size, va="center_baseline", ha=side, zorder=7)
        named += 1


def _legend(trace: Trace, bars: Bars, arrows: int) -> list[Artist]:
    handles: list[Artist] = []
    looks = np.unique(bars.look).tolist()
    for number, label in enumerate(bars.labels[:MOST_SPAN_NAMES], len(OPERATION_LOOKS)):
        name = span_text(trace.events.tables.labels[label]) if label != NONE else "span"
        handles.append(style.swatch(look_of(number), name))
    if len(bars.labels) > MOST_SPAN_NAMES:
        more = f"and {len(bars.labels) - MOST_SPAN_NAMES} more names of spans"
        handles.append(style.entry(more, linestyle="none"))
    if (trace.events.microbatch[bars.event[bars.look >= len(OPERATION_LOOKS)]] != NONE).any():
        handles.append(microbatch_entry())
    handles += [style.swatch(look_of(number)) for number in looks if number < len(OPERATION_LOOKS)]
    if arrows:
        look: Any = {"linewidth": 1, "marker": ">", "markersize": 5, "markevery": [1]}
        handles.append(style.entry("send posted → recv done", **look))
        if trace.crosses(trace.messages.src, trace.messages.dst).any():
            handles.append(style.entry("from host to host", color=style.VERMILLION, **look))
    if (trace.events.kind == MARK).any():
        handles.append(style.entry("mark", linestyle="none", marker="v", markersize=4))
    return handles
