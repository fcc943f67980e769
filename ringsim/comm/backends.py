"""Chooses the backend for new groups from the backends registered with torch.

``set_backend`` stores a name. ``init_process_group``, ``new_group`` and ``initialize_distributed``
use that backend if the program names none. Existing groups keep their own backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch.distributed as dist

from ringsim.errors import ArgumentError
from ringsim.state import change_state, get_state

GROUP = "ringsim.backends"  # the group of the entry points
TORCH = "torch"  # torch's own choice
_MIGRATION = (
    "Derive a class from ringsim.comm.MessageGroup, register it with "
    "torch.distributed.Backend.register_backend, and pass its name (see "
    "docs/how-to/write-a-backend.md)."
)


@dataclass(repr=False)
class CurrentBackend:
    """The type of ``ringsim.comm.cdb``: the backend for new groups, along with torch's functions.

    Attributes:
        name: the name of the backend, or "torch" for torch's own choice.

    Example:
        >>> backend = CurrentBackend("torch")
        >>> backend, backend.get_backend_config.__name__
        (CurrentBackend('torch'), 'get_backend_config')
    """

    name: str = TORCH

    def __repr__(self) -> str:
        return f"CurrentBackend({self.name!r})"

    def __getattr__(self, name: str) -> Any:
        """Returns torch's function ``name``."""
        return getattr(dist, name)

    @staticmethod
    def get_all_gather_function() -> Callable[..., Any]:
        """Returns ``all_gather_into_tensor``, for DeepSpeed's benchmarks."""
        return dist.all_gather_into_tensor


def current_backend() -> CurrentBackend:
    """Returns the backend for new groups."""
    return CurrentBackend(get_state().backend or TORCH)


def set_backend(backend: str) -> CurrentBackend:
    """Chooses the backend for all groups created after this call.

    Call this function on every rank before ``init_process_group``, ``initialize_distributed`` or
    ``new_group``. This function does not block. A backend that is passed to one of these calls
    takes precedence.

    Args:
        backend: "torch" for torch's own choice; the name of a backend registered with torch
            ("gloo", "mpi", ...); or the name of an entry point in the group ``ringsim.backends``.
            The entry point refers to a module, or to a function without arguments, that registers
            the backend.

    Returns:
        The chosen backend, which is also available as ``ringsim.comm.cdb``.

    Raises:
        ArgumentError: the backend does not exist or cannot be loaded.

    Example:
        >>> set_backend("torch").name
        'torch'
        >>> set_backend("pigeon")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: backend must be one of ..., got 'pigeon'. Install ...
    """
    if not isinstance(backend, str):
        raise ArgumentError(
            f"backend must be the name of a backend registered with torch, got {backend!r}. "
            f"{_MIGRATION}"
        )
    name = backend.lower()
    if name != TORCH:
        _load(name)
    change_state(backend=None if name == TORCH else name)
    return CurrentBackend(name)


def _load(name: str) -> None:
    """Registers a backend with torch if needed; raises ArgumentError if that fails."""
    entries = {each.name.lower(): each for each in entry_points(group=GROUP)}
    registered = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    if name == dist.Backend.MPI and not dist.is_mpi_available():
        raise ArgumentError(
            "cannot load the backend 'mpi': mpi4py is not installed. Install it: "
            "pip install 'ringsim[mpi]'."
        )
    if name in registered:
        return
    if name not in entries:
        known = ", ".join(sorted({TORCH, *registered, *entries}))
        raise ArgumentError(
            f"backend must be one of {known}, got {name!r}. Install the package that provides "
            "the backend."
        )
    try:
        found = entries[name].load()
    except ImportError as error:
        raise ArgumentError(
            f"cannot load the backend {name!r}: {error.name or error} is missing. Install the "
            "missing package."
        ) from error
    if callable(found) and not isinstance(found, type):
        found()
    if name not in dist.Backend.backend_list:
        raise ArgumentError(
            f"the entry point {name!r}, {found!r}, did not register a backend with torch under "
            f"that name. {_MIGRATION}"
        )
