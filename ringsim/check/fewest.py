"""The third exercise of the lesson on schedules: as few microbatches as a limit on the bubble allows, where messages take time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.result import CheckResult
from ringsim.check.small_task import count_microbatches
from ringsim.schedules.closed_forms import Step, makespan
from ringsim.schedules.costs import Costs
from ringsim.traces.value import Trace, count

__all__ = ["fewest_microbatches"]

_ROUNDING: Final = 1e-9  # of a bubble: who counts it in another way may be that far off
_NUMBER_HINT: Final = "Return one whole number, 1 or more."
_LOSS_HINT: Final = (
    "A formula that knows no messages counts too little: in 1F1B they cost something for each microbatch. Ask the simulator: "
    'ringsim.simulate_schedule("1f1b", costs, num_ranks=..., num_microbatches=..., semantics="buffered").bubble'
)
_MORE_HINT: Final = "Begin with 1 microbatch, and take one more until the simulated bubble is small enough."


class _Case(NamedTuple):
    """A pipeline whose forwards take 1."""

    num_ranks: int
    backward: int
    latency: float
    limit: float

    @property
    def costs(self) -> Costs:
        return Costs(forward=1, backward=self.backward, latency=self.latency)


def fewest_microbatches(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that chooses how many microbatches a step of 1F1B should have.

    ``function(num_ranks, costs, limit)`` returns the smallest number of microbatches with which the bubble is ``limit`` of the step or
    less. ``costs`` is a ``Costs`` with the times of a forward, of a backward and of a message, which travels as soon as it is sent. It runs
    on a rank of its own, so that a search that never ends is ended; there always is such a number.

    Args:
        function: the answer.
        seed: what sizes and times are drawn from; None to draw the seed, too.

    Returns:
        The verdict.

    Example:
        >>> import math
        >>> def without_messages(num_ranks, costs, limit):
        ...     return max(1, math.ceil((num_ranks - 1) * (1 - limit) / limit))
        >>> print(fewest_microbatches(without_messages, seed=1).reason)
        With 4 ranks, F 1, B 2 and 0.5 a message, 9 microbatches have a bubble of 40.0 %, and 25 % is allowed.
    """
    return examine("fewest_microbatches", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    cases = [_Case(4, backward=2, latency=0, limit=0.11), _Case(1, backward=2, latency=1, limit=0.05)]
    for num_ranks, latency in ((4, 0.5), (2, 1), (draw.randrange(3, 9), draw.choice((0.25, 0.75))), (8, draw.choice((0.5, 1, 2)))):
        backward = 2 if num_ranks == 4 else draw.randrange(1, 4)
        lost = 2 * latency * (num_ranks - 1) / num_ranks  # for each microbatch, however many there are
        least = lost / (1 + backward + lost)
        cases.append(_Case(num_ranks, backward, latency, limit=math.ceil(100 * (least + 0.05)) / 100))
    (answers,) = examination.run(_numbers_on_rank, 1, cases).results
    for case, answer in zip(cases, answers, strict=True):
        _judge_number(case, answer)
    return f"Right for {len(cases)} pipelines of 1 to 8 ranks, with messages that take time and without.", None


def _numbers_on_rank(function: Callable[..., Any], cases: Sequence[_Case]) -> list[int | str]:
    return [_plain(function(case.num_ranks, case.costs, case.limit)) for case in cases]


def _plain(answer: Any) -> int | str:
    """Returns an answer as a whole number; what is none as a few words."""
    try:
        return int(answer) if int(answer) == answer >= 1 else shown(answer)
    except (TypeError, ValueError):
        return shown(answer)


def _judge_number(case: _Case, answer: int | str) -> None:
    about = f"With {count(case.num_ranks, 'rank')}, F 1, B {case.backward} and {case.latency:g} a message"
    if isinstance(answer, str):
        raise Wrong(f"{about}, the answer must be a number of microbatches, got {answer}.", _NUMBER_HINT)
    bubble = _bubble(case, answer)
    if bubble > case.limit + _ROUNDING:
        have = "have" if answer > 1 else "has"
        reason = f"{about}, {count_microbatches(answer)} {have} a bubble of {100 * bubble:.1f} %, and {100 * case.limit:.0f} % is allowed."
        raise Wrong(reason, _LOSS_HINT)
    enough = next(number for number in range(1, answer + 1) if _bubble(case, number) <= case.limit + _ROUNDING)
    if enough < answer and _bubble(case, enough) <= case.limit - _ROUNDING:
        raise Wrong(f"{about}, {count_microbatches(answer)} are more than needed: {enough} would do.", _MORE_HINT)


def _bubble(case: _Case, num_microbatches: int) -> float:
    """Returns the part of the step in which a rank does not compute, by the closed form."""
    took = float(makespan(Step("1f1b", case.num_ranks, num_microbatches), case.costs, "buffered"))
    return 1 - num_microbatches * (1 + case.backward) / took
