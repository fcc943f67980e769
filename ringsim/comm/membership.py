"""What the backends that keep groups of their own, MPI and the simulator, answer and check alike: who is in a group, what fits it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ringsim.comm.mpi_group import to_index
from ringsim.errors import ArgumentError

__all__ = ["Membership"]


class Membership:
    """The part of a backend that asks its groups; they answer ``rank()``, ``size()`` and ``place_of()``, and have ``ranks``."""

    @abstractmethod
    def here(self) -> str:
        """Returns which rank this is, for errors."""

    @abstractmethod
    def _find(self, group: Any) -> Any:
        """Returns a group given as torch's functions take it; None where this rank is outside."""

    def get_rank(self, group: Any = None) -> int:
        """Returns this rank's number within the group, -1 outside of it; with None its global rank."""
        found = self._find(group)
        return -1 if found is None else int(found.rank())

    def get_world_size(self, group: Any = None) -> int:
        """Returns how many ranks the group has, -1 outside of it; with None how many there are."""
        found = self._find(group)
        return -1 if found is None else int(found.size())

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Returns the global ranks of a group, in the group's order.

        Raises:
            ArgumentError: this rank is outside.
        """
        found = self._find(group)
        if found is None:
            raise ArgumentError(f"the ranks of a group must be asked for within it, got a question from outside ({self.here()}).")
        return list(found.ranks)

    def _members(self, ranks: Sequence[int] | None, sort_ranks: bool) -> tuple[int, ...]:
        """Returns the global ranks that ``new_group`` is asked for, in the group's order."""
        size = self.get_world_size()
        members = tuple(range(size)) if ranks is None else tuple(to_index("ranks", rank) for rank in ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
            raise ArgumentError(
                f"ranks must be different ranks from 0 to {size - 1}, got {list(members)} ({self.here()}). Leave out the others."
            )
        return tuple(sorted(members)) if sort_ranks else members

    def _root(self, group: Any, what: str, global_rank: int | None, group_rank: int | None) -> int:
        """Returns the group rank of a root; rank 0 of all where none is given, as torch has it."""
        return int(group.place_of(what, 0 if global_rank is None and group_rank is None else global_rank, group_rank))

    def _check_parts(self, what: str, whole: torch.Tensor, other: str, part: torch.Tensor, group: Any) -> None:
        if whole.numel() != part.numel() * group.size():
            raise ArgumentError(
                f"{what} must have {group.size()} times the {part.numel()} elements of {other}, got {whole.numel()} ({self.here()}). "
                "Make it so large."
            )

    def _cut(self, what: str, tensor: torch.Tensor, sizes: Any, group: Any) -> list[int]:
        """Returns how many rows of a tensor belong to each rank: the lengths that are given, or equal parts."""
        if tensor.dim() == 0:
            raise ArgumentError(f"{what} must have a first dimension to be cut along, got a number ({self.here()}). Reshape it to (1,).")
        length, count = tensor.shape[0], group.size()
        if not sizes:
            if length % count:
                raise ArgumentError(
                    f"the first dimension of {what} must be a multiple of the {count} ranks, got {length} ({self.here()}). "
                    f"Give {what}_split_sizes."
                )
            return [length // count] * count
        lengths = [int(size) for size in sizes]
        if len(lengths) != count or min(lengths) < 0 or sum(lengths) != length:
            raise ArgumentError(
                f"{what}_split_sizes must be {count} lengths that add up to {length}, got {lengths} ({self.here()}). Count them again."
            )
        return lengths
