"""Defines the look of ringsim's pictures.

This module provides the colours, textures and fonts, the text around the axes, and functions that
write figures with reproducible bytes. The colours are from Okabe and Ito, and are distinct for
people with any common form of colour blindness. Each colour has a texture, so that pictures also
work in grey. A hue has the same meaning in all pictures.

Source:
    M. Okabe and K. Ito, "Color Universal Design", 2008 (the eight colours).
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import Collection, PolyCollection
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text
from matplotlib.transforms import ScaledTranslation

from ringsim.errors import ArgumentError, say
from ringsim.provenance import describe_replay, footer
from ringsim.traces.looks import LOOKS, contrast, read_table, readable_ink
from ringsim.traces.units import capitalise

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

GROUND = LOOKS["ground"].light
INK = LOOKS["ink"].light
MUTED = LOOKS["muted"].light
GRID = LOOKS["grid"].light
FAINT = LOOKS["line"].light
_DARK = {
    LOOKS[name].light: LOOKS[name].dark
    for family, looks in read_table().items()
    for name in looks
    if family not in ("paper", "verdict")
}
_SHORT = {look.name: look.short for look in LOOKS.values() if len(look.short) > 1}
# the hues of a colour wheel, from red, in equal steps
_HUES = "red orange yellow green green green blue blue blue purple purple pink".split()
_HATCH_SHARE = 0.4  # how far a texture's colour is from the bar's towards black or white

SUBTITLE_SIZE = 10.0
LINE_POINTS = 13.0  # the height of a line below the legend
GAP_POINTS = 6.0  # the gaps between the axis, the legend and the lines
LETTER = 0.55  # the average width of a letter, as a share of the font's size
LEAST_SHRUNK = 0.8  # a long title shrinks to no less than this share of its size
MOST_LETTERS = 60  # the most letters of a label; longer ones lose their middle
LEAST_LETTERS = 20  # in a line of a note
ASIDE_INCHES = 3.1  # the width of text next to a picture

_DATA = Path(__file__).parents[1] / "data"


def _read_settings(name: str) -> dict[Any, Any]:  # matplotlib types its own names as literals
    return dict(mpl.rc_params_from_file(_DATA / f"{name}.mplstyle", use_default_template=False))


COMPACT = _read_settings("compact")
SETTINGS = {
    **_read_settings("pictures"),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), GROUND),
    "axes.edgecolor": MUTED,
}


@dataclass(frozen=True)
class Look:
    """The look of one kind of bar.

    A look has a name, a fill colour and, for readers who cannot distinguish colours, a texture in
    the colour ``ink``. ``edge`` is the width of the outline in points, and ``zorder`` is the
    drawing order.
    """

    name: str
    colour: str
    hatch: str = ""
    ink: str = GROUND
    edge: float = 0.0
    zorder: float = 3.0

    @classmethod
    def of(cls, meaning: str, *, edge: float = 0.5, zorder: float = 3.0) -> Look:
        """Returns the look of bars with a meaning, which is a key of ``LOOKS``."""
        look = LOOKS[meaning]
        ink = _mix(look.light, readable_ink(look.light), _HATCH_SHARE)
        # matplotlib repeats a texture's character to draw it more densely
        hatch = look.texture * (2 if look.texture in "|-+" else 4)
        return cls(look.name, look.light, hatch, ink, edge, zorder)


def _mix(colour: str, other: str, share: float) -> str:
    one, two = np.array(to_rgb(colour)), np.array(to_rgb(other))
    return to_hex(one + (two - one) * share)


THEMES = {  # ground, ink
    "light": (GROUND, INK),
    "dark": (LOOKS["ground"].dark, LOOKS["ink"].dark),
}
COLOURS = ("facecolor", "edgecolor", "markerfacecolor", "markeredgecolor", "color")
CAPTION = "caption"  # the id of the hidden text with a figure's caption
_layout: ContextVar[str] = ContextVar("layout", default="page")


@contextlib.contextmanager
def drawing(layout: str = "page", *, users: bool = False) -> Iterator[None]:
    """Applies ringsim's fonts and colours within a ``with`` block, then restores the user's.

    The layout is that of a "page", of a compact picture in a "column", or of a "slide", with the
    legend and the notes next to the picture. If ``users`` is True, the user's own matplotlib
    settings for fonts, lines and sizes still apply.
    """
    kept = ("svg.", "text.")
    settings = {
        name: value
        for name, value in SETTINGS.items()
        if not users
        or mpl.rcParams[name] == mpl.rcParamsDefault[name]
        or "color" in name
        or name.startswith(kept)
    }
    token = _layout.set(layout)
    try:
        with mpl.style.context(
            {**settings, **(COMPACT if is_compact() else {})}, after_reset=not users
        ):
            yield
    finally:
        _layout.reset(token)


def is_compact() -> bool:
    """Returns whether a compact picture is being drawn."""
    return _layout.get() == "column"


def shorten(text: str, most: int = MOST_LETTERS) -> str:
    """Returns a text without its middle if it has more than ``most`` letters.

    Example:
        >>> shorten("a_very_long_name.py", 11)
        'a_ver…me.py'
    """
    begin, end = text[: most // 2], text[len(text) - (most - 1) // 2 :]
    return text if len(text) <= most else f"{begin}…{end}"


def letters(points: float) -> float:
    """Returns the font size to use for a desired size in points.

    Compact pictures have only two font sizes.
    """
    if not is_compact():
        return points
    return float(COMPACT["axes.titlesize" if points > SUBTITLE_SIZE else "axes.labelsize"])


def tint(part: Figure | Axes, theme: str | None) -> None:
    """Adjusts the greys of a picture drawn for a white background to suit a theme.

    White becomes the theme's ground, and black becomes its ink. On a dark ground, the colours of
    the table become their dark versions. If ``theme`` is None, ground and ink come from the user's
    matplotlib settings, or else from the light theme.
    """
    ground, ink = THEMES[theme or "light"]
    if theme is None:
        known, default = mpl.rcParams, mpl.rcParamsDefault
        if known["figure.facecolor"] != default["figure.facecolor"]:
            ground = to_hex(known["figure.facecolor"])
        if known["text.color"] != default["text.color"]:
            ink = to_hex(known["text.color"])
    if (ground.upper(), ink.upper()) == (GROUND, INK):
        return

    dark = _DARK if contrast(ground, INK) < contrast(ground, GROUND) else {}

    def turn(colours: Any) -> Any:
        return _turn(to_rgba_array(colours), to_rgb(ground), to_rgb(ink), dark)

    artists = part.findobj(lambda one: isinstance(one, (Patch, Collection, Line2D, Text)))
    artists += filter(None, (note.arrow_patch for note in part.findobj(Annotation)))
    for artist in artists:
        patch = artist.get_bbox_patch() if isinstance(artist, Text) else None
        tinted: Any = patch or artist  # the ink of a text on a bar depends on the bar
        looks = {name: plt.getp(tinted, name) for name in COLOURS if hasattr(tinted, f"get_{name}")}
        # all at once, because a marker may take the line's colour
        tinted.set(**{name: turn(one) for name, one in looks.items() if str(one) != "none"})
        if patch is not None:
            artist.set(color=readable_ink(to_hex(patch.get_facecolor())))
    for ax in part.get_axes() if isinstance(part, Figure) else [part, *part.child_axes]:
        ax.tick_params(which="both", color=ink, labelcolor=ink, grid_color=turn(GRID)[0])
        for image in ax.get_images():
            if (pixels := np.asarray(image.get_array())).ndim == 3:
                image.set_data(
                    turn(pixels.reshape(-1, pixels.shape[2])).reshape(*pixels.shape[:2], 4)
                )


def turn_dark(colours: Sequence[str]) -> list[str]:
    """Returns the dark theme's versions of colours for a light ground."""
    ground, ink = map(to_rgb, THEMES["dark"])
    return [to_hex(colour) for colour in _turn(to_rgba_array(list(colours)), ground, ink, _DARK)]


def _turn(
    colours: Any, ground: Sequence[float], ink: Sequence[float], dark: Mapping[str, str]
) -> Any:
    """Returns colours of shape (n, 4) as a theme shows them.

    The table's colours become those in ``dark``; other greys are scaled to lie between ink and
    ground.
    """
    black = to_rgb(INK)[0]
    share = np.clip((colours[:, :3].mean(axis=1, keepdims=True) - black) / (1 - black), 0, 1)
    turned = share * np.array(ground) + (1 - share) * np.array(ink)
    is_grey = np.ptp(colours[:, :3], axis=1, keepdims=True) < 0.04
    turned = np.hstack([np.where(is_grey, turned, colours[:, :3]), colours[:, 3:]])
    for light, night in dark.items():
        turned[(colours[:, :3] == to_rgb(light)).all(axis=1), :3] = to_rgb(night)
    return turned


def reach(ax: Axes) -> Any:
    """Returns the left, lower, right and upper extents of axes and their text, in pixels."""
    return np.array((ax.get_tightbbox() or ax.bbox).extents)


def points(ax: Axes) -> tuple[float, float]:
    """Returns the width and height of axes in points."""
    return float(ax.bbox.width * 72 / ax.figure.dpi), float(ax.bbox.height * 72 / ax.figure.dpi)


def per_point(ax: Axes) -> float:
    """Returns the length of one point on the horizontal axis."""
    left, right = ax.get_xlim()
    return float((right - left) / points(ax)[0])


def name_look(name: str) -> str:
    """Returns the name of a look in a legend, which is short in a compact picture."""
    return _SHORT.get(name, name.removeprefix("backward: ")) if is_compact() else name


def entry(ax: Axes, label: str, **look: Any) -> None:
    """Adds a line or a marker, which is dark by default, only to the legend."""
    ax.plot([], [], label=label, **{"color": INK, **look})


def swatch(ax: Axes, label: str, colour: str) -> None:
    """Adds a box only to the legend."""
    box = PolyCollection([], facecolors=colour, edgecolors=MUTED, label=name_look(label))
    ax.add_collection(box, autolim=False)


def fade(colour: str, share: float) -> str:
    """Returns a paler colour; a share of 0 leaves it unchanged, and a share of 1 makes it white."""
    return _mix(colour, GROUND, share)


def spread(places: Sequence[float], least: Any) -> Any:
    """Returns places in the same order, moved to be at least ``least`` apart.

    ``least`` is one distance, or a distance from each place to the next, in ascending order.
    """
    order = np.argsort(places, kind="stable")
    gaps = np.broadcast_to(least, max(len(order) - 1, 0))
    steps = np.append(0, np.cumsum(gaps))[: len(order)]
    # these must not decrease, so push them up and down, and average the two results
    apart = np.asarray(places, dtype=np.float64)[order] - steps
    pushed = np.maximum.accumulate(apart) + np.minimum.accumulate(apart[::-1])[::-1]
    moved = np.empty(len(order))
    moved[order] = pushed / 2 + steps
    return moved


def percent(share: float) -> str:
    """Formats a share in percent, as a whole number unless the share is small.

    Example:
        >>> percent(3 / 11), percent(0.042), percent(0), percent(0.0002)
        ('27 %', '4.2 %', '0 %', 'under 0.1 %')
    """
    if 0 < share < 0.0005:
        return "under 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def write_beside(
    ax: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    *,
    where: Any = "axes fraction",
    **look: Any,
) -> Text:
    """Writes text at a fixed distance, in points, from a position that may be outside the axes.

    ``where`` is the coordinate system of the position.
    """
    return ax.annotate(
        text, at, offset, where, textcoords="offset points", annotation_clip=False, **look
    )


def dress(
    ax: Axes,
    title: str,
    subtitle: str = "",
    notes: Sequence[str] = (),
    *,
    metadata: dict[str, Any],
    columns: int = 4,
) -> None:
    """Adds the text around a picture.

    The title and the subtitle are above the picture. The legend of all artists with a label, the
    notes and the origin of the numbers are below it.

    Args:
        ax: the axes, with the finished drawing.
        title: the main result, on one line.
        subtitle: further results, in smaller text.
        notes: sentences about omitted or merged parts, one per line.
        metadata: the metadata of the trace, from which the last line gets the machine, versions and
            date.
        columns: the largest number of legend entries per line.
    """
    to_points, compact = 72 / ax.figure.dpi, is_compact()
    notes = [*notes, footer(metadata)]
    if error := describe_replay(metadata):
        title += f" (predicted; {error})"
    panels: list[Any] = [ax, *ax.child_axes]
    for panel in panels:
        most = int(points(panel)[1] / (panel.yaxis.label.get_fontsize() * LETTER))
        panel.set_ylabel(textwrap.fill(panel.get_ylabel(), max(most, 1), break_long_words=False))
    left, bottom, right, _ = reach(ax)
    start, end = (left, ax.bbox.x1) if compact else (ax.bbox.x0, max(right, ax.bbox.x1))
    x, below = (start - ax.bbox.x0) * to_points, (ax.bbox.y0 - bottom) * to_points + GAP_POINTS
    if not compact:
        _add_heading(ax, title, subtitle, end - start)
    room = (end - start) * to_points
    if _layout.get() == "slide":
        x = (max(right, ax.bbox.x1) - ax.bbox.x0) * to_points + 3 * GAP_POINTS
        below = -points(ax)[1] * 0.6
        room = ASIDE_INCHES * 72
    handles: dict[str, Artist] = {}
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, _swatch(handle) if isinstance(handle, PolyCollection) else handle)
    if handles:
        height, omitted = _add_legend(ax, [*handles.values()], columns, room, (x, -below))
        below += height + GAP_POINTS
        if omitted:
            notes.insert(0, f"Not in the legend: {', '.join(map(_describe_entry, omitted))}")
    if compact:
        axis = next(filter(None, (panel.get_xlabel() for panel in panels)), "")
        known = filter(None, (title, subtitle, axis and f"Horizontal axis: {axis}", *notes))
        caption = "\n".join(capitalise(line).rstrip(".") + "." for line in known)
        ax.figure.text(0, 0, caption, visible=False, gid=CAPTION)
        return
    for size, colour, line in [*((9, INK, note) for note in notes[:-1]), (8.5, MUTED, notes[-1])]:
        folded = textwrap.wrap(
            line, max(int(room / (size * LETTER)), LEAST_LETTERS), subsequent_indent="  "
        )
        for part in folded:
            write_beside(ax, part, (0, 0), (x, -below), va="top", fontsize=size, color=colour)
            below += LINE_POINTS


def _add_heading(ax: Axes, title: str, subtitle: str, room: float) -> None:
    """Writes the title and the subtitle; long ones first shrink and are then folded."""
    pad = GAP_POINTS + 2
    for text in (subtitle, title):
        if not text:
            continue
        written: Any = (
            ax.set_title(text, loc="left", pad=pad, x=0)
            if text is title
            else write_beside(
                ax, text, (0, 1), (0, pad - 1), va="bottom", fontsize=SUBTITLE_SIZE, color=MUTED
            )
        )
        share = room / written.get_window_extent().width
        written.set_fontsize(written.get_fontsize() * min(1.0, max(share, LEAST_SHRUNK)))
        if share < LEAST_SHRUNK:
            written.set_text(textwrap.fill(text, max(int(len(text) * share / LEAST_SHRUNK), 1)))
        pad += (written.get_window_extent().height * 72 / ax.figure.dpi) + GAP_POINTS / 2


def _add_legend(
    ax: Axes, handles: Sequence[Artist], columns: int, room: float, offset: tuple[float, float]
) -> tuple[float, list[Artist]]:
    """Adds a legend at ``offset`` points from the axes' corner.

    It has as many columns as fit. In a compact picture, it has one line with the entries that fit,
    preferably those of the looks that fill the largest areas. Returns the height of the legend in
    points, and the omitted entries.
    """
    to_points = 72 / ax.figure.dpi
    shift = ScaledTranslation(offset[0] / 72, offset[1] / 72, ax.figure.dpi_scale_trans)

    def write(some: Sequence[Artist], number: int) -> tuple[float, float]:
        legend: Any = ax.legend(
            handles=list(some),
            loc="upper left",
            ncols=number,
            bbox_to_anchor=(0, 0),
            bbox_transform=ax.transAxes + shift,
        )
        legend.set_zorder(20)
        box = legend.get_window_extent()
        return box.width * to_points, box.height * to_points

    for handle in handles:
        label = str(handle.get_label())
        for most in range(MOST_LETTERS, LEAST_LETTERS, -4):
            handle.set_label(shorten(label, most))
            if len(label) <= LEAST_LETTERS or write([handle], 1)[0] <= room:
                break
    if is_compact():
        areas = _measure_areas(ax)
        shown: list[Artist] = []
        for handle in sorted(handles, key=lambda handle: -areas[_face(handle)]):
            if not shown or write([*shown, handle], len(shown) + 1)[0] <= room:
                shown.append(handle)
        omitted = [handle for handle in handles if handle not in shown]
        return write([one for one in handles if one in shown], len(shown))[1], omitted
    number = min(columns, len(handles))
    while (size := write(handles, number))[0] > room and number > 1:
        number -= 1
    return size[1], []


def _measure_areas(ax: Axes) -> Counter[str]:
    """Adds up the areas of all bars by colour."""
    areas: Counter[str] = Counter()
    for bars in ax.findobj(PolyCollection):
        sizes = [np.ptp(path.vertices, axis=0).prod() for path in bars.get_paths()]
        colours: Any = bars.get_facecolor()  # none, or one for all bars
        areas.update({to_hex(colour): sum(sizes) for colour in colours[:1]})
    return areas


def _swatch(bars: PolyCollection) -> Patch:
    """Returns the legend entry for bars, which always has an outline."""
    face, *edge = map(tuple, [*bars.get_facecolor()[:1], *bars.get_edgecolor()[:1]])
    hatch, label = bars.get_hatch(), bars.get_label()
    return Patch(
        facecolor=face, edgecolor=(*edge, face)[0], hatch=hatch, linewidth=0.5, label=label
    )


def _face(handle: Any) -> str:
    return to_hex(handle.get_facecolor()) if isinstance(handle, Patch) else ""


def _describe_entry(handle: Any) -> str:
    """Describes a legend entry in words, with the hue, which is the same in both themes."""
    colour = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
    hue, saturation, _ = rgb_to_hsv(to_rgb(colour))
    hatch = isinstance(handle, Patch) and handle.get_hatch()
    looks = [_HUES[round(hue * 12) % 12]] if saturation > 0.25 else []
    looks += [f"hatched {hatch[0]}"] if hatch else []
    return f"{handle.get_label()} ({', '.join(looks)})" if looks else str(handle.get_label())


def caption(figure: Figure) -> str:
    """Returns the words that a compact figure leaves to its caption, or "" if there are none."""
    return "\n".join(text.get_text() for text in figure.texts if text.get_gid() == CAPTION)


def figure_png(figure: Figure, *, dpi: float = 100, description: str = "") -> bytes:
    """Renders a figure as PNG; the bytes depend only on the figure and the description.

    The description is for readers who cannot see the picture.
    """
    file = io.BytesIO()
    with drawing():
        figure.savefig(
            file,
            format="png",
            dpi=dpi,
            metadata={"Software": None, "Description": description or None},
        )
    return file.getvalue()


def save_figure(
    figure: Figure, path: str | Path, *, dpi: float = 150, title: str = "", description: str = ""
) -> None:
    """Saves a figure as PNG, SVG or PDF, depending on the path's extension.

    Writing the same figure again writes the same bytes. The words that a compact figure leaves to
    its caption are written next to it, for example in ``timeline.caption.txt``.

    Args:
        figure: the figure to write.
        path: the file to write, with the extension ``.png``, ``.svg`` or ``.pdf``.
        dpi: the resolution of a PNG, in pixels per inch.
        title: the title of an SVG or PDF, for screen readers.
        description: a description of the picture for screen readers, by default the caption of a
            compact figure.

    Raises:
        ArgumentError: the path has a different extension.
    """
    path, words = Path(path), caption(figure)
    description = description or words
    if path.suffix == ".png":
        path.write_bytes(figure_png(figure, dpi=dpi, description=description))
    elif path.suffix == ".svg":
        text = figure_svg(figure, title=title, description=description)
        path.write_text(text, encoding="utf-8")
    elif path.suffix == ".pdf":
        about = {
            **dict.fromkeys(("CreationDate", "Creator", "Producer")),
            "Title": title or None,
            "Subject": description or None,
        }
        with drawing():
            figure.savefig(path, metadata=about)
    else:
        raise ArgumentError(
            f"path must end in .png, .svg or .pdf, got {say(str(path))}. Choose one of these "
            "extensions."
        )
    if words:
        path.with_suffix(".caption.txt").write_text(f"{words}\n", encoding="utf-8")


def figure_svg(figure: Figure, *, title: str = "", description: str = "") -> str:
    """Renders a figure as SVG; the output depends only on the arguments.

    The title and the description are for readers who cannot see the picture.
    """
    file = io.StringIO()
    with drawing():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    words = (
        f'\n <title id="title">{escape(title)}</title>\n <desc '
        f'id="desc">{escape(description)}</desc>'
    )
    start, end = file.getvalue().split("<svg", 1)
    attributes, rest = end.split(">", 1)
    return f'{start}<svg role="img" aria-labelledby="title desc"{attributes}>{words}{rest}'
