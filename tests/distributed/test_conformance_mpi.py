"""The conformance suite on MPI: one job for each world size, started by a real mpirun."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import conformance
import pytest
from mpi_runs import require_mpi, run_mpi

SKIPS: dict[str, str] = {}
JOB = str(Path(__file__).with_name("conformance_mpi_job.py"))


Verdict = Callable[[int, str], str]


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """Says what is wrong with a rule at a world size, "" if nothing; runs the job of that size when it is first asked."""
    require_mpi()

    @functools.cache
    def run(world_size: int) -> tuple[dict[str, str], str]:
        directory = tmp_path_factory.mktemp("mpi")
        ended = run_mpi(world_size, JOB, str(directory), limit_s=100)
        shown = f"mpirun ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return conformance.read_verdicts(directory, world_size), shown[-3000:]

    def ask(world_size: int, name: str) -> str:
        verdicts, shown = run(world_size)
        return verdicts.get(name, f"{conformance.NOT_REACHED}: {shown}")

    return ask


@pytest.mark.parametrize(("world_size", "name"), conformance.cases(SKIPS))
def test_mpi_keeps_the_rule(verdict: Verdict, world_size: int, name: str) -> None:
    assert verdict(world_size, name) == ""


def test_every_skip_names_a_rule_and_a_reason() -> None:
    assert set(SKIPS) <= set(conformance.load_rules())
    assert all(SKIPS.values())
