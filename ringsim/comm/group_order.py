"""Records and compares the creation and destruction of process groups.

If a rank creates a different group from its peers, it waits for them for half an hour, and a rank
that destroys its groups leaves its peers in the middle of an operation. The n-th group that a rank
creates is matched with the n-th group of every other rank, regardless of the members, because torch
numbers groups in this way. Each creation is recorded as a collective on the group ``GROUPS``, with
the members in place of a shape. If only the members create a group (``use_local_synchronization``),
torch names the group after the members and the number of groups that the rank is in. The creation
is then recorded on a group with that name.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ringsim.comm.numbering import name_and_ranks
from ringsim.comm.torch_private import NEW_GROUP, SET_DEFAULT, Hook, count_groups
from ringsim.errors import RendezvousFailed
from ringsim.traces.events import DESTROYED, ERROR, MADE_ANEW, NONE, OP_CODES, Group
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder

GROUPS = "groups of the world"
_LOCAL = 4  # the position of the argument use_local_synchronization after ranks
_SHORT = timedelta(seconds=30)


def own_limit(timeout: timedelta | None) -> timedelta | None:
    """Returns a group's timeout if the program relies on the timeout to continue, or else None.

    A long timeout only ends hangs, and the watcher reaches its verdict earlier.
    """
    return timeout if timeout is not None and timeout <= _SHORT else None


class GroupOrder:
    """Compares this rank's groups with the corresponding groups on other ranks.

    Groups are compared before torch is called, because nothing can wake a rank that waits for
    others in torch's store.

    Args:
        recorder: the recorder of this rank, which shares its directory with the other ranks.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: Counter[Group] = Counter()
        self._others: dict[int, PartReader] = {}
        # the groups that the other ranks create, by rank and slot
        self._records: dict[int, dict[int, Any]] = {}

    def check(self, members: list[int], world: Group) -> None:
        """Compares this rank's next group with the corresponding groups on some other ranks.

        Ranks that have not created that group yet are skipped.

        Args:
            members: the members of the group.
            world: the group on which this call is recorded.

        Raises:
            RendezvousFailed: another rank creates a different group.
        """
        me, size = self._recorder.rank, self._recorder.world_size
        # a few comparisons find a rank that disagrees with all others
        steps = [1 << power for power in range(size.bit_length())]
        for rank in sorted(
            {(me + step) % size for power in steps for step in (power, -power)} - {me}
        ):
            made = self._groups_of(rank, world)
            if self._made[world] < len(made):
                theirs, place = made[self._made[world]]
                if list(theirs) != members:
                    raise RendezvousFailed(
                        f"the ranks create different groups: {members} here, but {list(theirs)} "
                        f"in rank {rank}'s new_group{place} (rank {me} of {size}). Call "
                        "new_group for every group on every rank, in the same order, even for "
                        "groups that do not include the rank."
                    )
        self._made[world] += 1

    def _groups_of(self, rank: int, world: Group) -> list[tuple[tuple[int, ...], str]]:
        """Returns the members of each group that a rank has created, with the line that did so."""
        part = self._others.setdefault(rank, PartReader(self._recorder.directory, rank))
        if not part.is_live():
            return []  # ignore the records of an earlier run
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
    """Creates the replacement for torch's function that creates groups.

    Groups with their own timeout are added to ``limits``.
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
            return None  # torch raises the right error
        payload = recorder.payload("ranks", members, 0)
        if kwargs.get("use_local_synchronization", args[_LOCAL] if len(args) > _LOCAL else False):
            if recorder.rank not in members:
                return None  # this rank does not take part
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
    """Creates the replacement for torch's function that sets the default group.

    Torch sets the default group to None when all groups are destroyed.
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
