"""What the ranks print: all of it kept by rank, the part meant for eyes shown as it comes, each line tagged with its rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from ringsim.launch.config import RankConfig

_HIDE, _SHOW = "\x0e", "\x0f"  # as in rank.py
_MARKS: Final = re.compile(f"[{_HIDE}{_SHOW}]")


class RankOutput:
    """Follows the file into which one rank prints.

    Args:
        rank: whose output it is.
        file: where it goes.
        show: whether lines are printed here, tagged, as they come.
        show_hidden: whether that goes for hidden ones, too.
    """

    def __init__(self, rank: int, file: Path, *, show: bool, show_hidden: bool) -> None:
        self._rank = rank
        self._file = file
        self._show = show
        self._show_hidden = show_hidden
        self._offset = 0
        self._hidden = False
        self._kept: list[str] = []
        self._line = ""  # shown text that no line end has followed yet

    @property
    def text(self) -> str:
        """All that the rank has printed, also what was hidden."""
        return "".join(self._kept)

    def follow(self, *, last: bool = False) -> None:
        """Reads what is new and shows the complete lines of it; with ``last`` the incomplete one too."""
        try:
            if self._file.stat().st_size > self._offset:
                with self._file.open("rb") as file:
                    file.seek(self._offset)
                    fresh = file.read()
                cut = len(fresh) if last else fresh.rfind(b"\n") + 1  # a line may still be on its way
                self._offset += cut
                self._take(fresh[:cut].decode("utf-8", errors="replace"))
        except FileNotFoundError:
            pass  # the rank has not started yet
        if last and self._line:
            self._print("\n")

    def _take(self, text: str) -> None:
        position = 0
        for mark in _MARKS.finditer(text):
            self._keep(text[position : mark.start()])
            self._hidden = mark.group() == _HIDE
            position = mark.end()
        self._keep(text[position:])

    def _keep(self, text: str) -> None:
        self._kept.append(text)
        if self._show and (self._show_hidden or not self._hidden):
            self._print(text)

    def _print(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            sys.stdout.write(f"[rank {self._rank}] {line}\n")
        sys.stdout.flush()  # a pipe, too, gets it as it comes


class Outputs:
    """Follows the output of all ranks of a run.

    Args:
        config: of rank 0.
        show, show_hidden: see ``RankOutput``.
    """

    def __init__(self, config: RankConfig, *, show: bool, show_hidden: bool) -> None:
        self._ranks = [
            RankOutput(rank, config.for_rank(rank).output_file, show=show, show_hidden=show_hidden) for rank in range(config.world_size)
        ]

    def follow(self, *, last: bool = False) -> None:
        """See ``RankOutput.follow``."""
        for rank in self._ranks:
            rank.follow(last=last)

    @property
    def texts(self) -> list[str]:
        """Everything that was printed, by rank."""
        return [rank.text for rank in self._ranks]
