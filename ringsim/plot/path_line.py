"""The critical path over the rows of a step: along a rank while it computes, from rank to rank while a message travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from ringsim.plot import style
from ringsim.simulator.critical_path import DATA, LINK_BUSY, PROGRAM, RECEIVER_LATE, START, CriticalPath

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["REASON_COLOURS", "draw_path"]

REASON_COLOURS: Final = {PROGRAM: style.INK, DATA: style.BLUE, LINK_BUSY: style.VERMILLION, RECEIVER_LATE: style.PURPLE}
DASHES: Final[dict[str, Any]] = {PROGRAM: "solid", DATA: "solid", LINK_BUSY: (0, (1, 0.7)), RECEIVER_LATE: (0, (3, 1))}
WIDTH: Final = 2.2  # points
HALO: Final = 0.7  # white on either side, in widths of the line, so that it stands out from any box


def draw_path(ax: Axes, path: CriticalPath, *, unit: float, at: float = 0.0, width: float = WIDTH) -> list[Artist]:
    """Draws the path; each stretch has the colour of the reason why it did not begin earlier.

    Args:
        ax: axes with one row a rank, rank 0 at 0.
        path: the path.
        unit: how much of the path's time is one on the axis.
        at: where in its row the line runs while a rank computes, from the middle.
        width: of the line, in points.

    Returns:
        The legend's entries: one for each reason that occurs, with how often.
    """
    if not path.hops:
        return []
    start, end = (
        np.array([float(time) for time in times]) / unit for times in ([hop.start for hop in path.hops], [hop.end for hop in path.hops])
    )
    rank = np.array([hop.rank for hop in path.hops])
    source = np.array([hop.source if hop.source >= 0 else hop.rank for hop in path.hops])
    # A message that another one waits for leaves the link where it is: the line goes on from the sender's row.
    stays = np.array([after.source >= 0 and hop.source >= 0 for hop, after in zip(path.hops, path.hops[1:], strict=False)] + [False])
    below = np.where(stays, source, rank)
    lines = np.stack([np.stack([start, source + at], axis=-1), np.stack([end, below + at], axis=-1)], axis=1)
    reasons = np.array([PROGRAM if hop.reason == START else hop.reason for hop in path.hops])
    halo = LineCollection(
        list(lines), colors="white", linewidths=width * (1 + 2 * HALO), zorder=7.9, capstyle="round", gid="critical-path-halo"
    )
    ax.add_collection(halo, autolim=False)
    handles: list[Artist] = []
    for reason, colour in REASON_COLOURS.items():
        some = np.flatnonzero(reasons == reason)
        if len(some):
            drawn = LineCollection(
                list(lines[some]), colors=colour, linewidths=width, linestyles=[DASHES[reason]], zorder=8, capstyle="butt",
                gid=f"critical-path-{reason.replace(' ', '-')}",
            )  # fmt: skip
            ax.add_collection(drawn, autolim=False)
            label = f"critical path: {reason}, {len(some):,} times"
            handles.append(Line2D([], [], color=colour, linewidth=width, linestyle=DASHES[reason], label=label))
    return handles
