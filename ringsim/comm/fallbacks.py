"""What is done where a backend, or the installed torch, lacks an operation: it is built from those that exist.

| operation | built from, the first that exists |
|---|---|
| send, recv, batch_isend_irecv | isend, irecv |
| barrier | all_reduce; messages |
| broadcast, gather, scatter, reduce, all_to_all, all_to_all_single, object forms, monitored_barrier | messages |
| all_reduce, all_gather_single, all_gather_into_tensor | all_gather; messages |
| all_gather | all_gather_single, all_gather_into_tensor; messages |
| reduce_scatter_single, reduce_scatter_tensor | reduce_scatter; messages |
| gather_single, gather_into_tensor | gather; messages |
| reduce_scatter | messages |
| all_reduce_coalesced, all_gather_coalesced | all_reduce, all_gather, one after the other; else as these are |
| new_subgroups, new_subgroups_by_enumeration | new_group |

The result is the native one bit for bit, but for sums and products of floats, which are taken in the order of the ranks (``reductions``).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, Final

from ringsim.comm import built_collectives, built_messages, built_objects
from ringsim.comm.backend import Backend
from ringsim.errors import RingError

__all__ = ["FALLBACKS", "find"]

FALLBACKS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(module, name) for module in (built_collectives, built_objects) for name in module.__all__},
    **{name: getattr(built_messages, name) for name in built_messages.__all__ if name != "wait_for_source"},
    "all_gather_into_tensor": built_collectives.all_gather_single,
    "reduce_scatter_tensor": built_collectives.reduce_scatter_single,
    "gather_into_tensor": built_collectives.gather_single,
}
_SPELLINGS: Final = (  # of one operation
    ("all_gather_into_tensor", "all_gather_single"),
    ("reduce_scatter_tensor", "reduce_scatter_single"),
    ("gather_into_tensor", "gather_single"),
)
_REFUSAL: Final = re.compile(r"Backend \S+ does not support \w+")
_TWINS: Final = {name: twin for pair in _SPELLINGS for name, twin in (pair, pair[::-1])}


def find(backend: Backend, op: str, depth: int = 0) -> Callable[..., Any]:
    """Returns what does an operation on a backend: its own method, or one that is built; the latter warns once.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.
        depth: whose line the warning names: 0 the caller's, 1 that of its caller, and so on.

    Returns:
        A function that takes torch's arguments.

    Raises:
        RingError: neither exists.

    Example:
        >>> from ringsim.comm.torch_backend import TORCH
        >>> find(TORCH, "isend").__name__
        'isend'
    """
    if backend.supports(op):
        method: Callable[..., Any] = getattr(backend, op)
        return method
    twin = _TWINS.get(op)
    if twin is not None and backend.supports(twin):
        return find(backend, twin)
    return build(backend, op, depth + 1)


def build(backend: Backend, op: str, depth: int) -> Callable[..., Any]:
    """Returns an operation that is built from others of a backend; warns once.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.
        depth: whose line the warning names: 0 the caller's, 1 that of its caller, and so on.

    Raises:
        RingError: nobody knows how.
    """
    if op not in FALLBACKS:
        raise RingError(
            f"ringsim.comm.{op} must be something that the backend {backend.name!r} can do, got a backend without it. "
            "Use set_backend('torch') for what only torch has."
        )
    _warn_once(op, backend.name, 3 + depth)
    return functools.partial(FALLBACKS[op], backend)


def is_refusal(error: RuntimeError, op: str) -> bool:
    """Returns whether an error says that a backend lacks an operation that can be built: torch offers it, its Gloo or NCCL may not have it.

    Torch says so before anything is sent: ``Backend gloo does not support gather_single`` (torch 2.15).
    """
    return op in FALLBACKS and _REFUSAL.match(str(error)) is not None


@functools.cache
def _warn_once(op: str, backend_name: str, stacklevel: int) -> None:
    warnings.warn(
        f"the backend {backend_name!r} has no {op}; ringsim.comm builds it from other operations, which is slower",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
