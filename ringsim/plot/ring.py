r"""Draws the ring: its process groups and the messages on them.

The picture is a circle of ranks, or a matrix if there are many ranks. The circle has rank 0 at the
top. A tube between two ranks is a process group, and the arrows in the tube are its messages::

    (0)                  tube with a solid outline: a group with messages
  //   \\                tube with a dashed outline: a group without messages
(3)     (1)              arrow: messages; the width shows the number of bytes
  \\   //
    (2)                  arrow across the circle: messages outside the ring's groups
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Polygon

from ringsim.plot import sheet, style
from ringsim.plot.matrix import draw_matrix
from ringsim.plot.paths import Points, arc, arrow, beside, chord, node, node_angle
from ringsim.plot.sheet import Picture
from ringsim.plot.traffic import Traffic, TrafficEdge, count_traffic
from ringsim.traces.display import Style
from ringsim.traces.looks import LOOKS
from ringsim.traces.units import bytes_text, count
from ringsim.traces.value import Trace

MOST_NODES = 16
SIZE_INCHES = (7.2, 6.2)
# with more nodes, a label has no room for the group's name and both directions
MOST_DETAILED = 8
MOST_CHORD_LABELS = 12
LIMITS = (1.8, 1.55)  # the limits of the axes to each side
LETTER = 0.58  # the width of a letter, as a share of the font's size
PID_SIZE = 8.0  # points
TUBE = 0.17  # the thickness of a group's tube, relative to the circle's radius
TUBE_COLOUR = LOOKS["field"].light
UNUSED = (0, (4, 3))  # the outline of a tube without messages
WIDEST = 0.054  # the width of the arrow for the edge with the most bytes
THINNEST = 0.008  # the least width at which an arrow is visible

# The looks of pair groups repeat, but neighbouring groups always differ. The texture is a line
# along the middle of the arrow.
PAIR_COLOURS = tuple(LOOKS[name].light for name in ("pair_1", "pair_2", "pair_3"))
PAIR_TEXTURES: tuple[Any, ...] = (None, "solid", (0, (3, 2)))
CLOSING_COLOUR = LOOKS["closing"].light  # the edge from the last rank back to the first
ACROSS_COLOUR = LOOKS["across"].light
CLOSING_TEXTURE = (0, (0.5, 1.8))
OUTSIDE_TEXTURE = (0, (2, 2))


def plot_ring(trace: Trace, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws the messages between ranks.

    Up to 16 ranks are drawn as nodes of a ring, clockwise from the top. Tubes represent the ring's
    groups, and arrows represent messages; an arrow's width shows the number of bytes. More than 16
    ranks are drawn as a matrix of bytes.

    Args:
        trace: a trace; if it contains no messages, the picture shows only the groups.
        ax: the axes to draw on, or None to create a new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes. Call ``ax.figure.savefig(...)`` to save the figure.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [], "op": []}), {"world_size": 1})
        >>> plot_ring(trace).get_title(loc="left")
        'A ring of one rank has no edges'
    """
    return sheet.show([ring_picture(trace)], ax, **look)


def ring_picture(trace: Trace) -> Picture:
    """Returns the ring as a picture."""
    return Picture(lambda ax: _draw(trace, ax), *SIZE_INCHES)


def _draw(trace: Trace, ax: Axes) -> None:
    traffic = count_traffic(trace)
    if trace.world_size > MOST_NODES:
        notes = draw_matrix(traffic, ax)
    else:
        notes = _draw_circle(traffic, ax)
    if traffic.unfinished:
        notes.append(f"Not drawn: {count(traffic.unfinished, 'send')} that never finished.")
    if traffic.collectives:
        notes.append(f"Not drawn: {count(traffic.collectives, 'collective operation')}.")
    style.dress(ax, *_message(traffic), notes, metadata=trace.metadata, columns=2)


def _message(traffic: Traffic) -> tuple[str, str]:
    """Returns the picture's title and subtitle."""
    sent, ring, lanes = traffic.messages, traffic.ring, traffic.lanes
    outside = sum(edge.messages for edge in traffic.edges if edge.lane == "outside")
    if traffic.trace.world_size == 1 and not sent:
        return "A ring of one rank has no edges", "rank 0 has no other rank to send to"
    built = count(len(ring), "pair group") + " created" if ring else "no ring was created"
    ranks = count(traffic.trace.world_size, "rank")
    if not sent:
        return f"{ranks} sent nothing", built
    total = sum(edge.size_bytes for edge in traffic.edges)
    amount = f"{count(sent, 'message')}, {bytes_text(total)}"
    if outside == sent:
        return f"{ranks}: {amount}" + (", none on the ring" if ring else ""), built
    groups = len(traffic.used)
    if outside:
        return f"{ranks}: {amount}; {outside:,} outside the ring", f"{built}, {groups} used"
    way = "both ways" if len(lanes) == 2 else "clockwise" if "forward" in lanes else "anticlockwise"
    used = "all" if groups == len(ring) else groups
    return f"{ranks} sent {amount}", f"{way} round the ring; {built}, {used} used"


def _draw_circle(traffic: Traffic, ax: Axes) -> list[str]:
    """Draws ranks, groups and messages on axes that already have their final size.

    Returns notes about messages that are not drawn or not labelled.
    """
    ranks = traffic.trace.world_size
    radius = min(0.24, 0.22 * 2 * np.pi / max(ranks, 4))
    set_limits(ax, *LIMITS)
    _draw_groups(traffic, ax, radius)
    notes = _draw_messages(traffic, ax, radius)
    about = {piece.get("rank"): piece for piece in traffic.trace.metadata.get("ranks", [])}
    hosts = traffic.trace.hosts
    size = style.letters(18 if ranks <= 6 else 15 if ranks <= 10 else 11)
    for rank in range(ranks):
        x, y = node(rank, ranks)
        pid = about.get(rank, {}).get("pid")
        below = hosts[rank] if len(set(hosts)) > 1 else f"pid {pid}" if pid is not None else ""
        fits = len(below) * LETTER * PID_SIZE * style.per_point(ax) < 1.5 * radius
        raised = 0.05 if below and fits else 0.0
        draw_node(ax, rank, (x, y), radius, size, raised=raised, fc=style.GROUND, linewidth=1.6)
        if raised:
            small = style.letters(PID_SIZE)
            ax.text(
                x, y - 0.1, below, ha="center", va="center", size=small, color=style.MUTED, zorder=7
            )
    return notes


def set_limits(ax: Axes, wide: float, high: float) -> None:
    """Prepares axes without lines for a circle with radius 1, with limits to each side."""
    ax.set(xlim=(-wide, wide), ylim=(-high, high), aspect="equal")
    ax.set_axis_off()
    ax.apply_aspect()  # labels need the final size of the axes


def draw_node(
    ax: Axes,
    rank: int,
    at: tuple[float, float],
    radius: float,
    size: float,
    *,
    raised: float = 0.0,
    ink: str = style.INK,
    **look: Any,
) -> None:
    """Draws a circle with a rank's number, which is ``raised`` above the middle."""
    look = {"edgecolor": style.INK, "zorder": 6, "gid": f"rank-{rank}"} | look
    ax.add_patch(Circle(at, radius, **look))
    ax.text(
        at[0],
        at[1] + raised,
        str(rank),
        ha="center",
        va="center",
        weight="bold",
        fontsize=size,
        color=ink,
        zorder=7,
    )


def _draw_groups(traffic: Traffic, ax: Axes, radius: float) -> None:
    """Draws the tubes, each labelled with its messages and bytes."""
    ranks = traffic.trace.world_size
    detailed, both_ways = ranks <= MOST_DETAILED, "backward" in traffic.lanes
    for name, (pred, succ) in traffic.ring.items():
        on_it = [edge for edge in traffic.edges if edge.group == name and edge.lane != "outside"]
        on_it.sort(key=lambda edge: edge.lane, reverse=True)  # forward first
        words = [
            f"{edge.src}>{edge.dst}: {_amount([edge])}" if both_ways else _amount([edge])
            for edge in on_it
        ]
        if len(on_it) == 2 and not detailed:
            words = [_amount(on_it)]
        if style.is_compact() and not detailed:  # there is room only for the bytes
            words = [word.partition("\n")[0] for word in words]
        across = traffic.trace.crosses(pred, succ)
        outline = ACROSS_COLOUR if across else CLOSING_COLOUR if succ < pred else style.MUTED
        line = _centre_line(ranks, pred, succ, radius * 0.7)
        tube = np.concatenate([beside(line, TUBE / 2), beside(line, -TUBE / 2)[::-1]])
        label = "pair group" if on_it else "pair group, nothing sent"
        ax.add_patch(
            Polygon(
                tube,
                facecolor=TUBE_COLOUR,
                edgecolor=outline,
                linewidth=2.0 if across else 1.0,
                linestyle="solid" if on_it else UNUSED,
                gid=f"group-{name}",
                label="from host to host" if across else label,
            )
        )
        line = _centre_line(ranks, pred, succ, 0)
        middle = line[len(line) // 2]
        heading = [name] if detailed or not words else []
        text = "\n".join(heading + (words or ["nothing sent"]))
        ink = style.INK if words else style.MUTED
        _write(ax, middle, middle, TUBE / 2, text, 9 if detailed else 8, ink)


def _draw_messages(traffic: Traffic, ax: Axes, radius: float) -> list[str]:
    """Draws the arrows and returns the notes to print below the picture."""
    ranks = traffic.trace.world_size
    most = max((edge.size_bytes for edge in traffic.edges), default=0) or 1
    lane = TUBE / 4 if "backward" in traffic.lanes else 0.0
    across = [edge for edge in traffic.edges if edge.lane == "outside" and edge.src != edge.dst]
    sizes = sorted(edge.size_bytes for edge in traffic.edges if edge.lane == "outside")
    least_named = sizes[-MOST_CHORD_LABELS:][0] if sizes else 0
    gap = radius + 0.025
    for edge in traffic.edges:
        width = max(WIDEST * edge.size_bytes / most, THINNEST)
        if edge in across:
            is_named = edge.size_bytes >= least_named
            _draw_chord(ax, edge, traffic, width, gap, is_named=is_named)
        elif edge.lane != "outside":
            pred, succ = traffic.ring[edge.group]
            forward = edge.lane == "forward"
            path = _centre_line(ranks, pred, succ, gap, lane if forward else -lane)
            closes = succ < pred
            colour = CLOSING_COLOUR if closes else PAIR_COLOURS[pred % 3]
            texture = CLOSING_TEXTURE if closes else PAIR_TEXTURES[pred % 3]
            gid = f"{edge.lane}-{edge.group}"
            label = "closing edge" if closes else "messages, width = bytes"
            path = path if forward else path[::-1]
            _draw_arrow(ax, path, width, colour, texture, 4, gid, label)
    notes = []
    if lane and ranks > MOST_DETAILED:
        notes.append("Each pair group's label adds up both directions.")
    if len(sizes) > MOST_CHORD_LABELS:
        notes.append(
            f"All {len(sizes)} arrows across the ring are drawn, but only the "
            f"{MOST_CHORD_LABELS} widest are labelled."
        )
    to_itself = sum(edge.messages for edge in traffic.edges if edge.src == edge.dst)
    if to_itself:
        notes.append(f"Not drawn: {count(to_itself, 'message')} from a rank to itself.")
    return notes


def _draw_chord(
    ax: Axes, edge: TrafficEdge, traffic: Traffic, width: float, gap: float, *, is_named: bool
) -> None:
    """Draws a labelled arrow for messages outside the ring's groups."""
    ranks = traffic.trace.world_size
    clockwise = (edge.dst - edge.src) % ranks <= ranks // 2  # the way back bends further in
    ends = node(edge.src, ranks), node(edge.dst, ranks)
    path = chord(*ends, pull=0.4 if clockwise else 1.0, gap=gap)
    colour = ACROSS_COLOUR if traffic.trace.crosses(edge.src, edge.dst) else style.MUTED
    gid = f"outside-{edge.src}-{edge.dst}-{edge.group}"
    label = "messages on other groups"
    _draw_arrow(ax, path, width, colour, OUTSIDE_TEXTURE, 3, gid, label)
    if is_named:
        # abbreviated, because a small ring has little room in the middle
        text = f"{edge.group}\n{_amount([edge]).replace('message', 'msg')}"
        at, (way_x, way_y) = path[len(path) // 2], path[-1] - path[0]
        # The label is moved towards the centre or, near the centre, to the side to which the arrow
        # bends.
        away = -at if np.hypot(*at) > 0.3 else np.array([-way_y, way_x])
        _write(ax, at, away, width / 2, text, 8, style.INK)


def _draw_arrow(
    ax: Axes,
    path: Points,
    width: float,
    colour: str,
    texture: Any,
    zorder: int,
    gid: str,
    label: str,
) -> None:
    """Draws an arrow, with a texture along the middle if there is room."""
    outline = arrow(path, width, head=0.085)
    ax.add_patch(Polygon(outline, fc=colour, ec="none", zorder=zorder, gid=gid, label=label))
    if texture is not None and width > 2.5 * THINNEST:
        inner = path[np.hypot(*(path - path[-1]).T) > 0.12]
        ax.plot(*inner.T, color=style.GROUND, linewidth=1.2, linestyle=texture, zorder=zorder + 0.5)


def _write(
    ax: Axes, at: Points, away: Points, distance: float, text: str, points: float, colour: str
) -> None:
    """Writes text next to a path; the text begins at ``distance`` from ``at``."""
    way_x, way_y = away / np.hypot(*away)
    x, y = at + (distance + 0.03) * np.array([way_x, way_y])
    side = "left" if way_x > 0.1 else "right" if way_x < -0.1 else "center"
    height = "bottom" if way_y > 0.3 else "top" if way_y < -0.3 else "center"
    size = style.letters(points)
    ax.text(x, y, text, ha=side, va=height, size=size, color=colour, linespacing=1.2, zorder=8)


def _amount(edges: list[TrafficEdge]) -> str:
    messages = sum(edge.messages for edge in edges)
    return f"{bytes_text(sum(edge.size_bytes for edge in edges))}\n{count(messages, 'message')}"


def _centre_line(ranks: int, pred: int, succ: int, gap: float, lane: float = 0.0) -> Points:
    """Returns the path of a ring edge from pred to succ, moved outwards by ``lane``.

    The path follows the circle if succ is the next node, and crosses the circle otherwise.
    """
    if (pred + 1) % ranks == succ:
        start = node_angle(pred, ranks)
        return arc(start + gap, start + 2 * np.pi / ranks - gap, 1 + lane)
    path = chord(node(pred, ranks), node(succ, ranks), pull=0.3, gap=gap)
    return beside(path, lane)
