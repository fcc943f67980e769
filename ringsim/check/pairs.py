"""The first exercise of the lesson on the ring: which pairs of ranks get a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.result import CheckResult
from ringsim.traces.events import make_events
from ringsim.traces.value import Trace, count

__all__ = ["pair_groups"]

Pairs = list[tuple[int, int]]
_HINT: Final = "Group i joins rank i and its successor, which is rank (i + 1) % N: the last rank's successor is rank 0."


def pair_groups(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that lists the pairs of a ring.

    ``function(N)`` returns a list of N pairs (predecessor, successor): pair i is (i, (i + 1) mod N). A ring of one has none. The function
    runs on a rank of its own, so that one that never ends is ended.

    Args:
        function: the answer.
        seed: what sizes are drawn from; None to draw the seed, too.

    Returns:
        The verdict; its trace, where there is one, draws the groups that the answer asks for.

    Example:
        >>> print(pair_groups(lambda N: [(i, i + 1) for i in range(N - 1)], seed=1).reason)
        The ring of 2 ranks is not closed: (1, 0) is missing.
    """
    return examine("pair_groups", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [1, 2, 3, 4, draw.randrange(5, 10), draw.randrange(10, 65)]
    (answers,) = examination.run(_pairs_on_rank, 1, sizes).results or []
    for size, answer in zip(sizes, answers, strict=True):
        _judge_pairs(size, answer)
    return f"Right for rings of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks.", None


def _pairs_on_rank(function: Callable[..., Any], sizes: Sequence[int]) -> list[Pairs | str]:
    return [_plain_pairs(function(size)) for size in sizes]


def _plain_pairs(answer: Any) -> Pairs | str:
    """Returns an answer as pairs of numbers; what is none as a few words."""
    try:
        return [(int(pred), int(succ)) for pred, succ in answer] if not isinstance(answer, str) else repr(answer)
    except (TypeError, ValueError):
        return shown(answer)


def _judge_pairs(size: int, answer: Pairs | str) -> None:
    due = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    if answer == due:
        return
    ranks = count(size, "rank")

    def wrong(reason: str, hint: str = _HINT) -> Wrong:
        picture = None if isinstance(answer, str) else _picture(size, answer)
        return Wrong(reason, hint, world_size=size, trace=picture)

    if isinstance(answer, str):
        raise wrong(f"For {ranks} the answer must be a list of pairs of ranks, got {answer}.", "Return a list such as [(0, 1), (1, 0)].")
    listed = ", ".join(map(str, answer))
    if size == 1:
        hint = "A rank does not send to itself: for N == 1 the list is empty."
        raise wrong(f"A ring of 1 rank has no pairs, got {len(answer)}: {listed}.", hint)
    strange = [pair for pair in answer if pair not in due]
    missing = [pair for pair in due if pair not in answer]
    if missing == [(size - 1, 0)] and len(answer) == size - 1:
        raise wrong(f"The ring of {ranks} is not closed: {missing[0]} is missing.")
    if size > 2 and sorted((succ, pred) for pred, succ in answer) == sorted(due):
        hint = "The predecessor comes first: it is the one that sends."
        raise wrong(f"In the ring of {ranks} the pairs are the wrong way round: {answer[0]} instead of {answer[0][::-1]}.", hint)
    if strange:
        raise wrong(f"The ring of {ranks} has no pair {strange[0]}, for rank {strange[0][0]}'s successor is not rank {strange[0][1]}.")
    if missing and size == 2:
        hint = "Between two ranks there are two edges, there and back, and each has a group of its own."
        raise wrong(f"A ring of 2 ranks has 2 pairs, (0, 1) and (1, 0), got {listed or 'none'}.", hint)
    if missing:
        raise wrong(f"The ring of {ranks} lacks {count(len(missing), 'pair')}, the first of them {missing[0]}.")
    if len(answer) > size:
        raise wrong(f"The ring of {ranks} has {size} pairs, got {len(answer)}: some are there twice.")
    hint = "All ranks must list the groups in the same order, or they would build different groups at the same time."
    raise wrong(f"The pairs of the ring of {ranks} must come in order, pair i for the edge from rank i, got {listed}.", hint)


def _picture(size: int, answer: Pairs) -> Trace | None:
    """Returns a trace without events that draws the groups of an answer, as far as they can be drawn."""
    drawn = dict.fromkeys((pred, succ) for pred, succ in answer if 0 <= pred < size and 0 <= succ < size)
    if size == 1:
        return None
    groups = [[f"ring:{pred}>{succ}", [pred, succ]] for pred, succ in drawn]
    source = "the groups of the answer; nothing was run"
    return Trace(make_events({"rank": [], "op": []}), {"source": source, "world_size": size, "ring_groups": groups})
