"""Launching: real ranks for every claim."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ringsim
from ringsim.errors import ArgumentError, Interrupted, RankFailed, RunTimeout
from ringsim.launch import launcher
from ringsim.launch.config import Kind, start_environment
from ringsim.launch.forked import ForkedRanks, ForkServer
from ringsim.launch.launcher import get_launcher

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def private_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every run's files go here, so that what is left behind shows."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    get_launcher().close()  # parked ranks have their directory elsewhere
    yield directory
    get_launcher().close()
    assert list(directory.iterdir()) == []


def pass_round(rounds: int = 1, *, step: float = 1.0) -> float:
    """Passes a number round the ring; every rank adds to it."""
    import torch
    import torch.distributed as dist

    ring = ringsim.current_ring()
    token = torch.tensor([float(ring.rank)])
    for _ in range(rounds if ring.world_size > 1 else 0):
        with ringsim.span("add", stage=ring.rank):
            token = token + step
        sent = dist.isend(token, ring.succ, group=ring.succ_group)
        token = torch.empty(1)
        dist.recv(token, ring.pred, group=ring.pred_group)
        sent.wait()
    return float(token)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_by_rank(world_size: int) -> None:
    trace = ringsim.trace(pass_round, world_size=world_size, args=(2,), kwargs={"step": 10.0})
    assert trace.world_size == world_size
    steps = 20.0 if world_size > 1 else 0.0
    assert trace.results == [(rank - 2) % world_size + steps for rank in range(world_size)]
    messages = trace.to_pandas("messages")
    assert len(messages) == (2 * world_size if world_size > 1 else 0)
    assert len(trace.unmatched) == 0


def test_a_local_class_comes_back_as_itself() -> None:
    class Answer:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    def worker() -> Answer:
        return Answer(ringsim.current_ring().rank)

    results = ringsim.trace(worker, world_size=2).results
    assert all(isinstance(result, Answer) for result in results)
    assert [result.rank for result in results] == [0, 1]


def test_ranks_see_the_callers_surroundings_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker() -> tuple[object, ...]:
        affinity = sorted(os.sched_getaffinity(0))
        return os.environ.get("MY_SETTING"), "GONE" in os.environ, os.getcwd(), sys.path[0], sys.argv, affinity

    monkeypatch.setenv("GONE", "1")
    ringsim.trace(worker, world_size=2)  # parked ranks for the next call start under this environment
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MY_SETTING", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere/else")
    monkeypatch.setattr(sys, "argv", ["me", "--flag"])
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        results = ringsim.trace(worker, world_size=2).results
    finally:
        os.sched_setaffinity(0, before)
    assert results == [("now", False, str(tmp_path), "/somewhere/else", ["me", "--flag"], [core])] * 2


def test_values_read_at_the_start_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        import torch

        return torch.get_num_threads()

    for number in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number))
        assert ringsim.trace(threads, world_size=1).results == [number]
    monkeypatch.delenv("OMP_NUM_THREADS")
    crowded = ringsim.trace(threads, world_size=(os.cpu_count() or 1) + 1)
    assert set(crowded.results) == {1}
    assert any("one torch thread per rank" in note for note in crowded.metadata["notes"])


def test_seeds_differ_by_rank_and_repeat_by_run() -> None:
    def draw() -> tuple[float, float, float]:
        import torch

        return random.random(), float(np.random.rand()), float(torch.rand(1))

    first = ringsim.trace(draw, world_size=2, seed=5).results
    assert first == ringsim.trace(draw, world_size=2, seed=5).results
    assert first[0] != first[1]
    assert first[1] == ringsim.trace(draw, world_size=1, seed=6).results[0]  # seed + rank


def test_a_rank_is_never_used_twice() -> None:
    pids: list[int] = []
    for _ in range(3):
        pids += ringsim.trace(os.getpid, world_size=2).results
    assert len(set(pids)) == 6


def test_output_is_kept_by_rank_and_shown_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        rank = ringsim.current_ring().rank
        print("line", rank, "\nand more", sep="-")
        print("forced", rank, force=True)  # type: ignore[call-overload]
        os.write(2, b"from C, without an end of line")

    trace = ringsim.trace(talk, world_size=2)
    assert trace.output == [f"line-{rank}-\nand more\nforced {rank}\nfrom C, without an end of line" for rank in range(2)]
    lines = capsys.readouterr().out.splitlines()
    end = "from C, without an end of line"
    assert [line for line in lines if "[rank 0]" in line] == [f"[rank 0] {text}" for text in ("line-0-", "and more", "forced 0", end)]
    assert [line for line in lines if "[rank 1]" in line] == [f"[rank 1] {text}" for text in ("forced 1", end)]


def test_the_first_failure_is_reported_with_the_users_line() -> None:
    import torch
    import torch.distributed as dist

    def worker() -> None:
        ring = ringsim.current_ring()
        ringsim.mark("started")
        if ring.rank == 1:
            dist.send(torch.zeros(4), ring.succ, group=ring.succ_group)
            print(1 / (ring.rank - 1))
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)

    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ringsim.trace(worker, world_size=4)
    assert time.monotonic() - start < 10  # not the 30 s of a blocked recv
    text = str(caught.value)
    assert text.startswith("rank 1 of 4 raised ZeroDivisionError: ")
    assert "print(1 / (ring.rank - 1))" in text
    assert f"line {worker.__code__.co_firstlineno + 5}, in worker" in text
    assert text.count("Traceback") == 1
    assert caught.value.rank == 1
    trace = caught.value.trace
    assert trace is not None
    assert trace.results == [None] * 4
    frame = trace.to_pandas()
    assert list(frame[frame.kind == "mark"]["rank"]) == [0, 1, 2, 3]
    assert len(trace.to_pandas("messages")) == 1
    assert trace.metadata["complete"] is False


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 of 3 failed: its process was ended by signal 9 \(SIGKILL\)"),
        (lambda: os._exit(7), "rank 1 of 3 failed: its process left with exit code 7"),
        (lambda: sys.exit(3), "rank 1 of 3 raised SystemExit: 3"),
    ],
)
def test_a_rank_that_dies_is_named(end: Callable[[], None], words: str) -> None:
    import torch
    import torch.distributed as dist

    def worker() -> None:
        ring = ringsim.current_ring()
        if ring.rank == 1:
            end()
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)

    with pytest.raises(RankFailed, match=words) as caught:
        ringsim.trace(worker, world_size=3)
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().status.tolist().count("ok") == 0


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(RankFailed, match="the result of the worker must be picklable, got a lock"):
        ringsim.trace(threading.Lock, world_size=1)


def test_a_run_ends_at_its_limit() -> None:
    start = time.monotonic()
    with pytest.raises(RunTimeout, match=r"within limit_s=0.5 s, got no result from ranks \[0, 1\] of 2") as caught:
        ringsim.trace(time.sleep, world_size=2, args=(100,), limit_s=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.trace is not None


def test_a_blocked_operation_ends_at_its_limit() -> None:
    import torch
    import torch.distributed as dist

    def worker() -> None:
        ring = ringsim.current_ring()
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)

    with pytest.raises(RankFailed, match=r"dist\.recv\(torch\.zeros\(4\), ring\.pred"):
        ringsim.trace(worker, world_size=2, timeout_s=1)


def test_an_interrupt_gives_the_trace_so_far() -> None:
    def worker() -> None:
        ringsim.mark("here")
        time.sleep(100)

    pids: list[int] = []

    def interrupt() -> None:
        server = get_launcher()._server
        assert server is not None
        children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children")
        until(lambda: len(children.read_text().split()) == 2, 20)
        pids.extend(map(int, children.read_text().split()))
        time.sleep(0.5)  # so that the marks are there
        os.kill(os.getpid(), signal.SIGINT)

    ringsim.trace(pass_round, world_size=1)
    get_launcher()._server  # noqa: B018 - the server is there before the thread looks for it
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        ringsim.trace(worker, world_size=2)
    thread.join()
    assert all(gone(pid) for pid in pids)
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().kind.tolist() == ["mark", "mark"]


def start_script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """Starts a script that traces, in a session and a temporary directory of its own."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    environment = {**os.environ, "TMPDIR": str(tmp_path / "theirs")}
    (tmp_path / "theirs").mkdir()
    return subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


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
    with start_script(tmp_path, SLEEPERS) as script:
        assert script.stdout is not None
        pids = [int(script.stdout.readline().split()[-1]) for _ in range(3)]
        os.kill(script.pid, how)
        assert until(lambda: all(gone(pid) for pid in pids), 1.0), "a rank is left"
        assert until(lambda: list((tmp_path / "theirs").iterdir()) == [], 2.0), "a file is left"


def test_no_rank_outlives_its_server(tmp_path: Path) -> None:
    with start_script(tmp_path, SLEEPERS) as script:
        assert script.stdout is not None
        pids = [int(script.stdout.readline().split()[-1]) for _ in range(3)]
        server = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(server, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids), 1.0)
        assert script.wait(20) == 1  # the caller gets an error, not a hang


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


def test_a_worker_may_build_its_own_group() -> None:
    def worker() -> tuple[int, int]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()

    assert ringsim.trace(worker, world_size=3, ring=False).results == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_may_initialise_as_a_script_does() -> None:
    def worker() -> int:
        environment = os.environ
        head, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        ringsim.initialize_distributed(head, port, 2, int(environment["RANK"]), int(environment["LOCAL_RANK"]), "cpu")
        return ringsim.current_ring().succ

    assert ringsim.trace(worker, world_size=2, ring=True).results == [1, 0]  # the values in force
    assert ringsim.trace(worker, world_size=2, ring=False).results == [1, 0]


@pytest.mark.timeout(180)
def test_runs_at_the_same_time_do_not_meet() -> None:
    results: dict[int, list[list[float]]] = {}

    def many(number: int) -> None:
        results[number] = [ringsim.trace(pass_round, world_size=2, kwargs={"step": 10.0 * number}).results for _ in range(100)]

    threads = [threading.Thread(target=many, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[1 + 10.0 * number, 0 + 10.0 * number]] * 100 for number in (1, 2)}


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


def test_parked_ranks_end_when_nobody_comes(private_temporary_directory: Path) -> None:
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
    monkeypatch.setattr(launcher, "has_fork_server", lambda: False)
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


def test_no_gpu_is_said_plainly() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ArgumentError, match="gpu"):
        ringsim.trace(pass_round, world_size=2, comm_device="gpu")
