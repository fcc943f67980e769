"""Records and compares the making and destroying of process groups.

A rank that makes another group than its peers waits for them for half an hour, and one that
destroys its groups leaves its peers in the middle of an operation. The n-th group that a rank makes
meets the n-th of every other rank, whatever their members, because torch numbers them so. Each is
recorded as a collective on a group of its own, ``GROUPS``, with the members in place of a shape. A
group made by its members alone (``use_local_synchronization``) is named by torch after them and the
number of groups that the rank is in; its record is on a group of that name.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ringsim.comm.numbering import name_and_ranks
from ringsim.comm.torch_private import NEW_GROUP, SET_DEFAULT, Hook, count_groups
from ringsim.errors import RendezvousFailed
from ringsim.traces.events import DESTROYED, ERROR, MADE_ANEW, NONE, OP_CODES, Group
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder

__all__ = ["GROUPS", "own_limit", "record_end_of_groups", "record_new_groups"]

GROUPS: Final = "groups of the world"
_LOCAL: Final = 4  # place of the argument use_local_synchronization after ranks
_SHORT: Final = timedelta(seconds=30)


def own_limit(timeout: timedelta | None) -> timedelta | None:
    """Returns the time-out of a group if it lets the program go on, None if it is a net for hangs.

    A verdict comes before that.
    """
    return timeout if timeout is not None and timeout <= _SHORT else None


class GroupOrder:
    """Compares the groups that this rank makes with those of others in their place.

    Before torch is called. No other comparison is made before the damage: nothing wakes a rank that
    waits for others in torch's store.

    Args:
        recorder: writes this rank's own records, beside theirs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: Counter[Group] = Counter()
        self._others: dict[int, PartReader] = {}
        # by rank and slot, the groups that the others make
        self._records: dict[int, dict[int, Any]] = {}

    def check(self, members: list[int], world: Group) -> None:
        """Compares the next group of this rank with what its neighbours in the world make there.

        As far as they have come.

        Args:
            members: of the group.
            world: the group of whose calls this is one.

        Raises:
            RendezvousFailed: another rank makes another group.
        """
        me, size = self._recorder.rank, self._recorder.world_size
        # whoever disagrees with all others is found with few looks
        steps = [1 << power for power in range(size.bit_length())]
        for rank in sorted(
            {(me + step) % size for power in steps for step in (power, -power)} - {me}
        ):
            made = self._groups_of(rank, world)
            if self._made[world] < len(made):
                theirs, place = made[self._made[world]]
                if list(theirs) != members:
                    raise RendezvousFailed(
                        f"all ranks must make the same groups in the same order, got {members} "
                        f"here and {list(theirs)} in rank {rank}'s new_group{place} (rank {me} of "
                        f"{size}). Call new_group for every group on every rank, in one order, "
                        "also for groups that the rank is not in."
                    )
        self._made[world] += 1

    def _groups_of(self, rank: int, world: Group) -> list[tuple[tuple[int, ...], str]]:
        """Returns the members of the groups that a rank makes, or has made, and where it does."""
        part = self._others.setdefault(rank, PartReader(self._recorder.directory, rank))
        if not part.is_live():
            return []  # what an earlier run left is not to be taken for the present
        records, unread = self._records.setdefault(rank, {}), True
        while unread:
            batch = part.advance()
            making = batch.records["op"] == OP_CODES["new_group"]
            records.update(zip(batch.slots[making].tolist(), batch.records[making], strict=True))
            unread = part.more
        made = []
        for _, record in sorted(records.items()):
            number = int(record["group"])
            payload = part.names["payload"].get(int(record["payload"]))
            refused = record["status"] == ERROR and record["wait_ns"] == NONE
            of_world = number in part.fresh and part.names["group"][number] == world
            if of_world and payload is not None and not refused:
                file = part.names["file"].get(int(record["file"]), "")
                place = f" at {os.path.basename(file)}:{record['line']}" if file else ""
                made.append((payload.shape, place))
        return made


def record_new_groups(
    recorder: Recorder, compared: bool, limits: weakref.WeakSet[ProcessGroup]
) -> Hook:
    """Makes the replacement for torch's function that makes groups.

    Those with a time-out of their own are put into ``limits``.
    """
    call = getattr(*NEW_GROUP)
    post = recorder.make_post(OP_CODES["new_group"])
    order = GroupOrder(recorder)

    def post_making(ranks: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        if not dist.is_initialized():
            return None
        try:
            world = list(range(dist.get_world_size()))
            members = sorted(world if ranks is None else map(int, ranks))
        except (TypeError, ValueError):
            return None  # torch says what is wrong with them
        payload = recorder.payload("ranks", members, 0)
        if kwargs.get("use_local_synchronization", args[_LOCAL] if len(args) > _LOCAL else False):
            if recorder.rank not in members:
                return None  # it has no part in this
            return post(
                recorder.group(f"groups of {members} after {count_groups()} others", members),
                NONE,
                NONE,
                payload,
            )
        group = recorder.group(GROUPS, world, fresh=compared)
        slot = post(group, NONE, NONE, payload)
        if slot is not None and compared:
            try:
                order.check(members, Group(GROUPS, tuple(world), recorder.world))
            except RendezvousFailed as error:
                recorder.complete(slot, ERROR)
                recorder.notice("group_order_mismatch", str(error), group, NONE, NONE, payload)
                raise
        return slot

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        slot = post_making(ranks, args, kwargs)
        if slot is None:
            return call(ranks, *args, **kwargs)
        recorder.wait(slot)
        try:
            group = call(ranks, *args, **kwargs)
        except BaseException:
            recorder.complete(slot, ERROR)
            recorder.on_failure()
            raise
        recorder.complete(slot)
        is_made = isinstance(group, ProcessGroup) and not name_and_ranks(group)[0].startswith(
            "ring:"
        )
        if is_made and own_limit(kwargs.get("timeout", args[0] if args else None)) is not None:
            limits.add(group)
        return group

    return new_group


def record_end_of_groups(recorder: Recorder, on_new_world: Callable[[], None]) -> Hook:
    """Makes the replacement for torch's function that sets the default group.

    It is set to None when all groups are destroyed.
    """
    call, destroyed = getattr(*SET_DEFAULT), False

    def set_default(group: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal destroyed
        if group is None:
            destroyed = True
            recorder.mark(DESTROYED)
        elif destroyed:
            destroyed = False
            recorder.mark(MADE_ANEW)
            recorder.world += 1
        on_new_world()
        return call(group, *args, **kwargs)

    return set_default
