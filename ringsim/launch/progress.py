"""A progress line for long work, in a notebook or a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringsim.traces.cells import in_notebook
from ringsim.traces.parts import PartReader
from ringsim.traces.units import count

QUIET_S = 2.0  # shorter work needs no progress line
_EVERY_S = 0.25  # time between two updates of the progress line
_SHARE = 0.05  # the share of a processor that the updates may use
_LOG_S = 10.0  # time between two texts if there is no terminal


class Progress:
    """The progress line of a long run.

    In a notebook, the line is below the cell; in a terminal, it is the last line. Elsewhere, no
    line is shown, but a text of several lines is printed from time to time.

    Args:
        world_size: the number of ranks.
        live: whether the line is shown from the start.
    """

    _shown: Any = None  # a notebook's display handle, or the text in the terminal

    def __init__(self, world_size: int, *, live: bool = False) -> None:
        self._world_size = world_size
        self._start_s = time.monotonic()
        self._next_s = self._start_s + (0.0 if live else QUIET_S)

    def update(self, done: int, doing: Callable[[], str]) -> None:
        """Shows the number of ``done`` ranks, and briefly what the ranks are ``doing``.

        The line changes only when an update is due.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        begin_s = time.thread_time()
        words = doing()
        used_s = time.thread_time() - begin_s
        self._next_s = now + max(_EVERY_S, used_s / _SHARE)
        self.show(
            f"ringsim: {self._world_size} ranks, {now - self._start_s:.0f} s, {done} done"
            + (f", {words}" if words else "")
        )

    def close(self) -> None:
        """Removes the line."""
        if self._shown is not None:
            self.show("")
        self._shown = None

    def make_room(self) -> None:
        """Removes the line from the terminal, before output is printed in its place."""
        if isinstance(self._shown, str):
            self.close()
            self._next_s = 0.0  # it returns below the output

    def show(self, text: str) -> None:
        """Shows a text of one or more lines in the place of the previous text."""
        if in_notebook():
            from IPython.display import display

            if self._shown is None:
                self._shown = display({"text/plain": text}, raw=True, display_id=True)
            else:
                self._shown.update({"text/plain": text}, raw=True)
        elif sys.stderr is None:
            pass  # it was closed when Python started
        elif sys.stderr.isatty():
            size = shutil.get_terminal_size()
            lines = [line[: size.columns - 1] for line in text.split("\n")[: size.lines - 1]]
            above = (self._shown or "").count("\n")
            back = f"\x1b[{above}A" if above else ""
            self._shown = "\n".join(lines)
            sys.stderr.write(f"{back}\r\x1b[J{self._shown}")
            sys.stderr.flush()
        elif "\n" in text:  # a live view, in a log
            self._next_s += _LOG_S
            sys.stderr.write(f"{text}\n")


def count_progress(parts: Sequence[PartReader]) -> str:
    """Returns the progress of ranks, such as "12,040 messages, step 7", as far as it was read.

    Returns "" if nothing is known.
    """
    messages, step = sum(part.messages for part in parts), max(part.steps for part in parts)
    words = [count(messages, "message") if messages else "", f"step {step}" if step else ""]
    return ", ".join(filter(None, words))
