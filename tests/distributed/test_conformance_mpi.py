"""The conformance suite on MPI: one job for each world size, started by a real mpirun."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from mpi_runs import require_mpi, run_mpi

SKIPS: dict[str, str] = {}
JOB = str(Path(__file__).with_name("conformance_mpi_job.py"))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, str], str]]:
    """What is wrong with each rule, and what the job printed, by world size."""
    require_mpi()
    found = {}
    for size in conformance.WORLD_SIZES:
        directory = tmp_path_factory.mktemp("mpi")
        run = run_mpi(size, JOB, str(directory), limit_s=100)
        found[size] = conformance.read_verdicts(directory, size), f"mpirun ended with {run.returncode}\n{run.stdout}{run.stderr}"
    return found


@pytest.mark.parametrize(("world_size", "name"), conformance.cases(SKIPS))
def test_mpi_keeps_the_rule(verdicts: dict[int, tuple[dict[str, str], str]], world_size: int, name: str) -> None:
    wrong, shown = verdicts[world_size]
    assert not wrong.get(name, f"{conformance.NOT_REACHED}: {shown[-3000:]}")


def test_every_skip_names_a_rule_and_a_reason() -> None:
    assert set(SKIPS) <= set(conformance.load_rules())
    assert all(SKIPS.values())
