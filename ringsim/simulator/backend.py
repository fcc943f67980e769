"""The backend ``simulator``: all ranks in one process, on a virtual clock."""

from __future__ import annotations

from typing import Any

from ringsim.comm import built_messages, built_objects
from ringsim.simulator.collectives import Collectives
from ringsim.simulator.messages import Messages

__all__ = ["SimulatedRank"]


class SimulatedRank(Messages, Collectives):
    """What ``ringsim.comm`` calls on a simulated rank; each rank has one of its own.

    Only ``ringsim.simulate`` makes it. Tensors lie on the CPU, or on the meta device, where only sizes travel.
    """

    all_gather_object = built_objects.all_gather_object
    broadcast_object_list = built_objects.broadcast_object_list
    gather_object = built_objects.gather_object
    scatter_object_list = built_objects.scatter_object_list
    send_object_list = built_objects.send_object_list
    recv_object_list = built_objects.recv_object_list
    new_subgroups = built_messages.new_subgroups
    new_subgroups_by_enumeration = built_messages.new_subgroups_by_enumeration

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
