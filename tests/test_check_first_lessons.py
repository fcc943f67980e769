"""The checks of the first two lessons: right answers pass, and each wrong one fails for its own reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from verdicts import verdict

import ringsim
from ringsim import check

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]

# -- hello


def share(numbers: list[int]) -> int:
    ring = ringsim.current_ring()
    with ringsim.span("share"):
        return sum(numbers[ring.rank :: ring.world_size])


def share_in_a_loop(numbers: list[int]) -> torch.Tensor:
    ring = ringsim.current_ring()
    total = torch.zeros(1, dtype=torch.float64)
    with ringsim.span("share"):
        for index, number in enumerate(numbers):
            if index % ring.world_size == ring.rank:
                total += number
    return total


@pytest.mark.parametrize("answer", [share, share_in_a_loop])
def test_hello_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.hello, answer, seed)
        assert result.passed, result
        assert result.trace is not None


def share_of_four(numbers: list[int]) -> int:
    with ringsim.span("share"):
        return sum(numbers[ringsim.current_ring().rank :: 4])


def share_counted_from_one(numbers: list[int]) -> int:
    ring = ringsim.current_ring()
    with ringsim.span("share"):
        return sum(numbers[(ring.rank + 1) % ring.world_size :: ring.world_size])


def everything(numbers: list[int]) -> int:
    with ringsim.span("share"):
        return sum(numbers)


def share_of_rank_0_only(numbers: list[int]) -> int | None:
    return share(numbers) if ringsim.current_ring().rank == 0 else None


def share_without_span(numbers: list[int]) -> int:
    ring = ringsim.current_ring()
    return sum(numbers[ring.rank :: ring.world_size])


def share_with_another_span(numbers: list[int]) -> int:
    with ringsim.span("work"):
        return share_without_span(numbers)


def share_with_span_on_rank_0(numbers: list[int]) -> int:
    return share(numbers) if ringsim.current_ring().rank == 0 else share_without_span(numbers)


def raises(numbers: list[int]) -> int:
    return numbers[len(numbers)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda numbers: None, "Rank 0 of 3 must return the sum of its share, "),
        (lambda numbers: 7, "All 3 ranks returned 7, and each must return the sum of its own share."),
        (lambda numbers: "7", "got '7'."),
        (lambda numbers: [1], "got [1]."),
        (everything, "Every rank added up all the numbers"),
        (share_of_four, "Rank 0 of 3 took every 4th number, and must take every 3rd"),
        (share_counted_from_one, "Rank 0 of 3 returned the share of rank 1."),
        (lambda numbers: -share(numbers), "Rank 0 of 3 must return the sum of its share, "),
        (share_of_rank_0_only, "Rank 1 of 3 must return the sum of its share, "),
        (share_without_span, 'Rank 0 of 3 must record one span named "share", got 0.'),
        (share_with_another_span, 'Rank 0 of 3 must record one span named "share", got 0.'),
        (share_with_span_on_rank_0, 'Rank 1 of 3 must record one span named "share", got 0.'),
        (lambda numbers: share(numbers) + share(numbers) - share(numbers), "got 3."),
        (raises, "of 3 raised IndexError: list index out of range (line "),
        (lambda: 3, "takes 0 positional arguments but 1 was given"),
        (3, "The answer must be a function, got 3."),
    ],
)
def test_hello_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.hello, answer)
    assert not result.passed
    assert reason in result.reason


def test_an_answer_for_one_size_alone_does_not_pass() -> None:
    def only_for_three(numbers: list[int]) -> int:
        with ringsim.span("share"):
            return sum(numbers[ringsim.current_ring().rank :: 3])

    result = verdict(check.hello, only_for_three)
    assert "took every 3rd number, and must take every" in result.reason
    assert result.world_size != 3


# -- pair_groups


def pairs(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)] if n > 1 else []


def test_pair_groups_passes_a_right_answer() -> None:
    for seed in (1, None):
        assert verdict(check.pair_groups, pairs, seed).passed
    assert verdict(check.pair_groups, lambda n: tuple([a, b] for a, b in pairs(n))).passed


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda n: [], "A ring of 2 ranks has 2 pairs, (0, 1) and (1, 0), got none."),
        (lambda n: None, "For 1 rank the answer must be a list of pairs of ranks, got None."),
        (lambda n: "01", "must be a list of pairs of ranks, got '01'."),
        (lambda n: list(range(n)), "must be a list of pairs of ranks, got [0]."),
        (lambda n: [(0, 1), (1, 2), (2, 3), (3, 0)], "A ring of 1 rank has no pairs, got 4"),
        (lambda n: [(rank, (rank + 1) % n) for rank in range(n)], "A ring of 1 rank has no pairs, got 1: (0, 0)."),
        (lambda n: [(rank, rank + 1) for rank in range(n - 1)], "The ring of 2 ranks is not closed: (1, 0) is missing."),
        (lambda n: [(rank, rank + 1) for rank in range(n)] if n > 1 else [], "The ring of 2 ranks has no pair (1, 2)"),
        (lambda n: pairs(n) if n != 2 else [(0, 1), (0, 1)], "A ring of 2 ranks has 2 pairs"),
        (lambda n: pairs(n) if n != 2 else [(0, 1)], "(1, 0) is missing."),
        (lambda n: [(b, a) for a, b in pairs(n)], "must come in order"),
        (lambda n: [(b, a) for a, b in pairs(n)] if n > 2 else pairs(n), "the wrong way round: (1, 0) instead of (0, 1)."),
        (lambda n: pairs(n) * 2, "The ring of 2 ranks has 2 pairs, got 4: some are there twice."),
        (lambda n: pairs(n)[::-1] if n > 2 else pairs(n), "must come in order"),
        (lambda n: pairs(n) if n < 5 else pairs(4), "has no pair (3, 0), because rank 3's successor is not rank 0."),
        (lambda n: pairs(n) if n < 5 else pairs(n)[:3], "lacks"),
        (lambda n: pairs(n) if n < 10 else [], "lacks"),
        (lambda n: n / 0, "Rank 0 of 1 raised ZeroDivisionError: division by zero"),
        ([], "The answer must be a function, got []."),
    ],
)
def test_pair_groups_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.pair_groups, answer)
    assert not result.passed
    assert reason in result.reason


def test_pair_groups_draws_the_groups_of_the_answer() -> None:
    result = verdict(check.pair_groups, lambda n: [(0, rank) for rank in range(1, n)])
    assert result.trace is not None
    assert result.trace.metadata["ring_groups"] == [["ring:0>1", [0, 1]]]
    assert "image/png" in result.trace._repr_mimebundle_()[0]
    strange = verdict(check.pair_groups, lambda n: [(-1, 10**9)] if n > 1 else [])
    assert strange.trace is not None
    assert strange.trace.metadata["ring_groups"] == []


def test_the_same_seed_draws_the_same() -> None:
    def fails_late(n: int) -> list[tuple[int, int]]:
        return pairs(n) if n < 5 else []

    first, second = (verdict(check.pair_groups, fails_late, seed=77) for _ in range(2))
    assert first.as_dict() == second.as_dict()
    sizes = {check.pair_groups(fails_late).world_size for _ in range(12)}
    assert len(sizes) > 1, "another seed must draw another size"
