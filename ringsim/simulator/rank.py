"""A simulated rank: the backend ``simulator`` of ``ringsim.comm``.

One object a rank, all in one process. Only ``ringsim.simulate`` makes them. Tensors lie on the CPU,
or on the meta device, where only sizes travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from torch import Tensor, strided
from torch.distributed import GroupMember

from ringsim.comm.backend import Backend, Membership, run_collective
from ringsim.comm.built import check_reduction
from ringsim.comm.checks import CLOSE_GAPS, name_gaps
from ringsim.comm.collectives import READINGS, Call, describe, name_of_reduction, to_index
from ringsim.comm.objects import OBJECTS
from ringsim.comm.torch_hooks import GROUPS, own_limit
from ringsim.compute_costs import PostingCosts
from ringsim.errors import ArgumentError, Refused, RendezvousFailed, RingError
from ringsim.faults import make_failure
from ringsim.simulator.clock import Clock, Rank
from ringsim.simulator.collectives import Part, meet
from ringsim.simulator.links import Links, SharedCores
from ringsim.simulator.matching import (
    Channel,
    Kind,
    Message,
    Operation,
    Rendezvous,
    SimulatedGroup,
    check_tensor,
)
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES, Payload
from ringsim.traces.recorder import Recorder

__all__ = ["SimulatedRank", "World"]

_ISEND, _IRECV, _NEW_GROUP = (OP_CODES[name] for name in ("isend", "irecv", "new_group"))
_TAG_END: Final = 1 << 31


class _Making:
    """A group that ranks make together.

    Asked for by each with the same ranks, in the same order of groups.
    """

    def __init__(self, asked: tuple[Any, ...], group: SimulatedGroup, kind: Kind) -> None:
        self.asked, self.group, self.kind = asked, group, kind
        self.missing = len(group.ranks)  # how many members have not come
        self.first: Operation | None = None  # of whoever came first
        self.waiting: list[Operation] = []  # of the members that have come


@dataclass
class World:
    """What the ranks of one simulation share."""

    clock: Clock
    recorder: Recorder
    records: bool  # whether operations are recorded
    links: Links
    matcher: Rendezvous
    everybody: SimulatedGroup
    costs: PostingCosts | None = None  # of posting a message
    made: list[_Making] = field(default_factory=list)  # groups, in order
    makers: SimulatedGroup | None = None  # all ranks, as the group in which groups are made
    # by number of the call, and by rank
    shared: defaultdict[int, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    kinds: dict[Any, Kind] = field(default_factory=dict)
    # by operation, what records that one is posted
    posts: dict[int, Callable[..., int | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.posts = (
            {code: self.recorder.make_post(code) for code in OP_CODES.values()}
            if self.records
            else {}
        )

    def kind_of(self, tensors: Sequence[Tensor], copies: int = 1, op: Any = None) -> Kind:
        """Returns what an operation shares with others on such tensors.

        So many times, reduced in such a way.
        """
        how = "" if op is None else name_of_reduction(op)
        key = *((tensor.dtype, tensor.shape) for tensor in tensors), copies, how
        kind = self.kinds.get(key)
        if kind is None:
            first = tensors[0] if tensors else None
            kind = self.kinds[key] = self.make_kind(
                Payload(*describe(list(tensors), copies), how), first
            )
        return kind

    def make_kind(self, payload: Payload, tensor: Tensor | None = None) -> Kind:
        """Returns what operations that carry the same have in common."""
        return Kind(
            self.recorder.payload(*payload),
            payload,
            *((None, None) if tensor is None else (tensor.dtype, tensor.shape)),
        )


class SimulatedRank(Rank, Membership, Backend):
    """What ``ringsim.comm`` calls on a simulated rank.

    The functions are those of ``torch.distributed``: see there for the arguments. It fails in the
    place of its operation ``fails_at``, where that is given.
    """

    name = "simulator"
    direct = True
    barrier: Callable[..., Any]  # as all collectives: begun by `start`

    def __init__(self, world: World, number: int, seed: int, fails_at: int | None = None) -> None:
        super().__init__(number, seed, world.clock)
        self.world, self.everybody = world, world.everybody
        self.recorder, self._records, self._posts = world.recorder, world.records, world.posts
        self.in_order = not world.matcher.by_tag
        self.fails_at = fails_at
        # whether `_before_operation` has something to do
        self.hooked = world.clock.measures or fails_at is not None
        self._match, self._costs, links = world.matcher.post, world.costs, world.links
        self._first_use_s = (
            gloo.first_use_s
            if isinstance(links, SharedCores) and (gloo := links.gloo) is not None
            else 0.0
        )
        # Where messages meet, by what was given (sends or receives, group, peer, tag), which is
        # good after the first time.
        self._channels: dict[tuple[Any, ...], Channel] = {}
        self._operations = self._made = self._shares = self._refusals = 0
        # whether the rank is in the world, and whether its program has made it
        self._joined, self._asked = True, False
        self._gone: set[SimulatedGroup] = set()
        # What was found in a call of a collective, by its name and all that it was given but the
        # values of tensors.
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._refusal: Callable[[], BaseException] | None = None

    # -- the job

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return f"rank {self.number} of {self.everybody.size()}"

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
        """Joins the other ranks, who are there already.

        Does not block, takes no time, and needs no argument.

        Raises:
            ArgumentError: ``world_size`` or ``rank`` differ.
            RingError: this is the second call, with no ``destroy_process_group`` before it.
        """
        if self._joined and self._asked:
            raise RingError(
                f"the process group must be initialized once, got a second call ({self.here()}). "
                "Leave it out."
            )
        for what, wanted, is_value in (
            ("world_size", world_size, self.everybody.size()),
            ("rank", rank, self.number),
        ):
            if wanted not in (-1, is_value):
                raise ArgumentError(
                    f"{what} must be {is_value} in this simulation, or left out, got {wanted} "
                    f"({self.here()})."
                )
        self._joined = self._asked = True

    def destroy_process_group(self, group: Any = None) -> None:
        """Ends a group, or with None all of them, for this rank; does not block."""
        found = self.find_group(group)
        self._channels.clear()
        self._known.clear()
        if found is self.everybody:
            self._joined = False
        elif found is not None:
            self._gone.add(found)

    def share(self, value: Any) -> list[Any]:
        """Gives all ranks what each of them has, as a store would, and returns it by rank.

        It is a barrier, and moves no bytes.
        """
        self._shares += 1
        values = self.world.shared[self._shares]
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
        """Makes a group; all ranks call it in the same order with the same ranks.

        Members wait for each other; it takes no time.

        Returns:
            The group; on ranks outside ``GroupMember.NON_GROUP_MEMBER``.

        Raises:
            ArgumentError: a rank does not exist or is there twice.
            RendezvousFailed: another rank has made another group in its place.
        """
        if use_local_synchronization:
            raise ArgumentError(
                "use_local_synchronization must be False in a simulation, got True "
                f"({self.here()}). Call new_group on all ranks."
            )
        asked = None if ranks is None else tuple(ranks), sort_ranks
        # bears its edge, and is not recorded, as on torch
        made, is_pair = self.world.made, (group_desc or "").startswith("ring:")
        if self._made == len(made):
            made.append(self._make_group(asked, group_desc or "undefined", is_pair))
        making = made[self._made]
        members = making.group.ranks if asked == making.asked else self._members(*asked)
        self._made += 1
        if not is_pair:
            making.group.limit = own_limit(timeout)
        # who makes a ring has called its ranks together before
        if not is_pair or making.group.ranks != members:
            self._make_with_others(making, members)
        return making.group if self.number in making.group.places else GroupMember.NON_GROUP_MEMBER

    def _make_group(self, asked: tuple[Any, ...], desc: str, is_pair: bool) -> _Making:
        """Begins a group that no rank has asked for before."""
        world, members = self.world, self._members(*asked)
        name = desc if is_pair else f"{len(world.made) + 1}"
        group = SimulatedGroup(self.clock, name, members, world.recorder.group(name, members), desc)
        return _Making(asked, group, world.make_kind(Payload("ranks", tuple(sorted(members)), 0)))

    def _make_with_others(self, making: _Making, members: tuple[int, ...]) -> None:
        """Records that a group is made, as on torch.

        A collective of the world, with the members as its shape. They wait for each other.

        Raises:
            RendezvousFailed: another rank makes another group.
        """
        world, now_s = self.world, self.clock.now
        if world.makers is None:
            everyone = self.everybody.ranks
            world.makers = SimulatedGroup(
                self.clock, GROUPS, everyone, world.recorder.group(GROUPS, everyone)
            )
        fits = making.group.ranks == members
        kind = making.kind if fits else world.make_kind(Payload("ranks", tuple(sorted(members)), 0))
        slots: tuple[Any, ...] = (
            (world.posts[_NEW_GROUP](world.makers.number, NONE, NONE, kind.number),)
            if world.records
            else ()
        )
        operation = Operation(_NEW_GROUP, self, slots, world.makers, kind)
        self.clock.polls = 0
        if making.first is None:
            making.first = operation
        if not fits:
            theirs = f"rank {making.first.rank.number}'s new_group{making.first.place_of_call()}"
            message = (
                f"all ranks must make the same groups in the same order, got {list(members)} "
                f"here and {list(making.group.ranks)} in "
                f"{theirs} ({self.here()}). Call new_group for every group on every rank, in one "
                "order, also for groups that the rank is "
                "not in."
            )
            operation.refuse("group_order_mismatch", message)
            raise RendezvousFailed(message)
        if self.number in making.group.places:
            making.missing -= 1
            making.waiting.append(operation)
            if not making.missing:
                for each in making.waiting:
                    each.complete(now_s)
        else:
            operation.complete(now_s)
        operation.wait()

    def _everybody(self) -> SimulatedGroup:
        if not self._joined:
            raise Refused(
                "the process group must exist, got a call after destroy_process_group "
                f"({self.here()}). Initialize it again."
            )
        return self.everybody

    def _exists(self, group: Any) -> bool:
        return group not in self._gone

    # -- collectives

    def start(self, call: Call) -> Part:
        """Begins a collective."""
        if call.op is not None:
            check_reduction(call.op)
        return self._take_part(call, self.world.kind_of(call.carried, call.copies, call.op))

    def _take_part(self, call: Call, kind: Kind) -> Part:
        if self.hooked:
            self._before_operation()
        group: Any = call.group
        slots: tuple[Any, ...] = ()
        if self._records:
            peer = NONE if call.root == NONE else group.ranks[call.root]
            slots = (
                self._posts[OP_CODES[call.recorded_name]](group.number, peer, NONE, kind.number),
            )
        part = Part(self, slots, kind, call)
        if self._first_use_s:
            self._warm_up()
        self.clock.polls = 0
        meet(part, self.world.links)
        return part

    def monitored_barrier(
        self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        """Blocks until every rank of the group has come here.

        Where one never does, the simulation says which.
        """
        found = self.enter("monitored_barrier", group)
        if found is not None:
            self.start(Call("monitored_barrier", found, (), ())).wait(timeout)

    # -- messages

    def begin_send(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
        op: int = _ISEND,
    ) -> Message:
        """Begins to send; does not block.

        The tensor must not change until the handle has been waited for. ``op`` is recorded.
        """
        return self._begin(True, op, tensor, dst, group, tag, group_dst)

    def begin_recv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
        op: int = _IRECV,
    ) -> Message:
        """Begins to receive, from anybody where no source is given; does not block.

        ``op`` is recorded.
        """
        return self._begin(False, op, tensor, src, group, tag, group_src)

    isend, irecv = begin_send, begin_recv

    def blank_messages(self) -> None:
        """Lets every message of this rank carry zeros from now on, whatever was in its tensor."""
        match = self._match

        def match_blank(message: Message) -> None:
            if message.sends:
                message.tensor = message.tensor.new_zeros(message.tensor.shape)
            match(message)

        self._match = match_blank

    def _batch(self) -> AbstractContextManager[Any]:
        return self.world.matcher.batch(self)

    def _begin(
        self,
        sends: bool,
        op: int,
        tensor: Tensor,
        peer: int | None,
        group: Any,
        tag: int,
        group_peer: int | None,
    ) -> Message:
        """Begins to send or to receive, as the operation of a code."""
        channel = self._channels.get((sends, group, peer, tag)) if group_peer is None else None
        if channel is None:
            channel = self._open(sends, tensor, peer, group, tag, group_peer)
        kind = channel.kind
        if (
            kind is None
            or type(tensor) is not Tensor
            or tensor.dtype is not kind.dtype
            or tensor.shape != kind.shape
            or not tensor.is_contiguous()
        ):
            self._check_message(sends, tensor, channel)
            kind = self.world.kind_of((tensor,))
            other = channel.dst if sends else channel.src
            # as Gloo refuses: the operation is posted, and fails
            if not channel.connection.is_open:
                if self._records:
                    self.recorder.complete(
                        self._posts[op](channel.group.number, other, tag, kind.number), ERROR
                    )
                what = (
                    f"the connection to rank {other} must be open, got one that a limit has closed"
                )
                closed = Refused(f"{what} ({self.here()}). Make a new group after a time-out.")
                closed.imposed = True
                raise closed
            channel.kind = kind
        if self.hooked:
            self._before_operation()
        slots: tuple[Any, ...] = ()
        if self._records:
            slots = (
                self._posts[op](
                    channel.group.number, channel.dst if sends else channel.src, tag, kind.number
                ),
            )
        message = Message(op, self, slots, channel, kind, tensor, tag, sends)
        if self._first_use_s:
            self._warm_up()
        if self._costs is None:
            self._match(message)
            return message
        busy_s = channel.connection.busy_s
        busy_s[self.number] = self.clock.now
        self._match(message)
        busy_s[self.number] = end_s = self.clock.book(
            self._costs.post_s(sends, kind.size_bytes, met=message.number == 0)
        )
        self.clock.sleep_until(end_s)
        return message

    def _warm_up(self) -> None:
        """Lets what a fresh process takes for its first operation pass, once."""
        seconds, self._first_use_s = self._first_use_s, 0.0
        self.clock.work(seconds)

    def _open(
        self,
        sends: bool,
        tensor: Tensor,
        peer: int | None,
        given: Any,
        tag: int,
        group_peer: int | None,
    ) -> Channel:
        """Returns where messages to or from a peer meet their other side, and keeps it.

        Checks the arguments.
        """
        op, what = ("isend", "dst") if sends else ("irecv", "src")
        group: SimulatedGroup | None = self.find_group(given)
        if group is None:  # the message would be lost
            self._refuse(
                f"{op} must be called on a group that this rank is in, got one that it is not in "
                f"({self.here()}). "
                "Call it on the group's ranks only."
            )
        if not sends and peer is None and group_peer is None:
            other = ANY_SOURCE
        else:
            other = self._peer(what, group, peer, group_peer)
        number = to_index("tag", tag)
        if not 0 <= number < _TAG_END:
            self._refuse(
                f"tag must be from 0 to 2**31 - 1, got {number} ({self.here()}). Choose another.",
                op,
                group,
                other,
            )
        src, dst = (self.number, other) if sends else (other, self.number)
        channel = self.world.matcher.channel_of(group, src, dst, number)
        self._check_message(sends, tensor, channel)
        if group_peer is None:
            self._channels[sends, given, peer, tag] = channel
        return channel

    def _check_message(self, sends: bool, tensor: Any, channel: Channel) -> None:
        """Refuses a tensor that Gloo would not carry, and records it, as on torch."""
        op, other = ("isend", channel.dst) if sends else ("irecv", channel.src)
        try:
            if check_tensor("tensor", tensor).is_contiguous():
                return
            told = f"{name_gaps(tensor)} ({self.here()}, {op}). {CLOSE_GAPS}."
        except Refused as error:
            if not isinstance(tensor, Tensor):
                raise
            told = str(error)
        self._refuse(told, op, channel.group, other)

    def _peer(self, what: str, group: SimulatedGroup, global_rank: Any, group_rank: Any) -> int:
        """Returns the global rank of the other side, which must be another member."""
        try:
            peer = group.ranks[group.place_of(what, global_rank, group_rank)]
        except Refused as error:
            if global_rank in self.everybody.places:
                raise
            self._refuse(str(error))
        if peer == self.number:
            self._refuse(
                f"{what} must be another rank, got this rank itself ({self.here()}). Copy the "
                "tensor instead."
            )
        return peer

    def _refuse(
        self, message: str, op: str = "", group: SimulatedGroup | None = None, peer: int = NONE
    ) -> NoReturn:
        """Raises ArgumentError for a message that cannot be sent or received.

        Records it, as on torch.
        """
        if self._records:
            where = NONE if group is None else group.number, peer
            if group is not None:
                self.recorder.complete(self._posts[OP_CODES[op]](*where, NONE, NONE), ERROR)
            self.recorder.notice("invalid_argument", message, *where)
        raise ArgumentError(message)

    # -- what may go wrong

    def _before_operation(self) -> None:
        """Counts an operation about to be posted; raises where it must fail.

        Lets what was computed before it take its time.
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
        """Lets so many operations that the rank posts from now on raise an error.

        For the ranks can never go on.
        """
        self._refusal, self._refusals = make_error, times
        self.hooked = True


# -- collectives that are like an earlier one


def _describe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns what the reading of a call depends on.

    Where its tensors are plain and given by place; None otherwise.
    """
    found: list[Any] = []
    for value in args:
        if not isinstance(value, Tensor):
            found.append(value)
        elif (
            type(value) is Tensor
            and value.layout is strided
            and not value.requires_grad
            and value.is_contiguous()
        ):
            found += value.dtype, value.shape, value.is_cpu, value.is_meta
        else:
            return None
    return *found, *kwargs.items()


def _make_collective(name: str) -> Callable[..., Any]:
    """Makes the method of a collective.

    It does not read a call again that is like an earlier one of its rank.
    """
    reading = READINGS[name]
    places = {argument: place for place, argument in enumerate(reading.signature.parameters)}
    gives, takes = (places.get(argument, -1) for argument, _ in (reading.gives, reading.takes))

    def communicate(self: SimulatedRank, /, *args: Any, **kwargs: Any) -> Any:
        like = _describe_call(args, kwargs)
        try:
            known = self._known.get((name, like))
        except TypeError:  # lists of tensors, or of sizes
            like = known = None
        if known is None or like is None:

            def begin(rank: SimulatedRank, call: Call) -> Part:
                part = rank.start(call)
                if like is not None and all(
                    len(held) == 1 and 0 <= place < len(args) and held[0] is args[place]
                    for held, place in ((call.given, gives), (call.taken, takes))
                ):
                    self._known[name, like] = (
                        call.group, call.root, call.op, call.cut_given, call.cut_taken,
                        call.async_op, part.kind,
                    )  # fmt: skip
                return part

            return run_collective(self, begin, name, *args, **kwargs)
        group, root, op, cut_given, cut_taken, async_op, kind = known
        given = [args[gives]]
        taken = given if gives == takes else [args[takes]]
        part = self._take_part(
            Call(name, group, given, taken, (), 1, taken, root, op, cut_given, cut_taken), kind
        )
        if async_op:
            return part
        part.wait()
        return None

    return communicate


for _name in READINGS:
    setattr(SimulatedRank, _name, _make_collective(_name))
for _name, _function in OBJECTS.items():
    setattr(SimulatedRank, _name, _function)
