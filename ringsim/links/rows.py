"""From what was recorded to the rows of the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringsim.links.plan import PATTERNS, Block
from ringsim.links.samples import Floats, combine, step_ns, timed_ranks
from ringsim.traces.bandwidths import CEILINGS
from ringsim.traces.collectives import bus_factor
from ringsim.traces.events import NONE, Events

__all__ = ["make_rows", "samples_of"]

Samples = dict[Block, dict[int, Floats]]


def samples_of(events: Events) -> Samples:
    """Finds the measured steps in a record: by block and rank, the time of each in ns.

    Args:
        events: of a run of ``ringsim.links.worker.measure``; what else they hold is passed over.
    """
    found: Samples = {}
    for number, label in enumerate(events.tables.labels):
        block = Block.from_label(label)
        if block is None:
            continue
        chosen = np.flatnonzero((events.label == number) & (events.post_ns != NONE))
        for rank in np.unique(events.rank[chosen]).tolist():
            mine = chosen[events.rank[chosen] == rank]
            found.setdefault(block, {})[rank] = step_ns(block, events.post_ns[mine], events.done_ns[mine])
    return found


def make_rows(samples: Samples, ranks: Sequence[int], *, kind: str = "measured") -> list[dict[str, Any]]:
    """Turns the times of steps into rows, series by series, ceilings last; what was not measured on all ranks that tell has none.

    Args:
        samples: as ``samples_of`` gives them.
        ranks: the ring's global ranks, in order.
        kind: "measured" or "simulated".

    Returns:
        Rows, as ``ringsim.traces.bandwidths.make_bandwidths`` takes them.
    """
    rows = []
    for block in sorted(samples, key=_place):
        by_rank = samples[block]
        if block.pattern == "shift":  # each rank tells of the edge on which it receives
            edges = [(src, ranks[(place + 1) % len(ranks)]) for place, src in enumerate(ranks)]
            told = [(src, dst) for src, dst in edges if len(by_rank.get(dst, ()))]
            rows += [_row(block._replace(src=src, dst=dst), by_rank[dst], len(ranks), kind) for src, dst in told]
            continue
        tellers = timed_ranks(block, ranks)
        if all(len(by_rank.get(rank, ())) for rank in tellers):
            rows.append(_row(block, combine([by_rank[rank] for rank in tellers]), len(ranks), kind))
    return rows


def _place(block: Block) -> tuple[int, int, int, int]:
    pattern = (*PATTERNS, "copy").index(block.pattern)
    return (CEILINGS.index(block.backend) + 1 if block.backend in CEILINGS else 0), pattern, block.src, block.size_bytes


def _row(block: Block, times_ns: Floats, group_size: int, kind: str) -> dict[str, Any]:
    # The percentiles of a bandwidth are those of the time, the other way round: what one step in ten fell short of took longest.
    p10_ns, median_ns, p90_ns = np.percentile(times_ns, [10, 50, 90]).tolist()
    factor = bus_factor("all_reduce", group_size) if block.pattern == "all_reduce" else 1.0
    return {
        "pattern": block.pattern,
        "src": block.src,
        "dst": block.dst,
        "size_bytes": block.size_bytes,
        "latency_us": median_ns * 1e-3,
        "algbw_gb_per_s": _rate(block, median_ns),
        "busbw_gb_per_s": _rate(block, median_ns) * factor,
        "p10_latency_us": p10_ns * 1e-3,
        "p90_latency_us": p90_ns * 1e-3,
        "p10_algbw_gb_per_s": _rate(block, p90_ns),
        "p90_algbw_gb_per_s": _rate(block, p10_ns),
        "n": len(times_ns),
        "backend": block.backend,
        "kind": kind,
    }


def _rate(block: Block, time_ns: float) -> float:
    """Returns the bandwidth in GB/s, NaN on a simulated link that takes no time."""
    return block.size_bytes / time_ns if time_ns else math.nan
