"""Computes the size, blocked time and bandwidth of each operation on each group of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringsim.traces.collectives import COLLECTIVES, MESSAGES, bus_factor
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import (
    NONE,
    OK,
    OP_NAMES,
    Events,
    Group,
    Ints,
    Tables,
)
from ringsim.traces.matching import number_rows
from ringsim.traces.steps import split_where
from ringsim.traces.units import bytes_text, time_text

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OperationStats:
    """Statistics for all operations with the same name on the same group.

    An operation is *blocked* from the moment the program begins to wait for it until it is done.
    Operations for which that moment is unknown, such as collectives that C++ waits for, do not
    contribute to the blocked times. Bandwidths describe a typical operation: each is the median,
    over all operations, of the size divided by the time from post to done. If the program began to
    wait late, the bandwidths are lower bounds. 1 GB is 10**9 bytes.

    Attributes:
        op: torch's name for the operation.
        group: the name of the group.
        group_size: the number of ranks in the group.
        count: the number of operations; a collective counts once, however many ranks take part.
        size_bytes: the total size of the messages; for a collective, the total S as nccl-tests
            defines it.
        blocked_p50_us: the median blocked time, or NaN if no blocked time is known.
        blocked_p90_us: the 90th percentile of the blocked times, or NaN.
        blocked_max_us: the longest blocked time, or NaN.
        algbw_gb_per_s: the algorithm bandwidth, or NaN if the operations carried no data.
        busbw_gb_per_s: the bus bandwidth, with nccl-tests' factor for the size of the group.
        share: the fraction of all ranks' time that was spent blocked, from 0 to 1, or above 1 if
            several threads on a rank wait at the same time.
    """

    op: str
    group: str
    group_size: int
    count: int
    size_bytes: int
    blocked_p50_us: float
    blocked_p90_us: float
    blocked_max_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    share: float


@dataclass(frozen=True)
class Stats:
    """The table that ``Trace.stats`` returns.

    Attributes:
        rows: one row per operation and group, in descending order of blocked time.

    Example:
        >>> row = OperationStats(
        ...     "all_reduce", "world", 4, 12, 12_582_912, 300.0, 420.0, 1500.0, 2.1, 3.15, 0.25
        ... )
        >>> print(Stats((row,)))
        operation   group   ranks   count      bytes   blocked p50     p90     max   algbw GB/s   busbw GB/s   share
        all_reduce  world       4      12     12 MiB        300 µs  420 µs  1.5 ms         2.10         3.15    25 %
    """  # noqa: E501

    rows: tuple[OperationStats, ...]

    def to_pandas(self) -> pd.DataFrame:
        """Returns a new DataFrame with one row per operation and group.

        The columns are the fields of ``OperationStats``.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(OperationStats.__dataclass_fields__))

    def to_dict(self) -> list[JsonObject]:
        """Returns the rows as plain data for JSON, in which unknown values are None."""
        return [
            {key: None if value != value else value for key, value in asdict(row).items()}
            for row in self.rows
        ]

    def __repr__(self) -> str:
        """Returns the table as text."""
        if not self.rows:
            return "no operations were recorded"
        names = max(9, *(len(row.op) for row in self.rows))
        groups = max(5, *(len(row.group) for row in self.rows))
        head = (
            f"{'operation':{names}}  {'group':{groups}}{'ranks':>8}{'count':>8}{'bytes':>11}"
            f"{'blocked p50':>14}{'p90':>8}{'max':>8}"
        )
        lines = [f"{head}{'algbw GB/s':>13}{'busbw GB/s':>13}{'share':>8}"]
        for row in self.rows:
            size = bytes_text(row.size_bytes) if row.size_bytes else "-"
            lines.append(
                f"{row.op:{names}}  {row.group:{groups}}{row.group_size:>8}{row.count:>8,}"
                f"{size:>11}{_say(row.blocked_p50_us):>14}{_say(row.blocked_p90_us):>8}"
                f"{_say(row.blocked_max_us):>8}{_say_rate(row.algbw_gb_per_s):>13}"
                f"{_say_rate(row.busbw_gb_per_s):>13}{100 * row.share:>6.0f} %"
            )
        return "\n".join(lines)


def _say_rate(rate: float) -> str:
    return "-" if rate != rate else format(rate, ".2f" if rate >= 0.1 else ".2g")


def _say(time_us: float) -> str:
    return "-" if math.isnan(time_us) else time_text(time_us * 1e3)


@dataclass
class _Share:
    """The operations with one name on one group, as recorded by some of the ranks."""

    records: int
    calls: int
    size_bytes: int
    blocked_us: Floats
    bytes_per_us: Floats


class Tally:
    """Counts operations for the table, a few whole ranks at a time.

    A tally keeps 16 bytes per operation in memory.

    Example:
        Two ranks reduce 1,000 bytes three times, and each waits for 30 us of 60 us:

        >>> from ringsim.traces.events import OP_CODES, Group, Payload, Tables, make_events
        >>> tables = Tables(
        ...     groups=(Group("world", (0, 1)),), payloads=(Payload("uint8", (1000,), 1000),)
        ... )
        >>> post = np.array([0, 20_000, 40_000] * 2)
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0, 0, 1, 1, 1],
        ...         "op": [OP_CODES["all_reduce"]] * 6,
        ...         "group": [0] * 6,
        ...         "payload": [0] * 6,
        ...         "post_ns": post,
        ...         "wait_ns": post,
        ...         "done_ns": post + 10_000,
        ...     },
        ...     tables,
        ... )
        >>> tally = Tally()
        >>> tally.add(events)
        >>> (row,) = tally.table(tables, 2, 60e-6).rows
        >>> (
        ...     row.op,
        ...     row.count,
        ...     row.size_bytes,
        ...     row.blocked_p90_us,
        ...     row.algbw_gb_per_s,
        ...     round(row.share, 2),
        ... )
        ('all_reduce', 3, 3000, 10.0, 0.1, 0.5)
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], list[_Share]] = {}  # by operation and group

    def add(self, events: Events) -> None:
        """Counts the events of some ranks; each rank must be complete."""
        communicates = events.communicates & (events.group != NONE)
        mine = np.flatnonzero(communicates & (events.op != _NEW_GROUP))
        if len(mine) == 0:
            return
        key, sizes = number_rows(events.op[mine], events.group[mine]), events.size_bytes
        order = np.argsort(key, kind="stable")
        for index in split_where(mine[order], key[order]):
            op, group = int(events.op[index[0]]), int(events.group[index[0]])
            of_each, done = np.maximum(sizes[index], 0), events.done_ns[index]
            finished = (events.status[index] == OK) & (done != NONE)
            waited = finished & (events.wait_ns[index] != NONE)
            lasted_us = (done - events.post_ns[index]) / 1e3
            timed = finished & (lasted_us > 0) & (of_each > 0)
            share = _Share(
                records=len(index),
                calls=count_calls(events.rank[index], OP_NAMES[op]),
                size_bytes=int(of_each.sum()),
                blocked_us=((done - events.wait_ns[index]) / 1e3)[waited],
                bytes_per_us=of_each[timed] / lasted_us[timed],
            )
            self._shares.setdefault((op, group), []).append(share)

    def table(self, tables: Tables, world_size: int, makespan_s: float) -> Stats:
        """Returns the table of all counted operations.

        Args:
            tables: the tables that contain the names of the groups.
            world_size: the number of ranks in the run.
            makespan_s: the duration of the run, in seconds.
        """
        total_us = world_size * makespan_s * 1e6
        rows = [
            _make_row(OP_NAMES[op], tables.groups[group], shares, total_us)
            for (op, group), shares in self._shares.items()
        ]
        return Stats(tuple(sorted(rows, key=lambda row: (-row.share, row.op, row.group))))


_NEW_GROUP = OP_NAMES.index("new_group")


def _make_row(name: str, group: Group, shares: list[_Share], total_us: float) -> OperationStats:
    blocked_us = np.concatenate([share.blocked_us for share in shares])
    bytes_per_us = np.concatenate([share.bytes_per_us for share in shares])
    p50, p90, longest = (
        np.percentile(blocked_us, [50, 90, 100]).tolist() if len(blocked_us) else [math.nan] * 3
    )
    algbw = float(np.median(bytes_per_us)) * 1e-3 if len(bytes_per_us) else math.nan
    calls = records = sum(share.records for share in shares)
    size_bytes = sum(share.size_bytes for share in shares)
    factor = bus_factor(name, max(len(group.ranks), 1))
    if name in COLLECTIVES:
        calls = max(share.calls for share in shares)
        size_bytes = size_bytes * calls // records
    share = float(np.maximum(blocked_us, 0).sum()) / total_us if total_us > 0 else 0.0
    return OperationStats(
        name,
        group.name,
        len(group.ranks),
        calls,
        size_bytes,
        p50,
        p90,
        longest,
        algbw,
        algbw * factor,
        share,
    )


def count_calls(ranks: Ints, op: str) -> int:
    """Returns the number of operations, all with one name and group, that produced these records.

    A collective, including a user's own, leaves one record on each rank that takes part.

    Args:
        ranks: the rank of each record.
        op: the name of the operation.

    Example:
        >>> (
        ...     count_calls(np.array([0, 0, 1, 1]), "all_reduce"),
        ...     count_calls(np.array([0, 0, 1, 1]), "send"),
        ... )
        (2, 4)
    """
    return len(ranks) if op in MESSAGES else int(np.bincount(ranks).max(initial=0))
