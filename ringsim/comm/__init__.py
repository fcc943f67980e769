"""The functions of ``torch.distributed``, with a log of how long they take.

Use ``from ringsim import comm as dist`` instead of ``import torch.distributed as dist``. This
module offers every name in ``torch.distributed``, backed by torch's own objects. Functions that
communicate can be logged; without a log, a call performs only two extra checks. ``set_backend``
chooses the backend for groups that are created later. Once this module is imported, torch can also
create groups on MPI ("mpi").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as _torch

from ringsim.comm.backends import current_backend as _current_backend
from ringsim.comm.backends import set_backend as set_backend
from ringsim.comm.building import FALLBACK_TAG as FALLBACK_TAG
from ringsim.comm.deepspeed import allgather_fn as allgather_fn
from ringsim.comm.deepspeed import enable_symm_mem_for_group as enable_symm_mem_for_group
from ringsim.comm.deepspeed import get_all_ranks_from_group as get_all_ranks_from_group
from ringsim.comm.deepspeed import get_local_rank as get_local_rank
from ringsim.comm.deepspeed import get_world_group as get_world_group
from ringsim.comm.deepspeed import has_all_gather_into_tensor as has_all_gather_into_tensor
from ringsim.comm.deepspeed import has_all_reduce_coalesced as has_all_reduce_coalesced
from ringsim.comm.deepspeed import has_coalescing_manager as has_coalescing_manager
from ringsim.comm.deepspeed import has_reduce_scatter_tensor as has_reduce_scatter_tensor
from ringsim.comm.deepspeed import in_aml as in_aml
from ringsim.comm.deepspeed import in_aws_sm as in_aws_sm
from ringsim.comm.deepspeed import in_dlts as in_dlts
from ringsim.comm.deepspeed import inference_all_reduce as inference_all_reduce
from ringsim.comm.deepspeed import init_distributed as init_distributed
from ringsim.comm.deepspeed import initialize_mesh_device as initialize_mesh_device
from ringsim.comm.deepspeed import mpi_discovery as mpi_discovery
from ringsim.comm.deepspeed import (
    patch_aml_env_for_torch_nccl_backend as patch_aml_env_for_torch_nccl_backend,
)
from ringsim.comm.deepspeed import (
    patch_aws_sm_env_for_torch_nccl_backend as patch_aws_sm_env_for_torch_nccl_backend,
)
from ringsim.comm.deepspeed import reduce_scatter_fn as reduce_scatter_fn
from ringsim.comm.functions import FUNCTIONS as _FUNCTIONS
from ringsim.comm.functions import MANAGING as _MANAGING
from ringsim.comm.functions import P2POp as P2POp
from ringsim.comm.log import configure as configure
from ringsim.comm.log import get_comm_operation_count as get_comm_operation_count
from ringsim.comm.log import get_logged_comm_ops as get_logged_comm_ops
from ringsim.comm.log import has_comm_data as has_comm_data
from ringsim.comm.log import log_summary as log_summary
from ringsim.comm.log import reset_log as reset_log
from ringsim.comm.log import timed_op as timed_op
from ringsim.comm.message_group import MessageGroup as MessageGroup
from ringsim.comm.mpi import register as _register_mpi

if TYPE_CHECKING:
    # type checkers see this P2POp, and all other names from torch
    from torch.distributed.distributed_c10d import *  # type: ignore[assignment]  # noqa: F403

    from ringsim.comm.backends import CurrentBackend as _CurrentBackend

    cdb: _CurrentBackend

_register_mpi()
# the functions of the installed torch; type checkers and editors get the names from above
_TIMED = {**_FUNCTIONS, **_MANAGING}


def __getattr__(name: str) -> Any:
    """Returns a timed function or torch's own object; for ``cdb``, returns the current backend."""
    if name in _TIMED:
        globals()[name] = _TIMED[name]  # so that the next use does not call this function
        return _TIMED[name]
    if name == "cdb":
        return _current_backend()
    if name.startswith("__"):  # Python inspects the module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_torch, name)
    except AttributeError:
        raise AttributeError(
            f"neither {__name__!r} nor torch.distributed has an attribute {name!r}"
        ) from None


def __dir__() -> list[str]:
    """Returns the public names of torch.distributed and ringsim.comm."""
    own = {
        name
        for name, value in globals().items()
        if str(getattr(value, "__module__", "")).startswith("ringsim.")
    }
    return sorted(name for name in {*own, *_TIMED, *dir(_torch), "cdb"} if not name.startswith("_"))


__all__ = __dir__()  # for `from ringsim.comm import *`
