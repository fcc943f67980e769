"""What simulated ranks share, and what each of them has for itself."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch.distributed import GroupMember

from ringsim.comm.backend import Backend, Membership
from ringsim.comm.torch_hooks import GROUPS
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.faults import make_failure
from ringsim.predict.calibration import Calibration
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.clock import Clock
from ringsim.simulator.desk import Desk
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Message
from ringsim.simulator.parts import Part
from ringsim.simulator.post_office import PostOffice
from ringsim.simulator.rank_recorder import RankRecorder
from ringsim.simulator.tape import Kind, Tape
from ringsim.traces.events import NONE, OP_CODES, Payload

__all__ = ["RankCore", "World"]


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
