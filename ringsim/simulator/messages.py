"""Point-to-point messages of a simulated rank."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from ringsim.comm.backend import to_index
from ringsim.errors import ArgumentError
from ringsim.simulator.desk import Address
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Recv, Send
from ringsim.simulator.moving import check_tensor
from ringsim.simulator.ranks import RankCore
from ringsim.traces.events import ANY_SOURCE, OP_CODES

__all__ = ["Messages"]

_SEND, _RECV = OP_CODES["send"], OP_CODES["recv"]
_TAG_END: Final = 1 << 31
_BATCH: Final = {"isend": OP_CODES["batch_isend"], "irecv": OP_CODES["batch_irecv"]}


class Messages(RankCore):
    """``send``, ``recv`` and their kin, as ``torch.distributed`` has them; see there for the arguments."""

    def isend(self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Send:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        return self.begin_send(tensor, dst, group, tag, group_dst)

    def irecv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Recv:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self.begin_recv(tensor, src, group, tag, group_src)

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

    def _address_send(self, tensor: Tensor, dst: int | None, group: Any, tag: int, group_dst: int | None) -> Address:
        group = self._within("isend", group)
        check_tensor("tensor", tensor)
        peer, tag = self._peer("dst", group, dst, group_dst), self._check_tag(tag)
        channel = self._to[group, peer, tag] = self._office.channel_of(group, self.number, peer, tag)
        return group, tensor, peer, tag, channel

    def _address_recv(self, tensor: Tensor, src: int | None, group: Any, tag: int, group_src: int | None) -> Address:
        group = self._within("irecv", group)
        check_tensor("tensor", tensor)
        if src is None and group_src is None:
            return group, tensor, ANY_SOURCE, self._check_tag(tag), None
        peer, tag = self._peer("src", group, src, group_src), self._check_tag(tag)
        channel = self._from[group, peer, tag] = self._office.channel_of(group, peer, self.number, tag)
        return group, tensor, peer, tag, channel

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
