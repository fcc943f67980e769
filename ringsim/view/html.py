"""The view as one HTML file: the program, its style and the traces, and nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringsim.errors import ArgumentError
from ringsim.traces.lazy import resolve
from ringsim.view.encoding import pack

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["to_html"]

PROGRAM: Final = ("columns.js", "pyramid.js", "timeline.js", "ring.js", "panels.js", "main.js")
MOST_RUNS: Final = 8
MOST_PICTURED: Final = 100_000  # events of a trace whose picture is drawn, for printers and for those without JavaScript


def to_html(traces: Trace | Sequence[Trace], path: str | PathLike[str]) -> None:
    """Writes traces as an interactive page, one file that works from disk, in a sandboxed frame and without a network.

    The page may run no script and load no style but its own: its policy names them by their hashes.

    Args:
        traces: a trace, or up to 8 on one axis.
        path: where to; an existing file is replaced.

    Raises:
        ArgumentError: there are no traces, or too many.
        TraceFileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [0], "op": [OP_CODES["barrier"]], "post_ns": [5]}), {"world_size": 1})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     to_html(trace, f"{directory}/run.html")
        ...     Path(directory, "run.html").read_text()[:15]
        '<!DOCTYPE html>'
    """
    several = list(traces) if isinstance(traces, Sequence) else [traces]
    if not 1 <= len(several) <= MOST_RUNS:
        raise ArgumentError(f"traces must be 1 to {MOST_RUNS}, got {len(several)}. Choose those to compare.")
    resolve("write_whole")(Path(path), lambda file: file.write(_page(several).encode()))


def _page(traces: Sequence[Trace]) -> str:
    program, look = _part(*PROGRAM), _part("style.css")
    title = "ringsim: " + ", ".join(f"{trace.world_size} rank{'' if trace.world_size == 1 else 's'}" for trace in traces)
    policy = f"default-src 'none'; script-src {_hash(program)}; style-src {_hash(look)}; img-src data:"
    data = "".join(f'<script type="application/x-ringsim">{base64.b64encode(pack(trace)).decode("ascii")}</script>\n' for trace in traces)
    body = _part("page.html").replace("{title}", html.escape(title)).replace("{picture}", "".join(map(_picture, traces)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{look}</style>\n</head>\n<body>\n{body}{data}<script>{program}</script>\n</body>\n</html>\n"
    )


@cache
def _part(*names: str) -> str:
    """Returns files of the page, one behind the other."""
    here = files("ringsim.view") / "page"
    text = "\n".join((here / name).read_text("utf-8") for name in names)
    return f'"use strict";\n{text}' if names[0].endswith(".js") else text


def _hash(text: str) -> str:
    """Returns a script or a style as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _picture(trace: Trace) -> str:
    """Returns the still picture, which printers get, and browsers that run no script; nothing without Matplotlib."""
    if len(trace.events) > MOST_PICTURED:
        return ""
    try:
        png: bytes = resolve("png")(trace)
    except ImportError:
        return ""
    return f'<img alt="{html.escape(trace.describe())}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'
