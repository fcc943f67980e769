"""Sets the size and position of pictures on figures.

A picture is a function that draws on axes of their final size. The position of the axes depends on
the text around them, so each picture is drawn first, and then moved to make room for its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringsim.errors import ArgumentError, say
from ringsim.plot import style
from ringsim.plot.themes import themed_svg
from ringsim.traces.display import Images

LEAST_INCHES = 0.4  # the least size of a picture without its text
PAD_INCHES = 0.1  # the margin around a picture and its text
COMPACT_PAD_INCHES = 0.02
WIDE = 1.4  # in figures of at least this ratio, text is next to pictures without a time axis
MOST_TRIES = 6
CLOSE_INCHES = 0.01  # how exact a figure's size must be


class Picture(NamedTuple):
    """A picture that can be drawn on any axes.

    ``draw`` draws the picture on axes of their final size. ``width`` and ``height`` are a suitable
    size, in inches. In a compact figure, a picture with a time axis, or a chart, is ``strip``
    inches high.
    """

    draw: Callable[[Axes], None]
    width: float
    height: float
    strip: float = 0.0


def show(
    pictures: Sequence[Picture],
    ax: Axes | None = None,
    *,
    figsize: tuple[float, float | None] | None = None,
    dpi: float | None = None,
    theme: str | None = None,
    compact: bool = False,
) -> Axes:
    """Draws pictures on a new figure, or only the first picture if axes are given.

    `ringsim.traces.display.Style` describes the options. By default, the figure is as large as the
    pictures need. Returns the axes of the first picture.
    """
    if theme not in (None, *style.THEMES):
        raise ArgumentError(
            f"theme must be {' or '.join(map(repr, style.THEMES))}, got {say(theme)}. "
            "Omit theme to use matplotlib's colours."
        )
    if ax is not None and (figsize or dpi):
        raise ArgumentError(
            "figsize and dpi cannot be combined with ax. Set them on the figure that owns the axes."
        )
    part: Figure | Axes
    wide, high = figsize or (0, None)
    is_slide = high and wide >= WIDE * high and not any(picture.strip for picture in pictures)
    layout = "column" if compact else "slide" if is_slide else "page"
    with style.drawing(layout, users=True):
        if ax is None:
            part = plt.figure(dpi=dpi)
            ax = _lay_out(part, pictures[:1] if compact else pictures, figsize)[0]
        else:
            part = ax
            pictures[0].draw(ax)
    style.tint(part, theme)
    return ax


def draw_images(pictures: Sequence[Picture], description: str, *, themed: bool = True) -> Images:
    """Draws pictures side by side for a notebook.

    The PNG has 100 pixels per inch. The bytes depend only on the pictures.
    """
    figure = Figure()
    with style.drawing():
        _lay_out(figure, pictures)
    png = style.figure_png(figure, description=description)
    return Images(png, themed_svg(figure, description) if themed else "")


def _lay_out(
    figure: Figure, pictures: Sequence[Picture], size: tuple[float, float | None] | None = None
) -> list[Axes]:
    """Draws pictures from left to right, aligned at the top.

    By default, the figure is as large as the pictures with their text. If ``size`` is given in
    inches, the pictures are scaled to fit, but their text is not.
    """
    if size is None:
        return _draw_all(figure, pictures)
    wide = sum(picture.width for picture in pictures)
    high = max(picture.height for picture in pictures)
    strip = max(picture.strip for picture in pictures)
    # if the height is free, rows shrink less than the time axis, so that they stay legible
    power = 0.5 if strip else 1
    strip *= style.is_compact() and size[1] is None
    across, down = 1.0, 1.0
    for _ in range(MOST_TRIES):
        # Remove axes one by one, because matplotlib before 3.11 warns when it clears a figure
        # with a shared logarithmic axis.
        for ax in figure.axes:
            ax.remove()
        figure.clear()
        axes = _draw_all(
            figure,
            [
                picture._replace(
                    width=picture.width * across, height=strip or picture.height * down
                )
                for picture in pictures
            ],
        )
        wanted = size[0], size[1] or figure.get_figheight()
        missing = np.subtract(wanted, figure.get_size_inches())
        if abs(missing).max() < CLOSE_INCHES:
            break
        across = max(across + missing[0] / wide, LEAST_INCHES / wide)
        # Parts below a picture grow with the picture, so half of the missing height is enough.
        down = max(down + missing[1] / 2 / high, LEAST_INCHES / high)
        if size[1] is None:
            down = across**power
    figure.set_size_inches(size[0], size[1] or figure.get_figheight())
    return axes


def _draw_all(figure: Figure, pictures: Sequence[Picture]) -> list[Axes]:
    """Draws pictures, sets the figure's size and returns the pictures' axes."""
    axes = [figure.add_axes((0, 0, 1, 1), label=str(number)) for number in range(len(pictures))]
    # set the sizes first, because the text in a picture depends on the available room
    _place(figure, axes, pictures, np.zeros((len(axes), 4)))
    pad, around = COMPACT_PAD_INCHES if style.is_compact() else PAD_INCHES, []
    for ax, picture in zip(axes, pictures, strict=True):
        picture.draw(ax)
        around.append(np.abs(style.reach(ax) - np.array(ax.bbox.extents)) / figure.dpi + pad)
    _place(figure, axes, pictures, np.array(around))
    return axes


def _place(figure: Figure, axes: Sequence[Axes], pictures: Sequence[Picture], around: Any) -> None:
    """Derives a figure's size from its pictures and their margins, and positions the axes.

    ``around`` holds the room on the left, below, on the right and above each picture, in inches.
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
