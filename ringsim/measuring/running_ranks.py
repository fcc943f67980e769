"""Measures links between ranks that are already running, real or simulated.

Every rank measures, and all ranks share their results. On a virtual clock, every repetition takes
the same time, so one step per block is enough. The table then shows how each pattern uses a link:
the fit of a ping-pong reproduces the link's own constants, and the fit of a stream shows only how
long the link is occupied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ringsim import comm as dist
from ringsim.comm.log import begin_records, end_records
from ringsim.errors import ArgumentError
from ringsim.launch.api import make_kind
from ringsim.link import GivenLinks
from ringsim.measuring.plan import (
    Floats,
    MakePlan,
    Plan,
    PlannedRow,
    join_samples,
    make_rows,
    parts_of,
    timed_ranks,
)
from ringsim.measuring.worker import make_step, measure
from ringsim.provenance import __version__
from ringsim.ring import Ring, current_ring, destroy_distributed, initialize_distributed
from ringsim.simulator.api import simulate
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths


def measure_here(
    world_size: int | None, comm_device: str, make: MakePlan
) -> tuple[Ring, Plan, list[Any]]:
    """Measures links between ranks that are already running.

    Call it on every rank with the same arguments; it blocks until all ranks have measured. If the
    ranks do not form a ring, it creates one and destroys it afterwards.

    Args:
        world_size: the number of ranks that the caller expects, or None for any number.
        comm_device: "cpu" or "gpu".
        make: the function that returns the plan for a ring's ranks.

    Returns:
        The ring, the plan, and each rank's result of ``measure``. Every rank gets the same values.
    """
    joined = get_state().ring is None
    if joined:
        initialize_distributed(comm_device=comm_device)
    try:
        ring = current_ring()
        check_ring(ring, world_size, comm_device)
        plan = make(ring.ranks)
        records = begin_records()
        try:
            mine = measure(plan)
        finally:
            end_records(records)
        results: list[Any] = [None] * ring.world_size
        dist.all_gather_object(results, mine)
        return ring, plan, results
    finally:
        if joined:
            destroy_distributed()


def check_ring(ring: Ring, world_size: int | None, comm_device: str) -> None:
    """Raises ArgumentError unless the ring contains all ranks and matches the arguments."""
    where = f"(rank {ring.rank} of {ring.world_size})"
    if world_size not in (None, ring.world_size):
        raise ArgumentError(
            f"world_size must be {ring.world_size}, the number of running ranks, got "
            f"{world_size!r} {where}. Omit world_size."
        )
    if comm_device != ring.comm_device:
        raise ArgumentError(
            f'comm_device must be "{ring.comm_device}", as in the existing ring, got '
            f'{comm_device!r} {where}. Pass comm_device="{ring.comm_device}".'
        )
    if len(ring.ranks) != ring.world_size:
        raise ArgumentError(
            f"cannot measure a ring that contains only {len(ring.ranks)} of the ranks {where}. "
            "Measure all ranks in a separate run."
        )


_SIMULATED = "simulated"


def measure_simulated(
    world_size: int | None,
    comm_device: str,
    link: GivenLinks | None,
    topology: Topology | None,
    make: MakePlan,
) -> Bandwidths:
    """Measures links on a virtual clock: either given links or those of running simulated ranks.

    In simulated ranks, call it on every rank with the same arguments; it blocks until all ranks
    have measured. ``make`` returns the plan for the ring's ranks. Every run and every rank gets the
    same table, whose rows have the kind "simulated".
    """
    if link is None and topology is None:
        ring = current_ring()
        check_ring(ring, world_size, comm_device)
        plan = make(ring.ranks)
        everybody: list[Any] = [None] * ring.world_size
        dist.all_gather_object(everybody, _measure(plan))
        about = {
            "source": _SIMULATED,
            "backend": "virtual clock",
            "world_size": ring.world_size,
            "comm_device": comm_device,
            "versions": {"ringsim": __version__},
        }
        return _tabulate(everybody, about)
    if comm_device != "cpu":
        raise ArgumentError(
            f'comm_device must be "cpu" with link or topology, got {comm_device!r}. Omit '
            "comm_device, because no device is measured."
        )
    count = 2 if world_size is None else world_size
    # only to check the number of ranks before the plan is created
    make_kind(count, comm_device, timeout_s=1.0, ring=True)
    plan = make(range(count))
    trace = simulate(
        _measure, world_size=count, args=(plan,), link=link, topology=topology, record=False
    )
    told = ("source", "backend", "world_size", "comm_device", "constants", "versions")
    return _tabulate(trace.results, {name: trace.metadata[name] for name in told})


def _tabulate(told: Sequence[dict[PlannedRow, Floats]], about: dict[str, Any]) -> Bandwidths:
    """Returns the table for all ranks' times."""
    rows = make_rows(join_samples(told), range(len(told)), kind=_SIMULATED)
    return make_bandwidths(rows, {**about, "interrupted": False, "notes": []})


def _measure(plan: Plan) -> dict[PlannedRow, Floats]:
    """Runs the plan on this rank; returns the ns per message for each block that the rank times."""
    ring, clock = current_ring(), get_state().clock
    assert clock is not None
    found = {}
    for block in plan.blocks:
        # a tensor without data, because only the size matters
        tensor = torch.empty(block.size_bytes, dtype=torch.uint8, device="meta")
        if block.pattern == "all_reduce":
            tensor = tensor.view(torch.float32)
        step = make_step(block, ring, tensor, torch.empty_like(tensor))
        if ring.world_size > 1:
            dist.barrier()  # so that no other edge is busy
        if step is None:
            continue
        begin_s = clock.now_s()
        step()
        if ring.rank in timed_ranks(block, ring.ranks):
            found[block] = np.array([(clock.now_s() - begin_s) * 1e9 / parts_of(block)])
    return found
