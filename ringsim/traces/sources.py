"""Keeps the source code that a run's events refer to, so that the view can show it.

ringsim reads the code when the run ends, and never when a trace is shown, because a file may have
changed since. Only the user's own files are kept: no installed packages, and nothing of Python or
ringsim. Code is saved to a trace file only on request.
"""

from __future__ import annotations

import ast
import linecache
import os
import warnings
from collections.abc import Mapping
from typing import Any

from ringsim.traces.cells import list_files
from ringsim.traces.events import readable
from ringsim.traces.sites import LIBRARIES
from ringsim.traces.value import Trace

MOST_OF_FILE = 200_000
MOST_CHARACTERS = 1_000_000  # of all files together


def attach_sources(trace: Trace, cells: Mapping[str, str] | None = None) -> Trace:
    """Reads the source code of a trace's files into ``trace.sources``, and returns the trace.

    A file that is too large, or changed during the run, is left out, and a note is added.

    Args:
        trace: the trace of a run that has just ended.
        cells: the names of notebook cells, by file, as ``name_cells`` returns them.
    """
    files = {name: file for file, name in (cells or {}).items()}
    start_unix_ns = trace.metadata.get("start_unix_ns", float("inf"))
    left, omitted = MOST_CHARACTERS, []
    for name in list_files(trace.events.tables.files):
        file = files.get(name, name)
        if name not in files:
            if not file.endswith(".py") or any(part in file for part in LIBRARIES):
                continue
            linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
        changed = os.path.exists(file) and os.stat(file).st_mtime_ns > start_unix_ns
        if changed or len(text) > min(left, MOST_OF_FILE):
            omitted.append(os.path.basename(name))
        elif text:
            trace.sources[name] = text
            left -= len(text)
    if omitted:
        trace.metadata["notes"].append(
            f"the source code of {', '.join(omitted)} was left out, because it changed during the "
            f"run or has more than {MOST_OF_FILE:,} characters ({MOST_CHARACTERS:,} in all)"
        )
    return trace


def list_functions(source: str) -> list[tuple[str, range]]:
    r"""Returns the name and the lines of each function in Python code, with inner ones last.

    Code that Python cannot read, such as that of a cell with magics, has none.

    Example:
        >>> list_functions("def outer():\n    def inner():\n        pass\n")
        [('outer', range(1, 4)), ('inner', range(2, 4))]
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return [
        (node.name, range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def check_sources(value: Any) -> dict[str, str]:
    r"""Returns the source code in a trace file, made readable; raises ValueError if it is invalid.

    Example:
        >>> check_sources({"train.py": "x = 1\\n"})
        {'train.py': 'x = 1\\n'}
    """
    if (
        not isinstance(value, dict)
        or not all(isinstance(text, str) for text in value.values())
        or sum(map(len, value.values())) > MOST_CHARACTERS
    ):
        raise ValueError(
            f"sources is not an object with up to {MOST_CHARACTERS} characters of code"
        )
    sources: dict[str, str] = readable(value, lines=True)
    return sources
