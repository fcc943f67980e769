"""Splits two runs' time into shares, by step and by operation.

The shares are first use, posting, waiting, transfer, computing and program. As for a calibration,
each thread's time is split at the moments in the thread's trace::

    | posting |  program  | computing ........ |  program  | posting | waiting ...... | transfer ... |
    ^ isend               ^ compute begins     ^ ends                ^ wait           ^ both posted  ^ done

If the first operation of a kind takes longer to post than usual on its rank, the extra time counts
as *first use*.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringsim.prediction.calibration import POSTS, Moment, join_columns, list_moments
from ringsim.prediction.differences import name_operations, wait_for_others
from ringsim.traces.events import NONE, OP_NAMES, Ints
from ringsim.traces.matching import number_rows
from ringsim.traces.units import time_text
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("first use", "posting", "waiting", "transfer", "computing", "program")
_FIRST_USE, _POSTING, _WAITING, _TRANSFER, _COMPUTING, _PROGRAM = range(len(PARTS))


@dataclass(frozen=True, eq=False)
class PartsTable:
    """The table in ``Comparison.parts``.

    The columns have equal length, with a row for each step, operation and part. The times are sums
    over all ranks.

    Attributes:
        step: the index of the step.
        operation: torch's name for the operation, or the name of the span.
        part: one of ``PARTS``.
        seconds: the times in the first run and in the second, shape (rows, 2).
    """

    step: Ints
    operation: tuple[str, ...]
    part: tuple[str, ...]
    seconds: Ints

    def to_pandas(self) -> pd.DataFrame:
        """Returns the rows as a pandas DataFrame, with the largest differences first."""
        import pandas as pd

        first_s, second_s = self.seconds.T
        columns = {
            "step": self.step,
            "operation": self.operation,
            "part": self.part,
            "first_s": first_s,
            "second_s": second_s,
            "longer_s": second_s - first_s,
        }
        return pd.DataFrame(columns).sort_values(
            "longer_s", key=np.abs, ascending=False, ignore_index=True, kind="stable"
        )

    def __str__(self) -> str:
        """Returns each part's total in both runs."""
        sums = {
            part: self.seconds[[each == part for each in self.part]].sum(axis=0) for part in PARTS
        }
        return ", ".join(
            f"{part} {time_text(one * 1e9)} -> {time_text(other * 1e9)}"
            for part, (one, other) in sums.items()
            if one or other
        )


def share_out(traces: Sequence[Trace], numbers: Sequence[Ints]) -> PartsTable:
    """Splits two runs' time into parts.

    Args:
        traces: the two runs.
        numbers: for each run, the step of each event, or -1 for events to leave out.
    """
    names, words = name_operations(*(trace.events for trace in traces))
    shared = []
    for run, (trace, step) in enumerate(zip(traces, numbers, strict=True)):
        event, part, seconds = _list_parts(trace)
        name = np.where(part == _PROGRAM, len(words), names[run][event])
        own = step[event] != NONE
        columns = (step[event], part, name, np.full(len(event), run), seconds)
        shared.append([column[own] for column in columns])
    step, part, name, run_of, seconds = join_columns(shared)
    row = number_rows(step, part, name)
    some = np.unique(row, return_index=True)[1]
    sums = np.zeros((len(some), len(traces)))
    np.add.at(sums, (row, run_of), seconds)
    spent = sums.any(axis=1)
    some = some[spent]
    return PartsTable(
        step[some],
        tuple([*words, ""][number] for number in name[some].tolist()),
        tuple(PARTS[number] for number in part[some].tolist()),
        sums[spent],
    )


def _list_parts(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Returns each moment's event, part and time in seconds.

    Each moment occurs three times, because it may consist of waiting, first use and something else.
    """
    events = trace.events
    event, kind, seconds = list_moments(trace)
    part = np.full(len(event), _PROGRAM)
    part[(kind == Moment.COMPUTE) | ((kind == Moment.BEGIN) & (events.stage[event] != NONE))] = (
        _COMPUTING
    )
    part[np.isin(kind, POSTS)] = _POSTING
    blocked = kind == Moment.WAIT
    part[blocked] = _TRANSFER
    late_s = wait_for_others(trace)[event] * 1e-9
    waited = np.where(blocked, np.minimum(late_s, seconds), 0.0)
    beyond = _find_first_uses(trace, event, part, seconds)
    zero = np.zeros_like(part)
    return (
        np.tile(event, 3),
        np.concatenate([part, zero + _WAITING, zero + _FIRST_USE]),
        np.concatenate([seconds - waited - beyond, waited, beyond]),
    )


def _find_first_uses(trace: Trace, event: Ints, part: Ints, seconds: Ints) -> Ints:
    """Returns each moment's posting time in excess of the usual time.

    The excess is nonzero only for the first operation of a kind on a rank.
    """
    events = trace.events
    beyond = np.zeros(len(event))
    posting = np.flatnonzero(part == _POSTING)
    kinds = events.rank[event[posting]] * len(OP_NAMES) + events.op[event[posting]]
    for kind in np.unique(kinds):
        own = posting[kinds == kind]
        own = own[np.argsort(events.post_ns[event[own]], kind="stable")]
        if len(own) > 1:
            beyond[own[0]] = max(seconds[own[0]] - float(np.median(seconds[own[1:]])), 0.0)
    return beyond
