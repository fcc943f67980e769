"""What is particular to GPUs: CUDA events time the steps, and what is between two GPUs has several names."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringsim.errors import ArgumentError

__all__ = ["check_gpus", "paths_between", "place_of", "time_steps"]


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


def place_of(local_rank: int) -> dict[str, Any]:
    """Returns where this rank's GPU is and whom it can reach, as JSON can say it; every rank calls it by itself.

    Args:
        local_rank: the number of the rank's GPU on its machine.

    Returns:
        ``host``, the same for all ranks of a machine; ``gpu``, its number there; ``name``; ``peers``, the GPUs of the machine whose memory
        it can read, none where the environment forbids NCCL to do so.
    """
    forbidden = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or os.environ.get("NCCL_P2P_LEVEL") == "LOC"
    others = [other for other in range(torch.cuda.device_count()) if other != local_rank]
    peers = [] if forbidden else [other for other in others if torch.cuda.can_device_access_peer(local_rank, other)]
    return {"host": socket.gethostname(), "gpu": local_rank, "name": torch.cuda.get_device_name(local_rank), "peers": peers}


def paths_between(ranks: Sequence[int], places: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns how NCCL moves data along the edges of a ring, as far as torch and the environment tell.

    Args:
        ranks: the ring's ranks in order.
        places: ``place_of`` of every rank, by rank.

    Returns:
        By edge ("0>1"): "p2p" where one GPU can read the other's memory, "host-staged" where it goes through the machine's memory,
        "network" where the other GPU is on another machine.

    Example:
        >>> place = {"host": "one", "peers": [1]}
        >>> paths_between((0, 1), [{**place, "gpu": 0}, {**place, "gpu": 1, "host": "other"}])
        {'0>1': 'network', '1>0': 'network'}
    """
    paths = {}
    for number, src in enumerate(ranks if len(ranks) > 1 else ()):
        dst = ranks[(number + 1) % len(ranks)]
        here, there = places[src], places[dst]
        local = "p2p" if there["gpu"] in here["peers"] else "host-staged"
        paths[f"{src}>{dst}"] = local if here["host"] == there["host"] else "network"
    return paths
