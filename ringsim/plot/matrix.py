"""Draws the matrix of bytes between ranks, for runs with many ranks."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from ringsim.plot import style
from ringsim.plot.traffic import Traffic
from ringsim.traces.events import Ints
from ringsim.traces.looks import LOOKS
from ringsim.traces.units import bytes_text

MOST_CELLS = 256  # cells per side; more would be smaller than a pixel
MOST_OUTLINES = 64  # with more ranks, the outlines of cells would be invisible


def draw_matrix(traffic: Traffic, ax: Axes) -> list[str]:
    """Draws the bytes sent between each pair of ranks, on a logarithmic colour scale.

    Returns the notes to write below the picture.
    """
    ranks = traffic.trace.world_size
    shared = -(-ranks // MOST_CELLS)  # the number of ranks per side of a cell
    _draw_cells(ax, _sum_bytes(traffic, shared), shared)
    notes = []
    if shared > 1:
        notes.append(f"Each cell shows the mean over the pairs of {shared} x {shared} ranks.")
    crosses = traffic.trace.crosses
    borders = [rank - 0.5 for rank in range(1, ranks) if crosses(rank - 1, rank)]
    if borders and len(borders) < MOST_OUTLINES:
        look: Any = {"color": LOOKS["across"].light, "linewidth": 0.8, "gid": "hosts"}
        for border in borders:
            ax.axhline(border, **look)
            ax.axvline(border, **look)
        notes.append("Purple lines separate hosts.")
    unused = [ends for name, ends in traffic.ring.items() if name not in traffic.used]
    if unused and ranks <= MOST_OUTLINES:
        for pred, succ in unused:
            ax.add_patch(
                Rectangle(
                    (succ - 0.5, pred - 0.5),
                    1,
                    1,
                    fill=False,
                    ec=style.MUTED,
                    ls=(0, (2, 2)),
                    lw=0.8,
                )
            )
        notes.append("Dashed cells are pair groups that were created but not used.")
    elif unused:
        notes.append(
            f"{len(unused):,} of {len(traffic.ring):,} pair groups were created but not used."
        )
    return notes


def _sum_bytes(traffic: Traffic, shared: int) -> Ints:
    """Adds up the bytes between ranks, or averages over all pairs if ranks share a cell.

    Returns the matrix of shape (sender, receiver), in which pairs that sent nothing are masked.
    """
    ranks = traffic.trace.world_size
    side = -(-ranks // shared)
    cells, sent = np.zeros((side, side), dtype=np.int64), np.zeros((side, side), dtype=bool)
    for edge in traffic.edges:
        cell = edge.src // shared, edge.dst // shared
        cells[cell] += edge.size_bytes
        sent[cell] = True
    # the last cell has fewer ranks
    members = np.minimum(shared, ranks - shared * np.arange(side))
    mean = cells / np.outer(members, members)
    # messages of 0 bytes get the low end of the scale
    return np.ma.masked_array(np.where(cells == 0, 1, mean), mask=~sent)


def _draw_cells(ax: Axes, sent: Any, shared: int) -> None:
    """Draws the cells, if any, and their colour scale."""
    ax.set(xlabel="receiving rank", ylabel="sending rank")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(9, integer=True))
    ax.spines[["top", "right"]].set_visible(True)
    edge = len(sent) * shared - 0.5
    low, high = (float(sent.min()), float(sent.max())) if sent.count() else (1.0, 2.0)
    widened = 1 if low < high else 2
    picture = ax.imshow(
        sent,
        cmap=mpl.colormaps["cividis_r"].with_extremes(bad=(0, 0, 0, 0)),
        norm=LogNorm(low / widened, high * widened),
        extent=(-0.5, edge, edge, -0.5),
        interpolation="antialiased",
        interpolation_stage="rgba",
    )
    if sent.count():
        beside = ax.inset_axes((1.04, 0.1, 0.04, 0.8))
        in_words = FuncFormatter(lambda value, _: bytes_text(value))
        bar = ax.figure.colorbar(picture, cax=beside, label="bytes sent", format=in_words)
        bar.locator = LogLocator(base=2, numticks=8) if low < high else FixedLocator([low])
        bar.minorticks_off()
