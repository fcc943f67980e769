"""Writes and reads Chrome's Trace Event Format (chrome://tracing, ui.perfetto.dev, Speedscope).

The format is JSON. A file has one event per line, and arrows are called flows::

    {"ph": "X", "pid": 0, "tid": 2, "ts": 4.5, "dur": 1.5, "name": "isend to 1", "cat": "send", "args": {...}}  a slice, times in us
    {"ph": "s", "pid": 0, "tid": 2, "ts": 4.5, "id": 1, "name": "message", "cat": "message"}                     a flow begins
    {"ph": "f", "bp": "e", "pid": 1, "tid": 2, "ts": 7.9, "id": 1, ...}                                          and ends

Source:
    "Trace Event Format",
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

The module also reads ``torch.profiler`` files, one per rank, and joins them into one trace.

The profiler also writes Chrome's format. A Gloo operation appears as two slices, the call and the
work, which may be on different threads::

    program's thread     | c10d::send |                        post: the call begins
    Gloo's, or the same       | gloo:send           |          done: the work ends

Calls are matched with works in order, because Gloo performs works of the same kind in the order of
their calls.
"""  # noqa: E501

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ringsim.exchange.reading import (
    count_item_bytes,
    importing,
    list_files,
    name_missing,
    read_bytes,
)
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
from ringsim.traces.event_rows import EventRows
from ringsim.traces.events import (
    ANY_SOURCE,
    IN_FLIGHT,
    KIND_NAMES,
    MARK,
    NONE,
    OK,
    OP_KINDS,
    Group,
    Payload,
    Tables,
)

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
        told: dict[str, dict[str, Any]] = {}
        if lane.number == 1:
            told["process_name"] = {"name": f"rank {lane.rank}"}
            told["process_sort_index"] = {"sort_index": lane.rank}
        told["thread_name"] = {"name": lane.name}
        told["thread_sort_index"] = {"sort_index": lane.number}
        for what, args in told.items():
            yield {"ph": "M", "name": what, **place, "args": args}
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
            return unpack_run(
                run[RUN],
                [told[COLUMNS] for told in notes if isinstance(told, dict) and COLUMNS in told],
            )
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
            boxes.whole(lane, name, start, start + to_ns(event.get("dur", 0)))
        elif phase == "B":
            boxes.begin(lane, name, start)
        elif phase == "E":
            boxes.end(lane, start)
        else:
            boxes.mark(lane, name, start)
    # numbers, then words
    named = sorted(set(processes.values()), key=lambda process: (isinstance(process, str), process))
    numbers = {process: number for number, process in enumerate(named)}
    return boxes.trace({lane: numbers[process] for lane, process in processes.items()})


def to_ns(microseconds: Any) -> int:
    """Converts a time from the format's unit (fractional µs) to whole ns."""
    if isinstance(microseconds, int | float):
        return round(microseconds * 1000)
    raise ValueError(f"the time {str(microseconds)[:40]!r} is not a number")


class _Call(NamedTuple):
    """The meaning of a c10d operator.

    The fields hold ringsim's name for the operator, the work that the operator starts, and the
    positions of its inputs.
    """

    op: str
    work: str
    peer: int = NONE  # the input that holds the peer, or the root
    tag: int = NONE
    works: str = "one"  # "all": one work per rank in the group
    shards: bool = False  # whether the work's size is only one rank's share


_CALLS = {
    "c10d::send": _Call("isend", "send", peer=2, tag=3),
    "c10d::recv_": _Call("irecv", "recv", peer=2, tag=3),
    "c10d::recv_any_source_": _Call("irecv", "recvAnySource", tag=2),
    "c10d::allreduce_": _Call("all_reduce", "all_reduce"),
    "c10d::broadcast_": _Call("broadcast", "broadcast", peer=2),
    "c10d::reduce_": _Call("reduce", "reduce", peer=3),
    "c10d::allgather_": _Call("all_gather", "all_gather", shards=True),
    "c10d::_allgather_base_": _Call("all_gather_into_tensor", "all_gather", shards=True),
    "c10d::gather_": _Call("gather", "gather", peer=3, shards=True),
    "c10d::scatter_": _Call("scatter", "scatter", peer=3, shards=True),
    "c10d::_reduce_scatter_base_": _Call("reduce_scatter_tensor", "all_reduce"),
    "c10d::reduce_scatter_": _Call("reduce_scatter", "all_reduce", works="all", shards=True),
    "c10d::alltoall_": _Call("all_to_all", "all_to_all", shards=True),
    "c10d::alltoall_base_": _Call("all_to_all_single", "all_to_all"),
    "c10d::barrier": _Call("barrier", "barrier"),
    # this call itself waits; its messages appear as works
    "c10d::monitored_barrier_": _Call("monitored_barrier", ""),
}
_WORK = "gloo:"
# the profiler's name for each dtype -> torch's name
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short int": "int16",
    "int": "int32",
    "long int": "int64",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


@dataclass
class _File:
    """The content of one rank's file: the rank's number and its slices in chronological order."""

    rank: int
    world_size: int
    groups: list[tuple[int, ...]]
    calls: list[dict[str, Any]]
    works: list[dict[str, Any]]
    spans: list[dict[str, Any]]


def read_profiler(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Trace:
    """Reads ``torch.profiler`` files from the ranks of a Gloo run.

    ``torch.distributed`` operations become operations, and ``record_function`` blocks become spans.
    Other operators and kernels are left out. Each rank must have been profiled with
    ``record_shapes=True``; otherwise, the profiler records neither peers nor sizes. The profiler
    never records when a rank began to wait, so ``wait_ns`` is unknown. Nor does it record an
    operation's group. ``read_profiler`` therefore treats all ranks as global ranks, and adds a note
    to the trace if the run had other groups. The clocks of different hosts are not aligned.

    Args:
        paths: the files written by ``export_chrome_trace``, one per rank, gzipped or not; or a
            directory that contains no other ``.json`` or ``.json.gz`` files.

    Returns:
        The trace.

    Raises:
        TraceFileError: a file is missing or is not a rank's profile, two files are from the same
            rank, or the run did not use Gloo.

    Source:
        torch 2.13: torch/csrc/distributed/c10d/Ops.cpp (operators and their arguments) and
        ProcessGroupGloo.cpp (names of works).
    """
    rows, found_by_rank = EventRows(), dict[int, _File]()
    files = list_files(paths, lambda path: path.name.endswith((".json", ".json.gz")))
    for path in files:
        data = read_bytes(path)
        with importing(path, "one rank's torch.profiler trace"):
            found = _read_file(parse_json(data))
            if found.rank in found_by_rank:
                raise ValueError(f"two files are from rank {found.rank}")
            found_by_rank[found.rank] = found
            _add_events(rows, found)
    size = max(found.world_size for found in found_by_rank.values())
    with importing(", ".join(map(str, files))[:200], "torch.profiler traces from one run"):
        notes = _make_notes(found_by_rank, size)
        return rows.trace(
            {"world_size": size, "source": "measured", "backend": "gloo", "notes": notes}
        )


def _make_notes(files: dict[int, _File], size: int) -> list[str]:
    notes = ["imported from torch.profiler, which does not record when a rank began to wait"]
    notes += name_missing("file", files, size)
    if any(len(found.groups) > 1 for found in files.values()):
        notes.append(
            "the run had several groups, but the profiler does not record the group of an "
            "operation; ringsim treats all ranks as global ranks"
        )
    return notes


def _read_file(document: Any) -> _File:
    told = document["distributedInfo"] if isinstance(document, dict) else {}
    rank, size = told.get("rank"), told.get("world_size")
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= 10**6:
        raise ValueError("it names no rank, because torch.distributed was not in use")
    if told.get("backend") != "gloo":
        raise ValueError(
            f"the run used the backend {str(told.get('backend'))[:20]!r}, but ringsim reads "
            "only Gloo profiles"
        )
    base = document.get("baseTimeNanoseconds", 0)
    slices = []
    for event in document["traceEvents"]:
        if (
            event.get("ph") == "X"
            and event.get("cat") in ("cpu_op", "user_annotation")
            and isinstance(event.get("name"), str)
        ):
            start = base + to_ns(event["ts"])
            slices.append(
                {
                    **event,
                    "start_ns": start,
                    "end_ns": start + to_ns(event.get("dur", 0)),
                    "args": event.get("args", {}),
                }
            )
    slices.sort(key=lambda event: event["start_ns"])
    calls = [event for event in slices if event["name"] in _CALLS]
    barriers = [event for event in calls if not _CALLS[event["name"]].work]
    works = [
        event
        for event in slices
        if event["name"].startswith(_WORK) and not _is_within(event, barriers)
    ]
    spans = [
        event
        for event in slices
        if event["cat"] == "user_annotation" and not event["name"].startswith(_WORK)
    ]
    groups = [tuple(one["ranks"]) for one in told.get("pg_config", [])]
    return _File(rank, size, groups, calls, works, spans)


def _is_within(event: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Returns whether a slice begins inside one of ``others`` on the same thread.

    ``others`` are in time order, and slices on one thread do not overlap.
    """
    last = bisect_right(others, event["start_ns"], key=lambda one: one["start_ns"]) - 1
    return (
        last >= 0
        and others[last]["tid"] == event["tid"]
        and event["start_ns"] <= others[last]["end_ns"]
    )


def _add_events(rows: EventRows, found: _File) -> None:
    world = Group("world", tuple(range(found.world_size)))
    in_order = sorted(found.calls + found.spans, key=lambda event: event["start_ns"])
    threads: dict[Any, int] = {}
    for event in in_order:
        threads.setdefault(event["tid"], len(threads))
    waiting = defaultdict[str, deque[dict[str, Any]]](deque)
    for work in found.works:
        waiting[work["name"].removeprefix(_WORK)].append(work)
    for event in found.calls:
        call = _CALLS[event["name"]]
        queue = waiting[call.work]
        most = found.world_size if call.works == "all" else 1
        works = [queue.popleft() for _ in range(min(len(queue), most))]
        done = max(
            (work["end_ns"] for work in works), default=NONE if call.work else event["end_ns"]
        )
        columns = {
            "done_ns": done,
            "status": OK if done != NONE else IN_FLIGHT,
            "group": world,
            "thread": threads[event["tid"]],
        }
        if call.tag != NONE:
            columns["tag"] = int(_input(event, call.tag))
        if call.work == "recvAnySource":
            columns["peer"] = ANY_SOURCE
        elif call.peer != NONE:
            columns["peer"] = int(_input(event, call.peer))
        copies = found.world_size if call.shards else 1
        payload = _payload(works[0], copies) if works else None
        if payload is not None:
            columns["payload"] = payload
        rows.add(found.rank, call.op, event["start_ns"], **columns)
    for event in found.spans:
        rows.add(
            found.rank,
            "span",
            event["start_ns"],
            label=event["name"],
            done_ns=event["end_ns"],
            thread=threads[event["tid"]],
        )


def _input(event: dict[str, Any], place: int) -> str:
    if "Concrete Inputs" not in event["args"]:
        raise ValueError("it contains neither peers nor sizes; profile with record_shapes=True")
    value: str = event["args"]["Concrete Inputs"][place]
    return value


def _payload(work: dict[str, Any], times: int) -> Payload | None:
    """Returns a work's payload, which describes only the first tensor."""
    kinds, shapes = work["args"].get("Input type"), work["args"].get("Input Dims")
    if not kinds or not shapes or kinds[0] not in _DTYPES:
        return None
    dtype = _DTYPES[kinds[0]]
    shape = tuple(int(length) for length in shapes[0])
    if any(length < 0 for length in shape):
        raise ValueError(f"the shape {shape} has a negative length")
    whole = (times, *shape) if times > 1 else shape
    return Payload(dtype, whole, math.prod(whole) * count_item_bytes(dtype))
