"""The display of values: the style of their pictures, and their output in Jupyter."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any, Literal, TypedDict

__all__ = ["Bundle", "Style", "bundle", "shows_images"]

Bundle = tuple[dict[str, Any], dict[str, Any]]  # data and metadata, as Jupyter expects them


class Style(TypedDict, total=False):
    """The style of a picture; all ``plot_...`` functions take these keywords.

    Attributes:
        figsize: the width and height of the new figure in inches; a height of None fits the picture
            at that width. By default the size fits the picture.
        dpi: the pixels per inch of the new figure.
        theme: "light" or "dark"; by default the theme of your matplotlib settings
            (``plt.style.use("dark_background")``).
        compact: True for a column of a paper: no title, two font sizes, and notes wrapped to the
            width.
    """

    figsize: tuple[float, float | None]
    dpi: float
    theme: Literal["light", "dark"] | None
    compact: bool


def bundle(text: str, alt: str, draw: Callable[[], bytes]) -> Bundle:
    """Returns a picture and a text, for Jupyter to show a value.

    Args:
        text: the value as text, the only output if matplotlib is missing.
        alt: the picture in words.
        draw: a function that draws the picture as PNG.

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

    IPython in a terminal also asks for a bundle, but discards the picture.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is None or list(shell.display_formatter.active_types) != ["text/plain"]
