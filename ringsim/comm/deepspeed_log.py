"""The log in DeepSpeed's format.

This module writes the dictionary and the table of ``log_summary``, and the line for an operation.
As in DeepSpeed, Gbps means 10**9 bits per second, and KB means 1024 bytes. Unlike in DeepSpeed,
each value covers all ranks, and each latency applies to one operation.

Source:
    DeepSpeed, ``deepspeed/utils/comms_logging.py``: keys, headings and the format of a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from ringsim.comm.log_table import LogRow, LogTable
from ringsim.traces.units import BYTE_UNITS

Cells = dict[str, dict[int, dict[str, Any]]]  # by name and size in bytes

_WIDTH = 20
# in the order of the keys
_SUMMARY = (
    "Count",
    "Total Latency(ms)",
    "Avg Latency(ms)",
    "tput_avg (Gbps)",
    "busbw_avg (Gbps)",
)
_STRAGGLERS = (
    "Count",
    "Total comm lat(ms)",
    "Total straggler(ms)",
    "Avg comm lat(ms)",
    "Avg straggler(ms)",
)
_BREAKDOWN = ("_" * 31, "Breakdown with straggler effect", "-" * 31)


def describe(table: LogTable) -> tuple[Cells, Cells]:
    """Returns the dictionaries that DeepSpeed calls ``summary`` and ``straggler_analysis``.

    Rows that differ only in their group size are merged.

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
        >>> summary, stragglers = describe(LogTable((row,)))
        >>> (
        ...     summary["all_reduce"][1 << 20]["avg_latency_ms"],
        ...     stragglers["all_reduce"][1 << 20]["avg_straggler_ms"],
        ... )
        (0.5, 0.02)
    """
    cells: dict[tuple[str, int], list[LogRow]] = {}
    for row in table.rows:
        cells.setdefault((row.name, row.size_bytes), []).append(row)
    summary: Cells = {}
    stragglers: Cells = {}
    for (name, size_bytes), rows in cells.items():
        count = sum(row.count for row in rows)
        size = {"msg_size_bytes": size_bytes, "msg_size_str": _size_text(size_bytes)}
        latency_us = _mean(rows, _latency_us)
        straggler_us = min(_mean(rows, attrgetter("straggler_mean_us")), latency_us)
        summary.setdefault(name, {})[size_bytes] = {
            "count": count,
            "total_latency_ms": sum(row.total_us for row in rows) * 1e-3,
            "avg_latency_ms": latency_us * 1e-3,
            "tput_avg_gbps": _mean(rows, attrgetter("algbw_gb_per_s")) * 8,
            "busbw_avg_gbps": _mean(rows, attrgetter("busbw_gb_per_s")) * 8,
            **size,
        }
        stragglers.setdefault(name, {})[size_bytes] = {
            "count": count,
            "total_comm_lat_ms": (latency_us - straggler_us) * count * 1e-3,
            "total_straggler_ms": straggler_us * count * 1e-3,
            "avg_comm_lat_ms": (latency_us - straggler_us) * 1e-3,
            "avg_straggler_ms": straggler_us * 1e-3,
            **size,
        }
    return summary, stragglers


def _latency_us(row: LogRow) -> float:
    return row.first_mean_us if math.isnan(row.mean_us) else row.mean_us


def _mean(rows: Sequence[LogRow], value: Callable[[LogRow], float]) -> float:
    """Returns the mean of the known values, weighted by each row's number of operations.

    Returns 0 if no value is known.
    """
    known = [row for row in rows if not math.isnan(value(row))]
    count = sum(row.count for row in known)
    return sum(row.count * value(row) for row in known) / count if known else 0.0


def write_table(table: LogTable) -> str:
    """Returns DeepSpeed's table as text.

    The table of stragglers follows if ``table.show_straggler`` is set.
    """
    summary, stragglers = describe(table)
    more = (*_BREAKDOWN, *_write_cells(stragglers, _STRAGGLERS)) if table.show_straggler else ()
    return "\n".join(
        [*_write_cells(summary, _SUMMARY), *more, *(f"note: {note}" for note in table.notes)]
    )


def _write_cells(cells: Cells, headings: Sequence[str]) -> Iterator[str]:
    def write(*texts: str) -> str:
        return "".join(f"{text:<{_WIDTH}}" for text in texts)

    yield write("Comm. Op", "Message Size", *headings)
    for name, sizes in cells.items():
        yield name
        for _, cell in sorted(sizes.items()):
            values = [
                "-" if "gbps" in key and not value else _number(value)
                for key, value in cell.items()
                if not key.startswith("msg_size")
            ]
            yield write("", cell["msg_size_str"], *values)


def write_line(
    name: str, took_ms: float, size_bytes: int, algbw_gb_per_s: float, busbw_gb_per_s: float
) -> str:
    """Returns the log line for an operation, with NaN written as "-".

    Example:
        >>> write_line("all_reduce", 0.125, 4096, 0.0328, 0.0000061)
        'comm op: all_reduce | time (ms): 0.12 | msg size: 4.0 KB | algbw (Gbps): 0.26 | busbw (Gbps): 4.9e-05'
    """  # noqa: E501
    cells = (
        f"comm op: {name}",
        f"time (ms): {_number(took_ms)}",
        f"msg size: {_size_text(size_bytes)}",
        f"algbw (Gbps): {_number(algbw_gb_per_s * 8)}",
        f"busbw (Gbps): {_number(busbw_gb_per_s * 8)}",
    )
    return " | ".join(cells)


def _number(value: float) -> str:
    """Formats a number with two decimals, as in DeepSpeed, or with more if it would round to 0."""
    if math.isnan(value):
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if value == 0 or value >= 0.01 else f"{value:.2g}"


def _size_text(size_bytes: int) -> str:
    if size_bytes == 0:
        return "0B"
    power = (size_bytes.bit_length() - 1) // 10
    return f"{round(size_bytes / 1024**power, 2)} {BYTE_UNITS[power].replace('i', '')}"
