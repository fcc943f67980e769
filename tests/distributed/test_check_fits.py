"""The check of the lesson on bandwidth: right fits pass, and the usual mistakes are told apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from verdicts import verdict

import ringsim
from ringsim import check
from ringsim.check import examination, fits
from ringsim.check.fits import Data

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]


def medians(sizes: Any, times: Any) -> tuple[Any, Any]:
    each = np.unique(sizes)
    return each, np.array([np.median(times[sizes == size]) for size in each])


def weighted(sizes: Any, times: Any) -> tuple[float, float]:
    each, middle = medians(sizes, times)
    beta, alpha = np.polyfit(each, middle, 1, w=1 / middle)
    return alpha, beta


def by_fit_link(sizes: Any, times: Any) -> ringsim.Link:
    from ringsim.link import fit_link

    return fit_link(*medians(sizes, times))


def both_ends(sizes: Any, times: Any) -> list[float]:
    each, middle = medians(sizes, times)
    return [middle[0], (middle[-1] - middle[0]) / each[-1]]


def unweighted(sizes: Any, times: Any) -> tuple[float, float]:
    beta, alpha = np.polyfit(*medians(sizes, times), 1)
    return alpha, beta


def of_means(sizes: Any, times: Any) -> tuple[float, float]:
    each = np.unique(sizes)
    middle = np.array([times[sizes == size].mean() for size in each])
    beta, alpha = np.polyfit(each, middle, 1, w=1 / middle)
    return alpha, beta


@pytest.mark.parametrize("answer", [weighted, by_fit_link, both_ends])
def test_alphabeta_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.alphabeta, answer, seed)
        assert result.passed, result
        assert result.trace.world_size == 2
        assert "Right for 5 links chosen at random" in result.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (unweighted, r"alpha must be [\d.]+ µs within 30 %, got ", "Divide each error by the time"),
        (of_means, r"(alpha|beta) must be ", "Take the median"),
        (lambda sizes, times: weighted(sizes, times)[::-1], "alpha must be ", "return alpha, beta"),
        (lambda sizes, times: tuple(1e6 * number for number in weighted(sizes, times)), "alpha must be ", "not 40"),
        (lambda sizes, times: None, "two numbers from 0, alpha and beta, got None", "Return two numbers"),
        (lambda sizes, times: (1.0, float("nan")), "two numbers from 0", "Return two numbers"),
        (lambda sizes, times: times[10**6], "IndexError", "two numpy arrays"),
    ],
)
def test_alphabeta_says_what_is_wrong(answer: Answer, reason: str, hint: str) -> None:
    import re

    result = verdict(check.alphabeta, answer)
    assert not result.passed
    assert re.search(reason, result.reason), result
    assert hint in result.hint


def test_alphabeta_wants_a_function() -> None:
    assert "must be a function" in verdict(check.alphabeta, (40e-6, 1e-9)).reason


def quiet(factor: float = 1.0) -> Data:
    """Times of a link without noise; every second size takes ``factor`` times as long."""
    link = ringsim.Link(40e-6, 2.5e-10)
    times = [link.time_s(size) * (factor if index % 2 else 1.0) for index, size in enumerate(fits.SIZES)]
    return Data(list(fits.SIZES), times, None)


def test_a_line_is_judged_by_the_medians_of_real_messages() -> None:
    trace = ringsim.trace(fits._messages_on_rank, world_size=2, args=(None,))
    assert fits._judge_line(quiet(), ringsim.Link(44e-6, 2.8e-10), trace) is True
    with pytest.raises(examination.Wrong, match=r"8 B took 40 µs in the median, and the line says 80 µs"):
        fits._judge_line(quiet(), ringsim.Link(80e-6, 2.5e-10), trace)
    assert fits._judge_line(quiet(30.0), ringsim.Link(40e-6, 2.5e-10), trace) is False, "no line fits: nothing to judge by"


def test_real_messages_are_timed_by_the_record() -> None:
    trace = ringsim.trace(fits._messages_on_rank, world_size=2, args=(None,))
    data = fits._measured(trace)
    assert data.sizes_bytes == [size for size in fits.SIZES for _ in range(fits.REPEATS)]
    table = trace.to_pandas()
    mine = table[(table["rank"] == 0) & (table["size_bytes"] == 8)]
    trips = (mine["done_ns"].to_numpy()[1::2] - mine["post_ns"].to_numpy()[::2])[1:] / 2
    assert data.times_s[: fits.REPEATS] == pytest.approx((trips * 1e-9).tolist())
