"""Pictures on figures: how large each is, where it lies, and in which order they are drawn.

A picture is a function that draws on axes of their final size, which depends on the words around
the axes. So each is drawn once, and then moved to where its words have room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from ringsim.errors import ArgumentError, say
from ringsim.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_INCHES: Final = 0.4  # of a picture without its words
PAD_INCHES: Final = 0.1  # around a picture and its words


class Picture(NamedTuple):
    """A picture that any axes can hold.

    The function that draws it on axes of their final size, and the size in inches that suits it.
    """

    draw: Callable[[Axes], None]
    width: float
    height: float


def show(
    pictures: Sequence[Picture],
    ax: Axes | None = None,
    *,
    figsize: tuple[float, float | None] | None = None,
    dpi: float | None = None,
    theme: str | None = None,
    compact: bool = False,
) -> Axes:
    """Draws pictures on a new figure, by default as large as they need, or the first on given axes.

    The options are those of `ringsim.traces.display.Style`. Returns the axes of the first.
    """
    if theme not in (None, *style.THEMES):
        raise ArgumentError(
            f"theme must be {' or '.join(map(repr, style.THEMES))}, got {say(theme)}. "
            "Leave it out to follow matplotlib's."
        )
    if ax is not None and (figsize or dpi):
        raise ArgumentError(
            "figsize and dpi must be left out where ax is given, got both. Set them on the "
            "figure that the axes are of."
        )
    part: Figure | Axes
    with style.drawing(compact=compact, users=True):
        if ax is None:
            part = plt.figure(dpi=dpi)
            ax = _lay_out(part, pictures[:1] if compact else pictures, figsize)[0]
        else:
            part = ax
            pictures[0].draw(ax)
    style.tint(part, theme)
    return ax


def picture_png(pictures: Sequence[Picture], description: str) -> bytes:
    """Draws pictures side by side for a notebook.

    A PNG, 100 pixels an inch; the same bytes for the same pictures.
    """
    figure = Figure()
    with style.drawing():
        _lay_out(figure, pictures)
    return style.figure_png(figure, description=description)


def _lay_out(
    figure: Figure, pictures: Sequence[Picture], size: tuple[float, float | None] | None = None
) -> list[Axes]:
    """Draws pictures from left to right, their tops in line.

    Gives the figure the size that they and the words around them need. If the size is given, in
    inches, the pictures are scaled until it is met: words take what they take.
    """
    if size is None:
        return _draw_all(figure, pictures)
    wide = sum(picture.width for picture in pictures)
    high = max(picture.height for picture in pictures)
    # where any height will do: rows shrink less than the time axis, to stay legible
    power = 1 if wide < 1.2 * high else 0.5
    across, down = 1.0, 1.0
    for _ in range(5):
        # one by one: where two share a logarithmic axis, matplotlib before 3.11 warns as it clears
        # the figure
        for ax in figure.axes:
            ax.remove()
        figure.clear()
        fitted = [
            picture._replace(width=picture.width * across, height=picture.height * down)
            for picture in pictures
        ]
        axes = _draw_all(figure, fitted)
        across = max(across + (size[0] - figure.get_figwidth()) / wide, LEAST_INCHES / wide)
        # What hangs under a picture grows with it: half of what is missing is enough.
        down = (
            across**power
            if size[1] is None
            else max(down + (size[1] - figure.get_figheight()) / 2 / high, LEAST_INCHES / high)
        )
    figure.set_size_inches(size[0], size[1] or figure.get_figheight())
    return axes


def _draw_all(figure: Figure, pictures: Sequence[Picture]) -> list[Axes]:
    """Draws pictures, and gives the figure its size; returns the axes."""
    axes = [figure.add_axes((0, 0, 1, 1), label=str(number)) for number in range(len(pictures))]
    # sizes first: what is written into a picture depends on the room there is
    _place(figure, axes, pictures, np.zeros((len(axes), 4)))
    around = []
    for ax, picture in zip(axes, pictures, strict=True):
        picture.draw(ax)
        around.append(np.abs(style.reach(ax) - np.array(ax.bbox.extents)) / figure.dpi + PAD_INCHES)
    _place(figure, axes, pictures, np.array(around))
    return axes


def _place(figure: Figure, axes: Sequence[Axes], pictures: Sequence[Picture], around: Any) -> None:
    """Gives a figure the size of its pictures with the room around each, and places their axes.

    Left, below, right, above, in inches.
    """
    left, below, right, above = around.T
    widths, heights = np.array([(picture.width, picture.height) for picture in pictures]).T
    width, height = (left + widths + right).sum(), above.max() + (heights + below).max()
    figure.set_size_inches(width, height)
    starts = np.cumsum(left + widths + right) - widths - right
    for ax, start, wide, high in zip(axes, starts, widths, heights, strict=True):
        ax.set_position(
            (start / width, (height - above.max() - high) / height, wide / width, high / height)
        )
