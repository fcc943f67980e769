"""Where a simulated rank posts its messages, the short way: to whom it has been through before.

Each message passes here, most of them without a look at anything but who it is for: group, peer and tag were good the first time.

What simulated ranks share, and what each of them has for itself.

Point-to-point messages of a simulated rank.

Python objects among simulated ranks: the operations, sizes and tags that torch's functions have on real ranks.

The backend ``simulator``: all ranks in one process, on a virtual clock.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.distributed import GroupMember, ReduceOp

from ringsim.comm import built
from ringsim.comm.backend import Backend, Membership
from ringsim.comm.built import check_reduction, reduce_parts
from ringsim.comm.collectives import check_alike, check_count, describe
from ringsim.comm.mpi_transfers import to_index
from ringsim.comm.objects import pack, unpack
from ringsim.comm.torch_hooks import GROUPS
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.faults import make_failure
from ringsim.predict.calibration import Calibration
from ringsim.simulator.clock import Clock, Runner
from ringsim.simulator.collectives import Part, attend
from ringsim.simulator.links import Carrier
from ringsim.simulator.matching import Channel, Message, PostOffice, Recv, Send, SimulatedGroup, check_tensor, check_tensors
from ringsim.simulator.recording import Kind, RankRecorder, Tape
from ringsim.traces.events import ANY_SOURCE, NONE, OP_CODES, Payload

__all__ = ["Address", "Desk", "Messages", "Objects", "RankCore", "SimulatedRank", "World"]

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


@dataclass
class Making:
    """A group that ranks make together.

    Attributes:
        members: their global ranks.
        group: what they get.
        parts: of those that have come, in order.
        missing: how many members have not.
    """

    members: tuple[int, ...]
    group: SimulatedGroup
    parts: list[Part]
    missing: int


@dataclass
class World:
    """What the ranks of one simulation share.

    Attributes:
        clock: the clock.
        tape: where they are recorded.
        records: whether they are.
        carrier: says how long messages take.
        office: brings sends and recvs together.
        everybody: the group of all ranks.
        calibration: says how long a rank is busy when it posts a message; None for no time.
        in_order: whether a rank's operations on a group are carried out one after the other.
        made: the groups that were made, in order.
        makers: all ranks, as a group in which groups are made; None before the first.
        shared: what ranks have given to ``share``, by its number and by rank.
    """

    clock: Clock
    tape: Tape
    records: bool
    carrier: Carrier
    office: PostOffice
    everybody: SimulatedGroup
    calibration: Calibration | None = None
    in_order: bool = False
    made: list[Making] = field(default_factory=list)
    makers: SimulatedGroup | None = None
    shared: dict[int, dict[int, Any]] = field(default_factory=dict)


class RankCore(Desk, Membership, Backend):
    """The common part of messages and collectives of a simulated rank: who it is, and its groups.

    Args:
        world: what it shares with the others.
        number: its rank.
        seed: of its random numbers.
        fails_at: the number of the operation in whose place it fails, None for none.
    """

    name = "simulator"
    direct = True

    def __init__(self, world: World, number: int, seed: int, fails_at: int | None = None) -> None:
        hooked = world.clock.measures or fails_at is not None
        super().__init__(number, seed, world.clock, world.tape, world.records, world.office, world.everybody, world.calibration, hooked)
        self.in_order = world.in_order
        self.world = world
        self.recorder = RankRecorder(world.clock, world.tape, number, world.everybody.size()) if world.records else None
        self.fails_at = fails_at
        self._operations = 0
        self._joined = True
        self._made = 0
        self._shares = 0
        self._gone: set[SimulatedGroup] = set()
        self._refusal: Callable[[], BaseException] | None = None
        self._refusals = 0

    # -- the job

    def is_initialized(self) -> bool:
        """Returns whether the rank has joined the others."""
        return self._joined

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Joins the other ranks again, after ``destroy_process_group``; does not block, and takes no time.

        Args:
            backend: any: the simulator carries the messages.
            init_method: not needed here.
            timeout: not needed here: who can never go on is known.
            world_size: -1, or as in ``simulate``.
            rank: -1, or this rank.
            rest: torch's others, not needed here.
            named: the same by name.

        Raises:
            ArgumentError: ``world_size`` or ``rank`` differ.
            RingError: the rank has joined already.
        """
        if self._joined:
            raise RingError(
                f"the process group must be initialized once, got a second call ({self.here()}): ringsim.simulate has made it already. "
                "Leave the call out."
            )
        for what, wanted, is_value in (("world_size", world_size, self.everybody.size()), ("rank", rank, self.number)):
            if wanted not in (-1, is_value):
                raise ArgumentError(f"{what} must be {is_value} in this simulation, or left out, got {wanted} ({self.here()}).")
        self._joined = True

    def destroy_process_group(self, group: Any = None) -> None:
        """Ends a group, or with None all of them, for this rank; does not block."""
        found = self._find(group)
        self._to.clear()
        self._from.clear()
        if found is self.everybody:
            self._joined = False
        elif found is not None:
            self._gone.add(found)

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return f"rank {self.number} of {self.everybody.size()}"

    # -- groups

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> Any:
        """Makes a group; all ranks call it in the same order with the same ranks. Members wait for each other; it takes no time.

        Args:
            ranks: global ranks of the members, None for all.
            timeout: not needed here.
            backend: not needed here.
            pg_options: not needed here.
            use_local_synchronization: not to be used here.
            group_desc: what to call it, where one looks at it.
            device_id: not needed here.
            sort_ranks: whether rank 0 of the group is the least of ``ranks``, or the first.

        Returns:
            The group; on ranks outside ``GroupMember.NON_GROUP_MEMBER``.

        Raises:
            ArgumentError: a rank does not exist or is there twice.
            RendezvousFailed: another rank has made another group in its place.
        """
        if use_local_synchronization:
            raise ArgumentError(
                f"use_local_synchronization must be False in a simulation, got True ({self.here()}). Call new_group on all ranks."
            )
        members = self._members(ranks, sort_ranks)
        desc, made = group_desc or "undefined", self.world.made
        is_pair = desc.startswith("ring:")  # bears its edge, and is not recorded, as on torch
        if self._made == len(made):
            name = desc if is_pair else f"{len(made) + 1}"
            group = SimulatedGroup(self.clock, name, members, self.tape.number_group(name, members), desc)
            made.append(Making(members, group, [], len(members)))
        making = made[self._made]
        self._made += 1
        if not is_pair or making.members != members:  # who makes a ring has called its ranks together before
            self._make_with_others(making, members)
        return making.group if self.number in members else GroupMember.NON_GROUP_MEMBER

    def _make_with_others(self, making: Making, members: tuple[int, ...]) -> None:
        """Records that a group is made, as on torch: a collective of the world, with the members as its shape. They wait for each other.

        Raises:
            RendezvousFailed: another rank makes another group.
        """
        world, op, slot = self.world.makers, OP_CODES["new_group"], -1
        if world is None:
            everyone = self.everybody.ranks
            world = self.world.makers = SimulatedGroup(self.clock, GROUPS, everyone, self.tape.number_group(GROUPS, everyone))
        payload = Payload("ranks", tuple(sorted(members)), 0)
        kind = Kind(self.tape.number_payload(payload), payload)
        if self.records:
            slot = self.tape.post(self.clock.now, self.number, op, world.number, NONE, NONE, kind.number, sys._getframe(2))
        part = Part(op, self, slot, world, kind, "new_group", self.number, (), (), ())
        self.clock.polls = 0
        if making.members != members:
            theirs = next((f"rank {each.rank.number}'s new_group{self.place_of(each.slot)}" for each in making.parts), "another rank")
            message = (
                f"all ranks must make the same groups in the same order, got {list(members)} here and {list(making.members)} in {theirs} "
                f"({self.here()}). Call new_group for every group on every rank, in one order, also for groups that the rank is not in."
            )
            self.note("group_order_mismatch", message, part)
            raise RendezvousFailed(message)
        making.parts.append(part)
        making.missing -= self.number in members
        if self.number not in members:
            part.complete(self.clock.now)
        elif not making.missing:
            for each in making.parts:
                each.complete(min(each.done_s, self.clock.now))
        part.wait()

    def _find(self, group: Any) -> Any:
        """Returns a group given as torch's functions take it; None where this rank is outside.

        Raises:
            RingError: the rank has left the others, or the group.
            ArgumentError: it is no group of the simulator.
        """
        if not self._joined:
            raise RingError(f"the process group must exist, got a call after destroy_process_group ({self.here()}). Initialize it again.")
        if group is None:
            return self.everybody
        if group is GroupMember.NON_GROUP_MEMBER:
            return None
        if not isinstance(group, SimulatedGroup):
            raise ArgumentError(
                f"group must be one of the simulator, got {group!r} ({self.here()}). Make it with ringsim.comm.new_group, and call "
                "ringsim.comm's functions, not torch.distributed's: DeviceMesh and ProcessGroup are torch's own."
            )
        if group in self._gone:
            raise RingError(f"the group must exist, got {group} after it was destroyed ({self.here()}). Make a new one: new_group.")
        return group if self.number in group.places else None

    def _enter(self, op: str, group: Any) -> Any:
        """Returns the group of a collective; outside of it warns, as torch does, and returns None."""
        found = self._find(group)
        if found is None:
            warnings.warn(f"{op} does nothing on rank {self.number}, which is not in the group.", stacklevel=3)
        return found

    def _refuse(self, message: str) -> NoReturn:
        """Raises ArgumentError for a message that cannot be sent or received, and writes it down, as on torch."""
        if self.recorder is not None:
            self.recorder.notice("invalid_argument", message)
        raise ArgumentError(message)

    def _before_operation(self) -> None:
        """Counts an operation that is about to be posted, and lets what was computed before it take its time.

        Raises:
            RankFailed: the rank was made to fail in its place.
            RingError: the ranks can never go on; see `refuse`.
        """
        if self._refusal is not None and self._refusals > 0:
            self._refusals -= 1
            raise self._refusal()
        if self.clock.measures:
            self.clock.pay()
        if self.fails_at is not None and self._operations >= self.fails_at:
            raise make_failure(self.number, self.fails_at, self.everybody.size())
        self._operations += 1

    def refuse(self, make_error: Callable[[], BaseException], times: int) -> None:
        """Lets so many operations that the rank posts from now on raise an error, for the ranks can never go on."""
        self._refusal, self._refusals = make_error, times
        self.hooked = True

    # -- what others say of this rank's operations

    def place_of(self, slot: int) -> str:
        """Returns " at ring.py:7" for a record, "" where there is none."""
        return self.tape.place_of(slot) if slot >= 0 else ""

    def note(self, kind: str, message: str, operation: Message | Part) -> None:
        """Writes down that an operation is wrong, and that it raises."""
        if self.recorder is not None:
            self.tape.times[operation.slot + 2] = self.clock.now
            self.tape.failed.add(operation.slot)
            self.recorder.notice(kind, message, operation.group.number, operation.peer, operation.tag, operation.kind.number)


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


_SEND_objects, _RECV_objects = OP_CODES["send_object_list"], OP_CODES["recv_object_list"]
_CPU: Final = torch.device("cpu")  # whatever the default device is: objects have data


_SUM: Final = ReduceOp.SUM
Parts = Sequence[Part]


class Collectives(RankCore):
    """The collectives of ``torch.distributed``; see there for the arguments.

    Every rank of the group calls them, in the same order. They block until all have; with ``async_op=True`` they return a handle. Outside
    the group they do nothing. Reductions are taken in the order of the ranks. What is given is read before anything is written: the
    tensors of a rank may share memory.
    """

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Part | None:
        """Gives all ranks the root's tensor."""
        found = self._enter("broadcast", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("src", src, group_src)

        def perform(parts: Parts) -> None:
            for part in parts:
                if part.place != root:
                    part.outputs[0].copy_(parts[root].inputs[0])

        return self._collect("broadcast", found, [values], [values], perform, async_op, root=root)

    def all_reduce(self, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's tensor in place, with the result on all ranks."""
        found = self._enter("all_reduce", group)
        if found is None:
            return None
        return self._reduce_everywhere("all_reduce", found, [check_tensor("tensor", tensor)], op, async_op)

    def all_reduce_coalesced(self, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
        found = self._enter("all_reduce_coalesced", group)
        if found is None:
            return None
        values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
        if not values:
            raise ArgumentError(f"tensors must be at least one, got an empty list ({self.here()}). Leave the call out on all ranks.")
        check_alike("tensors", values, values[0], same_shape=False)
        return self._reduce_everywhere("all_reduce_coalesced", found, values, op, async_op)

    def _reduce_everywhere(self, name: str, group: SimulatedGroup, tensors: list[Tensor], op: Any, async_op: bool) -> Part | None:
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([part.inputs[index] for part in parts], op) for index in range(len(tensors))]
            for part in parts:
                for output, total in zip(part.outputs, totals, strict=True):
                    output.copy_(total)

        return self._collect(name, group, tensors, tensors, perform, async_op, reduction=op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
        found = self._enter("reduce", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("dst", dst, group_dst)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            parts[root].outputs[0].copy_(reduce_parts([part.inputs[0] for part in parts], op))

        return self._collect("reduce", found, [values], [values], perform, async_op, root=root, reduction=op)

    def reduce_scatter(self, output: Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
        found = self._enter("reduce_scatter", group)
        if found is None:
            return None
        result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
        check_count("input_list", inputs, found.size())
        check_alike("input_list", inputs, result, same_shape=False)
        mine = inputs[found.rank()]
        if mine.numel() != result.numel():
            raise ArgumentError(
                f"output must be as large as input_list[{found.rank()}], {mine.numel()} elements, got {result.numel()} ({self.here()}). "
                "Make it so."
            )
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([each.inputs[place] for each in parts], op) for place in range(len(parts))]
            for part, total in zip(parts, totals, strict=True):
                part.outputs[0].copy_(total.view_as(part.outputs[0]))

        return self._collect("reduce_scatter", found, inputs, [result], perform, async_op, reduction=op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Reduces everybody's tensor, and gives each rank its part of it."""
        found = self._enter("reduce_scatter_tensor", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_tensor", found, output, input, op, async_op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """The newer name of ``reduce_scatter_tensor``."""
        found = self._enter("reduce_scatter_single", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_single", found, output, input, op, async_op)

    def _reduce_to_parts(self, name: str, found: SimulatedGroup, output: Tensor, given: Tensor, op: Any, async_op: bool) -> Part | None:
        result, values = check_tensor("output", output), check_tensor("input", given)
        check_alike("output", [result], values, same_shape=False)
        self._check_parts("input", values, "output", result, found)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            total = reduce_parts([part.inputs[0].reshape(-1) for part in parts], op)
            for part, piece in zip(parts, total.chunk(len(parts)), strict=True):
                part.outputs[0].copy_(piece.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [result], perform, async_op, reduction=op)

    def all_gather(self, tensor_list: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's list with everybody's tensor, by rank."""
        found = self._enter("all_gather", group)
        if found is None:
            return None
        values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
        check_count("tensor_list", outputs, found.size())
        check_alike("tensor_list", outputs, values)
        return self._collect("all_gather", found, [values], outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> Part | None:
        """Fills the list of each rank with everybody's list of tensors."""
        found = self._enter("all_gather_coalesced", group)
        if found is None:
            return None
        inputs = check_tensors("input_tensor_list", input_tensor_list)
        check_count("output_tensor_lists", output_tensor_lists, found.size())
        outputs: list[Tensor] = []
        for place, each in enumerate(output_tensor_lists):
            row = check_tensors(f"output_tensor_lists[{place}]", each)
            check_count(f"output_tensor_lists[{place}]", row, len(inputs))
            for output, values in zip(row, inputs, strict=True):
                check_alike(f"output_tensor_lists[{place}]", [output], values)
            outputs += row
        return self._collect("all_gather_coalesced", found, inputs, outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's output with everybody's input behind each other, by rank."""
        found = self._enter("all_gather_into_tensor", group)
        return None if found is None else self._gather_into("all_gather_into_tensor", found, output_tensor, input_tensor, async_op)

    def all_gather_single(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """The newer name of ``all_gather_into_tensor``."""
        found = self._enter("all_gather_single", group)
        return None if found is None else self._gather_into("all_gather_single", found, output_tensor, input_tensor, async_op)

    def _gather_into(self, name: str, found: SimulatedGroup, output_tensor: Tensor, input_tensor: Tensor, async_op: bool) -> Part | None:
        values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
        check_alike("output_tensor", [output], values, same_shape=False)
        self._check_parts("output_tensor", output, "input_tensor", values, found)

        def perform(parts: Parts) -> None:
            whole = torch.cat([part.inputs[0].reshape(-1) for part in parts])
            for part in parts:
                part.outputs[0].copy_(whole.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [output], perform, async_op, carried=[output])

    def gather(
        self,
        tensor: Tensor,
        gather_list: Any = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "dst", dst, group_dst)
        outputs = self._list_at_root("gather_list", gather_list, values, found, root)

        def perform(parts: Parts) -> None:
            values = [part.inputs[0] for part in parts]
            values[root] = values[root].clone()  # the list may share its memory
            for output, value in zip(parts[root].outputs, values, strict=True):
                output.copy_(value)

        return self._collect("gather", found, [values], outputs, perform, async_op, copies=found.size(), root=root)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Part | None:
        """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
        found = self._enter("scatter", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "src", src, group_src)
        inputs = self._list_at_root("scatter_list", scatter_list, values, found, root)

        def perform(parts: Parts) -> None:
            own = parts[root].inputs[root].clone()  # its place may share the memory of other pieces
            for part, piece in zip(parts, parts[root].inputs, strict=True):
                if part.place != root:
                    part.outputs[0].copy_(piece)
            parts[root].outputs[0].copy_(own)

        return self._collect("scatter", found, inputs, [values], perform, async_op, copies=found.size(), root=root, carried=[values])

    def all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Part | None:
        """Sends each rank its tensor of the inputs, and fills the outputs with what comes from each. Sizes may differ."""
        found = self._enter("all_to_all", group)
        if found is None:
            return None
        inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
        check_count("input_tensor_list", inputs, found.size())
        check_count("output_tensor_list", outputs, found.size())
        check_alike("tensors", [*inputs, *outputs], inputs[0], same_shape=False)
        return self._collect("all_to_all", found, inputs, outputs, _exchange, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
        found = self._enter("all_to_all_single", group)
        if found is None:
            return None
        values, result = check_tensor("input", input), check_tensor("output", output)
        check_alike("output", [result], values, same_shape=False)
        pieces = values.split(self._cut("input", values, input_split_sizes, found))
        places = result.split(self._cut("output", result, output_split_sizes, found))
        return self._collect("all_to_all_single", found, pieces, places, _exchange, async_op, carried=[values], results=[result])

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Part | None:
        """Blocks until every rank of the group has come here."""
        found = self._enter("barrier", group)
        if found is None:
            return None
        return self._collect("barrier", found, [], [], _nothing, async_op, timeout=timeout)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here; where one never does, the simulation says which."""
        found = self._enter("monitored_barrier", group)
        if found is not None:
            self._collect("monitored_barrier", found, [], [], _nothing, False, timeout=timeout)

    # -- what the collectives share

    def _collect(
        self,
        name: str,
        group: SimulatedGroup,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        perform: Callable[[Parts], None],
        async_op: bool,
        *,
        copies: int = 1,
        root: int = NONE,
        reduction: Any = None,
        carried: Sequence[Tensor] | None = None,
        results: Sequence[Tensor] | None = None,
        timeout: Any = None,
    ) -> Part | None:
        """Begins a collective; waits for it unless ``async_op``.

        Args:
            name: of the operation.
            group: where.
            inputs: what this rank gives.
            outputs: what it gets.
            perform: moves the data, once all have come.
            async_op: whether to return the handle.
            copies: how many times the tensors count for the size.
            root: group rank of the root.
            reduction: how it reduces.
            carried: what its size is reckoned from, where that is not the inputs.
            results: what the handle returns, where that is not the outputs.
            timeout: limit of the wait.
        """
        if self.hooked:
            self._before_operation()
        how = "" if reduction is None else str(getattr(reduction, "op", reduction)).rpartition(".")[2]
        payload = Payload(*describe(list(inputs if carried is None else carried), copies), how)
        kind = Kind(self.tape.number_payload(payload), payload)
        slot = -1
        if self.records:
            peer = NONE if root == NONE else group.ranks[root]
            slot = self.tape.post(self.clock.now, self.number, OP_CODES[name], group.number, peer, NONE, kind.number, sys._getframe(1))
        part = Part(OP_CODES[name], self, slot, group, kind, name, group.rank(), inputs, outputs, outputs if results is None else results)
        part.root = root
        self.clock.polls = 0
        attend(part, self.world.carrier, perform)
        if async_op:
            return part
        part.wait(timeout)
        return None

    def _list_at_root(self, what: str, tensors: Any, like: Tensor, group: SimulatedGroup, root: int) -> list[Tensor]:
        """Returns the list that only the root has, checked; on other ranks an empty one."""
        if group.rank() != root:
            if tensors:
                raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({self.here()}).")
            return []
        outputs = check_tensors(what, tensors)
        check_count(what, outputs, group.size())
        check_alike(what, outputs, like)
        return outputs


def _gather_everywhere(parts: Parts) -> None:
    values = [tensor.clone() for part in parts for tensor in part.inputs]  # outputs may share memory with inputs
    for part in parts:
        for output, value in zip(part.outputs, values, strict=True):
            output.copy_(value)


def _exchange(parts: Parts) -> None:
    kept = [[piece.clone() for piece in part.inputs] for part in parts]  # outputs may share memory with inputs
    for part in parts:
        for output, row in zip(part.outputs, kept, strict=True):
            output.copy_(row[part.place].view_as(output))


def _nothing(parts: Parts) -> None:
    """Nothing is moved."""


class Objects(Messages, Collectives):
    """The functions of ``torch.distributed`` for objects; see there for the arguments. First sizes travel, then bytes. They block."""

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> None:
        """Sends objects to one rank; ``use_batch`` means nothing here."""
        self._check_device(device)
        for tensor in self._pack_all(object_list, weights_only):
            self.begin_send(tensor, dst, group, 0, group_dst, _SEND_objects).wait()

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> int:
        """Receives as many objects as the list is long, from anybody where no source is given; ``use_batch`` means nothing here.

        Returns:
            The sender's global rank.
        """
        self._check_device(device)
        sizes = _empty(len(object_list), torch.int64)
        handle = self.begin_recv(sizes, src, group, 0, group_src, _RECV_objects)
        handle.wait()
        data = _empty(int(sizes.sum()), torch.uint8)
        self.begin_recv(data, handle.peer, group, 0, None, _RECV_objects).wait()
        object_list[:] = _unpack_all(data, sizes, weights_only)
        return handle.peer

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Gives all ranks the root's objects. The root is rank 0 where none is given."""
        found = self._enter("broadcast_object_list", group)
        if found is None:
            return
        self._check_device(device)
        root = self._root(found, "src", src, group_src)
        if found.rank() == root:
            for tensor in self._pack_all(object_list, weights_only):
                self.broadcast(tensor, None, group, False, root)
            return
        sizes = _empty(len(object_list), torch.int64)
        self.broadcast(sizes, None, group, False, root)
        data = _empty(int(sizes.sum()), torch.uint8)
        self.broadcast(data, None, group, False, root)
        object_list[:] = _unpack_all(data, sizes, weights_only)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
        """Fills each rank's list with everybody's object, by rank."""
        found = self._enter("all_gather_object", group)
        if found is None:
            return
        self._check_length("object_list", object_list, found.size())
        data = _to_tensor(pack(obj, weights_only))
        sizes, longest = self._exchange_sizes(data, group, found.size())
        parts = _make_parts(found.size(), longest)
        self.all_gather(parts, _pad(data, longest), group)
        object_list[:] = [_unpack(part, size, weights_only) for part, size in zip(parts, sizes, strict=True)]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Fills the root's list with everybody's object, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather_object", group)
        if found is None:
            return
        root = self._root(found, "dst", dst, group_dst)
        is_root = found.rank() == root
        if is_root:
            self._check_length("object_gather_list", object_gather_list, found.size())
        data = _to_tensor(pack(obj, weights_only))
        sizes, longest = self._exchange_sizes(data, group, found.size())
        parts = _make_parts(found.size(), longest) if is_root else None
        self.gather(_pad(data, longest), parts, None, group, False, root)
        if parts is not None and object_gather_list is not None:
            object_gather_list[:] = [_unpack(part, size, weights_only) for part, size in zip(parts, sizes, strict=True)]

    def scatter_object_list(
        self,
        scatter_object_output_list: Any,
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Puts each rank's object of the root's list into its own. The root is rank 0 where none is given."""
        found = self._enter("scatter_object_list", group)
        if found is None:
            return
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise ArgumentError(
                f"scatter_object_output_list must be a list with a place for the object, got {scatter_object_output_list!r} "
                f"({self.here()}). Use [None]."
            )
        root = self._root(found, "src", src, group_src)
        pieces: list[Tensor] = []
        longest = _empty(1, torch.int64)
        if found.rank() == root:
            self._check_length("scatter_object_input_list", scatter_object_input_list, found.size())
            pieces = [_to_tensor(pack(each, weights_only)) for each in scatter_object_input_list or ()]
            longest = _tell_sizes([max(len(piece) for piece in pieces)])
        self.broadcast(longest, None, group, False, root)
        mine, size = _empty(int(longest), torch.uint8), _empty(1, torch.int64)
        self.scatter(mine, [_pad(piece, int(longest)) for piece in pieces], None, group, False, root)
        self.scatter(size, [_tell_sizes([len(piece)]) for piece in pieces], None, group, False, root)
        scatter_object_output_list[0] = _unpack(mine, int(size), weights_only)

    # -- what they share

    def _exchange_sizes(self, data: Tensor, group: Any, count: int) -> tuple[list[int], int]:
        """Returns how many bytes each rank has, and the most."""
        sizes = _empty(count, torch.int64)
        self.all_gather(list(sizes.split(1)), _tell_sizes([len(data)]), group)
        return sizes.tolist(), int(sizes.max())

    def _pack_all(self, objects: Any, weights_only: bool) -> tuple[Tensor, Tensor]:
        """Returns the sizes of the packed objects, shape (objects), and their bytes, shape (bytes)."""
        if not isinstance(objects, list | tuple) or not objects:
            raise ArgumentError(f"object_list must be a list of at least one object, got {objects!r} ({self.here()}). Put one into it.")
        packed = [pack(each, weights_only) for each in objects]
        return _tell_sizes([len(each) for each in packed]), _to_tensor(b"".join(packed))

    def _check_device(self, device: Any) -> None:
        if device is not None and torch.device(device).type != "cpu":
            raise ArgumentError(f'device must be "cpu" or None in a simulation, got {device} ({self.here()}). Leave it out.')

    def _check_length(self, what: str, objects: Any, count: int) -> None:
        if not isinstance(objects, list) or len(objects) != count:
            got = f"one of {len(objects)}" if isinstance(objects, list) else repr(objects)
            raise ArgumentError(f"{what} must be a list of {count}, one for each rank of the group, got {got} ({self.here()}). Fill it up.")


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=_CPU)


def _tell_sizes(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64, device=_CPU)


def _to_tensor(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _make_parts(count: int, size: int) -> list[Tensor]:
    return list(_empty(count * size, torch.uint8).split(size))


def _pad(data: Tensor, size: int) -> Tensor:
    padded = torch.zeros(size, dtype=torch.uint8, device=_CPU)
    padded[: len(data)] = data
    return padded


def _unpack(data: Tensor, size: int, weights_only: bool) -> Any:
    return unpack(data[:size].numpy().tobytes(), weights_only)


def _unpack_all(data: Tensor, sizes: Tensor, weights_only: bool) -> list[Any]:
    """Returns the objects whose bytes lie behind each other."""
    return [_unpack(piece, len(piece), weights_only) for piece in data.split(sizes.tolist())]


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
