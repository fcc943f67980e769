"""Rules for point-to-point messages, of tensors and of Python objects."""

from __future__ import annotations

from typing import Any

import torch
from conformance import DTYPES, make, rule, same, strided


def neighbours(rank: int, size: int) -> tuple[int, int]:
    return (rank - 1) % size, (rank + 1) % size


def source_of(handle: Any) -> int:
    return (
        handle.source_rank()
        if hasattr(handle, "source_rank") and not isinstance(handle, torch.distributed.Work)
        else handle._source_rank()
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


def pass_on(
    dist: Any,
    rank: int,
    size: int,
    lay_out: Any = torch.clone,
    into: Any = torch.clone,
    named: str = "",
    **what: Any,
) -> None:
    """Sends a tensor to the next rank while one comes from the previous rank."""
    pred, succ = neighbours(rank, size)
    received = into(torch.zeros_like(make(pred, **what)))
    sending = dist.isend(lay_out(make(rank, **what)), **{f"{named}dst": succ})
    receiving = dist.irecv(received, **{f"{named}src": pred})
    sending.wait()
    receiving.wait()
    same(received.clone(), make(pred, **what))


@rule(least=2, each={"global ranks": "", "ranks within the group": "group_"})
def isend_and_irecv_go_to(dist: Any, rank: int, size: int, named: str) -> None:
    pass_on(dist, rank, size, named=named)


@rule(least=2, each={"recv": 3, "irecv": 4})
def anybody_may_send_and_is_named_by(dist: Any, rank: int, size: int, tag: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=tag)
        return
    sources = set()
    for _ in range(size - 1):
        token = torch.empty(1)
        if tag == 3:
            source = dist.recv(token, tag=tag)
        else:
            handle = dist.irecv(token, tag=tag)
            handle.wait()
            source = source_of(handle)
        assert token.item() == source
        sources.add(source)
    assert sources == set(range(1, size))


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
        for handle in [
            dist.isend(torch.tensor([float(number)]), 1, tag=8) for number in range(count)
        ]:
            handle.wait()
    elif rank == 1:
        received = [torch.empty(1) for _ in range(count)]
        for handle in [dist.irecv(tensor, 0, tag=8) for tensor in received]:
            handle.wait()
        assert [tensor.item() for tensor in received] == list(range(count))


@rule(least=2)
def a_batch_sends_and_receives_at_once_and_in_order(dist: Any, rank: int, size: int) -> None:
    pred, succ = neighbours(rank, size)
    down, up, later = torch.empty(6), torch.empty(6), torch.empty(6)
    handles = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, make(rank, salt=1), succ, tag=1),
            dist.P2POp(dist.isend, make(rank, salt=2), pred, tag=2),
            dist.P2POp(dist.irecv, down, pred, tag=1),
            dist.P2POp(dist.irecv, up, group_peer=succ, tag=2),
            dist.P2POp(dist.isend, make(rank, salt=3), succ, tag=1),
            dist.P2POp(dist.irecv, later, pred, tag=1),
        ]
    )
    for handle in handles:
        handle.wait()
    same(down, make(pred, salt=1))
    same(up, make(succ, salt=2))
    same(later, make(pred, salt=3))


@rule(least=2, each={"empty": (0, 3), "number": (), "cube": (2, 3, 4), "large": (1 << 20,)})
def every_shape_travels(dist: Any, rank: int, size: int, shape: tuple[int, ...]) -> None:
    pass_on(dist, rank, size, shape=shape)


@rule(least=2, each={name: getattr(torch, name) for name in DTYPES})
def messages_carry(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    pass_on(dist, rank, size, dtype=dtype)


@rule(least=2)
def strided_tensors_are_sent(dist: Any, rank: int, size: int) -> None:
    pass_on(dist, rank, size, lay_out=strided)


@rule(least=2)
def strided_tensors_are_received(dist: Any, rank: int, size: int) -> None:
    pass_on(dist, rank, size, into=strided)


# -- objects


def thing(rank: int) -> dict[str, Any]:
    """Returns an object whose size differs from rank to rank."""
    return {"rank": rank, "text": "x" * 100 * rank, "list": list(range(rank))}


@rule(least=2, each={"one by one": {}, "in a batch": {"use_batch": True}})
def object_lists_are_sent_and_received(
    dist: Any, rank: int, size: int, how: dict[str, Any]
) -> None:
    if rank == 0:
        dist.send_object_list([thing(2), "two", None], 1, **how)
    elif rank == 1:
        received: list[Any] = [None] * 3
        assert dist.recv_object_list(received, 0, **how) == 0
        assert received == [thing(2), "two", None]


@rule()
def objects_are_broadcast(dist: Any, rank: int, size: int) -> None:
    for root in range(size):
        objects = [thing(root), root] if rank == root else [None, None]
        dist.broadcast_object_list(objects, root)
        assert objects == [thing(root), root]


@rule()
def objects_are_gathered_everywhere(dist: Any, rank: int, size: int) -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, thing(rank))
    assert objects == [thing(each) for each in range(size)]


@rule()
def objects_are_gathered(dist: Any, rank: int, size: int) -> None:
    for root in range(size):
        objects: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(thing(rank), objects, root)
        assert objects is None or objects == [thing(each) for each in range(size)]


@rule()
def objects_are_scattered(dist: Any, rank: int, size: int) -> None:
    for root in range(size):
        objects: list[Any] = [None]
        dist.scatter_object_list(
            objects, [thing(each) for each in range(size)] if rank == root else None, root
        )
        assert objects == [thing(rank)]


@rule(least=2)
def objects_travel_in_a_group(dist: Any, rank: int, size: int) -> None:
    group = dist.new_group([size - 1, 0])
    if rank in (0, size - 1):
        everybodys: list[Any] = [None] * 2
        dist.all_gather_object(everybodys, thing(rank), group=group)
        assert everybodys == [thing(0), thing(size - 1)]
        objects = [thing(rank)]
        dist.broadcast_object_list(objects, group=group, group_src=1)
        assert objects == [thing(size - 1)]
