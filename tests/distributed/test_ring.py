"""The ring on real ranks."""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import listening
from rank_server import RankServer, free_port, results
from torch.distributed import distributed_c10d as c10d

from ringsim import (
    current_ring,
    destroy_distributed,
    get_comm_device,
    get_pipeline_parallel_pred_group,
    get_pipeline_parallel_succ_group,
    initialize_distributed,
)
from ringsim.errors import ArgumentError, RendezvousFailed, RingError

HERE = "127.0.0.1"
LONG_S = 40  # working programs never get close to it, even on two loaded cores


def run(
    server: RankServer, function: Any, count: int, *arguments: Any, host: str = HERE, **options: Any
) -> Any:
    """Runs ``function(port, rank, *arguments)`` on ``count`` ranks, and returns their ends."""
    port = free_port(host)
    return server.run(
        function, [(port, rank, *arguments) for rank in range(count)], limit_s=50, **options
    )


def exchange(rank: int, source: int, target: int, group_in: Any, group_out: Any) -> int:
    """Sends this rank's number to one side and receives from the other; returns the result."""
    came = torch.full((3,), -1)
    sent = dist.isend(torch.full((3,), rank), target, group=group_out)
    dist.recv(came, source, group=group_in)
    sent.wait()
    assert came.unique().numel() == 1
    return int(came[0])


def pass_on(rank: int) -> int:
    """Sends this rank's number along the ring, and returns the received number."""
    ring = current_ring()
    return exchange(rank, ring.pred, ring.succ, ring.pred_group, ring.succ_group)


# -- the parts of a ring


def spoil(torch_is: str) -> None:
    """Makes this process use torch's public API."""
    if torch_is == "without private API":
        del dist.ProcessGroupGloo._Options
    elif torch_is == "of another version":
        torch.__version__ = "2.99.0"


def look_at_ring(
    port: int, rank: int, count: int, rings: list[list[int]], torch_is: str
) -> dict[str, Any]:
    spoil(torch_is)
    order = "ranks"
    if "hosts" in torch_is:
        order, socket.gethostname = "hosts", lambda: f"node{rank % 2}"
    ring_ranks = next(ring for ring in rings if rank in ring) if len(rings) > 1 else None
    options: dict[str, Any] = {"ring_ranks": ring_ranks, "ring_order": order}
    initialize_distributed(HERE, port, count, rank, rank, "cpu", timeout_s=LONG_S, **options)
    ring = current_ring()
    groups = [get_pipeline_parallel_pred_group(), get_pipeline_parallel_succ_group()]
    assert groups == [ring.pred_group, ring.succ_group]
    facts: dict[str, Any] = {
        "place": (ring.rank, ring.world_size, ring.pred, ring.succ, ring.ranks),
        "device": get_comm_device(),
        "groups of the process": len(c10d._world.pg_map),
        "members": [group and dist.get_process_group_ranks(group) for group in groups],
    }
    if groups[0] is not None:
        facts["my place in them"] = [dist.get_rank(group) for group in groups]
        facts["names"] = [group.group_desc for group in groups]
        facts["named by torch"] = [group.group_name != group.group_desc for group in groups]
        facts["distinct"] = groups[0] is not groups[1]
        facts["timeouts"] = [
            group._get_backend(torch.device("cpu")).options._timeout for group in groups
        ]
        facts["forward"] = pass_on(rank)
        facts["back"] = exchange(rank, ring.succ, ring.pred, *reversed(groups))
        came, totals, works = torch.empty(2), torch.full((2,), float(rank)), []
        for group, peer, buffer, total in zip(
            groups, (ring.pred, ring.succ), came.split(1), totals.split(1), strict=True
        ):
            send = dist.P2POp(dist.isend, torch.tensor([float(rank)]), peer, group)
            receive = dist.P2POp(dist.irecv, buffer, peer, group)
            works += dist.batch_isend_irecv([send, receive])
            works.append(dist.all_reduce(total, group=group, async_op=True))
        for work in works:
            work.wait()
        facts["batch"] = came.tolist()
        facts["sums"] = totals.tolist()
        dist.destroy_process_group(groups[0])
        facts["groups after one is destroyed"] = len(c10d._world.pg_map)
    dist.barrier()
    destroy_distributed()
    facts["initialised after"] = dist.is_initialized()
    return facts


def expected_facts(rank: int, world_size: int, ring: list[int], torch_is: str) -> dict[str, Any]:
    place = ring.index(rank)
    pred, succ = ring[place - 1], ring[(place + 1) % len(ring)]
    common = {
        "place": (rank, world_size, pred, succ, tuple(ring)),
        "device": "cpu",
        "initialised after": False,
    }
    if len(ring) == 1:
        return {**common, "members": [None, None], "groups of the process": 1}
    pairs = [sorted([pred, rank]), sorted([rank, succ])]
    return {
        **common,
        "members": pairs,
        "my place in them": [pair.index(rank) for pair in pairs],
        "names": [f"ring:{pred}>{rank}", f"ring:{rank}>{succ}"],
        "named by torch": ["known" not in torch_is] * 2,
        "distinct": True,
        # the default timeout of ``new_group`` is half an hour
        "timeouts": [timedelta(seconds=LONG_S)] * 2,
        "groups of the process": 3,  # the default group and two pairs
        "groups after one is destroyed": 2,
        "forward": pred,
        "back": succ,
        "batch": [pred, succ],
        "sums": [pred + rank, rank + succ],
    }


SEVERAL = [[2, 0, 1], [4, 3], [5]]


@pytest.mark.parametrize(
    ("rings", "torch_is"),
    [
        ([[0]], "known"),
        ([[0, 1]], "known"),
        ([[0, 2, 1]], "known, two hosts"),
        (SEVERAL, "known"),
        ([[0, 1]], "of another version"),
        (SEVERAL, "without private API"),
    ],
)
def test_rings(server: RankServer, rings: list[list[int]], torch_is: str) -> None:
    count = sum(len(ring) for ring in rings)
    facts = results(run(server, look_at_ring, count, count, rings, torch_is))
    assert facts == [
        expected_facts(rank, count, next(ring for ring in rings if rank in ring), torch_is)
        for rank in range(count)
    ]


# -- sockets

# 127.0.0.1, ::1, ::ffff:127.0.0.1
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def look_at_sockets(port: int, rank: int, host: str) -> tuple[Any, ...]:
    initialize_distributed(host, port, 2, rank, rank, "cpu", timeout_s=LONG_S)
    extra = dist.new_group([0, 1])
    came = exchange(rank, 1 - rank, 1 - rank, extra, extra)
    during, interface = listening(), os.environ.get("GLOO_SOCKET_IFNAME")
    del extra
    destroy_distributed()
    gc.collect()
    assert during, "Gloo and the store must listen, so the check itself failed"
    return came, during - LOOPBACK, interface, os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets"
)
@pytest.mark.parametrize(("host", "told"), [(HERE, None), (HERE, "lo"), ("::1", None)])
def test_nothing_listens_beyond_loopback(server: RankServer, host: str, told: str | None) -> None:
    """The user's choice of an interface is kept."""
    environment = {} if told is None else {"GLOO_SOCKET_IFNAME": told}
    ended = run(server, look_at_sockets, 2, host, host=host, environment=environment)
    assert results(ended) == [(1, set(), "lo", told), (0, set(), "lo", told)]


# -- ring after ring


def come_back(port: int, rank: int, times: int) -> list[int]:
    kept, came, before = [], [], builtins.print
    for index in range(times):
        initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=LONG_S)
        assert builtins.print is not before, "prints must be suppressed within the ring"
        came.append(pass_on(rank))
        if index % 2:
            kept.append(current_ring())
        destroy_distributed()
        assert builtins.print is before
    return came


def test_ring_after_ring_on_one_port(server: RankServer) -> None:
    """Torch's own rendezvous hung in the eighteenth such round."""
    assert results(run(server, come_back, 3, 24)) == [[2] * 24, [0] * 24, [1] * 24]


def ring_over_the_scripts_group(port: int, rank: int) -> list[Any]:
    address, limit = f"tcp://{HERE}:{port}", timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", init_method=address, world_size=3, rank=rank, timeout=limit)
    facts: list[Any] = []
    try:
        initialize_distributed(HERE, port, 4, rank, rank, "cpu")
    except ArgumentError as error:
        facts.append(str(error).partition(" (rank")[0])
    for _ in range(3):
        initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=LONG_S)
        facts.append(pass_on(rank))
        destroy_distributed()
        facts.append(len(c10d._world.pg_map))
    dist.barrier()
    return facts


def test_ring_over_the_scripts_group(server: RankServer) -> None:
    refused = "world_size must be 3, as in the existing default process group, got 4"
    assert results(run(server, ring_over_the_scripts_group, 3)) == [
        [refused, *[(rank - 1) % 3, 1] * 3] for rank in range(3)
    ]


OTHERS = {"head_ip": "localhost", "port": 1, "world_size": 2, "local_rank": 1}
OTHERS |= {"comm_device": "gpu", "timeout_s": 6}


def call_again(port: int, rank: int) -> list[str]:
    arguments: dict[str, Any] = {"head_ip": HERE, "port": port, "world_size": 1}
    arguments |= {"rank": rank, "local_rank": 0, "comm_device": "cpu"}
    initialize_distributed(**arguments, timeout_s=5)
    ring, shown = current_ring(), builtins.print
    initialize_distributed(**arguments, timeout_s=5)
    initialize_distributed(**arguments)  # without a timeout it matches any
    assert builtins.print is shown
    words = []
    for name, value in OTHERS.items():
        with pytest.raises(
            ArgumentError, match=r"as in the existing ring, got .*\(rank 0 of 1\)"
        ) as caught:
            initialize_distributed(**{**arguments, name: value})
        words.append(str(caught.value).partition(" must be ")[0])
    assert current_ring() is ring
    dist.destroy_process_group()  # without ringsim's knowledge: the next call starts again
    initialize_distributed(**arguments)
    assert current_ring() is not ring
    destroy_distributed()
    destroy_distributed()
    with pytest.raises(RingError, match="this rank is not in a ring"):
        current_ring()
    return words


def test_second_initialize(server: RankServer) -> None:
    assert results(run(server, call_again, 1)) == [list(OTHERS)]


# -- the end of a ring


def wait_for_nobody(port: int, rank: int) -> tuple[str, float]:
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=1.5)
    begin = time.monotonic()
    try:
        dist.recv(torch.empty(1), current_ring().pred, group=current_ring().pred_group)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "received", 0.0


def leave_work_undone(port: int, rank: int) -> bool:
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=2)
    ring = current_ring()

    def receive_from_nobody() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.recv(torch.empty(1), ring.pred, group=ring.pred_group)

    if rank == 0:
        kept = dist.irecv(torch.empty(1), 1, group=ring.succ_group)
        assert kept is not None
        dist.all_reduce(torch.empty(1), async_op=True)
        threading.Thread(target=receive_from_nobody, daemon=True).start()
    destroy_distributed()
    return dist.is_initialized()


def be_left_alone(port: int, rank: int) -> None:
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=LONG_S)
    if rank == 1:
        os._exit(3)
    destroy_distributed()


def fail_while_building(port: int, rank: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to any rank\nsecond line")

    if rank == 1:
        c10d._register_pg_in_world = fail  # registers a pair's group in torch's tables
    initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=2)


def act(name: str, port: int, rank: int) -> Any:
    return globals()[name](port, rank)


def test_ends(server: RankServer) -> None:
    """All of them run at the same time, because they mostly wait."""
    counts = {wait_for_nobody: 2, leave_work_undone: 2, be_left_alone: 2, fail_while_building: 3}
    arguments = [
        (each.__name__, port, rank)
        for each, count in counts.items()
        for port in [free_port()]
        for rank in range(count)
    ]
    ended = iter(server.run(act, arguments))
    stuck, undone, alone, failed = (
        [next(ended) for _ in range(count)] for count in counts.values()
    )
    for words, took_s in results(stuck):  # the timeout applies to the pair groups
        assert words != "received"
        assert took_s >= 1.4 or "closed" in words, (
            "the wait must be long unless the other rank ended first"
        )
    assert results(undone) == [False, False]
    assert [each.how for each in alone] == ["returned", "killed"]
    assert [each.error for each in failed] == [RendezvousFailed.__name__] * 3
    assert all(
        "rank 1 cannot connect to its peers: no route to any rank" in each.value for each in failed
    )
