"""How a ring ends: with work undone, after a death, and when a rank fails while the groups are built."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, free_port, results

import ringsim.ring.groups
from ringsim.errors import RendezvousFailed
from ringsim.ring import current_ring, destroy_distributed, initialize_distributed

pytestmark = pytest.mark.timeout(60)
HERE = "127.0.0.1"
LONG_S = 40


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as running:
        yield running


def leave_work_undone(port: int, rank: int, what: str) -> bool:
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=2)
    ring = current_ring()
    if rank == 0 and what == "irecv":
        kept = dist.irecv(torch.empty(1), 1, group=ring.pred_group)
        assert kept is not None
    elif rank == 0 and what == "all_reduce":
        dist.all_reduce(torch.empty(1), async_op=True)
    elif rank == 0:
        threading.Thread(target=receive_from_nobody, daemon=True).start()
    destroy_distributed()
    return dist.is_initialized()


def receive_from_nobody() -> None:
    ring = current_ring()
    try:
        dist.recv(torch.empty(1), ring.pred, group=ring.pred_group)
    except (RuntimeError, ValueError):
        pass


@pytest.mark.parametrize("what", ["irecv", "all_reduce", "a thread in recv"])
def test_destroy_ends_with_work_undone(server: RankServer, what: str) -> None:
    port = free_port()
    assert results(server.run(leave_work_undone, [(port, rank, what) for rank in range(2)], limit_s=30)) == [False, False]


def be_left_alone(port: int, rank: int) -> None:
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=LONG_S)
    if rank == 1:
        os._exit(3)
    destroy_distributed()


def test_destroy_ends_where_a_rank_died(server: RankServer) -> None:
    port = free_port()
    first, second = server.run(be_left_alone, [(port, rank) for rank in range(2)], limit_s=30)
    assert (first.how, second.how) == ("returned", "killed")


def fail_while_building(port: int, rank: int, how: str) -> None:
    def fail(*_: Any) -> None:
        if how == "dies":
            os._exit(3)
        raise RuntimeError("no route to anybody\nsecond line")

    if rank == 1:
        ringsim.ring.groups.build_pair_groups = fail  # type: ignore[assignment]
    initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=2)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_while_groups_are_built_fails_everyone(server: RankServer, how: str) -> None:
    port = free_port()
    ended = server.run(fail_while_building, [(port, rank, how) for rank in range(3)], limit_s=45)
    for rank in (0, 1, 2) if how == "raises" else (0, 2):
        assert ended[rank].error == RendezvousFailed.__name__
        if how == "raises":
            assert "rank 1 must reach its peers, got no route to anybody" in ended[rank].value
