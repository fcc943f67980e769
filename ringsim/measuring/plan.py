"""Plans measurements and converts recorded steps to rows of the table.

This module does not need torch. A measurement is a list of blocks, one per pattern, edge and size.
A block is measured in steps, each of which is one round trip, one burst of a stream, or one
exchange. Each step is a span that one rank records, from the call of its first operation to the end
of its last operation. The measurement therefore never compares two clocks::

    src, a span          |--- send --- recv ...............|       a ping-pong counts half of this
    dst                       recv .......... send ---

During the measurement, no rank records the operations themselves, because recording would prolong
each message (by a tenth at 4 KiB).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ringsim.errors import ArgumentError, check_limit
from ringsim.ring.pairs import all_pairs
from ringsim.traces.bandwidths import CEILINGS
from ringsim.traces.collectives import bus_factor
from ringsim.traces.events import Events

PATTERNS = ("pingpong", "oneway", "exchange", "shift", "all_reduce")
LINK = "link"  # stands for the backend's name on the virtual clock
SIZES = tuple(2**power for power in range(3, 29))  # 8 B to 256 MiB
STREAM = 8  # messages in flight in the pattern "oneway"
MAX_SIZE_BYTES = 2**30
_WORD = "bandwidth"
_LABEL = re.compile(rf"{_WORD} (\w+) (\w+) (-?\d+) (-?\d+) (\d+)")


class PlannedRow(NamedTuple):
    """One pattern on one edge with one message size, which becomes one row of the table.

    Attributes:
        backend: "gloo" or "nccl", or for the ceilings "tcp" or "memcpy".
        pattern: one of ``PATTERNS``, or "copy" for the ceiling "memcpy".
        src: the source's global rank, or -1 if there is no single edge.
        dst: the destination's global rank, or -1 if there is no single edge.
        size_bytes: the size of one message, or of the buffer.
    """

    backend: str
    pattern: str
    src: int
    dst: int
    size_bytes: int

    @property
    def label(self) -> str:
        """The label of the block's steps in the trace."""
        return " ".join(map(str, (_WORD, *self)))

    @classmethod
    def from_label(cls, label: str) -> Self | None:
        """Returns the block that a label belongs to, or None if it belongs to no block."""
        found = _LABEL.fullmatch(label)
        if found is None:
            return None
        backend, pattern, *numbers = found.groups()
        return cls(backend, pattern, *map(int, numbers))

    @property
    def copies(self) -> int:
        """The number of copies in one step of "memcpy".

        Small copies are repeated, because one of them takes less time than recording the step.
        """
        return max(1, min(64, 65_536 // self.size_bytes))


@dataclass(frozen=True)
class Plan:
    """The plan of a measurement.

    Attributes:
        blocks: the blocks in order. Sizes ascend, so that if a limit or an interrupt ends the
            measurement early, all edges lack the same largest sizes.
        limit_s: the time limit for the whole measurement, in seconds.
        timeout_s: the time limit for each blocked operation, in seconds, which no block may exceed.
    """

    blocks: tuple[PlannedRow, ...]
    limit_s: float
    timeout_s: float


MakePlan = Callable[[Sequence[int]], Plan]  # from the ranks of a ring


def make_plan(
    ranks: Sequence[int],
    sizes: Any,
    pattern: Any,
    backend: str,
    *,
    edge: Any = None,
    ceilings: bool = True,
    limit_s: Any = 60.0,
    timeout_s: float = 30.0,
) -> Plan:
    """Checks ``ringsim.bandwidth``'s arguments and returns the plan for a ring of ``ranks``.

    Raises:
        ArgumentError: an argument is invalid.

    Example:
        >>> plan = make_plan((0, 1, 2), [8, 1024], "pingpong", "gloo", edge=(2, 0), ceilings=False)
        >>> [(block.src, block.dst, block.size_bytes) for block in plan.blocks]
        [(2, 0, 8), (2, 0, 1024)]
    """
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not patterns or not set(patterns) <= set(PATTERNS):
        raise ArgumentError(
            f"pattern must be one or more of {', '.join(PATTERNS)}, got {pattern!r}. Pass one "
            "of these names, or a list of them."
        )
    check_limit("limit_s", limit_s)
    checked = _check_sizes(SIZES if sizes is None else sizes, patterns)
    edges = all_pairs(ranks)
    if edge is not None:
        chosen = tuple(edge) if isinstance(edge, tuple | list) else None
        if chosen not in edges:
            raise ArgumentError(
                f"edge must be one of the ring's edges {edges}, got {edge!r}. Pass (src, dst), or "
                "omit edge to measure all of them."
            )
        edges = [chosen]
    blocks = []
    for size in checked:
        for name in patterns:
            if name == "all_reduce" or (name == "shift" and edges):  # these use all edges at once
                blocks.append(PlannedRow(backend, name, -1, -1, size))
            else:
                blocks += [PlannedRow(backend, name, src, dst, size) for src, dst in edges]
        if ceilings and edges and backend == "gloo":
            blocks.append(PlannedRow("tcp", "pingpong", *edges[0], size))
        if ceilings:
            blocks.append(PlannedRow("memcpy", "copy", -1, -1, size))
    return Plan(tuple(blocks), float(limit_s), timeout_s)


def _check_sizes(sizes: Any, patterns: tuple[str, ...]) -> list[int]:
    try:
        given = [0 if isinstance(size, bool) else operator.index(size) for size in sizes]
    except TypeError:
        given = []
    if not given or not all(1 <= size <= MAX_SIZE_BYTES for size in given):
        raise ArgumentError(
            "sizes must be a non-empty list of sizes in bytes from 1 to 2**30, got "
            f"{sizes!r}. Pass, for example, sizes=[8, 4096, 2**20]."
        )
    if "all_reduce" in patterns and any(size % 4 for size in given):
        raise ArgumentError(
            f"sizes must be multiples of 4 for all_reduce, got {sizes!r}. Choose multiples of 4, "
            "because all_reduce adds float32 numbers."
        )
    return sorted(set(given))


Floats = npt.NDArray[Any]

STEADY = 0.025  # half the width of the median's 95 % interval, relative to the median
LEAST_STEPS = 3  # the fewest steps per block, even if they exceed the block's time
STEPS_MIN = 10
# machines are slow or fast for milliseconds at a time, so no block is shorter unless its time is up
STEADY_S = 0.03
STEPS_MAX = 5000


def timed_ranks(block: PlannedRow, ranks: Sequence[int]) -> list[int]:
    """Returns the ranks that time a block's steps; the first one is the leader."""
    if block.pattern == "copy":
        return [ranks[0]]
    if block.src < 0:
        return list(ranks)
    return [block.dst if block.pattern == "oneway" else block.src]


def step_ns(block: PlannedRow, post_ns: Floats, done_ns: Floats) -> Floats:
    """Returns the time per message, in ns, in each step of a block on one rank.

    Incomplete steps are left out.

    Example:
        >>> step_ns(
        ...     PlannedRow("gloo", "pingpong", 0, 1, 8),
        ...     np.array([0, 100, 200]),
        ...     np.array([80, 180, -1]),
        ... )
        array([40., 40.])
    """
    complete = done_ns >= 0
    found: Floats = (done_ns[complete] - post_ns[complete]) / parts_of(block)
    return found


def parts_of(block: PlannedRow) -> int:
    """Returns the number of successive messages in a step, by which the step's time is divided."""
    return {"pingpong": 2, "oneway": STREAM, "copy": block.copies}.get(block.pattern, 1)


def combine(by_rank: list[Floats]) -> Floats:
    """Returns the slowest rank's time for each step that every rank has completed.

    Example:
        >>> combine([np.array([3.0, 5.0, 4.0]), np.array([4.0, 1.0])])
        array([4., 5.])
    """
    shortest = min(map(len, by_rank))
    found: Floats = np.max([one[:shortest] for one in by_rank], axis=0)
    return found


def is_steady(samples: Floats) -> bool:
    """Returns whether more repetitions would hardly change the median.

    There must be at least 10 repetitions, and the median's 95 % interval must be within 2.5 % of
    the median on either side.

    Example:
        >>> is_steady(np.full(10, 5.0)), is_steady(np.full(9, 5.0)), is_steady(np.arange(1.0, 20.0))
        (True, False, False)

    Source:
        The interval between two order statistics, from the binomial distribution (normal
        approximation): W. J. Conover, "Practical Nonparametric Statistics", chapter 3.
    """
    n = len(samples)
    if n < STEPS_MIN:
        return False
    ordered = np.sort(samples)
    reach = 0.98 * n**0.5
    low = ordered[max(0, int(n / 2 - reach))]
    high = ordered[min(n - 1, int(np.ceil(n / 2 + reach)))]
    return bool((high - low) / 2 <= STEADY * np.median(ordered))


def steps_wanted(block: PlannedRow, found: Floats, share_s: float, fresh: Floats) -> int:
    """Returns the number of steps to run next, or 0 if the block is finished.

    A block is finished when the estimate is steady or the block's time is up.

    Args:
        block: the block to measure.
        found: the times per message so far, in ns; shape (n,).
        share_s: the time for the block, in seconds.
        fresh: the times of the latest steps or of the warm-up, in ns; must not be empty.

    Example:
        >>> few = np.array([50e3, 50e3, 20e6])  # the last step waited for a core
        >>> [
        ...     steps_wanted(PlannedRow("gloo", "exchange", 0, 1, 8), few, share_s, few)
        ...     for share_s in (0.01, 0.05, 1.0)
        ... ]
        [0, 4, 10]
    """
    n = len(found)
    # Use the mean rather than the median, so that a few steps that wait for a core do not use up
    # the time for the next sizes.
    spent_s = float(found.sum()) * parts_of(block) * 1e-9
    step_s = max(float(fresh.mean()), 1.0) * parts_of(block) * 1e-9
    if n >= STEPS_MAX or (is_steady(found) and spent_s >= STEADY_S):
        return 0
    wished = max(STEPS_MIN, n, math.ceil((STEADY_S - spent_s) / step_s))
    affordable = int((share_s - spent_s) / step_s)
    return max(min(wished, affordable, STEPS_MAX - n), LEAST_STEPS - n, 0)


Samples = dict[PlannedRow, dict[int, Floats]]


def samples_of(events: Events) -> Samples:
    """Returns the times per message in an interrupted run, in ns, keyed by block and rank."""
    found: Samples = {}
    for number, label in enumerate(events.tables.labels):
        block = PlannedRow.from_label(label)
        if block is None:
            continue
        chosen = events.label == number
        for rank in np.unique(events.rank[chosen]).tolist():
            mine = chosen & (events.rank == rank)
            found.setdefault(block, {})[rank] = step_ns(
                block, events.post_ns[mine], events.done_ns[mine]
            )
    return found


def join_samples(told: Sequence[Mapping[PlannedRow, Floats]]) -> Samples:
    """Returns all ranks' times by block and rank."""
    found: Samples = {}
    for rank, times_ns in enumerate(told):
        for block, times in times_ns.items():
            found.setdefault(block, {})[rank] = times
    return found


def make_rows(
    samples: Samples, ranks: Sequence[int], *, kind: str = "measured"
) -> list[dict[str, Any]]:
    """Converts times to rows for ``make_bandwidths``, with the ceilings last.

    A block is left out unless every rank that times the block has completed at least one step.
    """
    rows = []
    for block in sorted(samples, key=_place):
        by_rank = samples[block]
        if block.pattern == "shift":  # each rank times the edge on which it receives
            rows += [
                _row(block._replace(src=src, dst=dst), by_rank[dst], len(ranks), kind)
                for src, dst in all_pairs(ranks)
                if len(by_rank.get(dst, ()))
            ]
            continue
        tellers = timed_ranks(block, ranks)
        if all(len(by_rank.get(rank, ())) for rank in tellers):
            rows.append(_row(block, combine([by_rank[rank] for rank in tellers]), len(ranks), kind))
    return rows


def _place(block: PlannedRow) -> tuple[int, int, int, int]:
    backend = CEILINGS.index(block.backend) + 1 if block.backend in CEILINGS else 0
    pattern = (*PATTERNS, "copy").index(block.pattern)
    return backend, pattern, block.src, block.size_bytes


def _row(block: PlannedRow, times_ns: Floats, group_size: int, kind: str) -> dict[str, Any]:
    # The bandwidth's percentiles are the time's percentiles in reverse order, because the slowest
    # steps have the lowest bandwidth.
    p10_ns, median_ns, p90_ns = np.percentile(times_ns, [10, 50, 90]).tolist()
    factor = bus_factor("all_reduce", group_size) if block.pattern == "all_reduce" else 1.0
    return {
        **block._asdict(),
        "latency_us": median_ns * 1e-3,
        "algbw_gb_per_s": _rate(block, median_ns),
        "busbw_gb_per_s": _rate(block, median_ns) * factor,
        "p10_latency_us": p10_ns * 1e-3,
        "p90_latency_us": p90_ns * 1e-3,
        "p10_algbw_gb_per_s": _rate(block, p90_ns),
        "p90_algbw_gb_per_s": _rate(block, p10_ns),
        "n": len(times_ns),
        "kind": kind,
    }


def _rate(block: PlannedRow, time_ns: float) -> float:
    """Returns the bandwidth in GB/s, or NaN for a simulated link that takes no time."""
    return block.size_bytes / time_ns if time_ns else math.nan
