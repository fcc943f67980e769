"""Which backend carries groups made from now on: any that is registered with torch.

``set_backend`` keeps a name. ``init_process_group``, ``new_group`` and ``initialize_distributed``
take it if the program names none. Groups that exist stay on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final

import torch.distributed as dist

from ringsim.errors import ArgumentError
from ringsim.state import change_state, get_state

__all__ = ["GROUP", "TORCH", "CurrentBackend", "current_backend", "set_backend"]

GROUP: Final = "ringsim.backends"  # of the entry points
TORCH: Final = "torch"  # whatever torch takes by itself
_MIGRATION: Final = (
    "Register it with torch: derive a class from ringsim.comm.MessageGroup, call "
    "torch.distributed.Backend.register_backend, and pass the name (docs/coming-from-torch.md)."
)


@dataclass(repr=False)
class CurrentBackend:
    """What ``ringsim.comm.cdb`` is: the name of the backend for new groups, and torch's functions.

    Attributes:
        name: "torch" for whatever torch takes by itself.

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
        """Returns ``all_gather_into_tensor``; DeepSpeed's benchmarks ask for it."""
        return dist.all_gather_into_tensor


def current_backend() -> CurrentBackend:
    """Returns the backend for new groups."""
    return CurrentBackend(get_state().backend or TORCH)


def set_backend(backend: str) -> CurrentBackend:
    """Makes another backend carry the groups that are made from now on.

    Every rank calls it, before ``init_process_group`` and ``initialize_distributed``, or before
    ``new_group``; it does not block. A call that names a backend itself gets that one.

    Args:
        backend: "torch" for whatever torch takes by itself; the name of a backend that is
            registered with torch ("gloo", "mpi", ...); or an entry point of the group
            ``ringsim.backends``, which names something that registers it: a module, or a function
            without arguments.

    Returns:
        The backend, as ``cdb`` has it.

    Raises:
        ArgumentError: there is no backend of that name, or it cannot be loaded.

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
            f"backend must be a name, since backends are torch's own, got {backend!r}. {_MIGRATION}"
        )
    name = backend.lower()
    if name != TORCH:
        _load(name)
    change_state(backend=None if name == TORCH else name)
    return CurrentBackend(name)


def _load(name: str) -> None:
    """Makes sure that a backend is registered with torch; raises ArgumentError if it cannot be."""
    entries = {each.name.lower(): each for each in entry_points(group=GROUP)}
    registered = {each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED}
    if name == dist.Backend.MPI and not dist.is_mpi_available():
        raise ArgumentError(
            "backend must be loadable, got 'mpi', which lacks mpi4py. Install it: "
            "pip install 'ringsim[mpi]'."
        )
    if name in registered:
        return
    if name not in entries:
        known = ", ".join(sorted({TORCH, *registered, *entries}))
        raise ArgumentError(
            f"backend must be one of {known}, got {name!r}. Install the package that brings it."
        )
    try:
        found = entries[name].load()
    except ImportError as error:
        raise ArgumentError(
            f"backend must be loadable, got {name!r}, which lacks {error.name or error}. Install "
            "it: the package that it needs."
        ) from error
    if callable(found) and not isinstance(found, type):
        found()
    if name not in dist.Backend.backend_list:
        raise ArgumentError(
            f"the entry point {name!r} must register a backend of that name with torch, got "
            f"{found!r}, which does not. {_MIGRATION}"
        )
