"""Where a recorder writes: bytes for the records, and lines of names, in memory or in two files.

A recorder calls one method at a time, but a signal handler may call another in its middle.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.traces.events import RECORD, Ints

RECORD_BYTES: Final = RECORD.itemsize
# records that a file has room for at the start: every rank of a large run pays for them
FIRST_CHUNK: Final = 512
CHUNK: Final = 4096  # records by which it grows: 72 pages

_POPULATE: Final = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python names it from 3.14 on


class Full(OSError):
    """The file has as many records as it may have."""


class Store:
    """Records in memory. Their names need no lines: the recorder has them.

    Args:
        room: zeros, for the first records.

    Attributes:
        memory: the records as bytes. When there is more room, other memory takes its place; the old
            one stays valid for threads that are in the middle of a record.
        words: the same as numbers of 8 bytes.
    """

    def __init__(self, room: Any) -> None:
        self.memory = self.words = memoryview(b"")
        self._use(room)

    def _use(self, room: Any) -> None:
        memory = memoryview(room).cast("B")
        if len(memory) >= len(self.memory):  # else a signal handler has made more room meanwhile
            self.words = memory.cast(
                "q"
            )  # first: a thread that finds room in `memory` finds it here
            self.memory = memory

    @property
    def records(self) -> Ints:
        """The records, those not yet written among them, as an array of ``RECORD``."""
        return np.frombuffer(self.memory, dtype=RECORD)

    def grow(self, end: int) -> None:
        """Makes room for the bytes before ``end``."""
        room = np.zeros(4 * end, dtype=np.uint8)  # untouched pages cost nothing
        room[: len(self.memory)] = self.memory
        self._use(room)

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line of names."""

    def close(self) -> None:
        """Writes no more lines."""

    def abandon(self) -> None:
        """Lets go of what others write to, too, in a process forked from the one that does."""
        self._use(bytearray(self.memory))


class FileStore(Store):
    """The two files of a rank: a memory-mapped array of records, and lines of names.

    Args:
        directory: where they go.
        rank: whose they are.
        max_records: the first file gets no longer.

    Raises:
        TraceFileError: they cannot be made.
    """

    def __init__(self, directory: Path | str, rank: int, max_records: int) -> None:
        self.max_records = max_records
        self._closed = False
        events_path = Path(directory, f"rank-{rank}.events")
        names_path = events_path.with_suffix(".names")
        try:
            events_path.parent.mkdir(parents=True, exist_ok=True)
            for path in (events_path, names_path):
                # rather than cut it: an earlier recorder that still maps it would crash
                path.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._names = os.open(names_path, os.O_WRONLY | flags, 0o600)
            self._events = os.open(events_path, os.O_RDWR | flags, 0o600)
            super().__init__(self._map(0, FIRST_CHUNK))
        except OSError as error:
            raise TraceFileError(
                "the directory of a run must be writable and have "
                f"{FIRST_CHUNK * RECORD_BYTES:,} bytes free, got {error} (rank {rank}). "
                "Choose another path or free some space."
            ) from error

    def _map(self, start: int, records: int) -> mmap.mmap:
        """Gives the file room for more records, which begin at ``start``, and maps it whole.

        The zeros are written, for a full disk is then an error here, and nowhere else. They are
        appended: if a signal handler has made room meanwhile, its records stay.
        """
        length = min(start + records * RECORD_BYTES, self.max_records * RECORD_BYTES)
        zeros = memoryview(bytes(max(length - os.fstat(self._events).st_size, 0)))
        while zeros:
            zeros = zeros[os.write(self._events, zeros) :]
        # A new map each time, not a resized one: other threads may be writing through the old one,
        # which stays valid until they let go.
        room = mmap.mmap(self._events, length)
        try:
            # map the pages now, at once, rather than in the middle of operations
            room.madvise(_POPULATE, start, length - start)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or one before 5.14
        return room

    def grow(self, end: int) -> None:
        """Makes room for the bytes before ``end``.

        Raises:
            Full: there may be no more records, or the store is closed.
            OSError: the disk has no room.
        """
        if self._closed or end > self.max_records * RECORD_BYTES:
            raise Full(f"the maximum of {self.max_records:,} records was reached")
        while end > len(self.memory):
            self._use(self._map(len(self.memory), CHUNK))

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line of names; in one go, so that a kill leaves a whole line or none."""
        if not self._closed:
            os.write(self._names, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the files. The map stays valid for threads that are in the middle of a record."""
        if not self._closed:
            self._closed = True
            os.close(self._events)
            os.close(self._names)

    def abandon(self) -> None:
        """Writes to the files no more, in a process forked from the one that does."""
        self._closed = True
        super().abandon()
