"""Where the time of two runs goes, step by step and operation by operation.

First use, posting, waiting, transfer, computing, program. The time of each thread is shared out
between the moments that its trace shows, as for a calibration::

    | posting |  program  | computing ........ |  program  | posting | waiting ...... | transfer ... |
    ^ isend               ^ compute begins     ^ ends                ^ wait           ^ both posted  ^ done

A first operation of a kind that takes longer to post than is usual of its rank is *first use*
beyond that.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.prediction.calibration import Moment, list_moments
from ringsim.traces.events import NONE, OP_NAMES, SPAN, Ints
from ringsim.traces.matching import wait_for_last
from ringsim.traces.units import time_text
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PARTS", "Parts", "share_out"]

PARTS: Final = ("first use", "posting", "waiting", "transfer", "computing", "program")
_FIRST_USE, _POSTING, _WAITING, _TRANSFER, _COMPUTING, _PROGRAM = range(len(PARTS))
_POSTS: Final = (Moment.POST_SEND, Moment.POST_EARLY, Moment.POST_RECV, Moment.POST_COLLECTIVE)


@dataclass(frozen=True, eq=False)
class Parts:
    """The table of ``Comparison.parts``.

    Columns of one length, a row for each step, operation and part; all ranks together.

    Attributes:
        step: index of the step.
        operation: name of the operation or span, as torch spells it or the program does.
        part: one of ``PARTS``.
        seconds: in the first run and in the second; shape (rows, 2).
    """

    step: Ints
    operation: tuple[str, ...]
    part: tuple[str, ...]
    seconds: Ints

    def to_pandas(self) -> pd.DataFrame:
        """Returns the rows as a new pandas DataFrame; what differs most comes first."""
        import pandas as pd

        columns: dict[str, Any] = {
            "step": self.step,
            "operation": list(self.operation),
            "part": list(self.part),
        }
        columns |= {
            "first_s": self.seconds[:, 0],
            "second_s": self.seconds[:, 1],
            "longer_s": self.seconds[:, 1] - self.seconds[:, 0],
        }
        return pd.DataFrame(columns).sort_values(
            "longer_s", key=np.abs, ascending=False, ignore_index=True, kind="stable"
        )

    def __str__(self) -> str:
        """Returns the sum of each part, in both runs."""
        sums = {
            part: self.seconds[[each == part for each in self.part]].sum(axis=0) for part in PARTS
        }
        return ", ".join(
            f"{part} {time_text(one * 1e9)} -> {time_text(other * 1e9)}"
            for part, (one, other) in sums.items()
            if one or other
        )


def share_out(traces: Sequence[Trace], numbers: Sequence[Ints]) -> Parts:
    """Shares out the time of two runs.

    Args:
        traces: the two.
        numbers: of each, the step of each event; those of step -1 are left out.
    """
    names: dict[str, int] = {}
    columns = []
    for run, (trace, step) in enumerate(zip(traces, numbers, strict=True)):
        event, part, seconds = _list_parts(trace)
        own = step[event] != NONE
        columns.append(
            [
                each[own]
                for each in (
                    step[event],
                    part,
                    _name(trace, event, part, names),
                    np.full(len(event), run),
                    seconds,
                )
            ]
        )
    step, part, name, runs, spent = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    rows, which = np.unique(np.stack([step, part, name]), axis=1, return_inverse=True)
    sums = np.zeros((rows.shape[1], len(traces)))
    np.add.at(sums, (which.reshape(-1), runs), spent)
    rows, sums = rows[:, sums.any(axis=1)], sums[sums.any(axis=1)]
    known = list(names)
    return Parts(
        rows[0],
        tuple(known[each] for each in rows[2]),
        tuple(PARTS[each] for each in rows[1]),
        sums,
    )


def _name(trace: Trace, event: Ints, part: Ints, names: dict[str, int]) -> Ints:
    """Returns the number of what each event is called, "" for the program around it.

    New names join ``names``.
    """
    events = trace.events
    staged = (events.kind[event] == SPAN) & (events.stage[event] != NONE)
    key = np.where(staged, len(OP_NAMES) + events.label[event], events.op[event])
    key[part == _PROGRAM] = NONE
    found, which = np.unique(key, return_inverse=True)
    texts = [
        ""
        if each == NONE
        else OP_NAMES[each]
        if each < len(OP_NAMES)
        else events.tables.labels[each - len(OP_NAMES)]
        for each in found.tolist()
    ]
    numbers: Ints = np.array(
        [names.setdefault("compute" if text == "span" else text, len(names)) for text in texts]
    )[which]
    return numbers


def _list_parts(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Returns the event, the part and the seconds of each moment.

    One at which a rank waits, and then is sent something, is two.
    """
    events, waits = trace.events, trace.waits
    event, kind, seconds = list_moments(trace)
    part = np.full(len(event), _PROGRAM)
    part[(kind == Moment.COMPUTE) | ((kind == Moment.BEGIN) & (events.stage[event] != NONE))] = (
        _COMPUTING
    )
    part[np.isin(kind, _POSTS)] = _POSTING
    blocked = kind == Moment.WAIT
    part[blocked] = _TRANSFER
    late_s = (waits.late_sender_ns + waits.late_receiver_ns + wait_for_last(events, trace.apart))[
        event
    ] * 1e-9
    waited = np.where(blocked, np.minimum(late_s, seconds), 0.0)
    beyond = _find_first_uses(trace, event, part, seconds)
    split = ((waited, _WAITING), (beyond, _FIRST_USE))
    events_of = [event, *(event[spent > 0] for spent, _ in split)]
    parts_of = [part, *(np.full(np.count_nonzero(spent), number) for spent, number in split)]
    return (
        np.concatenate(events_of),
        np.concatenate(parts_of),
        np.concatenate([seconds - waited - beyond, waited[waited > 0], beyond[beyond > 0]]),
    )


def _find_first_uses(trace: Trace, event: Ints, part: Ints, seconds: Ints) -> Ints:
    """Returns, by moment, what posting took beyond the usual.

    For the first operation of a kind on a rank; 0 for all others.
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
