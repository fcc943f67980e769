"""Rules for groups."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from conformance import make, rule, same


def total(ranks: list[int]) -> torch.Tensor:
    return torch.stack([make(rank) for rank in ranks]).sum(0)


@rule()
def the_world_is_a_group(dist: Any, rank: int, size: int) -> None:
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    group = dist.new_group()
    assert dist.get_process_group_ranks(group) == list(range(size))
    assert (group.size(), group.rank()) == (size, rank)
    assert isinstance(group.group_name, str)


@rule(least=2)
def a_subset_reduces_on_its_own(dist: Any, rank: int, size: int) -> None:
    ranks = list(range(1, size))
    group = dist.new_group(ranks)
    if rank not in ranks:
        assert dist.get_rank(group) == dist.get_world_size(group) == -1
        return
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank - 1, size - 1)
    tensor = make(rank)
    dist.all_reduce(tensor, group=group)
    same(tensor, total(ranks))
    tensors = [torch.empty(6) for _ in ranks]
    dist.all_gather(tensors, make(rank), group=group)
    same(tensors[-1], make(size - 1))


@rule(least=2)
def outside_a_group_nothing_happens(dist: Any, rank: int, size: int) -> None:
    group = dist.new_group([0])
    if rank == 0:
        return
    tensor = make(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backend may warn, as torch does
        assert dist.all_reduce(tensor, group=group) is None
        assert dist.broadcast(tensor, 0, group=group, async_op=True) is None
        assert dist.barrier(group=group) is None
    same(tensor, make(rank))


@rule(least=2, each={"sorted": True, "as given": False})
def the_order_of_a_group_is(dist: Any, rank: int, size: int, ordered: bool) -> None:
    ranks = list(range(1, size)) if ordered else list(range(1, size))[::-1]
    group = dist.new_group(list(range(1, size))[::-1], sort_ranks=ordered)
    if rank == 0:
        return
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_rank(group) == ranks.index(rank)
    assert [dist.get_global_rank(group, place) for place in range(size - 1)] == ranks
    assert [ranks[dist.get_group_rank(group, each)] for each in ranks] == ranks
    tensors = [torch.empty(6) for _ in ranks]
    dist.all_gather(tensors, make(rank), group=group)
    same(tensors[0], make(ranks[0]))


@rule(least=2)
def roots_and_peers_are_global_ranks(dist: Any, rank: int, size: int) -> None:
    group = dist.new_group(list(range(1, size)))
    if rank == 0:
        return
    for chosen in ({"src": size - 1}, {"group_src": size - 2}):
        tensor = make(rank)
        dist.broadcast(tensor, group=group, **chosen)
        same(tensor, make(size - 1))
    if size > 2 and rank in (1, size - 1):
        tensor = torch.empty(6)
        if rank == 1:
            dist.send(make(1), size - 1, group)
            dist.send(make(1, salt=1), group=group, group_dst=size - 2)
        else:
            for salt, chosen in enumerate(({"src": 1}, {"group_src": 0})):
                assert dist.recv(tensor, group=group, **chosen) == 1
                same(tensor, make(1, salt=salt))


@rule(least=3)
def a_recv_from_anybody_in_a_group_gives_the_global_rank(dist: Any, rank: int, size: int) -> None:
    group = dist.new_group(list(range(1, size)))
    if rank == 1:
        for _ in range(size - 2):
            tensor = torch.empty(1)
            assert dist.recv(tensor, group=group) == tensor.item()
    elif rank > 1:
        dist.send(torch.tensor([float(rank)]), 1, group)


@rule(least=2)
def two_groups_over_the_same_ranks_keep_messages_apart(dist: Any, rank: int, size: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        for handle in [
            dist.isend(make(0, salt=1), 1, first),
            dist.isend(make(0, salt=2), 1, second),
        ]:
            handle.wait()
    elif rank == 1:
        late, early = torch.empty(6), torch.empty(6)
        handles = [dist.irecv(late, 0, second), dist.irecv(early, 0, first)]
        for handle in handles:
            handle.wait()
        same(early, make(0, salt=1))
        same(late, make(0, salt=2))


@rule(least=3)
def groups_that_overlap_work_at_once(dist: Any, rank: int, size: int) -> None:
    pairs = [[each, (each + 1) % size] for each in range(size)]
    groups = [dist.new_group(pair) for pair in pairs]
    handles = []
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            tensor = make(rank)
            handles.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, pair))
    for handle, tensor, pair in reversed(handles):
        handle.wait()
        same(tensor, total(pair))


@rule()
def a_group_of_one_talks_to_itself(dist: Any, rank: int, size: int) -> None:
    groups = [dist.new_group([each]) for each in range(size)]
    mine, tensor = groups[rank], make(rank)
    dist.all_reduce(tensor, group=mine)
    dist.broadcast(tensor, rank, group=mine)
    dist.barrier(group=mine)
    tensors = [torch.empty(6)]
    dist.all_gather(tensors, tensor, group=mine)
    same(tensors[0], make(rank))


@rule()
def a_destroyed_group_leaves_the_others_at_work(dist: Any, rank: int, size: int) -> None:
    first, second = dist.new_group(), dist.new_group()
    dist.barrier(group=first)
    dist.destroy_process_group(first)
    tensor = make(rank)
    dist.all_reduce(tensor, group=second)
    same(tensor, total(list(range(size))))
    dist.barrier()


@rule()
def subgroups_are_neighbours(dist: Any, rank: int, size: int) -> None:
    own, groups = dist.new_subgroups(1)
    assert (dist.get_process_group_ranks(own), len(groups)) == ([rank], size)
