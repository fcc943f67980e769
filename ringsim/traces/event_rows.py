"""Builds a trace from single events, added in any order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ringsim.traces.clocks import TIMES
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import (
    COLUMN_DTYPES,
    DEFAULTS,
    NONE,
    OP_CODES,
    Events,
    Tables,
    make_events,
    read_tables,
    write_tables,
)
from ringsim.traces.files import check_run
from ringsim.traces.parts import TABLE_OF
from ringsim.traces.value import Trace


class EventRows:
    """Collects events in any order and builds a trace from them.

    Example:
        >>> from ringsim.traces.events import Group
        >>> rows = EventRows()
        >>> rows.add(1, "recv", 500, peer=0, group=Group("world", (0, 1)), done_ns=900)
        >>> rows.add(0, "send", 400, peer=1, group=Group("world", (0, 1)), done_ns=700)
        >>> trace = rows.trace({"world_size": 2})
        >>> trace.events.rank.tolist(), trace.events.post_ns.tolist(), len(trace.messages)
        ([0, 1], [0, 100], 1)
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, int]] = []
        self._numbers: dict[str, dict[Any, int]] = {name: {} for name in TABLE_OF}

    def add(self, rank: int, op: str, post_ns: int, **columns: Any) -> None:
        """Adds one event; ``op`` is torch's name for the operation.

        Times may count from any moment. Pass the other columns by name: ``group`` as a Group,
        ``payload`` as a Payload, ``label`` and ``file`` as strings, and the rest as integers. A
        column that is None does not apply.
        """
        row = {"rank": rank, "op": OP_CODES[op], "post_ns": post_ns}
        for name, value in columns.items():
            if value is None:
                continue
            if name in TABLE_OF:
                numbers = self._numbers[name]
                row[name] = numbers.setdefault(value, len(numbers))
            else:
                row[name] = value
        self._rows.append(row)

    def trace(self, metadata: JsonObject) -> Trace:
        """Returns a trace with each rank's events in posting order; the earliest event is at 0.

        Raises ValueError if the events cannot belong to one run.
        """
        first = min((row["post_ns"] for row in self._rows), default=0)
        ordered = sorted(self._rows, key=lambda row: (row["rank"], row["post_ns"]))
        counts: Counter[int] = Counter()
        rows = []
        for row in ordered:
            known = DEFAULTS | row | {"seq": counts[row["rank"]]}
            counts[row["rank"]] += 1
            for name in TIMES:
                if name == "post_ns" or known[name] != NONE:
                    known[name] -= first
            rows.append([known[name] for name in COLUMN_DTYPES])
        # this step checks every string; whole_rows and check_run check the numbers
        names = read_tables(write_tables(Tables(*map(tuple, self._numbers.values()))))
        events = whole_rows(rows, names)
        check_run(events, metadata)
        return Trace(events, metadata)


def whole_rows(rows: list[Any], tables: Tables) -> Events:
    """Returns events built from complete rows, which may be in any order.

    Raises ValueError if a row has the wrong length or a number does not fit its dtype.
    """
    if not all(isinstance(row, list) and len(row) == len(COLUMN_DTYPES) for row in rows):
        raise ValueError(f"an event does not consist of {len(COLUMN_DTYPES)} numbers")
    # by rank, then in posting order
    ordered = sorted(rows, key=lambda row: (row[0], row[2]))
    columns = {name: [row[place] for row in ordered] for place, name in enumerate(COLUMN_DTYPES)}
    for name, values in columns.items():
        limits = np.iinfo(COLUMN_DTYPES[name])
        if any(type(value) is not int for value in values):
            raise ValueError(f"the column {name} contains a value that is not a whole number")
        if values and not (limits.min <= min(values) and max(values) <= limits.max):
            raise ValueError(
                f"the column {name} contains a number outside the range {limits.min} to "
                f"{limits.max}"
            )
    return make_events(columns, tables)
