"""Which rank's prints are shown: rank 0's, and those that say ``force=True``.

Several ranks that all print to one terminal make a text nobody can read. ``suppress_output`` puts a ``print`` in place that shows one
rank's lines and hands the others' to whoever keeps them (``RankState.hidden_output``); ``restore_output`` gives the built-in ``print``
back.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringsim.errors import ArgumentError
from ringsim.state import change_state, get_state

__all__ = ["Quiet", "make_print", "restore_output", "suppress_output"]


def suppress_output(rank: int) -> None:
    """Replaces ``print`` in this process, so that only rank 0's lines and forced ones are shown.

    The new ``print`` takes every argument that the built-in takes, and ``force`` on every rank. What is printed to a file of the caller's
    own always gets there: only stdout and stderr are governed. Calling it again is harmless; the last ``rank`` counts.
    ``destroy_distributed`` and ``restore_output`` undo it. Each rank calls it for itself; it does not block.

    Args:
        rank: the global rank of this process, 0 or more.

    Raises:
        ArgumentError: ``rank`` is no whole number of 0 or more.

    Example:
        >>> suppress_output(1)
        >>> print("hidden")
        >>> print("shown", "on", "rank", 1, sep="-", force=True)
        shown-on-rank-1
        >>> restore_output()
        >>> print("as before")
        as before
    """
    if type(rank) is not int or rank < 0:
        raise ArgumentError(f"rank must be a whole number of 0 or more, got {rank!r}. Pass this process's own rank.")
    restore_output()
    if get_state().clock is not None:
        change_state(undo_print=Quiet(rank))
        return
    original = builtins.print

    def undo() -> None:
        if builtins.print is print_of_rank:
            builtins.print = original

    # Another library may still hold this function after it was undone.
    print_of_rank = make_print(original, lambda: rank != 0 and get_state().undo_print is undo)
    builtins.print = print_of_rank
    change_state(undo_print=undo)


def make_print(original: Callable[..., None], hides: Callable[[], bool]) -> Callable[..., None]:
    """Makes a ``print`` that takes ``force`` and hands to ``RankState.hidden_output`` what is not to be shown.

    Args:
        original: prints.
        hides: whether prints of the calling rank are hidden now.
    """

    def print_of_rank(
        *values: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False, force: bool = False
    ) -> None:
        governed = file is None or file is sys.stdout or file is sys.stderr
        if force or not governed or not hides():
            original(*values, sep=sep, end=end, file=file, flush=flush)
            return
        text = io.StringIO()
        original(*values, sep=sep, end=end, file=text)  # also where nobody keeps it: a bad argument must fail on every rank alike
        keep = get_state().hidden_output
        if keep is not None:
            keep(text.getvalue())

    return print_of_rank


@dataclass(frozen=True)
class Quiet:
    """Says that the prints of a simulated rank are governed; in the place of what gives a real rank its ``print`` back.

    Simulated ranks share one ``print``, which asks the state of the rank that calls it.

    Attributes:
        rank: as ``suppress_output`` was told.
    """

    rank: int

    def __call__(self) -> None:
        """Nothing is to be given back."""


def restore_output() -> None:
    """Gives ``print`` back as it was before ``suppress_output``; harmless where nothing is suppressed.

    Example:
        >>> import builtins
        >>> before = builtins.print
        >>> suppress_output(3)
        >>> restore_output()
        >>> builtins.print is before
        True
    """
    undo = get_state().undo_print
    if undo is not None:
        undo()
        change_state(undo_print=None)
