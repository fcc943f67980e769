"""Converts traces to a form that timeline viewers draw, and other programs' slices to traces.

Viewers draw slices on lanes, instants, and flows between slices. Each rank is a process. Spans and
marks nest, so one lane holds all those of a thread. Operations overlap, so they are spread over as
many lanes as necessary: viewers draw a lane as a stack of boxes, which must not partly overlap::

    spans        | step 0                    |          lane 0: they nest
                 | forward 0 |  | forward 1  |
    operations   | irecv from 0        |  | send |      lane 0
                    | isend to 1   |                    lane 1, because it overlaps

An operation lasts from post to done, and contains a slice named "blocked" from wait to done. A flow
connects each send with its recv.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringsim.traces.documents import saving
from ringsim.traces.event_rows import EventRows, whole_rows
from ringsim.traces.events import (
    ANY_SOURCE,
    COLUMN_DTYPES,
    IN_FLIGHT,
    MARK,
    NONE,
    OK,
    OP_KINDS,
    OP_NAMES,
    RECV,
    SEND,
    SPAN,
    STATUS_NAMES,
    Tables,
    read_tables,
    readable,
    write_tables,
)
from ringsim.traces.files import check_run
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from os import PathLike


def place_apart(starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Returns the lowest lane, counted from 0, on which each slice overlaps no other slice.

    The starts must ascend.

    Example:
        >>> place_apart([0, 1, 3], [3, 5, 4])
        [0, 1, 0]
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def place_nested(starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Returns lane 0 for each slice that nests with the slices there, or else a higher lane.

    The starts must ascend; if starts are equal, the longest slice must come first.

    Example:
        >>> place_nested(
        ...     [0, 1, 3], [4, 2, 6]
        ... )  # the third begins within the first and ends after it
        [0, 0, 1]
    """
    stack: list[float] = []
    lanes, cutting = [0] * len(starts), []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or end <= stack[-1]:
            stack.append(end)
        else:
            cutting.append(index)
    apart = place_apart([starts[i] for i in cutting], [ends[i] for i in cutting])
    for index, lane in zip(cutting, apart, strict=True):
        lanes[index] = 1 + lane
    return lanes


def on_lanes(
    slices: list[Slice], place: Callable[[list[int], list[float]], list[int]]
) -> list[tuple[int, list[Slice]]]:
    """Returns each lane's number and slices, in ascending order of the numbers.

    ``place`` chooses a lane for each slice.
    """
    slices.sort(key=lambda one: (one.start_ns, -one.end_ns))
    lanes = defaultdict[int, list[Slice]](list)
    numbers = place([one.start_ns for one in slices], [one.end_ns for one in slices])
    for lane, one in zip(numbers, slices, strict=True):
        lanes[lane].append(one)
    return sorted(lanes.items())


def unfold(starts: Sequence[float], ends: Sequence[float]) -> Iterator[tuple[int, bool]]:
    """Yields the begin (True) and end (False) of each nested slice, in chronological order.

    At the same moment, ends come before begins. The starts must ascend; if starts are equal, the
    outer slice must come first. An infinite end is never yielded.

    Example:
        >>> ["[]"[not begins] + str(index) for index, begins in unfold([0, 1, 3], [3, 3, math.inf])]
        ['[0', '[1', ']1', ']0', '[2']
    """
    stack: list[int] = []
    for index, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            yield stack.pop(), False
        yield index, True
        stack.append(index)
    yield from ((index, False) for index in reversed(stack) if ends[index] != math.inf)


RUN = "ringsim"  # the key under which a file stores the data about the run
COLUMNS = "columns"  # the key under which an event stores all its numbers
BLOCKED = "blocked"


class Row(NamedTuple):
    """One event; the fields are the columns of ``Events``."""

    rank: int
    thread: int
    seq: int
    op: int
    group: int
    peer: int
    tag: int
    payload: int
    stage: int
    microbatch: int
    label: int
    file: int
    line: int
    post_ns: int
    wait_ns: int
    done_ns: int
    status: int


assert Row._fields == tuple(COLUMN_DTYPES)  # an invariant: both list the same columns


class Slice(NamedTuple):
    """One event on a lane.

    A mark ends when it starts, and an event in flight never ends (its end is infinity).
    ``flow_out`` is the number of the message that the event sends, counted from 1, and ``flow_in``
    is the number of the message that it receives. Each is 0 if there is no such message.
    """

    row: Row
    start_ns: int
    end_ns: float
    flow_out: int = 0
    flow_in: int = 0

    @property
    def blocked_ns(self) -> int | None:
        """The time at which the rank began to wait, or None unless the wait has begun and ended."""
        waited = (
            self.end_ns != math.inf
            and self.row.wait_ns != NONE
            and self.start_ns <= self.row.wait_ns < self.end_ns
        )
        return self.row.wait_ns if waited else None


@dataclass(frozen=True)
class Lane:
    """The slices on one of a rank's lanes, in the order in which they begin.

    A rank's lanes are numbered from 1.
    """

    rank: int
    number: int
    name: str
    slices: list[Slice]


def make_lanes(trace: Trace) -> Iterator[Lane]:
    """Yields a trace's lanes, rank by rank; the slices on a lane either nest or do not overlap."""
    events = trace.events
    columns = (getattr(events, name).tolist() for name in COLUMN_DTYPES)
    rows, messages = list(map(Row, *columns)), trace.messages
    out, into = np.zeros((2, len(events)), dtype=np.int64)
    out[messages.send] = into[messages.recv] = np.arange(1, len(messages) + 1)
    starts, program = events.post_ns.tolist(), np.isin(events.kind, (SPAN, MARK))
    ends = np.where(
        events.kind == MARK, events.post_ns, np.maximum(events.done_ns, events.post_ns)
    ).astype(object)
    ends[(events.kind != MARK) & (events.done_ns == NONE)] = math.inf
    numbers: Counter[int] = Counter()
    for rank, thread, here in events.by_thread():
        for kind, where, place in (
            ("spans", here[program[here]], place_nested),
            ("operations", here[~program[here]], place_apart),
        ):
            slices = [
                Slice(rows[i], starts[i], ends[i], int(out[i]), int(into[i]))
                for i in where.tolist()
            ]
            for lane, placed in on_lanes(slices, place):
                name = f"{kind} of thread {thread}" if thread else kind
                if lane:
                    name += f" ({lane + 1})"
                numbers[rank] += 1
                yield Lane(rank, numbers[rank], name, placed)


def make_name(row: Row, tables: Tables) -> str:
    """Returns the name that viewers display for an event, such as "isend to 1"."""
    name, kind = OP_NAMES[row.op], OP_KINDS[row.op]
    if kind in (SPAN, MARK):
        return tables.labels[row.label] if row.label != NONE else name
    if kind not in (SEND, RECV):
        return name
    peer = "any rank" if row.peer == ANY_SOURCE else row.peer
    return f"{name} {'to' if kind == SEND else 'from'} {peer}"


def describe_row(row: Row, tables: Tables) -> dict[str, str | int]:
    """Returns the facts that apply to an event, in readable form."""
    told: dict[str, str | int] = {
        name: getattr(row, name)
        for name in ("tag", "stage", "microbatch")
        if getattr(row, name) != NONE
    }
    if row.group != NONE:
        told["group"] = tables.groups[row.group].name
    if row.payload != NONE:
        payload = tables.payloads[row.payload]
        told |= {
            "size_bytes": payload.size_bytes,
            "dtype": payload.dtype,
            "shape": str(list(payload.shape)),
        }
    if row.file != NONE:
        told["source"] = f"{tables.files[row.file]}:{row.line}"
    return told | {"status": STATUS_NAMES[row.status]}


def pack_run(trace: Trace, path: str | PathLike[str]) -> str:
    """Returns the tables and metadata of a run as JSON.

    Raises:
        TraceFileError: ringsim could not read the run back. The message names ``path``, the file
            to be written.
    """
    with saving("a trace", path):
        check_run(trace.events, trace.metadata)
        run = {"format": 1, "tables": write_tables(trace.events.tables), "metadata": trace.metadata}
        return json.dumps(run, allow_nan=False)


def unpack_run(run: Any, rows: list[Any]) -> Trace:
    """Returns the trace described by the rows and the data from ``pack_run``.

    Raises ValueError if the rows cannot belong to one run.
    """
    if not isinstance(run, dict) or run.get("format") != 1:
        raise ValueError("its data about the run is not in format 1")
    events = whole_rows(rows, read_tables(run.get("tables")))
    metadata: Any = readable(run.get("metadata"))
    check_run(events, metadata)
    return Trace(events, metadata)


class Boxes:
    """Another program's slices, lane by lane; ``source`` names the program's format.

    On each lane, the slice that began last ends first.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        # the columns of each slice
        self.lanes = defaultdict[Hashable, list[dict[str, Any]]](list)
        self._open = defaultdict[Hashable, list[dict[str, Any]]](list)

    def begin(self, lane: Hashable, name: str, start_ns: int) -> None:
        """Begins a slice."""
        self.add(lane, "span", name, start_ns, status=IN_FLIGHT)
        self._open[lane].append(self.lanes[lane][-1])

    def end(self, lane: Hashable, end_ns: int) -> None:
        """Ends the slice that began most recently on a lane.

        Does nothing if no slice is open, as can happen at the start of a truncated file.
        """
        if self._open[lane]:
            self._open[lane].pop().update(done_ns=end_ns, status=OK)

    def add(self, lane: Hashable, op: str, name: str, start_ns: int, **more: int) -> None:
        """Adds a slice (``op`` is "span") or an instant ("mark"); ``more`` holds more columns."""
        self.lanes[lane].append({"op": op, "label": name, "post_ns": start_ns, **more})

    def trace(self, processes: Mapping[Hashable, Any]) -> Trace:
        """Returns the trace; the processes that own the lanes become ranks, in ascending order.

        Numbers come before words. Raises ValueError if there are no slices.
        """
        if not self.lanes:
            raise ValueError("it contains no slices")
        named = sorted(
            set(processes.values()), key=lambda process: (isinstance(process, str), process)
        )
        threads: Counter[int] = Counter()
        rows = EventRows()
        for lane, slices in self.lanes.items():
            rank = named.index(processes[lane])
            for columns in slices:
                rows.add(rank, thread=threads[rank], **columns)
            threads[rank] += 1
        note = (
            f"imported from {self._source}: each process became a rank and each slice a span; "
            "messages are unknown"
        )
        return rows.trace({"world_size": len(named), "source": "imported", "notes": [note]})
