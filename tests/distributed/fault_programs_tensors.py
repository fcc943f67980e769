"""Invalid tensors, ranks, tags and handles.

They are rows 8 to 14, 45, 46, 50, 51 and 56 to 71 of tests/distributed/faults.md.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault_programs import SHORT_S, fault

import ringsim

FULL = {"check": "full"}
# the tensor that rank 0 sends, and rank 1's buffer
SENT: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "8": (lambda: torch.zeros(8), lambda: torch.zeros(4)),
    "9": (lambda: torch.zeros(4), lambda: torch.zeros(8)),
    "10": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "11a": (lambda: torch.zeros(4), lambda: torch.zeros(4, dtype=torch.int32)),
    "11b": (lambda: torch.zeros(4).half(), lambda: torch.zeros(4).bfloat16()),
    "12a": (lambda: torch.zeros(4), lambda: torch.zeros(4).double()),
    "12b": (lambda: torch.zeros(4).double(), lambda: torch.zeros(4)),
    "57": (lambda: torch.zeros(0), lambda: torch.zeros(4)),
}


def unlike(row: str) -> None:
    if dist.get_rank() == 0:
        dist.send(SENT[row][0](), 1)  # here
    else:
        dist.recv(SENT[row][1](), 0)  # here


for _row in SENT:
    fault(_row, args=lambda row=_row: (row,))(unlike)  # type: ignore[misc]

# the tensor that rank 0 sends, the peer and the tag
REFUSED: dict[str, tuple[Callable[[], Any], int, int]] = {
    "13a": (lambda: torch.zeros(2, 3).t(), 1, 0),
    "14": (lambda: torch.zeros(2, 3).to_sparse(), 1, 0),
    "50a": (lambda: torch.zeros(4), 5, 0),
    "50b": (lambda: torch.zeros(4), -1, 0),
    "51a": (lambda: torch.zeros(4), 1, -1),
    "51b": (lambda: torch.zeros(4), 1, 2**31),
    "60": (lambda: torch.zeros(4, device="meta"), 1, 0),
    "61": (lambda: [0.0, 1.0], 1, 0),
}


def refused(row: str) -> None:
    tensor, dst, tag = REFUSED[row]
    if dist.get_rank() == 0:
        dist.send(tensor(), dst, tag=tag)  # here


for _row in REFUSED:
    fault(_row, args=lambda row=_row: (row,))(refused)  # type: ignore[misc]


@fault("13b")
def receives_across_rows() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(2, 3).t(), 1)  # here


@fault("45", size=3)
def receives_on_a_group_of_others() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(4), 0, group=group)  # here


@fault("46a", size=3)
def sends_on_a_group_of_others() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        dist.send(torch.zeros(4), 0, group=group)  # here


@fault("46b", size=3)
def sends_to_a_peer_outside_the_group() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4), 1, group=group)  # here


@fault("51c")
def the_largest_tag() -> bool:
    return arrives(torch.arange(4.0), tag=2**31 - 1)


def arrives(tensor: torch.Tensor, tag: int = 0) -> bool:
    """Sends a tensor from rank 0 to rank 1; returns whether all its bits arrived."""
    if dist.get_rank() == 0:
        dist.send(tensor, 1, tag=tag)
        return True
    received = torch.empty_like(tensor)
    dist.recv(received, 0, tag=tag)
    if tensor.numel() == 0:
        return True
    return torch.equal(received.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@fault("56")
def odd_values() -> bool:
    some = (torch.tensor([float("nan"), float("inf"), -0.0]), torch.zeros(0), torch.tensor(3.5))
    return all(arrives(tensor) for tensor in some)


@fault("58")
def every_dtype() -> bool:
    names = (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    some = [torch.arange(64, dtype=torch.uint8).view(getattr(torch, name)) for name in names]
    return all(arrives(tensor) for tensor in (torch.tensor([True, False]), *some))


@fault("59")
def a_sum_of_int16() -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.int16))  # here


@fault("62")
def receives_into_a_leaf() -> bool:
    leaf = torch.zeros(4, requires_grad=True)
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        return True
    dist.recv(leaf, 0)
    return bool((leaf == 1).all()) and leaf.grad is None and leaf.grad_fn is None


@fault("63", **FULL)
def changes_what_is_on_its_way() -> None:
    data = torch.zeros(8)
    if dist.get_rank() == 0:
        work: Any = dist.isend(data, 1)
        data.add_(1)  # here
        work.wait()
    else:
        dist.recv(data, 0)


@fault("64", **FULL)
def reads_too_early() -> None:
    data = torch.zeros(8)
    if dist.get_rank() == 0:
        dist.send(data, 1)
    else:
        work: Any = dist.irecv(data, 0)
        data.sum()  # here
        work.wait()


@fault("65")
def never_waits_for_its_send() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1)  # here
    else:
        dist.recv(torch.zeros(4), 0)


@fault("66a")
def never_waits_for_its_recv() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.irecv(torch.zeros(4), 0)  # here


@fault("66b")
def receives_again_what_it_dropped() -> bool:
    received = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        dist.send(torch.full((4,), 2.0), 1)
        return True
    dist.irecv(torch.zeros(4), 0)  # here
    dist.recv(received, 0)
    return bool((received == 2).all())


@fault("67a")
def waits_twice() -> bool:
    if dist.get_rank() == 0:
        work: Any = dist.isend(torch.ones(4), 1)
        work.wait()
        work.wait()
    else:
        dist.recv(torch.zeros(4), 0)
    return True


@fault("67b", **FULL)
def waits_twice_while_it_is_checked() -> None:
    if dist.get_rank() == 0:
        work: Any = dist.isend(torch.ones(4), 1)
        work.wait()
        work.wait()  # here
    else:
        dist.recv(torch.zeros(4), 0)


@fault("68", within_s=None)
def goes_on_after_a_time_out() -> None:
    if dist.get_rank() == 0:
        work: Any = dist.irecv(torch.zeros(4), 1)
        try:
            work.wait(dt.timedelta(seconds=0.3))
        except RuntimeError:
            dist.recv(torch.zeros(4), 1)  # here
    else:
        ringsim.compute(0.6)  # virtual time on simulated ranks
        dist.send(torch.ones(4), 0)


@fault("68b", within_s=None, limit_s=SHORT_S)
def tries_again_for_ever() -> None:
    while True:
        with contextlib.suppress(RuntimeError):
            dist.recv(torch.zeros(4), 1 - dist.get_rank())  # here


@fault("69", within_s=None, args=lambda: (os.getpid(),))
def the_user_interrupts(pid: int) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(4), 1)  # here
    else:
        time.sleep(0.3)
        os.kill(pid, signal.SIGINT)
        time.sleep(30)


@fault("70")
def two_threads_share_a_tag() -> None:
    def send(value: float) -> None:
        dist.send(torch.full((4,), value), 1)  # here

    if dist.get_rank() == 0:
        threads = [threading.Thread(target=send, args=(value,)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        time.sleep(0.2)  # until both threads send
        for _ in range(2):
            dist.recv(torch.zeros(4), 0)


@fault("71a")
def receives_from_anybody() -> bool:
    received = torch.zeros(4)
    if dist.get_rank() == 1:
        dist.send(torch.ones(4), 0)
        return True
    return dist.recv(received) == 1 and bool((received == 1).all())


@fault("71b")
def exchanges_in_a_batch() -> bool:
    peer, received = 1 - dist.get_rank(), torch.zeros(4)
    sent = torch.full((4,), float(dist.get_rank()))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    ):
        work.wait()
    return bool((received == peer).all())
