"""How long the ranks of a pipeline did not compute: measured, beside what the schedule's closed form says.

One rank of four, in a step of 1F1B::

    |.....| F F   B F   B     B |.......|
    |     |<------ span ------->|       |
    |<------------ makespan ----------->|

*By makespan* all dots count; *by span* only the gaps between a rank's own first and last action, for steps that follow each other would
fill the rest. Either is compared with the time that it is part of, or with the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringsim.errors import ScheduleError
from ringsim.schedules import closed_forms
from ringsim.traces.stages import StageActions, find_step

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["Bubble", "KnownBubble", "bubble", "measure_bubble"]


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


def bubble(trace: Trace, step: int | None = None) -> Bubble:
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
