"""The check for the lesson on four processes: each rank adds up its own share of the numbers."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator, Sequence
from typing import Any

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    listed,
    plain_number,
    shown,
)
from ringsim.traces.spans import mark
from ringsim.traces.value import Trace

SPAN_NAME = "share"
_READ = "a number is taken"
_WHOLE_HINT = (
    "ringsim.current_ring() returns a ring with the rank and the world_size of this process. A "
    "share begins at index rank, and its numbers are world_size apart."
)


def hello(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that adds up one rank's share of a list of numbers.

    ``function(numbers)`` receives the same list on every rank. Rank r returns the sum of
    numbers[r], numbers[r + world_size], numbers[r + 2 * world_size] and so on. The function takes
    these numbers from the list inside a single ``with ringsim.span("share")`` block. The check uses
    1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict, with its reason.

    Example:
        >>> import ringsim
        >>> def forgets_the_world_size(numbers):
        ...     with ringsim.span("share"):
        ...         return sum(numbers[ringsim.current_ring().rank :: 4])
        >>> print(hello(forgets_the_world_size, seed=1).reason)
        Rank 0 of 3 took every 4th number, but should have taken every 3rd, because there are 3 ranks.
    """  # noqa: E501
    return examine("hello", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    sizes = [3, draw.choice([5, 6]), 2, 1]
    for world_size in sizes:
        numbers = draw.sample(
            range(1, 10**6), draw.randrange(4 * world_size + 1, 5 * world_size + 8)
        )
        trace = examination.run(_share_on_rank, world_size, numbers)
        _judge_sums(numbers, trace)
        _judge_spans(trace)
    return f"Every rank added up its share, in runs with {listed(sizes)} ranks."


class _Numbers(UserList[int]):
    """A list that records when a number is taken from it, or from a slice of it."""

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            mark(_READ)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[int]:
        mark(_READ)
        return iter(self.data)


def _share_on_rank(function: Answer, numbers: Sequence[int]) -> float | str:
    return plain_number(function(_Numbers(numbers)))


def _judge_sums(numbers: Sequence[int], trace: Trace) -> None:
    size, results = trace.world_size, trace.results
    due = [sum(numbers[rank::size]) for rank in range(size)]
    if results == due:
        return
    rank = next(rank for rank in range(size) if results[rank] != due[rank])
    got, who = results[rank], f"Rank {rank} of {size}"
    if isinstance(got, str):
        raise Wrong(
            f"{who} must return the sum of its share, {due[rank]}, but returned {got}.",
            "Return the sum on every rank.",
        )
    if size > 1 and results == [sum(numbers)] * size:
        reason = "Every rank added up all the numbers, but should have added up only its own share."
        raise Wrong(reason, _WHOLE_HINT)
    if size > 1 and len(set(results)) == 1:
        raise Wrong(
            f"All {size} ranks returned {shown(got)}, but each should have returned the sum of "
            "its own share.",
            _WHOLE_HINT,
        )
    if got in due:
        raise Wrong(
            f"{who} returned the share of rank {due.index(got)}.",
            "Count shares from 0, like ranks and list indices.",
        )
    for step in range(1, len(numbers)):
        if step != size and got == sum(numbers[rank::step]):
            raise Wrong(
                f"{who} took every {_nth(step)} number, but should have taken every {_nth(size)}, "
                f"because there are {size} ranks.",
                _WHOLE_HINT,
            )
    reason = f"{who} must return the sum of its share, {due[rank]}, but returned {shown(got)}."
    raise Wrong(reason, _WHOLE_HINT)


def _judge_spans(trace: Trace) -> None:
    events = list(trace)
    hint = f'Put the work inside this block: with ringsim.span("{SPAN_NAME}"):'
    for rank in range(trace.world_size):
        who = f"Rank {rank} of {trace.world_size}"
        own = [event for event in events if event.rank == rank and event.status == "ok"]
        spans = [event for event in own if event.kind == "span" and event.label == SPAN_NAME]
        if len(spans) != 1:
            raise Wrong(
                f'{who} must record one span named "{SPAN_NAME}", but recorded {len(spans)}.',
                hint,
            )
        (span,) = spans
        reads = [event for event in own if event.kind == "mark" and event.label == _READ]
        if not any(read.seq > span.seq and read.post_ns <= (span.done_ns or 0) for read in reads):
            raise Wrong(
                f'{who} took no number inside its span named "{SPAN_NAME}": the work is outside '
                "the span.",
                hint,
            )


def _nth(number: int) -> str:
    return (
        f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number if number < 20 else number % 10, 'th') }"
    )
