"""Programs for measuring the errors of predictions.

Each program runs both on real ranks and on the virtual clock, with a number of rounds and a size in
bytes. The programs communicate as ordinary programs do: in rings, trees and pairs, with collectives
and in sub-groups, with and without computation between messages. ``KINDS`` maps the names of
programs to functions, which all take ``(rounds, size_bytes)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

import ringsim
from ringsim import comm as dist
from ringsim.pipeline import Costs, gpipe, one_f_one_b, rehearse

__all__ = ["COLLECTIVES", "KINDS"]

Program = Callable[[int, int], None]


def _floats(size_bytes: int) -> torch.Tensor:
    return torch.zeros(max(size_bytes // 4, 1))


def even_pipeline(rounds: int, size_bytes: int) -> None:
    """Runs 1F1B steps with receives that block."""
    schedule = one_f_one_b(dist.get_world_size(), 4)
    rehearse(
        schedule,
        Costs(forward=0.001, input=0.001, weight=0.001),
        size_bytes=size_bytes,
        steps=rounds,
        ahead=0,
    )


def uneven_pipeline(rounds: int, size_bytes: int) -> None:
    """Runs GPipe steps whose stages take different times."""
    count = dist.get_world_size()
    times = tuple(0.0005 * (1 + stage % 3) for stage in range(count))
    rehearse(
        gpipe(count, 4),
        Costs(forward=times, input=times, weight=times),
        size_bytes=size_bytes,
        steps=rounds,
        ahead=1,
    )


def master_and_workers(rounds: int, size_bytes: int) -> None:
    """Has rank 0 give each of the other ranks a task, and collect the results."""
    rank, count = dist.get_rank(), dist.get_world_size()
    task, results = _floats(size_bytes), [_floats(size_bytes) for _ in range(count)]
    for _ in range(rounds):
        if rank == 0:
            giving = [dist.isend(task, worker) for worker in range(1, count)]
            getting = [dist.irecv(results[worker], worker) for worker in range(1, count)]
            for work in (*giving, *getting):
                work.wait()
        else:
            dist.recv(task, 0)
            ringsim.compute(0.001 * (1 + rank % 2))
            dist.send(task, 0)


def ring_all_reduce(rounds: int, size_bytes: int) -> None:
    """Runs an all_reduce by hand, in which pieces go round the ring twice."""
    ring = ringsim.current_ring()
    count = ring.world_size
    pieces = list(_floats(max(size_bytes, 4 * count)).chunk(count))
    coming = torch.zeros_like(pieces[0])
    for _ in range(rounds):
        for step in range(2 * (count - 1)):
            going = pieces[(ring.rank - step) % count]
            getting = dist.irecv(
                coming[: len(pieces[(ring.rank - step - 1) % count])],
                ring.pred,
                group=ring.pred_group,
            )
            giving = dist.isend(going, ring.succ, group=ring.succ_group)
            getting.wait()
            giving.wait()


def generation_ring(rounds: int, size_bytes: int) -> None:
    """Sends a token through all stages and back to the first, again and again."""
    ring = ringsim.current_ring()
    token = _floats(size_bytes)
    for number in range(rounds):
        if ring.rank > 0 or number > 0:
            dist.recv(token, ring.pred, group=ring.pred_group)
        ringsim.compute(0.0005)
        dist.send(token, ring.succ, group=ring.succ_group)
    if ring.rank == 0:
        dist.recv(token, ring.pred, group=ring.pred_group)


def halo_exchange(rounds: int, size_bytes: int) -> None:
    """Has each rank exchange its borders with both neighbours, and compute."""
    rank, count = dist.get_rank(), dist.get_world_size()
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < count]
    here, there = _floats(size_bytes), [_floats(size_bytes) for _ in neighbours]
    for _ in range(rounds):
        swaps = [
            dist.P2POp(dist.irecv, border, other)
            for border, other in zip(there, neighbours, strict=True)
        ]
        swaps += [dist.P2POp(dist.isend, here, other) for other in neighbours]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        ringsim.compute(0.001)


def broadcast_tree(rounds: int, size_bytes: int) -> None:
    """Sends a message down a binary tree, and answers back up."""
    rank, count = dist.get_rank(), dist.get_world_size()
    children, value = (
        [child for child in (2 * rank + 1, 2 * rank + 2) if child < count],
        _floats(size_bytes),
    )
    for _ in range(rounds):
        if rank:
            dist.recv(value, (rank - 1) // 2)
        for work in [dist.isend(value, child) for child in children]:
            work.wait()
        for child in children:
            dist.recv(value, child)
        if rank:
            dist.send(value, (rank - 1) // 2)


def scatter_and_gather(rounds: int, size_bytes: int) -> None:
    """Sends parts down a binomial tree, which halves them, and joins them on the way up."""
    rank, count = dist.get_rank(), dist.get_world_size()
    steps = [1 << bit for bit in reversed(range((count - 1).bit_length()))]
    for _ in range(rounds):
        for span in steps:
            part = _floats(size_bytes * span // count)
            if rank % (2 * span) == 0 and rank + span < count:
                dist.send(part, rank + span)
            elif rank % (2 * span) == span:
                dist.recv(part, rank - span)
        ringsim.compute(0.0005)
        for span in reversed(steps):
            part = _floats(size_bytes * span // count)
            if rank % (2 * span) == span:
                dist.send(part, rank - span)
            elif rank % (2 * span) == 0 and rank + span < count:
                dist.recv(part, rank + span)


def pairwise_exchange(rounds: int, size_bytes: int) -> None:
    """Runs a butterfly: in each step, ranks whose numbers differ in one bit exchange messages."""
    rank, count = dist.get_rank(), dist.get_world_size()
    here, there = _floats(size_bytes), _floats(size_bytes)
    for _ in range(rounds):
        for bit in range((count - 1).bit_length()):
            partner = rank ^ (1 << bit)
            if partner < count:
                giving = dist.isend(here, partner)
                dist.recv(there, partner)
                giving.wait()


def sub_groups(rounds: int, size_bytes: int) -> None:
    """Reduces in both halves of the ranks; their first ranks exchange and broadcast the results."""
    rank, count = dist.get_rank(), dist.get_world_size()
    half = count // 2
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, count)))]
    mine, first = halves[rank >= half], half * (rank >= half)
    value, other = _floats(size_bytes), _floats(size_bytes)
    for _ in range(rounds):
        if half > 1:
            dist.all_reduce(value, group=mine)
        if rank == first:
            giving = dist.isend(value, half - first)
            dist.recv(other, half - first)
            giving.wait()
        if half > 1:
            dist.broadcast(other, first, group=mine)


def _collective(name: str, rounds: int, size_bytes: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch is about to rename some
    count = dist.get_world_size()
    size = max(size_bytes // 4 // count, 1) * count
    whole, part = torch.zeros(size), torch.zeros(size // count)
    parts = [torch.zeros(size // count) for _ in range(count)]
    is_root = dist.get_rank() == 0
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "gather": lambda: dist.gather(part, parts if is_root else None, 0),
        "scatter": lambda: dist.scatter(part, parts if is_root else None, 0),
        "barrier": dist.barrier,
    }
    for _ in range(rounds):
        calls[name]()


COLLECTIVES: Final = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_to_all_single", "gather",
    "scatter", "barrier",
)  # fmt: skip
KINDS: Final[dict[str, Program]] = {
    "even pipeline": even_pipeline,
    "uneven pipeline": uneven_pipeline,
    "master and workers": master_and_workers,
    "ring all-reduce by hand": ring_all_reduce,
    "generation ring": generation_ring,
    "halo exchange": halo_exchange,
    "broadcast tree and answers": broadcast_tree,
    "scatter and gather trees": scatter_and_gather,
    "pairwise exchange": pairwise_exchange,
    "sub-groups": sub_groups,
} | {f"collective {name}": partial(_collective, name) for name in COLLECTIVES}
