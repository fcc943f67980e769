"""Rules of wrong arguments: a Python error on every rank that calls, and the ranks can go on."""

from __future__ import annotations

from typing import Any

import torch
from conformance import make, refused, rule


def after(dist: Any, rank: int, size: int) -> None:
    """Fails unless the ranks can still talk."""
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


@rule(each={"too high": lambda size: size, "negative": lambda size: -1, "no integer": lambda size: "1", "none": lambda size: None})
def a_receiver_must_exist(dist: Any, rank: int, size: int, wrong: Any) -> None:
    refused(lambda: dist.isend(make(rank), wrong(size)))
    refused(lambda: dist.send(make(rank), wrong(size)))
    after(dist, rank, size)


@rule(each={"too high": lambda size: size, "negative": lambda size: -1, "no integer": lambda size: "1"})
def a_sender_must_exist(dist: Any, rank: int, size: int, wrong: Any) -> None:
    refused(lambda: dist.irecv(make(rank), wrong(size)))
    after(dist, rank, size)


@rule()
def nobody_sends_to_itself(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.send(make(rank), rank))
    after(dist, rank, size)


@rule(least=2)
def a_peer_is_given_once(dist: Any, rank: int, size: int) -> None:
    peer = (rank + 1) % size
    refused(lambda: dist.isend(make(rank), peer, group_dst=peer))
    refused(lambda: dist.irecv(make(rank), peer, group_src=peer))
    refused(lambda: dist.broadcast(make(rank), 0, group_src=0))
    after(dist, rank, size)


@rule(least=2)
def a_tag_is_not_negative(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.isend(make(rank), (rank + 1) % size, tag=-1))
    refused(lambda: dist.irecv(make(rank), (rank + 1) % size, tag=-1))
    after(dist, rank, size)


@rule(least=2)
def a_message_is_a_tensor(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.isend([1.0], (rank + 1) % size))
    refused(lambda: dist.irecv("text", (rank + 1) % size))
    after(dist, rank, size)


@rule()
def a_collective_takes_tensors(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.all_reduce(1.0))
    refused(lambda: dist.broadcast("text", 0))
    refused(lambda: dist.all_gather([make(rank)] * (size - 1) + ["text"], make(rank)))
    after(dist, rank, size)


@rule()
def a_root_must_exist(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.broadcast(make(rank), size))
    refused(lambda: dist.broadcast(make(rank), -1))
    refused(lambda: dist.reduce(make(rank), size))
    after(dist, rank, size)


@rule()
def all_gather_needs_a_place_for_each(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.all_gather([torch.empty(6)] * (size + 1), make(rank)))
    refused(lambda: dist.all_gather([torch.empty(6) for _ in range(size - 1)], make(rank)))
    after(dist, rank, size)


@rule()
def all_gather_needs_one_dtype(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.all_gather([torch.empty(6, dtype=torch.int32) for _ in range(size)], make(rank)))
    refused(lambda: dist.all_gather_into_tensor(torch.empty(6 * size, dtype=torch.float64), make(rank)))
    after(dist, rank, size)


@rule()
def all_gather_needs_one_shape(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.all_gather([torch.empty(7) for _ in range(size)], make(rank)))
    refused(lambda: dist.all_gather_into_tensor(torch.empty(6 * size + 1), make(rank)))
    after(dist, rank, size)


@rule()
def all_to_all_needs_one_tensor_for_each(dist: Any, rank: int, size: int) -> None:
    tensors = [torch.empty(6) for _ in range(size + 1)]
    refused(lambda: dist.all_to_all(tensors, tensors[:size]))
    refused(lambda: dist.all_to_all_single(torch.empty(2 * size), make(rank, (2 * size,)), [2] * size, [1] * size))
    refused(lambda: dist.all_to_all_single(torch.empty(2 * size, dtype=torch.int32), make(rank, (2 * size,))))
    after(dist, rank, size)


@rule()
def reduce_scatter_needs_one_tensor_for_each(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.reduce_scatter(torch.empty(6), [make(rank)] * (size + 1)))
    refused(lambda: dist.reduce_scatter_tensor(torch.empty(6), make(rank, (6 * size + 1,))))
    after(dist, rank, size)


@rule()
def a_root_needs_its_list(dist: Any, rank: int, size: int) -> None:
    mine = [dist.new_group([each]) for each in range(size)][rank]  # alone, so that nobody waits for a root that raises
    refused(lambda: dist.gather(make(rank), None, rank, group=mine))
    refused(lambda: dist.gather(make(rank), [torch.empty(6)] * 2, rank, group=mine))
    refused(lambda: dist.scatter(make(rank), None, rank, group=mine))
    refused(lambda: dist.scatter(make(rank), [make(rank)] * 2, rank, group=mine))
    after(dist, rank, size)


@rule()
def a_group_has_ranks_that_exist(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.new_group([0, size]))
    refused(lambda: dist.new_group([0, 0]))
    after(dist, rank, size)


@rule(least=2)
def a_batch_is_a_list_of_p2p_ops(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.batch_isend_irecv([]))
    refused(lambda: dist.batch_isend_irecv([make(rank)]))
    refused(lambda: dist.P2POp(dist.all_reduce, make(rank), (rank + 1) % size))
    after(dist, rank, size)


@rule()
def a_group_is_made_by_new_group(dist: Any, rank: int, size: int) -> None:
    refused(lambda: dist.all_reduce(make(rank), group="the world"))
    after(dist, rank, size)
