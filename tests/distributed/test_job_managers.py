"""Tests of Slurm and MPI on two hosts without a common directory."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mpi_runs import require_mpi
from test_hosts import PROCESSES, PROGRAM, environment, on_hosts, tell_doctor
from test_other_network import HERE, THERE, command
from test_other_network import machines as machines

import ringsim

SLURM = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
AuthInfo=socket={private}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
SlurmctldPidFile={private}/slurmctld.pid
SlurmdPidFile={private}/slurmd.pid
StateSaveLocation={private}/state
SlurmdSpoolDir={private}/spool
NodeName=node0 NodeAddr={here} CPUs=3
NodeName=node1 NodeAddr={there} CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""
BATCH = """#!/bin/sh
#SBATCH --nodes=2 --ntasks=4 --output=job.log
srun {python} -m ringsim trace -o run.ringtrace {program} && srun {python} -m ringsim doctor --json > doctor.json
echo $? > ended
"""  # noqa: E501
# A node of the cluster; $1 has the configuration. The first node runs the batch file, and the other
# one remains until its input ends.
NODE = """
mkdir -m 700 state spool
munged --force --foreground --socket=$PWD/munge.socket --key-file=$1/munge.key --pid-file=munge.pid --log-file=munge.log \
    --seed-file=munge.seed &
until test -S munge.socket; do sleep 0.02; done
slurmd -D -N $(hostname) > node.log 2>&1 &
test $(hostname) = node0 || { read end; exit; }
slurmctld -D > control.log 2>&1 &
until sinfo --noheader --format=%T%D 2> sinfo.log | grep -q idle2; do sleep 0.05; done
mkfifo ended
sbatch $1/job.sh; read code < ended
cat job.log; exit $code
"""  # noqa: E501


def start(
    hosts: list[list[str]], script: str, *arguments: str, **variables: str
) -> list[subprocess.Popen[str]]:
    """Runs a shell script on both hosts; each reads its input."""
    words = ["sh", "-c", script, "sh", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    known = environment(**variables)
    return [subprocess.Popen([*host, *words], env=known, text=True, **pipes) for host in hosts]


def check_doctor(said: str) -> None:
    """Checks the doctor's output for three ranks on one host and one on the other."""
    told = tell_doctor(said)
    assert told["hosts"] == (True, "node0: ranks 0, 1 and 2; node1: rank 3")
    assert told["networks"] == (True, f"node0: cable, {HERE}; node1: cable, {THERE}")
    assert told["clocks"][1].startswith("1 clock; node0: ")
    assert told["listening"][0], "ringsim must not listen on every network"
    assert told["ring"] == (True, "crosses hosts 2 times")


def check(trace: ringsim.Trace) -> None:
    """Checks that a trace has three ranks on one host and one on the other, with their messages."""
    assert [one["host"] for one in trace.metadata["ranks"]] == ["node0", "node0", "node0", "node1"]
    ops = sorted(trace.to_pandas().query("kind != 'mark'")["op"])
    assert ops == ["barrier"] * 4 + ["isend"] * 4 + ["recv"] * 4
    assert trace.metadata["complete"], trace.metadata["notes"]


@pytest.mark.timeout(900)
def test_a_batch_file_of_slurm(machines: tuple[str, ...], tmp_path: Path) -> None:
    if None in map(shutil.which, ("slurmctld", "slurmd", "srun", "munged")):
        pytest.skip("Slurm must be installed, with munge")
    hosts = on_hosts(machines, tmp_path, PROCESSES, PROCESSES)
    slurm = SLURM.format(private=tmp_path / "private", here=HERE, there=THERE)
    (tmp_path / "slurm.conf").write_text(slurm)
    (tmp_path / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
    )
    (tmp_path / "munge.key").write_bytes(secrets.token_bytes(1024))
    (tmp_path / "munge.key").chmod(0o400)
    (tmp_path / "job.sh").write_text(BATCH.format(python=sys.executable, program=PROGRAM))
    variables = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "GLOO_SOCKET_IFNAME": "cable"}
    first, second = nodes = start(hosts, NODE, str(tmp_path), **variables)
    try:
        said = first.communicate()[0]
        second.communicate("end\n")
    finally:
        for node in nodes:
            node.kill()
    assert first.returncode == 0, said
    check(ringsim.load(tmp_path / "node0" / "run.ringtrace"))
    check_doctor((tmp_path / "node0" / "doctor.json").read_text())


@contextmanager
def remote_shell(machines: tuple[str, ...], tmp_path: Path) -> Iterator[tuple[list[str], str]]:
    """Yields the prefix that runs a command on the first host, and the path of a program."""
    nodes = start(on_hosts(machines, tmp_path, [], []), "echo $$; read end")
    try:
        enter = {
            f"node{number}": ["nsenter", "-t", node.stdout.readline().strip(), "-m", "-u", "-n"]
            for number, node in enumerate(nodes)
        }
        cases = "".join(
            f'{name}) exec {" ".join(words)} sh -c "$*";;\n' for name, words in enter.items()
        )
        remote = tmp_path / "remote"
        remote.write_text(f'#!/bin/sh\nname=$1; shift; case "$name" in\n{cases}esac\n')
        remote.chmod(0o700)
        yield enter["node0"], str(remote)
        for node in nodes:
            node.communicate("end\n")
    finally:
        for node in nodes:
            node.kill()


def run_words(words: list[str], *options: list[str]) -> list[subprocess.CompletedProcess[str]]:
    pipes = {"capture_output": True, "text": True, "check": False}
    return [subprocess.run([*words, *more], env=environment(), **pipes) for more in options]


TRACE = [sys.executable, "-m", "ringsim", "trace", "-o", "run.ringtrace", str(PROGRAM)]
DOCTOR = [sys.executable, "-m", "ringsim", "doctor", "--json"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examined", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_mpirun_with_a_remote_shell(
    examined: bool, machines: tuple[str, ...], tmp_path: Path
) -> None:
    mpirun = require_mpi()
    if "HYDRA" not in command(mpirun, "--version"):
        pytest.skip("this test needs the mpirun of MPICH, because it uses its options")
    head = ["-genv", "MASTER_ADDR", HERE]
    doctor = [[*head, "-genv", "GLOO_SOCKET_IFNAME", "cable", *DOCTOR]] if examined else []
    with remote_shell(machines, tmp_path) as (enter, remote):
        options = f"-launcher rsh -launcher-exec {remote} -iface cable -hosts node0:3,node1:1 -n 4"
        words = [*enter, mpirun, *options.split(), "-wdir", str(tmp_path / "private")]
        without, run, *asked = run_words(words, TRACE, [*head, *TRACE], *doctor)
    assert without.returncode, "each rank would start ranks of its own"
    assert "the launcher did not set head_ip" in without.stderr, without
    assert not run.returncode, run.stdout + run.stderr
    for one in asked:
        check_doctor(one.stdout)
    check(ringsim.load(tmp_path / "node0" / "run.ringtrace"))
