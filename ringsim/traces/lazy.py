"""The functions of higher floors behind methods, by dotted name, imported on use.

Those of ``Trace``, ``Bandwidths`` and ``Diagnosis``. The layer test exempts this table and nothing
else.
"""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, TypedDict

from ringsim.errors import RingError

__all__ = ["NAMES", "Style", "bundle", "removed", "resolve", "shows_images"]

NAMES: Final = {
    "explain": "ringsim.diagnose.explain:explain",
    "filter": "ringsim.traces.filtering:filter_trace",
    "redact": "ringsim.traces.redaction:redact",
    "summarise": "ringsim.traces.summary:summarise",
    "describe": "ringsim.traces.summary:describe",
    "save": "ringsim.traces.files:save",
    "write_whole": "ringsim.traces.files:write_whole",
    "to_perfetto": "ringsim.exchange.perfetto:to_perfetto",
    "to_chrome": "ringsim.exchange.chrome:to_chrome",
    "to_html": "ringsim.view.html:to_html",
    "view": "ringsim.view.notebook:view",
    "plot_ring": "ringsim.plot.ring:plot_ring",
    "plot_timeline": "ringsim.plot.timeline:plot_timeline",
    "plot_bandwidth": "ringsim.plot.charts:plot_bandwidth",
    "png": "ringsim.plot.timeline:trace_png",
    "bandwidth_png": "ringsim.plot.charts:bandwidth_png",
    "plot_overlay": "ringsim.plot.overlay:plot_overlay",
    "overlay_png": "ringsim.plot.overlay:overlay_png",
    "plot_schedule_run": "ringsim.plot.schedule_run:plot_schedule_run",
    "schedule_run_png": "ringsim.plot.schedule_run:schedule_run_png",
    "plot_waitfor": "ringsim.plot.waitfor:plot_waitfor",
    "waitfor_png": "ringsim.plot.waitfor:waitfor_png",
}


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


def resolve(name: str) -> Any:
    """Imports and returns the function that the table lists under ``name``.

    Example:
        >>> resolve("save").__module__
        'ringsim.traces.files'
    """
    module, function = NAMES[name].split(":")
    return getattr(importlib.import_module(module), function)


def removed(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a stand-in for a removed function; calling it raises RingError.

    It stays for one version.

    Args:
        name: the function that was removed.
        instead: what to use.

    Example:
        >>> try:
        ...     removed("to_old", "to_new")("run.old")
        ... except RingError as error:
        ...     print(error)
        to_old was removed in ringsim 0.3: use to_new, or ringsim 0.2.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        """Raises RingError: this function was removed."""
        raise RingError(f"{name} was removed in ringsim 0.3: use {instead}, or ringsim 0.2.")

    return refuse


def bundle(value: Any, text: str, png: str, alt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what Jupyter shows of a value.

    A picture and a text, or the text alone without matplotlib.

    Args:
        value: the value to show.
        text: its text.
        png: the table's name of the function that draws its picture.
        alt: the picture in words.

    Returns:
        Data and metadata, as ``_repr_mimebundle_`` returns them.
    """
    data: dict[str, Any] = {"text/plain": text}
    if not shows_images():
        return data, {}
    try:
        picture: bytes = resolve(png)(value)
    except ImportError:
        return data, {}
    data["image/png"] = base64.b64encode(picture).decode("ascii")
    return data, {"image/png": {"alt": alt}}


def shows_images() -> bool:
    """Tells whether the front end shows images.

    IPython in a terminal asks for a bundle like a notebook does, and drops the picture.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is None or list(shell.display_formatter.active_types) != ["text/plain"]
