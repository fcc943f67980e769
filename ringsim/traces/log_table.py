"""The log of ``ringsim.comm`` as a value: one row for each operation and size, as text, as a dictionary and as a pandas table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ringsim.traces.units import bytes_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LogRow", "LogTable"]


@dataclass(frozen=True)
class LogRow:
    """What was logged of the operations of one name, kind, group size and message size, on all ranks.

    Latency is the time from post to done. An operation is a *first* one when it was the first that its rank was seen to do with that peer
    on that group (for a collective: the first on that group); connections are made then. Those are kept apart: mean, median, percentiles
    and bandwidths are of the others, and NaN where there are none. 1 GB is 10**9 bytes.

    Attributes:
        name: what the log calls them: ``log_name`` where one was given, else the operation.
        op: the operation, as torch spells it; "span" for a call of a function under ``timed_op``.
        group_size: number of ranks in their group.
        size_bytes: the message, or S as nccl-tests has it (see ``ringsim.costs``).
        count: how many there were. A collective counts once, however many ranks took part; a send and its recv count as one each.
        in_flight: records of operations that nobody has waited for yet.
        failed: records of operations that raised.
        first_count: how many of the records are first ones.
        first_mean_us: mean latency of the first ones.
        total_us: time spent in all of them, first ones included, by one rank on average.
        mean_us: mean latency.
        median_us: median latency.
        p10_us: a tenth of them took less.
        p90_us: a tenth of them took more.
        blocked_mean_us: the part of the mean latency in which the program was blocked, from wait to done.
        overlap_mean_us: the rest, from post to wait: an asynchronous operation ran beside the program.
        straggler_mean_us: the part of the mean latency in which a rank was blocked before the last one of its group, or the other side of
            its message, had posted; NaN where that is not known.
        algbw_gb_per_s: algorithm bandwidth, S over the median latency.
        busbw_gb_per_s: bus bandwidth, with the factor of nccl-tests for the group's size.
        lower_bound: whether the bandwidths are lower bounds, because the program came to wait late.
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


# What the text shows: heading, field, width, decimals.
_SHOWN = (
    ("count", "count", 8, 0),
    ("total ms", "total_us", 11, 3),
    ("mean us", "mean_us", 10, 1),
    ("median us", "median_us", 10, 1),
    ("p10 us", "p10_us", 9, 1),
    ("p90 us", "p90_us", 9, 1),
    ("first us", "first_mean_us", 10, 1),
    ("algbw GB/s", "algbw_gb_per_s", 12, 3),
    ("busbw GB/s", "busbw_gb_per_s", 12, 3),
)
_STRAGGLER = ("straggler us", "straggler_mean_us", 14, 1)


@dataclass(frozen=True)
class LogTable:
    """What ``log_summary`` found, the same on every rank.

    Attributes:
        rows: one for each name, operation, group size and message size.
        world_size: number of ranks in the job.
        ranks: those whose log is in it.
        notes: what the reader must know: ranks that are missing, times that are not comparable.
        show_straggler: whether the text has the column of straggler time.

    Example:
        >>> row = LogRow("all_reduce", "all_reduce", 4, 1 << 20, 10, 0, 0, 4, 900.0, 5400.0, 500.0, 490.0, 450.0, 600.0, 500.0, 0.0, 20.0,
        ...              2.14, 3.21, False)
        >>> table = LogTable((row,), world_size=4, ranks=(0, 1, 2, 3))
        >>> print(table)
        Communication of 4 ranks
        operation       size     n   count   total ms   mean us median us   p10 us   p90 us  first us  algbw GB/s  busbw GB/s
        all_reduce     1 MiB     4      10      5.400     500.0     490.0    450.0    600.0     900.0       2.140       3.210
        >>> table.to_dict()["summary"]["all_reduce"][1 << 20][0]["median_us"]
        490.0
    """

    rows: tuple[LogRow, ...]
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()
    show_straggler: bool = False

    def to_pandas(self) -> pd.DataFrame:
        """Returns the rows as a new pandas DataFrame, one column for each field of ``LogRow``."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows], columns=[field.name for field in fields(LogRow)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as a dictionary.

        Returns:
            ``summary``, a list of rows (dictionaries with the fields of ``LogRow``) by name and then by size in bytes; ``world_size``;
            ``ranks``; ``notes``.
        """
        summary: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for row in self.rows:
            summary.setdefault(row.name, {}).setdefault(row.size_bytes, []).append(asdict(row))
        return {"summary": summary, "world_size": self.world_size, "ranks": list(self.ranks), "notes": list(self.notes)}

    def to_json(self) -> bytes:
        """Returns the table as bytes, for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LogTable:
        """Returns the table that ``to_json`` wrote."""
        value = json.loads(data)
        rows = tuple(LogRow(**row) for row in value["rows"])
        return cls(rows, value["world_size"], tuple(value["ranks"]), tuple(value["notes"]), value["show_straggler"])

    def __str__(self) -> str:
        """Returns the table as text, with the unit in each heading; ``>=`` before a bandwidth that is a lower bound."""
        shown = (*_SHOWN, _STRAGGLER) if self.show_straggler else _SHOWN
        head = f"Communication of {self.world_size} rank{'' if self.world_size == 1 else 's'}"
        longest = max([9, *(len(_full_name(row)) for row in self.rows)])
        lines = [head if self.rows else f"{head}: nothing was logged"]
        if self.rows:
            lines.append(f"{'operation':{longest}}{'size':>10}{'n':>6}" + "".join(f"{heading:>{width}}" for heading, _, width, _ in shown))
        lines += [_line(row, shown, longest) for row in self.rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _full_name(row: LogRow) -> str:
    return row.name if row.name == row.op else f"{row.name} ({row.op})"


def _line(row: LogRow, shown: tuple[tuple[str, str, int, int], ...], longest: int) -> str:
    text = f"{_full_name(row):{longest}}{bytes_text(row.size_bytes):>10}{row.group_size:>6}"
    for heading, field, width, decimals in shown:
        value = getattr(row, field) * (1e-3 if heading.endswith(" ms") else 1)
        word = "-" if math.isnan(value) else f"{value:,.{decimals}f}"
        text += f"{'>= ' + word if row.lower_bound and field.endswith('gb_per_s') and word != '-' else word:>{width}}"
    left = [f"{number} {what}" for number, what in ((row.in_flight, "in flight"), (row.failed, "failed")) if number]
    return f"{text}  ({', '.join(left)})" if left else text
