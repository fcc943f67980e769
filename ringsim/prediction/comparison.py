"""``ringsim.compare``: a run on real ranks beside the same run on a virtual clock, and how far off the prediction was.

Errors are signed and relative to the measurement, ``virtual / real - 1``: -0.1 is a prediction that is 10 % too short. Two baselines show
what the prediction is worth: *nominal* has only what the program asked of ``ringsim.compute``, *no communication* has the predicted
computations. In both, messages take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ringsim.compute_costs import read_label
from ringsim.errors import ArgumentError, RingError
from ringsim.prediction.calibration import median_costs
from ringsim.schedules.engine import evaluate
from ringsim.schedules.schedule import Schedule
from ringsim.traces.events import MARK, NONE, OP_NAMES, SPAN, Events, Ints
from ringsim.traces.lazy import Style, bundle, resolve
from ringsim.traces.steps import StageActions, count_steps, find_step, is_step, number_steps
from ringsim.traces.value import Trace, check_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Comparison", "Errors", "compare"]


@dataclass(frozen=True)
class Errors:
    """A summary of signed relative errors.

    Attributes:
        mean: of their absolute values: the mean absolute percentage error.
        worst: the largest absolute value.
        bias: their mean: below 0 if the prediction is mostly too short.
        count: how many there are.

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
        """Summarises errors; NaN if there are none."""
        values = np.asarray(errors, dtype=np.float64)
        if len(values) == 0:
            return cls(np.nan, np.nan, np.nan, 0)
        return cls(float(np.abs(values).mean()), float(np.abs(values).max()), float(values.mean()), len(values))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs of one program, from ``compare``. Printing it says how good the prediction was, ``plot()`` shows it.

    Attributes:
        real: what was measured.
        virtual: what was predicted.
        real_steps_s: how long each step took, in seconds; the whole run if it has no steps of a pipeline.
        virtual_steps_s: how long it was predicted to take.
        nominal_s: what a step would take if each computation took what it was asked to, and messages nothing; None if none was asked to.
        no_communication_s: the same with the predicted computations; None if there is no step.
        real_index: the operations and spans that were compared, by their place in ``real.events``.
        virtual_index: the same in ``virtual.events``.
        real_begin_ns: when each step began to compute, in the time of ``real``.
        virtual_begin_ns: the same in that of ``virtual``.
        step: the step of each compared event.
        lag_s: how much later each of them ends in the prediction, counted from the start of the step.
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

    @cached_property
    def steps(self) -> Errors:
        """The errors of the steps."""
        return Errors.of(self.virtual_steps_s / self.real_steps_s - 1)

    @property
    def median_error(self) -> float:
        """The error of the median step, on which a disturbed step has no influence."""
        return float(np.median(self.virtual_steps_s) / np.median(self.real_steps_s) - 1)

    @cached_property
    def operations(self) -> Errors:
        """How far off the ends of operations are, as parts of their step's length: 0.02 for one that ends 2 % of the step too late."""
        return Errors.of(self.lag_s / self.real_steps_s[self.step])

    def baseline(self, name: str) -> Errors:
        """Returns the errors of a baseline.

        Args:
            name: "nominal" or "no communication".

        Raises:
            ArgumentError: there is no such baseline.
        """
        known = {"nominal": self.nominal_s, "no communication": self.no_communication_s}
        predicted = known.get(name)
        if predicted is None:
            there_are = [other for other, value in known.items() if value is not None]
            raise ArgumentError(f"name must be one of the baselines {there_are}, got {name!r}. Compare steps of a pipeline to have them.")
        return Errors.of(predicted / self.real_steps_s - 1)

    def plot(self, *, step: int | None = None, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws the prediction over the measurement, for one step, on ``ax`` or on a new figure.

        Args:
            step: which step, from 0; None for a step of median length.
            ax: where to draw.
        """
        axes: Axes = resolve("plot_overlay")(self, step=step, ax=ax, **look)
        return axes

    def __repr__(self) -> str:
        """Returns the errors in a few lines."""
        real_ms, virtual_ms = np.median(self.real_steps_s) * 1e3, np.median(self.virtual_steps_s) * 1e3
        lines = [f"median step: measured {real_ms:.3f} ms, predicted {virtual_ms:.3f} ms ({self.median_error:+.1%})"]
        lines.append(f"steps: {_words(self.steps)}")
        for name, value in (("nominal", self.nominal_s), ("no communication", self.no_communication_s)):
            if value is not None:
                lines.append(f"  baseline {name}: {value * 1e3:.3f} ms, {_words(self.baseline(name))}")
        lines.append(f"ends of operations, of the step: {_words(self.operations)}")
        lines += [f"note on the prediction: {note}" for note in self.virtual.metadata.get("notes", ())]
        return "\n".join(lines)

    def describe(self) -> str:
        """Returns one sentence that says what the picture shows: its alternative text."""
        return f"A measured run and its prediction; {'; '.join(line.strip() for line in repr(self).splitlines())}."

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return bundle(self, repr(self), "overlay_png", self.describe())


def compare(real: Trace, virtual: Trace) -> Comparison:
    """Compares a run on real ranks with the same run on a virtual clock.

    Args:
        real: of ``ringsim.trace``.
        virtual: of ``ringsim.simulate``, the same worker with the same arguments.

    Returns:
        The errors by step and by operation, and those of the baselines.

    Raises:
        ArgumentError: the two are not runs of one program: a rank did other things, or in another order.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> def run(arrives_ns):
        ...     events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [0, 0], "peer": [1, 0],
        ...                           "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [arrives_ns, arrives_ns]})
        ...     return Trace(events, {"world_size": 2})
        >>> comparison = compare(run(2_000_000), run(1_500_000))
        >>> comparison.steps.bias, len(comparison.lag_s)
        (-0.25, 2)
    """
    check_trace("real", real)
    check_trace("virtual", virtual)
    if real.world_size != virtual.world_size:
        raise ArgumentError(f"the two runs must have as many ranks, got {real.world_size} and {virtual.world_size}. Simulate as many.")
    real_index, virtual_index = _pair(real, virtual)
    num_steps = count_steps(real.events)
    if num_steps != count_steps(virtual.events):
        raise ArgumentError(
            f"the two runs must have as many steps, got {num_steps} and {count_steps(virtual.events)}. Run the same worker."
        )
    numbers = np.where(is_step(real.events), NONE, number_steps(real.events)) if num_steps else np.zeros(len(real.events), dtype=np.int64)
    compared = numbers[real_index] != NONE
    real_index, virtual_index = real_index[compared], virtual_index[compared]
    number = numbers[real_index]
    if len(real_index) == 0:
        raise ArgumentError(
            "the two runs must have something to compare, got no operation that is done. Record a worker that communicates."
        )
    (real_begin, real_end), (virtual_begin, virtual_end) = (
        _find_extents(trace, index, num_steps) for trace, index in ((real, real_index), (virtual, virtual_index))
    )
    lag_ns = (virtual.events.done_ns[virtual_index] - virtual_begin[number]) - (real.events.done_ns[real_index] - real_begin[number])
    nominal, no_communication = _find_baselines(find_step(virtual), virtual.events) if num_steps else (None, None)
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
        step=number,
        lag_s=lag_ns * 1e-9,
    )


def _pair(real: Trace, virtual: Trace) -> tuple[Ints, Ints]:
    """Pairs the n-th event of a rank in one run with its n-th in the other; raises if they are not alike."""
    pairs = []
    for rank in range(real.world_size):
        mine, theirs = (np.flatnonzero((trace.events.rank == rank) & (trace.events.kind != MARK)) for trace in (real, virtual))
        words = [_describe(trace.events, index) for trace, index in ((real, mine), (virtual, theirs))]
        if words[0] != words[1]:
            place = next((at for at, (one, other) in enumerate(zip(*words, strict=False)) if one != other), min(map(len, words)))
            was, is_now = (each[place] if place < len(each) else "nothing more" for each in words)
            raise ArgumentError(
                f"the two runs must be of one program, got {was} in one and {is_now} in the other (rank {rank}, operation {place}). "
                "Run the same worker with the same arguments on both clocks."
            )
        pairs.append((mine, theirs))
    real_index, virtual_index = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    done = (real.events.done_ns[real_index] != NONE) & (virtual.events.done_ns[virtual_index] != NONE)
    return real_index[done], virtual_index[done]


def _describe(events: Events, index: Ints) -> list[str]:
    """Returns what was done, in words that are the same in both runs."""
    labels, labelled = events.tables.labels, events.kind == SPAN
    return [
        f"the span {labels[events.label[at]]!r}" if labelled[at] else f"{OP_NAMES[events.op[at]]} with {events.peer[at]}"
        for at in index.tolist()
    ]


def _find_extents(trace: Trace, index: Ints, num_steps: int) -> tuple[Ints, Ints]:
    """Returns when each step began to compute and ended, in ns; in a run without steps, the operations at ``index`` are one."""
    if num_steps == 0:
        return trace.events.post_ns[index].min(keepdims=True), trace.events.done_ns[index].max(keepdims=True)
    steps = [find_step(trace, step) for step in range(num_steps)]
    return np.array([int(each.start.min()) for each in steps]), np.array([int(each.end.max()) for each in steps])


def _find_baselines(actions: StageActions, events: Events) -> tuple[float | None, float | None]:
    """Returns the makespan without communication: from what was asked of ``ringsim.compute``, and from the times of the computations."""
    placed = {int(stage): int(rank) for stage, rank in zip(actions.stage, actions.rank, strict=True)}
    if sorted(placed) != list(range(len(placed))) or sorted(set(placed.values())) != list(range(len(actions.ranks))):
        return None, None  # several pipelines side by side, or part of one
    rows = tuple(actions.list_actions(rank) for rank in actions.ranks)
    schedule = Schedule(actions.schedule, actions.num_microbatches, tuple(placed[stage] for stage in range(len(placed))), rows)
    asked_s = np.array([read_label(label) or 0.0 for label in events.tables.labels] or [0.0])
    seconds = np.where((events.kind == SPAN) & (events.label != NONE), asked_s[events.label], 0.0)
    asked = np.zeros(len(actions))
    for rank in actions.ranks:
        own, mine = np.flatnonzero(actions.rank == rank), (events.rank == rank) & (seconds > 0)
        until = np.concatenate([[0.0], np.cumsum(seconds[mine])])
        begun = events.post_ns[mine]
        asked[own] = until[np.searchsorted(begun, actions.end[own])] - until[np.searchsorted(begun, actions.start[own])]

    def time_step(took_s: Ints) -> float:
        return float(evaluate(schedule, median_costs(actions.stage, actions.kind, took_s)).makespan)

    try:
        return (time_step(asked) if asked.any() else None), time_step((actions.end - actions.start) * 1e-9)
    except RingError:
        return None, None  # not a schedule that can be timed


def _words(errors: Errors) -> str:
    return f"error {errors.mean:.1%} on average, {errors.worst:.1%} at most, bias {errors.bias:+.1%}, n {errors.count}"
