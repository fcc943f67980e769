"""The second exercise of the lesson on the generation ring: how many batches must be on their way for busy stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.result import CheckResult
from ringsim.schedules.generation import can_finish, steady_use
from ringsim.traces.value import Trace, count

__all__ = ["inner_iterations"]

WANTED: Final = Fraction(4, 5)
Setting = tuple[int, bool]


def inner_iterations(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that chooses the settings of a generation ring.

    ``function(N)`` returns (T, async_comm): a ring of N stages must come to an end with T inner iterations, each stage must work 80 % of
    the time or more while decoding, and T must be as small as that allows, for every batch on its way needs a cache on every stage. The
    function runs on a rank of its own, so that one that never ends is ended.

    Args:
        function: the answer.
        seed: what sizes are drawn from; None to draw the seed, too.

    Returns:
        The verdict.

    Example:
        >>> print(inner_iterations(lambda N: (N, False), seed=1).reason)
        With 10 stages (10, False) keeps a stage at work 100 % of the time, and 8 inner iterations would be enough for 80 %.
    """
    return examine("inner_iterations", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [10, 4, 2, 5, 1, draw.randrange(6, 10), draw.randrange(11, 100)]
    (answers,) = examination.run(_settings_on_rank, 1, sizes).results
    for size, answer in zip(sizes, answers, strict=True):
        _judge_setting(size, answer)
    return f"Right for {', '.join(map(str, sorted(sizes)[:-1]))} and {max(sizes)} stages.", None


def _settings_on_rank(function: Callable[..., Any], sizes: Sequence[int]) -> list[Setting | str]:
    return [_plain_setting(function(size)) for size in sizes]


def _plain_setting(answer: Any) -> Setting | str:
    """Returns an answer as a number and a bool; what is none as a few words."""
    try:
        turns, async_comm = answer
        return (int(turns), bool(async_comm)) if int(turns) == turns >= 1 else shown(answer)
    except (TypeError, ValueError):
        return shown(answer)


def _judge_setting(size: int, answer: Setting | str) -> None:
    stages = count(size, "stage")

    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(f"With {stages} {reason}", hint)

    if isinstance(answer, str):
        raise wrong(f"the answer must be a number of 1 or more and True or False, got {answer}.", "Return a pair such as (4, False).")
    turns, async_comm = answer
    if not can_finish(size, turns, async_comm):
        limits = "1 to 2 N - 1" if async_comm else "2 to N"
        raise wrong(f"{answer} never ends.", f"Look at the map: with async_comm={async_comm} a ring ends with {limits} inner iterations.")
    use = steady_use(size, turns, async_comm)
    percent = f"{100 * float(use):.0f} %"
    if use < WANTED:
        form = "T / N up to T = N" if async_comm else "(T - 1) / (N - 1)"
        hint = f"With async_comm={async_comm} a stage works {form} of the time. Which T makes that 80 %? Round up, and mind exact fifths."
        raise wrong(f"{answer} keeps a stage at work {percent} of the time, which is less than 80 %.", hint)
    fewest = next(number for number in range(1, size + 1) if steady_use(size, number, async_comm=True) >= WANTED)
    if turns > fewest:
        hint = "Which of the two kinds of messages needs fewer batches for the same share? And do not round up more than needed."
        raise wrong(
            f"{answer} keeps a stage at work {percent} of the time, and {count(fewest, 'inner iteration')} would be enough for 80 %.", hint
        )
