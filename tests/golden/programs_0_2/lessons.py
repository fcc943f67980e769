"""Workers of lessons 00, 01, 02 and 05.

Copied from version 0.2.0, to run unchanged: do not edit."""

import os
import time

import torch
from torch import distributed as dist
from torch import nn

import ringsim
from ringsim.pipeline import recv_activation, recv_gradient, send_activation, send_gradient

# -- lesson 00


def worker():
    ring = ringsim.current_ring()
    print(f"I am rank {ring.rank} of {ring.world_size}, in process {os.getpid()}", force=True)
    return ring.rank**2


def quiet_worker():
    print("said by rank", ringsim.current_ring().rank)


seen = []


def remember():
    seen.append(ringsim.current_ring().rank)
    return seen


def work_and_pass():
    ring = ringsim.current_ring()
    with ringsim.span("work"):
        time.sleep(0.020 * (ring.rank + 1))
    mine = torch.tensor([float(ring.rank)])
    sent = dist.isend(mine, ring.succ, group=ring.succ_group)
    received = torch.empty(1)
    dist.recv(received, ring.pred, group=ring.pred_group)
    sent.wait()
    return received.item()


layers = ["embedding", "attention", "mlp"]


def careless():
    ring = ringsim.current_ring()
    with ringsim.span("load"):
        time.sleep(0.005)
        name = layers[ring.rank]
    length = torch.tensor([float(len(name))])
    sent = dist.isend(length, ring.succ, group=ring.succ_group)
    dist.recv(length, ring.pred, group=ring.pred_group)
    sent.wait()


def sum_share_solution(numbers):
    ring = ringsim.current_ring()
    with ringsim.span("share"):
        return sum(numbers[ring.rank :: ring.world_size])


# -- lesson 01


def pass_once():
    ring = ringsim.current_ring()
    if ring.world_size == 1:
        return None  # nobody to talk to
    mine = torch.tensor([float(ring.rank)])
    sent = dist.isend(mine, ring.succ, group=ring.succ_group)
    received = torch.empty(1)
    dist.recv(received, ring.pred, group=ring.pred_group)
    sent.wait()
    return received.item()


def my_groups():
    ring = ringsim.current_ring()
    return dist.get_process_group_ranks(ring.pred_group), dist.get_process_group_ranks(ring.succ_group)


def pass_without_groups():
    ring = ringsim.current_ring()
    mine = torch.tensor([float(ring.rank)])
    sent = dist.isend(mine, ring.succ)
    received = torch.empty(1)
    dist.recv(received, ring.pred)
    sent.wait()
    return received.item()


def pass_round_solution(token):
    ring = ringsim.current_ring()
    total = token.clone()
    for _ in range(ring.world_size - 1):
        sent = dist.isend(token, ring.succ, group=ring.succ_group)
        received = torch.empty_like(token)
        dist.recv(received, ring.pred, group=ring.pred_group)
        sent.wait()
        total += received
        token = received
    return total


def list_pairs():
    return [pair for name, pair in ringsim.current_ring().group_pairs]


# -- lesson 02


def all_send_first(length=1):
    ring = ringsim.current_ring()
    mine, received = torch.zeros(length), torch.zeros(length)
    dist.send(mine, ring.succ, group=ring.succ_group)
    dist.recv(received, ring.pred, group=ring.pred_group)


def exchange_in_order(order, length=1):
    ring = ringsim.current_ring()
    mine, received = torch.full((length,), float(ring.rank)), torch.zeros(length)
    first = order[ring.rank]
    for step in (first, "R" if first == "S" else "S"):
        if step == "S":
            dist.send(mine, ring.succ, group=ring.succ_group)
        else:
            dist.recv(received, ring.pred, group=ring.pred_group)


def by_order_solution(mine):
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    if ring.rank == 0:
        dist.recv(received, ring.pred, group=ring.pred_group)
        dist.send(mine, ring.succ, group=ring.succ_group)
    else:
        dist.send(mine, ring.succ, group=ring.succ_group)
        dist.recv(received, ring.pred, group=ring.pred_group)
    return received


def by_isend_solution(mine):
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    sent = dist.isend(mine, ring.succ, group=ring.succ_group)
    dist.recv(received, ring.pred, group=ring.pred_group)
    sent.wait()
    return received


def by_batch_solution(mine):
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, ring.succ), dist.P2POp(dist.irecv, received, ring.pred)]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    return received


# -- lesson 05

torch.manual_seed(0)
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
data = torch.randn(3, 4)


def on_stage_0(layer):
    with ringsim.span("forward", stage=0, microbatch=0):
        y = layer(data)
    send_activation(y, microbatch=0)
    grad = recv_gradient(microbatch=0)
    with ringsim.span("backward", stage=0, microbatch=0):
        y.backward(grad)


def on_stage_1(layer):
    x = recv_activation(microbatch=0).requires_grad_()
    with ringsim.span("forward", stage=1, microbatch=0):
        loss = layer(x).square().mean()
    with ringsim.span("backward", stage=1, microbatch=0):
        loss.backward()
    send_gradient(x.grad, microbatch=0)


def one_microbatch():
    rank = ringsim.current_ring().rank
    torch.manual_seed(0)
    layer = [nn.Linear(4, 4), nn.Linear(4, 1)][rank]
    for _ in range(2):  # the first backward pass of a process loads modules of torch; the picture is of the last step
        layer.zero_grad()
        with ringsim.span("step by hand"):
            on_stage_0(layer) if rank == 0 else on_stage_1(layer)
    return layer.weight.grad
