r"""Brings the debugger of a rank to the caller's cell or terminal.

A rank has no terminal of its own. Its debugger therefore reads and writes over the channel to the
caller, which shows each text and sends back the line that the user types::

    rank                                              caller
    ----                                              ------
    "> train.py(7)step()\n(rank 2) "      -------->   prints the lines, and asks with the last one
    reads "p loss\n"                      <--------   the user types "p loss"
"""

from __future__ import annotations

import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def answer(text: str) -> str:
    """Shows a debugger's text; returns the line that the user types, or "quit" if input ends."""
    shown, newline, prompt = text.rpartition("\n")
    sys.stdout.write(shown + newline)
    try:
        return f"{input(prompt)}\n"
    except EOFError:
        return "quit\n"


class RankDebugger(pdb.Pdb):
    """The debugger of a rank, which is also the file that it reads and writes.

    Args:
        ask: the function that shows a text to the user, and returns the line that the user types.
        where: the function that returns the prompt, such as "rank 2".
    """

    def __init__(self, ask: Callable[[str], str], where: Callable[[], str]) -> None:
        terminal: Any = self
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, skip=["ringsim.*"])
        self._ask, self._where, self._text = ask, where, ""

    def write(self, text: str) -> None:
        """Keeps a text, which the next question shows."""
        self._text += text

    def flush(self) -> None:
        """Does nothing."""

    def readline(self) -> str:
        """Asks the user for a line."""
        sys.stdout.flush()  # so that the caller shows the rank's output first
        text, self._text = self._text, ""
        return self._ask(text)

    def interaction(self, *args: Any) -> None:
        """Talks to the user, with the rank in the prompt."""
        self.prompt = f"({self._where()}) "
        super().interaction(*args)

    def stop_at(self, frame: FrameType) -> None:
        """Stops immediately in a frame that has called this function."""
        self.set_trace(frame)
        sys.settrace(None)  # the frames between that one and this one do not matter
        self.interaction(frame, None)
        sys.settrace(self.trace_dispatch)
