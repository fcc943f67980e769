"""Messages that do not match, and ranks that are gone.

They are rows 1 to 7, 15 to 23 and 47 to 49 of tests/distributed/faults.md.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from fault_programs import SHORT_S, SLOW_S, die_within, fault, large

import ringsim

LONG_S = 30  # longer than the limit of any of these runs
OWN_LIMIT = dt.timedelta(seconds=0.3)
SHORT = {"limit_s": 2.0}  # for programs that only a limit ends


def tensor(count: int = 4) -> Any:
    return torch.zeros(count)


@fault("1")
def both_receive() -> None:
    dist.recv(tensor(), 1 - dist.get_rank())  # here


@fault("2a")
def both_send_little() -> None:
    dist.send(tensor(1000), 1 - dist.get_rank())  # here


@fault("2b")
def both_send_much() -> None:
    dist.send(tensor(1 << 24), 1 - dist.get_rank())  # here


@fault("3a", size=4)
def all_send_round_the_ring() -> None:
    ring = ringsim.current_ring()
    dist.send(tensor(), ring.succ, group=ring.succ_group)  # here
    dist.recv(tensor(), ring.pred, group=ring.pred_group)


@fault("3b", size=3)
def all_receive_round_the_ring() -> None:
    ring = ringsim.current_ring()
    dist.recv(tensor(), ring.pred, group=ring.pred_group)  # here
    dist.send(tensor(), ring.succ, group=ring.succ_group)


@fault("4a")
def another_tag() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 1, tag=1)  # here
    else:
        dist.recv(tensor(), 0, tag=2)  # here


@fault("4b")
def another_tag_though_both_sides_are_posted() -> None:
    me = dist.get_rank()
    ops = [
        dist.P2POp(dist.isend, tensor(), 1 - me, tag=me),
        dist.P2POp(dist.irecv, tensor(), 1 - me, tag=me),
    ]
    works = dist.batch_isend_irecv(ops)  # here
    for work in works:
        work.wait()  # here


@fault("5", size=3)
def another_peer() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 2)  # here
    elif dist.get_rank() == 1:
        dist.recv(tensor(), 0)


@fault("6a")
def nobody_receives_and_the_peer_is_gone() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 1)  # here


@fault("6b", within_s=None, **SHORT)
def nobody_receives_and_the_peer_computes() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 1)  # here
    time.sleep(LONG_S)


@fault("6c", within_s=None)
def a_limit_on_a_message_passes_and_the_peer_computes() -> None:
    if dist.get_rank() == 0:
        dist.irecv(tensor(), 1).wait(OWN_LIMIT)  # here
    ringsim.compute(SHORT_S)


@fault("6d", within_s=None)
def a_limit_on_a_collective_passes_and_the_peer_computes() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(tensor(), async_op=True).wait(OWN_LIMIT)  # here
    ringsim.compute(SHORT_S)


@fault("7a")
def nobody_sends_and_the_peer_is_gone() -> None:
    if dist.get_rank() == 1:
        dist.recv(tensor(), 0)  # here


@fault("7b", within_s=None, **SHORT)
def nobody_sends_and_the_peer_computes() -> None:
    if dist.get_rank() == 1:
        dist.recv(tensor(), 0)  # here
    time.sleep(LONG_S)


@fault("15")
def alike_and_in_another_order() -> bool:
    first, second = torch.ones(4), torch.full((4,), 2.0)
    if dist.get_rank() == 0:
        dist.send(first, 1)
        dist.send(second, 1)
        return True
    dist.recv(second, 0)
    dist.recv(first, 0)
    return bool(first[0] == 2.0 and second[0] == 1.0)  # exchanged


@fault("16")
def unlike_and_in_another_order() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(4), 1)  # here
        dist.send(tensor(8), 1)
    else:
        dist.recv(tensor(8), 0)  # here
        dist.recv(tensor(4), 0)


@fault("17")
def tags_in_another_order() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 1, tag=1)  # here
        dist.send(tensor(), 1, tag=2)
    else:
        dist.recv(tensor(), 0, tag=2)  # here
        dist.recv(tensor(), 0, tag=1)


@fault("18", size=3)
def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")  # here
    dist.recv(tensor(), 1)


@fault("19", within_s=None, **SHORT)
def raises_and_lives_on() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.recv(tensor(), 1)  # here
    except ValueError:
        time.sleep(LONG_S)


@fault("20")
def killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(tensor(), 1)  # here


@fault("21", within_s=SLOW_S)  # the kill itself comes a moment after the last event
def killed_within_a_message() -> None:
    if dist.get_rank() == 0:
        dist.send(large(1), 1)  # here
    else:
        message = large(0)
        die_within(message)
        dist.recv(message, 0)
        time.sleep(LONG_S)


@fault("22", within_s=None, **SHORT)
def stopped() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.recv(tensor(), 1)  # here


@fault("23a")
def leaves() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    dist.recv(tensor(), 1)  # here


@fault("23b")
def leaves_with_a_code() -> None:
    if dist.get_rank() == 1:
        sys.exit(7)  # here
    dist.recv(tensor(), 1)


@fault("47a")
def another_group() -> None:
    ring = ringsim.current_ring()
    if ring.rank == 0:
        dist.send(tensor(), 1, group=ring.succ_group)  # here
    else:
        dist.recv(tensor(), 0)  # here


@fault("47b", size=3)
def another_group_round_the_ring() -> None:
    ring = ringsim.current_ring()
    received: Any = dist.irecv(tensor(), ring.pred)  # here
    sent: Any = dist.isend(tensor(), ring.succ, group=ring.succ_group)  # here
    sent.wait()  # here
    received.wait()


@fault("48")
def each_its_own_group() -> None:
    ring = ringsim.current_ring()
    if ring.rank == 0:
        dist.send(tensor(), 1, group=ring.succ_group)  # here
    else:
        dist.recv(tensor(), 0, group=ring.succ_group)  # here


@fault("49a")
def sends_to_itself() -> None:
    if dist.get_rank() == 0:
        dist.send(tensor(), 0)  # here


@fault("49b")
def receives_from_itself() -> None:
    if dist.get_rank() == 0:
        dist.recv(tensor(), 0)  # here
