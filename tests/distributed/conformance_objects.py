"""Rules of Python objects."""

from __future__ import annotations

from typing import Any

from conformance import rule


def thing(rank: int) -> dict[str, Any]:
    """An object whose size differs from rank to rank."""
    return {"rank": rank, "text": "x" * 100 * rank, "list": list(range(rank))}


@rule(least=2)
def object_lists_are_sent_and_received(dist: Any, rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list([thing(2), "two", None], 1)
    elif rank == 1:
        received: list[Any] = [None] * 3
        assert dist.recv_object_list(received, 0) == 0
        assert received == [thing(2), "two", None]


@rule(least=2)
def object_lists_in_a_batch_are_sent_and_received(dist: Any, rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list([thing(3)], 1, use_batch=True)
    elif rank == 1:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0, use_batch=True)
        assert received == [thing(3)]


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
        dist.scatter_object_list(objects, [thing(each) for each in range(size)] if rank == root else None, root)
        assert objects == [thing(rank)]
