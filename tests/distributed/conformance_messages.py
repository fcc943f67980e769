"""Rules of point-to-point messages."""

from __future__ import annotations

from typing import Any

import torch
from conformance import make, rule, same, strided


def neighbours(rank: int, size: int) -> tuple[int, int]:
    return (rank - 1) % size, (rank + 1) % size


def source_of(handle: Any) -> int:
    return (
        handle.source_rank() if hasattr(handle, "source_rank") and not isinstance(handle, torch.distributed.Work) else handle._source_rank()
    )


@rule(least=2)
def send_and_recv_pass_a_token_round(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    token = torch.zeros(1)
    if rank == 0:
        dist.send(token, succ)
        dist.recv(token, pred)
        assert token.item() == size - 1
    else:
        assert dist.recv(token, pred) == pred
        dist.send(token + 1, succ)


@rule(least=2)
def isend_and_irecv_exchange_with_both_neighbours(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    received = torch.empty(6)
    receiving = dist.irecv(received, pred)
    sending = dist.isend(make(rank), succ)
    receiving.wait()
    sending.wait()
    same(received, make(pred))


@rule(least=2)
def peers_may_be_named_within_the_group(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    received = torch.empty(6)
    receiving = dist.irecv(received, group_src=pred)
    dist.isend(make(rank), group_dst=succ).wait()
    receiving.wait()
    same(received, make(pred))


@rule(least=2)
def recv_from_anybody_says_who_sent(dist: Any, rank: int, size: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=3)
        return
    sources = set()
    for _ in range(size - 1):
        token = torch.empty(1)
        source = dist.recv(token, tag=3)
        assert token.item() == source
        sources.add(source)
    assert sources == set(range(1, size))


@rule(least=2)
def irecv_from_anybody_says_who_sent(dist: Any, rank: int, size: int) -> None:
    if rank:
        dist.isend(torch.tensor([float(rank)]), 0, tag=4).wait()
        return
    tokens = [torch.empty(1) for _ in range(size - 1)]
    for token in tokens:
        handle = dist.irecv(token, tag=4)
        handle.wait()
        assert token.item() == source_of(handle)
    assert {token.item() for token in tokens} == set(range(1, size))


@rule(least=2)
def tags_keep_messages_apart_in_any_order(dist: Any, rank: int, size: int) -> None:
    if rank == 0:
        handles = [dist.isend(make(0, salt=tag), 1, tag=tag) for tag in (5, 7, 6)]
        for handle in handles:
            handle.wait()
    elif rank == 1:
        received = {tag: torch.empty(6) for tag in (6, 5, 7)}
        handles = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in received.items()]
        for handle in reversed(handles):
            handle.wait()
        for tag, tensor in received.items():
            same(tensor, make(0, salt=tag))


@rule(least=2)
def messages_of_one_tag_arrive_in_order(dist: Any, rank: int, size: int) -> None:
    count = 20
    if rank == 0:
        for handle in [dist.isend(torch.tensor([float(number)]), 1, tag=8) for number in range(count)]:
            handle.wait()
    elif rank == 1:
        received = [torch.empty(1) for _ in range(count)]
        for handle in [dist.irecv(tensor, 0, tag=8) for tensor in received]:
            handle.wait()
        assert [tensor.item() for tensor in received] == list(range(count))


@rule(least=2)
def a_batch_sends_and_receives_at_once(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    down, up = torch.empty(6), torch.empty(6)
    handles = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, make(rank, salt=1), succ, tag=1),
            dist.P2POp(dist.isend, make(rank, salt=2), pred, tag=2),
            dist.P2POp(dist.irecv, down, pred, tag=1),
            dist.P2POp(dist.irecv, up, group_peer=succ, tag=2),
        ]
    )
    for handle in handles:
        handle.wait()
    same(down, make(pred, salt=1))
    same(up, make(succ, salt=2))


@rule(least=2)
def a_batch_keeps_the_order_of_one_pair(dist: Any, rank: int, size: int) -> None:
    if rank > 1:
        return
    peer, received = 1 - rank, [torch.empty(6) for _ in range(3)]
    ops = [dist.P2POp(dist.irecv, tensor, peer) for tensor in received]
    ops += [dist.P2POp(dist.isend, make(rank, salt=number), peer) for number in range(3)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    for number, tensor in enumerate(received):
        same(tensor, make(peer, salt=number))


@rule(least=2)
def large_messages_cross(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    shape = (1 << 20,)
    sent, received = make(rank, shape), torch.empty(shape)
    sending, receiving = dist.isend(sent, succ), dist.irecv(received, pred)
    sending.wait()
    receiving.wait()
    same(received, make(pred, shape))


@rule(least=2, each={"empty": (0, 3), "number": (), "cube": (2, 3, 4)})
def every_shape_travels(dist: Any, rank: int, size: int, shape: tuple[int, ...]) -> None:
    pred, succ = neighbours(rank, size)
    received = torch.empty(shape)
    receiving = dist.irecv(received, pred)
    dist.isend(make(rank, shape), succ).wait()
    receiving.wait()
    same(received, make(pred, shape))


@rule(least=2)
def strided_tensors_are_sent(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    received = torch.empty(6)
    receiving = dist.irecv(received, pred)
    dist.isend(strided(make(rank)), succ).wait()
    receiving.wait()
    same(received, make(pred))


@rule(least=2)
def strided_tensors_are_received(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    received = strided(torch.zeros(6))
    receiving = dist.irecv(received, pred)
    dist.isend(make(rank), succ).wait()
    receiving.wait()
    same(received.clone(), make(pred))
