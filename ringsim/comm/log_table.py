"""The table that summarises the ``ringsim.comm`` log.

The table has one row per operation and size, computed from events. You can get the table as text,
as a dictionary or as a DataFrame.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.traces.collectives import algbw_gb_per_s, busbw_gb_per_s
from ringsim.traces.events import (
    ERROR,
    IN_FLIGHT,
    MARK,
    NONE,
    OK,
    OP_NAMES,
    RECV,
    SEND,
    SPAN,
    Events,
    Ints,
    number_places,
)
from ringsim.traces.matching import match, number_rows, refused, split_waits
from ringsim.traces.stats import count_calls
from ringsim.traces.units import bytes_text, rate_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LogRow:
    """All operations on any rank that share a name, kind, group size and message size.

    Latency is the time from post to done. A rank's *first* operation with a peer on a group (for a
    collective, the rank's first on that group) may include the time to connect, so first operations
    are kept apart: mean, median, percentiles and bandwidths cover only the other operations, and
    are NaN if there are none. 1 GB is 10**9 bytes.

    Attributes:
        name: the name in the log: ``log_name`` if it was given, else the operation.
        op: torch's name for the operation, or "span" for a call to a function wrapped by
            ``timed_op``.
        group_size: the number of ranks in the group.
        size_bytes: the size of the message, or S as defined by nccl-tests (see
            ``ringsim.traces.collectives``).
        count: the number of operations. A collective counts once, regardless of the number of
            ranks; a send and its recv count separately.
        in_flight: the number of records of operations that have not been waited for yet.
        failed: the number of records of operations that raised an error.
        first_count: the number of records of first operations.
        first_mean_us: the mean latency of first operations.
        total_us: the time spent in all operations, including first operations, averaged over the
            ranks.
        mean_us: the mean latency.
        median_us: the median latency.
        p10_us: the 10th percentile of the latency.
        p90_us: the 90th percentile of the latency.
        blocked_mean_us: the part of the mean latency in which the program was blocked, from wait to
            done.
        overlap_mean_us: the rest of the mean latency, from post to wait, in which an asynchronous
            operation overlapped with the program.
        straggler_mean_us: the part of the mean latency in which a rank was blocked before the last
            rank of its group, or the other side of its message, had posted; NaN if unknown.
        algbw_gb_per_s: the algorithm bandwidth, S divided by the median latency.
        busbw_gb_per_s: the bus bandwidth, with the factor from nccl-tests for the group size.
        lower_bound: whether the bandwidths are lower bounds, because the program began to wait
            late.
    """

    name: str
    op: str
    group_size: int
    size_bytes: int
    count: int
    in_flight: int
    failed: int
    first_count: int
    first_mean_us: float
    total_us: float
    mean_us: float
    median_us: float
    p10_us: float
    p90_us: float
    blocked_mean_us: float
    overlap_mean_us: float
    straggler_mean_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    lower_bound: bool


_OPS = np.array(OP_NAMES)
# The columns of the text: heading, field, width, decimals.
_SHOWN = (
    ("count", "count", 8, 0),
    ("total ms", "total_us", 11, 3),
    ("mean us", "mean_us", 10, 1),
    ("median us", "median_us", 10, 1),
    ("p10 us", "p10_us", 9, 1),
    ("p90 us", "p90_us", 9, 1),
    ("first us", "first_mean_us", 10, 1),
    ("algbw", "algbw_gb_per_s", 14, 0),
    ("busbw", "busbw_gb_per_s", 14, 0),
)
_STRAGGLER = ("straggler us", "straggler_mean_us", 14, 1)


@dataclass(frozen=True)
class LogTable:
    """The table that ``log_summary`` returns; it is the same on every rank.

    Attributes:
        rows: one row per name, operation, group size and message size.
        world_size: the number of ranks in the job.
        ranks: the ranks whose logs are included.
        notes: caveats, such as missing ranks or times that are not comparable.
        show_straggler: whether the text includes the straggler-time column.

    Example:
        >>> row = LogRow(
        ...     "all_reduce",
        ...     "all_reduce",
        ...     4,
        ...     1 << 20,
        ...     10,
        ...     0,
        ...     0,
        ...     4,
        ...     900.0,
        ...     5400.0,
        ...     500.0,
        ...     490.0,
        ...     450.0,
        ...     600.0,
        ...     500.0,
        ...     0.0,
        ...     20.0,
        ...     2.14,
        ...     3.21,
        ...     False,
        ... )
        >>> table = LogTable((row,), world_size=4, ranks=(0, 1, 2, 3))
        >>> print(table)
        Communication of 4 ranks
        operation       size     n   count   total ms   mean us median us   p10 us   p90 us  first us         algbw         busbw
        all_reduce     1 MiB     4      10      5.400     500.0     490.0    450.0    600.0     900.0     2.14 GB/s     3.21 GB/s
        >>> table.to_dict()["summary"]["all_reduce"][1 << 20][0]["median_us"]
        490.0
    """  # noqa: E501

    rows: tuple[LogRow, ...]
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()
    show_straggler: bool = False

    def to_pandas(self) -> pd.DataFrame:
        """Returns the rows as a new pandas DataFrame with one column per field of ``LogRow``."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=[field.name for field in fields(LogRow)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as a dictionary.

        Returns:
            A dictionary with the keys ``summary``, ``world_size``, ``ranks`` and ``notes``.
            ``summary`` maps a name and then a size in bytes to a list of rows (dictionaries with
            the fields of ``LogRow``).
        """
        summary: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for row in self.rows:
            summary.setdefault(row.name, {}).setdefault(row.size_bytes, []).append(asdict(row))
        return {
            "summary": summary,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "notes": list(self.notes),
        }

    def to_json(self) -> bytes:
        """Returns the table as bytes, for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LogTable:
        """Returns the table that ``to_json`` wrote."""
        rows, world_size, ranks, notes, show = json.loads(data).values()
        return cls(
            tuple(LogRow(**row) for row in rows), world_size, tuple(ranks), tuple(notes), show
        )

    def __str__(self) -> str:
        """Returns the table as text, with units in the headings or in the cells.

        A bandwidth that is a lower bound is preceded by ``>=``.
        """
        shown = (*_SHOWN, _STRAGGLER) if self.show_straggler else _SHOWN
        head = f"Communication of {self.world_size} rank{'' if self.world_size == 1 else 's'}"
        names = [row.name if row.name == row.op else f"{row.name} ({row.op})" for row in self.rows]
        longest = max([9, *map(len, names)])
        lines = [head if self.rows else f"{head}: nothing was logged"]
        if self.rows:
            lines.append(
                f"{'operation':{longest}}{'size':>10}{'n':>6}"
                + "".join(f"{heading:>{width}}" for heading, _, width, _ in shown)
            )
        for name, row in zip(names, self.rows, strict=True):
            cells = "".join(
                f"{_cell(row, heading, field, decimals):>{width}}"
                for heading, field, width, decimals in shown
            )
            left = [
                f"{number} {what}"
                for number, what in ((row.in_flight, "in flight"), (row.failed, "failed"))
                if number
            ]
            line = f"{name:{longest}}{bytes_text(row.size_bytes):>10}{row.group_size:>6}{cells}"
            lines.append(f"{line}  ({', '.join(left)})" if left else line)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cell(row: LogRow, heading: str, field: str, decimals: int) -> str:
    value = getattr(row, field) * (1e-3 if heading.endswith(" ms") else 1)
    if math.isnan(value):
        return "-"
    if field.endswith("gb_per_s"):
        return f"{'>= ' if row.lower_bound else ''}{rate_text(value)}"
    return f"{value:,.{decimals}f}"


# if more than this share of an operation's latency passes before the program waits, the operation
# may have ended before the wait began
_LATE = 0.5


def is_operation(events: Events) -> Ints:
    """Marks the events that the log covers.

    These are messages, collectives, and calls under ``timed_op`` (spans that have a group).
    """
    kind = events.kind
    mask: Ints = (kind != MARK) & ((kind != SPAN) | (events.group != NONE))
    return mask


def name_operations(events: Events) -> Ints:
    """Returns the name of each event in the log: its label, or else its operation."""
    labels = np.array([*events.tables.labels, ""])[events.label]
    named: Ints = np.where(events.label == NONE, _OPS[events.op], labels)
    return named


def make_rows(
    events: Events, first: Ints, *, one_clock: bool = True, by_tag: bool = True
) -> tuple[LogRow, ...]:
    """Computes the rows of the table.

    Args:
        events: the operations of all ranks, in order of rank and posting; ``is_operation`` must be
            true for all of them.
        first: bool, one per event: whether it was the rank's first operation with that peer on that
            group.
        one_clock: whether the times of different ranks can be compared.
        by_tag: False for a backend that ignores tags (NCCL).

    Returns:
        The rows, in order of name, operation, group size and message size.

    Example:
        Two ranks reduce 1,000 bytes three times; the first time takes longer:

        >>> from ringsim.traces.events import OP_CODES, Group, Payload, Tables, make_events
        >>> tables = Tables(
        ...     groups=(Group("world", (0, 1)),), payloads=(Payload("uint8", (1000,), 1000),)
        ... )
        >>> post = np.array([0, 100_000, 200_000] * 2)
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0, 0, 1, 1, 1],
        ...         "op": [OP_CODES["all_reduce"]] * 6,
        ...         "group": [0] * 6,
        ...         "payload": [0] * 6,
        ...         "post_ns": post,
        ...         "wait_ns": post,
        ...         "done_ns": post + [50_000, 10_000, 10_000] * 2,
        ...     },
        ...     tables,
        ... )
        >>> (row,) = make_rows(events, np.array([True, False, False] * 2))
        >>> (
        ...     row.name,
        ...     row.count,
        ...     row.first_mean_us,
        ...     row.median_us,
        ...     row.algbw_gb_per_s,
        ...     row.busbw_gb_per_s,
        ... )
        ('all_reduce', 3, 50.0, 10.0, 0.1, 0.1)
    """
    group_sizes = np.array([*(len(group.ranks) for group in events.tables.groups), 1])
    keys = (
        name_operations(events),
        _OPS[events.op],
        group_sizes[events.group],
        np.maximum(events.size_bytes, 0),
    )
    straggler = straggler_ns(events, by_tag=by_tag) if one_clock else np.full(len(events), math.nan)
    row_of = number_rows(*keys)
    rows = []
    for number in range(int(row_of.max(initial=NONE)) + 1):
        members = np.flatnonzero(row_of == number)
        key = [column[members[0]].item() for column in keys]
        rows.append(_make_row(key, events.select(members), first[members], straggler[members]))
    return tuple(rows)


def _make_row(key: list[Any], events: Events, first: Ints, straggler: Ints) -> LogRow:
    name, op, group_size, size_bytes = key
    done = (events.status == OK) & (events.done_ns != NONE)
    latency_us = (events.done_ns - events.post_ns) * 1e-3
    # a span has no wait: its caller was blocked the whole time
    wait_ns = np.where(events.wait_ns == NONE, events.post_ns, events.wait_ns)
    blocked_us = (events.done_ns - wait_ns) * 1e-3
    steady = done & ~first
    groups = np.unique(events.group)
    count = sum(count_calls(events.rank[events.group == group], op) for group in groups)
    mean_us, blocked_mean_us = _mean(latency_us[steady]), _mean(blocked_us[steady])
    p10_us, median_us, p90_us = (
        np.percentile(latency_us[steady], [10, 50, 90]).tolist() if steady.any() else [math.nan] * 3
    )
    hidden = ((latency_us - blocked_us) / np.maximum(latency_us, 1e-3))[steady]
    return LogRow(
        name,
        op,
        group_size,
        size_bytes,
        count=count,
        in_flight=int(np.count_nonzero(events.status == IN_FLIGHT)),
        failed=int(np.count_nonzero(events.status == ERROR)),
        first_count=int(np.count_nonzero(first)),
        first_mean_us=_mean(latency_us[done & first]),
        total_us=float(latency_us[done].sum()) * count / len(events),
        mean_us=mean_us,
        median_us=median_us,
        p10_us=p10_us,
        p90_us=p90_us,
        blocked_mean_us=blocked_mean_us,
        overlap_mean_us=mean_us - blocked_mean_us,
        straggler_mean_us=_mean(straggler[steady & ~np.isnan(straggler)] * 1e-3),
        algbw_gb_per_s=algbw_gb_per_s(size_bytes, median_us),
        busbw_gb_per_s=busbw_gb_per_s(
            name if op == "span" else op, size_bytes, median_us, group_size
        ),
        lower_bound=bool(len(hidden) and np.median(hidden) > _LATE),
    )


def _mean(values: Ints) -> float:
    return float(values.mean()) if len(values) else math.nan


def straggler_ns(events: Events, *, by_tag: bool = True) -> Ints:
    """Returns the time each operation was blocked until the last rank that it needed had posted.

    The k-th operation with a name, group and payload on one rank is matched with the k-th such
    operation on the other ranks, provided that all ranks of the group have the same number of such
    operations, because ranks may log different operations.

    Args:
        events: the operations of all ranks, in order of rank and posting, on one clock.
        by_tag: False for a backend that ignores tags.

    Returns:
        The times in ns (float64), or NaN if the other side is unknown.

    Source:
        Scalasca's wait state "n-to-n": from the time a rank waits to the time the last rank begins.
    """
    late = np.full(len(events), math.nan)
    messages = match(events, by_tag=by_tag)
    waits = split_waits(events, messages)
    for side in (messages.send, messages.recv):
        late[side] = waits.late_sender_ns[side] + waits.late_receiver_ns[side]
    kind = events.kind
    collective = np.flatnonzero(
        (kind != SEND) & (kind != RECV) & (events.group != NONE) & ~refused(events)
    )
    calls = events.select(collective)
    sizes = np.array([len(group.ranks) for group in events.tables.groups], dtype=np.int64)
    alike = number_rows(name_operations(calls), calls.op, calls.group, calls.payload)
    call = number_rows(alike, number_places(number_rows(alike, calls.rank)))
    partial = np.bincount(call)[call] < sizes[calls.group]
    known = ~np.isin(alike, alike[partial])
    last_post = np.zeros(len(calls), dtype=np.int64)
    np.maximum.at(last_post, call, calls.post_ns)
    until = last_post[call]
    until = np.where(calls.done_ns == NONE, until, np.minimum(until, calls.done_ns))
    begin = np.where(calls.wait_ns == NONE, calls.post_ns, calls.wait_ns)
    late[collective[known]] = np.maximum(until - begin, 0)[known]
    return late
