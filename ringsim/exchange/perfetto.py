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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ringsim.exchange.lanes import unfold
from ringsim.exchange.slices import BLOCKED, COLUMNS, RUN, Lane, Row, Slice, describe_row, list_rows, make_lanes, make_name, pack_run
from ringsim.exchange.wire import bytes_field, fixed_field, number_field, text_field
from ringsim.traces.events import KIND_NAMES, MARK, NONE, OPS, Tables
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["to_perfetto"]

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
        >>> from ringsim.exchange.perfetto_reading import read_perfetto
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
