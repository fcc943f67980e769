"""The boxes of a timeline: bars to scale, merged bars, ends that never came, and the words inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.collections import PolyCollection

from ringsim.plot import style
from ringsim.plot.bars import OPERATION_LOOKS, POSTED, SPAN_LOOKS, UNFINISHED, UNWAITED, Bars
from ringsim.plot.density import Density
from ringsim.plot.rows import Rows
from ringsim.plot.style import Look
from ringsim.plot.time_axis import TimeAxis
from ringsim.traces.events import NONE, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["draw_density", "draw_long", "draw_open_ends", "draw_span_names", "look_of", "span_texts"]

HATCHED_FROM: Final = 8  # slots: in a narrower bar no texture can be seen
MOST_NAMES: Final = 500  # words in boxes
LETTER: Final = 0.62  # width of a letter, as a share of the font's size
NAME_SIZE: Final = 8.0  # points


def look_of(number: int) -> Look:
    """Returns the look with a number as in ``Bars.look``; spans repeat theirs."""
    if number < len(OPERATION_LOOKS):
        return OPERATION_LOOKS[number]
    return SPAN_LOOKS[(number - len(OPERATION_LOOKS)) % len(SPAN_LOOKS)]


def draw_long(ax: Axes, bars: Bars, which: Ints, rows: Rows, axis: TimeAxis) -> None:
    """Draws the bars numbered ``which``, to scale, those of one look together."""
    hatched = bars.end_ns - bars.start_ns >= HATCHED_FROM * axis.slot_ns
    for number in np.unique(bars.look[which]).tolist():
        look = look_of(number)
        for textured in (True, False):
            some = which[(bars.look[which] == number) & (hatched[which] == textured)]
            if len(some) == 0:
                continue
            boxes: Any = rows.boxes(bars.rank[some], bars.lane[some], axis.at(bars.start_ns[some]), axis.at(bars.end_ns[some]))
            hatch = look.hatch if textured and look.hatch else None
            linewidth = 0.8 if look.colour == "#FFFFFF" else 0.5 if textured and not hatch else 0.0
            collection = PolyCollection(
                boxes, facecolors=look.colour, hatch=hatch, edgecolors=look.ink, linewidths=linewidth,
                zorder=2 if number in (POSTED, UNWAITED) else 3, gid=f"boxes-{number}",
            )  # fmt: skip
            ax.add_collection(collection, autolim=False)


def draw_density(ax: Axes, density: Density, rows: Rows, axis: TimeAxis) -> None:
    """Draws what the short bars add up to."""
    slot = axis.slot_ns / axis.unit_ns
    for number in np.unique(density.look).tolist():
        some = density.look == number
        start = density.slot[some] * slot
        boxes: Any = rows.boxes(density.rank[some], density.lane[some], start, start + slot, density.bottom[some], density.top[some])
        look = look_of(number)
        colour = look.ink if look.colour == "#FFFFFF" else look.colour
        ax.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0.0, zorder=2.5, gid=f"density-{number}"), autolim=False)


def draw_open_ends(ax: Axes, bars: Bars, rows: Rows, axis: TimeAxis) -> None:
    """Puts an arrowhead at the end of each bar that never ended: there the trace ends, not the operation."""
    some = np.flatnonzero(bars.is_open)
    if len(some):
        height = rows.middle(bars.rank[some], bars.lane[some])
        stuck = bars.look[some] == UNFINISHED
        colours = np.where(stuck, style.VERMILLION, style.MUTED)
        ax.scatter(axis.at(bars.end_ns[some]), height, s=26, marker=">", c=colours, linewidths=0, zorder=6, clip_on=False, gid="open-ends")


def draw_span_names(ax: Axes, trace: Trace, bars: Bars, rows: Rows, axis: TimeAxis) -> None:
    """Writes name, stage and microbatch into the spans where there is room, widest first."""
    spans = np.flatnonzero(bars.look >= len(OPERATION_LOOKS))
    if len(spans) == 0:
        return
    left, right = ax.get_xlim()
    points = ax.get_window_extent().width * 72 / ax.figure.dpi
    room = (bars.end_ns[spans] - bars.start_ns[spans]) / axis.unit_ns / (right - left) * points - 4
    lane_points = (
        ax.get_window_extent().height
        * 72
        / ax.figure.dpi
        / max(trace.world_size, 1)
        * float(np.min((rows.bottom - rows.top)[: bars.depths]))
    )
    size = min(NAME_SIZE, lane_points * 0.85)
    if size < 5:
        return
    widest = np.argsort(-room, kind="stable")[:MOST_NAMES]
    for bar, space in zip(spans[widest].tolist(), room[widest].tolist(), strict=True):
        fitting = [text for text in span_texts(trace, int(bars.event[bar])) if len(text) * LETTER * size <= space]
        if not fitting:
            continue
        lane = int(bars.lane[bar])
        # A patch of the plain colour, so that neither texture nor arrows cross the letters.
        plain = {"boxstyle": "square,pad=0.12", "facecolor": look_of(int(bars.look[bar])).colour, "edgecolor": "none"}
        ax.text(
            float(axis.at(bars.start_ns[bar] / 2 + bars.end_ns[bar] / 2)), float(rows.middle(bars.rank[bar], lane)), fitting[0],
            ha="center", va="center_baseline", fontsize=size, color=style.BLACK, zorder=7, clip_on=True, bbox=plain,
        )  # fmt: skip


def span_texts(trace: Trace, event: int) -> list[str]:
    """What may be written into a span, from the longest text to the shortest."""
    events = trace.events
    label = int(events.label[event])
    name = events.tables.labels[label] if label != NONE else ""
    stage, microbatch = int(events.stage[event]), int(events.microbatch[event])
    number = str(microbatch) if microbatch != NONE else ""
    full = [name, f"stage {stage}" if stage != NONE else "", f"microbatch {microbatch}" if number else ""]
    short = [name, number]
    return [text for text in (", ".join(filter(None, full)), " ".join(filter(None, short)), number) if text]
