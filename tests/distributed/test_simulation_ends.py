"""Tests of simulations that end by Ctrl-C, a limit, a crash, an endless wait, a thread or an error.

Each simulation runs in a separate process, so the state of the caller never changes.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gone, until

import ringsim
from ringsim.cli import main
from ringsim.errors import Deadlock, Interrupted, RankFailed, RingError, RunTimeout

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
LIMIT_S = 100.0  # for one run; no test comes near it
Worker = Callable[..., Any]


def simulate(worker: Worker, world_size: int = 2, *args: Any, limit_s: float = LIMIT_S) -> Any:
    """Returns the results of the ranks."""
    trace = ringsim.simulate(worker, world_size=world_size, args=args, link=LINK, limit_s=limit_s)
    return trace.results


def line_of(worker: Worker) -> str:
    """Returns "file:line" of a worker's line that ends in "# here"."""
    code = worker.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    numbers = range(code.co_firstlineno, len(lines))
    here = next(number for number in numbers if lines[number - 1].endswith("# here"))
    return f"{os.path.basename(code.co_filename)}:{here}"


def add_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def check_that_the_next_one_works() -> None:
    assert simulate(add_ranks, 3) == [3.0] * 3


# -- from outside


REFUSES_THREADS = """
import _thread

start, begun = _thread.start_new_thread, []

def start_some(function, *arguments):
    if function.__qualname__ == "Rank._live":
        begun.append(function)
        if len(begun) > 3:
            raise RuntimeError("can't start new thread")
    return start(function, *arguments)

_thread.start_new_thread = start_some
"""
SIMULATES_SIX = """
import ringsim
import torch.distributed as dist

def worker():
    dist.barrier()

try:
    ringsim.simulate(worker, world_size=6, link=ringsim.Link(1e-5, 1e-10))
except ringsim.errors.RingError as error:
    print(error)
"""


def test_a_machine_without_room_for_the_threads_is_named(tmp_path: Path) -> None:
    """The limit is set in the simulating process, because no test can fill a machine like this."""
    (tmp_path / "sitecustomize.py").write_text(REFUSES_THREADS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", SIMULATES_SIX]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert "can't start new thread after 3 threads. Simulate fewer ranks" in done.stdout, (
        done.stderr
    )


def loop(file: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        file.write_text(f"{os.getpid()}")
        while True:
            pass
    dist.barrier()


def return_or_loop() -> list[int]:
    dist.barrier()
    while dist.get_rank() == 1:
        pass
    return [dist.get_rank()]


def test_the_trace_of_an_ended_run_holds_the_results_so_far() -> None:
    """In 0.3.0, these results were pickled."""
    check_that_the_next_one_works()  # starts the server
    with pytest.raises(RunTimeout) as caught:
        simulate(return_or_loop, 2, limit_s=2.0)
    assert caught.value.trace.results == [[0], None]


@pytest.mark.parametrize("how", ["Ctrl-C", "a limit"])
def test_a_rank_that_loops_is_ended(how: str, tmp_path: Path) -> None:
    file, guard_s = tmp_path / "process", 5.0
    asked_s: list[float] = []

    def interrupt() -> None:
        assert until(lambda: file.exists() and file.read_text() != "")
        asked_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    check_that_the_next_one_works()  # starts the server, so that later runs start quickly
    if how == "Ctrl-C":
        threading.Thread(target=interrupt).start()
        with pytest.raises(Interrupted, match="the simulation was interrupted after") as caught:
            simulate(loop, 2, file)
        assert time.monotonic() - asked_s[0] < guard_s
    else:
        with pytest.raises(RunTimeout, match="did not end within limit_s=2 s") as caught:  # type: ignore[assignment]
            simulate(loop, 2, file, limit_s=2.0)
    assert until(lambda: gone(int(file.read_text())))
    assert caught.value.trace.to_pandas()["op"].tolist()[:2] == ["barrier"] * 2
    check_that_the_next_one_works()


# -- by themselves


def leave() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)  # here
    dist.barrier()


def send_itself_a_signal() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)  # here
    dist.barrier()


DEATHS = {
    leave: "its process exited with code 3 before the worker returned",
    send_itself_a_signal: r"its process was ended by signal 11 \(SIGSEGV\)",
}


@pytest.mark.parametrize("worker", DEATHS)
def test_a_rank_that_dies_is_named_as_on_real_ranks(worker: Worker) -> None:
    words = f"rank 1 of 2 failed: {DEATHS[worker]}"
    with pytest.raises(RankFailed, match=words) as simulated:
        simulate(worker)
    with pytest.raises(RankFailed, match=words) as real:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    first, expected = (each.value.diagnosis.findings[0] for each in (simulated, real))
    assert (first.kind, first.ranks) == (expected.kind, expected.ranks)
    file, line = line_of(worker).split(":")
    assert f'{file}", line {line}, in {worker.__name__}' in str(simulated.value)
    check_that_the_next_one_works()


def crash() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        ctypes.string_at(0)  # here
    dist.barrier()


def test_a_crash_in_c_ends_the_run_with_its_line_and_not_the_caller() -> None:
    words = r"the simulation ended early: its process was ended by signal 11 \(SIGSEGV\)"
    with pytest.raises(RankFailed, match=words) as caught:
        simulate(crash)
    file, line = line_of(crash).split(":")
    assert f'{file}", line {line}, in crash' in str(caught.value)
    check_that_the_next_one_works()


def handle() -> list[int]:
    """A rank receives its own signals, and other ranks do not."""
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGCHLD)  # ends no process
        os.kill(os.getpid(), 0)
    dist.barrier()
    return got


def test_a_handler_is_called_if_the_rank_sends_itself_the_signal() -> None:
    assert simulate(handle) == [[], [signal.SIGUSR1] * 2]


# -- endless waits


def wait_for_a_lock() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # here
    dist.barrier()


def wait_in_cpp() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.HashStore().queue_pop("no rank sends anything")  # type: ignore[attr-defined]  # here
    dist.barrier()


@pytest.mark.parametrize("worker", [wait_for_a_lock, wait_in_cpp])
def test_a_wait_where_a_rank_cannot_give_way_is_found(worker: Worker) -> None:
    with pytest.raises(
        RingError, match=r"rank 1 waits in .*cannot let the other ranks run"
    ) as caught:
        simulate(worker)
    assert type(caught.value) is RingError
    assert f"{worker.__name__} ({line_of(worker)})" in str(caught.value)
    assert "\n" not in str(caught.value)
    operations = caught.value.trace.to_pandas()
    assert operations[["rank", "op"]].values.tolist() == [[0, "barrier"]] * 2 + [[1, "barrier"]]


def work_for_longer_than_the_watchdog_waits() -> int:
    """Sleeps, and waits for its own thread, which is not an endless wait."""
    answers: queue.Queue[int] = queue.Queue()

    def answer() -> None:
        time.sleep(2.6)
        answers.put(7)

    if dist.get_rank() == 1:
        time.sleep(2.6)
        threading.Thread(target=answer).start()
        return answers.get()
    return 0


def test_a_rank_may_sleep_and_wait_for_its_own_thread() -> None:
    assert simulate(work_for_longer_than_the_watchdog_waits) == [0, 7]


def wait_for_a_future() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        torch.futures.Future().wait()  # here
    dist.barrier()


def wait_for_a_key(file: Path) -> None:
    store = dist.FileStore(str(file), 2)  # type: ignore[attr-defined]
    dist.barrier()
    if dist.get_rank() == 1:
        store.get("no rank sets this")  # here
    dist.barrier()


def test_what_no_rank_provides_is_a_deadlock_with_its_line(tmp_path: Path) -> None:
    for worker, args in ((wait_for_a_future, ()), (wait_for_a_key, (tmp_path / "store",))):
        where = f"rank 1 waits at {line_of(worker)}"
        with pytest.raises(Deadlock, match=f"rank 1 waits for a future.*\n  {where}") as caught:
            simulate(worker, 2, *args)
        assert caught.value.diagnosis.findings[0].ranks == (1, 0)


def meet_in_stores(file: Path) -> list[Any]:
    """Ranks wait for keys that other ranks set later, and for one that no rank sets."""
    rank = dist.get_rank()
    stores = [
        dist.FileStore(str(file), 3),  # type: ignore[attr-defined]
        dist.PrefixStore("mine", dist.FileStore(str(file), 3)),  # type: ignore[attr-defined]
    ]
    found: list[Any] = []
    for store in stores:
        ringsim.compute(0.1 * (3 - rank))
        store.set(f"{rank}", f"from {rank}")
        store.wait([f"{other}" for other in range(3)], timedelta(seconds=1))
        found += [store.get(f"{(rank + 1) % 3}")]
        try:
            store.wait(["no rank sets this"], timedelta(seconds=1))
        except RuntimeError as error:
            found += [str(error)]
        dist.barrier()
    return found


def test_ranks_wait_for_keys_of_a_store(tmp_path: Path) -> None:
    expected = [[f"from {(rank + 1) % 3}".encode(), "Wait timeout"] * 2 for rank in range(3)]
    assert simulate(meet_in_stores, 3, tmp_path / "store") == expected


# -- threads


def talk_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))  # here
    thread.start()
    thread.join()


def wait_in_a_thread() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        ringsim.compute(1.0)
        handle = dist.irecv(torch.ones(1), 0)
        thread = threading.Thread(target=lambda: handle.wait())  # here
        thread.start()
        thread.join()


@pytest.mark.parametrize("worker", [talk_in_a_thread, wait_in_a_thread])
def test_a_thread_that_communicates_ends_the_run_with_one_sentence(
    worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RingError, match="other than the one that runs its worker") as caught:
        simulate(worker)
    assert type(caught.value) is RingError
    assert "\n" not in str(caught.value)
    assert f"communicated at {line_of(worker)} in a thread" in str(caught.value)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


# -- errors


def raise_an_error() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")  # here
    dist.recv(torch.ones(1), 1)


def return_a_lock() -> Any:
    return threading.Lock() if dist.get_rank() == 1 else None


def receive_into_rows_that_share_memory() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1, 2).expand(3, 2), 0)  # here
    else:
        dist.send(torch.zeros(3, 2), 1)


@pytest.mark.parametrize(
    "worker", [raise_an_error, return_a_lock, receive_into_rows_that_share_memory]
)
def test_an_error_is_that_of_real_ranks(worker: Worker) -> None:
    with pytest.raises(RingError) as simulated:
        simulate(worker)
    with pytest.raises(RingError) as real:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    assert type(simulated.value) is type(real.value)
    first, expected = (each.value.diagnosis.findings[0] for each in (simulated, real))
    assert (first.kind, first.ranks) == (expected.kind, expected.ranks)
    headline, expected_headline = (str(each.value).splitlines()[0] for each in (simulated, real))
    assert headline == expected_headline
    if worker is not return_a_lock:
        file, line = line_of(worker).split(":")
        assert f'{file}", line {line}, in {worker.__name__}' in str(simulated.value)


# -- the caller and later runs


def test_a_group_of_the_caller_is_undisturbed() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group, before = dist.group.WORLD, dist.new_group([0])
        check_that_the_next_one_works()
        assert dist.group.WORLD is group
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        values = torch.tensor([5.0])
        dist.all_reduce(values)
        dist.all_reduce(values, group=before)
        assert values.item() == 5.0
    finally:
        dist.destroy_process_group()


def use_defaults_bound_at_import() -> list[float]:
    from torch.distributed.nn import functional  # the default group is a default argument in it

    values = torch.ones(2, requires_grad=True)
    total = functional.all_reduce(values * (1 + dist.get_rank()))
    total.sum().backward()
    assert values.grad is not None
    return [*total.tolist(), *values.grad.tolist()]


def test_a_simulation_of_other_size_follows() -> None:
    for size in (2, 4, 2):
        total = size * (size + 1) / 2
        assert simulate(use_defaults_bound_at_import, size) == [
            [total] * 2 + [float(size * (1 + rank))] * 2 for rank in range(size)
        ]


SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist

    class Part:
        def __init__(self, rank):
            self.rank = rank

    def main():
        import __main__
        dist.init_process_group("gloo")
        __main__.mine = dist.get_rank()
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, Part(dist.get_rank()))
        assert __main__.mine == dist.get_rank() == mine
        assert all(type(part) is Part for part in parts), "the class of this rank's own __main__"
        print(__name__, [part.rank for part in parts], sys.argv[1:])
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


def test_each_rank_of_a_module_has_its_own_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("package").mkdir()
    Path("package/program.py").write_text(textwrap.dedent(SCRIPT))
    before = sys.modules["__main__"]
    assert main(["simulate", "-n", "2", "-m", "package.program", "--steps", "3"]) == 0
    assert sys.modules["__main__"] is before
    shown = capsys.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] __main__ [0, 1] ['--steps', '3']" in shown
