"""What the computations and messages of a schedule cost, as arrays by stage: for one set of costs, or for K of them at once.

A message keeps its link busy while its bytes go by, and arrives one latency later::

    Costs.latency        arrives after latency, the link is never busy
    link=, size_bytes=   busy for size * beta, arrives alpha later; seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from ringsim.errors import ArgumentError, is_integer, is_list, say
from ringsim.link import Link, check_links
from ringsim.pipeline.costs import Costs
from ringsim.simulator.operations import KIND_LETTERS
from ringsim.traces.events import Ints

__all__ = ["Links", "Prices", "Sizes", "make_prices", "spread_sizes", "stack_prices"]

Links = Link | Mapping[tuple[int, int], Link]
Sizes = int | Sequence[int]
_MOST_BYTES: Final = 2**53  # up to here each size is a number of its own as a float, too
_FIELDS: Final = {"F": "forward", "I": "input", "W": "weight", "B": "backward"}  # of Costs
_BACKWARD, _INPUT, _WEIGHT = (KIND_LETTERS.index(letter) for letter in "BIW")


@dataclass(frozen=True, eq=False)
class Prices:
    """Times by stage S; a last axis of K where there are several sets of costs. Fractions where a cost is one, else float64.

    Attributes:
        duration: of a computation, shape (4, S): by its place in ``KIND_LETTERS`` and its stage.
        occupancy: how long the message that a stage receives keeps its link, shape (2, S): activations, gradients.
        latency: how long it then still travels, likewise. -inf where a stage receives none from another rank.
    """

    duration: Ints
    occupancy: Ints
    latency: Ints

    @property
    def is_exact(self) -> bool:
        """Whether the times are Fractions."""
        return self.duration.dtype == object

    @property
    def has_occupancy(self) -> bool:
        """Whether any message keeps its link busy."""
        return bool((self.occupancy > 0).any())


def make_prices(stage_ranks: Sequence[int], costs: Costs, link: Links | None, size_bytes: Sizes) -> Prices:
    """Lays one set of costs out by stage.

    Args:
        stage_ranks: for each stage, the rank that has it.
        costs: of the computations; and the latency, where no link is given.
        link: what a message costs, in seconds: one for all, or by (from rank, to rank); None: ``costs.latency``.
        size_bytes: of an activation and of its gradient: one for all, or for each boundary between two stages.

    Returns:
        The prices, without a K.

    Raises:
        ArgumentError: a time or size breaks its rule, or a link is missing.

    Example:
        >>> prices = make_prices((0, 1), Costs(), Link(alpha_s=0.5, beta_s_per_byte=0.25), 8)
        >>> prices.duration[1].tolist(), prices.occupancy.tolist(), prices.latency.tolist()
        ([2.0, 2.0], [[0.0, 2.0], [2.0, 0.0]], [[-inf, 0.5], [0.5, -inf]])
    """
    costs.check(len(stage_ranks))
    if link is not None:
        check_links(link)
    if link is not None and costs.latency != 0:
        raise ArgumentError(f"latency must be 0 where link is given, got {costs.latency}. Say it once: as the link's alpha_s.")
    by_kind = {kind: getattr(costs, name) for kind, name in _FIELDS.items()}
    times = {kind: _list_times(time, len(stage_ranks)) for kind, time in by_kind.items() if time is not None}
    exact = any(isinstance(time, Fraction) for row in (*times.values(), [costs.latency]) for time in row)
    dtype: Any = object if exact else np.float64
    duration = np.zeros((len(KIND_LETTERS), len(stage_ranks)), dtype=dtype)
    for kind, row in times.items():
        duration[KIND_LETTERS.index(kind)] = row
    if costs.backward is None:
        duration[_BACKWARD] = duration[_INPUT] + duration[_WEIGHT]
    sizes = np.array(spread_sizes(size_bytes, len(stage_ranks), has_link=link is not None), dtype=np.int64)
    occupancy, latency = np.zeros((2, len(stage_ranks)), dtype=dtype), np.full((2, len(stage_ranks)), -np.inf, dtype=dtype)
    owner = np.asarray(stage_ranks)
    met = np.flatnonzero(owner[1:] != owner[:-1])  # the boundaries between ranks
    for direction, (source, stage) in enumerate(((met, met + 1), (met + 1, met))):
        if link is None:
            latency[direction, stage] = costs.latency
        elif isinstance(link, Link):
            occupancy[direction, stage], latency[direction, stage] = sizes[met] * link.beta_s_per_byte, link.alpha_s
        else:
            used = [_find_link(link, *pair) for pair in zip(owner[source].tolist(), owner[stage].tolist(), strict=True)]
            occupancy[direction, stage] = sizes[met] * np.array([each.beta_s_per_byte for each in used])
            latency[direction, stage] = [each.alpha_s for each in used]
    return Prices(duration, occupancy, latency)


def stack_prices(each: Sequence[Prices]) -> Prices:
    """Puts K prices side by side, along a new last axis."""
    return Prices(
        *(np.stack([getattr(one, name) for one in each], axis=-1).astype(np.float64) for name in ("duration", "occupancy", "latency"))
    )


def spread_sizes(size_bytes: Sizes, num_stages: int, *, has_link: bool) -> list[int]:
    """Returns the size in bytes for each boundary between two stages.

    Args:
        size_bytes: one for all, or one each.
        num_stages: how many stages there are.
        has_link: whether somebody says what a byte costs.

    Raises:
        ArgumentError: a size breaks its rule, or there are too many or too few.
    """
    given: Any = [size_bytes] * max(num_stages - 1, 0) if is_integer(size_bytes) else size_bytes
    if not (is_list(given) or isinstance(given, np.ndarray)):
        raise ArgumentError(f"size_bytes must be an integer, or a list of them, got {say(given)}. Say how many bytes a stage hands on.")
    sizes = list(given)
    if len(sizes) != num_stages - 1:
        raise ArgumentError(f"size_bytes must be one number, or one for each of {num_stages - 1} boundaries, got {len(sizes)}. Count them.")
    if not all(_is_size(size) for size in sizes):
        raise ArgumentError(f"size_bytes must be from 0 to 2**53, got {say(size_bytes)}. Say how many bytes a stage hands on.")
    if any(sizes) and not has_link:
        raise ArgumentError(f"size_bytes must be left out where no link is given, got {say(size_bytes)}. Add link=Link(...).")
    return [int(size) for size in sizes]


def _is_size(size: Any) -> bool:
    return is_integer(size) and bool(0 <= size <= _MOST_BYTES)


def _find_link(link: Mapping[tuple[int, int], Link], source: int, rank: int) -> Link:
    if (source, rank) not in link:
        raise ArgumentError(
            f"link must have one for every pair of ranks that talk, got none for {source} -> {rank}. Add link[{source}, {rank}]."
        )
    return link[source, rank]


def _list_times(given: Any, num_stages: int) -> list[Any]:
    """Returns a time for each stage."""
    return list(given) if isinstance(given, Sequence) else [given] * num_stages
