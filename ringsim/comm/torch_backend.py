"""The backend that is there from the start: ``torch.distributed`` itself, with Gloo, NCCL or whatever torch offers."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from ringsim.comm.backend import Backend

__all__ = ["TORCH", "TorchBackend"]


class TorchBackend(Backend):
    """Passes everything on to ``torch.distributed``; what torch has, this has, under the same name.

    Example:
        >>> TorchBackend().supports("all_reduce"), TorchBackend().supports("all_reduce_by_pigeon")
        (True, False)
    """

    name = "torch"
    init_process_group = staticmethod(dist.init_process_group)
    new_group = staticmethod(dist.new_group)
    destroy_process_group = staticmethod(dist.destroy_process_group)
    is_initialized = staticmethod(dist.is_initialized)
    get_rank = staticmethod(dist.get_rank)
    get_world_size = staticmethod(dist.get_world_size)
    get_process_group_ranks = staticmethod(dist.get_process_group_ranks)
    get_backend = staticmethod(dist.get_backend)
    get_global_rank = staticmethod(dist.get_global_rank)
    get_group_rank = staticmethod(dist.get_group_rank)
    isend = staticmethod(dist.isend)
    irecv = staticmethod(dist.irecv)

    def __getattr__(self, name: str) -> Any:
        """Returns torch's function ``name``."""
        return getattr(dist, name)


TORCH: Final = TorchBackend()
