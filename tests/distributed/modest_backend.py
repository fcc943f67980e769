"""A user's backend: Gloo reduced to messages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringsim.comm import MessageGroup


class Modest(MessageGroup):
    """Messages over Gloo, from which all other operations are built."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size, backend_name="modest", timeout=timeout)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        return self._gloo.send([tensor], dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Any:
        if src is None:
            return self._gloo.recv_anysource([tensor], tag)
        return self._gloo.recv([tensor], src, tag)


def register() -> None:
    """Registers the backend with torch."""
    dist.Backend.register_backend("modest", Modest, devices=["cpu"])
