"""Correct programs that look stuck or mismatched.

There is no finding, and the results are right.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from accusations import accused

import ringsim
from ringsim import Trace
from ringsim.errors import ArgumentError

sys.path.append(str(Path(__file__).parents[1] / "programs"))
import right_messages

cloudpickle.register_pickle_by_value(right_messages)
pytestmark = pytest.mark.usefixtures("nothing_left_behind")

AT_ONCE = 5
LIMIT_S = 60


# -- programs that look stuck; each returns a number that is known in advance


def odd_ring_in_mixed_order(rounds: int = 60) -> float:
    """One rank receives first, all others send first: the messages pass one after the other."""
    ring = ringsim.current_ring()
    token, fresh = torch.tensor([float(ring.rank)]), torch.empty(1)
    for _ in range(rounds):
        if ring.rank == 0:
            dist.recv(fresh, ring.pred, group=ring.pred_group)
            dist.send(token, ring.succ, group=ring.succ_group)
        else:
            dist.send(token, ring.succ, group=ring.succ_group)
            dist.recv(fresh, ring.pred, group=ring.pred_group)
        token = fresh.clone()
    return float(token)


def scrambled_waits(count: int = 40) -> float:
    """All messages are posted, with a different size under each tag.

    The order of the waits differs from rank to rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    order = random.Random(rank)
    others = [other for other in range(size) if other != rank]
    received = [torch.empty(1 + tag) for _ in others for tag in range(count)]
    works: list[Any] = []
    for number, peer in enumerate(others):
        tags, other_tags = (order.sample(range(count), count) for _ in range(2))
        works += [dist.isend(torch.full((1 + tag,), float(tag)), peer, tag=tag) for tag in tags]
        mine = received[number * count :]
        works += [dist.irecv(mine[tag], peer, tag=tag) for tag in other_tags]
    order.shuffle(works)
    for work in works:
        if order.random() < 0.1:
            time.sleep(0.002)
        work.wait()
    return sum(float(tensor[-1]) for tensor in received)


def long_compute() -> float:
    """All ranks wait for rank 0, which computes and sleeps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(1)
    if rank == 0:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            sum(range(1000))
        time.sleep(0.4)
        for peer in range(1, size):
            dist.send(tensor + peer, peer)
    else:
        dist.recv(tensor, 0)
    return float(tensor)


def early_finisher() -> float:
    """The last rank posts its message and returns; the message is received much later."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), 7.0)
    if rank == size - 1:
        dist.isend(tensor, 0)
        return 7.0
    if rank == 0:
        time.sleep(0.3)
        dist.recv(tensor, size - 1)
        return float(tensor[0])
    return 0.0


def refused_and_tried_again(rounds: int = 60) -> float:
    """Sends of unsupported tensors raise when they are posted.

    The program catches the error, and sends the expected size. The refusal may be read later than
    the post: until then, the post may look like the other side of the recv.
    """
    ring, total = ringsim.current_ring(), 0.0
    for turn in range(rounds):
        for wrong in (torch.zeros(2, turn + 3).t(), torch.zeros(turn + 2).to_sparse()):
            with contextlib.suppress(ValueError, NotImplementedError):
                dist.send(wrong, ring.succ, group=ring.succ_group)
        sent: Any = dist.isend(torch.ones(turn + 1), ring.succ, group=ring.succ_group)
        received = torch.zeros(turn + 1)
        dist.recv(received, ring.pred, group=ring.pred_group)
        sent.wait()
        total += float(received.sum())
    return total


def large_message_for_anybody(size_bytes: int = 1 << 27) -> float:
    """A message is in flight to a recv from any source; the receiver waits for the next one."""
    rank = dist.get_rank()
    large, small = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(1)
    if rank == 0:
        work: Any = dist.irecv(large, tag=1)
        dist.recv(small, 1, tag=2)
        work.wait()
    else:
        dist.send(large + 1, 0, tag=1)
        dist.send(small + 1, 0, tag=2)
    return float(large[-1]) + float(small)


def beside_a_recv_from_anybody(size_bytes: int = 1 << 26) -> float:
    """All wait for a message that a recv from any source might have got, as far as is recorded.

    The message is slow.
    """
    rank = dist.get_rank()
    large, small = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(1)
    if rank == 0:
        first: Any = dist.irecv(large, 1, tag=1)
        second: Any = dist.irecv(large.clone(), tag=1)
        dist.send(small, 1, tag=2)
        first.wait()
        dist.send(small, 1, tag=3)
        second.wait()
    else:
        dist.recv(small, 0, tag=2)
        sent: Any = dist.isend(large + 1, 0, tag=1)
        dist.recv(small, 0, tag=3)
        sent.wait()
        dist.send(large + 1, 0, tag=1)
    return float(large[-1])


def stopped_and_continued() -> float:
    """A signal stops a rank for a while, and all others wait for it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.zeros(1)
    if rank == 0:
        with subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
            for peer in range(1, size):
                dist.send(tensor + 5, peer)
    else:
        dist.recv(tensor, 0)
    return float(tensor)


def help_from_another_thread() -> float:
    """The main threads wait for each other.

    A second thread, which has posted nothing yet, will free them.
    """
    rank = dist.get_rank()
    tensor = torch.zeros(1)

    def help_later() -> None:
        time.sleep(0.4)
        dist.send(torch.tensor([3.0]), 1, tag=9)

    if rank == 0:
        helper = threading.Thread(target=help_later)
        helper.start()
        dist.recv(tensor, 1)
        helper.join()
    elif rank == 1:
        dist.recv(tensor, 0, tag=9)
        dist.send(tensor, 0)
    return float(tensor)


def collectives_between() -> float:
    """Messages and collectives alternate; some arrive late, and some need not wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, total = torch.zeros(1), torch.ones(1)
    for turn in range(6):
        work = dist.all_reduce(total, async_op=True)
        if rank == turn % size:
            time.sleep(0.05)
            for peer in range(size):
                if peer != rank:
                    dist.send(tensor + turn, peer)
        else:
            dist.recv(torch.empty(1), turn % size)
        work.wait()
        dist.broadcast(tensor, turn % size)
        dist.barrier()
    return float(total)


def monitored_barriers() -> float:
    """One rank after the other is late, once for longer than ranks may stay in one state.

    Meanwhile, messages are in flight.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived, total = torch.empty(1), 0.0
    for turn in range(2 * size):
        works = [
            dist.isend(torch.ones(1), (rank + 1) % size),
            dist.irecv(arrived, (rank - 1) % size),
        ]
        if rank == turn % size:
            time.sleep(1.2 if turn == 1 else 0.05)
        dist.monitored_barrier()
        for work in works:
            work.wait()
        total += float(arrived)
    return total


def random_storm(steps: int = 150) -> float:
    """All draw the same messages, of any size, and send or receive their part in the same order.

    Returns the number of wrong messages.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    order, mine = random.Random(7), random.Random(rank)
    left: list[Any] = []
    missing = 0.0
    for _ in range(steps):
        source, target = order.sample(range(size), 2)
        elements, tag = order.choice([0, 1, 100, 100_000]), order.randrange(3)
        if rank == source:
            left.append(dist.isend(torch.full((elements,), 1.0), target, tag=tag))
            if mine.random() < 0.5:
                left.pop().wait()
        elif rank == target:
            tensor = torch.empty(elements)
            dist.recv(tensor, source, tag=tag)
            missing += elements - float(tensor.sum())
        if mine.random() < 0.03:
            time.sleep(0.03)
    for work in left:
        work.wait()
    return missing


# program -> (number of ranks, expected result of rank r)
PROGRAMS: dict[Callable[..., float], tuple[int, Callable[[int, int], float]]] = {
    odd_ring_in_mixed_order: (5, lambda rank, size: (rank - 60) % size),
    scrambled_waits: (3, lambda rank, size: (size - 1) * sum(range(40))),
    long_compute: (4, lambda rank, size: rank),
    early_finisher: (3, lambda rank, size: 0 if rank == 1 else 7),
    refused_and_tried_again: (3, lambda rank, size: sum(range(61))),
    large_message_for_anybody: (2, lambda rank, size: 0 if rank else 2),
    beside_a_recv_from_anybody: (2, lambda rank, size: 0 if rank else 1),
    stopped_and_continued: (3, lambda rank, size: 5 if rank else 0),
    help_from_another_thread: (2, lambda rank, size: 3),
    collectives_between: (3, lambda rank, size: size**6),
    monitored_barriers: (3, lambda rank, size: 2 * size),
    random_storm: (4, lambda rank, size: 0),
}


@pytest.fixture(scope="module")
def runs(nothing_left_behind: None) -> dict[Callable[..., float], Future[Trace]]:
    """Runs all of them at the same time."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(AT_ONCE) as pool:
        patch.setattr("ringsim.launch.watcher.RELAX", 1.0)  # it always looks as often as possible
        return {
            program: pool.submit(ringsim.trace, program, world_size=size, limit_s=LIMIT_S)
            for program, (size, _) in PROGRAMS.items()
        }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_only_looks_stuck_ends_as_it_should(
    program: Callable[..., float], runs: dict[Callable[..., float], Future[Trace]]
) -> None:
    size, expected = PROGRAMS[program]
    assert runs[program].result().results == [expected(rank, size) for rank in range(size)]


# -- programs whose sides look mismatched


def among_many_buffers() -> Any:
    """Uses many buffers while messages are in flight, but never a message's own."""
    ring = ringsim.current_ring()
    weight, buffer, sums = torch.ones(8, requires_grad=True), torch.zeros(17), []
    for _ in range(3):
        sent = (weight * 2).detach().clone()
        works: list[Any] = [
            dist.isend(sent, ring.succ),
            dist.isend(sent, ring.succ, tag=3),  # two sends may share a buffer
            dist.irecv(buffer[:8], ring.pred),
            dist.irecv(buffer[8:16], ring.pred, tag=3),
        ]
        loss = (weight.sum() * 3) + sent.sum()  # reading a buffer being sent is allowed
        loss.backward()
        torch.empty_like(buffer)
        buffer.view(17)[:4]
        buffer[16] = 1.0  # next to the messages
        for work in reversed(works):
            work.wait()
        sums.append(float(buffer.sum()))
        dist.all_reduce(buffer)
        buffer.zero_()
    dist.all_reduce(torch.zeros(4, 3).t())  # transposed in memory on all ranks
    return sums, str(weight.grad)


def other_shapes() -> Any:
    """Flat and shaped tensors, dimensions of 1, and empty tensors."""
    ring, received = ringsim.current_ring(), []
    for sent, size in [
        ((2, 3), (6,)),
        ((6,), (3, 2)),
        ((1, 4), (4, 1)),
        ((0, 3), (3, 0)),
        ((), (1,)),
        ((2, 1, 3), (2, 3)),
    ]:
        data, buffer = torch.full(sent, float(ring.rank)), torch.zeros(size)
        work: Any = dist.isend(data, ring.succ, group=ring.succ_group)
        dist.recv(buffer, ring.pred, group=ring.pred_group)
        work.wait()
        received.append(buffer.tolist())
    return received


COMPARED = among_many_buffers, other_shapes, scrambled_waits
RIGHT = [name for name in right_messages.PROGRAMS if name != "a_mistake_is_caught"]


def all_of_them() -> list[Any]:
    for name in RIGHT:  # they check their own results
        right_messages.PROGRAMS[name][0]()
        dist.barrier()
    return [(worker.__name__, worker()) for worker in COMPARED]


def test_nothing_is_refused_and_the_results_are_those_of_an_unchecked_run() -> None:
    size = right_messages.SIZE
    unchecked, checked = (
        ringsim.trace(all_of_them, world_size=size, check=check, limit_s=LIMIT_S)
        for check in ("off", "full")
    )
    assert checked.results == unchecked.results
    assert accused(checked) == []


def test_what_is_not_asked_for_is_not_checked() -> None:
    """A larger receive buffer: Gloo fills a part of it."""

    def worker() -> list[float]:
        received = torch.zeros(8)
        if dist.get_rank() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(received, 0)
        return received.tolist()

    trace = ringsim.trace(worker, world_size=2, check="off", limit_s=LIMIT_S)
    assert trace.results[1] == [1.0] * 4 + [0.0] * 4
    words = "check must be one of 'basic', 'full', 'off', got 'ful'"
    with pytest.raises(ArgumentError, match=words):
        ringsim.trace(worker, world_size=1, check="ful")
