"""Whose prints are shown: those of rank 0, and those with ``force=True``.

When several ranks print to one terminal, nobody can read it. ``suppress_output`` replaces ``print``
by one that shows the lines of rank 0 and passes those of the others to ``RankState.hidden_output``;
``restore_output`` puts the built-in ``print`` back.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringsim.errors import read_whole
from ringsim.state import change_state, get_state


def suppress_output(rank: int) -> None:
    """Replaces ``print`` in this process: only the lines of rank 0 and forced ones are shown.

    The new ``print`` takes every argument of the built-in one, and ``force`` on every rank. It
    writes its text at once, so that lines of several ranks do not mix. Only stdout and stderr are
    affected: what is printed to another file always gets there. Calling it again is harmless; the
    last ``rank`` counts. ``destroy_distributed`` and ``restore_output`` undo it. Each rank calls it
    for itself; it does not block.

    Args:
        rank: the global rank of this process, 0 or more.

    Raises:
        ArgumentError: ``rank`` is not a whole number of 0 or more.

    Example:
        >>> suppress_output(1)
        >>> print("hidden")
        >>> print("shown", "on", "rank", 1, sep="-", force=True)
        shown-on-rank-1
        >>> restore_output()
        >>> print("as before")
        as before
    """
    rank = read_whole("rank", rank, 0, hint="Pass this process's own rank.")
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
    """Makes a ``print`` that takes ``force``.

    It passes text to ``RankState.hidden_output`` where ``hides()`` says that it is not shown.
    """

    def print_of_rank(
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = False,
        force: bool = False,
    ) -> None:
        stream = sys.stdout if file is None else file
        if stream is None or not (stream is sys.stdout or stream is sys.stderr):
            original(*values, sep=sep, end=end, file=file, flush=flush)
            return
        text = io.StringIO()
        # even if nobody keeps it: a bad argument must fail on every rank
        original(*values, sep=sep, end=end, file=text)
        keep = get_state().hidden_output
        if force or not hides():
            # at once: launchers unbuffer their ranks, and each part would be a write of its own
            stream.write(text.getvalue())
            if flush:
                stream.flush()
        elif keep is not None:
            keep(text.getvalue())

    return print_of_rank


@dataclass(frozen=True)
class Quiet:
    """Marks a simulated rank's prints as suppressed.

    All share one ``print``, which looks at the state of the rank that calls it.
    """

    rank: int

    def __call__(self) -> None:
        """Restores nothing."""


def restore_output() -> None:
    """Restores ``print`` as it was before ``suppress_output``.

    Harmless if nothing is suppressed.
    """
    undo = get_state().undo_print
    if undo is not None:
        undo()
        change_state(undo_print=None)
