"""What is particular to a Jupyter kernel: that it is one, and what it calls the cell that a piece of code came from."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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


def _shell() -> Any:
    """Returns IPython's shell, None outside of it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
