"""The style of pictures, and how Jupyter displays values."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from typing import Literal, NamedTuple, TypedDict

from ringsim.traces.cells import find_shell
from ringsim.traces.documents import JsonObject

Bundle = tuple[JsonObject, JsonObject]  # data and metadata, as Jupyter expects them


class Style(TypedDict, total=False):
    """The style of a picture; all ``plot_...`` functions accept these keyword arguments.

    Attributes:
        figsize: the width and height of the new figure in inches. With a height of None, the height
            fits the picture at that width. By default, both fit the picture.
        dpi: the resolution of the new figure, in pixels per inch.
        theme: "light" or "dark"; by default, the theme of your matplotlib settings
            (``plt.style.use("dark_background")``).
        compact: whether to fit the picture into a column of a paper, as a low strip if it has a
            time axis. The title, the notes and the source are left to the caption, which
            ``save_figure`` writes next to the figure.
    """

    figsize: tuple[float, float | None]
    dpi: float
    theme: Literal["light", "dark"] | None
    compact: bool


class Images(NamedTuple):
    """A picture for a notebook, as PNG and as SVG that follows the page's theme.

    The SVG is "" if it would be large.
    """

    png: bytes
    svg: str


def bundle(text: str, alt: str, draw: Callable[[], Images]) -> Bundle:
    """Returns the picture and text that Jupyter displays for a value.

    Notebooks show the HTML, in which the picture follows the theme. The PNG is for tools that do
    not show HTML.

    Args:
        text: the value as text, which is the only output if matplotlib is missing.
        alt: a description of the picture.
        draw: a function that draws the picture.

    Example:
        >>> bundle("4 ranks", "a ring", lambda: Images(b"png", ""))
        ({'text/plain': '4 ranks', 'image/png': 'cG5n'}, {'image/png': {'alt': 'a ring'}})
        >>> bundle("4 ranks", "a ring", lambda: Images(b"png", "<svg>"))[0]["text/html"]
        '<img alt="a ring" src="data:image/svg+xml;base64,PHN2Zz4=">'
    """
    data = {"text/plain": text}
    if not shows_images():
        return data, {}
    try:
        images = draw()
    except ImportError:
        return data, {}
    data["image/png"] = base64.b64encode(images.png).decode("ascii")
    if images.svg:
        data["text/html"] = image_html(images, alt)
    return data, {"image/png": {"alt": alt}}


def image_html(images: Images, alt: str) -> str:
    """Returns a picture as an HTML element that needs no other files."""
    kind, content = ("svg+xml", images.svg.encode()) if images.svg else ("png", images.png)
    encoded = base64.b64encode(content).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{encoded}">'


def shows_images() -> bool:
    """Returns whether the front end shows images.

    IPython in a terminal also requests a bundle, but discards the picture.
    """
    shell = find_shell()
    return shell is None or list(shell.display_formatter.active_types) != ["text/plain"]
