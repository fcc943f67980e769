"""Unchanged programs for ``torch.distributed`` compute the same over MPI as on Gloo."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
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
OF_TWO = (  # programs for any number of ranks; a sum of two has one order
    *("ring_attention", "odd_even_sort", "top_k_by_gathered_pairs", "tokens_to_their_experts"),
    *("zero_redundancy", "ddp_without_sync", "ddp_with_unused_layers", "checkpoints_under_ddp"),
    *("fsdp_in_low_precision", "fsdp_and_the_whole_state", "a_transformer_layer_under_ddp"),
)
ONE_OF_EACH = ("data_parallel", "fully_sharded", "redistributed", "functional", "pipeline_of_1f1b")
FIRST = tuple(  # a program's own communication, and one of each of torch's modules that communicate
    name
    for name, program in PROGRAMS.items()
    if program.__module__ == "right_messages" or name in ONE_OF_EACH
)
MORE = tuple(name for name in PROGRAMS if name not in FIRST)
# the number of ranks, and the programs that they run one after the other
JOBS = {"first": (4, FIRST), "more": (4, MORE), "two": (2, OF_TWO)}


def run_all(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        dist.barrier()
        found[name] = PROGRAMS[name]()
    return found


@functools.cache
def on_gloo(job: str) -> list[dict[str, Any]]:
    size, names = JOBS[job]
    return ringsim.trace(run_all, world_size=size, args=(names,), limit_s=250).results


Ended = tuple["subprocess.CompletedProcess[str]", list[Path]]


@pytest.fixture(scope="module")
def on_mpi(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """Runs the programs of a job once; returns the completed process and the ranks' results."""
    require_mpi()

    @functools.cache
    def run(job: str) -> Ended:
        size, names = JOBS[job]
        directory = tmp_path_factory.mktemp("programs")
        (directory / "names.json").write_text(json.dumps(names))
        ended = run_mpi(size, SCRIPT, str(directory), "run_programs", limit_s=250)
        return ended, [directory / f"{rank}.pickle" for rank in range(size)]

    return run


def compare(job: str, name: str, on_mpi: Callable[[str], Ended]) -> None:
    exact = job == "two" or name not in two_clocks.CLOSE
    tolerance = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 1e-5, "rtol": 1e-4}
    ended, files = on_mpi(job)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for file, theirs in zip(files, on_gloo(job), strict=True):
        mine = pickle.loads(file.read_bytes())
        torch.testing.assert_close(mine[name], theirs[name], **tolerance)


@pytest.mark.parametrize("name", FIRST)
def test_results_over_mpi_are_those_of_gloo(name: str, on_mpi: Callable[[str], Ended]) -> None:
    compare("first", name, on_mpi)


@pytest.mark.parametrize(
    ("job", "name"), [(job, name) for job in ("more", "two") for name in JOBS[job][1]]
)
def test_more_results_over_mpi_are_those_of_gloo(
    job: str, name: str, on_mpi: Callable[[str], Ended]
) -> None:
    compare(job, name, on_mpi)


# MPI does not compare the sizes of a collective: this one ends, with wrong numbers
UNNOTICED = ("shapes_that_differ",)


@pytest.mark.parametrize("name", sorted({*two_clocks.WRONG}.difference(UNNOTICED)))
def test_a_wrong_program_ends_the_job_with_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps([name]))
    ended = run_mpi(two_clocks.SIZE, SCRIPT, str(tmp_path), "run_wrong", limit_s=240)
    assert ended.returncode not in (0, 124), ended.stdout + ended.stderr
    assert "timed out after 2 s" in ended.stderr or "MPI" in ended.stderr
