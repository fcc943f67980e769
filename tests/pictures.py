"""Functions that read the contents of a picture from its axes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.transforms import Bbox


def words(ax: Axes) -> str:
    """Returns the text in a picture, except for the title, axes and legend."""
    return "\n".join(text.get_text() for panel in (ax, *ax.child_axes) for text in panel.texts)


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def drawn(artists: Any, prefix: str) -> dict[str, Any]:
    """Returns artists by id, if the id has this prefix."""
    return {str(one.get_gid()): one for one in artists if (one.get_gid() or "").startswith(prefix)}


def boxes(
    ax: Axes, gid: str | None = None, row: int | None = None
) -> list[tuple[float, float, float, float]]:
    """Returns (left, right, top, bottom) of the boxes with an id and in a row, sorted."""
    corners = [
        path.vertices
        for group in ax.collections
        if isinstance(group, PolyCollection) and gid in (None, group.get_gid())
        for path in group.get_paths()
    ]
    found = sorted((c[:, 0].min(), c[:, 0].max(), c[:4, 1].min(), c[:4, 1].max()) for c in corners)
    return [box for box in found if row is None or abs((box[2] + box[3]) / 2 - row) < 0.5]


def spans(ax: Axes, gid: str, row: int | None = None) -> list[tuple[float, float]]:
    """Returns (left, right) of the boxes with an id, optionally in one row."""
    return [(round(box[0], 6), round(box[1], 6)) for box in boxes(ax, gid, row)]


def bars(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    """Returns (left, right) of the boxes, by their label in the legend."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in ax.collections:
        if isinstance(group, PolyCollection):
            look = to_hex(group.get_facecolor()[0]), group.get_hatch()
            for patch in ax.get_legend().get_patches():
                if look == (to_hex(patch.get_facecolor()), patch.get_hatch()):
                    found.setdefault(patch.get_label(), []).extend(spans(ax, group.get_gid()))
    return found


def overlap(one: Bbox, other: Bbox) -> float:
    """Returns the overlap of two boxes in pixels, zero or negative if they do not overlap."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    return float(min(width, min(one.y1, other.y1) - max(one.y0, other.y0)))


def assert_apart(found: list[Bbox], most: float = 1.5) -> None:
    assert all(overlap(one, other) < most for one, other in combinations(found, 2))


def assert_within(ax: Axes) -> list[Bbox]:
    """Checks that no text is cut off; returns the boxes of text outside title and axes."""
    ax.figure.canvas.draw()
    beside = [*ax.texts, *(ax.get_legend().get_texts() if ax.get_legend() else [])]
    canvas, (low, high) = ax.figure.bbox, sorted(ax.get_ylim())
    ticks = [label for label in ax.get_yticklabels() if low <= label.get_position()[1] <= high]
    ticks = ticks if ax.axison else []
    for text in [*beside, *ticks, ax.title, *([ax.xaxis.label] if ax.axison else [])]:
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1, text
            assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1, text
    return [text.get_window_extent() for text in beside if text.get_text()]


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009: severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
CONTRAST = 4.5  # WCAG AA, for readable text


def xyz(colour: Any, vision: str = "normal") -> np.ndarray:
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1)


def lab(colour: Any, vision: str = "normal") -> np.ndarray:
    """Returns CIE L*a*b* of a colour with this vision; a distance of 2 is barely visible."""
    share = xyz(colour, vision) / (TO_XYZ @ np.ones(3))
    f = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: Any, other: Any) -> float:
    """Returns the distance of two colours for the vision that separates them least."""
    return min(float(np.linalg.norm(lab(one, vision) - lab(other, vision))) for vision in VISION)


def contrast(one: Any, other: Any) -> float:
    """Returns the contrast ratio of two colours, from 1 to 21."""
    dark, light = sorted(float(xyz(colour)[1]) + 0.05 for colour in (one, other))
    return light / dark
