"""The MPI backend under a real mpirun."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import conformance
import pytest
from mpi_runs import require_mpi, run_mpi

import ringsim

SCRIPT = str(Path(__file__).with_name("mpi_jobs.py"))
# the jobs of one launch, by world size: each begins after the last one has left MPI; a job that
# fails ends all ranks
JOBS = {
    1: "come_from_deepspeed go_round_alone log",
    2: "go_round leave",
    3: "come_from_deepspeed keep_the_rules go_round refuse log live_twice mismatch leave_well",
    4: "miss",
}
Runs = Callable[[int], tuple[Path, "subprocess.CompletedProcess[str]"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs all jobs of a world size once; returns their directory and the completed processes."""
    require_mpi()

    @functools.cache
    def run(size: int) -> tuple[Path, subprocess.CompletedProcess[str]]:
        directory = tmp_path_factory.mktemp(f"mpi-{size}")
        words = [SCRIPT, str(directory), *JOBS[size].split()]
        if size > 1:
            return directory, run_mpi(size, *words, limit_s=240)
        # without mpirun: a job with one rank
        command = [sys.executable, *words]
        return directory, subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("size", "code", "failing", "told"),
    [(1, 0, "", ""), (2, 3, "leave", ""), (3, 0, "", ""), (4, None, "miss", "ValueError: no more")],
)
def test_all_jobs_end_well_but_one_that_ends_all_ranks(
    runs: Runs, size: int, code: int | None, failing: str, told: str
) -> None:
    """Python does not report SystemExit to sys.excepthook."""
    directory, ended = runs(size)
    # 124: the limit
    assert ended.returncode == code if code is not None else ended.returncode not in (0, 124), (
        ended.stdout + ended.stderr
    )
    for name in JOBS[size].split():
        assert ended.stdout.count(f"done {name}\n") == (0 if name == failing else size), (
            ended.stdout + ended.stderr
        )
    assert told in ended.stderr
    assert len(list(directory.glob("missed-*"))) == (size if failing == "miss" else 0)


def test_mpi_keeps_the_rules(runs: Runs) -> None:
    """Runs with three ranks, because the rules include groups of one and of two."""
    directory, ended = runs(3)
    conformance.check_job(
        directory,
        3,
        {},
        lambda: f"mpirun ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"[-3000:],
    )


def test_a_log_is_summed_up_on_all_ranks_and_printed_on_one(runs: Runs) -> None:
    rows = [line.split()[0] for line in runs(3)[1].stdout.splitlines() if line.strip()]
    named = [row for row in rows if row in ("exchange", "send", "recv")]
    assert named == ["exchange", "exchange", "recv", "send"] * 2


# -- rings


@pytest.mark.parametrize("count", [1, 2, 3])  # four in the two rings
def test_a_worker_goes_round_and_its_messages_are_on_the_edges(runs: Runs, count: int) -> None:
    directory, ended = runs(count)
    assert [line for line in ended.stdout.splitlines() if line.startswith("from rank")] == [
        "from rank 0"
    ] * 2
    for rank in range(count):
        report = json.loads((directory / f"ring-{rank}.json").read_text())
        pred, succ = (rank - 1) % count, (rank + 1) % count
        assert report["place"] == [rank, count, pred, succ, list(range(count)), "cpu"]
        assert report["result"] == (rank - 3) % count + 3
        if count == 1:
            assert report["groups"] == [None, None]
            continue
        edges = [(pred, rank), (rank, succ)]
        assert report["groups"] == [
            [f"ring:{a}>{b}", sorted([a, b]), sorted([a, b]).index(rank), 2] for a, b in edges
        ]
        assert report["distinct"]
    for turn in range(2):
        trace = ringsim.load(directory / f"{turn}.ringtrace")
        assert (trace.metadata["backend"], trace.metadata["complete"]) == ("mpi", True)
        frame = trace.to_pandas()
        assert set(frame["status"]) == {"ok"}
        sends = frame[frame["op"] == "isend"]
        succ = {rank: (rank + 1) % count for rank in range(count) if count > 1}
        expected = [(rank, succ[rank], f"ring:{rank}>{succ[rank]}") for rank in succ for _ in "123"]
        assert [*zip(sends["rank"], sends["peer"], sends["group"], strict=True)] == expected
        assert len(trace.to_pandas("messages")) == len(sends)
        assert len(trace.unmatched) == 0
        # spans, but no messages from creating the ring
        assert len(frame) == 3 * count + 2 * len(sends)
