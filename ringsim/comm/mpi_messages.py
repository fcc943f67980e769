"""Point-to-point messages on MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringsim.comm.mpi_buffers import check_tensor, for_receiving, for_sending, size_of
from ringsim.comm.mpi_group import MpiGroup, to_index
from ringsim.comm.mpi_handle import MpiHandle
from ringsim.comm.mpi_operations import Job, MpiOperations, Started
from ringsim.errors import ArgumentError
from ringsim.traces.events import ANY_SOURCE


class MpiMessages(MpiOperations):
    """``send``, ``recv`` and their kin, as ``torch.distributed`` has them; see there for the arguments.

    Tensors of every dtype travel as bytes. One that is not contiguous is copied. Nobody sends to itself, as on Gloo.
    """

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> MpiHandle | None:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        return self._send("isend", tensor, dst, group, tag, group_dst)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> MpiHandle | None:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self._receive("irecv", tensor, src, group, tag, group_src)

    def send(self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Sends; blocks until the tensor may change, which for a large one is when its receiver has posted."""
        handle = self._send("send", tensor, dst, group, tag, group_dst)
        if handle is not None:
            handle.wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receives; blocks. Returns the sender's global rank, -1 outside the group."""
        handle = self._receive("recv", tensor, src, group, tag, group_src)
        if handle is None:
            return -1
        handle.wait()
        found = self._find(group)
        return -1 if found is None else found.ranks[handle.source_rank()]

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[MpiHandle]:
        """Begins several messages; does not block. The order of sends against recvs does not matter.

        Args:
            p2p_op_list: ``P2POp`` of ``isend`` and ``irecv``, with one group.

        Returns:
            A handle for each.

        Raises:
            ArgumentError: the list is empty, or holds something else.
        """
        if not isinstance(p2p_op_list, list) or not p2p_op_list:
            raise ArgumentError(f"p2p_op_list must be a list of at least one P2POp, got {p2p_op_list!r} ({self.here()}).")
        calls = []
        for each in p2p_op_list:
            name = getattr(getattr(each, "op", None), "__name__", "")
            if name not in ("isend", "irecv"):
                raise ArgumentError(f"p2p_op_list must hold P2POps of isend and irecv, got {each!r} ({self.here()}). Use dist.P2POp.")
            if each.group is not p2p_op_list[0].group:
                raise ArgumentError(f"all P2POps of a batch must have one group, got two ({self.here()}). Make a batch for each group.")
            calls.append((name == "isend", each))
        handles = [
            self._send("batch_isend", each.tensor, each.peer, each.group, each.tag, None)
            if sends
            else self._receive("batch_irecv", each.tensor, each.peer, each.group, each.tag, None)
            for sends, each in calls
        ]
        return [handle for handle in handles if handle is not None]

    def _send(self, op: str, tensor: Any, dst: int | None, group: Any, tag: int, group_dst: int | None) -> MpiHandle | None:
        found = self._enter(op, group)
        if found is None:
            return None
        job = self._working()
        values = check_tensor("tensor", tensor)
        place = self._peer(op, "dst", found, dst, group_dst)
        tag = self._check_tag(job, op, tag)
        plain = for_sending(values)

        def start() -> Started:
            request = found.comm.Isend([_buffer(job, plain), size_of(plain), job.mpi.BYTE], place, tag)
            return Started(request, plain)

        peer = found.ranks[place]
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=f"{op} to rank {peer}, tag {tag}")

    def _receive(self, op: str, tensor: Any, src: int | None, group: Any, tag: int, group_src: int | None) -> MpiHandle | None:
        found = self._enter(op, group)
        if found is None:
            return None
        job = self._working()
        values = check_tensor("tensor", tensor)
        anybody = src is None and group_src is None
        place = job.mpi.ANY_SOURCE if anybody else self._peer(op, "src", found, src, group_src)
        tag = self._check_tag(job, op, tag)
        stage, bring = for_receiving(values)

        def start() -> Started:
            request = found.comm.Irecv([_buffer(job, stage), size_of(stage), job.mpi.BYTE], place, tag)
            return Started(request, stage, bring)

        peer = ANY_SOURCE if anybody else found.ranks[place]
        whom = "anybody" if anybody else f"rank {peer}"
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=f"{op} from {whom}, tag {tag}", receives=values)

    def _peer(self, op: str, what: str, group: MpiGroup, global_rank: int | None, group_rank: int | None) -> int:
        place = group.place_of(what, global_rank, group_rank)
        if place == group.rank():
            raise ArgumentError(f"{what} must be another rank, got this rank itself ({op}, {self.here()}). Copy the tensor instead.")
        return place

    def _check_tag(self, job: Job, op: str, tag: int) -> int:
        number = to_index("tag", tag)
        highest = job.world.comm.Get_attr(job.mpi.TAG_UB)
        if not 0 <= number <= highest:
            raise ArgumentError(f"tag must be from 0 to {highest} on this MPI, got {number} ({op}, {self.here()}). Choose another.")
        return number


def _buffer(job: Job, tensor: torch.Tensor) -> Any:
    return job.mpi.buffer.fromaddress(tensor.data_ptr(), size_of(tensor))
