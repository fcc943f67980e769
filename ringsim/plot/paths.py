"""Paths between the nodes of a ring: points along an arc or a chord, and the ribbons and arrows that follow them.

A path is an array of points, shape (points, 2), in the axes' coordinates; the first rank is at the top and the ranks go clockwise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Points", "arc", "arrow", "beside", "chord", "node_angle", "place", "ribbon"]

Points = npt.NDArray[Any]
STEPS: Final = 48


def node_angle(rank: int, world_size: int) -> float:
    """Angle of a rank in radians, counted clockwise from the top.

    Example:
        >>> node_angle(0, 4), round(node_angle(1, 4), 3)  # the top; the right
        (0.0, 1.571)
    """
    return 2 * float(np.pi) * rank / world_size


def place(angle: Any, radius: float = 1.0) -> Points:
    """Point, or points, at an angle clockwise from the top; shape (2,) or (points, 2).

    Example:
        >>> place(0.0).tolist()
        [0.0, 1.0]
    """
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)


def arc(start: float, end: float, radius: float = 1.0) -> Points:
    """Path along the circle from one angle to another, either way round."""
    return place(np.linspace(start, end, STEPS), radius)


def chord(start: Points, end: Points, *, pull: float, gap: float) -> Points:
    """Path between two nodes that bows towards the centre, and a little to the left of its way, so that the way back lies apart.

    Args:
        start: first node.
        end: last node.
        pull: how far it bows to the centre: 0 not at all, 1 all the way.
        gap: how far from both nodes it stays.

    Returns:
        A path.
    """
    way = end - start
    control = (start + end) / 2 * (1 - pull) + 0.12 * np.array([-way[1], way[0]])
    t = np.linspace(0, 1, 4 * STEPS)[:, None]
    path = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    clear = (np.hypot(*(path - start).T) >= gap) & (np.hypot(*(path - end).T) >= gap)
    return path[clear] if clear.sum() >= 2 else path


def ribbon(path: Points, width: float) -> Points:
    """Outline of a band of a width along a path, a closed polygon."""
    return np.concatenate([beside(path, width / 2), beside(path, -width / 2)[::-1]])


def arrow(path: Points, width: float, *, head: float) -> Points:
    """Outline of an arrow along a path, a closed polygon whose tip is the path's last point.

    Args:
        path: the path.
        width: of the shaft.
        head: length of the head, and about its width; at most half the path is head.

    Returns:
        A polygon; point ``len // 2`` is the tip.
    """
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    neck = along[-1] - min(head, along[-1] / 2)
    neck_point = np.array([np.interp(neck, along, path[:, 0]), np.interp(neck, along, path[:, 1])])
    shaft = np.concatenate([path[along < neck], neck_point[None]])
    normals = _normals(np.concatenate([shaft, path[-1:]]))[:-1]
    side = normals * width / 2
    wing = normals[-1] * max(head * 0.45, width * 0.75)
    return np.concatenate([shaft + side, [neck_point + wing, path[-1], neck_point - wing], (shaft - side)[::-1]])


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
