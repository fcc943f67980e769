"""The line through measured times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.link import fit_link

SIZES = np.array([2**power for power in range(3, 29)])
EXACT = 40e-6 + 3e-10 * SIZES


@given(
    alpha=st.floats(1e-8, 1e-1),
    beta=st.floats(1e-13, 1e-6),
    sizes=st.lists(st.integers(0, 2**40), min_size=2, max_size=30, unique=True),
)
def test_times_that_follow_the_model_give_it_back(
    alpha: float, beta: float, sizes: list[int]
) -> None:
    link = fit_link(sizes, [alpha + beta * size for size in sizes])
    for size in sizes:
        assert link.time_s(size) == pytest.approx(alpha + beta * size, rel=1e-6)


def test_the_fit_minimises_relative_errors() -> None:
    times = EXACT * np.random.default_rng(0).uniform(0.8, 1.25, len(SIZES))
    # numpy's least squares of (w * residual), an independent method
    slope, start = np.polyfit(SIZES, times, 1, w=1 / times)
    link = fit_link(SIZES, times)
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((start, slope), rel=1e-6)
    # 7 ms too much at 256 MiB: without weights, alpha would change by more than its value
    times = EXACT.copy()
    times[-1] *= 1.1
    assert fit_link(SIZES, times).alpha_s == pytest.approx(40e-6, rel=0.05)


def test_the_errors_say_how_far_fits_scatter() -> None:
    rng = np.random.default_rng(0)
    fits = [fit_link(SIZES, EXACT * rng.normal(1, 0.05, len(SIZES))) for _ in range(300)]
    for value, error in (
        ("alpha_s", "alpha_error_s"),
        ("beta_s_per_byte", "beta_error_s_per_byte"),
    ):
        scatter = np.std([getattr(fit, value) for fit in fits])
        assert np.median([getattr(fit, error) for fit in fits]) == pytest.approx(scatter, rel=0.25)


def test_two_points_leave_nothing_to_tell_an_error_from() -> None:
    link = fit_link([0, 1000], [1e-6, 2e-6])
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((1e-6, 1e-9))
    assert math.isnan(link.alpha_error_s)
    assert math.isnan(link.beta_error_s_per_byte)


def test_neither_number_comes_out_negative() -> None:
    level = [3e-6, 2e-6, 1e-6]  # the best level line weighs relative errors: sum(1/t) / sum(1/t**2)
    falling = fit_link([8, 16, 32], level)
    best_s = sum(1 / t for t in level) / sum(1 / t**2 for t in level)
    assert (falling.alpha_s, falling.beta_s_per_byte) == (pytest.approx(best_s), 0)
    steep = fit_link([10, 20, 30], [1e-6, 3e-6, 5e-6])  # would start at -1e-6
    assert steep.alpha_s == 0
    assert 1e-7 < steep.beta_s_per_byte < 5e-6 / 30
