"""Links: the model of two numbers, and the fit that finds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim.errors import ArgumentError
from ringsim.link import Link, fit_link

SIZES = [2**power for power in range(3, 29)]


def test_the_numbers_of_a_link() -> None:
    link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
    assert (link.alpha_error_s, link.beta_error_s_per_byte) == (0.0, 0.0)
    assert link.bandwidth_gb_per_s == pytest.approx(12.5)
    assert link.n_half_bytes == pytest.approx(125_000)
    assert link.time_s(0) == 10e-6
    assert link.time_s(link.n_half_bytes) == pytest.approx(2 * link.alpha_s)
    free = Link(1e-6, 0.0)
    assert math.isinf(free.bandwidth_gb_per_s)
    assert math.isinf(free.n_half_bytes)
    with pytest.raises(ArgumentError, match="size_bytes must be 0 or more, got -1"):
        link.time_s(-1)


@pytest.mark.parametrize(
    "numbers", [(-1e-6, 0.0), (math.nan, 0.0), (0.0, math.inf), (0.0, -1.0), ("fast", 0.0), (0.0, 0.0, -1.0), (True, 0.0)]
)
def test_a_link_of_impossible_numbers_is_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="must be a number from 0"):
        Link(*numbers)


@given(
    alpha=st.floats(1e-8, 1e-1),
    beta=st.floats(1e-13, 1e-6),
    sizes=st.lists(st.integers(0, 2**40), min_size=2, max_size=30, unique=True),
)
def test_times_that_follow_the_model_give_it_back(alpha: float, beta: float, sizes: list[int]) -> None:
    link = fit_link(sizes, [alpha + beta * size for size in sizes])
    for size in sizes:
        assert link.time_s(size) == pytest.approx(alpha + beta * size, rel=1e-6)


def test_the_fit_minimises_relative_errors() -> None:
    rng = np.random.default_rng(0)
    times = (40e-6 + 3e-10 * np.array(SIZES)) * rng.uniform(0.8, 1.25, len(SIZES))
    slope, start = np.polyfit(SIZES, times, 1, w=1 / times)  # numpy's least squares of (w * residual), an independent way
    link = fit_link(SIZES, times)
    assert link.alpha_s == pytest.approx(start, rel=1e-6)
    assert link.beta_s_per_byte == pytest.approx(slope, rel=1e-6)


def test_small_sizes_count() -> None:
    times = [50e-6 + size / 4e9 for size in SIZES]
    times[-1] *= 1.1  # 7 ms too much at 256 MiB: unweighted, that would move alpha by more than alpha
    assert fit_link(SIZES, times).alpha_s == pytest.approx(50e-6, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_the_errors_say_how_far_fits_scatter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    exact = 40e-6 + 3e-10 * np.array(SIZES)
    fits = [fit_link(SIZES, exact * rng.normal(1, 0.05, len(SIZES))) for _ in range(300)]
    for value, error in (("alpha_s", "alpha_error_s"), ("beta_s_per_byte", "beta_error_s_per_byte")):
        scatter = np.std([getattr(fit, value) for fit in fits])
        assert np.median([getattr(fit, error) for fit in fits]) == pytest.approx(scatter, rel=0.25)


def test_two_points_leave_nothing_to_tell_an_error_from() -> None:
    link = fit_link([0, 1000], [1e-6, 2e-6])
    assert link.alpha_s == pytest.approx(1e-6)
    assert link.beta_s_per_byte == pytest.approx(1e-9)
    assert math.isnan(link.alpha_error_s)
    assert math.isnan(link.beta_error_s_per_byte)


def test_neither_number_comes_out_negative() -> None:
    falling = fit_link([8, 16, 32], [3e-6, 2e-6, 1e-6])
    assert falling.beta_s_per_byte == 0
    assert 1e-6 < falling.alpha_s < 3e-6
    steep = fit_link([10, 20, 30], [1e-6, 3e-6, 5e-6])  # would start at -1e-6
    assert steep.alpha_s == 0
    assert 1e-7 < steep.beta_s_per_byte < 5e-6 / 30
    level = [3e-6, 2e-6, 1e-6]  # the best level line weighs relative errors: sum(1/t) / sum(1/t**2)
    assert falling.alpha_s == pytest.approx(sum(1 / t for t in level) / sum(1 / t**2 for t in level))


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([8], [1e-6], "two sizes or more, got 1"),
        ([8, 8, 8], [1e-6, 2e-6, 3e-6], "two sizes or more, got 1"),
        ([], [], "two sizes or more, got 0"),
        ([8, 16], [1e-6], "two lists of one length"),
        ([[8, 16]], [[1e-6, 2e-6]], "two lists of one length"),
        ([8, 16], [1e-6, 0.0], "times_s must be above 0"),
        ([8, 16], [1e-6, math.nan], "times_s must be above 0"),
        ([-8, 16], [1e-6, 2e-6], "sizes_bytes must be 0 or more"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sizes: list[float], times: list[float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fit_link(sizes, times)
