"""The computations of a pipeline as papers draw them: boxes with the microbatch's number, gaps shaded, and the phases of a rank above.

A row, with its lanes from top to bottom::

    |-- warm-up --|------- steady -------|-- cool-down --|
    [F0 ][F1 ]xxxx[B0     ][F2 ][B1     ]xxxx[B2     ]      xxx: nothing was computed, the bubble
     ..====   ..====                                         sends, then recvs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator

from ringsim.plot import style
from ringsim.plot.rows import Rows
from ringsim.plot.style import Look
from ringsim.traces.events import Ints
from ringsim.traces.steps import StageActions

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["ACTION_LOOKS", "BUBBLE_LOOK", "action_rows", "draw_actions", "microbatch_entry", "prepare_rows"]

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
