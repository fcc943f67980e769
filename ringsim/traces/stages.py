"""What the stages of a pipeline did, read from the spans of a trace: the actions of each step, rank by rank, as columns.

The executor writes a span for each step, named after the schedule, and within it one for each computation::

    rank 0   | step 1f1b                                              |
             | forward 0 | forward 1 |      | backward 0 | backward 1 |

So does any worker of one's own that names its spans so: "step " and a name around "forward", "backward", "input_grad" and "weight_grad",
these with ``stage`` and ``microbatch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.errors import ArgumentError, RingError
from ringsim.schedules import make_schedule
from ringsim.schedules.closed_forms import Step
from ringsim.schedules.schedule import Action
from ringsim.traces.events import NONE, SPAN, Events, Ints

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["KINDS", "STEP", "Phases", "StageActions", "count_steps", "find_step", "in_step"]

STEP: Final = "step "  # what the name of a step's span begins with
KINDS: Final = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}


@dataclass(frozen=True)
class Phases:
    """The three parts of a rank's step, by the moments between them.

    Attributes:
        start: its first action starts.
        warm_up_until: its first backward starts: until then it does forwards alone.
        cool_down_from: its last forward ends: from then on it does backwards alone. Not after ``warm_up_until`` where the two never take
            turns, as in GPipe: such a rank has no steady phase.
        end: its last action ends.
    """

    start: float
    warm_up_until: float
    cool_down_from: float
    end: float

    @property
    def has_steady(self) -> bool:
        """Whether forwards and backwards take turns."""
        return self.cool_down_from > self.warm_up_until


@dataclass(frozen=True, eq=False)
class StageActions:
    """The computations of one step as columns: numpy arrays of one length, ordered by rank, then by start.

    Times count in ns from the start of the run where they were measured, and in the unit of the costs where they were evaluated.

    Attributes:
        schedule: what the step is called, usually the name of its schedule.
        rank: who computed.
        stage: for which stage.
        kind: "F", "B", "I" or "W".
        microbatch: on which microbatch.
        start: when it began.
        end: when it ended.
    """

    schedule: str
    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        """Returns the number of computations."""
        return len(self.rank)

    @property
    def ranks(self) -> list[int]:
        """The ranks that computed, ascending."""
        return [int(rank) for rank in np.unique(self.rank)]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return int(self.stage.max()) + 1

    @property
    def num_microbatches(self) -> int:
        """How many microbatches there are."""
        return int(self.microbatch.max()) + 1

    @property
    def makespan(self) -> float:
        """From the start of the first computation to the end of the last, over all ranks."""
        return float(self.end.max() - self.start.min())

    def of(self, rank: int) -> StageActions:
        """Returns the computations of one rank."""
        where = self.rank == rank
        columns = (self.rank, self.stage, self.kind, self.microbatch, self.start, self.end)
        return StageActions(self.schedule, *(column[where] for column in columns))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank computed for, ascending."""
        return tuple(int(stage) for stage in np.unique(self.stage[self.rank == rank]))

    def list_actions(self, rank: int) -> tuple[Action, ...]:
        """Returns what a rank computed, in its order."""
        own = self.of(rank)
        return tuple(map(Action, own.stage.tolist(), own.kind.tolist(), own.microbatch.tolist()))

    def phases(self, rank: int) -> Phases:
        """Returns when a rank went from warm-up to steady, and from there to cool-down."""
        own = self.of(rank)
        forward = own.kind == "F"
        start, end = float(own.start.min()), float(own.end.max())
        first_backward = float(own.start[~forward].min()) if not forward.all() else end
        last_forward = float(own.end[forward].max()) if forward.any() else start
        return Phases(start, first_backward, last_forward, end)

    def find_known(self) -> Step | None:
        """Returns the step that closed forms know, where the ranks did just that schedule's actions in its order; else None.

        The name alone proves nothing: a schedule of one's own can be called anything.

        Example:
            >>> spans = [("F", 0, 4), ("B", 4, 9)]
            >>> columns = [np.array(column) for column in zip(*[(0, 0, kind, 0, start, end) for kind, start, end in spans])]
            >>> StageActions("1f1b", *columns).find_known()
            Step(name='1f1b', num_ranks=1, num_microbatches=1, num_chunks=1)
        """
        if self.num_stages * self.num_microbatches > len(self.rank):
            return None  # a forward for each is missing; and numbers from a damaged file may ask for more than memory holds
        placed = {self.stages_of(rank) for rank in self.ranks}  # as a set: replicas of the pipeline have the same stages
        try:
            step = Step(self.schedule, len(placed), self.num_microbatches, self.num_stages // len(placed))
        except RingError:
            return None  # no schedule of that name, or not with as many stages
        schedule = make_schedule(step.name, step.num_ranks, step.num_microbatches, step.num_chunks)
        expected = {schedule.stages_of(place): row for place, row in enumerate(schedule.actions)}
        return step if all(self.list_actions(rank) == expected.get(self.stages_of(rank)) for rank in self.ranks) else None


def count_steps(events: Events) -> int:
    """Returns how many whole steps of a pipeline the events hold.

    Args:
        events: those of any trace.
    """
    return int(_number_steps(events).max(initial=-1)) + 1


def in_step(events: Events, step: int) -> Ints:
    """Tells which events were posted within a step: a mask.

    Args:
        events: those of any trace.
        step: which step, from 0.
    """
    where: Ints = _number_steps(events) == step
    return where


def find_step(trace: Trace, step: int | None = None) -> StageActions:
    """Reads the computations of one step.

    Args:
        trace: of ranks that ran ``train_step_pipeline``, or spans of the same names.
        step: which step, from 0; None for the last one.

    Returns:
        Its computations, in ns from the start of the run.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> columns = {"rank": [0, 0, 0], "op": [OP_CODES["span"]] * 3, "label": [0, 1, 2], "stage": [-1, 0, 0],
        ...            "microbatch": [-1, 0, 0], "post_ns": [0, 10, 50], "done_ns": [150, 40, 120]}
        >>> trace = Trace(make_events(columns, Tables(labels=("step 1f1b", "forward", "backward"))), {"world_size": 1})
        >>> actions = find_step(trace)
        >>> actions.schedule, list(map(str, actions.list_actions(0))), actions.makespan
        ('1f1b', ['0F0', '0B0'], 110.0)
    """
    events = trace.events
    numbers = _number_steps(events)
    count = int(numbers.max(initial=-1)) + 1
    if count == 0:
        raise ArgumentError("trace must have a step of a pipeline, got one without. Record ranks that call train_step_pipeline.")
    if step is None:
        step = count - 1
    if not 0 <= step < count:
        raise ArgumentError(f"step must be from 0 to {count - 1}, got {step}. Leave it out for the last one.")
    own = np.flatnonzero((numbers == step) & _is_action(events))
    own = own[np.lexsort((events.post_ns[own], events.rank[own]))]
    labels = events.tables.labels
    name = labels[events.label[np.flatnonzero((numbers == step) & _is_step(events))[0]]]
    kind = np.array([KINDS.get(label, "") for label in labels])[events.label[own]]
    columns = (events.rank[own], events.stage[own], kind, events.microbatch[own], events.post_ns[own], events.done_ns[own])
    return StageActions(name.removeprefix(STEP), *columns)


def _number_steps(events: Events) -> Ints:
    """Numbers the step that each event was posted in, from 0 on each rank; -1 outside, and in steps that did not end everywhere."""
    numbers = np.full(len(events), NONE, dtype=np.int64)
    steps, whole = _is_step(events), []
    actions = _is_action(events) if steps.any() else steps
    for rank in np.unique(events.rank[steps]).tolist():
        of_rank = slice(*np.searchsorted(events.rank, [rank, rank + 1]))
        posted = events.post_ns[of_rank]
        begin, end = posted[steps[of_rank]], events.done_ns[of_rank][steps[of_rank]]  # an end that has not come is before everything
        turn = np.searchsorted(begin, posted, side="right") - 1  # the last to begin: a user may name the turns of a loop alike
        turn[turn >= 0] = np.where(posted[turn >= 0] <= end[turn[turn >= 0]], turn[turn >= 0], NONE)
        busy = np.unique(turn[(turn != NONE) & actions[of_rank]])  # the steps that hold computations
        numbers[of_rank] = np.where(np.isin(turn, busy), np.searchsorted(busy, turn), NONE)
        whole.append(len(busy))
    numbers[numbers >= min(whole, default=0)] = NONE
    return numbers


def _is_step(events: Events) -> Ints:
    return _is_span(events, [number for number, label in enumerate(events.tables.labels) if label.startswith(STEP)])


def _is_action(events: Events) -> Ints:
    named = _is_span(events, [number for number, label in enumerate(events.tables.labels) if label in KINDS])
    where: Ints = named & (events.stage != NONE) & (events.microbatch != NONE) & (events.done_ns != NONE)
    return where


def _is_span(events: Events, labels: list[int]) -> Ints:
    where: Ints = (events.kind == SPAN) & np.isin(events.label, labels)
    return where
