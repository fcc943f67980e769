"""The cause among several failures, on simulated ranks; those of Gloo are in test_faults.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock, MessageMismatch, RankFailed, RingError

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def fail(worker: Callable[..., Any], size: int = 3) -> tuple[RingError, Any]:
    """Returns the error of a run and its diagnosis, which the trace also gives."""
    with pytest.raises(RingError) as caught:
        ringsim.simulate(worker, world_size=size, link=LINK)
    error = caught.value
    assert error.trace is not None
    # the diagnosis of a verdict has the waiting times up to then
    said, known = error.trace.explain(), error.diagnosis
    assert [(one.kind, one.ranks, one.hint) for one in said.findings] == [
        (one.kind, one.ranks, one.hint) for one in known.findings
    ]
    return error, known


def ask(rank: int) -> None:
    dist.recv(torch.zeros(4), rank)


# -- errors of the user's program with torch's words


def raises_on_rank_1(error: Exception) -> None:
    if dist.get_rank() == 1:
        raise error
    ask(1)


def test_an_error_of_the_users_is_no_echo_whatever_it_says() -> None:
    error = RuntimeError("Connection closed by peer [127.0.0.1]:80")
    said, diagnosis = fail(lambda: raises_on_rank_1(error))
    assert type(said) is RankFailed
    assert said.rank == 1
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == ("rank_failed", (1,))
    assert sorted(echo.ranks for echo in finding.consequences) == [(0,), (2,)]


# -- an exception on its way out when a wait gets stuck


def finish_in_a_barrier() -> None:
    try:
        raises_on_rank_1(ValueError("root cause"))
    finally:
        dist.barrier()


class Meeting:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        dist.barrier()


def leave_through_a_barrier() -> None:
    with Meeting():
        raises_on_rank_1(ValueError("root cause"))


@pytest.mark.parametrize("worker", [finish_in_a_barrier, leave_through_a_barrier])
def test_what_a_finally_hides_is_the_cause(worker: Callable[[], None]) -> None:
    error, diagnosis = fail(worker)
    assert type(error) is RankFailed
    assert str(error).startswith("rank 1 of 3 raised ValueError: root cause")
    assert "and then got stuck in a wait during cleanup: " in str(error)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == ("rank_failed", (1,))
    assert "root cause" in finding.message
    assert {echo.ranks for echo in finding.consequences} == {(0,), (2,)}


def fall_back() -> None:
    known: dict[str, int] = {}
    try:
        known["here"]
    except KeyError:
        ask((dist.get_rank() + 1) % dist.get_world_size())


def test_what_an_except_clause_keeps_is_named_and_no_cause() -> None:
    error, diagnosis = fail(fall_back)
    assert type(error) is Deadlock
    assert [(one.kind, one.ranks) for one in diagnosis.findings] == [("deadlock", (0, 1, 2))]
    assert "after it had raised KeyError: 'here' (" in str(error)
    # only the user's frames: the place of each wait, and the earlier exception
    assert str(error).count("in fall_back") == 3 * 2
    assert "ringsim/" not in str(error).replace(__file__, "")


# -- errors that are hard to print


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        (Mute(), "Mute: <exception str() failed>"),
        (ValueError("half \udce9, red \x1b[31m"), r"half \udce9, red \x1b[31m"),
    ],
    ids=["mute", "noise"],
)
def test_an_error_that_is_hard_to_say_is_said(hard: Exception, words: str, tmp_path: Path) -> None:
    error, diagnosis = fail(lambda: raises_on_rank_1(hard))
    assert words in str(error)
    str(error).encode()
    assert words in diagnosis.findings[0].message
    error.trace.save(tmp_path / "run.ringtrace")  # type: ignore[union-attr]
    assert str(ringsim.load(tmp_path / "run.ringtrace").explain()) == str(diagnosis)
    diagnosis.plot().figure.savefig(tmp_path / "run.png")  # type: ignore[union-attr]


# -- ranks that are woken from an endless wait, and catch the error: the trace and the error
# agree


def receives_and_goes_on() -> str:
    try:
        dist.recv(torch.zeros(4), (dist.get_rank() + 1) % dist.get_world_size())
    except RingError as error:
        return type(error).__name__
    return "received"


def tries_again() -> None:
    for _ in range(3):
        try:
            ask(1 - dist.get_rank())
        except RingError:
            continue


def does_something_else_then() -> None:
    if dist.get_rank() == 2:
        return
    try:
        dist.recv(torch.zeros(4), 1 - dist.get_rank(), tag=dist.get_rank())
    except RingError:
        dist.send(torch.zeros(4), (dist.get_rank() + 1) % 3, tag=9)


def waits_for_one_that_left() -> None:
    if dist.get_rank() == 0:
        with contextlib.suppress(RingError):
            ask(1)


@pytest.mark.parametrize(
    ("worker", "size", "kind", "ranks"),
    [
        (receives_and_goes_on, 3, "deadlock", {0, 1, 2}),
        (tries_again, 2, "deadlock", {0, 1}),
        (does_something_else_then, 3, "deadlock", {0, 1}),
        (waits_for_one_that_left, 3, "peer_exited", {0, 1}),
    ],
)
def test_the_trace_explains_a_caught_verdict(
    worker: Callable[[], object], size: int, kind: str, ranks: set[int], tmp_path: Path
) -> None:
    """So does its file."""
    error, said = fail(worker, size)
    trace = error.trace
    assert trace is not None
    trace.save(tmp_path / "caught.ringtrace")
    for diagnosis in (said, trace.explain(), ringsim.load(tmp_path / "caught.ringtrace").explain()):
        found = [(one.kind, set(one.ranks)) for one in diagnosis.findings]
        assert found == [(kind, ranks)], diagnosis
        assert diagnosis.findings[0].operations == said.findings[0].operations
        assert diagnosis.findings[0].hint == said.findings[0].hint
        assert [diagnosis.states[rank] for rank in ranks] == [said.states[rank] for rank in ranks]


# -- ranks that disagree on a step


def disagree(options: list[dict[str, Any]]) -> None:
    from ringsim.pipeline import train_step_pipeline

    torch.manual_seed(0)
    mine = dict(options[dist.get_rank()])
    count = mine.pop("count", 8)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
    train_step_pipeline(model, [torch.ones(2, 3)] * count, [torch.tensor([0, 1])] * count, **mine)


DIFFERENT = r"the {} on ranks \d and \d differ"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"count": 7}, r"the number of microbatches is [78] on rank \d but [78] on rank \d"),
        ({"schedule": "gpipe"}, DIFFERENT.format("schedules")),
        ({"partition": [1, 3, 2, 2]}, DIFFERENT.format("partitions of the model")),
        (
            {"schedule": "gpipe", "partition": [1, 3, 2, 2]},
            DIFFERENT.format("schedules") + ", and " + DIFFERENT.format("partitions of the model"),
        ),
    ],
)
def test_a_step_that_differs_is_one_finding_that_says_in_what(
    odd: dict[str, Any], words: str
) -> None:
    error, diagnosis = fail(lambda: disagree([{}, odd, {}, {}]), 4)
    assert type(error) is MessageMismatch
    (finding,) = diagnosis.findings
    assert finding.kind == "message_mismatch"
    # the first rank with the error ends the others, so not all of them raise it
    assert 1 in finding.ranks
    assert re.search(
        rf"ranks .*: the ranks do not perform the same step: {words}\. Call", finding.message
    )
