"""A group of simulated ranks: one object that all its members hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringsim.comm.backend import to_index
from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.simulator.clock import Clock

__all__ = ["SimulatedGroup", "shorten"]


class SimulatedGroup:
    """Ranks that talk with each other; answers what a ``ProcessGroup`` is asked, and is passed as ``group=``.

    Args:
        clock: knows which rank asks.
        name: the same on all members: "world", "ring:2>3", ...
        ranks: the members, global ranks, in the group's order.
        number: its number in the trace.
        desc: what the user called it.

    Attributes:
        places: the place of each member, by its global rank.
        calls: how many collectives each member has called, by place; empty before the first.
        free_s: when the bytes of its last collective have left, where its links are its own.
        links: the different links from each member to the next one, once somebody has asked.
        meetings: the collectives that not all members have come to, by their number.
    """

    __slots__ = ("calls", "clock", "desc", "free_s", "group_name", "links", "meetings", "number", "places", "ranks")

    def __init__(self, clock: Clock, name: str, ranks: tuple[int, ...], number: int, desc: str = "undefined") -> None:
        self.clock = clock
        self.group_name = name
        self.ranks = ranks
        self.number = number
        self.desc = desc
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.calls: list[int] = []
        self.free_s = 0.0
        self.links: tuple[Link, ...] = ()
        self.meetings: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Says what to do instead to torch's own functions, which look for the methods of ``ProcessGroup``."""
        raise AttributeError(
            f'the group of a call of torch.distributed must be one of torch\'s own, got group "{self.group_name}" of the simulator, which '
            f"has no {name}. Use the functions of ringsim.comm: from ringsim import comm as dist."
        )

    def __repr__(self) -> str:
        return f'SimulatedGroup("{self.group_name}", {shorten(self.ranks)})'

    @property
    def group_desc(self) -> str:
        """What the user called the group."""
        return self.desc

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns the calling rank's place in the group, -1 outside."""
        rank = self.clock.current.number
        return self.places.get(rank, -1)

    def place_of(self, what: str, global_rank: Any, group_rank: Any) -> int:
        """Returns the group rank that is meant by one of the two.

        Args:
            what: "dst" or "src", for the error.
            global_rank: a global rank, or None.
            group_rank: a place in the group, or None.

        Raises:
            ArgumentError: both or none are given, or the group has no such rank.
        """
        if (global_rank is None) == (group_rank is None):
            given = "none" if global_rank is None else f"{global_rank} and {group_rank}"
            raise ArgumentError(f"one of {what} and group_{what} must be given, got {given} ({self._here()}). Leave one of them out.")
        if global_rank is None:
            place = to_index(f"group_{what}", group_rank)
            if not 0 <= place < len(self.ranks):
                raise ArgumentError(
                    f"group_{what} must be a rank of the group, from 0 to {len(self.ranks) - 1}, got {place} ({self._here()}). "
                    f"Its global ranks are {shorten(self.ranks)}."
                )
            return place
        rank = to_index(what, global_rank)
        if rank not in self.places:
            raise ArgumentError(
                f"{what} must be a global rank of the group, one of {shorten(self.ranks)}, got {rank} ({self._here()}). "
                f"To count within the group, use group_{what}."
            )
        return self.places[rank]

    def _here(self) -> str:
        return f'rank {self.rank()} of {len(self.ranks)} of group "{self.group_name}"'


def shorten(ranks: Sequence[int]) -> str:
    """Returns ranks in words: all of them, or of many the first.

    Example:
        >>> shorten([0, 2]), shorten(range(100))
        ('[0, 2]', '[0, 1, 2, 3, 4, 5, 6, 7] and 92 more')
    """
    return f"{list(ranks[:8])} and {len(ranks) - 8} more" if len(ranks) > 16 else str(list(ranks))
