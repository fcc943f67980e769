"""Reading what Perfetto reads: the files that ringsim wrote as they were, those of others as spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ringsim.exchange import perfetto as schema
from ringsim.exchange.boxes import Boxes
from ringsim.exchange.foreign import parse_json, read_bytes, reading
from ringsim.exchange.slices import COLUMNS, RUN, unpack_run
from ringsim.exchange.wire import as_int64, fields

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["read_perfetto"]

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
        if number != schema.PACKET or isinstance(packet, int):
            continue
        event, time_ns = _read_packet(packet, tracks, sequences)
        if event is None:
            continue
        if event.kind == schema.INSTANT and RUN in event.notes:
            run = parse_json(str(event.notes[RUN]).encode())
        elif event.kind in (schema.BEGIN, schema.INSTANT) and COLUMNS in event.notes:
            rows.append([int(value) for value in event.notes[COLUMNS].split()])
        elif event.kind == schema.BEGIN:
            boxes.begin(event.track, event.name, time_ns)
        elif event.kind == schema.END:
            boxes.end(event.track, time_ns)
        elif event.kind == schema.INSTANT:
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
    sequence = sequences.setdefault(parts.get(schema.SEQUENCE, 0), _Sequence())
    if parts.get(schema.FLAGS, 0) & schema.CLEARED:
        sequence.names.clear()
    if schema.INTERNED in parts:
        for table, entry in fields(parts[schema.INTERNED]):
            if table in (schema.NAMES, schema.KEYS) and not isinstance(entry, int):
                interned: dict[int, Any] = dict(fields(entry))
                sequence.names[table, interned.get(_IID, 0)] = _text(interned.get(_WORD, b""))
    if _DEFAULTS in parts:
        defaults: dict[int, Any] = dict(fields(parts[_DEFAULTS]))
        if schema.EVENT in defaults:
            sequence.track = dict(fields(defaults[schema.EVENT])).get(schema.TRACK_UUID, 0)  # type: ignore[assignment]
    if schema.TRACK in parts:
        _read_track(parts[schema.TRACK], tracks)
    if schema.EVENT not in parts:
        return None, 0
    return _read_event(parts[schema.EVENT], sequence), parts.get(schema.TIMESTAMP, 0)


def _read_track(data: Any, tracks: dict[int, _Track]) -> None:
    parts: dict[int, Any] = dict(fields(data))
    track = tracks.setdefault(parts.get(schema.UUID, 0), _Track())
    track.parent = parts.get(schema.PARENT, 0)
    for kind in (schema.PROCESS, schema.THREAD):
        if kind in parts:
            track.pid = dict(fields(parts[kind])).get(schema.PID, 0)  # type: ignore[assignment]


def _read_event(data: Any, sequence: _Sequence) -> _Event:
    event = _Event(track=sequence.track)
    value: Any
    for number, value in fields(data):
        if number == schema.TYPE:
            event.kind = value
        elif number == schema.TRACK_UUID:
            event.track = value
        elif number == schema.NAME:
            event.name = _text(value)
        elif number == schema.NAME_ID:
            event.name = sequence.names.get((schema.NAMES, value), "")
        elif number == schema.ANNOTATION:
            key, told = _read_annotation(value, sequence)
            event.notes[key] = told
    return event


def _read_annotation(data: Any, sequence: _Sequence) -> tuple[str, Any]:
    key = ""
    told: Any = None
    value: Any
    for number, value in fields(data):
        if number == schema.KEY:
            key = _text(value)
        elif number == schema.KEY_ID:
            key = sequence.names.get((schema.KEYS, value), "")
        elif number == schema.INT:
            told = as_int64(value)
        elif number == schema.STRING:
            told = _text(value)
    return key, told


def _text(value: Any) -> str:
    if isinstance(value, int):  # of which bytes() would make so many zeros
        raise ValueError("a name is a number")
    return bytes(value).decode("utf-8")
