"""The ring on the MPI backend, under a real mpirun: its place, its groups, its messages in the trace, and what is left afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mpi_runs import run_mpi

import ringsim

JOBS = str(Path(__file__).with_name("mpi_ring_jobs.py"))


def reports(directory: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


@pytest.mark.parametrize("count", [1, 2, 3])  # four in the rings side by side
def test_a_worker_goes_round_and_its_messages_are_on_the_edges(count: int, tmp_path: Path) -> None:
    run = run_mpi(count, JOBS, "go_round", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "from rank 0\n" * 2
    for rank, report in enumerate(reports(tmp_path)):
        pred, succ = (rank - 1) % count, (rank + 1) % count
        assert report["place"] == [rank, count, pred, succ, list(range(count)), "cpu"]
        assert report["result"] == (rank - 3) % count + 3
        if count == 1:
            assert report["groups"] == [None, None]
            continue
        edges = [(pred, rank), (rank, succ)]
        assert report["groups"] == [[f"ring:{a}>{b}", sorted([a, b]), sorted([a, b]).index(rank), 2] for a, b in edges]
        assert report["distinct"]
    for turn in range(2):
        trace = ringsim.load(tmp_path / f"{turn}.ringtrace")
        assert (trace.metadata["backend"], trace.metadata["complete"]) == ("mpi", True)
        frame = trace.to_pandas()
        assert set(frame["status"]) == {"ok"}
        sends = frame[frame["op"] == "isend"]
        expected = [(rank, (rank + 1) % count, f"ring:{rank}>{(rank + 1) % count}") for rank in range(count) for _ in range(3)]
        assert list(zip(sends["rank"], sends["peer"], sends["group"], strict=True)) == (expected if count > 1 else [])
        assert len(trace.to_pandas("messages")) == len(sends)
        assert len(trace.unmatched) == 0
        assert len(frame) == 3 * count + 2 * len(sends)  # spans, and nothing that building the ring sends


def test_rings_side_by_side_in_a_world_of_the_script(tmp_path: Path) -> None:
    run = run_mpi(4, JOBS, "two_rings", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    found = reports(tmp_path)
    assert [each["members"] for each in found] == [[0, 1], [0, 1], [3, 2], [3, 2]]
    assert [each["came"] for each in found] == [1, 0, 3, 2]
    assert [group[0] for group in found[2]["groups"]] == ["ring:3>2", "ring:2>3"]


def test_what_is_wrong_is_said_on_every_rank() -> None:
    run = run_mpi(3, JOBS, "refuse")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("refused") == 3
