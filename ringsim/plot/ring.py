r"""The ring: which process groups were built, and what was really sent on them.

As a circle of ranks, or, of many, as a matrix. A trace becomes a graph. A group that was built is
an edge, whether or not anything was sent on it; so are messages that went elsewhere::

    rank 0 --ring:0>1--> rank 1        lane "forward": along the group, activations
    rank 0 <--ring:0>1-- rank 1        lane "backward": against it, gradients
    rank 0 ---world----> rank 2        lane "outside": on none of the ring's groups

In the circle, whose first rank is at the top, a process group is a tube between two ranks, and its
messages are the arrows inside::

    (0)                  tube, solid outline: a group with messages
  //   \\                tube, dashed outline: built, nothing sent
(3)     (1)              arrow: messages, as wide as their bytes
  \\   //
    (2)                  arrow across: messages outside the ring's groups
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack

import matplotlib as mpl
import networkx as nx
import numpy as np
import numpy.typing as npt
from matplotlib.colors import LogNorm
from matplotlib.patches import Circle, Patch, Polygon, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from ringsim.plot import sheet, style
from ringsim.plot.sheet import Picture
from ringsim.traces.display import Style
from ringsim.traces.events import COLLECTIVE, NONE, OK, SEND
from ringsim.traces.units import bytes_text, count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["communication_graph", "plot_ring"]

MOST_NODES: Final = 16
SIZE_INCHES: Final = (7.2, 6.2)
# a name is anybody's: int() refuses thousands of digits
RING_NAME: Final = re.compile(r"ring:(\d{1,9})>(\d{1,9})")


def plot_ring(trace: Trace, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws who sent to whom.

    The ring's groups as tubes, the messages as arrows as wide as their bytes. Ranks go clockwise
    from the top. Up to 16 ranks are nodes; more are drawn as a matrix of bytes.

    Args:
        trace: any trace; one without messages shows the groups alone.
        ax: where to draw; a new figure by default.
        **look: size, theme and so on of the new figure, see `ringsim.traces.display.Style`.

    Returns:
        The axes. ``ax.figure.savefig(...)`` writes them.

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
    graph = communication_graph(trace)
    is_matrix = len(graph) > MOST_NODES
    notes = (_draw_matrix if is_matrix else _draw_circle)(graph, ax) + _left_out(graph)
    handles = () if is_matrix else _circle_legend(graph)
    style.dress(ax, *_message(graph), notes, handles, metadata=trace.metadata, columns=2)


def _message(graph: nx.MultiDiGraph) -> tuple[str, str]:
    """The picture's message in one line, and what follows from it in another."""
    used, ring = _list_used(graph), graph.graph["ring"]
    sent = sum(data["messages"] for *_, data in used)
    outside = sum(data["messages"] for *_, data in used if data["lane"] == "outside")
    if len(graph) == 1 and not sent:
        return "A ring of one rank has no edges", "nobody to send to: everything stays on rank 0"
    built = count(len(ring), "pair group") + " built" if ring else "no ring was built"
    ranks = count(len(graph), "rank")
    if not sent:
        return f"{ranks} sent nothing", built
    total = sum(data["size_bytes"] for *_, data in used)
    amount = f"{count(sent, 'message')}, {bytes_text(total)}"
    if outside == sent:
        return f"{ranks}: {amount}" + (", none on the ring" if ring else ""), built
    groups = len({key for _, _, key, _ in used} & set(ring))
    if outside:
        return f"{ranks}: {amount}; {outside:,} outside the ring", f"{built}, {groups} used"
    lanes = {data["lane"] for *_, data in used}
    way = "both ways" if len(lanes) == 2 else "clockwise" if "forward" in lanes else "anticlockwise"
    return (
        f"{ranks} sent {amount}",
        f"{way} round the ring; {built}, {'all' if groups == len(ring) else groups} used",
    )


def _list_used(graph: nx.MultiDiGraph) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Returns the edges with messages: source, destination, group, data."""
    return [edge for edge in graph.edges(keys=True, data=True) if edge[3]["messages"]]


def _left_out(graph: nx.MultiDiGraph) -> list[str]:
    sentences = []
    if graph.graph["unfinished"]:
        sentences.append(
            f"Not drawn: {count(graph.graph['unfinished'], 'send')} that never finished."
        )
    if graph.graph["collectives"]:
        sentences.append(f"Not drawn: {count(graph.graph['collectives'], 'collective operation')}.")
    return sentences


# -- the graph


def communication_graph(trace: Trace) -> nx.MultiDiGraph:
    """Counts the messages between each pair of ranks, apart for each process group.

    A message counts where it was sent, once the send or its recv is done: a sender that never waits
    does not learn that it arrived. What the collectives carried is not counted.

    Args:
        trace: any trace.

    Returns:
        A graph with a node for each rank (``pid`` and ``host`` where known). The key of an edge is
        the name of its group; an edge has ``lane`` ("forward", "backward" or "outside"),
        ``messages`` and ``size_bytes``. The graph itself has ``ring`` (name of a built ring group
        to its pred and succ), ``unfinished`` (sends of which neither side got done) and
        ``collectives`` (collective operations posted).

    Example:
        >>> from ringsim.traces.events import Group, OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> tables = Tables(
        ...     groups=(Group("ring:0>1", (0, 1)),), payloads=(Payload("float32", (2,), 8),)
        ... )
        >>> send = {
        ...     "rank": [0, 0],
        ...     "op": [OP_CODES["send"]] * 2,
        ...     "peer": [1, 1],
        ...     "group": [0, 0],
        ...     "payload": [0, 0],
        ... }
        >>> graph = communication_graph(Trace(make_events(send, tables), {"world_size": 2}))
        >>> graph.edges[0, 1, "ring:0>1"]
        {'lane': 'forward', 'messages': 2, 'size_bytes': 16}
    """
    events = trace.events
    ring = _ring_groups(trace)
    sends = events.kind == SEND
    sent = sends & (events.status == OK)
    sent[trace.messages.send[events.status[trace.messages.recv] == OK]] = True
    graph = nx.MultiDiGraph(
        ring=ring,
        unfinished=int((sends & ~sent).sum()),
        collectives=int((events.kind == COLLECTIVE).sum()),
    )
    known = {piece.get("rank"): piece for piece in trace.metadata.get("ranks", [])}
    for rank in range(trace.world_size):
        graph.add_node(rank, pid=known.get(rank, {}).get("pid"), host=trace.hosts[rank])
    for name, (pred, succ) in ring.items():
        graph.add_edge(pred, succ, key=name, lane="forward", messages=0, size_bytes=0)

    done = np.flatnonzero(sent & (events.peer >= 0))
    keys, which = np.unique(
        np.stack([events.group[done], events.rank[done], events.peer[done]]),
        axis=1,
        return_inverse=True,
    )
    messages = np.bincount(which, minlength=keys.shape[1])
    size_bytes = np.zeros(keys.shape[1], dtype=np.int64)
    np.add.at(size_bytes, which, np.maximum(events.size_bytes[done], 0))
    for (group, src, dst), number, total in zip(
        keys.T.tolist(), messages.tolist(), size_bytes.tolist(), strict=True
    ):
        name = events.tables.groups[group].name if group != NONE else "no group"
        ends = ring.get(name)
        lane = "forward" if ends == (src, dst) else "backward" if ends == (dst, src) else "outside"
        graph.add_edge(src, dst, key=name, lane=lane, messages=number, size_bytes=total)
    return graph


def _ring_groups(trace: Trace) -> dict[str, tuple[int, int]]:
    """Groups of the ring that were built, by name: (pred, succ).

    Torch sorts a group's ranks, so the direction is in the name alone.
    """
    listed: list[Any] = trace.metadata.get("ring_groups", [])
    names = [name for name, _ in listed] or [group.name for group in trace.events.tables.groups]
    ring = {}
    for name in names:
        if match := RING_NAME.fullmatch(name):
            pred, succ = int(match[1]), int(match[2])
            if pred != succ and max(pred, succ) < trace.world_size:
                ring[name] = pred, succ
    return ring


# -- paths: arrays of points, shape (points, 2), in the coordinates of the axes


Points = npt.NDArray[Any]
STEPS: Final = 49


def node_angle(rank: int, world_size: int) -> float:
    """Angle of a rank in radians, counted clockwise from the top."""
    return 2 * float(np.pi) * rank / world_size


def place(angle: Any, radius: float = 1.0) -> Points:
    """Point, or points, at an angle clockwise from the top; shape (2,) or (points, 2)."""
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)


def node(rank: int, world_size: int) -> Points:
    """Returns where a rank stands: on the circle, or, alone, in its middle."""
    return place(node_angle(rank, world_size), 1.0 if world_size > 1 else 0.0)


def arc(start: float, end: float, radius: float = 1.0) -> Points:
    """Path along the circle from one angle to another, either way round."""
    return place(np.linspace(start, end, STEPS), radius)


def bow(start: Points, end: Points, control: Points, steps: int = STEPS) -> Points:
    """Path from one point to another that bows towards a third.

    A quadratic Bezier curve; shape (steps, 2).
    """
    t = np.linspace(0, 1, steps)[:, None]
    path: Points = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return path


def _chord(start: Points, end: Points, *, pull: float, gap: float) -> Points:
    """Path between two nodes that bows towards the centre.

    Also a little to the left of its way, so that the way back lies apart. ``pull`` says how far: 0
    not at all, 1 all the way to the centre; it stays ``gap`` away from both nodes.
    """
    way = end - start
    path = bow(
        start, end, (start + end) / 2 * (1 - pull) + 0.12 * np.array([-way[1], way[0]]), 4 * STEPS
    )
    clear = (np.hypot(*(path - start).T) >= gap) & (np.hypot(*(path - end).T) >= gap)
    return path[clear] if clear.sum() >= 2 else path


def arrow(path: Points, width: float, *, head: float) -> Points:
    """Outline of an arrow along a path.

    A closed polygon whose point ``len // 2`` is the tip, the path's last point. The head is
    ``head`` long and about as wide; at most half the path is head.
    """
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    neck = along[-1] - min(head, along[-1] / 2)
    neck_point = np.array([np.interp(neck, along, path[:, 0]), np.interp(neck, along, path[:, 1])])
    shaft = np.concatenate([path[along < neck], neck_point[None]])
    normals = _normals(np.concatenate([shaft, path[-1:]]))[:-1]
    side = normals * width / 2
    wing = normals[-1] * max(head * 0.45, width * 0.75)
    return np.concatenate(
        [shaft + side, [neck_point + wing, path[-1], neck_point - wing], (shaft - side)[::-1]]
    )


def beside(path: Points, distance: float) -> Points:
    """Path at a distance to the left of another; a negative one lies to the right."""
    moved: Points = path + distance * _normals(path)
    return moved


def _normals(path: Points) -> Points:
    """Unit vectors to the left of the way at each point."""
    way = np.gradient(path, axis=0)
    normal = np.stack([-way[:, 1], way[:, 0]], axis=1)
    length = np.hypot(*normal.T)[:, None]
    unit: Points = np.divide(normal, length, out=np.zeros_like(normal), where=length > 0)
    return unit


# -- labels beside arrows: they cover neither a node nor another label, nor, where there is room
# elsewhere, an arrow

LABEL_SIZE: Final = 8.5
# where beside the arrow a label may stand, as shares of its length
ALONG: Final = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)
AWAY: Final = (0.05, 0.15, 0.3, 0.5)  # and how far from it
# and then how far up or down, as shares of its height
RAISED: Final = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0)
CLEAR: Final = 0.03  # between two boxes, or a box and an arrow, at least
# The cost of a place, by how far it is from the arrow's middle: away from it, up or down, towards
# the centre, each point covered.
FAR_AWAY: Final = 3.0
OFF: Final = 0.3
INSIDE: Final = 0.2
ON_ITS_ARROW: Final = 0.15
ON_ANOTHER: Final = 0.15


def words_box(ax: Axes, x: float, y: float, text: str) -> Bbox:
    """Writes words at a place, centred; returns the room that they take, in the axes' data."""
    written = ax.text(
        x, y, text, ha="center", va="center", fontsize=style.letters(LABEL_SIZE), zorder=7
    )
    return Bbox(written.get_window_extent().transformed(ax.transData.inverted()))


def label_edges(
    ax: Axes, labels: Sequence[tuple[str, Points]], paths: Sequence[Points], taken: Sequence[Bbox]
) -> int:
    """Writes a label beside each of some arrows, the most important first.

    Returns how many found no room, and are not written. A label, given by its words and the path of
    its arrow, never covers what is ``taken`` by nodes and other words, and covers one of the
    ``paths`` of all arrows only where there is no other room. The axes have their size and range
    already.
    """
    low, high = np.sort([ax.get_xlim(), ax.get_ylim()]).T
    boxes = [np.array(box.extents) for box in taken]
    points, missing = np.concatenate([np.empty((0, 2)), *paths]), 0
    for text, path in labels:
        written = ax.text(
            0,
            0,
            text,
            ha="center",
            va="center",
            fontsize=style.letters(LABEL_SIZE),
            zorder=5,
            linespacing=0.95,
        )
        half = np.array(written.get_window_extent().transformed(ax.transData.inverted()).size) / 2
        places = np.array(list(_places(path, *(2 * half))))
        cost, middle, others = places[:, 0], places[:, 1:], np.array(boxes).reshape(-1, 4)
        between = (
            abs(middle[:, None] - (others[:, :2] + others[:, 2:]) / 2)
            - half
            - (others[:, 2:] - others[:, :2]) / 2
        )
        fits = ((middle - half >= low) & (middle + half <= high)).all(axis=1) & (
            between >= CLEAR
        ).any(axis=2).all(axis=1)
        weights = np.concatenate(
            [np.full(len(other), ON_ITS_ARROW if other is path else ON_ANOTHER) for other in paths]
        )
        least, best = np.inf, None
        for index in np.flatnonzero(fits)[np.argsort(cost[fits], kind="stable")]:
            if cost[index] >= least:
                break  # the next ones cost more, even if they cover nothing
            found = (
                cost[index]
                + weights[(abs(points - middle[index]) <= half + CLEAR).all(axis=1)].sum()
            )
            if found < least:
                least, best = found, middle[index]
        if best is None:
            written.remove()
            missing += 1
        else:
            written.set_position(best)
            boxes.append(np.concatenate([best - half, best + half]))
    return missing


def _places(path: Points, width: float, height: float) -> Iterator[tuple[float, float, float]]:
    """Yields places for the middle of a box beside a path, or on it: their cost, x and y."""
    for share in ALONG:
        index = round(share * (len(path) - 1))
        point, way = path[index], path[min(index + 1, len(path) - 1)] - path[max(index - 1, 0)]
        normal = np.array([way[1], -way[0]]) / max(float(np.hypot(*way)), 1e-9)
        # from the middle of the box to its side, along the normal
        reach = (abs(normal[0]) * width + abs(normal[1]) * height) / 2
        off_middle = abs(share - 0.5)
        yield off_middle + FAR_AWAY * AWAY[0], *point
        for side, away, raised in itertools.product((normal, -normal), AWAY, RAISED):
            x, y = point + side * (away + reach)
            towards_centre = INSIDE if side @ point < 0 else 0.0
            cost = off_middle + FAR_AWAY * away + towards_centre + OFF * abs(raised)
            yield cost, x, y + raised * height


# -- the circle

# nodes up to which the label of a group has room for its name and for each way
MOST_DETAILED: Final = 8
MOST_CHORD_LABELS: Final = 12
LIMITS: Final = (1.8, 1.55)  # of the axes, to each side
LETTER: Final = 0.58  # width of a letter, as a share of the font's size
PID_SIZE: Final = 8.0  # points
TUBE: Final = 0.17  # thickness of a group's tube, where the circle has radius 1
TUBE_COLOUR: Final = "#F6F6F6"
UNUSED: Final = (0, (4, 3))  # outline of a tube on which nothing was sent
WIDEST: Final = 0.054  # the arrow of the edge with most bytes
THINNEST: Final = 0.008  # an arrow that is narrower to scale is drawn so, to be seen at all

# One look for each pair group, repeated: neighbours always differ. The texture is a line along the
# arrow's middle.
PAIR_COLOURS: Final = (style.BLUE, style.VERMILLION, style.GREEN)
PAIR_TEXTURES: Final[tuple[Any, ...]] = (None, "solid", (0, (3, 2)))
CLOSING_COLOUR: Final = style.PURPLE  # the edge from the last rank back to the first
CLOSING_TEXTURE: Final = (0, (0.5, 1.8))


def _draw_circle(graph: nx.MultiDiGraph, ax: Axes) -> list[str]:
    """Draws ranks, groups and messages on axes that have their size already.

    Returns notes on what is not drawn, or not labelled.
    """
    world_size = len(graph)
    radius = min(0.24, 0.22 * 2 * np.pi / max(world_size, 4))
    ax.set(xlim=(-LIMITS[0], LIMITS[0]), ylim=(-LIMITS[1], LIMITS[1]), aspect="equal")
    ax.set_axis_off()
    ax.apply_aspect()
    _draw_groups(graph, ax, radius)
    notes = _draw_messages(graph, ax, radius)
    several = len(set(nx.get_node_attributes(graph, "host").values())) > 1
    for rank, data in graph.nodes(data=True):
        x, y = node(rank, world_size)
        ax.add_patch(
            Circle(
                (x, y),
                radius,
                facecolor="white",
                edgecolor=style.INK,
                linewidth=1.6,
                zorder=6,
                gid=f"rank-{rank}",
            )
        )
        pid = data["host"] if several else f"pid {data['pid']}" if data["pid"] is not None else ""
        small = pid and len(pid) * LETTER * PID_SIZE * style.per_point(ax) < 1.5 * radius
        ax.text(
            x, y + (0.05 if small else 0), str(rank), ha="center", va="center", zorder=7,
            weight="bold",
            fontsize=style.letters(18 if world_size <= 6 else 15 if world_size <= 10 else 11),
        )  # fmt: skip
        if small:
            ax.text(
                x,
                y - 0.1,
                pid,
                ha="center",
                va="center",
                zorder=7,
                fontsize=style.letters(PID_SIZE),
                color=style.MUTED,
            )
    return notes


def _draw_groups(graph: nx.MultiDiGraph, ax: Axes, radius: float) -> None:
    """Draws the tubes, and writes beside each what was sent on it."""
    detailed = len(graph) <= MOST_DETAILED
    both_ways = _goes_backward(graph)
    for name, (pred, succ) in graph.graph["ring"].items():
        lanes = [
            (src, dst, data)
            for src, dst in ((pred, succ), (succ, pred))
            if (data := graph.get_edge_data(src, dst, name)) and data["messages"]
        ]
        words = [
            f"{src}>{dst}: {_amount(data)}" if both_ways else _amount(data)
            for src, dst, data in lanes
        ]
        if len(lanes) == 2 and not detailed:
            there, back = (data for *_, data in lanes)
            words = [_amount({what: there[what] + back[what] for what in there if what != "lane"})]
        across = _crosses(graph, pred, succ)
        outline = style.VERMILLION if across else CLOSING_COLOUR if succ < pred else style.MUTED
        line = _centre_line(graph, pred, succ, radius * 0.7)
        tube = np.concatenate([beside(line, TUBE / 2), beside(line, -TUBE / 2)[::-1]])
        ax.add_patch(
            Polygon(
                tube, facecolor=TUBE_COLOUR, edgecolor=outline, linewidth=2.0 if across else 1.0,
                linestyle="solid" if lanes else UNUSED,
                gid=f"group-{name}",
            )
        )  # fmt: skip
        middle = _middle(_centre_line(graph, pred, succ, 0))
        heading = [name] if detailed or not words else []
        text = "\n".join(heading + (words or ["nothing sent"]))
        ink = style.INK if words else style.MUTED
        _write(ax, middle, middle, TUBE / 2, text, ink, len(graph))


def _draw_messages(graph: nx.MultiDiGraph, ax: Axes, radius: float) -> list[str]:
    """Draws the arrows; returns notes for below."""
    edges = _list_used(graph)
    most = max((data["size_bytes"] for *_, data in edges), default=0)
    lane_width = TUBE / 4 if _goes_backward(graph) else 0.0
    chords = sorted(data["size_bytes"] for *_, data in edges if data["lane"] == "outside")[::-1]
    least_named = chords[min(len(chords), MOST_CHORD_LABELS) - 1] if chords else 0
    gap = radius + 0.025
    to_itself = 0
    for src, dst, key, data in edges:
        width = max(WIDEST * data["size_bytes"] / most if most else 0, THINNEST)
        if src == dst:
            to_itself += data["messages"]
        elif data["lane"] == "outside":
            clockwise = (dst - src) % len(graph) <= len(graph) // 2  # the way back bows further in
            ends = node(src, len(graph)), node(dst, len(graph))
            path = _chord(*ends, pull=0.4 if clockwise else 1.0, gap=gap)
            colour = style.VERMILLION if _crosses(graph, src, dst) else style.MUTED
            _draw_arrow(ax, path, width, colour, (0, (2, 2)), 3, f"outside-{src}-{dst}-{key}")
            if data["size_bytes"] >= least_named:
                # the middle of a small ring has little room
                text = f"{key}\n{_amount(data).replace('message', 'msg')}"
                at = _middle(path)
                # Beside the arrow: towards the centre, or, near it, on the side to which the arrow
                # bows.
                away = (
                    -at
                    if np.hypot(*at) > 0.3
                    else np.array([path[0][1] - path[-1][1], path[-1][0] - path[0][0]])
                )
                _write(ax, at, away, width / 2, text, style.INK, MOST_DETAILED + 1)
        else:
            pred, succ = graph.graph["ring"][key]
            forward = data["lane"] == "forward"
            path = _centre_line(graph, pred, succ, gap, lane_width if forward else -lane_width)
            if not forward:
                path = path[::-1]
            closes = succ < pred
            colour = CLOSING_COLOUR if closes else PAIR_COLOURS[pred % 3]
            texture = CLOSING_TEXTURE if closes else PAIR_TEXTURES[pred % 3]
            _draw_arrow(ax, path, width, colour, texture, 4, f"{data['lane']}-{key}")
    notes = []
    if lane_width and len(graph) > MOST_DETAILED:
        notes.append("The label of a pair group adds up both ways.")
    if len(chords) > MOST_CHORD_LABELS:
        notes.append(
            f"Arrows across: all {len(chords)} are drawn, the {MOST_CHORD_LABELS} widest are "
            "labelled."
        )
    if to_itself:
        notes.append(f"Not drawn: {count(to_itself, 'message')} of a rank to itself.")
    return notes


def _draw_arrow(
    ax: Axes, path: Points, width: float, colour: str, texture: Any, zorder: int, gid: str
) -> None:
    """Draws one arrow, with its texture along the middle where there is room."""
    ax.add_patch(
        Polygon(
            arrow(path, width, head=0.085),
            facecolor=colour,
            edgecolor="none",
            zorder=zorder,
            gid=gid,
        )
    )
    if texture is not None and width > 2.5 * THINNEST:
        inner = path[np.hypot(*(path - path[-1]).T) > 0.12]
        ax.plot(*inner.T, color="white", linewidth=1.2, linestyle=texture, zorder=zorder + 0.5)


def _write(
    ax: Axes, at: Points, away: Points, distance: float, text: str, colour: str, world_size: int
) -> None:
    """Writes beside a path: ``distance`` and the text's own extent away from the point ``at``."""
    fontsize = style.letters(9 if world_size <= MOST_DETAILED else 8)
    lines = text.split("\n")
    extent = (
        np.array([max(map(len, lines)) * LETTER, len(lines) * 1.25])
        * fontsize
        / 2
        * style.per_point(ax)
    )
    away = away / np.hypot(*away)
    x, y = at + away * (distance + 0.03 + float(extent @ np.abs(away)))
    side = "left" if away[0] > 0.3 else "right" if away[0] < -0.3 else "center"
    x += {"left": -1, "right": 1, "center": 0}[side] * extent[0]
    ax.text(
        x, y, text, ha=side, va="center", fontsize=fontsize, color=colour, linespacing=1.2, zorder=8
    )


def _middle(path: Points) -> Points:
    point: Points = path[len(path) // 2]
    return point


def _circle_legend(graph: nx.MultiDiGraph) -> list[Artist]:
    used, ring = _list_used(graph), graph.graph["ring"]
    busy = {key for _, _, key, _ in used}
    lanes = {data["lane"] for *_, data in used}
    across = any(_crosses(graph, src, dst) for src, dst in graph.edges())
    closes = any(succ < pred for pred, succ in ring.values())
    tube = {"facecolor": TUBE_COLOUR, "edgecolor": style.MUTED}
    unused = tube | {"linestyle": UNUSED}
    marked = tube | {"edgecolor": style.VERMILLION, "linewidth": 2}
    entries: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        (busy & set(ring), "pair group with messages", tube),
        (set(ring) - busy, "pair group, nothing sent", unused),
        (lanes - {"outside"}, "messages on it, width = bytes", {"facecolor": PAIR_COLOURS[0]}),
        ("outside" in lanes, "messages on other groups", {"facecolor": style.MUTED}),
        (closes, "the edge that closes the ring", {"facecolor": CLOSING_COLOUR}),
        (across, "from host to host", marked),
    )
    return [Patch(label=label, **look) for is_shown, label, look in entries if is_shown]


def _crosses(graph: nx.MultiDiGraph, src: int, dst: int) -> bool:
    """Tells whether two ranks are on two hosts."""
    here, there = graph.nodes[src]["host"], graph.nodes[dst]["host"]
    return bool(here and there and here != there)


def _goes_backward(graph: nx.MultiDiGraph) -> bool:
    """Tells whether anything was sent against the ring's direction, as gradients are."""
    return any(data["lane"] == "backward" for _, _, data in graph.edges(data=True))


def _amount(data: dict[str, Any]) -> str:
    return f"{bytes_text(data['size_bytes'])}\n{count(data['messages'], 'message')}"


def _centre_line(
    graph: nx.MultiDiGraph, pred: int, succ: int, gap: float, lane: float = 0.0
) -> Points:
    """Path of a ring edge from pred to succ, ``lane`` outside its middle.

    Along the circle to the next node, else across.
    """
    world_size = len(graph)
    if (pred + 1) % world_size == succ:
        start = node_angle(pred, world_size)
        return arc(start + gap, start + 2 * np.pi / world_size - gap, 1 + lane)
    path = _chord(node(pred, world_size), node(succ, world_size), pull=0.3, gap=gap)
    return beside(path, lane)


# -- the matrix

MOST_CELLS: Final = 256  # a side; more would be less than a pixel each
MOST_OUTLINES: Final = 64  # ranks up to which an unused group's cell can be seen


def bytes_matrix(
    graph: nx.MultiDiGraph, most_cells: int = MOST_CELLS
) -> tuple[npt.NDArray[np.int64], int]:
    """Sums the bytes from each rank to each rank.

    In at most ``most_cells`` cells a side, which several ranks may share.

    Returns:
        The matrix, shape (sender, receiver), and how many ranks a cell's side stands for. A cell
        without messages is -1.
    """
    shared = -(-len(graph) // most_cells)
    side = -(-len(graph) // shared)
    cells = np.full((side, side), -1, dtype=np.int64)
    for src, dst, data in graph.edges(data=True):
        if data["messages"]:
            cell = (src // shared, dst // shared)
            cells[cell] = max(cells[cell], 0) + data["size_bytes"]
    return cells, shared


def _draw_matrix(graph: nx.MultiDiGraph, ax: Axes) -> list[str]:
    """Draws the bytes sent between each pair of ranks, on a logarithmic colour scale.

    Returns notes for below.
    """
    cells, shared = bytes_matrix(graph)
    if shared > 1:
        # the last cell stands for fewer
        ranks = np.diff(np.append(np.arange(0, len(graph), shared), len(graph)))
        cells = np.where(cells < 0, -1, cells / np.outer(ranks, ranks))
    ax.set(xlabel="receiving rank", ylabel="sending rank")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(9, integer=True))
    ax.spines[["top", "right"]].set_visible(True)
    edge = len(cells) * shared - 0.5
    # messages of 0 bytes: the scale's low end
    sent = np.ma.masked_less(np.where(cells == 0, 1, cells), 0)
    low, high = (float(sent.min()), float(sent.max())) if sent.count() else (1.0, 2.0)
    widened = 1 if low < high else 2
    colours = mpl.colormaps["cividis_r"].with_extremes(bad="white")
    picture = ax.imshow(
        sent, cmap=colours,
        norm=LogNorm(low / widened, high * widened),
        extent=(-0.5, edge, edge, -0.5), interpolation="antialiased", interpolation_stage="rgba",
    )  # fmt: skip
    notes = []
    if shared > 1:
        notes.append(f"One cell stands for {shared} x {shared} ranks: the mean of their pairs.")
    if sent.count():
        beside = ax.inset_axes((1.04, 0.1, 0.04, 0.8))
        bar = ax.figure.colorbar(
            picture,
            cax=beside,
            label="bytes sent",
            format=FuncFormatter(lambda value, _: bytes_text(value)),
        )
        bar.locator = LogLocator(base=2, numticks=8) if low < high else FixedLocator([low])
        bar.minorticks_off()
    borders = [rank - 0.5 for rank in range(1, len(graph)) if _crosses(graph, rank - 1, rank)]
    if borders and len(borders) < MOST_OUTLINES:
        for border in borders:
            for draw in (ax.axhline, ax.axvline):
                draw(border, color=style.VERMILLION, linewidth=0.8, gid="hosts")
        notes.append("Orange lines: from one host to the next.")
    unused = [
        ends
        for name, ends in graph.graph["ring"].items()
        if graph.edges[(*ends, name)]["messages"] == 0
    ]
    if unused and len(graph) <= MOST_OUTLINES:
        for pred, succ in unused:
            ax.add_patch(
                Rectangle(
                    (succ - 0.5, pred - 0.5),
                    1,
                    1,
                    fill=False,
                    edgecolor=style.MUTED,
                    linestyle=(0, (2, 2)),
                    linewidth=0.8,
                )
            )
        notes.append("Dashed cells: pair groups that were built; nothing was sent along them.")
    elif unused:
        notes.append(
            f"{len(unused):,} of {len(graph.graph['ring']):,} pair groups were built and not used."
        )
    return notes
