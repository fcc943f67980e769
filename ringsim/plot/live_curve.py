"""The activations that each rank holds while a step goes on, as a curve, with the bound of the closed form dashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import MaxNLocator

from ringsim.plot import style
from ringsim.traces.steps import StageActions, list_live, measure_peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HEIGHT_INCHES", "draw_live_curve"]

HEIGHT_INCHES: Final = 1.25
MOST_RANKS: Final = 4  # curves: more could not be told apart
NAME_POINTS: Final = 10.5  # height of a name beside the curves
PALEST: Final = 0.6  # how far the last curve's colour is on the way to white


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
    red, green, blue = (channel + (1 - channel) * share * PALEST for channel in to_rgb(colour))
    return to_hex((red, green, blue))
