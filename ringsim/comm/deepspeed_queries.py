"""What DeepSpeed's programs ask: which operations there are, who is in a group, which place the launcher gave this process.

Any rank calls these at any time; none blocks.

Source:
    DeepSpeed, ``deepspeed/comm/comm.py`` and ``utils.py``: names and arguments.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringsim.comm.torch_backend import TORCH
from ringsim.environment import discover
from ringsim.errors import RingError
from ringsim.state import get_state

__all__ = [
    "enable_symm_mem_for_group",
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_world_group",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "initialize_mesh_device",
]


def has_reduce_scatter_tensor() -> bool:
    """Returns whether the backend has ``reduce_scatter_tensor`` itself; where it has not, it is built from others.

    Example:
        >>> has_reduce_scatter_tensor()
        True
    """
    return (get_state().backend or TORCH).supports("reduce_scatter_tensor")


def has_all_gather_into_tensor() -> bool:
    """Returns whether the backend has ``all_gather_into_tensor`` itself; where it has not, it is built from others.

    Example:
        >>> has_all_gather_into_tensor()
        True
    """
    return (get_state().backend or TORCH).supports("all_gather_into_tensor")


def has_all_reduce_coalesced() -> bool:
    """Returns whether the backend has ``all_reduce_coalesced`` itself; where it has not, it is built from others.

    Example:
        >>> has_all_reduce_coalesced()
        True
    """
    return (get_state().backend or TORCH).supports("all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    """Returns whether operations can be put together by torch's coalescing manager.

    Example:
        >>> has_coalescing_manager()
        True
    """
    return get_state().backend is None and hasattr(dist, "_coalescing_manager")


def get_world_group() -> Any:
    """Returns the group of all ranks.

    Raises:
        RingError: there is none yet.

    Example:
        >>> get_world_group()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: the process group must exist before it is used, got none. Call init_distributed first.
    """
    _check_joined()
    return dist.group.WORLD if get_state().backend is None else None


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the global ranks of a group, in the group's order; of all ranks for None.

    Raises:
        RingError: there is no process group yet.

    Example:
        >>> get_all_ranks_from_group()
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: the process group must exist before it is used, got none. Call init_distributed first.
    """
    _check_joined()
    backend = get_state().backend or TORCH
    return list(range(backend.get_world_size())) if group is None else list(backend.get_process_group_ranks(group))


def get_local_rank() -> int:
    """Returns this process's number on its machine: what ``LOCAL_RANK`` says, the ring, or the launcher.

    Raises:
        RingError: nothing says it.

    Example:
        >>> import os
        >>> os.environ["LOCAL_RANK"] = "3"
        >>> get_local_rank()
        3
        >>> del os.environ["LOCAL_RANK"]
    """
    said = os.environ.get("LOCAL_RANK", "")
    if said.isdecimal():
        return int(said)
    ring = get_state().ring
    return discover(ask_mpi=False).local_rank if ring is None else ring.local_rank


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of all ranks. All ranks call it; it blocks until all have.

    Args:
        mesh_shape: how many ranks there are in each dimension.
        mesh_dim_names: what the dimensions are called.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, mesh_shape, mesh_dim_names=mesh_dim_names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Passes on to torch: allows symmetric memory on a group, where torch and the GPUs can."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    enable(group_name)  # type: ignore[arg-type]  # a string by another name


def get_local_rank_from_launcher() -> int:
    """Returns ``LOCAL_RANK``, or what Open MPI says instead; 0 where neither is set.

    Example:
        >>> get_local_rank_from_launcher()
        0
    """
    return _read("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0)


def get_world_rank_from_launcher() -> int:
    """Returns ``RANK``, or what Open MPI says instead; 0 where neither is set.

    Example:
        >>> get_world_rank_from_launcher()
        0
    """
    return _read("RANK", "OMPI_COMM_WORLD_RANK", 0)


def get_world_size_from_launcher() -> int:
    """Returns ``WORLD_SIZE``, or what Open MPI says instead; 1 where neither is set.

    Example:
        >>> get_world_size_from_launcher()
        1
    """
    return _read("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1)


def _read(variable: str, instead: str, default: int) -> int:
    return int(os.environ.get(variable) or os.environ.get(instead) or default)


def _check_joined() -> None:
    if not (get_state().backend or TORCH).is_initialized():
        raise RingError("the process group must exist before it is used, got none. Call init_distributed first.")
