"""The watcher in ranks started by another launcher: ``with ringsim.trace(path)`` on one machine.

All programs run at the same time before the first test, because most of them wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_server import Ended, RankServer, results
from test_recording import PATIENCE, join
from torch.nn.parallel import DistributedDataParallel

import ringsim
from ringsim.errors import Deadlock, MessageMismatch

PROGRAMS: dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]] = {}


def on_ranks(size: int, *args: Any, name: str = "") -> Callable[..., Any]:
    """Registers a worker as a program to run."""

    def register(worker: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[name or worker.__name__] = worker, size, args
        return worker

    return register


def play(name: str, directory: str, rank: int) -> Any:
    worker, _, args = PROGRAMS[name]
    return worker(directory, rank, *args)


class Played(NamedTuple):
    ranks: list[Ended]
    folder: Path


@pytest.fixture(scope="module")
def played(server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    """Returns the ends of a program's ranks, and its directory."""
    folders = {name: tmp_path_factory.mktemp("run") for name in PROGRAMS}
    ranks = [
        (name, str(folders[name]), rank)
        for name, (_, size, _) in PROGRAMS.items()
        for rank in range(size)
    ]
    ended = list(zip(ranks, server.run(play, ranks), strict=True))
    return lambda name: Played([how for (mine, _, _), how in ended if mine == name], folders[name])


@on_ranks(2)
def both_receive(directory: str, rank: int) -> tuple[str, int, float, bool]:
    path = join(directory, rank, 2)
    dist.barrier()
    start_s = time.monotonic()
    with pytest.raises(Deadlock) as caught, ringsim.trace(path):
        dist.recv(torch.zeros(3), 1 - rank)
    took_s, diagnosis = time.monotonic() - start_s, caught.value.diagnosis
    assert [(one.kind, one.ranks) for one in diagnosis.findings] == [("deadlock", (0, 1))]
    assert diagnosis.trace is caught.value.trace
    has_trace = caught.value.trace == (ringsim.load(path) if rank == 0 else None)
    return str(caught.value), caught.traceback[0].lineno + 1, took_s, has_trace


def test_ranks_raise_where_they_are_stuck(played: Callable[[str], Played]) -> None:
    ranks, folder = played("both_receive")
    line = both_receive.__code__.co_firstlineno + 6
    for text, raised_at, after_s, has_trace in results(ranks):
        assert text.startswith("deadlock: ranks 0 and 1 wait for each other.\n  rank 0 waits for ")
        assert raised_at == line
        assert after_s < PATIENCE.total_seconds() - 1, "it is not torch's timeout that ends it"
        assert has_trace
    trace = ringsim.load(folder / "run.ringtrace")
    assert [(one.kind, set(one.ranks)) for one in trace.explain().findings] == [
        ("deadlock", {0, 1})
    ]
    assert sorted(entry.name for entry in folder.iterdir()) == ["run.ringtrace", "store"]


@on_ranks(2)
def saves_a_checkpoint(directory: str, rank: int) -> str:
    path = join(directory, rank, 2)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with ringsim.trace(path):
        try:
            for _ in range(2 + rank):
                model(torch.ones(2, 4)).sum().backward()
            dist.barrier()
        except RuntimeError:
            time.sleep(3.5)  # it has 2 s to raise after it is woken
            Path(directory, f"checkpoint-{rank}").touch()
    return "left the block"


def test_a_rank_that_has_left_its_wait_in_cpp_may_finish(played: Callable[[str], Played]) -> None:
    """0.2.0 killed such ranks after 2 s, so there was no checkpoint and no file."""
    ranks, folder = played("saves_a_checkpoint")
    assert results(ranks) == ["left the block"] * 2
    assert len(list(folder.glob("checkpoint-*"))) == 2
    (finding,) = ringsim.load(folder / "run.ringtrace").explain().findings
    assert finding.kind == "collective_mismatch"


@on_ranks(2)
def waits_for_its_own_thread(directory: str, rank: int) -> str:
    """Rank 0 is in no operation, and waits for an event that is never set."""
    path, pid = join(directory, rank, 2), torch.tensor([os.getpid()])
    if rank == 1:
        dist.recv(pid, 0)
        with pytest.raises(Deadlock) as caught, ringsim.trace(path):
            dist.recv(torch.zeros(3), 0)
        os.kill(int(pid), signal.SIGUSR1)
        return str(caught.value)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    dist.send(pid, 1)
    with ringsim.trace(path) as recording, contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    return str(recording.trace.explain())


def test_the_file_says_what_the_error_says_of_a_rank_whose_threads_wait(
    played: Callable[[str], Played],
) -> None:
    explained, raised = results(played("waits_for_its_own_thread")[0])
    assert explained == raised
    assert "(threading.Event().wait()) for another of its threads\n" in raised


@on_ranks(3, "done", name="rank 0 is done")
@on_ranks(3, "killed", name="rank 0 is killed")
def watched_by_another(directory: str, rank: int, how: str) -> list[float]:
    """Rank 0 exits or is killed, and the others wait for each other."""
    path = join(directory, rank, 3)
    if rank == 0:
        with ringsim.trace(path):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return []
    with pytest.raises(Deadlock) as caught, ringsim.trace(path):
        dist.recv(torch.zeros(3), 3 - rank)
    return [operation.waited_s for operation in caught.value.diagnosis.findings[0].operations]


@pytest.mark.parametrize("how", ["done", "killed"])
def test_another_rank_watches_once_rank_0_is_gone(
    played: Callable[[str], Played], how: str
) -> None:
    """0.1.0 let them hang; if rank 0 was dead, there was no message."""
    ranks, folder = played(f"rank 0 is {how}")
    first = "killed" if how == "killed" else "returned"
    assert [each.how for each in ranks] == [first, "returned", "returned"]
    trace = ringsim.load(folder / "run.ringtrace")  # left by a killed rank 0
    (finding,) = (each for each in trace.explain().findings if each.kind == "deadlock")
    assert finding.ranks == (1, 2)
    for operation, heard_s in zip(finding.operations, ranks[1].value, strict=True):
        assert operation.waited_s >= heard_s > 0  # 0.1.0's file had only some microseconds


@on_ranks(2)
def blocks_from_the_start(directory: str, rank: int) -> str:
    """A block around everything: mismatches are found, at the latest when all have left it."""
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        with ringsim.trace(f"{directory}/run.ringtrace"):
            if rank == 0:
                dist.send(torch.zeros(4), 1)
            else:
                dist.recv(torch.zeros(8), 0)
    except MessageMismatch as error:
        return str(error)
    return "no error"


@on_ranks(2)
def plain_blocks(directory: str, rank: int) -> None:
    """A send that begins before a block matches a recv in it."""
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for size in (3, 4):
        if rank == 0:
            early: Any = dist.isend(torch.zeros(size + 6), 1)
            with ringsim.trace(f"{directory}/run-{size}.ringtrace"):
                late: Any = dist.isend(torch.zeros(size), 1)
                early.wait()
                late.wait()
        else:
            with ringsim.trace(f"{directory}/run-{size}.ringtrace"):
                dist.recv(torch.zeros(size + 6), 0)
                dist.recv(torch.zeros(size), 0)


def test_what_happened_before_a_block_is_not_held_against_it(
    played: Callable[[str], Played],
) -> None:
    ranks, folder = played("plain_blocks")
    results(ranks)
    for size in (3, 4):
        trace = ringsim.load(folder / f"run-{size}.ringtrace")
        assert "did not compare the two sides" in trace.metadata["not_checked"][0]
        assert "message_mismatch" not in [finding.kind for finding in trace.explain().findings]


def test_a_block_around_everything_finds_what_disagrees(played: Callable[[str], Played]) -> None:
    """A watcher that looks while both sides wait ends them; otherwise, the block's end does."""
    ranks, folder = played("blocks_from_the_start")
    found = ringsim.load(folder / "run.ringtrace").explain()
    assert found.kind == "message_mismatch"
    for words in (str(found), *(each.value for each in ranks[:1] if each.how == "returned")):
        assert "rank 0 sends float32[4]" in words
        assert "but rank 1 receives float32[8]" in words
    assert {each.how for each in ranks} <= {"returned", "killed"}


@on_ranks(2)
def from_anybody(directory: str, rank: int) -> None:
    path = join(directory, rank, 2)
    with ringsim.trace(path):
        dist.recv(torch.zeros(3))


def test_ranks_that_nothing_else_reaches_are_ended_and_leave_their_parts(
    played: Callable[[str], Played],
) -> None:
    ranks, folder = played("from_anybody")
    assert [each.how for each in ranks] == ["killed", "killed"]
    # they are not ended by the server's limit
    assert (folder / "run.ringtrace.parts" / "verdict.json").exists()
    (finding,) = ringsim.load(folder / "run.ringtrace").explain().findings
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1))


@on_ranks(3)
def blocks_in_turn(directory: str, rank: int) -> list[str]:
    join(directory, rank, 3)
    for number in range(3):
        with ringsim.trace(f"{directory}/{number}.ringtrace"):
            if number == 0:
                dist.barrier()
            elif rank == 0:
                time.sleep(1.2)  # much longer than the watcher lets ranks stay in one state
                dist.send(torch.zeros(1), 1)
            elif rank == 1:
                dist.recv(torch.zeros(1), 0)
    return [entry for entry in os.listdir(directory) if "parts" in entry] if rank == 0 else []


def test_who_is_waited_for_may_take_its_time_and_who_is_done_may_leave(
    played: Callable[[str], Played],
) -> None:
    ranks, _ = played("blocks_in_turn")
    assert results(ranks) == [[], [], []]


@on_ranks(2)
def without_pipes(directory: str, rank: int) -> Any:
    def refuse(*_arguments: Any) -> None:
        raise PermissionError("no pipes here")

    os.mkfifo = refuse  # type: ignore[assignment]
    with ringsim.trace(join(directory, rank, 2)) as recording:
        dist.barrier()
    return recording.trace.metadata["notes"] if rank == 0 else None


def test_where_there_are_no_named_pipes_it_records_and_says_that_it_does_not_watch(
    played: Callable[[str], Played],
) -> None:
    ranks, _ = played("without_pipes")
    notes = results(ranks)[0]
    assert notes == ["No watcher looked for stuck ranks: no pipes here (rank 0)."]


@on_ranks(2)
def fails_while_another_works(directory: str, rank: int) -> None:
    """A wait of rank 0 reaches the limit of its group: it asks for rank 1's place."""
    path = join(directory, rank, 2)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        with ringsim.trace(path):
            time.sleep(6)  # busy for longer than rank 0 waits
    else:
        with pytest.raises(RuntimeError, match="Timed out"), ringsim.trace(path):
            dist.recv(torch.zeros(3), 1, group)


def test_a_rank_that_fails_says_where_the_others_are(played: Callable[[str], Played]) -> None:
    ranks, folder = played("fails_while_another_works")
    results(ranks)
    line = fails_while_another_works.__code__.co_firstlineno + 7
    said = str(ringsim.load(folder / "run.ringtrace").explain())
    assert f"rank 1 was asleep at test_fault_joined.py:{line}" in said
