"""Unchanged programs for ``torch.distributed`` compute the same over MPI as on Gloo."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from mpi_runs import require_mpi, run_mpi

import ringsim

PLACE = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PLACE))
import right_messages  # noqa: E402
import right_modules  # noqa: E402
import two_clocks  # noqa: E402

for module in (right_messages, right_modules, two_clocks):
    cloudpickle.register_pickle_by_value(module)

SCRIPT = str(Path(__file__).with_name("mpi_jobs.py"))
PROGRAMS: dict[str, Callable[[], Any]] = {
    **{name: program for name, (program, _) in right_messages.PROGRAMS.items()},
    **two_clocks.EXACT,
    **two_clocks.CLOSE,
}
del PROGRAMS["barriers"]  # torch's monitored_barrier only supports Gloo
ONE_OF_EACH = ("data_parallel", "fully_sharded", "redistributed", "functional", "pipeline_of_1f1b")
CHOSEN = (
    tuple(  # a program's own communication, and one of each of torch's modules that communicate
        name
        for name, program in PROGRAMS.items()
        if program.__module__ == "right_messages" or name in ONE_OF_EACH
    )
)
SIZE = 4


def run_all(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        dist.barrier()
        found[name] = PROGRAMS[name]()
    return found


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Returns the results of the programs on each rank, over MPI and on Gloo."""
    require_mpi()
    directory = tmp_path_factory.mktemp("programs")
    (directory / "names.json").write_text(json.dumps(CHOSEN))
    ended = run_mpi(SIZE, SCRIPT, str(directory), "run_programs", limit_s=250)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    on_mpi = [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(SIZE)]
    return on_mpi, ringsim.trace(run_all, world_size=SIZE, args=(CHOSEN,), limit_s=250).results


@pytest.mark.parametrize("name", CHOSEN)
def test_results_over_mpi_are_those_of_gloo(name: str, both: tuple[Results, Results]) -> None:
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if name in two_clocks.CLOSE else {"atol": 0, "rtol": 0}
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine[name], theirs[name], **tolerance)


# MPI does not compare the sizes of a collective: this one ends, with wrong numbers
UNNOTICED = ("shapes_that_differ",)


@pytest.mark.parametrize("name", sorted({*two_clocks.WRONG}.difference(UNNOTICED)))
def test_a_wrong_program_ends_the_job_with_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps([name]))
    ended = run_mpi(two_clocks.SIZE, SCRIPT, str(tmp_path), "run_wrong", limit_s=240)
    assert ended.returncode not in (0, 124), ended.stdout + ended.stderr
    assert "timed out after 2 s" in ended.stderr or "MPI" in ended.stderr
