"""What a picture shows, read off its axes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.transforms import Bbox


def words(ax: Axes) -> str:
    """All words in a picture but those of title, axes and legend, one text after the other."""
    return "\n".join(text.get_text() for panel in (ax, *ax.child_axes) for text in panel.texts)


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def drawn(artists: Any, prefix: str) -> dict[str, Any]:
    """Artists by their id, of those that begin so."""
    return {str(one.get_gid()): one for one in artists if (one.get_gid() or "").startswith(prefix)}


def boxes(
    ax: Axes, gid: str | None = None, row: int | None = None
) -> list[tuple[float, float, float, float]]:
    """(left, right, top, bottom) of the boxes of an id or of all, of one row or of all, sorted.

    Y grows downwards.
    """
    corners = [
        path.vertices
        for group in ax.collections
        if isinstance(group, PolyCollection) and gid in (None, group.get_gid())
        for path in group.get_paths()
    ]
    found = sorted((c[:, 0].min(), c[:, 0].max(), c[:4, 1].min(), c[:4, 1].max()) for c in corners)
    return [box for box in found if row is None or abs((box[2] + box[3]) / 2 - row) < 0.5]


def spans(ax: Axes, gid: str, row: int | None = None) -> list[tuple[float, float]]:
    """(left, right) of the same."""
    return [(round(box[0], 6), round(box[1], 6)) for box in boxes(ax, gid, row)]


def bars(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    """(left, right) of the boxes by the word that the legend has for their look."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in ax.collections:
        if isinstance(group, PolyCollection):
            look = to_hex(group.get_facecolor()[0]), group.get_hatch()
            for patch in ax.get_legend().get_patches():
                if look == (to_hex(patch.get_facecolor()), patch.get_hatch()):
                    found.setdefault(patch.get_label(), []).extend(spans(ax, group.get_gid()))
    return found


def overlap(one: Bbox, other: Bbox) -> float:
    """By how many pixels two boxes lie over each other; 0 and less where they do not."""
    return float(
        min(
            min(one.x1, other.x1) - max(one.x0, other.x0),
            min(one.y1, other.y1) - max(one.y0, other.y0),
        )
    )


def assert_apart(found: list[Bbox], most: float = 1.5) -> None:
    assert all(overlap(one, other) < most for one, other in combinations(found, 2)), (
        "pixels of overlap"
    )


def assert_within(ax: Axes) -> list[Bbox]:
    """No words are cut off; returns the room that those beside title and axes take."""
    ax.figure.canvas.draw()
    beside = [*ax.texts, *(ax.get_legend().get_texts() if ax.get_legend() else [])]
    canvas, (low, high) = ax.figure.bbox, sorted(ax.get_ylim())
    ticks = [
        label
        for label in ax.get_yticklabels()
        if ax.axison and low <= label.get_position()[1] <= high
    ]
    for text in [*beside, *ticks, ax.title, *([ax.xaxis.label] if ax.axison else [])]:
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1, text
            assert canvas.y0 <= box.y0 < box.y1 <= canvas.y1, text
    return [text.get_window_extent() for text in beside if text.get_text()]
