"""Launching: one error for every way in which a run can end badly."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import pass_round
from processes import gone, until

import ringsim
from ringsim.errors import Interrupted, RankFailed, RunTimeout
from ringsim.launch.ranks import get_launcher

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


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
        if ring.rank == 1:
            time.sleep(100)  # it might still send: nobody knows better than the limit
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
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        ringsim.trace(worker, world_size=2)
    thread.join()
    assert all(gone(pid) for pid in pids)
    assert caught.value.trace is not None
    assert caught.value.trace.to_pandas().kind.tolist() == ["mark", "mark"]
