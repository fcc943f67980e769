"""Ends the groups of a session after a failed call, and explains what was built on them.

Objects of the program keep the groups that they were built on. Their next operation would raise an
obscure error or wait forever, so it raises an error that names the remedy instead.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ringsim.comm.torch_private import list_groups, rename_groups_of
from ringsim.errors import RingError
from ringsim.state import change_state, get_state

_ENDED = "ended when an earlier call of the session failed. Make it again:"


def end_groups() -> None:
    """Ends all groups of this process; the objects built on them raise an error on use."""
    note_ended()
    end_objects()
    if dist.is_initialized():
        dist.destroy_process_group()


def note_ended() -> None:
    """Makes operations of this rank on its present groups raise an error."""
    change_state(ended=weakref.WeakSet([*get_state().ended, *list_groups()]))


def end_objects() -> None:
    """Makes the models and device meshes that this process has built raise an error on use."""
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            thing.register_forward_pre_hook(_refuse_model)
        elif issubclass(type(thing), DeviceMesh):
            rename_groups_of(thing, f"of a device mesh that {_ENDED} init_device_mesh(...)")


def check_group(group: ProcessGroup) -> None:
    """Raises RingError if an operation uses a group that has ended."""
    if group in get_state().ended:
        raise RingError(
            f"this process group {_ENDED} dist.new_group(...), or fully_shard(...) for FSDP."
        )


def _refuse_model(*_: Any) -> NoReturn:
    raise RingError(
        f"the groups of this model {_ENDED} model = DistributedDataParallel(model.module)."
    )
