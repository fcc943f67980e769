"""Draws ranks' bars in rows, for all pictures that have a time axis.

A row has lanes for marks, spans, sends and recvs, and the ghosts of a recorded run, from top to
bottom. ``bars`` computes what the lanes contain, and ``timeline``, ``pipeline_step`` and
``schedule_run`` choose the rows and lanes of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from ringsim.plot import style
from ringsim.plot.bars import FIRST_SPAN, Bars
from ringsim.plot.style import Look
from ringsim.traces.events import NONE, Ints
from ringsim.traces.looks import find_meanings, read_table, readable_ink
from ringsim.traces.units import span_text

OPERATION_LOOKS = tuple(  # indexed by the states in ``bars``
    Look.of(state, zorder=2 if state in ("posted", "unwaited", "program") else 3)
    for state in (*read_table()["state"], "program")
)

LEAST_ROW_POINTS = 4.0  # the least height of a row that belongs to one rank
SLOTS = 1600  # about one per pixel; bars shorter than a slot are merged with neighbours
# as a share of the axis; in narrower boxes, textures and outlines would be invisible
LEAST_TEXTURED = 8 / SLOTS
LEAST_TEXTURED_POINTS = 3.0  # the least height of a box with texture
ROW_NAME_POINTS = 18.0  # the least distance between the names of rows
COMPACT_NAME_POINTS = 8.0
MOST_NAME_LETTERS = 22
TICK_POINTS = 50.0  # the room for a tick's label
COMPACT_TICK_POINTS = 28.0
GAP_POINTS = 6.0  # between a compact picture's rows and the unit of its time axis
EDGE = 0.42  # the distance from the middle of a row, which is 1 high, to its outer lanes
GAP = 0.03  # between lanes
GHOSTS = 0.16  # the height of the lane for ghosts, with the gap above
MOST_SPAN_NAMES = 8  # the most span names in the legend: one for each look
MOST_TEXTS = 1000
TEXT_SIZE = 8.0  # points
LEAST_SIZE = 5.0  # points; smaller text would be illegible
LETTER = 0.62  # the width of a letter, as a share of the font's size
WIDTH_INCHES = 9.6
STRIP_ROW_INCHES = 0.148
MOST_STRIP_INCHES = 2.9


@dataclass(frozen=True)
class TimeAxis:
    """A time axis, which converts a trace's times to positions.

    The axis starts at ``first_ns`` with position 0, and ends at ``last_ns``. Its unit is
    ``unit_ns`` long.
    """

    first_ns: int
    last_ns: int
    unit_ns: float
    unit: str

    def at(self, time_ns: Ints | float) -> Ints:
        """Returns the positions of times on the axis."""
        return np.asarray((time_ns - self.first_ns) / self.unit_ns)


class Lanes(NamedTuple):
    """The edges of a row's lanes, as distances from the row's middle; y grows downwards.

    The first lanes are for spans, followed by four for sends, recvs, collectives and ghosts.
    ``marks`` holds the upper and the lower edge of the strip for marks.
    """

    top: Ints
    bottom: Ints
    marks: tuple[float, float]


def divide(
    depths: int = 1,
    *,
    strip: float = 0.0,
    operations: float = 0.0,
    has_ghosts: bool = False,
    edge: float = EDGE,
) -> Lanes:
    """Divides a row into lanes between ``-edge`` and ``edge``.

    The spans share what is left by the strip for marks, by the lanes for sends and recvs, and by
    the ghosts. If there is nothing left to share, because ``depths`` is 0, the lanes for sends and
    recvs take all of it.
    """
    top = -edge + strip + (GAP if strip else 0)
    bottom = edge - GHOSTS * has_ghosts
    split = bottom - operations if depths else top
    spans = np.linspace(top, split - (GAP if operations else 0), depths + 1)
    middle = (split + bottom) / 2
    return Lanes(
        top=np.append(spans[:-1], [split, middle + GAP / 2, split, bottom + GAP]),
        bottom=np.append(spans[1:], [middle - GAP / 2, bottom, bottom, edge]),
        marks=(-edge, -edge + strip),
    )


@dataclass(frozen=True, eq=False)
class RankRows:
    """The ranks' rows on axes; the middle of rank 0's row is at 0.

    One point is ``per_point`` long on the time axis. Each row combines ``ranks`` ranks and is
    ``points`` points high.
    """

    ax: Axes
    lanes: Lanes
    per_point: float
    points: float
    ranks: int
    first: int = 0  # the row of rank 0

    def middle(self, rank: Ints | int, lane: Ints | int) -> Ints:
        """Returns the y position of the middle of a lane in each rank's row."""
        middle = (self.lanes.top[lane] + self.lanes.bottom[lane]) / 2
        return self.first + rank // self.ranks + middle

    def draw(
        self,
        look: Look,
        gid: str,
        rank: Ints,
        lane: Ints | int,
        start: Ints,
        end: Ints,
        low: Ints | float = 0.0,
        high: Ints | float = 1.0,
        *,
        zorder: float | None = None,
        outlined: bool = False,
    ) -> None:
        """Draws bars with a single look; omits textures and outlines that would be invisible.

        The legend shows the look by its name, unless the name is "". ``start`` and ``end`` are
        positions on the axis. ``low`` and ``high`` are shares of the lane's height, measured from
        its lower edge.
        """
        below = self.lanes.bottom[lane]
        base, height = self.first + rank // self.ranks + below, below - self.lanes.top[lane]
        lower, upper = base - low * height, base - high * height
        corners: Any = np.stack([start, lower, start, upper, end, upper, end, lower], axis=-1)
        corners = corners.reshape(-1, 4, 2)
        points = abs(lower - upper) * self.points
        left, right = self.ax.get_xlim()
        wide = end - start >= LEAST_TEXTURED * (right - left)
        wide &= points >= LEAST_TEXTURED_POINTS
        zorder = look.zorder if zorder is None else zorder
        name = style.name_look(look.name)
        more = {"facecolors": look.colour, "zorder": zorder, "gid": gid, "label": name}

        def add(some: Ints, **looks: Any) -> None:
            if some.any():
                self.ax.add_collection(PolyCollection(corners[some], **looks), autolim=False)

        add(wide, edgecolors=look.ink, hatch=look.hatch or None, linewidths=look.edge, **more)
        # Boxes only a pixel high are not smoothed, because soft edges would blur the rows.
        add(~wide, linewidths=0, antialiaseds=points[~wide] >= 1, **more)
        # drawn separately, because a hatch takes the colour of the edge
        white = {"edgecolors": style.GROUND, "linewidths": 0.6, "zorder": zorder + 0.1}
        add(wide & outlined, facecolors="none", **white)

    def draw_each(
        self, looks: Mapping[Any, Look], gid: str, look: Ints, *columns: Ints | int, **more: Any
    ) -> None:
        """Draws bars like ``draw``, but takes the look of each bar from ``looks``."""
        every = np.broadcast_arrays(*columns)
        for name, one in looks.items():
            some = look == name
            if some.any():
                self.draw(one, f"{gid}-{name}", *(column[some] for column in every), **more)

    def draw_bars(self, bars: Bars, which: Ints, axis: TimeAxis) -> None:
        """Draws the selected bars, to scale."""
        look = np.where(which, bars.look, NONE)
        times = axis.at(bars.start_ns), axis.at(bars.end_ns)
        self.draw_each(looks_of(bars), "boxes", look, bars.rank, bars.lane, *times)

    def write_in(
        self,
        rank: Ints,
        lane: Ints | int,
        start: Ints,
        end: Ints,
        texts: Callable[[int], Sequence[str]],
        colour: Callable[[int], str],
        low: Ints | float = 0.0,
        high: Ints | float = 1.0,
    ) -> bool:
        """Writes in each bar the first of its ``texts`` that fits, starting with the widest bar.

        If none fits, the last one shrinks; in a compact picture, all texts then have the least
        size. Blanks around a text reserve room. A plain background in the bar's ``colour`` hides
        textures and arrows. ``low`` and ``high`` are those of ``draw``. Returns whether any bar has
        a text.
        """
        room = ((end - start) / self.per_point - (0 if style.is_compact() else 1.5)) / LETTER
        height = (self.lanes.bottom - self.lanes.top)[lane]
        least = np.min(height * (high - low)) * self.points
        largest = min(style.letters(TEXT_SIZE), least * 0.85)
        widest = {bar: texts(bar) for bar in np.argsort(-room, kind="stable")[:MOST_TEXTS].tolist()}
        if style.is_compact() and any(room[bar] < len(widest[bar][-1]) * largest for bar in widest):
            largest = min(LEAST_SIZE, largest)
        x, y = (start + end) / 2, self.middle(rank, lane) + height * (1 - low - high) / 2
        is_written = False
        for bar, words in widest.items():
            text = next((text for text in words if len(text) * largest <= room[bar]), words[-1])
            size = min(largest, room[bar] / max(len(text), 1))
            if size >= LEAST_SIZE:
                is_written = True
                self.ax.text(
                    x[bar],
                    y[bar],
                    text.strip(),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=readable_ink(colour(bar)),
                    zorder=7,
                    clip_on=True,
                    bbox={"boxstyle": "square,pad=0.1", "fc": colour(bar), "ec": "none"},
                )
        return is_written


def looks_of(bars: Bars) -> dict[int, Look]:
    """Returns the looks that bars use, keyed by number, those of spans first.

    The first spans have their names in the legend.
    """
    looks = dict(enumerate(OPERATION_LOOKS))
    meanings = find_meanings(bars.labels)
    known = {meaning: Look.of(meaning) for meaning in set(meanings)}
    for number, (label, meaning) in enumerate(zip(bars.labels, meanings, strict=True)):
        name = (span_text(label) or "span") if number < MOST_SPAN_NAMES else ""
        looks[FIRST_SPAN + number] = replace(known[meaning], name=name)
    used = sorted(np.unique(bars.look).tolist(), key=lambda number: (number < FIRST_SPAN, number))
    return {number: looks[number] for number in used}


def lay_rows(
    ax: Axes,
    names: Sequence[str],
    length: float,
    time: str,
    unit: str,
    lanes: Lanes,
    *,
    ranks: int = 1,
    above: float = 0.0,
) -> RankRows:
    """Divides axes that already have their final size into one row per name.

    The time axis ends at ``length``, and ``time`` and ``unit`` label it. Above the first row,
    ``above`` points remain free.
    """
    width, height = style.points(ax)
    row = height / len(names)
    ax.set_xlim(-0.004 * length, 1.012 * length)
    ax.set_ylim(len(names) - 0.5, -0.5 - above / row)
    every = math.ceil((COMPACT_NAME_POINTS if style.is_compact() else ROW_NAME_POINTS) / row)
    shown = {place: name for place, name in enumerate(names) if name and place % every == 0}
    ax.set_yticks([*shown], [style.shorten(name, MOST_NAME_LETTERS) for name in shown.values()])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=style.GRID)
    label_time(ax, time, unit)
    return RankRows(ax, lanes, 1.016 * length / width, height / (len(names) + above / row), ranks)


def label_time(ax: Axes, time: str, unit: str) -> None:
    """Labels the horizontal axis and sets ticks at round numbers."""
    ax.set_xlabel(f"{time} ({unit})", loc="left")
    room = COMPACT_TICK_POINTS if style.is_compact() else TICK_POINTS
    most = int(np.clip(style.points(ax)[0] / room, 1, 10))
    ax.xaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if style.is_compact():  # the unit is enough, next to the ticks' labels
        ax.xaxis.label.set_visible(False)
        size = style.letters(1)
        gap = -size * 0.6 - ax.xaxis.get_tick_padding()
        style.write_beside(ax, unit, (0, 0), (-GAP_POINTS, gap), ha="right", va="center", size=size)


def strip_inches(rows: int) -> float:
    """Returns the height of a compact picture with this number of rows."""
    return min(STRIP_ROW_INCHES * rows, MOST_STRIP_INCHES)
