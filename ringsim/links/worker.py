"""What every rank does to measure: block after block, all ranks together, until each estimate is steady or its time is up.

::

    for each block
        all ranks         barrier, so that no other edge is busy; rank 0 says how much time the block has
        its ranks         warm up
        repeat            the leader says how many steps follow: none when the estimate is steady or the time is up
                          the steps, each a span with the block's label on the ranks that tell the time
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from ringsim.comm import torch_hooks
from ringsim.errors import RingError
from ringsim.links.ceilings import Loopback, make_copy
from ringsim.links.gpu import place_of, time_steps
from ringsim.links.patterns import Step, group_of, make_step
from ringsim.links.plan import Block, Plan
from ringsim.links.samples import STEADY_S, STEPS_MAX, STEPS_MIN, Floats, is_steady, parts_of, step_ns, timed_ranks
from ringsim.ring import Ring, current_ring
from ringsim.state import get_state
from ringsim.traces.recorder import Recorder

__all__ = ["measure"]

WARM_UP: Final = "warm-up"
_LARGE_BYTES: Final = 2**24
_LEAST_STEPS: Final = 3  # of a block, also where they take longer than its time


def measure(plan: Plan) -> dict[str, Any]:
    """Measures the blocks of a plan; the record, which must be on, takes the times.

    Collective over the default group: every rank calls it with the same plan, and is blocked until all have measured.

    Args:
        plan: what to measure; blocks that no time is left for are left out.

    Returns:
        What this rank knows beside the record, as JSON can say it: ``gpu_ns``, by label, the times in ns that CUDA events gave (none on
        Gloo); ``host``, this machine; ``interface``, the network interface that Gloo was told to use; ``place``, where its GPU is.

    Raises:
        RingError: nothing is recorded, or there is no ring.

    Example:
        >>> import ringsim
        >>> from ringsim.links.plan import make_plan
        >>> plan = make_plan((0, 1), [8], "pingpong", "gloo", edge=(0, 1), ceilings=False)
        >>> trace = ringsim.trace(measure, world_size=2, args=(plan,))
        >>> trace.results[0]["gpu_ns"], "bandwidth gloo pingpong 0 1 8" in trace.events.tables.labels
        ({}, True)
    """
    if get_state().recorder is None:
        raise RingError("a measurement must be recorded, got no recorder. Call ringsim.bandwidth, which records it.")
    ring = current_ring()
    gpu_ns = _Meter(plan, ring).run()
    place = place_of(ring.local_rank) if ring.comm_device == "gpu" else None
    return {"gpu_ns": gpu_ns, "host": socket.gethostname(), "interface": os.environ.get("GLOO_SOCKET_IFNAME"), "place": place}


@contextmanager
def not_recorded(recorder: Recorder) -> Iterator[None]:
    """Takes the recorder's hooks away for the length of the block, whoever holds them."""
    users = recorder.users
    for _ in range(users):
        torch_hooks.uninstall(recorder)
    try:
        yield
    finally:
        for _ in range(users):
            torch_hooks.install(recorder)


class _Meter:
    def __init__(self, plan: Plan, ring: Ring) -> None:
        recorder = get_state().recorder
        assert recorder is not None
        self._plan, self._ring, self._recorder = plan, ring, recorder
        self._gpu = ring.comm_device == "gpu"
        self._device = torch.device("cuda", ring.local_rank) if self._gpu else torch.device("cpu")
        self._buffers = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
        self._loopback: Loopback | None = None
        self._gpu_ns: dict[str, list[float]] = {}

    def run(self) -> dict[str, list[float]]:
        deadline_s = time.monotonic() + self._plan.limit_s
        blocks = self._without_loopback_between_machines()
        try:
            for place, block in enumerate(blocks):
                share_s = self._meet((deadline_s - time.monotonic()) / (len(blocks) - place))
                if share_s <= 0:
                    break
                self._measure(block, share_s)
        finally:
            if self._loopback is not None:
                self._loopback.close()
        return self._gpu_ns

    def _without_loopback_between_machines(self) -> list[Block]:
        blocks = list(self._plan.blocks)
        if not any(block.backend == "tcp" for block in blocks):
            return blocks
        hosts: list[Any] = [None] * self._ring.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        return [block for block in blocks if block.backend != "tcp" or hosts[block.src] == hosts[block.dst]]

    def _meet(self, share_s: float) -> float:
        """Waits for all ranks; returns what rank 0 says that the next block may take."""
        if self._ring.world_size == 1:
            return share_s
        dist.barrier()
        told = torch.tensor([min(share_s, self._plan.timeout_s / 4)], dtype=torch.float64, device=self._device)
        dist.broadcast(told, src=self._ring.ranks[0])
        return float(told.item())

    def _measure(self, block: Block, share_s: float) -> None:
        step = self._step_of(block)
        if step is None:
            return
        tells = self._ring.rank in timed_ranks(block, self._ring.ranks)
        with not_recorded(self._recorder):
            fresh = self._repeat(block, step, 1 if block.size_bytes >= _LARGE_BYTES else 3, WARM_UP if tells else None)
            found = np.zeros(0)
            while (count := self._agree(block, self._wanted(block, found, share_s, fresh) if tells else 0)) > 0:
                fresh = self._repeat(block, step, count, block.label if tells else None)
                found = np.concatenate([found, fresh])

    def _step_of(self, block: Block) -> Step | None:
        """Returns this rank's part of a step of a block; None where it has none."""
        rank = self._ring.rank
        if (block.src >= 0 and rank not in (block.src, block.dst)) or (block.pattern == "copy" and rank != self._ring.ranks[0]):
            return None
        outgoing, incoming = self._buffers_of(block)
        if block.backend == "memcpy":
            return make_copy(block, outgoing, incoming)
        if block.backend == "tcp":
            if self._loopback is None:
                self._loopback = Loopback(block, self._ring, self._plan.timeout_s, self._device)
            return self._loopback.make_step(outgoing, incoming)
        return make_step(block, self._ring, outgoing, incoming)

    def _buffers_of(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a step sends and where it receives; every page of it has been touched."""
        size = block.size_bytes
        if len(self._buffers[0]) < size:
            self._buffers = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))  # first let go of the smaller ones
            first, second = (torch.empty(size, dtype=torch.uint8, device=self._device).fill_(0) for _ in range(2))
            self._buffers = first, second
        outgoing, incoming = self._buffers[0][:size], self._buffers[1][:size]
        if block.pattern == "all_reduce":
            return outgoing.view(torch.float32), incoming.view(torch.float32)
        return outgoing, incoming

    def _repeat(self, block: Block, step: Step, count: int, name: str | None) -> Floats:
        """Does ``count`` steps; records each as a span where there is a name for them, and returns the times in ns."""
        if self._gpu:
            times_ns = [whole_ns / parts_of(block) for whole_ns in time_steps(step, count)]
            if name == block.label:
                self._gpu_ns.setdefault(name, []).extend(times_ns)
            return np.array(times_ns)
        if name is None:
            for _ in range(count):
                step()
            return np.zeros(0)
        recorder = self._recorder
        begin, end, before = recorder.span_begin, recorder.span_end, recorder.bookmark()
        for _ in range(count):
            slot = begin(name)
            step()
            if slot is not None:
                end(slot)
        records = recorder.records_since(before)
        return step_ns(block, records["post_ns"], records["done_ns"])

    @staticmethod
    def _wanted(block: Block, found: Floats, share_s: float, fresh: Floats) -> int:
        """Returns how many steps should follow: none when the estimate is steady, or the time of the block is up."""
        n = len(found)
        spent_s, step_s = (float(value) * parts_of(block) * 1e-9 for value in (found.sum(), max(np.median(fresh), 1.0)))
        if n >= STEPS_MAX or (is_steady(found) and spent_s >= STEADY_S):
            return 0
        wished = max(STEPS_MIN, n, math.ceil((STEADY_S - spent_s) / step_s))
        affordable = int((share_s - spent_s) / step_s)
        return max(min(wished, affordable, STEPS_MAX - n), _LEAST_STEPS - n, 0)

    def _agree(self, block: Block, count: int) -> int:
        """Returns what the leader of a block wants."""
        if block.backend == "memcpy" or self._ring.world_size == 1:
            return count
        told = torch.tensor([count], dtype=torch.int64, device=self._device)
        (leader, *_) = timed_ranks(block, self._ring.ranks)
        if block.src < 0:
            dist.broadcast(told, src=leader)
        elif self._ring.rank == leader:
            dist.send(told, block.dst if leader == block.src else block.src, group=group_of(block, self._ring))
        else:
            dist.recv(told, leader, group=group_of(block, self._ring))
        return int(told.item())
