"""Launching: what becomes of processes, sockets and files, whoever dies first, and how often one launches."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from launching import pass_round, running_script
from processes import descendants, gone, until

import ringsim
from ringsim.errors import Deadlock, RankFailed
from ringsim.launch import ranks
from ringsim.launch.job import Kind, start_environment
from ringsim.launch.ranks import ForkedRanks, ForkServer, get_launcher

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


SLEEPERS = """
    import os, sys, time
    import ringsim
    def worker():
        print(os.getpid(), force=True)
        time.sleep(100)
    ringsim.trace(worker, world_size=3)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_launcher(tmp_path: Path, how: signal.Signals) -> None:
    with running_script(tmp_path, SLEEPERS) as script:
        assert script.stdout is not None
        pids = [int(script.stdout.readline().split()[-1]) for _ in range(3)]
        os.kill(script.pid, how)
        assert until(lambda: all(gone(pid) for pid in pids), 1.0), "a rank is left"
        assert until(lambda: list((tmp_path / "theirs").iterdir()) == [], 2.0), "a file is left"


def test_no_rank_outlives_its_server(tmp_path: Path) -> None:
    with running_script(tmp_path, SLEEPERS) as script:
        assert script.stdout is not None
        pids = [int(script.stdout.readline().split()[-1]) for _ in range(3)]
        server = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(server, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids), 1.0)
        assert script.wait(20) == 1  # the caller gets an error, not a hang


def test_no_rank_is_left_when_an_error_arrives() -> None:
    """A closed channel is not enough: its rank may still be exiting, or wait to be reaped."""

    def wait_for_each_other() -> None:
        import torch
        import torch.distributed as dist

        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    def sleep_and_fail() -> None:
        if ringsim.current_ring().rank == 0:
            raise ValueError("no such layer")
        time.sleep(100)

    for worker, error in [(wait_for_each_other, Deadlock), (sleep_and_fail, RankFailed)] * 4:
        with pytest.raises(error):
            ringsim.trace(worker, world_size=2)
        assert not [name for name in descendants(os.getpid()).values() if name.startswith("ringsim-rank")]


def test_nothing_listens_beyond_loopback() -> None:
    def listening() -> list[str]:
        """The addresses on which this process listens, as /proc has them."""
        inodes = set()
        for fd in Path("/proc/self/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        found = []
        for name in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in inodes and (words[3] == "0A" or name.startswith("udp")):
                    found.append(words[1].split(":")[0])
        return found

    def worker() -> list[str]:
        import torch.distributed as dist

        dist.new_group([0, 1])  # a group of the worker's own stays there, too
        return listening()

    for ring in (True, False):

        def alone() -> list[str]:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            return worker()

        results = ringsim.trace(worker if ring else alone, world_size=2, ring=ring).results
        addresses = {address for result in results for address in result}
        assert addresses, "every rank listens: Gloo's pairs connect to it"
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}, addresses
    server = get_launcher()._server
    assert server is not None


@pytest.mark.timeout(180)
def test_runs_at_the_same_time_do_not_meet() -> None:
    results: dict[int, list[list[float]]] = {}

    def many(number: int) -> None:
        results[number] = [ringsim.trace(pass_round, world_size=2, kwargs={"step": 10.0 * number}).results for _ in range(30)]

    threads = [threading.Thread(target=many, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[1 + 10.0 * number, 0 + 10.0 * number]] * 30 for number in (1, 2)}


@pytest.mark.timeout(120)
def test_a_hundred_runs_leak_nothing() -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        kib = int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), kib

    for _ in range(10):
        ringsim.trace(pass_round, world_size=2)
    fds, threads, kib = resources()
    for _ in range(100):
        ringsim.trace(pass_round, world_size=2)
    fds_after, threads_after, kib_after = resources()
    assert fds_after == fds
    assert threads_after == threads
    assert kib_after - kib < 8192  # a run's trace takes some 10 KiB: a hundred kept ones would show, and so would a copy of torch


def test_parked_ranks_end_when_nobody_comes() -> None:
    server = ForkServer()
    try:
        kind = Kind(2, "cpu", 30.0, True, start_environment())
        ranks = ForkedRanks(server, kind, park_s=2.0)
        pids = [channel.recv()[1] for channel in ranks.channels]
        assert not any(gone(pid) for pid in pids)
        assert until(lambda: all(gone(pid) for pid in pids), 5.0)
        assert until(lambda: not ranks.directory.exists(), 1.0)
        assert not ranks.take()
        ranks.close()
    finally:
        server.close()


def test_works_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "has_fork_server", lambda: False)
    trace = ringsim.trace(pass_round, world_size=2, kwargs={"step": 3.0})
    assert trace.results == [4.0, 3.0]
    assert len(trace.to_pandas("messages")) == 2

    def fail() -> None:
        raise ValueError("no such layer")

    with pytest.raises(RankFailed, match="no such layer"):
        ringsim.trace(fail, world_size=1)
    with pytest.raises(RankFailed, match="SIGKILL"):
        ringsim.trace(lambda: os.kill(os.getpid(), signal.SIGKILL), world_size=1)


def test_works_in_a_script_without_a_guard_and_in_python_c(tmp_path: Path) -> None:
    body = """
        import ringsim
        print("once")
        class Thing:
            pass
        def worker():
            return ringsim.current_ring().rank, Thing()
        results = ringsim.trace(worker, world_size=2).results
        print([rank for rank, _ in results], all(isinstance(thing, Thing) for _, thing in results))
    """
    text = textwrap.dedent(body)
    (tmp_path / "script.py").write_text(text)
    for command in ([str(tmp_path / "script.py")], ["-c", text]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=50, check=True)
        assert done.stdout.splitlines() == ["once", "[0, 1] True"]
        assert done.stderr == ""


def test_a_forked_child_has_ranks_of_its_own() -> None:
    ringsim.trace(pass_round, world_size=2)
    read, write = socket.socketpair()
    pid = os.fork()
    if pid == 0:
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
    assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]
