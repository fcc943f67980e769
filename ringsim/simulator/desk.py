"""Where a simulated rank posts its messages, the short way: to whom it has been through before.

Each message passes here, most of them without a look at anything but who it is for: group, peer and tag were good the first time.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import Tensor

from ringsim.predict.calibration import Calibration
from ringsim.simulator.clock import Clock, Runner
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Channel, Recv, Send
from ringsim.simulator.moving import check_tensor
from ringsim.simulator.post_office import PostOffice
from ringsim.simulator.tape import Kind, Tape
from ringsim.traces.events import OP_CODES

__all__ = ["Address", "Desk"]

# What a message needs to go on its way: group, tensor, peer, tag, channel.
Address = tuple[SimulatedGroup, Tensor, int, int, Channel | None]
_ISEND, _IRECV = OP_CODES["isend"], OP_CODES["irecv"]
_frame_at: Final = sys._getframe
_USER: Final = 2  # frames from a message that begins up to the user's line


class Desk(Runner):
    """Posts messages of a rank.

    Args:
        number: the rank.
        seed: of its random numbers.
        clock: the clock.
        tape: where operations are recorded.
        records: whether they are.
        office: brings sends and recvs together.
        everybody: the group of all ranks.
        calibration: says how long the rank is busy when it posts a message; None for no time.
        hooked: whether ``_before_operation`` is to be called.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        clock: Clock,
        tape: Tape,
        records: bool,
        office: PostOffice,
        everybody: SimulatedGroup,
        calibration: Calibration | None,
        hooked: bool,
    ) -> None:
        super().__init__(number, seed)
        self.clock = clock
        self.tape = tape
        self.records = records
        self.everybody = everybody
        self.calibration = calibration
        self.hooked = hooked
        self._office = office
        # Where the messages go, and come from, that the rank has sent and received once: by group, peer and tag, which are good then.
        self._to: dict[tuple[SimulatedGroup, int, int], Channel] = {}
        self._from: dict[tuple[SimulatedGroup, int, int], Channel] = {}

    def begin_send(self, tensor: Tensor, dst: int | None, group: Any, tag: int, group_dst: int | None, op: int = _ISEND) -> Send:
        """Begins to send, for a function that stands between this one and the user's line."""
        if group is None:
            group = self.everybody
        channel = None
        if type(group) is SimulatedGroup and type(dst) is int and type(tag) is int and group_dst is None:
            channel = self._to.get((group, dst, tag))
        if channel is None:
            group, tensor, dst, tag, channel = self._address_send(tensor, dst, group, tag, group_dst)
            kind = self.tape.kind_of(tensor)
        else:
            kind = channel.kind
            if not kind.fits(tensor):
                kind = self._look_closer(tensor, channel)
        if self.hooked:
            self._before_operation()
        slot = -1
        if self.records:
            slot = self.tape.post(self.clock.now, self.number, op, group.number, dst, tag, kind.number, _frame_at(_USER))  # type: ignore[arg-type]
        handle = Send.__new__(Send)
        handle.begin(op, self, slot, group, kind, tensor, dst, tag, channel)  # type: ignore[arg-type]  # dst is a number here
        self._office.send(handle)
        if self.calibration is not None:
            self.clock.work(self.calibration.post_s(True, kind.size_bytes, met=handle.number == 0))
        return handle

    def begin_recv(self, tensor: Tensor, src: int | None, group: Any, tag: int, group_src: int | None, op: int = _IRECV) -> Recv:
        """Begins to receive, for a function that stands between this one and the user's line."""
        if group is None:
            group = self.everybody
        channel = None
        if type(group) is SimulatedGroup and type(src) is int and type(tag) is int and group_src is None:
            channel = self._from.get((group, src, tag))
        if channel is None:
            group, tensor, src, tag, channel = self._address_recv(tensor, src, group, tag, group_src)
            kind = self.tape.kind_of(tensor)
        else:
            kind = channel.kind
            if not kind.fits(tensor):
                kind = self._look_closer(tensor, channel)
        if self.hooked:
            self._before_operation()
        slot = -1
        if self.records:
            slot = self.tape.post(self.clock.now, self.number, op, group.number, src, tag, kind.number, _frame_at(_USER))  # type: ignore[arg-type]
        handle = Recv.__new__(Recv)
        handle.begin(op, self, slot, group, kind, tensor, src, tag, channel)  # type: ignore[arg-type]  # src is a number here
        self._office.recv(handle)
        if self.calibration is not None:
            self.clock.work(self.calibration.post_s(False, kind.size_bytes))
        return handle

    def _look_closer(self, tensor: Tensor, channel: Channel) -> Kind:
        """Returns the kind of a tensor that may not be like the last one of its channel.

        Raises:
            ArgumentError: it is nothing that can be sent.
        """
        check_tensor("tensor", tensor)
        channel.kind = self.tape.kind_of(tensor)
        return channel.kind

    def _address_send(self, tensor: Tensor, dst: int | None, group: Any, tag: int, group_dst: int | None) -> Address:
        """Returns what a send needs whose group, peer and tag are new, and keeps where it goes.

        Raises:
            RingError: one of them is wrong.
        """
        raise NotImplementedError

    def _address_recv(self, tensor: Tensor, src: int | None, group: Any, tag: int, group_src: int | None) -> Address:
        """Returns the same of a recv, which has no channel where it is from anybody."""
        raise NotImplementedError

    def _before_operation(self) -> None:
        """Is called before each operation, where that was asked for."""
        raise NotImplementedError
