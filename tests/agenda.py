"""A virtual clock without ranks, for tests of what asks it: a queue of calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Calls what is due in order of time, and of asking where the time is the same."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._asked = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._time_s

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self._time_s, "nothing can happen in the past"
        heapq.heappush(self._due, (time_s, self._asked, call))
        self._asked += 1

    def run(self) -> int:
        """Runs until nothing is due, and returns how many calls that took."""
        while self._due:
            self._time_s, _, call = heapq.heappop(self._due)
            call()
        return self._asked
