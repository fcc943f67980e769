"""Collectives, groups and the rendezvous: rows 24 to 44 and 52 to 55 of faults.md."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault_programs import SLOW_S, fault
from rank_server import free_port

import ringsim

HERE = "127.0.0.1"
SHORT_S = 1.0  # the timeout of a rendezvous that must fail
# ranks that meet by themselves, at this port
MEETS: dict[str, Any] = {"ring": False, "within_s": None, "args": lambda: (free_port(),)}


def my_rank() -> int:
    return int(os.environ["RANK"])


def meet(
    port: int,
    world_size: int,
    rank: int,
    *,
    head: str = HERE,
    device: str = "cpu",
    timeout_s: float = SHORT_S,
) -> None:
    ringsim.initialize_distributed(head, port, world_size, rank, 0, device, timeout_s=timeout_s)


@fault("24", size=3, within_s=SLOW_S)
def leaves_before_a_group_is_made() -> None:
    if dist.get_rank() != 1:
        dist.new_group([0, 1, 2])  # here


@fault("25a", size=3, within_s=SLOW_S)
def one_is_missing_in_the_barrier() -> None:
    if dist.get_rank():
        dist.barrier()  # here


@fault("25b", size=3, within_s=SLOW_S)
def one_is_missing_in_the_monitored_barrier() -> None:
    if dist.get_rank() < 2:
        dist.monitored_barrier()  # here


# the calls of rank 0 and of rank 1; tests/golden/faults/simulated.txt quotes these lines
# fmt: off
# ruff: disable[E501]
COLLECTIVES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "26a": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.broadcast(torch.zeros(4), 0)),
    "26b": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.barrier()),
    "27": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.all_reduce(torch.zeros(8))),
    "28a": (lambda: dist.all_reduce(torch.zeros(2, 3)), lambda: dist.all_reduce(torch.zeros(3, 2))),
    "28b": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.all_reduce(torch.zeros(4, dtype=torch.int32))),
    "28c": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX)),
    "29": (lambda: dist.broadcast(torch.zeros(4), 0), lambda: dist.broadcast(torch.zeros(4), 1)),
}
# ruff: enable[E501]
# fmt: on


def unlike_collectives(row: str) -> None:
    COLLECTIVES[row][dist.get_rank()]()


for _row in COLLECTIVES:
    fault(_row, within_s=SLOW_S, args=lambda row=_row: (row,), blame=COLLECTIVES[_row])(
        unlike_collectives
    )  # type: ignore[misc]


@fault("26c", within_s=SLOW_S)
def a_barrier_against_a_recv() -> None:
    if dist.get_rank():
        dist.barrier()  # here
    else:
        dist.recv(torch.zeros(4), 1)  # here


@fault("26d", size=3, within_s=SLOW_S)
def a_forgotten_recv_before_a_barrier() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4), 1)  # here
    dist.barrier()  # here


@fault("26e", within_s=SLOW_S)
def a_reduction_that_is_waited_for_late() -> None:
    tensor = torch.zeros(4)
    if dist.get_rank() == 0:
        work: Any = dist.all_reduce(tensor, async_op=True)  # here
        time.sleep(5)  # longer than the patience with collectives; meanwhile, nothing is recorded
        work.wait()
    else:
        dist.broadcast(tensor, 0)  # here


# the number of ranks, and the rendezvous of each
MEETINGS: dict[str, tuple[int, Callable[[int, int], None]]] = {
    "30": (3, lambda port, rank: meet(port, 2 if rank == 0 else 3, rank)),  # rank 0 expects fewer
    "31a": (2, lambda port, rank: meet(port, 2 + rank, rank)),  # rank 1 expects more
    "31b": (2, lambda port, rank: meet(port, 3 - rank, rank)),  # rank 0 expects more
    "32a": (3, lambda port, rank: meet(port, 3, min(rank, 1))),  # two are rank 1
    "32b": (2, lambda port, _: meet(port, 2, 0)),  # two are rank 0
    "33a": (2, lambda port, _: meet(port, 2, 2)),
    "33b": (2, lambda port, _: meet(port, 2, -1)),
    "33c": (2, lambda port, _: meet(port, 2, "0")),  # type: ignore[arg-type]
    "34": (2, lambda port, rank: meet(port if rank == 0 else 1, 2, rank)),  # another port
    "36": (4, lambda port, rank: meet(port, 2, rank % 2)),  # two jobs on one port
    "37a": (2, lambda port, _: meet(port, 2, 1, head="192.0.2.1")),  # an address without a machine
    "37b": (2, lambda port, _: meet(port, 2, 1, head="no-such-machine.invalid")),
    "39a": (3, lambda port, rank: meet(port, 3, rank) if rank < 2 else None),  # rank 2 never comes
    "39b": (3, lambda port, rank: meet(port, 3, rank) if rank > 0 else None),  # rank 0 never comes
    "42": (2, lambda port, rank: meet(port, 2, rank, device="tpu")),
}


def meets(row: str, port: int) -> None:
    MEETINGS[row][1](port, my_rank())


for _row, (_size, _meet) in MEETINGS.items():
    fault(
        _row,
        size=_size,
        ring=False,
        within_s=None,
        args=lambda row=_row: (row, free_port()),
        blame=[_meet],
    )(meets)  # type: ignore[misc]


@fault("35", size=2, **MEETS)
def a_stranger_at_the_port(_: int) -> None:
    with socket.create_server((HERE, 0)) as stranger:
        if my_rank() == 1:
            meet(stranger.getsockname()[1], 2, 1)  # here


@fault("38", size=2, **MEETS)
def an_interface_that_is_not_there(port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    meet(port, 2, my_rank())  # here


@fault("40", size=2, **MEETS)
def a_backend_that_is_none(_: int) -> None:
    dist.init_process_group("smoke-signals")  # here


@fault("41", size=2, **MEETS)
def gpus_where_there_are_none(port: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    meet(port, 2, my_rank(), device="gpu")  # here


@fault("43", size=3, within_s=SLOW_S)
def groups_in_another_order() -> None:
    pairs = [[0, 1], [1, 2]]
    for pair in pairs if dist.get_rank() == 0 else pairs[::-1]:
        dist.new_group(pair)  # here


@fault("44a", size=3, within_s=SLOW_S)
def groups_of_other_members() -> None:
    dist.new_group([0, 1] if dist.get_rank() == 0 else [0, 1, 2])  # here


@fault("44b", size=3, within_s=SLOW_S)
def a_member_makes_no_group() -> None:
    if dist.get_rank():
        dist.new_group([0, 1])  # here
    dist.barrier()  # here


@fault("44c", size=3, within_s=SLOW_S)
def an_outsider_makes_no_group() -> None:
    if dist.get_rank() < 2:
        dist.new_group([0, 1])


@fault("52", size=1)
def a_ring_of_one() -> bool:
    ring = ringsim.current_ring()
    return (ring.pred, ring.succ, ring.pred_group, ring.succ_group) == (0, 0, None, None)


@fault("53a", size=2)
def joins_twice() -> None:
    meet(free_port(), 2, 1 - dist.get_rank())  # here


@fault("53b", size=2, ring=False)
def sends_before_it_joins() -> None:
    dist.send(torch.zeros(4), 1 - my_rank())  # here


@fault("53c", size=2)
def sends_after_it_left() -> None:
    peer = 1 - dist.get_rank()
    dist.destroy_process_group()
    dist.send(torch.zeros(4), peer)  # here


@fault("54", size=2, **MEETS)
def joins_again_and_again(port: int) -> bool:
    from ringsim import destroy_distributed

    for _ in range(20):
        meet(port, 2, my_rank(), timeout_s=20)
        total = torch.ones(1)
        dist.all_reduce(total)
        destroy_distributed()
    return bool(total == 2)


@fault("55a")
def takes_nothing_down() -> bool:
    dist.barrier()
    return True


@fault("55b")
def one_takes_its_groups_down_early() -> bool:
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    return True
