"""A torch backend that hides what it has."""

from __future__ import annotations

from ringsim.comm.backend import TorchBackend


class Hiding(TorchBackend):
    """Torch without some of its operations; without all that are optional if none are named.

    Args:
        hidden: the names of the operations.
    """

    name = "hiding"

    def __init__(self, *hidden: str) -> None:
        self._hidden = hidden

    def supports(self, op: str) -> bool:
        if self._hidden:
            return op not in self._hidden
        return op in TorchBackend.__abstractmethods__ or op in vars(TorchBackend)
