"""The cores of one machine, on the virtual clock: who needs one waits until one is free.

More ranks than cores is what a laptop has. Ranks that sleep need none; posting a message, bringing its bytes over and the program between
what a trace shows do. With two cores and three ranks that begin at once::

    core 0   |== rank 0 posts ==|== rank 2 posts ==|          rank 2 asked last, and waits for the first core that is free
    core 1   |== rank 1 posts ==|== 0 -> 1 is carried ====|
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace

from ringsim.link import Link
from ringsim.simulator.carriers import Line, PrivateLinks

__all__ = ["Cores", "SharedCores"]


class Cores:
    """Gives cores to whoever asks, in the order in which they ask; nobody is interrupted.

    Args:
        count: how many there are, from 1.

    Example:
        >>> cores = Cores(2)
        >>> [cores.book(0.0, 3.0) for _ in range(3)]  # the third waits until 3.0
        [3.0, 3.0, 6.0]
    """

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count  # a heap: from when on each core is free

    def book(self, from_s: float, seconds: float) -> float:
        """Takes the core that is free first.

        Args:
            from_s: when it is needed, in seconds.
            seconds: for how long.

        Returns:
            When whoever asked is done with it.
        """
        end_s = max(self._free_s[0], from_s) + seconds
        heapreplace(self._free_s, end_s)
        return end_s


class _Line(Line):
    """A link whose messages need a core for as long as each takes alone; what a slower link takes beyond that needs none."""

    __slots__ = ("alone", "cores")

    def __init__(self, link: Link, alone: Link, cores: Cores) -> None:
        super().__init__(link)
        self.alone, self.cores = alone, cores

    def carry(self, size_bytes: int, ready_s: float) -> float:
        """Takes a message of a size that may leave at a time, and returns when it arrives."""
        begin_s = max(ready_s, self.free_s)
        arrives_s = super().carry(size_bytes, ready_s)
        return max(arrives_s, self.cores.book(begin_s, self.alone.time_s(size_bytes)))


class SharedCores(PrivateLinks):
    """A link for each ordered pair of ranks; each message needs a core for as long as it takes alone.

    Args:
        link: what a message costs that is alone.
        slower: how many times as long a link takes, by (src, dst): what is beyond the link's own time needs no core.
        count: how many cores there are.

    Example:
        >>> carrier = SharedCores(Link(alpha_s=1.0, beta_s_per_byte=0.5), {}, count=1)
        >>> carrier.carry(0, 1, size_bytes=4, ready_s=0.0), carrier.carry(2, 3, size_bytes=4, ready_s=0.0)
        (3.0, 6.0)
    """

    def __init__(self, link: Link, slower: Mapping[tuple[int, int], float], count: int) -> None:
        super().__init__(link, slower)
        self.cores = Cores(count)
        self._alone = link

    def _make_line(self, src: int, dst: int) -> Line:
        return _Line(self.link_of(src, dst), self._alone, self.cores)
