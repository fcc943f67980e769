"""The conformance suite on MPI: one job for each world size, started by a real mpirun."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
from mpi_runs import require_mpi, run_mpi

SKIPS: dict[str, str] = {}
JOB = str(Path(__file__).with_name("conformance_mpi_job.py"))


@pytest.mark.parametrize("world_size", conformance.WORLD_SIZES)
def test_mpi_keeps_the_rules(tmp_path: Path, world_size: int) -> None:
    require_mpi()

    def run() -> str:
        ended = run_mpi(world_size, JOB, str(tmp_path), limit_s=100)
        return f"mpirun ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"[-3000:]

    conformance.check_job(tmp_path, world_size, SKIPS, run)


def test_every_exception_names_a_rule_and_its_reason() -> None:
    conformance.check_skips(SKIPS)
