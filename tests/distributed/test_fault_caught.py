"""Ranks that are woken from a wait without end, and catch the error: the trace says what the error says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import comm
from ringsim.errors import RingError
from ringsim.simulator.api import simulate

pytestmark = pytest.mark.timeout(90)


def token() -> torch.Tensor:
    return torch.zeros(4)


def receives_and_goes_on() -> str:
    try:
        comm.recv(token(), (comm.get_rank() + 1) % comm.get_world_size())
    except RingError as error:
        return type(error).__name__
    return "received"


def tries_again() -> None:
    for _ in range(3):
        try:
            comm.recv(token(), 1 - comm.get_rank())
        except RingError:
            continue


def does_something_else_then() -> None:
    if comm.get_rank() == 2:
        return
    try:
        comm.recv(token(), 1 - comm.get_rank(), tag=comm.get_rank())
    except RingError:
        comm.send(token(), (comm.get_rank() + 1) % 3, tag=9)


def waits_for_one_that_left() -> None:
    if comm.get_rank() == 0:
        try:
            comm.recv(token(), 1)
        except RingError:
            return


def receives_in_a_thread() -> None:
    """Its first thread has communicated, too, and waits for the second."""
    rank = dist.get_rank()
    dist.barrier()
    thread = threading.Thread(target=lambda: dist.recv(token(), 1 - rank, tag=3 + rank))
    thread.start()
    thread.join()


CAUGHT = [
    (receives_and_goes_on, 3, "deadlock", {0, 1, 2}),
    (tries_again, 2, "deadlock", {0, 1}),
    (does_something_else_then, 3, "deadlock", {0, 1}),
    (waits_for_one_that_left, 3, "peer_exited", {0, 1}),
]


def check(error: RingError, kind: str, ranks: set[int], tmp_path: Path) -> None:
    """Compares what is found in the trace, and in its file, with what the error says."""
    trace, said = error.trace, error.diagnosis
    assert trace is not None
    assert said is not None
    trace.save(tmp_path / "caught.ringtrace")
    for diagnosis in (said, trace.explain(), ringsim.load(tmp_path / "caught.ringtrace").explain()):
        assert [(one.kind, set(one.ranks)) for one in diagnosis.findings] == [(kind, ranks)], str(diagnosis)
        assert diagnosis.findings[0].operations == said.findings[0].operations
        assert diagnosis.findings[0].hint == said.findings[0].hint
        assert [diagnosis.states[rank] for rank in ranks] == [said.states[rank] for rank in ranks]


@pytest.mark.parametrize(("worker", "size", "kind", "ranks"), [*CAUGHT, (receives_in_a_thread, 2, "deadlock", {0, 1})])
def test_trace_explains_a_caught_verdict(worker: Callable[[], object], size: int, kind: str, ranks: set[int], tmp_path: Path) -> None:
    with pytest.raises(RingError) as caught:
        ringsim.trace(worker, world_size=size, limit_s=30)
    check(caught.value, kind, ranks, tmp_path)


@pytest.mark.parametrize(("worker", "size", "kind", "ranks"), CAUGHT)
def test_simulated_trace_explains_a_caught_verdict(
    worker: Callable[[], object], size: int, kind: str, ranks: set[int], tmp_path: Path
) -> None:
    with pytest.raises(RingError) as caught:
        simulate(worker, world_size=size, link=ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10))
    check(caught.value, kind, ranks, tmp_path)
