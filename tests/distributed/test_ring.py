"""The ring on real ranks: members, direction, messages, time-outs, several rings in one world, how it ends and what is left."""

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

import ringsim.ring.groups
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.ring import (
    current_ring,
    destroy_distributed,
    get_comm_device,
    get_pipeline_parallel_pred_group,
    get_pipeline_parallel_succ_group,
    initialize_distributed,
)

pytestmark = pytest.mark.timeout(60)
HERE = "127.0.0.1"
LONG_S = 40  # nothing that should work comes near it, also on two loaded cores


def exchange(here: int, source: int, target: int, group_in: Any, group_out: Any) -> int:
    """Sends this rank's number to one side while it receives from the other; returns what came."""
    came = torch.full((3,), -1)
    sent = dist.isend(torch.full((3,), here), target, group=group_out)
    dist.recv(came, source, group=group_in)
    sent.wait()
    assert came.unique().numel() == 1
    return int(came[0])


def refuse_private_api() -> None:
    """Makes this process's torch one that lacks what building a pair by its members takes."""
    del dist.ProcessGroupGloo._Options


def look_at_ring(port: int, count: int, rank: int, ring_ranks: list[int] | None, private: bool) -> dict[str, Any]:
    if not private:
        refuse_private_api()
    initialize_distributed(HERE, port, count, rank, rank, "cpu", timeout_s=LONG_S, ring_ranks=ring_ranks)
    ring = current_ring()
    groups = [get_pipeline_parallel_pred_group(), get_pipeline_parallel_succ_group()]
    assert groups == [ring.pred_group, ring.succ_group]
    facts: dict[str, Any] = {
        "place": (ring.rank, ring.world_size, ring.pred, ring.succ, ring.ranks),
        "device": get_comm_device(),
        "groups of the process": len(c10d._world.pg_map),
        "members": [group and dist.get_process_group_ranks(group) for group in groups],
        "my place in them": [group and dist.get_rank(group) for group in groups],
        "names": [group and (group.group_name if private else group.group_desc) for group in groups],
        "distinct": groups[0] is not groups[1],
        "time-outs": [group and group._get_backend(torch.device("cpu")).options._timeout for group in groups],
    }
    if groups[0] is not None:
        facts["forward"] = exchange(rank, ring.pred, ring.succ, *groups)
        facts["back"] = exchange(rank, ring.succ, ring.pred, *reversed(groups))
        came = [torch.empty(1), torch.empty(1)]
        works = []
        for group, peer, buffer in zip(groups, (ring.pred, ring.succ), came, strict=True):
            mine = torch.tensor([float(rank)])
            works += dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, buffer, peer, group)])
        totals = [torch.tensor([float(rank)]), torch.tensor([float(rank)])]
        works += [dist.all_reduce(total, group=group, async_op=True) for total, group in zip(totals, groups, strict=True)]
        for work in works:
            work.wait()
        facts["batch"] = [buffer.item() for buffer in came]
        facts["sums"] = [total.item() for total in totals]
        dist.destroy_process_group(groups[0])
        facts["groups after one is destroyed"] = len(c10d._world.pg_map)
    dist.barrier()
    destroy_distributed()
    facts["initialised after"] = dist.is_initialized()
    return facts


def check_ring(facts: dict[str, Any], rank: int, world_size: int, ring: list[int], *, private: bool = True) -> None:
    place, count = ring.index(rank), len(ring)
    pred, succ = ring[(place - 1) % count], ring[(place + 1) % count]
    assert facts["place"] == (rank, world_size, pred, succ, tuple(ring))
    assert facts["device"] == "cpu"
    assert facts["initialised after"] is False
    if count == 1:
        assert facts["members"] == facts["names"] == [None, None]
        assert facts["groups of the process"] == 1
        return
    assert facts["members"] == [sorted([pred, rank]), sorted([rank, succ])]
    assert facts["my place in them"] == [sorted([pred, rank]).index(rank), sorted([rank, succ]).index(rank)]
    assert facts["names"] == [f"ring:{pred}>{rank}", f"ring:{rank}>{succ}"]
    assert facts["distinct"]
    assert facts["time-outs"] == [timedelta(seconds=LONG_S)] * 2
    assert facts["groups of the process"] == 3, "the default group and two pairs: none that the rank is not in"
    assert facts["groups after one is destroyed"] == 2
    assert (facts["forward"], facts["back"]) == (pred, succ)
    assert facts["batch"] == [pred, succ]
    assert facts["sums"] == [pred + rank, rank + succ]


@pytest.mark.parametrize(
    ("rings", "private"),
    [
        *((rings, True) for rings in ([[0]], [[0, 1]], [[*range(8)]], [[*range(33)]], [[2, 0, 1], [4, 3]], [[0], [1]])),
        *((rings, False) for rings in ([[0, 1]], [[2, 0, 1], [4, 3]], [[1, 2, 0], [3]])),  # where torch lacks the private API
    ],
)
def test_rings(server: RankServer, rings: list[list[int]], private: bool) -> None:
    port, count = free_port(), sum(len(ring) for ring in rings)
    ring_of = {rank: ring if len(rings) > 1 else None for ring in rings for rank in ring}
    facts = results(server.run(look_at_ring, [(port, count, rank, ring_of[rank], private) for rank in range(count)], limit_s=50))
    for rank in range(count):
        check_ring(facts[rank], rank, count, ring_of[rank] or rings[0], private=private)


def look_at_ring_of_another_torch(port: int, rank: int) -> tuple[str, bool, int]:
    torch.__version__ = "2.99.0"
    initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=LONG_S)
    ring = current_ring()
    came = exchange(rank, ring.pred, ring.succ, ring.pred_group, ring.succ_group)
    return ring.pred_group.group_desc, ring.pred_group.group_name == ring.pred_group.group_desc, came


def test_another_version_of_torch_goes_the_public_way(server: RankServer) -> None:
    """There a group's name is torch's own number."""
    port = free_port()
    facts = results(server.run(look_at_ring_of_another_torch, [(port, rank) for rank in range(3)]))
    assert facts == [("ring:2>0", False, 2), ("ring:0>1", False, 0), ("ring:1>2", False, 1)]


def wait_for_nobody(port: int, rank: int, timeout_s: float, private: bool) -> tuple[str, float]:
    if not private:
        refuse_private_api()
    initialize_distributed(HERE, port, 2, rank, rank, "cpu", timeout_s=timeout_s)
    begin = time.monotonic()
    try:
        dist.recv(torch.empty(1), current_ring().pred, group=current_ring().pred_group)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "received", 0.0


@pytest.mark.parametrize("private", [True, False], ids=["private", "public"])
def test_time_out_reaches_the_pair_groups(server: RankServer, private: bool) -> None:
    """``new_group`` takes half an hour unless it is told: a deadlock on a pair would last that long."""
    port = free_port()
    for words, took_s in results(server.run(wait_for_nobody, [(port, rank, 1.5, private) for rank in range(2)], limit_s=40)):
        assert words != "received"
        assert took_s >= 1.4 or "closed" in words, "the other may end first, and then nobody is waited for"


def look_at_sockets(host: str, port: int, rank: int) -> dict[str, Any]:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    initialize_distributed(host, port, 2, rank, rank, "cpu", timeout_s=LONG_S)
    extra = dist.new_group([0, 1])
    came = exchange(rank, 1 - rank, 1 - rank, extra, extra)
    during, interface = listening(), os.environ.get("GLOO_SOCKET_IFNAME")
    del extra
    destroy_distributed()
    gc.collect()
    return {"came": came, "during": during, "interface": interface, "before": before, "after": os.environ.get("GLOO_SOCKET_IFNAME")}


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, ::1, ::ffff:127.0.0.1


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.parametrize(("host", "told"), [("127.0.0.1", None), ("127.0.0.1", "lo"), ("::1", None), ("localhost", None)])
def test_nothing_listens_beyond_loopback(server: RankServer, host: str, told: str | None) -> None:
    """The user's choice of an interface stays."""
    port, environment = free_port(host), {} if told is None else {"GLOO_SOCKET_IFNAME": told}
    ended = server.run(look_at_sockets, [(host, port, rank) for rank in range(2)], environment=environment)
    for rank, facts in enumerate(results(ended)):
        assert facts["came"] == 1 - rank
        assert facts["during"], "Gloo and the store listen somewhere: the look at them failed"
        assert facts["during"] <= LOOPBACK
        assert facts["interface"] in ("lo", "lo0")
        assert facts["after"] == facts["before"] == told


def test_the_look_at_sockets_finds_one_that_listens_everywhere() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert not listening() <= LOOPBACK


def come_back(port: int, count: int, rank: int, times: int) -> list[float]:
    kept, came, before = [], [], builtins.print
    for index in range(times):
        initialize_distributed(HERE, port, count, rank, rank, "cpu", timeout_s=LONG_S)
        assert builtins.print is not before, "prints are suppressed within the ring only"
        ring = current_ring()
        came.append(exchange(rank, ring.pred, ring.succ, ring.pred_group, ring.succ_group))
        if index % 2:
            kept.append(ring)
        destroy_distributed()
        assert builtins.print is before
    return came


def test_ring_after_ring_on_one_port(server: RankServer) -> None:
    """Torch's own hung at the eighteenth such round: a rank met the store that was on its way out."""
    port = free_port()
    came = results(server.run(come_back, [(port, 3, rank, 24) for rank in range(3)], limit_s=50))
    assert came == [[2] * 24, [0] * 24, [1] * 24]


def ring_over_the_scripts_group(port: int, rank: int) -> list[Any]:
    dist.init_process_group("gloo", init_method=f"tcp://{HERE}:{port}", world_size=3, rank=rank, timeout=timedelta(seconds=LONG_S))
    try:
        initialize_distributed(HERE, port, 4, rank, rank, "cpu")
    except ArgumentError as error:
        facts: list[Any] = [str(error)]
    for _ in range(3):
        initialize_distributed(HERE, port, 3, rank, rank, "cpu", timeout_s=LONG_S)
        ring = current_ring()
        facts.append(exchange(rank, ring.pred, ring.succ, ring.pred_group, ring.succ_group))
        destroy_distributed()
        facts.append(len(c10d._world.pg_map))
    dist.barrier()
    return facts


def test_ring_over_the_scripts_group(server: RankServer) -> None:
    port = free_port()
    for rank, facts in enumerate(results(server.run(ring_over_the_scripts_group, [(port, rank) for rank in range(3)]))):
        assert facts[0].startswith("world_size must be 3 as in the default process group that exists, got 4 (rank ")
        assert facts[1:] == [(rank - 1) % 3, 1] * 3


def call_again(port: int) -> list[str]:
    arguments: dict[str, Any] = {"head_ip": HERE, "port": port, "world_size": 1, "rank": 0, "local_rank": 0, "comm_device": "cpu"}
    initialize_distributed(**arguments, timeout_s=5)
    ring, shown = current_ring(), builtins.print
    initialize_distributed(**arguments, timeout_s=5)
    initialize_distributed(**arguments)  # who leaves the time-out out agrees with any
    assert current_ring() is ring
    assert builtins.print is shown
    words = []
    others = {"head_ip": "localhost", "port": port % 65535 + 1, "world_size": 2, "local_rank": 1, "comm_device": "gpu", "timeout_s": 6}
    for name, value in others.items():
        try:
            initialize_distributed(**{**arguments, name: value})
        except ArgumentError as error:
            words.append(str(error))
    assert current_ring() is ring
    dist.destroy_process_group()  # behind our back: the next call starts anew
    initialize_distributed(**arguments)
    assert current_ring() is not ring
    destroy_distributed()
    destroy_distributed()
    try:
        current_ring()
    except RingError as error:
        words.append(str(error))
    return words


def test_second_initialize(server: RankServer) -> None:
    (words,) = results(server.run(call_again, [(free_port(),)]))
    assert len(words) == 7
    for name, sentence in zip(("head_ip", "port", "world_size", "local_rank", "comm_device", "timeout_s"), words, strict=False):
        assert sentence.startswith(f"{name} must be ")
        assert "as in the ring that exists, got" in sentence
        assert "(rank 0 of 1)" in sentence
    assert words[-1].startswith("the ring must exist before it is used, got none")


# -- how a ring ends


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
    with contextlib.suppress(RuntimeError, ValueError):
        dist.recv(torch.empty(1), current_ring().pred, group=current_ring().pred_group)


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
