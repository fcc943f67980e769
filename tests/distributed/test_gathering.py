"""One trace of ranks without a common directory: rank 0 gets their parts over the store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, results
from test_recording import join

import ringsim
from ringsim.cli import main


def finish_sending() -> None:
    """Does Python's work at the end of a process, which the server of these ranks skips."""
    for thread in threading.enumerate():
        if thread.name == "ringsim-parts":
            thread.join()


def hosts(directory: str, rank: int, dies: bool) -> None:
    """Records four ranks as on two hosts, each with its own directory of parts."""
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank // 2}"
    patch = pytest.MonkeyPatch()
    patch.setattr("ringsim.launch.gathering.CHUNK_BYTES", 1 << 10)  # many chunks of few events
    # the trace of a long run is read on demand
    patch.setattr("ringsim.launch.recording.MOST_KEPT", 0)
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
    assert (trace.metadata["complete"], trace.metadata["notes"]) == (True, [])
    assert not [*tmp_path.glob("host-*/*")], "parts must be deleted when rank 0 has them"


def test_parts_of_a_rank_that_died_come_and_stay(
    server: RankServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.run(hosts, [(str(tmp_path), rank, True) for rank in range(4)])
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert [int((trace.events.rank == rank).sum()) for rank in range(4)] == [102, 101, 101, 101]
    assert trace.metadata["complete"] is False
    first, second = sorted(tmp_path.glob("host-*/*.parts"))
    file = str(tmp_path / "merged.ringtrace")
    assert main(["merge", file, str(first), str(second)]) == 0
    merged = ringsim.load(file)
    assert len(merged.events) == len(trace.events)
    assert merged.metadata["run_id"] == trace.metadata["run_id"]
    other = tmp_path / "other.parts"
    shutil.copytree(second, other, ignore=shutil.ignore_patterns("*.ear"))
    for names in other.glob("*.names"):
        names.write_text(names.read_text().replace(trace.metadata["run_id"], "another"))
    assert main(["merge", file, str(first), str(other)]) == 1
    assert "cannot merge parts from different runs" in capsys.readouterr().err
