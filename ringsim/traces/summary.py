"""A trace in words: a few lines for a terminal, one sentence for those who cannot see its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringsim.traces.events import NONE, OP_NAMES

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["count", "describe", "duration", "size", "summarise"]

_SHOWN = 3  # lines of one sort before "and n more"


def summarise(trace: Trace) -> str:
    """Returns the summary that a terminal shows.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> tables = Tables(payloads=(Payload("float32", (1024,), 4096),))
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
        ...                       "tag": [0, 0], "payload": [0, 0], "post_ns": [500, 0], "wait_ns": [500, 0],
        ...                       "done_ns": [2000, 3000]}, tables)
        >>> print(summarise(Trace(events, {"world_size": 2, "source": "measured", "backend": "gloo"})))
        Trace of 2 ranks (measured, gloo)
          messages      1 message, 4.10 kB, 2 events in 3.00 us
          busiest edge  0 -> 1: 1 message, 4.10 kB
          longest wait  rank 1 waited 500 ns in recv for rank 0 to send
          unmatched     none
    """
    events, metadata = trace.events, trace.metadata
    about = ", ".join(str(metadata[key]) for key in ("source", "backend", "date") if metadata.get(key))
    total = int(np.maximum(events.size_bytes[trace.messages.send], 0).sum())
    lines = [
        f"Trace of {count(trace.world_size, 'rank')}" + (f" ({about})" if about else ""),
        f"  messages      {count(len(trace.messages), 'message')}, {size(total)}, {count(len(events), 'event')} in {_makespan(trace)}",
    ]
    edge = _busiest_edge(trace)
    if edge is not None:
        others = f" and {count(edge.equals, 'other')} alike" if edge.equals else ""
        lines.append(f"  busiest edge  {edge.src} -> {edge.dst}{others}: {count(edge.number, 'message')}, {size(edge.total_bytes)}")
        lines.append(f"  longest wait  {_longest_wait(trace) or 'nobody waited for a partner'}")
    unmatched = trace.unmatched
    lines.append(f"  unmatched     {count(len(unmatched), 'operation') if unmatched else 'none'}")
    lines += _some([f"    {operation!r}" for operation in unmatched])
    lines += _some([f"  note: {note}" for note in metadata.get("notes", ())])
    lines += _some([f"  not recorded: {what}" for what in metadata.get("not_recorded", ())])
    return "\n".join(lines)


def describe(trace: Trace) -> str:
    """Returns one sentence that says what a picture of the trace shows: its alternative text.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> describe(Trace(make_events({"rank": [], "op": []}), {"world_size": 4}))
        'Trace of 4 ranks that exchanged no message in 0 s.'
    """
    number = len(trace.messages)
    exchanged = count(number, "message") if number else "no message"
    sentence = f"Trace of {count(trace.world_size, 'rank')} that exchanged {exchanged} in {_makespan(trace)}"
    edge = _busiest_edge(trace)
    if edge is not None and not edge.equals:
        sentence += f", {'all' if edge.number == number else 'most bytes'} from rank {edge.src} to rank {edge.dst}"
    wait = _longest_wait(trace)
    if wait is not None:
        sentence += f"; the longest wait: {wait}"
    if trace.unmatched:
        sentence += f"; {count(len(trace.unmatched), 'operation')} without a partner"
    return sentence + "."


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "4 ranks", "12,000 messages".

    Example:
        >>> count(1, "rank"), count(12000, "message")
        ('1 rank', '12,000 messages')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it.

    Example:
        >>> duration(0), duration(5e-07), duration(0.0123), duration(75)
        ('0 s', '500 ns', '12.3 ms', '75.0 s')
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")), zero="0 s")


def size(size_bytes: int) -> str:
    """Returns a size in the unit that suits it; 1 kB is 1000 bytes.

    Example:
        >>> size(8), size(4096), size(5_000_000_000)
        ('8 B', '4.10 kB', '5.00 GB')
    """
    return _scaled(size_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")), zero="0 B")


def _scaled(value: float, units: tuple[tuple[float, str], ...], *, zero: str) -> str:
    """Three significant digits in the largest unit that leaves at least 1; whole numbers in the smallest."""
    if value == 0:
        return zero
    for scale, unit in units[:-1]:
        # 0.9995 of a unit would print as 1000 of the one below
        if value >= 0.9995 * scale:
            number = value / scale
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"
    scale, unit = units[-1]
    return f"{value / scale:.0f} {unit}"


def _makespan(trace: Trace) -> str:
    return duration(trace.makespan_s)


class _Edge(NamedTuple):
    """What went from ``src`` to ``dst``, and how many other edges carried exactly as much."""

    src: int
    dst: int
    number: int
    total_bytes: int
    equals: int


def _busiest_edge(trace: Trace) -> _Edge | None:
    """Returns the edge that carried most bytes, None where there are no messages; of several alike, that of the lowest ranks."""
    messages = trace.messages
    if len(messages) == 0:
        return None
    edges, edge_of, number = np.unique(messages.src.astype(np.int64) << 32 | messages.dst, return_inverse=True, return_counts=True)
    total = np.zeros(len(edges), dtype=np.int64)
    np.add.at(total, edge_of, np.maximum(trace.events.size_bytes[messages.send], 0))
    best = int(np.lexsort((-number, -total))[0])
    equals = int(np.count_nonzero((total == total[best]) & (number == number[best]))) - 1
    return _Edge(int(edges[best]) >> 32, int(edges[best]) & 0xFFFFFFFF, int(number[best]), int(total[best]), equals)


def _longest_wait(trace: Trace) -> str | None:
    """Returns who waited longest for whom, in words, None where nobody waited for a partner."""
    waits, messages = trace.waits, trace.messages
    if len(messages) == 0:
        return None
    late_sender, late_receiver = waits.late_sender_ns[messages.recv], waits.late_receiver_ns[messages.send]
    worst = int(np.argmax(np.maximum(late_sender, late_receiver)))
    by_sender = late_sender[worst] >= late_receiver[worst]
    longest = int(max(late_sender[worst], late_receiver[worst]))
    if longest == 0:
        return None
    src, dst = int(messages.src[worst]), int(messages.dst[worst])
    waiter, late, verb, index = (dst, src, "send", messages.recv[worst]) if by_sender else (src, dst, "receive", messages.send[worst])
    events = trace.events
    file = events.file[index]
    place = f" ({events.tables.files[file]}:{events.line[index]})" if file != NONE else ""
    return f"rank {waiter} waited {duration(longest * 1e-9)} in {OP_NAMES[events.op[index]]}{place} for rank {late} to {verb}"


def _some(lines: list[str]) -> list[str]:
    """Returns the first lines, and how many more there are."""
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"    ... and {len(lines) - _SHOWN} more"]
