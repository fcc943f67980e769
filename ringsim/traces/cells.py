"""The names of notebook cells, which replace the names of the cells' temporary files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ringsim.traces.events import CALLS


def in_notebook() -> bool:
    """Returns whether a Jupyter kernel runs this process."""
    return hasattr(_shell(), "kernel")


def name_cells(filenames: Iterable[str]) -> dict[str, str]:
    """Returns the notebook's names for those files that are notebook cells.

    For example ``{"/tmp/...": "Cell In[5]"}``.
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
    """Returns a file name, with a cell's file named as by ``name_cells``.

    Example:
        >>> rename_file(
        ...     "/tmp/7/8.py:4 > /tmp/7/9.py",
        ...     {"/tmp/7/8.py": "Cell In[5]", "/tmp/7/9.py": "Cell In[2]"},
        ... )
        'Cell In[5]:4 > Cell In[2]'
    """
    return rename_places(f"{name}:", cells)[:-1]


def rename_places(text: str, names: Mapping[str, str]) -> str:
    """Returns a text with the lines of cells named as by ``name_cells``.

    Args:
        text: a text with places such as "/tmp/ipykernel_7/123.py:4" or "123.py:4".
        names: the names of cells, by file name.

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
