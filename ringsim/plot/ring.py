"""The ring: which process groups were built, and what was really sent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import matplotlib.pyplot as plt
import networkx as nx

from ringsim.plot import style
from ringsim.plot.circle import circle_legend, draw_circle
from ringsim.plot.graph import communication_graph
from ringsim.plot.matrix import draw_matrix
from ringsim.traces.units import bytes_text
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["plot_ring"]

MOST_NODES: Final = 16
SIZE_INCHES: Final = (7.2, 6.2)


def plot_ring(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draws who sent to whom: the ring's groups as tubes, the messages as arrows as wide as their bytes.

    Ranks go clockwise from the top. Up to 16 ranks are nodes; more are drawn as a matrix of bytes.

    Args:
        trace: any trace; one without messages shows the groups alone.
        ax: where to draw; a new figure by default.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [], "op": []}), {"world_size": 1})
        >>> plot_ring(trace).get_title(loc="left")
        'A ring of one rank has no edges'
    """
    with style.drawing():
        if ax is not None:
            draw_ring(trace, ax)
            return ax
        figure = plt.figure(figsize=SIZE_INCHES)
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *SIZE_INCHES, draw_ring(trace, ax))])
    return ax


def draw_ring(trace: Trace, ax: Axes) -> style.Margins:
    """Draws the ring on axes that have their size already; returns the room that the words around it take."""
    graph = communication_graph(trace)
    title, subtitle = _message(graph)
    if len(graph) > MOST_NODES:
        notes = draw_matrix(graph, ax) + _left_out(graph)
        return style.dress(ax, title, subtitle=subtitle, notes=notes, metadata=trace.metadata, left=56, right=100, below=40)
    notes = draw_circle(graph, ax) + _left_out(graph)
    return style.dress(ax, title, subtitle=subtitle, notes=notes, handles=circle_legend(graph), metadata=trace.metadata, columns=2)


def _message(graph: nx.MultiDiGraph) -> tuple[str, str]:
    """The picture's message in one line, and what follows from it in another."""
    edges = [data for _, _, data in graph.edges(data=True)]
    sent = sum(data["messages"] for data in edges)
    total = sum(data["size_bytes"] for data in edges)
    outside = sum(data["messages"] for data in edges if data["lane"] == "outside")
    ring = graph.graph["ring"]
    if len(graph) == 1 and not sent:
        return "A ring of one rank has no edges", "nobody to send to: everything stays on rank 0"
    used = {key for _, _, key, data in graph.edges(keys=True, data=True) if data["messages"]} & set(ring)
    built = count(len(ring), "pair group") + " built" if ring else "no ring was built"
    ranks = count(len(graph), "rank")
    if not sent:
        return f"{ranks} sent nothing", built
    amount = f"{count(sent, 'message')}, {bytes_text(total)}"
    if outside == sent:
        return f"{ranks}: {amount}" + (", none on the ring" if ring else ""), built
    if outside:
        return f"{ranks}: {amount}; {outside:,} outside the ring", f"{built}, {len(used)} used"
    lanes = {data["lane"] for data in edges if data["messages"]}
    way = (
        "both ways round the ring"
        if len(lanes) == 2
        else "clockwise round the ring"
        if "forward" in lanes
        else "anticlockwise round the ring"
    )
    return f"{ranks} sent {amount}", f"{way}; {built}, {'all' if len(used) == len(ring) else len(used)} used"


def _left_out(graph: nx.MultiDiGraph) -> list[str]:
    """Sentences on what was recorded and is not drawn."""
    sentences = []
    if graph.graph["unfinished"]:
        sentences.append(f"Not drawn: {count(graph.graph['unfinished'], 'send')} that never finished.")
    if graph.graph["collectives"]:
        sentences.append(f"Not drawn: {count(graph.graph['collectives'], 'collective operation')}.")
    return sentences
