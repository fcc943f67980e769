"""How ringsim's pictures look: colours, textures, fonts, the words around the axes, and files that are the same byte for byte.

The colours are those of Okabe and Ito, which can be told apart with every common colour blindness. Each goes with a texture, so that a
picture also works in grey. A hue means the same in all pictures.

Source:
    M. Okabe and K. Ito, "Color Universal Design", 2008: the eight colours.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.sax.saxutils import escape

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from ringsim.provenance import footer

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = [
    "Look",
    "Margins",
    "Picture",
    "drawing",
    "dress",
    "fade",
    "figure_png",
    "lay_out",
    "per_point",
    "percent",
    "picture_png",
    "points",
    "save_figure",
    "show",
    "swatch",
    "write_beside",
]

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
LEGEND_ENTRY: Final = 4.0  # width of a legend's entry without its words: handle and gaps, in font sizes
LETTER: Final = 0.55  # width of a letter on average, in font sizes
BOLD_LETTER: Final = 0.66
LEGEND_ROW_POINTS: Final = 15.0
FOOTER_POINTS: Final = 12.0
TITLE_POINTS: Final = 20.0  # height of its line
GAP_POINTS: Final = 16.0  # between two pictures

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
    """How one kind of thing is drawn: its name in the legend, its colour, and its texture for those who cannot tell colours apart.

    Args:
        name: what the legend calls it.
        colour: fill, as "#RRGGBB".
        hatch: matplotlib's pattern, empty for none.
        ink: colour of the pattern and of the outline.
    """

    name: str
    colour: str
    hatch: str = ""
    ink: str = "white"


@contextmanager
def drawing() -> Iterator[None]:
    """Sets ringsim's fonts and colours within the block, and restores the user's settings."""
    with mpl.rc_context():
        mpl.rcdefaults()  # a user's style must not change the bytes
        mpl.rcParams.update(SETTINGS)
        yield


class Margins(NamedTuple):
    """Room that the words around a picture take, in points."""

    left: float
    right: float
    above: float
    below: float


class Picture(NamedTuple):
    """A picture that any axes can hold: the function that draws it on axes of their final size, and the size in inches that suits it."""

    draw: Callable[[Axes], Margins]
    width: float
    height: float


def show(pictures: Sequence[Picture], ax: Axes | None = None) -> Axes:
    """Draws pictures on a new figure of the size they need, or the first of them on the given axes; returns the axes of the first."""
    with drawing():
        if ax is None:
            return lay_out(plt.figure(), pictures)[0]
        pictures[0].draw(ax)
    return ax


def picture_png(pictures: Sequence[Picture], description: str) -> bytes:
    """Draws pictures side by side for a notebook.

    Args:
        pictures: from left to right.
        description: said in the file, for those who cannot see the picture.

    Returns:
        A PNG, 100 pixels an inch; the same bytes for the same pictures.
    """
    figure = Figure()
    with drawing():
        lay_out(figure, pictures)
    return figure_png(figure, description=description)


def lay_out(figure: Figure, pictures: Sequence[Picture]) -> list[Axes]:
    """Draws pictures on a figure from left to right, their tops in line, and gives it the size that they need; returns their axes."""
    axes = [figure.add_axes((0, 0, 1, 1), label=str(number)) for number in range(len(pictures))]
    # Sizes first: what is written into a picture depends on the room there is.
    _fit(figure, axes, pictures, [Margins(0, 0, 0, 0)] * len(pictures))
    margins = [picture.draw(ax) for ax, picture in zip(axes, pictures, strict=True)]
    spaced = [each._replace(right=each.right + GAP_POINTS) for each in margins[:-1]]
    _fit(figure, axes, pictures, [*spaced, margins[-1]])
    return axes


def _fit(figure: Figure, axes: Sequence[Axes], pictures: Sequence[Picture], margins: Sequence[Margins]) -> None:
    """Gives a figure the size that its pictures need, and puts their axes in place."""
    width = sum(picture.width + (around.left + around.right) / 72 for picture, around in zip(pictures, margins, strict=True))
    above = max(around.above for around in margins) / 72
    height = above + max(picture.height + around.below / 72 for picture, around in zip(pictures, margins, strict=True))
    figure.set_size_inches(width, height)
    x = 0.0
    for ax, picture, around in zip(axes, pictures, margins, strict=True):
        x += around.left / 72
        ax.set_position((x / width, (height - above - picture.height) / height, picture.width / width, picture.height / height))
        x += picture.width + around.right / 72


def points(ax: Axes) -> tuple[float, float]:
    """Returns width and height of axes in points."""
    extent = ax.get_window_extent()
    return float(extent.width * 72 / ax.figure.dpi), float(extent.height * 72 / ax.figure.dpi)


def per_point(ax: Axes) -> float:
    """Returns how much of the horizontal axis is one point wide."""
    left, right = ax.get_xlim()
    return float((right - left) / points(ax)[0])


def swatch(look: Look, label: str | None = None) -> Patch:
    """Returns the legend's entry for a look, under its own name by default."""
    hatch = look.hatch or None
    return Patch(facecolor=look.colour, edgecolor=look.ink, hatch=hatch, linewidth=0.5, label=look.name if label is None else label)


def fade(colour: str, share: float) -> str:
    """Returns a colour on its way to white: 0 as it is, 1 white.

    Example:
        >>> fade("#000000", 0.6)
        '#999999'
    """
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
) -> None:
    """Writes words a fixed distance in points from a place, also outside of the axes; ``where`` says what the place is measured in."""
    ax.annotate(text, at, xycoords=where, xytext=offset, textcoords="offset points", annotation_clip=False, **look)


def dress(
    ax: Axes,
    title: str,
    *,
    metadata: dict[str, Any],
    subtitle: str = "",
    notes: Sequence[str] = (),
    handles: Sequence[Artist] = (),
    columns: int = 4,
    left: float = 8.0,
    right: float = 8.0,
    below: float = 8.0,
) -> Margins:
    """Puts the words around a picture: above it what it says; below it the legend, notes, and where the numbers come from.

    Distances are in points, so that they suit axes of any size.

    Args:
        ax: the axes, which are drawn already.
        title: the message, one line.
        metadata: the trace's, for the last line: machine, versions and date.
        subtitle: what follows from the message, smaller.
        notes: sentences on what the picture leaves out or merges, one line each.
        handles: entries of the legend.
        columns: entries of the legend in a line, at most.
        left: room for the axes' own labels at the left.
        right: the same at the right.
        below: the same below.

    Returns:
        The room that all of it takes.
    """
    room = points(ax)[0] + right
    title_size = _size_that_fits(title, TITLE_SIZE, BOLD_LETTER, room)
    ax.set_title(title, loc="left", pad=TITLE_POINTS + 2 if subtitle else 8, x=0, fontsize=title_size)
    if subtitle:
        size = _size_that_fits(subtitle, SUBTITLE_SIZE, LETTER, room)
        write_beside(ax, subtitle, (0, 1), (0, 7), ha="left", va="bottom", fontsize=size, color=MUTED)
    if handles:
        columns = _columns_that_fit([str(handle.get_label()) for handle in handles], columns, room)
        legend = ax.legend(
            handles=list(handles), loc="upper left", ncols=columns, borderaxespad=0, borderpad=0, handlelength=1.8, columnspacing=1.4,
            bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans),
        )  # fmt: skip
        legend.set_zorder(20)
        below += LEGEND_ROW_POINTS * -(-len(handles) // columns) + 5
    for line in notes:
        write_beside(ax, line, (0, 0), (0, -below), ha="left", va="top", fontsize=9, color=INK)
        below += FOOTER_POINTS + 1
    write_beside(ax, footer(metadata), (0, 0), (0, -below - 2), ha="left", va="top", fontsize=8.5, color=MUTED)
    return Margins(left, right, 2 * TITLE_POINTS + 12 if subtitle else TITLE_POINTS + 16, below + FOOTER_POINTS + 6)


def figure_png(figure: Figure, *, dpi: float = 100, description: str = "") -> bytes:
    """Draws a figure to PNG, the same bytes for the same figure.

    Args:
        figure: the figure.
        dpi: pixels an inch.
        description: said in the file, for those who cannot see the picture.
    """
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


def _size_that_fits(text: str, size: float, letter: float, room: float) -> float:
    """Returns the font size for a line of text: ``size``, or less where the line is longer than the room, in points."""
    return size * min(1.0, max(room / max(len(text) * letter * size, 1), 0.5))


def _columns_that_fit(labels: Sequence[str], most: int, room: float) -> int:
    """Returns how many columns of a legend, filled one after the other, fit into the room, in points."""
    for columns in range(min(most, len(labels)), 1, -1):
        rows, longer = divmod(len(labels), columns)  # as matplotlib shares them out: the first columns take what is left over
        ends = [rows * (column + 1) + min(column + 1, longer) for column in range(columns)]
        widest = [max(map(len, labels[start:end])) for start, end in zip([0, *ends], ends, strict=False)]
        if sum(letters * LETTER + LEGEND_ENTRY for letters in widest) * LEGEND_SIZE <= room:
            return columns
    return 1
