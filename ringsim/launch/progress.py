"""One line that says how a long run is doing: rewritten in place, gone when the run ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ringsim.traces.parts import in_notebook

QUIET_S: Final = 2.0  # shorter runs need no progress line
_EVERY_S: Final = 0.5


class Progress:
    """A progress line: in a notebook below the cell, in a terminal on its last line, elsewhere nowhere.

    Args:
        world_size: number of ranks of the run.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._start_s = time.monotonic()
        self._next_s = self._start_s + QUIET_S
        self._shown: Any = None  # a notebook's display handle, or True for the terminal

    def update(self, done: int, doing: Callable[[], str]) -> None:
        """Shows how many ranks are done, if it is time to.

        Args:
            done: ranks whose worker has returned.
            doing: says what they are at, in a few words or none; asked only when it is time.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        words = doing()
        self._show(f"ringsim: {self._world_size} ranks, {now - self._start_s:.0f} s, {done} done" + (f", {words}" if words else ""))

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown is True:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        elif self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)
        self._shown = None

    def _show(self, text: str) -> None:
        if in_notebook():
            bundle = {"text/plain": text}
            if self._shown is None:
                from IPython.display import display

                self._shown = display(bundle, raw=True, display_id=True)
            else:
                self._shown.update(bundle, raw=True)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True
