"""Trace files (``*.ringtrace``), written completely or not at all, and never trusted when read.

A trace file is a zip archive with two uncompressed members::

    meta.json       {"format": 1, "needs": "0.1.0", "events": 2, "tables": {...}, "metadata": {...}}
                    and, on request, "sources": {"train.py": "import torch..."}
    events.parquet  one row per event; the columns of ``Events``, with null for a missing wait_ns or
                    done_ns; times as each rank's own clock showed them

Any tool that supports zip and Parquet can read the file, and nothing in it is executable. ringsim
checks sizes, counts and checksums before it parses anything, and afterwards checks every number
that refers to a table.

The rows are stored in groups. Each group records the ranks and times that it covers, so that you
can read a part of a long run without the rest.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.provenance import __version__
from ringsim.traces.clocks import align, are_clocks, unalign
from ringsim.traces.documents import (
    DAMAGE,
    Forms,
    JsonObject,
    StrPath,
    are_all,
    check_metadata,
    open_file,
    parse_json,
    reading,
    saving,
    write_whole,
)
from ringsim.traces.events import (
    ANY_SOURCE,
    COLUMN_DTYPES,
    ERROR,
    IN_FLIGHT,
    NO_EVENTS,
    NONE,
    OPS,
    Events,
    Ints,
    Tables,
    concatenate,
    make_events,
    read_tables,
    readable,
    write_tables,
)
from ringsim.traces.filtering import choose, part_of_file
from ringsim.traces.parts import FILE_NAME, TABLE_OF, PartReader
from ringsim.traces.run_parts import read_run
from ringsim.traces.sources import check_sources
from ringsim.traces.value import Trace, part_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ringsim.traces.filtering import Numbers, Stretch

FORMAT = 1
GROUP_ROWS = 2**18  # rows per group: few enough to read one rank without many others
NEEDS = "0.1.0"  # the oldest ringsim that reads this format
META, EVENTS = "meta.json", "events.parquet"

MAX_FILE_BYTES = 2**31 - 1  # the limit for a zip archive without extensions
MAX_META_BYTES = 64 * 2**20
MAX_EVENTS = 100_000_000
# Parquet can repeat one number a million times in a few bytes, but a million events take 84 MB of
# memory. Files from real runs hold a fifth of an event per byte. A large file with twenty times as
# many was made to fill the reader's memory.
FREE_EVENTS = 10_000_000
MAX_EVENTS_PER_BYTE = 4
MAX_RANKS = 10**6
_MAX_DIRECTORY_BYTES = 4096  # the zip archive's directory has only two short entries

_NULLABLE = ("wait_ns", "done_ns")
_SPANNED = ("rank", "post_ns")  # each row group stores these columns' minimum and maximum
# these columns grow steadily and are stored as differences; the others repeat a few values
_TIMES = ("seq", "post_ns", "wait_ns", "done_ns")


def save(trace: Trace, path: StrPath, *, source: bool = False) -> None:
    """Saves a trace to a single file, completely or not at all.

    Saving the same trace again writes the same bytes. Results and output are not saved.

    Args:
        trace: the trace to save; its metadata must be JSON-serializable.
        path: the file to write; an existing file is replaced.
        source: whether to also save the source code.

    Raises:
        TraceFileError: the file cannot be written, or ringsim could not read it back.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES
        >>> trace = Trace(
        ...     make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5]}),
        ...     {"world_size": 1},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.save(f"{directory}/run.ringtrace")
        ...     load(f"{directory}/run.ringtrace") == trace
        True
    """
    with saving("a trace", path):
        check_run(trace.events, trace.metadata)
        shown = unalign(trace.events, trace.metadata.get("clocks", []))
        sources = check_sources(trace.sources) if source else {}
    save_pieces([shown], trace.metadata, path, sources)


def save_pieces(
    pieces: Iterable[Events],
    metadata: JsonObject,
    path: StrPath,
    sources: Mapping[str, str] | None = None,
) -> int:
    """Writes a run piece by piece, with only one piece in memory at a time.

    Returns the number of events.

    Args:
        pieces: the events, by rank and then in posting order, with times as each rank's own clock
            showed them. The tables of the last piece apply to all pieces.
        metadata: the run's metadata.
        path: see ``save``.
        sources: the source code to save, by the name of the file.

    Raises:
        TraceFileError: see ``save``.
    """
    more = {"sources": sources} if sources else {}
    with saving("a trace", path):
        return write_whole(path, lambda file: _write_run(file, pieces, metadata, more))


def _write_run(
    file: BinaryIO,
    pieces: Iterable[Events],
    metadata: JsonObject,
    more: JsonObject,
) -> int:
    with tempfile.TemporaryFile(dir=os.path.dirname(file.name)) as rows:
        count, tables = _write_events(rows, pieces, metadata)
        _check_density(count, length := rows.tell())
        meta = {
            "format": FORMAT,
            "needs": NEEDS,
            "events": count,
            "tables": write_tables(tables),
            "metadata": metadata,
            **more,
        }
        packed = json.dumps(meta, allow_nan=False, separators=(",", ":")).encode("ascii")
        if len(packed) > MAX_META_BYTES:
            raise ValueError(
                f"its names and metadata take up {len(packed)} bytes, more than {MAX_META_BYTES}"
            )
        if length + len(packed) > MAX_FILE_BYTES - 2 * _MAX_DIRECTORY_BYTES:
            raise TraceFileError(
                f"the trace does not fit into a trace file of at most {MAX_FILE_BYTES} bytes. "
                "Save only part of the run, such as trace.filter(ranks=0)."
            )
        rows.seek(0)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, data in ((META, io.BytesIO(packed)), (EVENTS, rows)):
                entry = zipfile.ZipInfo(name)  # always dated 1980, so that bytes are reproducible
                entry.external_attr = 0o644 << 16
                with archive.open(entry, "w") as member:
                    shutil.copyfileobj(data, member, 1 << 20)
    return count


def load(path: StrPath, *, ranks: Numbers | None = None, between_s: Stretch | None = None) -> Trace:
    """Reads a trace file or part of the run that it contains; see ``ringsim.load``."""
    name = os.fsdecode(path).rstrip(os.sep)
    name = name.removesuffix(".parts") if os.path.isdir(name) else name
    try:
        return _load(name, ranks, between_s)
    except TraceFileError as error:
        parts = name + ".parts"
        if not os.path.isdir(parts):
            raise
        trace = _recover(Path(parts), f"{error} Its parts in {parts} cannot be read either")
    trace.metadata["notes"].append(
        f"recovered from {Path(parts).name}, because the run ended before the trace "
        "file was written"
    )
    return trace.filter(ranks=ranks, between_s=between_s)


def merge(directories: Sequence[StrPath]) -> Trace:
    """Joins parts of the same run from several directories into one trace.

    Use this function if some hosts' parts did not reach rank 0 and you copied them yourself.

    Args:
        directories: the directories that contain the parts, with names such as
            ``run.ringtrace.parts``. If two of them contain the same part, the longer file is used.

    Returns:
        The trace.

    Raises:
        TraceFileError: a directory contains no parts, or the parts are from different runs.

    Example:
        >>> try:
        ...     merge(["no.parts"])
        ... except TraceFileError as error:
        ...     print(error)
        cannot merge no.parts: No such file or directory. Pass directories named *.ringtrace.parts.
    """
    runs: dict[object, Path] = {}
    with tempfile.TemporaryDirectory(prefix="ringsim-merge-") as together:
        for directory in map(Path, directories):
            try:
                files = [
                    file
                    for file in sorted(directory.iterdir())
                    if FILE_NAME.fullmatch(file.name) or file.name == "run.json"
                ]
                if not files:
                    raise FileNotFoundError(0, "it contains no parts")
            except OSError as error:
                raise TraceFileError(
                    f"cannot merge {directory}: {error.strerror}. "
                    "Pass directories named *.ringtrace.parts."
                ) from error
            for file in files:
                if match := FILE_NAME.fullmatch(file.name):
                    part = PartReader(directory, int(match[1]))
                    part.read_names()
                    runs.setdefault(part.meta.get("run_id"), directory)
                there = Path(together, file.name)
                if not there.exists() or there.stat().st_size < file.stat().st_size:
                    there.unlink(missing_ok=True)
                    there.symlink_to(file.resolve())
        if len(runs) > 1:
            said = " and ".join(
                f"{run_id!r} ({directory})" for run_id, directory in [*runs.items()][:2]
            )
            raise TraceFileError(
                f"cannot merge parts from different runs: {said}. Merge each run separately."
            )
        return _recover(Path(together), "cannot read the merged parts")


def _recover(parts: Path, otherwise: str) -> Trace:
    """Returns the trace recovered from parts; ``otherwise`` begins the error message on failure."""
    try:
        events, metadata = read_run(parts)
        if not metadata["ranks"]:
            raise ValueError("no rank left a record")
        check_run(events, metadata)
    except (*DAMAGE, TraceFileError) as other:
        raise TraceFileError(f"{otherwise}: {other}") from other
    return Trace(events, metadata)


def _load(path: str, ranks: Numbers | None, between_s: Stretch | None) -> Trace:
    """Reads the row groups that may contain the requested events.

    Checks the checksum of the whole file, or that of each page if only a part is read.
    """
    is_whole = ranks is None and between_s is None
    with _opened(path) as (file, archive):
        meta, metadata = _read_meta(archive, path)
        clocks = metadata.get("clocks", [])
        chosen, end_s = choose(metadata.get("world_size", MAX_RANKS), ranks, between_s)
        # the file stores times as each rank's own clock showed them
        last_ns = math.inf if clocks else end_s * 1e9
        rows = (
            io.BytesIO(archive.read(EVENTS))
            if is_whole
            else _Section(file, archive.getinfo(EVENTS))
        )
        with _open_events(rows, meta) as parquet:
            groups = list(map(parquet.metadata.row_group, range(parquet.num_row_groups)))
            wanted = [
                number
                for number, group in enumerate(groups)
                if is_whole or _may_hold(group, chosen, last_ns)
            ]
            starts = np.cumsum([0, *(group.num_rows for group in groups)])
            events = align(_read_rows(parquet, read_tables(meta.get("tables")), wanted), clocks)
        if "part" in metadata and not is_whole:  # the indices count all events in the file
            places = [np.arange(*starts[number : number + 2]) for number in wanted]
            read = np.isin(np.concatenate([starts[:0], *places]), metadata["part"]["apart"])
            metadata["part"]["apart"] = np.flatnonzero(read).tolist()
        check_run(events, metadata)
        trace = Trace(events, metadata, sources=check_sources(meta.get("sources", {})))
        all_read = len(wanted) == len(groups)
        return part_of_file(trace, chosen, ranks, between_s, all_read=all_read)


def read_by_rank(path: StrPath) -> Iterator[Trace]:
    """Yields a run in rank order, in pieces of a few whole ranks each.

    Each piece is a trace with the run's metadata; the last piece may be empty. At most one row
    group and the longest rank are in memory at a time.

    Args:
        path: the path of the file.

    Raises:
        TraceFileError: see ``load``.
    """
    name = os.fsdecode(path)
    with _opened(name) as (file, archive):
        meta, metadata = _read_meta(archive, name)
        with archive.open(EVENTS) as member:
            while member.read(1 << 20):  # raises if the checksum is wrong
                pass
        tables, part = read_tables(meta.get("tables")), part_of(metadata)
        apart = np.array(part["apart"], dtype=np.int64)
        with _open_events(_Section(file, archive.getinfo(EVENTS)), meta) as parquet:
            if len(apart) and not 0 <= apart.min() <= apart.max() < parquet.metadata.num_rows:
                raise ValueError("an event in part.apart does not exist")
            groups = (
                _read_rows(parquet, tables, [number]) for number in range(parquet.num_row_groups)
            )
            first, last_rank = 0, NONE
            for events in _whole_ranks(groups, tables):
                mine = apart[(apart >= first) & (apart < first + len(events))] - first
                first += len(events)
                about = metadata.copy()
                if "part" in metadata:
                    about["part"] = {**part, "apart": mine.tolist()}
                check_run(events, about)
                if len(events):
                    if events.rank[0] <= last_rank:
                        raise ValueError("the events are not ordered by rank and posting")
                    last_rank = int(events.rank[-1])
                piece = [Trace(align(events, metadata.get("clocks", [])), about)]
                del events
                yield piece.pop()


def _whole_ranks(groups: Iterable[Events], tables: Tables) -> Iterator[Events]:
    """Yields the events in row groups, regrouped so that no rank is split."""
    kept = [replace(NO_EVENTS, tables=tables)]
    for events in groups:
        # the last rank of this group may continue in the next
        begins = int(np.searchsorted(events.rank, events.rank[-1])) if len(events) else 0
        if begins or (len(kept) > 1 and len(events) and kept[-1].rank[-1] != events.rank[0]):
            whole = [concatenate([*kept, events.select(np.arange(begins))])]
            kept = kept[:1]
            yield whole.pop()  # keep no reference, so that the caller can free the memory
        kept.append(events.select(np.arange(begins, len(events))))
    yield concatenate(kept)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
    remedy = "Use another copy, or record the run again."
    with open_file(path, "the trace file") as file:
        with reading("a trace", path, remedy), _open_zip(file) as archive:
            yield file, archive


def _read_meta(archive: zipfile.ZipFile, path: str) -> tuple[JsonObject, JsonObject]:
    """Returns the content of ``meta.json`` and the trace's metadata within it."""
    meta = parse_json(archive.read(META))
    number = meta.get("format") if isinstance(meta, dict) else None
    if type(number) is not int or number < 1:
        raise ValueError(f"{META} does not specify a format")
    if number > FORMAT:
        needs = str(meta.get("needs"))[:40]
        raise TraceFileError(
            f"cannot read {path}: it has format {number}, and ringsim {__version__} reads formats "
            f"up to {FORMAT}. Install ringsim {needs!r} or later: pip install --upgrade ringsim."
        )
    metadata = readable(meta.get("metadata"))
    check_metadata(metadata, _FORMS)
    return meta, metadata


def _open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Checks the archive's sizes, and only then has zipfile parse the archive."""
    length = file.seek(0, os.SEEK_END)
    if length > MAX_FILE_BYTES:
        raise TraceFileError(
            f"cannot read {file.name}: it is {length} bytes long, but a trace file can have at "
            f"most {MAX_FILE_BYTES}. Save only part of the run."
        )
    file.seek(max(length - 22, 0))
    signature, _, _, here, entries, directory_bytes, _, comment = struct.unpack(
        "<4s4H2LH", file.read(22)
    )
    if (
        signature != b"PK\5\6"
        or (here, entries, comment) != (2, 2, 0)
        or directory_bytes > _MAX_DIRECTORY_BYTES
    ):
        raise ValueError("it is not a zip archive with two members, or it is truncated")
    archive = zipfile.ZipFile(file)
    members = {member.filename: member for member in archive.infolist()}
    if members.keys() != {META, EVENTS}:
        raise ValueError(f"its members are not {META} and {EVENTS}")
    for member in members.values():
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.file_size != member.compress_size
            or member.file_size > length
        ):
            raise ValueError(f"the stated size of {member.filename} does not match its content")
    if members[META].file_size > MAX_META_BYTES:
        raise ValueError(f"{META} is longer than {MAX_META_BYTES} bytes")
    return archive


class _Section(io.RawIOBase):
    """A member of the archive as a separate file that reads only the requested bytes.

    zipfile's own file would read the member from the start to seek backwards.
    """

    def __init__(self, file: BinaryIO, member: zipfile.ZipInfo) -> None:
        file.seek(member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))
        self._start = member.header_offset + 30 + name_bytes + extra_bytes
        self._file, self._length, self._at = file, member.file_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        )
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _write_events(
    sink: BinaryIO, pieces: Iterable[Events], metadata: JsonObject
) -> tuple[int, Tables]:
    """Writes ``events.parquet``; each row group is written as soon as it is full.

    Returns the number of events and the tables of the last piece.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, tables, count = _schema(), Tables(), 0
    waiting = _make_table(NO_EVENTS, schema)
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in COLUMN_DTYPES if name not in _TIMES],
        column_encoding=dict.fromkeys(_TIMES, "DELTA_BINARY_PACKED"),
        write_statistics=list(_SPANNED),
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for piece in pieces:
            check_run(piece, metadata)
            tables, count = piece.tables, count + len(piece)
            waiting = pa.concat_tables([waiting, _make_table(piece, schema)])
            full = len(waiting) // GROUP_ROWS * GROUP_ROWS
            if full:
                writer.write_table(waiting.slice(0, full), row_group_size=GROUP_ROWS)
                waiting = waiting.slice(full)
        if len(waiting) or not count:
            writer.write_table(waiting)
    return count, tables


def _make_table(events: Events, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    arrays = []
    for field in schema:
        values = np.ascontiguousarray(getattr(events, field.name))
        # null instead of -1 keeps the differences between the other values small
        bits = (
            pa.py_buffer(np.packbits(values != NONE, bitorder="little")) if field.nullable else None
        )
        arrays.append(pa.Array.from_buffers(field.type, len(values), [bits, pa.py_buffer(values)]))
    return pa.Table.from_arrays(arrays, schema=schema)


def _open_events(source: Any, meta: JsonObject) -> pq.ParquetFile:
    """Opens ``events.parquet`` and checks its columns and number of rows.

    Both this function and ``_read_rows`` read the file in the calling thread. Arrow's own threads
    may still hold a Python buffer when the interpreter ends, which aborts or hangs the process.

    Source:
        github.com/apache/arrow issues 34314, 49942 and 50482.
    """
    import pyarrow.parquet as pq

    count = meta.get("events")
    if type(count) is not int or not 0 <= count <= MAX_EVENTS:
        raise ValueError(f"{META} does not specify a number of events up to {MAX_EVENTS}")
    file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
    if file.metadata.num_rows != count:
        raise ValueError(f"{EVENTS} has {file.metadata.num_rows} rows, but {META} states {count}")
    _check_density(count, source.seek(0, os.SEEK_END))
    if not file.schema_arrow.equals(_schema()):
        raise ValueError(f"{EVENTS} does not have the columns of a trace")
    return file


def _read_rows(parquet: pq.ParquetFile, tables: Tables, groups: Sequence[int]) -> Events:
    """Reads the given row groups."""
    table = parquet.read_row_groups(groups, use_threads=False)
    columns = {name: _to_numpy(table.column(name), dtype) for name, dtype in COLUMN_DTYPES.items()}
    if any(len(column) != table.num_rows for column in columns.values()):
        raise ValueError(f"the columns of {EVENTS} have different lengths")
    return make_events(columns, tables)


def _may_hold(group: Any, chosen: Sequence[int], last_ns: float) -> bool:
    """Returns whether a row group may hold an event that these ranks posted by ``last_ns``.

    ``chosen`` must be sorted. A group without statistics may hold any event.
    """
    columns = (group.column(list(COLUMN_DTYPES).index(name)) for name in _SPANNED)
    ranks, times = (column.statistics for column in columns)
    if ranks is None or times is None or not (ranks.has_min_max and times.has_min_max):
        return True
    at = bisect.bisect_left(chosen, ranks.min)
    return at < len(chosen) and chosen[at] <= ranks.max and times.min <= last_ns


def _check_density(count: int, length: int) -> None:
    if count > max(FREE_EVENTS, MAX_EVENTS_PER_BYTE * length):
        raise ValueError(
            f"{EVENTS} has {count} events in {length} bytes, "
            f"more than {MAX_EVENTS_PER_BYTE} per byte"
        )


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in COLUMN_DTYPES.items()}
    return pa.schema(
        [pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in types.items()]
    )


def _to_numpy(column: pa.ChunkedArray, dtype: str) -> Ints:
    """Converts a column to a numpy array directly from its buffers.

    Pyarrow's own conversion would import pandas.
    """
    rows = []
    for chunk in column.chunks:
        bits, values = chunk.buffers()
        row = (
            np.frombuffer(values, dtype=dtype)[chunk.offset : chunk.offset + len(chunk)]
            if values
            else np.zeros(0, dtype=dtype)
        )
        if chunk.null_count:
            valid = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[
                chunk.offset : chunk.offset + len(chunk)
            ]
            row = np.where(valid.view(bool), row, np.array(NONE, dtype=dtype))
        rows.append(row)
    return np.concatenate(rows) if len(rows) != 1 else rows[0]


_FORMS: Forms = {
    "world_size": (
        lambda value: type(value) is int and 0 <= value <= MAX_RANKS,
        f"a number of ranks up to {MAX_RANKS}",
    ),
    "ranks": (
        lambda value: (
            are_all(value, dict) and all(type(one.get("rank", 0)) is int for one in value)
        ),
        "a list of objects, one per rank",
    ),
    "ring_groups": (
        lambda value: (
            are_all(value, list) and all(len(one) == 2 and isinstance(one[0], str) for one in value)
        ),
        "a list of pairs of name and members",
    ),
    "clocks": (are_clocks, "a valid list of clocks"),
    "part": (
        lambda value: (
            isinstance(value, dict)
            and are_all(value.get("of"), str)
            and are_all(value.get("apart"), int)
        ),
        'an object with the keys "of" and "apart"',
    ),
}


def check_run(events: Events, metadata: Any) -> None:
    """Raises ValueError unless the events and the metadata can belong to the same run.

    All code that uses a trace relies on this check.
    """
    check_metadata(metadata, _FORMS)
    size = metadata.get("world_size", MAX_RANKS)
    tables, largest = events.tables, np.iinfo(np.int64).max
    ranges = {
        **dict.fromkeys(("thread", "seq", "post_ns"), (0, largest)),
        **dict.fromkeys(("line", "stage", "microbatch", "wait_ns", "done_ns"), (NONE, largest)),
        **{name: (NONE, len(table) - 1) for name, table in zip(TABLE_OF, tables, strict=True)},
        "rank": (0, size - 1),
        "peer": (ANY_SOURCE, size - 1),
        "op": (0, len(OPS) - 1),
        "status": (IN_FLIGHT, ERROR),
    }
    apart = part_of(metadata)["apart"]
    if any(type(place) is not int or not 0 <= place < len(events) for place in apart):
        raise ValueError("an event in part.apart does not exist")
    if len(events) == 0:
        return
    for name, (low, high) in ranges.items():
        values = getattr(events, name)
        if values.min() < low or values.max() > high:
            raise ValueError(
                f"the column {name} contains a number outside the range {low} to {high}"
            )
    step, same_rank = np.diff(events.seq), np.diff(events.rank) == 0
    if (np.diff(events.rank) < 0).any() or (step[same_rank] <= 0).any():
        raise ValueError("the events are not ordered by rank and posting")
