"""A group of ranks on MPI: a communicator, and which global rank stands where in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from ringsim.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class MpiGroup:
    """The ranks that share a communicator; answers what a ``ProcessGroup`` is asked, and is passed as ``group=``.

    Attributes:
        comm: the mpi4py communicator.
        ranks: the members, global ranks, in the group's order.
        group_name: "world", or a name that is the same on all members.
        number: the same on all members, and no other group's; the world's is 0.
        timeout_s: limit of one operation on the group, in seconds.
        group_desc: what the user called it.
        places: the place of each member, by its global rank.
    """

    comm: Any = field(repr=False)
    ranks: tuple[int, ...]
    group_name: str
    number: int = field(repr=False)
    timeout_s: float = field(repr=False)
    group_desc: str = field(default="", repr=False)
    places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {rank: place for place, rank in enumerate(self.ranks)})

    def __getattr__(self, name: str) -> Any:
        """Says what to do instead to torch's own functions, which look for the methods of ``ProcessGroup``."""
        raise AttributeError(
            f'the group of a call of torch.distributed must be one of torch\'s own, got group "{self.group_name}" of MPI, which has no '
            f"{name}. Use the functions of ringsim.comm: from ringsim import comm as dist."
        )

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns this process's place in the group."""
        place: int = self.comm.Get_rank()
        return place

    def place_of(self, what: str, global_rank: int | None, group_rank: int | None) -> int:
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
                    f"Its global ranks are {_shorten(self.ranks)}."
                )
            return place
        try:
            return self.places[to_index(what, global_rank)]
        except KeyError:
            raise ArgumentError(
                f"{what} must be a global rank of the group, one of {_shorten(self.ranks)}, got {global_rank} ({self._here()}). "
                f"To count within the group, use group_{what}."
            ) from None

    def _here(self) -> str:
        return f'rank {self.rank()} of {len(self.ranks)} of group "{self.group_name}"'


def to_index(what: str, value: Any) -> int:
    """Returns an argument as an integer.

    Raises:
        ArgumentError: it is none.
    """
    try:
        return index(value)
    except TypeError:
        raise ArgumentError(f"{what} must be an integer, got {value!r}. Give a rank's number.") from None


def _shorten(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}]"
