"""The cost model of a link: a latency and a time per byte.

This two-parameter model is named after Hockney::

    time = alpha + beta * size

                    time |              .-'    slope beta: seconds for one more byte, 1 / bandwidth
                         |          .-'
                         |      .-'
                   alpha +--.-'                time of a message without data
                         +-------+-----------
                               n_half          size at which both parts are equal, so a message
                                               reaches half the bandwidth
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsim.errors import ArgumentError, is_integer, is_number, say


@dataclass(frozen=True)
class Link:
    """The cost of one message on one link: ``alpha_s + beta_s_per_byte * size_bytes`` seconds.

    Args:
        alpha_s: the latency in seconds; must be non-negative.
        beta_s_per_byte: the time per byte in seconds, which is the inverse of the bandwidth; must
            be non-negative.
        alpha_error_s: the standard error of ``alpha_s``, in seconds; 0 if ``alpha_s`` is exact, or
            NaN if a fit could not determine the error.
        beta_error_s_per_byte: the standard error of ``beta_s_per_byte``, in the same form.

    Raises:
        ArgumentError: a number is invalid.

    Example:
        >>> link = Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
        >>> (
        ...     round(link.bandwidth_gb_per_s, 3),
        ...     round(link.n_half_bytes),
        ...     round(link.time_s(1_000_000) * 1e6),
        ... )
        (12.5, 125000, 90)

    Source:
        R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
        Computing 20 (1994): the model, and n_half.
    """

    alpha_s: float
    beta_s_per_byte: float
    alpha_error_s: float = 0.0
    beta_error_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            unknown_error = "error" in name and isinstance(value, float) and math.isnan(value)
            if not unknown_error and not (
                isinstance(value, int | float) and is_number(value) and value >= 0
            ):
                raise ArgumentError(
                    f"{name} must be a non-negative number, got {say(value)}. Use seconds, not "
                    "microseconds: alpha_s=10e-6."
                )

    @property
    def bandwidth_gb_per_s(self) -> float:
        """The bandwidth that large messages approach, 1 / beta, in GB/s (1 GB = 10**9 bytes).

        The value is infinite if beta is 0.
        """
        return 1e-9 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    @property
    def n_half_bytes(self) -> float:
        """The size in bytes at which a message reaches half the bandwidth, alpha / beta.

        The value is infinite if beta is 0.
        """
        return self.alpha_s / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    def time_s(self, size_bytes: float) -> float:
        """Returns the time that one message takes, in seconds.

        Args:
            size_bytes: the size of the message in bytes; must be non-negative.

        Returns:
            The time in seconds, measured from the moment when both sides are ready.

        Raises:
            ArgumentError: ``size_bytes`` is negative.
        """
        if not size_bytes >= 0:
            raise ArgumentError(
                f"size_bytes must be non-negative, got {size_bytes!r}. Pass the size of the "
                "message in bytes."
            )
        return self.alpha_s + self.beta_s_per_byte * size_bytes


GivenLinks = Link | Mapping[tuple[int, int], Link]  # for all pairs of ranks, or for each (src, dst)


def check_link(name: str, value: object) -> None:
    """Checks that an argument is a link.

    Args:
        name: the name of the argument, for the error.
        value: the value that was passed.

    Raises:
        ArgumentError: the value is not a link.
    """
    if not isinstance(value, Link):
        raise ArgumentError(
            f"{name} must be a Link, got {say(value)}. Pass Link(alpha_s=10e-6, "
            "beta_s_per_byte=8e-11)."
        )


def check_links(link: object, world_size: int | None = None) -> None:
    """Checks that an argument is a link or a mapping from pairs of ranks to links.

    Args:
        link: the value that was passed.
        world_size: the number of ranks, or None if unknown.

    Raises:
        ArgumentError: the value is neither a link nor such a mapping, or a pair names a nonexistent
            rank.

    Example:
        >>> check_links({(0, 1): Link(1e-6, 1e-10)}, world_size=2)
    """
    if not isinstance(link, Mapping):
        check_link("link", link)
        return
    known, most = "ranks", math.inf
    if world_size is not None:
        known, most = f"ranks from 0 to {world_size - 1}", world_size - 1
    for pair, value in link.items():
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(is_integer(rank) and 0 <= rank <= most for rank in pair)
        ):
            raise ArgumentError(
                f"the keys of link must be pairs of {known}, got {say(pair)}. Use link={{(0, "
                "1): Link(...)}."
            )
        check_link(f"link[{pair!r}]", value)


def fit_link(
    sizes_bytes: Sequence[float] | npt.NDArray[Any], times_s: Sequence[float] | npt.NDArray[Any]
) -> Link:
    """Fits alpha and beta to measured times.

    The fit minimizes the squares of the *relative* errors, so an error of 10 % counts the same at 8
    bytes and at 256 MiB; otherwise the largest sizes would dominate. Neither alpha nor beta is
    negative: if the best line would start below 0, the fit is the best line through 0; if the line
    would fall, the fit is the best horizontal line.

    Args:
        sizes_bytes: the sizes in bytes, at least two of them different; shape (n,).
        times_s: the time for each size in seconds, positive; shape (n,). Medians are a good choice.

    Returns:
        The link. Its standard errors come from the scatter around the line, and are NaN for two
        points, which have no scatter. If the model does not hold, for example because the protocol
        changes at some size, the errors are large.

    Example:
        >>> link = fit_link([1000, 2000, 4000], [11e-6, 12e-6, 14e-6])
        >>> round(link.alpha_s * 1e6, 6), round(link.bandwidth_gb_per_s, 6)
        (10.0, 1.0)
    """
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    # scaled to the order of 1, because alpha and beta differ by ten powers of ten
    scale = sizes.max()
    ones, growing = 1 / times, sizes / scale / times
    columns = np.stack([ones, growing], axis=1)
    found, _, _, _ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    free = [0, 1]
    if found.min() < 0:  # the best allowed fit has only one of the two numbers
        alone = 1 if found[0] < 0 else 0
        found = np.zeros(2)
        found[alone] = columns[:, alone].sum() / (columns[:, alone] ** 2).sum()
        free = [alone]
    errors = _standard_errors(columns, found, free)
    return Link(
        float(found[0]), float(found[1] / scale), float(errors[0]), float(errors[1] / scale)
    )


def _standard_errors(
    columns: npt.NDArray[Any], found: npt.NDArray[Any], free: list[int]
) -> npt.NDArray[Any]:
    """Returns both standard errors: 0 for a fixed number, NaN if there is no scatter."""
    errors = np.zeros(2)
    if len(columns) <= 2:
        errors[free] = math.nan
        return errors
    scatter = ((columns @ found - 1) ** 2).sum() / (len(columns) - len(free))
    part = columns[:, free]
    errors[free] = np.sqrt(scatter * np.diag(np.linalg.inv(part.T @ part)))
    return errors
