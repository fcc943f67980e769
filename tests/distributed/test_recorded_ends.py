"""The ends of ranks in a block of ``with ringsim.trace(path)``.

The file shows a rank that raises, exits, dies or finishes too early.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import Ended, RankServer, results
from test_recording import join

import ringsim
from ringsim.errors import PeerExited

RAISED = r"raised ValueError: no such layer \(.*test_recorded_ends.py, line "
DIED = r"\n  rank 1 died inside the recorded block, from a signal or os._exit\(\)"
CASES = [  # the rank that leaves, how and when, and the kind and words of the finding
    (1, "raises", "while they wait", "rank_failed", f"rank 1 {RAISED}"),
    (1, "exits", "while they wait", "peer_exited", r"\n  rank 1 called sys.exit\(0\)"),
    (1, "dies", "while they wait", "peer_exited", DIED),
    (1, "is done", "before they wait", "peer_exited", "\n  rank 1 has left the recorded block"),
    (0, "raises", "while they wait", "rank_failed", f"rank 0 {RAISED}"),
]


def wait_longer() -> None:
    """Makes rank 0, if this is it, wait for the ends of all blocks."""
    pytest.MonkeyPatch().setattr("ringsim.launch.merging.WAIT_AFTER_ERROR_S", 60.0)


def ends_early(directory: str, rank: int, who: int, how: str, when: str) -> list[str]:
    """Rank ``who`` leaves before it sends the message that all others wait for.

    Returns the notes of their errors.
    """
    if who:  # then the others end by themselves: rank 0 waits for each living rank
        wait_longer()
    path, store = join(directory, rank, 3), dist.distributed_c10d._get_default_store()
    try:
        with ringsim.trace(path):
            if rank == who:
                if when == "while they wait":
                    store.wait(["waiting"])
                    time.sleep(0.2)
                if how == "raises":
                    raise ValueError("no such layer")
                if how == "exits":
                    sys.exit(0)
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
            if rank != who:
                if when == "before they wait":
                    time.sleep(0.6)
                store.set("waiting", "")
                dist.recv(torch.zeros(3), who)
    except (RuntimeError, ValueError, SystemExit) as error:
        if rank == who:
            os._exit(1)
        if isinstance(error, PeerExited):  # the watcher saw it before torch's error was raised
            return [str(error)]
        return getattr(error, "__notes__", [])
    os._exit(0)


@pytest.fixture(scope="module")
def ended(
    server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, list[Ended]]]:
    """Three cases at a time, with three ranks each, which have a second to answer."""
    places = [tmp_path_factory.mktemp("case") for _ in CASES]
    asked = [
        (str(place), rank, *case[:3])
        for place, case in zip(places, CASES, strict=True)
        for rank in range(3)
    ]
    found = [end for some in (asked[:9], asked[9:]) for end in server.run(ends_early, some)]
    return [(place, found[3 * number : 3 * number + 3]) for number, place in enumerate(places)]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"rank {who} {how} {when}" for who, how, when, _, _ in CASES]
)
def test_the_file_says_who_ended_and_why(
    ended: list[tuple[Path, list[Ended]]], number: int
) -> None:
    """0.1.0 found nothing wrong, or a busy rank."""
    (who, how, _, kind, words), (directory, ranks) = CASES[number], ended[number]
    trace = ringsim.load(directory / "run.ringtrace")
    (finding,) = trace.explain().findings
    if how == "dies":
        assert not trace.metadata["complete"]
        assert any("ranks [1] had not left" in note for note in trace.metadata["notes"])
        assert (directory / "run.ringtrace.parts" / "rank-1.events").exists()
    assert (finding.kind, who in finding.ranks) == (kind, True)
    assert re.search(words, finding.message)
    assert len(finding.consequences) == 2 or kind != "rank_failed"
    notes = [note for each in ranks if each.how == "returned" for note in each.value]
    verdict = rf"peer exited: .*\n(.*\n)*  rank {who} (is dead|has left)"
    names_it = re.compile(rf"ringsim: rank {who} |{verdict}")
    assert [names_it.match(note) is not None for note in notes] == [True, True]


def ended_at_work(directory: str, rank: int) -> None:
    """Rank 1 raises; rank 0 computes when a launcher ends it for that."""
    path, store = join(directory, rank, 2), dist.distributed_c10d._get_default_store()
    try:
        with ringsim.trace(path):
            if rank == 1:
                store.wait(["pid"])
                raise ValueError("boom")
            store.set("pid", str(os.getpid()))
            time.sleep(60)
    finally:
        os.kill(int(store.get("pid")), signal.SIGTERM)


def test_where_no_file_was_written_the_parts_tell_who_died(
    server: RankServer, tmp_path: Path
) -> None:
    ranks = server.run(ended_at_work, [(str(tmp_path), rank) for rank in range(2)])
    assert [each.how for each in ranks] == ["killed", "raised"]
    assert not (tmp_path / "run.ringtrace").exists()
    for name in ("run.ringtrace", "run.ringtrace.parts/"):
        (finding,) = ringsim.load(f"{tmp_path}/{name}").explain().findings
        assert finding.kind == "rank_failed"
        assert finding.message.startswith("rank 1 raised ValueError: boom (")


def is_hurried(directory: str, rank: int) -> list[bool]:
    """Rank 0 gets a signal to end while it waits for rank 1, which does not leave."""
    path, store = join(directory, rank, 2), dist.distributed_c10d._get_default_store()
    heard: list[bool] = []
    if rank == 1:
        with ringsim.trace(path):
            pid = int(store.get("pid"))
            time.sleep(0.3)
            os.kill(pid, signal.SIGTERM)
            store.wait(["left"])
        return heard
    signal.signal(signal.SIGTERM, lambda *_: heard.append(Path(path).exists()))
    with ringsim.trace(path):
        store.set("pid", str(os.getpid()))
    store.set("left", "")
    return heard


def test_a_sigterm_is_put_off_until_the_file_is_written(server: RankServer, tmp_path: Path) -> None:
    """When one rank has failed, a launcher such as torchrun sends the signal to the others."""
    ranks = server.run(is_hurried, [(str(tmp_path), rank) for rank in range(2)])
    assert results(ranks) == [[True], []]
    notes = ringsim.load(tmp_path / "run.ringtrace").metadata["notes"]
    assert any("ranks [1] had not left" in note for note in notes)
