"""Labels at the right edge of a chart, each beside the height that it names, moved apart where they would cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.plot.style import LETTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["label_heights", "spread"]

LABEL_SIZE: Final = 8.5
LINE_POINTS: Final = 11.0
OFFSET_POINTS: Final = 12.0


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Moves heights apart until neighbours are ``least`` from each other, none further than needed, and none past another.

    Example:
        >>> spread([0.0, 1.0, 100.0], 10.0)
        [-4.5, 5.5, 100.0]
    """
    order = np.argsort(heights, kind="stable")
    groups: list[tuple[float, int]] = []  # middle and number of labels that stand together
    for height in np.asarray(heights, dtype=np.float64)[order]:
        groups.append((float(height), 1))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < least * (groups[-1][1] + groups[-2][1]) / 2:
            (low, few), (high, more) = groups[-2], groups[-1]
            groups[-2:] = [((low * few + high * more) / (few + more), few + more)]
    places = [middle + least * (index - (number - 1) / 2) for middle, number in groups for index in range(number)]
    found = np.empty(len(places))
    found[order] = places
    return [float(place) for place in found]


def label_heights(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> float:
    """Writes labels to the right of axes that have their size and range already.

    Args:
        ax: the axes.
        labels: for each its height in the axes' data, its words, and their colour.

    Returns:
        The room that they take, in points.
    """
    if not labels:
        return 0.0
    to_points = 72 / ax.figure.dpi
    heights = [float(ax.transData.transform((ax.get_xlim()[1], height))[1]) * to_points for height, _, _ in labels]
    for (height, text, colour), own, place in zip(labels, heights, spread(heights, LINE_POINTS), strict=True):
        ax.annotate(
            text, (1, height), xycoords=ax.get_yaxis_transform(), xytext=(OFFSET_POINTS, place - own), textcoords="offset points",
            ha="left", va="center", fontsize=LABEL_SIZE, color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip
    return OFFSET_POINTS + LABEL_SIZE * LETTER * max(len(text) for _, text, _ in labels)
