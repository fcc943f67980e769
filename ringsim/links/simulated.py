"""The table of bandwidths of links on a virtual clock: the steps of the real measurement, one of each, on simulated ranks.

Nothing differs from one repetition to the next there, so one is enough. What the table shows is what the patterns make of a link: the fit
of a ping-pong gives back the very numbers that went in, that of a stream shows the link's occupancy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.launch.api import make_kind
from ringsim.link import Link
from ringsim.links.here import check_ring
from ringsim.links.patterns import make_step
from ringsim.links.plan import Block, Plan
from ringsim.links.rows import make_rows
from ringsim.links.samples import parts_of, timed_ranks
from ringsim.provenance import __version__
from ringsim.ring import current_ring
from ringsim.simulator.api import simulate
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths

__all__ = ["LINK", "measure_simulated"]

LINK: Final = "link"  # in the place of a backend's name
_SIMULATED: Final = "simulated"

Links = Link | Mapping[tuple[int, int], Link]


def measure_simulated(
    world_size: int | None, comm_device: str, link: Links | None, topology: Topology | None, make: Callable[[Sequence[int]], Plan]
) -> Bandwidths:
    """Measures links on a virtual clock: those that are given, or in simulated ranks those of their run.

    In simulated ranks it is collective: every rank calls it with the same arguments, and is blocked until all have measured.

    Args:
        world_size: number of ranks; None for 2, or as many as there are.
        comm_device: "cpu".
        link: as for ``ringsim.simulate``, and so is the next one.
        topology: which links there are.
        make: makes the plan, given the ring's ranks; its limits do not count.

    Returns:
        The table, the same in each run and on every rank; its rows are "simulated".

    Raises:
        ArgumentError: an argument breaks its rule.
        RingError: links are given, by a simulated rank.
    """
    if link is None and topology is None:
        ring = current_ring()
        check_ring(ring, world_size, comm_device)
        plan = make(ring.ranks)
        everybody: list[Any] = [None] * ring.world_size
        dist.all_gather_object(everybody, _measure(plan))
        about = {"source": _SIMULATED, "backend": "virtual clock", "world_size": ring.world_size, "comm_device": comm_device}
        return _tabulate(plan, everybody, {**about, "versions": {"ringsim": __version__}})
    if comm_device != "cpu":
        raise ArgumentError(f"comm_device must be left out where link or topology is given, got {comm_device!r}: no device is measured.")
    count = 2 if world_size is None else world_size
    make_kind(count, comm_device, timeout_s=1.0, ring=True)  # checks the number of ranks, before a plan is made for them
    plan = make(range(count))
    trace = simulate(_measure, world_size=count, args=(plan,), link=link, topology=topology, record=False)
    told = ("source", "backend", "world_size", "comm_device", "constants", "versions")
    return _tabulate(plan, trace.results, {name: trace.metadata[name] for name in told})


def _tabulate(plan: Plan, times_ns: Sequence[dict[Block, float]], about: dict[str, Any]) -> Bandwidths:
    """Makes a table of the times by rank and block."""
    samples = {block: {rank: np.array([told[block]]) for rank, told in enumerate(times_ns) if block in told} for block in plan.blocks}
    rows = make_rows(samples, range(len(times_ns)), kind=_SIMULATED)
    return make_bandwidths(rows, {**about, "interrupted": False, "notes": []})


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
