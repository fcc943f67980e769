"""Correct programs whose sides look as if they disagreed: nobody is accused, and the results are those of an unchecked run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer

import ringsim

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
LIMIT_S = 40
SIZE = 3


def ring_of() -> Any:
    return ringsim.current_ring()


def other_shapes() -> Any:
    """Flat against shaped, ones that do not count, nothing at all."""
    ring, received = ring_of(), []
    for sent, size in [((2, 3), (6,)), ((6,), (3, 2)), ((1, 4), (4, 1)), ((0, 3), (3, 0)), ((), (1,)), ((2, 1, 3), (2, 3))]:
        data, buffer = torch.full(sent, float(ring.rank)), torch.zeros(size)
        work: Any = dist.isend(data, ring.succ, group=ring.succ_group)
        dist.recv(buffer, ring.pred, group=ring.pred_group)
        work.wait()
        received.append(buffer.tolist())
    return received


def tags_and_sizes() -> Any:
    """Messages of many sizes under many tags, received in another order than sent."""
    ring = ring_of()
    sends: list[Any] = [dist.isend(torch.full((tag,), float(tag)), ring.succ, tag=tag) for tag in range(1, 40)]
    buffers = {tag: torch.zeros(tag) for tag in range(1, 40)}
    recvs: list[Any] = [dist.irecv(buffers[tag], ring.pred, tag=tag) for tag in reversed(buffers)]
    for work in (*recvs, *sends):
        work.wait()
    return [buffer.tolist() for buffer in buffers.values()]


def server_of_any() -> Any:
    """Rank 0 takes from anybody, under one tag for every size; and in between from each one in particular."""
    ring, total = ring_of(), 0.0
    if ring.rank == 0:
        for size in (3, 4):
            for _ in range(ring.world_size - 1):
                buffer = torch.zeros(size)
                dist.recv(buffer, tag=size)
                total += float(buffer.sum())
        for rank in range(1, ring.world_size):
            buffer = torch.zeros(rank)
            dist.recv(buffer, rank, tag=3)
            total += float(buffer.sum())
        return total
    for size in (3, 4):
        dist.send(torch.ones(size), 0, tag=size)
    dist.send(torch.ones(ring.rank), 0, tag=3)
    return None


def collectives() -> Any:
    """One of each, with different arguments where that is right."""
    ring, found = ring_of(), []
    size, rank = ring.world_size, ring.rank
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    whole = torch.zeros(2 * size)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    dist.gather(torch.full((2,), float(rank)), [torch.zeros(2) for _ in range(size)] if rank == 1 else None, dst=1)
    part = torch.zeros(3)
    dist.scatter(part, [torch.full((3,), float(one)) for one in range(size)] if rank == 2 else None, src=2)
    dist.reduce(part, 1, op=dist.ReduceOp.MAX)
    splits = [rank + 1] * size  # uneven: rank r sends r + 1 to each
    uneven = torch.zeros(sum(range(1, size + 1)))
    dist.all_to_all_single(uneven, torch.full((sum(splits),), float(rank)), [one + 1 for one in range(size)], splits)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * (rank + 1))
    words: list[Any] = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, 0)
    handle: Any = dist.all_reduce(whole, async_op=True)
    dist.barrier()
    handle.wait()
    found += [whole.tolist(), uneven.tolist(), objects, words, part.tolist() if rank == 1 else None]
    return found


def groups_again() -> Any:
    """A group is made, used, destroyed and made again, with messages of other sizes; a subset has its own."""
    ring, found = ring_of(), []
    for size in (2, 5, 3):
        group = dist.new_group([0, 1])
        pair = dist.new_group([0, 2])
        if ring.rank < 2:
            data = torch.full((size,), float(ring.rank))
            dist.all_reduce(data, group=group)
            if ring.rank == 0:
                dist.send(data, 1, group=group)
            else:
                dist.recv(data, 0, group=group)
            found.append(data.tolist())
            dist.destroy_process_group(group)
        if ring.rank != 1:
            dist.broadcast(torch.zeros(size), 2, group=pair)
    return found


def threads() -> Any:
    """Two threads of a rank, each on a tag of its own, with sizes that vary."""
    ring = ring_of()
    received: list[list[Any]] = [[], []]

    def play(tag: int) -> None:
        for index in range(60):
            size = 1 + (index * (tag + 2)) % 7
            work: Any = dist.isend(torch.full((size,), float(tag)), ring.succ, group=ring.succ_group, tag=tag)
            buffer = torch.zeros(size)
            dist.recv(buffer, ring.pred, group=ring.pred_group, tag=tag)
            work.wait()
            received[tag].append(buffer.tolist())

    other = threading.Thread(target=play, args=(1,))
    other.start()
    play(0)
    other.join()
    return received


def batches() -> Any:
    ring, found = ring_of(), []
    for index in range(20):
        buffer = torch.zeros(index)
        operations = [
            dist.P2POp(dist.isend, torch.full((index,), 1.0), ring.succ),
            dist.P2POp(dist.irecv, buffer, ring.pred),
        ]
        for work in dist.batch_isend_irecv(operations if ring.rank % 2 else operations[::-1]):
            work.wait()
        found.append(buffer.tolist())
    if ring.rank == 0:
        dist.send_object_list(["a", 1], 1)
    elif ring.rank == 1:
        words: list[Any] = [None, None]
        dist.recv_object_list(words, 0)
        found.append(words)
    return found


@pytest.mark.parametrize("worker", [other_shapes, tags_and_sizes, server_of_any, collectives, groups_again, threads, batches])
def test_nothing_is_refused(worker: Callable[[], Any]) -> None:
    unchecked = ringsim.trace(worker, world_size=SIZE, check="off", limit_s=LIMIT_S)
    for _ in range(2):
        checked = ringsim.trace(worker, world_size=SIZE, limit_s=LIMIT_S)
        assert checked.results == unchecked.results
        assert not [label for label in checked.events.tables.labels if label.startswith("!")]
    assert ringsim.trace(worker, world_size=SIZE, check="full", limit_s=LIMIT_S).results == unchecked.results


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as running:
        yield running


def blocks_from_the_start(directory: str, rank: int) -> str:
    """A block around everything: what disagrees is found, at the latest when all have left it."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    try:
        with ringsim.trace(f"{directory}/run.ringtrace"):
            if rank == 0:
                dist.send(torch.zeros(4), 1)
            else:
                dist.recv(torch.zeros(8), 0)
    except ringsim.errors.MessageMismatch as error:
        return str(error)
    return "no error"


def plain_blocks(directory: str, rank: int) -> None:
    """A send that begins before a block meets a recv in it, and the sizes of what follows differ."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    for size in (3, 4):
        if rank == 0:
            early: Any = dist.isend(torch.zeros(size + 6), 1)
            with ringsim.trace(f"{directory}/run-{size}.ringtrace"):
                late: Any = dist.isend(torch.zeros(size), 1)
                early.wait()
                late.wait()
        else:
            with ringsim.trace(f"{directory}/run-{size}.ringtrace"):
                dist.recv(torch.zeros(size + 6), 0)
                dist.recv(torch.zeros(size), 0)


def test_what_happened_before_a_block_is_not_held_against_it(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(plain_blocks, [(str(tmp_path), rank) for rank in range(2)], limit_s=LIMIT_S)
    assert [(each.how, each.value) for each in ended] == [("returned", None)] * 2
    for size in (3, 4):
        trace = ringsim.load(tmp_path / f"run-{size}.ringtrace")
        assert "not compared on group world" in trace.metadata["not_checked"][0]
        assert "message_mismatch" not in [finding.kind for finding in trace.explain().findings]


def test_a_block_around_everything_finds_what_disagrees(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(blocks_from_the_start, [(str(tmp_path), rank) for rank in range(2)], limit_s=LIMIT_S)
    assert [each.how for each in ended] == ["returned"] * 2
    assert "rank 0 sends float32[4]" in ended[0].value
    assert "rank 1 receives float32[8]" in ended[0].value
    assert ringsim.load(tmp_path / "run.ringtrace").explain().kind == "message_mismatch"
