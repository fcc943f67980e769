"""The name and the store keys that the ranks of a recorded block share.

The ranks never use the program's own messages. Each block has its own keys in the default group's
store::

    key                  written by
    ---                  ----------
    run_id               the first rank that enters: the name of the block
    attempt              rank 0, if ranks may be restarted
    at/R                 rank R, entering: the location of its part
    left/R               rank R, leaving: its end
    soon, wants, files,  rank 0 and ranks on other hosts, see ``gathering``
    chunk, receipt
    hosts/...            one rank per host, see ``hosts``
    clock/...            one rank per clock, see ``clocks``; queues, not sealed
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ringsim.comm.torch_private import default_store
from ringsim.errors import RingError
from ringsim.launch.clocks import name_boot, name_clock

Patience = Callable[[], bool]  # returns whether to wait longer
_MAX_PAUSE_S = 0.01
# per waiting rank: together they ask 3,300 times per second, and a store can answer 44,000
_EACH_PAUSE_S = 3e-4
_PLACE = {
    "host": str,
    "clock": str,
    "directory": str,
    "id": str,
    "pid": int,
    "start_ns": int,
}


class BlockStore:
    """The store keys of one recorded block; all values are sealed with the block's name.

    Args:
        store: a torch store, or an object with its ``set``, ``get``, ``check`` and ``delete_key``.
        run_id: the name of the block; values sealed by another block are refused.
        waiting: the number of ranks, on all hosts, that may wait for a key at the same time.

    Attributes:
        store: the store.
        run_id: the name of the block.
        asked_s: the time of the unanswered request, on ``time.monotonic``'s clock; if the link is
            down, the answer may take many minutes.
    """

    asked_s = math.inf

    def __init__(self, store: Any, run_id: str, waiting: int = 1) -> None:
        self.store, self.run_id, self.waiting = store, run_id, waiting

    def within(self, prefix: str) -> BlockStore:
        """Returns keys that begin with a prefix."""
        return BlockStore(PrefixStore(prefix, self.store), self.run_id)

    def clone(self) -> BlockStore:
        """Returns the same keys on a new connection."""
        return BlockStore(self.store.clone(), self.run_id)

    def put(self, key: str, value: Any) -> None:
        """Writes bytes, or a value as JSON, and their checksum under a key."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.store.set(key, self._seal(data) + data)

    def read_bytes(self, key: str, patience: Patience) -> bytes | None:
        """Returns the bytes under a key as soon as the key exists.

        Returns None if ``patience()`` ends first, or if the data are invalid.
        """
        if not self.wait(key, patience):
            return None
        sealed: bytes = self._ask(lambda: self.store.get(key))
        return sealed[4:] if self._seal(sealed[4:]) == sealed[:4] else None

    def read(self, key: str, patience: Patience) -> Any:
        """Like ``read_bytes``, for a value as JSON."""
        try:
            return json.loads(self.read_bytes(key, patience) or b"null")
        except (ValueError, RecursionError):
            return None

    def take(self, key: str, patience: Patience) -> Any:
        """Like ``read``, but also deletes the key."""
        value = self.read(key, patience)
        self.delete(key)
        return value

    def delete(self, key: str) -> None:
        """Deletes a key, if it exists."""
        self._ask(lambda: self.store.delete_key(key))

    def has(self, key: str) -> bool:
        """Returns whether a key exists."""
        return bool(self._ask(lambda: self.store.check([key])))

    def wait(self, key: str, patience: Patience, *, there: bool = True) -> bool:
        """Waits until a key exists, or no longer exists.

        Returns False if ``patience()`` ended first.
        """
        pause_s = 0.0002
        while self.has(key) != there:
            if not patience():
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s(self.waiting))
        return True

    def _seal(self, data: bytes) -> bytes:
        return zlib.crc32(data, zlib.crc32(self.run_id.encode())).to_bytes(4, "big")

    def _ask(self, question: Callable[[], Any]) -> Any:
        self.asked_s = time.monotonic()
        answer = question()
        self.asked_s = math.inf
        return answer


def longest_pause_s(waiting: int) -> float:
    """Returns the longest interval between polls for a key, given the number of waiting ranks.

    Example:
        >>> [round(longest_pause_s(waiting), 3) for waiting in (1, 30, 1000)]
        [0.01, 0.01, 0.3]
    """
    return max(_MAX_PAUSE_S, waiting * _EACH_PAUSE_S)


def lasts(seconds: float) -> Patience:
    """Returns a patience that ends after the given seconds."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() < deadline


def never() -> bool:
    """A patience that ends immediately."""
    return False


def enter_block(rank: int, world_size: int) -> BlockStore:
    """Returns the keys of the block that a rank enters; the n-th block is the same on all ranks."""
    store = default_store()
    if store is None:
        raise RingError(
            "ringsim cannot find the default store in this version of torch. Use a version that "
            "ringsim was tested with."
        )
    entered = store.add(f"ringsim/recording/entered/{rank}", 1)
    own = PrefixStore(f"ringsim/recording/{entered}", store)
    # The first rank that enters names the block, because rank 0 may be late and no rank waits for
    # it.
    run_id = own.compare_set("run_id", "", uuid.uuid4().hex[:12]).decode()
    return BlockStore(own, run_id, world_size if rank else 1)


def store_port() -> int:
    """Returns the port of the default group's store, or -1 if the store does not use TCP."""
    store: object = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", -1))


def place_of(directory: Path) -> dict[str, Any]:
    """Describes the location of a rank's part, as plain data for JSON.

    Ranks with the same ``id`` see the same directory.
    """
    about = directory.stat()
    return {
        "host": socket.gethostname(),
        "directory": str(directory),
        "id": f"{name_boot()} {about.st_dev} {about.st_ino}",
        "clock": name_clock(),
        "pid": os.getpid(),
    }


def find_place(keys: BlockStore, rank: int, patience: Patience) -> dict[str, Any]:
    """Returns the location of a rank's part.

    The result is empty if the rank has not entered the block, or if its data are invalid.
    """
    place = keys.read(f"at/{rank}", patience)
    fits = (
        isinstance(place, dict)
        and place.keys() == _PLACE.keys()
        and all(type(place[key]) is kind for key, kind in _PLACE.items())
    )
    return place if fits else {}
