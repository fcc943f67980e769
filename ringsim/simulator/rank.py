"""A simulated rank: the backend ``simulator`` of ``ringsim.comm``, one object a rank, all in one process.

Only ``ringsim.simulate`` makes them. Tensors lie on the CPU, or on the meta device, where only sizes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.distributed import GroupMember

from ringsim.comm.backend import Backend, Membership
from ringsim.comm.collectives import Call, to_index
from ringsim.comm.objects import OBJECTS
from ringsim.comm.torch_hooks import GROUPS
from ringsim.compute_costs import PostingCosts
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.faults import make_failure
from ringsim.simulator.clock import Clock, Runner
from ringsim.simulator.collectives import Part, post
from ringsim.simulator.links import Links
from ringsim.simulator.matching import Channel, Kind, Recv, Rendezvous, Send, SimulatedGroup, check_tensor
from ringsim.traces.events import ANY_SOURCE, NONE, OP_CODES, Payload
from ringsim.traces.recorder import Recorder

__all__ = ["Making", "SimulatedRank", "World"]

_ISEND, _IRECV = OP_CODES["isend"], OP_CODES["irecv"]
_TAG_END: Final = 1 << 31


@dataclass
class Making:
    """A group that ranks make together.

    Attributes:
        members: their global ranks.
        group: what they get.
        missing: how many members have not come.
        parts: of those that have come, in order.
    """

    members: tuple[int, ...]
    group: SimulatedGroup
    missing: int
    parts: list[Part] = field(default_factory=list)


@dataclass
class World:
    """What the ranks of one simulation share.

    Attributes:
        clock: the virtual clock.
        recorder: numbers what operations name, and records them all where ``records``.
        records: whether operations are recorded.
        links: carry messages and collectives.
        matcher: brings sends and recvs together.
        everybody: the group of all ranks.
        costs: says how long a rank is busy when it posts a message; None for no time.
        made: the groups that were made, in order.
        makers: all ranks, as a group in which groups are made; None before the first.
        shared: what ranks have given to ``share``, by its number and by rank.
        kinds: what operations carry, by what tells it.
        posts: by operation, what records that one is posted.
    """

    clock: Clock
    recorder: Recorder
    records: bool
    links: Links
    matcher: Rendezvous
    everybody: SimulatedGroup
    costs: PostingCosts | None = None
    made: list[Making] = field(default_factory=list)
    makers: SimulatedGroup | None = None
    shared: dict[int, dict[int, Any]] = field(default_factory=dict)
    kinds: dict[Any, Kind] = field(default_factory=dict)
    posts: _Posts = field(init=False)

    def __post_init__(self) -> None:
        self.posts = _Posts(self.recorder if self.records else None)

    def make_kind(self, payload: Payload, dtype: torch.dtype | None = None, shape: torch.Size | None = None) -> Kind:
        """Returns what operations that carry the same have in common."""
        return Kind(self.recorder.payload(*payload), payload, dtype, shape)

    def kind_of(self, tensor: Tensor) -> Kind:
        """Returns what a message shares with others of its dtype and shape."""
        key = tensor.dtype, tensor.shape
        kind = self.kinds.get(key)
        if kind is None:
            payload = Payload(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
            kind = self.kinds[key] = self.make_kind(payload, *key)
        return kind


class _Posts(dict[int, Callable[..., int | None]]):
    """By the code of an operation, what records that one is posted: made on use."""

    def __init__(self, recorder: Recorder | None) -> None:
        super().__init__()
        self._recorder = recorder

    def __missing__(self, op: int) -> Callable[..., int | None]:
        post = self[op] = _post_nothing if self._recorder is None else self._recorder.make_post(op)
        return post


def _post_nothing(group: int, peer: int, tag: int, payload: int) -> None:
    """Records nothing."""


class SimulatedRank(Runner, Membership, Backend):
    """What ``ringsim.comm`` calls on a simulated rank. The functions are those of ``torch.distributed``: see there for the arguments.

    Args:
        world: what it shares with the others.
        number: its rank.
        seed: of its random numbers.
        fails_at: the number of the operation in whose place it fails, None for none.
    """

    name = "simulator"
    direct = True

    def __init__(self, world: World, number: int, seed: int, fails_at: int | None = None) -> None:
        super().__init__(number, seed)
        self.world = world
        self.clock = world.clock
        self.recorder = world.recorder if world.records else None
        self.everybody = world.everybody
        self.in_order = not world.matcher.by_tag
        self.fails_at = fails_at
        self.hooked = world.clock.measures or fails_at is not None  # whether `before_operation` has something to do
        self._match, self._posts = world.matcher.post, world.posts
        self._costs = world.costs
        # Where messages went, and came from: by group, peer and tag as they were given, which are good after the first time.
        self._to: dict[tuple[Any, Any, Any], Channel] = {}
        self._from: dict[tuple[Any, Any, Any], Channel] = {}
        self._operations = self._made = self._shares = self._refusals = 0
        self._joined = True
        self._gone: set[SimulatedGroup] = set()
        self._refusal: Callable[[], BaseException] | None = None

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
        found = self.find_group(group)
        self._to.clear()
        self._from.clear()
        if found is self.everybody:
            self._joined = False
        elif found is not None:
            self._gone.add(found)

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return f"rank {self.number} of {self.everybody.size()}"

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
            group_desc: what to call it; shown by the group.
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
            group = SimulatedGroup(self.clock, name, members, self.world.recorder.group(name, members), desc)
            made.append(Making(members, group, len(members)))
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
        world, everyone = self.world, self.everybody.ranks
        if world.makers is None:
            world.makers = SimulatedGroup(self.clock, GROUPS, everyone, world.recorder.group(GROUPS, everyone))
        payload = Payload("ranks", tuple(sorted(members)), 0)
        kind = world.make_kind(payload)
        slot = world.posts[OP_CODES["new_group"]](world.makers.number, NONE, NONE, kind.number)
        part = Part(self, slot, kind, Call("new_group", world.makers, (), ()))
        self.clock.polls = 0
        if making.members != members:
            theirs = next((f"rank {each.rank.number}'s new_group{each.place_of_call()}" for each in making.parts), "another rank")
            message = (
                f"all ranks must make the same groups in the same order, got {list(members)} here and {list(making.members)} in {theirs} "
                f"({self.here()}). Call new_group for every group on every rank, in one order, also for groups that the rank is not in."
            )
            part.refuse("group_order_mismatch", message)
            raise RendezvousFailed(message)
        making.parts.append(part)
        making.missing -= self.number in members
        if self.number not in members:
            part.complete(self.clock.now)
        elif not making.missing:
            for each in making.parts:
                each.complete(min(each.done_s, self.clock.now))
        part.wait()

    def _everybody(self) -> SimulatedGroup:
        if not self._joined:
            raise RingError(f"the process group must exist, got a call after destroy_process_group ({self.here()}). Initialize it again.")
        return self.everybody

    def _exists(self, group: Any) -> bool:
        return group not in self._gone

    def start(self, call: Call) -> Part:
        """Begins a collective."""
        return post(self, call)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here; where one never does, the simulation says which."""
        del wait_all_ranks
        found = self.enter("monitored_barrier", group)
        if found is not None:
            self.start(Call("monitored_barrier", found, (), ())).wait(timeout)

    # -- messages

    def begin_send(self, tensor: Tensor, dst: int | None, group: Any, tag: int, group_dst: int | None, op: int = _ISEND) -> Send:
        """Begins to send, as the operation of a code."""
        channel = self._to.get((group, dst, tag)) if group_dst is None else None
        if channel is None:
            channel = self._open_send(tensor, dst, group, tag, group_dst)
        kind = channel.kind
        if kind is None or type(tensor) is not Tensor or tensor.dtype is not kind.dtype or tensor.shape != kind.shape:
            check_tensor("tensor", tensor)
            kind = channel.kind = self.world.kind_of(tensor)
        if self.hooked:
            self.before_operation()
        slot = None
        if self.recorder is not None:
            slot = self._posts[op](channel.group.number, channel.dst, tag, kind.number)
        handle = Send(op, self, slot, channel.group, kind, tensor, channel.dst, tag, channel)
        self._match(handle)
        if self._costs is not None:
            self.clock.work(self._costs.post_s(True, kind.size_bytes, met=handle.number == 0))
        return handle

    def begin_recv(self, tensor: Tensor, src: int | None, group: Any, tag: int, group_src: int | None, op: int = _IRECV) -> Recv:
        """Begins to receive, as the operation of a code."""
        channel = self._from.get((group, src, tag)) if group_src is None else None
        if channel is None:
            channel = self._open_recv(tensor, src, group, tag, group_src)
        kind = channel.kind
        if kind is None or type(tensor) is not Tensor or tensor.dtype is not kind.dtype or tensor.shape != kind.shape:
            check_tensor("tensor", tensor)
            kind = channel.kind = self.world.kind_of(tensor)
        if self.hooked:
            self.before_operation()
        slot = None
        if self.recorder is not None:
            slot = self._posts[op](channel.group.number, channel.src, tag, kind.number)
        handle = Recv(op, self, slot, channel.group, kind, tensor, channel.src, tag, None if channel.src == ANY_SOURCE else channel)
        self._match(handle)
        if self._costs is not None:
            self.clock.work(self._costs.post_s(False, kind.size_bytes))
        return handle

    def _batch(self) -> AbstractContextManager[Any]:
        return self.world.matcher.batch(self)

    def _open_send(self, tensor: Tensor, dst: int | None, given: Any, tag: int, group_dst: int | None) -> Channel:
        """Returns where the messages to a peer meet their recvs, and keeps it.

        Raises:
            RingError: an argument is wrong.
        """
        group = self._within("isend", given)
        check_tensor("tensor", tensor)
        peer, number = self._peer("dst", group, dst, group_dst), self._check_tag(tag)
        channel = self.world.matcher.channel_of(group, self.number, peer, number)
        if group_dst is None:
            self._to[given, dst, tag] = channel
        return channel

    def _open_recv(self, tensor: Tensor, src: int | None, given: Any, tag: int, group_src: int | None) -> Channel:
        """Returns the same of a recv; one from anybody has a channel of its own."""
        group = self._within("irecv", given)
        check_tensor("tensor", tensor)
        if src is None and group_src is None:
            return Channel(group, ANY_SOURCE, self.number, self._check_tag(tag))
        peer, number = self._peer("src", group, src, group_src), self._check_tag(tag)
        channel = self.world.matcher.channel_of(group, peer, self.number, number)
        if group_src is None:
            self._from[given, src, tag] = channel
        return channel

    def _within(self, op: str, group: Any) -> SimulatedGroup:
        """Returns the group of a message.

        Raises:
            ArgumentError: this rank is outside, so that the message would be lost.
        """
        found: SimulatedGroup | None = self.find_group(group)
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

    def _refuse(self, message: str) -> NoReturn:
        """Raises ArgumentError for a message that cannot be sent or received, and records it, as on torch."""
        if self.recorder is not None:
            self.recorder.notice("invalid_argument", message)
        raise ArgumentError(message)

    # -- what may go wrong

    def before_operation(self) -> None:
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


for _name, _function in OBJECTS.items():
    setattr(SimulatedRank, _name, _function)
