"""Summarises a run in a few lines, even if its file does not fit into memory.

``Trace.summary`` and ``Trace.describe`` return these summaries. The ranks in a file are counted one
after another. A rank's sends and recvs stay in memory until the rank on the other side has been
read. In a ring, these are the operations of three ranks rather than of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ringsim.environment import count_crossings
from ringsim.errors import TraceFileError, escape_line
from ringsim.provenance import describe_replay
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.documents import StrPath
from ringsim.traces.events import (
    COLLECTIVE,
    NO_EVENTS,
    NONE,
    OP_NAMES,
    RECV,
    SEND,
    SPAN,
    Events,
    Ints,
    concatenate,
    find_ring,
)
from ringsim.traces.files import load, read_by_rank
from ringsim.traces.matching import Unmatched, describe_unmatched
from ringsim.traces.stats import OperationStats, Stats, Tally
from ringsim.traces.steps import count_steps, is_step, number_steps
from ringsim.traces.units import bytes_text, count, rate_text, time_text
from ringsim.traces.value import Trace

_SHOWN = 3  # how many lines of one kind to show before "and n more"


class _Wait(NamedTuple):
    """One wait for a partner.

    Waits sort by length, longest first, and waits of equal length by the time of sending.
    """

    negative_ns: int
    sent_ns: int
    sender: int
    seq: int
    said: str


class _Edge(NamedTuple):
    """The traffic from ``src`` to ``dst``; ``equals`` counts other edges with the same traffic."""

    src: int
    dst: int
    number: int
    total_bytes: int
    equals: int


@dataclass
class _Went:
    """Totals over the messages within hosts or across hosts.

    The bytes and the time during which both sides were posted cover only messages that arrived.
    """

    number: int = 0
    size_bytes: int = 0
    took_ns: int = 0
    blocked_ns: int = 0

    def add(self, trace: Trace, chosen: Ints) -> None:
        events, send, recv = trace.events, trace.messages.send[chosen], trace.messages.recv[chosen]
        done = events.done_ns[recv] != NONE
        self.number += len(send)
        self.size_bytes += int(np.maximum(events.size_bytes[send], 0)[done].sum())
        took_ns = np.maximum(
            events.done_ns[recv] - np.maximum(events.post_ns[send], events.post_ns[recv]), 0
        )
        self.took_ns += int(took_ns[done].sum())
        self.blocked_ns += int(
            np.maximum(trace.waits.blocked_ns[np.concatenate([send, recv])], 0).sum()
        )

    def __str__(self) -> str:
        rate = (
            f", {rate_text(self.size_bytes / self.took_ns)}"
            if self.took_ns and self.size_bytes
            else ""
        )
        return (
            f"{count(self.number, 'message')}, {bytes_text(self.size_bytes)}{rate}, blocked "
            f"{time_text(self.blocked_ns)}"
        )


@dataclass
class Totals:
    """Totals over the events of a run, counted in one or more passes.

    Attributes:
        run: the run, for values that do not depend on every event. For a file, it contains only the
            first and the last event of each rank, and each rank's last step.
        num_events: the number of events.
        num_steps: the number of complete pipeline steps.
        num_messages: the number of messages.
        num_unmatched: the number of operations without a partner.
        num_apart: the number of operations whose other side was left out of a part.
        early: the number of messages that seem to have arrived before they were sent.
        tally: the operations in the table ``stats``.
    """

    run: Trace
    num_events: int = 0
    num_steps: int = 0
    num_messages: int = 0
    num_unmatched: int = 0
    num_apart: int = 0
    early: int = 0
    tally: Tally = field(default_factory=Tally)
    # the number of messages and bytes of each edge (source and destination packed into one number)
    _number: Counter[int] = field(default_factory=Counter)
    _bytes: Counter[int] = field(default_factory=Counter)
    _longest: list[_Wait] = field(default_factory=list)
    # the first few operations without a partner, with rank and seq
    _unmatched: list[tuple[int, int, Unmatched]] = field(default_factory=list)
    _within: _Went = field(default_factory=_Went)
    _across: _Went = field(default_factory=_Went)

    def add_events(self, events: Events, whole_table: bool) -> None:
        """Counts the events of one or more ranks; each rank must be complete.

        If ``whole_table`` is False, the table leaves out messages.
        """
        self.num_events += len(events)
        self.tally.add(events if whole_table else events.select(events.kind == COLLECTIVE))

    def add_messages(self, trace: Trace) -> None:
        """Counts the messages in a trace; the trace must contain both sides of each message.

        Operations without a partner are counted separately.
        """
        events, messages = trace.events, trace.messages
        self.num_messages += len(messages)
        self.early += int(messages.early.sum())
        edges, edge_of, number = np.unique(
            messages.src.astype(np.int64) << 32 | messages.dst,
            return_inverse=True,
            return_counts=True,
        )
        total = np.zeros(len(edges), dtype=np.int64)
        np.add.at(total, edge_of, np.maximum(events.size_bytes[messages.send], 0))
        for edge, times, size_bytes in zip(
            edges.tolist(), number.tolist(), total.tolist(), strict=True
        ):
            self._number[edge] += times
            self._bytes[edge] += size_bytes
        self._longest = sorted([*self._longest, *_find_longest(trace)])[:1]
        crosses = trace.crosses(messages.src, messages.dst)
        self._within.add(trace, ~crosses)
        self._across.add(trace, crosses)
        self.num_unmatched += len(messages.unmatched)
        first = describe_unmatched(events, messages.unmatched[:_SHOWN])
        placed = [(one.rank, int(events.seq[one.index]), one) for one in first]
        self._unmatched = sorted([*self._unmatched, *placed], key=lambda one: one[:2])[:_SHOWN]

    @property
    def total_bytes(self) -> int:
        """The total bytes of all messages."""
        return self._bytes.total()

    @cached_property
    def busiest(self) -> _Edge | None:
        """The edge that carried the most bytes, or None if there are no messages.

        If several edges carried equally many, this is the edge between the lowest ranks.
        """
        if not self._number:
            return None
        carried = {edge: (self._bytes[edge], self._number[edge]) for edge in sorted(self._number)}
        best = max(carried, key=carried.__getitem__)
        total, number = carried[best]
        equals = [*carried.values()].count((total, number)) - 1
        return _Edge(best >> 32, best & 0xFFFFFFFF, number, total, equals)

    @property
    def longest_wait(self) -> str | None:
        """A description of the longest wait for a partner, or None if no rank waited."""
        return self._longest[0].said if self._longest else None

    @cached_property
    def stats(self) -> Stats:
        """The same table as ``Trace.stats`` returns, restricted to the counted operations."""
        return self.tally.table(self.run.events.tables, self.run.world_size, self.run.makespan_s)

    @property
    def collectives(self) -> list[OperationStats]:
        """The rows of the table for collectives.

        Messages are left out because they take many rows: a ring has one group per pair of ranks.
        """
        return [row for row in self.stats.rows if row.op in COLLECTIVES]

    def __str__(self) -> str:
        """Returns a summary of the run in a few lines of text."""
        run, metadata = self.run, self.run.metadata
        about = ", ".join(
            str(metadata[key]) for key in ("source", "backend", "date") if metadata.get(key)
        )
        about = "; ".join(filter(None, [about, describe_replay(metadata)]))
        number, lasted = count(self.num_messages, "message"), time_text(run.makespan_s * 1e9)
        lines = [
            f"Trace of {count(run.world_size, 'rank')}" + (f" ({about})" if about else ""),
            *self._say_part(),
            (
                f"  messages      {number}, {bytes_text(self.total_bytes)}, "
                f"{count(self.num_events, 'event')} in {lasted}"
            ),
        ]
        if (edge := self.busiest) is not None:
            others = f" and {count(edge.equals, 'other')}" if edge.equals else ""
            lines.append(
                f"  busiest edge  {edge.src} -> {edge.dst}{others}: "
                f"{count(edge.number, 'message')}, {bytes_text(edge.total_bytes)}"
                f"{' each' if edge.equals else ''}"
            )
            lines.append(f"  longest wait  {self.longest_wait or 'no rank waited for a partner'}")
        lines += [*self._say_hosts(), *self._say_collectives()]
        if self.num_steps:
            lines.append(f"  pipeline      {_say_last_step(self)}")
        lines.append(
            "  unmatched     "
            f"{count(self.num_unmatched, 'operation') if self.num_unmatched else 'none'}"
        )
        lines += _some(
            [f"    {operation!r}" for _, _, operation in self._unmatched], self.num_unmatched
        )
        for name, key in (("note", "notes"), ("not recorded", "not_recorded")):
            said = [f"  {name}: {escape_line(what)}" for what in metadata.get(key, ())]
            lines += _some(said, len(said))
        return "\n".join(lines)

    def _say_part(self) -> list[str]:
        """Returns a line about the part, if any, and the operations without their other side."""
        if "part" not in self.run.metadata:
            return []
        said = [*self.run.metadata["part"]["of"]]
        if self.num_apart:
            said.append(f"{count(self.num_apart, 'operation')} whose other side is left out")
        return [f"  part          {'; '.join(said)}"]

    def _say_hosts(self) -> list[str]:
        """Returns lines about the accuracy of the clocks and the messages within and across hosts.

        The list is empty if there was only one host.
        """
        names, clocks = list(dict.fromkeys(filter(None, self.run.hosts))), self.run.clocks
        if len(names) < 2 and not clocks:
            return []
        known = [clock.uncertainty_ns for clock in clocks]
        exact = [time_ns for time_ns in known if time_ns is not None]
        said = []
        if known:
            is_exact = len(exact) == len(known)
            accuracy = f"known to ±{time_text(max(exact))}" if is_exact else "not all compared"
            said.append(f"clocks {accuracy}")
        if self.early or known:
            said.append(f"{count(self.early, 'message')} arrived before being sent")
        more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        if not names:  # of a run that another program recorded
            return [f"  clocks        {'; '.join(said)}"]
        lines = [f"  hosts         {'; '.join([', '.join([*names[:_SHOWN], *more]), *said])}"]
        for where, went in (("within hosts", self._within), ("across hosts", self._across)):
            lines += [f"    {where}: {went}"] if went.number else []
        return lines + _say_crossings(self.run)

    def _say_collectives(self) -> list[str]:
        """Returns lines about the collectives; the first few have bytes and blocked times."""
        rows = self.collectives
        if not rows:
            return []
        total, calls = sum(row.size_bytes for row in rows), sum(row.count for row in rows)
        said = [
            (
                f"    {row.op} on {row.group}: {count(row.count, 'call')}, "
                f"{bytes_text(row.size_bytes)}, {_say_blocked(row)}"
            )
            for row in rows
        ]
        return [
            f"  collectives   {count(calls, 'call')}, {bytes_text(total)}",
            *_some(said, len(said)),
        ]


# -- counting a trace


def count_trace(trace: Trace, *, whole_table: bool = False) -> Totals:
    """Counts a trace's events; if ``whole_table`` is False, ``stats`` leaves out messages."""
    totals = Totals(trace, num_steps=count_steps(trace.events), num_apart=len(trace.apart))
    totals.add_events(trace.events, whole_table)
    totals.add_messages(trace)
    return totals


def describe(trace: Trace) -> str:
    """Returns the text for ``Trace.describe``."""
    totals = count_trace(trace)
    number, calls = totals.num_messages, sum(row.count for row in totals.collectives)
    did = f"exchanged {count(number, 'message') if number else 'no messages'}"
    if calls and not number:
        did = f"called {count(calls, 'collective')}"
    part = "Part of a trace" if "part" in trace.metadata else "Trace"
    sentence = (
        f"{part} of {count(trace.world_size, 'rank')} that {did} in "
        f"{time_text(trace.makespan_s * 1e9)}"
    )
    if (edge := totals.busiest) is not None and not edge.equals:
        sentence += (
            f", {'all' if edge.number == number else 'most bytes'} from rank {edge.src} to rank "
            f"{edge.dst}"
        )
    if totals.longest_wait is not None:
        sentence += f"; the longest wait: {totals.longest_wait}"
    if totals.num_steps:
        sentence += f"; {_say_last_step(totals)}"
    if totals.num_unmatched:
        sentence += f"; {count(totals.num_unmatched, 'operation')} without a partner"
    if error := describe_replay(trace.metadata):
        sentence += f"; predicted, {error}"
    return sentence + "."


# -- counting a file


def count_file(
    path: StrPath,
    *,
    whole_table: bool = False,
    on_rank: Callable[[int, int], object] | None = None,
) -> Totals:
    """Counts the events in a trace file without loading the whole file.

    Args:
        path: the file, or any other path that ``load`` accepts.
        whole_table: whether the table ``stats`` includes messages, which takes 16 bytes of memory
            per operation.
        on_rank: called with the last rank that was read and the number of ranks, to show progress.

    Returns:
        The totals. Use their ``run`` only for metadata, hosts, clocks, times, and the bubble of the
        last step.

    Raises:
        TraceFileError: see ``load``.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "group": [-1, -1],
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [0, 0],
        ...         "wait_ns": [0, 0],
        ...         "done_ns": [2000, 3000],
        ...     }
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     Trace(events, {"world_size": 2}).save(f"{directory}/run.ringtrace")
        ...     print(count_file(f"{directory}/run.ringtrace"))
        Trace of 2 ranks
          messages      1 message, 0 B, 2 events in 3 µs
          busiest edge  0 -> 1: 1 message, 0 B
          longest wait  no rank waited for a partner
          unmatched     none
    """
    try:
        return _count_ranks(path, whole_table, on_rank)
    except TraceFileError:
        # load may recover the trace from its parts; otherwise it raises the same error
        return count_trace(load(path), whole_table=whole_table)


def _count_ranks(
    path: StrPath, whole_table: bool, on_rank: Callable[[int, int], object] | None
) -> Totals:
    outline, waiting = _Outline(), list[Events]()
    totals = Totals(Trace(NO_EVENTS, {}))
    for piece in read_by_rank(path):
        events, metadata = piece.events, piece.metadata
        totals.add_events(events, whole_table)
        totals.num_apart += len(piece.apart)
        outline.add(events)
        takes_part = np.isin(events.kind, (SEND, RECV))
        takes_part[piece.apart] = False
        talk = concatenate([*waiting, events.select(takes_part)])
        last = int(events.rank.max(initial=NONE))
        if on_rank is not None:
            on_rank(last, piece.world_size)
        alone = {name: value for name, value in metadata.items() if name != "part"}
        there, waiting = talk.select(talk.peer <= last), [talk.select(talk.peer > last)]
        del piece, events, talk  # so that memory holds only one copy of a rank
        totals.add_messages(Trace(there, alone))
    totals.add_messages(Trace(waiting[0], alone))
    totals.num_steps = outline.end_at_same_step(path)
    totals.run = Trace(concatenate(outline.by_rank()), metadata)
    return totals


class _Outline:
    """Keeps each rank's first and last events, and the spans in the rank's last step."""

    def __init__(self) -> None:
        self._kept: dict[int, Events] = {}
        self._steps: dict[int, int] = {}
        self._none = NO_EVENTS

    def add(self, events: Events, step: int | None = None) -> None:
        """Adds the outline of complete ranks, with the spans in ``step`` or in the last step."""
        self._none = replace(NO_EVENTS, tables=events.tables)
        last_ns, is_span, has_steps = events.last_ns, events.kind == SPAN, is_step(events).any()
        for rank in np.unique(events.rank).tolist():
            start, end = np.searchsorted(events.rank, [rank, rank + 1])
            kept = np.zeros(end - start, dtype=bool)
            kept[[events.post_ns[start:end].argmin(), last_ns[start:end].argmax()]] = True
            if has_steps and is_step(mine := events.select(np.arange(start, end))).any():
                numbers = number_steps(mine)
                self._steps[rank] = int(numbers.max()) + 1
                wanted = self._steps[rank] - 1 if step is None else step
                kept |= is_span[start:end] & (numbers == wanted) & (numbers != NONE)
            self._kept[rank] = events.select(start + np.flatnonzero(kept))

    def end_at_same_step(self, path: StrPath) -> int:
        """Returns the number of steps that all ranks have completed.

        Ranks that have completed more steps are read again, for the spans of the last common step.
        """
        complete = min(self._steps.values(), default=0)
        for rank, number in [*self._steps.items()]:
            if number > complete > 0:
                self.add(load(path, ranks=rank).events, complete - 1)
        return complete

    def by_rank(self) -> list[Events]:
        """Returns the outline in one part per rank."""
        return [self._none, *(self._kept[rank] for rank in sorted(self._kept))]


# -- in words


def _find_longest(trace: Trace) -> list[_Wait]:
    """Returns the longest wait for a partner, or an empty list."""
    waits, messages, events = trace.waits, trace.messages, trace.events
    late_sender = waits.late_sender_ns[messages.recv]
    late_receiver = waits.late_receiver_ns[messages.send]
    longest = np.maximum(late_sender, late_receiver)
    if longest.max(initial=0) == 0:
        return []
    worst = int(np.argmax(longest))
    by_sender = late_sender[worst] >= late_receiver[worst]
    src, dst, sent = int(messages.src[worst]), int(messages.dst[worst]), int(messages.send[worst])
    waiter, late, verb, index = (
        (dst, src, "send", messages.recv[worst]) if by_sender else (src, dst, "receive", sent)
    )
    file = events.file[index]
    place = f" ({events.tables.files[file]}:{events.line[index]})" if file != NONE else ""
    said = (
        f"rank {waiter} waited {time_text(int(longest[worst]))} in "
        f"{OP_NAMES[events.op[index]]}{place} for rank {late} to {verb}"
    )
    return [
        _Wait(-int(longest[worst]), int(events.post_ns[sent]), src, int(events.seq[sent]), said)
    ]


def _say_crossings(trace: Trace) -> list[str]:
    """Returns a line if rings would cross hosts less often with the ranks in a different order."""
    names = [group.name for group in trace.events.tables.groups]
    after = dict(find_ring(names, trace.world_size).values())
    crossed = needed = 0
    # start at a rank without a predecessor, if some edge of the ring was not used
    for first in sorted(after, key=lambda rank: rank in after.values()):
        ring = [first]
        while ring[-1] in after:
            ring.append(after.pop(ring[-1]))
        hosts = [trace.hosts[rank] for rank in dict.fromkeys(ring)]
        crossed, needed = crossed + count_crossings(hosts), needed + count_crossings(sorted(hosts))
    hint = 'initialize_distributed(ring_order="hosts")'
    return (
        [f"    the ring crosses hosts {count(crossed, 'time')} instead of {needed}: use {hint}"]
        if crossed > needed
        else []
    )


def _say_blocked(row: OperationStats) -> str:
    if row.blocked_max_us != row.blocked_max_us:
        return "waited for in C++"
    return (
        f"blocked {time_text(1e3 * row.blocked_p50_us)} each (median), {100 * row.share:.0f} % of "
        "the run"
    )


def _say_last_step(totals: Totals) -> str:
    """Returns a phrase with the number of steps, and with the name and bubble of the last step."""
    measured = totals.run.bubble()
    said = (
        f"{count(totals.num_steps, 'step')}, the last one ({measured.schedule}) with a bubble of "
        f"{100 * measured.of_total:.0f} %"
    )
    return (
        said
        if measured.closed_form is None
        else f"{said} (closed form {100 * measured.closed_form.of_total:.0f} %)"
    )


def _some(lines: list[str], number: int) -> list[str]:
    """Returns the first few of ``number`` lines, followed by a line that counts the rest."""
    return lines if number <= _SHOWN else [*lines[:_SHOWN], f"    ... and {number - _SHOWN} more"]
