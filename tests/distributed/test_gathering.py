"""One trace of ranks that share no directory: their parts come to rank 0 over the store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, results
from test_recording import join

import ringsim
from ringsim.cli import main
from ringsim.launch import block, gathering, recording
from ringsim.state import OUR_THREADS


def finish_sending() -> None:
    """Does what Python does at the end of a process, and the server of these ranks does not."""
    for thread in threading.enumerate():
        if thread.name == f"{OUR_THREADS}parts":
            thread.join()


def hosts(directory: str, rank: int, dies: bool) -> None:
    """Four ranks on two hosts: two directories of parts that only their own ranks write to."""
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank // 2}"
    gathering.CHUNK_BYTES = 1 << 10  # type: ignore[misc]  # many chunks of few events
    # the trace of a long run is read when it is asked for
    recording.MOST_KEPT = 0  # type: ignore[misc]
    path = join(directory, rank, 4)
    with contextlib.suppress(RuntimeError), ringsim.trace(path) as recorded:
        for _ in range(100):
            dist.barrier()
        with contextlib.nullcontext() if dies else ringsim.trace(f"{directory}/inner.ringtrace"):
            dist.all_reduce(torch.zeros(1))
        if dies and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and rank == 0:
            dist.recv(torch.zeros(1), 3)  # fails
    assert rank or recorded.trace == ringsim.load(path)
    finish_sending()


def test_parts_on_other_hosts_come_over_the_store(server: RankServer, tmp_path: Path) -> None:
    results(server.run(hosts, [(str(tmp_path), rank, False) for rank in range(4)]))
    trace, inner = (ringsim.load(tmp_path / f"{name}.ringtrace") for name in ("run", "inner"))
    assert (len(trace.events), len(inner.events)) == (4 * 101, 4)
    assert trace.metadata["complete"]
    assert trace.metadata["notes"] == []
    assert not [*tmp_path.glob("host-*/*")], "parts go once rank 0 has them"


def test_parts_of_a_rank_that_died_come_and_stay(
    server: RankServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.run(hosts, [(str(tmp_path), rank, True) for rank in range(4)])
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert [int((trace.events.rank == rank).sum()) for rank in range(4)] == [102, 101, 101, 101]
    assert trace.metadata["complete"] is False
    parts = sorted(tmp_path.glob("host-*/*.parts"))
    assert len(parts) == 2
    assert main(["merge", str(tmp_path / "merged.ringtrace"), *map(str, parts)]) == 0
    merged = ringsim.load(tmp_path / "merged.ringtrace")
    assert len(merged.events) == len(trace.events)
    assert merged.metadata["run_id"] == trace.metadata["run_id"]
    other = shutil.copytree(
        parts[1], tmp_path / "other.parts", ignore=shutil.ignore_patterns("*.ear")
    )
    for names in other.glob("*.names"):
        names.write_text(names.read_text().replace(trace.metadata["run_id"], "another"))
    assert main(["merge", str(tmp_path / "merged.ringtrace"), str(parts[0]), str(other)]) == 1
    assert "must be of one run, got those of" in capsys.readouterr().err


def test_a_rank_that_fails_before_rank_0_is_there_leaves_its_part_in_the_store(
    tmp_path: Path,
) -> None:
    for kind in ("events", "names"):
        (tmp_path / f"rank-1.{kind}").write_bytes(b"abc")
    keys = block.Store(dist.HashStore(), "run")
    gathering.Offer(
        keys, 1, tmp_path, block.place_of(tmp_path), tmp_path / "run.ringtrace", failed=True
    ).make()
    finish_sending()
    rank_0 = tmp_path / "rank 0"
    rank_0.mkdir()
    keys.put(
        "at/1",
        json.dumps(
            {
                "host": "node2",
                "clock": "far",
                "directory": "/there",
                "id": "there",
                "pid": 7,
                "start_ns": 1,
            }
        ).encode(),
    )
    fetching = gathering.Gathering(keys, rank_0, 2)
    fetching.fetch([1], lambda: False)
    assert (fetching.missing, sorted(path.name for path in rank_0.iterdir())) == (
        [],
        ["rank-1.events", "rank-1.names"],
    )


def test_a_rank_leaves_though_rank_0_has_removed_the_directory_that_they_share(
    tmp_path: Path,
) -> None:
    keys, place = (
        block.Store(dist.HashStore(), "run"),
        {**block.place_of(tmp_path), "start_ns": 1},
    )
    keys.put("at/0", json.dumps(place).encode())
    tmp_path.rmdir()
    gathering.Offer(keys, 1, tmp_path, place, tmp_path / "run.ringtrace", failed=False).make()


ENDED = """
import sys, threading, time
from pathlib import Path
import torch.distributed as dist
from ringsim.launch import block, gathering

gathering.CHUNK_BYTES, gathering.ENDING_S, looks = 1 << 10, 0.0, 0

class Store(block.Store):
    def has(self, key):
        global looks
        looks += not threading.main_thread().is_alive()
        return super().has(key)

def gather():
    threading.main_thread().join()
    while offering.is_alive() and looks < 20:
        time.sleep(0.01)
    fetching = gathering.Gathering(keys, Path(sys.argv[2]), 2)
    fetching.fetch([1], lambda: True)
    fetching.acknowledge(whole=True, keep=True)
    print(fetching.missing)

store, there = dist.HashStore(), Path(sys.argv[1])
keys, asking = block.Store(store, "run"), Store(store, "run")
for rank, path in enumerate((sys.argv[2], there)):
    keys.put(f"at/{rank}", gathering.json.dumps({**block.place_of(Path(path)), "start_ns": rank}).encode())
gathering.Offer(asking, 1, there, {**block.place_of(there), "start_ns": 1}, there / "run.ringtrace", failed=False).make()
(offering,) = [one for one in threading.enumerate() if one.name == "ringsim-parts"]
threading.Thread(target=gather).start()
"""  # noqa: E501


def test_a_process_that_ends_long_before_rank_0_leaves_the_block_still_gives_its_part(
    tmp_path: Path,
) -> None:
    """After 2 s it used to leave there a part that is too large for the store.

    Rank 0 alone may have much to do at the end.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    for directory in (there, here):
        directory.mkdir()
    for kind in ("events", "names"):
        (there / f"rank-1.{kind}").write_bytes(bytes(10 << 10))
    ended = subprocess.run(
        [sys.executable, "-c", ENDED, str(there), str(here)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
    assert sorted(path.name for path in here.iterdir()) == ["rank-1.events", "rank-1.names"]
    assert not there.exists()


def test_hosts_are_asked_one_after_the_other_and_told_when_it_is_soon_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "AHEAD", 1)
    monkeypatch.setattr(gathering, "CHUNK_BYTES", 1 << 10)
    store, ranks, directories = (
        dist.HashStore(),
        range(5),
        [tmp_path / str(rank) for rank in range(5)],
    )
    for rank, directory in enumerate(directories):
        directory.mkdir()
        for kind in ("events", "names"):
            (directory / f"rank-{rank}.{kind}").write_bytes(bytes([rank]) * 10_000)
        place = {**block.place_of(directory), "start_ns": rank}
        block.Store(store, "run").put(f"at/{rank}", json.dumps(place).encode())
    for rank in ranks[1:]:
        place = {**block.place_of(directories[rank]), "start_ns": rank}
        gathering.Offer(
            block.Store(store, "run", 1000),
            rank,
            directories[rank],
            place,
            tmp_path / "run.ringtrace",
            failed=False,
        ).make()
    fetching = gathering.Gathering(block.Store(store, "run"), directories[0], 5)
    fetching.fetch(ranks[1:], lambda: True)
    fetching.acknowledge(whole=True, keep=True)
    finish_sending()
    assert fetching.missing == []
    for rank in ranks:
        assert (directories[0] / f"rank-{rank}.events").read_bytes() == bytes([rank]) * 10_000
    assert [path.exists() for path in directories] == [True] + [False] * 4


GOOD = [["rank-1.events", 3], ["rank-1.names", 0]]


@pytest.mark.parametrize(
    ("listed", "chunk", "sealed_by", "comes"),
    [
        (GOOD, b"abc", "run", True),
        (GOOD, b"abc", "another run", False),
        (GOOD, b"abc" * gathering.CHUNK_BYTES, "run", False),
        ([*GOOD, ["../rank-1.events", 3]], b"abc", "run", False),
        ([*GOOD, ["rank-0.events", 3]], b"abc", "run", False),  # rank 0's own
        ([["rank-1.events", 1 << 40], GOOD[1]], b"abc", "run", False),
        ([*GOOD, 7], b"abc", "run", False),
        ({}, b"abc", "run", False),
        (GOOD, None, "run", False),  # it has stopped
    ],
)
def test_what_arrives_is_not_trusted(
    listed: object,
    chunk: bytes | None,
    sealed_by: str,
    comes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "STOPPED_S", 0)
    (tmp_path / "here").mkdir()
    store = dist.HashStore()
    keys, theirs = block.Store(store, "run"), block.Store(store, sealed_by)
    keys.put(
        "at/1",
        json.dumps(
            {
                "host": "node2",
                "clock": "far",
                "directory": "/there",
                "id": "there",
                "pid": 7,
                "start_ns": 1,
            }
        ).encode(),
    )
    keys.put("files/1", json.dumps(listed).encode())
    if chunk is not None:
        theirs.put("chunk/1/0", chunk)
    gathered = gathering.Gathering(keys, tmp_path / "here", 2)
    gathered.fetch([0, 1], lambda: True)
    assert (
        sorted(path.name for path in tmp_path.rglob("rank-*") if path.suffix != ".arriving")
        == ["rank-1.events", "rank-1.names"] * comes
    )
    assert [
        re.findall(r"ranks \[1\] .*host node2: .* /there", said) != [] for said in gathered.missing
    ] == [True] * (not comes)
    gathered.acknowledge(whole=True, keep=True)
    assert store.check(["receipt/1"]) is False, (
        "it did not wait to be asked, so it does not wait for a receipt"
    )


def test_one_rank_of_a_host_says_how_to_join_the_parts_that_nobody_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError(f"the store went with rank 0: {keys}")

    for rank in (2, 3):
        (tmp_path / f"rank-{rank}.names").touch()
        keys, place = block.Store(Gone(), "run"), block.place_of(tmp_path)
        gathering.Offer(keys, rank, tmp_path, place, Path("run.ringtrace"), failed=False).give()
    said = capsys.readouterr().err
    assert re.findall(
        r"\[rank (\d)\].*They are in (.*): join .*ringsim merge run.ringtrace", said
    ) == [("2", str(tmp_path))]
