"""The style of pictures, and how Jupyter displays values."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any, Literal, TypedDict

__all__ = ["Bundle", "Style", "bundle", "shows_images"]

Bundle = tuple[dict[str, Any], dict[str, Any]]  # data and metadata, as Jupyter expects them


class Style(TypedDict, total=False):
    """The style of a picture; all ``plot_...`` functions accept these keyword arguments.

    Attributes:
        figsize: the width and height of the new figure in inches. With a height of None, the height
            fits the picture at that width. By default, both fit the picture.
        dpi: the resolution of the new figure, in pixels per inch.
        theme: "light" or "dark"; by default, the theme of your matplotlib settings
            (``plt.style.use("dark_background")``).
        compact: whether to fit the picture into a column of a paper, with no title, only two font
            sizes, and notes wrapped to the column's width.
    """

    figsize: tuple[float, float | None]
    dpi: float
    theme: Literal["light", "dark"] | None
    compact: bool


def bundle(text: str, alt: str, draw: Callable[[], bytes]) -> Bundle:
    """Returns the picture and text that Jupyter displays for a value.

    Args:
        text: the value as text, which is the only output if matplotlib is missing.
        alt: a description of the picture.
        draw: a function that draws the picture and returns it as PNG.

    Example:
        >>> bundle("4 ranks", "a ring", lambda: b"png")
        ({'text/plain': '4 ranks', 'image/png': 'cG5n'}, {'image/png': {'alt': 'a ring'}})
    """
    data = {"text/plain": text}
    if not shows_images():
        return data, {}
    try:
        picture = draw()
    except ImportError:
        return data, {}
    data["image/png"] = base64.b64encode(picture).decode("ascii")
    return data, {"image/png": {"alt": alt}}


def shows_images() -> bool:
    """Returns whether the front end shows images.

    IPython in a terminal also requests a bundle, but discards the picture.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is None or list(shell.display_formatter.active_types) != ["text/plain"]
