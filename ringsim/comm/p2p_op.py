"""``P2POp`` for ``batch_isend_irecv``: torch's own, which also takes the ``isend`` and ``irecv`` of ``ringsim.comm``."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch.distributed as dist

from ringsim.comm.functions import FUNCTIONS
from ringsim.comm.torch_backend import TorchBackend
from ringsim.errors import ArgumentError
from ringsim.state import get_state

__all__ = ["P2POp"]

_SIGNATURE: Final = inspect.signature(dist.P2POp)
_ORIGINALS: Final[dict[Any, Any]] = {FUNCTIONS[name]: getattr(dist, name) for name in ("isend", "irecv")}


class P2POp(dist.P2POp):
    """A send or a receive for ``batch_isend_irecv``; those of torch may stand in the same list.

    Its attribute ``op`` is torch's function, whichever was given.
    """

    __doc__ = dist.P2POp.__doc__

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        """Checks the arguments as torch does."""
        made: P2POp = dist.P2POp.__new__(cls, _ORIGINALS.get(op, op), *args, **kwargs)
        return made

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Takes torch's arguments; peers are found by the current backend."""
        op = _ORIGINALS.get(op, op)
        backend = get_state().backend
        if backend is None or isinstance(backend, TorchBackend):
            super().__init__(op, *args, **kwargs)
            return
        given = _SIGNATURE.bind(op, *args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        if (arguments["peer"] is None) == (arguments["group_peer"] is None):
            raise ArgumentError(
                f"peer must be given once, got peer={arguments['peer']!r} and group_peer={arguments['group_peer']!r} (P2POp). "
                "Give one of them."
            )
        self.op, self.tensor, self.group, self.tag = op, arguments["tensor"], arguments["group"], arguments["tag"]
        if arguments["peer"] is None:
            self.group_peer = arguments["group_peer"]
            self.peer = backend.get_global_rank(self.group, self.group_peer)
        else:
            self.peer = arguments["peer"]
            self.group_peer = backend.get_group_rank(self.group, self.peer)

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__} peer={self.peer}, tag={self.tag}, {tuple(self.tensor.shape)}, {self.tensor.dtype})"


P2POp.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
