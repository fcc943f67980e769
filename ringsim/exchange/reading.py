"""Files that others may have written, read within limits and refused with one error.

Also their events, gathered into a trace.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from ringsim.errors import RingError, TraceFileError
from ringsim.traces.events import (
    COLUMN_DTYPES,
    NONE,
    OP_CODES,
    Events,
    Tables,
    make_events,
    name_damage,
    read_file,
    read_tables,
    write_tables,
)
from ringsim.traces.files import check_run
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from os import PathLike

__all__ = [
    "Rows",
    "columns_of",
    "list_files",
    "name_missing",
    "read_bytes",
    "reading",
    "whole_rows",
]

MAX_BYTES: Final = 2**30  # of one file, unpacked
# A trace of very regular steps is packed to a thirtieth, repeated zeros to a thousandth. What
# others would unpack to gigabytes was made to fill the reader's memory.
FREE_BYTES: Final = 16 * 2**20
MAX_RATIO: Final = 100
_DAMAGE: Final = (
    *(
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
        EOFError,
    ),
    *(DecodeError, zlib.error),
)


@contextmanager
def reading(path: str | PathLike[str], what: str) -> Iterator[None]:
    """Turns what damaged data raises within the block into a TraceFileError.

    It says what the file should be.

    Example:
        >>> try:
        ...     with reading("run.json", "a Chrome trace"):
        ...         int("x")
        ... except TraceFileError as error:
        ...     print(error)
        A file to import must be a Chrome trace, got run.json: invalid literal for int() with base 10: 'x'. Export it again.
    """  # noqa: E501
    try:
        yield
    except RingError:
        raise  # says it better, or speaks of an argument
    except _DAMAGE as error:
        raise TraceFileError(
            f"A file to import must be {what}, got {os.fsdecode(path)}: {name_damage(error)}. "
            "Export it again."
        ) from error


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Returns the content of a file, unpacked if it is gzipped.

    Raises TraceFileError if it cannot be read, or is larger than 1 GiB.
    """
    data = read_file(path, "A file to import", MAX_BYTES)
    if data[:2] == b"\x1f\x8b":
        with reading(path, "packed by gzip"):
            unpacking = zlib.decompressobj(wbits=31)
            most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * len(data)))
            data = unpacking.decompress(data, most + 1)
            if most < len(data) <= MAX_BYTES:
                raise ValueError(
                    f"it unpacks to more than {MAX_RATIO} times its size, which no trace does"
                )
            if not unpacking.eof and len(data) <= MAX_BYTES:
                raise ValueError("its end is missing")
    if len(data) > MAX_BYTES:
        raise TraceFileError(
            f"A file to import must be at most {MAX_BYTES} bytes, got more "
            f"({os.fsdecode(path)}). Export a part of the run."
        )
    return data


def list_files(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]], fits: Callable[[Path], Any]
) -> list[str | PathLike[str]]:
    """Returns the files of a run, one a rank, that are named one by one or by their directory.

    There only those that ``fits`` picks.
    """
    if not isinstance(paths, str | os.PathLike):
        several = list(paths)
    elif os.path.isdir(paths):
        several = [path for path in sorted(Path(paths).iterdir()) if fits(path)]
    else:
        several = [paths]
    if not several:
        raise TraceFileError(
            f"The files to import must be one or more, got none ({paths!r}). "
            "Name them, or their directory."
        )
    return several


def name_missing(what: str, ranks: Iterable[int], size: int) -> list[str]:
    """Returns a note that ``what`` is there of ``ranks`` only; none if it is there of all."""
    missing = sorted(set(range(size)) - set(ranks))
    return (
        [
            (
                f"no {what} of rank {', '.join(map(str, missing[:8]))}"
                f"{' and others' if len(missing) > 8 else ''}"
            )
        ]
        if missing
        else []
    )


_NAMED: Final = ("group", "payload", "label", "file")


class Rows:
    """Events that become a trace; they may be added in any order.

    Example:
        >>> from ringsim.traces.events import Group
        >>> rows = Rows()
        >>> rows.add(1, "recv", 500, peer=0, group=Group("world", (0, 1)), done_ns=900)
        >>> rows.add(0, "send", 400, peer=1, group=Group("world", (0, 1)), done_ns=700)
        >>> trace = rows.trace({"world_size": 2})
        >>> trace.events.rank.tolist(), trace.events.post_ns.tolist(), len(trace.messages)
        ([0, 1], [0, 100], 1)
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, int]] = []
        self._numbers: dict[str, dict[Any, int]] = {name: {} for name in _NAMED}

    def add(self, rank: int, op: str, post_ns: int, **columns: Any) -> None:
        """Adds one event, by torch's name of its operation; the clock may start anywhere.

        Other columns go by their names: ``group`` is a Group, ``payload`` a Payload, ``label`` and
        ``file`` are words.
        """
        row = {"rank": rank, "op": OP_CODES[op], "post_ns": post_ns}
        for name, value in columns.items():
            if name in _NAMED:
                numbers = self._numbers[name]
                row[name] = numbers.setdefault(value, len(numbers))
            else:
                row[name] = value
        self._rows.append(row)

    def trace(self, metadata: dict[str, Any]) -> Trace:
        """Returns the trace: each rank's events in the order of posting, the earliest at 0.

        Raises ValueError where no run has them.
        """
        rows = sorted(self._rows, key=lambda row: (row["rank"], row["post_ns"]))
        first = min((row["post_ns"] for row in rows), default=0)
        columns: dict[str, list[int]] = {
            name: [
                row.get(name, 0 if name == "thread" else 2 if name == "status" else NONE)
                for row in rows
            ]
            for name in COLUMN_DTYPES
            if name != "seq"
        }
        for name in ("post_ns", "wait_ns", "done_ns"):
            columns[name] = [
                value if value == NONE and name != "post_ns" else value - first
                for value in columns[name]
            ]
        groups, payloads, labels, files = (tuple(self._numbers[name]) for name in _NAMED)
        # which checks every number, and every word
        tables = read_tables(write_tables(Tables(groups, payloads, labels, files)))
        events = make_events(columns_of(columns), tables)
        check_run(events, metadata)
        return Trace(events, metadata)


def columns_of(columns: dict[str, list[int]]) -> dict[str, Any]:
    """Returns columns as numpy arrays of the dtypes that ``Events`` has.

    Raises ValueError where a number does not fit.
    """
    arrays = {}
    for name, values in columns.items():
        limits = np.iinfo(COLUMN_DTYPES[name])
        if any(type(value) is not int for value in values):
            raise ValueError(f"the column {name} holds something other than whole numbers")
        if values and not (limits.min <= min(values) and max(values) <= limits.max):
            raise ValueError(
                f"the column {name} holds a number outside {limits.min} to {limits.max}"
            )
        arrays[name] = np.array(values, dtype=COLUMN_DTYPES[name])
    return arrays


def whole_rows(rows: list[Any], tables: Tables) -> Events:
    """Returns events from rows of all columns, in any order.

    Raises ValueError where a row does not have them, or a number does not fit.
    """
    if not all(isinstance(row, list) and len(row) == len(COLUMN_DTYPES) for row in rows):
        raise ValueError(f"an event does not have {len(COLUMN_DTYPES)} numbers")
    # by rank, then by the order of posting
    ordered = sorted(rows, key=lambda row: (row[0], row[2]))
    columns = {name: [row[place] for row in ordered] for place, name in enumerate(COLUMN_DTYPES)}
    return make_events(columns_of(columns), tables)
