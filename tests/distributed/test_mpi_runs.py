"""The MPI backend under a real mpirun: recording, logging, beginning and end, and what goes wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_runs import require_mpi, run_mpi

import ringsim

JOBS = str(Path(__file__).with_name("mpi_jobs.py"))


def test_a_block_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "mpi.ringtrace"
    run = run_mpi(3, JOBS, "record", str(path))
    assert (run.returncode, run.stdout) == (0, "messages 5\n"), run.stderr
    trace = ringsim.load(path)
    assert trace.metadata["backend"] == "mpi"
    assert trace.metadata["complete"]
    frame = trace.to_pandas()
    assert set(frame["status"]) == {"ok"}
    assert frame[frame["rank"] == 1]["op"].tolist() == ["irecv", "send", "span", "all_reduce", "broadcast", "send"]
    assert set(frame["file"].dropna()) == {JOBS}
    assert sorted(frame[frame["op"] == "recv"]["peer"]) == [1, 2]  # from anybody: known now
    assert frame[frame["op"] == "all_reduce"]["stage"].tolist() == [0, 1, 2]
    assert set(frame[frame["op"] == "broadcast"]["group"]) == {"mpi:1"}
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == []  # the parts are gone


ENDING_WELL = {  # a job, and what each of its ranks says at its end
    "log": "logged on all ranks",
    "live_twice": "lived twice",
    "mismatch": "mismatch was told",
    "disagree": "disagreed",
    "torch_only": "torch was pointed",
    "wrong_size": "size was told",
}


@pytest.fixture(scope="module")
def ended_well() -> subprocess.CompletedProcess[str]:
    """One mpirun for all jobs of two ranks that end well: one begins where the other has left MPI."""
    return run_mpi(2, JOBS, ",".join(["summary", *ENDING_WELL]))


@pytest.mark.parametrize("name", ENDING_WELL)
def test_job_ends_well(ended_well: subprocess.CompletedProcess[str], name: str) -> None:
    assert ended_well.stdout.count(ENDING_WELL[name]) == 2, ended_well.stdout + ended_well.stderr


def test_a_log_is_summed_up_on_all_ranks_and_printed_on_one(ended_well: subprocess.CompletedProcess[str]) -> None:
    assert ended_well.returncode == 0, ended_well.stdout + ended_well.stderr
    lines = [line.split() for line in ended_well.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("exchange", "send", "recv")] == ["exchange", "exchange", "recv", "send"] * 2


def test_a_script_without_mpirun_is_a_job_of_one() -> None:
    require_mpi()
    run = subprocess.run([sys.executable, JOBS, "log"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("logged on all ranks\n")


def test_a_rank_that_does_not_come_is_named() -> None:
    run = run_mpi(3, JOBS, "missing")
    assert run.returncode not in (0, 124), run.stderr  # 124: the limit
    assert run.stdout.count("missed") == 3, run.stderr
    assert "this ends all ranks" in run.stderr


def test_a_rank_that_raises_ends_the_job() -> None:
    begin = time.monotonic()
    run = run_mpi(3, JOBS, "fail", limit_s=50)
    assert run.returncode not in (0, 124), run.stdout + run.stderr  # 124: the limit
    assert time.monotonic() - begin < 50
    assert "Call the functions of ringsim.comm" in run.stderr


@pytest.mark.parametrize(("how", "code"), [("3", 3), ("rank 1 has no data", 1)])
def test_a_rank_that_exits_ends_the_job(how: str, code: int) -> None:
    """Others waited for it until their limits, and MPI at its end for them: Python reports no SystemExit to sys.excepthook."""
    run = run_mpi(3, JOBS, "leave", how, limit_s=50)
    assert run.returncode == code, run.stdout + run.stderr  # 124: the limit
    assert run.stdout == ""
    assert ("rank 1 has no data" in run.stderr) == (code == 1)


@pytest.mark.parametrize(("how", "met"), [("well", 0), ("caught", 3)])
def test_a_rank_that_exits_well_or_not_at_all_ends_nothing(how: str, met: int) -> None:
    run = run_mpi(3, JOBS, "leave", how, limit_s=50)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("met") == met
