"""Tests of the fork server and parked ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gone, listening_ports, until

import ringsim
from ringsim.errors import RankFailed, RingError
from ringsim.launch import ranks, supervisor
from ringsim.launch.job import RankKind, start_environment
from ringsim.launch.ranks import ForkedRanks, get_launcher

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def succ() -> int:
    """Uses the ring: receives the next rank's number."""
    ring = ringsim.current_ring()
    dist.all_reduce(torch.ones(1))
    return ring.succ


def call() -> Any:
    """Runs two ranks; returns the fork server that started them."""
    assert ringsim.trace(succ, world_size=2).results == [1, 0]
    return get_launcher()._server


def park(park_s: float) -> tuple[ForkedRanks, list[int]]:
    """Parks two ranks; returns them, and their processes."""
    kind = RankKind(2, "cpu", 30.0, ring=True, environment=start_environment())
    parked = ForkedRanks(call(), kind, park_s=park_s)
    return parked, [channel.recv()[1] for channel in parked.channels]


@contextlib.contextmanager
def going_on(there: Path) -> Iterator[tuple[Future[ringsim.Trace], list[int]]]:
    """Keeps a run of another thread alive during a block."""

    def worker() -> int:
        rank = ringsim.current_ring().rank
        (there / f"{rank} {os.getpid()}").touch()
        until(lambda: (there / "over").exists(), 60)
        return rank

    there.mkdir()
    with ThreadPoolExecutor() as thread:
        future = thread.submit(ringsim.trace, worker, world_size=2)
        until(lambda: len(list(there.iterdir())) == 2, 60)
        yield future, [int(path.name.split()[1]) for path in sorted(there.iterdir())]
        (there / "over").touch()


def test_values_read_at_the_start_take_another_server_and_no_rank_outlives_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := tmp_path / "ranks").mkdir()

    def worker() -> None:
        (there / str(os.getpid())).touch()
        if ringsim.current_ring().rank == 0:
            until(lambda: len(list(there.iterdir())) == 2)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    with going_on(tmp_path / "other") as (other, _):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert ringsim.trace(torch.get_num_threads, world_size=1).results == [1]
    assert other.result().results == [0, 1]  # of the previous server
    with pytest.raises(RingError):  # not a hang
        ringsim.trace(worker, world_size=2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert until(lambda: all(gone(int(path.name)) for path in there.iterdir())), "a rank is left"
    call()  # uses another server


def test_parked_ranks_end_when_nobody_comes() -> None:
    parked, pids = park(1.5)
    assert not any(map(gone, pids))
    assert until(lambda: all(map(gone, pids)))
    assert until(lambda: not parked.directory.exists())
    assert not parked.take()
    parked.close()


def test_a_call_just_when_parked_ranks_end_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 0.2.0, the launcher looked too early for signs of their end.

    The launcher then looked for signs that appeared only after the ranks had ended.
    """
    park_s = 0.2
    monkeypatch.setattr(ranks, "PARKED_S", park_s)
    for step in range(12):
        time.sleep(park_s - 0.03 + step * 0.005)
        call()


def knock(port: int) -> str:
    """Connects to a port of loopback, and returns the outcome."""
    try:
        # not create_connection, which imports files that another user may not read
        with socket.socket() as connection:
            connection.settimeout(0.2)
            connection.connect(("127.0.0.1", port))
            connection.sendall(bytes(64))
            return "answer" if connection.recv(1) else "end"
    except OSError as error:
        return type(error).__name__


def knock_as_another_user(ports: list[int]) -> set[str]:
    """Connects to ports of loopback, as an unprivileged user, and returns each outcome."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(*3 * [65534])
                os.setresuid(*3 * [65534])
            os.write(write, " ".join(map(knock, ports)).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as said:
        return set(said.read().split())


def test_nobody_else_reaches_the_store_that_a_ring_has_met_over() -> None:
    def meet_anew() -> tuple[int, bool, float]:
        ring = ringsim.current_ring()
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*place, is_master=False)
        held = store.check(["ringsim/0/head"])  # a key of the roll-call
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # with env://, as under torchrun
        dist.all_reduce(total := torch.ones(1))
        return ring.port - place[1], held, total.item()

    assert ringsim.trace(meet_anew, world_size=2).results == [(0, False, 2.0)] * 2
    parked, pids = park(20)
    port = int(parked.config.port_file.read_text())
    assert knock_as_another_user([port]) == {"ConnectionRefusedError"}
    heard = knock_as_another_user([port for pid in pids for port in listening_ports(pid)])
    assert heard <= {"TimeoutError", "end", "ConnectionResetError"}
    parked.close()


def test_ranks_do_without_a_fork_server_that_is_stopped_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", 0.5)
    monkeypatch.setattr(ranks, "EXIT_S", 0.2)  # no message reports that its ranks have ended
    monkeypatch.setattr(supervisor, "_LOST_S", 0.2)
    with going_on(tmp_path / "dying") as (dying, pids), going_on(tmp_path / "other") as (other, _):
        stopped = get_launcher()._server
        os.kill(stopped._process.pid, signal.SIGSTOP)
        assert call() is not stopped
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 0 of 2 failed: its process is gone"):
            dying.result()
    assert other.result().results == [0, 1]
    assert gone(stopped._process.pid)


def test_a_forked_child_has_ranks_of_its_own() -> None:
    call()
    read, write = socket.socketpair()
    if (pid := os.fork()) == 0:
        answer = b"no"
        try:
            if ringsim.trace(os.getppid, world_size=1).results != [os.getppid()]:
                answer = b"ok"
            get_launcher().close()
        finally:
            write.send(answer)
            os._exit(0)
    write.close()
    assert read.recv(2) == b"ok"
    read.close()
    os.waitpid(pid, 0)
    call()
