"""What each rank wrote while it ran, read into one set of events.

A directory of parts holds, for each rank, ``rank-<r>.events`` (an array of ``RECORD``, zero beyond its end) and ``rank-<r>.names`` (JSON
lines: the names that the records number, and what the rank says of itself), and for the run ``run.json``. A rank may have been killed at
any moment, so any file may be missing and the last record or line may be cut. What is readable is read, and what is not is noted.

Several sets of events made into one, as if they had been recorded together.

The part of another rank of the same machine, read while that rank writes it: its records as numbers, and what its numbers mean.

``ringsim.traces.parts`` reads the parts of all ranks once; this reads one from inside another rank, in the middle of its operations.

What is particular to a Jupyter kernel: that it is one, and what it calls the cell that a piece of code came from.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import SEEK_END
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    COLUMN_DTYPES,
    ERROR,
    IN_FLIGHT,
    NONE,
    OP_KINDS,
    OPS,
    RECORD,
    Events,
    Group,
    Ints,
    Payload,
    Tables,
    make_events,
    read_group,
    read_payload,
    read_word,
)

__all__ = ["COLUMNS", "WORDS", "Batch", "Neighbour", "PartReader", "join_events", "read_parts", "read_run"]

_FILE_NAME: Final = re.compile(r"rank-(\d{1,6})\.(?:events|names)")
_LOOK: Final = 1 << 14  # records that are looked at in one go, from the end
_MAX_RANKS: Final = 10**6  # as many as the file names can tell apart; a number beyond is damage
_PER_RANK: Final = ("rank", "pid", "host", "num_threads", "cost_ns_per_op")  # what metadata["ranks"] keeps of each rank
_TABLES: Final = ("group", "payload", "label", "file")
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "group": read_group,
    "payload": read_payload,
    "label": lambda entry: read_word(entry.get("name")),
    "file": lambda entry: read_word(entry.get("name")),
}


@dataclass
class _Part:
    """What one rank left: its records, its names by table and number, what it says of itself, and how much was unreadable."""

    records: Ints
    names: dict[str, dict[int, Any]]
    meta: dict[str, Any] = field(default_factory=dict)
    unreadable: int = 0


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
    start_ns = said.pop("start_ns", None)
    world_size = said.get("world_size")
    parts, size, start_ns = _read_all(
        directory, start_ns if _is_time(start_ns) else None, world_size if _is_world_size(world_size) else None
    )
    events, pieces = _merge(parts, start_ns), _pieces(parts, size, start_ns)
    said = {key: value for key, value in said.items() if isinstance(value, dict) or key not in ("machine", "versions")}
    metadata = {"format": 1, "run_id": "", "source": "measured", **said, **pieces}
    if ends := _ends(parts):
        metadata["ends"] = ends
    if ended_ns := [part.meta["end_ns"] for part in parts.values() if _is_time(part.meta.get("end_ns"))]:
        metadata["end_ns"] = max(max(ended_ns) - start_ns, 0)
    for key in ("notes", "not_recorded"):
        metadata[key] = list(dict.fromkeys([*_words(said.get(key)), *pieces[key]]))
    ended = all("end_ns" in part.meta for part in parts.values())
    metadata["complete"] = ended and pieces["complete"] and said.get("complete", True) is True
    if _is_time(said.get("start_unix_ns")):
        metadata["start_unix_ns"] = said["start_unix_ns"]
    if not isinstance(metadata.get("date"), str) and _is_time(metadata.get("start_unix_ns")):
        metadata["date"] = datetime.fromtimestamp(metadata["start_unix_ns"] * 1e-9, tz=UTC).date().isoformat()
    return events, metadata


def read_parts(
    directory: Path, *, start_ns: int | None = None, world_size: int | None = None, only_rank: int | None = None
) -> tuple[Events, dict[str, Any]]:
    """Reads the parts of all ranks, or of one.

    The tables of the ranks are merged into one, threads are numbered from 0 within each rank, and times count from the start of the
    run. A rank may still be writing: its events so far are read.

    Args:
        directory: where the parts are.
        start_ns: start of the run on CLOCK_MONOTONIC; None takes the earliest start that a rank gives. An event before it becomes the
            start instead, so no time is negative.
        world_size: number of ranks in the run; None takes what the ranks say.
        only_rank: read the part of this rank alone; None reads all.

    Returns:
        The events, ordered by rank and then as posted, and the pieces of metadata that the ranks know: ``world_size``, ``ranks``,
        ``not_recorded``, ``notes``, ``complete`` (every rank left a part, all of it readable, and none stopped recording), and, where
        a rank gave them, ``backend``, ``start_unix_ns`` and ``not_checked`` (which operations were not compared with their other side).

    Raises:
        TraceFileError: the directory or a file in it cannot be read.
    """
    parts, size, start = _read_all(directory, start_ns, world_size, only_rank)
    return _merge(parts, start), _pieces(parts, size, start)


def _read_all(
    directory: Path, start_ns: int | None, world_size: int | None, only_rank: int | None = None
) -> tuple[dict[int, _Part], int, int]:
    """Returns the parts by rank, the number of ranks, and the moment from which times count; see ``read_parts``."""
    try:
        found = sorted({int(match[1]) for entry in directory.iterdir() if (match := _FILE_NAME.fullmatch(entry.name))})
        parts = {rank: _read_part(directory, rank) for rank in found if only_rank in (None, rank)}
    except OSError as error:
        raise TraceFileError(
            f"The parts of a run must be readable, got {directory}: {error.strerror or error}. Check that its ranks began to record."
        ) from error
    size = world_size if world_size is not None else _world_size(parts)
    for rank, part in parts.items():
        sane = _sane(part.records, size if rank < size else 0)
        part.unreadable += int(np.count_nonzero(~sane))
        part.records = part.records[sane]
    starts = [part.meta["start_ns"] for part in parts.values() if _is_time(part.meta.get("start_ns"))]
    start = start_ns if start_ns is not None else min(starts, default=None)
    posts = [int(part.records["post_ns"].min()) for part in parts.values() if len(part.records)]
    return parts, size, min([*posts, *([] if start is None else [start])], default=0)


def _read_part(directory: Path, rank: int) -> _Part:
    names: dict[str, dict[int, Any]] = {table: {} for table in _TABLES}
    records, cut = _read_records(directory / f"rank-{rank}.events")
    part = _Part(records, names, unreadable=int(cut))
    try:
        lines = (directory / f"rank-{rank}.names").read_bytes().split(b"\n")
    except FileNotFoundError:
        return part
    part.unreadable += bool(lines.pop())  # what follows the last line end: nothing, or a line that was being written
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["table"] == "meta":
                part.meta[read_word(entry["key"])] = entry["value"]
                continue
            number = entry["id"]
            if type(number) is not int or not 0 <= number < len(lines):  # numbers are given in order, one a line
                raise ValueError("a number that no rank gave")
            names[entry["table"]][number] = _READERS[entry["table"]](entry)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            part.unreadable += 1
    return part


def _read_records(path: Path) -> tuple[Ints, bool]:
    """Returns the valid records of a file, and whether its last one is cut.

    A slot that was claimed but never written, because the rank was killed in between, is passed over: other threads may have written
    the slots after it. The rank may be writing at this moment, so the file is looked at three times, for a copy takes longer than a
    record. The first look tells how far the rank has come: a copy that met it there may lack a record before the last. The second tells
    which records up to there are valid. Those are whole in the third, for their status is written last.
    """
    try:
        count = _count_written(path)
        status = _whole_records(path.read_bytes())["status"][:count]
        data = path.read_bytes()
    except FileNotFoundError:
        return np.empty(0, dtype=RECORD), False
    records = _whole_records(data)[: len(status)].copy()
    records["status"] = status
    records["done_ns"][status == IN_FLIGHT] = NONE  # an end that came between the two looks
    return records[status != 0], any(data[len(data) // RECORD.itemsize * RECORD.itemsize :])


def _count_written(path: Path) -> int:
    """Returns how many records there are up to the last that is valid; beyond it the file may have room for many."""
    with path.open("rb") as file:
        end = file.seek(0, SEEK_END) // RECORD.itemsize
        while end > 0:
            begin = max(end - _LOOK, 0)
            file.seek(begin * RECORD.itemsize)
            valid = np.flatnonzero(_whole_records(file.read((end - begin) * RECORD.itemsize))["status"])
            if len(valid):
                return begin + int(valid[-1]) + 1
            end = begin
    return 0


def _whole_records(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=RECORD, count=len(data) // RECORD.itemsize)


def _sane(records: Ints, world_size: int) -> Ints:
    """Marks the records that a recorder can have written; what else is there is damage."""
    sane = (records["status"] <= ERROR) & (records["op"] < len(OPS)) & (records["post_ns"] >= 0)
    sane &= (records["peer"] >= ANY_SOURCE) & (records["peer"] < world_size)
    for name in ("wait_ns", "done_ns", "stage", "microbatch", "line"):
        sane &= records[name] >= NONE
    return sane


def _merge(parts: dict[int, _Part], start_ns: int) -> Events:
    merged: dict[str, dict[Any, int]] = {table: {} for table in _TABLES}
    columns: dict[str, list[Ints]] = {}
    for rank, part in parts.items():
        records = part.records
        rows: dict[str, Ints] = {name: records[name] for name in RECORD.names or ()}
        rows["rank"] = np.full(len(records), rank)
        rows["thread"] = _number_threads(records["thread"])
        for table in _TABLES:
            rows[table] = _renumber(records[table], part.names[table], merged[table])
        for name in ("post_ns", "wait_ns", "done_ns"):
            rows[name] = np.where(records[name] == NONE, NONE, np.maximum(records[name] - start_ns, 0))
        for name, row in rows.items():
            columns.setdefault(name, []).append(row)
    groups: dict[Group, int]
    payloads: dict[Payload, int]
    groups, payloads = merged["group"], merged["payload"]
    tables = Tables(tuple(groups), tuple(payloads), tuple(merged["label"]), tuple(merged["file"]))
    if not columns:
        return make_events({"rank": [], "op": []}, tables)
    return make_events({name: np.concatenate(rows) for name, rows in columns.items()}, tables)


def _renumber(numbers: Ints, names: dict[int, Any], merged: dict[Any, int]) -> Ints:
    """Turns a rank's own numbers into those of the merged table; a number without a name becomes -1."""
    to_merged = np.full(max(names, default=-1) + 2, NONE, dtype=np.int32)  # the last entry stands for every unknown number
    for number in sorted(names):
        to_merged[number] = merged.setdefault(names[number], len(merged))
    known = (numbers >= 0) & (numbers < len(to_merged) - 1)
    return to_merged[np.where(known, numbers, len(to_merged) - 1)]


def _number_threads(idents: Ints) -> Ints:
    """Numbers threads from 0 in the order of their first record."""
    _, first, number = np.unique(idents, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _world_size(parts: dict[int, _Part]) -> int:
    said = [part.meta["world_size"] for part in parts.values() if _is_world_size(part.meta.get("world_size"))]
    return max([*said, *(rank + 1 for rank in parts)], default=0)


def _is_world_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MAX_RANKS


def _is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _pieces(parts: dict[int, _Part], world_size: int, start_ns: int) -> dict[str, Any]:
    missing = [rank for rank in range(world_size) if rank not in parts] if len(parts) < world_size else []
    stopped = [rank for rank, part in parts.items() if part.meta.get("stopped_at_max")]
    said = [part.meta["note"] for part in parts.values() if isinstance(part.meta.get("note"), str)]
    damaged = [rank for rank, part in parts.items() if part.unreadable]
    hosts = {part.meta.get("host") for part in parts.values()} - {None}
    notes = [
        (missing, "left no record"),
        ([rank for rank in stopped if "note" not in parts[rank].meta], "stopped recording at the maximum of records"),
        (damaged, "left something unreadable, which was passed over"),
    ]
    pieces: dict[str, Any] = {
        "world_size": world_size,
        "ranks": [
            {"rank": rank, **{key: part.meta[key] for key in _PER_RANK if key in part.meta and key != "rank"}}
            for rank, part in parts.items()
        ],
        "not_recorded": list(dict.fromkeys(word for part in parts.values() for word in _words(part.meta.get("not_recorded")))),
        "notes": [*said, *(f"{_name_ranks(ranks)} {what}" for ranks, what in notes if ranks)],
        "complete": not (missing or stopped or damaged),
    }
    unchecked = list(dict.fromkeys(word for part in parts.values() for word in _words(part.meta.get("not_checked"))))
    if len(hosts) > 1:
        unchecked.append(f"Both sides of an operation were not compared between the {len(hosts)} hosts that the ranks ran on.")
    if unchecked:
        pieces["not_checked"] = unchecked
    if len(hosts) > 1:
        pieces["notes"].append(f"the ranks ran on {len(hosts)} hosts, whose clocks are not aligned: compare times within a host only")
    backends = [part.meta["backend"] for part in parts.values() if isinstance(part.meta.get("backend"), str)]
    if backends:
        pieces["backend"] = backends[0]
    for part in parts.values():
        if _is_time(part.meta.get("start_ns")) and _is_time(part.meta.get("start_unix_ns")):
            pieces["start_unix_ns"] = part.meta["start_unix_ns"] + start_ns - part.meta["start_ns"]
            break
    return pieces


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _words(value: Any) -> list[str]:
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _ends(parts: dict[int, _Part]) -> list[dict[str, Any]]:
    """Says how the ranks ended: as each says of itself, or as others saw it; who had not ended its part was at work until then."""
    ends: dict[int, dict[str, Any]] = {
        rank: {"rank": rank, "state": "running", "about": "still at work", "error": ""}
        for rank, part in parts.items()
        if "end_ns" not in part.meta
    }
    lists = [(rank, part.meta.get(key)) for rank, part in parts.items() for key in ("deaths", "ends")]
    told = [(rank, end) for rank, found in lists for end in _entries(found) if type(end.get("rank")) is int]
    ends |= {end["rank"]: end for _, end in told}
    ends |= {rank: end for rank, end in told if end["rank"] == rank}
    return [ends[rank] for rank in sorted(ends)]


def _entries(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


_TABLE_OF: Final = {"group": "groups", "payload": "payloads", "label": "labels", "file": "files"}  # column -> its table


def join_events(parts: Sequence[Events]) -> Events:
    """Puts events together, one part after the other; names that several parts have become one.

    Args:
        parts: each with tables of its own. Those of one rank stand in the order in which they were recorded.

    Returns:
        The events of all parts. ``seq`` counts anew within each rank.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group, make_events
        >>> one = make_events({"rank": [0], "op": [OP_CODES["send"]], "group": [0]}, Tables(groups=(Group("world", (0, 1)),)))
        >>> joined = join_events([one, one])
        >>> joined.group.tolist(), joined.seq.tolist(), len(joined.tables.groups)
        ([0, 0], [0, 1], 1)
    """
    merged: dict[str, dict[Any, int]] = {column: {} for column in _TABLE_OF}
    columns: dict[str, list[Ints]] = {name: [np.zeros(0, dtype)] for name, dtype in COLUMN_DTYPES.items() if name != "seq"}
    for part in parts:
        for name, pieces in columns.items():
            values = getattr(part, name)
            if name in _TABLE_OF:
                values = _renumber_joining(values, getattr(part.tables, _TABLE_OF[name]), merged[name])
            pieces.append(values)
    tables = Tables(**{table: tuple(merged[column]) for column, table in _TABLE_OF.items()})
    return make_events({name: np.concatenate(pieces) for name, pieces in columns.items()}, tables)


def _renumber_joining(numbers: Ints, names: Sequence[Any], merged: dict[Any, int]) -> Ints:
    """Turns the numbers of one table into those of the merged one."""
    to_merged = np.array([*(merged.setdefault(name, len(merged)) for name in names), NONE], dtype=np.int32)
    return to_merged[numbers]  # -1 picks the last, which is NONE


WORDS: Final = RECORD.itemsize // 4  # of 4 bytes, in a record
# Where a record has its columns, counted in these words; of op and status, which share one, status is the upper half.
COLUMNS: Final = {name: offset // 4 for name, (_, offset, *_) in (RECORD.fields or {}).items() if name != "status"}


class Neighbour:
    """Another rank's part.

    Args:
        directory: where the ranks write their parts.
        rank: whose part.

    Attributes:
        view: its records as words of 4 bytes; what they mean stands in ``COLUMNS``. Zero from where the rank has not written yet.
        elsewhere: whether the rank runs on another machine, so that its records cannot be read while it writes them.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self.view: memoryview = memoryview(b"").cast("i")
        self.elsewhere = False
        self._events_path = directory / f"rank-{rank}.events"
        self._names_path = self._events_path.with_suffix(".names")
        self._file = self._names = -1
        self._rest = b""  # of the names: a line whose end is not there yet
        self._meta: dict[str, Any] = {}
        self._tables: dict[str, dict[int, dict[str, Any]]] = {}

    def __del__(self) -> None:
        """Lets go of the files."""
        for file in (self._file, self._names):
            if file >= 0:
                os.close(file)

    def open(self) -> bool:
        """Begins to read; False where there is nothing to be read, or not yet."""
        if self._file >= 0:
            return True
        if self.elsewhere:
            return False
        try:
            file = os.open(self._events_path, os.O_RDONLY)
            self._names = os.open(self._names_path, os.O_RDONLY)
        except OSError:
            return False
        self._read_names()
        if self._is_writing():
            self._file = file
            self.extend()
            return True
        self.elsewhere = self._meta.get("host", socket.gethostname()) != socket.gethostname()
        os.close(file)
        os.close(self._names)
        self._names, self._rest, self._meta, self._tables = -1, b"", {}, {}
        return False

    def _is_writing(self) -> bool:
        """Whether the process that began this part lives, here: what an earlier run left is not to be taken for the present."""
        pid, start_ns = self._meta.get("pid"), self._meta.get("start_ns")
        if not isinstance(start_ns, int) or self._meta.get("host") != socket.gethostname():
            return False
        try:
            born_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        except (OSError, ValueError, IndexError, AttributeError):  # the process is gone; or this is not Linux
            return False
        return born_ticks * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns <= start_ns

    def starved_s(self) -> float:
        """Returns how long the rank's first thread has waited for a processor in its life, in seconds; 0 where the system does not tell.

        Each wait counts when it is over: one that still lasts is not in it.
        """
        try:
            _, waited_ns, _ = Path(f"/proc/{self._meta.get('pid')}/schedstat").read_text().split()
            return int(waited_ns) / 1e9
        except (OSError, ValueError):
            return 0.0

    def extend(self) -> bool:
        """Sees more of the file, where it has grown; False where it has not."""
        length = os.fstat(self._file).st_size // RECORD.itemsize * RECORD.itemsize
        if length <= self.view.nbytes:
            return False
        self.view = memoryview(mmap.mmap(self._file, length, access=mmap.ACCESS_READ)).cast("i")
        return True

    def entry(self, table: str, number: int) -> dict[str, Any]:
        """Returns what the rank wrote down of one of its numbers; empty where it wrote nothing."""
        entries = self._tables.setdefault(table, {})
        if number not in entries and self._names >= 0:
            self._read_names()
        return entries.get(number, {})

    def payload(self, number: int) -> Payload | None:
        """Returns one of the rank's payloads, None where it has no name."""
        try:
            return read_payload(self.entry("payload", number))
        except ValueError:
            return None

    def _read_names(self) -> None:
        pieces = [self._rest]
        while piece := os.read(self._names, 1 << 16):
            pieces.append(piece)
        *lines, self._rest = b"".join(pieces).split(b"\n")
        for line in lines:
            entry = json.loads(line)
            if entry["table"] == "meta":
                self._meta[entry["key"]] = entry["value"]
            else:
                self._tables.setdefault(entry["table"], {})[entry["id"]] = entry


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    return hasattr(_shell(), "kernel")


def name_cells(filenames: Iterable[str]) -> dict[str, str]:
    """Returns what the notebook calls those of some file names that are its cells: ``{"/tmp/...": "Cell In[5]"}``."""
    compiler: Any = getattr(_shell(), "compile", None)
    if not hasattr(compiler, "format_code_name"):
        return {}
    found = {filename: compiler.format_code_name(filename) for filename in filenames}
    return {filename: " ".join(label) for filename, label in found.items() if label is not None}


def rename_places(text: str, names: Mapping[str, str]) -> str:
    """Returns a text in which the lines of cells are called by the names that ``name_cells`` gave.

    Args:
        text: has places in it, as "/tmp/ipykernel_7/123.py:4", or "123.py:4".
        names: of cells, by file name.

    Example:
        >>> rename_places("got 5 here and 4 in rank 0's send at 123.py:4", {"/tmp/ipykernel_7/123.py": "Cell In[5]"})
        "got 5 here and 4 in rank 0's send at Cell In[5]:4"
    """
    for filename, name in names.items():
        text = text.replace(f"{filename}:", f"{name}:").replace(f"{os.path.basename(filename)}:", f"{name}:")
    return text


def _shell() -> Any:
    """Returns IPython's shell, None outside of it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


_FIRST_READ: Final = 64  # records that are read at first; more follow where they are full
_LONGEST_READ: Final = 1 << 14
_GAP: Final = 64  # records that are read along rather than skipped


class Batch(NamedTuple):
    """Records of one rank, ascending: new ones, and those of earlier batches that have changed."""

    slots: Ints
    records: Ints


class PartReader:
    """Reads the part of one rank while it grows. The files are read, never mapped: what others cut short does no harm here.

    ::

        slots   [done][done][posted, awaited][done][posted][ 0 ][ 0 ]
                             ^ read again           ^        ^ the next batch begins here

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

    def is_live(self) -> bool:
        """Tells whether the process that began this part lives, on this machine (Linux); what an earlier run left is not of the present."""
        if "pid" not in self.meta:
            self.read_names()
        if self.meta.get("host") != socket.gethostname():
            return False
        try:
            words = Path(f"/proc/{self.meta['pid']}/stat").read_text().rpartition(")")[2].split()
            asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()  # the machine, since it was started
            born_ns = int(words[19]) * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns
        except (OSError, KeyError):
            return False
        return born_ns <= int(self.meta.get("start_ns", NONE))

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
        pieces, first, width = [self._held[:0]], self._next, _FIRST_READ
        while True:
            window = _read(file, self._next, width)
            written = np.flatnonzero(window["status"])
            if not len(written):
                break
            pieces.append(window[: int(written[-1]) + 1])
            self._next += int(written[-1]) + 1
            if len(window) < width:
                break
            width = min(4 * width, _LONGEST_READ)
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
