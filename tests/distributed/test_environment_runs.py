"""Tests of discovery in ranks that real launchers started.

The launchers are torchrun, ``mpirun`` if one is installed, and ringsim itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mpi_runs import ON_THIS_MACHINE, find_mpirun
from rank_server import free_port

import ringsim
from ringsim.errors import RingError

LIMIT_S = 90
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MPIRUN = find_mpirun()
HAS_MPI4PY = importlib.util.find_spec("mpi4py") is not None

# The script for each rank: it reports the ring found without arguments, a message passed around it,
# and a second discovery. If its launcher is hidden, it reports the ring found by MPI.
SAY = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    import ringsim
    from ringsim.environment import discover
    before = dict(os.environ)
    found = discover()
    ringsim.initialize_distributed()
    ring = ringsim.current_ring()
    came = torch.empty(1)
    sent = dist.isend(torch.tensor([float(ring.rank)]), ring.succ, group=ring.succ_group)
    dist.recv(came, ring.pred, group=ring.pred_group)
    sent.wait()
    ringsim.initialize_distributed()
    again = ringsim.current_ring() is ring
    ringsim.destroy_distributed()
    place = found.rank, found.world_size, found.local_rank
    kept = [again, (ring.rank, ring.world_size, ring.local_rank) == place, dict(os.environ) == before]
    report = [*place, found.rule, found.head_ip, int(came), kept]
    if sys.argv[2:] == ["mpi4py"]:
        hidden = {name: value for name, value in before.items() if "LOCAL" not in name and not name.startswith(("HYDI", "MASTER"))}
        by_mpi = discover(environ=hidden)
        report += [[by_mpi.rank, by_mpi.world_size, by_mpi.local_rank, by_mpi.rule, by_mpi.head_ip], by_mpi.port]
    open(f"{sys.argv[1]}/{found.rank}.json", "w").write(json.dumps(report))
"""  # noqa: E501


def run(directory: Path, command: Sequence[str], *words: str, **variables: str) -> list[Any]:
    """Runs the script under a launcher, and ends all its processes at the limit."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(SAY))
    root = str(Path(ringsim.__file__).parent.parent)
    environment = {**os.environ, **ON_THIS_MACHINE, "PYTHONPATH": root, **variables}
    whole = [*command, str(script), str(directory), *words]
    output = directory / "output.txt"
    with output.open("wb") as shown:
        pipes = {"stdout": shown, "stderr": shown, "start_new_session": True}
        with subprocess.Popen(whole, env=environment, **pipes) as process:
            try:
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, output.read_text()
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def test_torchrun(tmp_path: Path) -> None:
    assert run(tmp_path, TORCHRUN) == [
        [rank, 2, rank, "torchrun", "localhost", 1 - rank, [True, True, True]] for rank in range(2)
    ]


@pytest.mark.skipif(
    MPIRUN is None, reason="no mpirun next to this Python or on PATH: pip install 'ringsim[mpi]'"
)
def test_mpirun(tmp_path: Path) -> None:
    """MPI is the last resort, used if the launcher does not report the machine of a rank."""
    words = ["mpi4py"] if HAS_MPI4PY else []
    reports = run(
        tmp_path, [str(MPIRUN), "-n", "2", sys.executable], *words, MASTER_PORT=str(free_port())
    )
    assert {report[3] for report in reports} <= {"mpich", "openmpi"}
    said = [
        [rank, 2, rank, reports[0][3], "127.0.0.1", 1 - rank, [True, True, True]]
        for rank in range(2)
    ]
    if HAS_MPI4PY:
        said = [
            [*each, [rank, 2, rank, "mpi4py", "127.0.0.1"], reports[0][-1]]
            for rank, each in enumerate(said)
        ]
    assert reports == said


def join_without_arguments(directory: str) -> tuple[Any, ...]:
    """Joins a ring, using the variables of the launcher."""
    import torch.distributed as dist

    local_rank = None
    if directory:
        local_rank, world_size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
        store = dist.FileStore(f"{directory}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=local_rank, world_size=world_size)
    ringsim.initialize_distributed(local_rank=local_rank)
    ring = ringsim.current_ring()
    ringsim.initialize_distributed(world_size=ring.world_size)
    return ring.rank, ring.world_size, ring.succ, ringsim.current_ring() is ring


@pytest.mark.parametrize(("ring", "own_group"), [(True, False), (False, False), (False, True)])
def test_ranks_of_ringsim_need_no_arguments_either(
    ring: bool, own_group: bool, tmp_path: Path
) -> None:
    """Checks that ranks find their ring, or build one if there is none."""
    directory = str(tmp_path) if own_group else ""
    assert ringsim.trace(
        join_without_arguments, world_size=2, args=(directory,), ring=ring
    ).results == [(0, 2, 1, True), (1, 2, 0, True)]


def test_a_process_alone_is_told_what_to_do_and_makes_a_world_of_one_when_asked() -> None:
    with pytest.raises(RingError, match="no launcher started this process"):
        ringsim.initialize_distributed()
    ringsim.initialize_distributed(world_size=1)
    ring = ringsim.current_ring()
    ringsim.initialize_distributed()
    assert ringsim.current_ring() is ring
    place = ring.rank, ring.world_size, ring.head_ip, ring.comm_device
    assert place == (0, 1, "127.0.0.1", "cpu")
