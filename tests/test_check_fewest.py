"""The check of the lesson on schedules that asks for as few microbatches as a limit on the bubble allows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from verdicts import verdict

import ringsim
from ringsim import check
from ringsim.pipeline import Costs

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[[int, Costs, float], Any]


def by_simulation(num_ranks: int, costs: Costs, limit: float) -> int:
    number = 1
    while simulated_bubble(num_ranks, costs, number) > limit:
        number += 1
    return number


def simulated_bubble(num_ranks: int, costs: Costs, number: int) -> float:
    return ringsim.simulate_schedule("1f1b", costs, num_ranks=num_ranks, num_microbatches=number, semantics="buffered").bubble


def without_messages(num_ranks: int, costs: Costs, limit: float) -> int:
    return max(1, math.ceil((num_ranks - 1) * (1 - limit) / limit))


@pytest.mark.parametrize("answer", [by_simulation, lambda *case: np.int64(by_simulation(*case))])
def test_a_right_answer_passes(answer: Answer) -> None:
    for seed in (1, 2, 3, None):
        result = verdict(check.fewest_microbatches, answer, seed)
        assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (without_messages, "F 1, B 2 and 0.5 a message, 9 microbatches have a bubble of 40.0 %, and 25 % is allowed."),
        (lambda *case: by_simulation(*case) + 1, "26 microbatches are more than needed: 25 would do."),
        (lambda *case: 1, "With 4 ranks, F 1, B 2 and 0 a message, 1 microbatch has a bubble of 75.0 %, and 11 % is allowed."),
        (lambda *case: 10**15, "25 would do."),
        (lambda *case: 0, "must be a number of microbatches, got 0."),
        (lambda *case: None, "must be a number of microbatches, got None."),
        (lambda *case: 27.5, "must be a number of microbatches, got 27.5."),
        (7, "The answer must be a function"),
    ],
)
def test_a_wrong_answer_is_told_why(answer: Any, words: str) -> None:
    result = verdict(check.fewest_microbatches, answer)
    assert not result.passed
    assert words in result.reason
