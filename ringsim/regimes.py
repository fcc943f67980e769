"""Where one alpha-beta line does not hold for all sizes: the breaks at which a transport changes how it works.

Many transports send small messages in one way and large ones in another. The time then jumps, up or down, from one size to the next, and
no single line fits both sides::

    time |                    .-'
         |                 .-'        the right line, continued to the left, misses the left points,
         |   .-'                      and the left line misses the right ones: a break
         | .-'
         +------------|--------- size

Where only the *slope* changes (a cache that is too small from some size on), the two lines meet, neither misses the next point by much,
and that is no break.

The rule: between two neighbouring sizes is a break where

- both sides have at least three sizes, and each side's fit, continued to the next size beyond, misses the time measured there by more
  than a quarter, by more than three times what it misses its own points by, and by more than the middle four fifths of the times there
  spread; of several such places, the one whose two fits leave least;
- or the larger message takes less time by more than a quarter, and nine in ten of its times are below nine in ten of the smaller's.

Each side is then looked at again in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ringsim.errors import ArgumentError
from ringsim.link import Link, fit_link

__all__ = ["Regime", "find_regimes"]

LEAST_SIZES: Final = 3
LEAST_MISS: Final = 0.25  # of the measured time
LEAST_SCATTERS: Final = 3.0  # times the root mean square of the relative errors of a side's own points

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """A range of sizes for which one line holds.

    Args:
        first: index of its smallest size.
        last: index of its largest size; it belongs to the regime.
        link: the line; None where the regime has a single size.
    """

    first: int
    last: int
    link: Link | None


def find_regimes(
    sizes_bytes: Sequence[float] | npt.NDArray[Any],
    times_s: Sequence[float] | npt.NDArray[Any],
    *,
    p10_s: Sequence[float] | npt.NDArray[Any] | None = None,
    p90_s: Sequence[float] | npt.NDArray[Any] | None = None,
) -> list[Regime]:
    """Splits measured times at the breaks; the rule stands in the module's docstring.

    Args:
        sizes_bytes: sizes, ascending, each once; shape (n,).
        times_s: the median time of each in seconds, above 0; shape (n,).
        p10_s: what a tenth of the times is below; the medians by default.
        p90_s: what nine tenths are below; the medians by default.

    Returns:
        The regimes from small to large: one where there is no break, none where there are no sizes.

    Raises:
        ArgumentError: the sizes do not ascend, or the lengths differ.

    Example:
        >>> sizes = [2**power for power in range(10, 20)]
        >>> times = [20e-6 + size / 1e9 if size < 2**15 else 120e-6 + size / 4e9 for size in sizes]
        >>> [(sizes[regime.first], sizes[regime.last], round(regime.link.alpha_s * 1e6)) for regime in find_regimes(sizes, times)]
        [(1024, 16384, 20), (32768, 524288, 120)]
    """
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    low = times if p10_s is None else np.asarray(p10_s, dtype=np.float64)
    high = times if p90_s is None else np.asarray(p90_s, dtype=np.float64)
    if sizes.ndim != 1 or not sizes.shape == times.shape == low.shape == high.shape:
        raise ArgumentError(f"sizes_bytes and the times must be lists of one length, got {len(sizes)} sizes and {len(times)} times.")
    if (np.diff(sizes) <= 0).any():
        raise ArgumentError(f"sizes_bytes must ascend, got {sizes.tolist()}. Sort them, and give each once.")
    if not len(sizes):
        return []
    marks = [0, *_breaks(sizes, times, low, high, 0), len(sizes)]
    # The first place found between three regimes may be a compromise; once its neighbours are known it is one no more.
    for at in marks[1:-1]:
        place = marks.index(at)
        near = slice(marks[place - 1], marks[place + 1])
        if not _holds(sizes[near], times[near], low[near], high[near], at - marks[place - 1]):
            del marks[place]
    return [
        Regime(start, end - 1, fit_link(sizes[start:end], times[start:end]) if end - start > 1 else None) for start, end in pairwise(marks)
    ]


def _breaks(sizes: Floats, times: Floats, low: Floats, high: Floats, offset: int) -> list[int]:
    """Indices of the sizes that begin a regime, but for the first."""
    at = next((place for place in range(1, len(sizes)) if _falls(times, low, high, place)), None)
    if at is None:
        jumps = [jump for place in range(1, len(sizes)) if (jump := _jump(sizes, times, low, high, place)) is not None]
        if not jumps:
            return []
        _, at = min(jumps)
    before = _breaks(sizes[:at], times[:at], low[:at], high[:at], offset)
    return [*before, offset + at, *_breaks(sizes[at:], times[at:], low[at:], high[at:], offset + at)]


def _holds(sizes: Floats, times: Floats, low: Floats, high: Floats, at: int) -> bool:
    return _falls(times, low, high, at) or _jump(sizes, times, low, high, at) is not None


def _falls(times: Floats, low: Floats, high: Floats, at: int) -> bool:
    """Tells whether the size at this index takes clearly less time than the one before it."""
    return bool(times[at] < times[at - 1] * (1 - LEAST_MISS) and high[at] < low[at - 1])


def _jump(sizes: Floats, times: Floats, low: Floats, high: Floats, at: int) -> tuple[float, int] | None:
    """What the fits of both sides leave, and the index, where the fits of both miss the other side; None elsewhere."""
    if not LEAST_SIZES <= at <= len(sizes) - LEAST_SIZES:
        return None
    left = 0.0
    for side, beyond in ((slice(None, at), at), (slice(at, None), at - 1)):
        # A line that may start below 0 follows a change of slope; one that may not is all that makes sense of times that scatter.
        link = fit_link(sizes[side], times[side])
        for line in (_line(sizes[side], times[side]), np.array([link.alpha_s, link.beta_s_per_byte])):
            own, miss = _misses(line, sizes[side], times[side]), _misses(line, sizes[beyond], times[beyond])
            explained = max(LEAST_MISS, LEAST_SCATTERS * float(np.sqrt(np.mean(own**2))))
            if abs(miss) <= explained or low[beyond] <= (1 + miss) * times[beyond] <= high[beyond]:
                return None
        left += float((own**2).sum())
    return left, at


def _line(sizes: Floats, times: Floats) -> Floats:
    """The best line by relative errors, its start below 0 allowed, unlike ``fit_link``'s: after a change of slope it has to be."""
    scale = sizes[-1]
    found, _, _, _ = np.linalg.lstsq(np.stack([1 / times, sizes / scale / times], axis=1), np.ones(len(sizes)), rcond=None)
    return np.array([found[0], found[1] / scale])


def _misses(line: Floats, sizes: Any, times: Any) -> Any:
    """What the line says too much, as a share of the measured time."""
    return (line[0] + line[1] * sizes) / times - 1
