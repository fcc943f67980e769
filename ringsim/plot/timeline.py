"""Draws the ranks' timeline, with their work, messages and waits.

This module also draws the picture that a notebook shows for a trace, with ring and timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes

from ringsim.diagnose.snapshot import reopen
from ringsim.plot import sheet, style
from ringsim.plot.bars import FIRST_SPAN, UNFINISHED, Bars, choose_messages, make_bars, merge
from ringsim.plot.ghosts import draw_recorded, fit_axis
from ringsim.plot.pipeline_step import explain_numbers, picture_step, step_picture
from ringsim.plot.ring import ring_picture
from ringsim.plot.rows import (
    EDGE,
    LEAST_ROW_POINTS,
    LEAST_SIZE,
    LETTER,
    MOST_SPAN_NAMES,
    SLOTS,
    WIDTH_INCHES,
    RankRows,
    TimeAxis,
    divide,
    lay_rows,
    looks_of,
    strip_inches,
)
from ringsim.plot.sheet import Picture
from ringsim.traces.clocks import unalign
from ringsim.traces.display import Images, Style
from ringsim.traces.events import (
    COLLECTIVE,
    ERROR,
    NONE,
    OP_NAMES,
    SEND,
    SPAN,
    read_notice,
)
from ringsim.traces.looks import LOOKS, find_meanings
from ringsim.traces.steps import count_steps
from ringsim.traces.units import count, span_text, time_text
from ringsim.traces.value import Trace

MOST_STRIPES = 64  # with more rows, there are no stripes behind them
MOST_MARK_NAMES = 100
MARK_NAME_SIZE = 7.5  # points
HEAD_POINTS = 1.0  # the width of an arrow's shaft; matplotlib's unit for the head
COMPACT_HEAD_POINTS = 0.6
MERGED_SLOTS = 400  # the number of slots if rows combine several ranks
MERGED_ROW_POINTS = 12.0  # the least height of a row that combines several ranks
COMPACT_EDGE = 0.48
OPERATIONS = 0.32  # the height of the lanes for sends and recvs, if there are spans above
MARKS = 0.17  # the height of the strip for marks
# the scale of pictures in a notebook; their text keeps its size, so that it stays legible
SMALLER = 0.68


def plot_timeline(
    trace: Trace,
    *,
    step: int | None = None,
    align: bool = True,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws the timeline of each rank.

    Each rank has its own row, with rank 0 at the top. Time runs from left to right, to scale, from
    the start of the run. A row shows the rank's spans, with its sends and recvs below the spans,
    and arrows lead from sends to recvs. The time that an operation was blocked is divided into two
    parts: waiting for a late partner, and transfer. Bars shorter than a pixel are merged, and a
    note below the picture reports this.

    A trace of ``train_step_pipeline`` is drawn as in the papers, one step at a time. Forwards and
    backwards are labelled with their microbatch numbers, bubbles are shaded, and brackets mark the
    warm-up, the steady phase and the cool-down. A new figure also shows the live activations. If an
    operation is stuck or has failed, the trace is drawn like any other trace. If there are several
    hosts, each host's first row shows its name, and arrows between hosts have a different colour.

    Args:
        trace: a trace, with any number of events.
        step: the index of the pipeline step to draw, counted from 0. By default, if the trace
            contains steps, the last one is drawn.
        align: whether to align the times of different hosts; if False, each host's times are drawn
            as its own clock showed them.
        ax: the axes to draw on, or None to create a new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes. Call ``ax.figure.savefig(...)`` to save the figure.

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
            metadata=trace.metadata | {"clocks": []},
        )
    return sheet.show([timeline_picture(trace, step, with_curve=ax is None)], ax, **look)


def trace_images(trace: Trace, *, themed: bool = True) -> Images:
    """Draws the ring and the timeline for a notebook; without events, draws only the ring.

    If ``themed`` is False, draws them only as PNG.
    """
    ring = ring_picture(trace)
    pictures = [ring._replace(width=ring.width * SMALLER, height=ring.height * SMALLER)]
    if len(trace.events):
        times = timeline_picture(trace)
        pictures.append(times._replace(width=times.width * SMALLER, height=max(times.height, 2.6)))
    return sheet.draw_images(pictures, trace.describe(), themed=themed)


def timeline_picture(
    trace: Trace,
    step: int | None = None,
    *,
    with_curve: bool = False,
    draw_under: Callable[[Axes, TimeAxis], None] | None = None,
) -> Picture:
    """Returns the timeline as a picture.

    For a pipeline, the picture shows one step, by default the last one. If an operation is stuck or
    has failed, and no step is given, it shows the whole run instead. ``with_curve`` adds the live
    activations below the rows of a step. ``draw_under`` draws panels below the rows of the whole
    run.
    """
    trace = replace(trace, events=reopen(trace.events, trace.metadata))
    events = trace.events
    is_stuck = (events.wait_ns != NONE) & (events.done_ns == NONE) | (events.status == ERROR)
    if step is not None or not (
        draw_under or (events.communicates & is_stuck).any() or not count_steps(events)
    ):
        return step_picture(picture_step(trace, step), with_curve=with_curve)
    row = 0.62 + 0.22 * (events.kind == SPAN).any() + 0.14 * events.program_marks.any()
    return Picture(
        lambda ax: _draw(trace, ax, draw_under),
        WIDTH_INCHES,
        float(np.clip(row * trace.world_size, 1.2, 8.5)),
        strip_inches(trace.world_size),
    )


def _draw(trace: Trace, ax: Axes, draw_under: Callable[[Axes, TimeAxis], None] | None) -> None:
    events, axis, bars = trace.events, fit_axis(trace), make_bars(trace)
    rows = _lay_out(trace, bars, axis, ax)
    slot_ns = max(axis.last_ns - axis.first_ns, 1) / (SLOTS if rows.ranks == 1 else MERGED_SLOTS)
    short = (bars.end_ns - bars.start_ns < slot_ns) | (rows.ranks > 1)
    rows.draw_bars(bars, ~short, axis)
    merged = merge(bars, short, axis.first_ns, slot_ns, rows.ranks, trace.world_size)
    slot = slot_ns / axis.unit_ns
    places = merged.rank, merged.lane, merged.slot * slot, merged.slot * slot + slot
    rows.draw_each(
        looks_of(bars), "density", merged.look, *places, merged.low, merged.high, zorder=2.5
    )
    _draw_open_ends(rows, bars, axis)
    if rows.ranks == 1:
        _draw_span_names(rows, trace, bars, axis)
    _draw_marks(rows, trace, axis)
    arrows = _draw_arrows(rows, trace, bars.depths, axis)

    notes = []
    if axis.first_ns:
        late = time_text(axis.first_ns)
        notes.append(f"The first event came {late} after the start of the run.")
    if rows.ranks > 1:
        notes.append(
            f"Each row combines {rows.ranks} ranks; the height of a bar is its share of their time."
        )
    elif short.any():
        pixel = f"a pixel ({time_text(slot_ns)})" if slot_ns >= 1 else "a pixel"
        notes.append(
            f"Bars shorter than {pixel} are merged ({short.sum():,} of {len(bars.rank):,}); their "
            "height is their share of the time."
        )
    arrived = (events.done_ns[trace.messages.recv] != NONE).sum()
    if arrived < len(trace.messages):
        notes.append(f"No arrow: {count(len(trace.messages) - arrived, 'message')} never arrived.")
    if arrows < arrived:
        notes.append(
            f"Arrows show {arrows:,} of {count(arrived, 'message')}, spread evenly over time."
        )
    if len(bars.labels) > MOST_SPAN_NAMES:
        more = len(bars.labels) - MOST_SPAN_NAMES
        style.entry(ax, f"and {more} more span names", linestyle="none")
    if (events.microbatch[events.kind == SPAN] != NONE).any() and not style.is_compact():
        explain_numbers(ax)
    if trace.recorded is not None and rows.ranks == 1:
        draw_recorded(rows, trace.recorded, axis)
    if draw_under is not None:
        draw_under(ax, axis)
    style.dress(ax, *_message(trace, bars), notes, metadata=trace.metadata)


def _lay_out(trace: Trace, bars: Bars, axis: TimeAxis, ax: Axes) -> RankRows:
    """Divides the axes into rows with a time axis and draws lines between hosts.

    If rows would be too low, each row combines 2, 4, 8 ... ranks.
    """
    height = style.points(ax)[1] / trace.world_size
    ranks = 1
    if height < LEAST_ROW_POINTS:
        ranks = 2 ** math.ceil(math.log2(MERGED_ROW_POINTS / height))
    hosts = trace.hosts
    several = len({*hosts} - {""}) > 1
    names = []
    for first in range(0, trace.world_size, ranks):
        last = min(first + ranks, trace.world_size) - 1
        name = f"rank {first}" if first == last else f"ranks {first}–{last}"
        if several and (first == 0 or hosts[first] != hosts[first - 1]):
            name = f"{hosts[first]}  {name}"
        names.append(name)
    time = "time since the first event" if axis.first_ns else "time since the start of the run"
    length = max(axis.last_ns - axis.first_ns, 1) / axis.unit_ns
    lanes = divide(
        bars.depths,
        strip=MARKS * bool(trace.events.program_marks.any()),
        operations=OPERATIONS * bool((bars.lane >= bars.depths).any()),
        has_ghosts=trace.recorded is not None,
        edge=COMPACT_EDGE if style.is_compact() else EDGE,
    )
    rows = lay_rows(ax, names, length, time, axis.unit, lanes, ranks=ranks)
    firsts = np.arange(ranks, trace.world_size, ranks)
    borders = np.flatnonzero(trace.crosses(firsts - 1, firsts)) + 0.5
    if len(borders):
        ax.hlines(borders, *ax.get_xlim(), color=style.MUTED, linewidth=0.8, zorder=1, gid="hosts")
    for row in range(0, len(names) if len(names) <= MOST_STRIPES else 0, 2):
        ax.axhspan(row - 0.5, row + 0.5, color=LOOKS["field"].light, linewidth=0, zorder=0)
    return rows


def _draw_open_ends(rows: RankRows, bars: Bars, axis: TimeAxis) -> None:
    """Draws an arrowhead at the end of each unfinished bar.

    The arrowhead shows that the trace ends there, but the operation does not.
    """
    some = bars.is_open
    if some.any():
        rows.ax.scatter(
            axis.at(bars.end_ns[some]),
            rows.middle(bars.rank[some], bars.lane[some]),
            s=26,
            marker=">",
            c=np.where(bars.look[some] == UNFINISHED, LOOKS["stuck"].light, style.MUTED),
            linewidths=0,
            zorder=6,
            clip_on=False,
            gid="open-ends",
        )


def _draw_span_names(rows: RankRows, trace: Trace, bars: Bars, axis: TimeAxis) -> None:
    """Writes names, stages and microbatches into spans with room."""
    spans = np.flatnonzero(bars.look >= FIRST_SPAN)
    looks = looks_of(bars)
    if len(spans):
        rows.write_in(
            bars.rank[spans],
            bars.lane[spans],
            axis.at(bars.start_ns[spans]),
            axis.at(bars.end_ns[spans]),
            lambda number: _span_texts(trace, bars.event[spans[number]]),
            lambda number: looks[bars.look[spans[number]]].colour,
        )


def _span_texts(trace: Trace, event: int) -> Sequence[str]:
    """Returns the possible texts for a span, from longest to shortest."""
    events = trace.events
    label, stage, microbatch = events.label[event], events.stage[event], events.microbatch[event]
    name = span_text(events.tables.labels[label]) if label != NONE else ""
    number = str(microbatch) if microbatch != NONE else ""
    if style.is_compact() and number:  # the legend has the names
        return [number]
    full = (name, f"stage {stage}" if stage != NONE else "", number and f"microbatch {number}")
    short = LOOKS[find_meanings([name])[0]].short
    names = " ".join(filter(None, (name, number))), number and short + number
    return [*filter(None, (", ".join(filter(None, full)), *names, number))] or [""]


def _message(trace: Trace, bars: Bars) -> tuple[str, str]:
    """Returns the picture's title and subtitle."""
    events = trace.events
    ranks = count(trace.world_size, "rank")
    if len(events) == 0:
        return f"Nothing was recorded on {ranks}", ""
    stuck = bars.event[bars.look == UNFINISHED]
    if len(stuck):
        index = stuck[np.argmin(events.wait_ns[stuck])]  # the operation that was blocked first
        kind, peer = events.kind[index], events.peer[index]
        partner = f" {'to' if kind == SEND else 'from'} rank {peer}" if peer >= 0 else ""
        return (
            f"Stuck: {count(len(stuck), 'operation')} never finished",
            f"first: rank {events.rank[index]} in {OP_NAMES[events.op[index]]}{partner}",
        )
    length = time_text(trace.makespan_s * 1e9)
    if not events.communicates.any():
        return f"{ranks} ran for {length} without a message", ""
    if trace.makespan_s == 0:
        return f"{ranks}, {count(len(trace.messages), 'message')}, and no time passed", ""
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


def _draw_marks(rows: RankRows, trace: Trace, axis: TimeAxis) -> None:
    """Draws a tick for each mark, with its name if there is room before the next mark."""
    ax, events = rows.ax, trace.events
    marks = np.flatnonzero(events.program_marks)
    if len(marks) == 0:
        return
    marks = marks[np.lexsort((events.post_ns[marks], events.rank[marks]))]
    x, row = axis.at(events.post_ns[marks]), events.rank[marks] // rows.ranks
    top, bottom = rows.lanes.marks
    ax.vlines(x, row + top, row + bottom, colors=style.INK, linewidths=1.2, zorder=5, gid="marks")
    ax.scatter(x, row + bottom, s=12, marker="v", c=style.INK, linewidths=0, zorder=5, label="mark")
    size = min(MARK_NAME_SIZE, (bottom - top) * rows.points * 0.95)
    if size < LEAST_SIZE:
        return
    (left, right), per_point = ax.get_xlim(), rows.per_point
    same = row[1:] == row[:-1]
    until = np.append(np.where(same, x[1:], right), right)
    since = np.append(left, np.where(same, x[:-1], left))
    named = 0
    for index, at, y, begin, end in zip(
        marks, x, row + (top + bottom) / 2, since, until, strict=True
    ):
        name = events.tables.labels[events.label[index]] if events.label[index] != NONE else ""
        notice = read_notice(name)
        # write only the kind of a notice, because its sentence is too long
        name = style.shorten(notice[0] if notice is not None else name)
        if not name or named == MOST_MARK_NAMES:
            continue
        room = (len(name) * LETTER * size + 5) * per_point
        side, offset = "left", 4
        if at + room > end:
            if end != right or at - room < begin:
                continue
            side, offset = "right", -4  # the last mark of its row has its name on the left
        place = at + offset * per_point, y
        ax.text(*place, name, fontsize=size, va="center_baseline", ha=side, zorder=7)
        named += 1


def _draw_arrows(rows: RankRows, trace: Trace, send_lane: int, axis: TimeAxis) -> int:
    """Draws arrows from the post of each send to the end of its recv; returns how many it drew."""
    messages, events = trace.messages, trace.events
    chosen = choose_messages(trace, rows.ranks)
    src, dst = messages.src[chosen], messages.dst[chosen]
    x, y = axis.at(events.post_ns[messages.send[chosen]]), rows.middle(src, send_lane)
    to_x, to_y = axis.at(events.done_ns[messages.recv[chosen]]), rows.middle(dst, send_lane + 1)
    # arrows across many rows are paler
    far, across = abs(dst // rows.ranks - src // rows.ranks) > 1, trace.crosses(src, dst)
    words = "message" if style.is_compact() else "send posted → recv done"
    looks = (
        (~far & ~across, style.INK, 4.5, "arrows", words),
        (far & ~across, style.fade(style.INK, 0.5), 4.0, "arrows-far", words),
        (across, LOOKS["across"].light, 4.4, "arrows-across", "from host to host"),
    )
    head = COMPACT_HEAD_POINTS if style.is_compact() else HEAD_POINTS
    for some, colour, zorder, gid, label in looks:
        if some.any():
            line = {"linewidth": 1, "marker": ">", "markersize": 5, "markevery": [1]}
            style.entry(rows.ax, label, color=colour, **line)
            rows.ax.quiver(
                x[some], y[some], (to_x - x)[some], (to_y - y)[some], angles="xy", scale_units="xy",
                scale=1, units="inches",
                width=head / 72, headwidth=6, headlength=7, headaxislength=6.5, minlength=0,
                color=colour, zorder=zorder, gid=gid,
            )  # fmt: skip
    return len(chosen)
