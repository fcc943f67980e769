"""What is particular to a Jupyter kernel: that it is one, and what it calls the cell that a piece of code came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    return hasattr(_shell(), "kernel")


def name_cells(filenames: Iterable[str]) -> dict[str, str]:
    """Returns what the notebook calls those of some file names that are its cells: ``{"/tmp/...": "Cell In[5]"}``."""
    compiler: Any = getattr(_shell(), "compile", None)
    if not hasattr(compiler, "format_code_name"):
        return {}
    found = {filename: compiler.format_code_name(filename) for filename in filenames}
    return {filename: " ".join(label) for filename, label in found.items() if label is not None}


def rename_places(text: str, names: Mapping[str, str]) -> str:
    """Returns a text in which the lines of cells are called by the names that ``name_cells`` gave.

    Args:
        text: has places in it, as "/tmp/ipykernel_7/123.py:4", or "123.py:4".
        names: of cells, by file name.

    Example:
        >>> rename_places("got 5 here and 4 in rank 0's send at 123.py:4", {"/tmp/ipykernel_7/123.py": "Cell In[5]"})
        "got 5 here and 4 in rank 0's send at Cell In[5]:4"
    """
    for filename, name in names.items():
        text = text.replace(f"{filename}:", f"{name}:").replace(f"{os.path.basename(filename)}:", f"{name}:")
    return text


def _shell() -> Any:
    """Returns IPython's shell, None outside of it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
