"""Replaces the names of notebook cells' temporary files with the cells' names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ringsim.traces.events import CALLS, Events


def in_notebook() -> bool:
    """Returns whether this process is a Jupyter kernel."""
    return hasattr(_shell(), "kernel")


def name_cells(filenames: Iterable[str]) -> dict[str, str]:
    """Returns each notebook cell's file together with the notebook's name for the cell.

    The result looks like ``{"/tmp/...": "Cell In[5]"}``.
    """
    compiler: Any = getattr(_shell(), "compile", None)
    if not hasattr(compiler, "format_code_name"):
        return {}
    pieces = (name.rpartition(CALLS) for name in filenames)
    found = {
        name: compiler.format_code_name(name)
        for caller, _, file in pieces
        for name in (caller.rpartition(":")[0], file)
    }
    return {filename: " ".join(label) for filename, label in found.items() if label is not None}


def rename_file(name: str, cells: Mapping[str, str]) -> str:
    """Returns a file name in which each cell's file is replaced by its name in ``cells``.

    Example:
        >>> rename_file(
        ...     "/tmp/7/8.py:4 > /tmp/7/9.py",
        ...     {"/tmp/7/8.py": "Cell In[5]", "/tmp/7/9.py": "Cell In[2]"},
        ... )
        'Cell In[5]:4 > Cell In[2]'
    """
    return rename_places(f"{name}:", cells)[:-1]


def rename_events(events: Events, cells: Mapping[str, str]) -> Events:
    """Returns the events with each cell's file replaced by its name in ``cells``."""
    tables = events.tables
    files = tuple(rename_file(name, cells) for name in tables.files)
    labels = tuple(rename_places(label, cells) for label in tables.labels)
    return replace(events, tables=tables._replace(files=files, labels=labels))


def rename_places(text: str, names: Mapping[str, str]) -> str:
    """Returns a string in which each cell's file is replaced by the cell's name.

    Args:
        text: a text that contains places such as "/tmp/ipykernel_7/123.py:4" or "123.py:4".
        names: the cells' names by file name, as ``name_cells`` returns them.

    Example:
        >>> rename_places(
        ...     "got 5 here and 4 in rank 0's send at 123.py:4",
        ...     {"/tmp/ipykernel_7/123.py": "Cell In[5]"},
        ... )
        "got 5 here and 4 in rank 0's send at Cell In[5]:4"
    """
    for filename, name in names.items():
        text = text.replace(f"{filename}:", f"{name}:").replace(
            f"{os.path.basename(filename)}:", f"{name}:"
        )
    return text


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
