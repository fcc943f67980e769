"""Formulas for the times, memory and messages of a step with a known schedule.

The formulas use p ranks, m microbatches and v stages per rank. The forward of one stage takes f and
its backward takes b = i + w, the times of its two halves. Every rank computes for m v (f + b). The
rest of its time, the bubble, is counted in two ways::

                       by makespan: during the step        by span: between a rank's first and last
                                                           action
    gpipe, 1f1b        (p-1) (f+b)                         the same
    interleaved_1f1b   (p-1) (f+b), and                    the same
    looped_bfs         (v-1) (p-m) (f+b) more if m < p     the same
    zb_h1   m >= p     (p-1) max(f, i, f+i-w)              (p-1) max(i, f+i-w)
    zb_h2   m >= 2p-1  (p-1) max(f, i-f, f+i-2w)           (p-1) max(0, i-f, f+i-2w)
    zb_v    m >= 2p-1  (p-1) f             if f = i = w    0
    dualpipe_v m >= 2p (p-1) f             if f = i = w    the same

These formulas hide the benefit of chunks: with v stages per rank, each stage is v times shorter,
and so is the bubble.

"Zero bubble" means zero by span. By makespan, every schedule has a bubble, because the last rank
has nothing to do until the first microbatch has passed through p - 1 forwards. ``bubble_of_ideal``
gives the bubble as a share of the work, and ``bubble_of_total`` as a share of the whole step.

``evaluate`` finds the same times by running the schedule. It also times schedules for which no
formula is known.

If stages differ and each rank holds one stage, the slowest stage sets the pace: all microbatches
queue in front of it, and the other stages add one forward and one backward each
(``gpipe_makespan``, ``one_f_one_b_bound``). Here is GPipe with a second stage that takes twice as
long::

    rank 0   F0 F1 F2                   B0    B1    B2
    rank 1      F0--- F1--- F2--- B0--- B1--- B2---
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules import find_num_chunks
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.programs import Semantics, read_semantics
from ringsim.schedules.schedule import check_counts

__all__ = [
    "Step",
    "bubble_of_ideal",
    "bubble_of_total",
    "dualpipe_v_overlapped_idle",
    "gpipe_makespan",
    "idle",
    "makespan",
    "messages",
    "one_f_one_b_bound",
    "peak_live",
    "span_idle",
]

_UNIT = Costs()  # 1 for a forward, input or weight; 2 for a backward; 0 for a message
_VEE = ("zb_v", "dualpipe_v")


@dataclass(frozen=True)
class Step:
    """A pipeline step, described by its schedule and its numbers of ranks and microbatches.

    Attributes:
        name: the schedule's name, as for ``make_schedule``.
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches.
        num_chunks: the number of stages per rank, or None for the default of ``make_schedule``.

    Raises:
        ArgumentError: a count is less than 1.
        ScheduleError: no schedule has that name, or the schedule requires a different number of
            chunks.

    Example:
        >>> Step("zb_v", 4, 8).num_stages
        8
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None

    def __post_init__(self) -> None:
        check_counts(self.num_ranks, self.num_microbatches, self.stages_a_rank)

    @property
    def stages_a_rank(self) -> int:
        """The number of stages per rank."""
        return find_num_chunks(self.name, self.num_chunks)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.num_ranks * self.stages_a_rank


def makespan(step: Step, costs: Costs = _UNIT, semantics: Semantics = "buffered") -> Time:
    """Returns the length of a step.

    Args:
        step: the schedule and its counts.
        costs: the costs of the actions, the same for all stages. ``latency`` may be positive for
            ``gpipe`` and ``1f1b``.
        semantics: when a message starts to travel; matters only if messages take time.
            ``buffered``: as soon as it is sent. ``rendezvous``: when the receiver has nothing else
            to do, as with ``lower(schedule, ahead=0)``.

    Returns:
        The time from the start of the first action to the end of the last. The time is exact if the
        costs are ints or Fractions.

    Raises:
        ScheduleError: no formula is known for this step with these costs.
        ArgumentError: ``semantics`` is unknown.

    Example:
        >>> [
        ...     makespan(Step(name, 4, 8))
        ...     for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")
        ... ]
        [33, 33, 57, 27, 27, 51]
        >>> [makespan(Step(name, 4, 8), Costs(latency=1)) for name in ("gpipe", "1f1b")]
        [39, 49]

    Source:
        See ``idle``. The latency terms were fitted to the evaluator's results, and tests check them
        against the evaluator.
    """
    if read_semantics(semantics).in_order:
        raise ArgumentError(
            f"semantics must be one of rendezvous, buffered, got {semantics}. Use evaluate, "
            "because there is no formula for messages in order."
        )
    return _work(step, costs) + idle(step, costs) + _latency(step, costs.latency, semantics)


def idle(step: Step, costs: Costs = _UNIT) -> Time:
    """Returns a rank's idle time during a step, that is, the bubble relative to the makespan.

    The formulas assume that messages take no time.

    Args:
        step: the schedule and its counts.
        costs: the costs of the actions, the same for all stages.

    Returns:
        The idle time. It is the same on all ranks, because all ranks compute for the same time.

    Raises:
        ScheduleError: no formula is known for this step with these costs.

    Example:
        >>> [idle(Step(name, 4, 8)) for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")]
        [9, 9, 3, 3]

    Source:
        GPipe: arXiv 1811.06965. 1F1B, interleaved: arXiv 2104.04473. Breadth first: arXiv
        2211.05953. Zero bubble: arXiv 2401.10241, with (p-1) (f+i-w) and (p-1) (f+i-2w); the other
        terms of the maxima apply if the first gradient returns so late that a rank cannot fill the
        time (w > f in ZB-H1, i > f in ZB-H2).
    """
    f, i, w = _check_formula(step, costs)
    p, m = step.num_ranks, step.num_microbatches
    if step.name == "zb_h1":
        return (p - 1) * max(f, i, f + i - w)
    if step.name == "zb_h2":
        return (p - 1) * max(f, i - f, f + i - 2 * w)
    if step.name in _VEE:
        return (p - 1) * f
    # the first microbatch comes around the ring only after the last one has left
    gaps = (step.stages_a_rank - 1) * max(0, p - m)
    return (p - 1 + gaps) * _forward_and_backward(step, costs)


def span_idle(step: Step, costs: Costs = _UNIT) -> Time:
    """Returns a rank's idle time between its first and last action, the span-based bubble.

    If the ranks' idle times differ, the longest one is returned.

    Args:
        step: the schedule and its counts.
        costs: the costs of the actions, the same for all stages.

    Returns:
        The idle time, if messages take no time.

    Raises:
        ScheduleError: no formula is known for this step with these costs.

    Example:
        >>> [span_idle(Step(name, 4, 8)) for name in ("1f1b", "zb_h1", "zb_h2", "zb_v")]
        [9, 3, 0, 0]

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv 2401.10241, which counts this way;
        see ``idle``.
    """
    f, i, w = _check_formula(step, costs)
    if step.name == "zb_h1":
        return (step.num_ranks - 1) * max(i, f + i - w)
    if step.name == "zb_h2":
        return (step.num_ranks - 1) * max(0, i - f, f + i - 2 * w)
    return 0 if step.name == "zb_v" else idle(step, costs)


def bubble_of_total(step: Step, costs: Costs = _UNIT) -> Time:
    """Returns the makespan-based bubble as a fraction of the whole step.

    The papers on GPipe and zero bubbles use this definition.

    Args:
        step: the schedule and its counts.
        costs: the costs of the actions, the same for all stages.

    Returns:
        The ratio idle / (work + idle), which is a Fraction if the costs are exact.

    Raises:
        ScheduleError: no formula is known for this step with these costs.

    Example:
        >>> bubble_of_total(Step("1f1b", 4, 8))  # (p-1) / (m+p-1)
        Fraction(3, 11)

    Source:
        Huang et al., GPipe, 2018, arXiv 1811.06965, section 2.3.
    """
    waiting = idle(step, costs)
    return _divide(waiting, _work(step, costs) + waiting)


def bubble_of_ideal(step: Step, costs: Costs = _UNIT) -> Time:
    """Returns the makespan-based bubble relative to the work, as the Megatron papers do.

    Args:
        step: the schedule and its counts.
        costs: the costs of the actions, the same for all stages.

    Returns:
        The ratio idle / work, which is a Fraction if the costs are exact. It can exceed 1.

    Raises:
        ScheduleError: no formula is known for this step with these costs.

    Example:
        >>> (
        ...     bubble_of_ideal(Step("1f1b", 4, 8)),
        ...     bubble_of_ideal(Step("interleaved_1f1b", 4, 8, num_chunks=2)),
        ... )  # (p-1) / (m v)
        (Fraction(3, 8), Fraction(3, 16))

    Source:
        Narayanan et al., 2021, arXiv 2104.04473, section 2.2.
    """
    return _divide(idle(step, costs), _work(step, costs))


def dualpipe_v_overlapped_idle(num_ranks: int, pair: Time, backward: Time, weight: Time) -> Time:
    """Returns DualPipeV's makespan-based bubble if forwards and backwards overlap.

    The formula assumes that the hardware runs a forward and a backward at the same time, as one
    block.

    Args:
        num_ranks: the number of ranks.
        pair: the time of an overlapped forward and backward; their messages leave when both are
            done.
        backward: the time of one stage's whole backward.
        weight: the time of the backward's second half; the forward and the first half must take the
            same time.

    Returns:
        The idle time of the rank that is idle longest.

    Example:
        >>> dualpipe_v_overlapped_idle(4, pair=3, backward=2, weight=1)
        6

    Source:
        DualPipe's README: (p-1) (F&B + B - 3 W), with p ranks and two stages on each.
    """
    return (num_ranks - 1) * (pair + backward - 3 * weight)


def peak_live(step: Step) -> tuple[int, ...]:
    """Returns the peak number of live activations on each rank.

    An activation is live from the start of its forward to the end of its backward.

    Args:
        step: the schedule and its counts.

    Returns:
        For each rank, the number of live activations, each of which belongs to one stage. If a rank
        holds v stages, each activation is v times smaller.

    Raises:
        ScheduleError: no formula is known for this step.

    Example:
        >>> peak_live(Step("gpipe", 4, 8)), peak_live(Step("1f1b", 4, 8))
        ((8, 8, 8, 8), (4, 3, 2, 1))
        >>> peak_live(Step("interleaved_1f1b", 4, 8)), peak_live(Step("zb_v", 4, 8))
        ((11, 9, 7, 5), (8, 8, 8, 8))

    Source:
        1F1B, interleaved: arXiv 2104.04473, section 2.2. Zero bubble: arXiv 2401.10241. DualPipeV:
        DualPipe's README.
    """
    p, m, v = step.num_ranks, step.num_microbatches, step.stages_a_rank
    if step.name == "1f1b":
        return tuple(min(p - rank, m) for rank in range(p))
    if step.name == "interleaved_1f1b":
        first_round = -(-m // max(1, m // p))
        return tuple(
            min(2 * (p - 1 - rank) + (v - 1) * first_round + 1, m * v) for rank in range(p)
        )
    if step.name in _VEE:
        _check_enough(step)
    peaks = {"zb_h1": min(p, m), "zb_h2": min(2 * p - 1, m), "zb_v": 2 * p, "dualpipe_v": 2 * p + 1}
    return (peaks.get(step.name, m * v),) * p


def messages(step: Step) -> tuple[int, ...]:
    """Returns the number of messages (one stage's activation or gradient) that each rank sends.

    Args:
        step: the schedule and its counts.

    Returns:
        The number of sends on each rank. Stages on the same rank exchange no messages.

    Example:
        >>> (
        ...     messages(Step("1f1b", 4, 8)),
        ...     messages(Step("interleaved_1f1b", 4, 8)),
        ...     messages(Step("zb_v", 4, 8)),
        ... )
        ((8, 16, 16, 8), (24, 32, 32, 24), (16, 32, 32, 16))

    Source:
        A count: one activation goes up and one gradient goes down across each boundary between
        stages on different ranks.
    """
    p, m, v = step.num_ranks, step.num_microbatches, step.stages_a_rank
    if p == 1:
        return (0,)
    # the first and last stages send in one direction only, and the turn of a V sends nothing
    saved = v if step.name in _VEE else 1
    return tuple(m * (2 * v - (saved if rank in (0, p - 1) else 0)) for rank in range(p))


def _latency(step: Step, latency: Time, semantics: Semantics) -> Time:
    p, m = step.num_ranks, step.num_microbatches
    if latency == 0 or p == 1:
        return 0
    if step.name in ("gpipe", "afab"):
        return 2 * (p - 1 if semantics == "buffered" else m + p - 2) * latency
    if step.name != "1f1b":
        raise ScheduleError(
            f"latency must be 0 for the closed form of {step.name}, got {latency}. Use evaluate."
        )
    if semantics == "buffered":
        return 2 * (m + p - 3 - (m - 2) // p) * latency
    if p == 2:
        return (m + 1) * latency
    return (2 * (p - 1) if m == 1 else 2 * m + 2 * p - 5) * latency


def _check_formula(step: Step, costs: Costs) -> tuple[Time, Time, Time]:
    """Returns f, i and w; raises ScheduleError if no formula for the step's bubble exists."""
    _check_enough(step)
    f, i, w, b = _times(costs)
    if step.name == "dualpipe_v" and costs.overlap:
        raise ScheduleError(
            f"overlap must be 0 for the closed form of dualpipe_v, got {costs.overlap}. Use "
            "evaluate, or dualpipe_v_overlapped_idle."
        )
    if step.name in _VEE and not (f == i == w and b == i + w):
        raise ScheduleError(
            f"f, i and w must be equal for the closed form of {step.name}, and b must be i + w, "
            f"got {f}, {i}, {w} (and b = {b}). Use evaluate."
        )
    return f, i, w


def _check_enough(step: Step) -> None:
    """Raises ScheduleError if there are too few microbatches for the formula."""
    p = step.num_ranks
    least = {"zb_h1": p, "zb_h2": 2 * p - 1, "zb_v": 2 * p - 1, "dualpipe_v": 2 * p}.get(
        step.name, 1
    )
    if step.num_microbatches < least:
        raise ScheduleError(
            f"num_microbatches must be at least {least} for the closed form of {step.name} on {p} "
            f"rank{'s' if p > 1 else ''}, got {step.num_microbatches}. Use evaluate, or more "
            "microbatches."
        )


def _times(costs: Costs) -> tuple[Time, Time, Time, Time]:
    times: Any = costs.forward, costs.input, costs.weight, costs.backward
    if any(isinstance(each, Sequence) for each in times):
        raise ScheduleError(
            f"costs must be the same for all stages, got {costs}. Use evaluate, gpipe_makespan "
            "or one_f_one_b_bound."
        )
    f, i, w, b = times
    return f, i, w, i + w if b is None else b


def _forward_and_backward(step: Step, costs: Costs) -> Time:
    """Returns the cost of one microbatch on one stage."""
    f, i, w, b = _times(costs)
    return f + (i + w if step.name in ("zb_h1", "zb_h2") else b)


def _work(step: Step, costs: Costs) -> Time:
    return step.num_microbatches * step.stages_a_rank * _forward_and_backward(step, costs)


def _divide(part: Time, whole: Time) -> Time:
    """Returns the ratio of two numbers, which is exact if both are exact. 0 / 0 is 0."""
    return part / Fraction(whole) if part else 0


def gpipe_makespan(
    num_microbatches: int, forward: Sequence[Time], backward: Sequence[Time], latency: Time = 0
) -> Time:
    """Returns the length of a GPipe step with unequal stages.

    The slowest stage sets the pace; every other stage adds one forward and one backward.

    Args:
        num_microbatches: the number of microbatches.
        forward: the time of each stage's forward.
        backward: the time of each stage's backward.
        latency: the time of a message, which travels as soon as it is sent.

    Returns:
        The time from the start of the first action to the end of the last.

    Raises:
        ArgumentError: there is no stage or no microbatch.
        ValueError: ``forward`` and ``backward`` differ in length.

    Example:
        >>> gpipe_makespan(3, forward=[1, 2, 1], backward=[2, 4, 2])
        24

    Source:
        GPipe corresponds to a row of machines that all microbatches pass through in the same order.
        Tests check the formula against the evaluator.
    """
    check_counts(len(forward), num_microbatches)
    once = sum(f + b for f, b in zip(forward, backward, strict=True))
    pace = max(forward) + max(backward)
    return once + (num_microbatches - 1) * pace + 2 * (len(forward) - 1) * latency


def one_f_one_b_bound(
    num_microbatches: int, forward: Sequence[Time], backward: Sequence[Time]
) -> Time:
    """Returns a lower bound on the length of a 1F1B step with unequal stages.

    There is no simple formula for the exact length.

    Args:
        num_microbatches: the number of microbatches.
        forward: the time of each stage's forward.
        backward: the time of each stage's backward.

    Returns:
        The maximum over all stages of a stage's work plus the time that one microbatch takes to
        reach the stage and to return from it.

    Raises:
        ArgumentError: there is no stage or no microbatch.
        ValueError: ``forward`` and ``backward`` differ in length.

    Example:
        >>> one_f_one_b_bound(3, forward=[1, 2, 1], backward=[2, 4, 2])
        21

    Source:
        A stage cannot begin before the first microbatch reaches it, and the step cannot end before
        the last microbatch's gradient has returned from it.
    """
    check_counts(len(forward), num_microbatches)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return max(sum(both[:stage]) + num_microbatches * time for stage, time in enumerate(both))
