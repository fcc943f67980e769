"""Measuring in ranks that run already: every rank records itself, and all learn what all have recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ringsim.comm.log import begin_records, end_records
from ringsim.errors import ArgumentError
from ringsim.links.plan import Plan
from ringsim.links.rows import Samples, samples_of
from ringsim.links.worker import measure
from ringsim.ring import Ring, current_ring, destroy_distributed, initialize_distributed
from ringsim.state import get_state
from ringsim.traces.parts import read_parts

__all__ = ["check_ring", "measure_here"]


def measure_here(world_size: int | None, comm_device: str, make: Callable[[Ring], Plan]) -> tuple[Ring, Plan, Samples, list[Any]]:
    """Measures in the ranks that run already; joins them in a ring first where they are in none, and takes it down again.

    Collective: every rank calls it, with the same arguments, and is blocked until all have measured.

    Args:
        world_size: how many ranks the caller expects, None for as many as there are.
        comm_device: "cpu" or "gpu".
        make: makes the plan, given the ring.

    Returns:
        The ring, the plan, the times of all ranks, and what ``measure`` returned on each; the same on every rank.

    Raises:
        ArgumentError: there is another number of ranks, or the ring is on another device, or does not have all ranks.
    """
    joined = get_state().ring is None
    if joined:
        initialize_distributed(comm_device=comm_device)
    try:
        ring = current_ring()
        check_ring(ring, world_size, comm_device)
        plan = make(ring)
        records = begin_records()
        try:
            facts = measure(plan)
            recorder = records.recorder
            events, _ = read_parts(Path(recorder.directory), start_ns=0, world_size=recorder.world_size, only_rank=recorder.rank)
        finally:
            end_records(records)
        mine = events.select(events.seq >= records.first)
        mine = replace(mine, rank=np.full(len(mine), ring.rank, dtype=mine.rank.dtype))  # a recorder of its own counts itself as rank 0
        everybody: list[Any] = [None] * ring.world_size
        dist.all_gather_object(everybody, (samples_of(mine), facts))
        samples: Samples = {}
        for found, _ in everybody:
            for block, by_rank in found.items():
                samples.setdefault(block, {}).update(by_rank)
        return ring, plan, samples, [said for _, said in everybody]
    finally:
        if joined:
            destroy_distributed()


def check_ring(ring: Ring, world_size: int | None, comm_device: str) -> None:
    """Checks that a ring which is there already is the one that is asked for.

    Args:
        ring: this rank's ring.
        world_size: how many ranks the caller expects, None for as many as there are.
        comm_device: "cpu" or "gpu".

    Raises:
        ArgumentError: it is another one, or does not have all ranks.
    """
    where = f"(rank {ring.rank} of {ring.world_size})"
    if world_size not in (None, ring.world_size):
        raise ArgumentError(f"world_size must be {ring.world_size} or left out in ranks that run already, got {world_size!r} {where}.")
    if comm_device != ring.comm_device:
        raise ArgumentError(f'comm_device must be that of the ring, "{ring.comm_device}", got {comm_device!r} {where}. Pass that.')
    if len(ring.ranks) != ring.world_size:
        raise ArgumentError(
            f"the ring must have all ranks to be measured, got one of {len(ring.ranks)} {where}. Measure in a run of its own."
        )
