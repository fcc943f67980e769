"""Implements ``ringsim.compare``, which compares two runs, or a run and its prediction.

Errors are signed, and relative to the first run: ``second / first - 1``. An error of -0.1 means
that a prediction is 10 % too short. Two baselines help you judge a prediction: *nominal* uses only
the times requested in calls of ``ringsim.compute``, and *no communication* uses the predicted times
of computations. In both, messages take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ringsim.errors import ArgumentError, RingError
from ringsim.prediction.calibration import find_asked, median_costs
from ringsim.prediction.differences import PROGRAM, Differences, differ, pair
from ringsim.prediction.time_shares import PartsTable, share_out
from ringsim.provenance import describe_replay
from ringsim.schedules.engine import evaluate
from ringsim.schedules.schedule import Schedule
from ringsim.traces.display import Bundle, Images, Style, bundle
from ringsim.traces.events import MARK, NONE, SPAN, Events, Ints
from ringsim.traces.steps import count_steps, find_step, is_step, list_steps, number_steps
from ringsim.traces.units import count, time_text
from ringsim.traces.value import Trace, check_trace

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Errors:
    """A summary of signed relative errors.

    Attributes:
        mean: the mean of the absolute errors (the mean absolute percentage error).
        worst: the largest absolute error.
        bias: the mean of the signed errors, which is negative if the prediction is mostly too
            short.
        count: the number of errors.

    Example:
        >>> Errors.of([0.25, -0.75])
        Errors(mean=0.5, worst=0.75, bias=-0.25, count=2)
    """

    mean: float
    worst: float
    bias: float
    count: int

    @classmethod
    def of(cls, errors: Ints | list[float]) -> Errors:
        """Summarizes errors. The summary is NaN if there are no errors."""
        values = np.asarray(errors, dtype=np.float64)
        if len(values) == 0:
            return cls(np.nan, np.nan, np.nan, 0)
        size = np.abs(values)
        return cls(float(size.mean()), float(size.max()), float(values.mean()), len(values))


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison of two runs, as returned by ``compare``.

    Print a comparison to see the differences and where they began, or draw them with ``plot()``.
    The first run is called *real* and the second *virtual*, as for a run and its prediction, but
    you can compare any two runs.

    Attributes:
        real: the first run, which is the measured run if the second run is its prediction.
        virtual: the second run.
        real_steps_s: the length in seconds of each step in the first run, or of the whole run if it
            contains no pipeline steps.
        virtual_steps_s: the length in seconds of each step in the second run.
        nominal_s: the length of a step if each computation took the requested time and messages
            took no time, or None if no times were requested.
        no_communication_s: the length of a step with the second run's computations if messages took
            no time, or None if there is no step.
        real_index: the operations and spans that occur in both runs, as indexes into
            ``real.events``.
        virtual_index: the same operations and spans, as indexes into ``virtual.events``.
        real_begin_ns: the time at which each step in ``real`` began to compute.
        virtual_begin_ns: the time at which each step in ``virtual`` began to compute.
        step: the step of each compared event.
        lag_s: how much later each compared event ends in the second run, measured from the start of
            the step.
        unpaired: the number of operations and spans that occur only in the first run, and the
            number that occur only in the second.
        differences: a table that shows how much longer each operation took and how much later it
            ended, by step, rank, stage and operation.
        parts: a table that shows where the time goes (first use, posting, waiting, transfer,
            computing, program), by step and operation.
        called: the names of the two runs, such as their file names, or None for "measured" and
            "predicted", or "first" and "second".
    """

    real: Trace
    virtual: Trace
    real_steps_s: Ints
    virtual_steps_s: Ints
    nominal_s: float | None
    no_communication_s: float | None
    real_index: Ints
    virtual_index: Ints
    real_begin_ns: Ints
    virtual_begin_ns: Ints
    step: Ints
    lag_s: Ints
    unpaired: tuple[int, int]
    differences: Differences
    parts: PartsTable
    called: tuple[str, str] | None = None

    @property
    def predicts(self) -> bool:
        """Whether only the second run is simulated or predicted."""
        made = ("simulated", "predicted")
        real, virtual = self.real.metadata.get("source"), self.virtual.metadata.get("source")
        return virtual in made and real not in made

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two runs.

        These are the names in ``called``, or "measured" and "predicted", or "first" and "second".
        """
        if self.called is not None:
            return self.called
        return ("measured", "predicted") if self.predicts else ("first", "second")

    @cached_property
    def steps(self) -> Errors:
        """The errors in the lengths of the steps."""
        return Errors.of(self.virtual_steps_s / self.real_steps_s - 1)

    @property
    def median_error(self) -> float:
        """The error of the median step, which a single disturbed step does not affect."""
        return float(np.median(self.virtual_steps_s) / np.median(self.real_steps_s) - 1)

    @cached_property
    def operations(self) -> Errors:
        """The errors in operation end times, as fractions of the step's length.

        An error of 0.02 means that the predicted end of an operation is too late by 2 % of the
        step's length.
        """
        return Errors.of(self.lag_s / self.real_steps_s[self.step])

    def baseline(self, name: str) -> Errors:
        """Returns the errors of a baseline.

        Args:
            name: the name of the baseline, "nominal" or "no communication".

        Raises:
            ArgumentError: there is no such baseline.
        """
        predicted = self._baselines.get(name)
        if predicted is None:
            raise ArgumentError(
                f"name must be one of the baselines {list(self._baselines)}, got {name!r}. "
                "Baselines exist only for runs with pipeline steps."
            )
        return Errors.of(predicted / self.real_steps_s - 1)

    @property
    def _baselines(self) -> dict[str, float]:
        known = {"nominal": self.nominal_s, "no communication": self.no_communication_s}
        return {name: value for name, value in known.items() if value is not None}

    def plot(
        self, *, step: int | None = None, ax: Axes | None = None, **look: Unpack[Style]
    ) -> Axes:
        """Draws one step of both runs, the second over the first, on ``ax`` or on a new figure.

        Args:
            step: the number of the step, counted from 0, or None for a step of median length.
            ax: the axes to draw on.
        """
        from ringsim.plot.overlay import plot_overlay

        return plot_overlay(self, step=step, ax=ax, **look)

    def to_pandas(self) -> pd.DataFrame:
        """Returns the table ``differences`` as a DataFrame, with the largest differences first."""
        return self.differences.to_pandas()

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes both runs to an interactive page, on a single time axis, rank by rank."""
        from ringsim.view.html import to_html

        to_html([self.real, self.virtual], path, self.names)

    def where_it_began(self) -> str:
        """Returns a sentence that names the step and the operation where the runs began to differ.

        The result is empty if only waiting made the run longer. Otherwise, the sentence names the
        stage's operations that changed most in the same direction as the whole run.
        """
        table = self.differences
        grown_s = float(np.sum(self.virtual_steps_s - self.real_steps_s))
        row = table.find_beginning(round(grown_s, 9))
        if row is None:
            return ""
        change = float(table.longer_s[row])
        step = f"step {table.step[row]}, " if count_steps(self.real.events) else ""
        stage = "" if table.stage[row] == NONE else f" of stage {table.stage[row]}"
        how = f"{time_text(abs(change) * 1e9)} {'longer' if change > 0 else 'less'}"
        took = f"{step}rank {table.rank[row]}: {table.operation[row]}{stage} took {how}."
        if (event := int(table.began[row])) != NONE:
            return f"{took} The change began with {self.virtual[event]!r}."
        if table.operation[row] != PROGRAM:
            return took
        of_rank = self.real.events.rank[self.real_index] == table.rank[row]
        own = of_rank & (self.step == table.step[row])
        first, second = self.real_index[own], self.virtual_index[own]
        longer = _find_gaps(self.virtual.events, second) - _find_gaps(self.real.events, first)
        event = int(second[np.argmax(longer * np.sign(change))])
        return f"{took} The largest part was before {self.virtual[event]!r}."

    def __repr__(self) -> str:
        """Returns a few lines about the differences, followed by the first rows of the table."""
        lines = self._tell()
        if self.differences.longer_s.any():
            lines.append(self.differences.to_text(self.names))
        if self.predicts:
            notes = self.virtual.metadata.get("notes", ())
            lines += [f"note on the prediction: {note}" for note in notes]
        return "\n".join(lines)

    def describe(self) -> str:
        """Returns a one-sentence description of the plot, for use as alternative text."""
        what = "A measured run and its prediction" if self.predicts else "Two runs"
        return f"{what}; {'; '.join(line.strip().rstrip('.') for line in self._tell())}."

    def _tell(self) -> list[str]:
        first, second = self.names
        real_ms = np.median(self.real_steps_s) * 1e3
        virtual_ms = np.median(self.virtual_steps_s) * 1e3
        what = "median step" if count_steps(self.real.events) else "run"
        times = (
            f"{what}: {first} {real_ms:.3f} ms, {second} {virtual_ms:.3f} ms "
            f"({self.median_error:+.1%})"
        )
        errors = (describe_replay(run.metadata) for run in (self.real, self.virtual))
        lines = ["; ".join([times, *filter(None, errors)])]
        if self.steps.count > 1:
            lines.append(f"steps: {self._words(self.steps)}")
        if self.predicts:
            lines += [
                f"  baseline {name}: {value * 1e3:.3f} ms, {self._words(self.baseline(name))}"
                for name, value in self._baselines.items()
            ]
        lines.append(f"ends of operations, relative to the step: {self._words(self.operations)}")
        lines += [
            f"only {name}: {count(number, 'event')}"
            for name, number in zip(self.names, self.unpaired, strict=True)
            if number
        ]
        if parts := str(self.parts):
            lines.append(f"all ranks: {parts}")
        if began := self.where_it_began():
            lines.append(f"largest change: {began}")
        return lines

    def _words(self, errors: Errors) -> str:
        if self.predicts:
            return (
                f"error {errors.mean:.1%} on average, {errors.worst:.1%} at most, bias "
                f"{errors.bias:+.1%}, n {errors.count}"
            )
        return (
            f"{errors.bias:+.1%} on average, {errors.worst:.1%} at most in either direction, "
            f"n {errors.count}"
        )

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        return bundle(repr(self), self.describe(), self._draw)

    def _draw(self) -> Images:
        from ringsim.plot.overlay import overlay_images

        return overlay_images(self)


def compare(real: Trace, virtual: Trace) -> Comparison:
    """Compares two runs.

    You can compare runs before and after a change, two schedules, two machines, or a run on real
    ranks with the same run on a virtual clock. Only operations that occur in both runs are
    compared. Operations match if they are in the same step on the same rank, have the same name,
    and have the same peer or the same stage and microbatch. Extra steps in one of the runs are left
    out.

    Args:
        real: the first run.
        virtual: the second run. If it is simulated and the first run is not, it is treated as a
            prediction of the first run.

    Returns:
        The comparison. It shows the operations that took longer and where the delay began, the
        errors by step and by operation, and the errors of the baselines.

    Raises:
        ArgumentError: the two runs have no finished operation in common.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> def run(arrives_ns):
        ...     events = make_events(
        ...         {
        ...             "rank": [0, 1],
        ...             "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...             "group": [0, 0],
        ...             "peer": [1, 0],
        ...             "tag": [0, 0],
        ...             "post_ns": [0, 0],
        ...             "wait_ns": [0, 0],
        ...             "done_ns": [arrives_ns, arrives_ns],
        ...         }
        ...     )
        ...     return Trace(events, {"world_size": 2})
        >>> comparison = compare(run(2_000_000), run(1_500_000))
        >>> comparison.steps.bias, len(comparison.lag_s)
        (-0.25, 2)
        >>> comparison.to_pandas()[["rank", "operation", "longer_s"]].head(2)
           rank operation  longer_s
        0     0      send   -0.0005
        1     1      recv   -0.0005
    """
    check_trace("real", real)
    check_trace("virtual", virtual)
    runs = (real, virtual)
    num_steps = min(count_steps(trace.events) for trace in runs)
    numbers = [_number_steps(trace.events, num_steps) for trace in runs]
    alike = [
        np.where(is_step(trace.events) & (num_steps > 0), NONE, of)
        for trace, of in zip(runs, numbers, strict=True)
    ]
    pairs = pair(real, virtual, alike)
    others = [
        int(((of != NONE) & (trace.events.kind != MARK)).sum() - (of[index] != NONE).sum())
        for trace, of, index in zip(runs, alike, pairs, strict=True)
    ]
    # a pair belongs to the step of its event in the first run
    numbers[1][pairs[1]] = numbers[0][pairs[0]]
    step = alike[0][pairs[0]]
    real_done, virtual_done = real.events.done_ns[pairs[0]], virtual.events.done_ns[pairs[1]]
    done = (step != NONE) & (real_done != NONE) & (virtual_done != NONE)
    if not done.any():
        raise ArgumentError(
            "the two runs have no finished operation in common. Record the same worker twice."
        )
    real_index, virtual_index = (index[done] for index in pairs)
    step = step[done]
    real_begin, real_end = _find_extents(real, real_index, num_steps)
    virtual_begin, virtual_end = _find_extents(virtual, virtual_index, num_steps)
    lag_ns = (virtual_done[done] - virtual_begin[step]) - (real_done[done] - real_begin[step])
    nominal, no_communication = _find_baselines(virtual, num_steps)
    return Comparison(
        real=real,
        virtual=virtual,
        real_steps_s=(real_end - real_begin) * 1e-9,
        virtual_steps_s=(virtual_end - virtual_begin) * 1e-9,
        nominal_s=nominal,
        no_communication_s=no_communication,
        real_index=real_index,
        virtual_index=virtual_index,
        real_begin_ns=real_begin,
        virtual_begin_ns=virtual_begin,
        step=step,
        lag_s=lag_ns * 1e-9,
        unpaired=(others[0], others[1]),
        differences=differ(
            real, virtual, numbers, (real_begin, virtual_begin), (real_index, virtual_index)
        ),
        parts=share_out(runs, numbers),
    )


def _number_steps(events: Events, num_steps: int) -> Ints:
    """Returns the step of each event, or -1 outside the first ``num_steps`` steps.

    A run without steps counts as a single step.
    """
    if num_steps == 0:
        return np.zeros(len(events), dtype=np.int64)
    numbers = number_steps(events)
    numbers[numbers >= num_steps] = NONE
    return numbers


def _find_gaps(events: Events, index: Ints) -> Ints:
    """Returns the time for which a rank's program ran before each of its events, in ns."""
    post, done = events.post_ns[index], events.done_ns[index]
    # an operation that ends after the next event did not block the program
    blocks = (events.kind[index] == SPAN) | (done <= np.append(post[1:], post[-1]))
    ends = np.maximum.accumulate(np.where(blocks, done, post))
    gaps: Ints = np.maximum(post - np.append(post[0], ends[:-1]), 0)
    return gaps


def _find_extents(trace: Trace, index: Ints, num_steps: int) -> tuple[Ints, Ints]:
    """Returns the time at which each step began to compute and the time at which it ended, in ns.

    In a run without steps, the operations at ``index`` form one step.
    """
    extents = [(each.start.min(), each.end.max()) for each in list_steps(trace)[:num_steps]]
    if num_steps == 0:
        extents = [(trace.events.post_ns[index].min(), trace.events.done_ns[index].max())]
    begin, end = np.array(extents).T
    return begin, end


def _find_baselines(trace: Trace, num_steps: int) -> tuple[float | None, float | None]:
    """Returns the last step's makespan without communication, in two variants.

    The first uses the times requested in ``ringsim.compute``, and the second uses the computations'
    times.
    """
    if num_steps == 0:
        return None, None
    events, actions = trace.events, find_step(trace, num_steps - 1)
    placed = dict(zip(actions.stage.tolist(), actions.rank.tolist(), strict=True))
    stages, ranks = sorted(placed), sorted(set(placed.values()))
    if stages != list(range(len(stages))) or ranks != list(range(len(actions.ranks))):
        return None, None  # several pipelines next to each other, or only part of a pipeline
    schedule = Schedule(
        actions.schedule,
        actions.num_microbatches,
        tuple(placed[stage] for stage in stages),
        tuple(actions.list_actions(rank) for rank in ranks),
    )
    seconds = np.nan_to_num(find_asked(events))
    asked_s = np.zeros(len(actions.rank))
    for rank in ranks:
        own, mine = actions.rank == rank, (events.rank == rank) & (seconds > 0)
        until_s = np.concatenate([[0.0], np.cumsum(seconds[mine])])
        begun = np.searchsorted(events.post_ns[mine], [actions.start[own], actions.end[own]])
        asked_s[own] = until_s[begun[1]] - until_s[begun[0]]

    def time_step(took_s: Ints) -> float:
        return float(evaluate(schedule, median_costs(actions.stage, actions.kind, took_s)).makespan)

    try:
        nominal = time_step(asked_s) if asked_s.any() else None
        return nominal, time_step((actions.end - actions.start) * 1e-9)
    except RingError:
        return None, None  # a schedule that cannot be timed
