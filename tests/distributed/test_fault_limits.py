"""Where only a limit ends a run: it says who waited, who was stopped, and what the others did, at which line and for how long."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import RunTimeout
from ringsim.traces.findings import Diagnosis

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]

LIMIT_S = 6.0
LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The first run loads torch, which takes longer than the limit."""
    ringsim.trace(time.monotonic, world_size=4)


def line_of(worker: Callable[..., None], words: str) -> int:
    """Returns the line of a worker that ends with a comment of these words."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number in range(worker.__code__.co_firstlineno, len(lines) + 1) if lines[number - 1].endswith(f"# {words}"))


def at_the_limit(worker: Callable[..., None], tmp_path: Path) -> tuple[Diagnosis, str]:
    """Runs a worker on four ranks; returns what is said of it, which must be the same of a file."""
    with pytest.raises(RunTimeout) as caught:
        ringsim.trace(worker, world_size=4, limit_s=LIMIT_S)
    trace = caught.value.trace
    assert trace is not None
    trace.save(tmp_path / "ended.ringtrace")
    diagnosis: Diagnosis = caught.value.diagnosis
    assert ringsim.load(tmp_path / "ended.ringtrace").explain() == diagnosis
    (finding,) = diagnosis.findings
    assert finding.kind == "stalled"
    assert finding.message in str(caught.value)
    assert all(operation.waited_s <= LIMIT_S + 1 for operation in finding.operations)
    return diagnosis, finding.message


def others_are_stopped_or_busy() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.recv(torch.zeros(4), 1)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:
        with ringsim.span("compute", stage=2, microbatch=5):
            time.sleep(LONG_S)  # in a span
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        sum(range(1000))  # in none


def test_stopped_and_busy_ranks_are_named(tmp_path: Path) -> None:
    """And as long as one of them might help there is no verdict: the limit ends the run."""
    diagnosis, message = at_the_limit(others_are_stopped_or_busy, tmp_path)
    assert diagnosis.findings[0].ranks == (0,)
    assert {(edge.rank, edge.peer) for edge in diagnosis.edges} == {(0, 1)}
    assert diagnosis.states == ("blocked", "stopped", "running", "running")
    assert re.search(r"Meanwhile rank 1 is stopped by a signal \(SIGSTOP, or one like it, for [\d.]+ s\); ", message)
    line = line_of(others_are_stopped_or_busy, "in a span")
    assert re.search(rf"rank 2 was still computing stage 2, microbatch 5 \(for [\d.]+ s, asleep at test_fault_limits.py:{line}\)", message)
    line = line_of(others_are_stopped_or_busy, "in none")
    assert re.search(rf"rank 3 was computing at test_fault_limits.py:({line - 1}|{line}) \(for [\d.]+ s\)", message)


def nobody_waits() -> None:
    dist.barrier()
    time.sleep(LONG_S)  # all of them


def test_ranks_that_all_compute_are_named_too(tmp_path: Path) -> None:
    """The error said that nobody had an answer, and the diagnosis that nothing was wrong."""
    diagnosis, message = at_the_limit(nobody_waits, tmp_path)
    assert diagnosis.findings[0].ranks == (0, 1, 2, 3)
    line = line_of(nobody_waits, "all of them")
    assert message.startswith(f"no rank waited for another when the run was ended: rank 0 was asleep at test_fault_limits.py:{line} (for ")
