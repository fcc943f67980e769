"""Launching.

What a worker finds and what comes back, one error for each bad end, and what is left of processes,
sockets and files.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import descendants, gone, listening, listening_ports, until

import ringsim
from ringsim.errors import Deadlock, Interrupted, PeerExited, RankFailed, RingError, RunTimeout
from ringsim.launch import ranks, run
from ringsim.launch.job import Kind, start_environment
from ringsim.launch.ranks import ForkedRanks, get_launcher
from ringsim.launch.results import read_result, write_result

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
Raised = TypeVar("Raised", bound=BaseException)


def pass_round(rounds: int = 1, *, step: float = 1.0) -> float:
    """Passes a number round the ring; every rank adds to it."""
    ring = ringsim.current_ring()
    token = torch.tensor([float(ring.rank)])
    for _ in range(rounds if ring.world_size > 1 else 0):
        sent = dist.isend(token + step, ring.succ, group=ring.succ_group)
        dist.recv(token := torch.empty(1), ring.pred, group=ring.pred_group)
        sent.wait()
    return float(token)


def fails(error: type[Raised], words: str | None, *call: Any, **options: Any) -> Raised:
    """Makes a run that ends badly, and returns its error.

    All ranks are gone, and reaped, by then.
    """
    with pytest.raises(error, match=words) as caught:
        ringsim.trace(*call, **options)
    assert not [
        name for name in descendants(os.getpid()).values() if name.startswith("ringsim-rank")
    ]
    return caught.value


# -- what a worker finds, and what comes back


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_results_come_by_rank(world_size: int) -> None:
    trace = ringsim.trace(pass_round, world_size=world_size, args=(2,), kwargs={"step": 10.0})
    assert trace.world_size == world_size
    steps = 20.0 if world_size > 1 else 0.0
    assert trace.results == [(rank - 2) % world_size + steps for rank in range(world_size)]
    assert len(trace.to_pandas("messages")) == (2 * world_size if world_size > 1 else 0)
    assert len(trace.unmatched) == 0


def large_result() -> tuple[Any, ...]:
    whole = torch.arange(2.0**20).reshape(1024, 1024)
    tied = whole.to(torch.bfloat16)
    return (
        whole,
        tied,
        tied,
        whole.t(),
        whole.clone().requires_grad_(),
        torch.nn.Linear(512, 512),
        whole.numpy(),
        [],
        torch.ones(()),
        whole > 3,
    )


def test_large_results_are_mapped_and_belong_to_the_caller(tmp_path: Path) -> None:
    expected = large_result()
    for result in ringsim.trace(large_result, world_size=2).results:
        for got, sent in zip(result, expected, strict=True):
            if isinstance(sent, torch.Tensor):
                assert (got.dtype, got.requires_grad) == (sent.dtype, sent.requires_grad)
                assert torch.equal(got, sent)
        result[0][0] = -1.0  # one's own
        assert float(result[0][0].sum()) == -1024
        assert result[1] is result[2]
        assert np.array_equal(result[6], expected[6])
        assert result[5](torch.ones(512)).requires_grad
    spans = write_result(expected, tmp_path / "result")
    assert [end - start for start, end in spans[1:]] == [
        4 << 20,
        2 << 20,
        1 << 20,
        4 << 20,
        1 << 20,
    ]
    assert spans[0][1] < 10 << 20, (
        "only what is no plain tensor is in the pickle: a transposed one and one with a gradient"
    )
    assert torch.equal(read_result(tmp_path / "result", spans)[0], expected[0])
    assert list(tmp_path.iterdir()) == []


def test_ranks_see_the_callers_surroundings_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen:  # a local class comes back as itself
        def __init__(self) -> None:
            self.pid = os.getpid()
            affinity = sorted(os.sched_getaffinity(0))
            self.place = (
                os.environ.get("MY_SETTING"),
                "GONE" in os.environ,
                os.getcwd(),
                sys.path[0],
                sys.argv,
                affinity,
            )
            self.drawn = random.random(), float(np.random.rand()), float(torch.rand(1))

    monkeypatch.setenv("GONE", "1")
    # parked ranks for the next call start under this environment
    first = ringsim.trace(Seen, world_size=2, seed=5).results
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MY_SETTING", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere/else")
    monkeypatch.setattr(sys, "argv", ["me", "--flag"])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        second = ringsim.trace(Seen, world_size=2, seed=5).results
    finally:
        os.sched_setaffinity(0, before)
    assert all(isinstance(seen, Seen) for seen in first + second)
    assert [seen.place for seen in second] == [
        ("now", False, str(tmp_path), "/somewhere/else", ["me", "--flag"], [min(before)])
    ] * 2
    assert len({seen.pid for seen in first + second}) == 4, "a rank is never used twice"
    assert [seen.drawn for seen in first] == [seen.drawn for seen in second]
    assert first[0].drawn != first[1].drawn
    torch.manual_seed(6)  # the seed and the rank
    assert first[1].drawn[2] == float(torch.rand(1))
    assert first[1].drawn == ringsim.trace(Seen, world_size=1, seed=6).results[0].drawn


def test_crowded_ranks_compute_with_one_thread() -> None:
    crowded = ringsim.trace(torch.get_num_threads, world_size=(os.cpu_count() or 1) + 1)
    assert set(crowded.results) == {1}
    assert any("one torch thread per rank" in note for note in crowded.metadata["notes"])


def test_output_is_kept_by_rank_and_shown_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    end = "from C, without an end of line"

    def talk() -> None:
        rank = ringsim.current_ring().rank
        print("line", rank, "\nand more", sep="-")
        print("forced", rank, force=True)  # type: ignore[call-overload]
        os.write(2, end.encode())

    assert ringsim.trace(talk, world_size=2).output == [
        f"line-{rank}-\nand more\nforced {rank}\n{end}" for rank in range(2)
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "[rank 0]" in line] == [
        f"[rank 0] {text}" for text in ("line-0-", "and more", "forced 0", end)
    ]
    assert [line for line in lines if "[rank 1]" in line] == [
        f"[rank 1] {text}" for text in ("forced 1", end)
    ]


def test_what_is_printed_comes_out_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    r"""In 0.2.0 ``print("\x0e")`` hid what the rank printed after it."""
    control = "".join(map(chr, {*range(32), 127, 0x85, 0x2028} - {ord("\n")}))

    def worker() -> str:
        print(control)
        print("after it", force=True)
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            print(control)
        return caught.getvalue().replace(control, "")

    trace = ringsim.trace(worker, world_size=2)
    assert trace.output == [f"{control}\nafter it\n", f"{control}\nafter it\n{control}\n"]
    lines = capsys.readouterr().out.split("\n")
    assert sorted(lines) == sorted(
        ["", f"[rank 0] {control}", "[rank 0] after it", "[rank 1] after it"]
    )
    assert trace.results == ["\n", ""]


def test_a_worker_may_initialise_as_a_script_does_and_listens_on_loopback_alone() -> None:
    def as_ringsim() -> int:
        at = os.environ
        ringsim.initialize_distributed(
            at["MASTER_ADDR"],
            int(at["MASTER_PORT"]),
            2,
            int(at["RANK"]),
            int(at["LOCAL_RANK"]),
            "cpu",
        )
        return ringsim.current_ring().succ

    def as_torch() -> int:
        dist.init_process_group("gloo")
        return 1 - dist.get_rank()

    def worker(initialise: Callable[[], int]) -> tuple[int, set[str]]:
        succ = initialise()
        dist.new_group([0, 1])  # a group of the worker's own stays on loopback, too
        return succ, listening()

    # first, the values in force
    for initialise, ring in ((as_ringsim, True), (as_ringsim, False), (as_torch, False)):
        results = ringsim.trace(worker, world_size=2, args=(initialise,), ring=ring).results
        assert [succ for succ, _ in results] == [1, 0]
        addresses = set().union(*(seen for _, seen in results))
        assert addresses, "every rank listens: Gloo's pairs connect to it"
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}, addresses


def test_what_a_run_leaves_is_for_its_user_alone() -> None:
    """Its directories are 0700 while the ranks run, whatever the umask allows.

    Nobody else gets at the files in them.
    """
    there = Path(tempfile.gettempdir())

    def modes() -> dict[str, int]:
        return {str(path.relative_to(there)): path.lstat().st_mode for path in there.rglob("*")}

    before = os.umask(0)
    try:
        # five: not those that were parked before
        found = ringsim.trace(modes, world_size=5).results[0]
    finally:
        os.umask(before)
    assert {stat.S_IMODE(mode) for mode in found.values() if stat.S_ISDIR(mode)} == {0o700}
    files = [name for name, mode in found.items() if not stat.S_ISDIR(mode)]
    assert any(name.endswith(".events") for name in files), "the look found what the ranks write"
    assert all("/" in name for name in files), "every file lies in one of them"


# -- one error for every way in which a run can end badly


def test_the_first_failure_is_reported_with_the_users_line() -> None:
    def worker() -> None:
        ring = ringsim.current_ring()
        ringsim.mark("started")
        if ring.rank == 1:
            dist.send(torch.zeros(4), ring.succ, group=ring.succ_group)
            print(1 / (ring.rank - 1))
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)
        dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)

    words = "^rank 1 of 4 raised ZeroDivisionError: "
    # If the blocked recv were waited for, the test would reach its limit.
    error = fails(RankFailed, words, worker, world_size=4, timeout_s=1000.0)
    text, trace = str(error), error.trace
    assert "print(1 / (ring.rank - 1))" in text
    assert f"line {worker.__code__.co_firstlineno + 5}, in worker" in text
    assert text.count("Traceback") == 1
    assert trace is not None
    assert (error.rank, trace.results, trace.metadata["complete"]) == (1, [None] * 4, False)
    frame = trace.to_pandas()
    assert list(frame[frame.kind == "mark"]["rank"]) == [0, 1, 2, 3]
    assert len(trace.to_pandas("messages")) == 1


def wait_for(rank: int, then: Callable[[], object]) -> None:
    """Every rank but one waits for a message from that one, which does something else."""
    if dist.get_rank() != rank:
        dist.recv(torch.zeros(4), rank)
    else:
        then()


def test_other_bad_ends() -> None:
    fails(
        RankFailed,
        "the result of the worker must be picklable, got a lock",
        threading.Lock,
        world_size=1,
    )
    fails(Deadlock, None, lambda: dist.recv(torch.zeros(4), 1 - dist.get_rank()), world_size=2)
    fails(
        RankFailed,
        "rank 1 of 3 raised SystemExit: 3",
        wait_for,
        world_size=3,
        args=(1, lambda: sys.exit(3)),
    )
    # Some other rank might still send: only the limit of an operation, and that of the run, know
    # better.
    fails(
        RankFailed,
        r"dist\.recv\(torch\.zeros\(4\), rank\)",
        wait_for,
        world_size=2,
        args=(1, lambda: time.sleep(100)),
        timeout_s=1,
    )
    late = fails(
        RunTimeout,
        r"limit_s=0.5 s, got no result from ranks \[0, 1\] of 2",
        time.sleep,
        world_size=2,
        args=(100,),
        limit_s=0.5,
    )
    assert late.trace is not None


def test_an_interrupt_gives_the_trace_so_far(tmp_path: Path) -> None:
    def worker() -> None:
        ringsim.mark("here")
        (tmp_path / str(os.getpid())).touch()
        time.sleep(100)

    def interrupt() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    error = fails(Interrupted, None, worker, world_size=2)
    thread.join()
    assert error.trace is not None
    assert error.trace.to_pandas().kind.tolist() == ["mark", "mark"]


def test_a_rank_hears_the_interrupt_that_it_sends_itself() -> None:
    """In 0.2.0 ranks ignored SIGINT."""

    def worker(catches: bool) -> str:
        if ringsim.current_ring().rank == 0:
            return "nothing"
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not catches:
                raise
        return "caught"

    assert ringsim.trace(worker, world_size=2, args=(True,)).results == ["nothing", "caught"]
    fails(RankFailed, "rank 1 of 2 raised KeyboardInterrupt", worker, world_size=2, args=(False,))


INTERRUPTED = """
    import os, pathlib, signal, sys, time
    import ringsim

    os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it this session's terminal
    there, calls = pathlib.Path(sys.argv[1]), []

    def worker():
        signal.signal(signal.SIGINT, lambda *_: (there / f"heard-{os.getpid()}").touch())
        (there / f"rank-{os.getpid()}").touch()
        time.sleep(100)

    try:
        ringsim.trace(worker, world_size=2)
    except ringsim.errors.Interrupted as error:
        calls.append(error)
    time.sleep(0.1)  # a second interrupt would end it here
    print("interrupted", len(calls), "time")
"""


def test_a_terminals_interrupt_ends_all_ranks_and_reaches_the_caller_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    (there := tmp_path / "there").mkdir()
    keyboard, terminal = os.openpty()
    with open(keyboard, "wb", buffering=0) as keys:
        command = [sys.executable, str(script), str(there)]
        process = subprocess.Popen(
            command, stdin=terminal, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        os.close(terminal)
        assert until(lambda: len(list(there.iterdir())) == 2, 40)
        keys.write(b"\x03")
        said, _ = process.communicate()
    assert (said, process.returncode) == ("interrupted 1 time\n", 0)
    names = sorted(path.name for path in there.iterdir())
    assert [name.partition("-")[0] for name in names] == ["rank", "rank"]
    assert until(lambda: all(gone(int(name.partition("-")[2])) for name in names), 5)


# -- ranks with processes of their own, which keep a dead rank's channel and connections open unless
# they end with it


LONG_S = 50.0  # what a child would take
KEPT: list[object] = []  # what a rank must not drop


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return pid


def start_process(new_session: bool = False) -> int:
    """It has all the files of the rank."""
    return subprocess.Popen(
        ["sleep", str(LONG_S)], close_fds=False, start_new_session=new_session
    ).pid


def load_in_workers() -> int:
    data = torch.utils.data.TensorDataset(torch.arange(100_000))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, num_workers=2))
    next(batches)
    KEPT.append(batches)
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def fail() -> None:
    raise ValueError("no such layer")


@pytest.mark.parametrize(
    ("begin", "end", "kind", "words"),
    [
        (
            fork,
            kill,
            "peer_exited",
            r"rank 1 of 2 failed: its process was ended by signal 9 \(SIGKILL\)",
        ),
        (fork, print, "peer_exited", None),
        (
            start_process,
            leave,
            "rank_failed",
            "rank 1 of 2 failed: its process left with exit code 7",
        ),
        (load_in_workers, fail, "rank_failed", "rank 1 of 2 raised ValueError: no such layer"),
    ],
)
def test_end_of_a_rank_is_seen_though_its_child_lives(
    begin: Callable[[], int],
    end: Callable[[], None],
    kind: str,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed rank was found out when its child ended.

    Others that had one went on ``EXIT_S`` later: here long enough to tell.
    """
    monkeypatch.setattr("ringsim.launch.ranks.EXIT_S", 50.0)

    def begin_and_end() -> None:
        (tmp_path / "pid").write_text(str(begin()))
        end()

    error: RankFailed | PeerExited = fails(
        PeerExited if end is print else RankFailed,
        words,
        wait_for,
        world_size=2,
        args=(1, begin_and_end),
        limit_s=30,
    )
    child = int((tmp_path / "pid").read_text())
    assert until(lambda: gone(child)), "the child is left"
    assert error.diagnosis is not None
    assert (error.diagnosis.kind, 1 in error.diagnosis.findings[0].ranks) == (kind, True), str(
        error.diagnosis
    )
    assert error.trace is not None
    assert "ok" not in error.trace.to_pandas().query("rank == 0").status.tolist()
    first_ns, last_ns = error.trace.metadata["given_up_ns"], error.trace.metadata["end_ns"]
    assert last_ns - first_ns < 50e9  # for a channel that stays open it is waited that long


def test_a_child_ends_with_its_rank_unless_it_leads_a_session() -> None:
    (child, service), *_ = ringsim.trace(
        lambda: (fork(), start_process(new_session=True)), world_size=1
    ).results
    assert until(lambda: gone(child)), "the child is left"
    assert not gone(service)
    os.kill(service, signal.SIGKILL)
    assert until(lambda: gone(service))


# -- whoever dies first, and how often one launches


SCRIPT = """
    import os, subprocess, time
    import ringsim
    print("once", flush=True)
    class Thing:
        pass
    def worker():
        return ringsim.current_ring().rank, Thing()
    def sleeper():
        print(os.getpid(), subprocess.Popen(["sleep", "50"]).pid, force=True)
        time.sleep(100)
    results = ringsim.trace(worker, world_size=2).results
    print([rank for rank, _ in results], all(isinstance(thing, Thing) for _, thing in results), flush=True)
    ringsim.trace(sleeper, world_size=2)
"""  # noqa: E501


def test_a_script_needs_no_guard_and_no_rank_and_no_child_of_one_outlives_it(
    tmp_path: Path,
) -> None:
    """Neither a script, whatever its name, nor what follows ``python -c``.

    However Python was started, and whatever signal ends it.
    """
    scripts = "script.py", os.fsdecode(b"\xe9.py")
    for name in scripts:
        (tmp_path / name).write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    how = {
        signal.SIGINT: ("script.py",),
        signal.SIGKILL: ("-c", textwrap.dedent(SCRIPT)),
        signal.SIGTERM: ("-OO", "-I", "script.py"),
        signal.SIGHUP: ("-X", "dev", scripts[1]),
    }
    running = {
        number: subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # the tests may run under nohup
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        for number, words in how.items()
    }
    pids: list[int] = []
    try:
        for number, process in running.items():
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[:2] == ["once\n", "[0, 1] True\n"]
            pids += [int(pid) for line in lines[2:] for pid in line.split()[2:]]
            process.send_signal(number)
        until(lambda: all(gone(pid) for pid in pids))  # four servers end their ranks side by side
        assert [
            (pids.index(pid), Path(f"/proc/{pid}/cmdline").read_text())
            for pid in pids
            if not gone(pid)
        ] == [], "a process is left"
        assert until(
            lambda: (
                [path.name for path in tmp_path.iterdir()] in (list(scripts), [*reversed(scripts)])
            )
        ), "a file is left"
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    assert len(pids) == 16


@contextlib.contextmanager
def going_on(there: Path) -> Iterator[tuple[Future[ringsim.Trace], list[int]]]:
    """Keeps a run of another thread going for the length of a block.

    Gives its future, and the processes of its ranks.
    """

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
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker() -> None:
        (tmp_path / str(os.getpid())).touch()
        if ringsim.current_ring().rank == 0:
            until(lambda: len(list(tmp_path.iterdir())) == 2)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    with going_on(tmp_path_factory.mktemp("other") / "run") as (other, _):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert ringsim.trace(torch.get_num_threads, world_size=1).results == [1]
    assert other.result().results == [0, 1]  # of the server before
    fails(RingError, None, worker, world_size=2)  # not a hang
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert until(lambda: all(gone(int(path.name)) for path in tmp_path.iterdir())), "a rank is left"
    assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]  # of another server


def test_runs_at_the_same_time_do_not_meet() -> None:
    results: dict[int, list[list[float]]] = {}

    def many(number: int) -> None:
        results[number] = [
            ringsim.trace(pass_round, world_size=2, kwargs={"step": 10.0 * number}).results
            for _ in range(3)
        ]

    threads = [threading.Thread(target=many, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[1 + 10.0 * number, 0 + 10.0 * number]] * 3 for number in (1, 2)}


def test_many_runs_leak_nothing() -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        kib = int(Path("/proc/self/statm").read_text().split()[1]) * (
            os.sysconf("SC_PAGE_SIZE") // 1024
        )
        return len(os.listdir("/proc/self/fd")), threading.active_count(), kib

    for _ in range(3):
        ringsim.trace(pass_round, world_size=2)
    fds, threads, kib = resources()
    for _ in range(12):
        ringsim.trace(pass_round, world_size=2)
    fds_after, threads_after, kib_after = resources()
    assert (fds_after, threads_after) == (fds, threads)
    assert kib_after - kib < 12 * 100  # a run's trace takes some 10 KiB, a record that is kept 100


def test_parked_ranks_end_when_nobody_comes() -> None:
    ringsim.trace(pass_round, world_size=2)
    server = get_launcher()._server
    assert server is not None
    parked = ForkedRanks(server, Kind(2, "cpu", 30.0, True, start_environment()), park_s=1.5)
    pids = [channel.recv()[1] for channel in parked.channels]
    assert not any(gone(pid) for pid in pids)
    assert until(lambda: all(gone(pid) for pid in pids))
    assert until(lambda: not parked.directory.exists())
    assert not parked.take()
    parked.close()


def test_a_call_just_when_parked_ranks_end_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 0.2.0 the launcher looked for traces of their end, which came after it.

    About half of such calls failed.
    """
    park_s = 0.2
    monkeypatch.setattr(ranks, "PARKED_S", park_s)
    for step in range(12):
        time.sleep(park_s - 0.03 + step * 0.005)
        assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]


def knock(port: int) -> str:
    """Connects to a port of loopback, and says what came of it."""
    try:
        # not create_connection, which imports what another user may not read
        with socket.socket() as connection:
            connection.settimeout(0.2)
            connection.connect(("127.0.0.1", port))
            connection.sendall(bytes(64))
            return "answer" if connection.recv(1) else "end"
    except OSError as error:
        return type(error).__name__


def knock_as_another_user(ports: list[int]) -> set[str]:
    """Connects to ports of loopback, as nobody if this is root, and says what came of each."""
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
        ring, place = (
            ringsim.current_ring(),
            (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        )
        store = dist.TCPStore(*place, is_master=False)
        held = store.check(["ringsim/0/head"])  # of the roll-call, in the store that they met over
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # over env://, as under torchrun
        dist.all_reduce(total := torch.ones(1))
        return ring.port - place[1], held, total.item()

    assert ringsim.trace(meet_anew, world_size=2).results == [(0, False, 2.0)] * 2
    server = get_launcher()._server
    assert server is not None
    parked = ForkedRanks(server, Kind(2, "cpu", 30.0, True, start_environment()), park_s=20)
    pids = [channel.recv()[1] for channel in parked.channels]
    assert knock_as_another_user([int(parked.config.port_file.read_text())]) == {
        "ConnectionRefusedError"
    }
    assert knock_as_another_user([port for pid in pids for port in listening_ports(pid)]) <= {
        "TimeoutError",
        "end",
        "ConnectionResetError",
    }
    parked.close()


def test_ranks_do_without_a_fork_server_that_is_stopped_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", 0.5)
    monkeypatch.setattr(ranks, "EXIT_S", 0.2)  # nobody says that its ranks have ended
    monkeypatch.setattr(run, "_LOST_S", 0.2)
    with going_on(tmp_path / "dying") as (dying, pids), going_on(tmp_path / "other") as (other, _):
        stopped = get_launcher()._server
        assert stopped is not None
        os.kill(stopped._process.pid, signal.SIGSTOP)
        assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]
        assert get_launcher()._server is not stopped
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 0 of 2 failed: its process is gone"):
            dying.result()
    assert other.result().results == [0, 1]
    assert gone(stopped._process.pid)


def test_a_fork_server_obeys_to_the_last_word(tmp_path: Path) -> None:
    ringsim.trace(pass_round, world_size=2)
    server = get_launcher()._server
    assert server is not None
    directory = tmp_path / "ringsim-of-a-run"
    directory.mkdir()
    # and the answer is not read: the server's next look at the socket is an error
    server._put("answer", "")
    assert select.select([server._control], [], [], 5.0)[0]
    os.kill(server._process.pid, signal.SIGSTOP)
    server.send({"do": "end", "set": "that has ended", "directory": str(directory)})
    server._control.close()
    os.kill(server._process.pid, signal.SIGCONT)
    get_launcher().close()
    assert not directory.exists()


def test_ranks_that_never_come_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranks, run):
        monkeypatch.setattr(module, "START_S", 0.2)  # loading torch takes longer
    for limit_s in (None, 60):
        get_launcher().close()
        fails(
            RingError,
            r"ranks must come up within 0\.2 s, got 0 of 2 by then\. Call again",
            pass_round,
            world_size=2,
            limit_s=limit_s,
        )
    monkeypatch.undo()
    assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]


def test_works_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker() -> float:
        result = pass_round(step=3.0)
        if ringsim.current_ring().rank == 1:
            time.sleep(0.3)  # so that the other's result is there
            kill()
        return result

    monkeypatch.setattr(ranks, "has_fork_server", lambda: False)
    trace = fails(
        RankFailed, r"rank 1 of 2 failed: .* by signal 9 \(SIGKILL\)", worker, world_size=2
    ).trace
    assert trace is not None
    assert (trace.results, len(trace.to_pandas("messages"))) == ([4.0, None], 2)


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


def logged() -> None:
    logging.getLogger("mine").info("is said")
    logging.getLogger("quiet").warning("is not said")
    sys.exit(0)


def test_a_rank_logs_as_its_caller_and_may_exit_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s of %(name)s: %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger("quiet"), "level", logging.ERROR)
    trace = ringsim.trace(logged, world_size=2)
    assert (trace.results, trace.output) == ([None] * 2, ["INFO of mine: is said\n"] * 2)


def test_a_decorator_runs_on_ranks() -> None:
    run = ringsim.traced(world_size=2, ring=False)(lambda number, *, more: number + more)
    assert run(1, more=2).results == [3, 3]
    with pytest.raises(TypeError, match=r"Write @ringsim.traced\(world_size=4\)"):
        ringsim.traced(logged)
