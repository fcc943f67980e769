"""Point-to-point messages of a simulated rank."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import Tensor

from ringsim.comm.mpi_group import to_index
from ringsim.errors import ArgumentError
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Recv, Send
from ringsim.simulator.moving import check_tensor
from ringsim.simulator.ranks import RankCore
from ringsim.traces.events import ANY_SOURCE, OP_CODES

__all__ = ["Messages"]

_SEND, _ISEND, _RECV, _IRECV = (OP_CODES[name] for name in ("send", "isend", "recv", "irecv"))
_TAG_END: Final = 1 << 31
_frame_at: Final = sys._getframe
_BATCH: Final = {"isend": OP_CODES["batch_isend"], "irecv": OP_CODES["batch_irecv"]}


class Messages(RankCore):
    """``send``, ``recv`` and their kin, as ``torch.distributed`` has them; see there for the arguments."""

    def isend(self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Send:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        return self.begin_send(tensor, dst, group, tag, group_dst)

    def begin_send(self, tensor: Tensor, dst: int | None, group: Any, tag: int, group_dst: int | None, op: int = _ISEND) -> Send:
        """Begins to send, for a function that stands between this one and the user's line."""
        if group is None:
            group = self.everybody
        channel = None
        if group.__class__ is SimulatedGroup and dst.__class__ is int and tag.__class__ is int and group_dst is None:
            channel = self._to.get((group, dst, tag))
        if channel is None:
            group = self._within("isend", group)
            tensor = check_tensor("tensor", tensor)
            dst = self._peer("dst", group, dst, group_dst)
            tag = self._check_tag(tag)
            channel = self._to[group, dst, tag] = self.world.office.channel_of(group, self.number, dst, tag)
        elif tensor.__class__ is not Tensor or not tensor.is_cpu:
            tensor = check_tensor("tensor", tensor)
        if self.hooked:
            self._before_operation()
        kind = self._kinds[tensor.dtype, tensor.shape]
        slot = -1
        if self.records:
            slot = self._post(self.hub.now, self.number, op, group.number, dst, tag, kind.number, _frame_at(2))  # type: ignore[arg-type]
        handle = Send(op, self, slot, group, kind, tensor, dst, tag, channel)  # type: ignore[arg-type]  # dst is known to be a number
        self._send(handle)
        if self.calibration is not None:
            self.hub.work(self.calibration.post_s(True, kind.size_bytes, met=handle.number == 0))
        return handle

    def irecv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Recv:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self.begin_recv(tensor, src, group, tag, group_src)

    def begin_recv(self, tensor: Tensor, src: int | None, group: Any, tag: int, group_src: int | None, op: int = _IRECV) -> Recv:
        """Begins to receive, for a function that stands between this one and the user's line."""
        if group is None:
            group = self.everybody
        channel = None
        if group.__class__ is SimulatedGroup and src.__class__ is int and tag.__class__ is int and group_src is None:
            channel = self._from.get((group, src, tag))
        if channel is None:
            group = self._within("irecv", group)
            tensor = check_tensor("tensor", tensor)
            src = ANY_SOURCE if src is None and group_src is None else self._peer("src", group, src, group_src)
            tag = self._check_tag(tag)
            if src != ANY_SOURCE:
                channel = self._from[group, src, tag] = self.world.office.channel_of(group, src, self.number, tag)
        elif tensor.__class__ is not Tensor or not tensor.is_cpu:
            tensor = check_tensor("tensor", tensor)
        if self.hooked:
            self._before_operation()
        kind = self._kinds[tensor.dtype, tensor.shape]
        slot = -1
        if self.records:
            slot = self._post(self.hub.now, self.number, op, group.number, src, tag, kind.number, _frame_at(2))  # type: ignore[arg-type]
        handle = Recv(op, self, slot, group, kind, tensor, src, tag, channel)  # type: ignore[arg-type]  # src is known to be a number
        self._recv(handle)
        if self.calibration is not None:
            self.hub.work(self.calibration.post_s(False, kind.size_bytes))
        return handle

    def send(self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Sends; blocks until the tensor may change."""
        self.begin_send(tensor, dst, group, tag, group_dst, _SEND).wait()

    def recv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receives; blocks. Returns the sender's global rank."""
        handle = self.begin_recv(tensor, src, group, tag, group_src, _RECV)
        handle.wait()
        return handle.peer

    def batch_isend_irecv(self, p2p_op_list: Any) -> list[Any]:
        """Begins several messages; does not block.

        Args:
            p2p_op_list: ``P2POp`` of ``isend`` and ``irecv``, with one group.

        Returns:
            A handle for each.

        Raises:
            ArgumentError: the list is empty, or holds something else.
        """
        if not isinstance(p2p_op_list, list) or not p2p_op_list:
            raise ArgumentError(f"p2p_op_list must be a list of at least one P2POp, got {p2p_op_list!r} ({self.here()}).")
        names = [getattr(getattr(each, "op", None), "__name__", "") for each in p2p_op_list]
        for name, each in zip(names, p2p_op_list, strict=True):
            if name not in _BATCH:
                raise ArgumentError(f"p2p_op_list must hold P2POps of isend and irecv, got {each!r} ({self.here()}). Use dist.P2POp.")
            if each.group is not p2p_op_list[0].group:
                raise ArgumentError(f"all P2POps of a batch must have one group, got two ({self.here()}). Make a batch for each group.")
        handles: list[Any] = []
        with self.world.office.batch(self, self._find(p2p_op_list[0].group)):
            for name, each in zip(names, p2p_op_list, strict=True):
                begin: Any = self.begin_send if name == "isend" else self.begin_recv
                handles.append(begin(each.tensor, each.peer, each.group, each.tag, None, _BATCH[name]))
        return handles

    def _within(self, op: str, group: Any) -> SimulatedGroup:
        """Returns the group of a message.

        Raises:
            ArgumentError: this rank is outside, so that the message would be lost.
        """
        found: SimulatedGroup | None = self._find(group)
        if found is None:
            self._refuse(
                f"{op} must be called on a group that this rank is in, got one that it is not in ({self.here()}). "
                "Call it on the group's ranks only."
            )
        return found

    def _peer(self, what: str, group: SimulatedGroup, global_rank: Any, group_rank: Any) -> int:
        """Returns the global rank of the other side.

        Raises:
            ArgumentError: there is no such rank, or it is this one.
        """
        try:
            peer = group.ranks[group.place_of(what, global_rank, group_rank)]
        except ArgumentError as error:
            self._refuse(str(error))
        if peer == self.number:
            self._refuse(f"{what} must be another rank, got this rank itself ({self.here()}). Copy the tensor instead.")
        return peer

    def _check_tag(self, tag: Any) -> int:
        number = to_index("tag", tag)
        if not 0 <= number < _TAG_END:
            self._refuse(f"tag must be from 0 to 2**31 - 1, got {number} ({self.here()}). Choose another.")
        return number
