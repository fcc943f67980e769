"""Draws charts of bandwidth against message size and of stage use in a generation ring.

A bandwidth chart has a curve for each pattern, backend and edge. A curve is interrupted where one
alpha-beta line does not fit. For a trace, each message is a point. If NCCL was not measured,
published NCCL figures are drawn next to the measurement, each with its source, a public discussion.
Most sources state the bandwidth of large messages, and a few the times for single sizes; the chart
does not interpolate between them. nccl-tests' ``sendrecv_perf`` sends and receives at the same time
on every rank, so compare its figures with the pattern "exchange", not with "pingpong".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    LogLocator,
    MultipleLocator,
    PercentFormatter,
)

from ringsim.link import Link
from ringsim.plot import sheet, style
from ringsim.plot.published import FIGURES
from ringsim.plot.sheet import Picture
from ringsim.provenance import footer
from ringsim.schedules.generation import steady_use
from ringsim.traces.bandwidths import CEILINGS, ONE_GPU, Bandwidths, Regime, find_regimes
from ringsim.traces.display import Images, Style
from ringsim.traces.events import NONE, OK, Ints
from ringsim.traces.looks import LOOKS, Meaning, read_table
from ringsim.traces.units import bytes_text, capitalise, count, time_text
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (6.6, 3.6)  # the size of the upper panel
STRIP_INCHES = 1.2  # the height of the upper panel of a compact chart
MOST_NAMED = 3  # the most measurements in the title


def plot_bandwidth(
    trace: Trace | Bandwidths,
    *,
    curve: Bandwidths | None = None,
    published: bool = True,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws bandwidth against message size, with time against message size below.

    A table of bandwidths is drawn as medians with a band from p10 to p90, together with the
    alpha-beta line through the medians and the machine's ceilings. A curve is interrupted at sizes
    that a single line does not fit; ``ringsim.traces.bandwidths`` explains the rule. If the table
    contains messages but no NCCL measurements, published NCCL figures are drawn next to them as
    dashed lines, with their sources.

    For a trace, each message is a point at its size and its time, which runs from the later of the
    two posts to the arrival. Open points are lower bounds, because the receiver began to wait late.
    If there are more than 12 messages of the same size, their median is drawn instead, with a line
    from p10 to p90.

    Args:
        trace: a trace, or a table of bandwidths.
        curve: a measured table to draw behind the messages of a trace, or None.
        published: whether to draw published figures; ``compact`` pictures never show them.
        ax: the axes for the upper panel, below which the lower panel is added, or None to create a
            new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes of the upper panel. The lower panel is a child of these axes.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.traces.bandwidths import make_bandwidths
        >>> row = {
        ...     "pattern": "pingpong",
        ...     "src": 0,
        ...     "dst": 1,
        ...     "backend": "gloo",
        ...     "kind": "measured",
        ...     "n": 30,
        ... }
        >>> times_us = {2**k: 40 + 2**k / 4e3 for k in range(3, 28)}
        >>> rows = [{**row, "size_bytes": size, "latency_us": t} for size, t in times_us.items()]
        >>> plot_bandwidth(make_bandwidths(rows, {})).get_title(loc="left")
        'Gloo: 8 B take 40 µs, 128 MiB reach 4 GB/s'
    """
    if isinstance(trace, Bandwidths):
        picture = _table_picture(trace, published=published and not look.get("compact"))
    else:
        picture = Picture(lambda ax: _draw_trace(trace, curve, ax), *SIZE_INCHES, STRIP_INCHES)
    return sheet.show([picture], ax, **look)


def bandwidth_images(table: Bandwidths) -> Images:
    """Draws a table's chart for a notebook."""
    return sheet.draw_images([_table_picture(table, published=True)], table.describe())


def _table_picture(table: Bandwidths, *, published: bool) -> Picture:
    return Picture(
        lambda ax: _draw_table(table, ax, published=published), *SIZE_INCHES, STRIP_INCHES
    )


def _draw_table(table: Bandwidths, ax: Axes, *, published: bool) -> None:
    curves = make_curves(table)
    sizes = [one.size_bytes for one in curves] or [np.array([1, 2**20])]
    panels = _add_panels(ax, np.concatenate(sizes))
    labels = _draw_curves(curves, panels)
    notes = _fit_notes(curves) + _counts(curves)
    of_messages = all(one.bus_factor == 1 for one in curves)
    if published and curves and of_messages and all(one.backend != "nccl" for one in curves):
        labels += _draw_published(panels)
        # only the times need a note, because the bandwidths' sources are written next to the lines
        points = {figure.link: figure.source for figure in FIGURES if figure.latency_us is not None}
        cited = "; ".join(f"{link} ({source})" for link, source in points.items())
        notes.append(f"Published times: {cited}.")
        words = "NCCL, published elsewhere (not measured here)"
        style.entry(ax, words, linewidth=1.2, **PUBLISHED_LOOK)
    _write_labels(ax, labels)
    ax.set_ylabel("bandwidth, GB/s (algbw = busbw)" if of_messages else "bus bandwidth, GB/s")
    notes += [*_circumstances(table.metadata), *map(str, table.metadata.get("notes", ()))]
    style.dress(ax, *_message(curves), notes, metadata=table.metadata, columns=3)


def _draw_trace(trace: Trace, table: Bandwidths | None, ax: Axes) -> None:
    found = achieved(trace)
    curves = make_curves(table) if table is not None else []
    sizes = np.concatenate([found.size_bytes, *(one.size_bytes for one in curves)])
    panels = _add_panels(ax, sizes if len(sizes) else np.array([2**10, 2**20]))
    labels = _draw_curves(curves, panels, name_half=False)
    colour = pen(str(trace.metadata.get("backend") or "")).light
    _draw_messages(found, False, "waited for from the start", colour, panels)
    _draw_messages(found, True, "waited for late (a lower bound)", colour, panels)
    _write_labels(ax, labels)
    notes = [f"Lines: {footer(table.metadata)}.", *_fit_notes(curves)] if table is not None else []
    notes += _left_out(found)
    words = _trace_message(found, trace)
    style.dress(ax, *words, notes, metadata=trace.metadata, columns=3)


def _draw_messages(
    found: Achieved, is_bound: bool, words: str, colour: str, panels: _Panels
) -> None:
    """Draws the messages of one kind as dots or quantiles."""
    look: dict[str, Any] = {
        "color": colour, "markerfacecolor": "none" if is_bound else colour, "marker": "o",
        "markersize": 5,
        "linestyle": "none", "zorder": 6,
    }  # fmt: skip
    gid = f"messages {'bound' if is_bound else 'exact'}"
    few, many = found.split(is_bound)
    if len(few):
        dots = found.size_bytes[few], found.gb_per_s[few], found.time_us[few]
        panels.plot(*dots, label=words, gid=gid, **look)
    for some in many:
        # shifted, so that the two kinds of messages are next to each other
        size = np.median(found.size_bytes[some]) * (1.05 if is_bound else 0.95)
        low, middle, high = (
            np.quantile((found.gb_per_s[some], found.time_us[some]), share, axis=1)
            for share in (0.1, 0.5, 0.9)
        )
        ends = zip(low, high, strict=True)
        panels.plot([size, size], *ends, color=colour, lw=1.6, zorder=5, gid=f"{gid} p10-p90")
        label = f"over {MOST_DOTS} messages of one size, {words}: median, p10 to p90"
        panels.plot(size, *middle, label=label, gid=f"{gid} median", **look)


def _message(curves: Sequence[Curve]) -> tuple[str, str]:
    """Returns the chart's title and subtitle."""
    slowest = [_slowest(edges) for edges in _group(curves).values()]
    if not slowest:
        return "No backend was measured", ""
    curve = slowest[0]
    first, last = bytes_text(curve.size_bytes[0]), bytes_text(curve.size_bytes[-1])
    if len(slowest) > 1:
        named = slowest[:MOST_NAMED]
        rates = ", ".join(f"{one.label} {one.gb_per_s[-1]:.3g}" for one in named)
        times = ", ".join(f"{one.label} {time_text(one.latency_us[0] * 1e3)}" for one in named)
        return f"{last}: {rates} GB/s", f"{first}: {times}"
    title = (
        f"{curve.label}: {first} take {time_text(curve.latency_us[0] * 1e3)}, {last} reach "
        f"{curve.gb_per_s[-1]:.3g} GB/s"
    )
    subtitle = "each point is a median; two numbers, alpha and beta, describe the fitted line"
    link = curve.regimes[-1].link
    if len(curve.regimes) == 1 and link is not None and _is_sure(link):
        half = link.n_half_bytes
        if curve.size_bytes[0] < half < curve.size_bytes[-1]:
            subtitle = (
                f"below n½ = {bytes_text(round(half))}, most of the time is the fixed cost "
                "per message, alpha"
            )
    return title, subtitle


def _counts(curves: Sequence[Curve]) -> list[str]:
    counts = [int(n) for curve in curves if not curve.is_ceiling for n in curve.n]
    if not any(counts):
        return []
    low, high = min(counts), max(counts)
    if all(curve.kind == "simulated" for curve in curves):
        return ["One message per size, because repetitions do not differ on a virtual clock."]
    many = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return [f"Medians of n = {many} repetitions per size, without the warm-up."]


def _circumstances(metadata: dict[str, Any]) -> list[str]:
    """Returns a sentence about the interface, the paths and the load, if known."""
    parts = []
    if metadata.get("interface"):
        parts.append(f"sockets over {metadata['interface']}")
    if metadata.get("paths"):
        paths = ", ".join(f"{edge}: {path}" for edge, path in metadata["paths"].items())
        parts.append(f"paths between the GPUs: {paths}")
    if len(metadata.get("load") or ()) == 2:
        parts.append("load average {:.1f} before and {:.1f} after".format(*metadata["load"]))
    text = "; ".join(parts)
    return [f"{capitalise(text)}."] if text else []


def _trace_message(found: Achieved, trace: Trace) -> tuple[str, str]:
    if not len(found):
        queued = "NCCL does not report the times of messages"
        return queued if found.queued else "No message arrived", ""
    best = int(np.argmax(found.gb_per_s))
    bounds = np.count_nonzero(found.is_bound)
    title = (
        f"{count(len(found), 'message')}: at best {found.gb_per_s[best]:.3g} GB/s, with "
        f"{bytes_text(found.size_bytes[best])}"
    )
    moved = f"{bytes_text(int(found.size_bytes.sum()))} among {count(trace.world_size, 'rank')}"
    return title, f"{moved}; {bounds:,} of the bandwidths are lower bounds" if bounds else moved


def _left_out(found: Achieved) -> list[str]:
    why = {
        " (NCCL reports when a message was queued, not when it arrived)": found.queued,
        " of 0 bytes": found.empty,
        " that never arrived": found.unfinished,
    }
    return [
        f"Not drawn: {count(number, 'message')}{words}." for words, number in why.items() if number
    ]


# -- a table as curves


_CEILING_LINES: dict[str, Any] = {"tcp": (0, (6, 1.5, 1.2, 1.5)), "memcpy": (0, (1.2, 1.6))}


def pen(backend: str) -> Meaning:
    """Returns the look of a backend, which may be one that the user wrote."""
    if backend in read_table()["backend"]:
        return LOOKS[backend]
    look = LOOKS["other_backend"]
    return look._replace(name=backend or look.name)


@dataclass(frozen=True, eq=False)
class Curve:
    """The measurements of one link, in ascending order of message size.

    The columns are numpy arrays of equal length; bands have the shape (2, n), with p10 and p90.
    ``src`` and ``dst`` are global ranks, or -1 if all ranks take part. ``gb_per_s`` is the bus
    bandwidth. Each median is over ``n`` messages. ``on_one_gpu`` marks ranks that share a GPU and
    take turns, so that the curve does not describe a link.
    """

    pattern: str
    backend: str
    kind: str
    src: int
    dst: int
    size_bytes: Any
    latency_us: Any
    gb_per_s: Any
    latency_band_us: Any
    band_gb_per_s: Any
    n: Any
    on_one_gpu: bool = False

    @property
    def backend_name(self) -> str:
        """The backend's name, followed by a remark if the ranks share one GPU."""
        name = pen(self.backend).name
        return f"{name} over {ONE_GPU}" if self.on_one_gpu and self.backend == "nccl" else name

    @property
    def is_ceiling(self) -> bool:
        """Whether the curve is a reference line rather than a backend."""
        return self.backend in CEILINGS

    @property
    def name(self) -> str:
        """The backend, pattern and edge, for use in notes."""
        edge = f" {self.src} -> {self.dst}" if self.src >= 0 and self.dst >= 0 else ""
        return (
            f"{self.backend_name} {self.pattern}{edge}"
            f"{'' if self.kind == 'measured' else f', {self.kind}'}"
        )

    @property
    def label(self) -> str:
        """The backend, and any pattern other than "pingpong", for use in titles."""
        if self.pattern == "pingpong":
            return self.backend_name
        return f"{self.backend_name} {self.pattern}"

    @property
    def bus_factor(self) -> float:
        """The bus bandwidth divided by the algorithm bandwidth, which is 1 for messages."""
        return float(
            np.round(np.median(self.gb_per_s * self.latency_us / self.size_bytes * 1e3), 4)
        )

    def points(self, part: slice) -> tuple[Any, Any, Any]:
        """Returns the sizes, bandwidths and times in a slice."""
        return self.size_bytes[part], self.gb_per_s[part], self.latency_us[part]

    @property
    def parts(self) -> list[slice]:
        """One slice per regime."""
        return [slice(regime.first, regime.last + 1) for regime in self.regimes]

    @cached_property
    def regimes(self) -> list[Regime]:
        """The ranges of sizes, each with one fitted line; the line's times are in seconds."""
        low, high = (
            np.where(np.isnan(self.latency_band_us), self.latency_us, self.latency_band_us) * 1e-6
        )
        return find_regimes(self.size_bytes, self.latency_us * 1e-6, p10_s=low, p90_s=high)


def make_curves(table: Bandwidths) -> list[Curve]:
    """Returns the curves of a table, in the table's order.

    Zeros are omitted, because a logarithmic axis cannot show them.
    """
    curves = []
    on_one_gpu = ONE_GPU in table.metadata.get("paths", {}).values()
    drawable = (
        (table.columns["size_bytes"] > 0)
        & (table.columns["latency_us"] > 0)
        & (table.columns["algbw_gb_per_s"] != 0)
    )
    for key in table.series():
        mine = table.select(drawable & table.where(*key)).columns
        for kind in dict.fromkeys(mine["kind"].tolist()):
            rows = np.flatnonzero(mine["kind"] == kind)
            _, first = np.unique(mine["size_bytes"][rows], return_index=True)
            column = {name: values[rows[first]] for name, values in mine.items()}
            pattern, backend, src, dst = key
            if src >= 0:  # for messages, both bandwidths are equal, and one may be missing
                column["busbw_gb_per_s"] = column["algbw_gb_per_s"]
            factor = column["busbw_gb_per_s"] / column["algbw_gb_per_s"]
            curves.append(
                Curve(
                    pattern, backend, kind, src, dst, column["size_bytes"], column["latency_us"],
                    column["busbw_gb_per_s"],
                    np.stack([column["p10_latency_us"], column["p90_latency_us"]]),
                    np.stack([column["p10_algbw_gb_per_s"], column["p90_algbw_gb_per_s"]]) * factor,
                    column["n"], on_one_gpu,
                )
            )  # fmt: skip
    return curves


MARKERS = {"pingpong": "o", "oneway": ">", "exchange": "D", "shift": "s", "all_reduce": "^"}
OTHER_MARKER = "P"
FIT_LINE = (0, (4, 2))
NOT_MEASURED_LINE = (0, (3, 2))
MOST_NOTES = 3
MOST_ERROR = 0.25  # as a share of alpha
Groups = dict[tuple[str, str, str], list[Curve]]


def _group(curves: Sequence[Curve]) -> Groups:
    """Groups the curves, except ceilings, by (backend, pattern, kind).

    Each group contains the edges of one measurement.
    """
    groups: Groups = {}
    for curve in curves:
        if not curve.is_ceiling:
            groups.setdefault((curve.backend, curve.pattern, curve.kind), []).append(curve)
    return groups


def _slowest(edges: Sequence[Curve]) -> Curve:
    """Returns the edge on which the largest message takes the longest time."""
    return max(edges, key=lambda curve: curve.latency_us[-1])


def _draw_curves(
    curves: Sequence[Curve], panels: _Panels, *, name_half: bool = True
) -> list[Label]:
    """Draws all curves; labels n½ if there is only one measurement.

    Returns the labels to write at the right edge.
    """
    labels: list[Label] = []
    for curve in curves:
        if curve.is_ceiling:
            look = pen(curve.backend)
            for part in curve.parts:
                marker = "." if part.stop - part.start == 1 else ""
                panels.plot(
                    *curve.points(part),
                    color=look.light,
                    linestyle=_CEILING_LINES[curve.backend],
                    linewidth=1.5,
                    marker=marker,
                    gid=f"ceiling {curve.backend}",
                )
            labels.append((curve.gb_per_s[-1], look.name, look.light))
    groups = _group(curves)
    for (backend, pattern, kind), edges in groups.items():
        for curve in edges:
            _draw_edge(curve, panels, alone=len(edges) == 1)
        look, words = pen(backend), edges[0].backend_name
        if len({other for other in groups if other[0] == backend}) > 1:
            words += f" {pattern}"
        if len(edges) > 1:
            words += f", {len(edges)} edges"
        if kind != "measured":
            words += f", {kind}"
        height = np.median([curve.gb_per_s[-1] for curve in edges])
        labels.append((float(height), words, look.light))
    for edges in groups.values():
        _draw_fit(_slowest(edges), panels, name=name_half and len(groups) == 1)
    _explain(panels.rates, groups)
    return labels


def _explain(ax: Axes, groups: Groups) -> None:
    """Adds patterns, bands and fits to the legend; lines of backends have labels."""
    if not groups:
        return
    backends = {backend for backend, _, _ in groups}
    colour = pen(backends.pop()).light if len(backends) == 1 else style.INK
    for pattern in dict.fromkeys(pattern for _, pattern, _ in groups):
        marker = MARKERS.get(pattern, OTHER_MARKER)
        style.entry(ax, f"{pattern}: median", color=colour, marker=marker, markersize=5)
    if any(len(edges) == 1 for edges in groups.values()):
        pale = style.fade(colour, 0.78)
        style.entry(ax, "p10 to p90", color=pale, linewidth=8, solid_capstyle="butt")
    style.entry(ax, "fit: time = alpha + beta · size", linestyle=FIT_LINE, linewidth=1.1)


def _fit_notes(curves: Sequence[Curve]) -> list[str]:
    """Returns notes about the fits or, if there are several edges, about the slowest edge's fit.

    If any curve is interrupted, a note explains why.
    """
    notes = []
    for edges in list(_group(curves).values())[:MOST_NOTES]:
        curve = _slowest(edges)
        which = f"{curve.name}, the slowest of {len(edges)} edges" if len(edges) > 1 else curve.name
        fitted = [
            (curve.size_bytes[regime.last], regime.link)
            for regime in curve.regimes
            if regime.link is not None
        ]
        if len(curve.regimes) == 1 and fitted:
            notes.append(f"{which}: {link_text(fitted[0][1])}.")
        elif fitted:
            notes.append(f"{which}:")
            notes += [
                f"    up to {bytes_text(last)}: {link_text(link)};" for last, link in fitted[:-1]
            ]
            notes.append(f"    beyond: {link_text(fitted[-1][1])}.")
    if any(len(curve.regimes) > 1 for curve in curves):
        notes.append("Curves are interrupted at jumps that the fits on both sides do not explain.")
    return notes


def _is_sure(link: Link) -> bool:
    """Returns whether a fit's alpha is accurate enough to compute n½."""
    return not link.alpha_error_s > MOST_ERROR * link.alpha_s


def link_text(link: Link) -> str:
    """Formats a fit's alpha, 1 / beta and n½, with their standard errors if known."""
    alpha = f"alpha = {_with_error(link.alpha_s * 1e6, link.alpha_error_s * 1e6)} µs"
    # a fit of times that do not grow may leave a rounding error
    if not link.beta_s_per_byte or link.beta_s_per_byte <= link.beta_error_s_per_byte:
        return f"{alpha}, no cost that grows with size"
    relative = link.beta_error_s_per_byte / link.beta_s_per_byte
    rate = (
        f"1/beta = {_with_error(link.bandwidth_gb_per_s, link.bandwidth_gb_per_s * relative)} GB/s"
    )
    return f"{alpha}, {rate}, n½ = {bytes_text(round(link.n_half_bytes))}"


def _with_error(value: float, error: float) -> str:
    """Formats a number and its error, both rounded to the error's first digit."""
    if not error > 0 or not math.isfinite(error):
        return f"{value:.3g}"
    digits = max(0, min(6, -math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _draw_edge(curve: Curve, panels: _Panels, *, alone: bool) -> None:
    """Draws the medians of one edge, separately for each regime.

    If the edge is the only one, its band is also drawn.
    """
    look, name = pen(curve.backend), f"{curve.backend} {curve.pattern} {curve.src}>{curve.dst}"
    for part in curve.parts:
        panels.plot(
            *curve.points(part), color=look.light,
            linestyle="-" if curve.kind == "measured" else NOT_MEASURED_LINE,
            linewidth=1.6 if alone else 0.8,
            marker=MARKERS.get(curve.pattern, OTHER_MARKER), markersize=4 if alone else 2,
            gid=f"median {name}", zorder=4,
        )  # fmt: skip
        for panel, band in zip(panels, (curve.band_gb_per_s, curve.latency_band_us), strict=True):
            low, high = band[:, part]
            if alone and np.isfinite((low, high)).all():
                panel.fill_between(
                    curve.size_bytes[part],
                    low,
                    high,
                    color=look.light,
                    alpha=0.22,
                    linewidth=0,
                    zorder=2,
                    gid=f"band {name}",
                )


def _draw_fit(curve: Curve, panels: _Panels, *, name: bool) -> None:
    """Draws each regime's line, and marks n½ if n½ is within the regime's sizes.

    If ``name`` is True, n½ is also labelled.
    """
    for regime in curve.regimes:
        link = regime.link
        if link is None:
            continue
        low, high = curve.size_bytes[regime.first], curve.size_bytes[regime.last]
        sizes = np.geomspace(low, high, 100)
        times_s = link.alpha_s + link.beta_s_per_byte * sizes
        rates = curve.bus_factor * sizes / times_s * 1e-9
        panels.plot(
            sizes,
            rates,
            times_s * 1e6,
            color=style.INK,
            linestyle=FIT_LINE,
            linewidth=1.1,
            gid=f"fit {curve.name}",
            zorder=5,
        )
        half, rate = link.n_half_bytes, curve.bus_factor * link.bandwidth_gb_per_s / 2
        if low <= half <= high and _is_sure(link):
            panels.plot(
                half, rate, 2e6 * link.alpha_s, marker="D", linestyle="none", color=style.INK,
                markerfacecolor=style.GROUND, markersize=6,
                gid="n half", zorder=7,
            )  # fmt: skip
            if name:
                style.write_beside(
                    panels.rates,
                    f"n½ = {bytes_text(round(half))}\nhalf of 1/beta",
                    (half, rate),
                    (9, -6),
                    where="data",
                    va="top",
                    fontsize=style.letters(9),
                    zorder=7,
                    path_effects=[withStroke(linewidth=2.5, foreground=style.GROUND)],
                )


# -- panels and labels

Label = tuple[float, str, str]  # at the right edge: height in data coordinates, text, colour

BELOW = 0.74  # height of the gap and the lower panel, relative to the upper panel
GAP = 0.08
MOST_TICKS = 9
TICK_POINTS = 36  # the room for one tick label


class _Panels(NamedTuple):
    """Two panels that share an axis of sizes, with bandwidths above and times below."""

    rates: Axes
    times: Axes

    def plot(self, sizes: Any, gb_per_s: Any, time_us: Any, **look: Any) -> None:
        """Draws into both panels."""
        self.rates.plot(sizes, gb_per_s, **look)
        self.times.plot(sizes, time_us, **look)


def _add_panels(ax: Axes, sizes: Any) -> _Panels:
    """Adds the panel with the times below the axes."""
    below = ax.inset_axes((0, -BELOW, 1, BELOW - GAP), sharex=ax)
    most = min(MOST_TICKS, int(style.points(ax)[0] // TICK_POINTS) + 1)
    for panel, label in ((ax, "bandwidth, GB/s"), (below, "time per message")):
        panel.set_xscale("log", base=2)
        panel.set(ylabel=label, yscale="log")
        panel.grid(color=style.FAINT, linewidth=0.6)
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=most))
        panel.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        panel.yaxis.set_major_locator(LogLocator(base=10, numticks=7))
        panel.minorticks_off()
    ax.set_xlim(sizes.min() / 2**0.5, sizes.max() * 2**0.5)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    below.yaxis.set_major_formatter(lambda value, _: time_text(value * 1e3))
    ax.tick_params(labelbottom=False)
    below.set_xlabel("message size")
    return _Panels(ax, below)


LINE_POINTS = 11.0
OFFSET_POINTS = 12.0


def _write_labels(ax: Axes, labels: Sequence[Label]) -> None:
    """Writes labels to the right of axes that already have their final size and range."""
    to_points = 72 / ax.figure.dpi
    heights = [
        ax.transData.transform((ax.get_xlim()[1], height))[1] * to_points for height, _, _ in labels
    ]
    for (height, text, colour), own, place in zip(
        labels, heights, style.spread(heights, LINE_POINTS), strict=True
    ):
        style.write_beside(
            ax, text, (1, height), (OFFSET_POINTS, place - own), where=ax.get_yaxis_transform(),
            va="center", color=colour,
            fontsize=style.letters(8.5),
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1,
                        "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


# -- bandwidths of the messages of a trace

# if a larger share of a message's time passed before the wait, the bandwidth is a lower bound
LATE = 0.05
# the most messages of one size to draw as dots; if there are more, quantiles replace the dots
MOST_DOTS = 12
MOST_SIZES = 64


@dataclass(frozen=True, eq=False)
class Achieved:
    """Times and bandwidths of the messages that arrived, as numpy arrays of equal length.

    A message's time is from the later post to the end of the receiver's wait. If the receiver began
    to wait late, the message may have arrived earlier, so its bandwidth is a lower bound
    (``is_bound``). Three kinds of messages are left out and only counted: messages of 0 bytes,
    which have no bandwidth (``empty``), messages that never arrived (``unfinished``), and NCCL
    messages (``queued``), because an NCCL wait ends when the operation is queued on the GPU.
    """

    size_bytes: Any
    time_us: Any
    gb_per_s: Any
    is_bound: Any
    empty: int
    unfinished: int
    queued: int

    def __len__(self) -> int:
        """Returns the number of messages."""
        return len(self.size_bytes)

    def split(self, is_bound: bool) -> tuple[Ints, list[Ints]]:
        """Groups the rows of one kind by size.

        Returns the rows for sizes with few messages, and for each size with many messages a list of
        its rows. If there are many sizes, sizes within a factor of 2**(1/4) count as one.
        """
        here = np.flatnonzero(self.is_bound == is_bound)
        sizes = self.size_bytes[here]
        if len(np.unique(sizes)) > MOST_SIZES:
            sizes = np.round(4 * np.log2(sizes))
        of_size = [here[sizes == size] for size in np.unique(sizes)]
        few = [rows for rows in of_size if len(rows) <= MOST_DOTS]
        return np.concatenate([*few, here[:0]]), [rows for rows in of_size if len(rows) > MOST_DOTS]


def achieved(trace: Trace) -> Achieved:
    """Computes the times and bandwidths of the messages in a trace."""
    events, messages = trace.events, trace.messages
    send, recv = messages.send, messages.recv
    start, end, watched = (
        np.maximum(events.post_ns[send], events.post_ns[recv]),
        events.done_ns[recv],
        events.wait_ns[recv],
    )
    sizes = events.size_bytes[send]
    queued = trace.metadata.get("backend") == "nccl"
    arrived = (events.status[recv] == OK) & (end != NONE) & (watched != NONE) & (end > start)
    drawn = arrived & (sizes > 0) & (not queued)
    time_ns = (end - start)[drawn]
    unwatched_ns = np.maximum(watched - start, 0)[drawn]
    return Achieved(
        sizes[drawn], time_ns * 1e-3, sizes[drawn] / time_ns, unwatched_ns > LATE * time_ns,
        0 if queued else int(np.count_nonzero(arrived & (sizes <= 0))),
        0 if queued else int(np.count_nonzero(~arrived)),
        len(messages) if queued else 0,
    )  # fmt: skip


# -- published figures

# the share of the chart's width, at the right edge, for figures about "large" messages
PUBLISHED_SHARE = 0.12
PUBLISHED_LOOK: dict[str, Any] = {
    "color": LOOKS["nccl"].light, "linestyle": (0, (3, 2)), "marker": "s", "markersize": 4.5,
    "markerfacecolor": style.GROUND,
}  # fmt: skip


def _draw_published(panels: _Panels) -> list[Label]:
    """Draws the published figures.

    Times are drawn as points, and bandwidths of large messages as dashes at the right edge. Returns
    the labels of the dashes.
    """
    ax, below = panels
    ink, labels = pen("nccl").light, []
    times: dict[tuple[str, str], list[Any]] = {}
    low, high = ax.get_xlim()
    for figure in FIGURES:
        rate, size = figure.bandwidth_gb_per_s, figure.size_bytes
        if rate is not None:
            look = PUBLISHED_LOOK | {"marker": "", "linewidth": 1.6, "zorder": 3}
            place, gid = (1 - PUBLISHED_SHARE, 1), f"published {figure.source}"
            ax.plot(place, [rate, rate], transform=ax.get_yaxis_transform(), gid=gid, **look)
            labels.append((rate, f"{rate:g}: {figure.link} ({figure.source})", ink))
        elif size is not None and low <= size <= high:
            shown = times.setdefault((figure.link, figure.source), [])
            shown.append((size, figure.latency_us))
    for (link, source), shown in times.items():
        below.plot(
            *zip(*shown, strict=True),
            linewidth=1.2,
            gid=f"published {link} ({source})",
            zorder=3,
            **PUBLISHED_LOOK,
        )
        beside = len(shown) == 1  # the label of several points is below them
        style.write_beside(
            below, link, shown[0], (7, 0) if beside else (-3, -6), where="data",
            va="center" if beside else "top", color=ink,
            fontsize=style.letters(8), zorder=8,
            bbox={"facecolor": style.GROUND, "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )  # fmt: skip
    return labels


# -- how busy the stages of a generation ring are

USE_INCHES = (7.2, 3.8)
# matplotlib types its line styles as literals
_LINES: tuple[tuple[bool, str, str, str, Any], ...] = (
    (False, "synchronous", LOOKS["activations"].light, "o", "-"),
    (True, "asynchronous", LOOKS["across"].light, "s", "--"),
)


class MeasuredUse(NamedTuple):
    """A measured point.

    Attributes:
        num_inner_iterations: the number of inner iterations.
        async_comm: whether messages were asynchronous.
        use: the share of the time in which stages worked.
    """

    num_inner_iterations: int
    async_comm: bool
    use: float


def plot_inner_iterations(
    num_stages: int,
    measured: Sequence[MeasuredUse] = (),
    *,
    metadata: dict[str, Any] | None = None,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Plots how busy a stage is while decoding, against the number of inner iterations.

    Lines show the closed forms (``steady_use``), and filled points show measurements. A cross at 0
    marks a setting for which the ring never finishes.

    Args:
        num_stages: the number of stages, at least 2.
        measured: the measured points, if any.
        metadata: the metadata of a measured trace, for the last line of text, or None.
        ax: the axes to draw on, or None to create a new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes. Call ``ax.figure.savefig(...)`` to save the figure.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> plot_inner_iterations(4).get_title(loc="left")
        'With 4 stages, 4 batches in flight keep all of them busy'
    """
    return sheet.show(
        [Picture(lambda ax: _draw_use(num_stages, measured, metadata, ax), *USE_INCHES)], ax, **look
    )


def _draw_use(
    num_stages: int, measured: Sequence[MeasuredUse], metadata: dict[str, Any] | None, ax: Axes
) -> None:
    turns = range(1, 2 * num_stages + 1)
    for async_comm, name, colour, marker, line in _LINES:
        look: dict[str, Any] = {
            "color": colour, "marker": marker, "markersize": 7, "markerfacecolor": style.GROUND
        }  # fmt: skip
        uses = [float(steady_use(num_stages, number, async_comm)) for number in turns]
        ax.plot(turns, uses, line, linewidth=1.6, zorder=3, label=f"{name}, closed form", **look)
        stuck = [(number, 0) for number, use in zip(turns, uses, strict=True) if use == 0]
        own = [point[::2] for point in measured if point.async_comm is async_comm]
        size = 110 if async_comm else 60
        cross: Any = {"s": size, "marker": "x", "linewidths": 1.8, "label": "never ends"}
        dot: Any = {"s": 26, "marker": marker, "linewidths": 0, "label": "filled: measured"}
        for points, mark in ((own, dot), (stuck, cross)):
            if points:
                ax.scatter(*zip(*points, strict=True), color=colour, zorder=5, **mark)
    ax.set(
        xlabel="inner iterations (batches in flight)",
        ylabel="share of the time in which a stage works",
        xlim=(0.6, 2 * num_stages + 0.4),
        ylim=(-0.04, 1.06),
    )
    ax.xaxis.set_major_locator(MultipleLocator(1 if num_stages <= 12 else num_stages // 6))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(axis="y", color=style.GRID)
    style.dress(
        ax,
        f"With {num_stages} stages, {num_stages} batches in flight keep all of them busy",
        subtitle=(
            f"fewer leave stages idle; {num_stages + 1} or more (asynchronous: {2 * num_stages}) "
            "jam the ring"
        ),
        metadata=metadata or {"source": "closed forms; nothing was run"},
    )
