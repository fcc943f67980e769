"""How values show themselves: the look of their pictures, and what Jupyter shows of them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from typing import Any, Literal, TypedDict

__all__ = ["Bundle", "Style", "bundle", "shows_images"]

Bundle = tuple[dict[str, Any], dict[str, Any]]  # data and metadata, as Jupyter asks for them


class Style(TypedDict, total=False):
    """How a picture is to be drawn; all functions ``plot_...`` take these as keywords.

    Attributes:
        figsize: width and height of the new figure in inches; a height of None is as much as the
            picture needs at that width. By default as large as suits the picture.
        dpi: pixels an inch of the new figure.
        theme: "light" or "dark"; by default what the user's settings of matplotlib say
            (``plt.style.use("dark_background")``).
        compact: for a column of a paper: without title, in two sizes of letters, and with its notes
            folded to the width.
    """

    figsize: tuple[float, float | None]
    dpi: float
    theme: Literal["light", "dark"] | None
    compact: bool


def bundle(text: str, alt: str, draw: Callable[[], bytes]) -> Bundle:
    """Returns what Jupyter shows of a value: a picture and a text.

    Args:
        text: the value as text, which is all without matplotlib.
        alt: the picture in words.
        draw: draws the picture as PNG.

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

    IPython in a terminal asks for a bundle like a notebook does, and drops the picture.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is None or list(shell.display_formatter.active_types) != ["text/plain"]
