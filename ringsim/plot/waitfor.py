"""Draws the graph of waiting ranks, including any cycle that no rank can leave.

The last moments of the timeline are drawn next to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.text import Text

from ringsim.errors import name_ranks
from ringsim.plot import sheet, style
from ringsim.plot.bars import time_range
from ringsim.plot.paths import Points, bow, node
from ringsim.plot.ring import draw_node, set_limits
from ringsim.plot.sheet import Picture
from ringsim.plot.timeline import timeline_picture
from ringsim.schedules.engine import Cycle
from ringsim.traces.display import Images, Style
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, Tables, make_events
from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation, kind_text
from ringsim.traces.looks import LOOKS
from ringsim.traces.run_parts import join_events
from ringsim.traces.units import capitalise, count
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 12  # the most nodes; of more ranks, the most important are drawn
MOST_LABELS = 8
MOST_TIMELINE_RANKS = 64
# half of the graph's width and height, relative to the radius of its circle
HALF = (2.0, 1.44)
GRAPH_INCHES = (5.0, 3.6)
TIMELINE_SHARE = 0.6  # the timeline's width, as a share of its normal width
BOW = 0.18  # how far an arrow bends to the right, as a share of its length
# how long before the ranks got stuck the timeline begins, as a share of the time since then
BEFORE = 0.5
BEFORE_NS = 20_000_000  # the least time before the ranks got stuck
RADIUS = 0.2
CROWDED = 0.32  # the largest radius of a node, as a share of the distance between neighbours
DASHED = (0, (4, 2))
FILE_LETTERS = 20
MOST_NOTES = 4  # the most lines of the first finding

# The label of an arrow never covers a node or another label, and covers an arrow only if there is
# no room elsewhere.
LABEL_SIZE = 8.5
PLACES = 65  # the number of possible positions of a label in each direction
OUTSIDE = 1.1  # how far outside the arrow a label should be
CLEAR = 0.04  # the least distance between two boxes, or between a box and an arrow
# The cost of a position is its distance from the arrow, plus these costs: for the distance of the
# label's middle, and for each covered point.
OFF = 0.3
COVERED = 0.15

_RUNNING = (LOOKS["running"].name, style.GROUND, LOOKS["running"].light, "solid")
# for each state: the text next to the rank, the fill, the outline, and the dashes
_LOOKS: dict[str, tuple[str, str, str, Any]] = {
    "blocked": ("", style.GROUND, LOOKS["stuck"].light, "solid"),
    "exited": (LOOKS["exited"].name, LOOKS["exited"].light, style.MUTED, (0, (2, 2))),
    "failed": ("failed", style.INK, style.INK, "solid"),
    "killed": ("dead", style.INK, style.INK, "solid"),
    "running": _RUNNING,
    "stopped": (LOOKS["stopped"].name, LOOKS["stopped"].light, style.INK, "solid"),
    "unknown": _RUNNING,
}


def plot_waitfor(diagnosis: Diagnosis, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws a graph that shows which ranks are waiting for which others.

    Ranks are drawn in a circle, with an arrow from each waiting rank to the rank that it waits for.
    The arrows in a cycle that no rank can leave are wide and red. If the diagnosis has a trace, the
    last moments of its timeline are drawn next to the graph.

    Args:
        diagnosis: a diagnosis; if it has no findings, the picture shows only the ranks.
        ax: the axes to draw only the graph on, or None to create a new figure with both pictures.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes of the graph. Call ``ax.figure.savefig(...)`` to save the figure.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> edges = (Edge(0, 1, None, in_cycle=True), Edge(1, 0, None, in_cycle=True))
        >>> finding = Finding("deadlock", (0, 1), (), "ranks 0 and 1 wait for each other.")
        >>> plot_waitfor(Diagnosis((finding,), 2, edges)).get_title(loc="left")
        'Deadlock: ranks 0 and 1'
    """
    return sheet.show(_pictures(diagnosis), ax, **look)


def diagnose_cycle(cycle: Cycle) -> Diagnosis:
    """Returns a diagnosis of a schedule whose ranks wait for each other.

    Args:
        cycle: the cycle, from the ``diagnosis`` of a ``Deadlock``.
    """
    ranks = tuple(rank for rank, _ in cycle)
    edges = tuple(
        Edge(rank, peer, Operation(rank, label), in_cycle=True)
        for rank, peer, label in zip(ranks, ranks[1:] + ranks[:1], cycle.labels, strict=True)
    )
    finding = Finding("deadlock", ranks, (), cycle.message)
    origin = {"source": "simulated", "backend": f"virtual clock, {cycle.semantics}"}
    trace = Trace(make_events({"rank": [], "op": []}), {"world_size": cycle.num_ranks, **origin})
    return Diagnosis((finding,), cycle.num_ranks, edges, trace=trace)


def waitfor_images(diagnosis: Diagnosis) -> Images:
    """Draws the graph and the timeline for a notebook."""
    return sheet.draw_images(_pictures(diagnosis), str(diagnosis))


def _pictures(diagnosis: Diagnosis) -> list[Picture]:
    """Returns the graph and, if there are any, the last moments of the timeline."""
    pictures = [Picture(lambda ax: _draw_graph(diagnosis, ax), *GRAPH_INCHES)]
    moments = _last_moments(diagnosis)
    if moments is not None:
        timeline = timeline_picture(moments)
        pictures.append(
            timeline._replace(
                width=timeline.width * TIMELINE_SHARE, height=max(timeline.height, 2.2)
            )
        )
    return pictures


def _last_moments(diagnosis: Diagnosis) -> Trace | None:
    """Returns the part of the trace that belongs to the findings, or None if no part does.

    If ranks are stuck, this is the end of the trace; if the run finished, it is the whole trace.
    """
    trace: Trace | None = diagnosis.trace
    if trace is None or len(trace.events) == 0 or trace.world_size > MOST_TIMELINE_RANKS:
        return None
    events = trace.events
    last = time_range(events)[1]
    waited_s = [edge.operation.waited_s for edge in diagnosis.edges if edge.operation is not None]
    waited_ns = int(max(waited_s, default=0.0) * 1e9)
    if waited_ns == 0:
        return trace
    stuck = (events.done_ns == NONE) & (events.wait_ns != NONE)
    stuck_since = int(events.wait_ns[stuck].min()) if stuck.any() else last - waited_ns
    start = stuck_since - max(int(BEFORE * (last - stuck_since)), BEFORE_NS)
    recent = stuck | (np.maximum(events.done_ns, events.post_ns) >= start)
    rank, mark = int(events.rank.min()), OP_CODES["mark"]
    columns = {"rank": [rank], "op": [mark], "label": [0], "post_ns": [stuck_since + waited_ns]}
    at_end = make_events(columns, Tables(labels=("end of the run",)))
    return replace(trace, events=join_events([events.select(recent), at_end]))


def _draw_graph(diagnosis: Diagnosis, ax: Axes) -> None:
    edges = diagnosis.edges or _edges_of(diagnosis.findings)
    ranks = _shown_ranks(diagnosis, edges)
    # the states of a finished run are not shown
    states = diagnosis.states if set(diagnosis.states) != {"exited"} else ()
    set_limits(ax, *HALF)
    at = {rank: node(index, len(ranks)) for index, rank in enumerate(ranks)}
    radius = min(RADIUS, CROWDED * 2 * float(np.sin(np.pi / max(len(ranks), 2))))
    shown = [edge for edge in edges if edge.rank in at and edge.peer in at]
    taken: list[Any] = []
    for rank, (x, y) in at.items():
        taken += _draw_rank(ax, rank, x, y, radius, states[rank] if states else "")
    unlabelled = _draw_edges(ax, shown, at, radius, taken)
    notes = _notes(diagnosis)
    hidden = diagnosis.world_size - len(ranks)
    if hidden > 0:
        waits = f" and {count(len(edges) - len(shown), 'wait')}" if len(edges) > len(shown) else ""
        notes.append(f"Not drawn: {count(hidden, 'rank')}{waits}.")
    if unlabelled > 0:
        notes.append(f"Not labelled, for lack of room: {count(unlabelled, 'arrow')}.")
    metadata = diagnosis.trace.metadata if diagnosis.trace is not None else {}
    style.dress(ax, _title(diagnosis), notes=notes, metadata=metadata, columns=3)


def _title(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return f"Nothing wrong was found on {count(diagnosis.world_size, 'rank')}"
    first = diagnosis.findings[0]
    others = len(diagnosis.findings) - 1
    more = f" (and {count(others, 'finding')} more)" if others else ""
    return f"{kind_text(first.kind).capitalize()}: {name_ranks(first.ranks)}{more}"


def _notes(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.findings:
        return []
    lines = [line.strip() for line in diagnosis.findings[0].message.splitlines()]
    # if ranks are stuck, the arrows' labels contain what the other lines say
    return [capitalise(line) for line in lines[: 1 if diagnosis.edges else MOST_NOTES]]


def _edges_of(findings: tuple[Finding, ...]) -> tuple[Edge, ...]:
    """Returns the waits described by findings, for runs in which no rank is stuck."""
    every = [one for finding in findings for one in (finding, *finding.consequences)]
    pairs = [one.operations[:2] for one in every if len(one.operations) > 1]
    return tuple(
        Edge(mine.rank, theirs.rank, mine) for mine, theirs in pairs if mine.rank != theirs.rank
    )


def _shown_ranks(diagnosis: Diagnosis, edges: tuple[Edge, ...]) -> list[int]:
    """Chooses the ranks to draw.

    These are all ranks if there are few. Otherwise, ranks in a cycle come first, then ranks with
    findings, and then other ranks that wait or are waited for.
    """
    if diagnosis.world_size <= MOST_RANKS:
        return list(range(diagnosis.world_size))
    wanted = [rank for edge in edges if edge.in_cycle for rank in (edge.rank, edge.peer)]
    wanted += [rank for finding in diagnosis.findings for rank in finding.ranks]
    wanted += [rank for edge in edges for rank in (edge.rank, edge.peer)]
    return sorted(list(dict.fromkeys([*wanted, *range(diagnosis.world_size)]))[:MOST_RANKS])


def _draw_edges(
    ax: Axes, edges: list[Edge], at: dict[int, Any], radius: float, taken: list[Any]
) -> int:
    """Draws an arrow, labelled with the operation, from each rank to each rank it waits for.

    Arrows bend to the right, so that they do not coincide with the arrows back. Returns the number
    of arrows without a label.
    """
    pairs: dict[tuple[int, int], list[Edge]] = {}
    for edge in sorted(edges, key=lambda one: not one.in_cycle):
        pairs.setdefault((edge.rank, edge.peer), []).append(edge)
    points = radius / style.per_point(ax)
    paths, labels = [], []
    look: dict[str, Any]
    for (rank, peer), waits in pairs.items():
        start, end = at[rank], at[peer]
        label, look = "waits for", {"color": style.MUTED, "linewidth": 1.2, "linestyle": DASHED}
        if waits[0].in_cycle:
            label, look = "waits for, in a cycle", {"color": LOOKS["stuck"].light, "linewidth": 2.6}
        style.entry(ax, label, **look)
        if rank == peer:
            middle = start[0], start[1] + radius
            ax.add_patch(Circle(middle, radius * 0.8, fill=False, zorder=2, **look))
            continue
        ax.add_patch(
            FancyArrowPatch(
                tuple(start), tuple(end), connectionstyle=f"arc3,rad={BOW}",
                arrowstyle="-|>,head_length=7,head_width=4",
                shrinkA=points + 1, shrinkB=points + 2, zorder=2 + waits[0].in_cycle,
                gid=f"waits-{rank}-{peer}", **look,
            )
        )  # fmt: skip
        way = end - start
        # like matplotlib's "arc3"
        paths.append(bow(start, end, (start + end) / 2 + BOW * np.array([way[1], -way[0]])))
        said = [edge.operation for edge in waits if edge.operation is not None]
        if said:
            labels.append((f"{rank} → {peer}: {_label(said)}", paths[-1]))
    return _label_edges(ax, labels[:MOST_LABELS], paths, taken) + max(len(labels) - MOST_LABELS, 0)


def _label(operations: list[Operation]) -> str:
    """Returns a two-line label for the operations in which one rank waits for another."""
    one, more = operations[0], len(operations) - 1
    text = one.op if one.tag < 0 or one.kind == COLLECTIVE else f"{one.op}, tag {one.tag}"
    name, _, line = one.place.rpartition(":")
    at = f"{style.shorten(name, FILE_LETTERS)}:{line}" if name else ""
    return f"{text}{f' and {more} more' if more else ''}\n{at}".strip()


def _draw_rank(ax: Axes, rank: int, x: float, y: float, radius: float, state: str) -> list[Any]:
    """Draws a rank's node and, unless the rank is blocked, the rank's state next to it.

    Returns the middles and half of the sizes of the node and the text.
    """
    words, fill, outline, dashes = _LOOKS.get(state, ("", style.GROUND, style.INK, "solid"))
    ink = style.GROUND if fill == style.INK else style.INK
    size = style.letters(13 * min(1.0, radius / 0.17))
    draw_node(
        ax, rank, (x, y), radius, size, ink=ink, fc=fill, edgecolor=outline, ls=dashes, linewidth=2
    )
    if state == "blocked":
        style.entry(ax, "blocked", ls="none", marker="o", ms=9, mfc=fill, mec=outline)
    taken: list[Any] = [((x, y), radius)]
    if words:
        at = np.array([x, y + (radius + 0.1) * (1 if y >= -0.01 else -1)])
        taken.append((at, _write_words(ax, words, at, zorder=7)[1]))
    return taken


# -- labels of arrows


def _write_words(ax: Axes, text: str, at: Any, **look: Any) -> tuple[Text, Any]:
    """Writes centred text and returns the text and half of its size, in data coordinates."""
    size = style.letters(LABEL_SIZE)
    written = ax.text(at[0], at[1], text, ha="center", va="center", fontsize=size, **look)
    box = written.get_window_extent().transformed(ax.transData.inverted())
    return written, np.array(box.size) / 2


def _label_edges(
    ax: Axes, labels: Sequence[tuple[str, Points]], paths: Sequence[Points], taken: list[Any]
) -> int:
    """Writes labels next to some arrows, starting with the most important one.

    Each label is a text and the path of its arrow. A label never covers the boxes ``taken`` by
    nodes and other text (their middles, and half of their sizes), and covers one of the arrows'
    ``paths`` only if there is no room elsewhere. The axes must have their final size and range.
    Returns the number of labels that were not written because there was no room.
    """
    grid = (np.linspace(-half, half, PLACES) for half in HALF)
    places = np.stack(np.meshgrid(*grid), axis=-1).reshape(-1, 2)
    points, missing = np.concatenate([np.empty((0, 2)), *paths])[::4], 0
    for text, path in labels:
        written, half = _write_words(ax, text, (0, 0), zorder=5, linespacing=1.1)
        off = abs(places - OUTSIDE * path[len(path) // 2])
        cost = np.hypot(*np.maximum(off - half, 0).T) + OFF * np.hypot(*off.T)
        cost += COVERED * (abs(points - places[:, None]) < half + CLEAR).all(axis=2).sum(axis=1)
        cost[(abs(places) + half > HALF).any(axis=1)] = np.inf
        for middle, reach in taken:
            cost[(abs(places - middle) < half + reach + CLEAR).all(axis=1)] = np.inf
        best = cost.argmin()
        if np.isfinite(cost[best]):
            written.set_position(tuple(places[best]))
            taken = [*taken, (places[best], half)]
        else:
            written.remove()
            missing += 1
    return missing
