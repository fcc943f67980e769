"""Correct programs that look as if they were stuck, or as if their sides disagreed: nobody is accused, and the results are right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from quiet_programs import PROGRAMS

import ringsim
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left_behind")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

POLL_S = 0.002  # the watcher looks ten times as often as by default
AT_ONCE = 3
LIMIT_S = 60
SIZE = 3  # ranks of programs that are compared
LATE = {"late_sender", "late_receiver", "straggler"}


# -- programs that look as if they were stuck


@pytest.fixture(scope="module")
def runs(nothing_left_behind: None) -> dict[Callable[..., float], Future[Trace]]:
    """Runs all of them side by side."""

    def look_closely(program: Callable[..., float]) -> Trace:
        kind = make_kind(PROGRAMS[program][0], "cpu", LIMIT_S, ring=True)
        return run(pack_call(program, (), {}, seed=0), kind, RunOptions(poll_s=POLL_S))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {program: pool.submit(look_closely, program) for program in PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_only_looks_stuck_ends_as_it_should(
    program: Callable[..., float], runs: dict[Callable[..., float], Future[Trace]]
) -> None:
    size, expected = PROGRAMS[program]
    assert runs[program].result().results == [expected(rank, size) for rank in range(size)]


# -- programs whose sides look as if they disagreed


def other_shapes() -> Any:
    """Flat against shaped, ones that do not count, nothing at all."""
    ring, received = ringsim.current_ring(), []
    for sent, size in [((2, 3), (6,)), ((6,), (3, 2)), ((1, 4), (4, 1)), ((0, 3), (3, 0)), ((), (1,)), ((2, 1, 3), (2, 3))]:
        data, buffer = torch.full(sent, float(ring.rank)), torch.zeros(size)
        work: Any = dist.isend(data, ring.succ, group=ring.succ_group)
        dist.recv(buffer, ring.pred, group=ring.pred_group)
        work.wait()
        received.append(buffer.tolist())
    return received


def tags_and_sizes() -> Any:
    """Messages of many sizes under many tags, received in another order than sent."""
    ring = ringsim.current_ring()
    sends: list[Any] = [dist.isend(torch.full((tag,), float(tag)), ring.succ, tag=tag) for tag in range(1, 40)]
    buffers = {tag: torch.zeros(tag) for tag in range(1, 40)}
    recvs: list[Any] = [dist.irecv(buffers[tag], ring.pred, tag=tag) for tag in reversed(buffers)]
    for work in (*recvs, *sends):
        work.wait()
    return [buffer.tolist() for buffer in buffers.values()]


def server_of_any() -> Any:
    """Rank 0 takes from anybody, under one tag for every size; and in between from each one in particular."""
    ring, total = ringsim.current_ring(), 0.0
    if ring.rank == 0:
        for size in (3, 4):
            for _ in range(ring.world_size - 1):
                buffer = torch.zeros(size)
                dist.recv(buffer, tag=size)
                total += float(buffer.sum())
        for rank in range(1, ring.world_size):
            buffer = torch.zeros(rank)
            dist.recv(buffer, rank, tag=3)
            total += float(buffer.sum())
        return total
    for size in (3, 4):
        dist.send(torch.ones(size), 0, tag=size)
    dist.send(torch.ones(ring.rank), 0, tag=3)
    return None


def collectives() -> Any:
    """One of each, with different arguments where that is right."""
    ring, found = ringsim.current_ring(), []
    size, rank = ring.world_size, ring.rank
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    whole = torch.zeros(2 * size)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    dist.gather(torch.full((2,), float(rank)), [torch.zeros(2) for _ in range(size)] if rank == 1 else None, dst=1)
    part = torch.zeros(3)
    dist.scatter(part, [torch.full((3,), float(one)) for one in range(size)] if rank == 2 else None, src=2)
    dist.reduce(part, 1, op=dist.ReduceOp.MAX)
    splits = [rank + 1] * size  # uneven: rank r sends r + 1 to each
    uneven = torch.zeros(sum(range(1, size + 1)))
    dist.all_to_all_single(uneven, torch.full((sum(splits),), float(rank)), [one + 1 for one in range(size)], splits)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * (rank + 1))
    words: list[Any] = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, 0)
    handle: Any = dist.all_reduce(whole, async_op=True)
    dist.barrier()
    handle.wait()
    found += [whole.tolist(), uneven.tolist(), objects, words, part.tolist() if rank == 1 else None]
    return found


def groups_again() -> Any:
    """A group is made, used, destroyed and made again, with messages of other sizes; a subset has its own."""
    ring, found = ringsim.current_ring(), []
    for size in (2, 5, 3):
        group = dist.new_group([0, 1])
        pair = dist.new_group([0, 2])
        if ring.rank < 2:
            data = torch.full((size,), float(ring.rank))
            dist.all_reduce(data, group=group)
            if ring.rank == 0:
                dist.send(data, 1, group=group)
            else:
                dist.recv(data, 0, group=group)
            found.append(data.tolist())
            dist.destroy_process_group(group)
        if ring.rank != 1:
            dist.broadcast(torch.zeros(size), 2, group=pair)
    return found


def threads() -> Any:
    """Two threads of a rank, each on a tag of its own, with sizes that vary."""
    ring = ringsim.current_ring()
    received: list[list[Any]] = [[], []]

    def play(tag: int) -> None:
        for index in range(60):
            size = 1 + (index * (tag + 2)) % 7
            work: Any = dist.isend(torch.full((size,), float(tag)), ring.succ, group=ring.succ_group, tag=tag)
            buffer = torch.zeros(size)
            dist.recv(buffer, ring.pred, group=ring.pred_group, tag=tag)
            work.wait()
            received[tag].append(buffer.tolist())

    other = threading.Thread(target=play, args=(1,))
    other.start()
    play(0)
    other.join()
    return received


def batches() -> Any:
    ring, found = ringsim.current_ring(), []
    for index in range(20):
        buffer = torch.zeros(index)
        operations = [dist.P2POp(dist.isend, torch.full((index,), 1.0), ring.succ), dist.P2POp(dist.irecv, buffer, ring.pred)]
        for work in dist.batch_isend_irecv(operations if ring.rank % 2 else operations[::-1]):
            work.wait()
        found.append(buffer.tolist())
    if ring.rank == 0:
        dist.send_object_list(["a", 1], 1)
    elif ring.rank == 1:
        words: list[Any] = [None, None]
        dist.recv_object_list(words, 0)
        found.append(words)
    return found


# A recv from anybody keeps what comes later on its group from being compared: it stands at the end.
COMPARED = (other_shapes, tags_and_sizes, collectives, groups_again, threads, batches, server_of_any)


def all_of_them() -> list[Any]:
    results = []
    for worker in COMPARED:
        results.append(worker())
        dist.barrier()
    return results


def test_nothing_is_refused_and_the_results_are_those_of_an_unchecked_run() -> None:
    checks = ("off", "basic", "full")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        unchecked, *checked = pool.map(lambda check: ringsim.trace(all_of_them, world_size=SIZE, check=check, limit_s=LIMIT_S), checks)
    for trace in checked:
        for index, worker in enumerate(COMPARED):
            assert [results[index] for results in trace.results] == [results[index] for results in unchecked.results], worker.__name__
        assert not [label for label in trace.events.tables.labels if label.startswith("!")]
        assert {finding.kind for finding in trace.explain().findings} <= LATE
