"""How ringsim's pictures look: colours, textures, fonts, the words around the axes, and files that are the same byte for byte.

The colours are those of Okabe and Ito, which can be told apart with every common colour blindness. Each goes with a texture, so that a
picture also works in grey. A hue means the same in all pictures.

Source:
    M. Okabe and K. Ito, "Color Universal Design", 2008: the eight colours.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.sax.saxutils import escape

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from ringsim.provenance import footer

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Text

__all__ = ["figure_png", "save_figure"]

BLACK: Final = "#000000"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
BLUE: Final = "#0072B2"
VERMILLION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"

INK: Final = "#222222"
MUTED: Final = "#5F5F5F"  # contrast with white 6.4 : 1
GRID: Final = "#E9E9E9"
FAINT: Final = "#D9D9D9"

TITLE_SIZE: Final = 12.5
SUBTITLE_SIZE: Final = 10.0
LEGEND_SIZE: Final = 9.5
LINE_POINTS: Final = 13.0  # height of a line below the legend
GAP_POINTS: Final = 6.0  # between the axis, the legend and the lines
PAD_INCHES: Final = 0.1  # around a picture and its words
LEAST_SHRUNK: Final = 0.5  # of its size, to which a long title shrinks before it reaches out

SETTINGS: Final[dict[Any, Any]] = {  # matplotlib types its own names as literals
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": 10,
    "axes.titlesize": TITLE_SIZE,
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "figure.facecolor": "white",  # not transparent: a dark page must not swallow the ink
    "figure.dpi": 100,
    "savefig.facecolor": "white",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "hatch.linewidth": 0.8,
    "legend.fontsize": LEGEND_SIZE,
    "legend.frameon": False,
    "svg.hashsalt": "ringsim",  # ids in the file come from this, not from a random number
    "text.parse_math": False,  # names are anybody's: a dollar sign is one, and no formula, which may be wrong
    "svg.fonttype": "path",  # glyphs as shapes: no reader's font can move a label
}


@dataclass(frozen=True)
class Look:
    """How one kind of thing is drawn: its name, its fill, and for those who cannot tell colours apart a texture, in the colour ``ink``."""

    name: str
    colour: str
    hatch: str = ""
    ink: str = "white"


def drawing() -> AbstractContextManager[None]:
    """Sets ringsim's fonts and colours within a block, whatever the user's style, which is restored."""
    return mpl.style.context(SETTINGS, after_reset=True)


class Picture(NamedTuple):
    """A picture that any axes can hold: the function that draws it on axes of their final size, and the size in inches that suits it."""

    draw: Callable[[Axes], None]
    width: float
    height: float


def show(pictures: Sequence[Picture], ax: Axes | None = None) -> Axes:
    """Draws pictures on a new figure of the size they need, or the first of them on the given axes; returns the axes of the first."""
    with drawing():
        if ax is None:
            return _lay_out(plt.figure(), pictures)[0]
        pictures[0].draw(ax)
    return ax


def picture_png(pictures: Sequence[Picture], description: str) -> bytes:
    """Draws pictures side by side for a notebook: a PNG, 100 pixels an inch; the same bytes for the same pictures."""
    figure = Figure()
    with drawing():
        _lay_out(figure, pictures)
    return figure_png(figure, description=description)


def _lay_out(figure: Figure, pictures: Sequence[Picture]) -> list[Axes]:
    """Draws pictures from left to right, their tops in line, and gives the figure the size that they and the words around them need."""
    axes = [figure.add_axes((0, 0, 1, 1), label=str(number)) for number in range(len(pictures))]
    _place(figure, axes, pictures, np.zeros((len(axes), 4)))  # sizes first: what is written into a picture depends on the room there is
    around = []
    for ax, picture in zip(axes, pictures, strict=True):
        picture.draw(ax)
        around.append(np.abs(_reach(ax) - np.array(ax.bbox.extents)) / figure.dpi + PAD_INCHES)
    _place(figure, axes, pictures, np.array(around))
    return axes


def _place(figure: Figure, axes: Sequence[Axes], pictures: Sequence[Picture], around: Any) -> None:
    """Gives a figure the size of its pictures with the room around each (left, below, right, above, in inches), and places their axes."""
    left, below, right, above = around.T
    widths, heights = (np.array([getattr(picture, side) for picture in pictures]) for side in ("width", "height"))
    width, height = (left + widths + right).sum(), above.max() + (heights + below).max()
    figure.set_size_inches(width, height)
    starts = np.cumsum(left + widths + right) - widths - right
    for ax, start, wide, high in zip(axes, starts, widths, heights, strict=True):
        ax.set_position((start / width, (height - above.max() - high) / height, wide / width, high / height))


def _reach(ax: Axes) -> Any:
    """Returns how far axes and all that is written around them reach, in pixels: left, below, right, above."""
    return np.array((ax.get_tightbbox() or ax.bbox).extents)


def points(ax: Axes) -> tuple[float, float]:
    """Returns width and height of axes in points."""
    return float(ax.bbox.width * 72 / ax.figure.dpi), float(ax.bbox.height * 72 / ax.figure.dpi)


def per_point(ax: Axes) -> float:
    """Returns how much of the horizontal axis is one point wide."""
    left, right = ax.get_xlim()
    return float((right - left) / points(ax)[0])


def swatch(look: Look, label: str | None = None) -> Patch:
    """Returns the legend's entry for a look, under its own name by default."""
    hatch = look.hatch or None
    return Patch(facecolor=look.colour, edgecolor=look.ink, hatch=hatch, linewidth=0.5, label=look.name if label is None else label)


def fade(colour: str, share: float) -> str:
    """Returns a colour on its way to white: 0 as it is, 1 white."""
    red, green, blue = (channel + (1 - channel) * share for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def percent(share: float) -> str:
    """Writes a share in percent: whole numbers, except for small shares.

    Example:
        >>> percent(3 / 11), percent(0.042), percent(0), percent(0.0002)
        ('27 %', '4.2 %', '0 %', 'under 0.1 %')
    """
    if 0 < share < 0.0005:
        return "under 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def write_beside(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], *, where: Any = "axes fraction", **look: Any
) -> Text:
    """Writes words a fixed distance in points from a place, also outside of the axes; ``where`` says what the place is measured in."""
    return ax.annotate(text, at, xycoords=where, xytext=offset, textcoords="offset points", annotation_clip=False, **look)


def dress(
    ax: Axes,
    title: str,
    *,
    metadata: dict[str, Any],
    subtitle: str = "",
    notes: Sequence[str] = (),
    handles: Sequence[Artist] = (),
    columns: int = 4,
) -> None:
    """Puts the words around a picture: above it what it says; below it the legend, notes, and where the numbers come from.

    Args:
        ax: the axes, which are drawn already.
        title: the message, one line.
        metadata: the trace's, for the last line: machine, versions and date.
        subtitle: what follows from the message, smaller.
        notes: sentences on what the picture leaves out or merges, one line each.
        handles: entries of the legend.
        columns: entries of the legend in a line, at most.
    """
    to_points = 72 / ax.figure.dpi
    _, bottom, right, _ = _reach(ax)
    room, below = max(right, ax.bbox.x1) - ax.bbox.x0, (ax.bbox.y0 - min(bottom, ax.bbox.y0)) * to_points + GAP_POINTS
    heading = [ax.set_title(title, loc="left", pad=22 if subtitle else 8, x=0)]
    if subtitle:
        heading.append(write_beside(ax, subtitle, (0, 1), (0, 7), ha="left", va="bottom", fontsize=SUBTITLE_SIZE, color=MUTED))
    for text in heading:
        text.set_fontsize(text.get_fontsize() * min(1.0, max(room / text.get_window_extent().width, LEAST_SHRUNK)))
    for number in range(min(columns, len(handles)), 0, -1):
        legend = ax.legend(
            handles=list(handles), loc="upper left", ncols=number, borderaxespad=0, borderpad=0, handlelength=1.8, columnspacing=1.4,
            bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans),
        )  # fmt: skip
        legend.set_zorder(20)
        extent = legend.get_window_extent()
        if extent.width <= room or number == 1:
            below += extent.height * to_points + GAP_POINTS
            break
    for line in notes:
        write_beside(ax, line, (0, 0), (0, -below), ha="left", va="top", fontsize=9, color=INK)
        below += LINE_POINTS
    write_beside(ax, footer(metadata), (0, 0), (0, -below - 2), ha="left", va="top", fontsize=8.5, color=MUTED)


def figure_png(figure: Figure, *, dpi: float = 100, description: str = "") -> bytes:
    """Draws a figure to PNG, the same bytes for the same figure; the description is for those who cannot see the picture."""
    file = io.BytesIO()
    with drawing():
        figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None, "Description": description or None})
    return file.getvalue()


def save_figure(figure: Figure, path: str | Path, *, dpi: float = 150, title: str = "", description: str = "") -> None:
    """Writes a figure as PNG or SVG, by the ending of the path; the same bytes for the same figure.

    Args:
        figure: the figure.
        path: where to; ends in ``.png`` or ``.svg``.
        dpi: pixels an inch of a PNG.
        title: the picture's name, which an SVG shows to screen readers.
        description: the picture in a sentence, likewise.
    """
    path = Path(path)
    if path.suffix == ".png":
        path.write_bytes(figure_png(figure, dpi=dpi, description=description))
        return
    file = io.StringIO()
    with drawing():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    words = f'\n <title id="title">{escape(title)}</title>\n <desc id="desc">{escape(description)}</desc>'
    start, end = file.getvalue().split("<svg", 1)
    attributes, rest = end.split(">", 1)
    text = f'{start}<svg role="img" aria-labelledby="title desc"{attributes}>{words}{rest}'
    path.write_text(text, encoding="utf-8")
