"""Helpers for tests of simulated ranks: a link, a function that runs workers, and workers.

The simulating process imports the module of its worker, so this module imports little.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import gauss
from typing import Any

import torch
from numpy.random import standard_normal

import ringsim
from ringsim import comm as dist
from ringsim.state import get_state

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def run(worker: Callable[..., Any], world_size: int = 3, *args: Any, **kwargs: Any) -> list[Any]:
    """Returns the results of the ranks."""
    return ringsim.simulate(
        worker, world_size=world_size, args=args, **{"link": LINK, **kwargs}
    ).results


def now_s() -> float:
    """Returns the time on the rank's clock."""
    clock = get_state().clock
    assert clock is not None
    return clock.now_s()


def compute_and_meet() -> None:
    """Computes, then enters a barrier."""
    ringsim.compute(0.001)
    dist.barrier()


def switch() -> None:
    """Lets all other ranks run before this one continues."""
    exchange(
        torch.zeros(2, dtype=torch.float32, device="cpu"),
        torch.zeros(2, dtype=torch.float32, device="cpu"),
    )


def exchange(out: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Sends to the next rank of the ring; returns the tensor from the previous rank."""
    ring = ringsim.current_ring()
    for handle in (
        dist.isend(out, ring.succ, group=ring.succ_group),
        dist.irecv(back, ring.pred, group=ring.pred_group),
    ):
        handle.wait()
    return back


def follow_steps(steps: list[list[tuple[Any, ...]]], limits: bool) -> None:
    """Runs the steps listed for this rank: compute, send, receive and wait."""
    handles: list[Any] = []
    for op, about, *rest in steps[dist.get_rank()]:
        if op == "work":
            ringsim.compute(float(about))
        elif op == "wait":
            limit = timedelta(seconds=1e6 + len(handles))
            handles[about].wait(limit) if limits else handles[about].wait()
        else:
            post = dist.isend if op == "send" else dist.irecv
            handles.append(post(torch.zeros(rest[0], dtype=torch.uint8), about))


# messages: source, destination, bytes, time of the isend, time of the irecv
Plan = list[tuple[int, int, int, float, float]]


def post_all(plan: Plan) -> list[float]:
    """Posts all messages without waiting; returns the done time of each recv."""
    rank = dist.get_rank()
    sends = [(sent_s, index) for index, (src, _, _, sent_s, _) in enumerate(plan) if src == rank]
    recvs = [(asked_s, index) for index, (_, dst, *_, asked_s) in enumerate(plan) if dst == rank]
    handles = []
    for at_s, index in sorted(sends + recvs):
        ringsim.compute(max(at_s - now_s(), 0.0))
        src, dst, size_bytes, _, _ = plan[index]
        post, peer = (dist.isend, dst) if src == rank else (dist.irecv, src)
        handles.append((index, post(torch.zeros(size_bytes, dtype=torch.uint8), peer, tag=index)))
    ends = [-1.0] * len(plan)
    for index, handle in handles:
        handle.wait()
        if plan[index][1] == rank:
            ends[index] = handle.done_s
    return ends


def draw_by_name() -> list[float]:
    """Draws random numbers with functions that this module imported by name."""
    switch()
    return [gauss(0, 1), float(standard_normal())]
