"""Reads a rank's output from its file while the rank runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ringsim.launch.job import ALONE, RankConfig


class RankOutput:
    """The output of one rank, read from its file.

    With ``show``, its lines are printed as they arrive, each with its rank, unless the process runs
    a function alone. With ``show_hidden``, lines hidden by print suppression are also printed.
    Before lines are printed, ``make_room`` is called.
    """

    def __init__(
        self,
        config: RankConfig,
        *,
        show: bool,
        show_hidden: bool,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._tag = "" if config.comm_device == ALONE else f"[rank {config.rank}] "
        self._file = config.file("out")
        self._mark = config.mark
        self._show = show
        self._show_hidden = show_hidden
        self._make_room = make_room
        self._offset = 0
        self._hidden = False
        self._kept: list[str] = []
        self._line = ""  # shown text without a line end so far

    @property
    def text(self) -> str:
        """All text that the rank has printed, including hidden text."""
        return "".join(self._kept)

    def follow(self, *, last: bool = False) -> None:
        """Reads new output and shows its complete lines; ``last`` also shows an incomplete line."""
        try:
            if self._file.stat().st_size > self._offset:
                with self._file.open("rb") as file:
                    file.seek(self._offset)
                    fresh = file.read()
                # a line may still be incomplete
                cut = len(fresh) if last else fresh.rfind(b"\n") + 1
                self._offset += cut
                self._take(fresh[:cut].decode("utf-8", errors="replace"))
        except FileNotFoundError:
            pass  # the rank has not started yet
        if last and self._line:
            self._print("\n")

    def _take(self, text: str) -> None:
        for number, part in enumerate(text.split(self._mark)):
            self._hidden ^= number > 0
            self._kept.append(part)
            if self._show and (self._show_hidden or not self._hidden):
                self._print(part)

    def _print(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._make_room()
        try:
            for line in lines:
                sys.stdout.write(f"{self._tag}{line}\n")
            sys.stdout.flush()  # otherwise, a pipe would receive it late
        except (OSError, ValueError, AttributeError):  # no reader, a full disk, or a closed stream
            self._show = False
