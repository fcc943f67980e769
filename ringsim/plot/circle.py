r"""The circle of ranks.

A process group is a tube between two ranks, and its messages are the arrows inside it::

    (0)                  tube, solid outline: a group with messages
  //   \\                tube, dashed outline: built, nothing sent
(3)     (1)              arrow: messages, as wide as their bytes
  \\   //
    (2)                  arrow across: messages outside the ring's groups
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import networkx as nx
import numpy as np
from matplotlib.patches import Circle, Patch, Polygon

from ringsim.plot import style
from ringsim.plot.paths import Points, arc, arrow, beside, chord, node_angle, place, ribbon
from ringsim.traces.units import bytes_text
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["circle_legend", "draw_circle"]

MOST_DETAILED: Final = 8  # nodes up to which the label of a group has room for its name and for each way
MOST_CHORD_LABELS: Final = 12
LIMITS: Final = (1.8, 1.55)  # of the axes, to each side
LETTER: Final = 0.58  # width of a letter, as a share of the font's size
PID_SIZE: Final = 8.0  # points
TUBE: Final = 0.17  # thickness of a group's tube, where the circle has radius 1
TUBE_COLOUR: Final = "#F6F6F6"
UNUSED: Final = (0, (4, 3))  # outline of a tube on which nothing was sent
WIDEST: Final = 0.054  # the arrow of the edge with most bytes
THINNEST: Final = 0.008  # an arrow that is narrower to scale is drawn so, to be seen at all

# One look for each pair group, repeated: neighbours always differ. The texture is a line along the arrow's middle.
PAIR_COLOURS: Final = (style.BLUE, style.VERMILLION, style.GREEN)
PAIR_TEXTURES: Final[tuple[Any, ...]] = (None, "solid", (0, (3, 2)))
CLOSING_COLOUR: Final = style.PURPLE  # the edge from the last rank back to the first
CLOSING_TEXTURE: Final = (0, (0.5, 1.8))


def draw_circle(graph: nx.MultiDiGraph, ax: Axes) -> list[str]:
    """Draws ranks, groups and messages on axes that have their size already.

    Args:
        graph: as ``communication_graph`` returns it, with few enough ranks for nodes.
        ax: where to draw.

    Returns:
        Notes on what is not drawn, or not labelled.
    """
    world_size = len(graph)
    radius = min(0.24, 0.22 * 2 * np.pi / max(world_size, 4))
    ax.set(xlim=(-LIMITS[0], LIMITS[0]), ylim=(-LIMITS[1], LIMITS[1]), aspect="equal")
    ax.set_axis_off()
    ax.apply_aspect()
    _draw_groups(graph, ax, radius)
    notes = _draw_messages(graph, ax, radius)
    for rank, data in graph.nodes(data=True):
        x, y = place(node_angle(rank, world_size), 1.0 if world_size > 1 else 0.0).tolist()
        ax.add_patch(Circle((x, y), radius, facecolor="white", edgecolor=style.INK, linewidth=1.6, zorder=6, gid=f"rank-{rank}"))
        pid = f"pid {data['pid']}"
        small = data["pid"] is not None and len(pid) * LETTER * PID_SIZE * _per_point(ax) < 1.5 * radius
        ax.text(
            x, y + (0.05 if small else 0), str(rank), ha="center", va="center", zorder=7, weight="bold",
            fontsize=18 if world_size <= 6 else 15 if world_size <= 10 else 11,
        )  # fmt: skip
        if small:
            ax.text(x, y - 0.1, pid, ha="center", va="center", zorder=7, fontsize=PID_SIZE, color=style.MUTED)
    return notes


def _draw_groups(graph: nx.MultiDiGraph, ax: Axes, radius: float) -> None:
    """Draws the tubes, and beside each what was sent on it."""
    detailed = len(graph) <= MOST_DETAILED
    both_ways = _goes_backward(graph)
    for name, (pred, succ) in graph.graph["ring"].items():
        lanes = [(src, dst, graph.edges[src, dst, name]) for src, dst in ((pred, succ), (succ, pred)) if graph.has_edge(src, dst, name)]
        lanes = [lane for lane in lanes if lane[2]["messages"]]
        words = [f"{src}>{dst}: {_amount(data)}" if both_ways else _amount(data) for src, dst, data in lanes]
        if len(lanes) == 2 and not detailed:
            words = [_amount({what: sum(data[what] for *_, data in lanes) for what in ("messages", "size_bytes")})]
        outline = CLOSING_COLOUR if _closes(pred, succ) else style.MUTED
        tube = ribbon(_centre_line(graph, pred, succ, radius * 0.7), TUBE)
        ax.add_patch(
            Polygon(
                tube, facecolor=TUBE_COLOUR, edgecolor=outline, linewidth=1.0, linestyle="solid" if lanes else UNUSED, zorder=1,
                gid=f"group-{name}",
            )
        )  # fmt: skip
        middle = _middle(_centre_line(graph, pred, succ, 0))
        heading = [name] if detailed or not words else []
        _write(
            ax, middle, middle, TUBE / 2, "\n".join(heading + (words or ["nothing sent"])), style.INK if words else style.MUTED, len(graph)
        )


def _draw_messages(graph: nx.MultiDiGraph, ax: Axes, radius: float) -> list[str]:
    """Draws the arrows; returns notes for below."""
    edges = [(src, dst, key, data) for src, dst, key, data in graph.edges(keys=True, data=True) if data["messages"]]
    most = max((data["size_bytes"] for *_, data in edges), default=0)
    lane_width = TUBE / 4 if _goes_backward(graph) else 0.0
    chords = sorted((data["size_bytes"] for *_, data in edges if data["lane"] == "outside"), reverse=True)
    least_named = chords[min(len(chords), MOST_CHORD_LABELS) - 1] if chords else 0
    gap = radius + 0.025
    to_itself = 0
    for src, dst, key, data in edges:
        width = max(WIDEST * data["size_bytes"] / most if most else 0, THINNEST)
        if src == dst:
            to_itself += data["messages"]
        elif data["lane"] == "outside":
            path = _chord(graph, src, dst, gap)
            _draw_arrow(ax, path, width, style.MUTED, (0, (2, 2)), 3, f"outside-{src}-{dst}-{key}")
            if data["size_bytes"] >= least_named:
                text = f"{key}\n{_amount(data).replace('message', 'msg')}"  # the middle of a small ring has little room
                at = _middle(path)
                # Beside the arrow: towards the centre, or, near it, on the side to which the arrow bows.
                away = -at if np.hypot(*at) > 0.3 else np.array([path[0][1] - path[-1][1], path[-1][0] - path[0][0]])
                _write(ax, at, away, width / 2, text, style.INK, MOST_DETAILED + 1)
        else:
            pred, succ = graph.graph["ring"][key]
            forward = data["lane"] == "forward"
            path = _centre_line(graph, pred, succ, gap, lane_width if forward else -lane_width)
            colour, texture = _look(pred, succ)
            _draw_arrow(ax, path if forward else path[::-1], width, colour, texture, 4, f"{data['lane']}-{key}")
    notes = ["The label of a pair group adds up both ways."] if lane_width and len(graph) > MOST_DETAILED else []
    if len(chords) > MOST_CHORD_LABELS:
        notes.append(f"Arrows across: all {len(chords)} are drawn, the {MOST_CHORD_LABELS} widest are labelled.")
    if to_itself:
        notes.append(f"Not drawn: {count(to_itself, 'message')} of a rank to itself.")
    return notes


def _draw_arrow(ax: Axes, path: Points, width: float, colour: str, texture: Any, zorder: int, gid: str) -> None:
    """Draws one arrow, with its texture along the middle where there is room."""
    ax.add_patch(Polygon(arrow(path, width, head=0.085), facecolor=colour, edgecolor="none", zorder=zorder, gid=gid))
    if texture is not None and width > 2.5 * THINNEST:
        inner = path[np.hypot(*(path - path[-1]).T) > 0.12]
        ax.plot(*inner.T, color="white", linewidth=1.2, linestyle=texture, zorder=zorder + 0.5)


def _write(ax: Axes, at: Points, away: Points, distance: float, text: str, colour: str, world_size: int) -> None:
    """Writes beside a path: ``distance`` and the text's own extent away from the point ``at``."""
    fontsize = 9 if world_size <= MOST_DETAILED else 8
    lines = text.split("\n")
    extent = np.array([max(map(len, lines)) * LETTER, len(lines) * 1.25]) * fontsize / 2 * _per_point(ax)
    away = away / np.hypot(*away)
    x, y = at + away * (distance + 0.03 + float(extent @ np.abs(away)))
    side = "left" if away[0] > 0.3 else "right" if away[0] < -0.3 else "center"
    x += {"left": -1, "right": 1, "center": 0}[side] * extent[0]
    ax.text(x, y, text, ha=side, va="center", fontsize=fontsize, color=colour, linespacing=1.2, zorder=8)


def _per_point(ax: Axes) -> float:
    """How much of the axes' own unit a point of a font is."""
    return 2 * LIMITS[0] / (ax.get_window_extent().width * 72 / ax.figure.dpi)


def _middle(path: Points) -> Points:
    """Returns the middle point of a path."""
    point: Points = path[len(path) // 2]
    return point


def circle_legend(graph: nx.MultiDiGraph) -> list[Artist]:
    """Entries of the legend for what occurs in the circle."""
    edges = [data for _, _, data in graph.edges(data=True)]
    busy = {key for _, _, key, data in graph.edges(keys=True, data=True) if data["messages"]}
    handles: list[Artist] = []
    if any(name in busy for name in graph.graph["ring"]):
        handles.append(Patch(facecolor=TUBE_COLOUR, edgecolor=style.MUTED, label="pair group with messages"))
    if any(name not in busy for name in graph.graph["ring"]):
        handles.append(Patch(facecolor=TUBE_COLOUR, edgecolor=style.MUTED, linestyle=UNUSED, label="pair group, nothing sent"))
    if any(data["messages"] and data["lane"] != "outside" for data in edges):
        handles.append(Patch(facecolor=PAIR_COLOURS[0], label="messages on it, width = bytes"))
    if any(data["lane"] == "outside" for data in edges):
        handles.append(Patch(facecolor=style.MUTED, label="messages on other groups"))
    if any(_closes(*ends) for ends in graph.graph["ring"].values()):
        handles.append(Patch(facecolor=CLOSING_COLOUR, label="the edge that closes the ring"))
    return handles


def _goes_backward(graph: nx.MultiDiGraph) -> bool:
    """Tells whether anything was sent against the ring's direction, as gradients are."""
    return any(data["lane"] == "backward" for _, _, data in graph.edges(data=True))


def _amount(data: dict[str, Any]) -> str:
    return f"{bytes_text(data['size_bytes'])}\n{count(data['messages'], 'message')}"


def _closes(pred: int, succ: int) -> bool:
    """Tells whether an edge leads from the end of a ring back to its beginning."""
    return succ < pred


def _look(pred: int, succ: int) -> tuple[str, Any]:
    """Colour and texture of a pair group."""
    if _closes(pred, succ):
        return CLOSING_COLOUR, CLOSING_TEXTURE
    return PAIR_COLOURS[pred % 3], PAIR_TEXTURES[pred % 3]


def _centre_line(graph: nx.MultiDiGraph, pred: int, succ: int, gap: float, lane: float = 0.0) -> Points:
    """Path of a ring edge from pred to succ, ``lane`` outside its middle: along the circle to the next node, else across."""
    world_size = len(graph)
    if (pred + 1) % world_size == succ:
        start = node_angle(pred, world_size)
        return arc(start + gap, start + 2 * np.pi / world_size - gap, 1 + lane)
    path = chord(place(node_angle(pred, world_size)), place(node_angle(succ, world_size)), pull=0.3, gap=gap)
    return beside(path, lane)


def _chord(graph: nx.MultiDiGraph, src: int, dst: int, gap: float) -> Points:
    """Path of messages outside the ring's groups; the way back bows further in."""
    world_size = len(graph)
    clockwise = (dst - src) % world_size <= world_size // 2
    return chord(place(node_angle(src, world_size)), place(node_angle(dst, world_size)), pull=0.4 if clockwise else 1.0, gap=gap)
