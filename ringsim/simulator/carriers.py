"""Who carries messages on the virtual clock, and says when each one arrives.

Here each ordered pair of ranks has a link of its own, which takes one message after the other. A message holds the link while its bytes
go in, and arrives one latency after the last of them::

    ready    start             free       arrive
      |--------|=================|----------|
        busy     size * beta       alpha              start = max(ready, free of the message before)

Links that pairs of ranks share are in ``shared_links``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from ringsim.errors import ArgumentError
from ringsim.link import Link, check_links

__all__ = ["Agenda", "Arrived", "Carrier", "Line", "PrivateLinks", "degraded"]

Arrived = Callable[[float], None]  # called with the time of an arrival, at that time

_NO_DEGREES: Final[Mapping[tuple[int, int], float]] = {}


class Agenda(Protocol):
    """What a carrier asks of the virtual clock."""

    def now_s(self) -> float:
        """Returns the time, in seconds."""
        ...

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Calls ``call`` at a time, now at the earliest; what is due at the same time is called in the order in which it was asked for."""
        ...


class Carrier(Protocol):
    """Carries the messages of all ranks.

    Messages of one source and one destination arrive in the order in which they were handed over.
    """

    def carry(self, src: int, dst: int, size_bytes: int, ready_s: float, arrived: Arrived | None = None) -> float | None:
        """Takes a message.

        Args:
            src: the rank it comes from.
            dst: the rank it goes to.
            size_bytes: its size, 0 or more.
            ready_s: when it may leave: not before now.
            arrived: what to call when it arrives, where that is not known yet; None where nobody asks.

        Returns:
            When it arrives, in seconds, where that is known at once; then ``arrived`` is not called. None where it depends on messages
            still to come.
        """
        ...

    def link_of(self, src: int, dst: int) -> Link:
        """Returns what a message that nobody disturbs costs; carries none.

        Args:
            src: the rank it comes from.
            dst: the rank it goes to, another one.

        Raises:
            ArgumentError: there is no link.
        """
        ...


class Line:
    """One link, which nobody else uses.

    Args:
        link: what a message costs on it.

    Attributes:
        free_s: when it has taken all bytes of the messages until now.
    """

    __slots__ = ("alpha_s", "beta_s", "free_s")

    def __init__(self, link: Link) -> None:
        self.alpha_s, self.beta_s = link.alpha_s, link.beta_s_per_byte
        self.free_s = 0.0

    def carry(self, size_bytes: int, ready_s: float) -> float:
        """Takes a message of a size that may leave at a time, and returns when it arrives."""
        free_s = self.free_s
        self.free_s = free_s = (ready_s if ready_s > free_s else free_s) + size_bytes * self.beta_s
        return free_s + self.alpha_s


class PrivateLinks:
    """A link for each ordered pair of ranks, which nobody else uses: each arrival is known at once.

    Args:
        link: what a message costs: one for all pairs, or one for each ordered pair (src, dst) that talks.
        slower: how many times as long a link takes, by (src, dst).

    Raises:
        ArgumentError: ``link`` is no link and no table of links, or an entry of it is none.

    Example:
        >>> carrier = PrivateLinks(Link(alpha_s=1.0, beta_s_per_byte=0.5))
        >>> carrier.carry(0, 1, size_bytes=4, ready_s=0.0)  # in until 2.0
        3.0
        >>> carrier.carry(0, 1, size_bytes=4, ready_s=0.0)  # waits for the first one's last byte
        5.0
        >>> carrier.carry(1, 0, size_bytes=4, ready_s=0.0)  # the other way there is another link
        3.0
    """

    def __init__(self, link: Link | Mapping[tuple[int, int], Link], slower: Mapping[tuple[int, int], float] = _NO_DEGREES) -> None:
        check_links(link)
        self._link = link
        self._slower = slower
        self._lines: dict[tuple[int, int], Line] = {}  # by (src, dst)

    def carry(self, src: int, dst: int, size_bytes: int, ready_s: float, arrived: Arrived | None = None) -> float:
        """Takes a message, as `Carrier.carry` says.

        Returns:
            When it arrives, in seconds.

        Raises:
            ArgumentError: the table of links has none for this pair.
        """
        return self.line_of(src, dst).carry(size_bytes, ready_s)

    def line_of(self, src: int, dst: int) -> Line:
        """Returns the line of a pair, which carries all its messages.

        Raises:
            ArgumentError: the table of links has none for this pair.
        """
        line = self._lines.get((src, dst))
        if line is None:
            line = self._lines[src, dst] = self._make_line(src, dst)
        return line

    def _make_line(self, src: int, dst: int) -> Line:
        return Line(self.link_of(src, dst))

    def link_of(self, src: int, dst: int) -> Link:
        """Returns what a message that nobody disturbs costs, as `Carrier.link_of` says.

        Raises:
            ArgumentError: the table of links has none for this pair.
        """
        link = self._link
        if isinstance(link, Mapping):
            found = link.get((src, dst))
            if found is None:
                raise ArgumentError(
                    f"link must have an entry for each pair that talks, got none for ({src}, {dst}). Add ({src}, {dst}): Link(...)."
                )
            link = found
        return degraded(link, self._slower.get((src, dst), 1.0))


def degraded(link: Link, factor: float) -> Link:
    """Returns a link on which every message takes ``factor`` times as long.

    Args:
        link: what it would be.
        factor: above 0.

    Returns:
        The link; the same one for a factor of 1.

    Example:
        >>> degraded(Link(alpha_s=1.0, beta_s_per_byte=0.5), 5).time_s(4)
        15.0
    """
    return link if factor == 1.0 else Link(link.alpha_s * factor, link.beta_s_per_byte * factor)
