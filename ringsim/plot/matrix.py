"""The communication matrix: the ring's picture where there are too many ranks for nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import matplotlib as mpl
import networkx as nx
import numpy as np
import numpy.typing as npt
from matplotlib.colors import LogNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from ringsim.plot import style
from ringsim.traces.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bytes_matrix", "draw_matrix"]

MOST_CELLS: Final = 256  # a side; more would be less than a pixel each
MOST_OUTLINES: Final = 64  # ranks up to which an unused group's cell can be seen


def bytes_matrix(graph: nx.MultiDiGraph, most_cells: int = MOST_CELLS) -> tuple[npt.NDArray[np.int64], int]:
    """Sums the bytes from each rank to each rank.

    Args:
        graph: as ``communication_graph`` returns it.
        most_cells: cells a side; where there are more ranks, several share a cell, and their bytes are added.

    Returns:
        The matrix, shape (sender, receiver), and how many ranks a cell's side stands for. A cell without messages is -1.
    """
    shared = -(-len(graph) // most_cells)
    side = -(-len(graph) // shared)
    cells = np.full((side, side), -1, dtype=np.int64)
    for src, dst, data in graph.edges(data=True):
        if data["messages"]:
            cell = (src // shared, dst // shared)
            cells[cell] = max(cells[cell], 0) + data["size_bytes"]
    return cells, shared


def draw_matrix(graph: nx.MultiDiGraph, ax: Axes) -> list[str]:
    """Draws the bytes sent between each pair of ranks, on a logarithmic colour scale; returns notes for below."""
    cells, shared = bytes_matrix(graph)
    ax.set(xlabel="receiving rank", ylabel="sending rank")
    ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(9, integer=True))
    ax.yaxis.set_major_locator(mpl.ticker.MaxNLocator(9, integer=True))
    ax.spines[["top", "right"]].set_visible(True)
    edge = len(cells) * shared - 0.5
    sent = np.ma.masked_less(np.maximum(cells, np.where(cells == 0, 1, cells)), 0)  # messages of 0 bytes: the scale's low end
    low, high = (float(sent.min()), float(sent.max())) if sent.count() else (1.0, 2.0)
    colours = mpl.colormaps["cividis_r"].with_extremes(bad="white")
    picture = ax.imshow(
        sent, cmap=colours, norm=LogNorm(low if low < high else low / 2, high if low < high else high * 2),
        extent=(-0.5, edge, edge, -0.5), interpolation="nearest",
    )  # fmt: skip
    notes = [f"One cell stands for {shared} x {shared} ranks; their bytes are added."] if shared > 1 else []
    if sent.count():
        beside = ax.inset_axes((1.04, 0.1, 0.04, 0.8))
        bar = ax.figure.colorbar(picture, cax=beside, label="bytes sent", format=FuncFormatter(lambda value, _: bytes_text(value)))
        bar.locator = LogLocator(base=2, numticks=8) if low < high else FixedLocator([low])
        bar.minorticks_off()
    unused = [ends for name, ends in graph.graph["ring"].items() if graph.edges[(*ends, name)]["messages"] == 0]
    if unused and len(graph) <= MOST_OUTLINES:
        for pred, succ in unused:
            ax.add_patch(
                mpl.patches.Rectangle(
                    (succ - 0.5, pred - 0.5), 1, 1, fill=False, edgecolor=style.MUTED, linestyle=(0, (2, 2)), linewidth=0.8
                )
            )
        notes.append("Dashed cells: pair groups that were built; nothing was sent along them.")
    elif unused:
        notes.append(f"{len(unused):,} of {len(graph.graph['ring']):,} pair groups were built and not used.")
    return notes
