"""Which backend is the current one, and how a backend is found by its name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from ringsim.comm.backend import Backend
from ringsim.comm.torch_backend import TORCH
from ringsim.errors import ArgumentError
from ringsim.state import change_state, get_state

__all__ = ["GROUP", "get_backend_object", "set_backend"]

GROUP: Final = "ringsim.backends"  # of the entry points
# Written as entry points, too: a name costs nothing until it is asked for.
_BUILT_IN: Final = {
    name: EntryPoint(name, value, GROUP)
    for name, value in (("torch", "ringsim.comm.torch_backend:TORCH"), ("mpi", "ringsim.comm.mpi_backend:MpiBackend"))
}


def get_backend_object() -> Backend:
    """Returns the current backend, which ``ringsim.comm.cdb`` is."""
    return get_state().backend or TORCH


def set_backend(backend: Backend | str) -> Backend:
    """Makes ``ringsim.comm`` send through another backend from now on.

    Every rank calls it, before ``init_process_group`` and ``initialize_distributed``; it does not block. Groups and handles of one backend
    mean nothing to another.

    Args:
        backend: an object that keeps the protocol of ``ringsim.comm.backend.Backend``; or the name of one: "torch", "mpi", or an entry
            point of the group ``ringsim.backends``, which names a backend or a class that makes one without arguments.

    Returns:
        The backend.

    Raises:
        ArgumentError: there is no backend of that name, it cannot be loaded, or it is no backend.

    Example:
        >>> set_backend("torch").name
        'torch'
        >>> set_backend("pigeon")
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: backend must be one of mpi, torch or a Backend, got 'pigeon'. Install the package that brings it.
    """
    found = _load(backend) if isinstance(backend, str) else backend
    if not isinstance(found, Backend):
        raise ArgumentError(f"backend must be a ringsim.comm.backend.Backend or a name, got {found!r}. Derive its class from Backend.")
    change_state(backend=None if found is TORCH else found)
    return found


def _load(name: str) -> object:
    """Returns what the entry point ``name`` leads to, an object of it if it is a class."""
    known = {**{each.name: each for each in entry_points(group=GROUP)}, **_BUILT_IN}
    if name not in known:
        raise ArgumentError(
            f"backend must be one of {', '.join(sorted(known))} or a Backend, got {name!r}. Install the package that brings it."
        )
    try:
        found = known[name].load()
        return found() if isinstance(found, type) else found
    except ImportError as error:
        hint = "pip install 'ringsim[mpi]'" if name == "mpi" else "the package that it needs"
        raise ArgumentError(f"backend must be loadable, got {name!r}, which lacks {error.name or error}. Install it: {hint}.") from error
