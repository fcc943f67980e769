"""The cores of a machine that simulated ranks share."""

from __future__ import annotations

from heapq import heapreplace

__all__ = ["Cores"]


class Cores:
    """Gives cores to whoever asks, in the order in which they ask; nobody is interrupted.

    Example:
        >>> cores = Cores(2)
        >>> [cores.book(0.0, 3.0) for _ in range(3)]  # the third waits until 3.0
        [3.0, 3.0, 6.0]
    """

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count  # a heap: from when on each core is free

    def book(self, from_s: float, seconds: float) -> float:
        """Takes the core that is free first, for some seconds.

        Returns when whoever asked is done with it.
        """
        end_s = max(self._free_s[0], from_s) + seconds
        heapreplace(self._free_s, end_s)
        return end_s
