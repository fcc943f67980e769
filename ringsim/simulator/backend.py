"""The backend ``simulator``: all ranks in one process, on a virtual clock."""

from __future__ import annotations

from typing import Any

from ringsim.comm import built
from ringsim.simulator.objects import Objects

__all__ = ["SimulatedRank"]


class SimulatedRank(Objects):
    """What ``ringsim.comm`` calls on a simulated rank; each rank has one of its own.

    Only ``ringsim.simulate`` makes it. Tensors lie on the CPU, or on the meta device, where only sizes travel.
    """

    new_subgroups = built.new_subgroups
    new_subgroups_by_enumeration = built.new_subgroups_by_enumeration

    def share(self, value: Any) -> list[Any]:
        """Gives all ranks what each of them has, as a store would; every rank calls it. It is a barrier, and moves no bytes.

        Returns:
            The values, by rank.
        """
        self._shares += 1
        values = self.world.shared.setdefault(self._shares, {})
        values[self.number] = value
        self.barrier()
        self.world.shared.pop(self._shares, None)
        return [values[rank] for rank in self.everybody.ranks]
