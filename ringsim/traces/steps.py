"""Reads pipeline steps from the spans of a trace.

For each step, this module lists the actions and computes the bubble and the live activations. The
executor records one span for each step, named after the schedule, and inside it one span for each
computation::

    rank 0   | step 1f1b                                              |
             | forward 0 | forward 1 |      | backward 0 | backward 1 |

Your own worker can record the same spans: a span "step NAME" around spans named "forward",
"backward", "input_grad" and "weight_grad", each with ``stage`` and ``microbatch``. Other spans may
use these names as well. No span inside a computation counts as a computation, and a span "step ..."
is a step only if it directly contains computations::

    | step of my loop                                    |  not a step: contains only steps
      | step 1f1b                                     |     a step
        | forward 0                 | | backward 0  |       computations
            | forward | | step 3 |                          neither

The bubble is the time during which a rank does not compute. For one of four ranks in a 1F1B step::

    |.....| F F   B F   B     B |.......|
    |     |<------ span ------->|       |
    |<------------ makespan ----------->|

*By makespan*, all idle time counts, including the dots. *By span*, only the gaps between the rank's
own first and last action count, because the next step could fill the rest. The bubble is given as a
share of the makespan or the span, or relative to the work.

A forward pass keeps the data that its backward pass needs, so an activation is live from the start
of ``F`` to the end of ``B`` (or ``W``)::

    F0 F1 F2    B0 F3 B1    B2 B3
    1  2  3     3  3..3     2  1  0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from ringsim.errors import ArgumentError, RingError, ScheduleError
from ringsim.schedules import closed_forms, make_schedule
from ringsim.schedules.closed_forms import Step
from ringsim.schedules.schedule import Action
from ringsim.traces.events import NONE, Events, Ints

T = TypeVar("T")
ByRank = tuple[float, ...]


class _Recorded(Protocol):
    """The part of a trace's interface that this module uses."""

    @property
    def events(self) -> Events: ...


STEP = "step "  # the prefix of the names of step spans
KINDS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}


@dataclass(frozen=True, eq=False)
class StageActions:
    """The computations in one step, stored as columns.

    The columns are numpy arrays of equal length, ordered by rank, then by start. Measured times are
    in ns from the start of the run; computed times are in the same unit as the costs.

    Attributes:
        schedule: the name of the step, which is usually the name of the schedule.
        rank: the rank that computed.
        stage: the stage for which the rank computed.
        kind: "F", "B", "I" or "W".
        microbatch: the index of the microbatch.
        start: the start of the computation.
        end: the end of the computation.
    """

    schedule: str
    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    start: Ints
    end: Ints

    @property
    def ranks(self) -> list[int]:
        """The ranks that did any computation, in ascending order."""
        return list(np.unique(self.rank).tolist())

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return int(self.stage.max()) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.microbatch.max()) + 1

    @property
    def makespan(self) -> float:
        """The time from the start of the first computation to the end of the last, on any rank."""
        return float(self.end.max() - self.start.min())

    def of(self, rank: int) -> StageActions:
        """Returns one rank's computations."""
        where = self.rank == rank
        schedule, *columns = vars(self).values()
        return StageActions(schedule, *(column[where] for column in columns))

    def count_from(self, begin: float, unit: float) -> StageActions:
        """Returns the computations with times counted from ``begin``, in multiples of ``unit``."""
        start, end = (self.start - begin) / unit, (self.end - begin) / unit
        return replace(self, start=start, end=end)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank computes, in ascending order."""
        return tuple(np.unique(self.stage[self.rank == rank]).tolist())

    def list_actions(self, rank: int) -> tuple[Action, ...]:
        """Returns a rank's computations, in order."""
        own = self.of(rank)
        return tuple(map(Action, own.stage.tolist(), own.kind.tolist(), own.microbatch.tolist()))

    def phases(self, rank: int) -> list[tuple[str, float, float]]:
        """Returns the name, start and end of each of a rank's phases that takes any time.

        In the warm-up, the rank runs only forwards, and in the cool-down only backwards. Between
        them, in the steady phase, forwards and backwards alternate. GPipe has no steady phase.
        """
        own = self.of(rank)
        forward = own.kind == "F"
        start, end = own.start.min(), own.end.max()
        first_backward = own.start[~forward].min(initial=end)
        last_forward = own.end[forward].max(initial=start)
        phases = [
            ("warm-up", start, min(first_backward, last_forward)),
            ("steady", first_backward, last_forward),
            ("cool-down", max(first_backward, last_forward), end),
        ]
        return [phase for phase in phases if phase[2] > phase[1]]

    def find_known(self) -> Step | None:
        """Returns the step in the form that closed forms use, or None if it has no such form.

        The result is None unless the ranks ran exactly the actions of the schedule after which the
        step is named. The name alone does not suffice, because users may give a step any name.

        Example:
            >>> spans = [("F", 0, 4), ("B", 4, 9)]
            >>> columns = [
            ...     np.array(column)
            ...     for column in zip(*[(0, 0, kind, 0, start, end) for kind, start, end in spans])
            ... ]
            >>> StageActions("1f1b", *columns).find_known()
            Step(name='1f1b', num_ranks=1, num_microbatches=1, num_chunks=1)
        """
        if self.num_stages * self.num_microbatches > len(self.rank):
            # some forward pass is missing, or a damaged file has numbers that need too much memory
            return None
        # a set, because replicas of the pipeline have the same stages and actions
        done = {(self.stages_of(rank), self.list_actions(rank)) for rank in self.ranks}
        placed = {stages for stages, _ in done}
        try:
            step = Step(
                self.schedule, len(placed), self.num_microbatches, self.num_stages // len(placed)
            )
        except RingError:
            return None  # no schedule has this name, or it does not allow this number of stages
        schedule = make_schedule(step.name, step.num_ranks, step.num_microbatches, step.num_chunks)
        expected = {(schedule.stages_of(place), row) for place, row in enumerate(schedule.actions)}
        return step if done <= expected else None


def count_steps(events: Events) -> int:
    """Returns the number of complete pipeline steps."""
    return int(number_steps(events).max(initial=-1)) + 1


def in_step(events: Events, step: int) -> Ints:
    """Returns a mask of the events posted in a step; steps are numbered from 0."""
    where: Ints = number_steps(events) == step
    return where


def find_step(trace: _Recorded, step: int | None = None) -> StageActions:
    """Reads the computations in one step.

    Args:
        trace: a trace with the spans described in the module docstring.
        step: the index of the step, from 0, or None for the last one.

    Returns:
        The computations of the step, in ns from the start of the run.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> columns = {
        ...     "rank": [0, 0, 0],
        ...     "op": [OP_CODES["span"]] * 3,
        ...     "label": [0, 1, 2],
        ...     "stage": [-1, 0, 0],
        ...     "microbatch": [-1, 0, 0],
        ...     "post_ns": [0, 10, 50],
        ...     "done_ns": [150, 40, 120],
        ... }
        >>> trace = Trace(
        ...     make_events(columns, Tables(labels=("step 1f1b", "forward", "backward"))),
        ...     {"world_size": 1},
        ... )
        >>> actions = find_step(trace)
        >>> actions.schedule, list(map(str, actions.list_actions(0))), actions.makespan
        ('1f1b', ['0F0', '0B0'], 110.0)
    """
    steps = list_steps(trace)
    if not steps:
        raise ArgumentError(
            "the trace contains no pipeline step. Record ranks that call train_step_pipeline. In "
            "your own loop, use ringsim.span('step mine') around each step, and spans 'forward' "
            "and 'backward' with stage= and microbatch= around its computations."
        )
    if step is None:
        step = len(steps) - 1
    if not 0 <= step < len(steps):
        raise ArgumentError(
            f"step must be from 0 to {len(steps) - 1}, got {step}. Omit step to use the last one."
        )
    return steps[step]


def list_steps(trace: _Recorded) -> list[StageActions]:
    """Reads the computations in each step."""
    events = trace.events
    return [read_actions(events, own, name) for name, own in split_steps(events)]


def split_steps(events: Events) -> list[tuple[str, Ints]]:
    """Returns the name of each step, and the indices of its computations by rank, then by start."""
    numbers, labels = number_steps(events), events.tables.labels
    spans = np.flatnonzero(is_step(events) & (numbers != NONE))
    firsts = spans[np.unique(numbers[spans], return_index=True)[1]]
    names = [labels[label].removeprefix(STEP) for label in events.label[firsts].tolist()]
    own = np.flatnonzero(is_action(events) & (numbers != NONE))
    own = own[np.lexsort((events.post_ns[own], events.rank[own], numbers[own]))]
    # not strict, because np.split returns one empty part even if there are no steps
    return list(zip(names, split_where(own, numbers[own]), strict=False))


def split_where(values: Ints, key: Ints) -> list[Ints]:
    """Splits values where the key of the next value differs."""
    return np.split(values, np.flatnonzero(np.diff(key)) + 1)


def read_actions(events: Events, own: Ints, name: str = "") -> StageActions:
    """Returns the computations at the indices ``own`` as columns."""
    kinds = np.array([KINDS.get(label, "") for label in events.tables.labels])
    return StageActions(
        name,
        events.rank[own],
        events.stage[own],
        kinds[events.label[own]],
        events.microbatch[own],
        events.post_ns[own],
        events.done_ns[own],
    )


def number_steps(events: Events) -> Ints:
    """Returns the number of the step in which each event was posted, counted from 0 on each rank.

    The number is -1 for events outside steps, and in steps that did not end on every rank.
    """
    numbers = np.full(len(events), NONE, dtype=np.int64)
    steps, whole = is_step(events), []
    actions = is_action(events) if steps.any() else steps
    for rank in np.unique(events.rank[steps]).tolist():
        of_rank = slice(*np.searchsorted(events.rank, [rank, rank + 1]))
        posted, done = events.post_ns[of_rank], events.done_ns[of_rank]
        ended = steps[of_rank] & (done != NONE)
        parents = _find_parents(posted[ended], done[ended])
        innermost = _find_innermost(
            ended, posted, np.append(done[ended], np.iinfo(np.int64).max), parents
        )
        found = _find_outermost(parents, set(innermost[actions[of_rank]].tolist()))[innermost]
        busy = np.unique(found[found != NONE])
        numbers[of_rank] = np.where(found == NONE, NONE, np.searchsorted(busy, found))
        whole.append(len(busy))
    numbers[numbers >= min(whole, default=0)] = NONE
    return numbers


def _find_parents(begin: Ints, end: Ints) -> Ints:
    """Returns the index of the innermost span that encloses each span, or -1 if there is none.

    The spans must be in the order in which they began.
    """
    parents, open_spans = np.full(len(begin), NONE), list[int]()
    for span in range(len(begin)):
        while open_spans and (
            end[open_spans[-1]] < end[span] or end[open_spans[-1]] <= begin[span]
        ):
            open_spans.pop()
        if open_spans:
            parents[span] = open_spans[-1]
        open_spans.append(span)
    return parents


def _find_innermost(begins: Ints, posted: Ints, end: Ints, parents: Ints) -> Ints:
    """Returns the index of the innermost span in which each event was posted, or -1.

    ``begins`` is a mask of the events that are such spans. ``end`` has one more entry than there
    are spans, for events outside all spans.
    """
    found = np.cumsum(begins) - 1
    while (over := posted > end[found]).any():
        found[over] = parents[found[over]]
    return found


def _find_outermost(parents: Ints, busy: set[int]) -> Ints:
    """Returns the outermost busy span around each span (possibly the span itself), or -1.

    One more entry, at the end, is for the index -1.
    """
    found = np.full(len(parents) + 1, NONE)
    for span, parent in enumerate(parents.tolist()):
        found[span] = found[parent] if found[parent] != NONE or span not in busy else span
    return found


def is_step(events: Events) -> Ints:
    """Returns a mask that selects the spans whose names denote steps."""
    return events.spans(lambda label: label.startswith(STEP))


def is_action(events: Events) -> Ints:
    """Returns a mask of the spans that are computations."""
    return _find_work(events, KINDS)


def _find_work(events: Events, names: Collection[str]) -> Ints:
    """Returns a mask of the ended spans that have one of these names, a stage and a microbatch.

    A span inside such a span on the same thread does not count.
    """
    found = events.spans(names.__contains__)
    found &= (events.stage != NONE) & (events.microbatch != NONE) & (events.done_ns != NONE)
    for _, _, own in events.by_thread():
        mine = own[found[own]]
        begin, end = events.post_ns[mine][1:], events.done_ns[mine][1:]
        until = np.maximum.accumulate(events.done_ns[mine])[:-1]  # the last end so far
        found[mine[1:]] = (begin >= until) | (end > until)
    return found


@dataclass(frozen=True)
class KnownBubble:
    """The bubble that a closed form predicts.

    The formula assumes that all stages are equal, that backwards take twice as long as forwards,
    and that messages take no time.

    Attributes:
        of_total: the makespan-based bubble, as a fraction of the step.
        of_ideal: the makespan-based bubble, relative to the work.
        of_span: the span-based bubble, as a fraction of the span, on the rank with the largest
            bubble.
    """

    of_total: float
    of_ideal: float
    of_span: float


@dataclass(frozen=True)
class Bubble:
    """The time that ranks are idle during a step.

    Sequences have one entry per rank. Measured times are in ns; computed times are in the same unit
    as the costs.

    Attributes:
        schedule: the name of the step.
        ranks: the ranks that did any computation, in ascending order.
        makespan: the time from the start of the first computation to the end of the last, over all
            ranks.
        busy: how long each rank spent computing.
        span: the time from the start of each rank's first computation to the end of its last.
        closed_form: the bubble that the closed form predicts, or None if there is no closed form or
            the ranks did not run the schedule that the step is named after.
    """

    schedule: str
    ranks: tuple[int, ...]
    makespan: float
    busy: ByRank
    span: ByRank
    closed_form: KnownBubble | None

    @property
    def idle(self) -> ByRank:
        """How long each rank was idle during the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_idle(self) -> ByRank:
        """How long each rank was idle between its first and last action."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def of_total_by_rank(self) -> ByRank:
        """Each rank's idle time relative to the makespan, as a fraction of the step.

        The GPipe and zero-bubble papers use this definition; for 1F1B, the share is
        (p-1) / (m+p-1).
        """
        return _ratios(self.idle, [self.makespan] * len(self.ranks))

    @property
    def of_span_by_rank(self) -> ByRank:
        """Each rank's idle time within its span, as a fraction of that span."""
        return _ratios(self.span_idle, self.span)

    @property
    def of_total(self) -> float:
        """The makespan-based idle time of all ranks together, as a fraction of their total time."""
        return _ratio(sum(self.idle), self.makespan * len(self.ranks))

    @property
    def of_ideal(self) -> float:
        """The makespan-based idle time of all ranks together, relative to their total work.

        The Megatron papers use this definition; for 1F1B, the ratio is (p-1) / m.
        """
        return _ratio(sum(self.idle), sum(self.busy))

    @property
    def of_span(self) -> float:
        """The span-based idle time, as a fraction of the span, on the rank that is idle longest."""
        idle, span = max(zip(self.span_idle, self.span, strict=True))
        return _ratio(idle, span)

    def __repr__(self) -> str:
        """Returns a table of each rank, all ranks together, and the closed form."""
        ranks = [f"rank {rank}" for rank in self.ranks]
        rows = list(
            zip(
                ranks,
                self.of_total_by_rank,
                self.of_span_by_rank,
                _ratios(self.idle, self.busy),
                strict=True,
            )
        )
        # "of its span" shows the worst rank
        rows.append(("all ranks", self.of_total, self.of_span, self.of_ideal))
        if known := self.closed_form:
            rows.append(("closed form", known.of_total, known.of_span, known.of_ideal))
        lines = ["{:<11} {:>10.1%} {:>13.1%} {:>13.1%}".format(*row) for row in rows]
        return "\n".join(
            [
                f"Bubble of a step ({self.schedule})",
                "            of the step   of its span   to the work",
                *lines,
            ]
        )


def measure_bubble(actions: StageActions) -> Bubble:
    """Measures how long the ranks are idle during one pipeline step.

    Args:
        actions: the computations of the step, measured or computed from costs.

    Returns:
        The bubble of each rank and in total, both by makespan and by span, in the unit of the
        actions, with the closed form's bubble if there is one.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> labels = ("step gpipe", "forward", "backward")
        >>> rows = [
        ...     (0, 0, -1, 0, 110),
        ...     (0, 1, 0, 0, 20),
        ...     (0, 2, 0, 70, 110),
        ...     (1, 0, -1, 0, 110),
        ...     (1, 1, 1, 25, 40),
        ...     (1, 2, 1, 40, 70),
        ... ]
        >>> rank, label, stage, post, done = zip(*rows)
        >>> spans = make_events(
        ...     {
        ...         "rank": rank,
        ...         "op": [OP_CODES["span"]] * 6,
        ...         "label": label,
        ...         "stage": stage,
        ...         "microbatch": [-1, 0, 0] * 2,
        ...         "post_ns": post,
        ...         "done_ns": done,
        ...     },
        ...     Tables(labels=labels),
        ... )
        >>> Trace(spans, {"world_size": 2}).bubble()
        Bubble of a step (gpipe)
                    of the step   of its span   to the work
        rank 0           45.5%         45.5%         83.3%
        rank 1           59.1%          0.0%        144.4%
        all ranks        52.3%         45.5%        109.5%
        closed form      50.0%         50.0%        100.0%

    Source:
        Relative to the step: Huang et al., GPipe, 2018, arXiv 1811.06965. Relative to the work:
        Narayanan et al., 2021, arXiv 2104.04473. Relative to the span: Qi et al., Zero Bubble
        Pipeline Parallelism, 2023, arXiv 2401.10241.
    """
    own = [actions.of(rank) for rank in actions.ranks]
    busy = tuple(map(_measure_busy, own))
    span = tuple(each.makespan for each in own)
    # the formulas assume that a rank runs one computation after the other
    overlaps = sum(busy) < 0.999 * (actions.end - actions.start).sum()
    return Bubble(
        actions.schedule,
        tuple(actions.ranks),
        actions.makespan,
        busy,
        span,
        None if overlaps else _by_formula(actions, _know_bubble),
    )


def _measure_busy(own: StageActions) -> float:
    """Returns the time that a rank computes; computations at the same time count once."""
    before = np.maximum.accumulate(np.append(own.start[:1], own.end[:-1]))
    return float(np.maximum(own.end - np.maximum(own.start, before), 0).sum())


def _by_formula(actions: StageActions, formula: Callable[[Step], T]) -> T | None:
    """Applies a closed form to a step, or returns None if the step has no closed form."""
    step = actions.find_known()
    try:
        return None if step is None else formula(step)
    except ScheduleError:
        return None


def _know_bubble(step: Step) -> KnownBubble:
    idle = closed_forms.span_idle(step)
    work = closed_forms.makespan(step) - closed_forms.idle(step)
    return KnownBubble(
        of_total=float(closed_forms.bubble_of_total(step)),
        of_ideal=float(closed_forms.bubble_of_ideal(step)),
        of_span=float(idle / (work + idle)),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratios(parts: Sequence[float], wholes: Sequence[float]) -> ByRank:
    return tuple(_ratio(part, whole) for part, whole in zip(parts, wholes, strict=True))


@dataclass(frozen=True)
class PeakActivations:
    """The peak number of live activations on each rank.

    One activation is the data that one stage keeps for one microbatch.

    Attributes:
        schedule: the name of the step.
        ranks: the ranks that did any computation, in ascending order.
        peaks: the peak number of live activations on each rank.
        bounds: the peak that the closed form predicts for each rank, or None if there is no closed
            form.
    """

    schedule: str
    ranks: tuple[int, ...]
    peaks: tuple[int, ...]
    bounds: tuple[int, ...] | None

    def __repr__(self) -> str:
        """Returns one line per rank."""
        bounds = [
            "" if self.bounds is None else f"   closed form {bound:>4}"
            for bound in self.bounds or self.ranks
        ]
        lines = [
            f"rank {rank:<4} {peak:>4}{bound}"
            for rank, peak, bound in zip(self.ranks, self.peaks, bounds, strict=True)
        ]
        return "\n".join([f"Peak live activations of a step ({self.schedule})", *lines])


def measure_peaks(actions: StageActions) -> PeakActivations:
    """Finds the peak number of live activations on each rank in one pipeline step.

    Args:
        actions: the computations of the step, measured or computed from costs.

    Returns:
        The peak of each rank, with the closed form's peaks if there is a closed form.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> labels = ("step gpipe", "forward", "backward")
        >>> spans = make_events(
        ...     {
        ...         "rank": [0] * 5,
        ...         "op": [OP_CODES["span"]] * 5,
        ...         "label": [0, 1, 1, 2, 2],
        ...         "stage": [-1, 0, 0, 0, 0],
        ...         "microbatch": [-1, 0, 1, 0, 1],
        ...         "post_ns": [0, 0, 10, 20, 40],
        ...         "done_ns": [60, 10, 20, 40, 60],
        ...     },
        ...     Tables(labels=labels),
        ... )
        >>> Trace(spans, {"world_size": 1}).peak_activations()
        Peak live activations of a step (gpipe)
        rank 0       2   closed form    2
    """
    peaks = tuple(int(list_live(actions.of(rank))[1].max(initial=0)) for rank in actions.ranks)
    stages = [actions.stages_of(rank) for rank in actions.ranks]
    known = _by_formula(actions, closed_forms.peak_live)
    bound_of = dict(zip(sorted(set(stages)), known or (), strict=False))
    return PeakActivations(
        actions.schedule,
        tuple(actions.ranks),
        peaks,
        tuple(map(bound_of.__getitem__, stages)) if known else None,
    )


def list_live(own: StageActions) -> tuple[Ints, Ints]:
    """Returns the times at which one rank's count of live activations changes, and each new count.

    The times are in ascending order.
    """
    begins, ends = own.start[own.kind == "F"], own.end[np.isin(own.kind, ("B", "W"))]
    times, changes = np.concatenate([begins, ends]), np.repeat([1, -1], [len(begins), len(ends)])
    order = np.lexsort((changes, times))  # at the same moment, ends come before begins
    return times[order], np.cumsum(changes[order])


class StageUse(NamedTuple):
    """The load of one stage.

    Attributes:
        prefill_s: the mean duration of a prefill job, in seconds.
        decode_s: the mean duration of a decode job, in seconds.
        decode_use: the fraction of the decoding time that the stage spent working, over complete
            turns of the ring.
        idle_s: how long the stage had no job, from the start of the first job of any stage to the
            end of the last, in seconds.
    """

    prefill_s: float
    decode_s: float
    decode_use: float
    idle_s: float


def measure_stage_use(trace: _Recorded) -> list[StageUse]:
    """Measures the load of each stage in a generation ring.

    ``decode_use`` covers the batches of the first round, from a stage's first decode job to the
    beginning of the last token's turn, so that filling and draining the ring do not count.

    Args:
        trace: a trace of one call to ``generate`` with at least three tokens per prompt.

    Returns:
        One row per stage, in order.

    Raises:
        ArgumentError: the trace contains no such call, or several.

    Example:
        >>> from ringsim.traces.value import Trace
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> span = OP_CODES["span"]
        >>> events = make_events(
        ...     {
        ...         "rank": [0] * 4,
        ...         "op": [span] * 4,
        ...         "stage": [0] * 4,
        ...         "microbatch": [0] * 4,
        ...         "label": [0, 1, 1, 1],
        ...         "post_ns": [0, 600, 1000, 1400],
        ...         "done_ns": [300, 700, 1100, 1500],
        ...     },
        ...     Tables(labels=("prefill", "decode")),
        ... )
        >>> measure_stage_use(Trace(events, {"world_size": 1}))[0].decode_use
        0.25
    """
    events = trace.events
    prefill = events.spans("prefill".__eq__)
    jobs = np.flatnonzero(_find_work(events, ("prefill", "decode")))
    if len(jobs) == 0:
        raise ArgumentError(
            "the trace contains no jobs from generate. Record the ranks while they generate."
        )
    start, stop = events.post_ns[jobs].min(), events.done_ns[jobs].max()
    rows = []
    for stage in range(int(events.stage[jobs].max()) + 1):
        own = jobs[events.stage[jobs] == stage]
        took = events.done_ns[own] - events.post_ns[own]
        is_prefill = prefill[own]
        use = _decode_use(events.post_ns[own], took, is_prefill, events.microbatch[own])
        rows.append(
            StageUse(
                took[is_prefill].mean() * 1e-9,
                took[~is_prefill].mean() * 1e-9,
                use,
                (stop - start - took.sum()) * 1e-9,
            )
        )
    return rows


def _decode_use(start: Ints, took: Ints, is_prefill: Ints, batch: Ints) -> float:
    """Returns the share of time spent working, from the first decode job to the last token's turn.

    Only the first round counts.
    """
    # the first round begins with one prefill per batch
    in_turn = int(np.flatnonzero(~is_prefill)[0]) if not is_prefill.all() else 0
    decode = np.flatnonzero(~is_prefill & (batch < in_turn))
    turns = len(decode) // in_turn if in_turn else 0
    if turns < 2 or (batch[is_prefill] == 0).sum() != 1:
        raise ArgumentError(
            "cannot measure the load: the trace does not contain exactly one call to generate with "
            "max_new_tokens of 3 or more. Record only one such call."
        )
    whole = decode[: (turns - 1) * in_turn]
    return float(took[whole].sum() / (start[decode[len(whole)]] - start[decode[0]]))
