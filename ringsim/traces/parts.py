"""Reads the files that ranks write while recording, both during and after a run.

A directory of parts contains ``run.json`` for the run and two files for each rank. The file
``rank-<r>.events`` is an array of ``RECORD``, zero after the last record. The file
``rank-<r>.names`` consists of JSON lines: the names that the records refer to by number, and the
rank's metadata. A rank may be killed at any moment, so any file may be missing, and the last record
or line may be cut. The reader uses everything that it can read, and notes the rest.

``PartReader`` follows one rank, whether or not the rank is still writing.
``ringsim.traces.run_parts`` reads all ranks to their end. Files of other processes are read but
never memory-mapped, so that a reader does not crash if a file is cut short: it gets fewer bytes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringsim.traces.cells import name_cells, rename_file
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import (
    ANY_SOURCE,
    ERROR,
    IN_FLIGHT,
    NONE,
    OP_CODES,
    OP_KINDS,
    OPS,
    RECORD,
    SEND,
    Ints,
    read_group,
    read_payload,
    read_word,
)
from ringsim.traces.steps import STEP

FILE_NAME = re.compile(r"rank-(\d{1,6})\.(?:events|names)")
_FIRST_WINDOW = 64  # the number of slots to read at first; more follow if these are full
_WINDOW = 1 << 16
# for reading a long part completely: each window is copied about ten times
_SMALL_WINDOW = 1 << 13
# the longest run of slots that threads may have claimed but not yet written
_MOST_CLAIMED = 32
_GAP = 64  # slots farther apart than this are read in separate calls
# the table that each column refers to
TABLE_OF = {"group": "groups", "payload": "payloads", "label": "labels", "file": "files"}
_READERS: dict[str, Callable[[Any], Any]] = {
    "group": read_group,
    "payload": read_payload,
    "label": lambda entry: read_word(entry.get("name")),
    "file": lambda entry: read_word(entry.get("name")),
}
_SENDS = np.flatnonzero(OP_KINDS == SEND)
_SPAN = OP_CODES["span"]
_NO_RECORDS: Ints = np.zeros(0, dtype=RECORD)
_BYTES = np.dtype((np.void, RECORD.itemsize))


class Batch(NamedTuple):
    """One rank's records, in ascending order.

    A batch holds the records written since the last batch, and earlier records that have changed. A
    record in flight appears again when the program waits for it and when it is done; a record that
    is done never appears again.

    Attributes:
        slots: the index of each record in the part (int64).
        records: the records, an array of ``RECORD``; ``group``, ``payload``, ``label`` and ``file``
            hold the rank's own numbers.
    """

    slots: Ints
    records: Ints


class PartReader:
    """Reads one rank's part, while the rank is writing to the part or afterwards.

    The reader's memory use does not grow with the part.

    Args:
        directory: the directory that holds the parts.
        rank: the rank to follow; its part need not exist yet.
        world_size: the number of ranks, or None if unknown; a record whose peer is not one of
            these ranks counts as damaged.
        cells: whether to name the source files that are cells of this notebook after their cells.

    Attributes:
        names: the names that the records refer to, by table ("group", "payload", "label", "file")
            and number. They are complete for the batches read so far, unless the file is damaged.
        fresh: the numbers of the groups that had no operations before they were numbered, so that
            all of their operations are recorded.
        meta: the rank's metadata: ``pid``, ``host``, ``start_ns``, ``end_ns`` (after the rank has
            ended), and so on.
        more: whether more records can be read now.
        replaced: whether the last batch began a different part, because a later run replaced the
            files; earlier batches are then void.
        unreadable: the number of damaged records and lines that were left out.
        messages: the number of messages that the rank has sent, as far as read.
        steps: the number of steps that the rank has begun, as far as read: spans "step ...".

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES
        >>> from ringsim.traces.recorder import Recorder
        >>> directory = tempfile.mkdtemp()
        >>> recorder, reader = Recorder(directory, 0, 2), PartReader(Path(directory), 0, 2)
        >>> slot = recorder.make_post(OP_CODES["isend"])(
        ...     recorder.group("world", [0, 1]), 1, 0, recorder.payload("float32", [2], 8)
        ... )
        >>> batch = reader.advance()
        >>> batch.slots.tolist(), reader.names["group"][batch.records["group"][0]].name
        ([0], 'world')
        >>> recorder.wait(slot)
        >>> batch = reader.advance()
        >>> (
        ...     batch.slots.tolist(),
        ...     bool(batch.records["wait_ns"][0] > 0),
        ...     reader.advance().slots.tolist(),
        ... )
        ([0], True, [])
        >>> recorder.close()
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int | None = None, *, cells: bool = True
    ) -> None:
        self.rank, self.world_size, self._cells = rank, world_size, cells
        self._events_path = directory / f"rank-{rank}.events"
        self._names_path = directory / f"rank-{rank}.names"
        self._file = (0, 0)  # device and inode
        self.replaced = False
        self._begin()

    def _begin(self) -> None:
        """Resets the reader."""
        self.names: dict[str, dict[int, Any]] = {table: {} for table in TABLE_OF}
        self.fresh: set[int] = set()
        self.meta: JsonObject = {}
        self.unreadable = self.messages = self.steps = 0
        self.more = False
        self._step_labels: list[int] = []
        self._names_read = 0  # bytes
        self._unfinished = b""  # the last line of the names file, if its end is not yet written
        self._width, self._widest = _FIRST_WINDOW, _WINDOW
        self._next = 0  # the first slot that the reader has not yet seen written
        # Records that may still change (in flight, or claimed by a thread but still empty), and
        # their last known content.
        self._watched, self._seen = np.zeros(0, dtype=np.int64), _NO_RECORDS

    def is_damaged(self) -> bool:
        """Returns whether any line or record of the part is unreadable or truncated."""
        try:
            length = self._events_path.stat().st_size
            with self._events_path.open("rb") as file:
                file.seek(length // RECORD.itemsize * RECORD.itemsize)
                cut = any(file.read())
        except FileNotFoundError:
            cut = False
        return cut or bool(self._unfinished) or self.unreadable > 0

    def read_all(self) -> Ints:
        """Returns all records that the rank has written so far, in posting order.

        Call this method if you read the part only once.
        """
        try:
            until = self._events_path.stat().st_size // RECORD.itemsize
        except FileNotFoundError:
            until = 0
        batches = [self.advance()]
        # stop at the current end, because a rank may write faster than this loop reads
        while self.more and self._next < until:
            batches.append(self.advance())
        slots = np.concatenate([batch.slots for batch in batches])
        records = _concatenate([batch.records for batch in batches])
        if not (np.diff(slots) > 0).all():  # the rank is still writing: keep each slot's last read
            _, last = np.unique(slots[::-1], return_index=True)
            records = records[::-1][last]
        # these operations ended while they were being read
        records["done_ns"][records["status"] == IN_FLIGHT] = NONE
        return records

    def read_pieces(self) -> Iterator[Ints]:
        """Yields the same records as ``read_all``, in small pieces if the part is finished.

        The iterator yields at least one piece.
        """
        self.read_names()
        if "end_ns" not in self.meta:
            yield self.read_all()
            return
        self._widest, self.more, last = _SMALL_WINDOW, True, NONE
        while self.more:
            batch = self.advance()
            records = batch.records.compress(batch.slots > last)  # a finished part does not change
            records["done_ns"][records["status"] == IN_FLIGHT] = NONE
            last = max([last, *batch.slots[-1:].tolist()])
            yield records

    def advance(self) -> Batch:
        """Reads new and changed records, quickly if there are only a few.

        Returns:
            The records, at most about 80,000 at a time. If ``more`` is then True, call again
            immediately.

        Raises:
            OSError: a file exists but cannot be read.
        """
        try:
            file = os.open(self._events_path, os.O_RDONLY)
        except FileNotFoundError:
            self.read_names()
            return Batch(self._watched[:0], _NO_RECORDS)
        try:
            about = os.fstat(file)
            self.replaced = self._file not in ((0, 0), (about.st_dev, about.st_ino))
            if self.replaced:
                self._begin()
            self._file = about.st_dev, about.st_ino
            slots, was, records = self._read_changes(file)
        finally:
            os.close(file)
        self.read_names()  # after the records, because names are written before the records
        if not len(slots):
            return Batch(slots, records)
        written = records["status"] != 0
        new = records.compress(written & (was["status"] == 0))
        self.messages += int(np.isin(new["op"], _SENDS).sum())
        self.steps += int(((new["op"] == _SPAN) & np.isin(new["label"], self._step_labels)).sum())
        watched = _may_change(records)
        self._watched, self._seen = slots[watched], records[watched]
        changed = written & np.logical_or.reduce(
            [was[name] != records[name] for name in ("status", "wait_ns", "peer")]
        )
        return self._drop_damage(slots[changed], records.compress(changed))

    def _read_changes(self, file: int) -> tuple[Ints, Ints, Ints]:
        """Returns the watched and new slots with their previous and current content.

        Records that may change are read last. If a record is then in flight, it was also in flight
        when the newest record was written.
        """
        first, fresh = self._next, self._read_new(file)
        slots, was, records = self._watched, self._seen, self._seen
        if len(fresh):
            slots = np.concatenate([slots, np.arange(first, self._next)])
            was = _concatenate([was, np.zeros(len(fresh), dtype=RECORD)])
            records = _concatenate([records, fresh])
        again = np.flatnonzero(_may_change(records))
        if not len(again):
            return slots, was, records
        there, now = _read_slots(file, slots[again])
        records = records.copy()
        records[again[there]] = now
        kept = np.ones(len(slots), dtype=bool)
        kept[again[~there]] = False
        return slots[kept], was.compress(kept), records.compress(kept)

    def _read_new(self, file: int) -> Ints:
        """Returns the records after the last known one, up to the current end of the part.

        They include bookmarks, which have no status.
        """
        read, self.more = [], True
        while self.more:
            width = self._width
            records = _read_settled(file, self._next, width)
            there = np.flatnonzero((records["status"] != 0) | (records["post_ns"] == NONE))
            seen = int(there[-1]) + 1 if len(there) else 0
            read.append(records[:seen])
            self._next += seen
            self.more = width - seen < _MOST_CLAIMED  # otherwise no thread has claimed these slots
            self._width = min(4 * width, self._widest) if seen == width else _FIRST_WINDOW
            if width == self._widest:
                break
        return _concatenate(read)

    def _drop_damage(self, slots: Ints, records: Ints) -> Batch:
        """Returns the records, except those that no recorder can have written."""
        sane = (
            (records["status"] <= ERROR)
            & (records["op"] < len(OPS))
            & (records["post_ns"] >= 0)
            & (records["peer"] >= ANY_SOURCE)
        )
        for name in ("wait_ns", "done_ns", "stage", "microbatch", "line"):
            sane &= records[name] >= NONE
        if self.world_size is not None:
            sane &= records["peer"] < (self.world_size if self.rank < self.world_size else 0)
        self.unreadable += int(np.count_nonzero(~sane))
        return Batch(slots[sane], records.compress(sane))

    def read_names(self) -> None:
        """Reads new lines from the names file; ``advance`` also does this, after the records."""
        try:
            if os.stat(self._names_path).st_size <= self._names_read:
                return
            with open(self._names_path, "rb", buffering=0) as file:
                file.seek(self._names_read)
                fresh = file.readall()
        except FileNotFoundError:
            return
        self._names_read += len(fresh)
        *lines, self._unfinished = (self._unfinished + fresh).split(b"\n")
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["table"] == "meta":
                    self.meta[read_word(entry["key"])] = entry["value"]
                else:
                    self._add_name(entry)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.unreadable += 1

    def _add_name(self, entry: JsonObject) -> None:
        table, number = entry["table"], entry["id"]
        # the rank assigns numbers in order, one per line
        if type(number) is not int or not 0 <= number < self._names_read:
            raise ValueError("the rank cannot have assigned this number")
        value = _READERS[table](entry)
        if table == "file" and self._cells:
            value = rename_file(value, name_cells([value]))
        self.names[table][number] = value
        if table == "label" and value.startswith(STEP):
            self._step_labels.append(number)
        if table == "group" and entry.get("fresh") is True:
            self.fresh.add(number)

    def is_live(self) -> bool:
        """Returns whether the process that began this part is still alive on this Linux machine.

        If an earlier run left the part behind, the process is not alive.
        """
        if "pid" not in self.meta:
            self.read_names()
        pid, start_ns = self.meta.get("pid"), self.meta.get("start_ns")
        if not isinstance(start_ns, int) or self.meta.get("host") != socket.gethostname():
            return False
        try:
            born_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        except (OSError, ValueError, IndexError, AttributeError):
            # the process has ended, or this is not Linux
            return False
        return born_ticks * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns <= start_ns


def _may_change(records: Ints) -> Ints:
    """Returns a mask of the records that are in flight, or claimed by a thread but still empty.

    A slot with a bookmark stays empty and never changes.
    """
    status = records["status"]
    return np.asarray((status == IN_FLIGHT) | ((status == 0) & (records["post_ns"] != NONE)))


def _read_slots(file: int, slots: Ints) -> tuple[Ints, Ints]:
    """Returns a mask of the slots that exist in the file, and the records in those slots.

    ``slots`` must ascend, and must not be empty.
    """
    there, read = np.zeros(len(slots), dtype=bool), []
    ends = [0, *(np.flatnonzero(np.diff(slots) > _GAP) + 1).tolist(), len(slots)]
    for begin, end in pairwise(ends):
        places = slots[begin:end] - slots[begin]
        records = _read_settled(file, int(slots[begin]), int(places[-1]) + 1)
        there[begin:end] = here = places < len(records)
        read.append(records[places[here]])
    return there, _concatenate(read)


def _read_settled(file: int, first: int, count: int) -> Ints:
    """Reads records that a rank may still be writing; returns fewer if the file is shorter.

    The rank writes a record's status last, so a record that has a status at the first read is
    complete at the second. A record in flight may already have its end time shortly before its
    status becomes done.
    """
    status, data = (
        os.pread(file, count * RECORD.itemsize, first * RECORD.itemsize) for _ in range(2)
    )
    whole = min(len(status), len(data)) // RECORD.itemsize
    records = np.frombuffer(bytearray(data), dtype=RECORD, count=whole)
    records["status"] = np.frombuffer(status, dtype=RECORD, count=whole)["status"]
    return records


def _concatenate(parts: Sequence[Ints]) -> Ints:
    """Concatenates records bytewise.

    If they had fields, numpy would copy each field of each part separately, which takes ten times
    as long.
    """
    return (
        np.concatenate([part.view(_BYTES) for part in parts]).view(RECORD) if parts else _NO_RECORDS
    )
