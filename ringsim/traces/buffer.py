"""What a rank leaves on disk while it runs: a memory-mapped array of records, and the names that the records number.

The kernel keeps what was written to the map whatever happens to the process, so a rank that is killed leaves everything up to that
moment, and a watcher can read the file live::

    rank-2.events   [record][record][record][ 0 ][ 0 ] ... grown chunk by chunk; a slot with status 0 is empty
    rank-2.names    {"table": "group", "id": 0, "name": "world", "ranks": [0, 1, 2, 3]}
                    {"table": "payload", "id": 0, "dtype": "float32", "shape": [1024], "size_bytes": 4096}
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.traces.events import RECORD

RECORD_BYTES: Final = RECORD.itemsize
FIRST_CHUNK: Final = 512  # records that there is room for at the start: every rank of a large run pays for them
CHUNK: Final = 4096  # records by which the array grows: 72 pages, a tenth of a millisecond
_POPULATE: Final = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python names it from 3.14 on


class PartBuffer:
    """The two files that one rank writes: slots for records, and lines for names.

    Args:
        directory: where the files go; made if it does not exist.
        rank: whose files these are.
        max_records: where the array ends; ``grow`` returns None from there on.

    Raises:
        TraceFileError: the files cannot be made (no permission, disk full).

    Example:
        >>> import struct, tempfile
        >>> from ringsim.traces.events import OK, RECORD_FORMAT
        >>> buffer = PartBuffer(tempfile.mkdtemp(), rank=0, max_records=10)
        >>> struct.pack_into(RECORD_FORMAT, buffer.memory, 0, *range(14), OK)
        >>> buffer.count, buffer.number("label", name="compute"), buffer.number("label", name="compute")
        (1, 0, 0)
        >>> buffer.close()
    """

    def __init__(self, directory: Path | str, rank: int, *, max_records: int) -> None:
        self._lock = Lock()
        self._numbers: dict[str, dict[str, int]] = {}
        self.entries: dict[str, list[dict[str, Any]]] = {}  # what each number of a table means
        self._capacity = 0  # records that the file has room for
        self._max_records = max_records
        self._closed = False
        events_path = Path(directory, f"rank-{rank}.events")
        try:
            events_path.parent.mkdir(parents=True, exist_ok=True)
            for path in (events_path, events_path.with_suffix(".names")):
                path.unlink(missing_ok=True)  # rather than cut it: whoever has mapped the one of an earlier recording would crash
            self._names = os.open(events_path.with_suffix(".names"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            self._events = os.open(events_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            self.memory = self._extend(min(FIRST_CHUNK, max_records))
        except OSError as error:
            raise TraceFileError(
                f"the directory of a run must be writable and have {FIRST_CHUNK * RECORD_BYTES:,} bytes free, got {error} (rank {rank}). "
                "Choose another path or free some space."
            ) from error

    def _extend(self, capacity: int) -> mmap.mmap:
        """Gives the file room for ``capacity`` records and maps it whole. A full disk shows here, as an error, and nowhere else."""
        start, length = self._capacity * RECORD_BYTES, (capacity - self._capacity) * RECORD_BYTES
        if hasattr(os, "posix_fallocate"):  # not on macOS and Windows, where writing has to do
            os.posix_fallocate(self._events, start, length)
        # Zeros are there already, but writing them makes the pages known: the first touch of each through the map costs a fifth.
        os.lseek(self._events, start, os.SEEK_SET)
        zeros = memoryview(bytes(length))
        while zeros:
            zeros = zeros[os.write(self._events, zeros) :]
        self._capacity = capacity
        # A new map each time, not a resized one: other threads may be writing through the old one, which stays valid until they let go.
        memory = mmap.mmap(self._events, capacity * RECORD_BYTES)
        try:
            memory.madvise(_POPULATE, start, length)  # map the pages now, at once, rather than one by one in the middle of operations
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or one before 5.14
        return memory

    def grow(self, offset: int) -> mmap.mmap | None:
        """Makes room for the record at ``offset``.

        Args:
            offset: in bytes from the start of the file.

        Returns:
            The map to write it to; None where the array has its largest size, or is closed.

        Raises:
            OSError: the disk is full. What was written stays valid.
        """
        with self._lock:
            if self._closed or offset >= self._max_records * RECORD_BYTES:
                return None
            while offset >= self._capacity * RECORD_BYTES:
                self.memory = self._extend(min(self._capacity + CHUNK, self._max_records))
            return self.memory

    @property
    def count(self) -> int:
        """How many records have been written."""
        return int(np.count_nonzero(np.frombuffer(self.memory, dtype=RECORD)["status"]))

    def number(self, table: str, **entry: Any) -> int:
        """Returns the number of a name, and writes the name down when it is new.

        Args:
            table: "group", "payload", "label" or "file".
            entry: what the table's lines hold, JSON-able.
        """
        key = json.dumps(entry)
        with self._lock:
            numbers = self._numbers.setdefault(table, {})
            if key not in numbers:
                # On disk before in memory: whoever reads a record that bears the number finds the name.
                self._append({"table": table, "id": len(numbers), **entry})
                self.entries.setdefault(table, []).append(entry)
                numbers[key] = len(numbers)
            return numbers[key]

    def set_meta(self, key: str, value: Any) -> None:
        """Writes down one fact about the rank; the last value of a key counts."""
        with self._lock:
            self._append({"table": "meta", "key": key, "value": value})

    def _append(self, line: dict[str, Any]) -> None:
        if not self._closed:
            os.write(self._names, json.dumps(line).encode() + b"\n")  # one write a line: a kill leaves a whole line or none

    def close(self) -> None:
        """Closes the files. The map stays valid for threads that are in the middle of a record."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._events)
                os.close(self._names)

    def abandon(self) -> None:
        """Writes nothing more, in a process that was forked from the one that does."""
        self._lock = Lock()  # another thread may have held the old one when the process was forked
        self._closed = True
