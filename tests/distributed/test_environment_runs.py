"""Discovery in ranks that real launchers started: torchrun, ``mpirun`` where one is installed, and ringsim itself."""

from __future__ import annotations

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
from mpi_runs import MPI_VARIABLES, find_mpirun
from rank_server import free_port

import ringsim
from ringsim.cli import main
from ringsim.errors import RingError

LIMIT_S = 90
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MPIRUN = find_mpirun()
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside this Python or on PATH: pip install 'ringsim[mpi]'")

# What a rank of a script says about itself: found without an argument, a message round the ring, and found again.
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
    open(f"{sys.argv[1]}/{found.rank}.json", "w").write(json.dumps(report))
"""


def run(directory: Path, command: Sequence[str], body: str, **variables: str) -> list[Any]:
    """Runs a script under a launcher, ends all of it at the limit, and returns what the ranks have said, by rank."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(body))
    environment = {**os.environ, **MPI_VARIABLES, "PYTHONPATH": str(Path(ringsim.__file__).parent.parent), **variables}
    words = [*command, str(script), str(directory)]
    output = directory / "output.txt"
    with (
        output.open("wb") as shown,
        subprocess.Popen(words, env=environment, stdout=shown, stderr=shown, start_new_session=True) as process,
    ):
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, output.read_text()
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def test_torchrun(tmp_path: Path) -> None:
    assert run(tmp_path, TORCHRUN, SAY) == [
        [0, 2, 0, "torchrun", "localhost", 1, [True, True, True]],
        [1, 2, 1, "torchrun", "localhost", 0, [True, True, True]],
    ]


@needs_mpirun
def test_mpirun(tmp_path: Path) -> None:
    reports = run(tmp_path, [str(MPIRUN), "-n", "3", sys.executable], SAY, MASTER_PORT=str(free_port()))
    assert [report[:2] for report in reports] == [[0, 3], [1, 3], [2, 3]]
    assert sorted(report[2] for report in reports) == [0, 1, 2]
    assert {report[3] for report in reports} <= {"mpich", "openmpi"}
    assert [report[4:] for report in reports] == [["127.0.0.1", came, [True, True, True]] for came in (2, 0, 1)]


@needs_mpirun
def test_mpi4py_is_the_last_resort(tmp_path: Path) -> None:
    """Each rank hides what its launcher says of its machine, and asks MPI."""
    python = python_with_mpi4py()
    hide = """
        import json, os, sys
        from ringsim.environment import discover
        hidden = {name: value for name, value in os.environ.items() if "LOCAL" not in name and not name.startswith("HYDI")}
        found = discover(environ=hidden)
        with open(f"{sys.argv[1]}/{found.rank}.json", "w") as file:
            json.dump([found.rank, found.world_size, found.local_rank, found.rule, found.head_ip, found.port], file)
    """
    first, second = run(tmp_path, [str(MPIRUN), "-n", "2", python], hide)
    assert first == [0, 2, 0, "mpi4py", "127.0.0.1", first[-1]]
    assert second == [1, 2, 1, "mpi4py", "127.0.0.1", first[-1]]


def python_with_mpi4py() -> str:
    """Returns an interpreter that has mpi4py: this one, or the one that stands beside mpirun."""
    for python in (sys.executable, str(Path(str(MPIRUN)).parent / "python3")):
        if Path(python).exists() and subprocess.run([python, "-c", "import mpi4py"], capture_output=True, timeout=60).returncode == 0:
            return python
    pytest.skip("mpi4py is not installed")


def join_without_arguments(directory: str) -> tuple[Any, ...]:
    """Joins a ring by what the launcher says; or, in a group that the script made, by what the group says."""
    import torch.distributed as dist

    local_rank = None
    if directory:
        local_rank, world_size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", world_size), rank=local_rank, world_size=world_size)
    ringsim.initialize_distributed(local_rank=local_rank)
    ring = ringsim.current_ring()
    ringsim.initialize_distributed(world_size=ring.world_size)
    return ring.rank, ring.world_size, ring.succ, ringsim.current_ring() is ring


@pytest.mark.parametrize(("ring", "own_group"), [(True, False), (False, False), (False, True)])
def test_ranks_of_ringsim_need_no_arguments_either(ring: bool, own_group: bool, tmp_path: Path) -> None:
    """With a ring, it is the one that exists; without, it is built over the store of the launcher, or over the group of the script."""
    directory = str(tmp_path) if own_group else ""
    assert ringsim.trace(join_without_arguments, world_size=2, args=(directory,), ring=ring).results == [(0, 2, 1, True), (1, 2, 0, True)]


def test_a_process_alone_is_told_what_to_do_and_makes_a_world_of_one_when_asked() -> None:
    with pytest.raises(RingError, match="must come from a launcher or from arguments, got nothing"):
        ringsim.initialize_distributed()
    ringsim.initialize_distributed(world_size=1)
    ring = ringsim.current_ring()
    ringsim.initialize_distributed()
    assert ringsim.current_ring() is ring
    assert (ring.rank, ring.world_size, ring.head_ip, ring.comm_device) == (0, 1, "127.0.0.1", "cpu")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {},
            "no  launcher         rank, world_size, local_rank, head_ip and port must come from a launcher or from arguments, got nothing",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            "ok  launcher         rank 1 of 2, local rank 0, head 10.0.0.1:29500: found by torchrun from RANK=1, WORLD_SIZE=2",
        ),
        ({"RANK": "1"}, "no  launcher         torchrun's variables must be set together, got RANK=1 and no WORLD_SIZE"),
    ],
)
def test_doctor_says_which_rule_would_fire(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert line in shown
    words = {line[4:20].strip(): line[:3].strip() for line in shown.splitlines()}
    assert words["Gloo"] == words["loopback"] == words["start method"] == "ok"
    assert {"NCCL", "processes"} <= words.keys()
