"""The one reader of what ranks record: live, post mortem, and for the log.

A directory of parts holds for each rank ``rank-<r>.events`` (an array of ``RECORD``, zero beyond
its end) and ``rank-<r>.names`` (JSON lines: the names that the records number, and what the rank
says of itself), and for the run ``run.json``. A rank may be killed at any moment, so any file may
be missing and the last record or line may be cut. What is readable is read, and what is not is
noted.

``PartReader`` follows one rank, whether it still writes or not. ``read_parts`` and ``read_run``
read all ranks to their end. What others write is read, never mapped: a file that somebody cuts
short is then a short read and not the end of the reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.errors import TraceFileError, name_ranks
from ringsim.traces.clocks import UNKNOWN, align_run, find_clocks, reference_ns
from ringsim.traces.events import (
    ANY_SOURCE,
    CALLS,
    COLUMN_DTYPES,
    ERROR,
    IN_FLIGHT,
    NONE,
    OPS,
    RECORD,
    Events,
    Ints,
    Tables,
    make_events,
    read_group,
    read_payload,
    read_word,
    readable,
)

FILE_NAME: Final = re.compile(r"rank-(\d{1,6})\.(?:events|names)")
_MAX_RANKS: Final = 10**6  # as many as the file names can tell apart; a number beyond is damage
_FIRST_WINDOW: Final = 64  # slots that a look reads at first; more follow where they are full
_WINDOW: Final = 1 << 16
# for one who reads all of a long part: a window is copied some ten times over
_SMALL_WINDOW: Final = 1 << 13
# slots one after the other that threads may have claimed and not written yet
_MOST_CLAIMED: Final = 32
_GAP: Final = 64  # slots between two that are read in one go
# what metadata["ranks"] keeps of each rank
_PER_RANK: Final = ("pid", "host", "num_threads", "cost_ns_per_op")
_LIMITS: Final = {"world_size": range(1, _MAX_RANKS + 1)} | dict.fromkeys(
    ("start_ns", "start_unix_ns", "end_ns"), range(2**63)
)
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "group": read_group,
    "payload": read_payload,
    "label": lambda entry: read_word(entry.get("name")),
    "file": lambda entry: read_word(entry.get("name")),
}
# column -> its table
_TABLE_OF: Final = {"group": "groups", "payload": "payloads", "label": "labels", "file": "files"}
_NO_RECORDS: Final[Ints] = np.zeros(0, dtype=RECORD)
_BYTES: Final = np.dtype((np.void, RECORD.itemsize))


class Batch(NamedTuple):
    """Records of one rank, ascending.

    Those that are new since the last batch, and those of earlier batches that have changed. A
    record that was in flight comes again when it is awaited or done; one that is done does not.

    Attributes:
        slots: the place of each in the part (int64).
        records: the records, an array of ``RECORD``; ``group``, ``payload``, ``label`` and ``file``
            are the rank's own numbers.
    """

    slots: Ints
    records: Ints


class PartReader:
    """Follows the part of one rank, while the rank writes or afterwards.

    What it keeps does not grow with the part.

    Args:
        directory: where the parts are.
        rank: whose part; it need not be there yet.
        world_size: number of ranks; a record that names a peer beyond is damage. None until it is
            known.
        cells: whether source files that are cells of this notebook get the names of the cells.

    Attributes:
        names: by table ("group", "payload", "label", "file") and number, what the records mean;
            complete for the batches so far. Where the file is damaged, a number may be missing.
        fresh: numbers of the groups on which nothing was posted before they were numbered: all
            their operations are recorded.
        meta: what the rank says of itself: ``pid``, ``host``, ``start_ns``, ``end_ns`` once it has
            ended, ...
        more: whether there is more to be read at once.
        replaced: whether the last batch began another part, that of a later run in the place of the
            first: earlier batches are void.
        unreadable: how much was damaged, and left out.

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
        """Knows nothing of the rank yet."""
        self.names: dict[str, dict[int, Any]] = {table: {} for table in _TABLE_OF}
        self.fresh: set[int] = set()
        self.meta: dict[str, Any] = {}
        self.unreadable = 0
        self.more = False
        self._names_read = 0  # bytes
        self._unfinished = b""  # the last line of the names, where its end is not there yet
        self._width, self._widest = _FIRST_WINDOW, _WINDOW
        self._next = 0  # the first slot that nobody has seen written
        # What may change: in flight, or claimed by another thread and still empty; and how it
        # looked.
        self._watched, self._seen = np.zeros(0, dtype=np.int64), _NO_RECORDS

    def is_damaged(self) -> bool:
        """Whether something of the part could not be read.

        A line or a record, or one that is cut.
        """
        try:
            length = self._events_path.stat().st_size
            with self._events_path.open("rb") as file:
                file.seek(length // RECORD.itemsize * RECORD.itemsize)
                cut = any(file.read())
        except FileNotFoundError:
            cut = False
        return cut or bool(self._unfinished) or self.unreadable > 0

    def read_all(self) -> Ints:
        """Reads all that the rank has written by now, in the order of posting.

        For one who looks but once.
        """
        try:
            until = self._events_path.stat().st_size // RECORD.itemsize
        except FileNotFoundError:
            until = 0
        batches = [self.advance()]
        # a rank that writes faster than this reads must not keep it here
        while self.more and self._next < until:
            batches.append(self.advance())
        slots, records = (
            np.concatenate([batch.slots for batch in batches]),
            _concatenate([batch.records for batch in batches]),
        )
        if not (np.diff(slots) > 0).all():  # the rank is writing: the latest look at a slot counts
            _, last = np.unique(slots[::-1], return_index=True)
            records = records[::-1][last]
        # an end that came while it was read
        records["done_ns"][records["status"] == IN_FLIGHT] = NONE
        return records

    def read_pieces(self) -> Iterator[Ints]:
        """Reads the same as ``read_all``, a little at a time where the rank has ended its part.

        Once at least.
        """
        self.read_names()
        if "end_ns" not in self.meta:
            yield self.read_all()
            return
        self._widest, self.more, last = _SMALL_WINDOW, True, NONE
        while self.more:
            batch = self.advance()
            records = batch.records.compress(batch.slots > last)  # nobody writes there any more
            records["done_ns"][records["status"] == IN_FLIGHT] = NONE
            last = max([last, *batch.slots[-1:].tolist()])
            yield records

    def advance(self) -> Batch:
        """Reads what is new; cheap where little is.

        Returns:
            The records; of a long part at most some 80,000, and ``more`` says whether to call again
            at once.

        Raises:
            OSError: a file is there and cannot be read.
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
        self.read_names()  # after the records: names are written before the records that bear them
        if not len(slots):
            return Batch(slots, records)
        written = records["status"] != 0
        watched = _may_change(records)
        self._watched, self._seen = slots[watched], records[watched]
        changed = written & np.logical_or.reduce(
            [was[name] != records[name] for name in ("status", "wait_ns", "peer")]
        )
        return self._drop_damage(slots[changed], records.compress(changed))

    def _read_changes(self, file: int) -> tuple[Ints, Ints, Ints]:
        """Returns the slots that are watched or new, how they looked, and how they look.

        What may change is read last: where it is in flight, it was so when the newest record had
        been written.
        """
        first, fresh = self._next, self._read_new(file)
        slots, was, records = self._watched, self._seen, self._seen
        if len(fresh):
            slots = np.concatenate([slots, np.arange(first, self._next)])
            was, records = (
                _concatenate([was, np.zeros(len(fresh), dtype=RECORD)]),
                _concatenate([records, fresh]),
            )
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
        """Returns the records behind the last that was seen, up to the last by now.

        A bookmark is one, without a status.
        """
        read, self.more = [], True
        while self.more:
            width = self._width
            records = _read_settled(file, self._next, width)
            there = np.flatnonzero((records["status"] != 0) | (records["post_ns"] == NONE))
            seen = int(there[-1]) + 1 if len(there) else 0
            read.append(records[:seen])
            self._next += seen
            self.more = width - seen < _MOST_CLAIMED  # else what is empty is not claimed
            self._width = min(4 * width, self._widest) if seen == width else _FIRST_WINDOW
            if width == self._widest:
                break
        return _concatenate(read)

    def _drop_damage(self, slots: Ints, records: Ints) -> Batch:
        """Leaves out what no recorder can have written."""
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
        """Reads what is new in the names file; ``advance`` does it, too."""
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

    def _add_name(self, entry: dict[str, Any]) -> None:
        table, number = entry["table"], entry["id"]
        # numbers are given in order, one a line
        if type(number) is not int or not 0 <= number < self._names_read:
            raise ValueError("a number that no rank gave")
        value = _READERS[table](entry)
        if table == "file" and self._cells:
            value = rename_file(value, name_cells([value]))
        self.names[table][number] = value
        if table == "group" and entry.get("fresh") is True:
            self.fresh.add(number)

    def is_live(self) -> bool:
        """Whether the process that began this part lives, on this machine (Linux).

        What an earlier run left is not the present.
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
            # the process is gone; or this is not Linux
            return False
        return born_ticks * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns <= start_ns


def _may_change(records: Ints) -> Ints:
    """Tells which records are in flight, or claimed by another thread and still empty.

    Where nothing will come, a bookmark says so.
    """
    status = records["status"]
    return np.asarray((status == IN_FLIGHT) | ((status == 0) & (records["post_ns"] != NONE)))


def _read_slots(file: int, slots: Ints) -> tuple[Ints, Ints]:
    """Returns which of the slots, in ascending order and at least one, the file has.

    Also the records in these.
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
    """Reads records that may be written at this moment, fewer where the file is shorter.

    What has a status is whole. The status is written last, so a record that has one at the first
    look is whole at the second. One in flight may have the time of its end already, which says that
    it is about to be done.
    """
    status, data = (
        os.pread(file, count * RECORD.itemsize, first * RECORD.itemsize) for _ in range(2)
    )
    whole = min(len(status), len(data)) // RECORD.itemsize
    records: Ints = np.frombuffer(bytearray(data), dtype=RECORD, count=whole)
    records["status"] = np.frombuffer(status, dtype=RECORD, count=whole)["status"]
    return records


def _concatenate(parts: Sequence[Ints]) -> Ints:
    """Joins records as bytes.

    Numpy looks at each field of each part, which takes ten times as long.
    """
    return (
        np.concatenate([part.view(_BYTES) for part in parts]).view(RECORD) if parts else _NO_RECORDS
    )


# -- all ranks


def read_run(directory: Path) -> tuple[Events, dict[str, Any]]:
    """Reads a whole run: the parts of its ranks, and what whoever started it wrote of it.

    Args:
        directory: where the parts are; ``run.json`` may be missing.

    Returns:
        The events, and the metadata of a trace.

    Raises:
        TraceFileError: the directory or a file in it cannot be read.
    """
    try:
        run = json.loads((directory / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        run = None  # killed before it could write that, or damaged: the parts say the most of it
    said = run if isinstance(run, dict) else {}
    start_ns, world_size = (
        _valid([{"start_ns": said.pop("start_ns", None)}], "start_ns"),
        _valid([said], "world_size"),
    )
    parts = Parts(directory, *world_size or [None])
    events = parts.join(*start_ns)
    pieces, metas = parts.describe(), list(parts.metas.values())
    said = {
        key: value
        for key, value in said.items()
        if isinstance(value, dict) or key not in ("machine", "versions")
    }
    metadata = {
        "format": 1,
        "run_id": next(iter(_valid(metas, "run_id")), ""),
        "source": "measured",
        **said,
        **pieces,
    }
    if ends := told_ends(parts.metas):
        metadata["ends"] = ends
    clocks, begun_ns = pieces.get("clocks", []), 0
    ended_ns = [
        reference_ns(clocks, rank, at_ns - parts.start_ns)
        for rank, meta in parts.metas.items()
        for at_ns in _valid([meta], "end_ns")
    ]
    if clocks:
        events, metadata["clocks"], begun_ns = align_run(
            events, clocks, start_ns[0] - parts.start_ns if start_ns else None
        )
    if ended_ns:
        metadata["end_ns"] = max(max(ended_ns) - begun_ns, 0)
    for key in ("notes", "not_recorded"):
        metadata[key] = _sentences([said, pieces], key)
    metadata["complete"] = (
        all("end_ns" in meta for meta in metas)
        and pieces["complete"]
        and said.get("complete", True) is True
    )
    for start_unix_ns in _valid([said], "start_unix_ns") or _valid([pieces], "start_unix_ns"):
        metadata["start_unix_ns"] = start_unix_ns
        if not isinstance(said.get("date"), str):
            metadata["date"] = (
                datetime.fromtimestamp(start_unix_ns * 1e-9, tz=UTC).date().isoformat()
            )
    return events, readable(metadata)


def read_parts(
    directory: Path,
    *,
    start_ns: int | None = None,
    world_size: int | None = None,
    only_rank: int | None = None,
) -> tuple[Events, dict[str, Any]]:
    """Reads the parts of all ranks, or of one.

    The tables of the ranks are merged into one, threads are numbered from 0 within each rank, and
    times count from the start of the run. A rank may still be writing: its events so far are read.

    Args:
        directory: where the parts are.
        start_ns: start of the run on CLOCK_MONOTONIC; None takes the earliest start that a rank
            gives. An event before it becomes the start instead, so no time is negative.
        world_size: number of ranks in the run; None takes what the ranks say.
        only_rank: read the part of this rank alone; None reads all.

    Returns:
        The events, ordered by rank and then as posted, and the pieces of metadata that the ranks
        know: ``world_size``, ``ranks``, ``not_recorded``, ``notes``, ``complete`` (every rank left
        a part, all of it readable, and none stopped recording), and, where a rank gave them,
        ``backend``, ``start_unix_ns``, ``not_checked`` (which operations were not compared with
        their other side) and ``used_before`` (the names of groups on which not every operation is
        recorded).

    Raises:
        TraceFileError: the directory or a file in it cannot be read.
    """
    parts = Parts(directory, world_size, only_rank)
    return parts.join(*() if start_ns is None else [start_ns]), parts.describe()


class Parts:
    """The parts of all ranks, or of one; see ``read_parts``.

    Attributes:
        metas: by rank, what it says of itself.
        world_size: number of ranks in the run.
        start_ns: from where times count, 0 until ``join``.
    """

    def __init__(
        self, directory: Path, world_size: int | None, only_rank: int | None = None
    ) -> None:
        self._directory, self.start_ns, self.metas = directory, 0, dict[int, dict[str, Any]]()
        self._damaged: set[int] = set()
        with self._told():
            found = sorted(
                {
                    int(match[1])
                    for entry in directory.iterdir()
                    if (match := FILE_NAME.fullmatch(entry.name))
                }
            )
            for rank in found if only_rank is None else {only_rank} & {*found}:
                reader = PartReader(directory, rank, cells=False)
                reader.read_names()
                self.metas[rank] = reader.meta
        said = [*_valid(self.metas.values(), "world_size"), *(rank + 1 for rank in self.metas)]
        self.world_size = max(said, default=0) if world_size is None else world_size

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceFileError(
                f"The parts of a run must be readable, got {self._directory}: "
                f"{error.strerror or error}. "
                "Check that its ranks began to record."
            ) from error

    def read(self) -> Iterator[Events]:
        """Reads one rank after the other to its end, in pieces of some thousand events.

        Times are those of its clock.
        """
        for rank in self.metas:
            with self._told():
                reader, count, threads = (
                    PartReader(self._directory, rank, self.world_size, cells=False),
                    0,
                    dict[int, int](),
                )
                for records in reader.read_pieces():
                    yield _make_piece(rank, records, reader.names, count, threads)
                    count += len(records)
                if reader.is_damaged():
                    self._damaged.add(rank)
            self.metas[rank] = reader.meta

    def join(self, *start_ns: int) -> Events:
        """Returns the events of all ranks.

        Times count from their start, by default the earliest that a rank gives.
        """
        events = join_events(list(self.read()))
        posts = [int(events.post_ns.min())] if len(events) else []
        # no time is negative
        self.start_ns = min(
            [*posts, *(start_ns or _valid(self.metas.values(), "start_ns"))], default=0
        )
        for name in ("post_ns", "wait_ns", "done_ns") if self.start_ns else ():
            values = getattr(events, name)
            np.copyto(values, np.maximum(values - self.start_ns, 0), where=values != NONE)
        return events

    def describe(self) -> dict[str, Any]:
        """Returns the pieces of metadata that the ranks know."""
        ranks, metas = self.metas.items(), self.metas.values()
        missing = (
            [rank for rank in range(self.world_size) if rank not in self.metas]
            if len(metas) < self.world_size
            else []
        )
        stopped = [rank for rank, meta in ranks if meta.get("stopped_at_max")]
        silent = [rank for rank in stopped if "note" not in self.metas[rank]]
        notes, not_checked = _valid(metas, "note"), _sentences(metas, "not_checked")
        for concerned, what in (
            (missing, "left no record"),
            (silent, "stopped recording at the maximum of records"),
            (sorted(self._damaged), "left something unreadable, which was passed over"),
        ):
            notes += [f"{name_ranks(concerned)} {what}"] if concerned else []
        hosts = set(_valid(metas, "host"))
        if len(hosts) > 1:
            not_checked.append(
                f"Both sides of an operation were not compared between the {len(hosts)} hosts "
                "that the ranks ran on."
            )
        clocks = find_clocks(self.metas, self.start_ns)
        # where there are no entries
        one_clock = all(isinstance(meta.get("clock"), str) for meta in metas)
        if any(entry["how"] == UNKNOWN for entry in clocks) or (
            len(hosts) > 1 and not clocks and not one_clock
        ):
            notes.append(
                f"the ranks ran on {max(len(hosts), len(clocks))} hosts, whose clocks were not "
                "compared: compare times within a host only"
            )
        starts = [
            meta["start_unix_ns"] + self.start_ns - meta["start_ns"]
            for meta in metas
            if _valid([meta], "start_ns") and _valid([meta], "start_unix_ns")
        ]
        told = {
            "not_checked": not_checked,
            "used_before": _sentences(metas, "used_before"),
            "backend": next(iter(_valid(metas, "backend")), None),
            "start_unix_ns": next(iter(starts), None),
            "clocks": clocks,
        }
        return {
            "world_size": self.world_size,
            "ranks": [
                {"rank": rank, **{key: meta[key] for key in _PER_RANK if key in meta}}
                for rank, meta in ranks
            ],
            "not_recorded": _sentences(metas, "not_recorded"),
            "notes": notes,
            "complete": not (missing or stopped or self._damaged),
            **{key: value for key, value in told.items() if value not in ([], None)},
        }


def _make_piece(
    rank: int,
    records: Ints,
    names: Mapping[str, Mapping[int, Any]],
    first: int,
    threads: dict[int, int],
) -> Events:
    """Returns records of a rank, from the ``first`` of them on, as events with tables of their own.

    Adds to the numbers of ``threads``.
    """
    columns: dict[str, Any] = {name: records[name] for name in RECORD.names or ()} | {
        "rank": np.full(len(records), rank)
    }
    idents, places, numbers = np.unique(records["thread"], return_index=True, return_inverse=True)
    for place in np.argsort(places).tolist():
        threads.setdefault(int(idents[place]), len(threads))
    columns["thread"] = np.array([threads[ident] for ident in idents.tolist()], dtype=np.int32)[
        numbers
    ]
    columns["seq"] = np.arange(first, first + len(records))
    tables = {}
    for column, table in _TABLE_OF.items():
        known = sorted(names[column])
        tables[table] = tuple(map(names[column].__getitem__, known))
        columns[column] = _close_gaps(records[column], known)
    return make_events(columns, Tables(**tables))


def _close_gaps(numbers: Ints, known: list[int]) -> Ints:
    """Turns a rank's numbers into places among those that have a name.

    One that has none becomes -1.
    """
    place = np.searchsorted(known, numbers)
    there = np.array([*known, NONE])[place] == numbers
    return np.where(there & (numbers >= 0), place, NONE)


def _valid(metas: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """Returns what is said under ``key``, where it can be.

    A number within its limits, or a word.
    """
    values = [meta.get(key) for meta in metas]
    if key in _LIMITS:
        return [value for value in values if type(value) is int and value in _LIMITS[key]]
    return [value for value in values if isinstance(value, str)]


def _sentences(metas: Iterable[dict[str, Any]], key: str) -> list[str]:
    lists = [meta.get(key) for meta in metas]
    return list(
        dict.fromkeys(
            one
            for found in lists
            if isinstance(found, list)
            for one in found
            if isinstance(one, str)
        )
    )


def told_ends(metas: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Says how the ranks ended.

    As each says of itself, or as others saw it; who had not ended its part was at work until then.
    """
    ends: dict[int, dict[str, Any]] = {
        rank: {"rank": rank, "state": "running", "about": "still at work", "error": ""}
        for rank, meta in metas.items()
        if "end_ns" not in meta
    }
    lists = [(rank, meta.get(key)) for rank, meta in metas.items() for key in ("deaths", "ends")]
    entries = [
        (rank, end)
        for rank, found in lists
        if isinstance(found, list)
        for end in found
        if isinstance(end, dict)
    ]
    told = [(rank, end) for rank, end in entries if type(end.get("rank")) is int]
    ends |= {end["rank"]: end for _, end in told}
    ends |= {rank: end for rank, end in told if end["rank"] == rank}
    return [ends[rank] for rank in sorted(ends)]


def join_events(parts: Sequence[Events]) -> Events:
    """Puts events together, one part after the other; names that several parts have become one.

    Args:
        parts: each with tables of its own. Those of one rank stand in the order in which they were
            recorded.

    Returns:
        The events of all parts. ``seq`` counts anew within each rank.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group
        >>> one = make_events(
        ...     {"rank": [0], "op": [OP_CODES["send"]], "group": [0]},
        ...     Tables(groups=(Group("world", (0, 1)),)),
        ... )
        >>> joined = join_events([one, one])
        >>> joined.group.tolist(), joined.seq.tolist(), len(joined.tables.groups)
        ([0, 0], [0, 1], 1)
    """
    columns: dict[str, list[Ints]] = {
        name: [np.zeros(0, dtype)] for name, dtype in COLUMN_DTYPES.items() if name != "seq"
    }
    tables = Tables()
    for part in share_tables(parts):
        tables = part.tables
        for name, pieces in columns.items():
            pieces.append(getattr(part, name))
    return make_events({name: np.concatenate(pieces) for name, pieces in columns.items()}, tables)


def share_tables(parts: Iterable[Events]) -> Iterator[Events]:
    """Yields the parts of a run with tables that go on from one to the next.

    Those of the last have all names.
    """
    merged: dict[str, dict[Any, int]] = {column: {} for column in _TABLE_OF}
    for part in parts:
        columns = {}
        for column, table in _TABLE_OF.items():
            numbers = [
                merged[column].setdefault(entry, len(merged[column]))
                for entry in getattr(part.tables, table)
            ]
            # -1 picks the last
            columns[column] = np.array([*numbers, NONE], dtype=np.int32)[getattr(part, column)]
        yield replace(
            part,
            **columns,
            tables=Tables(**{table: tuple(merged[column]) for column, table in _TABLE_OF.items()}),
        )


# -- cells of a notebook


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    return hasattr(_shell(), "kernel")


def name_cells(filenames: Iterable[str]) -> dict[str, str]:
    """Returns what the notebook calls those of some file names that are its cells.

    ``{"/tmp/...": "Cell In[5]"}``.
    """
    compiler: Any = getattr(_shell(), "compile", None)
    if not hasattr(compiler, "format_code_name"):
        return {}
    pieces = (name.rpartition(CALLS) for name in filenames)
    found = {
        name: compiler.format_code_name(name)
        for caller, _, file in pieces
        for name in (caller.rpartition(":")[0], file)
    }
    return {filename: " ".join(label) for filename, label in found.items() if label is not None}


def rename_file(name: str, cells: Mapping[str, str]) -> str:
    """Returns the name of a file with cells called by the names that ``name_cells`` gave.

    Example:
        >>> rename_file(
        ...     "/tmp/7/8.py:4 > /tmp/7/9.py",
        ...     {"/tmp/7/8.py": "Cell In[5]", "/tmp/7/9.py": "Cell In[2]"},
        ... )
        'Cell In[5]:4 > Cell In[2]'
    """
    return rename_places(f"{name}:", cells)[:-1]


def rename_places(text: str, names: Mapping[str, str]) -> str:
    """Returns a text in which the lines of cells are called by the names that ``name_cells`` gave.

    Args:
        text: has places in it, as "/tmp/ipykernel_7/123.py:4", or "123.py:4".
        names: of cells, by file name.

    Example:
        >>> rename_places(
        ...     "got 5 here and 4 in rank 0's send at 123.py:4",
        ...     {"/tmp/ipykernel_7/123.py": "Cell In[5]"},
        ... )
        "got 5 here and 4 in rank 0's send at Cell In[5]:4"
    """
    for filename, name in names.items():
        text = text.replace(f"{filename}:", f"{name}:").replace(
            f"{os.path.basename(filename)}:", f"{name}:"
        )
    return text


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
