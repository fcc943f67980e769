"""Computes paths: arrays of points of shape (points, 2), in the axes' coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[Any]
STEPS = 97


def node_angle(rank: int, world_size: int) -> float:
    """Returns the angle of a rank in radians, clockwise from the top."""
    return 2 * float(np.pi) * rank / world_size


def place(angle: Any, radius: float = 1.0) -> Points:
    """Returns points, of shape (2,) or (points, 2), at angles measured clockwise from the top."""
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)


def node(rank: int, world_size: int) -> Points:
    """Returns a rank's position on the circle, or the circle's centre if there is only one rank."""
    return place(node_angle(rank, world_size), 1.0 if world_size > 1 else 0.0)


def arc(start: float, end: float, radius: float) -> Points:
    """Returns a path along the circle between two angles, in either direction."""
    return place(np.linspace(start, end, STEPS), radius)


def bow(start: Points, end: Points, control: Points, steps: int = STEPS) -> Points:
    """Returns a path between two points that bends towards a control point.

    The path is a quadratic Bezier curve of shape (steps, 2).
    """
    t = np.linspace(0, 1, steps)[:, None]
    return (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end


def chord(start: Points, end: Points, *, pull: float, gap: float) -> Points:
    """Returns a path between two nodes that bends towards the centre.

    The path also bends a little to the left, so that it does not coincide with the path back.
    ``pull`` sets how far the path bends, from 0 (not at all) to 1 (to the centre). The path keeps a
    distance of ``gap`` from both nodes.
    """
    way = end - start
    path = bow(
        start, end, (start + end) / 2 * (1 - pull) + 0.12 * np.array([-way[1], way[0]]), 4 * STEPS
    )
    clear = (np.hypot(*(path - start).T) >= gap) & (np.hypot(*(path - end).T) >= gap)
    return path[clear] if clear.sum() >= 2 else path


def arrow(path: Points, width: float, *, head: float) -> Points:
    """Returns the outline of an arrow along a path.

    The outline is a closed polygon. Its point ``len // 2`` is the tip, at the end of the path. The
    arrowhead is ``head`` long and about as wide, but takes at most half of the path.
    """
    along = np.append(0.0, np.cumsum(np.hypot(*np.diff(path, axis=0).T)))
    is_shaft = along <= along[-1] - min(head, along[-1] / 2)
    shaft, normals = path[is_shaft], _normals(path)[is_shaft]
    side, wing = normals * width / 2, normals[-1] * max(head * 0.45, width * 0.75)
    tip = [shaft[-1] + wing, path[-1], shaft[-1] - wing]
    return np.concatenate([shaft + side, tip, (shaft - side)[::-1]])


def beside(path: Points, distance: float) -> Points:
    """Returns a parallel path at a distance to the left (if negative, to the right)."""
    return path + distance * _normals(path)


def _normals(path: Points) -> Points:
    """Returns the unit vector that points to the left of a path, at each of its points."""
    way = np.gradient(path, axis=0)
    normal = np.stack([-way[:, 1], way[:, 0]], axis=1)
    length = np.hypot(*normal.T)[:, None]
    unit: Points = np.divide(normal, length, out=np.zeros_like(normal), where=length > 0)
    return unit
