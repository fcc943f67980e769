"""What a process group is called in the record, and which ranks are in it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

__all__ = ["name_and_ranks"]


def name_and_ranks(group: ProcessGroup) -> tuple[str, list[int]]:
    """Returns a group's name, the same on all of its ranks, and the global rank of each of its ranks.

    Args:
        group: any process group; of one that was made behind torch's back nobody knows which global ranks are in it.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> name_and_ranks(dist.group.WORLD)
        ('world', [0])
        >>> dist.destroy_process_group()
    """
    name = _name(group)
    try:
        return name, dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return f"{name or 'unnamed'} (unregistered: group ranks)", list(range(group.size()))


def _name(group: ProcessGroup) -> str:
    if group is distributed_c10d.GroupMember.WORLD:
        return "world"
    try:  # where torch numbered a pair group, its name stands in the description
        return group.group_desc if group.group_desc.startswith("ring:") else str(group.group_name)
    except RuntimeError:  # made behind torch's back
        return ""
