"""Traces for Perfetto (ui.perfetto.dev and its trace processor): TrackEvent packets, with flows.

::

    process "rank 0"            packet: track_descriptor, one a process and one a lane
      lane  "spans"             packet: slice begin, slice end
      lane  "operations"        begin of a send: flow_ids; end of its recv: terminating_flow_ids

The numbers of the fields are those of the published schema. Each slice carries what is known of it as debug annotations, and all its
columns as one more, so that a file that ringsim wrote is read back as the very trace.

Source:
    protos/perfetto/trace of https://github.com/google/perfetto (trace_packet, track_descriptor, track_event, debug_annotation,
    interned_data), and "Writing TrackEvent Protos Synthetically", https://perfetto.dev/docs/reference/synthetic-track-event

Reading what Perfetto reads: the files that ringsim wrote as they were, those of others as spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ringsim.exchange.reading import parse_json, read_bytes, reading
from ringsim.exchange.slices import (
    BLOCKED,
    COLUMNS,
    RUN,
    Boxes,
    Lane,
    Row,
    Slice,
    describe_row,
    list_rows,
    make_lanes,
    make_name,
    pack_run,
    unfold,
    unpack_run,
)
from ringsim.exchange.wire import as_int64, bytes_field, fields, fixed_field, number_field, text_field
from ringsim.traces.events import KIND_NAMES, MARK, NONE, OPS, Tables
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["read_perfetto", "to_perfetto"]

# Trace: packet 1. TracePacket: timestamp 8, sequence 10, event 11, interned data 12, sequence flags 13, track descriptor 60.
PACKET, TIMESTAMP, SEQUENCE, EVENT, INTERNED, FLAGS, TRACK = 1, 8, 10, 11, 12, 13, 60
CLEARED, NEEDS = 1, 2  # the flags: names interned before do not count; names interned before are needed
# TrackDescriptor: uuid 1, name 2, process 3 (pid 1, process_name 6), thread 4 (pid 1), parent_uuid 5.
UUID, TRACK_NAME, PROCESS, THREAD, PARENT = 1, 2, 3, 4, 5
PID, PROCESS_NAME = 1, 6
# TrackEvent: category 3 and 22, annotation 4, type 9, name 10 (interned) and 23, track 11, flows 47, flows that end 48.
CATEGORY_ID, ANNOTATION, TYPE, NAME_ID, TRACK_UUID, CATEGORY, NAME, FLOW, FLOW_END = 3, 4, 9, 10, 11, 22, 23, 47, 48
BEGIN, END, INSTANT = 1, 2, 3
# DebugAnnotation: name 1 (interned) and 10, int 4, string 6. InternedData: categories 1, names 2, names of annotations 3.
KEY_ID, INT, STRING, KEY = 1, 4, 6, 10
CATEGORIES, NAMES, KEYS = 1, 2, 3

_SEQUENCE: Final = number_field(SEQUENCE, 1)
_RUN_TRACK: Final = 1


def to_perfetto(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes a trace as Perfetto reads it: drop the file on ui.perfetto.dev, which opens it in the browser and sends it nowhere.

    Ranks are processes; spans and operations stand on lanes below them, and an arrow leads from each send to its recv.
    ``ringsim.exchange.read_perfetto`` gives back the same trace, without results and output.

    Args:
        trace: any trace.
        path: where to, usually ``*.pftrace``; an existing file is replaced.

    Raises:
        TraceFileError: the file cannot be written, or the metadata is more than JSON can say.

    Example:
        >>> import tempfile
        >>> from ringsim.exchange.perfetto import read_perfetto
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5]}), {"world_size": 1})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_perfetto(f"{directory}/run.pftrace")
        ...     read_perfetto(f"{directory}/run.pftrace") == trace
        True

    Source:
        The schema of Perfetto, see the module.
    """
    run = pack_run(trace)
    write_whole(path, lambda file: file.writelines(_packets(trace, run)))


class _Names:
    """Names that are written once each, and numbered from 1."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._new: list[bytes] = []
        self._annotations: dict[tuple[str, str | int], bytes] = {}

    def number(self, table: int, name: str) -> int:
        known = self._numbers.get((table, name))
        if known is None:
            known = self._numbers[table, name] = len(self._numbers) + 1
            self._new.append(bytes_field(table, number_field(1, known) + text_field(2, name)))
        return known

    def annotation(self, key: str, value: str | int) -> bytes:
        """Returns the field that says one thing of an event; few things are said, and often."""
        known = self._annotations.get((key, value))
        if known is None:
            said = number_field(INT, value) if isinstance(value, int) else text_field(STRING, value)
            known = self._annotations[key, value] = bytes_field(ANNOTATION, number_field(KEY_ID, self.number(KEYS, key)) + said)
        return known

    def take_new(self) -> bytes:
        """Returns the field that makes the new names known; nothing where there are none."""
        if not self._new:
            return b""
        written = bytes_field(INTERNED, b"".join(self._new))
        self._new.clear()
        return written


def _packets(trace: Trace, run: str) -> Iterator[bytes]:
    """Yields the packets of a trace."""
    rows, tables, names = list_rows(trace.events), trace.events.tables, _Names()
    made = f"{RUN}: {trace.metadata.get('source', 'of unknown source')}"  # measured, simulated: whoever looks at it should see
    meta = bytes_field(ANNOTATION, text_field(KEY, RUN) + text_field(STRING, run))
    yield _packet(number_field(FLAGS, CLEARED) + bytes_field(TRACK, number_field(UUID, _RUN_TRACK) + text_field(TRACK_NAME, made)))
    yield _event(0, INSTANT, _RUN_TRACK, meta + text_field(NAME, RUN) + text_field(CATEGORY, RUN))
    last = -1
    for lane in make_lanes(trace):
        process = lane.rank + 1 << 32
        if lane.rank != last:
            told = number_field(PID, lane.rank + 1) + text_field(PROCESS_NAME, f"rank {lane.rank}")  # pid 0 means the idle task
            yield _packet(bytes_field(TRACK, number_field(UUID, process) + bytes_field(PROCESS, told)))
            last = lane.rank
        track = process + lane.number
        yield _packet(bytes_field(TRACK, number_field(UUID, track) + number_field(PARENT, process) + text_field(TRACK_NAME, lane.name)))
        yield from _lane(lane, track, rows, tables, names)


def _lane(lane: Lane, track: int, rows: list[Row], tables: Tables, names: _Names) -> Iterator[bytes]:
    """Yields the begins and ends of a lane's slices, and of the waits within them."""
    parts: list[tuple[int, float, Slice | None]] = []  # a wait stands for itself: None
    for one in lane.slices:
        parts.append((one.start_ns, one.end_ns, one))
        wait_ns = rows[one.index].wait_ns
        if one.end_ns != math.inf and wait_ns != NONE and one.start_ns <= wait_ns < one.end_ns:
            parts.append((wait_ns, one.end_ns, None))
    for place, begins in unfold([start for start, _, _ in parts], [end for _, end, _ in parts]):
        start, end, event = parts[place]
        if not begins:
            flow = fixed_field(FLOW_END, event.flow_in) if event is not None and event.flow_in else b""
            if event is None or OPS[rows[event.index].op][1] != MARK:
                yield _event(int(end), END, track, flow)
        elif event is None:
            named = number_field(NAME_ID, names.number(NAMES, BLOCKED)) + number_field(CATEGORY_ID, names.number(CATEGORIES, BLOCKED))
            yield _event(start, BEGIN, track, named, names.take_new())
        else:
            row = rows[event.index]
            kind = OPS[row.op][1]
            named = number_field(NAME_ID, names.number(NAMES, make_name(row, tables)))
            named += number_field(CATEGORY_ID, names.number(CATEGORIES, KIND_NAMES[kind]))
            flow = fixed_field(FLOW, event.flow_out) if event.flow_out else b""
            more = named + flow + _annotations(row, tables, names)
            yield _event(start, INSTANT if kind == MARK else BEGIN, track, more, names.take_new())


def _annotations(row: Row, tables: Tables, names: _Names) -> bytes:
    told = b"".join(names.annotation(key, value) for key, value in describe_row(row, tables).items())
    columns = number_field(KEY_ID, names.number(KEYS, COLUMNS)) + text_field(STRING, " ".join(map(str, row)))
    return told + bytes_field(ANNOTATION, columns)


def _event(time_ns: int, kind: int, track: int, more: bytes, interned: bytes = b"") -> bytes:
    event = number_field(TYPE, kind) + number_field(TRACK_UUID, track) + more
    return _packet(number_field(TIMESTAMP, time_ns) + number_field(FLAGS, NEEDS) + interned + bytes_field(EVENT, event))


def _packet(content: bytes) -> bytes:
    return bytes_field(PACKET, _SEQUENCE + content)


_DEFAULTS: Final = 59  # TracePacket.trace_packet_defaults, which holds track_event_defaults as 11
_IID, _WORD = 1, 2  # of what is interned


@dataclass
class _Track:
    parent: int = 0
    pid: int | None = None


@dataclass
class _Sequence:
    """What the packets of one writer have said until now."""

    names: dict[tuple[int, int], str] = field(default_factory=dict)
    track: int = 0


@dataclass
class _Event:
    kind: int = 0
    track: int = 0
    name: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def read_perfetto(path: str | PathLike[str]) -> Trace:
    """Reads a file of Perfetto's TrackEvent packets.

    What ``Trace.to_perfetto`` wrote comes back as that trace. Of another program's file, each process becomes a rank, each slice a span
    and each instant a mark: such a file says of no slice that it is a message.

    Args:
        path: the file; it may be packed by gzip.

    Returns:
        The trace.

    Raises:
        TraceFileError: there is no such file, or it is something else.

    Source:
        The schema of Perfetto, see ``ringsim.exchange.perfetto``.
    """
    data = read_bytes(path)
    with reading(path, "a Perfetto trace"):
        return _read(data)


def _read(data: bytes) -> Trace:
    run: Any = None
    rows: list[Any] = []
    tracks: dict[int, _Track] = {}
    sequences: dict[int, _Sequence] = {}
    boxes = Boxes("Perfetto")
    for number, packet in fields(data):
        if number != PACKET or isinstance(packet, int):
            continue
        event, time_ns = _read_packet(packet, tracks, sequences)
        if event is None:
            continue
        if event.kind == INSTANT and RUN in event.notes:
            run = parse_json(str(event.notes[RUN]).encode())
        elif event.kind in (BEGIN, INSTANT) and COLUMNS in event.notes:
            rows.append([int(value) for value in event.notes[COLUMNS].split()])
        elif event.kind == BEGIN:
            boxes.begin(event.track, event.name, time_ns)
        elif event.kind == END:
            boxes.end(event.track, time_ns)
        elif event.kind == INSTANT:
            boxes.mark(event.track, event.name, time_ns)
    if run is not None:
        return unpack_run(run, rows)
    return boxes.trace({lane: _pid(lane, tracks) for lane in boxes.lanes})


def _pid(track: Any, tracks: dict[int, _Track]) -> int:
    """Returns the process that a track belongs to; 0 where none is named."""
    for _ in range(100):  # a chain of parents that is made to go in a circle ends here
        known = tracks.get(track)
        if known is None:
            break
        if known.pid is not None:
            return known.pid
        track = known.parent
    return 0


def _read_packet(packet: Any, tracks: dict[int, _Track], sequences: dict[int, _Sequence]) -> tuple[_Event | None, int]:
    parts: dict[int, Any] = dict(fields(packet))  # of a field that comes twice the last counts
    sequence = sequences.setdefault(parts.get(SEQUENCE, 0), _Sequence())
    if parts.get(FLAGS, 0) & CLEARED:
        sequence.names.clear()
    if INTERNED in parts:
        for table, entry in fields(parts[INTERNED]):
            if table in (NAMES, KEYS) and not isinstance(entry, int):
                interned: dict[int, Any] = dict(fields(entry))
                sequence.names[table, interned.get(_IID, 0)] = _text(interned.get(_WORD, b""))
    if _DEFAULTS in parts:
        defaults: dict[int, Any] = dict(fields(parts[_DEFAULTS]))
        if EVENT in defaults:
            sequence.track = dict(fields(defaults[EVENT])).get(TRACK_UUID, 0)  # type: ignore[assignment]
    if TRACK in parts:
        _read_track(parts[TRACK], tracks)
    if EVENT not in parts:
        return None, 0
    return _read_event(parts[EVENT], sequence), parts.get(TIMESTAMP, 0)


def _read_track(data: Any, tracks: dict[int, _Track]) -> None:
    parts: dict[int, Any] = dict(fields(data))
    track = tracks.setdefault(parts.get(UUID, 0), _Track())
    track.parent = parts.get(PARENT, 0)
    for kind in (PROCESS, THREAD):
        if kind in parts:
            track.pid = dict(fields(parts[kind])).get(PID, 0)  # type: ignore[assignment]


def _read_event(data: Any, sequence: _Sequence) -> _Event:
    event = _Event(track=sequence.track)
    value: Any
    for number, value in fields(data):
        if number == TYPE:
            event.kind = value
        elif number == TRACK_UUID:
            event.track = value
        elif number == NAME:
            event.name = _text(value)
        elif number == NAME_ID:
            event.name = sequence.names.get((NAMES, value), "")
        elif number == ANNOTATION:
            key, told = _read_annotation(value, sequence)
            event.notes[key] = told
    return event


def _read_annotation(data: Any, sequence: _Sequence) -> tuple[str, Any]:
    key = ""
    told: Any = None
    value: Any
    for number, value in fields(data):
        if number == KEY:
            key = _text(value)
        elif number == KEY_ID:
            key = sequence.names.get((KEYS, value), "")
        elif number == INT:
            told = as_int64(value)
        elif number == STRING:
            told = _text(value)
    return key, told


def _text(value: Any) -> str:
    if isinstance(value, int):  # of which bytes() would make so many zeros
        raise ValueError("a name is a number")
    return bytes(value).decode("utf-8")
