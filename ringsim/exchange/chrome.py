"""Writes and reads Chrome's Trace Event Format (chrome://tracing, ui.perfetto.dev, Speedscope).

The format is JSON. A file has one event per line, and arrows are called flows::

    {"ph": "X", "pid": 0, "tid": 2, "ts": 4.5, "dur": 1.5, "name": "isend to 1", "cat": "send", "args": {...}}  a slice, times in us
    {"ph": "s", "pid": 0, "tid": 2, "ts": 4.5, "id": 1, "name": "message", "cat": "message"}                     a flow begins
    {"ph": "f", "bp": "e", "pid": 1, "tid": 2, "ts": 7.9, "id": 1, ...}                                          and ends

Source:
    "Trace Event Format",
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""  # noqa: E501

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringsim.exchange.reading import importing, read_bytes, to_ns
from ringsim.exchange.slices import (
    BLOCKED,
    COLUMNS,
    RUN,
    Boxes,
    Slice,
    describe_row,
    make_lanes,
    make_name,
    pack_run,
    unpack_run,
)
from ringsim.traces.documents import parse_json, write_whole
from ringsim.traces.events import KIND_NAMES, MARK, OP_KINDS, Tables

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace


def to_chrome(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes a trace in Chrome's format, which many tools can read.

    Each rank becomes a process. Its spans and operations are drawn on lanes below the process, and
    an arrow connects each send to its recv. ``ringsim.exchange.read_chrome`` reads the trace back,
    without results and output. A Perfetto file with the same data is half the size.

    Args:
        trace: any trace.
        path: the file to write, usually ``*.json``; an existing file is replaced.

    Raises:
        TraceFileError: the file cannot be written, or ringsim could not read it back.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(
        ...     make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5]}),
        ...     {"world_size": 1},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_chrome(f"{directory}/run.json")
        ...     read_chrome(f"{directory}/run.json") == trace
        True

    Source:
        The format's document; see the module docstring.
    """
    run = pack_run(trace, path)
    write_whole(
        path, lambda file: file.writelines(line.encode("ascii") for line in _lines(trace, run))
    )


def _lines(trace: Trace, run: str) -> Iterator[str]:
    yield f'{{"displayTimeUnit": "ns", "otherData": {{{json.dumps(RUN)}: {run}}}, "traceEvents": ['
    before = "\n"
    for event in _events(trace):
        yield before + json.dumps(event)
        before = ",\n"
    yield "\n]}\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for lane in make_lanes(trace):
        place = {"pid": lane.rank, "tid": lane.number}
        names = [("thread", lane.name, lane.number)]
        if lane.number == 1:
            names.insert(0, ("process", f"rank {lane.rank}", lane.rank))
        for what, name, number in names:
            yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
            order = {"sort_index": number}
            yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": order}
        for one in lane.slices:
            yield from _slice(one, place, trace.events.tables)


def _slice(one: Slice, place: dict[str, int], tables: Tables) -> Iterator[dict[str, Any]]:
    kind = OP_KINDS[one.row.op]
    event = {
        **place,
        "name": make_name(one.row, tables),
        "cat": KIND_NAMES[kind],
        "ts": one.start_ns / 1000,
        "args": {**describe_row(one.row, tables), COLUMNS: list(one.row)},
    }
    if kind == MARK:
        yield {"ph": "i", "s": "t", **event}
    elif one.end_ns == math.inf:
        yield {"ph": "B", **event}
    else:
        yield {"ph": "X", **event, "dur": (one.end_ns - one.start_ns) / 1000}
        if one.blocked_ns is not None:
            blocked = {"ts": one.blocked_ns / 1000, "dur": (one.end_ns - one.blocked_ns) / 1000}
            yield {"ph": "X", **place, "name": BLOCKED, "cat": BLOCKED, **blocked}
    yield from _flows(one, place)


def _flows(one: Slice, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the endpoints of a slice's arrows, at times within the slice.

    A viewer finds the slice by these times.
    """
    named = {**place, "name": "message", "cat": "message"}
    if one.flow_out:
        yield {"ph": "s", **named, "id": one.flow_out, "ts": one.start_ns / 1000}
    if one.flow_in:
        end = max(one.end_ns - 1, one.start_ns) if one.end_ns != math.inf else one.start_ns
        yield {"ph": "f", "bp": "e", **named, "id": one.flow_in, "ts": end / 1000}


def read_chrome(path: str | PathLike[str]) -> Trace:
    """Reads a file in Chrome's Trace Event Format.

    A file written by ``Trace.to_chrome`` yields the original trace. In a file from any other
    program, each process becomes a rank, each slice becomes a span, and each instant becomes a
    mark. For ``torch.profiler`` files, use ``read_profiler``, which recognises messages.

    Args:
        path: the file, which may be gzipped. It contains either an object with the key
            "traceEvents" or a list of events.

    Returns:
        The trace.

    Raises:
        TraceFileError: the file is missing or is not a Chrome trace.

    Source:
        The format's document; see the module docstring.
    """
    data = read_bytes(path)
    with importing(path, "a Chrome trace"):
        document = parse_json(data)
        if not isinstance(document, dict):
            document = {"traceEvents": document}
        events = document["traceEvents"]
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError("traceEvents is not a list of events")
        run = document.get("otherData")
        if isinstance(run, dict) and RUN in run:
            notes = [event.get("args") for event in events]
            rows = [told[COLUMNS] for told in notes if isinstance(told, dict) and COLUMNS in told]
            return unpack_run(run[RUN], rows)
        return _read_boxes(events)


def _read_boxes(events: list[dict[str, Any]]) -> Trace:
    """Reads slices written by a different program.

    Begin and end events must be in time order, as the format requires.
    """
    boxes = Boxes("the Trace Event Format")
    processes: dict[Any, Any] = {}
    for event in events:
        phase = event.get("ph")
        if phase not in ("X", "B", "E", "i", "I"):
            continue
        process, start = event.get("pid", 0), to_ns(event["ts"])
        lane = (process, event.get("tid", 0))
        processes[lane] = process
        name = str(event.get("name", ""))
        if phase == "X":
            boxes.add(lane, "span", name, start, done_ns=start + to_ns(event.get("dur", 0)))
        elif phase == "B":
            boxes.begin(lane, name, start)
        elif phase == "E":
            boxes.end(lane, start)
        else:
            boxes.add(lane, "mark", name, start)
    return boxes.trace(processes)
