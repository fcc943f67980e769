"""How ringsim's pictures look: colours, textures, fonts, the words around the axes, and files that are the same byte for byte.

Colours are those of Okabe and Ito, told apart with every common colour blindness; each goes with a texture, so that a picture also
works in grey. A hue means the same in all pictures.

Source:
    M. Okabe and K. Ito, "Color Universal Design", 2008: the eight colours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ringsim.provenance import footer

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["Look", "Margins", "drawing", "dress", "figure_png", "fit", "save_figure"]

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
    """How one kind of thing is drawn: its name in the legend, its colour, and its texture for those who see no colour.

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
    """Sets ringsim's fonts and colours for what is drawn inside, and gives the user's own settings back."""
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
    """Puts the words around a picture: its message above; legend, notes and where the numbers come from below.

    Distances are in points, so that they hold for axes of any size.

    Args:
        ax: the axes, drawn already.
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
    room = ax.get_window_extent().width * 72 / ax.figure.dpi + right
    title_size = _size_that_fits(title, TITLE_SIZE, BOLD_LETTER, room)
    ax.set_title(title, loc="left", pad=TITLE_POINTS + 2 if subtitle else 8, x=0, fontsize=title_size)
    if subtitle:
        size = _size_that_fits(subtitle, SUBTITLE_SIZE, LETTER, room)
        _beside(ax, subtitle, (0, 1), (0, 7), va="bottom", fontsize=size, color=MUTED)
    if handles:
        columns = _columns_that_fit([str(handle.get_label()) for handle in handles], columns, room)
        legend = ax.legend(
            handles=list(handles), loc="upper left", ncols=columns, borderaxespad=0, borderpad=0, handlelength=1.8, columnspacing=1.4,
            bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + ScaledTranslation(0, -below / 72, ax.figure.dpi_scale_trans),
        )  # fmt: skip
        legend.set_zorder(20)
        below += LEGEND_ROW_POINTS * -(-len(handles) // columns) + 5
    for line in notes:
        _beside(ax, line, (0, 0), (0, -below), va="top", fontsize=9, color=INK)
        below += FOOTER_POINTS + 1
    _beside(ax, footer(metadata), (0, 0), (0, -below - 2), va="top", fontsize=8.5, color=MUTED)
    return Margins(left, right, 2 * TITLE_POINTS + 12 if subtitle else TITLE_POINTS + 16, below + FOOTER_POINTS + 6)


def fit(figure: Figure, pictures: Sequence[tuple[Axes, float, float, Margins]]) -> None:
    """Gives a figure the size that its pictures need, and lays them out from left to right, their tops in line.

    Args:
        figure: the figure.
        pictures: for each its axes, their width and height in inches, and the margins around them.
    """
    width = sum(inner + (margins.left + margins.right) / 72 for _, inner, _, margins in pictures)
    above = max(margins.above for *_, margins in pictures) / 72
    height = above + max(inner + margins.below / 72 for _, _, inner, margins in pictures)
    figure.set_size_inches(width, height)
    x = 0.0
    for ax, inner_width, inner_height, margins in pictures:
        x += margins.left / 72
        ax.set_position((x / width, (height - above - inner_height) / height, inner_width / width, inner_height / height))
        x += inner_width + margins.right / 72


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
    """Font size for a line of text: ``size``, or what is left of it when the line is longer than the room, in points."""
    return size * min(1.0, max(room / max(len(text) * letter * size, 1), 0.5))


def _columns_that_fit(labels: Sequence[str], most: int, room: float) -> int:
    """Columns of a legend, filled one after the other, that the room has place for; in points."""
    for columns in range(min(most, len(labels)), 1, -1):
        rows, longer = divmod(len(labels), columns)  # as matplotlib shares them out: the first columns take what is left over
        ends = [rows * (column + 1) + min(column + 1, longer) for column in range(columns)]
        widest = [max(map(len, labels[start:end])) for start, end in zip([0, *ends], ends, strict=False)]
        if sum(letters * LETTER + LEGEND_ENTRY for letters in widest) * LEGEND_SIZE <= room:
            return columns
    return 1


def _beside(ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    ax.annotate(text, at, xycoords="axes fraction", xytext=offset, textcoords="offset points", ha="left", annotation_clip=False, **look)
