"""The transfer of parts over the store: questions, checks, and ranks that give up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from test_gathering import finish_sending

from ringsim.launch import gathering
from ringsim.launch.block import BlockStore, never, place_of
from ringsim.launch.gathering import Gathering, Offer

FAR = {"host": "node2", "clock": "far", "directory": "/there", "id": "there"}
FAR |= {"pid": 7, "start_ns": 1}
FILES = ["rank-1.events", "rank-1.names"]


def offer(keys: BlockStore, rank: int, directory: Path, *, failed: bool = False) -> Offer:
    """Makes the offer of a rank, and writes it to the store."""
    place = {**place_of(directory), "start_ns": rank}
    keys.put(f"at/{rank}", json.dumps(place).encode())
    return Offer(keys, rank, directory, place, directory / "run.ringtrace", failed)


def write_part(directory: Path, rank: int, size_bytes: int) -> None:
    directory.mkdir(exist_ok=True)
    for kind in ("events", "names"):
        (directory / f"rank-{rank}.{kind}").write_bytes(bytes([rank]) * size_bytes)


def test_a_rank_that_fails_before_rank_0_is_there_leaves_its_part_in_the_store(
    tmp_path: Path,
) -> None:
    here, there, keys = tmp_path / "here", tmp_path / "there", BlockStore(dist.HashStore(), "run")
    here.mkdir()
    write_part(there, 1, 3)
    offer(keys, 1, there, failed=True).make()
    finish_sending()
    keys.put("at/1", json.dumps(FAR).encode())
    fetching = Gathering(keys, here, 2)
    fetching.fetch([1], never)
    assert (fetching.missing, sorted(path.name for path in here.iterdir())) == ([], FILES)


ENDED = """
import sys, threading, time
from pathlib import Path
import torch.distributed as dist
from ringsim.launch import block, gathering
from test_gathering_parts import offer

gathering.CHUNK_BYTES, gathering.ENDING_S, looks = 1 << 10, 0.0, 0

class Store(block.BlockStore):
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

store = dist.HashStore()
keys = block.BlockStore(store, "run")
offer(keys, 0, Path(sys.argv[2]))
offer(Store(store, "run"), 1, Path(sys.argv[1])).make()
(offering,) = [one for one in threading.enumerate() if one.name == "ringsim-parts"]
threading.Thread(target=gather).start()
"""


def test_a_process_that_ends_long_before_rank_0_leaves_the_block_still_gives_its_part(
    tmp_path: Path,
) -> None:
    """After 2 s, it used to leave a part that is too large for the store.

    Rank 0 may be busy at the end.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    write_part(there, 1, 10 << 10)
    words = [sys.executable, "-c", ENDED, str(there), str(here)]
    ended = subprocess.run(
        words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
    assert sorted(path.name for path in here.iterdir()) == FILES
    assert not there.exists()


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
    (here := tmp_path / "here").mkdir()
    store = dist.HashStore()
    keys = BlockStore(store, "run")
    keys.put("at/1", json.dumps(FAR).encode())
    keys.put("files/1", json.dumps(listed).encode())
    if chunk is not None:
        BlockStore(store, sealed_by).put("chunk/1/0", chunk)
    gathered = Gathering(keys, here, 2)
    gathered.fetch([0, 1], lambda: True)
    came = [path.name for path in tmp_path.rglob("rank-*") if path.suffix != ".arriving"]
    assert sorted(came) == FILES * comes
    told = [re.search(r"ranks \[1\] .*host node2\. .* /there", said) for said in gathered.missing]
    assert [found is not None for found in told] == [True] * (not comes)
    gathered.acknowledge(whole=True, keep=True)
    # it did not wait for a request, so it does not wait for a receipt
    assert store.check(["receipt/1"]) is False
