"""Correct programs with messages and collectives, and the calls of their four ranks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
PROGRAMS: dict[str, tuple[Callable[[], None], dict[str, int]]] = {}


def right(**counts: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a program for four ranks, with the total number of calls on all ranks."""

    def register(program: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[program.__name__] = program, counts
        return program

    return register


def place() -> tuple[int, int, int]:
    """Returns this rank, the next rank and the previous rank."""
    rank = dist.get_rank()
    return rank, (rank + 1) % SIZE, (rank - 1) % SIZE


# -- messages


@right(isend=4, recv=4)
def shift() -> None:
    rank, after, before = place()
    received = torch.zeros(3)
    work = dist.isend(torch.full((3,), float(rank)), after)
    dist.recv(received, before)
    work.wait()
    assert received.tolist() == [before] * 3


@right(batch_isend=8, batch_irecv=8)
def halo_in_a_batch() -> None:
    _, after, before = place()
    left, right_ = torch.zeros(2), torch.zeros(2)
    own = torch.ones(2)
    operations = [
        (dist.isend, own, before),
        (dist.isend, own, after),
        (dist.irecv, left, before),
        (dist.irecv, right_, after),
    ]
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        work.wait()
    assert float(left.sum() + right_.sum()) == 4


@right(isend=8, recv=8)
def tags_in_another_order() -> None:
    _, after, before = place()
    works = [dist.isend(torch.full((tag + 1,), float(tag)), after, tag=tag) for tag in (0, 1)]
    for tag in (1, 0):
        received = torch.zeros(tag + 1)
        dist.recv(received, before, tag=tag)
        assert float(received[0]) == tag
    for work in works:
        work.wait()


@right(send=12, recv=12)
def served_by_whoever_comes() -> None:
    """Rank 0 answers six questions in the order in which they arrive."""
    rank, _, _ = place()
    message = torch.zeros(1)
    if rank == 0:
        for _ in range(6):
            who = dist.recv(message, tag=1)
            dist.send(message * 2, who, tag=2)
    else:
        for turn in range(2):
            dist.send(torch.tensor([float(turn)]), 0, tag=1)
            dist.recv(message, 0, tag=2)
            assert float(message) == 2 * turn


@right(isend=24, recv=24)
def all_reduce_round_the_ring() -> None:
    """Runs a hand-written reduce-scatter and all-gather of three steps each."""
    rank, after, before = place()
    parts, fresh = list(torch.full((SIZE, 2), float(rank + 1)).unbind()), torch.zeros(2)
    for step in range(2 * (SIZE - 1)):
        index = (rank - step if step < SIZE - 1 else rank - step + SIZE) % SIZE
        work = dist.isend(parts[index], after)
        dist.recv(fresh, before)
        work.wait()
        target = (index - 1) % SIZE
        parts[target] = parts[target] + fresh if step < SIZE - 1 else fresh.clone()
    assert all(part.tolist() == [10.0, 10.0] for part in parts)


@right(isend=4, recv=4)
def nothing_in_a_message() -> None:
    _, after, before = place()
    work = dist.isend(torch.zeros(0), after)
    dist.recv(torch.zeros(0), before)
    work.wait()


@right(send_object_list=4, recv_object_list=4)
def objects_in_messages() -> None:
    rank, _, _ = place()
    if rank % 2 == 0:
        dist.send_object_list([{"rank": rank}, "text"], rank + 1)
    else:
        found: list[Any] = [None, None]
        dist.recv_object_list(found, rank - 1)
        assert found == [{"rank": rank - 1}, "text"]


@right(isend=4, irecv=4)
def waits_with_limits_that_are_kept() -> None:
    _, after, before = place()
    received = torch.zeros(1)
    works = [dist.irecv(received, before), dist.isend(torch.ones(1), after)]
    for work in works:
        work.wait(dt.timedelta(seconds=30))
    assert float(received) == 1


# -- collectives


@right(all_reduce=12)
def several_reductions_at_once() -> None:
    tensors = [torch.full((8,), float(index)) for index in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert [float(tensor[0]) for tensor in tensors] == [0, 4, 8]


@right(all_reduce=4)
def asked_until_it_is_done() -> None:
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert value.tolist() == [4.0] * 4


@right(all_reduce=12, reduce=4)
def every_reduction() -> None:
    rank, _, _ = place()
    for op, expected in ((dist.ReduceOp.MAX, 3), (dist.ReduceOp.MIN, 0), (dist.ReduceOp.SUM, 6)):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, op=op)
        assert float(value) == expected
    dist.reduce(value, dst=2)


@right(scatter=4, gather=4)
def scattered_and_gathered() -> None:
    rank, _, _ = place()
    mine = torch.zeros(2)
    dist.scatter(
        mine,
        [torch.full((2,), float(other)) for other in range(SIZE)] if rank == 1 else None,
        src=1,
    )
    back = [torch.zeros(2) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(mine * 2, back, dst=1)
    assert back is None or [float(tensor[0]) for tensor in back] == [0, 2, 4, 6]


@right(all_to_all_single=4)
def uneven_parts_to_all() -> None:
    rank, _, _ = place()
    received = torch.zeros(sum(range(1, SIZE + 1)))
    dist.all_to_all_single(
        received,
        torch.full(((rank + 1) * SIZE,), float(rank)),
        list(range(1, SIZE + 1)),
        [rank + 1] * SIZE,
    )
    assert received.tolist() == [float(source) for source in range(SIZE) for _ in range(source + 1)]


@right(all_gather_into_tensor=4, reduce_scatter_tensor=4, all_gather=4)
def into_one_tensor() -> None:
    rank, _, _ = place()
    whole, part = torch.zeros(2 * SIZE), torch.zeros(2)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    dist.reduce_scatter_tensor(part, whole)
    assert part.tolist() == [4.0 * rank] * 2
    parts = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(parts, part)


@right(all_gather=12, broadcast=12, gather=4, scatter=8)
def objects_in_collectives() -> None:
    rank, _, _ = place()
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, "x" * rank)
    assert found == ["", "x", "xx", "xxx"]
    words: list[Any] = [{"lr": 0.1}, None] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, src=0)
    assert words == [{"lr": 0.1}, None]
    dist.gather_object(rank, found if rank == 2 else None, dst=2)
    dist.scatter_object_list(
        words, [[other] for other in range(SIZE)] if rank == 0 else None, src=0
    )
    assert words[0] == [rank]


@right(barrier=4, monitored_barrier=4)
def barriers() -> None:
    dist.monitored_barrier(timeout=dt.timedelta(seconds=60))
    dist.barrier()


@right(new_group=16, all_reduce=8)
def rows_and_columns() -> None:
    rank, _, _ = place()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=groups[rank // 2])
    dist.all_reduce(value, group=groups[2 + rank % 2])
    assert float(value) == 6
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)


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


@right(new_group=12, broadcast=6)
def a_group_is_made_three_times() -> None:
    for size in (2, 5, 3):
        group = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            dist.broadcast(torch.zeros(size), src=3, group=group)
            dist.destroy_process_group(group)


# -- threads, processes, caught errors


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
    """A thread receives batches into a queue, and the main thread computes with them."""
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
    """Ranks wait long enough to be considered stuck.

    Rank 1 is in no operation.
    """
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
    """A program tries a nonexistent peer to find out the number of ranks."""
    _, after, before = place()
    with contextlib.suppress(ValueError, RuntimeError):
        dist.isend(torch.zeros(1), SIZE)
    work = dist.isend(torch.ones(1), after)
    dist.recv(torch.zeros(1), before)
    work.wait()
