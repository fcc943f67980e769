"""What one rank writes, read while it writes it: new records, and those that have changed since.

::

    slots   [done][done][posted, awaited][done][posted][ 0 ][ 0 ]
                         ^ read again           ^        ^ the next batch begins here
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.traces.events import COLLECTIVE, IN_FLIGHT, OP_KINDS, RECORD, Ints, read_group, read_payload
from ringsim.traces.parts import name_cells

__all__ = ["Batch", "PartReader"]

_WINDOW: Final = 64  # records that are read at first; more follow where they are full
_WINDOW_MAX: Final = 1 << 14
_GAP: Final = 64  # records that are read along rather than skipped


class Batch(NamedTuple):
    """Records of one rank, ascending: new ones, and those of earlier batches that have changed."""

    slots: Ints
    records: Ints


class PartReader:
    """Reads the part of one rank, bit by bit. The files are read, never mapped: what others cut short does no harm here.

    Args:
        directory: where the parts are; one that is not there yet counts as empty.
        rank: whose part it is.

    Attributes:
        meta: what the rank says of itself.
        names: by table and number, what the rank numbers: groups, payloads, files.
        fresh: the numbers of its groups on which every operation is recorded.
        replaced: whether another part has come in the place of the one that was read first.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._events_path = directory / f"rank-{rank}.events"
        self._names_path = self._events_path.with_suffix(".names")
        self._inode = 0
        self.replaced = False
        self._begin()

    def _begin(self) -> None:
        self.meta: dict[str, Any] = {}
        self.names: dict[str, dict[int, Any]] = {"group": {}, "payload": {}, "file": {}}
        self.fresh: set[int] = set()
        self._names_read = 0  # bytes
        self._unfinished = b""  # the last line of the names, where its end is not there yet
        self._next = 0  # the first slot that no batch has seen written
        self._open: Ints = np.zeros(0, dtype=np.int64)  # slots to be read again: not done, or empty though later ones are not
        self._held: Ints = np.zeros(0, dtype=RECORD)  # what was read there

    def advance(self) -> Batch:
        """Returns what is new, and reads the names for it."""
        try:
            file = os.open(self._events_path, os.O_RDONLY)
        except OSError:
            return Batch(self._open[:0], self._held[:0])
        try:
            inode = os.fstat(file).st_ino
            if inode != self._inode:  # the first, or one of another run in the place of the last
                self.replaced = self._inode != 0
                self._begin()
                self._inode = inode
            again, records = self._open, self._read_again(file)
            changed = (records != self._held) & (records["status"] != 0)
            fresh_slots, fresh = self._read_new(file)
        finally:
            os.close(file)
        self.read_names()
        slots, every = np.concatenate([again, fresh_slots]), np.concatenate([records, fresh])
        waits = (every["status"] == 0) & (every["post_ns"] == 0)  # left empty for good, it bears another number
        waits |= (every["status"] == IN_FLIGHT) & (OP_KINDS[every["op"]] <= COLLECTIVE)
        new = np.concatenate([changed, fresh["status"] != 0])
        self._open, self._held = slots[waits], every[waits]
        return Batch(slots[new], every[new])

    def _read_again(self, file: int) -> Ints:
        """Reads the open slots again."""
        records = np.zeros(len(self._open), dtype=RECORD)
        for some in np.split(np.arange(len(self._open)), np.flatnonzero(np.diff(self._open) > _GAP) + 1):
            if len(some):
                first = int(self._open[some[0]])
                read = _read(file, first, int(self._open[some[-1]]) + 1 - first)
                there = self._open[some] - first < len(read)
                records[some[there]] = read[self._open[some[there]] - first]
                records[some[~there]] = self._held[some[~there]]  # cut off by somebody: it stays as it was
        return records

    def _read_new(self, file: int) -> tuple[Ints, Ints]:
        """Reads what was written behind the last batch, up to the last record that is there."""
        pieces, first, width = [self._held[:0]], self._next, _WINDOW
        while True:
            window = _read(file, self._next, width)
            written = np.flatnonzero(window["status"])
            if not len(written):
                break
            pieces.append(window[: int(written[-1]) + 1])
            self._next += int(written[-1]) + 1
            if len(window) < width:
                break
            width = min(4 * width, _WINDOW_MAX)
        return np.arange(first, self._next), np.concatenate(pieces)

    def read_names(self) -> None:
        """Reads the names that are new: groups, payloads, files, and what the rank says of itself."""
        try:
            with self._names_path.open("rb", buffering=0) as file:
                file.seek(self._names_read)
                fresh = file.readall()
        except OSError:
            return
        self._names_read += len(fresh)
        *lines, self._unfinished = (self._unfinished + fresh).split(b"\n")
        for line in lines:
            entry = json.loads(line)
            table = entry["table"]
            if table == "meta":
                self.meta[entry["key"]] = entry["value"]
            elif table == "group":
                self.names[table][entry["id"]] = read_group(entry)
                if entry.get("fresh"):
                    self.fresh.add(entry["id"])
            elif table == "payload":
                self.names[table][entry["id"]] = read_payload(entry)
            elif table == "file":
                name = entry["name"]
                self.names[table][entry["id"]] = name_cells([name]).get(name, name)


def _read(file: int, first: int, count: int) -> Ints:
    """Reads records, as many as are there."""
    data = os.pread(file, count * RECORD.itemsize, first * RECORD.itemsize)
    return np.frombuffer(data, dtype=RECORD, count=len(data) // RECORD.itemsize)
