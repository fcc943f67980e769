"""The table of bandwidths of links on a virtual clock: the steps of the real measurement, one of each, on simulated ranks.

Nothing differs from one repetition to the next there, so one is enough. What the table shows is what the patterns make of a link: the fit
of a ping-pong gives back the very numbers that went in, that of a stream shows the link's occupancy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from ringsim import comm as dist
from ringsim.link import Link
from ringsim.links.patterns import make_step
from ringsim.links.plan import Block, Plan
from ringsim.links.rows import make_rows
from ringsim.links.samples import parts_of, timed_ranks
from ringsim.ring import current_ring
from ringsim.simulator.api import simulate
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths

__all__ = ["SIMULATED", "simulate_bandwidths"]

SIMULATED: Final = "simulated"  # in the place of a backend's name

Links = Link | Mapping[tuple[int, int], Link]


def simulate_bandwidths(plan: Plan, world_size: int, link: Links | None, topology: Topology | None) -> Bandwidths:
    """Measures links on a virtual clock.

    Args:
        plan: what to measure; its limits do not count.
        world_size: number of ranks.
        link: as for ``ringsim.simulate``, and so is the next one.
        topology: which links there are.

    Returns:
        The table, the same in each run; its rows are "simulated".

    Raises:
        ArgumentError: an argument breaks its rule.
    """
    trace = simulate(_measure, world_size=world_size, args=(plan,), link=link, topology=topology, record=False)
    samples = {
        block: {rank: np.array([times_ns[block]]) for rank, times_ns in enumerate(trace.results) if block in times_ns}
        for block in plan.blocks
    }
    told = ("source", "backend", "world_size", "comm_device", "constants", "versions")
    metadata = {name: trace.metadata[name] for name in told} | {"interrupted": False, "notes": []}
    return make_bandwidths(make_rows(samples, range(world_size), kind=SIMULATED), metadata)


def _measure(plan: Plan) -> dict[Block, float]:
    """What each rank runs; returns the ns of a message, by block, where this rank tells of it."""
    ring, clock = current_ring(), get_state().clock
    assert clock is not None
    found = {}
    for block in plan.blocks:
        numbers = block.pattern == "all_reduce"  # tensors of no data: the size is all that counts
        outgoing, incoming = (
            torch.empty(
                block.size_bytes // 4 if numbers else block.size_bytes, dtype=torch.float32 if numbers else torch.uint8, device="meta"
            )
            for _ in range(2)
        )
        step = make_step(block, ring, outgoing, incoming)
        if ring.world_size > 1:
            dist.barrier()  # so that no other edge is busy
        if step is None:
            continue
        begin_s = clock.now_s()
        step()
        if ring.rank in timed_ranks(block, ring.ranks):
            found[block] = (clock.now_s() - begin_s) * 1e9 / parts_of(block)
    return found
