"""What the ranks of a recorded block share: a name, and keys in the default group's store.

They tell each other nothing by the program's messages. Each block has keys of its own::

    key                  written by
    ---                  ----------
    run_id               the first rank that enters: the name of the block
    attempt              rank 0, if ranks may be restarted
    at/R                 rank R, entering: where its part lies
    left/R               rank R, leaving: how
    soon, wants, files,  rank 0 and ranks on other hosts, see ``gathering``
    chunk, receipt
    hosts/...            one rank of each host, see ``hosts``
    clock/...            one rank of each clock, see ``clocks``; queues, not sealed
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
from typing import Any, Final

from torch.distributed.distributed_c10d import PrefixStore

from ringsim.comm.torch_private import default_store
from ringsim.errors import RingError
from ringsim.launch.clocks import name_boot, name_clock

_MAX_PAUSE_S: Final = 0.01
# of it for each rank that may wait: together they ask 3,300 times a second, of 44,000 that a store
# can answer
_EACH_PAUSE_S: Final = 3e-4
_PLACE: Final = {
    "host": str,
    "clock": str,
    "directory": str,
    "id": str,
    "pid": int,
    "start_ns": int,
}


class Store:
    """The keys of one recorded block in the store, and what all its values are sealed with.

    Args:
        store: a store of torch's, or one with its ``set``, ``get``, ``check`` and ``delete_key``.
        run_id: of the block; a value that another block has sealed is refused.
        waiting: how many ranks may wait for a key at once, of all hosts.

    Attributes:
        store: of torch.
        run_id: of the block.
        asked_s: since when it owes an answer, on ``time.monotonic``'s clock: if the link to it is
            down, it comes after many minutes.
    """

    def __init__(self, store: Any, run_id: str, waiting: int = 1) -> None:
        self.store, self.run_id, self.waiting = store, run_id, waiting
        self.asked_s = math.inf

    def within(self, prefix: str) -> Store:
        """Returns keys that begin with a prefix."""
        return Store(PrefixStore(prefix, self.store), self.run_id)

    def clone(self) -> Store:
        """Returns the same keys on a connection of their own."""
        return Store(self.store.clone(), self.run_id)

    def put(self, key: str, data: bytes) -> None:
        """Puts data under a key, with their checksum."""
        self.store.set(key, self._seal(data) + data)

    def read(self, key: str, patience: Callable[[], bool]) -> bytes | None:
        """Returns what is under a key once it is there.

        None once ``patience()`` is over, or if it is not whole.
        """
        if not self.wait(key, patience):
            return None
        sealed: bytes = self._ask(lambda: self.store.get(key))
        return sealed[4:] if self._seal(sealed[4:]) == sealed[:4] else None

    def take(self, key: str, patience: Callable[[], bool]) -> bytes | None:
        """Returns what ``read`` does, and deletes it."""
        data = self.read(key, patience)
        self._ask(lambda: self.store.delete_key(key))
        return data

    def has(self, key: str) -> bool:
        """Returns whether a key is there."""
        return bool(self._ask(lambda: self.store.check([key])))

    def wait(self, key: str, patience: Callable[[], bool], *, there: bool = True) -> bool:
        """Waits until a key is there, or gone.

        Returns whether it came to that while ``patience()`` lasted.
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
    """Returns how long a rank pauses at most between looks for a key that so many may wait for.

    Example:
        >>> [round(longest_pause_s(waiting), 3) for waiting in (1, 30, 1000)]
        [0.01, 0.01, 0.3]
    """
    return max(_MAX_PAUSE_S, waiting * _EACH_PAUSE_S)


def lasts(seconds: float) -> Callable[[], bool]:
    """Returns a patience that is over after so many seconds."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() < deadline


def never() -> bool:
    """Is no patience at all."""
    return False


def enter_block(rank: int, world_size: int) -> Store:
    """Returns the keys of the block that a rank enters: its n-th is the n-th of every rank."""
    store = default_store()
    if store is None:
        raise RingError(
            "cannot find the default store in this version of torch. Use a version that ringsim "
            "was tested with."
        )
    entered = store.add(f"ringsim/recording/entered/{rank}", 1)
    own = PrefixStore(f"ringsim/recording/{entered}", store)
    # The first rank to enter names the block: rank 0 may come late, and nobody waits for it.
    run_id = own.compare_set("run_id", "", uuid.uuid4().hex[:12]).decode()
    return Store(own, run_id, world_size if rank else 1)


def store_port() -> int:
    """Returns the port of the default group's store, -1 if it is not over TCP."""
    store: object = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", -1))


def place_of(directory: Path) -> dict[str, Any]:
    """Describes where a rank's part lies, as plain data for JSON.

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


def find_place(keys: Store, rank: int, patience: Callable[[], bool]) -> dict[str, Any]:
    """Returns the place of a rank's part.

    Nothing if the rank has not entered the block, or has said something else.
    """
    try:
        place: Any = json.loads(keys.read(f"at/{rank}", patience) or b"{}")
    except (ValueError, RecursionError):
        return {}
    fits = (
        isinstance(place, dict)
        and place.keys() == _PLACE.keys()
        and all(type(place[key]) is kind for key, kind in _PLACE.items())
    )
    return place if fits else {}
