"""Which of several failures is the cause: programs that fail on more than one rank, or wrap what went wrong, measured and simulated."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock, MessageMismatch, RankFailed, RingError
from ringsim.traces.findings import Diagnosis

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def on_ranks(worker: Callable[..., Any], size: int) -> None:
    ringsim.trace(worker, world_size=size, limit_s=30)


def simulated(worker: Callable[..., Any], size: int) -> None:
    ringsim.simulate(worker, world_size=size, link=LINK)


BOTH = pytest.mark.parametrize("run", [on_ranks, simulated])


def fail(run: Callable[..., Any], worker: Callable[..., Any], size: int = 3) -> tuple[RingError, Diagnosis]:
    """Returns the error of a run and its diagnosis, which a file of it repeats."""
    with pytest.raises(RingError) as caught:
        run(worker, size)
    error = caught.value
    assert error.trace is not None
    said, known = error.trace.explain(), error.diagnosis  # that of a verdict says how long ranks waited until then
    assert [(one.kind, one.ranks, one.hint) for one in said.findings] == [(one.kind, one.ranks, one.hint) for one in known.findings]
    return error, known


def ask(rank: int) -> None:
    dist.recv(torch.zeros(4), rank)


# -- what the user's program says like torch


def raise_reset() -> None:
    if dist.get_rank() == 1:
        raise ConnectionResetError("[Errno 104] Connection reset by peer")
    ask(1)


def raise_closed() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:80")
    ask(1)


def raise_timed_out() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("Timed out waiting for my database")
    dist.barrier()


def break_a_pipe() -> None:
    if dist.get_rank() == 1:
        mine, other = socket.socketpair()
        other.close()
        with mine:
            mine.sendall(b"x")
    ask(1)


@BOTH
@pytest.mark.parametrize("worker", [raise_reset, raise_closed, raise_timed_out, break_a_pipe])
def test_an_error_of_the_users_is_no_echo_whatever_it_says(run: Callable[..., Any], worker: Callable[[], None]) -> None:
    error, diagnosis = fail(run, worker)
    assert type(error) is RankFailed
    assert error.rank == 1
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("rank_failed", (1,))]
    assert sorted(echo.ranks for echo in diagnosis.findings[0].consequences) == [(0,), (2,)]


# -- what peers make of a lost connection


def wrap(*, chained: bool) -> None:
    x = torch.zeros(4)
    try:
        for step in range(3):
            if dist.get_rank() == 2 and step == 1:
                time.sleep(0.1)
                raise ValueError("nan loss")
            dist.all_reduce(x)
    except Exception as error:
        if chained:
            raise RuntimeError(f"rank {dist.get_rank()} failed in step") from error
        raise RuntimeError("step failed") from None


@pytest.mark.parametrize("chained", [True, False])
def test_peers_that_wrap_the_lost_connection_are_no_cause(chained: bool) -> None:
    error, diagnosis = fail(on_ranks, lambda: wrap(chained=chained))
    assert error.rank == 2  # type: ignore[attr-defined]
    assert "also failed" not in str(error)
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("rank_failed", (2,))]
    assert ("after ValueError: nan loss (" in diagnosis.findings[0].message) is chained
    assert sorted(echo.ranks for echo in diagnosis.findings[0].consequences) == [(0,), (1,)]


def wrap_a_loss() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ask(1)
    except Exception as error:
        raise RuntimeError("lost my peer") from error


def test_peers_that_wrap_a_death_are_no_cause() -> None:
    error, diagnosis = fail(on_ranks, wrap_a_loss)
    assert "rank 1 of 3 failed: its process was ended by signal 9" in str(error)
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("peer_exited", (0, 1, 2))]


def fail_one_by_one() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank != 2:
        time.sleep(0.1 * (2 - rank))
    ringsim.compute(0.001 * (3 - rank))
    raise ValueError(f"number {rank}")


@BOTH
def test_who_failed_first_comes_first(run: Callable[..., Any]) -> None:
    error, diagnosis = fail(run, fail_one_by_one)
    assert "raised ValueError: number 2" in str(error)
    assert [finding.ranks for finding in diagnosis.findings] == [(2,), (1,), (0,)]


# -- an exception that is on its way out when a wait ends in vain


def finish_in_a_barrier() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("root cause")
        ask(1)
    finally:
        dist.barrier()


class Meeting:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        dist.barrier()


def leave_through_a_barrier() -> None:
    with Meeting():
        if dist.get_rank() == 1:
            raise ValueError("root cause")
        ask(1)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    try:
        yield
    finally:
        dist.barrier()


def leave_a_generator_through_a_barrier() -> None:
    with meeting():
        if dist.get_rank() == 1:
            raise ValueError("root cause")
        ask(1)


def meet_and_raise_again() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("root cause")
        ask(1)
    except ValueError:
        dist.barrier()
        raise


WORKERS = [finish_in_a_barrier, leave_through_a_barrier, leave_a_generator_through_a_barrier, meet_and_raise_again]


@BOTH
@pytest.mark.parametrize("worker", WORKERS)
def test_what_a_finally_hides_is_the_cause(run: Callable[..., Any], worker: Callable[[], None]) -> None:
    error, diagnosis = fail(run, worker)
    assert type(error) is RankFailed
    assert str(error).startswith("rank 1 of 3 raised ValueError: root cause")
    assert "and waited in vain on its way out: " in str(error)
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("rank_failed", (1,))]
    assert "root cause" in diagnosis.findings[0].message
    assert {echo.ranks for echo in diagnosis.findings[0].consequences} == {(0,), (2,)}


def fall_back() -> None:
    known: dict[str, int] = {}
    try:
        known["here"]
    except KeyError:
        ask((dist.get_rank() + 1) % dist.get_world_size())


@BOTH
def test_what_an_except_clause_keeps_is_named_and_no_cause(run: Callable[..., Any]) -> None:
    error, diagnosis = fail(run, fall_back)
    assert type(error) is Deadlock
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("deadlock", (0, 1, 2))]
    assert "after it had raised KeyError: 'here' (" in str(error)


# -- errors that are hard to say


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raise_mute() -> None:
    if dist.get_rank() == 1:
        raise Mute
    ask(1)


def raise_noise() -> None:
    if dist.get_rank() == 1:
        raise ValueError("half \udce9, red \x1b[31m")
    ask(1)


@BOTH
@pytest.mark.parametrize(("worker", "words"), [(raise_mute, "Mute: <exception str() failed>"), (raise_noise, r"half \udce9, red \x1b[31m")])
def test_an_error_that_is_hard_to_say_is_said(run: Callable[..., Any], worker: Callable[[], None], words: str, tmp_path: Path) -> None:
    error, diagnosis = fail(run, worker)
    assert words in str(error)
    str(error).encode()
    assert words in diagnosis.findings[0].message
    error.trace.save(tmp_path / "run.ringtrace")  # type: ignore[union-attr]
    assert str(ringsim.load(tmp_path / "run.ringtrace").explain()) == str(diagnosis)
    diagnosis.plot().figure.savefig(tmp_path / "run.png")  # type: ignore[union-attr]


@BOTH
def test_only_the_users_frames_are_shown(run: Callable[..., Any]) -> None:
    error, _ = fail(run, fall_back)
    assert str(error).count("in fall_back") == 3 * 2  # where each waits, and what it had raised before
    assert "ringsim/" not in str(error).replace(__file__, "")


# -- ranks that disagree on a step


def disagree(options: list[dict[str, Any]]) -> None:
    from ringsim.pipeline import train_step_pipeline

    torch.manual_seed(0)
    mine = dict(options[dist.get_rank()])
    count = mine.pop("count", 8)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
    train_step_pipeline(model, [torch.ones(2, 3)] * count, [torch.tensor([0, 1])] * count, **mine)


ANOTHER = r"another {} on rank \d than on rank \d"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"count": 7}, r"one of [78] microbatches on rank \d and one of [78] on rank \d"),
        ({"schedule": "gpipe"}, ANOTHER.format("schedule")),
        ({"partition": [1, 3, 2, 2]}, ANOTHER.format("partition of the model")),
        ({"schedule": "gpipe", "partition": [1, 3, 2, 2]}, ANOTHER.format("schedule") + " and " + ANOTHER.format("partition of the model")),
    ],
)
def test_a_step_that_differs_is_one_finding_that_says_in_what(odd: dict[str, Any], words: str) -> None:
    error, diagnosis = fail(on_ranks, lambda: disagree([{}, odd, {}, {}]), 4)
    assert type(error) is MessageMismatch
    (finding,) = diagnosis.findings
    assert finding.kind == "message_mismatch"
    assert 1 in finding.ranks  # the first to hear of it ends the others: not all of those that it concerns hear of it
    assert re.search(rf"ranks .*: a step must be the same on every rank, got {words}\. Call", finding.message)
