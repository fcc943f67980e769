"""The handle of a rank's part in a simulated collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Operation
from ringsim.simulator.tape import Kind

if TYPE_CHECKING:
    from ringsim.simulator.ranks import RankCore

__all__ = ["Part", "SimulatedFuture"]


class Part(Operation):
    """A rank's part in a collective.

    Args:
        op: its code.
        rank: whose it is.
        slot: of its record, -1 where it has none.
        group: where.
        kind: of what it carries.
        name: of the collective.
        place: of the rank in the group.
        inputs: tensors that it gives.
        outputs: tensors that it gets.
        results: the tensors that hold the result.

    Attributes:
        root: group rank of the root, -1 for none.
    """

    def __init__(
        self,
        op: int,
        rank: RankCore,
        slot: int,
        group: SimulatedGroup,
        kind: Kind,
        name: str,
        place: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(op, rank, slot, group, kind)
        self.root = -1
        self.peer = self.tag = -1
        self.name = name
        self.place = place
        self.inputs = inputs
        self.outputs = outputs
        self.results = results

    def describe(self) -> str:
        """Returns the operation in words."""
        return f'{self.name} of group "{self.group.group_name}"'

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        self.wait()
        return list(self.results)

    def get_future(self) -> SimulatedFuture:
        """Returns a future of the result."""
        return SimulatedFuture(self)


class SimulatedFuture:
    """Stands for the result of an operation, as ``torch.futures.Future`` does: that one would block all ranks.

    Args:
        handle: of the operation.
    """

    def __init__(self, handle: Part) -> None:
        self._handle = handle

    def wait(self) -> list[torch.Tensor]:
        """Blocks until the result is there, and returns it."""
        return self._handle.result()

    def value(self) -> list[torch.Tensor]:
        """Returns the result, which must be there."""
        return self._handle.result()

    def done(self) -> bool:
        """Returns whether the result is there."""
        return self._handle.is_completed()
