"""The text of a notebook cell on one rank: what ``%%ring`` has every rank run. It stands alone, so that a rank need not load IPython."""

from __future__ import annotations

import ast
import pickle
from typing import Any

import cloudpickle

import ringsim

__all__ = ["run_on_rank"]


def run_on_rank(source: str, filename: str, /, **variables: Any) -> Any:
    """Runs the text of a cell on this rank, and returns the value of its last line, as a notebook shows it.

    The cell finds ``ring``, the place of this rank in its ring, and ``ringsim``.

    Args:
        source: the text.
        filename: what tracebacks call it.
        variables: those of the notebook that the cell uses.

    Returns:
        The value, where the last statement is an expression; as text, where the value itself cannot travel; else None.

    Example:
        >>> def worker():
        ...     return run_on_rank("double = 2 * number; double + ring.rank", "<cell>", number=4)
        >>> ringsim.trace(worker, world_size=2).results
        [8, 9]
    """
    space = {"__name__": "__main__", "ring": ringsim.current_ring(), "ringsim": ringsim, **variables}
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), space)
    value = eval(compile(ast.Expression(last.value), filename, "eval"), space) if isinstance(last, ast.Expr) else None
    try:
        cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return repr(value)
    return value
