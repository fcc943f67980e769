"""Where one alpha-beta line does not hold: breaks are found where a model with a break made the times, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.traces.bandwidths import find_regimes

SIZES = [2**power for power in range(3, 29)]


def line(size: float, alpha_s: float, gb_per_s: float) -> float:
    return alpha_s + size / gb_per_s * 1e-9


def bounds(times: list[float], **bands: list[float]) -> list[tuple[int, int]]:
    return [(regime.first, regime.last) for regime in find_regimes(SIZES[: len(times)], times, **bands)]


@given(st.floats(1e-6, 1e-3), st.floats(0.1, 500), st.integers(0, 10**6))
def test_one_line_with_noise_has_no_break(alpha_s: float, gb_per_s: float, seed: int) -> None:
    noise = np.exp(np.random.default_rng(seed).uniform(-0.05, 0.05, len(SIZES)))
    times = [line(size, alpha_s, gb_per_s) * factor for size, factor in zip(SIZES, noise, strict=True)]
    assert bounds(times) == [(0, len(SIZES) - 1)]


@given(st.integers(3, len(SIZES) - 3), st.integers(0, 10**6))
def test_a_jump_is_found_where_it_is(at: int, seed: int) -> None:
    """Three times the time from one size on, alpha and beta alike: both continuations miss by a factor."""
    noise = np.exp(np.random.default_rng(seed).uniform(-0.03, 0.03, len(SIZES)))
    times = [
        line(size, 40e-6, 3) * (3 if index >= at else 1) * factor for index, (size, factor) in enumerate(zip(SIZES, noise, strict=True))
    ]
    assert bounds(times) == [(0, at - 1), (at, len(SIZES) - 1)]


def test_the_lines_are_those_of_both_sides() -> None:
    times = [line(size, 20e-6, 1.5) if size < 2**16 else line(size, 150e-6, 5) for size in SIZES]
    small, large = find_regimes(SIZES, times)
    assert SIZES[small.last] == 2**15
    assert (small.link.alpha_s, small.link.bandwidth_gb_per_s) == pytest.approx((20e-6, 1.5))
    assert (large.link.alpha_s, large.link.bandwidth_gb_per_s) == pytest.approx((150e-6, 5))


def test_two_breaks() -> None:
    factors = [1] * 8 + [3] * 8 + [9] * 10
    times = [line(size, 40e-6, 3) * factor for size, factor in zip(SIZES, factors, strict=True)]
    assert bounds(times) == [(0, 7), (8, 15), (16, 25)]


def test_a_change_of_slope_alone_is_no_break() -> None:
    """A cache that is too small from 1 MiB on: 12 GB/s below, 4 GB/s for every byte beyond."""
    times = [line(min(size, 2**20), 10e-6, 12) + max(size - 2**20, 0) / 4e9 for size in SIZES]
    assert bounds(times) == [(0, len(SIZES) - 1)]


def test_a_fall_is_a_break_where_the_bands_are_apart() -> None:
    times = [100e-6] * 4 + [50e-6] * 2
    assert bounds(times) == [(0, 3), (4, 5)]
    assert bounds(times, p10_s=[40e-6] * 6, p90_s=[200e-6] * 6) == [(0, 5)], "the medians fall, the messages do not"
    assert bounds([100e-6] * 4 + [90e-6] * 2) == [(0, 5)], "by less than a quarter"


def test_a_jump_within_the_spread_of_the_times_is_none() -> None:
    times = [line(size, 40e-6, 3) * (3 if index >= 10 else 1) for index, size in enumerate(SIZES)]
    narrow = {"p10_s": [0.9 * time for time in times], "p90_s": [1.2 * time for time in times]}
    wide = {"p10_s": [time / 5 for time in times], "p90_s": [5 * time for time in times]}
    assert bounds(times, **narrow) == [(0, 9), (10, 25)]
    assert bounds(times, **wide) == [(0, 25)]


def test_few_sizes() -> None:
    assert find_regimes([], []) == []
    (alone,) = find_regimes([8], [1e-6])
    assert (alone.first, alone.last, alone.link) == (0, 0, None)
    (two,) = find_regimes([0, 1000], [1e-6, 2e-6])
    assert two.link.bandwidth_gb_per_s == pytest.approx(1)


def test_sizes_must_ascend() -> None:
    with pytest.raises(ArgumentError, match=r"sizes_bytes must ascend, got \[8.0, 8.0\]"):
        find_regimes([8, 8], [1e-6, 2e-6])
    with pytest.raises(ArgumentError, match="lists of one length, got 2 sizes and 1 times"):
        find_regimes([8, 16], [1e-6])
