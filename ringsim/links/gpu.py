"""What is particular to GPUs: CUDA events time the steps, and what is between two GPUs has several names."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import torch

from ringsim.errors import ArgumentError

__all__ = ["check_gpus", "paths_between", "time_steps"]


def time_steps(step: Callable[[], None], count: int) -> list[float]:
    """Does steps on the current GPU; returns the time of each in ns, from CUDA events on the current stream.

    NCCL's ``wait`` returns when the work is queued, and makes the current stream wait for it: an event recorded after it has the time at
    which the GPU was done.

    Args:
        step: posts the work of one step, and waits for it.
        count: how many to do.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) * 1e6 for before, after in itertools.pairwise(events)]


def check_gpus(world_size: int) -> None:
    """Checks that each rank on this machine has a GPU of its own.

    Raises:
        ArgumentError: there are fewer.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world_size > count:
        others = "world_size=1, which measures copies within its memory, or for " if count else ""
        raise ArgumentError(
            f'world_size must be at most the number of GPUs with comm_device="gpu", got {world_size} with {count}: NCCL refuses two ranks '
            f'on one GPU, and they would only show how they take turns. Ask for {others}comm_device="cpu".'
        )


def paths_between(ranks: Sequence[int]) -> dict[str, str]:
    """Returns how NCCL moves data along the edges of a ring on this machine, as far as torch and the environment tell.

    Args:
        ranks: the ring's ranks in order; each is on the GPU of its number.

    Returns:
        By edge ("0>1"): "p2p" where one GPU can read the other's memory and nobody has forbidden it, else "host-staged"; "network" where
        the other GPU is not on this machine.
    """
    count = torch.cuda.device_count()
    forbidden = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or os.environ.get("NCCL_P2P_LEVEL") == "LOC"
    paths = {}
    for place, src in enumerate(ranks if len(ranks) > 1 else ()):
        dst = ranks[(place + 1) % len(ranks)]
        if max(src, dst) >= count:
            paths[f"{src}>{dst}"] = "network"
        else:
            paths[f"{src}>{dst}"] = "p2p" if not forbidden and torch.cuda.can_device_access_peer(src, dst) else "host-staged"
    return paths
