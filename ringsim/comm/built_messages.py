"""Point-to-point operations, barriers and groups, built from those that every backend has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringsim.comm.backend import Backend
from ringsim.comm.handle import Handle
from ringsim.comm.member import Member
from ringsim.errors import ArgumentError, RingError

__all__ = [
    "barrier",
    "batch_isend_irecv",
    "monitored_barrier",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "send",
    "wait_for_source",
]


def send(
    backend: Backend, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """``send`` from ``isend``."""
    work = backend.isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    backend: Backend, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> int:
    """``recv`` from ``irecv``; returns the sender's global rank, -1 outside the group."""
    work = backend.irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    return wait_for_source(backend, work, src, group, group_src)


def wait_for_source(backend: Backend, work: Any, src: int | None, group: Any, group_src: int | None) -> int:
    """Returns the global rank that a message came from, given the handle, which is complete, and what the caller asked for."""
    if src is not None:
        return src
    if group_src is None:
        group_src = work._source_rank() if hasattr(work, "_source_rank") else work.source_rank()
    return backend.get_process_group_ranks(group)[group_src]


def batch_isend_irecv(backend: Backend, p2p_op_list: list[Any]) -> list[Any]:
    """``batch_isend_irecv``: one operation after the other."""
    if not p2p_op_list:
        raise ArgumentError(f"p2p_op_list must be a list of one P2POp or more, got {p2p_op_list!r}. Make them with ringsim.comm.P2POp.")
    works = [getattr(backend, each.op.__name__)(each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]
    return [work for work in works if work is not None]


def barrier(backend: Backend, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Handle | None:
    """``barrier``: every rank shows a number to every other. ``device_ids`` means nothing here, ``timeout`` limits each message."""
    del device_ids
    member = Member(backend, group, "barrier")
    if member.rank < 0:
        return None
    native = member.native("all_reduce")
    token = torch.zeros(1, dtype=torch.int32)
    if native:
        works = [native[1](token, torch.distributed.ReduceOp.SUM, group, True)]
    else:
        works, _ = member.share(token)
    handle = Handle(works, lambda: None)
    if async_op:
        return handle
    handle.wait(timeout)
    return None


def monitored_barrier(backend: Backend, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """``monitored_barrier``: every rank reports to the first, which answers all.

    Raises:
        RingError: on the first rank, a rank did not come in time; with ``wait_all_ranks`` the message names all of them.
    """
    member = Member(backend, group, "monitored_barrier")
    if member.rank < 0:
        return
    token = torch.zeros(1, dtype=torch.int32)
    if member.rank > 0:
        Handle([member.send(token, 0), member.recv(torch.zeros_like(token), 0)], lambda: None).wait(timeout)
        return
    missing = []
    for rank, work in [(rank, member.recv(torch.zeros_like(token), rank)) for rank in member.others]:
        try:
            Handle([work], lambda: None).wait(timeout)
        except (RuntimeError, OSError, RingError) as error:
            missing.append((member.ranks[rank], error))
            if not wait_all_ranks:
                break
    if missing:
        ranks = [rank for rank, _ in missing]
        raise RingError(f"all ranks must reach monitored_barrier, got none of ranks {ranks} in time. Look where they are.") from missing[0][
            1
        ]
    Handle([member.send(token, rank) for rank in member.others], lambda: None).wait(timeout)


def new_subgroups_by_enumeration(
    backend: Backend,
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Any = None,
    backend_name: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> tuple[Any, list[Any]]:
    """``new_subgroups_by_enumeration`` from ``new_group``; returns this rank's group, None if it is in none, and all groups."""
    del backend_name, pg_options, group_desc
    every = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    if not every or len(set(every)) != len(every):
        raise ArgumentError(f"ranks_per_subgroup_list must name every rank at most once, got {ranks_per_subgroup_list!r}. Part them.")
    groups = [backend.new_group(list(ranks), timeout) for ranks in ranks_per_subgroup_list]
    rank = backend.get_rank()
    own = next((group for group, ranks in zip(groups, ranks_per_subgroup_list, strict=True) if rank in ranks), None)
    return own, groups


def new_subgroups(
    backend: Backend,
    group_size: int | None = None,
    group: Any = None,
    timeout: Any = None,
    backend_name: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> tuple[Any, list[Any]]:
    """``new_subgroups`` from ``new_group``: neighbours of ``group_size`` each (which must be given: there are no GPUs to count)."""
    del backend_name, pg_options, group_desc
    ranks = backend.get_process_group_ranks(group)
    if not group_size or len(ranks) % group_size:
        raise ArgumentError(
            f"group_size must divide the {len(ranks)} ranks, got {group_size!r} (new_subgroups). Say how many belong together."
        )
    return new_subgroups_by_enumeration(backend, [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)], timeout)
