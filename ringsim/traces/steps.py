"""What the stages of a pipeline did, read from the spans of a trace: the actions of each step, the bubble, the live activations.

The executor writes a span for each step, named after the schedule, and within it one for each computation::

    rank 0   | step 1f1b                                              |
             | forward 0 | forward 1 |      | backward 0 | backward 1 |

So does any worker that names its own spans this way: "step " and a name around "forward", "backward", "input_grad" and "weight_grad",
these with ``stage`` and ``microbatch``.

The bubble is the time in which a rank does not compute. One rank of four, in a step of 1F1B::

    |.....| F F   B F   B     B |.......|
    |     |<------ span ------->|       |
    |<------------ makespan ----------->|

*By makespan* all dots count; *by span* only the gaps between the rank's own first and last action, for consecutive steps would fill the
rest. Either is compared with the time that it is part of, or with the work.

A forward pass keeps what its backward pass needs: an activation is live from the start of ``F`` to the end of ``B``, or of ``W``::

    F0 F1 F2    B0 F3 B1    B2 B3
    1  2  3     3  3..3     2  1  0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ringsim.errors import ArgumentError, RingError, ScheduleError
from ringsim.schedules import closed_forms, make_schedule
from ringsim.schedules.closed_forms import Step
from ringsim.schedules.schedule import Action
from ringsim.traces.events import NONE, SPAN, Events, Ints

__all__ = [
    "KINDS",
    "STEP",
    "Bubble",
    "KnownBubble",
    "PeakActivations",
    "Phases",
    "StageActions",
    "StageUse",
    "bubble",
    "count_steps",
    "find_step",
    "in_step",
    "list_live",
    "measure_bubble",
    "measure_peaks",
    "measure_stage_use",
    "peak_activations",
]


class Recorded(Protocol):
    """A trace, as far as this module needs one."""

    @property
    def events(self) -> Events: ...
    @property
    def metadata(self) -> dict[str, Any]: ...


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


def find_step(trace: Recorded, step: int | None = None) -> StageActions:
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


@dataclass(frozen=True)
class KnownBubble:
    """The bubble by closed form: all stages alike, backward twice as long as forward, messages that take no time.

    Attributes:
        of_total: by makespan, as a part of the whole step.
        of_ideal: by makespan, in proportion to the work.
        of_span: by span, on the rank where that is longest, as a part of its span.
    """

    of_total: float
    of_ideal: float
    of_span: float


@dataclass(frozen=True)
class Bubble:
    """The time in which ranks did not compute, by rank: sequences have one entry for each of ``ranks``.

    Times count in ns where they were measured, and in the unit of the costs where they were evaluated.

    Attributes:
        schedule: what the step is called.
        ranks: the ranks that computed, ascending.
        makespan: from the first computation of the step to the end of the last, over all ranks.
        busy: how long each rank computed.
        span: from each rank's first computation to the end of its last.
        closed_form: what the schedule costs by formula; None where none is known, or the ranks did something else than its name says.
    """

    schedule: str
    ranks: tuple[int, ...]
    makespan: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    closed_form: KnownBubble | None

    @property
    def idle(self) -> tuple[float, ...]:
        """By makespan: how long each rank did not compute while the step lasted."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_idle(self) -> tuple[float, ...]:
        """By span: how long each rank did not compute between its first and last action."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def of_total_by_rank(self) -> tuple[float, ...]:
        """Idle by makespan as a part of the step, as in the papers on GPipe and zero bubbles: for 1F1B (p-1) / (m+p-1)."""
        return _ratios(self.idle, [self.makespan] * len(self.ranks))

    @property
    def of_span_by_rank(self) -> tuple[float, ...]:
        """Idle by span as a part of the span."""
        return _ratios(self.span_idle, self.span)

    @property
    def of_total(self) -> float:
        """Idle by makespan of all ranks together, as a part of their time."""
        return _ratio(sum(self.idle), self.makespan * len(self.ranks))

    @property
    def of_ideal(self) -> float:
        """Idle by makespan of all ranks together, in proportion to their work, as in the papers on Megatron: for 1F1B (p-1) / m."""
        return _ratio(sum(self.idle), sum(self.busy))

    @property
    def of_span(self) -> float:
        """Idle by span as a part of the span, on the rank that is idle longest."""
        idle, span = max(zip(self.span_idle, self.span, strict=True))
        return _ratio(idle, span)

    def __repr__(self) -> str:
        """Returns a table: each rank, all of them, and the closed form."""
        lines = [f"Bubble of a step ({self.schedule})", "            of the step   of its span   to the work"]
        ideal = _ratios(self.idle, self.busy)
        rows = [(f"rank {rank}", *row) for rank, *row in zip(self.ranks, self.of_total_by_rank, self.of_span_by_rank, ideal, strict=True)]
        rows.append(("all ranks", self.of_total, self.of_span, self.of_ideal))  # by span: the worst of them
        if self.closed_form is not None:
            rows.append(("closed form", self.closed_form.of_total, self.closed_form.of_span, self.closed_form.of_ideal))
        lines += [f"{name:<11} {total:>10.1%} {span:>13.1%} {work:>13.1%}" for name, total, span, work in rows]
        return "\n".join(lines)


def bubble(trace: Recorded, step: int | None = None) -> Bubble:
    """Measures how long the ranks did not compute in one step of a pipeline.

    Args:
        trace: of ranks that ran ``train_step_pipeline``.
        step: which step, from 0; None for the last one.

    Returns:
        The bubble by rank and in all, by makespan and by span, times in ns; with the closed form where the schedule has one.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> labels = ("step gpipe", "forward", "backward")
        >>> rows = [(0, 0, -1, 0, 110), (0, 1, 0, 0, 20), (0, 2, 0, 70, 110), (1, 0, -1, 0, 110), (1, 1, 1, 25, 40), (1, 2, 1, 40, 70)]
        >>> rank, label, stage, post, done = zip(*rows)
        >>> spans = make_events({"rank": rank, "op": [OP_CODES["span"]] * 6, "label": label, "stage": stage,
        ...                      "microbatch": [-1, 0, 0] * 2, "post_ns": post, "done_ns": done}, Tables(labels=labels))
        >>> bubble(Trace(spans, {"world_size": 2}))
        Bubble of a step (gpipe)
                    of the step   of its span   to the work
        rank 0           45.5%         45.5%         83.3%
        rank 1           59.1%          0.0%        144.4%
        all ranks        52.3%         45.5%        109.5%
        closed form      50.0%         50.0%        100.0%

    Source:
        Of the step: Huang et al., GPipe, 2018, arXiv 1811.06965. To the work: Narayanan et al., 2021, arXiv 2104.04473. Of the span:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241.
    """
    return measure_bubble(find_step(trace, step))


def measure_bubble(actions: StageActions) -> Bubble:
    """Measures how long the ranks of a step did not compute; see `bubble`.

    Args:
        actions: the computations of the step, measured or evaluated.

    Returns:
        The bubble, in the unit of the actions.
    """
    ranks = actions.ranks
    own = [actions.of(rank) for rank in ranks]
    return Bubble(
        schedule=actions.schedule,
        ranks=tuple(ranks),
        makespan=actions.makespan,
        busy=tuple(float((each.end - each.start).sum()) for each in own),
        span=tuple(each.makespan for each in own),
        closed_form=_find_closed_form(actions),
    )


def _find_closed_form(actions: StageActions) -> KnownBubble | None:
    step = actions.find_known()
    if step is None:
        return None
    try:
        total, ideal, idle = closed_forms.bubble_of_total(step), closed_forms.bubble_of_ideal(step), closed_forms.span_idle(step)
    except ScheduleError:  # too few microbatches for the formula
        return None
    work = closed_forms.makespan(step) - closed_forms.idle(step)
    return KnownBubble(float(total), float(ideal), _ratio(float(idle), float(work + idle)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratios(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, ...]:
    return tuple(_ratio(part, whole) for part, whole in zip(parts, wholes, strict=True))


@dataclass(frozen=True)
class PeakActivations:
    """The most live activations at a time, by rank; each is what one stage keeps of one microbatch.

    Attributes:
        schedule: what the step is called.
        ranks: the ranks that computed, ascending.
        peaks: for each of them, the most it held.
        bounds: for each of them, what the closed form says; None where none is known.
    """

    schedule: str
    ranks: tuple[int, ...]
    peaks: tuple[int, ...]
    bounds: tuple[int, ...] | None

    def __repr__(self) -> str:
        """Returns one line a rank."""
        bounds = self.bounds or (None,) * len(self.ranks)
        lines = [
            f"rank {rank:<4} {peak:>4}" + ("" if bound is None else f"   closed form {bound:>4}")
            for rank, peak, bound in zip(self.ranks, self.peaks, bounds, strict=True)
        ]
        return "\n".join([f"Peak live activations of a step ({self.schedule})", *lines])


def peak_activations(trace: Recorded, step: int | None = None) -> PeakActivations:
    """Counts the most activations that each rank held at a time, in one step of a pipeline.

    Args:
        trace: of ranks that ran ``train_step_pipeline``.
        step: which step, from 0; None for the last one.

    Returns:
        The peaks by rank, with the closed form's where the schedule has one.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> labels = ("step gpipe", "forward", "backward")
        >>> spans = make_events({"rank": [0] * 5, "op": [OP_CODES["span"]] * 5, "label": [0, 1, 1, 2, 2], "stage": [-1, 0, 0, 0, 0],
        ...                      "microbatch": [-1, 0, 1, 0, 1], "post_ns": [0, 0, 10, 20, 40], "done_ns": [60, 10, 20, 40, 60]},
        ...                     Tables(labels=labels))
        >>> peak_activations(Trace(spans, {"world_size": 1}))
        Peak live activations of a step (gpipe)
        rank 0       2   closed form    2
    """
    return measure_peaks(find_step(trace, step))


def measure_peaks(actions: StageActions) -> PeakActivations:
    """Counts the most activations that each rank held in a step; see `peak_activations`.

    Args:
        actions: the computations of the step, measured or evaluated.
    """
    ranks = actions.ranks
    peaks = tuple(int(list_live(actions, rank)[1].max(initial=0)) for rank in ranks)
    return PeakActivations(actions.schedule, tuple(ranks), peaks, _find_bounds(actions))


def list_live(actions: StageActions, rank: int) -> tuple[Ints, Ints]:
    """Lists how many activations a rank holds, each time that changes.

    Args:
        actions: the computations of a step.
        rank: which rank.

    Returns:
        The times, ascending, and the number from each time on.
    """
    own = actions.of(rank)
    begins, ends = own.start[own.kind == "F"], own.end[(own.kind == "B") | (own.kind == "W")]
    times = np.concatenate([begins, ends])
    changes = np.concatenate([np.ones(len(begins), dtype=np.int64), np.full(len(ends), -1, dtype=np.int64)])
    order = np.lexsort((changes, times))  # what ends goes before what begins at the same moment
    return times[order], np.cumsum(changes[order])


def _find_bounds(actions: StageActions) -> tuple[int, ...] | None:
    step = actions.find_known()
    if step is None:
        return None
    try:
        peaks = closed_forms.peak_live(step)
    except ScheduleError:  # too few microbatches for the formula
        return None
    places = {stages: place for place, stages in enumerate(sorted({actions.stages_of(rank) for rank in actions.ranks}))}
    return tuple(peaks[places[actions.stages_of(rank)]] for rank in actions.ranks)


class StageUse(NamedTuple):
    """What one stage did.

    Attributes:
        prefill_s: time of a prefill job, on average, in seconds.
        decode_s: time of a decode job, likewise.
        decode_use: share of the time in which it worked, over whole repetitions of the ring while it was decoding.
        idle_s: time without a job, from the first job of all stages to the last, in seconds.
    """

    prefill_s: float
    decode_s: float
    decode_use: float
    idle_s: float


def measure_stage_use(trace: Recorded) -> list[StageUse]:
    """Measures how busy each stage of a generation ring was.

    For the share while decoding, the batches of the first round are looked at, from the first decode job of a stage until the last
    token's turn begins: so the filling and draining of the ring do not count.

    Args:
        trace: of one call of ``generate``, with three tokens or more for each prompt.

    Returns:
        One row a stage, in order.

    Raises:
        ArgumentError: the trace has no such call, or more than one.

    Example:
        >>> from ringsim.traces.value import Trace
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> span = OP_CODES["span"]
        >>> events = make_events(
        ...     {
        ...         "rank": [0] * 4, "op": [span] * 4, "stage": [0] * 4, "microbatch": [0] * 4, "label": [0, 1, 1, 1],
        ...         "post_ns": [0, 600, 1000, 1400], "done_ns": [300, 700, 1100, 1500],
        ...     },
        ...     Tables(labels=("prefill", "decode")),
        ... )
        >>> measure_stage_use(Trace(events, {"world_size": 1}))[0].decode_use
        0.25
    """
    events = trace.events
    names = np.array([*trace.events.tables.labels, ""])[events.label]
    jobs = np.flatnonzero((events.kind == SPAN) & np.isin(names, ("prefill", "decode")) & (events.done_ns != NONE))
    if len(jobs) == 0:
        raise ArgumentError("trace must be of a call of generate, got one without its jobs. Record the ranks while they generate.")
    start, stop = events.post_ns[jobs].min(), events.done_ns[jobs].max()
    rows = []
    for stage in range(int(events.stage[jobs].max()) + 1):
        own = jobs[events.stage[jobs] == stage]
        took = events.done_ns[own] - events.post_ns[own]
        is_prefill = names[own] == "prefill"
        use = _decode_use(events.post_ns[own], took, is_prefill, events.microbatch[own])
        rows.append(StageUse(took[is_prefill].mean() * 1e-9, took[~is_prefill].mean() * 1e-9, use, (stop - start - took.sum()) * 1e-9))
    return rows


def _decode_use(start: Ints, took: Ints, is_prefill: Ints, batch: Ints) -> float:
    """Share of the time worked between the first decode job and the turn of the last token, in the first round."""
    in_turn = int(np.flatnonzero(~is_prefill)[0]) if not is_prefill.all() else 0  # the first round begins with one prefill a batch
    decode = np.flatnonzero(~is_prefill & (batch < in_turn))
    turns = len(decode) // in_turn if in_turn else 0
    if turns < 2 or (batch[is_prefill] == 0).sum() != 1:
        raise ArgumentError(
            "trace must be of one call of generate with max_new_tokens of 3 or more, got another. Record such a call alone."
        )
    whole = decode[: (turns - 1) * in_turn]
    return float(took[whole].sum() / (start[decode[len(whole)]] - start[decode[0]]))
