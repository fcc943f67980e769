"""Reads a rank's output from its file while the rank runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ringsim.launch.job import ALONE, RankConfig


@dataclass
class RankOutput:
    """The output of one rank, read from its file.

    With ``show``, its lines are printed as they arrive, each with its rank, unless the process runs
    a function alone. With ``show_hidden``, lines hidden by print suppression are also printed.
    Before lines are printed, ``make_room`` is called.
    """

    config: RankConfig
    show: bool
    show_hidden: bool
    make_room: Callable[[], None] = lambda: None
    _offset: int = 0
    _hidden: bool = False
    _kept: list[str] = field(default_factory=list)
    _line: str = ""  # shown text without a line end so far

    @property
    def text(self) -> str:
        """All text that the rank has printed, including hidden text."""
        return "".join(self._kept)

    def follow(self, *, last: bool = False) -> None:
        """Reads new output and shows its complete lines; ``last`` also shows an incomplete line."""
        path = self.config.file("out")
        try:
            if path.stat().st_size > self._offset:
                with path.open("rb") as file:
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
        for number, part in enumerate(text.split(self.config.mark)):
            self._hidden ^= number > 0
            self._kept.append(part)
            if self.show and (self.show_hidden or not self._hidden):
                self._print(part)

    def _print(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self.make_room()
        tag = "" if self.config.comm_device == ALONE else f"[rank {self.config.rank}] "
        try:
            for line in lines:
                sys.stdout.write(f"{tag}{line}\n")
            sys.stdout.flush()  # otherwise, a pipe would receive it late
        except (OSError, ValueError, AttributeError):  # no reader, a full disk, or a closed stream
            self.show = False
