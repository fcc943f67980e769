"""Shows the making and the end of process groups to the recorder.

A rank that makes another group than its peers waits for them for half an hour; one that destroys its groups leaves others in the middle of
what they do there.

The n-th group that a rank makes meets the n-th of every other, whatever its members: torch numbers them so. A record of it is a collective
on a group of its own, ``GROUPS``, that carries the members in place of a shape. A group that its members alone make
(``use_local_synchronization``) torch names by them and by how many groups the rank is in already. So does its record, on a group of these
members: where they are in different numbers of groups, they wait for each other in vain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringsim.comm.counterparts import Counterparts
from ringsim.traces.events import DESTROYED, ERROR, MADE_ANEW, NONE, OP_CODES
from ringsim.traces.recorder import Recorder

__all__ = ["GROUPS", "record_end_of_groups", "record_new_groups"]

GROUPS: Final = "groups of the world"
_LOCAL: Final = 4  # place of the argument use_local_synchronization after ranks
_FUNCTION: Final = "_new_group_with_tag"  # what new_group, split_group and device meshes call
_SETTER: Final = "_update_default_pg"  # what init_process_group and destroy_process_group call


def record_new_groups(recorder: Recorder, counterparts: Counterparts | None) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Makes the replacement for torch's function that makes groups.

    Args:
        recorder: writes the records.
        counterparts: compares them with those of the other ranks; None for no comparison.

    Returns:
        The replacement by (owner, name); nothing where a version of torch does not have the function, which is private.
    """
    call = getattr(distributed_c10d, _FUNCTION, None)
    if call is None:
        return {}
    post = recorder.make_post(OP_CODES["new_group"])
    met: set[int] = set()

    def post_making(ranks: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        if not dist.is_initialized():
            return None
        try:
            world = list(range(dist.get_world_size()))
            members = sorted(world if ranks is None else map(int, ranks))
        except (TypeError, ValueError):
            return None  # torch says what is wrong with them
        if kwargs.get("use_local_synchronization", args[_LOCAL] if len(args) > _LOCAL else False):
            if recorder.rank not in members:
                return None  # it passes by
            before = len(distributed_c10d._world.pg_names)
            group = recorder.group(f"groups of {members} after {before} others", members)
            return post(group, NONE, NONE, recorder.payload("ranks", members, 0))
        group = recorder.group(GROUPS, world, fresh=counterparts is not None)
        payload = recorder.payload("ranks", members, 0)
        slot = post(group, NONE, NONE, payload)
        if slot is not None and counterparts is not None:
            if group not in met:
                met.add(group)
                counterparts.meet_group(group, GROUPS, world)
            try:
                counterparts.compare_collective(group, OP_CODES["new_group"], payload, NONE)
            except BaseException:
                recorder.complete(slot, ERROR)
                raise
        return slot

    @functools.wraps(call)
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
        return group

    return {(distributed_c10d, _FUNCTION): new_group}


def record_end_of_groups(recorder: Recorder) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Makes the replacement for torch's function that sets the default group: to none when it is destroyed, and all groups with it.

    Args:
        recorder: writes a mark then, and another where a program makes its groups anew.

    Returns:
        The replacement by (owner, name); nothing where a version of torch does not have the function, which is private.
    """
    call = getattr(distributed_c10d, _SETTER, None)
    if call is None:
        return {}
    destroyed = False

    @functools.wraps(call)
    def set_default(group: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal destroyed
        if group is None or destroyed:
            destroyed = group is None
            recorder.mark(DESTROYED if destroyed else MADE_ANEW)
        return call(group, *args, **kwargs)

    return {(distributed_c10d, _SETTER): set_default}
