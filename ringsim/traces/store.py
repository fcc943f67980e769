"""A recorder's storage: records as bytes and names as lines, in memory or in two files.

A recorder calls one method at a time, but a signal handler may interrupt the call and make a second
call.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import RECORD, Ints

RECORD_BYTES = RECORD.itemsize
# the number of records that a new file has room for; kept small for runs with many ranks
FIRST_CHUNK = 512
CHUNK = 4096  # the number of records by which a file grows: 72 pages

_POPULATE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # in Python's mmap since 3.14


class Full(OSError):
    """The file has reached its maximum number of records."""


class RecordStore:
    """Stores records in memory, but no names, because the recorder itself keeps the names.

    Args:
        room: zeroed memory for the first records.

    Attributes:
        memory: the records as bytes. ``grow`` replaces this memory, but the old memory stays valid
            for threads that are writing a record.
        words: the same memory as 8-byte integers.
    """

    def __init__(self, room: Any) -> None:
        self.memory = self.words = memoryview(b"")
        self._use(room)

    def _use(self, room: Any) -> None:
        memory = memoryview(room).cast("B")
        if len(memory) >= len(self.memory):  # otherwise a signal handler has already made more room
            # first, because a thread that finds room in `memory` must also find room in `words`
            self.words = memory.cast("q")
            self.memory = memory

    @property
    def records(self) -> Ints:
        """All records, including empty ones, as an array of ``RECORD``."""
        return np.frombuffer(self.memory, dtype=RECORD)

    def grow(self, end: int) -> None:
        """Makes room for the bytes before ``end``."""
        room = np.zeros(4 * end, dtype=np.uint8)  # untouched pages cost nothing
        room[: len(self.memory)] = self.memory
        self._use(room)

    def append(self, line: JsonObject) -> None:
        """Does nothing, because names are not stored."""

    def close(self) -> None:
        """Does nothing, because no files are open."""

    def abandon(self) -> None:
        """Detaches a forked process from the memory that its parent writes to."""
        self._use(bytearray(self.memory))


class FileStore(RecordStore):
    """Stores records and names in a rank's two files: a memory-mapped array, and lines of JSON.

    Args:
        directory: the directory in which to create the files.
        rank: the rank that the files belong to.
        max_records: the maximum number of records.

    Raises:
        TraceFileError: the files cannot be created.
    """

    def __init__(self, directory: Path | str, rank: int, max_records: int) -> None:
        self.max_records = max_records
        self._closed = False
        events_path = Path(directory, f"rank-{rank}.events")
        names_path = events_path.with_suffix(".names")
        try:
            events_path.parent.mkdir(parents=True, exist_ok=True)
            for path in (events_path, names_path):
                # Delete rather than truncate the file, because an earlier recorder that still maps
                # the file would crash.
                path.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._names = os.open(names_path, os.O_WRONLY | flags, 0o600)
            self._events = os.open(events_path, os.O_RDWR | flags, 0o600)
            super().__init__(self._map(0, FIRST_CHUNK))
        except OSError as error:
            raise TraceFileError(
                f"cannot record rank {rank} in {Path(directory)}: {error.strerror or error}. "
                "Choose a different path, or free up some disk space."
            ) from error

    def _map(self, start: int, records: int) -> mmap.mmap:
        """Makes room for more records, beginning at ``start``, and maps the whole file.

        Zeros are written so that a full disk raises an error here and nowhere else. They are
        appended, so that if a signal handler has already made room, its records are kept.
        """
        length = min(start + records * RECORD_BYTES, self.max_records * RECORD_BYTES)
        zeros = memoryview(bytes(max(length - os.fstat(self._events).st_size, 0)))
        while zeros:
            zeros = zeros[os.write(self._events, zeros) :]
        # Create a new map rather than resize the old one, because other threads may be writing
        # through the old map, which stays valid until they are done.
        room = mmap.mmap(self._events, length)
        try:
            # populate the pages now rather than during operations
            room.madvise(_POPULATE, start, length - start)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or Linux before 5.14
        return room

    def grow(self, end: int) -> None:
        """Makes room for the bytes before ``end``.

        Raises:
            Full: the maximum number of records was reached, or the store is closed.
            OSError: the disk is full.
        """
        if self._closed or end > self.max_records * RECORD_BYTES:
            raise Full(f"the maximum of {self.max_records:,} records was reached")
        while end > len(self.memory):
            self._use(self._map(len(self.memory), CHUNK))

    def append(self, line: JsonObject) -> None:
        """Writes a line of names in one call, so that a killed process leaves no partial line."""
        if not self._closed:
            os.write(self._names, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the files but keeps the map valid for threads that are still writing a record."""
        if not self._closed:
            self._closed = True
            os.close(self._events)
            os.close(self._names)

    def abandon(self) -> None:
        """Detaches a forked process from its parent's files."""
        self._closed = True
        super().abandon()
