"""What simulated ranks print: kept by rank, and shown as that of real ranks is."""

from __future__ import annotations

import sys
from typing import Any

from ringsim.simulator.clock import Clock

__all__ = ["Outputs"]


class Outputs:
    """Stands in for ``sys.stdout`` (and ``sys.stderr``) while ranks are simulated.

    Args:
        clock: knows which rank runs.
        world_size: how many ranks there are.
    """

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, clock: Clock, world_size: int) -> None:
        self._clock = clock
        self._shown = sys.stdout
        self._kept: list[list[str]] = [[] for _ in range(world_size)]
        self._lines: dict[int, str] = {}  # of a rank that no line end has followed yet

    def write(self, text: str) -> int:
        """Keeps what the rank that runs prints, and shows its whole lines."""
        rank = self._clock.current.number
        if rank < 0:
            return self._shown.write(text)
        self._kept[rank].append(text)
        *lines, self._lines[rank] = (self._lines.get(rank, "") + text).split("\n")
        for line in lines:
            self._shown.write(f"[rank {rank}] {line}\n")
        return len(text)

    def hide(self, text: str) -> None:
        """Keeps what print suppression hides."""
        self._kept[self._clock.current.number].append(text)

    def flush(self) -> None:
        """Shows at once what is to be shown."""
        self._shown.flush()

    def isatty(self) -> bool:
        """Returns False: what a rank prints goes through here first."""
        return False

    def finish(self) -> list[str]:
        """Shows the last lines that have no end; returns all that was printed, by rank."""
        for rank, line in sorted(self._lines.items()):
            if line:
                self._shown.write(f"[rank {rank}] {line}\n")
        return ["".join(kept) for kept in self._kept]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)
