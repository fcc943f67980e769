"""Point-to-point messages of a simulated rank."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import Tensor

from ringsim.comm.functions import FUNCTIONS
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
_DOORS: Final = frozenset(id(FUNCTIONS[name].__code__) for name in ("isend", "irecv"))  # between the user's frame and these methods
_frame_at: Final = sys._getframe
_BATCH: Final = {"isend": OP_CODES["batch_isend"], "irecv": OP_CODES["batch_irecv"]}


class Messages(RankCore):
    """``send``, ``recv`` and their kin, as ``torch.distributed`` has them; see there for the arguments."""

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
        *,
        op: int = _ISEND,
    ) -> Send | None:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        if group is None and self._joined:
            group = self.everybody
        elif group.__class__ is not SimulatedGroup or self._gone or self.number not in group.places or not self._joined:
            group = self._enter("isend", group)
            if group is None:
                return None
        if tensor.__class__ is not Tensor or not tensor.is_cpu:
            tensor = check_tensor("tensor", tensor)
        if dst.__class__ is not int or group_dst is not None or dst not in group.places or dst == self.number:
            dst = self._peer("dst", group, dst, group_dst)
        if tag.__class__ is not int or not 0 <= tag < _TAG_END:
            tag = self._check_tag(tag)
        if self.hooked:
            self._before_operation()
        kind = self._kinds[tensor.dtype, tensor.shape]
        slot = -1
        if self.records:
            frame: Any = _frame_at(1)
            if id(frame.f_code) in _DOORS:
                frame = frame.f_back
            slot = self._post(self.hub.now, self.number, op, group.number, dst, tag, kind.number, frame)
        handle = Send(op, self, slot, group, kind, tensor, dst, tag)
        self._send(handle)
        if self.calibration is not None:
            self.hub.work(self.calibration.post_s(True, kind.size_bytes, met=handle.number == 0))
        return handle

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
        *,
        op: int = _IRECV,
    ) -> Recv | None:
        """Begins to receive, from anybody where no source is given; does not block."""
        if group is None and self._joined:
            group = self.everybody
        elif group.__class__ is not SimulatedGroup or self._gone or self.number not in group.places or not self._joined:
            group = self._enter("irecv", group)
            if group is None:
                return None
        if tensor.__class__ is not Tensor or not tensor.is_cpu:
            tensor = check_tensor("tensor", tensor)
        if src.__class__ is not int or group_src is not None or src not in group.places or src == self.number:
            src = ANY_SOURCE if src is None and group_src is None else self._peer("src", group, src, group_src)
        if tag.__class__ is not int or not 0 <= tag < _TAG_END:
            tag = self._check_tag(tag)
        if self.hooked:
            self._before_operation()
        kind = self._kinds[tensor.dtype, tensor.shape]
        slot = -1
        if self.records:
            frame: Any = _frame_at(1)
            if id(frame.f_code) in _DOORS:
                frame = frame.f_back
            slot = self._post(self.hub.now, self.number, op, group.number, src, tag, kind.number, frame)
        handle = Recv(op, self, slot, group, kind, tensor, src, tag)
        self._recv(handle)
        if self.calibration is not None:
            self.hub.work(self.calibration.post_s(False, kind.size_bytes))
        return handle

    def send(self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Sends; blocks until the tensor may change."""
        handle = self.isend(tensor, dst, group, tag, group_dst, op=_SEND)
        if handle is not None:
            handle.wait()

    def recv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receives; blocks. Returns the sender's global rank, -1 outside the group."""
        handle = self.irecv(tensor, src, group, tag, group_src, op=_RECV)
        if handle is None:
            return -1
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
                begin: Any = self.isend if name == "isend" else self.irecv
                handles.append(begin(each.tensor, each.peer, each.group, each.tag, op=_BATCH[name]))
        return [handle for handle in handles if handle is not None]

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
