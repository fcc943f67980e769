"""All of torch's private names that the communication layer uses.

This module also handles versions of torch that lack a name. A ``Place`` is a function that
recording or checking replaces and later restores; a missing place is skipped. All other names are
only queried; if such a name is missing, the query returns a harmless default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work, c10d_logger, distributed_c10d
from torch.distributed.distributed_c10d import Store

# documented, in a private module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves as tree_leaves

OF_TORCH = os.path.dirname(torch.__file__) + os.sep
without_modes = _disable_current_modes
_NOTHING: AbstractContextManager[Any] = nullcontext()


class DispatchMode(TorchDispatchMode):
    """A mode that sees every operator, and does not make torch import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, because True imports the compiler, which takes a second."""
        return False


Place = tuple[Any, str]  # an owner, and the name of its attribute
Hook = Callable[..., Any]  # a function in such a place
Replacements = dict[Place, Hook]

# called by new_group, split_group and device meshes
NEW_GROUP: Place = (distributed_c10d, "_new_group_with_tag")
# called by init_process_group and destroy_process_group
SET_DEFAULT: Place = (distributed_c10d, "_update_default_pg")
WARN_OUTSIDER: Place = (distributed_c10d, "_warn_not_in_group")
CHECK_NOT_SELF: Place = (distributed_c10d, "_check_not_self_rank")
# creates torch's log entry for a failed call
DESCRIBE_CALL: Place = (c10d_logger, "_get_msg_dict")
START_COALESCING: Place = (ProcessGroup, "_start_coalescing")
END_COALESCING: Place = (ProcessGroup, "_end_coalescing")
CHECK_BATCH: Place = (distributed_c10d, "_check_p2p_op_list")  # called by batch_isend_irecv
WORLD: Place = (distributed_c10d, "_world")  # torch's tables of groups
REGISTER: Place = (distributed_c10d, "_register_process_group")  # in C++
# creates a group for init_process_group and new_group
MAKE_GROUP: Place = (distributed_c10d, "_new_process_group_helper")
HAS_MPI: Place = (distributed_c10d, "_MPI_AVAILABLE")  # the result of is_mpi_available
UNREGISTER: Place = (distributed_c10d, "_unregister_process_group")
UNREGISTER_ALL: Place = (distributed_c10d, "_unregister_all_process_groups")
Future: Any = torch.futures.Future.__bases__[0]  # the type of get_future's result

_MESSAGE_TYPES = (12, 13, 14)  # send, recv and recv from any source


def present(replacements: dict[Place, Any]) -> dict[Place, Any]:
    """Returns the replacements that have something to replace in this version of torch."""
    return {place: value for place, value in replacements.items() if hasattr(*place)}


def default_store() -> Store | None:
    """Returns the store of the default process group, or None if torch hides it."""
    ask = getattr(distributed_c10d, "_get_default_store", None)
    return None if ask is None else ask()


def default_timeout_s() -> float | None:
    """Returns the CPU timeout of the default process group, or None if torch hides it."""
    try:
        return float(
            distributed_c10d.group.WORLD._get_backend(  # type: ignore[union-attr]
                torch.device("cpu")
            ).options._timeout.total_seconds()
        )
    except (
        AttributeError,
        RuntimeError,
    ):  # no default group, or a different backend or version of torch
        return None


def count_groups() -> int:
    """Returns the number of groups that include this rank.

    Torch uses this number in the name of the next group that only its members create.
    """
    return len(getattr(getattr(distributed_c10d, "_world", None), "pg_names", ()))


def list_groups() -> list[ProcessGroup]:
    """Returns the groups in torch's tables, or an empty list if torch hides the tables."""
    return [*getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())]


def rename_groups_of(mesh: Any, name: str) -> None:
    """Gives the groups of a device mesh a name that torch does not find, and so reports."""
    mesh._dim_group_names = [name] * mesh.ndim


def is_registered(group: ProcessGroup) -> bool:
    """Returns whether a group is in torch's tables, or True if torch hides the tables."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    return known is None or group in known


def is_unused(group: ProcessGroup) -> bool:
    """Returns whether no operation has been posted on a group.

    Returns False if the answer is unknown, because only Gloo counts operations.
    """
    count = getattr(group, "_get_sequence_number_for_group", lambda: None)
    try:
        return "gloo" in group.name() and count() == 0
    except RuntimeError:
        return False


def gpu_backend(group: ProcessGroup) -> str:
    """Returns the name of a group's backend for GPUs, regardless of its backend for host tensors.

    The name is empty if there is none.
    """
    ask = getattr(group, "_get_backend", None)
    try:
        return "" if ask is None else str(ask(torch.device("cuda")).name()).lower()
    except RuntimeError:
        return ""


def is_message(work: Work) -> bool:
    """Returns whether a handle belongs to a send or a recv."""
    return getattr(work, "_get_op_type", lambda: None)() in _MESSAGE_TYPES


def source_rank(work: Any) -> int:
    """Returns the group rank of a received message's sender, or -1 if torch does not record it."""
    try:
        return int(getattr(work, "_source_rank", lambda: -1)())
    except RuntimeError:  # the operation has no source
        return -1


def keys_below_backend_select() -> Any:
    """Returns the dispatch keys below ``BackendSelect``, or None if torch lacks or hides them."""
    key = getattr(getattr(torch._C, "DispatchKey", None), "BackendSelect", None)
    ask = getattr(torch._C, "_dispatch_keyset_full_after", None)
    return None if key is None or ask is None else ask(key)


def has_dispatch_modes() -> bool:
    """Returns whether a ``TorchDispatchMode`` is active on the calling thread."""
    # torch has no public query for it
    return torch._C._len_torch_dispatch_stack() > 0


def outside_modes() -> AbstractContextManager[Any]:
    """Returns a context manager that disables every ``TorchDispatchMode`` on this thread."""
    # disabling modes unconditionally costs 8 us per message
    return _disable_current_modes() if has_dispatch_modes() else _NOTHING


def in_backward() -> bool:
    """Returns whether the calling thread is in a backward pass."""
    # torch has no public query for it; only in a backward pass does C++ itself wait for a future
    return bool(torch._C._current_graph_task_id() != -1)


def has_modes() -> bool:
    """Returns whether a torch mode is active on the calling thread, or a default device is set."""
    # torch has no public query for it
    return has_dispatch_modes() or torch._C._len_torch_function_stack() > 0


def has_saved_tensor_hooks() -> bool:
    """Returns whether the calling thread has hooks for tensors saved for the backward pass."""
    # torch has no public query for it; the argument is whether to check during tracing
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def run_after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the current backward pass has computed its gradients.

    If no node of the graph is running, the function is called immediately.
    """
    # as in torch's own FSDP: the engine's callbacks have no public name
    if torch._C._current_autograd_node() is None:
        function()
    else:
        Variable._execution_engine.queue_callback(function)
