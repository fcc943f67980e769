"""Controls printing: shows only what rank 0 prints and what is printed with ``force=True``.

If several ranks print to one terminal, the output is unreadable. ``suppress_output`` replaces
``print`` with a version that shows rank 0's lines and passes the other ranks' lines to
``RankState.hidden_output``; ``restore_output`` restores the built-in ``print``.
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
    """Replaces ``print`` in this process so that only rank 0's and forced lines are shown.

    The new ``print`` accepts ``force`` in addition to the arguments of the built-in ``print``. It
    writes its text in one piece, so lines from different ranks do not mix. Only stdout and stderr
    are affected; text printed to any other file is always written. Calling this function again is
    harmless; the last ``rank`` applies. ``destroy_distributed`` and ``restore_output`` undo its
    effect. Each rank calls the function separately; the call does not block.

    Args:
        rank: the global rank of this process; must be non-negative.

    Raises:
        ArgumentError: ``rank`` is not a non-negative integer.

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

    # Another library may still hold this function after it has been undone.
    print_of_rank = make_print(original, lambda: rank != 0 and get_state().undo_print is undo)
    builtins.print = print_of_rank
    change_state(undo_print=undo)


def make_print(original: Callable[..., None], hides: Callable[[], bool]) -> Callable[..., None]:
    """Creates a ``print`` function that accepts ``force``.

    The function passes its text to ``RankState.hidden_output`` if ``hides()`` is true.
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
        # even if the text is dropped: a bad argument must fail on every rank
        original(*values, sep=sep, end=end, file=text)
        keep = get_state().hidden_output
        if force or not hides():
            # in one write: launchers unbuffer their ranks, so each part would be a separate write
            stream.write(text.getvalue())
            if flush:
                stream.flush()
        elif keep is not None:
            keep(text.getvalue())

    return print_of_rank


@dataclass(frozen=True)
class Quiet:
    """A ``print`` that marks a simulated rank's prints as suppressed.

    All simulated ranks share one ``print``, which checks the state of the calling rank.
    """

    rank: int

    def __call__(self) -> None:
        """Does nothing, because no ``print`` was replaced."""


def restore_output() -> None:
    """Restores the ``print`` that ``suppress_output`` replaced; harmless if none was replaced."""
    undo = get_state().undo_print
    if undo is not None:
        undo()
        change_state(undo_print=None)
