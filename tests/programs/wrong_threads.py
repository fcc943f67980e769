"""Wrong programs that start threads and processes: rows 88 to 90 of faults.md."""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from fault_programs import EASE, SHORT_S, fault


def tensor(count: int = 4) -> torch.Tensor:
    return torch.zeros(count)


# -- threads


@fault("88a", **EASE)
def a_lock_that_the_receiver_holds() -> None:
    """The sending thread needs a lock that the main thread holds while it receives."""
    rank, lock = dist.get_rank(), threading.Lock()

    def sends() -> None:
        with lock:  # here
            dist.send(tensor(), 1 - rank)

    with lock:
        thread = threading.Thread(target=sends)
        thread.start()
        dist.recv(tensor(), 1 - rank)  # here
    thread.join()


@fault("88b", **EASE)
def a_queue_that_a_receiver_should_fill() -> None:
    rank, batches = dist.get_rank(), queue.Queue()

    def receives() -> None:
        batch = tensor()
        dist.recv(batch, 1 - rank)  # here
        batches.put(batch)

    threading.Thread(target=receives, daemon=True).start()
    dist.send(batches.get(), 1 - rank)  # here


@fault("88c", **EASE)
def a_receiver_of_asyncio() -> None:
    rank = dist.get_rank()

    def receives() -> None:
        dist.recv(tensor(), 1 - rank)  # here

    async def both() -> None:
        await asyncio.to_thread(receives)
        await asyncio.to_thread(dist.send, tensor(), 1 - rank)

    asyncio.run(both())  # here


@fault("88d", **EASE)
def a_receiver_of_a_pool() -> None:
    rank = dist.get_rank()

    def receives() -> None:
        dist.recv(tensor(), 1 - rank)  # here

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receives)
        sent = pool.submit(dist.send, tensor(), 1 - rank)
        received.result()
        sent.result()


@fault("88e", **EASE)
def the_thread_that_sends_raises() -> None:
    rank = dist.get_rank()

    def sends() -> None:
        raise ValueError("no more batches")  # here

    if rank == 0:
        thread = threading.Thread(target=sends)
        thread.start()
        thread.join()
    else:
        dist.recv(tensor(), 0)  # here


@fault("88f", **EASE)
def the_thread_that_fills_a_queue_raises() -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue()

    def loads() -> None:
        raise ValueError("no more batches")  # here

    if dist.get_rank() == 0:
        threading.Thread(target=loads, daemon=True).start()
        dist.send(batches.get(), 1)  # here
    else:
        dist.recv(tensor(), 0)  # here


@fault("88g", **EASE)
def two_threads_with_collectives() -> None:
    """The threads start in a different order on each rank."""
    order = [tensor(4), tensor(8)] if dist.get_rank() == 0 else [tensor(8), tensor(4)]

    def reduces(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)  # here

    for each in order:
        thread = threading.Thread(target=reduces, args=(each,))
        thread.start()
        thread.join()


@fault("88h", within_s=None, limit_s=SHORT_S)
def threads_that_exchange_heartbeats() -> None:
    rank, group = dist.get_rank(), dist.new_group()

    def beats() -> None:
        beat, exchanges = tensor(1), [dist.send, dist.recv]
        while True:
            for exchange in exchanges[:: 1 - 2 * rank]:
                exchange(beat, 1 - rank, group=group)
            time.sleep(0.05)

    threading.Thread(target=beats, daemon=True).start()
    dist.recv(tensor(), 1 - rank)  # here


# -- processes


@fault("89a", **EASE)
def a_segmentation_fault() -> None:
    dist.all_reduce(tensor())  # here
    if dist.get_rank() == 1:
        ctypes.string_at(0)  # here
    dist.all_reduce(tensor())  # here


@fault("89b", **EASE)
def leaves_without_a_word() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(tensor())  # here


@fault("89c", **EASE)
def aborts() -> None:
    if dist.get_rank() == 1:
        os.abort()  # here
    dist.all_reduce(tensor())  # here


@fault("89d", **EASE)
def leaves_with_a_message() -> None:
    if dist.get_rank() == 1:
        sys.exit("no such file: train.bin")  # here
    dist.all_reduce(tensor())


@fault("89e", **EASE)
def runs_in_circles() -> None:
    def deeper() -> None:
        deeper()  # here

    if dist.get_rank() == 1:
        deeper()
    dist.all_reduce(tensor())


@fault("89f", **EASE)
def asks_the_keyboard() -> None:
    if dist.get_rank() == 0:
        input("learning rate? ")  # here
    dist.barrier()


@fault("89g", **EASE)
def returns_what_cannot_be_sent() -> object:
    return threading.Lock()


@fault("90a", within_s=None, limit_s=SHORT_S)
def a_child_that_never_ends() -> None:
    if dist.get_rank() == 0:
        subprocess.run(["sleep", "60"], check=True)  # here
    dist.barrier()  # here


@fault("90b", **EASE)
def a_child_that_fails() -> None:
    if dist.get_rank() == 0:
        subprocess.run(["false"], check=True)  # here
    dist.barrier()


@fault("90c", within_s=None, limit_s=SHORT_S)
def a_key_that_nobody_sets() -> None:
    if dist.get_rank() == 0:
        dist.HashStore().get("ready")  # here
    dist.barrier()  # here


@fault("90d", **EASE)
def a_module_that_is_not_there() -> None:
    if dist.get_rank() == 1:
        import no_such_module  # noqa: F401  # here
    dist.barrier()
