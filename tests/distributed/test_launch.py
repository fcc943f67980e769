"""Launching: the worker's environment, its results, and one error for each failure."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import descendants, gone, listening, until

import ringsim
from ringsim.errors import RankFailed, RingError, RunTimeout

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def pass_round(rounds: int = 1, *, step: float = 1.0) -> float:
    """Passes a number around the ring; every rank adds to it."""
    ring = ringsim.current_ring()
    token = torch.tensor([float(ring.rank)])
    for _ in range(rounds):
        sent = dist.isend(token + step, ring.succ, group=ring.succ_group)
        dist.recv(token := torch.empty(1), ring.pred, group=ring.pred_group)
        sent.wait()
    return float(token)


def fails(error: type[BaseException], words: str | None, *call: Any, **options: Any) -> Any:
    """Makes a run that fails, and returns its error; all ranks are gone by then."""
    with pytest.raises(error, match=words) as caught:
        ringsim.trace(*call, **options)
    left = descendants(os.getpid()).values()
    assert not [name for name in left if name.startswith("ringsim-rank")]
    return caught.value


# -- the worker's environment, and its results


def test_results_come_by_rank() -> None:
    trace = ringsim.trace(pass_round, world_size=3, args=(2,), kwargs={"step": 10.0})
    assert trace.results == [21.0, 22.0, 20.0]
    assert len(trace.to_pandas("messages")) == 6
    assert trace.unmatched == []


def large_result() -> tuple[Any, ...]:
    whole = torch.arange(2.0**20).reshape(1024, 1024)
    tied = whole.to(torch.bfloat16)
    with_gradient, layer = whole.clone().requires_grad_(), torch.nn.Linear(512, 512)
    return whole, tied, tied, whole.t(), with_gradient, layer, whole.numpy(), [], torch.ones(())


def test_large_results_belong_to_the_caller() -> None:
    expected = large_result()
    for result in ringsim.trace(large_result, world_size=2).results:
        for got, sent in zip(result, expected, strict=True):
            if isinstance(sent, torch.Tensor):
                assert (got.dtype, got.requires_grad) == (sent.dtype, sent.requires_grad)
                assert torch.equal(got, sent)
        result[0][0] = -1.0  # a result can be changed
        assert float(result[0][0].sum()) == -1024
        assert result[1] is result[2]
        assert np.array_equal(result[6], expected[6])
        assert result[5](torch.ones(512)).requires_grad


def test_a_function_travels_whose_module_was_loaded_by_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker in a test file loaded by pytest with ``--import-mode=importlib``.

    It uses another such file, and modules with their own class.
    """
    text = "import torch\nfrom strange.helpers import one\n"
    text += "def two(): return one() + len([torch.ops, torch.backends.cudnn])"
    sources = {"": "", ".helpers": "def one(): return 1", ".test_it": text}
    for name, source in sources.items():
        module = types.ModuleType(f"strange{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(source, vars(module))
    assert ringsim.trace(module.two, world_size=1).results == [3]


def test_ranks_see_the_callers_surroundings_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen:  # results are instances of this local class
        def __init__(self) -> None:
            self.pid = os.getpid()
            setting, left = os.environ.get("MY_SETTING"), "GONE" in os.environ
            affinity = sorted(os.sched_getaffinity(0))
            self.place = setting, left, os.getcwd(), sys.path[0], sys.argv, affinity
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
    place = "now", False, str(tmp_path), "/somewhere/else", ["me", "--flag"], [min(before)]
    assert [seen.place for seen in second] == [place] * 2
    assert len({seen.pid for seen in first + second}) == 4, "no rank may be used twice"
    assert [seen.drawn for seen in first] == [seen.drawn for seen in second]
    assert first[0].drawn != first[1].drawn
    torch.manual_seed(6)  # the seed plus the rank
    assert first[1].drawn[2] == float(torch.rand(1))
    assert first[1].drawn == ringsim.trace(Seen, world_size=1, seed=6).results[0].drawn


def test_crowded_ranks_compute_with_one_thread() -> None:
    crowded = ringsim.trace(torch.get_num_threads, world_size=(os.cpu_count() or 1) + 1)
    assert set(crowded.results) == {1}
    assert any("one torch thread per rank" in note for note in crowded.metadata["notes"])


def test_output_is_kept_by_rank_and_shown_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    r"""In 0.2.0 ``print("\x0e")`` hid the later output of the rank."""
    end = "from C, without an end of line"
    control = "".join(map(chr, {*range(32), 127, 0x85, 0x2028} - {ord("\n")}))

    def worker() -> str:
        print(control)
        print("after it", force=True)
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            print(control)
        os.write(2, end.encode())
        return caught.getvalue().replace(control, "")

    trace = ringsim.trace(worker, world_size=2)
    first = f"{control}\nafter it\n"
    assert trace.output == [f"{first}{end}", f"{first}{control}\n{end}"]
    shown = ["", f"[rank 0] {control}"]
    shown += [f"[rank {rank}] {text}" for rank in range(2) for text in ("after it", end)]
    assert sorted(capsys.readouterr().out.split("\n")) == sorted(shown)
    assert trace.results == ["\n", ""]


def test_a_worker_may_initialise_as_a_script_does_and_listens_on_loopback_alone() -> None:
    def as_ringsim() -> int:
        at = os.environ
        place = at["MASTER_ADDR"], int(at["MASTER_PORT"]), 2, int(at["RANK"]), int(at["LOCAL_RANK"])
        ringsim.initialize_distributed(*place, "cpu")
        return ringsim.current_ring().succ

    def as_torch() -> int:
        dist.init_process_group("gloo")
        return 1 - dist.get_rank()

    def worker(initialise: Callable[[], int]) -> tuple[int, set[str]]:
        succ = initialise()
        dist.new_group([0, 1])  # a group created by the worker also stays on loopback
        return succ, listening()

    # the current values come first
    for initialise, ring in ((as_ringsim, True), (as_ringsim, False), (as_torch, False)):
        results = ringsim.trace(worker, world_size=2, args=(initialise,), ring=ring).results
        assert [succ for succ, _ in results] == [1, 0]
        addresses = set().union(*(seen for _, seen in results))
        assert addresses, "every rank must listen, because Gloo's pairs connect to it"
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}, addresses


def test_what_a_run_leaves_is_for_its_user_alone() -> None:
    """Its directories are 0700 while the ranks run, whatever the umask is."""
    there = Path(tempfile.gettempdir())

    def modes() -> dict[str, int]:
        return {str(path.relative_to(there)): path.lstat().st_mode for path in there.rglob("*")}

    before = os.umask(0)
    try:
        # five: not the ones parked before
        found = ringsim.trace(modes, world_size=5).results[0]
    finally:
        os.umask(before)
    assert {stat.S_IMODE(mode) for mode in found.values() if stat.S_ISDIR(mode)} == {0o700}
    files = [name for name, mode in found.items() if not stat.S_ISDIR(mode)]
    assert any(name.endswith(".events") for name in files), "files that ranks write must be found"
    assert all("/" in name for name in files), "every file must be in a directory"


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


# -- one error for every failure of a run


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
    # If the launcher waited for the blocked recv, the test would reach its limit.
    error = fails(RankFailed, words, worker, world_size=4, timeout_s=1000.0)
    assert "print(1 / (ring.rank - 1))" in str(error)
    assert f"line {worker.__code__.co_firstlineno + 5}, in worker" in str(error)
    assert str(error).count("Traceback") == 1
    results, complete = error.trace.results, error.trace.metadata["complete"]
    assert (error.rank, results, complete) == (1, [None] * 4, False)
    frame = error.trace.to_pandas()
    assert list(frame[frame.kind == "mark"]["rank"]) == [0, 1, 2, 3]
    assert len(error.trace.to_pandas("messages")) == 1


def wait_for(rank: int, then: Callable[[], object]) -> None:
    """All ranks but one wait for a message from that one, which does something else."""
    if dist.get_rank() != rank:
        dist.recv(torch.zeros(4), rank)
    else:
        then()


SLEEPS = (1, lambda: time.sleep(100))
CALL = r"dist\.recv\(torch\.zeros\(4\), rank\)"


@pytest.mark.parametrize(
    ("error", "words", "worker", "size", "options"),
    [
        (RankFailed, "cannot pickle the worker's result, a lock", threading.Lock, 1, {}),
        (RankFailed, "rank 1 of 3 raised SystemExit: 3", wait_for, 3,
         {"args": (1, lambda: sys.exit(3))}),
        # Another rank might still send: only the limits of an operation and of the run end this.
        (RankFailed, CALL, wait_for, 2, {"args": SLEEPS, "timeout_s": 1}),
        (RunTimeout, r"limit_s=0.5 s: no result from ranks \[0, 1\] of 2", time.sleep, 2,
         {"args": (100,), "limit_s": 0.5}),
    ],
)  # fmt: skip
def test_other_bad_ends(
    error: Any, words: str | None, worker: Any, size: int, options: dict[str, Any]
) -> None:
    assert fails(error, words, worker, world_size=size, **options).trace is not None


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
    names = [path.name.split("-") for path in there.iterdir()]
    assert [name for name, _ in names] == ["rank", "rank"]
    assert until(lambda: all(gone(int(pid)) for _, pid in names), 5)


# -- ranks with child processes, which keep a dead rank's channel and connections open unless they
# end with it


LONG_S = 50.0  # the duration of a child
KEPT: list[object] = []  # objects that a rank must keep alive


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return pid


def start_process(new_session: bool = False) -> int:
    """Starts a process that inherits all files of the rank."""
    words = ["sleep", str(LONG_S)]
    return subprocess.Popen(words, close_fds=False, start_new_session=new_session).pid


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
        (fork, kill, "peer_exited", r" failed: its process was ended by signal 9 \(SIGKILL\)"),
        (start_process, leave, "rank_failed", " failed: its process exited with code 7"),
        (load_in_workers, fail, "rank_failed", " raised ValueError: no such layer"),
    ],
)
def test_end_of_a_rank_is_seen_though_its_child_lives(
    begin: Callable[[], int],
    end: Callable[[], None],
    kind: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The death of a rank used to be found only when its child ended.

    Other ranks with a child continued ``EXIT_S`` later, which is long enough here to notice.
    """
    monkeypatch.setattr("ringsim.launch.ranks.EXIT_S", 50.0)

    def begin_and_end() -> None:
        (tmp_path / "pid").write_text(str(begin()))
        end()

    told = f"rank 1 of 2{words}"
    error = fails(RankFailed, told, wait_for, world_size=2, args=(1, begin_and_end), limit_s=30)
    child = int((tmp_path / "pid").read_text())
    assert until(lambda: gone(child)), "the child is left"
    found = error.diagnosis
    assert (found.kind, 1 in found.findings[0].ranks) == (kind, True), str(found)
    assert "ok" not in error.trace.to_pandas().query("rank == 0").status.tolist()
    first_ns, last_ns = error.trace.metadata["given_up_ns"], error.trace.metadata["end_ns"]
    assert last_ns - first_ns < 50e9  # the wait for a channel that stays open


def test_a_child_ends_with_its_rank_unless_it_leads_a_session() -> None:
    (child, service), *_ = ringsim.trace(
        lambda: (fork(), start_process(new_session=True)), world_size=1
    ).results
    assert until(lambda: gone(child)), "the child is left"
    assert not gone(service)
    os.kill(service, signal.SIGKILL)
    assert until(lambda: gone(service))


# -- early deaths, and repeated launches


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
    """No process remains of a script or of ``python -c``, whatever signal ends it."""
    scripts = {"script.py", os.fsdecode(b"\xe9.py")}
    for name in scripts:
        (tmp_path / name).write_text(textwrap.dedent(SCRIPT))
    how = {
        signal.SIGKILL: ("-c", textwrap.dedent(SCRIPT)),
        signal.SIGTERM: ("-OO", "-I", "script.py"),
        signal.SIGHUP: ("-X", "dev", *(scripts - {"script.py"})),
    }
    running = {
        number: subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
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
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[:2] == ["once\n", "[0, 1] True\n"]
            pids += [int(pid) for line in lines[2:] for pid in line.split()[2:]]
            process.send_signal(number)
        until(lambda: all(map(gone, pids)))  # three servers end their ranks at the same time
        left = [pid for pid in pids if not gone(pid)]
        assert [Path(f"/proc/{pid}/cmdline").read_text() for pid in left] == []
        assert until(lambda: {path.name for path in tmp_path.iterdir()} == scripts), (
            "a file is left"
        )
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    assert len(pids) == 12


def test_many_runs_leak_nothing() -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kib = pages * (os.sysconf("SC_PAGE_SIZE") // 1024)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), kib

    for _ in range(3):
        ringsim.trace(pass_round, world_size=2)
    fds, threads, kib = resources()
    for _ in range(12):
        ringsim.trace(pass_round, world_size=2)
    fds_after, threads_after, kib_after = resources()
    assert (fds_after, threads_after) == (fds, threads)
    assert kib_after - kib < 12 * 100  # a run's trace takes about 10 KiB, a kept record 100


def test_works_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker() -> float:
        result = pass_round(step=3.0)
        if ringsim.current_ring().rank == 1:
            time.sleep(0.3)  # so that the other's result exists
            kill()
        return result

    monkeypatch.setattr("ringsim.launch.ranks.has_fork_server", lambda: False)
    words = r"rank 1 of 2 failed: .* by signal 9 \(SIGKILL\)"
    trace = fails(RankFailed, words, worker, world_size=2).trace
    assert (trace.results, len(trace.to_pandas("messages"))) == ([4.0, None], 2)


def test_ranks_that_never_come_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ranks", "run", "supervisor"):
        monkeypatch.setattr(f"ringsim.launch.{module}.START_S", 0.2)  # loading torch takes longer
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # needs another fork server
    words = r"only 0 of 2 ranks started within 0\.2 s\. Check this machine's load, and try again"
    fails(RingError, words, pass_round, world_size=2)
    monkeypatch.undo()
    assert ringsim.trace(pass_round, world_size=2).results == [2.0, 1.0]
