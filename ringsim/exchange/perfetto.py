"""Writes and reads Perfetto traces (ui.perfetto.dev and its trace processor).

A file consists of TrackEvent packets, connected by flows::

    process "rank 0"            packet: track_descriptor, one per process and one per lane
      lane  "spans"             packet: slice begin, slice end
      lane  "operations"        begin of a send: flow_ids; end of its recv: terminating_flow_ids

Each slice carries debug annotations with the facts about its event. One more annotation holds all
of the event's columns, from which ringsim restores the original trace. Files from other programs
are read as spans.

Source:
    protos/perfetto/trace in https://github.com/google/perfetto, and "Writing TrackEvent Protos
    Synthetically", https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringsim.exchange.reading import importing, read_bytes
from ringsim.exchange.schemas import perfetto_trace, plain_text
from ringsim.exchange.slices import (
    BLOCKED,
    COLUMNS,
    RUN,
    Boxes,
    Lane,
    Slice,
    describe_row,
    make_lanes,
    make_name,
    pack_run,
    unfold,
    unpack_run,
)
from ringsim.traces.documents import parse_json, write_whole
from ringsim.traces.events import KIND_NAMES, MARK, NONE, OP_KINDS

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

BEGIN, END, INSTANT = 1, 2, 3  # TrackEvent.Type
# TracePacket.SequenceFlags: the packet discards earlier interned names, or needs them
CLEARED, NEEDED = 1, 2
_SEQUENCE = 1
_RUN_TRACK = 1
_MOST_PARENTS = 100  # a chain of parents may contain a cycle, so it needs a limit


def to_perfetto(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes a trace in Perfetto's format.

    Drop the file onto ui.perfetto.dev, which opens it in the browser without uploading it. Each
    rank becomes a process. Its spans and operations are drawn on lanes below the process, and an
    arrow connects each send to its recv. ``ringsim.exchange.read_perfetto`` reads the trace back,
    without results and output.

    Args:
        trace: any trace.
        path: the file to write, usually ``*.pftrace``; an existing file is replaced.

    Raises:
        TraceFileError: the file cannot be written, or ringsim could not read it back.

    Example:
        >>> import tempfile
        >>> from ringsim.exchange.perfetto import read_perfetto
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(
        ...     make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5]}),
        ...     {"world_size": 1},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_perfetto(f"{directory}/run.pftrace")
        ...     read_perfetto(f"{directory}/run.pftrace") == trace
        True

    Source:
        The Perfetto schema; see the module docstring.
    """
    run = pack_run(trace, path)
    write_whole(path, lambda file: file.writelines(_Writer(trace).parts(run)))


class _Writer:
    """Creates a trace's packets.

    Each name is written once, and later packets refer to it by number.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, self._tables = trace, trace.events.tables
        self._numbers: dict[tuple[str, str], int] = {}
        self._new: list[tuple[str, int, str]] = []
        self._file = perfetto_trace()()

    def parts(self, run: str) -> Iterator[bytes]:
        """Yields the file in parts, one per lane.

        ``run`` holds everything about the run except its events.
        """
        # so that a viewer shows whether the run was measured or simulated
        made = plain_text(f"{RUN}: {self._trace.metadata.get('source', 'unknown source')}")
        self._packet(sequence_flags=CLEARED, track_descriptor={"uuid": _RUN_TRACK, "name": made})
        about = {"name": RUN, "string_value": plain_text(run)}
        self._event(0, INSTANT, _RUN_TRACK, name=RUN, categories=[RUN], debug_annotations=[about])
        last = NONE
        for lane in make_lanes(self._trace):
            process = lane.rank + 1 << 32
            if lane.rank != last:
                # pid 0 means the idle task
                told = {"pid": lane.rank + 1, "process_name": f"rank {lane.rank}"}
                self._packet(track_descriptor={"uuid": process, "process": told})
                last = lane.rank
            track = process + lane.number
            self._packet(
                track_descriptor={"uuid": track, "parent_uuid": process, "name": lane.name}
            )
            self._lane(lane, track)
            yield self._take()
        yield self._take()  # for a trace without events

    def _take(self) -> bytes:
        """Returns the packets added since the last call; together, all parts form the file."""
        written: bytes = self._file.SerializeToString()
        self._file.Clear()
        return written

    def _lane(self, lane: Lane, track: int) -> None:
        """Adds the begin and end events for a lane's slices and for the waits inside them."""
        parts: list[tuple[int, float, Slice | None]] = []  # None: a wait
        for one in lane.slices:
            parts.append((one.start_ns, one.end_ns, one))
            if one.blocked_ns is not None:
                parts.append((one.blocked_ns, one.end_ns, None))
        for place, begins in unfold([start for start, _, _ in parts], [end for _, end, _ in parts]):
            start, end, slice_ = parts[place]
            if slice_ is None and begins:
                self._event(start, BEGIN, track, **self._named(BLOCKED, BLOCKED))
            elif slice_ is None:
                self._event(int(end), END, track)
            elif begins:
                self._begin(slice_, track)
            elif OP_KINDS[slice_.row.op] != MARK:
                flows = [slice_.flow_in] if slice_.flow_in else ()
                self._event(int(end), END, track, terminating_flow_ids=flows)

    def _begin(self, one: Slice, track: int) -> None:
        kind = OP_KINDS[one.row.op]
        named = self._named(make_name(one.row, self._tables), KIND_NAMES[kind])
        facts = describe_row(one.row, self._tables) | {COLUMNS: " ".join(map(str, one.row))}
        told = [self._annotation(key, value) for key, value in facts.items()]
        flows = [one.flow_out] if one.flow_out else ()
        what = INSTANT if kind == MARK else BEGIN
        self._event(one.start_ns, what, track, **named, flow_ids=flows, debug_annotations=told)

    def _named(self, name: str, category: str) -> dict[str, Any]:
        return {
            "name_iid": self._number("event_names", name),
            "category_iids": [self._number("event_categories", category)],
        }

    def _number(self, table: str, name: str) -> int:
        known = self._numbers.get((table, name))
        if known is None:
            known = self._numbers[table, name] = len(self._numbers) + 1
            self._new.append((table, known, name))
        return known

    def _annotation(self, key: str, value: str | int) -> dict[str, Any]:
        """Returns the annotation for a single fact about an event."""
        told = (
            {"int_value": value} if isinstance(value, int) else {"string_value": plain_text(value)}
        )
        return {"name_iid": self._number("debug_annotation_names", key), **told}

    def _event(self, time_ns: int, kind: int, track: int, **more: Any) -> None:
        self._packet(
            timestamp=time_ns,
            sequence_flags=NEEDED,
            track_event={"type": kind, "track_uuid": track, **more},
        )

    def _packet(self, **content: Any) -> None:
        packet = self._file.packet.add(trusted_packet_sequence_id=_SEQUENCE, **content)
        for table, number, name in self._new:
            getattr(packet.interned_data, table).add(iid=number, name=plain_text(name))
        self._new.clear()


def read_perfetto(path: str | PathLike[str]) -> Trace:
    """Reads a Perfetto file that consists of TrackEvent packets.

    A file written by ``Trace.to_perfetto`` yields the original trace. In a file from any other
    program, each process becomes a rank, each slice becomes a span, and each instant becomes a
    mark, because such a file does not show which slices are messages.

    Args:
        path: the file, which may be gzipped.

    Returns:
        The trace.

    Raises:
        TraceFileError: the file is missing or is not a Perfetto trace.

    Source:
        The Perfetto schema; see ``ringsim.exchange.perfetto``.
    """
    from google.protobuf.message import (
        DecodeError,
    )  # on use: reading other formats needs no protobuf

    data = read_bytes(path)
    with importing(path, "a Perfetto trace"):
        try:
            return _read(perfetto_trace().FromString(data))
        except DecodeError as error:  # not a subclass of ValueError
            raise ValueError(str(error)) from error


@dataclass
class _Sequence:
    """The state that a writer's packets have set so far.

    ``names`` holds the interned names by table and number, and ``track`` the default track.
    """

    names: dict[tuple[str, int], str] = field(default_factory=dict)
    track: int = 0

    def read(self, packet: Any) -> None:
        """Updates the state with a packet."""
        if packet.sequence_flags & CLEARED:
            self.names.clear()
        for table in ("event_names", "debug_annotation_names"):
            for interned in getattr(packet.interned_data, table):
                self.names[table, interned.iid] = interned.name
        if packet.trace_packet_defaults.HasField("track_event_defaults"):
            self.track = packet.trace_packet_defaults.track_event_defaults.track_uuid

    def name(self, one: Any, table: str = "event_names") -> str:
        """Returns the name of an event or an annotation."""
        return one.name or self.names.get((table, one.name_iid), "")

    def notes(self, event: Any) -> dict[str, str]:
        """Returns an event's string annotations by name."""
        return {
            self.name(note, "debug_annotation_names"): note.string_value
            for note in event.debug_annotations
            if note.HasField("string_value")
        }


def _read(file: Any) -> Trace:
    run: Any = None
    rows: list[list[int]] = []
    tracks: dict[int, Any] = {}
    sequences: dict[int, _Sequence] = {}
    boxes = Boxes("Perfetto")
    for packet in file.packet:
        sequence = sequences.setdefault(packet.trusted_packet_sequence_id, _Sequence())
        sequence.read(packet)
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if not packet.HasField("track_event"):
            continue
        event, notes = packet.track_event, sequence.notes(packet.track_event)
        track = event.track_uuid if event.HasField("track_uuid") else sequence.track
        if event.type == INSTANT and RUN in notes:
            run = parse_json(notes[RUN].encode())
        elif event.type in (BEGIN, INSTANT) and COLUMNS in notes:
            rows.append([int(value) for value in notes[COLUMNS].split()])
        elif event.type == BEGIN:
            boxes.begin(track, sequence.name(event), packet.timestamp)
        elif event.type == END:
            boxes.end(track, packet.timestamp)
        elif event.type == INSTANT:
            boxes.add(track, "mark", sequence.name(event), packet.timestamp)
    if run is not None:
        return unpack_run(run, rows)
    return boxes.trace({lane: _pid(lane, tracks) for lane in boxes.lanes})


def _pid(track: Any, tracks: dict[int, Any]) -> int:
    """Returns the ID of the process that owns a track, or 0 if the file names no process."""
    for _ in range(_MOST_PARENTS):
        known = tracks.get(track)
        if known is None:
            break
        if known.HasField("process") or known.HasField("thread"):
            pid: int = known.process.pid or known.thread.pid
            return pid
        track = known.parent_uuid
    return 0
