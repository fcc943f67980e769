"""Traces in the Trace Event Format of Chrome (chrome://tracing, ui.perfetto.dev, Speedscope): JSON, one event a line, with flows.

::

    {"ph": "X", "pid": 0, "tid": 2, "ts": 4.5, "dur": 1.5, "name": "isend to 1", "cat": "send", "args": {...}}    a slice, times in us
    {"ph": "s", "pid": 0, "tid": 2, "ts": 4.5, "id": 1, "name": "message", "cat": "message"}                       a flow begins
    {"ph": "f", "bp": "e", "pid": 1, "tid": 2, "ts": 7.9, "id": 1, ...}                                            and ends

Source:
    "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringsim.exchange.boxes import Boxes
from ringsim.exchange.foreign import parse_json, read_bytes, reading
from ringsim.exchange.slices import (
    BLOCKED,
    COLUMNS,
    RUN,
    Lane,
    Row,
    Slice,
    describe_row,
    list_rows,
    make_lanes,
    make_name,
    pack_run,
    unpack_run,
)
from ringsim.traces.events import KIND_NAMES, MARK, NONE, OPS, Tables
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["read_chrome", "to_chrome", "to_ns"]


def to_chrome(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes a trace as Chrome and everything that grew around it read it.

    Ranks are processes; spans and operations stand on lanes below them, and an arrow leads from each send to its recv.
    ``ringsim.exchange.read_chrome`` gives back the same trace, without results and output. A Perfetto file holds the same in half
    the bytes.

    Args:
        trace: any trace.
        path: where to, usually ``*.json``; an existing file is replaced.

    Raises:
        TraceFileError: the file cannot be written, or the metadata is more than JSON can say.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5]}), {"world_size": 1})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_chrome(f"{directory}/run.json")
        ...     read_chrome(f"{directory}/run.json") == trace
        True

    Source:
        The format's document, see the module.
    """
    run = pack_run(trace)
    write_whole(path, lambda file: file.writelines(line.encode("ascii") for line in _lines(trace, run)))


def _lines(trace: Trace, run: str) -> Iterator[str]:
    yield f'{{"displayTimeUnit": "ns", "otherData": {{{json.dumps(RUN)}: {run}}}, "traceEvents": ['
    before = "\n"
    for event in _events(trace):
        yield before + json.dumps(event)
        before = ",\n"
    yield "\n]}\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    rows, tables = list_rows(trace.events), trace.events.tables
    for lane in make_lanes(trace):
        place = {"pid": lane.rank, "tid": lane.number}
        if lane.number == 1:
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {lane.rank}"}}
            yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": lane.rank}}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": lane.number}}
        yield from _lane(lane, place, rows, tables)


def _lane(lane: Lane, place: dict[str, int], rows: list[Row], tables: Tables) -> Iterator[dict[str, Any]]:
    for one in lane.slices:
        row = rows[one.index]
        kind = OPS[row.op][1]
        told = {**describe_row(row, tables), COLUMNS: list(row)}
        event = {**place, "name": make_name(row, tables), "cat": KIND_NAMES[kind], "ts": one.start_ns / 1000, "args": told}
        if kind == MARK:
            yield {"ph": "i", "s": "t", **event}
        elif one.end_ns == math.inf:
            yield {"ph": "B", **event}
        else:
            yield {"ph": "X", **event, "dur": (one.end_ns - one.start_ns) / 1000}
            if row.wait_ns != NONE and one.start_ns <= row.wait_ns < one.end_ns:
                blocked = {"ts": row.wait_ns / 1000, "dur": (one.end_ns - row.wait_ns) / 1000}
                yield {"ph": "X", **place, "name": BLOCKED, "cat": BLOCKED, **blocked}
        yield from _flows(one, place)


def _flows(one: Slice, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The two ends of arrows: each within its slice, for a viewer finds the slice by the time."""
    named = {**place, "name": "message", "cat": "message"}
    if one.flow_out:
        yield {"ph": "s", **named, "id": one.flow_out, "ts": one.start_ns / 1000}
    if one.flow_in:
        end = max(one.end_ns - 1, one.start_ns) if one.end_ns != math.inf else one.start_ns
        yield {"ph": "f", "bp": "e", **named, "id": one.flow_in, "ts": end / 1000}


def read_chrome(path: str | PathLike[str]) -> Trace:
    """Reads a file in Chrome's Trace Event Format.

    What ``Trace.to_chrome`` wrote comes back as that trace. Of another program's file, each process becomes a rank, each slice a span and
    each instant a mark; for those of ``torch.profiler`` there is ``read_profiler``, which knows messages.

    Args:
        path: the file, an object with "traceEvents" or a list of events; it may be packed by gzip.

    Returns:
        The trace.

    Raises:
        TraceFileError: there is no such file, or it is something else.

    Source:
        The format's document, see the module.
    """
    data = read_bytes(path)
    with reading(path, "a Chrome trace"):
        document = parse_json(data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError("traceEvents is not a list of events")
        run = document.get("otherData") if isinstance(document, dict) else None
        if isinstance(run, dict) and RUN in run:
            notes = [event.get("args") for event in events]
            return unpack_run(run[RUN], [told[COLUMNS] for told in notes if isinstance(told, dict) and COLUMNS in told])
        return _read_boxes(events)


def _read_boxes(events: list[dict[str, Any]]) -> Trace:
    """Reads slices that another program wrote; begins and ends come in the order of time, as the format asks."""
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
            boxes.whole(lane, name, start, start + to_ns(event.get("dur", 0)))
        elif phase == "B":
            boxes.begin(lane, name, start)
        elif phase == "E":
            boxes.end(lane, start)
        else:
            boxes.mark(lane, name, start)
    named = sorted(set(processes.values()), key=lambda process: (isinstance(process, str), process))  # numbers, then words
    numbers = {process: number for number, process in enumerate(named)}
    return boxes.trace({lane: numbers[process] for lane, process in processes.items()})


def to_ns(microseconds: Any) -> int:
    """Returns a time of the format, µs with a fraction, in whole ns.

    Raises:
        ValueError: it is none.

    Example:
        >>> to_ns(4334620159834.049)
        4334620159834049
    """
    if isinstance(microseconds, int | float):
        return round(microseconds * 1000)
    raise ValueError(f"a time is {str(microseconds)[:40]!r}, not a number")
