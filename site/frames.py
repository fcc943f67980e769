"""Replaces views and explorers on the site with frames that need no kernel.

Each kernel that builds the site runs this script first. Below a view, the site also shows its still
pictures.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.display import display

STATIC = Path(os.environ["RINGSIM_SITE_STATIC"])


def show_view(view: Any) -> None:
    """Writes the page of a view, and shows the page and the still pictures."""
    from ringsim.view.html import to_html

    to_html(view.traces, unnamed := STATIC / "view.html", source=True)
    name = f"view-{hashlib.sha256(unnamed.read_bytes()).hexdigest()[:12]}.html"
    unnamed.replace(STATIC / name)
    show_frame(name, "An interactive view of the run", "36rem")
    for trace in view.traces:
        display(trace)


def show_explorer(explorer: Any) -> None:
    """Shows the page of an explorer, which ``conf.py`` has written."""
    from ringsim import explore

    (name,) = (name for name in explore.__all__ if getattr(explore, name)().title == explorer.title)
    show_frame(f"{name}.html", explorer.title, "46rem")


def show_frame(name: str, title: str, height: str) -> None:
    """Shows one of the site's static pages in a frame."""
    style = f"width: 100%; height: {height}; border: 1px solid"
    frame = (
        f'<iframe src="../_static/{name}" title="{title}" loading="lazy" style="{style}"></iframe>'
    )
    display({"text/html": frame, "text/plain": title}, raw=True)


formatter = get_ipython().display_formatter.ipython_display_formatter
formatter.for_type_by_name("ringsim.view.notebook", "View", show_view)
formatter.for_type_by_name("ringsim.view.explorer", "Explorer", show_explorer)
