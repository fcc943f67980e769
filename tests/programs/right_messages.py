"""Right programs of messages and collectives, as users write them, with how often each operation is called by all four ranks together."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
PROGRAMS: dict[str, tuple[Callable[[], None], dict[str, int]]] = {}


def right(**counts: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a program for four ranks, with the calls of all ranks together."""

    def register(program: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[program.__name__] = program, counts
        return program

    return register


def place() -> tuple[int, int, int]:
    """Returns this rank, the next and the one before."""
    rank = dist.get_rank()
    return rank, (rank + 1) % SIZE, (rank - 1) % SIZE


# -- messages


@right(batch_isend=8, batch_irecv=8)
def halo_in_a_batch() -> None:
    _, after, before = place()
    left, right_ = torch.zeros(2), torch.zeros(2)
    own = torch.ones(2)
    operations = [(dist.isend, own, before), (dist.isend, own, after), (dist.irecv, left, before), (dist.irecv, right_, after)]
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        work.wait()
    assert float(left.sum() + right_.sum()) == 4


@right(isend=12, irecv=12)
def computes_while_messages_travel() -> None:
    """Attention in a ring: what came last is used while the next comes."""
    _, after, before = place()
    block, total = torch.ones(64, 64), torch.zeros(64, 64)
    for _ in range(3):
        following = torch.empty(64, 64)
        works = [dist.isend(block, after), dist.irecv(following, before)]
        total += block @ block
        for work in works:
            work.wait()
        block = following
    assert float(total[0, 0]) == 192


@right(isend=24, irecv=24, all_reduce=16)
def many_buffers() -> None:
    """Uses many buffers while messages are on their way, but never one of theirs."""
    _, after, before = place()
    weight, buffer = torch.ones(8, requires_grad=True), torch.zeros(17)
    for _ in range(3):
        sent = (weight * 2).detach().clone()
        works = [dist.isend(sent, after), dist.isend(sent, after, tag=3)]  # two that only read may share
        works += [dist.irecv(buffer[:8], before), dist.irecv(buffer[8:16], before, tag=3)]
        (weight.sum() * 3 + sent.sum()).backward()  # reading what is being sent is fine
        torch.empty_like(buffer)
        buffer[16] = 1.0  # beside the messages
        for work in reversed(works):
            work.wait()
        assert float(buffer.sum()) == 33
        dist.all_reduce(buffer)
        buffer.zero_()
    assert weight.grad is not None
    assert weight.grad.tolist() == [9.0] * 8
    dist.all_reduce(torch.zeros(4, 3).t())  # in another order, the same on all ranks


@right(isend=24, recv=24)
def other_shapes() -> None:
    """Flat against shaped, ones that do not count, nothing at all."""
    rank, after, before = place()
    for sent, size in [((2, 3), (6,)), ((6,), (3, 2)), ((1, 4), (4, 1)), ((0, 3), (3, 0)), ((), (1,)), ((2, 1, 3), (2, 3))]:
        buffer = torch.zeros(size)
        work = dist.isend(torch.full(sent, float(rank)), after)
        dist.recv(buffer, before)
        work.wait()
        assert (buffer == before).all()


# -- collectives


@right(all_reduce=4)
def asked_until_it_is_done() -> None:
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert value.tolist() == [4.0] * 4


@right(new_group=8, all_reduce=4, send=2, recv=2)
def halves() -> None:
    rank, _, _ = place()
    mine, _ = dist.new_subgroups(2)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mine)
    assert float(value) == (1 if rank < 2 else 5)
    if rank % 2 == 0:
        dist.send(value, group=mine, group_dst=1)
    else:
        dist.recv(value, group=mine, group_src=0)


# -- threads, processes, errors that are caught


@right(send=12, recv=12)
def a_thread_for_each_peer() -> None:
    rank, _, _ = place()
    got: dict[int, float] = {}

    def talk(peer: int) -> None:
        message = torch.tensor([float(rank)])
        if rank < peer:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            received = torch.zeros(1)
            dist.recv(received, peer)
            dist.send(message, peer)
            message = received
        got[peer] = float(message)

    threads = [threading.Thread(target=talk, args=(peer,)) for peer in range(SIZE) if peer != rank]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {peer: float(peer) for peer in range(SIZE) if peer != rank}


@right(recv=4, send=4)
def an_executor() -> None:
    _, after, before = place()
    received = torch.zeros(1)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(dist.recv, received, before), pool.submit(dist.send, torch.ones(1), after)]
        for future in futures:
            future.result()
    assert float(received) == 1


@right(recv=12, send=12)
def asyncio_in_turn() -> None:
    rank, _, _ = place()

    async def talk() -> None:
        message = torch.zeros(1)
        for turn in range(6):
            if rank % 2 == 0:
                await asyncio.to_thread(dist.send, message + turn, rank + 1)
            else:
                await asyncio.to_thread(dist.recv, message, rank - 1)
                assert float(message) == turn

    asyncio.run(talk())


@right(recv=12, send=12)
def fetched_ahead() -> None:
    """A thread receives batches into a queue, and the first thread computes with them."""
    rank, _, _ = place()
    if rank % 2 == 0:
        for turn in range(6):
            dist.send(torch.full((16,), float(turn)), rank + 1)
        return
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def fetch() -> None:
        for _ in range(6):
            batch = torch.zeros(16)
            dist.recv(batch, rank - 1)
            batches.put(batch)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert [float(batches.get()[0]) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    thread.join()


@right(send=3, recv=3)
def sent_by_a_timer() -> None:
    """All ranks sleep for longer than it takes to tell that one is stuck, and rank 1 is in no operation."""
    rank, _, _ = place()
    if rank != 1:
        dist.recv(torch.zeros(2), 1)
        return

    def send_all() -> None:
        for peer in (0, 2, 3):
            dist.send(torch.zeros(2), peer)

    timer = threading.Timer(4.2, send_all)
    timer.start()
    timer.join()


def square(number: int, answers: Any) -> None:
    answers.send(number * number)


@right(all_reduce=4)
def a_process_of_its_own() -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=square, args=(dist.get_rank(), theirs))
    process.start()
    value = torch.tensor([float(mine.recv())])
    process.join()
    dist.all_reduce(value)
    assert float(value) == 14


@right(isend=8, recv=4)
def a_mistake_is_caught() -> None:
    """A peer that is not there, as a program finds out how many there are."""
    _, after, before = place()
    with contextlib.suppress(ValueError, RuntimeError):
        dist.isend(torch.zeros(1), SIZE)
    work = dist.isend(torch.ones(1), after)
    dist.recv(torch.zeros(1), before)
    work.wait()
