"""Launching: what a worker finds and what comes back, one error for each bad end, and what is left of processes, sockets and files."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import pass_round, running_script
from processes import descendants, gone, listening, until

import ringsim
from ringsim.errors import ArgumentError, Deadlock, Interrupted, PeerExited, RankFailed, RunTimeout
from ringsim.launch import ranks
from ringsim.launch.job import Kind, start_environment
from ringsim.launch.ranks import EXIT_S, ForkedRanks, ForkServer, get_launcher

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


# -- what a worker finds, and what comes back


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_results_come_by_rank(world_size: int) -> None:
    trace = ringsim.trace(pass_round, world_size=world_size, args=(2,), kwargs={"step": 10.0})
    assert trace.world_size == world_size
    steps = 20.0 if world_size > 1 else 0.0
    assert trace.results == [(rank - 2) % world_size + steps for rank in range(world_size)]
    assert len(trace.to_pandas("messages")) == (2 * world_size if world_size > 1 else 0)
    assert len(trace.unmatched) == 0


def test_ranks_see_the_callers_surroundings_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen:  # a local class comes back as itself
        def __init__(self) -> None:
            self.pid = os.getpid()
            affinity = sorted(os.sched_getaffinity(0))
            self.place = os.environ.get("MY_SETTING"), "GONE" in os.environ, os.getcwd(), sys.path[0], sys.argv, affinity

    monkeypatch.setenv("GONE", "1")
    first = ringsim.trace(Seen, world_size=2).results  # parked ranks for the next call start under this environment
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MY_SETTING", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere/else")
    monkeypatch.setattr(sys, "argv", ["me", "--flag"])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        second = ringsim.trace(Seen, world_size=2).results
    finally:
        os.sched_setaffinity(0, before)
    assert all(isinstance(seen, Seen) for seen in first + second)
    assert [seen.place for seen in second] == [("now", False, str(tmp_path), "/somewhere/else", ["me", "--flag"], [min(before)])] * 2
    assert len({seen.pid for seen in first + second}) == 4, "a rank is never used twice"


def test_values_read_at_the_start_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert ringsim.trace(torch.get_num_threads, world_size=1).results == [1]
    monkeypatch.delenv("OMP_NUM_THREADS")
    crowded = ringsim.trace(torch.get_num_threads, world_size=(os.cpu_count() or 1) + 1)
    assert set(crowded.results) == {1}
    assert any("one torch thread per rank" in note for note in crowded.metadata["notes"])


def test_seeds_differ_by_rank_and_repeat_by_run() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    first = ringsim.trace(draw, world_size=2, seed=5).results
    torch.manual_seed(6)
    assert first[1][2] == float(torch.rand(1))
    assert first == ringsim.trace(draw, world_size=2, seed=5).results
    assert first[0] != first[1]
    assert first[1] == ringsim.trace(draw, world_size=1, seed=6).results[0]  # seed + rank


def test_output_is_kept_by_rank_and_shown_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    end = "from C, without an end of line"

    def talk() -> None:
        rank = ringsim.current_ring().rank
        print("line", rank, "\nand more", sep="-")
        print("forced", rank, force=True)  # type: ignore[call-overload]
        os.write(2, end.encode())

    assert ringsim.trace(talk, world_size=2).output == [f"line-{rank}-\nand more\nforced {rank}\n{end}" for rank in range(2)]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "[rank 0]" in line] == [f"[rank 0] {text}" for text in ("line-0-", "and more", "forced 0", end)]
    assert [line for line in lines if "[rank 1]" in line] == [f"[rank 1] {text}" for text in ("forced 1", end)]


def test_a_worker_may_initialise_as_a_script_does() -> None:
    def as_ringsim() -> int:
        at = os.environ
        ringsim.initialize_distributed(at["MASTER_ADDR"], int(at["MASTER_PORT"]), 2, int(at["RANK"]), int(at["LOCAL_RANK"]), "cpu")
        return ringsim.current_ring().succ

    def as_torch() -> int:
        dist.init_process_group("gloo")
        return dist.get_rank() + 10 * dist.get_world_size()

    assert ringsim.trace(as_ringsim, world_size=2, ring=True).results == [1, 0]  # the values in force
    assert ringsim.trace(as_ringsim, world_size=2, ring=False).results == [1, 0]
    assert ringsim.trace(as_torch, world_size=3, ring=False).results == [30, 31, 32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_plainly() -> None:
    with pytest.raises(ArgumentError, match="gpu"):
        ringsim.trace(pass_round, world_size=2, comm_device="gpu")


# -- one error for every way in which a run can end badly


def receives_from(rank: int, *, then: Callable[[], object] | None = None) -> None:
    """Every rank but one waits for a message from that one, which does something else."""
    if dist.get_rank() != rank:
        dist.recv(torch.zeros(4), rank)
    elif then is not None:
        then()


def test_the_first_failure_is_reported_with_the_users_line() -> None:
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
    trace = caught.value.trace
    assert trace is not None
    assert (caught.value.rank, trace.results, trace.metadata["complete"]) == (1, [None] * 4, False)
    frame = trace.to_pandas()
    assert list(frame[frame.kind == "mark"]["rank"]) == [0, 1, 2, 3]
    assert len(trace.to_pandas("messages")) == 1


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 of 3 failed: its process was ended by signal 9 \(SIGKILL\)"),
        (lambda: os._exit(7), "rank 1 of 3 failed: its process left with exit code 7"),
        (lambda: sys.exit(3), "rank 1 of 3 raised SystemExit: 3"),
    ],
)
def test_a_rank_that_dies_is_named(end: Callable[[], None], words: str) -> None:
    with pytest.raises(RankFailed, match=words) as caught:
        ringsim.trace(receives_from, world_size=3, args=(1,), kwargs={"then": end})
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().status.tolist().count("ok") == 0


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(RankFailed, match="the result of the worker must be picklable, got a lock"):
        ringsim.trace(threading.Lock, world_size=1)


def test_a_run_and_a_blocked_operation_end_at_their_limits() -> None:
    start = time.monotonic()
    with pytest.raises(RunTimeout, match=r"within limit_s=0.5 s, got no result from ranks \[0, 1\] of 2") as caught:
        ringsim.trace(time.sleep, world_size=2, args=(100,), limit_s=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.trace is not None
    with pytest.raises(RankFailed, match=r"dist\.recv\(torch\.zeros\(4\), rank"):  # the other might still send: only the limit knows better
        ringsim.trace(receives_from, world_size=2, args=(1,), kwargs={"then": lambda: time.sleep(100)}, timeout_s=1)


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
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        ringsim.trace(worker, world_size=2)
    thread.join()
    assert all(gone(pid) for pid in pids)
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().kind.tolist() == ["mark", "mark"]


# -- ranks with processes of their own, which keep a dead rank's channel and connections open unless they end with it


LONG_S = 50.0  # what a child would take
KEPT: list[object] = []  # what a rank must not drop


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return pid


def start_process(close_fds: bool = True, new_session: bool = False) -> int:
    return subprocess.Popen(["sleep", str(LONG_S)], close_fds=close_fds, start_new_session=new_session).pid


def start_process_with_all_files() -> int:
    return start_process(close_fds=False)


def load_in_workers() -> int:
    data = torch.utils.data.TensorDataset(torch.arange(100_000))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, num_workers=2))
    next(batches)
    KEPT.append(batches)
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(1)


def fail() -> None:
    raise ValueError("no such layer")


def come_back() -> None:
    pass


def ends_with_a_child(begin: Callable[[], int], end: Callable[[], None], written: Path) -> None:
    if dist.get_rank() == 1:
        written.write_text(str(begin()))
        end()
        return
    dist.recv(torch.zeros(4), 1)


@pytest.mark.parametrize(
    ("begin", "end", "kind"),
    [
        (fork, kill, "peer_exited"),
        (fork, leave, "rank_failed"),
        (fork, come_back, "peer_exited"),
        (start_process_with_all_files, kill, "peer_exited"),
        (load_in_workers, kill, "peer_exited"),
        (load_in_workers, fail, "rank_failed"),
    ],
)
def test_end_of_a_rank_is_seen_though_its_child_lives(begin: Callable[[], int], end: Callable[[], None], kind: str, tmp_path: Path) -> None:
    """A killed rank was found out when its child ended; whoever else had one, it took 5 s more to go on."""
    with pytest.raises(RankFailed if end is not come_back else PeerExited) as caught:
        ringsim.trace(ends_with_a_child, world_size=2, args=(begin, end, tmp_path / "pid"), limit_s=30)
    error, child = caught.value, int((tmp_path / "pid").read_text())
    assert until(lambda: gone(child), 1.0), "the child is left"
    assert error.diagnosis is not None
    assert (error.diagnosis.kind, 1 in error.diagnosis.findings[0].ranks) == (kind, True), str(error.diagnosis)
    assert error.trace is not None
    first_ns, last_ns = error.trace.metadata["given_up_ns"], error.trace.metadata["end_ns"]
    assert last_ns - first_ns < EXIT_S * 1e9  # for a channel that stays open it is waited that long


def test_a_child_ends_with_its_rank_unless_it_leads_a_session() -> None:
    def has_children() -> tuple[int, int]:
        return fork(), start_process(new_session=True)

    (child, service), *_ = ringsim.trace(has_children, world_size=1, limit_s=30).results
    assert until(lambda: gone(child), 1.0), "the child is left"
    assert not gone(service)
    os.kill(service, signal.SIGKILL)
    assert until(lambda: gone(service), 5.0)


# -- whoever dies first, and how often one launches


SLEEPERS = """
    import os, subprocess, sys, time
    import ringsim
    def worker():
        print(os.getppid(), os.getpid(), subprocess.Popen(["sleep", "50"]).pid, force=True)
        time.sleep(100)
    ringsim.trace(worker, world_size=3)
"""


def pids_of(script: subprocess.Popen[str]) -> tuple[int, list[int]]:
    """Returns the process of the fork server, and those of the ranks and their children, once all are there."""
    assert script.stdout is not None
    rows = [[int(word) for word in script.stdout.readline().split()[2:]] for _ in range(3)]
    return rows[0][0], [pid for _, *pids in rows for pid in pids]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_and_no_child_of_one_outlives_its_launcher(tmp_path: Path, how: signal.Signals) -> None:
    with running_script(tmp_path, SLEEPERS) as script:
        _, pids = pids_of(script)
        os.kill(script.pid, how)
        assert until(lambda: all(gone(pid) for pid in pids), 2.0), "a process is left"
        assert until(lambda: list((tmp_path / "theirs").iterdir()) == [], 2.0), "a file is left"


def test_no_rank_outlives_its_server(tmp_path: Path) -> None:
    with running_script(tmp_path, SLEEPERS) as script:
        server, pids = pids_of(script)
        os.kill(server, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids[::2]), 1.0), "a rank is left"
        for child in pids[1::2]:  # nobody is there to end them
            os.kill(child, signal.SIGKILL)
        assert script.wait(20) == 1  # the caller gets an error, not a hang


def test_no_rank_is_left_when_an_error_arrives() -> None:
    """A closed channel is not enough: its rank may still be exiting, or wait to be reaped."""

    def wait_for_each_other() -> None:
        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    def sleep_and_fail() -> None:
        if ringsim.current_ring().rank == 0:
            raise ValueError("no such layer")
        time.sleep(100)

    for worker, error in [(wait_for_each_other, Deadlock), (sleep_and_fail, RankFailed)] * 2:
        with pytest.raises(error):
            ringsim.trace(worker, world_size=2)
        assert not [name for name in descendants(os.getpid()).values() if name.startswith("ringsim-rank")]


def test_nothing_listens_beyond_loopback() -> None:
    def worker(ring: bool) -> set[str]:
        if not ring:
            dist.init_process_group("gloo")
        dist.new_group([0, 1])  # a group of the worker's own stays there, too
        return listening()

    for ring in (True, False):
        addresses = set().union(*ringsim.trace(worker, world_size=2, args=(ring,), ring=ring).results)
        assert addresses, "every rank listens: Gloo's pairs connect to it"
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}, addresses


def test_runs_at_the_same_time_do_not_meet() -> None:
    results: dict[int, list[list[float]]] = {}

    def many(number: int) -> None:
        results[number] = [ringsim.trace(pass_round, world_size=2, kwargs={"step": 10.0 * number}).results for _ in range(10)]

    threads = [threading.Thread(target=many, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[1 + 10.0 * number, 0 + 10.0 * number]] * 10 for number in (1, 2)}


def test_many_runs_leak_nothing() -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        kib = int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), kib

    for _ in range(5):
        ringsim.trace(pass_round, world_size=2)
    fds, threads, kib = resources()
    for _ in range(40):
        ringsim.trace(pass_round, world_size=2)
    fds_after, threads_after, kib_after = resources()
    assert (fds_after, threads_after) == (fds, threads)
    assert kib_after - kib < 4096  # a run's trace takes some 10 KiB, a record that is kept 100


def test_parked_ranks_end_when_nobody_comes() -> None:
    server = ForkServer()
    try:
        parked = ForkedRanks(server, Kind(2, "cpu", 30.0, True, start_environment()), park_s=2.0)
        pids = [channel.recv()[1] for channel in parked.channels]
        assert not any(gone(pid) for pid in pids)
        assert until(lambda: all(gone(pid) for pid in pids), 5.0)
        assert until(lambda: not parked.directory.exists(), 1.0)
        assert not parked.take()
        parked.close()
    finally:
        server.close()


def test_works_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "has_fork_server", lambda: False)
    trace = ringsim.trace(pass_round, world_size=2, kwargs={"step": 3.0})
    assert trace.results == [4.0, 3.0]
    assert len(trace.to_pandas("messages")) == 2
    with pytest.raises(RankFailed, match="SIGKILL"):
        ringsim.trace(lambda: os.kill(os.getpid(), signal.SIGKILL), world_size=1)


def test_works_in_a_script_without_a_guard_and_in_python_c(tmp_path: Path) -> None:
    text = textwrap.dedent("""
        import ringsim
        print("once")
        class Thing:
            pass
        def worker():
            return ringsim.current_ring().rank, Thing()
        results = ringsim.trace(worker, world_size=2).results
        print([rank for rank, _ in results], all(isinstance(thing, Thing) for _, thing in results))
    """)
    (tmp_path / "script.py").write_text(text)
    commands = ([sys.executable, str(tmp_path / "script.py")], [sys.executable, "-c", text])
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    assert [process.communicate(timeout=50) for process in running] == [("once\n[0, 1] True\n", "")] * 2


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
