"""The picture of one step of a pipeline, wherever its times are from: rows of boxes, and under them the activations that were alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ringsim.plot import style
from ringsim.plot.actions import action_rows, draw_actions, prepare_rows
from ringsim.plot.live_curve import HEIGHT_INCHES as CURVE_INCHES
from ringsim.plot.live_curve import draw_live_curve
from ringsim.plot.rows import Rows
from ringsim.traces.steps import Bubble, StageActions, measure_bubble
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["StepPicture", "draw_step", "percent", "plot_step", "step_height"]

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
    margins = draw_step(picture, ax, room_inches=GAP_INCHES + CURVE_INCHES)
    style.fit(figure, [(ax, WIDTH_INCHES, height, margins)])
    ax.set_xlabel("")
    ax.tick_params(axis="x", length=0, labelbottom=False)
    place, (_, whole) = ax.get_position(), figure.get_size_inches()
    bottom = place.y0 - (GAP_INCHES + CURVE_INCHES) / whole
    under = figure.add_axes((place.x0, bottom, place.width, CURVE_INCHES / whole), label="live activations")
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
