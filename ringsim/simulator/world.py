"""Keeps torch.distributed's tables of process groups separate for each simulated rank.

torch keeps the groups of a process in ``distributed_c10d._world``. An object with the running
rank's attributes replaces it. Members share their groups: the n-th group that a rank creates is the
n-th group of every other rank. If only its members create a group (``use_local_synchronization``),
they find the group by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from ringsim.comm.group_order import GROUPS, own_limit
from ringsim.comm.torch_hooks import put
from ringsim.comm.torch_private import (
    CHECK_BATCH,
    REGISTER,
    SET_DEFAULT,
    UNREGISTER,
    UNREGISTER_ALL,
    WORLD,
    Future,
    Place,
)
from ringsim.diagnose.failure import place_text
from ringsim.errors import RendezvousFailed
from ringsim.launch.worlds import check_world
from ringsim.ring.pairs import all_pairs, pair_name
from ringsim.simulator.clock import Clock
from ringsim.simulator.group import SimulatedGroup
from ringsim.simulator.isolation import Isolation
from ringsim.simulator.rank import Shared, SimulatedRank
from ringsim.simulator.stores import let_stores_give_way
from ringsim.simulator.work import PayloadKind, SimulatedWork, Team
from ringsim.traces.events import DESTROYED, MADE_ANEW, NONE, OP_CODES, Payload

_NEW_GROUP = OP_CODES["new_group"]
_DEFAULT = "0"  # torch's name for the first group
_BACKEND = "gloo"


class RankWorld:
    """The running rank's version of the state that ``distributed_c10d`` keeps for a process.

    Args:
        clock: the clock of the ranks.

    Attributes:
        generation: the number of times the rank has destroyed its world.
        made: the number of groups that the rank has created in this world.
        asked: whether the rank's program has called ``init_process_group``.
        group: the default group.
    """

    def __init__(self, clock: Clock) -> None:
        self.begin(clock)

    def begin(self, clock: Clock) -> None:
        """Sets the attributes of the calling rank, which does not belong to any group yet."""
        self.clock = clock
        self.group: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, Mapping[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}  # torch 2.15
        self.comms: list[Any] = []
        self.group_count = 0
        self.generation = self.made = 0
        self.asked = False

    @property
    def default_pg(self) -> Any:
        """The default group. Threads that a worker starts cannot use it."""
        self.clock.check_thread()
        return self.group

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self.group = group

    # the rank's groups and their configurations, in the form that torch lists them
    pg_config_info = distributed_c10d._World.pg_config_info


@dataclass
class _Making:
    """A group that ranks are creating together.

    Attributes:
        first: the operation of the first rank that called.
        waiting: the operations of the members that have called.
    """

    group: SimulatedGroup
    kind: PayloadKind
    first: SimulatedWork | None = None
    waiting: list[SimulatedWork] = field(default_factory=list)


@dataclass
class _Generation:
    """A world of all ranks: the default group and the groups created in it."""

    default: SimulatedGroup
    makers: Team  # the group of all ranks, which creates groups
    # the other groups, by number, or by name if only their members create them
    makings: dict[int | str, _Making] = field(default_factory=dict)


class Worlds:
    """Makes torch.distributed work with simulated ranks until the process ends.

    Args:
        shared: the state that the ranks share.
        size: the number of ranks.
        isolation: the object that keeps the ranks apart.

    Attributes:
        ranks: the numbers of all ranks, which all their rings share.
        teams: all groups, in the order of creation.
        pairs: the groups of the ring, by the place of the predecessor; empty if there is only one
            rank.
    """

    def __init__(self, shared: Shared, size: int, isolation: Isolation) -> None:
        self._shared, self._clock, self._recorder = shared, shared.clock, shared.recorder
        self.ranks = tuple(range(size))
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._world = isolation.world = RankWorld(shared.clock)
        shared.clock.refuse_thread = self._refuse_thread
        self.teams: list[Team] = []
        self._generations: list[_Generation] = []
        self.pairs: list[SimulatedGroup] = []
        self._registered: dict[str, Any] = {}
        self._post = shared.recorder.make_post(_NEW_GROUP)
        self.begin_again()
        self._install()

    def begin_again(self) -> None:
        """Makes the world and the ring of all ranks, and leaves the earlier ones."""
        self.teams.clear()
        self._first = len(self._generations)  # the generation that ranks join at first
        self._begin_generation()
        self.pairs = self._make_pairs()

    @property
    def makings(self) -> list[SimulatedWork]:
        """The operations of ranks that wait for other ranks to create a group."""
        return [
            operation
            for generation in self._generations
            for making in generation.makings.values()
            for operation in making.waiting
        ]

    # -- groups

    def _number(self, name: str, ranks: tuple[int, ...], generation: int) -> int:
        """Returns the number of a group in the trace."""
        self._recorder.world = generation
        number = self._recorder.group(name, ranks)
        self._recorder.world = 0
        return number

    def _add_group(
        self, title: str, ranks: tuple[int, ...], generation: int, name: str, desc: str
    ) -> SimulatedGroup:
        """Returns a new group, whose name is ``title`` in the trace and ``name`` in torch."""
        team = Team(self._clock, title, ranks, self._number(title, ranks, generation))
        self.teams.append(team)
        return SimulatedGroup(team, name, desc, self.make_group)

    def _begin_generation(self) -> _Generation:
        number = len(self._generations)
        default = self._add_group("world", self.ranks, number, _DEFAULT, "default_pg")
        makers = Team(self._clock, GROUPS, self.ranks, NONE)  # gets its number on first use
        self._generations.append(_Generation(default, makers))
        return self._generations[-1]

    def _make_pairs(self) -> list[SimulatedGroup]:
        pairs = []
        for pair in all_pairs(self.ranks):
            name = pair_name(pair)
            pairs.append(self._add_group(name, tuple(sorted(pair)), self._first, name, name))
        return pairs

    def make_group(
        self,
        ranks: Sequence[int],
        *,
        timeout: timedelta | None = None,
        group_name: str = "",
        group_desc: str | None = None,
        **options: Any,
    ) -> SimulatedGroup | None:
        """Creates a group. torch calls this method on all ranks, in the same order.

        The members wait for each other, which takes no virtual time.

        Returns:
            The group, or None on a rank that is not a member.

        Raises:
            RendezvousFailed: another rank creates a different group at this point.
        """
        members, desc, world = tuple(ranks), group_desc or "undefined", self._world
        generation, is_pair = self._generations[world.generation], desc.startswith("ring:")
        is_local = not group_name.isdigit()  # only its members create this group
        key = group_name if is_local else world.made
        making = generation.makings.get(key)
        if making is None:
            title = desc if is_pair else group_name
            group = self._add_group(title, members, world.generation, group_name, desc)
            making = generation.makings[key] = _Making(group, self._kind_of(members))
        if is_local:
            title = f"groups of {list(members)} after {len(world.pg_names)} others"
            makers = Team(self._clock, title, members, self._recorder.group(title, members))
        else:
            makers = generation.makers
            world.made += 1
        if not is_pair:
            making.group.team.limit = own_limit(timeout)
        if not is_pair or making.group.team.ranks != members:
            self._meet(making, makers, members)
        if self._clock.current.number in making.group.team.places:
            return making.group
        world.pg_group_ranks[dist.GroupMember.NON_GROUP_MEMBER] = making.group.team.places
        return None

    def _kind_of(self, members: tuple[int, ...]) -> PayloadKind:
        return self._shared.make_kind(Payload("ranks", tuple(sorted(members)), 0))

    def _meet(self, making: _Making, makers: Team, members: tuple[int, ...]) -> None:
        """Waits for the other members and, as real ranks do, records a collective of all ranks."""
        rank: Any = self._clock.current
        shared, team, now_s = self._shared, making.group.team, self._clock.now
        if makers.number == NONE:
            makers.number = self._number(GROUPS, self.ranks, self._world.generation)
        fits = team.ranks == members
        kind = making.kind if fits else self._kind_of(members)
        post = self._post
        slots: Any = (post(makers.number, NONE, NONE, kind.number),) if shared.records else ()
        operation = SimulatedWork(_NEW_GROUP, rank, slots, makers, kind)
        self._clock.polls = 0
        if making.first is None:
            making.first = operation
        if not fits:
            theirs = making.first
            message = (
                f"the ranks create different groups: {list(members)} here, but {list(team.ranks)} "
                f"in rank {theirs.rank.number}'s new_group{theirs.place_of_call()} "
                f"({rank.here()}). Call new_group for every group on every rank, in the same "
                "order, even for groups that do not include the rank."
            )
            operation.refuse("group_order_mismatch", message)
            raise RendezvousFailed(message)
        if rank.number in team.places:
            making.waiting.append(operation)
            if len(making.waiting) == len(team.ranks):
                for each in making.waiting:
                    each.complete(now_s)
        else:
            operation.complete(now_s)
        operation.wait()

    # -- a rank

    def join(self, rank: SimulatedRank) -> None:
        """Adds the calling rank to the world and its ring."""
        self._world.begin(self._clock)
        self._world.generation = self._first
        self._enter(self._generations[self._first].default)
        if self.pairs:
            for pair in (self.pairs[rank.number - 1], self.pairs[rank.number]):
                self._list(pair)

    def _enter(self, default: SimulatedGroup) -> None:
        """Writes the default group into the rank's tables, as ``init_process_group`` does."""
        world = self._world
        world.default_pg = default
        world.group_count = 1
        self._list(default)

    def _list(self, group: SimulatedGroup) -> None:
        world, name = self._world, group.group_name
        store = PrefixStore(f"{world.generation}/{name}/", self._store)
        world.pg_map[group] = (_BACKEND, store)
        world.pg_names[group] = name
        world.pg_backend_config[group] = f"cpu:{_BACKEND}"
        world.pg_group_ranks[group] = group.team.places
        world.pg_to_tag[group] = f"ptd:{name}"
        world.tags_to_pg.setdefault("", []).append(group)
        world.tags_to_pg[f"ptd:{name}"] = [group]
        self._register(name, group)

    def _refuse_thread(self) -> None:
        """Ends the run because a worker's thread communicates, and blocks this thread forever."""
        if threading.current_thread() is threading.main_thread():
            return
        place = self._recorder.sites.find(sys._getframe(1))
        line = f" at {place_text((place.f_code.co_filename, place.f_lineno))}" if place else ""
        message = (
            f"a simulated rank communicated{line} in a thread other than the one that runs its "
            "worker. Run the program on real ranks with ringsim.trace."
        )
        self._clock.give_up(message)
        threading.Event().wait()

    # -- replacements in torch

    def _install(self) -> None:
        """Replaces the parts of torch that assume one rank per process."""
        let_stores_give_way(self._clock)
        init = self._make_init(dist.init_process_group)
        replacements: dict[Place, Any] = {
            WORLD: self._world,
            REGISTER: self._register,
            UNREGISTER: lambda _name: None,  # because other ranks may still use the group
            UNREGISTER_ALL: lambda: None,
            SET_DEFAULT: self._set_default,
            CHECK_BATCH: self._begin_batch,
            (Future, "wait"): self._make_wait(Future.wait),
            (dist, "init_process_group"): init,
            (distributed_c10d, "init_process_group"): init,
        }
        self._originals = put(replacements | self._shared.checks.replacements)

    def _register(self, name: str, group: Any) -> None:
        """Registers a group by its name, so that C++ finds it in one table for all ranks."""
        known = self._registered.get(name)
        if known is group:
            return
        if known is not None:
            self._originals[UNREGISTER](name)
        self._registered[name] = group
        self._originals[REGISTER](name, group)

    def _set_default(self, group: Any) -> None:
        """Sets the calling rank's default group."""
        self._originals[SET_DEFAULT](group)
        if group is None:
            self._recorder.mark(DESTROYED)
            self._world.generation += 1
            self._world.made = 0
            self._world.asked = False

    def _begin_batch(self, p2p_op_list: Any) -> None:
        """Checks and announces the messages of ``batch_isend_irecv``, which calls this first."""
        self._originals[CHECK_BATCH](p2p_op_list)
        rank: Any = self._clock.current
        rank.begin_batch(len(p2p_op_list))

    def _make_init(self, call: Callable[..., None]) -> Callable[..., None]:
        """Creates the ``init_process_group`` that joins the existing ranks."""
        signature = inspect.signature(call)

        @functools.wraps(call)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            wanted = signature.bind(*args, **kwargs).arguments
            world = self._world
            if dist.is_initialized() and world.asked:
                call(*args, **kwargs)  # torch refuses a second call
            if not dist.is_initialized():
                self._join_again()
            check_world(wanted, "ringsim.simulate", "Omit it.")
            world.asked = True
            limit = own_limit(wanted.get("timeout"))
            if limit is not None:
                world.default_pg.team.limit = limit

        return init_process_group

    def _join_again(self) -> None:
        """Adds the calling rank to a new world, after ``destroy_process_group``."""
        number = self._world.generation
        if number == len(self._generations):
            self._begin_generation()
        self._recorder.mark(MADE_ANEW)
        self._enter(self._generations[number].default)

    def _make_wait(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Creates the replacement for ``Future.wait``, in which a waiting rank gives way."""
        clock = self._clock

        @functools.wraps(call)
        def wait(self: Any) -> Any:
            operation = getattr(self, "operation", None)
            if operation is not None:
                operation.wait()
            elif not self.done():
                rank = clock.current
                self.add_done_callback(lambda _: clock.at(clock.now, rank))
                while not self.done():
                    clock.pause()
            return call(self)

        return wait
