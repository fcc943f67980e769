"""Several sets of events made into one, as if they had been recorded together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ringsim.traces.events import COLUMN_DTYPES, NONE, Events, Ints, Tables, make_events

__all__ = ["join_events"]

_TABLE_OF: Final = {"group": "groups", "payload": "payloads", "label": "labels", "file": "files"}  # column -> its table


def join_events(parts: Sequence[Events]) -> Events:
    """Puts events together, one part after the other; names that several parts have become one.

    Args:
        parts: each with tables of its own. Those of one rank stand in the order in which they were recorded.

    Returns:
        The events of all parts. ``seq`` counts anew within each rank.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group, make_events
        >>> one = make_events({"rank": [0], "op": [OP_CODES["send"]], "group": [0]}, Tables(groups=(Group("world", (0, 1)),)))
        >>> joined = join_events([one, one])
        >>> joined.group.tolist(), joined.seq.tolist(), len(joined.tables.groups)
        ([0, 0], [0, 1], 1)
    """
    merged: dict[str, dict[Any, int]] = {column: {} for column in _TABLE_OF}
    columns: dict[str, list[Ints]] = {name: [np.zeros(0, dtype)] for name, dtype in COLUMN_DTYPES.items() if name != "seq"}
    for part in parts:
        for name, pieces in columns.items():
            values = getattr(part, name)
            if name in _TABLE_OF:
                values = _renumber(values, getattr(part.tables, _TABLE_OF[name]), merged[name])
            pieces.append(values)
    tables = Tables(**{table: tuple(merged[column]) for column, table in _TABLE_OF.items()})
    return make_events({name: np.concatenate(pieces) for name, pieces in columns.items()}, tables)


def _renumber(numbers: Ints, names: Sequence[Any], merged: dict[Any, int]) -> Ints:
    """Turns the numbers of one table into those of the merged one."""
    to_merged = np.array([*(merged.setdefault(name, len(merged)) for name in names), NONE], dtype=np.int32)
    return to_merged[numbers]  # -1 picks the last, which is NONE
