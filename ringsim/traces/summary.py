"""A trace in words: a few lines for a terminal, one sentence for those who cannot see its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringsim.traces.bubbles import bubble
from ringsim.traces.events import NONE, OP_NAMES
from ringsim.traces.stages import count_steps
from ringsim.traces.units import bytes_text, time_text

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["count", "describe", "summarise"]

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
          messages      1 message, 4 KiB, 2 events in 3 µs
          busiest edge  0 -> 1: 1 message, 4 KiB
          longest wait  rank 1 waited 500 ns in recv for rank 0 to send
          unmatched     none
    """
    events, metadata = trace.events, trace.metadata
    about = ", ".join(str(metadata[key]) for key in ("source", "backend", "date") if metadata.get(key))
    total = int(np.maximum(events.size_bytes[trace.messages.send], 0).sum())
    lines = [
        f"Trace of {count(trace.world_size, 'rank')}" + (f" ({about})" if about else ""),
        f"  messages      {count(len(trace.messages), 'message')}, {bytes_text(total)}, {_events_in_time(trace)}",
    ]
    edge = _busiest_edge(trace)
    if edge is not None:
        others = f" and {count(edge.equals, 'other')} alike" if edge.equals else ""
        lines.append(f"  busiest edge  {edge.src} -> {edge.dst}{others}: {count(edge.number, 'message')}, {bytes_text(edge.total_bytes)}")
        lines.append(f"  longest wait  {_longest_wait(trace) or 'nobody waited for a partner'}")
    if count_steps(events):
        lines.append(f"  pipeline      {_last_step(trace)}")
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
        'Trace of 4 ranks that exchanged no message in 0 ns.'
    """
    number = len(trace.messages)
    exchanged = count(number, "message") if number else "no message"
    sentence = f"Trace of {count(trace.world_size, 'rank')} that exchanged {exchanged} in {time_text(trace.makespan_s * 1e9)}"
    edge = _busiest_edge(trace)
    if edge is not None and not edge.equals:
        sentence += f", {'all' if edge.number == number else 'most bytes'} from rank {edge.src} to rank {edge.dst}"
    wait = _longest_wait(trace)
    if wait is not None:
        sentence += f"; the longest wait: {wait}"
    if count_steps(trace.events):
        sentence += f"; {_last_step(trace)}"
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


def _events_in_time(trace: Trace) -> str:
    return f"{count(len(trace.events), 'event')} in {time_text(trace.makespan_s * 1e9)}"


def _last_step(trace: Trace) -> str:
    """Returns what a pipeline's last step was, and its bubble, in words."""
    measured = bubble(trace)
    said = f"{count(count_steps(trace.events), 'step')}, the last one of {measured.schedule}: bubble {100 * measured.of_total:.0f} %"
    return said if measured.closed_form is None else f"{said} (closed form {100 * measured.closed_form.of_total:.0f} %)"


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
    return f"rank {waiter} waited {time_text(longest)} in {OP_NAMES[events.op[index]]}{place} for rank {late} to {verb}"


def _some(lines: list[str]) -> list[str]:
    """Returns the first lines, and how many more there are."""
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"    ... and {len(lines) - _SHOWN} more"]
