"""The lines of a bandwidth chart: medians and their band, the fit through them, and the ceilings of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from ringsim.link import Link
from ringsim.plot import style
from ringsim.plot.curves import Curve, pen
from ringsim.traces.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curve_legend", "draw_curves", "fit_notes", "is_sure", "measured_groups"]

MARKERS: Final = {"pingpong": "o", "oneway": ">", "exchange": "D", "shift": "s", "all_reduce": "^"}
OTHER_MARKER: Final = "P"
FIT_LINE: Final = (0, (4, 2))
NOT_MEASURED_LINE: Final = (0, (3, 2))
MOST_NOTES: Final = 3
MOST_ERROR: Final = 0.25  # of alpha
Groups = dict[tuple[str, str, str], list[Curve]]


def measured_groups(curves: Sequence[Curve]) -> Groups:
    """Returns the curves that are no ceilings by (backend, pattern, kind): the edges of one measurement."""
    groups: Groups = {}
    for curve in curves:
        if not curve.is_ceiling:
            groups.setdefault((curve.backend, curve.pattern, curve.kind), []).append(curve)
    return groups


def draw_curves(curves: Sequence[Curve], ax: Axes, below: Axes, *, name_half: bool = True) -> list[tuple[float, str, str]]:
    """Draws curves into both panels.

    Args:
        curves: ceilings and others.
        ax: the panel of bandwidths.
        below: the panel of times.
        name_half: write beside n½ what it is, where there is a single measurement.

    Returns:
        Labels for the right edge: height, words and colour of each.
    """
    labels = []
    for curve in curves:
        if curve.is_ceiling:
            look = pen(curve.backend)
            for panel, values in ((ax, curve.gb_per_s), (below, curve.latency_us)):
                for regime in curve.regimes:
                    part = slice(regime.first, regime.last + 1)
                    panel.plot(
                        curve.size_bytes[part], values[part], color=look.colour, linestyle=look.line, linewidth=1.5,
                        marker="." if regime.first == regime.last else "", gid=f"ceiling {curve.backend}",
                    )  # fmt: skip
            labels.append((float(curve.gb_per_s[-1]), look.name, look.ink))
    groups = measured_groups(curves)
    for (backend, pattern, kind), edges in groups.items():
        for curve in edges:
            _draw_edge(curve, ax, below, alone=len(edges) == 1)
        look = pen(backend)
        words = look.name if len({other for other in groups if other[0] == backend}) == 1 else f"{look.name} {pattern}"
        several = (f", {len(edges)} edges" if len(edges) > 1 else "") + (f", {kind}" if kind != "measured" else "")
        labels.append((float(np.median([curve.gb_per_s[-1] for curve in edges])), words + several, look.ink))
    slowest = [max(edges, key=lambda curve: float(curve.latency_us[-1])) for edges in groups.values()]
    for curve in slowest:
        _draw_fit(curve, ax, below, name=name_half and len(slowest) == 1)
    return labels


def curve_legend(curves: Sequence[Curve]) -> list[Any]:
    """Returns the legend's entries: what the marks mean. Which line is whose stands beside the lines."""
    groups = measured_groups(curves)
    if not groups:
        return []
    colour = pen(next(iter(groups))[0]).colour if len({backend for backend, _, _ in groups}) == 1 else style.INK
    entries: list[Any] = [
        Line2D([], [], color=colour, marker=MARKERS.get(pattern, OTHER_MARKER), markersize=5, label=f"{pattern}: median")
        for pattern in dict.fromkeys(pattern for _, pattern, _ in groups)
    ]
    if any(len(edges) == 1 for edges in groups.values()):
        entries.append(Patch(facecolor=colour, alpha=0.22, linewidth=0, label="p10 to p90"))
    entries.append(Line2D([], [], color=style.INK, linestyle=FIT_LINE, linewidth=1.1, label="fit: time = alpha + beta · size"))
    return entries


def fit_notes(curves: Sequence[Curve]) -> list[str]:
    """Returns the numbers of the fits in sentences, of the slowest edge where there are several; and what a break means."""
    groups = list(measured_groups(curves).values())
    notes = []
    for edges in groups[:MOST_NOTES]:
        curve = max(edges, key=lambda curve: float(curve.latency_us[-1]))
        which = f"{curve.name}, the slowest of {len(edges)} edges" if len(edges) > 1 else curve.name
        fitted = [(curve.size_bytes[regime.last], regime.link) for regime in curve.regimes if regime.link is not None]
        if len(curve.regimes) == 1 and fitted:
            notes.append(f"{which}: {link_text(fitted[0][1])}.")
        elif fitted:
            notes.append(f"{which}:")
            notes += [f"    up to {bytes_text(last)}: {link_text(link)};" for last, link in fitted[:-1]]
            notes.append(f"    beyond: {link_text(fitted[-1][1])}.")
    if any(len(curve.regimes) > 1 for curve in curves):
        notes.append("Interrupted where the time jumps by more than the fits of both sides explain.")
    return notes


def is_sure(link: Link) -> bool:
    """Tells whether a fit knows its alpha well enough for more to be said of it: n½ follows from it."""
    return not link.alpha_error_s > MOST_ERROR * link.alpha_s


def link_text(link: Link) -> str:
    """Writes a fit: alpha, 1 / beta and n½, with one standard error each where it is known."""
    alpha = f"alpha = {_with_error(link.alpha_s * 1e6, link.alpha_error_s * 1e6)} µs"
    if not link.beta_s_per_byte:
        return f"{alpha}, no cost that grows with the size"
    relative = link.beta_error_s_per_byte / link.beta_s_per_byte
    rate = f"1/beta = {_with_error(link.bandwidth_gb_per_s, link.bandwidth_gb_per_s * relative)} GB/s"
    return f"{alpha}, {rate}, n½ = {bytes_text(round(link.n_half_bytes))}"


def _with_error(value: float, error: float) -> str:
    """A number and its error: both end where the error has its first digit."""
    if not error > 0 or not math.isfinite(error):
        return f"{value:.3g}"
    digits = max(0, min(6, -math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _draw_edge(curve: Curve, ax: Axes, below: Axes, *, alone: bool) -> None:
    """Draws the medians of one edge, each regime by itself, and the band where the edge stands alone."""
    look, name = pen(curve.backend), f"{curve.backend} {curve.pattern} {curve.src}>{curve.dst}"
    line = look.line if curve.kind == "measured" else NOT_MEASURED_LINE
    marker = MARKERS.get(curve.pattern, OTHER_MARKER)
    for panel, values, band in ((ax, curve.gb_per_s, curve.band_gb_per_s), (below, curve.latency_us, curve.latency_band_us)):
        for regime in curve.regimes:
            part = slice(regime.first, regime.last + 1)
            panel.plot(
                curve.size_bytes[part], values[part], color=look.colour, linestyle=line, linewidth=1.6 if alone else 0.8,
                marker=marker, markersize=4 if alone else 2, gid=f"median {name}", zorder=4,
            )  # fmt: skip
            if alone and np.isfinite(band[:, part]).all():
                panel.fill_between(
                    curve.size_bytes[part], *band[:, part], color=look.colour, alpha=0.22, linewidth=0, gid=f"band {name}", zorder=2
                )


def _draw_fit(curve: Curve, ax: Axes, below: Axes, *, name: bool) -> None:
    """Draws the line of each regime, and marks n½ where it lies among the regime's sizes; with its name if asked to."""
    for regime in curve.regimes:
        link = regime.link
        if link is None:
            continue
        ends = curve.size_bytes[regime.first], curve.size_bytes[regime.last]
        sizes = np.geomspace(*ends, 100)
        times_s = link.alpha_s + link.beta_s_per_byte * sizes
        for panel, values in ((ax, curve.bus_factor * sizes / times_s * 1e-9), (below, times_s * 1e6)):
            panel.plot(sizes, values, color=style.INK, linestyle=FIT_LINE, linewidth=1.1, gid=f"fit {curve.name}", zorder=5)
        half = link.n_half_bytes
        if ends[0] <= half <= ends[1] and is_sure(link):
            points = ((ax, curve.bus_factor * link.bandwidth_gb_per_s / 2), (below, 2e6 * link.alpha_s))
            for panel, value in points:
                panel.plot(half, value, "D", color=style.INK, markerfacecolor="white", markersize=6, gid="n half", zorder=7)
            if name:
                text = f"n½ = {bytes_text(round(half))}\nhalf of 1/beta"
                ax.annotate(
                    text, (half, points[0][1]), xytext=(9, -6), textcoords="offset points", va="top", fontsize=9, zorder=7,
                    path_effects=[withStroke(linewidth=2.5, foreground="white")],
                )  # fmt: skip
