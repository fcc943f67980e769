"""Where the ranks of a recorded block say that they have left it, and rank 0 reads it: beside their messages, never among them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringsim.errors import RingError
from ringsim.state import get_state

_LOOK_S = 0.01  # between two looks, once it has taken a while


class Board(Protocol):
    """What the ranks of one block share."""

    def post(self, rank: int, text: str) -> None:
        """Says something; once for each rank."""

    def read(self, rank: int, wait_s: float) -> str | None:
        """Returns what a rank said, None where it says nothing within ``wait_s`` seconds."""


class StoreBoard:
    """A board in the default store of ``torch.distributed``. The n-th of a rank is the n-th of every rank.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        store = distributed_c10d._get_default_store()
        entered = store.add(f"ringsim/recording/entered/{rank}", 1)
        self._store = dist.PrefixStore(f"ringsim/recording/{entered}", store)  # type: ignore[attr-defined]

    def post(self, rank: int, text: str) -> None:
        """Says something; once for each rank."""
        self._store.set(str(rank), text)

    def read(self, rank: int, wait_s: float) -> str | None:
        """Returns what a rank said, None where it says nothing within ``wait_s`` seconds."""
        deadline, pause_s = time.monotonic() + wait_s, 0.0005
        while not self._store.check([str(rank)]):  # to let the store wait would have torch warn of each end of its patience
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        said: bytes = self._store.get(str(rank))
        return said.decode()


class FileBoard:
    """A board of files, for ranks of other backends: rank 0 reads their parts from the same directory anyway.

    Args:
        directory: of the parts, the same for all ranks.
        block: a name that no other block has, the same on all ranks.

    Example:
        >>> import tempfile
        >>> board = FileBoard(Path(tempfile.mkdtemp()), "job-1")
        >>> board.post(1, "done")
        >>> board.read(1, wait_s=1.0), board.read(2, wait_s=0.0)
        ('done', None)
    """

    def __init__(self, directory: Path, block: str) -> None:
        self._directory, self._block = directory, block

    def post(self, rank: int, text: str) -> None:
        """Says something; once for each rank."""
        path = self._path(rank)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.replace(path)

    def read(self, rank: int, wait_s: float) -> str | None:
        """Returns what a rank said, None where it says nothing within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while not self._path(rank).exists():
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_S)
        return self._path(rank).read_text()

    def _path(self, rank: int) -> Path:
        return self._directory / f"left-{self._block}-{rank}.said"


def make_board(directory: Path, rank: int) -> Board:
    """Makes the board of the next block of the current backend; every rank calls it, and it does not block.

    Raises:
        RingError: the backend cannot tell the blocks of a job apart.
    """
    backend = get_state().backend
    if backend is None:
        return StoreBoard(rank)
    name_block = getattr(backend, "name_block", None)
    if name_block is None:
        raise RingError(
            f"a backend must have the method name_block for its ranks to be recorded, got {backend.name!r} without. Let it return a name "
            "that is the same on all ranks, and another at each call."
        )
    return FileBoard(directory, name_block())
