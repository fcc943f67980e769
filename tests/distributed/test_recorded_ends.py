"""How ranks leave a block of ``with ringsim.trace(path)``.

What the file says of one that raises, exits, dies or is done too early.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import Ended, RankServer, results
from test_recording import join

import ringsim
from ringsim.errors import PeerExited
from ringsim.launch import block, merging
from ringsim.launch.ends import gather_ends
from ringsim.launch.recording import hold_back_sigterm
from ringsim.traces.findings import SLOW_KINDS

RAISED = r"raised ValueError: no such layer \(.*test_recorded_ends.py, line "
DIED = r"but rank 1 died within the recorded block, by a signal or os._exit\(\)"
CASES = [  # which rank leaves, how, when, and the kind and the words of the finding
    (1, "raises", "while they wait", "rank_failed", f"rank 1 {RAISED}"),
    (1, "raises", "before they wait", "rank_failed", f"rank 1 {RAISED}"),
    (1, "exits", "while they wait", "peer_exited", r"but rank 1 left with sys.exit\(0\)"),
    (1, "dies", "while they wait", "peer_exited", DIED),
    (1, "is done", "before they wait", "peer_exited", "but rank 1 has left the recorded block"),
    (0, "raises", "while they wait", "rank_failed", f"rank 0 {RAISED}"),
]


def ends_early(directory: str, rank: int, who: int, how: str, when: str) -> list[str]:
    """Rank ``who`` leaves before it sends what all others wait for.

    Returns what their errors say besides torch's words.
    """
    if who:  # then the others end by themselves: rank 0 is to wait for each that lives
        merging.WAIT_AFTER_ERROR_S = 60.0  # type: ignore[misc]  # of this process alone
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
        if isinstance(error, PeerExited):  # the watch saw it before torch's error was raised
            return [str(error)]
        return getattr(error, "__notes__", [])
    os._exit(0)


@pytest.fixture(scope="module")
def ended(
    server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, list[Ended]]]:
    """Three cases at once, three ranks each, which have a second to answer.

    Where each left its file, and how its ranks ended.
    """
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
    """0.1.0 found nothing wrong, or a rank that was busy."""
    (who, how, _, kind, words), (directory, ranks) = CASES[number], ended[number]
    trace = ringsim.load(directory / "run.ringtrace")
    (finding,) = trace.explain().findings
    if how == "dies":
        assert not trace.metadata["complete"]
        assert any("ranks [1] had not left" in note for note in trace.metadata["notes"])
        assert (directory / "run.ringtrace.parts" / "rank-1.events").exists()  # the evidence stays
    assert (finding.kind, who in finding.ranks) == (kind, True)
    assert re.search(words, finding.message)
    assert len(finding.consequences) == 2 or kind != "rank_failed"
    notes = [note for each in ranks if each.how == "returned" for note in each.value]
    verdict = rf"peer exited: .*, but rank {who} (is dead|has left)"
    names_it = re.compile(rf"ringsim: rank {who} |{verdict}")
    assert [names_it.match(note) is not None for note in notes] == [True, True]


def says_who_raised(path: str | Path) -> bool:
    (finding,) = ringsim.load(path).explain().findings
    return finding.kind == "rank_failed" and finding.message.startswith(
        "rank 1 raised ValueError: boom ("
    )


def ended_at_work(directory: str, rank: int) -> None:
    """Rank 1 raises; rank 0 computes when it is ended for that, as a launcher would do."""
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
    assert [
        each.how for each in server.run(ended_at_work, [(str(tmp_path), rank) for rank in range(2)])
    ] == ["killed", "raised"]
    assert not (tmp_path / "run.ringtrace").exists()
    for path in (
        tmp_path / "run.ringtrace",
        tmp_path / "run.ringtrace.parts",
        f"{tmp_path}/run.ringtrace.parts/",
    ):
        assert says_who_raised(path)


def raise_together(directory: str, rank: int) -> None:
    """Both ranks raise. Rank 1 writes how it ends, and posts when rank 0 has looked three times."""
    path, store = join(directory, rank, 2), dist.distributed_c10d._get_default_store()
    put, has, looks = block.Store.put, block.Store.has, []

    def put_late(self: block.Store, key: str, data: bytes) -> None:
        if key == "left/1":
            store.set("written", "")
            store.wait(["looked"])
        put(self, key, data)

    def has_and_count(self: block.Store, key: str) -> bool:
        looks.append(key)
        if looks.count("left/1") == 30:
            store.set("looked", "")
        return has(self, key)

    merging.WAIT_AFTER_ERROR_S = 60.0  # type: ignore[misc]  # of this process alone
    block.Store.put = put_late  # type: ignore[method-assign]
    block.Store.has = has_and_count  # type: ignore[method-assign]
    try:
        with ringsim.trace(path):
            if rank == 0:
                store.wait(["written"])
            raise ValueError("boom")
    finally:
        store.set("looked", "")


def test_rank_0_waits_for_a_rank_that_is_about_to_leave(server: RankServer, tmp_path: Path) -> None:
    """0.2.0 waited no longer than 0.1 s for a rank that had written how it ends."""
    ended = server.run(raise_together, [(str(tmp_path), rank) for rank in range(2)])
    assert [(each.how, each.value) for each in ended] == [("raised", "boom")] * 2
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert [note for note in trace.metadata["notes"] if "had not left" in note] == []
    assert [end["rank"] for end in trace.metadata["ends"]] == [0, 1]


def left_and_at_work(directory: str, rank: int) -> None:
    with ringsim.trace(join(directory, rank, 2)):
        work: Any = dist.isend(torch.zeros(3), 1 - rank)
        dist.recv(torch.zeros(3), 1 - rank)
    work.wait()
    dist.barrier()


def test_who_left_in_peace_is_not_accused(server: RankServer, tmp_path: Path) -> None:
    results(server.run(left_and_at_work, [(str(tmp_path), rank) for rank in range(2)]))
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert "ends" not in trace.metadata
    assert not {each.kind for each in trace.explain().findings} - {*SLOW_KINDS}


def test_who_was_at_work_when_another_failed_is_not_called_dead() -> None:
    """A launcher ends it because of the other, before the file is written."""
    dead = [{"rank": rank, "state": "killed", "about": "is dead", "error": ""} for rank in (1, 2)]
    asleep = {"rank": 2, "state": "running", "about": "asleep", "error": ""}
    ends = gather_ends({0: {"raised": True, "lost": True, "end": None}}, [*dead, asleep], 0)
    assert [(end["rank"], end["state"]) for end in ends] == [(1, "killed"), (2, "running")]


def test_a_sigterm_is_put_off_and_comes_afterwards() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
    try:
        with hold_back_sigterm() as came:
            assert not came.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert came.wait(10)
            assert heard == []
        assert heard == ["mine"]
        with hold_back_sigterm():
            pass
        assert heard == ["mine"]
    finally:
        signal.signal(signal.SIGTERM, before)
