"""Bandwidth and time against the size of a message: what links gave, and what the messages of a trace achieved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from ringsim.errors import ArgumentError
from ringsim.plot import style
from ringsim.plot.achieved import Achieved, achieved
from ringsim.plot.curve_lines import curve_legend, draw_curves, fit_notes, is_sure, measured_groups
from ringsim.plot.curves import Curve, make_curves, pen
from ringsim.plot.labels import label_heights
from ringsim.plot.published_marks import draw_published, published_legend, published_notes
from ringsim.plot.size_axes import BELOW, add_time_panel, scale_sizes
from ringsim.provenance import footer
from ringsim.traces.bandwidths import Bandwidths
from ringsim.traces.units import bytes_text, time_text
from ringsim.traces.value import Trace, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_bandwidth", "png"]

SIZE_INCHES: Final = (6.6, 3.6)  # of the upper panel
MOST_NAMED: Final = 3  # measurements that the title names


def plot_bandwidth(trace: Trace | Bandwidths, *, curve: Bandwidths | None = None, published: bool = True, ax: Axes | None = None) -> Axes:
    """Draws bandwidth and, below, time against message size.

    A table of bandwidths is drawn as medians with their p10-p90 band, the alpha-beta line through them, and the ceilings of the machine.
    A curve is interrupted where one line does not hold (``ringsim.traces.bandwidths`` has the rule). Where the table has messages and no NCCL, what
    others published of NCCL stands beside, dashed, with its source.

    Of a trace, every message is a point: its size by the time from the moment at which both sides had posted it until it was there. Open
    points are lower bounds, of messages that the receiver began to wait for only later.

    Args:
        trace: a trace, or a table of bandwidths.
        curve: a measured table to draw behind the messages of a trace.
        published: False leaves the figures of others away.
        ax: where to draw the upper panel; the lower one goes below it. A new figure by default.

    Returns:
        The axes of the upper panel; the lower one is its child.

    Raises:
        ArgumentError: a curve is given for a table, which has its own.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.traces.bandwidths import make_bandwidths
        >>> row = {"pattern": "pingpong", "src": 0, "dst": 1, "backend": "gloo", "kind": "measured", "n": 30}
        >>> times_us = {2**k: 40 + 2**k / 4e3 for k in range(3, 28)}
        >>> rows = [{**row, "size_bytes": size, "latency_us": t} for size, t in times_us.items()]
        >>> plot_bandwidth(make_bandwidths(rows, {})).get_title(loc="left")
        'Gloo: 8 B take 40 µs, 128 MiB go at 4 GB/s'
    """
    if isinstance(trace, Bandwidths) and curve is not None:
        raise ArgumentError("curve must be left out for a table of bandwidths, got one. Pass a trace, to be drawn over the curve.")
    with style.drawing():
        if ax is not None:
            _draw(trace, curve, ax, published)
            return ax
        figure = plt.figure(figsize=SIZE_INCHES)
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *SIZE_INCHES, style.Margins(0, 0, 0, 0))])
        style.fit(figure, [(ax, *SIZE_INCHES, _draw(trace, curve, ax, published))])
    return ax


def png(table: Bandwidths) -> bytes:
    """Draws a table's chart for a notebook: a PNG, 100 pixels an inch, with the table's description in the file."""
    with style.drawing():
        figure = Figure()
        ax = figure.add_axes((0, 0, 1, 1))
        style.fit(figure, [(ax, *SIZE_INCHES, style.Margins(0, 0, 0, 0))])
        style.fit(figure, [(ax, *SIZE_INCHES, _draw(table, None, ax, True))])
    return style.figure_png(figure, description=table.describe())


def _draw(trace: Trace | Bandwidths, curve: Bandwidths | None, ax: Axes, published: bool) -> style.Margins:
    """Draws on axes that have their size already; returns the room that the words around take."""
    if isinstance(trace, Bandwidths):
        return _draw_table(trace, ax, published)
    return _draw_trace(trace, curve, ax)


def _draw_table(table: Bandwidths, ax: Axes, published: bool) -> style.Margins:
    curves = make_curves(table)
    below = add_time_panel(ax)
    sizes = np.concatenate([one.size_bytes for one in curves] or [np.array([1, 2**20])])
    scale_sizes(ax, below, float(sizes.min()), float(sizes.max()))
    labels = draw_curves(curves, ax, below)
    with_published = published and bool(curves) and all(one.backend != "nccl" and one.bus_factor == 1 for one in curves)
    if with_published:
        labels += draw_published(ax, below)
    right = label_heights(ax, labels)
    ax.set_ylabel("bandwidth, GB/s (algbw = busbw)" if {one.bus_factor for one in curves} <= {1.0} else "bus bandwidth, GB/s")
    title, subtitle = _message(curves)
    handles = curve_legend(curves) + (published_legend() if with_published else [])
    notes = (
        fit_notes(curves)
        + _counts(curves)
        + (published_notes() if with_published else [])
        + _circumstances(table.metadata)
        + [str(note) for note in table.metadata.get("notes", ())]
    )
    return _dress(ax, title, subtitle, notes, handles, table.metadata, right)


def _draw_trace(trace: Trace, table: Bandwidths | None, ax: Axes) -> style.Margins:
    found = achieved(trace)
    curves = make_curves(table) if table is not None else []
    below = add_time_panel(ax)
    sizes = np.concatenate([found.size_bytes, *(one.size_bytes for one in curves)])
    scale_sizes(ax, below, float(sizes.min(initial=2**20)), float(sizes.max(initial=2**10)))
    labels = draw_curves(curves, ax, below, name_half=False)
    backend = str(trace.metadata.get("backend") or "")
    handles = curve_legend(curves)
    points, look = found.points(), pen(backend)
    for is_bound, words in ((False, "watched from the start"), (True, "waited for later: a lower bound")):
        here = points.is_bound == is_bound
        if here.any():
            face = "none" if is_bound else look.colour
            for panel, values in ((ax, points.gb_per_s), (below, points.time_us)):
                (line,) = panel.plot(
                    points.size_bytes[here], values[here], "o", color=look.colour, markerfacecolor=face, markersize=5,
                    markeredgewidth=1.0, label=f"a message, {words}", gid=f"messages {'bound' if is_bound else 'exact'}", zorder=6,
                )  # fmt: skip
            handles.append(line)
    right = label_heights(ax, labels)
    notes = [f"Lines: {footer(table.metadata)}.", *fit_notes(curves)] if table is not None else []
    title, subtitle = _trace_message(found, trace)
    return _dress(ax, title, subtitle, notes + _left_out(found), handles, trace.metadata, right)


def _dress(
    ax: Axes, title: str, subtitle: str, notes: list[str], handles: list[Any], metadata: dict[str, Any], right: float
) -> style.Margins:
    height_points = ax.get_window_extent().height * 72 / ax.figure.dpi
    return style.dress(
        ax, title, subtitle=subtitle, notes=notes, handles=handles, metadata=metadata, columns=3, left=76, right=right + 8,
        below=BELOW * height_points + 42,
    )  # fmt: skip


def _message(curves: Sequence[Curve]) -> tuple[str, str]:
    """The chart's message in one line, and what follows from it in another."""
    slowest = [max(edges, key=lambda curve: float(curve.latency_us[-1])) for edges in measured_groups(curves).values()]
    if not slowest:
        return "No backend was measured", ""
    curve = slowest[0]
    first, last = bytes_text(curve.size_bytes[0]), bytes_text(curve.size_bytes[-1])
    if len(slowest) > 1:
        rates = ", ".join(f"{one.label} {one.gb_per_s[-1]:.3g}" for one in slowest[:MOST_NAMED])
        times = ", ".join(f"{one.label} {time_text(one.latency_us[0] * 1e3)}" for one in slowest[:MOST_NAMED])
        return f"{last}: {rates} GB/s", f"{first}: {times}"
    title = f"{curve.label}: {first} take {time_text(curve.latency_us[0] * 1e3)}, {last} go at {curve.gb_per_s[-1]:.3g} GB/s"
    link = curve.regimes[-1].link
    if len(curve.regimes) > 1 or link is None or not is_sure(link) or not curve.size_bytes[0] < link.n_half_bytes < curve.size_bytes[-1]:
        return title, "each point is a median; the line is what two numbers, alpha and beta, make of them"
    return title, f"below n½ = {bytes_text(round(link.n_half_bytes))} most of the time is the fixed cost of a message, alpha"


def _counts(curves: Sequence[Curve]) -> list[str]:
    """Says how many messages the medians are of."""
    counts = np.concatenate([curve.n for curve in curves if not curve.is_ceiling] or [np.zeros(0)])
    if not len(counts) or not counts.max():
        return []
    low, high = int(counts.min()), int(counts.max())
    if all(curve.kind == "simulated" for curve in curves):
        return ["Each size once: on a virtual clock no repetition differs."]
    return [f"Medians of n = {f'{low:,}' if low == high else f'{low:,} to {high:,}'} repetitions of each size, warm-up left out."]


def _circumstances(metadata: dict[str, Any]) -> list[str]:
    """Says what carried the messages and what else the machine was doing, as far as that is known."""
    parts = []
    if metadata.get("interface"):
        parts.append(f"sockets over {metadata['interface']}")
    if metadata.get("paths"):
        parts.append("between the GPUs " + ", ".join(f"{edge}: {path}" for edge, path in metadata["paths"].items()))
    if len(metadata.get("load") or ()) == 2:
        parts.append("load average {:.1f} before and {:.1f} after".format(*metadata["load"]))
    text = "; ".join(parts)
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def _trace_message(found: Achieved, trace: Trace) -> tuple[str, str]:
    if not len(found):
        return ("NCCL's messages have no times of their own" if found.queued else "No message arrived"), ""
    best = int(np.argmax(found.gb_per_s))
    bounds = int(np.count_nonzero(found.is_bound))
    title = f"{count(len(found), 'message')}: at best {found.gb_per_s[best]:.3g} GB/s, with {bytes_text(found.size_bytes[best])}"
    moved = f"{bytes_text(int(found.size_bytes.sum()))} among {count(trace.world_size, 'rank')}"
    return title, f"{moved}; {bounds:,} of the bandwidths are lower bounds" if bounds else moved


def _left_out(found: Achieved) -> list[str]:
    """Says what is not drawn."""
    notes = []
    if found.queued:
        notes.append(f"Not drawn: {count(found.queued, 'message')}: on NCCL the record has the end of queueing, not of the transfer.")
    if found.empty:
        notes.append(f"Not drawn: {count(found.empty, 'message')} of 0 bytes.")
    if found.unfinished:
        notes.append(f"Not drawn: {count(found.unfinished, 'message')} that never arrived.")
    return notes
