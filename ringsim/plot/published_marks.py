"""What others published of NCCL, in a chart of a machine that has none: dashed, hollow, and named with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from matplotlib.lines import Line2D

from ringsim.plot.curves import pen
from ringsim.published import FIGURES, PublishedFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_published", "published_legend", "published_notes"]

DASHES: Final = (0, (3, 2))
SHARE: Final = 0.12  # of the chart's width, at the right: where figures for "large" messages stand


def draw_published(ax: Axes, below: Axes) -> list[tuple[float, str, str]]:
    """Draws the published figures: times as points, bandwidths of large messages as dashes at the right edge.

    Args:
        ax: the panel of bandwidths.
        below: the panel of times; both have their range of sizes.

    Returns:
        Labels for the right edge of the upper panel: height, words and colour of each.
    """
    look, labels = pen("nccl"), []
    times: dict[str, list[PublishedFigure]] = {}
    for figure in FIGURES:
        if figure.latency_us is not None:
            times.setdefault(f"{figure.link} ({figure.source})", []).append(figure)
        elif figure.bandwidth_gb_per_s is not None:
            ax.plot(
                (1 - SHARE, 1), [figure.bandwidth_gb_per_s] * 2, transform=ax.get_yaxis_transform(), color=look.colour, linestyle=DASHES,
                linewidth=1.6, gid=f"published {figure.source}", zorder=3,
            )  # fmt: skip
            labels.append((figure.bandwidth_gb_per_s, f"{figure.bandwidth_gb_per_s:g}: {figure.link} ({figure.source})", look.ink))
    low, high = ax.get_xlim()
    for name, figures in times.items():
        shown = [(figure.size_bytes, figure.latency_us) for figure in figures if figure.size_bytes and low <= figure.size_bytes <= high]
        if shown:
            below.plot(
                *zip(*shown, strict=True), color=look.colour, linestyle=DASHES, linewidth=1.2, marker="s", markersize=4.5,
                markerfacecolor="white", gid=f"published {name}", zorder=3,
            )  # fmt: skip
            beside = len(shown) == 1  # a row has its name below it
            below.annotate(
                figures[0].link, shown[-1] if beside else shown[0], xytext=(7, 0) if beside else (-3, -6), textcoords="offset points",
                va="center" if beside else "top", fontsize=8, color=look.ink, zorder=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
            )  # fmt: skip
    return labels


def published_notes() -> list[str]:
    """Names the sources of the points; those of the dashes stand beside them."""
    points = {figure.link: figure.source for figure in FIGURES if figure.latency_us is not None}
    return [f"Published times: {'; '.join(f'{link} ({source})' for link, source in points.items())}."]


def published_legend() -> list[Any]:
    """Returns the legend's entry."""
    label = "NCCL, published by others (not measured here)"
    return [Line2D([], [], color=pen("nccl").colour, linestyle=DASHES, marker="s", markersize=4.5, markerfacecolor="white", label=label)]
