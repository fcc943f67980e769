"""The first exercise of the lesson on stages: which layers each stage gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.result import CheckResult
from ringsim.traces.value import Trace, count

__all__ = ["partition"]

Cut = list[list[int]]  # for each stage, its layers
_COUNT_HINT: Final = "The answer is a list with one entry a stage, also for a stage without layers: range(3, 3) is an empty range."
_LOST_HINT: Final = (
    "num_layers // num_stages layers for each stage leave num_layers % num_stages over. Give one more to each of the first so many stages."
)
_ORDER_HINT: Final = "Stages are cut from front to back: where one ends, the next begins. Keep a running start."
_BALANCE_HINT: Final = (
    "A pipeline is as fast as its slowest stage. Do not give all that is left over to one stage: the first num_layers % num_stages stages "
    "get one layer each."
)


def partition(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that cuts a model's layers into stages.

    ``function(num_layers, num_stages)`` returns a list with the layers of each stage, as ranges or lists of numbers. Any cut passes that
    holds every layer once, in order, in stages that differ by one layer at most; with more stages than layers some are empty. The
    function runs on a rank of its own, so that one that never ends is ended.

    Args:
        function: the answer.
        seed: what sizes are drawn from; None to draw the seed, too.

    Returns:
        The verdict, with its reason.

    Example:
        >>> def whole_shares_only(num_layers, num_stages):
        ...     share = num_layers // num_stages
        ...     return [range(stage * share, (stage + 1) * share) for stage in range(num_stages)]
        >>> print(partition(whole_shares_only, seed=1).reason)
        With 10 layers and 4 stages 2 layers are lost, the first of them layer 8.
    """
    return examine("partition", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [(8, 4), (10, 4), (4, 4), (3, 4), (1, 3), (5, 1), (0, 2)]
    sizes += [(draw.randrange(5, 100), draw.randrange(2, 20)) for _ in range(5)]
    (answers,) = examination.run(_cuts_on_rank, 1, sizes).results
    for (num_layers, num_stages), answer in zip(sizes, answers, strict=True):
        _judge_cut(num_layers, num_stages, answer)
    return f"Every layer once, in order, and balanced, for {len(sizes)} models; stages without layers included.", None


def _cuts_on_rank(function: Callable[..., Any], sizes: Sequence[tuple[int, int]]) -> list[Cut | str]:
    return [_plain_cut(function(*size)) for size in sizes]


def _plain_cut(answer: Any) -> Cut | str:
    """Returns an answer as lists of numbers; what is none as a few words."""
    if isinstance(answer, str):
        return repr(answer)
    try:
        return [[int(layer) for layer in layers] for layers in answer]
    except (TypeError, ValueError):
        return shown(answer)


def _judge_cut(num_layers: int, num_stages: int, cut: Cut | str) -> None:
    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(f"With {count(num_layers, 'layer')} and {count(num_stages, 'stage')} {reason}.", hint)

    if isinstance(cut, str):
        raise wrong(
            f"the answer must be a list of ranges, one for each stage, got {cut}", "Return a list such as [range(0, 2), range(2, 4)]."
        )
    if len(cut) != num_stages:
        raise wrong(f"the answer must have one entry for each stage, got {len(cut)}", _COUNT_HINT)
    given = [layer for layers in cut for layer in layers]
    strange = [layer for layer in given if not 0 <= layer < num_layers]
    if strange:
        raise wrong(f"there is no layer {strange[0]}", "Layers are numbered from 0 to num_layers - 1. range(a, b) ends before b.")
    lost = sorted(set(range(num_layers)) - set(given))
    if lost:
        are = "is" if len(lost) == 1 else "are"
        raise wrong(f"{count(len(lost), 'layer')} {are} lost, the first of them layer {lost[0]}", _LOST_HINT)
    twice = [layer for layer in given if given.count(layer) > 1]
    if twice:
        raise wrong(f"layer {twice[0]} is in more than one place", _ORDER_HINT)
    if given != list(range(num_layers)):
        raise wrong(f"the layers must be in order, got {shown(cut)}", _ORDER_HINT)
    lengths = [len(layers) for layers in cut]
    if max(lengths) - min(lengths) > 1:
        raise wrong(f"stages must differ by one layer at most, got {shown(lengths)} layers", _BALANCE_HINT)
