"""Finds the differences between two runs.

For each operation of each stage, the table shows the time that the operation itself took, and the
time that it waited for other ranks. Each moment of a rank's time in a step belongs to the innermost
span or blocked operation at that moment or, if there is none, to the program. Waits for late ranks
are counted separately, so that a delay is charged to the rank that caused it, and not to the ranks
that it reached::

    rank 0   [forward .......... 2 ms longer ]         itself +2 ms
    rank 1   recv ====================== | forward     waited +2 ms
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringsim.compute_costs import read_label
from ringsim.errors import escape_line
from ringsim.prediction.calibration import join_columns
from ringsim.traces.events import CALLS, MARK, NONE, OP_NAMES, SPAN, Events, Ints, number_places
from ringsim.traces.matching import number_rows, wait_for_last
from ringsim.traces.steps import count_steps, is_step
from ringsim.traces.units import span_text, time_text
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    import pandas as pd

PROGRAM = "(program)"  # a rank's time outside spans and waits
_COMPUTE = "compute"
_SPAN_OF_COMPUTE = len(OP_NAMES)  # the number of this name
_SPAN_WITHOUT_NAME = OP_NAMES.index("span")
_SHOWN = 8


class _Spent(NamedTuple):
    """The time that a run spent on each event.

    The columns have equal length. ``event`` is -1 for the program in a run without steps.
    """

    event: Ints
    step: Ints
    rank: Ints
    stage: Ints
    name: Ints
    counts: Ints  # 0 for an event that is part of the span around it
    end_ns: Ints
    own_ns: Ints
    waited_ns: Ints


@dataclass(frozen=True, eq=False)
class Differences:
    """The table of differences in a comparison.

    The columns have equal length, with a row for each step, rank, stage and operation. The largest
    differences come first.

    Attributes:
        step: the index of the step.
        rank: the rank.
        stage: the pipeline stage of the event or of the span around it, or -1 for none.
        operation: the name of the span, torch's name for the operation, or "(program)" for the time
            outside spans and operations.
        counts: the number of events in the first run and in the second, shape (rows, 2).
        own_s: the time that the events themselves took, in both runs.
        waited_s: the time that the events waited for other ranks, in both runs.
        later_s: how much later the last of the events ends in the second run, measured from the
            start of the step, or NaN if one of the runs has no such events.
        began: the index, among the second run's events, of the first event that took longer (or
            shorter), or -1 if the first run has no matching event.
        line: the file and line of the event in ``began``, or of the first event if only one run has
            the row, or "" if unknown.
    """

    step: Ints
    rank: Ints
    stage: Ints
    operation: tuple[str, ...]
    counts: Ints
    own_s: Ints
    waited_s: Ints
    later_s: Ints
    began: Ints
    line: tuple[str, ...]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.step)

    @cached_property
    def longer_s(self) -> Ints:
        """The extra time that each row itself took in the second run, negative if it took less."""
        longer: Ints = self.own_s[:, 1] - self.own_s[:, 0]
        return longer

    def find_beginning(self, grown_s: float = 0.0) -> int | None:
        """Returns the row in which the difference began.

        This is the operation that changed most over all steps, in the first step that has at least
        half of the operation's largest change.

        Args:
            grown_s: how much longer all steps took, negative if the steps were faster. Only changes
                in the same direction count, because faster operations do not explain longer steps.
                If ``grown_s`` is 0, the sum of the rows determines the direction.
        """
        if not len(self) or not self.longer_s.any():
            return None
        which = number_rows(
            self.rank, self.stage, np.unique(self.operation, return_inverse=True)[1]
        )
        total = np.bincount(which, weights=self.longer_s)
        sign = np.sign(grown_s) or np.sign(self.longer_s.sum()) or 1.0
        change = np.where(which == np.argmax(sign * total), sign * self.longer_s, 0.0)
        rows = np.flatnonzero(change >= change.max() / 2)
        return int(rows[np.argmin(self.step[rows])]) if change.max() > 0 else None

    def to_pandas(self) -> pd.DataFrame:
        """Returns the rows as a pandas DataFrame, in which first_s and second_s include waiting."""
        import pandas as pd

        took = self.own_s + self.waited_s
        columns = {
            "step": self.step,
            "rank": self.rank,
            "stage": pd.arrays.IntegerArray(self.stage.copy(), self.stage == NONE),
            "operation": self.operation,
            "first_count": self.counts[:, 0],
            "second_count": self.counts[:, 1],
            "first_s": took[:, 0],
            "second_s": took[:, 1],
            "longer_s": self.longer_s,
            "waited_longer_s": self.waited_s[:, 1] - self.waited_s[:, 0],
            "later_s": self.later_s,
            "began": pd.arrays.IntegerArray(self.began.copy(), self.began == NONE),
            "line": self.line,
        }
        return pd.DataFrame(columns)

    def to_text(self, names: tuple[str, str] = ("first", "second")) -> str:
        """Returns the first rows as text, with the names of the runs as column headings."""
        wide = max([9, *map(len, self.operation[:_SHOWN])])
        first, second = (max(len(name) + 2, 10) for name in names)
        heads = f"{names[0]:>{first}}{names[1]:>{second}}    itself    waited  ends later  line"
        lines = [f"step  rank  stage  {'operation':{wide}}{heads}"]
        took, waited = self.own_s + self.waited_s, self.waited_s[:, 1] - self.waited_s[:, 0]
        for row in range(min(len(self), _SHOWN)):
            stage = "-" if self.stage[row] == NONE else self.stage[row]
            lines.append(
                f"{self.step[row]:>4}{self.rank[row]:>6}{stage:>7}  {self.operation[row]:{wide}}"
                f"{time_text(took[row, 0] * 1e9):>{first}}{time_text(took[row, 1] * 1e9):>{second}}"
                f"{_signed(self.longer_s[row]):>10}{_signed(waited[row]):>10}"
                f"{_signed(self.later_s[row]):>12}  {self.line[row]}".rstrip()
            )
        if len(self) > _SHOWN:
            lines.append(f"... and {len(self) - _SHOWN:,} more rows")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Returns the first rows as text."""
        return self.to_text()


def _signed(time_s: float) -> str:
    if np.isnan(time_s):
        return "-"
    if abs(time_s) < 5e-10:
        return "0"
    return f"{'+' if time_s > 0 else '-'}{time_text(abs(time_s) * 1e9)}"


def name_operations(*several: Events) -> tuple[list[Ints], list[str]]:
    """Numbers the operations of several runs consistently.

    A span is identified by its name, and an operation by torch's name for it. The time requested in
    ``ringsim.compute`` does not count: a computation that became longer is still the same
    computation.

    Returns:
        The number of each event in each run, and the name for each number.
    """
    numbers = {(False, name): number for number, name in enumerate(OP_NAMES)} | {
        (True, _COMPUTE): _SPAN_OF_COMPUTE
    }
    found = []
    for events in several:
        spans = [
            (True, _COMPUTE if read_label(label) is not None else span_text(label))
            for label in events.tables.labels
        ]
        of_label = np.array(
            [numbers.setdefault(span, len(numbers)) for span in spans] + [_SPAN_WITHOUT_NAME],
            dtype=np.int64,
        )
        found.append(np.where(events.kind == SPAN, of_label[events.label], events.op))
    return found, [name for _, name in numbers]


def pair(first: Trace, second: Trace, steps: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Pairs the events that two runs have in common.

    If every rank did the same in both runs, a rank's n-th event is paired with its n-th event in
    the other run. Otherwise, within each step of a rank, the k-th operations with the same name and
    peer are paired, and so are the k-th spans with the same name, stage and microbatch.

    Args:
        first: the first run.
        second: the second run.
        steps: for each run, the step of each event, or -1 for events to leave out.

    Returns:
        The indexes of the paired events in each run, in the order of the first run.
    """
    chosen, columns = [], []
    names, _ = name_operations(first.events, second.events)
    for trace, name in zip((first, second), names, strict=True):
        events, span = trace.events, trace.events.kind == SPAN
        peer = np.where(span, NONE, events.peer)
        stage, microbatch = (
            np.where(span, column, NONE) for column in (events.stage, events.microbatch)
        )
        index = np.flatnonzero(events.kind != MARK)
        chosen.append(index)
        columns.append(np.stack([events.rank, name, peer, stage, microbatch])[:, index])
    # on a virtual clock, an event at the border between two steps may be in either step
    if np.array_equal(columns[0], columns[1]):
        return chosen[0], chosen[1]
    for run, step in enumerate(steps):
        step = step[chosen[run]]
        counted = step != NONE
        chosen[run] = chosen[run][counted]
        columns[run] = np.stack([step, *columns[run]])[:, counted]
    key, split = number_rows(*np.concatenate(columns, axis=1)), len(chosen[0])
    alike = key * (len(key) + 1) + np.concatenate(
        [number_places(key[:split]), number_places(key[split:])]
    )
    _, at_first, at_second = np.intersect1d(
        alike[:split], alike[split:], assume_unique=True, return_indices=True
    )
    order = np.argsort(at_first)
    return chosen[0][at_first[order]], chosen[1][at_second[order]]


def differ(
    first: Trace,
    second: Trace,
    steps: Sequence[Ints],
    begins_ns: Sequence[Ints],
    pairs: Sequence[Ints],
) -> Differences:
    """Returns the table of differences.

    Args:
        first: the first run.
        second: the second run.
        steps: for each run, the step of each event, including the steps' own spans, or -1 for
            events to leave out.
        begins_ns: for each run, the start of each step.
        pairs: the indexes of the paired events in each run.
    """
    names, words = name_operations(first.events, second.events)
    spent = [
        _share_out(trace, name, step, len(words))
        for trace, name, step in zip((first, second), names, steps, strict=True)
    ]
    both = _Spent(*join_columns(spent))
    row = number_rows(both.step, both.rank, both.stage, both.name)
    run = np.repeat([0, 1], [len(one.event) for one in spent])
    some = np.unique(row, return_index=True)[1]
    number = len(some)

    def add(values: Ints) -> Ints:
        added = np.bincount(2 * row + run, weights=values, minlength=2 * number)
        return added.reshape(-1, 2)

    ends = np.full((number, 2), np.nan)
    np.fmax.at(
        ends,
        (row, run),
        both.end_ns - np.where(run == 0, *(begins[both.step] for begins in begins_ns)),
    )
    own = add(both.own_ns) * 1e-9
    longer = own[:, 1] - own[:, 0]
    began = _find_first(spent, row[run == 1], pairs, longer)
    order = np.lexsort((both.rank[some], both.step[some], -np.abs(longer)))
    first_at = np.full((number, 2), NONE)  # the first event of each row in each run
    first_at[row[::-1], run[::-1]] = both.event[::-1]
    lines = []
    for place, (before, after) in zip(began.tolist(), first_at.tolist(), strict=True):
        if place != NONE or before == NONE:
            lines.append(_line_of(second.events, after if place == NONE else place))
        else:
            lines.append(_line_of(first.events, before) if after == NONE else "")
    some = some[order]
    return Differences(
        step=both.step[some],
        rank=both.rank[some],
        stage=both.stage[some],
        operation=tuple([*words, PROGRAM][name] for name in both.name[some].tolist()),
        counts=add(both.counts)[order].astype(np.int64),
        own_s=own[order],
        waited_s=add(both.waited_ns)[order] * 1e-9,
        later_s=(ends[:, 1] - ends[:, 0])[order] * 1e-9,
        began=began[order],
        line=tuple(lines[at] for at in order.tolist()),
    )


def wait_for_others(trace: Trace) -> Ints:
    """Returns the time for which a late rank blocked each event, in ns."""
    waits = trace.waits
    of_message = waits.late_sender_ns + waits.late_receiver_ns
    waited: Ints = of_message + wait_for_last(trace.events, trace.apart)
    return waited


def _line_of(events: Events, index: int) -> str:
    """Returns an event's file and line, or "" if they are unknown or the event is the program."""
    if index == NONE or events.file[index] == NONE:
        return ""
    file = events.tables.files[events.file[index]].partition(CALLS)[0]
    return f"{escape_line(os.path.basename(file))}:{events.line[index]}"


def _share_out(trace: Trace, name: Ints, step: Ints, program: int) -> _Spent:
    """Assigns each moment of a rank to the innermost span or blocked operation.

    ``program`` is the name for the time outside spans and blocked operations.
    """
    events = trace.events
    begin = np.where(events.kind == SPAN, events.post_ns, events.wait_ns)
    own = np.flatnonzero(
        (step != NONE) & (events.kind != MARK) & (begin != NONE) & (events.done_ns != NONE)
    )
    rank, thread, start = events.rank[own], events.thread[own], begin[own]
    end, waited = np.maximum(events.done_ns[own], start), wait_for_others(trace)[own]
    columns = [own, step[own], rank, thread, start, end, events.stage[own], name[own], waited]
    steps = is_step(events)[own] & (count_steps(events) > 0)
    if steps.any():
        columns[-2] = np.where(steps, program, name[own])
    elif len(own):  # the whole run counts as one step
        ranks, at = np.unique(rank, return_index=True)
        none, zero = np.full(len(ranks), NONE), np.zeros(len(ranks), dtype=np.int64)
        first_thread = np.minimum.reduceat(thread, at)
        begun, ended = np.minimum.reduceat(events.post_ns[own], at), np.maximum.reduceat(end, at)
        runs = [none, zero, ranks, first_thread, begun, ended, none, zero + program, zero]
        columns = list(join_columns([runs, columns]))
    order = np.lexsort((-columns[5], columns[4], columns[3], columns[2]))
    event, step, rank, thread, start, end, stage, name, waited = (
        column[order] for column in columns
    )
    took, stage, name, counts = _nest(
        rank.astype(np.int64) << 32 | thread, start, end, stage, name, program
    )
    waited = np.clip(waited, 0, took)
    return _Spent(event, step, rank, stage, name, counts, end, took - waited, waited)


def _nest(
    lane: Ints, start: Ints, end: Ints, stage: Ints, name: Ints, program: int
) -> Iterator[Ints]:
    """Returns each stretch's own time, its stage and name, and whether it counts, as columns.

    The own time is the time for which the stretch is the innermost one in its lane. Stretches must
    be ordered by lane, then by start. A stretch inside a span has the span's stage. A call of
    ``ringsim.compute`` is part of the span around it.
    """
    lanes, starts, ends, took = lane.tolist(), start.tolist(), end.tolist(), (end - start).tolist()
    stages, names, counts, stack = stage.tolist(), name.tolist(), [1] * len(start), list[int]()
    for at, begin in enumerate(starts):
        while stack and (lanes[stack[-1]] != lanes[at] or ends[stack[-1]] <= begin):
            stack.pop()
        if stack:
            around = stack[-1]
            if names[at] == _SPAN_OF_COMPUTE and names[around] != program:
                names[at], counts[at] = names[around], 0
            if stages[at] == NONE:
                stages[at] = stages[around]
        for outer in reversed(stack):  # there is more than one only if stretches overlap
            if begin < ends[outer]:
                until = min(ends[at], ends[outer])
                took[outer] -= until - begin
                begin = until
            if begin == ends[at]:
                break
        stack.append(at)
    return (np.array(column, dtype=np.int64) for column in (took, stages, names, counts))


def _find_first(spent: Sequence[_Spent], row: Ints, pairs: Sequence[Ints], longer: Ints) -> Ints:
    """Returns, for each row, the first event with at least half of the row's largest change.

    The rows are the second run's rows, numbered by ``row``.
    """
    changed = np.zeros(len(pairs[0]))
    for one, index, sign in zip(spent, pairs, (-1, 1), strict=True):
        own = np.zeros(int(max(index.max(initial=0), one.event.max(initial=0))) + 2)
        own[one.event] = one.own_ns  # the last entry is the program, which has no event
        changed += sign * own[index]
    row_of = np.full(len(own), NONE)
    row_of[spent[1].event] = row
    there = np.flatnonzero(row_of[pairs[1]] != NONE)
    of_pair, index = row_of[pairs[1][there]], pairs[1][there]
    change = changed[there] * np.sign(longer)[of_pair]
    most = np.zeros(len(longer))
    np.maximum.at(most, of_pair, change)
    # the first event is written last, so it remains
    large = np.flatnonzero((change > 0) & (change >= most[of_pair] / 2))[::-1]
    began = np.full(len(longer), NONE)
    began[of_pair[large]] = index[large]
    return began
