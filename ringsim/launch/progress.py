"""A progress line for long work, in a notebook or a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ringsim.traces.cells import in_notebook

QUIET_S: Final = 2.0  # shorter work needs no progress line
_EVERY_S: Final = 0.5  # time between two updates of the progress line


class Progress:
    """The progress line of a long run.

    In a notebook, the line is below the cell; in a terminal, it is the last line. Elsewhere, no
    line is shown.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._start_s = time.monotonic()
        self._next_s = self._start_s + QUIET_S
        self._shown: Any = None  # a notebook's display handle, or True for the terminal

    def update(self, done: int, doing: Callable[[], str]) -> None:
        """Shows the number of ``done`` ranks, and briefly what the ranks are ``doing``.

        The line changes only when an update is due.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        words = doing()
        self._show(
            f"ringsim: {self._world_size} ranks, {now - self._start_s:.0f} s, {done} done"
            + (f", {words}" if words else "")
        )

    def clear(self) -> None:
        """Removes the line."""
        if self._shown is not None:
            self._show("")
        self._shown = None

    def _show(self, text: str) -> None:
        if in_notebook():
            from IPython.display import display

            if self._shown is None:
                self._shown = display({"text/plain": text}, raw=True, display_id=True)
            else:
                self._shown.update({"text/plain": text}, raw=True)
        elif sys.stderr is not None and sys.stderr.isatty():
            # None: it was closed when Python started
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True
