"""The private names of torch that the communication layer uses, all of them here.

Also what is done where a version of torch lacks one. The places are of functions that recording or
checking puts others in place of, and takes back; one that is missing is left out. The rest is only
asked: a missing name means the answer that does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work, c10d_logger, distributed_c10d
from torch.distributed.distributed_c10d import Store

# documented, in a private module
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves

without_modes: Final = _disable_current_modes
_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()

Place = tuple[Any, str]  # an owner, and the name of its attribute
Hook = Callable[..., Any]  # a function in such a place
Replacements = dict[Place, Hook]

# what new_group, split_group and device meshes call
NEW_GROUP: Final[Place] = (distributed_c10d, "_new_group_with_tag")
# what init_process_group and destroy_process_group call
SET_DEFAULT: Final[Place] = (distributed_c10d, "_update_default_pg")
WARN_OUTSIDER: Final[Place] = (distributed_c10d, "_warn_not_in_group")
CHECK_NOT_SELF: Final[Place] = (distributed_c10d, "_check_not_self_rank")
# what torch's log says of a call that failed
DESCRIBE_CALL: Final[Place] = (c10d_logger, "_get_msg_dict")
START_COALESCING: Final[Place] = (ProcessGroup, "_start_coalescing")
END_COALESCING: Final[Place] = (ProcessGroup, "_end_coalescing")
CHECK_BATCH: Final[Place] = (distributed_c10d, "_check_p2p_op_list")  # called by batch_isend_irecv
WORLD: Final[Place] = (distributed_c10d, "_world")  # torch's tables of groups
REGISTER: Final[Place] = (distributed_c10d, "_register_process_group")  # with C++
# what init_process_group and new_group create a group with
MAKE_GROUP: Final[Place] = (distributed_c10d, "_new_process_group_helper")
HAS_MPI: Final[Place] = (distributed_c10d, "_MPI_AVAILABLE")  # what is_mpi_available returns
UNREGISTER: Final[Place] = (distributed_c10d, "_unregister_process_group")
UNREGISTER_ALL: Final[Place] = (distributed_c10d, "_unregister_all_process_groups")
Future: Final[Any] = torch.futures.Future.__bases__[0]  # what get_future returns

_MESSAGE_TYPES: Final = (12, 13, 14)  # send, recv and recv from any source


def present(replacements: dict[Place, Any]) -> dict[Place, Any]:
    """Returns the replacements of what this version of torch has."""
    return {place: value for place, value in replacements.items() if hasattr(*place)}


def default_store() -> Store | None:
    """Returns the store of the default process group, None if torch hides it."""
    ask = getattr(distributed_c10d, "_get_default_store", None)
    return None if ask is None else ask()


def default_timeout_s() -> float | None:
    """Returns how long an operation of the default process group may wait on CPUs.

    None if torch hides it.
    """
    try:
        return float(
            distributed_c10d.group.WORLD._get_backend(  # type: ignore[union-attr]
                torch.device("cpu")
            ).options._timeout.total_seconds()
        )
    except (AttributeError, RuntimeError):  # no default group; another backend, or version of torch
        return None


def count_groups() -> int:
    """Returns how many groups this rank is in.

    Torch names the next one that its members alone make after that.
    """
    return len(getattr(getattr(distributed_c10d, "_world", None), "pg_names", ()))


def is_registered(group: ProcessGroup) -> bool:
    """Returns whether torch has taken a group into its tables; True if torch hides them."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    return known is None or group in known


def is_unused(group: ProcessGroup) -> bool:
    """Returns whether no operation has been posted on a group.

    False if that is unknown (only Gloo counts them).
    """
    count = getattr(group, "_get_sequence_number_for_group", lambda: None)
    try:
        return "gloo" in group.name() and count() == 0
    except RuntimeError:
        return False


def gpu_backend(group: ProcessGroup) -> str:
    """Returns the name of what carries a group's operations on GPUs.

    Independent of the backend for tensors of the host; empty if there is none.
    """
    ask = getattr(group, "_get_backend", None)
    try:
        return "" if ask is None else str(ask(torch.device("cuda")).name()).lower()
    except RuntimeError:
        return ""


def is_message(work: Work) -> bool:
    """Returns whether a handle is that of a send or a recv."""
    return getattr(work, "_get_op_type", lambda: None)() in _MESSAGE_TYPES


def source_rank(work: Any) -> int:
    """Returns the group rank that a message came from, once it is there.

    -1 if torch does not know.
    """
    try:
        return int(getattr(work, "_source_rank", lambda: -1)())
    except RuntimeError:  # of an operation that has no source
        return -1


def keys_below_backend_select() -> Any:
    """Returns the set of the dispatcher's keys that come after ``BackendSelect``.

    None if torch has no such key, or hides it.
    """
    key = getattr(getattr(torch._C, "DispatchKey", None), "BackendSelect", None)
    ask = getattr(torch._C, "_dispatch_keyset_full_after", None)
    return None if key is None or ask is None else ask(key)


def outside_modes() -> AbstractContextManager[Any]:
    """Returns a block outside of any ``TorchDispatchMode`` that the calling thread is in."""
    # torch has no public question for it; to disable modes unasked costs 8 us a message
    if torch._C._len_torch_dispatch_stack() > 0:
        return _disable_current_modes()
    return _NOTHING


def in_backward() -> bool:
    """Returns whether the calling thread is in a backward pass."""
    # torch has no public question for it; only there does C++ wait for a future by itself
    return bool(torch._C._current_graph_task_id() != -1)


def has_modes() -> bool:
    """Returns whether the calling thread is in a mode of torch, or has a default device."""
    # torch has no public question for it
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0


def has_saved_tensor_hooks() -> bool:
    """Returns whether the calling thread has hooks for tensors that are saved for backward."""
    # torch has no public question for it; the argument: whether to look while it traces
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def run_after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the gradients of the backward pass that goes on are there.

    If no node of the graph runs any more, that is now.
    """
    # as torch's own FSDP does it: the engine's callbacks have no public name
    if torch._C._current_autograd_node() is None:
        function()
    else:
        Variable._execution_engine.queue_callback(function)
