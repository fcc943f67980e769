"""Models the cores that simulated ranks share on a machine."""

from __future__ import annotations

from heapq import heapreplace


class Cores:
    """Cores that are assigned in the order of requests, without interrupting tasks.

    Example:
        >>> cores = Cores(2)
        >>> [cores.book(0.0, 3.0) for _ in range(3)]  # the third waits until 3.0
        [3.0, 3.0, 6.0]
    """

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count  # a heap of the times at which cores become free

    def book(self, from_s: float, seconds: float) -> float:
        """Reserves the core that becomes free first for some seconds.

        Returns the time at which the reservation ends.
        """
        end_s = max(self._free_s[0], from_s) + seconds
        heapreplace(self._free_s, end_s)
        return end_s
