"""A trace's single events and messages, as small, readable values.

``Events`` and ``Messages`` hold columns, which suit numpy; these values suit loops and interactive
use. Their fields are the columns of ``Trace.to_pandas()`` with the same names, and None instead of
NA.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, SupportsIndex

from ringsim.traces.events import (
    ANY_SOURCE,
    COLUMN_DTYPES,
    KIND_NAMES,
    MARK,
    NONE,
    OP_KINDS,
    OP_NAMES,
    SPAN,
    STATUS_NAMES,
    Events,
)
from ringsim.traces.findings import Operation
from ringsim.traces.units import time_text


class Event(NamedTuple):
    """One operation, span or mark.

    Times are in ns from the start of the run, and sizes are in bytes. A field is None if it does
    not apply, and a time is None if it has not been reached yet.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group, Tables, make_events
        >>> events = make_events(
        ...     {
        ...         "rank": [0],
        ...         "op": [OP_CODES["isend"]],
        ...         "group": [0],
        ...         "peer": [1],
        ...         "tag": [7],
        ...         "post_ns": [2000],
        ...         "wait_ns": [2500],
        ...         "done_ns": [5000],
        ...     },
        ...     Tables(groups=(Group("ring:0>1", (0, 1)),)),
        ... )
        >>> event_at(events, 0)
        rank 0: isend to 1 (ring:0>1, tag 7) from 2 µs to 5 µs
        >>> event_at(events, 0).wait_ns
        2500
    """

    rank: int
    thread: int
    seq: int
    kind: str
    op: str
    group: str | None
    peer: int | None
    tag: int | None
    size_bytes: int | None
    dtype: str | None
    shape: tuple[int, ...] | None
    stage: int | None
    microbatch: int | None
    label: str | None
    file: str | None
    line: int | None
    post_ns: int
    wait_ns: int | None
    done_ns: int | None
    status: str

    def __repr__(self) -> str:
        """Returns a line with the rank, the operation, the code location and the times."""
        begin = time_text(self.post_ns)
        if self.kind == KIND_NAMES[MARK]:
            return f"rank {self.rank}: {_describe(self)} at {begin}"
        if self.done_ns is None:
            return (
                f"rank {self.rank}: {_describe(self)} from {begin}, {self.status.replace('_', ' ')}"
            )
        return f"rank {self.rank}: {_describe(self)} from {begin} to {time_text(self.done_ns)}"


def _describe(event: Event) -> str:
    """Returns a description of an event without its rank and times."""
    if event.kind in (KIND_NAMES[SPAN], KIND_NAMES[MARK]):
        part = part_text(event)
        return f"{event.kind} {event.label or ''!r}" + (f" ({part})" if part else "")
    if event.kind == "recv" and event.peer is None:
        return str(as_operation(event, peer=ANY_SOURCE))
    return str(as_operation(event))


def part_text(event: Event) -> str:
    """Returns an event's part of a pipeline, such as "stage 1, microbatch 3", or "" for none."""
    parts = {"stage": event.stage, "microbatch": event.microbatch}
    return ", ".join(f"{name} {number}" for name, number in parts.items() if number is not None)


def as_operation(event: Event, **more: Any) -> Operation:
    """Returns an event as an operation; ``more`` replaces or adds fields of the operation."""
    known = {
        name: value
        for name in Operation.__dataclass_fields__
        if (value := getattr(event, name, None)) is not None
    }
    return Operation(**known | more)


class Message(NamedTuple):
    """One message: a matched send and recv.

    ``stage`` and ``microbatch`` come from the sender if it has them, and otherwise from the
    receiver. All other fields come from the sender.
    """

    src: int
    dst: int
    tag: int | None
    group: str | None
    size_bytes: int | None
    dtype: str | None
    shape: tuple[int, ...] | None
    stage: int | None
    microbatch: int | None
    send: Event
    recv: Event

    def __repr__(self) -> str:
        """Returns a line with the two ranks, the send, and the times of the message."""
        arrived = (
            "in flight"
            if self.recv.done_ns is None
            else f"received at {time_text(self.recv.done_ns)}"
        )
        return (
            f"rank {self.src} -> {self.dst}: {_describe(self.send)}, posted at "
            f"{time_text(self.send.post_ns)}, {arrived}"
        )


def event_at(events: Events, index: SupportsIndex) -> Event:
    """Returns the event at an index; a negative index counts from the end.

    Raises:
        IndexError: the index is out of range.
    """
    at, tables = operator.index(index), events.tables
    row: dict[str, Any] = {
        name: None if (value := int(getattr(events, name)[at])) == NONE else value
        for name in COLUMN_DTYPES
    }

    def find(column: str, names: tuple[Any, ...]) -> Any:
        return None if row[column] is None else names[row[column]]

    group, payload = find("group", tables.groups), find("payload", tables.payloads)
    carries = payload is not None and payload.dtype != ""
    known = row | {
        "kind": KIND_NAMES[OP_KINDS[row["op"]]],
        "op": OP_NAMES[row["op"]],
        "group": None if group is None else group.name,
        "peer": None if row["peer"] == ANY_SOURCE else row["peer"],
        "size_bytes": None if payload is None or payload.size_bytes == NONE else payload.size_bytes,
        "dtype": payload.dtype if carries else None,
        "shape": payload.shape if carries else None,
        "label": find("label", tables.labels),
        "file": find("file", tables.files),
        "status": STATUS_NAMES[row["status"]],
    }
    return Event(**{name: known[name] for name in Event._fields})
