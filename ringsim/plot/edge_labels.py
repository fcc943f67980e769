"""Labels beside the arrows between nodes, each where it covers neither a node, nor another label, nor, if it can be, an arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.plot.paths import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Box", "bowed", "label_edges", "words_box"]

Box = tuple[float, float, float, float]  # left, bottom, right, top, in the axes' data

LABEL_SIZE: Final = 8.5
BOW: Final = 0.18  # how far an arrow bows to the right of its way, as a share of its length
STEPS: Final = 49
ALONG: Final = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)  # where beside the arrow a label may stand, as shares of its length
AWAY: Final = (0.05, 0.15, 0.3, 0.5)  # and how far from it
RAISED: Final = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0)  # and then how far up or down, as shares of its height
CLEAR: Final = 0.03  # between two boxes, at least
# What speaks against a place, by how far it is from the arrow's middle: away from it, up or down, towards the centre, each point covered.
FAR_AWAY: Final = 3.0
OFF: Final = 0.3
INSIDE: Final = 0.2
ON_ITS_ARROW: Final = 0.05
ON_ANOTHER: Final = 0.15


def bowed(start: Points, end: Points) -> Points:
    """Path of an arrow that bows to the right of its way, so that the way back lies apart; shape (points, 2).

    It is the one that matplotlib draws with ``connectionstyle="arc3,rad=0.18"``.

    Example:
        >>> bowed(np.array([0.0, 0.0]), np.array([0.0, 1.0]))[24].round(3).tolist()  # its middle
        [0.09, 0.5]
    """
    way = end - start
    control = (start + end) / 2 + BOW * np.array([way[1], -way[0]])
    t = np.linspace(0, 1, STEPS)[:, None]
    path: Points = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return path


def words_box(ax: Axes, x: float, y: float, text: str) -> Box:
    """Writes words at a place, centred; returns the room that they take."""
    written = ax.text(x, y, text, ha="center", va="center", fontsize=LABEL_SIZE, zorder=7)
    box = written.get_window_extent().transformed(ax.transData.inverted())
    return float(box.x0), float(box.y0), float(box.x1), float(box.y1)


def label_edges(ax: Axes, labels: Sequence[tuple[str, Points]], paths: Sequence[Points], taken: Sequence[Box]) -> int:
    """Writes a label beside each of some arrows, the most important first.

    Args:
        ax: the axes, which have their size and range already.
        labels: words of each, and the path of its arrow.
        paths: of all arrows: a label covers one only where there is no other room.
        taken: what no label may cover: nodes, and words that are there already.

    Returns:
        How many found no room, and are not written.
    """
    left, right = sorted(ax.get_xlim())
    bottom, top = sorted(ax.get_ylim())
    boxes = list(taken)
    missing = 0
    points = np.concatenate([np.empty((0, 2)), *paths])
    owner = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    for text, path in labels:
        against = np.where(owner == next(index for index, other in enumerate(paths) if other is path), ON_ITS_ARROW, ON_ANOTHER)
        written = ax.text(0, 0, text, ha="center", va="center", fontsize=LABEL_SIZE, zorder=5, linespacing=0.95)
        extent = written.get_window_extent().transformed(ax.transData.inverted())
        best = None
        for cost, (x, y) in _places(path, extent.width, extent.height):
            box = (x - extent.width / 2, y - extent.height / 2, x + extent.width / 2, y + extent.height / 2)
            inside = left <= box[0] and box[2] <= right and bottom <= box[1] and box[3] <= top
            if not inside or (best is not None and cost >= best[0]) or any(_meet(box, other) for other in boxes):
                continue
            cost += float(against[_covered(box, points)].sum())
            if best is None or cost < best[0]:
                best = cost, box, (x, y)
        if best is None:
            written.remove()
            missing += 1
        else:
            written.set_position(best[2])
            boxes.append(best[1])
    return missing


def _places(path: Points, width: float, height: float) -> Iterator[tuple[float, tuple[float, float]]]:
    """Yields middles of a box beside a path, or on it, each with what speaks against it."""
    for share in ALONG:
        index = round(share * (len(path) - 1))
        point, way = path[index], path[min(index + 1, len(path) - 1)] - path[max(index - 1, 0)]
        normal = np.array([way[1], -way[0]]) / max(float(np.hypot(*way)), 1e-9)
        reach = (abs(normal[0]) * width + abs(normal[1]) * height) / 2  # from the middle of the box to its side, along the normal
        off_middle = abs(share - 0.5)
        yield off_middle + FAR_AWAY * AWAY[0], (float(point[0]), float(point[1]))
        for side in (normal, -normal):
            towards_centre = INSIDE if float(side @ point) < 0 else 0.0
            for away in AWAY:
                x, y = point + side * (away + reach)
                for raised in RAISED:
                    yield off_middle + FAR_AWAY * away + towards_centre + OFF * abs(raised), (float(x), float(y + raised * height))


def _meet(one: Box, other: Box) -> bool:
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return min(wide, high) > -CLEAR


def _covered(box: Box, points: Points) -> Points:
    """Marks the points that a box covers."""
    x, y = points[:, 0], points[:, 1]
    inside: Points = (x >= box[0]) & (x <= box[2]) & (y >= box[1]) & (y <= box[3])
    return inside
